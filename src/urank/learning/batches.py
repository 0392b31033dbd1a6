"""Batches of whole lists, streamed from a prepared log with the next row group prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from urank import distributed
from urank.learning.features import Featurizer, Inputs
from urank.log.dataset import Block, Dataset, RowGroup
from urank.progress import prefetch

HELD_OUT_ROWS = 500_000
"""Impressions the held-out loss is measured on, at most: more hardly improve the comparison of rounds. At one
measurement every four million training rows (`round_rows`), this is an eighth, the default share of valid to train."""

BATCH_ROWS = 2**16
"""Rows of a batch, at most, however long its lists are: larger tensors are allocated from and returned to the kernel at
every step, which takes longer than filling them, and memory would grow with the length of the lists."""


@dataclass(frozen=True, eq=False)
class ListArrays:
    """The lists of a row group as arrays.

    Attributes:
        position, click, value: `[rows]`, 1-based logged positions, clicks 0 or 1, and values of clicks.
        offsets: `[lists + 1]`.
        table: `[rows, K]`, P(click | item, k) of the click model that a ranker learns from; None for a click model.
        gain: `[rows]`, the gain of each item by itself, such as its click over its propensity; None unless requested.
    """

    inputs: Inputs
    position: NDArray[np.int64]
    click: NDArray[np.float32]
    value: NDArray[np.float32]
    offsets: NDArray[np.int64]
    table: NDArray[np.float32] | None = None
    gain: NDArray[np.float32] | None = None

    def _by_row(self) -> dict[str, Any]:
        arrays = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "offsets"}
        return {name: array for name, array in arrays.items() if array is not None}

    def permuted(self, order: NDArray[np.int64]) -> ListArrays:
        """Return the lists in another order."""
        lengths = np.diff(self.offsets)[order]
        offsets = np.append(0, np.cumsum(lengths))
        rows = np.repeat(self.offsets[order] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return ListArrays(**{name: array[rows] for name, array in self._by_row().items()}, offsets=offsets)

    def batches(self, batch_lists: int, batch_rows: int) -> Iterator[Batch]:
        """Slice the lists into batches that share their memory; long lists make batches of fewer lists."""
        by_row = self._by_row()
        inputs = by_row.pop("inputs")
        by_row |= {"numeric": inputs.numeric, "categorical": inputs.categorical}
        tensors = {name: torch.from_numpy(array) for name, array in by_row.items()}
        offsets, lists, last = torch.from_numpy(self.offsets), len(self.offsets) - 1, 0
        while last < lists:
            first = last
            fits = int(np.searchsorted(self.offsets, self.offsets[first] + batch_rows, side="right")) - 1
            last = min(first + batch_lists, max(fits, first + 1), lists)
            rows = slice(int(self.offsets[first]), int(self.offsets[last]))
            if rows.start < rows.stop:  # no item of a list may have been shown
                own = {name: tensor[rows] for name, tensor in tensors.items()}
                yield Batch(**own, offsets=offsets[first : last + 1] - offsets[first])


@dataclass(frozen=True, eq=False)
class Batch:
    """Whole lists as tensors; fields as in `ListArrays`."""

    numeric: Tensor
    categorical: Tensor
    position: Tensor
    click: Tensor
    value: Tensor
    offsets: Tensor
    table: Tensor | None = None
    gain: Tensor | None = None

    def __len__(self) -> int:
        return len(self.position)

    @property
    def lists(self) -> int:
        return len(self.offsets) - 1

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        return Batch(**{name: each.to(device, non_blocking=True) for name, each in tensors.items() if each is not None})


class Gain(Protocol):
    """The gain of each item by itself, `[rows]`, and the item columns it needs."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __call__(self, block: Block) -> NDArray[np.float32]: ...


