"""Refusals: one sentence, the right place, and nothing of the inside or of what was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from urank.serve.request_schemas import (
    MAX_ERRORS,
    PROBLEM_JSON,
    Problem,
    ProblemBody,
    invalid_body,
    problem_response,
    request_models,
)
from urank.serve.server_settings import Limits

SENT = "what was sent"


def refused(body: str, name: str = "RankQuery", *, mixed: bool = True) -> Problem:
    with pytest.raises(ValidationError) as error:
        request_models(mixed, Limits(candidates=10**6, queries=10**6))[name].model_validate_json(body)
    return invalid_body(error.value)


def sent(problem: Problem) -> dict[str, Any]:
    response = problem_response(problem)
    assert response.status_code == problem.status
    assert response.headers["content-type"] == PROBLEM_JSON
    found: dict[str, Any] = json.loads(bytes(response.body))
    ProblemBody.model_validate(found)
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
    "body", ["", "{", '{"query_id": "q"', "[1, 2", "nul", "{'a': 1}", '{"a": 1,}', "\ud7ff", '"\\ud800"']
)
def test_what_is_no_json(body: str) -> None:
    problem = refused(body)
    assert problem.status == 400
    assert problem.detail.startswith("the body is not JSON: ")


def test_places_of_what_breaks_the_schema() -> None:
    good = {"item_id": "a", "features": {"f": 1}}
    assert places(refused(query([good, {**good, "item_id": 3}]))) == ["candidates.1.item_id"]
    assert places(refused(query([{**good, "value": -1}]))) == ["candidates.0.value"]
    assert places(refused(query([good], colour="red"))) == ["colour"]
    assert places(refused(query([]))) == ["candidates"]
    assert places(refused("[]")) == [""]
    batch = json.dumps({"queries": [json.loads(query([good])), json.loads(query([{**good, "item_id": ""}]))]})
    assert places(refused(batch, "RankBatch")) == ["queries.1.candidates.0.item_id"]
    feedback = json.dumps({"events": [{"ranking_id": "0" * 12, "item_id": "a"}]})
    assert places(refused(feedback, "FeedbackBody")) == ["events.0.ranking_id"]


@pytest.mark.parametrize("mixed", [True, False])
def test_a_feature_is_one_place(mixed: bool) -> None:
    """However many kinds it may have."""
    for name, value in (("f", []), ("features", 1e999), ("x.y", {})):
        body = query([{"item_id": "a", "features": {"fine": 1, name: value}}])
        assert places(refused(body, mixed=mixed)) == [f"candidates.0.features.{name}"]


def test_nothing_of_what_was_sent_is_sent_back() -> None:
    for body in (
        query([{"item_id": [SENT], "features": {"f": [SENT]}, "value": SENT}], user_id=[SENT], method=SENT),
        f'{{"query_id": "{SENT}',
        json.dumps(SENT),
    ):
        for mixed in (True, False):
            assert SENT not in json.dumps(sent(refused(body, mixed=mixed)))


def test_very_many_places_are_counted_only() -> None:
    good = [{"item_id": "a", "features": {"f": 1}}]
    problem = refused(query(good, **{str(number): 1 for number in range(5_000)}))
    assert problem.detail == "the body violates the schema in 5000 places; see openapi.json"
    assert problem.errors == []
    few = refused(query(good, **{str(number): 1 for number in range(500)}))
    assert few.detail == "the body violates the schema in 500 places; see openapi.json"
    assert len(sent(few)["errors"]) == MAX_ERRORS


def test_lists_are_given_up_at_the_first_entry_that_is_wrong() -> None:
    """A body has room for a million of them."""
    problem = refused(query([1] * 5_000))
    assert problem.detail == "the body violates the schema in one place; see openapi.json"
    assert places(problem) == ["candidates.0"]
    assert places(refused(json.dumps({"queries": [1] * 5_000}), "RankBatch")) == ["queries.0"]
    assert places(refused(json.dumps({"events": [1] * 5_000}), "FeedbackBody")) == ["events.0"]
    good = {"item_id": "a", "features": {"f": 1}}
    for mixed in (True, False):
        wrong = {**good, "features": {f"f{number}": [] for number in range(5_000)}}
        assert places(refused(query([good, wrong]), mixed=mixed)) == ["candidates.1.features.f0"]
    long = json.dumps({"candidates": [good], "orders": {"fine": ["a"], "mine": [1] * 5_000}})
    assert places(refused(long, "ExplainQuery")) == ["orders.mine.0"]
    many = json.dumps({"candidates": [good], "orders": {str(number): 1 for number in range(5_000)}})
    assert places(refused(many, "ExplainQuery")) == ["orders.0"]
