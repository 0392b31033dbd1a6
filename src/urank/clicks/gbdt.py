"""Trees as a click model: LightGBM with the position as one more feature, under a monotone constraint.

A row of LightGBM is `[numeric, categorical, position]`. Numbers go in raw, LightGBM bins them itself and knows NaN as
missing; categories go in as the numbers of the `Featurizer`. The constraint holds for every tree, so the table never
rises with the position, whatever the item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightgbm
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from urank.errors import DataError
from urank.features import Featurizer, Inputs
from urank.log.dataset import Dataset
from urank.progress import Report, silent

if TYPE_CHECKING:
    import onnx

__all__ = ["GbdtClicks", "GbdtConfig", "fit_gbdt", "to_onnx"]

CHUNK_BYTES = 64 * 2**20
MAX_LEAVES = 512  # a tree may be as deep as it has leaves, and its JSON is read by recursion

Floats = NDArray[np.float32]


class GbdtConfig(BaseModel):
    """What decides how the trees grow."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    trees: int = Field(300, ge=1, le=100_000, description="trees at most; early stopping keeps fewer")
    learning_rate: float = Field(0.1, gt=0, le=1, description="weight of each tree")
    leaves: int = Field(31, ge=2, le=MAX_LEAVES, description="leaves of a tree at most")
    min_data_in_leaf: int = Field(50, ge=1, description="impressions that a leaf must hold")
    row_share: float = Field(0.8, gt=0, le=1, description="share of the impressions, drawn anew, that each tree sees")
    feature_share: float = Field(0.8, gt=0, le=1, description="share of the features that each tree may split on")
    l2: float = Field(0.0, ge=0, description="L2 regularisation of the values of the leaves")
    bins: int = Field(255, ge=2, le=65_535, description="bins of a numeric feature at most")
    early_stopping: int = Field(
        20, ge=1, description="stop after so many trees without a better log loss on the valid split"
    )
    threads: int = Field(0, ge=0, description="threads of LightGBM; 0 for as many as there are cores")


