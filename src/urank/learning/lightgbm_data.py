"""What all trees of urank share: how they grow, the rows that LightGBM reads, and a model as text.

A row of LightGBM is `[numeric, categorical, extra]`. Numbers go in raw, LightGBM bins them itself and knows NaN as
missing; categories go in as the numbers of the `Featurizer`. The extra is one more column of the log that the model
looks at, such as the position or the value, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import lightgbm
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from urank.errors import DataError
from urank.learning.features import Featurizer, Inputs
from urank.log.dataset import Dataset, RowGroup, sample_to_fit
from urank.progress import Report

__all__ = [
    "CHUNK_BYTES",
    "Floats",
    "GrowthConfig",
    "TreeModel",
    "lightgbm_dataset",
    "matrix",
    "sample_for_trees",
    "sample_sentence",
]

CHUNK_BYTES = 64 * 2**20
IN_MEMORY_BYTES = 256 * 2**20
"""Splits up to this size are given to LightGBM whole: row by row, choosing the bins takes longer than many trees."""

ROW_BYTES = 80
"""Besides its bins, an impression has a score (8 bytes), two derivatives, a label (4 each), copies of these on their
way to LightGBM and back, and its place in a leaf."""

MAX_LEAVES = 512  # a tree may be as deep as it has leaves, and its JSON is read by recursion

Floats = NDArray[np.float32]


class GrowthConfig(BaseModel):
    """What decides how trees grow."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    trees: int = Field(300, ge=1, le=100_000, description="trees at most; early stopping keeps fewer")
    learning_rate: float = Field(0.1, gt=0, le=1, description="weight of each tree")
    leaves: int = Field(31, ge=2, le=MAX_LEAVES, description="leaves of a tree at most")
    min_data_in_leaf: int = Field(50, ge=1, description="impressions that a leaf must hold")
    row_share: float = Field(1.0, gt=0, le=1, description="share of the impressions, drawn anew, that each tree sees")
    feature_share: float = Field(0.8, gt=0, le=1, description="share of the features that each tree may split on")
    l2: float = Field(0.0, ge=0, description="L2 regularisation of the values of the leaves")
    bins: int = Field(255, ge=2, le=65_535, description="bins of a numeric feature at most")
    early_stopping: int = Field(20, ge=1, description="stop after so many trees without a better valid split")
    threads: int = Field(0, ge=0, description="threads of LightGBM; 0 for as many as there are cores")

    def row_bytes(self, features: int, positions: int = 0) -> int:
        """What growing takes of memory for an impression: its bins, scores and derivatives, and for a ranker what it
        would earn at each position."""
        return features * (1 if self.bins <= 255 else 2) + 4 * positions + ROW_BYTES

    def params(self, seed: int) -> dict[str, Any]:
        """The same for LightGBM; the same seed gives the same trees."""
        return {
            "learning_rate": self.learning_rate,
            "num_leaves": self.leaves,
            "min_data_in_leaf": self.min_data_in_leaf,
            "bagging_fraction": self.row_share,
            "bagging_freq": 1,
            "feature_fraction": self.feature_share,
            "lambda_l2": self.l2,
            "max_bin": self.bins,
            "num_threads": self.threads,
            "seed": seed,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        }


