"""Examination from randomised lists: the clicks of the same items at position k and at position 1.

Where chance decides at which position an item stands, the items at k are, on average, those at 1, and the ratio of the
two click rates is the ratio of examination (Joachims, Swaminathan and Schnabel 2017). Two designs are known here:

- swaps: the item ranked first changes places with the one at k, k uniform among the n items of the list. The log tells
  the rank before it (`ranked_position`), and only the items ranked first are compared: each stands at each position
  with the same chance, 1/n. That holds for shuffled lists too, whose ranks before the shuffle are logged.
- shuffles without such ranks: any item stands anywhere with the same chance, and all are compared.

Lists differ in length: position k is compared with position 1 of those lists alone that show something at k.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.dataset import Block, Dataset
from urank.log.interventions import ranges
from urank.log.lists import list_ids
from urank.propensity.model import Curve

__all__ = ["fit_randomised", "list_counts", "relative_rates"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def list_counts(
    position: Ints, click: NDArray[Any], offsets: Ints, K: int, *, where: NDArray[np.bool_] | None = None
) -> Ints:
    """What each list tells of each position `[lists, 4, K]`.

    The four are shows and clicks at k, then shows and clicks at 1 if the list shows anything at k: numerators and
    denominators of the two rates that are compared.

    Args:
        position: `[rows]`, from 1 to K, no two alike in a list.
        click: `[rows]`, 0 or 1.
        offsets: `[lists + 1]`.
        K: number of positions.
        where: `[rows]`, the items that are compared; all when left out. The others only tell what a list shows.

    >>> list_counts(np.array([1, 3]), np.array([1, 0]), np.array([0, 2]), 3)[0].tolist()
    [[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 1]]
    """
    lists = list_ids(offsets)
    counts = np.zeros((len(offsets) - 1, 4, K), dtype=np.int64)
    shown = np.zeros((len(offsets) - 1, K), dtype=np.int64)
    shown[lists, position - 1] = 1
    counts[lists, 0, position - 1] = 1 if where is None else where
    counts[lists, 1, position - 1] = click.astype(np.int64) * counts[lists, 0, position - 1]
    counts[:, 2] = counts[:, 0, :1] * shown
    counts[:, 3] = counts[:, 1, :1] * shown
    return counts


def relative_rates(counts: NDArray[Any]) -> tuple[Floats, Floats]:
    """p(k) / p(1) `[K]` and its standard error `[K]`, from the counts `[Q, 4, K]` of queries.

        R_k = (C_k / S_k) / (C_1 / S_1),      Var R_k ≈ Q / (Q − 1) Σ_q ψ_qk²
        ψ_qk = [(c_qk − r_k s_qk) / S_k − R_k (c_q1 − r_1 s_q1) / S_1] / r_1

    with C, S the sums of clicks c and shows s over queries, and r the rates. ψ is the ratio linearised (the delta
    method); queries are the sample, so what lists of one query have in common widens the error. A position without
    any click has R_k = 0 and the error it would have if there were one click.

    Args:
        counts: as `list_counts` has them, summed over the lists of each query.

    >>> one_query = np.array([[[10, 10], [4, 1], [10, 10], [4, 4]]])
    >>> relative_rates(np.repeat(one_query, 2, axis=0))  # no query differs from the other
    (array([1.  , 0.25]), array([0., 0.]))
    """
    each = counts.astype(np.float64)
    shows, clicks, top_shows, top_clicks = each.sum(axis=0)
    rate, top_rate = clicks / shows, top_clicks / top_shows
    ratio = rate / top_rate
    influence = (each[:, 1] - rate * each[:, 0]) / shows - ratio * (each[:, 3] - top_rate * each[:, 2]) / top_shows
    Q = len(each)
    error = np.sqrt((influence**2).sum(axis=0) * Q / max(Q - 1, 1)) / top_rate
    return ratio, np.where(clicks > 0, error, 1 / shows / top_rate)


def fit_randomised(dataset: Dataset, split: str = "train", *, policies: Sequence[str] | None = None) -> Curve:
    """One curve from the randomised lists of a log, with standard errors.

    Args:
        dataset: a prepared log. With `ranked_position` the items ranked first are compared, else all items.
        split: the part of it that is looked at; a curve has too few parameters to need a held-out part.
        policies: the values of `policy` whose lists were randomised. When left out: with `ranked_position`, those
            policies in which some item was moved, since an item that stands first in a list that nobody randomised
            may be of another kind; without it there must be one policy only, and its order must have been random,
            which nothing in a log can prove.

    Raises:
        DataError: when nothing was randomised, or a position cannot be compared with position 1.
    """
    ranked = dataset.has("ranked_position")
    wanted = _policies(dataset, split, policies)
    hashes, sums = [], []
    for block in _read(dataset, split, ["position", "click"]):
        rows, kept = _kept(block, wanted)
        position, click = block.column("position").astype(np.int64)[rows], block.column("click")[rows]
        where = (block.column("ranked_position") == 1)[rows] if ranked else None
        offsets = np.append(0, np.cumsum(np.diff(block.offsets)[kept]))
        counts = list_counts(position, click, offsets, dataset.positions, where=where)
        queries, counts = _by_query(block.query_hash[kept], counts)
        hashes.append(queries)
        sums.append(counts)
    if not sum(len(queries) for queries in hashes):
        raise DataError(f"the {split} split of {dataset.folder} must have randomised lists; it has none")
    _, counts = _by_query(np.concatenate(hashes), np.concatenate(sums))  # a query may go on in the next block
    _check_comparable(counts.sum(axis=0), dataset, split)
    values, errors = relative_rates(counts)
    return Curve("randomised", tuple(values.tolist()), tuple(errors.tolist()))


def _by_query(hashes: NDArray[np.uint64], counts: Ints) -> tuple[NDArray[np.uint64], Ints]:
    """Sums of the rows that have the same hash."""
    if len(hashes) == 0:
        return hashes, counts
    order = np.argsort(hashes, kind="stable")
    queries, starts = np.unique(hashes[order], return_index=True)
    return queries, np.asarray(np.add.reduceat(counts[order], starts, axis=0))


def _read(dataset: Dataset, split: str, columns: list[str]) -> Iterator[Block]:
    optional = [name for name in ("ranked_position", "policy") if dataset.has(name)]
    return dataset.blocks(split, [*columns, *optional])


def _kept(block: Block, policies: Collection[str] | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The rows and the lists of these policies; a list has the policy of its first item."""
    if policies is None:
        kept = np.ones(len(block.offsets) - 1, dtype=np.bool_)
    else:
        of_list = _policy(block).gather(block.offsets[:-1])
        kept = of_list.is_in(list(policies)).fill_null(False).to_numpy().astype(np.bool_)
    return np.repeat(kept, np.diff(block.offsets)), kept


