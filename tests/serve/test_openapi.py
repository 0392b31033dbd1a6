"""The description of the API is true: of the bodies, of the answers, and of what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from serve.cases import client, example, loaded, saved
from serve.server import running
from urank.serve.request_arrays import ARROW_TYPE
from urank.serve.request_schemas import PROBLEM_JSON

POSTED = ("/v1/rank", "/v1/explain", "/v1/feedback")
KEY = "a-key-of-the-tests-0123"
FEW = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
load_all_checks()
TRUE = [
    CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "response_headers_conformance",
    )
]


def description(kind: str = "trees", **settings_: Any) -> dict[str, Any]:
    with client(kind, **settings_) as http:
        headers = {"x-api-key": KEY} if "key" in settings_ else {}
        found: dict[str, Any] = http.get("/openapi.json", headers=headers).json()
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


@pytest.mark.parametrize("kind", ["trees", "numbers"])
def test_every_path_and_every_reference_is_there(kind: str) -> None:
    found = description(kind)
    assert set(found["paths"]) == {
        *POSTED,
        *("/v1/items", "/v1/reload", "/v1/model", "/v1/models", "/v1/models/{name}", "/v1/models/{name}/rank"),
        *("/v1/models/{name}/explain", "/v1/samples", "/v1/samples/{number}", "/healthz", "/readyz", "/metrics"),
    }
    schemas = found["components"]["schemas"]
    for reference in references(found):
        assert reference.removeprefix("#/components/schemas/") in schemas
    assert all(re.fullmatch("[A-Za-z]+", name) for name in schemas)
    for path, operations in found["paths"].items():
        for operation in operations.values():
            declared = [each["name"] for each in operation.get("parameters", []) if each["in"] == "path"]
            assert declared == re.findall(r"{(\w+)}", path)
            assert operation["summary"]
            for status, response in operation["responses"].items():
                assert response["content"], (path, status)
                assert int(status) < 400 or list(response["content"]) == [PROBLEM_JSON]
    assert list(found["paths"]["/v1/rank"]["post"]["requestBody"]["content"]) == ["application/json", ARROW_TYPE]
    assert list(found["paths"]["/v1/rank"]["post"]["responses"]["200"]["content"]) == ["application/json", ARROW_TYPE]


def test_features_are_described_by_name() -> None:
    schemas = description("trees", limits=limits(candidates=7, queries=3))["components"]["schemas"]
    features = schemas["Features"]
    model = loaded("trees")
    numbers = [feature.name for feature in model.featurizer.numeric]
    texts = [feature.name for feature in model.featurizer.categorical]
    assert list(features["properties"]) == list(schemas["Columns"]["properties"]) == [*numbers, *texts]
    assert features["additionalProperties"] is schemas["Columns"]["additionalProperties"] is False
    for name, schema in features["properties"].items():
        kinds = {each["type"] for each in schema["anyOf"]}
        assert kinds == ({"number", "null"} if name in numbers else {"string", "integer", "number", "boolean", "null"})
    assert schemas["RankQuery"]["required"] == ["query_id", "candidates"]
    assert schemas["RankColumns"]["required"] == ["query_id", "item_id"]
    assert not {"item_id", "features", "value"} & set(schemas["RankQuery"]["properties"])
    assert "candidates" not in schemas["ExplainColumns"]["properties"]
    assert schemas["RankQuery"]["properties"]["candidates"]["maxItems"] == 7
    assert schemas["RankBatch"]["properties"]["queries"]["maxItems"] == 3
    lenient = description("trees", ignore_unknown=True)["components"]["schemas"]
    assert lenient["Features"].get("additionalProperties", True) is True


def limits(**given_: int) -> Any:
    from urank.serve.server_settings import Limits

    return Limits(**given_)


def test_a_key_is_described_where_there_is_one() -> None:
    found = description(key=KEY)
    assert found["security"] == [{"key": []}]
    assert found["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert found["paths"]["/healthz"]["get"]["security"] == found["paths"]["/readyz"]["get"]["security"] == []
    assert "security" not in found["paths"]["/v1/rank"]["post"]
    assert "security" not in description()
    assert KEY not in json.dumps(found)


def test_without_a_playground_there_are_no_samples() -> None:
    assert not [path for path in description(playground=False)["paths"] if "samples" in path]


def test_the_page_shows_what_is_described() -> None:
    with client("trees") as http:
        page = http.get("/docs").text
        for path, operations in http.get("/openapi.json").json()["paths"].items():
            assert path in page
            for operation in operations.values():
                assert operation["summary"] in page


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, requests.Session]]:
    """The description of a real server that keeps a log, read by schemathesis, and a session that asks no proxy."""
    folder = tmp_path_factory.mktemp("described")
    with running(saved("trees"), "--log", folder / "log") as (url, _), requests.Session() as session:
        session.trust_env = False
        found = session.get(f"{url}/openapi.json").json()
        schema = schemathesis.openapi.from_dict(found)
        schema.config.update(base_url=url)
        yield schema, session


def operations() -> list[tuple[str, str]]:
    return [
        *((path, "POST") for path in POSTED),
        ("/v1/models/{name}/rank", "POST"),
        ("/v1/reload", "POST"),
        ("/v1/items", "PUT"),
        *((path, "GET") for path in ("/v1/model", "/v1/models", "/v1/models/{name}")),
        *((path, "GET") for path in ("/v1/samples", "/v1/samples/{number}")),
        *((path, "GET") for path in ("/healthz", "/readyz", "/metrics")),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), operations())
def test_answers_are_as_described(api: tuple[Any, requests.Session], path: str, method: str) -> None:
    schema, session = api
    seen: list[int] = []

    @FEW
    @given(schema[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def ask(case: Any) -> None:
        response = case.call(session=session)
        seen.append(response.status_code)
        case.validate_response(response, checks=TRUE)

    ask()
    if path in ("/v1/rank", "/v1/explain"):  # a list is only ranked if it has all features
        good = {key: each for key, each in example("trees").items() if path == "/v1/rank" or key != "query_id"}
        case = schema[path][method].Case(body=good, media_type="application/json")
        response = case.call(session=session)
        seen.append(response.status_code)
        case.validate_response(response, checks=TRUE)
    others = {"/v1/reload": 403, "/v1/items": 403, "/v1/feedback": 202}
    assert others.get(path, 404 if "{" in path else 200) in seen


@pytest.mark.slow
@pytest.mark.parametrize("path", [*POSTED, "/v1/samples/{number}"])
def test_so_are_refusals_of_what_is_not_described(api: tuple[Any, requests.Session], path: str) -> None:
    schema, session = api
    seen: set[int] = set()

    @FEW
    @given(schema[path]["POST" if path in POSTED else "GET"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def ask(case: Any) -> None:
        response = case.call(session=session)
        seen.add(response.status_code)
        case.validate_response(response, checks=TRUE)

    ask()
    assert seen <= {400, 404, 415, 422}
    assert seen
