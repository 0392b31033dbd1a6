"""What a server answers, as values. Fields that a newer server adds are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from urank.errors import DataError

if TYPE_CHECKING:
    from urank.ranking.positions import Method

__all__ = [
    "ExplainedItem",
    "Explanation",
    "ModelFacts",
    "Order",
    "RankedItem",
    "Ranking",
    "Reloaded",
    "Shadow",
    "SplitTest",
]


@dataclass(frozen=True)
class RankedItem:
    """An item in its place.

    Attributes:
        item_id: which.
        position: from 1.
        score: by which it was ranked; none when the model has no scorer.
        click: P(click) there; none beyond the positions that the model knows.
        utility: what it is expected to earn there.
    """

    item_id: str
    position: int
    score: float | None
    click: float | None
    utility: float


@dataclass(frozen=True)
class Ranking:
    """A ranked list, best first.

    Attributes:
        ranking_id: what feedback names it by.
        query_id: as it was asked.
        model: the version that ranked it.
        method: how; none when the candidates were a table and the server did not say.
        policy: what the log calls the way it was made: the model, and how chance had a hand in it.
        arm: of the A/B test; none when there is no test.
        utility: what the list is expected to earn.
        items: from the top.
    """

    ranking_id: str
    query_id: str
    model: str
    method: Method | None
    policy: str
    arm: str | None
    utility: float
    items: tuple[RankedItem, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """The item ids, from the top."""
        return tuple(item.item_id for item in self.items)


@dataclass(frozen=True)
class ExplainedItem:
    """An item, what a click on it is worth, its score, and P(click) at each position from the first."""

    item_id: str
    value: float
    score: float | None
    clicks: tuple[float, ...]


@dataclass(frozen=True)
class Order:
    """An order, from the top as far as it is shown, and what each of its items is expected to earn."""

    name: str
    items: tuple[str, ...]
    utility: float
    utilities: tuple[float, ...]


@dataclass(frozen=True)
class Explanation:
    """The click table of a list, and the utility of orders of it.

    Attributes:
        model: the version that was asked.
        method: by which the server ranks.
        positions: how many would be shown.
        items: as they were sent.
        orders: one by each method of the model, then those that were sent.
    """

    model: str
    method: Method
    positions: int
    items: tuple[ExplainedItem, ...]
    orders: tuple[Order, ...]

    def order(self, name: str) -> Order:
        """The order of this name."""
        for order in self.orders:
            if order.name == name:
                return order
        raise DataError(f"name must be one of {', '.join(order.name for order in self.orders)}; got '{name}'")


@dataclass(frozen=True)
class Shadow:
    """A model that ranks silently."""

    version: str
    name: str


@dataclass(frozen=True)
class SplitTest:
    """An A/B test: its name, the share of users in arm B, and the version of the model there."""

    name: str
    share: float
    version: str


@dataclass(frozen=True)
class ModelFacts:
    """What is served, and what it takes.

    Attributes:
        version, name: of the model.
        method: by which the server ranks when a request does not say.
        methods: by which it can.
        positions: that the model knows.
        numeric, categorical: its features, all of which a candidate needs.
        takes_value: whether its scores depend on the value of a click.
        loaded: when.
        explore: how lists are randomised, as `swap:0.05`.
        shadow, test: the other models, if there are any.
        log: whether the server keeps rankings and feedback.
        limits: how much a request may ask for, by name.
    """

    version: str
    name: str
    method: Method
    methods: tuple[Method, ...]
    positions: int
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    takes_value: bool
    loaded: datetime
    explore: str | None
    shadow: Shadow | None
    test: SplitTest | None
    log: bool
    limits: Mapping[str, float]


@dataclass(frozen=True)
class Reloaded:
    """The version that is served now, and whether it is another one than before."""

    version: str
    changed: bool


def read_ranking(found: Mapping[str, Any]) -> Ranking:
    """A ranking, from JSON."""
    return Ranking(
        **_texts(found, "ranking_id", "query_id", "model", "method", "policy", "arm"),
        utility=found["utility"],
        items=tuple(
            RankedItem(item["item_id"], item["position"], item["score"], item["click"], item["utility"])
            for item in found["items"]
        ),
    )


def read_explanation(found: Mapping[str, Any]) -> Explanation:
    """An explanation, from JSON."""
    return Explanation(
        **_texts(found, "model", "method"),
        positions=found["positions"],
        items=tuple(
            ExplainedItem(item["item_id"], item["value"], item["score"], tuple(item["clicks"]))
            for item in found["items"]
        ),
        orders=tuple(
            Order(order["name"], tuple(order["items"]), order["utility"], tuple(order["utilities"]))
            for order in found["orders"]
        ),
    )


def read_model(found: Mapping[str, Any]) -> ModelFacts:
    """What is served, from JSON."""
    shadow, test = found["shadow"], found["test"]
    return ModelFacts(
        **_texts(found, "version", "name", "method", "positions", "takes_value", "explore", "log"),
        methods=tuple(found["methods"]),
        numeric=tuple(found["features"]["numeric"]),
        categorical=tuple(found["features"]["categorical"]),
        loaded=datetime.fromisoformat(found["loaded"]),
        shadow=None if shadow is None else Shadow(**_texts(shadow, "version", "name")),
        test=None if test is None else SplitTest(**_texts(test, "name", "share", "version")),
        limits=dict(found["limits"]),
    )


def read_reloaded(found: Mapping[str, Any]) -> Reloaded:
    """What reloading came to, from JSON."""
    return Reloaded(found["version"], found["changed"])


def _texts(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """These fields, as they are."""
    return {name: found[name] for name in names}
