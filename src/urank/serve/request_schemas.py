"""Request bodies and refusals (RFC 9457 problem details).

Bodies are parsed with strict types, bounded lengths, and no unknown fields, NaN or infinity. Features are a map from
name to value, whose type follows the model: where a model has only numeric features, the parser itself refuses other
values. The names of features are validated by `urank.serve.request_arrays`. Answers are in
`urank.client.wire_schemas`, shared with the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, create_model
from pydantic_core import to_json
from starlette.responses import Response

from urank.ranking.matching import Method
from urank.serve.feedback_records import RANKING_ID

if TYPE_CHECKING:
    from urank.serve.server_settings import Limits

MAX_TEXT = 512
MAX_POSITIONS = 10_000
MAX_VALUE = 1e30  # far below the overflow of sums in 32-bit floats
MAX_ORDERS = 16
MAX_EVENTS = 10_000
MAX_FEATURES = 10_000

NumericFeatures = dict[str, float | None]
MixedFeatures = dict[str, Annotated[int | float | str | bool | None, Field(union_mode="left_to_right")]]
FeaturesT = TypeVar("FeaturesT")

Id = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
OrderName = Annotated[str, Field(min_length=1, max_length=64)]
Value = Annotated[float, Field(ge=0, le=MAX_VALUE)]
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Candidate(_RequestBody, Generic[FeaturesT]):
    """An item that could be shown."""

    item_id: Id
    features: FeaturesT = Field(description="every feature of the model by name; null if missing")
    value: Value | None = Field(None, description="value of a click; 1 by default")


class RankQuery(_RequestBody, Generic[FeaturesT]):
    """A list to rank."""

    query_id: Id
    user_id: Id | None = Field(None, description="decides the arm of an A/B test, and is logged")
    positions: Positions | None = Field(
        None, description="number of items shown; as many as the model knows by default"
    )
    method: Method | None = Field(None, description="how to rank; the server's method by default")
    candidates: list[Candidate[FeaturesT]] = Field(min_length=1)


class RankBatch(_RequestBody, Generic[FeaturesT]):
    """Several lists to rank."""

    queries: list[RankQuery[FeaturesT]] = Field(min_length=1)


class ExplainQuery(_RequestBody, Generic[FeaturesT]):
    """A list to explain, and orders of it to evaluate."""

    user_id: ClassVar[None] = None
    method: ClassVar[None] = None
    query_id: Id | None = None
    positions: Positions | None = Field(None, description="number of items shown; at most as many as the model knows")
    candidates: list[Candidate[FeaturesT]] = Field(min_length=1)
    orders: Annotated[dict[OrderName, Annotated[list[Id], Field(min_length=1), FailFast()]], FailFast()] = Field(
        default_factory=dict, max_length=MAX_ORDERS, description="orders to evaluate by name: item ids, best first"
    )


class Event(_RequestBody):
    """Feedback on an item of a ranking."""

    ranking_id: Annotated[str, Field(pattern=RANKING_ID)]
    item_id: Id
    click: bool = True
    conversion: bool = False
    value: Value | None = Field(None, description="actual value; replaces the value by which the item was ranked")


class FeedbackBody(_RequestBody):
    """Feedback on items of rankings; reporting it twice does no harm."""

    events: Annotated[list[Event], Field(min_length=1, max_length=MAX_EVENTS), FailFast()]


@cache
def request_models(mixed: bool, limits: Limits) -> dict[str, Any]:
    """Return the body types by name, for models with (`mixed`) or without categorical features.

    Parsing a list fails at its first invalid entry: a body of a few megabytes has room for a million of them.
    """
    features: Any = Annotated[MixedFeatures if mixed else NumericFeatures, Field(max_length=MAX_FEATURES), FailFast()]
    candidate = create_model("Candidate", __base__=Candidate[features])  # the name of its schema
    candidates = Annotated[list[candidate], Field(min_length=1, max_length=limits.candidates), FailFast()]
    query = create_model("RankQuery", __base__=RankQuery[features], candidates=(candidates, ...))
    queries = Annotated[list[query], Field(min_length=1, max_length=limits.queries), FailFast()]
    return {
        "RankQuery": query,
        "RankBatch": create_model("RankBatch", __base__=RankBatch[features], queries=(queries, ...)),
        "ExplainQuery": create_model("ExplainQuery", __base__=ExplainQuery[features], candidates=(candidates, ...)),
        "FeedbackBody": FeedbackBody,
    }


PROBLEM_JSON = "application/problem+json"
MAX_ERRORS = 10
_MAX_ERROR_TEXT = 200
_MAX_LOCATED = 1_000
_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # older Pythons have older names


class ProblemLocation(BaseModel):
    """A location in the body, and what is wrong there."""

    at: str
    problem: str


class ProblemBody(BaseModel):
    """A refusal."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[ProblemLocation] = []


class Problem(Exception):  # noqa: N818 - the term of RFC 9457
    """Refusal of a request: status, one sentence, pairs of a location and what is wrong there, response headers."""

    def __init__(
        self, status: int, detail: str, errors: Sequence[tuple[str, str]] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.errors, self.headers = list(errors), dict(headers or {})


def problem_response(problem: Problem) -> Response:
    """Return the response for a refusal."""
    title = _TITLES.get(problem.status) or HTTPStatus(problem.status).phrase
    body: dict[str, Any] = {"type": "about:blank", "title": title, "status": problem.status, "detail": problem.detail}
    if problem.errors:
        body["errors"] = [{"at": _short(at), "problem": _short(text)} for at, text in problem.errors[:MAX_ERRORS]]
    return Response(to_json(body), problem.status, headers=problem.headers, media_type=PROBLEM_JSON)


def invalid_body(error: ValidationError) -> Problem:
    """Convert a parser error to a refusal with the first locations, without the input itself.

    Very many errors are only counted, since locating them takes longer than finding them.
    """
    if error.error_count() > _MAX_LOCATED:
        return Problem(422, f"the body violates the schema in {error.error_count()} places; see openapi.json")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON: {_short(found[0]['msg'].removeprefix('Invalid JSON: '))}")
    places = list(dict.fromkeys(_location(each["loc"], each["msg"]) for each in found))
    count = f"{len(places)} places" if len(places) > 1 else "one place"
    return Problem(422, f"the body violates the schema in {count}; see openapi.json", places)


def _location(location: Sequence[int | str], message: str) -> tuple[str, str]:
    """Return a dotted location and its message; the alternatives of a feature's type are one.

    >>> _location(("candidates", 3, "features", "price", "float"), "Input should be a valid number")
    ('candidates.3.features.price', 'Input should be a number, text, a boolean or null')
    """
    end = location.index("features") + 2 if "features" in location else len(location)
    if end < len(location):
        location, message = location[:end], "Input should be a number, text, a boolean or null"
    return ".".join(map(str, location)), message


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_TEXT else f"{text[:_MAX_ERROR_TEXT]}…"