@dataclass(frozen=True)
class TreeModel:
    """Fitted trees; two with the same text are the same model.

    Attributes:
        text: the trees in LightGBM's own text format.
        n_numeric, n_categorical: how many features of each kind they take.
        extra: the name of the column after the features, if there is one.
    """

    text: str
    n_numeric: int
    n_categorical: int
    extra: str | None

    def to_text(self) -> str:
        """The model in LightGBM's own text format."""
        return self.text

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.n_numeric + self.n_categorical + (self.extra is not None)

    @cached_property
    def booster(self) -> lightgbm.Booster:
        """The trees, ready to predict."""
        return lightgbm.Booster(model_str=self.text)

    def predict(self, inputs: Inputs, extra: NDArray[Any] | None = None) -> Floats:
        """The raw sum of the trees `[rows]`, a chunk of rows at a time; `extra` counts only if they take it."""
        sums = np.empty(len(inputs), dtype=np.float32)
        step = max(1, CHUNK_BYTES // (4 * self.width))
        for start in range(0, len(inputs), step):
            rows = slice(start, start + step)
            chunk = matrix(inputs[rows], extra[rows] if self.extra is not None and extra is not None else None)
            sums[rows] = np.asarray(self.booster.predict(chunk, raw_score=True))
        return sums

    def checked(self) -> Self:
        """The model itself.

        Raises:
            DataError: when the text is not that of a LightGBM model, or of one with other columns.
        """
        if not self.text.startswith("tree\n"):  # LightGBM would also say so on standard error
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
    """The log, or a sample of its train and valid queries when trees cannot hold all of them in its memory."""
    return sample_to_fit(dataset, ("train", "valid"), dataset.memory.held_bytes / row_bytes)


def sample_sentence(dataset: Dataset, row_bytes: int) -> str | None:
    """What to tell of trees that learn from a sample only; nothing when they learn from all."""
    rows, all_rows = sample_for_trees(dataset, row_bytes).rows("train"), dataset.rows("train")
    if rows >= all_rows:
        return None
    return f"trees learned from a sample, {rows:,} of {all_rows:,} impressions, which is what the memory has room for"


def matrix(inputs: Inputs, extra: NDArray[Any] | None = None) -> Floats:
    """The rows of LightGBM: numeric, categorical, extra.

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
) -> lightgbm.Dataset:
    """A split as LightGBM holds it, with the clicks as labels.

    A large log is read twice, a row group at a time; only LightGBM's bins, a byte or two for each value, stay in
    memory. Where even these are too many, `what_trees_hold` gives a sample.

    Args:
        dataset: the prepared log.
        split: the name of the split.
        featurizer: fitted on the train split.
        params: of LightGBM.
        report: told of the rows read.
        extra: the name of the column after the features, if there is one.
        reference: the data whose bins are used again.
    """
    groups = dataset.groups(split)
    clicks = [dataset.read(group, ["click"]).column("click").astype(np.float32) for group in groups]
    read, total = 0, dataset.rows(split)

    def done(rows: int) -> None:
        nonlocal read
        read += rows
        report(f"reading {split}", read, total)

    reader = _Reader(dataset, featurizer, extra)
    first, n = len(featurizer.numeric), len(featurizer.categorical)
    rows: list[_Rows] | Floats = [_Rows(reader, g, len(click), done) for g, click in zip(groups, clicks, strict=True)]
    if 4 * total * (first + n + 1) <= IN_MEMORY_BYTES:
        rows = np.concatenate([each[:] for each in rows])
    data = lightgbm.Dataset(
        rows,
        np.concatenate(clicks),
        reference=reference,
        categorical_feature=list(range(first, first + n)),
        params=dict(params),
    )
    return data.construct()


class _Reader:
    """The rows of LightGBM of a split, a row group at a time; the one last read is kept."""

    def __init__(self, dataset: Dataset, featurizer: Featurizer, extra: str | None) -> None:
        self.dataset, self.featurizer, self.extra = dataset, featurizer, extra
        self.last: tuple[RowGroup, Floats] | None = None

    def matrix(self, group: RowGroup) -> Floats:
        if self.last is None or self.last[0] is not group:
            self.last = None  # so that there are never two
            columns = [*self.featurizer.names, *([] if self.extra is None else [self.extra])]
            block = self.dataset.read(group, columns)
            extra = None if self.extra is None else block.column(self.extra)
            self.last = group, matrix(self.featurizer.encode(block.items), extra)
        return self.last[1]


class _Rows(lightgbm.Sequence):
    """One row group as LightGBM reads it: single rows, in order, to choose the bins; then slices to fill them."""

    batch_size = 2**16

    def __init__(self, reader: _Reader, group: RowGroup, rows: int, done: Callable[[int], None]) -> None:
        self.reader, self.group, self.rows, self.done = reader, group, rows, done

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int | slice | list[int]) -> NDArray[Any]:
        found = self.reader.matrix(self.group)[index]
        if isinstance(index, slice):
            self.done(len(found))
            return found
        return found.astype(np.float64)  # the only type that LightGBM takes a sample in
