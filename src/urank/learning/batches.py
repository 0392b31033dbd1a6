"""Batches of whole lists, streamed from a prepared log with the next row group prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
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
from urank.log.ragged import list_ids, offsets_of_runs
from urank.log.splits import hash_factors, mix_bits
from urank.progress import prefetch

HELD_OUT_ROWS = 500_000
"""Impressions the held-out loss is measured on, at most: more hardly improve the comparison of rounds. At one
measurement every four million training rows (`round_rows`), this is an eighth, the default share of valid to train."""

BATCH_ROWS = 2**16
"""Items of a batch, at most, however long its lists are: larger tensors are allocated from and returned to the kernel
at every step, which takes longer than filling them, and memory would grow with the length of the lists."""

REPEATED_ROWS = 8
"""Impressions of a batch, at most, as a multiple of its items: they are few bytes each, but a list may be repeated any
number of times."""

VALID_LISTS = 2048
"""Distinct lists of a batch without gradient steps."""

LEAST_REPEATED = 0.2
"""Share of repeated lists in the first row group below which repetition is not looked for in the others."""


@dataclass(frozen=True, eq=False)
class ListArrays:
    """The lists of a row group as arrays, with each distinct list of items stored once.

    Logs repeat the candidates of a query in many sessions, with other positions and clicks. Logged lists of the same
    items are adjacent and share the rows of `inputs`, so a network runs once for all of them:
    `network(inputs)[item]` has one row per impression.

    Attributes:
        inputs, value: `[items]`, features and value of a click, of the items of each distinct list.
        item: `[rows]`, the index of each impression in the items.
        position, click: `[rows]`, 1-based logged positions, and clicks 0 or 1.
        offsets: `[lists + 1]`, bounds of the logged lists over the rows.
        item_offsets: `[distinct + 1]`, bounds of the distinct lists over the items.
        sessions: `[distinct + 1]`, bounds of the distinct lists over the logged lists.
        table: `[items, K]`, P(click | item, k) of the click model that a ranker learns from; None for a click model.
        gain: `[rows]`, the gain of each item by itself, such as its click over its propensity; None unless requested.
    """

    inputs: Inputs
    value: NDArray[np.float32]
    item: NDArray[np.int64]
    position: NDArray[np.int64]
    click: NDArray[np.float32]
    offsets: NDArray[np.int64]
    item_offsets: NDArray[np.int64]
    sessions: NDArray[np.int64]
    table: NDArray[np.float32] | None = None
    gain: NDArray[np.float32] | None = None

    @classmethod
    def from_rows(cls, inputs: Inputs, *, offsets: NDArray[np.int64], **columns: Any) -> ListArrays:
        """Build lists from one row per impression; every logged list counts as distinct."""
        rows, lists = np.arange(len(inputs)), np.arange(len(offsets))
        return cls(inputs=inputs, item=rows, offsets=offsets, item_offsets=offsets, sessions=lists, **columns)

    def __len__(self) -> int:
        """Return the number of logged lists."""
        return len(self.offsets) - 1

    @property
    def distinct(self) -> int:
        return len(self.item_offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self.inputs.numeric, self.inputs.categorical, *vars(self).values()]
        return sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))

    def collapsed(self, *, by_value: bool = True) -> ListArrays:
        """Store lists with the same items, in any order, once; the order of the logged lists may change.

        Requires lists as built by `from_rows`, without a table. Items are the same if their inputs are, and with
        `by_value` also their values.
        """
        bits = _item_bits(self.inputs, self.value if by_value else None)
        leader, twin = _first_equal_lists(bits, self.offsets)
        order = np.argsort(leader, kind="stable")
        rows, offsets = _gather(self.offsets, order)
        sessions = offsets_of_runs(leader[order])
        first_rows, item_offsets = _gather(self.offsets, leader[order][sessions[:-1]])
        number = np.empty(len(self.item), dtype=np.int64)
        number[first_rows] = np.arange(len(first_rows))
        return ListArrays(
            inputs=self.inputs[first_rows],
            value=self.value[first_rows],
            item=number[twin[rows]],
            position=self.position[rows],
            click=self.click[rows],
            offsets=offsets,
            item_offsets=item_offsets,
            sessions=sessions,
            gain=self.gain[rows] if self.gain is not None else None,
        )

    def shown(self, positions: int) -> ListArrays:
        """Drop impressions beyond the last position, and items without any other."""
        keep = self.position <= positions
        if keep.all():
            return self
        used = np.zeros(len(self.inputs), dtype=bool)
        used[self.item[keep]] = True
        rows, items = (np.append(0, np.cumsum(each)) for each in (keep, used))
        return replace(
            self,
            inputs=self.inputs[used],
            value=self.value[used],
            item=items[self.item[keep]],
            position=self.position[keep],
            click=self.click[keep],
            offsets=rows[self.offsets],
            item_offsets=items[self.item_offsets],
            gain=self.gain[keep] if self.gain is not None else None,
        )

    def shuffled(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw an order of the logged lists in which those of the same items stay adjacent."""
        return _gather(self.sessions, rng.permutation(self.distinct))[0]

    def select(self, lists: NDArray[np.int64]) -> ListArrays:
        """Return some of the logged lists in this order; those of the same items must be adjacent in it."""
        owner = list_ids(self.sessions)[lists]
        sessions = offsets_of_runs(owner)
        chosen = owner[sessions[:-1]]
        items, item_offsets = _gather(self.item_offsets, chosen)
        rows, offsets = _gather(self.offsets, lists)
        moved = np.repeat(item_offsets[:-1] - self.item_offsets[chosen], np.diff(sessions))
        return ListArrays(
            inputs=self.inputs[items],
            value=self.value[items],
            item=self.item[rows] + np.repeat(moved, np.diff(offsets)),
            position=self.position[rows],
            click=self.click[rows],
            offsets=offsets,
            item_offsets=item_offsets,
            sessions=sessions,
            table=self.table[items] if self.table is not None else None,
            gain=self.gain[rows] if self.gain is not None else None,
        )

    def batches(self, batch_lists: int, batch_rows: int) -> Iterator[Batch]:
        """Slice the lists into batches that share their memory; long lists make batches of fewer lists.

        A batch has at most `batch_lists` distinct lists with `batch_rows` items and `REPEATED_ROWS` times as many
        impressions; a list that is repeated more often continues in the next batch.
        """
        owner, last = list_ids(self.sessions), 0
        while last < len(self):
            first, own = last, int(owner[last])
            fits = _last_within(self.item_offsets, own, batch_rows)
            whole = int(self.sessions[min(max(fits, own + 1), own + batch_lists, self.distinct)])
            last = min(whole, max(_last_within(self.offsets, first, REPEATED_ROWS * batch_rows), first + 1))
            if last < whole and owner[last] > own:
                last = int(self.sessions[owner[last]])  # the first list that does not fit starts the next batch
            if self.offsets[first] < self.offsets[last]:  # no item of a list may have been shown
                yield self.batch(first, last)

    def batch(self, first: int, last: int) -> Batch:
        """Return the logged lists from `first` up to `last`, excluded, as tensors that share their memory."""
        own, end = (int(each) for each in np.searchsorted(self.sessions, [first, last - 1], side="right") - [1, 0])
        rows, items = slice(*self.offsets[[first, last]]), slice(*self.item_offsets[[own, end]])
        arrays = {
            "numeric": self.inputs.numeric[items],
            "categorical": self.inputs.categorical[items],
            "value": self.value[items],
            "item": self.item[rows] - items.start,
            "position": self.position[rows],
            "click": self.click[rows],
            "offsets": self.offsets[first : last + 1] - rows.start,
            "item_offsets": self.item_offsets[own : end + 1] - items.start,
            "sessions": self.sessions[own : end + 1].clip(first, last) - first,
            "table": self.table[items] if self.table is not None else None,
            "gain": self.gain[rows] if self.gain is not None else None,
        }
        return Batch(**{name: torch.from_numpy(array) for name, array in arrays.items() if array is not None})


