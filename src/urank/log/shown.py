"""A prepared log without the candidates that nobody saw, for whatever learns from clicks alone."""

from __future__ import annotations

from collections.abc import Sequence

from urank.log.dataset import Block, Dataset, Group
from urank.log.view import View

__all__ = ["has_unseen", "shown"]


def has_unseen(dataset: Dataset) -> bool:
    """Whether the log was prepared with `positions`, so that it may hold items further down than the last of them."""
    return any("shown" in counts for counts in dataset.description["counts"].values())


def shown(dataset: Dataset) -> Dataset:
    """The same log without the items beyond the last position; nothing is copied."""
    return _Shown(dataset) if has_unseen(dataset) else dataset


class _Shown(View):
    """A log seen through its first K positions; a list of which nothing was shown stays, without items."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, {})

    def rows(self, split: str) -> int:
        if type(self._whole) is Dataset:
            return int(self.description["counts"][split]["shown"])
        return sum(int(block.offsets[-1]) for block in self.blocks(split, []))  # a part of a log: not counted yet

    def read(self, group: Group, columns: Sequence[str]) -> Block:
        return self._whole.read(group, [*columns, "position"]).shown(self.positions)
