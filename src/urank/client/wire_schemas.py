"""Answers of the HTTP API, shared by server and client.

The server sends exactly these fields, as its OpenAPI document declares. A client ignores fields that a newer server
adds. Methods are plain strings here, since a newer server may have more of them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from msgspec import Struct

from urank.errors import DataError


class _Answer(Struct, frozen=True, gc=False):
    """Base of all answers."""


class RankedItem(_Answer, frozen=True):
    """An item at its position.

    Attributes:
        score: None unless the list was ranked by score.
        probability: P(click) at this position, or P(conversion) if that is the model's goal; None beyond the positions
            that the model knows.
        utility: Expected utility at this position: probability times value.
    """

    item_id: str
    position: int
    score: float | None
    probability: float | None
    utility: float


class Ranking(_Answer, frozen=True):
    """A ranked list, best first.

    Attributes:
        ranking_id: The id that feedback refers to.
        model: Version of the model that ranked it.
        policy: Name of the logging policy: the model version, and the kind of exploration if it was applied.
        arm: Arm of the A/B test; None without a test.
        utility: Expected utility of the list.
    """

    ranking_id: str
    query_id: str
    model: str
    method: str
    policy: str
    arm: str | None
    utility: float
    items: tuple[RankedItem, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """The item ids, best first."""
        return tuple(item.item_id for item in self.items)


class RankingBatch(_Answer, frozen=True):
    """Several ranked lists."""

    rankings: tuple[Ranking, ...]


class ExplainedItem(_Answer, frozen=True):
    """An item, the value of a click on it, its score, and P(click) at each position."""

    item_id: str
    value: float
    score: float | None
    clicks: tuple[float, ...]


class Order(_Answer, frozen=True):
    """The shown part of an order, with the expected utility of each of its items."""

    name: str
    items: tuple[str, ...]
    utility: float
    utilities: tuple[float, ...]


class Explanation(_Answer, frozen=True):
    """The click table of a list, and the expected utility of orders of it.

    Attributes:
        method: The server's default method.
        positions: Number of positions shown.
        items: In the order of the request.
        orders: One for each method of the model, then those of the request.
    """

    model: str
    method: str
    positions: int
    items: tuple[ExplainedItem, ...]
    orders: tuple[Order, ...]

    def order(self, name: str) -> Order:
        """Return the order with this name."""
        for order in self.orders:
            if order.name == name:
                return order
        raise DataError(f"name must be one of {', '.join(order.name for order in self.orders)}; got '{name}'")


class Shadow(_Answer, frozen=True):
    """A model whose rankings are logged but not shown."""

    version: str
    name: str


class SplitTest(_Answer, frozen=True):
    """A running A/B test: its name, the share of users in arm B, and the model version of that arm."""

    name: str
    share: float
    version: str


class FeatureNames(_Answer, frozen=True):
    """The features that every candidate must have, by itself, by the context or by the server's items."""

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]


class ModelFacts(_Answer, frozen=True):
    """The models in use, and what requests must contain.

    Attributes:
        method: Default method of the server.
        methods: Methods that a request may ask for.
        positions: K, the number of positions whose click probabilities the model knows.
        takes_value: Whether scores depend on the value of a click.
        loaded: When the model was loaded.
        explore: Kind and share of randomised lists, as `swap:0.05`; None without exploration.
        items: Number of items whose features the server holds; None without them.
        log: Whether the server keeps a feedback log.
        limits: Largest request sizes, by name.
    """

    version: str
    name: str
    method: str
    methods: tuple[str, ...]
    positions: int
    features: FeatureNames
    takes_value: bool
    loaded: datetime
    explore: str | None
    shadow: Shadow | None
    test: SplitTest | None
    items: int | None
    log: bool
    limits: dict[str, int | float]

    @property
    def numeric(self) -> tuple[str, ...]:
        return self.features.numeric

    @property
    def categorical(self) -> tuple[str, ...]:
        return self.features.categorical


class ModelNames(_Answer, frozen=True):
    """The model version in use by the name of each model; the first is also that of `/v1/rank`."""

    models: dict[str, str]


class ItemsStored(_Answer, frozen=True):
    """The number of items that were added and replaced, and that of all items."""

    added: int
    replaced: int
    items: int


class Accepted(_Answer, frozen=True):
    """The number of events that were written durably."""

    accepted: int


class Reloaded(_Answer, frozen=True):
    """The model version in use after a reload, and whether it changed."""

    version: str
    changed: bool
    status: Literal["reloaded", "unchanged"]
