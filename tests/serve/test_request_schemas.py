"""Refusals: one sentence, the right place, and nothing of the inside or of what was sent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from urank.serve.request_schemas import (
    FEEDBACK,
    PROBLEM_JSON,
    Problem,
    ProblemBody,
    parse,
    problem_response,
    request_types,
)
from urank.serve.server_settings import Limits

SENT = "what was sent"
TYPES = request_types(("f", "x.y", "emb[0]"), ("c",), Limits(candidates=10**6, queries=10**6))


def refused(body: str, name: str = "rank") -> Problem:
    decoder = FEEDBACK if name == "feedback" else getattr(TYPES, name)
    with pytest.raises(Problem) as error:
        parse(decoder, body.encode("utf-8", "surrogatepass"))
    return error.value


def sent(problem: Problem) -> dict[str, Any]:
    response = problem_response(problem)
    assert response.status_code == problem.status
    assert response.headers["content-type"] == PROBLEM_JSON
    found: dict[str, Any] = json.loads(bytes(response.body))
    msgspec.convert(found, ProblemBody)
    return found


def query(candidates: Any, **more: Any) -> str:
    return json.dumps({"query_id": "q", "candidates": candidates, **more})


def places(problem: Problem) -> list[str]:
    return [place for place, _ in problem.errors]


def test_as_it_is_sent() -> None:
    found = sent(Problem(422, "a sentence", [("here", "is wrong")], headers={"Retry-After": "1"}))
    assert found == {
        "type": "about:blank",
        "title": "Unprocessable Content",
        "status": 422,
        "detail": "a sentence",
        "errors": [{"at": "here", "problem": "is wrong"}],
    }
    assert "errors" not in sent(Problem(404, "a sentence"))
    assert problem_response(Problem(503, "x", headers={"Retry-After": "1"})).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "body", ["", "{", '{"query_id": "q"', "nul", "{'a': 1}", '{"query_id": "q",}', "\ud7ff", '"\\ud800"', "\ud800"]
)
def test_what_is_no_json(body: str) -> None:
    problem = refused(body)
    assert problem.status == 400
    assert problem.detail.startswith("the body is not JSON: ")


def test_what_is_nested_too_deeply() -> None:
    lenient = request_types(("f",), (), Limits(), ignore_unknown=True)
    body = b'{"query_id": "q", "candidates": [{"item_id": "a", "features": {"g": ' + b"[" * 100_000
    with pytest.raises(Problem) as error:
        parse(lenient.rank, body)
    assert (error.value.status, error.value.detail) == (400, "the body is nested too deeply")


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"candidates": [{"item_id": 3}]}, "candidates.0.item_id"),
        ({"candidates": [{"item_id": "a"}, {"item_id": ""}]}, "candidates.1.item_id"),
        ({"candidates": [{"item_id": "x" * 513}]}, "candidates.0.item_id"),
        ({"candidates": [{"item_id": "a", "value": -1}]}, "candidates.0.value"),
        ({"candidates": [{"item_id": "a", "value": 1e31}]}, "candidates.0.value"),
        ({"candidates": [{}]}, "candidates.0.item_id"),
        ({"candidates": [{"item_id": "a", "colour": 1}]}, "candidates.0.colour"),
        ({"candidates": []}, "candidates"),
        ({"candidates": [{"item_id": "a", "features": {"f": "1"}}]}, "candidates.0.features.f"),
        ({"candidates": [{"item_id": "a", "features": {"f": True}}]}, "candidates.0.features.f"),
        ({"candidates": [{"item_id": "a", "features": {"emb[0]": []}}]}, "candidates.0.features.emb[0]"),
        ({"candidates": [{"item_id": "a", "features": {"x.y": {}}}]}, "candidates.0.features.x.y"),
        ({"candidates": [{"item_id": "a", "features": {"c": []}}]}, "candidates.0.features.c"),
        ({"candidates": [{"item_id": "a", "features": {"c": "x" * 4_097}}]}, "candidates.0.features.c"),
        ({"candidates": [{"item_id": "a", "features": {"g": 1}}]}, "candidates.0.features.g"),
        ({"item_id": ["a", 1]}, "item_id.1"),
        ({"item_id": []}, "item_id"),
        ({"features": {"f": [1, "x"]}}, "features.f.1"),
        ({"features": {"f": 1}}, "features.f"),
        ({"features": {"g": [1]}}, "features.g"),
        ({"value": [1, -1]}, "value.1"),
        ({"context": {"f": [1]}}, "context.f"),
        ({"context": {"g": 1}}, "context.g"),
        ({"positions": 0}, "positions"),
        ({"positions": 1.5}, "positions"),
        ({"method": "best"}, "method"),
        ({"user_id": ""}, "user_id"),
        ({"colour": "red"}, "colour"),
        ({"queries": []}, "queries"),
    ],
)
def test_places_of_what_breaks_the_schema(changed: dict[str, Any], place: str) -> None:
    body = {"query_id": "q", **changed}
    problem = refused(json.dumps(body))
    assert (problem.status, places(problem)) == (422, [place])
    if "queries" not in changed:
        batch = refused(json.dumps({"queries": [{"query_id": "p"}, body]}), "batch")
        assert places(batch) == [f"queries.1.{place}"]


@pytest.mark.parametrize("number", ["1e999", "-1e400", "9" * 400])
def test_numbers_beyond_64_bits_are_refused(number: str) -> None:
    body = query([{"item_id": "a", "features": {"f": 1.5}}]).replace("1.5", number)
    assert places(refused(body)) == ["candidates.0.features.f"]


def test_other_places() -> None:
    assert places(refused("{}")) == ["query_id"]
    assert places(refused("[]")) == [""]
    feedback = json.dumps({"events": [{"ranking_id": "0" * 12, "item_id": "a"}]})
    assert places(refused(feedback, "feedback")) == ["events.0.ranking_id"]
    for orders in ({"mine": [1]}, {"mine": []}, {"": ["a"]}, {str(number): ["a"] for number in range(17)}):
        assert places(refused(json.dumps({"item_id": ["a"], "orders": orders}), "explain"))[0].startswith("orders")


def test_features_that_are_unknown_may_be_ignored() -> None:
    lenient = request_types(("f",), (), Limits(), ignore_unknown=True)
    assert parse(lenient.rank, b'{"query_id": "q", "context": {"f": 1, "g": [{}]}}').context.x0 == 1.0


def test_nothing_of_what_was_sent_is_sent_back() -> None:
    for body in (
        query([{"item_id": [SENT]}]),
        query([{"item_id": "a", "features": {"f": SENT}}]),
        query([{"item_id": "a", "features": {"c": [SENT]}}]),
        query([{"item_id": "a", "value": SENT}]),
        query([], user_id=[SENT]),
        query([{"item_id": "a"}], method=SENT),
        f'{{"query_id": "{SENT}',
        json.dumps(SENT),
    ):
        assert SENT not in json.dumps(sent(refused(body)))


def test_lists_are_given_up_at_the_first_entry_that_is_wrong() -> None:
    """A body has room for a million of them."""
    assert places(refused(query([1] * 5_000))) == ["candidates.0"]
    assert places(refused(json.dumps({"queries": [1] * 5_000}), "batch")) == ["queries.0"]
    assert places(refused(json.dumps({"events": [1] * 5_000}), "feedback")) == ["events.0"]
    unknown = {"item_id": "a", "features": {f"g{number}": [] for number in range(5_000)}}
    assert places(refused(query([{"item_id": "a"}, unknown]))) == ["candidates.1.features.g0"]
