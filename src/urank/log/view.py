"""A prepared log of which only some lists are seen; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from urank.log.dataset import Block, Dataset, Group

__all__ = ["Part", "View", "some_lists"]


@dataclass
class Part:
    """What is seen of a split: row groups, or some lists of them, and how many impressions these have."""

    groups: list[Group] = field(default_factory=list)
    rows: int = 0


class View(Dataset):
    """Everything that learns from a `Dataset` learns from a view of it."""

    def __init__(self, dataset: Dataset, parts: Mapping[str, Part]) -> None:
        """See a log through parts of it; splits that are not named are seen whole."""
        # Not read again from its folder: what the dataset was told not to know, the view does not know either.
        vars(self).update(vars(dataset))
        self._whole = dataset
        self._parts = dict(parts)

    def groups(self, split: str) -> list[Group]:
        return self._parts[split].groups if split in self._parts else self._whole.groups(split)

    def rows(self, split: str) -> int:
        return self._parts[split].rows if split in self._parts else self._whole.rows(split)

    def read(self, group: Group, columns: Sequence[str]) -> Block:
        return self._whole.read(group, columns)


def some_lists(group: Group, places: NDArray[np.int64]) -> Group:
    """Some of the lists that a group means, by their places among these, rising."""
    return Group(group.path, group.number, len(places), places if group.keep is None else group.keep[places])
