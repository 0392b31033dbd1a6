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
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.dataset import Block, Dataset
from urank.log.interventions import ranges
from urank.log.lists import list_ids
from urank.log.shown import shown
from urank.propensity.model import Curve

__all__ = [
    "curve_of_queries",
    "fit_randomised",
    "group_rates",
    "joined",
    "list_counts",
    "randomised_lists",
    "relative_rates",
    "summed",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = NDArray[np.int32]


def list_counts(
    position: Ints,
    click: NDArray[Any],
    offsets: Ints,
    K: int,
    *,
    where: NDArray[np.bool_] | None = None,
    part: Ints | None = None,
) -> Counts:
    """What each list, or each part of one, tells of each position `[parts, 4, K]`.

    The four are shows and clicks at k, then shows and clicks at 1 if the list shows anything at k: numerators and
    denominators of the two rates that are compared.

    Args:
        position: `[rows]`, from 1 to K, no two alike in a list.
        click: `[rows]`, 0 or 1.
        offsets: `[lists + 1]`.
        K: number of positions.
        where: `[rows]`, the items that are compared; all when left out. The others only tell what a list shows.
        part: `[rows]`, numbers from 0 up, none of them shared by two lists: which items are counted together, such as
            those of one category. The items of a list when left out.

    >>> list_counts(np.array([1, 3]), np.array([1, 0]), np.array([0, 2]), 3)[0].tolist()
    [[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 1]]
    """
    lists, place = list_ids(offsets), position - 1
    shown = np.zeros((len(offsets) - 1, K), dtype=np.int32)
    shown[lists, place] = 1
    if part is None:
        part, list_of = lists, np.arange(len(offsets) - 1)
    else:
        list_of = np.zeros(part.max(initial=-1) + 1, dtype=np.int64)
        list_of[part] = lists
    counts = np.zeros((len(list_of), 4, K), dtype=np.int32)
    counts[part, 0, place] = 1 if where is None else where
    counts[part, 1, place] = click.astype(np.int32) * counts[part, 0, place]
    counts[:, 2] = counts[:, 0, :1] * shown[list_of]
    counts[:, 3] = counts[:, 1, :1] * shown[list_of]
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
    ratio, error = group_rates(counts, np.array([0, len(counts)]))
    return ratio[0], error[0]


def group_rates(counts: NDArray[Any], offsets: Ints) -> tuple[Floats, Floats]:
    """`relative_rates` of each of G groups, `[G, K]` and `[G, K]`.

    Args:
        counts: `[rows, 4, K]`, a row for each query that a group has, one group after the other.
        offsets: `[G + 1]`, where the rows of each group begin.

    Returns:
        The ratios and their errors; no numbers (NaN, or infinite) where there is nothing to compare.
    """
    group = list_ids(offsets)
    shows, clicks, top_shows, top_clicks = np.moveaxis(np.add.reduceat(counts, offsets[:-1], dtype=np.int64), 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate, top_rate = clicks / shows, top_clicks / top_shows
        ratio = rate / top_rate
        influence = (counts[:, 1] - rate[group] * counts[:, 0]) / shows[group]
        influence -= ratio[group] * (counts[:, 3] - top_rate[group] * counts[:, 2]) / top_shows[group]
        Q = np.diff(offsets)[:, None]
        error = np.sqrt(np.add.reduceat(influence**2, offsets[:-1]) * Q / np.maximum(Q - 1, 1)) / top_rate
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
    parts = []
    for block, where in randomised_lists(dataset, split, policies):
        position = block.column("position").astype(np.int64)
        counts = list_counts(position, block.column("click"), block.offsets, dataset.positions, where=where)
        parts.append(summed([block.query_hash], counts))
    (queries,), counts = joined(parts)
    return curve_of_queries(queries, counts, f"the {split} split of {dataset.folder}")


def randomised_lists(
    dataset: Dataset, split: str, policies: Sequence[str] | None, columns: Sequence[str] = ()
) -> Iterator[tuple[Block, NDArray[np.bool_]]]:
    """The lists whose order chance decided, and which of their items are compared, `[rows]`; some lists at a time.

    Args:
        dataset, split, policies: as for `fit_randomised`.
        columns: what to read of the items besides the position and the click.

    Raises:
        DataError: when there are none.
    """
    wanted = _policies(dataset, split, policies)
    found = False
    for block in _read(dataset, split, ["position", "click", *columns]):
        kept = _kept(block, wanted)
        if kept.any():
            rows = np.repeat(kept, np.diff(block.offsets))
            offsets = np.append(0, np.cumsum(np.diff(block.offsets)[kept]))
            block = Block(block.lists.filter(pa.array(kept)), block.items.filter(pa.array(rows)), offsets)
            ranked = dataset.has("ranked_position")
            yield block, block.column("ranked_position") == 1 if ranked else np.ones(rows.sum(), dtype=np.bool_)
            found = True
    if not found:
        raise DataError(f"the {split} split of {dataset.folder} must have randomised lists; it has none")


def summed(keys: Sequence[NDArray[Any]], counts: Counts) -> tuple[list[NDArray[Any]], Counts]:
    """The sums of the rows of `counts` that agree in all keys, and these keys, sorted by the first of them, and so on.

    >>> summed([np.array([7, 5, 7])], np.array([[1], [2], [4]]))
    ([array([5, 7])], array([[2], [5]]))
    """
    order = np.lexsort(keys[::-1])
    keys = [key[order] for key in keys]
    changed = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    starts = np.append(0, np.flatnonzero(changed) + 1)
    return [key[starts] for key in keys], np.add.reduceat(counts[order], starts, dtype=counts.dtype)


def joined(parts: Sequence[tuple[list[NDArray[Any]], Counts]]) -> tuple[list[NDArray[Any]], Counts]:
    """What was `summed` block by block, summed together: a query may go on in the next block."""
    keys = [np.concatenate(key) for key in zip(*(keys for keys, _ in parts), strict=True)]
    return summed(keys, np.concatenate([counts for _, counts in parts]))


def curve_of_queries(queries: NDArray[np.uint64], counts: Counts, source: str) -> Curve:
    """One curve from counts `[rows, 4, K]`, each of some query `[rows]`; `source` is what a refusal calls the lists."""
    _, counts = summed([queries], counts)
    _check_comparable(counts.sum(axis=0), source)
    values, errors = relative_rates(counts)
    return Curve("randomised", tuple(values.tolist()), tuple(errors.tolist()))


def _read(dataset: Dataset, split: str, columns: list[str]) -> Iterator[Block]:
    optional = [name for name in ("ranked_position", "policy") if dataset.has(name)]
    return shown(dataset).blocks(split, [*columns, *optional])


def _kept(block: Block, policies: Collection[str] | None) -> NDArray[np.bool_]:
    """The lists of these policies; a list has the policy of its first item."""
    if policies is None:
        return np.ones(len(block.offsets) - 1, dtype=np.bool_)
    kept = np.diff(block.offsets) > 0  # of an empty list nothing was shown
    of_list = _policy(block).gather(block.offsets[:-1][kept])
    kept[kept] = of_list.is_in(list(policies)).fill_null(False).to_numpy()
    return kept


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


def _check_comparable(sums: NDArray[Any], source: str) -> None:
    """Refuse sums `[4, K]` in which a position was not shown, or has no clicks at position 1 to compare with."""
    for row, words in ((0, "shows"), (3, "clicks at position 1 to compare with")):
        absent = [int(k) + 1 for k in np.flatnonzero(sums[row] == 0)]
        if absent:
            raise DataError(
                f"every position needs {words} in the randomised lists of {source}; there are none for {ranges(absent)}"
            )
