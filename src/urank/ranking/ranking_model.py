"""A model that ranks: the click table, a scorer that learned from it, and the order that either of them gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray

from urank.clicks.click_model import ClickModel
from urank.errors import ConfigError, DataError
from urank.learning.features import Inputs
from urank.log.candidates import IDS, CandidateLists, Candidates, read_candidates
from urank.log.ragged import at_positions
from urank.memory import DEFAULT_MEMORY, Memory
from urank.progress import prefetch
from urank.ranking.guard import Guard
from urank.ranking.positions import (
    METHODS,
    Method,
    expected_gain,
    guarded_positions,
    positions_in_lists,
    values_or_ones,
)

__all__ = ["RankingModel", "Scorer"]

# What ranking takes for each position of a candidate: the table, its weights, and these again as padded lists.
_WORK_BYTES = 64
T = TypeVar("T")
R = TypeVar("R")


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
            self.score(inputs, value) if method == "score" else expected_gain(self.log_ctr(inputs), value, method),
            offsets,
        )

    def rank(
        self,
        candidates: Any,
        *,
        method: Method | None = None,
        top: int | None = None,
        guard: Guard | str | None = None,
        columns: Mapping[str, str] | None = None,
        memory: Memory = DEFAULT_MEMORY,
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
            memory: what the work may take, besides the candidates and the result; a list that takes more is refused.

        Returns:
            the ids, and for each candidate `position`, `score` (when there is a scorer), `click` (P(click) there; null
            when it has no place) and `utility`, best first within each list.
        """
        required = () if guard is None else ("position",)
        source = self.candidates(candidates, columns=columns, required=required, memory=memory)
        return pl.concat([ranked for _, ranked in self.ranked(source, method=method, top=top, guard=guard)])

    def ranked(
        self,
        source: Candidates,
        *,
        method: Method | None = None,
        top: int | None = None,
        guard: Guard | str | None = None,
    ) -> Iterator[tuple[CandidateLists, pl.DataFrame]]:
        """Rank all that `candidates` opened, some lists at a time and in their order: these, and what `rank` makes of
        them. As many are worked on at once as torch has threads, while the next are read."""

        def rank(some: CandidateLists) -> pl.DataFrame:
            return self.rank_lists(some, method=method, top=top, guard=guard)

        return _in_turn(rank, prefetch(source.lists()), torch.get_num_threads())

    def candidates(
        self,
        source: Any,
        *,
        columns: Mapping[str, str] | None = None,
        required: Collection[str] = (),
        memory: Memory = DEFAULT_MEMORY,
    ) -> Candidates:
        """Open candidates with the features that the model needs, to be ranked some lists at a time.

        A quarter of the memory is for all lists that are being read, ranked or written; a single list may take half of
        it.
        """
        featurizer = self.clicks.featurizer
        inputs = 4 * len(featurizer.numeric) + 8 * len(featurizer.categorical)
        return read_candidates(
            source,
            numeric=[feature.name for feature in featurizer.numeric],
            categorical=[feature.name for feature in featurizer.categorical],
            columns=columns,
            required=required,
            work_bytes=_WORK_BYTES * self.clicks.positions + inputs,
            batch_bytes=memory.total // 4 // (torch.get_num_threads() + 4),
            list_bytes=memory.held_bytes,
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
        score = table = None  # what the order needs is computed for all rows, the rest for those that are kept
        if method == "score":
            score = self.score(inputs, value)
            position = positions_in_lists(score, offsets)
        else:
            table = self.log_ctr(inputs)
            position = positions_in_lists(expected_gain(table, value, method), offsets)
        if guard is not None:
            if "position" not in frame.columns:
                raise DataError("a guard needs the column 'position', the current rank of each candidate")
            position = guarded_positions(position, frame["position"].to_numpy(), offsets, Guard.parse(guard))
        rows = _best_first(position, offsets, top)
        columns: dict[str, Any] = {"position": pl.Series(position[rows], dtype=pl.Int32)}
        if self.scorer is not None:
            few = None if value is None else value[rows]
            columns["score"] = self.score(inputs[rows], few) if score is None else score[rows]
        columns |= self._earned(inputs, value, position, rows, table)
        ids = [name for name in IDS if name in frame.columns]
        return frame.select(ids)[rows].with_columns(**columns)

    def _earned(
        self,
        inputs: Inputs,
        value: NDArray[Any] | None,
        position: NDArray[np.int64],
        rows: NDArray[np.int64],
        table: NDArray[np.float32] | None,
    ) -> dict[str, Any]:
        """The columns `click` and `utility` of these rows; without a table, it is computed for those with a place."""
        placed = np.flatnonzero(position[rows] <= self.clicks.positions)
        chosen = rows[placed]
        known = self.log_ctr(inputs[chosen]) if table is None else table[chosen]
        click = np.exp(at_positions(known, position[chosen]))
        utility = np.zeros(len(rows), dtype=np.float32)
        utility[placed] = click if value is None else click * value[chosen]
        nothing = pl.Series([None], dtype=pl.Float32).new_from_index(0, len(rows))
        return {"click": nothing.scatter(placed, click), "utility": utility}

    def _check(self, method: str) -> None:
        if method not in self.methods:
            raise ConfigError(f"this model ranks by {', '.join(self.methods)}; got '{method}'")


def _value_of(items: Inputs | pl.DataFrame | pa.Table) -> NDArray[Any] | None:
    """The values that a table brings along."""
    if isinstance(items, Inputs):
        return None
    names = items.columns if isinstance(items, pl.DataFrame) else items.column_names
    return np.asarray(items["value"].to_numpy()) if "value" in names else None


def _best_first(position: NDArray[np.int64], offsets: NDArray[np.int64], top: int | None) -> NDArray[np.int64]:
    """The rows of each list from the top, as many of them as are kept.

    >>> _best_first(np.array([2, 3, 1, 1]), np.array([0, 3, 4]), 2).tolist()
    [2, 0, 3]
    """
    rows = np.empty_like(position)
    rows[np.repeat(offsets[:-1], np.diff(offsets)) + position - 1] = np.arange(len(position))
    return rows if top is None else rows[position[rows] <= top]


def _in_turn(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[tuple[T, R]]:
    """Each item and what a function gives for it, in order, so many of them worked on at once. Each has a thread of
    torch for itself: threads that share one item would wait for each other at every layer."""
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for item in items:
                    waiting.append((item, pool.submit(function, item)))
                    if len(waiting) > threads:
                        first, future = waiting.popleft()
                        yield first, future.result()
                while waiting:
                    first, future = waiting.popleft()
                    yield first, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)  # new threads would otherwise begin with what was set last
