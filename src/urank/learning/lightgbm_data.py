"""Shared parts of all tree models: growth settings, LightGBM datasets, and models as text.

A LightGBM row is `[numeric, categorical, extra]`. Numbers are raw, since LightGBM bins them itself and treats NaN as
missing; categories are the codes of the `Featurizer`. The extra is an optional further column of the log, such as the
position or the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import lightgbm
import numpy as np
from numpy.typing import NDArray

from urank.errors import DataError
from urank.learning.features import Featurizer, Inputs
from urank.log.dataset import Dataset, RowGroup, drop_unseen, sample_to_fit
from urank.progress import Report

CHUNK_BYTES = 64 * 2**20
IN_MEMORY_BYTES = 256 * 2**20
"""Splits up to this size are passed to LightGBM whole: choosing the bins row by row takes longer than many trees."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TreeModel:
    """Fitted trees; models with equal text are equal."""

    text: str  # the trees in LightGBM's text format
    n_numeric: int  # n_numeric, n_categorical: number of features of each kind
    n_categorical: int
    extra: str | None  # the name of the column after the features; None without one

    @property
    def width(self) -> int:
        return self.n_numeric + self.n_categorical + (self.extra is not None)

    @cached_property
    def booster(self) -> lightgbm.Booster:
        """The trees, ready to predict."""
        return lightgbm.Booster(model_str=self.text)

    def predict(self, inputs: Inputs, extra: NDArray[Any] | None = None) -> Floats:
        """Sum the trees `[rows]`, in chunks of rows; `extra` is ignored by trees without it."""
        sums = np.empty(len(inputs), dtype=np.float32)
        step = max(1, CHUNK_BYTES // (4 * self.width))
        for start in range(0, len(inputs), step):
            rows = slice(start, start + step)
            chunk = matrix(inputs[rows], extra[rows] if self.extra is not None and extra is not None else None)
            sums[rows] = np.asarray(self.booster.predict(chunk, raw_score=True))
        return sums

    def checked(self) -> Self:
        """Return the model after validating its text; a DataError if that is not a LightGBM model of these columns."""
        if not self.text.startswith("tree\n"):  # LightGBM would also write to standard error
            raise DataError(f"the text must be a LightGBM model; it starts with {self.text[:20]!r}")
        try:
            width = self.booster.num_feature()
        except lightgbm.basic.LightGBMError as error:
            raise DataError(f"the text is not a LightGBM model: {error}") from error
        if width != self.width:
            last = "nothing else" if self.extra is None else f"the {self.extra}"
            raise DataError(
                f"the LightGBM model must take {self.n_numeric} numeric features, {self.n_categorical} categorical "
                f"features and {last}; it takes {width} columns"
            )
        return self


def sample_for_trees(dataset: Dataset, row_bytes: int) -> Dataset:
    """Sample the train and valid queries if all of them exceed the memory budget."""
    return sample_to_fit(dataset, ("train", "valid"), dataset.memory.held_bytes / row_bytes)


def sample_sentence(dataset: Dataset, row_bytes: int) -> str | None:
    """Describe the sample that trees are trained on; None if it is all impressions."""
    rows, all_rows = sample_for_trees(dataset, row_bytes).rows("train"), dataset.rows("train")
    if rows >= all_rows:
        return None
    return f"trees learned from a sample, {rows:,} of {all_rows:,} impressions, as many as fit in memory"


def matrix(inputs: Inputs, extra: NDArray[Any] | None = None) -> Floats:
    """Build LightGBM rows: numeric, categorical, extra.

    >>> inputs = Inputs(np.array([[0.5], [np.nan]], np.float32), np.array([[3], [0]]))
    >>> matrix(inputs, np.array([1, 2])).tolist()
    [[0.5, 3.0, 1.0], [nan, 0.0, 2.0]]
    """
    columns = (inputs.numeric, inputs.categorical, *(() if extra is None else (extra[:, None],)))
    return np.concatenate(columns, axis=1, dtype=np.float32, casting="unsafe")


def lightgbm_dataset(
    dataset: Dataset,
    split: str,
    featurizer: Featurizer,
    params: dict[str, Any],
    report: Report,
    *,
    extra: str | None,
    reference: lightgbm.Dataset | None = None,
    shown: bool = False,
) -> lightgbm.Dataset:
    """Load a split into a LightGBM dataset, with the clicks as labels.

    A large log is read twice, by row group; only LightGBM's bins, a byte or two for each value, stay in memory. If even
    these are too many, use `sample_for_trees`.

    Args:
        dataset, split, featurizer: the prepared log, its split, and the encoding fitted on the train split.
        params, report: parameters of LightGBM, and progress callback.
        extra: the name of the column after the features; None without one.
        reference: the dataset whose bins are reused.
        shown: drop the items beyond the last position, which were not shown.
    """
    groups, labelled = dataset.groups(split), drop_unseen(dataset) if shown else dataset
    clicks = [labelled.read(group, ["click"]).column("click").astype(np.float32) for group in groups]
    read, total = 0, sum(map(len, clicks))

    def done(rows: int) -> None:
        nonlocal read
        read += rows
        report(f"reading {split}", read, total)

    reader = _RowGroupReader(dataset, featurizer, extra, shown)
    first, n = len(featurizer.inputs), len(featurizer.categorical)
    rows: list[_RowGroupSequence] | Floats = [
        _RowGroupSequence(reader, group, len(click), done) for group, click in zip(groups, clicks, strict=True)
    ]
    if 4 * total * (first + n + 1) <= IN_MEMORY_BYTES:
        rows = np.concatenate([each[:] for each in rows])
    categorical = list(range(first, first + n))
    labels = np.concatenate(clicks)
    return lightgbm.Dataset(rows, labels, reference, categorical_feature=categorical, params=dict(params)).construct()


class _RowGroupReader:
    """Read row groups as LightGBM rows; the last one is cached."""

    def __init__(self, dataset: Dataset, featurizer: Featurizer, extra: str | None, shown: bool) -> None:
        self.dataset, self.featurizer, self.extra, self.shown = dataset, featurizer, extra, shown
        self.last: tuple[RowGroup, Floats] | None = None

    def matrix(self, group: RowGroup) -> Floats:
        if self.last is None or self.last[0] is not group:
            self.last = None  # never hold two
            columns = [*self.featurizer.names, *([] if self.extra is None else [self.extra])]
            block = self.dataset.read(group, [*columns, "position"] if self.shown else columns)
            if self.shown:
                inputs, block = self.featurizer.encode_shown(block, self.dataset.positions)
            else:
                inputs = self.featurizer.encode(block.items, block.offsets)
            self.last = group, matrix(inputs, None if self.extra is None else block.column(self.extra))
        return self.last[1]


class _RowGroupSequence(lightgbm.Sequence):
    """One row group as LightGBM reads it: single rows in order to choose the bins, then slices to fill them."""

    batch_size = 2**16

    def __init__(self, reader: _RowGroupReader, group: RowGroup, rows: int, done: Callable[[int], None]) -> None:
        self.reader, self.group, self.rows, self.done = reader, group, rows, done

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int | slice | list[int]) -> NDArray[Any]:
        found = self.reader.matrix(self.group)[index]
        if isinstance(index, slice):
            self.done(len(found))
            return found
        return found.astype(np.float64)  # the only dtype LightGBM samples in