@dataclass(frozen=True, eq=False)
class Batch:
    """Whole lists as tensors; fields as in `ListArrays`.

    A loss runs the network on `numeric` and `categorical`, selects the outputs of `item`, and is a mean over the rows
    or over the logged lists. `weight` is the number of logged lists that each list represents; None for 1.
    """

    numeric: Tensor
    categorical: Tensor
    value: Tensor
    item: Tensor
    position: Tensor
    click: Tensor
    offsets: Tensor
    item_offsets: Tensor
    sessions: Tensor
    table: Tensor | None = None
    gain: Tensor | None = None
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.position)

    @property
    def lists(self) -> int:
        """Number of logged lists."""
        return len(self.offsets) - 1

    def once(self) -> Batch:
        """Return each distinct list once, weighted by its logged lists, for losses without positions and clicks."""
        items = len(self.numeric)
        return replace(
            self,
            item=torch.arange(items, device=self.item.device),
            position=self.position.new_ones(items),
            click=self.click.new_zeros(items),
            gain=None,
            offsets=self.item_offsets,
            sessions=torch.arange(len(self.item_offsets), device=self.item.device),
            weight=self.sessions.diff(),
        )

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        return Batch(**{name: each.to(device, non_blocking=True) for name, each in tensors.items() if each is not None})


def _last_within(offsets: NDArray[np.int64], first: int, most: int) -> int:
    """Return the last index whose offset exceeds that of `first` by at most `most`."""
    return int(np.searchsorted(offsets, offsets[first] + most, side="right")) - 1


