"""The OpenAPI document of the models in use, and the page that shows it.

Schemas are those of the body and answer types, which depend on the features of the models. That every feature must be
present, in a candidate, in the context or among the items of the server, is not part of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader
from msgspec import Struct
from msgspec.json import schema_components
from starlette.responses import Response

from urank import __version__
from urank.client.wire_schemas import (
    Accepted,
    Explanation,
    ItemsStored,
    ModelFacts,
    ModelNames,
    Ranking,
    RankingBatch,
    Reloaded,
)
from urank.ranking.matching import METHODS
from urank.report.style import theme_css
from urank.serve.playground import html_page
from urank.serve.request_arrays import ARROW_TYPE, FLOAT32_BOUND
from urank.serve.request_schemas import PROBLEM_JSON, ProblemBody
from urank.serve.security import OPEN_PATHS
from urank.serve.service import METRICS_TYPE, Service

JSON = "application/json"
_RANK = (("RankQuery", "RankColumns", "RankBatch"), (Ranking, RankingBatch))
_EXPLAIN = (("ExplainQuery", "ExplainColumns"), (Explanation,))
OPERATIONS: Mapping[str, tuple[tuple[str, ...], tuple[type[Struct], ...]]] = {
    "/v1/rank": _RANK,
    "/v1/explain": _EXPLAIN,
    "/v1/models/{name}/rank": _RANK,
    "/v1/models/{name}/explain": _EXPLAIN,
    "/v1/feedback": (("FeedbackBody",), (Accepted,)),
    "/v1/items": (("ItemsBody",), (ItemsStored,)),
    "/v1/reload": ((), (Reloaded,)),
    "/v1/model": ((), (ModelFacts,)),
    "/v1/models": ((), (ModelNames,)),
    "/v1/models/{name}": ((), (ModelFacts,)),
}
"""Alternatives of the body and of the answer of each path."""

_ARROW_PATHS = ("/v1/rank", "/v1/models/{name}/rank", "/v1/items")
_PARAMETERS = {"number": {"type": "string", "pattern": "^[0-9]{1,9}$"}, "name": {"type": "string", "minLength": 1}}
_REFUSALS = {
    "400": "The body does not match its type.",
    "401": "A key is required, or it is wrong.",
    "403": "This server has no key, so it does not support this.",
    "404": "Not found.",
    "408": "The body did not arrive in time.",
    "409": "The server is not configured for this, or the model is broken and the old one stays.",
    "413": "The body is too large.",
    "415": "The body has an unsupported type.",
    "421": "The host name is not allowed.",
    "422": "The body violates a rule; the answer's errors have the locations.",
    "503": "The log cannot be written, or the answer took too long.",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_REFERENCE = "#/components/schemas/"
_LIST_FORMS = {"Query": ("candidates", ("item_id", "features", "value")), "Columns": ("item_id", ("candidates",))}
"""The field that each form of a list needs, and those that it has not."""
_MAX_SCHEMA_LINES = 80
_TEMPLATES = Environment(loader=PackageLoader("urank.serve", "templates"), autoescape=True)


def describe(paths: Mapping[str, tuple[str, str]], service: Service) -> dict[str, Any]:
    """Return the OpenAPI document for the models in use.

    Args:
        paths: Method and summary of each path.
    """
    components: dict[str, Any] = {"schemas": _schemas(service)}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "urank",
            "version": __version__,
            "summary": "Ranks lists by expected utility, and logs rankings and feedback.",
            "description": "Refusals are `application/problem+json`.",
        },
        "paths": {path: {method: _operation(path, summary, service)} for path, (method, summary) in paths.items()},
        "components": components,
    }
    if service.config.key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(path: str, summary: str, service: Service) -> dict[str, Any]:
    bodies, answers = OPERATIONS.get(path, ((), ()))
    names = re.findall(r"{(\w+)}", path)
    operation: dict[str, Any] = {"summary": summary}
    if names:
        parameters = [{"name": each, "in": "path", "required": True, "schema": _PARAMETERS[each]} for each in names]
        operation["parameters"] = parameters
    if bodies:
        other_features = "name" in names and service.config.others  # those of each model are at /v1/models/{name}
        body = {"type": "object"} if other_features else _any_of(bodies)
        arrow = {ARROW_TYPE: _BINARY} if path in _ARROW_PATHS else {}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}, **arrow}}
    if path == "/metrics":
        content: dict[str, Any] = {METRICS_TYPE: {"schema": {"type": "string"}}}
    else:
        schema = _any_of(each.__name__ for each in answers) if answers else {"type": "object"}
        arrow = {ARROW_TYPE: _BINARY} if bodies == _RANK[0] else {}
        content = {JSON: {"schema": schema}, **arrow}
    problem = {PROBLEM_JSON: {"schema": {"$ref": f"{_REFERENCE}ProblemBody"}}}
    status = "202" if path == "/v1/feedback" else "200"
    refusals = {status: {"description": text, "content": problem} for status, text in _REFUSALS.items()}
    operation["responses"] = {status: {"description": "Success.", "content": content}, **refusals}
    if path in OPEN_PATHS:
        operation["security"] = []
    return operation


def _schemas(service: Service) -> dict[str, Any]:
    types = service.context.types
    answers = {each for _, kinds in OPERATIONS.values() for each in kinds}
    described = [*types.bodies.values(), ProblemBody, *sorted(answers, key=lambda each: each.__name__)]
    _, schemas = schema_components(described, ref_template=f"{_REFERENCE}{{name}}")
    active, limits = service.context.active, service.config.limits
    number = {"type": "number", "exclusiveMinimum": -FLOAT32_BOUND, "exclusiveMaximum": FLOAT32_BOUND}
    for name in active.numeric:
        schemas["Features"]["properties"][name]["anyOf"][0] = number
        schemas["Columns"]["properties"][name]["items"]["anyOf"][0] = number
    for column in schemas["Columns"]["properties"].values():
        column["maxItems"] = limits.candidates
    for name, schema in schemas.items():  # clients ignore unknown fields of answers, but the server sends none
        if name not in ("Features", "Columns"):
            schema["additionalProperties"] = False
    schemas["Ranking"]["properties"]["method"]["enum"] = list(METHODS)
    for name in ("Rank", "Explain"):
        query = schemas.pop(f"{name}Query")
        for form, (needed, omitted) in _LIST_FORMS.items():
            properties = {key: each for key, each in query["properties"].items() if key not in omitted}
            changed = {"title": f"{name}{form}", "properties": properties, "required": [*query["required"], needed]}
            schemas[f"{name}{form}"] = query | changed
    schemas["RankBatch"]["properties"]["queries"]["items"] = _any_of(("RankQuery", "RankColumns"))
    return schemas


def _any_of(names: Iterable[str]) -> dict[str, Any]:
    references = [{"$ref": f"{_REFERENCE}{name}"} for name in names]
    return references[0] if len(references) == 1 else {"anyOf": references}


def docs_page(document: dict[str, Any]) -> Response:
    """Return the page of an OpenAPI document."""
    schemas = {name: _schema_text(schema) for name, schema in sorted(document["components"]["schemas"].items())}
    content = {"document": document, "schemas": schemas, "refusals": _REFUSALS, "theme": theme_css()}
    return html_page(_TEMPLATES.get_template("docs.html").render(**content))


def _schema_text(schema: dict[str, Any]) -> str:
    lines = json.dumps(schema, indent=2, ensure_ascii=False).splitlines()
    more = len(lines) - _MAX_SCHEMA_LINES
    return "\n".join([*lines[:_MAX_SCHEMA_LINES], *([f"… {more} more lines in /openapi.json"] if more > 0 else [])])
