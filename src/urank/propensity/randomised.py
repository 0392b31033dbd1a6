"""Examination by category of items, Q(o = 1 | category, k), from randomised lists (Section 6.1 of the paper).

    p(k | c) = (C_ck / S_ck) / (C_c1 / S_c1)      clicks C and shows S of the items of category c at k and at 1

is compared as `randomised` compares all items: where chance decides who stands where, the items of c at k are, on
average, those of c at 1. A category is drawn towards the curve of all items, the more the fewer clicks it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.columns import join_names
from urank.log.dataset import Block, Dataset, drop_unseen
from urank.log.identifiability import ranges
from urank.log.ragged import list_ids, offsets_of_runs
from urank.propensity.examination import ExaminationCurve

__all__ = [
    "MIN_CLICKS",
    "ByCategory",
    "category_curves",
    "credibility",
    "curve_of_queries",
    "fit_by_category",
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
    drop_unseen = np.zeros((len(offsets) - 1, K), dtype=np.int32)
    drop_unseen[lists, place] = 1
    if part is None:
        part, list_of = lists, np.arange(len(offsets) - 1)
    else:
        list_of = np.zeros(part.max(initial=-1) + 1, dtype=np.int64)
        list_of[part] = lists
    counts = np.zeros((len(list_of), 4, K), dtype=np.int32)
    counts[part, 0, place] = 1 if where is None else where
    counts[part, 1, place] = click.astype(np.int32) * counts[part, 0, place]
    counts[:, 2] = counts[:, 0, :1] * drop_unseen[list_of]
    counts[:, 3] = counts[:, 1, :1] * drop_unseen[list_of]
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


def fit_randomised(
    dataset: Dataset, split: str = "train", *, policies: Sequence[str] | None = None
) -> ExaminationCurve:
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


def curve_of_queries(queries: NDArray[np.uint64], counts: Counts, source: str) -> ExaminationCurve:
    """One curve from counts `[rows, 4, K]`, each of some query `[rows]`; `source` is what a refusal calls the lists."""
    _, counts = summed([queries], counts)
    _check_comparable(counts.sum(axis=0), source)
    values, errors = relative_rates(counts)
    return ExaminationCurve("randomised", tuple(values.tolist()), tuple(errors.tolist()))


def _read(dataset: Dataset, split: str, columns: list[str]) -> Iterator[Block]:
    optional = [name for name in ("ranked_position", "policy") if dataset.has(name)]
    return drop_unseen(dataset).blocks(split, [*columns, *optional])


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


MIN_CLICKS = 10
"""Clicks at position 1, those of one query counted once, without which a category has no curve of its own."""

Floats_categories = NDArray[np.float64]


@dataclass(frozen=True)
class ByCategory:
    """A curve for every category of items.

    Attributes:
        name: how it was estimated.
        column: the column of the items that names their category.
        overall: the curve of all items, which stands for the categories that have none and for missing ones.
        curves: that of each category, by its name.
    """

    name: str
    column: str
    overall: ExaminationCurve
    curves: Mapping[str, ExaminationCurve]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def examination(self, block: Block) -> Floats_categories:
        """p(k | c) / p(1 | c) `[rows, K]`."""
        table = np.array([curve.values for curve in (*self.curves.values(), self.overall)], dtype=np.float64)
        return table[_codes(_text(block, self.column), list(self.curves))]  # −1 is the last


def credibility(
    ratio: Floats_categories, sums: NDArray[Any], overall: Floats_categories, usable: NDArray[np.bool_]
) -> tuple[Floats_categories, Floats_categories]:
    """The weight w `[G, K]` that each category's own ratio deserves, and the spread τ² `[K]` of the categories.

        p̂(k | c) = R_k + w_ck (R_ck − R_k),      w_ck = τ_k² / (τ_k² + v_ck)
        v_ck = 1 / (S_ck · C_c1 / S_c1 · R_k) + 1 / C_c1

    R_k is the overall curve, R_ck a category's own, and v the relative variance that R_ck would have if the category's
    curve were the overall one: so w does not depend on the clicks that came at k. τ_k² is by how much, relative to R_k,
    curves differ beyond v (DerSimonian and Laird 1986): at k alone, or, when that is more, as curves R_k^a do whose
    steepness a differs as all positions together say. A few categories at one position may look alike by chance.

    Args:
        ratio: R_ck `[G, K]`.
        sums: `[G, 4, K]`, shows and clicks at k and at 1, as `list_counts` has them.
        overall: R_k `[K]`.
        usable: `[G, K]`, where R_ck can be used; elsewhere w is 0.

    >>> sums = np.array([[[400, 400], [100, clicks], [400, 400], [100, 100]] for clicks in (40, 80)])
    >>> ratio = np.array([[1.0, 0.4], [1.0, 0.8]])
    >>> weight, spread = credibility(ratio, sums, np.array([1.0, 0.6]), np.full((2, 2), True))
    >>> weight.round(3).tolist(), spread.round(3).tolist()  # v = 1 / (400 · 0.25 · 0.6) + 1 / 100 at position 2
    ([[0.0, 0.88], [0.0, 0.88]], [0.0, 0.196])
    """
    usable = usable & (overall > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shows, _, top_shows, top_clicks = np.moveaxis(sums, 1, 0)
        noise = np.where(usable, 1 / (shows * top_clicks / top_shows * overall) + 1 / top_clicks, np.inf)
        deviation = np.where(usable, ratio / overall - 1, 0.0)
        several = (usable.sum(axis=0) > 1) & (np.arange(len(overall)) > 0)  # at position 1 nothing can differ
        precision, steep = 1 / noise, np.where(several, np.log(overall) ** 2, 0.0)
        left = np.where(several, (precision * deviation**2).sum(axis=0) - (usable.sum(axis=0) - 1), 0.0)
        scale = np.where(several, precision.sum(axis=0) - (precision**2).sum(axis=0) / precision.sum(axis=0), 0.0)
    at_k = np.divide(left, scale, out=np.zeros_like(left), where=scale > 0)
    of_all = left.sum() / max((scale * steep).sum(), 1e-12)
    spread = np.maximum(0.0, np.maximum(at_k, of_all * steep))
    return spread / (spread + noise), spread


def category_curves(
    counts: Counts, offsets: NDArray[np.int64], overall: ExaminationCurve, *, min_clicks: int
) -> list[ExaminationCurve | None]:
    """The curve of each of G categories; none for those with too few clicks.

        error² = w² Var R_ck + (1 − w)² (τ_k² R_k² + Var R_k)

    The error of a category without clicks at some k is thus the spread of the categories around the overall curve. That
    τ² is itself an estimate is not counted: with three categories the errors of the rarest are some 10 % too small.

    Args:
        counts: `[rows, 4, K]`, a row for each query in which a category was shown, one category after the other.
        offsets: `[G + 1]`, where the rows of each category begin.
        overall: the curve of all items, with its errors.
        min_clicks: as for `fit_by_category`.
    """
    ratio, error = group_rates(counts, offsets)
    sums = np.add.reduceat(counts, offsets[:-1], dtype=np.int64)
    clicked = np.add.reduceat(counts[:, 3] > 0, offsets[:-1], dtype=np.int64)
    usable = (clicked >= min_clicks) & (sums[:, 0] > 0)
    R, R_error = np.array(overall.values), np.array(overall.errors)
    weight, spread = credibility(ratio, sums, R, usable)
    values = R + weight * np.where(usable, ratio - R, 0.0)
    variance = weight**2 * np.where(usable, error, 0.0) ** 2 + (1 - weight) ** 2 * (spread * R**2 + R_error**2)
    return [
        ExaminationCurve(overall.name, tuple(own.tolist()), tuple(errors.tolist())) if enough else None
        for own, errors, enough in zip(values, np.sqrt(variance), clicked[:, 0] >= min_clicks, strict=True)
    ]


def fit_by_category(
    dataset: Dataset,
    split: str = "train",
    *,
    column: str = "category",
    policies: Sequence[str] | None = None,
    min_clicks: int = MIN_CLICKS,
) -> ByCategory:
    """A curve for every category, from the randomised lists of a log, with standard errors.

    Counts are held in memory, 16 bytes for each position of each pair of a query and a category.

    Args:
        dataset: a prepared log. With `ranked_position` the items ranked first are compared, else all items.
        split: the part of it that is looked at.
        column: the role `category`, or a categorical feature.
        policies: as for `fit_randomised`.
        min_clicks: a category needs so many clicks at position 1, those of one query counted once, to have a curve of
            its own, and so many in lists that show something at k to tell of k. Elsewhere the overall curve holds.

    Raises:
        DataError: when nothing was randomised, or a position cannot be compared with position 1.
    """
    if column not in dataset.categorical:
        has = join_names(dataset.categorical) or "none"
        raise ConfigError(f"column must name a categorical column of {dataset.folder}, which has {has}; got '{column}'")
    if min_clicks < 1:
        raise ConfigError(f"min_clicks must be a whole number from 1 up; got {min_clicks}")
    names: dict[str, None] = {}  # in the order in which they are first seen
    parts = []
    for block, where in randomised_lists(dataset, split, policies, [column]):
        text = _text(block, column)
        names.update(dict.fromkeys(text.drop_nulls().unique(maintain_order=True)))
        code = _codes(text, list(names))
        parts.append(_counted(block, where, code, dataset.positions))
    (code, queries), counts = joined(parts)
    overall = curve_of_queries(queries, counts, f"the {split} split of {dataset.folder}")
    named = code >= 0
    code, counts = code[named], counts[named]
    found = category_curves(counts, offsets_of_runs(code), overall, min_clicks=min_clicks) if len(code) else []
    curves = {name: curve for name, curve in zip(names, found, strict=True) if curve is not None}
    return ByCategory(f"randomised by {column}", column, overall, dict(sorted(curves.items())))


def _counted(
    block: Block, where: NDArray[np.bool_], code: NDArray[np.int64], K: int
) -> tuple[list[NDArray[Any]], Counts]:
    """The counts of each category and query of a block, and which these are."""
    lists = list_ids(block.offsets)
    codes = code.max() + 2  # from −1 on
    pairs, part = np.unique(lists * codes + code + 1, return_inverse=True)
    position, click = block.column("position").astype(np.int64), block.column("click")
    counts = list_counts(position, click, block.offsets, K, where=where, part=part)
    return summed([pairs % codes - 1, block.query_hash[pairs // codes]], counts)


def _text(block: Block, column: str) -> pl.Series:
    return pl.Series(block.items[column].combine_chunks()).cast(pl.String)


def _codes(text: pl.Series, names: Sequence[str]) -> NDArray[np.int64]:
    """The place of each text among the names; −1 for any other and for a missing one."""
    return text.cast(pl.Enum(names), strict=False).to_physical().cast(pl.Int64).fill_null(-1).to_numpy()
