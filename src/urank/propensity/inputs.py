"""What the estimates that look at features share: a log that can teach them, and the features themselves."""

from __future__ import annotations

from urank.errors import DataError
from urank.features import Featurizer
from urank.log.dataset import Dataset

__all__ = ["fit_featurizer"]


def fit_featurizer(dataset: Dataset) -> Featurizer:
    """The featurizer of the train split.

    Raises:
        DataError: when there is nothing to learn from, to stop by, or to tell items apart by.
    """
    for split in ("train", "valid"):
        if dataset.rows(split) == 0:
            raise DataError(f"{dataset.folder} has no {split} queries; prepare it with other shares (--valid, --test)")
    if not dataset.features:
        raise DataError(f"{dataset.folder} has no features, so nothing tells its items apart")
    blocks = (block.items for block in dataset.blocks("train", dataset.features))
    return Featurizer.fit(blocks, dataset.numeric, dataset.categorical)
