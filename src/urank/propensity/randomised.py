"""Examination from randomised lists: one curve for all items, or one for each category (Section 6.1 of the paper).

    p(k) / p(1) = (C_k / S_k) / (C_1 / S_1)      clicks C and shows S at k and at 1

Where chance decides which item is at k, the items at k are on average as relevant as those at 1, so their click rates
compare the examination. If lists were randomised by moving the item ranked first (`ranked_position`), the items ranked
first are compared, else all items. A category is shrunk towards the curve of all items, the more the fewer clicks it
has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = NDArray[np.int32]
KeyedCounts = tuple[list[NDArray[Any]], Counts]

MIN_CLICKS = 10
"""Clicks at position 1, counted once per query, that a category needs to have its own curve."""


def fit_randomised(dataset: Dataset, *, policies: Sequence[str] | None = None) -> ExaminationCurve:
    """Estimate one curve from the randomised lists of the train split, with standard errors.

    Args:
        dataset: a prepared log. With `ranked_position` the items ranked first are compared, else all items.
        policies: the values of `policy` whose lists were randomised. By default, with `ranked_position`, the policies
            that moved any item, since the first items of other lists may be of another kind; without it, the only
            policy of the log, whose order must have been random, which no log can prove.

    Raises:
        DataError: no list was randomised, or a position cannot be compared with position 1.
    """
    parts = []
    for block, compared in _randomised_lists(dataset, policies):
        position = block.column("position").astype(np.int64)
        counts = list_counts(position, block.column("click"), block.offsets, dataset.positions, where=compared)
        parts.append(sum_by_key([block.query_hash], counts))
    (queries,), counts = _sum_parts(parts)
    return _curve(queries, counts, dataset)


@dataclass(frozen=True)
class ByCategory:
    """A curve for every category of items, and `overall` for categories without a curve and missing categories."""

    name: str
    column: str
    overall: ExaminationCurve
    curves: Mapping[str, ExaminationCurve]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def examination(self, block: Block) -> Floats:
        """Look up p(k | c) / p(1 | c) `[rows, K]`."""
        table = np.array([curve.values for curve in (*self.curves.values(), self.overall)], dtype=np.float64)
        return table[_codes(_text(block, self.column), list(self.curves))]  # −1 is the last


def fit_by_category(
    dataset: Dataset,
    *,
    column: str = "category",
    policies: Sequence[str] | None = None,
    min_clicks: int = MIN_CLICKS,
) -> ByCategory:
    """Estimate a curve for every category from the randomised lists of the train split, with standard errors.

    Counts are held in memory, 16 bytes for each position of each pair of a query and a category.

    Args:
        dataset, policies: as for `fit_randomised`.
        column: the role `category`, or a categorical feature.
        min_clicks: clicks at position 1, counted once per query, that a category needs to have its own curve, and
            those in lists that show something at k that it needs for its own value at k; otherwise the overall curve
            is used.

    Raises:
        DataError: no list was randomised, or a position cannot be compared with position 1.
    """
    if column not in dataset.categorical:
        has = join_names(dataset.categorical) or "none"
        raise ConfigError(f"column must name a categorical column of {dataset.folder}, which has {has}; got '{column}'")
    if min_clicks < 1:
        raise ConfigError(f"min_clicks must be at least 1; got {min_clicks}")
    names: dict[str, None] = {}  # in order of appearance
    parts = []
    for block, compared in _randomised_lists(dataset, policies, [column]):
        text = _text(block, column)
        names.update(dict.fromkeys(text.drop_nulls().unique(maintain_order=True)))
        parts.append(_category_counts(block, compared, _codes(text, list(names)), dataset.positions))
    (code, queries), counts = _sum_parts(parts)
    overall = _curve(queries, counts, dataset)
    named = code >= 0
    code, counts = code[named], counts[named]
    found = category_curves(counts, offsets_of_runs(code), overall, min_clicks=min_clicks) if len(code) else []
    curves = {name: curve for name, curve in zip(names, found, strict=True) if curve is not None}
    return ByCategory(f"randomised by {column}", column, overall, dict(sorted(curves.items())))


def list_counts(
    position: Ints,
    click: NDArray[Any],
    offsets: Ints,
    K: int,
    *,
    where: NDArray[np.bool_] | None = None,
    part: Ints | None = None,
) -> Counts:
    """Count shows and clicks of each list, or each part of one, by position, `[parts, 4, K]`.

    The four are shows and clicks at k, then shows and clicks at 1 if the list shows anything at k: numerators and
    denominators of the two rates to compare.

    Args:
        position, click: `[rows]`, from 1 to K, distinct within a list, and 0 or 1.
        offsets: `[lists + 1]`.
        where: `[rows]`, the items to compare; by default all. The others only count as something shown at k.
        part: `[rows]`, numbers from 0 that no two lists share: the items to count together, such as those of one
            category; by default the items of a list.

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


