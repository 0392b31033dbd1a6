"""The click models of an evaluation: fitted by query on the evaluation log itself, never on the queries they judge.

A policy that was optimised on a click table looks good by that table: it seeks out the table's errors. So an evaluation
has click models of its own. The queries are cut into folds, and each fold is judged by a model that was trained,
stopped and calibrated on the others; that is done several times with other cuts, and the tables are averaged, which
takes out much of the chance in a single cut. How far models of one cut disagree tells how far they can be trusted.
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

__all__ = ["CrossFittedModels", "CrossfitConfig", "fit_cross_fitted", "fold_of", "folds"]

SALT = 1_000_003
VALID_SHARE = 0.2


def folds(
    dataset: Dataset, splits: Sequence[str], *, count: int = 2, valid: float = VALID_SHARE, seed: int = 0
) -> list[DatasetView]:
    """The folds of some splits of a prepared log, by a stable hash of the query.

    The queries of a fold are its test split, those of the other folds its train and valid.

    Args:
        dataset: the prepared log.
        splits: those whose queries are meant, as `["test"]`.
        count: how many folds.
        valid: share of the other folds' queries that stops and calibrates a model which the rest teaches.
        seed: of the hash.
    """
    if count < 2:
        raise ConfigError(f"there must be at least 2 folds; got {count}")
    found = [{split: SplitView() for split in SPLITS} for _ in range(count)]
    for split in splits:
        for group in dataset.groups(split):
            block = dataset.read(group, ["position"])
            lengths = np.diff(block.offsets)
            home = fold_of(block, count, seed)
            aside = _hash(block, 2 * seed + 1).astype(np.float64) / 2.0**64 < valid
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
    """The fold `[lists]` that the query of each list belongs to."""
    return (_hash(block, 2 * seed) % np.uint64(count)).astype(np.int64)


def _hash(block: Block, salt: int) -> NDArray[np.uint64]:
    return stable_hash(pl.Series(block.lists["query_id"].combine_chunks()), seed=SALT + salt)


class CrossfitConfig(Settings):
    """How an evaluation makes its own click models."""

    cuts: int = Field(2, ge=1, le=100, description="times that the queries are cut in two halves, each time anew")
    clicks: ClickConfig = ClickConfig(families=("monotone", "pbm"))
    seed: int = Field(0, ge=0, description="of the cuts and of all random numbers")


@dataclass(frozen=True, eq=False)
class CrossFittedModels:
    """Fitted click models: for each cut, one for each half, trained on the other half."""

    models: list[list[ClickModel]]
    seed: int

    def tables(self, block: Block) -> NDArray[np.float64]:
        """P(click | item, k) of the items of a block `[cuts, 2, rows, K]`, by every model."""
        return np.array(
            [[np.exp(model.log_ctr(block.items)) for model in cut] for cut in self.models], dtype=np.float64
        )

    def own(self, block: Block, tables: NDArray[np.float64]) -> NDArray[np.float64]:
        """The table `[rows, K]` that judges each query: the mean over the cuts of the model that did not see it."""
        lengths = np.diff(block.offsets)
        rows = np.arange(tables.shape[2])
        chosen = []
        for number, cut in enumerate(tables):
            half = np.repeat(fold_of(block, 2, self.seed + number), lengths)
            chosen.append(cut[half, rows])
        return np.asarray(np.mean(chosen, axis=0))


def fit_cross_fitted(
    dataset: Dataset, splits: Sequence[str], config: CrossfitConfig, *, report: Report = silent
) -> CrossFittedModels:
    """Fit the click models of an evaluation.

    Args:
        dataset: the prepared log.
        splits: those to judge by.
        config: settings.
        report: told how far it is.
    """
    models: list[list[ClickModel]] = []
    for number in range(config.cuts):
        models.append([])
        for half, fold in enumerate(folds(dataset, splits, count=2, seed=config.seed + number)):
            name = f"judge {2 * number + half + 1} of {2 * config.cuts}"

            def told(step: str, done: float, total: float | None, note: str = "", /, name: str = name) -> None:
                report(f"{name}: {step}", done, total, note)

            seed = config.seed + config.clicks.seed + 2 * number + half
            clicks = config.clicks.model_copy(update={"seed": seed})
            models[-1].append(fit_clicks(fold, clicks, reference=False, report=told).model)
    return CrossFittedModels(models, config.seed)
