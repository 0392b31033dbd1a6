"""A model that ranks: the click table, a scorer that learned from it, and the order that either of them gives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.clicks.model import ClickModel
from urank.errors import ConfigError, DataError
from urank.features import Inputs
from urank.log.candidates import IDS, CandidateLists, Candidates, read_candidates
from urank.log.lists import at_positions
from urank.rankers.guardrail import Guard
from urank.rankers.order import METHODS, Method, guarded_positions, positions_in_lists, values_or_ones, worth

__all__ = ["RankingModel", "Scorer"]

# What ranking takes for each position of a candidate: the table, its weights, and these again as padded lists.
_WORK_BYTES = 64


class Scorer(Protocol):
    """What gives each item a score, s = Φ(f, b)."""

    @property
    def family(self) -> str:
        """`network` or `trees`."""
        ...

    @property
    def takes_value(self) -> bool:
        """Whether it was trained on values."""
        ...

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores `[rows]`."""
        ...


@dataclass(frozen=True, eq=False)
class RankingModel:
    """Ranks lists of candidates.

    Attributes:
        clicks: gives P(click | item, k).
        scorer: gives scores; none when only the click model was trained.
        method: how it ranks unless told otherwise.
    """

    clicks: ClickModel
    scorer: Scorer | None = None
    method: Method = "match"

    def __post_init__(self) -> None:
        self._check(self.method)

    @property
    def name(self) -> str:
        """What it is made of, as `network on monotone ×3`."""
        return self.clicks.name if self.scorer is None else f"{self.scorer.family} on {self.clicks.name}"

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods it can rank by."""
        return METHODS if self.scorer is not None else ("match", "ctr1")

    def log_ctr(self, items: Inputs | pl.DataFrame | pa.Table) -> NDArray[np.float32]:
        """log P(click | item, position) `[rows, K]`."""
        return self.clicks.log_ctr(items)

    def score(self, items: Inputs | pl.DataFrame | pa.Table, value: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """The score of each item `[rows]`; the value is that of the table where it is not given, and 1 without one."""
        if self.scorer is None:
            raise ConfigError("this model has no scorer, only a click model; rank by match or ctr1")
        inputs = items if isinstance(items, Inputs) else self.clicks.featurizer.encode(items)
        value = _value_of(items) if value is None else value
        if value is None and self.scorer.takes_value:
            raise DataError("the model was trained on values and needs the column 'value', which is not there")
        return self.scorer.score(inputs, values_or_ones(value, len(inputs)))

    def order(
        self,
        items: Inputs | pl.DataFrame | pa.Table,
        offsets: NDArray[np.int64],
        *,
        value: NDArray[Any] | None = None,
        method: Method | None = None,
    ) -> NDArray[np.int64]:
        """The 1-based position of each item `[rows]` in its list; the lists lie between the offsets. Values as in
        `score`."""
        method = self.method if method is None else method
        self._check(method)
        inputs = items if isinstance(items, Inputs) else self.clicks.featurizer.encode(items)
        value = _value_of(items) if value is None else value
        return positions_in_lists(
            self.score(inputs, value) if method == "score" else worth(self.log_ctr(inputs), value, method), offsets
        )

    def rank(
        self,
        candidates: Any,
        *,
        method: Method | None = None,
        top: int | None = None,
        guard: Guard | str | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> pl.DataFrame:
        """Rank candidates: a table of Polars, pandas or PyArrow, a row for each, or a path of Parquet or CSV files.

        Args:
            candidates: `query_id` and `session_id` tell which rows are one list, which must lie together; without
                them all rows are one. Also the features, and `value` where a click is worth more on some items. Other
                columns are ignored, so a log will do.
            method: score, match or ctr1; the model's own when left out.
            top: keep so many of each list; all when left out.
            guard: how close to stay to the current order, as `shift:2` (see `Guard`); the column `position` has it.
            columns: role -> the column that plays it, where names differ, as `{"query_id": "search"}`.

        Returns:
            the ids, and for each candidate `position`, `score` (when there is a scorer), `click` (P(click) there; null
            when it has no place) and `utility`, best first within each list.
        """
        required = () if guard is None else ("position",)
        lists = self.candidates(candidates, columns=columns, required=required).lists()
        return pl.concat([self.rank_lists(some, method=method, top=top, guard=guard) for some in lists])

    def candidates(
        self, source: Any, *, columns: Mapping[str, str] | None = None, required: Collection[str] = ()
    ) -> Candidates:
        """Open candidates with the features that the model needs, to be ranked some lists at a time."""
        featurizer = self.clicks.featurizer
        return read_candidates(
            source,
            numeric=[feature.name for feature in featurizer.numeric],
            categorical=[feature.name for feature in featurizer.categorical],
            columns=columns,
            required=required,
            work_bytes=_WORK_BYTES * self.clicks.positions,
        )

    def rank_lists(
        self,
        lists: CandidateLists,
        *,
        method: Method | None = None,
        top: int | None = None,
        guard: Guard | str | None = None,
    ) -> pl.DataFrame:
        """Rank some lists that `candidates` gave; see `rank`."""
        method = self.method if method is None else method
        self._check(method)
        if top is not None and top < 1:
            raise ConfigError(f"top must be a whole number from 1 up; got {top}")
        frame, offsets = lists.frame, lists.offsets
        inputs = self.clicks.featurizer.encode(frame)
        value = frame["value"].to_numpy() if "value" in frame.columns else None
        table = self.log_ctr(inputs) if len(inputs) else np.empty((0, self.clicks.positions), dtype=np.float32)
        columns: dict[str, Any] = {}
        if self.scorer is not None:
            columns["score"] = self.score(inputs, value) if len(inputs) else np.empty(0, dtype=np.float32)
        if method == "score":
            position = positions_in_lists(columns["score"], offsets)
        else:
            position = positions_in_lists(worth(table, value, method), offsets)
        if guard is not None:
            if "position" not in frame.columns:
                raise DataError("a guard needs the column 'position', the current rank of each candidate")
            position = guarded_positions(position, frame["position"].to_numpy(), offsets, Guard.parse(guard))
        placed = position <= self.clicks.positions
        click = np.exp(at_positions(table, np.where(placed, position, 1)))
        columns["click"] = pl.Series(click).zip_with(pl.Series(placed), pl.Series([None], dtype=pl.Float32))
        columns["utility"] = np.where(placed, click * values_or_ones(value, len(inputs)), np.float32(0))
        best_first = np.empty_like(position)
        best_first[np.repeat(offsets[:-1], np.diff(offsets)) + position - 1] = np.arange(len(position))
        ids = [name for name in IDS if name in frame.columns]
        ranked = frame.select(ids).with_columns(position=pl.Series(position, dtype=pl.Int32), **columns)[best_first]
        return ranked if top is None else ranked.filter(pl.col("position") <= top)

    def _check(self, method: str) -> None:
        if method not in self.methods:
            raise ConfigError(f"this model ranks by {', '.join(self.methods)}; got '{method}'")


def _value_of(items: Inputs | pl.DataFrame | pa.Table) -> NDArray[Any] | None:
    """The values that a table brings along."""
    if isinstance(items, Inputs):
        return None
    names = items.columns if isinstance(items, pl.DataFrame) else items.column_names
    return np.asarray(items["value"].to_numpy()) if "value" in names else None