def sum_by_key(keys: Sequence[NDArray[Any]], counts: Counts) -> KeyedCounts:
    """Sum the rows of `counts` that agree in all keys; the result is sorted by the keys.

    >>> sum_by_key([np.array([7, 5, 7])], np.array([[1], [2], [4]]))
    ([array([5, 7])], array([[2], [5]]))
    """
    order = np.lexsort(keys[::-1])
    keys = [key[order] for key in keys]
    changed = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    starts = np.append(0, np.flatnonzero(changed) + 1)
    return [key[starts] for key in keys], np.add.reduceat(counts[order], starts, dtype=counts.dtype)


def _sum_parts(parts: Sequence[KeyedCounts]) -> KeyedCounts:
    """Sum the counts of blocks by key: a query may continue in the next block."""
    keys = [np.concatenate(key) for key in zip(*(keys for keys, _ in parts), strict=True)]
    return sum_by_key(keys, np.concatenate([counts for _, counts in parts]))


def relative_rates(counts: NDArray[Any]) -> tuple[Floats, Floats]:
    """Estimate p(k) / p(1) `[K]` and its standard error `[K]` from the counts `[Q, 4, K]` of queries.

        R_k = (C_k / S_k) / (C_1 / S_1),      Var R_k ≈ Q / (Q − 1) Σ_q ψ_qk²
        ψ_qk = [(c_qk − r_k s_qk) / S_k − R_k (c_q1 − r_1 s_q1) / S_1] / r_1

    with C, S the sums of clicks c and shows s over queries, and r the rates. ψ linearises the ratio (the delta method);
    queries are the sampling units, so correlation among the lists of a query widens the error. A position without any
    click has R_k = 0 and the error of a single click.

    Args:
        counts: those of `list_counts`, summed over the lists of each query.

    >>> one_query = np.array([[[10, 10], [4, 1], [10, 10], [4, 4]]])
    >>> relative_rates(np.repeat(one_query, 2, axis=0))  # the queries do not differ
    (array([1.  , 0.25]), array([0., 0.]))
    """
    ratio, error = group_rates(counts, np.array([0, len(counts)]))
    return ratio[0], error[0]


