"""Judges: click networks that represent the items of an evaluation, never trained on the queries they judge.

A policy that was optimised on a click table exploits the errors of that table and looks good by it, so an evaluation
has networks of its own, which `urank.evaluation.refit` refits on the evaluated clicks. Two are trained with each model,
on halves of its train split, and saved with it. For a log that no judge was trained for, queries are cut into halves,
and each half is judged by a network trained on the other, with two cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from urank.clicks.click_model import ClickModel
from urank.clicks.fitting import ClickConfig, fit_clicks
from urank.config import Settings
from urank.errors import ConfigError, TooFewError
from urank.learning.features import Featurizer
from urank.learning.training import TrainingConfig
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
    """Settings of the judges of an evaluation."""

    clicks: ClickConfig = ClickConfig(
        families=("monotone",), hidden=(64, 32), calibration="none", training=TrainingConfig(share=0.5)
    )
    seed: int = Field(0, ge=0, description="seed of the cuts, of ties and of all random numbers")


CUTS = 2
"""Cuts of a log without judges; their difference measures what networks add to the error."""


def fit_judges(
    dataset: Dataset,
    splits: Sequence[str],
    config: CrossfitConfig,
    *,
    featurizer: Featurizer | None = None,
    cut: int = 0,
    report: Report = silent,
) -> list[ClickModel]:
    """Train a network for each half of the queries of some splits, on the other half.

    Args:
        dataset, splits: a prepared log, and its splits to train on.
        config: settings.
        featurizer: encoding of the items; by default that of the first half.
        cut: number of the cut into halves.
        report: Progress callback.
    """
    judges: list[ClickModel] = []
    for half, fold in enumerate(folds(dataset, splits, count=2, seed=config.seed + cut)):
        name = f"judge {2 * cut + half + 1}"

        def prefixed(step: str, done: float, total: float | None, note: str = "", /, name: str = name) -> None:
            report(f"{name}: {step}", done, total, note)

        clicks = config.clicks.model_copy(update={"seed": config.seed + config.clicks.seed + 2 * cut + half})
        judges.append(fit_clicks(fold, clicks, featurizer=featurizer, reference=False, report=prefixed).model)
        featurizer = judges[0].featurizer
    return judges
