"""What comes in and goes out as JSON: strict types, no unknown fields, no NaN or infinity, bounded lengths.

Features are a map from name to value. Where a model has numbers only, that is also what the type says, so that the
parser itself checks it; the names are checked by `urank.serve.items`, which knows the model.
"""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from urank.rankers.order import Method
from urank.serve.records import RANKING_ID

__all__ = [
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
    "RankAnswer",
    "RankBatch",
    "RankQuery",
    "RankedItem",
    "RankingsAnswer",
    "Reloaded",
]

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
