"""The ranking model: a click model, a scorer that learned from it, the ranking of lists by either, and its settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeAlias, TypeVar

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
from urank.log.reader import in_type_of, table_frame
from urank.memory import DEFAULT_MEMORY, Memory
from urank.progress import prefetch
from urank.ranking.guard import Guard
from urank.ranking.matching import METHODS, Method, expected_gain, guarded_positions, positions_in_lists, values_or_ones
from urank.ranking.ranking_settings import Goal
from urank.ranking.utility import Array

# Working memory per position of a candidate: the table, its weights, and both as padded lists.
_WORK_BYTES = 64
Items: TypeAlias = Inputs | pl.DataFrame | pa.Table | Any
"""Encoded items, or a table of Polars, PyArrow or pandas."""
AnyGuard = Guard | str | None
T = TypeVar("T")
R = TypeVar("R")


class Scorer(Protocol):
    """Computes a score `[rows]` for each item, s = Φ(f, b); its family is `network`, `linear` or `trees`."""

    @property
    def family(self) -> str: ...

    @property
    def takes_value(self) -> bool: ...

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]: ...


@dataclass(frozen=True, eq=False)
class RankingModel:
    """Ranks lists of candidates by a click model and, unless only that was trained, a scorer.

    `judges` are networks that rank nothing: evaluations of any policy refit them (`urank.evaluation.refit`). `columns`
    are those of the log it was trained on, role -> column where the names differ; candidates may have them too.
    """

    clicks: ClickModel
    scorer: Scorer | None = None
    method: Method = "match"
    judges: tuple[ClickModel, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check(self.method)

    @property
    def name(self) -> str:
        """Its components, such as `network on monotone ×3`."""
        return self.clicks.name if self.scorer is None else f"{self.scorer.family} on {self.clicks.name}"

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return str(import_module("urank.report.model_report").model_html(self))  # of a higher layer

    @property
    def goal(self) -> Goal:
        """What it was trained to earn."""
        return "clicks" if self.clicks.conversion is None else "conversions"

    @property
    def methods(self) -> tuple[Method, ...]:
        """The available ranking methods."""
        return METHODS if self.scorer is not None else ("match", "ctr1")

    def log_ctr(self, items: Items, offsets: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Predict log P(click | item, position) `[rows, K]`, or of conversions, its goal; offsets as in `score`."""
        return self.clicks.log_ctr(_as_items(items), offsets)

    def score(
        self, items: Items, value: Array | None = None, offsets: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Return the score of each item `[rows]`.

        Args:
            items: encoded items, or a table of whole lists.
            value: `[rows]`; defaults to the column of that name, and to 1 without one.
            offsets: `[lists + 1]`, the bounds of the lists of a table; by default as in `Featurizer.encode`.
        """
        if self.scorer is None:
            raise ConfigError("this model has no scorer, only a click model; use method match or ctr1")
        items = _as_items(items)
        inputs = items if isinstance(items, Inputs) else self.clicks.featurizer.encode(items, offsets)
        value = _value_of(items) if value is None else value
        if value is None and self.scorer.takes_value:
            raise DataError("the model was trained on values and needs the column 'value', which is not there")
        return self.scorer.score(inputs, values_or_ones(value, len(inputs)))

    def order(
        self, items: Items, offsets: NDArray[np.int64], *, value: Array | None = None, method: Method | None = None
    ) -> NDArray[np.int64]:
        """Return the 1-based position of each item `[rows]` in its list, given the offsets of the lists."""
        method = self.method if method is None else method
        self._check(method)
        inputs = items if isinstance(items, Inputs) else self.clicks.featurizer.encode(items, offsets)
        value = _value_of(items) if value is None else value
        by_score = method == "score"
        gain = self.score(inputs, value) if by_score else expected_gain(self.log_ctr(inputs), value, method)
        return positions_in_lists(gain, offsets)

    def rank(
        self,
        candidates: Any,
        *,
        method: Method | None = None,
        top: int | None = None,
        guard: AnyGuard = None,
        columns: Mapping[str, str] | None = None,
        memory: Memory = DEFAULT_MEMORY,
    ) -> Any:
        """Rank candidates in a table of Polars, pandas or PyArrow, a row for each, or in Parquet or CSV files.

        Args:
            candidates: `query_id` and `session_id` identify the list of a row, and the rows of a list must be
                contiguous; without them all rows are one list. Also the features and, if clicks differ in worth,
                `value`. Other columns are ignored, so a log can be used.
            method: score, match or ctr1; by default the model's own.
            top: keep this many of each list; all by default.
            guard: how close to stay to the current order, as `shift:2` (see `Guard`), given in the column `position`.
            columns: role -> column, where names differ, as `{"query_id": "search"}`.
            memory: working memory, besides the candidates and the result; a list that needs more is refused.

        Returns:
            a table of the same kind (Polars for files), best first within each list: the ids, and for each candidate
            `position`, `score` (with a scorer), `probability` (P(click) there, or that of the goal; null without
            a place) and `utility`.
        """
        required = () if guard is None else ("position",)
        source = self.candidates(candidates, columns=columns, required=required, memory=memory)
        ranked = pl.concat([ranked for _, ranked in self.ranked(source, method=method, top=top, guard=guard)])
        return in_type_of(candidates, ranked)

    def ranked(
        self, source: Candidates, *, method: Method | None = None, top: int | None = None, guard: AnyGuard = None
    ) -> Iterator[tuple[CandidateLists, pl.DataFrame]]:
        """Yield lists of candidates, in their order, with their ranking as in `rank`.

        As many batches of lists are ranked in parallel as torch has threads, while the next are read.
        """
        rank = partial(self.rank_lists, method=method, top=top, guard=guard)
        return _parallel_map(rank, prefetch(source.lists()), torch.get_num_threads())

    def candidates(
        self,
        source: Any,
        *,
        columns: Mapping[str, str] | None = None,
        required: Collection[str] = (),
        memory: Memory = DEFAULT_MEMORY,
    ) -> Candidates:
        """Open candidates with the features of the model, to be ranked in batches of lists.

        A quarter of the memory is for all lists that are being read, ranked or written; a single list may take half.
        """
        featurizer = self.clicks.featurizer
        inputs = 4 * len(featurizer.inputs) + 8 * len(featurizer.categorical)
        return read_candidates(
            source,
            numeric=[feature.name for feature in featurizer.numeric],
            categorical=[feature.name for feature in featurizer.categorical],
            columns=columns,
            known=self.columns,
            required=required,
            work_bytes=_WORK_BYTES * self.clicks.positions + inputs,
            batch_bytes=memory.total // 4 // (torch.get_num_threads() + 4),
            list_bytes=memory.held_bytes,
        )

    def rank_lists(
        self, lists: CandidateLists, *, method: Method | None = None, top: int | None = None, guard: AnyGuard = None
    ) -> pl.DataFrame:
        """Rank some lists of `candidates`; see `rank`."""
        method = self.method if method is None else method
        self._check(method)
        if top is not None and top < 1:
            raise ConfigError(f"top must be a whole number from 1 up; got {top}")
        frame, offsets = lists.frame, lists.offsets
        inputs = self.clicks.featurizer.encode(frame, offsets)
        value = _value_of(frame)
        score = table = None  # only what the order needs is computed for all rows
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
        placed = np.flatnonzero(position[rows] <= self.clicks.positions)
        chosen = rows[placed]
        known = self.log_ctr(inputs[chosen]) if table is None else table[chosen]
        probability = np.exp(at_positions(known, position[chosen]))
        utility = np.zeros(len(rows), dtype=np.float32)
        utility[placed] = probability if value is None else probability * value[chosen]
        nothing = pl.Series([None], dtype=pl.Float32).new_from_index(0, len(rows))
        columns |= {"probability": nothing.scatter(placed, probability), "utility": utility}
        ids = [name for name in IDS if name in frame.columns]
        return frame.select(ids)[rows].with_columns(**columns)

    def _check(self, method: str) -> None:
        if method not in self.methods:
            raise ConfigError(f"this model ranks by {', '.join(self.methods)}; got '{method}'")


def _as_items(items: Items) -> Inputs | pl.DataFrame | pa.Table:
    return (
        items if isinstance(items, Inputs | pl.DataFrame | pa.Table) else table_frame(items, "the table", "candidates")
    )


def _value_of(items: Items) -> Array | None:
    """Return the column `value` of a table; None if absent."""
    if isinstance(items, Inputs):
        return None
    names = items.columns if isinstance(items, pl.DataFrame) else items.column_names
    return np.asarray(items["value"].to_numpy()) if "value" in names else None


def _best_first(position: NDArray[np.int64], offsets: NDArray[np.int64], top: int | None) -> NDArray[np.int64]:
    """Return the rows of each list from the top, at most `top` of each.

    >>> _best_first(np.array([2, 3, 1, 1]), np.array([0, 3, 4]), 2).tolist()
    [2, 0, 3]
    """
    rows = np.empty_like(position)
    rows[np.repeat(offsets[:-1], np.diff(offsets)) + position - 1] = np.arange(len(position))
    return rows if top is None else rows[position[rows] <= top]


def _parallel_map(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[tuple[T, R]]:
    """Map a function over items in parallel, and yield items and results in order.

    Each item is processed with one torch thread: threads that share an item would wait for each other at every layer.
    """
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
        torch.set_num_threads(threads)  # otherwise new threads would start with the last setting