def _gather(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the chosen lists' members, and the bounds of the lists among them.

    >>> [each.tolist() for each in _gather(np.array([0, 2, 3]), np.array([1, 0]))]
    [[2, 0, 1], [0, 1, 3]]
    """
    lengths = np.diff(offsets)[chosen]
    bounds = np.append(0, np.cumsum(lengths))
    return np.repeat(offsets[chosen] - bounds[:-1], lengths) + np.arange(bounds[-1]), bounds


def _item_bits(inputs: Inputs, value: NDArray[np.float32] | None) -> NDArray[np.uint32]:
    """Return the bits `[rows, F]` of items, equal if and only if their inputs are; NaN equals NaN."""
    numeric = inputs.numeric if value is None else np.column_stack([inputs.numeric, value])
    numbers = np.where(np.isnan(numeric), np.float32(np.nan), numeric)
    return np.concatenate([numbers.view(np.uint32), inputs.categorical.astype(np.uint32)], axis=1)


def _first_equal_lists(
    bits: NDArray[np.uint32], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the first list with the same items as each list, and for each row the row of the same item in it.

    Lists are compared by a hash, and those with equal hashes item by item, so a collision merges nothing.
    """
    hashes = np.zeros(len(bits), dtype=np.uint64)
    for column, factor in zip(bits.T, hash_factors(bits.shape[1]), strict=True):
        hashes += column * factor
    hashes = mix_bits(hashes)
    lists, lengths = list_ids(offsets), np.diff(offsets)
    sums = np.append(np.uint64(0), np.cumsum(mix_bits(hashes + np.uint64(1)), dtype=np.uint64))
    keys = sums[offsets[1:]] - sums[offsets[:-1]]  # the same for any order of the items
    _, first, same = np.unique(keys, return_index=True, return_inverse=True)
    leader = first[same]
    leader = np.where(lengths == lengths[leader], leader, np.arange(len(leader)))
    order = np.lexsort((hashes, lists))
    twin = np.empty_like(order)
    twin[order] = order[np.arange(len(order)) + (offsets[leader] - offsets[:-1])[lists]]
    others = np.flatnonzero(leader[lists] != lists)
    different = np.zeros(len(leader), dtype=bool)
    for start in range(0, len(others), BATCH_ROWS):
        rows = others[start : start + BATCH_ROWS]
        different[lists[rows[(bits[rows] != bits[twin[rows]]).any(axis=1)]]] = True
    separate = different[lists]
    twin[separate] = np.flatnonzero(separate)
    return np.where(different, np.arange(len(leader)), leader), twin


class Gain(Protocol):
    """The gain of each item by itself, `[rows]`, and the item columns it needs."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __call__(self, block: Block) -> NDArray[np.float32]: ...


class Stream:
    """Stream the lists of one split by row group; row groups stay in memory after the first pass while they fit."""

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
        collapse: bool = False,
        values: bool = True,
        most_rows: int | None = None,
        cut: bool = False,
    ) -> None:
        """Open a split.

        Args:
            dataset, split, featurizer, batch_lists: the prepared log, its split, their encoding, and lists in a batch.
            cache_bytes: largest size of the row groups in memory; by default from the dataset's memory budget.
            table: computes P(click | item, k) `[items, K]`.
            gain: computes the gain of each item by itself.
            shown: drop the items beyond the last position, which were not shown.
            collapse: store lists with the same items once, if enough of them are repeated; their order then changes.
            values: read the values of clicks; without, all are 1.
            most_rows: read only as many of the first row groups as reach this many rows.
            cut: also cut the first row group to that many rows; in a process group, only for streams of one process.
        """
        self.dataset, self.split, self.featurizer, self.batch_lists = dataset, split, featurizer, batch_lists
        self.groups, self.rows = dataset.groups(split), dataset.rows(split)
        if most_rows is not None and self.rows > most_rows:
            lists = sum(group.lists for group in self.groups)
            before = np.cumsum([0, *(group.lists for group in self.groups)])[:-1] * self.rows / lists
            self.groups = [group for group, rows in zip(self.groups, before, strict=True) if rows < most_rows]
            self.rows = round(self.rows * sum(group.lists for group in self.groups) / lists)
        self._table, self._gain, self._shown, self._collapse = table, gain, shown, collapse
        self._values = values and dataset.has("value")
        self._cut = most_rows if cut else None
        self._cache_bytes = dataset.memory.cache_bytes if cache_bytes is None else cache_bytes
        self._kept: dict[int, ListArrays] = {}

    @cached_property
    def repeats(self) -> float:
        """Logged lists per distinct list in the first row group; 1 if lists are not collapsed.

        The first row group is a sample, and the same one for every worker and after a crash.
        """
        if not self._collapse or not self.groups:
            return 1.0
        read = self._read(0)
        collapsed = read.collapsed(by_value=self._values)
        repeated = collapsed.distinct <= (1 - LEAST_REPEATED) * len(read)
        self._keep(0, self._completed(collapsed if repeated else read))
        return len(read) / collapsed.distinct if repeated else 1.0

    @property
    def distinct(self) -> int:
        """About the number of distinct lists."""
        return round(sum(group.lists for group in self.groups) / self.repeats)

    def lists(self, group: int) -> ListArrays:
        """Read one row group."""
        repeated = self.repeats > 1
        if group not in self._kept:
            lists = self._read(group)
            lists = lists.collapsed(by_value=self._values) if repeated else lists
            return self._keep(group, self._completed(lists))
        return self._kept[group]

    def _read(self, group: int) -> ListArrays:
        columns = [*self.featurizer.names, "position", "click", *(["value"] if self._values else [])]
        columns += self._gain.columns if self._gain is not None else []
        block = self.dataset.read(self.groups[group], columns)
        block = block if self._cut is None or not block.items.num_rows else next(block.parts(self._cut))
        ones = np.ones(block.items.num_rows, dtype=np.float32)
        return ListArrays.from_rows(
            self.featurizer.encode_raw(block.items),
            offsets=block.offsets,
            position=block.column("position").astype(np.int64),
            click=block.column("click").astype(np.float32),
            value=block.column("value").copy() if self._values else ones,
            gain=self._gain(block) if self._gain is not None else None,
        )

    def _completed(self, lists: ListArrays) -> ListArrays:
        """Add the within-list columns, drop what was not shown, and add the table."""
        numeric = self.featurizer.add_within(lists.inputs.numeric, lists.item_offsets)
        lists = replace(lists, inputs=Inputs(numeric, lists.inputs.categorical))
        lists = lists.shown(self.dataset.positions) if self._shown else lists
        return lists if self._table is None else replace(lists, table=self._table(lists.inputs))

    def _keep(self, group: int, lists: ListArrays) -> ListArrays:
        """Cache a row group if it fits."""
        if lists.nbytes <= self._cache_bytes:
            self._cache_bytes -= lists.nbytes
            self._kept[group] = lists
        return lists

    def order(self, seed: int, epoch: int) -> list[int]:
        """Draw the order of the row groups in an epoch."""
        return [int(group) for group in np.random.default_rng([seed, epoch]).permutation(len(self.groups))]

    def batches(
        self,
        groups: Sequence[int] | None = None,
        *,
        shuffle: tuple[int, int] | None = None,
        batch_lists: int | None = None,
    ) -> Iterator[Batch]:
        """Read batches of distinct lists; each worker reads its share of the logged lists, in smaller batches.

        Args:
            groups: numbers of row groups; by default all, in order.
            shuffle: seed and epoch that determine the order of the lists within a row group; by default as stored.
            batch_lists: distinct lists of a batch; by default those of the stream.
        """

        def loaded() -> Iterator[ListArrays]:
            for group, part in self._shares(range(len(self.groups)) if groups is None else groups):
                lists = self.lists(group)
                whole = shuffle is None and len(part) == len(lists)
                order = np.arange(len(lists))
                if shuffle is not None:
                    order = lists.shuffled(np.random.default_rng([*shuffle, group]))
                yield lists if whole else lists.select(order[part.start : part.stop])

        workers = distributed.size()
        most = -(-(self.batch_lists if batch_lists is None else batch_lists) // workers)
        for lists in prefetch(loaded()):
            yield from lists.batches(most, -(-BATCH_ROWS // workers))

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
    *,
    table: Callable[[Inputs], NDArray[np.float32]] | None = None,
    gain: Gain | None = None,
    shown: bool = False,
    values: bool = True,
) -> tuple[Stream, Stream]:
    """Open the streams for training and early stopping, with repeated lists collapsed.

    Of a large valid split only the first row groups are read: queries are ordered by hash, so they are a sample. It
    takes no gradient steps, so its batches are large.
    """
    open_split = partial(Stream, dataset, featurizer=featurizer, table=table, gain=gain, shown=shown, values=values)
    train = open_split("train", collapse=True)
    return train, open_split("valid", batch_lists=VALID_LISTS, most_rows=HELD_OUT_ROWS, collapse=True)


class MemoryStream(Stream):
    """Stream lists that are already in memory."""

    def __init__(self, lists: ListArrays, *, batch_lists: int = 256) -> None:
        self.batch_lists = batch_lists
        self.rows = len(lists.position)
        self.groups = [RowGroup(Path(), 0, len(lists))]
        self._collapse = False
        self._kept = {0: lists}
