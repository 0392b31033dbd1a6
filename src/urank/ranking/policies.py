"""Policies, which give every item of a logged list a new position; evaluation takes policies only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.learning.features import Featurizer
from urank.log.dataset import Block
from urank.log.ragged import list_ids
from urank.log.splits import stable_hash
from urank.ranking.guard import Guard
from urank.ranking.matching import Method, guarded_positions, positions_in_lists
from urank.ranking.ranking_model import RankingModel, Scorer


class Policy(Protocol):
    """Maps lists to positions."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the items that it reads."""
        ...

    def positions(self, block: Block) -> NDArray[np.int64]:
        """Return the 1-based position of every item `[rows]`, distinct within a list."""
        ...


@dataclass(frozen=True)
class LoggedOrder:
    """The logged order."""

    name: str = "logged"
    columns: tuple[str, ...] = ("position",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        return block.column("position").astype(np.int64)


@dataclass(frozen=True)
class Random:
    """A random order that depends on the list and the seed only, not on the order of lists or items in the data."""

    seed: int = 0
    name: str = "random"
    columns: tuple[str, ...] = ("position",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        keys = block.lists.column_names
        lists = pl.DataFrame(block.lists).select(pl.concat_str(keys, separator="\x00")).to_series()
        place = pl.Series(block.column("position")) - 1
        names = lists[list_ids(block.offsets)] + "\x00" + place.cast(pl.String)
        scores = stable_hash(names, seed=self.seed).astype(np.float64)
        return positions_in_lists(scores, block.offsets)


@dataclass(frozen=True, eq=False)
class ModelPolicy:
    """The order by one of the methods of a model."""

    name: str
    model: RankingModel
    method: Method

    @property
    def columns(self) -> Sequence[str]:
        scorer = self.model.scorer if self.method == "score" else None
        return [*self.model.clicks.featurizer.names, *(["value"] if scorer is not None and scorer.takes_value else [])]

    def positions(self, block: Block) -> NDArray[np.int64]:
        return self.model.order(block.items, block.offsets, method=self.method)


@dataclass(frozen=True, eq=False)
class ScorerPolicy:
    """The order by falling score of a scorer without a click model, such as one of another paper."""

    name: str
    featurizer: Featurizer
    scorer: Scorer

    @property
    def columns(self) -> Sequence[str]:
        return [*self.featurizer.names, *(["value"] if self.scorer.takes_value else [])]

    def positions(self, block: Block) -> NDArray[np.int64]:
        value = block.column("value") if self.scorer.takes_value else np.ones(block.items.num_rows)
        scores = self.scorer.score(self.featurizer.encode(block.items, block.offsets), value.astype(np.float32))
        return positions_in_lists(scores, block.offsets)


@dataclass(frozen=True, eq=False)
class TableMatch:
    """The exact matching of a given click table.

    With the true table (`urank.lab.truth.true_table`) it is the KM oracle of Section 5.3, an upper bound of all orders.
    """

    name: str
    table: Callable[[Block], NDArray[np.float64]]
    columns: tuple[str, ...] = ("item_id",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        weights = self.table(block)
        if "value" in block.items.column_names:
            weights = weights * block.column("value")[:, None]
        return positions_in_lists(weights, block.offsets)


@dataclass(frozen=True, eq=False)
class Guarded:
    """Another policy, kept close to the logged order.

    Since it depends on the logged order itself, estimators by inverse propensities are not valid for it;
    `urank.evaluation.guard_sweep` evaluates it without them.
    """

    policy: Policy
    guard: Guard

    @property
    def name(self) -> str:
        return f"{self.policy.name}, {self.guard.name}"

    @property
    def columns(self) -> Sequence[str]:
        return list(dict.fromkeys([*self.policy.columns, "position"]))

    def positions(self, block: Block) -> NDArray[np.int64]:
        return guarded_positions(self.policy.positions(block), block.column("position"), block.offsets, self.guard)