def _policy(block: Block) -> pl.Series:
    return pl.Series(block.items["policy"].combine_chunks()).cast(pl.String)


def _policies(dataset: Dataset, split: str, policies: Sequence[str] | None) -> list[str] | None:
    """The policies to look at; all lists when there is no such column."""
    ranked = dataset.has("ranked_position")
    if not dataset.has("policy"):
        if policies:
            raise ConfigError(f"policies must name values of the role policy; {dataset.folder} has no such column")
        if ranked and not any(_moved(block).any() for block in _read(dataset, split, ["position"])):
            raise _nothing_moved(dataset, split)
        return None
    known: set[str] = set()
    moved: set[str] = set()
    for block in _read(dataset, split, ["position"]):
        policy = _policy(block)
        known.update(policy.drop_nulls().unique())
        if ranked:
            moved.update(policy.filter(pl.Series(_moved(block))).drop_nulls().unique())
    for name in policies or ():
        if name not in known:
            raise ConfigError(
                f"policies must name policies of {dataset.folder}, {', '.join(sorted(known)[:10])}; got '{name}'"
            )
    if ranked and not (moved & set(policies) if policies else moved):
        raise _nothing_moved(dataset, split)
    if policies:
        return list(policies)
    if not ranked and len(known) > 1:
        raise DataError(
            f"{dataset.folder} has no ranked_position, so the policies whose order was random must be named; "
            f"it has {', '.join(sorted(known)[:10])}"
        )
    return sorted(moved if ranked else known)


def _moved(block: Block) -> NDArray[np.bool_]:
    return np.asarray(block.column("ranked_position") != block.column("position"))


def _nothing_moved(dataset: Dataset, split: str) -> DataError:
    return DataError(
        f"ranked_position must differ from position where a list was randomised; it never does in the {split} split of "
        f"{dataset.folder}"
    )


def _check_comparable(sums: Ints, dataset: Dataset, split: str) -> None:
    """Refuse sums `[4, K]` in which a position was not shown, or has no clicks at position 1 to compare with."""
    for row, words in ((0, "shows"), (3, "clicks at position 1 to compare with")):
        absent = [int(k) + 1 for k in np.flatnonzero(sums[row] == 0)]
        if absent:
            raise DataError(
                f"every position needs {words} in the randomised lists of the {split} split of {dataset.folder}; "
                f"there are none for {ranges(absent)}"
            )
