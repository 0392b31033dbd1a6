"""What comes in and goes out as JSON: strict types, no unknown fields, no NaN or infinity, bounded lengths.

Features are a map from name to value. Where a model has numbers only, that is also what the type says, so that the
parser itself checks it; the names are checked by `urank.serve.request_arrays`, which knows the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from urank.ranking.positions import Method
from urank.serve.feedback_store import RANKING_ID

__all__ = [
    "MOST_ERRORS",
    "PROBLEM_JSON",
    "Accepted",
    "Candidate",
    "Event",
    "ExplainAnswer",
    "ExplainQuery",
    "ExplainedItem",
    "FeedbackBody",
    "Limits",
    "MixedFeatures",
    "NumericFeatures",
    "OrderAnswer",
    "Problem",
    "ProblemBody",
    "RankAnswer",
    "RankBatch",
    "RankQuery",
    "RankedItem",
    "RankingsAnswer",
    "Reloaded",
    "invalid_body",
    "problem_response",
]

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


MAX_TEXT = 512
MAX_POSITIONS = 10_000
MAX_VALUE = 1e30  # far from where sums of 32-bit numbers overflow
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


class Limits(BaseModel):
    """How much a request may ask for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(16 * 2**20, ge=1_024, description="bytes of a body")
    candidates: int = Field(2_000, ge=1, description="candidates of a query")
    queries: int = Field(100, ge=1, description="queries of a batch")
    rows: int = Field(20_000, ge=1, description="candidates of a batch in all")
    json_bytes: int = Field(4 * 2**20, ge=1_024, description="bytes of a JSON body, which takes longer to parse")
    requests: int = Field(1_000, ge=1, description="requests at one time")
    seconds: float = Field(10.0, gt=0, description="seconds for a body to arrive, and for an answer")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Candidate(_Body, Generic[FeaturesT]):
    """An item that could be shown."""

    item_id: Id
    features: FeaturesT = Field(description="every feature of the model, by its name; null where it is missing")
    value: Value | None = Field(None, description="what a click on it is worth; 1 when left out")


class RankQuery(_Body, Generic[FeaturesT]):
    """A list to rank."""

    query_id: Id
    user_id: Id | None = Field(None, description="who will see it; decides the arm of a test, and is logged")
    positions: Positions | None = Field(
        None, description="how many will be shown; as many as the model knows when left out"
    )
    method: Method | None = Field(None, description="how to rank; the server's own when left out")
    candidates: list[Candidate[FeaturesT]] = Field(min_length=1)


class RankBatch(_Body, Generic[FeaturesT]):
    """Several lists to rank."""

    queries: list[RankQuery[FeaturesT]] = Field(min_length=1)


class ExplainQuery(_Body, Generic[FeaturesT]):
    """A list to look into, and orders of it to judge."""

    query_id: Id | None = None
    positions: Positions | None = Field(None, description="how many would be shown; at most as many as the model knows")
    candidates: list[Candidate[FeaturesT]] = Field(min_length=1)
    orders: Annotated[dict[OrderName, Annotated[list[Id], Field(min_length=1), FailFast()]], FailFast()] = Field(
        default_factory=dict, max_length=MAX_ORDERS, description="orders to judge: item ids from the top, by name"
    )


class Event(_Body):
    """What happened to an item of a ranking."""

    ranking_id: Annotated[str, Field(pattern=RANKING_ID)]
    item_id: Id
    click: bool = True
    conversion: bool = False
    value: Value | None = Field(None, description="what it turned out to be worth; replaces the value it was ranked by")


class FeedbackBody(_Body):
    """What happened to items of rankings; saying it twice does no harm."""

    events: Annotated[list[Event], Field(min_length=1, max_length=MAX_EVENTS), FailFast()]


class RankedItem(_Body):
    """An item in its place; `click` is null beyond the positions that the model knows."""

    item_id: str
    position: int
    score: float | None
    click: float | None
    utility: float


class RankAnswer(_Body):
    """A ranked list, best first."""

    ranking_id: str
    query_id: str
    model: str
    method: Method
    policy: str
    arm: str | None
    utility: float
    items: list[RankedItem]


class RankingsAnswer(_Body):
    """Several ranked lists."""

    rankings: list[RankAnswer]


class ExplainedItem(_Body):
    """An item and its row of the click table."""

    item_id: str
    value: float
    score: float | None
    clicks: list[float]


class OrderAnswer(_Body):
    """An order, as far as it is shown, and what its items are expected to earn."""

    name: str
    items: list[str]
    utility: float
    utilities: list[float]


class ExplainAnswer(_Body):
    """The click table of a list and the utility of orders."""

    model: str
    method: Method
    positions: int
    items: list[ExplainedItem]
    orders: list[OrderAnswer]


class Accepted(_Body):
    """So many events are durable."""

    accepted: int


class Reloaded(_Body):
    """The version of the model that is served now."""

    version: str
    changed: bool
    status: Literal["reloaded", "unchanged"]
