"""Refusals as `application/problem+json` (RFC 9457): one sentence, and where in the body; nothing of the inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

__all__ = ["MOST_ERRORS", "PROBLEM_JSON", "Problem", "ProblemBody", "invalid_body", "problem_response"]

PROBLEM_JSON = "application/problem+json"
MOST_ERRORS = 10
_MOST_TEXT = 200
_MOST_TOLD = 1_000
_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # older Pythons know older names


class Place(BaseModel):
    """What is wrong where."""

    at: str
    problem: str


class ProblemBody(BaseModel):
    """A refusal."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[Place] = []


class Problem(Exception):  # noqa: N818 - the word of RFC 9457
    """A request that is refused.

    Args:
        status: of HTTP.
        detail: one sentence.
        errors: where in the body, and what is wrong there.
        headers: to send along.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})


def problem_response(problem: Problem) -> Response:
    """A refusal as it is sent."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": _TITLES.get(problem.status) or HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
    }
    if problem.errors:
        body["errors"] = [{"at": _short(at), "problem": _short(text)} for at, text in problem.errors[:MOST_ERRORS]]
    return Response(to_json(body), problem.status, headers=problem.headers, media_type=PROBLEM_JSON)


def invalid_body(error: ValidationError) -> Problem:
    """What a parser found, without the input itself: the first places, and how many more there are.

    Where there are very many, naming them would take longer than finding them, so none is named.
    """
    if error.error_count() > _MOST_TOLD:
        return Problem(422, f"the body breaks the schema in {error.error_count()} places; see openapi.json")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON: {_short(found[0]['msg'].removeprefix('Invalid JSON: '))}")
    places = list(dict.fromkeys(_place(each["loc"], each["msg"]) for each in found))
    count = f"{len(places)} places" if len(places) > 1 else "one place"
    return Problem(422, f"the body breaks the schema in {count}; see openapi.json", places)


def _place(location: Sequence[int | str], message: str) -> tuple[str, str]:
    """Where something is wrong, and what; of a feature that may be of several kinds, all of them in one.

    >>> _place(("candidates", 3, "features", "price", "float"), "Input should be a valid number")
    ('candidates.3.features.price', 'Input should be a number, text, a boolean or null')
    """
    end = location.index("features") + 2 if "features" in location else len(location)
    if end < len(location):
        location, message = location[:end], "Input should be a number, text, a boolean or null"
    return ".".join(map(str, location)), message


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
