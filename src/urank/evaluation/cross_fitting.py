"""Cross-fitted click models of an evaluation: trained on the evaluation log, never on the queries they evaluate.

A policy that was optimised on a click table exploits the errors of that table and looks good by it. So an evaluation
fits separate click models. The queries are split into folds, and each fold is evaluated by a model that was trained,
stopped and calibrated on the others. This is repeated with other cuts, and the tables are averaged, which reduces the
variance of a single cut. The difference between the models of a cut measures their variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from urank.clicks.click_model import ClickModel
from urank.clicks.fitting import ClickConfig, fit_clicks
from urank.config import Settings
from urank.errors import ConfigError, TooFewError
from urank.log.dataset import Block, Dataset, DatasetView, SplitView
from urank.log.splits import SPLITS, stable_hash
from urank.progress import Report, silent

SALT = 1_000_003
VALID_SHARE = 0.2
"""Share of the other folds' queries for early stopping and calibration."""


def folds(dataset: Dataset, splits: Sequence[str], *, count: int = 2, seed: int = 0) -> list[DatasetView]:
    """Split some splits of a prepared log, as `["test"]`, into folds by a stable hash of the query.

    The queries of a fold are its test split, those of the other folds its train and valid.
    """
    if count < 2:
        raise ConfigError(f"there must be at least 2 folds; got {count}")
    found = [{split: SplitView() for split in SPLITS} for _ in range(count)]
    for split in splits:
        for group in dataset.groups(split):
            block = dataset.read(group, ["position"])
            lengths = np.diff(block.offsets)
            home = fold_of(block, count, seed)
            aside = _hash(block, 2 * seed + 1).astype(np.float64) / 2.0**64 < VALID_SHARE
            for number, parts in enumerate(found):
                own = home == number
                for name, kept in {"test": own, "valid": ~own & aside, "train": ~own & ~aside}.items():
                    if kept.any():
                        parts[name].groups.append(group.select(np.flatnonzero(kept)))
                        parts[name].rows += int(lengths[kept].sum())
    for number, parts in enumerate(found):
        empty = next((name for name in SPLITS if not parts[name].rows), None)
        if empty is not None:
            raise TooFewError(
                f"{dataset.folder} has too few queries in {', '.join(splits)} for {count} folds: "
                f"the {empty} part of fold {number + 1} is empty"
            )
    return [DatasetView(dataset, parts) for parts in found]


def fold_of(block: Block, count: int, seed: int) -> NDArray[np.int64]:
    """Return the fold `[lists]` of each list's query."""
    return (_hash(block, 2 * seed) % np.uint64(count)).astype(np.int64)


def _hash(block: Block, salt: int) -> NDArray[np.uint64]:
    return stable_hash(pl.Series(block.lists["query_id"].combine_chunks()), seed=SALT + salt)


class CrossfitConfig(Settings):
    """Settings of the click models of an evaluation."""

    cuts: int = Field(2, ge=1, le=100, description="number of random splits of the queries into halves")
    clicks: ClickConfig = ClickConfig(families=("monotone", "pbm"), within_list="off")
    seed: int = Field(0, ge=0, description="seed of the cuts and of all random numbers")


@dataclass(frozen=True, eq=False)
class CrossFittedModels:
    """Fitted click models: for each cut and half, one trained on the other half."""

    models: list[list[ClickModel]]
    seed: int

    def tables(self, block: Block) -> NDArray[np.float64]:
        """Predict P(click | item, k) of the items of a block by every model, `[cuts, 2, rows, K]`."""
        tables = [[np.exp(model.log_ctr(block.items, block.offsets)) for model in cut] for cut in self.models]
        return np.array(tables, dtype=np.float64)

    def own(self, block: Block, tables: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the cross-fitted table `[rows, K]`: the mean over cuts of the models not trained on the query."""
        lengths, rows = np.diff(block.offsets), np.arange(tables.shape[2])
        halves = [np.repeat(fold_of(block, 2, self.seed + number), lengths) for number in range(len(tables))]
        return np.asarray(np.mean([cut[half, rows] for cut, half in zip(tables, halves, strict=True)], axis=0))


def fit_cross_fitted(
    dataset: Dataset, splits: Sequence[str], config: CrossfitConfig, *, report: Report = silent
) -> CrossFittedModels:
    """Fit the click models of an evaluation on these splits."""
    models: list[list[ClickModel]] = []
    for number in range(config.cuts):
        models.append([])
        for half, fold in enumerate(folds(dataset, splits, count=2, seed=config.seed + number)):
            name = f"judge {2 * number + half + 1} of {2 * config.cuts}"

            def prefixed(step: str, done: float, total: float | None, note: str = "", /, name: str = name) -> None:
                report(f"{name}: {step}", done, total, note)

            seed = config.seed + config.clicks.seed + 2 * number + half
            clicks = config.clicks.model_copy(update={"seed": seed})
            models[-1].append(fit_clicks(fold, clicks, reference=False, report=prefixed).model)
    return CrossFittedModels(models, config.seed)
