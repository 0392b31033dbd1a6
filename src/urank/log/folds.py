"""Cross-fitting: the queries of a prepared log in folds, each held out once from what the others teach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError, TooFewError
from urank.log.dataset import Block, Dataset
from urank.log.split import SPLITS, stable_hash
from urank.log.view import Part, View, some_lists

__all__ = ["fold_of", "folds"]

SALT = 1_000_003
VALID_SHARE = 0.2


def folds(
    dataset: Dataset, splits: Sequence[str], *, count: int = 2, valid: float = VALID_SHARE, seed: int = 0
) -> list[View]:
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
    found = [{split: Part() for split in SPLITS} for _ in range(count)]
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
                        parts[name].groups.append(some_lists(group, np.flatnonzero(kept)))
                        parts[name].rows += int(lengths[kept].sum())
    for number, parts in enumerate(found):
        empty = next((name for name in SPLITS if not parts[name].rows), None)
        if empty is not None:
            raise TooFewError(
                f"{dataset.folder} has too few queries in {', '.join(splits)} for {count} folds: "
                f"the {empty} part of fold {number + 1} is empty"
            )
    return [View(dataset, parts) for parts in found]


def fold_of(block: Block, count: int, seed: int) -> NDArray[np.int64]:
    """The fold `[lists]` that the query of each list belongs to."""
    return (_hash(block, 2 * seed) % np.uint64(count)).astype(np.int64)


def _hash(block: Block, salt: int) -> NDArray[np.uint64]:
    return stable_hash(pl.Series(block.lists["query_id"].combine_chunks()), seed=SALT + salt)
