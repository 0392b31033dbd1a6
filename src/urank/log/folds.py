"""Cross-validation folds of a prepared log, by a stable hash of the query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError, TooFewError
from urank.log.dataset import Block, Dataset, DatasetView, SplitView
from urank.log.splits import SPLITS, stable_hash

SALT = 1_000_003
VALID_SHARE = 0.2
"""Share of the other folds' queries for early stopping and calibration."""


def folds(
    dataset: Dataset, splits: Sequence[str], *, count: int = 2, seed: int = 0, test: bool = True
) -> list[DatasetView]:
    """Split some splits of a prepared log, as `["test"]`, into folds by a stable hash of the query.

    The queries of a fold are its test split, those of the other folds its train and valid. Without `test`, the queries
    of a fold are its valid split, and those of the other folds its train.
    """
    if count < 2:
        raise ConfigError(f"there must be at least 2 folds; got {count}")
    found = [{split: SplitView() for split in SPLITS if test or split != "test"} for _ in range(count)]
    for split in splits:
        for group in dataset.groups(split):
            block = dataset.read(group, ["position"])
            lengths = np.diff(block.offsets)
            home = fold_of(block, count, seed)
            aside = _hash(block, 2 * seed + 1).astype(np.float64) / 2.0**64 < VALID_SHARE
            for number, parts in enumerate(found):
                own = home == number
                split_in_three = {"test": own, "valid": ~own & aside, "train": ~own & ~aside}
                for name, kept in (split_in_three if test else {"valid": own, "train": ~own}).items():
                    if kept.any():
                        parts[name].groups.append(group.select(np.flatnonzero(kept)))
                        parts[name].rows += int(lengths[kept].sum())
    for number, parts in enumerate(found):
        empty = next((name for name, part in parts.items() if not part.rows), None)
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