def group_rates(counts: NDArray[Any], offsets: Ints) -> tuple[Floats, Floats]:
    """Compute `relative_rates` of each of G groups, `[G, K]` and `[G, K]`; NaN or infinite without data to compare.

    Args:
        counts: `[rows, 4, K]`, a row for each query of a group, one group after the other.
        offsets: `[G + 1]`, where the rows of each group begin.
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


def _curve(queries: NDArray[np.uint64], counts: Counts, dataset: Dataset) -> ExaminationCurve:
    """Estimate one curve from counts `[rows, 4, K]` of queries `[rows]`; errors name the dataset."""
    _, counts = sum_by_key([queries], counts)
    sums = counts.sum(axis=0)
    for row, needed in ((0, "shows"), (3, "clicks at position 1 to compare with")):
        absent = [int(k) + 1 for k in np.flatnonzero(sums[row] == 0)]
        if absent:
            raise DataError(
                f"every position needs {needed} in the randomised lists of the train split of {dataset.folder}; there "
                f"are none for {ranges(absent)}; collect more randomised lists"
            )
    values, errors = relative_rates(counts)
    return ExaminationCurve("randomised", tuple(values.tolist()), tuple(errors.tolist()))


def credibility(ratio: Floats, sums: NDArray[Any], overall: Floats, usable: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Compute the weight w `[G, K]` of each category's own ratio, and the variance τ² `[K]` between categories.

        p̂(k | c) = R_k + w_ck (R_ck − R_k),      w_ck = τ_k² / (τ_k² + v_ck)
        v_ck = 1 / (S_ck · C_c1 / S_c1 · R_k) + 1 / C_c1

    R_k is the overall curve, R_ck a category's own, and v the relative variance of R_ck if the category's curve were
    the overall one: so w does not depend on the clicks at k. τ_k² is the relative variance of the curves beyond v
    (DerSimonian and Laird 1986): the larger of the estimate at k alone, and that of curves R_k^a whose exponents a vary
    as estimated from all positions together, since few categories may look alike by chance at one position.

    Args:
        ratio: R_ck `[G, K]`.
        sums: `[G, 4, K]`, shows and clicks at k and at 1, as in `list_counts`.
        overall: R_k `[K]`.
        usable: `[G, K]`, where R_ck can be used; elsewhere w is 0.

    >>> sums = np.array([[[400, 400], [100, clicks], [400, 400], [100, 100]] for clicks in (40, 80)])
    >>> ratio = np.array([[1.0, 0.4], [1.0, 0.8]])
    >>> weight, variance = credibility(ratio, sums, np.array([1.0, 0.6]), np.full((2, 2), True))
    >>> weight.round(3).tolist(), variance.round(3).tolist()  # v = 1 / (400 · 0.25 · 0.6) + 1 / 100 at position 2
    ([[0.0, 0.88], [0.0, 0.88]], [0.0, 0.196])
    """
    usable = usable & (overall > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shows, _, top_shows, top_clicks = np.moveaxis(sums, 1, 0)
        noise = np.where(usable, 1 / (shows * top_clicks / top_shows * overall) + 1 / top_clicks, np.inf)
        deviation = np.where(usable, ratio / overall - 1, 0.0)
        several = (usable.sum(axis=0) > 1) & (np.arange(len(overall)) > 0)  # at position 1 nothing can differ
        precision, steep = 1 / noise, np.where(several, np.log(overall) ** 2, 0.0)
        excess = np.where(several, (precision * deviation**2).sum(axis=0) - (usable.sum(axis=0) - 1), 0.0)
        scale = np.where(several, precision.sum(axis=0) - (precision**2).sum(axis=0) / precision.sum(axis=0), 0.0)
    at_k = np.divide(excess, scale, out=np.zeros_like(excess), where=scale > 0)
    of_all = excess.sum() / max((scale * steep).sum(), 1e-12)
    variance = np.maximum(0.0, np.maximum(at_k, of_all * steep))
    return variance / (variance + noise), variance


def category_curves(
    counts: Counts, offsets: Ints, overall: ExaminationCurve, *, min_clicks: int
) -> list[ExaminationCurve | None]:
    """Estimate the curve of each of G categories; None for those with too few clicks.

        error² = w² Var R_ck + (1 − w)² (τ_k² R_k² + Var R_k)

    The error of a category without clicks at some k is thus the variation of the categories around the overall curve.
    The uncertainty of τ² itself is not included: with three categories, errors of the rarest are some 10 % too small.

    Args:
        counts: `[rows, 4, K]`, a row for each query in which a category was shown, one category after the other.
        offsets: `[G + 1]`, where the rows of each category begin.
        overall, min_clicks: the curve of all items, with its errors, and as for `fit_by_category`.
    """
    ratio, error = group_rates(counts, offsets)
    sums = np.add.reduceat(counts, offsets[:-1], dtype=np.int64)
    clicked = np.add.reduceat(counts[:, 3] > 0, offsets[:-1], dtype=np.int64)
    usable = (clicked >= min_clicks) & (sums[:, 0] > 0)
    R, R_error = np.array(overall.values), np.array(overall.errors)
    weight, between = credibility(ratio, sums, R, usable)
    values = R + weight * np.where(usable, ratio - R, 0.0)
    variance = weight**2 * np.where(usable, error, 0.0) ** 2 + (1 - weight) ** 2 * (between * R**2 + R_error**2)
    return [
        ExaminationCurve(overall.name, tuple(own.tolist()), tuple(errors.tolist())) if enough else None
        for own, errors, enough in zip(values, np.sqrt(variance), clicked[:, 0] >= min_clicks, strict=True)
    ]


def _category_counts(block: Block, compared: NDArray[np.bool_], code: Ints, K: int) -> KeyedCounts:
    """Count by category code and query."""
    lists = list_ids(block.offsets)
    codes = code.max() + 2  # from −1 on
    pairs, part = np.unique(lists * codes + code + 1, return_inverse=True)
    position, click = block.column("position").astype(np.int64), block.column("click")
    counts = list_counts(position, click, block.offsets, K, where=compared, part=part)
    return sum_by_key([pairs % codes - 1, block.query_hash[pairs // codes]], counts)


def _codes(text: pl.Series, names: Sequence[str]) -> Ints:
    """Return the index of each text among the names; −1 if absent or missing."""
    return text.cast(pl.Enum(names), strict=False).to_physical().cast(pl.Int64).fill_null(-1).to_numpy()


def _randomised_lists(
    dataset: Dataset, policies: Sequence[str] | None, columns: Sequence[str] = ()
) -> Iterator[tuple[Block, NDArray[np.bool_]]]:
    """Read the randomised lists in blocks with position, click and `columns`; mask `[rows]` the items to compare."""
    randomised = _randomised_policies(dataset, policies)
    found = False
    for block in _blocks(dataset, ["position", "click", *columns]):
        lengths = np.diff(block.offsets)
        kept = np.ones(len(lengths), dtype=np.bool_)
        if randomised is not None:  # a list has the policy of its first item
            kept = lengths > 0
            policy = _text(block, "policy").gather(block.offsets[:-1][kept])
            kept[kept] = policy.is_in(randomised).fill_null(False).to_numpy()
        if not kept.any():
            continue
        found = True
        offsets = np.append(0, np.cumsum(lengths[kept]))
        rows = pa.array(np.repeat(kept, lengths))
        block = Block(block.lists.filter(pa.array(kept)), block.items.filter(rows), offsets)
        moved = dataset.has("ranked_position")
        yield block, np.asarray(block.column("ranked_position") == 1) if moved else np.ones(offsets[-1], dtype=np.bool_)
    if not found:
        raise DataError(f"the train split of {dataset.folder} must have randomised lists; it has none")


def _randomised_policies(dataset: Dataset, policies: Sequence[str] | None) -> list[str] | None:
    """Return the policies whose lists were randomised; None for all lists of a log without policies."""
    has_policy, ranked = dataset.has("policy"), dataset.has("ranked_position")
    if policies and not has_policy:
        raise ConfigError(f"policies must be values of the role policy; {dataset.folder} has no such column")
    if not has_policy and not ranked:
        return None
    known: set[str] = set()
    moved: set[str] = set()
    for block in _blocks(dataset, ["position"]):
        policy = _text(block, "policy") if has_policy else pl.repeat("", block.items.num_rows, eager=True)
        known.update(policy.drop_nulls().unique())
        if ranked:
            is_moved = pl.Series(block.column("ranked_position") != block.column("position"))
            moved.update(policy.filter(is_moved).drop_nulls().unique())
    names = join_names(sorted(known))
    for name in policies or ():
        if name not in known:
            raise ConfigError(f"policies must be policies of {dataset.folder}, which has {names}; got '{name}'")
    if ranked and not (moved & set(policies) if policies else moved):
        raise DataError(
            "ranked_position must differ from position where a list was randomised; it never does in the train split "
            f"of {dataset.folder}"
        )
    if not has_policy:
        return None
    if not policies and not ranked and len(known) > 1:
        raise DataError(
            f"{dataset.folder} has no ranked_position, so the policies with random order must be named (--randomised "
            f"policy=NAME); it has {names}"
        )
    return list(policies) if policies else sorted(moved if ranked else known)


def _blocks(dataset: Dataset, columns: Sequence[str]) -> Iterator[Block]:
    optional = [name for name in ("ranked_position", "policy") if dataset.has(name)]
    return drop_unseen(dataset).blocks("train", [*columns, *optional])


def _text(block: Block, column: str) -> pl.Series:
    return pl.Series(block.items[column].combine_chunks()).cast(pl.String)
