"""Batches of whole lists, streamed from a prepared log: the next row group is read while the current one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from urank import distributed
from urank.learning.features import Featurizer, Inputs
from urank.log.dataset import Block, Dataset, RowGroup
from urank.progress import prefetch

__all__ = ["Batch", "Gain", "ListBatches", "MemoryStream", "Stream", "train_and_valid"]

HELD_OUT_ROWS = 500_000
"""More impressions tell a better round from a worse one no more surely. Measured once in four million rows learned from
(`round_rows`), these are an eighth of them, the share that valid has of train by default."""

BATCH_ROWS = 2**16
"""Most rows of a batch, however long its lists are. Larger tensors than these are asked of the kernel and given back in
every step, which takes longer than it takes to fill them, and memory would grow with the lists."""


@dataclass(frozen=True, eq=False)
class ListBatches:
    """The lists of a row group as arrays.

    Attributes:
        inputs: what a model takes, a row for each item.
        position: `[rows]`, 1-based, where each item was shown.
        click: `[rows]`, 0 or 1.
        value: `[rows]`, what a click is worth.
        offsets: `[lists + 1]`.
        table: `[rows, K]`, P(click | item, k) by the click model that a ranker learns from; none for a click model.
        gain: `[rows]`, what each item is worth by itself, such as its click over its propensity; none unless asked for.
    """

    inputs: Inputs
    position: NDArray[np.int64]
    click: NDArray[np.float32]
    value: NDArray[np.float32]
    offsets: NDArray[np.int64]
    table: NDArray[np.float32] | None = None
    gain: NDArray[np.float32] | None = None

    def permuted(self, order: NDArray[np.int64]) -> ListBatches:
        """The same lists in another order."""
        lengths = np.diff(self.offsets)[order]
        offsets = np.append(0, np.cumsum(lengths))
        rows = np.repeat(self.offsets[order] - offsets[:-1], lengths) + np.arange(offsets[-1])
        table = self.table[rows] if self.table is not None else None
        gain = self.gain[rows] if self.gain is not None else None
        return ListBatches(
            self.inputs[rows], self.position[rows], self.click[rows], self.value[rows], offsets, table, gain
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """Some whole lists as tensors; fields as in `Lists`."""

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
        """How many lists."""
        return len(self.offsets) - 1

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        held = (getattr(self, each.name) for each in fields(self))
        return Batch(*(tensor.to(device, non_blocking=True) if tensor is not None else None for tensor in held))  # type: ignore[arg-type]


class Gain(Protocol):
    """What each item of a block is worth by itself."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the items that it looks at."""
        ...

    def __call__(self, block: Block) -> NDArray[np.float32]:
        """`[rows]`."""
        ...


