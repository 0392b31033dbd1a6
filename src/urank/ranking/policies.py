"""Policies: what gives every item of a logged list a new position. Evaluation takes policies and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.learning.features import Featurizer
from urank.log.dataset import Block
from urank.log.ragged import list_ids, pad, positions_by_score, where_items
from urank.log.splits import stable_hash
from urank.ranking.guard import Guard
from urank.ranking.matching import match
from urank.ranking.positions import Method
from urank.ranking.ranking_model import RankingModel, Scorer

__all__ = ["Guarded", "LoggedOrder", "ModelPolicy", "Policy", "Random", "ScorerPolicy", "TableMatch"]


class Policy(Protocol):
    """Lists in, positions out."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the items that it looks at."""
        ...

    def positions(self, block: Block) -> NDArray[np.int64]:
        """The 1-based position of every item `[rows]`, distinct within a list."""
        ...


@dataclass(frozen=True)
class LoggedOrder:
    """The order of the log."""

    name: str = "logged"
    columns: tuple[str, ...] = ("position",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        return block.column("position").astype(np.int64)


@dataclass(frozen=True)
class Random:
    """A random order, the same for the same list and seed wherever it stands in the data and however its items lie."""

    seed: int = 0
    name: str = "random"
    columns: tuple[str, ...] = ("position",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        keys = block.lists.column_names
        lists = pl.DataFrame(block.lists).select(pl.concat_str(keys, separator="\x00")).to_series()
        place = pl.Series(block.column("position")) - 1
        names = lists[list_ids(block.offsets)] + "\x00" + place.cast(pl.String)
        scores = stable_hash(names, seed=self.seed).astype(np.float64)
        where = where_items(block.offsets)
        return positions_by_score(pad(scores, block.offsets), where=where)[where]


@dataclass(frozen=True, eq=False)
class ModelPolicy:
    """The order of a model by one of its methods."""

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
    """By falling score of a scorer alone, such as one of another paper that knows no click model."""

    name: str
    featurizer: Featurizer
    scorer: Scorer

    @property
    def columns(self) -> Sequence[str]:
        return [*self.featurizer.names, *(["value"] if self.scorer.takes_value else [])]

    def positions(self, block: Block) -> NDArray[np.int64]:
        value = block.column("value") if self.scorer.takes_value else np.ones(block.items.num_rows)
        scores = self.scorer.score(self.featurizer.encode(block.items), value.astype(np.float32))
        where = where_items(block.offsets)
        return positions_by_score(pad(scores, block.offsets), where=where)[where]


@dataclass(frozen=True, eq=False)
class TableMatch:
    """The exact matching of a given click table. With the true one (`urank.lab.truth.true_table`) it is the KM
    oracle of Section 5.3, the most that any order can earn."""

    name: str
    table: Callable[[Block], NDArray[np.float64]]
    columns: tuple[str, ...] = ("item_id",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        weights = self.table(block)
        if "value" in block.items.column_names:
            weights = weights * block.column("value")[:, None]
        where = where_items(block.offsets)
        return np.asarray(match(pad(weights, block.offsets), where=where)[where])


@dataclass(frozen=True, eq=False)
class Guarded:
    """Another policy, kept close to the logged order.

    It looks at the list that it is judged by, so inverse propensities, which count how often a policy meets a random
    list by chance, do not hold for it; `urank.evaluation.guard_sweep` judges it without them.
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
        where = where_items(block.offsets)
        wanted = pad(self.policy.positions(block), block.offsets)
        return self.guard.apply(wanted, pad(block.column("position"), block.offsets), where=where)[where]