class Stream:
    """Stream the lists of one split by row group; small splits stay in memory after the first pass."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        featurizer: Featurizer,
        *,
        batch_lists: int = 256,
        cache_bytes: int | None = None,
        table: Callable[[Inputs], NDArray[np.float32]] | None = None,
        gain: Gain | None = None,
        shown: bool = False,
        most_rows: int | None = None,
    ) -> None:
        """Open a split.

        Args:
            dataset, split, featurizer, batch_lists: the prepared log, its split, their encoding, and lists in a batch.
            cache_bytes: largest size of a split that is kept in memory; by default from the dataset's memory budget.
            table: computes P(click | item, k) `[rows, K]`.
            gain: computes the gain of each item by itself.
            shown: drop the items beyond the last position, which were not shown.
            most_rows: read only as many of the first row groups as reach this many rows.
        """
        self.dataset, self.split, self.featurizer, self.batch_lists = dataset, split, featurizer, batch_lists
        self.groups, self.rows = dataset.groups(split), dataset.rows(split)
        if most_rows is not None and self.rows > most_rows:
            lists = sum(group.lists for group in self.groups)
            before = np.cumsum([0, *(group.lists for group in self.groups)])[:-1] * self.rows / lists
            self.groups = [group for group, rows in zip(self.groups, before, strict=True) if rows < most_rows]
            self.rows = round(self.rows * sum(group.lists for group in self.groups) / lists)
        cache_bytes = dataset.memory.cache_bytes if cache_bytes is None else cache_bytes
        width = 4 * len(featurizer.numeric) + 8 * len(featurizer.categorical) + 24
        width += 4 * dataset.positions if table is not None else 0
        self._table, self._gain, self._shown = table, gain, shown
        self._keep = self.rows * width <= cache_bytes
        self._kept: dict[int, ListArrays] = {}

    def lists(self, group: int) -> ListArrays:
        """Read one row group."""
        if group in self._kept:
            return self._kept[group]
        has_value = self.dataset.has("value")
        columns = [*self.featurizer.names, "position", "click", *(["value"] if has_value else [])]
        columns += self._gain.columns if self._gain is not None else []
        block = self.dataset.read(self.groups[group], columns)
        block = block.shown(self.dataset.positions) if self._shown else block
        inputs = self.featurizer.encode(block.items)
        lists = ListArrays(
            inputs=inputs,
            position=block.column("position").astype(np.int64),
            click=block.column("click").astype(np.float32),
            value=block.column("value").copy() if has_value else np.ones(block.items.num_rows, dtype=np.float32),
            offsets=block.offsets,
            table=self._table(inputs) if self._table is not None else None,
            gain=self._gain(block) if self._gain is not None else None,
        )
        if self._keep:
            self._kept[group] = lists
        return lists

    def order(self, seed: int, epoch: int) -> list[int]:
        """Draw the order of the row groups in an epoch."""
        return [int(group) for group in np.random.default_rng([seed, epoch]).permutation(len(self.groups))]

    def batches(
        self, groups: Sequence[int] | None = None, *, shuffle: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Read batches of about `batch_lists` lists; each worker reads its share of the lists, in smaller batches.

        Args:
            groups: numbers of row groups; by default all, in order.
            shuffle: seed and epoch that determine the order of the lists within a row group; by default as written.
        """

        def loaded() -> Iterator[ListArrays]:
            for group, part in self._shares(range(len(self.groups)) if groups is None else groups):
                lists = self.lists(group)
                order = np.arange(self.groups[group].lists)
                if shuffle is not None:
                    order = np.random.default_rng([*shuffle, group]).permutation(order)
                whole = shuffle is None and len(part) == len(order)
                yield lists if whole else lists.permuted(order[part.start : part.stop])

        workers = distributed.size()
        for lists in prefetch(loaded()):
            yield from lists.batches(-(-self.batch_lists // workers), -(-BATCH_ROWS // workers))

    def _shares(self, groups: Sequence[int]) -> list[tuple[int, range]]:
        """Return the row groups this worker reads, and its range of lists in each: neighbours may share a group."""
        bounds = np.append(0, np.cumsum([self.groups[group].lists for group in groups]))
        mine = distributed.share(int(bounds[-1]))
        shares = [
            (group, range(max(first, mine.start) - first, min(last, mine.stop) - first))
            for group, (first, last) in zip(groups, pairwise(bounds.tolist()), strict=True)
        ]
        return [(group, part) for group, part in shares if len(part)]


def train_and_valid(
    dataset: Dataset,
    featurizer: Featurizer,
    batch_lists: int,
    *,
    table: Callable[[Inputs], NDArray[np.float32]] | None = None,
    gain: Gain | None = None,
    shown: bool = False,
) -> tuple[Stream, Stream]:
    """Open the streams for training and early stopping; valid takes no gradient steps, so its batches are larger.

    Of a large valid split only the first row groups are read: queries are ordered by hash, so they are a sample.
    """
    open_split = partial(Stream, dataset, featurizer=featurizer, table=table, gain=gain, shown=shown)
    train = open_split("train", batch_lists=batch_lists)
    return train, open_split("valid", batch_lists=8 * batch_lists, most_rows=HELD_OUT_ROWS)


class MemoryStream(Stream):
    """Stream lists that are already in memory."""

    def __init__(self, lists: ListArrays, *, batch_lists: int = 256) -> None:
        self.batch_lists = batch_lists
        self.rows = len(lists.position)
        self.groups = [RowGroup(Path(), 0, len(lists.offsets) - 1)]
        self._kept = {0: lists}