class Stream:
    """The lists of one split, a row group at a time; small splits are kept in memory after the first pass."""

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
            dataset: the prepared log.
            split: the name of the split.
            featurizer: makes inputs of raw columns.
            batch_lists: lists in a batch.
            cache_bytes: how large a split may be to be kept; by the memory of the dataset when left out.
            table: gives P(click | item, k) `[rows, K]`.
            gain: gives what each item is worth by itself.
            shown: leave out the items beyond the last position, which nobody saw.
            most_rows: take only the first row groups, as many as reach so many rows.
        """
        self.dataset = dataset
        self.split = split
        self.featurizer = featurizer
        self.batch_lists = batch_lists
        self.groups = dataset.groups(split)
        self.rows = dataset.rows(split)
        if most_rows is not None and self.rows > most_rows:
            lists = sum(group.lists for group in self.groups)
            before = np.cumsum([0, *(group.lists for group in self.groups)])[:-1] * self.rows / lists
            self.groups = [group for group, rows in zip(self.groups, before, strict=True) if rows < most_rows]
            self.rows = round(self.rows * sum(group.lists for group in self.groups) / lists)
        self._shown = shown
        cache_bytes = dataset.memory.cache_bytes if cache_bytes is None else cache_bytes
        width = 4 * len(featurizer.numeric) + 8 * len(featurizer.categorical) + 24
        width += 4 * dataset.positions if table is not None else 0
        self._table = table
        self._gain = gain
        self._keep = self.rows * width <= cache_bytes
        self._kept: dict[int, ListBatches] = {}

    def lists(self, group: int) -> ListBatches:
        """One row group."""
        if group in self._kept:
            return self._kept[group]
        has_value = self.dataset.has("value")
        columns = [*self.featurizer.names, "position", "click", *(["value"] if has_value else [])]
        columns += self._gain.columns if self._gain is not None else []
        block = self.dataset.read(self.groups[group], columns)
        block = block.shown(self.dataset.positions) if self._shown else block
        inputs = self.featurizer.encode(block.items)
        lists = ListBatches(
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
        """The order of the row groups in an epoch."""
        return [int(group) for group in np.random.default_rng([seed, epoch]).permutation(len(self.groups))]

    def batches(
        self, groups: Sequence[int] | None = None, *, shuffle: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Batches of about `batch_lists` lists; of a team, each worker has its share of the lists and of a batch.

        Args:
            groups: numbers of row groups; all of them, in order, when left out.
            shuffle: seed and epoch that decide the order of the lists within a row group; as written when left out.
        """

        mine = self._shares(range(len(self.groups)) if groups is None else groups)

        def loaded() -> Iterator[ListBatches]:
            for group, part in mine:
                lists = self.lists(group)
                order = np.arange(self.groups[group].lists)
                if shuffle is not None:
                    order = np.random.default_rng([*shuffle, group]).permutation(order)
                whole = shuffle is None and len(part) == len(order)
                yield lists if whole else lists.permuted(order[part.start : part.stop])

        for lists in prefetch(loaded()):
            yield from self._cut(lists, -(-self.batch_lists // distributed.size()))

    def _shares(self, groups: Sequence[int]) -> list[tuple[int, range]]:
        """The row groups that this worker reads, and which of their lists it takes: neighbours may share a group."""
        bounds = np.append(0, np.cumsum([self.groups[group].lists for group in groups]))
        mine = distributed.share(int(bounds[-1]))
        shares = []
        for group, first, last in zip(groups, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            part = range(max(first, mine.start) - first, min(last, mine.stop) - first)
            if len(part):
                shares.append((group, part))
        return shares

    def _cut(self, lists: ListBatches, batch_lists: int) -> Iterator[Batch]:
        """Slices of a row group; they share its memory. Long lists make batches of fewer."""
        numeric, categorical = torch.from_numpy(lists.inputs.numeric), torch.from_numpy(lists.inputs.categorical)
        position, click = torch.from_numpy(lists.position), torch.from_numpy(lists.click)
        value, offsets = torch.from_numpy(lists.value), torch.from_numpy(lists.offsets)
        table = torch.from_numpy(lists.table) if lists.table is not None else None
        gain = torch.from_numpy(lists.gain) if lists.gain is not None else None
        n_lists, most_rows = len(lists.offsets) - 1, -(-BATCH_ROWS // distributed.size())
        last = 0
        while last < n_lists:
            first = last
            fits = int(np.searchsorted(lists.offsets, lists.offsets[first] + most_rows, side="right")) - 1
            last = min(first + batch_lists, max(fits, first + 1), n_lists)
            rows = slice(int(lists.offsets[first]), int(lists.offsets[last]))
            if rows.start == rows.stop:  # lists of which nothing was shown
                continue
            yield Batch(
                numeric[rows],
                categorical[rows],
                position[rows],
                click[rows],
                value[rows],
                offsets[first : last + 1] - offsets[first],
                table[rows] if table is not None else None,
                gain[rows] if gain is not None else None,
            )


def train_and_valid(
    dataset: Dataset,
    featurizer: Featurizer,
    batch_lists: int,
    *,
    table: Callable[[Inputs], NDArray[np.float32]] | None = None,
    gain: Gain | None = None,
    shown: bool = False,
) -> tuple[Stream, Stream]:
    """What a network learns from and what stops it; no step is taken on valid, so that its batches may be larger.

    Of a large valid split the first row groups do: its queries are in the order of their hashes, so they are a sample.
    """
    return (
        Stream(dataset, "train", featurizer, batch_lists=batch_lists, table=table, gain=gain, shown=shown),
        Stream(
            dataset,
            "valid",
            featurizer,
            batch_lists=8 * batch_lists,
            table=table,
            gain=gain,
            shown=shown,
            most_rows=HELD_OUT_ROWS,
        ),
    )


class MemoryStream(Stream):
    """Lists that are in memory already, in place of those of a prepared log."""

    def __init__(self, lists: ListBatches, *, batch_lists: int = 256) -> None:
        self.batch_lists = batch_lists
        self.rows = len(lists.position)
        self.groups = [RowGroup(Path(), 0, len(lists.offsets) - 1)]
        self._kept = {0: lists}