@dataclass(frozen=True)
class GbdtClicks:
    """A fitted model; two with the same text are the same model.

    Attributes:
        text: the trees in LightGBM's own text format.
        positions: K.
        n_numeric, n_categorical: how many features of each kind it takes.
    """

    text: str
    positions: int
    n_numeric: int
    n_categorical: int

    @classmethod
    def from_text(cls, text: str, positions: int, featurizer: Featurizer) -> GbdtClicks:
        """What `to_text` gave.

        Raises:
            DataError: when it is not the text of a LightGBM model, or of one with other features.
        """
        if not text.startswith("tree\n"):  # LightGBM would also say so on standard error
            raise DataError(f"the text must be a LightGBM model; it starts with {text[:20]!r}")
        model = cls(text, positions, len(featurizer.numeric), len(featurizer.categorical))
        try:
            width = model.booster.num_feature()
        except lightgbm.basic.LightGBMError as error:
            raise DataError(f"the text is not a LightGBM model: {error}") from error
        if width != model.n_numeric + model.n_categorical + 1:
            raise DataError(
                f"the LightGBM model must take {model.n_numeric} numeric features, {model.n_categorical} categorical "
                f"features and the position; it takes {width} columns"
            )
        return model

    @property
    def family(self) -> str:
        return "gbdt"

    def to_text(self) -> str:
        """The model in LightGBM's own text format."""
        return self.text

    @cached_property
    def booster(self) -> lightgbm.Booster:
        """The trees, ready to predict."""
        return lightgbm.Booster(model_str=self.text)

    def log_ctr(self, inputs: Inputs) -> Floats:
        """log P(click) `[rows, K]` of each item at each position."""
        K, width = self.positions, self.n_numeric + self.n_categorical + 1
        table = np.empty((len(inputs), K), dtype=np.float32)
        step = max(1, CHUNK_BYTES // (4 * width * K))
        for start in range(0, len(inputs), step):
            rows = slice(start, start + step)
            chunk = np.repeat(_matrix(inputs[rows], np.zeros(len(table[rows]))), K, axis=0)
            chunk[:, -1] = np.tile(np.arange(1, K + 1), len(table[rows]))
            raw = np.asarray(self.booster.predict(chunk, raw_score=True))
            table[rows] = -np.logaddexp(0, -raw).reshape(-1, K)
        return table


def to_onnx(model: GbdtClicks) -> onnx.ModelProto:
    """The model as a graph that takes `numeric` and `categorical` as the networks do and gives `log_ctr`."""
    from urank.clicks.tree_onnx import trees_to_onnx  # slow to load

    return trees_to_onnx(model.booster.dump_model(), model.positions, model.n_numeric, model.n_categorical)


def fit_gbdt(
    dataset: Dataset, featurizer: Featurizer, *, seed: int, config: GbdtConfig, report: Report = silent
) -> GbdtClicks:
    """Grow trees on the train split until the log loss on the valid split, if it has rows, no longer falls.

    The log is read twice, a row group at a time; only LightGBM's bins, a byte or two for each value, stay in memory.

    Args:
        dataset: the prepared log.
        featurizer: fitted on its train split.
        seed: the same seed gives the same text.
        config: how the trees grow.
        report: told of the rows read and of the trees grown.

    Raises:
        DataError: when the train split is empty.
    """
    if dataset.rows("train") == 0:
        raise DataError(f"the train split of {dataset.folder} must have impressions; it has none")
    params = _params(config, seed, len(featurizer.numeric), len(featurizer.categorical))
    train = _binned(dataset, "train", featurizer, params, report)
    callbacks: list[Callable[..., Any]] = [lambda env: report("growing trees", env.iteration + 1, env.end_iteration)]
    valid_sets = []
    if dataset.rows("valid"):
        valid_sets.append(_binned(dataset, "valid", featurizer, params, report, reference=train))
        callbacks.append(lightgbm.early_stopping(config.early_stopping, verbose=False))
    booster = lightgbm.train(
        params, train, num_boost_round=config.trees, valid_sets=valid_sets, valid_names=["valid"], callbacks=callbacks
    )
    return GbdtClicks.from_text(booster.model_to_string(), dataset.positions, featurizer)


def _params(config: GbdtConfig, seed: int, n_numeric: int, n_categorical: int) -> dict[str, Any]:
    return {
        "objective": "binary",
        "metric": "binary_logloss",
        "learning_rate": config.learning_rate,
        "num_leaves": config.leaves,
        "min_data_in_leaf": config.min_data_in_leaf,
        "bagging_fraction": config.row_share,
        "bagging_freq": 1,
        "feature_fraction": config.feature_share,
        "lambda_l2": config.l2,
        "max_bin": config.bins,
        "monotone_constraints": [0] * (n_numeric + n_categorical) + [-1],
        # The other methods bind less, but broke the constraint where values were missing (LightGBM 4.7: intermediate in
        # 0.7 %, advanced in 11 % of 2,540 random fits, basic in none).
        "monotone_constraints_method": "basic",
        "num_threads": config.threads,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }


class _Reader:
    """The rows of LightGBM of a split, a row group at a time; the one last read is kept."""

    def __init__(self, dataset: Dataset, featurizer: Featurizer) -> None:
        self.dataset, self.featurizer = dataset, featurizer
        self.last: tuple[tuple[Path, int, int], Floats] | None = None

    def matrix(self, group: tuple[Path, int, int]) -> Floats:
        if self.last is None or self.last[0] != group:
            self.last = None  # so that there are never two
            block = self.dataset.read(group, [*self.featurizer.names, "position"])
            self.last = group, _matrix(self.featurizer.encode(block.items), block.column("position"))
        return self.last[1]


class _Rows(lightgbm.Sequence):
    """One row group as LightGBM reads it: single rows, in order, to choose the bins; then slices to fill them."""

    batch_size = 2**16

    def __init__(self, reader: _Reader, group: tuple[Path, int, int], rows: int, done: Callable[[int], None]) -> None:
        self.reader, self.group, self.rows, self.done = reader, group, rows, done

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int | slice | list[int]) -> NDArray[Any]:
        found = self.reader.matrix(self.group)[index]
        if isinstance(index, slice):
            self.done(len(found))
            return found
        return found.astype(np.float64)  # the only type that LightGBM takes a sample in


def _binned(
    dataset: Dataset,
    split: str,
    featurizer: Featurizer,
    params: dict[str, Any],
    report: Report,
    reference: lightgbm.Dataset | None = None,
) -> lightgbm.Dataset:
    """A split as LightGBM holds it; the bins are those of the reference when there is one."""
    groups = dataset.groups(split)
    clicks = [dataset.read(group, ["click"]).column("click").astype(np.float32) for group in groups]
    read, total = 0, dataset.rows(split)

    def done(rows: int) -> None:
        nonlocal read
        read += rows
        report(f"reading {split}", read, total)

    reader = _Reader(dataset, featurizer)
    rows = [_Rows(reader, group, len(click), done) for group, click in zip(groups, clicks, strict=True)]
    first, n = len(featurizer.numeric), len(featurizer.categorical)
    data = lightgbm.Dataset(
        rows,
        np.concatenate(clicks),
        reference=reference,
        categorical_feature=list(range(first, first + n)),
        params=dict(params),
    )
    return data.construct()


def _matrix(inputs: Inputs, position: NDArray[Any]) -> Floats:
    """The rows of LightGBM: numeric, categorical, position."""
    columns = (inputs.numeric, inputs.categorical, position[:, None])
    return np.concatenate(columns, axis=1, dtype=np.float32, casting="unsafe")
