"""What policies would earn, from a log: estimates with intervals, side by side, beside the truth where it is known."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from urank import distributed
from urank.config import to_jsonable
from urank.errors import ConfigError, DataError
from urank.evaluation.cross_fitting import CrossfitConfig, fit_cross_fitted
from urank.evaluation.estimators import (
    ESTIMATORS,
    LoggedBatch,
    Sums,
    Terms,
    Weighted,
    linearised,
    list_terms,
    logged_values,
    needs_propensity,
    query_values,
)
from urank.evaluation.intervals import (
    Comparison,
    Interval,
    add_model_variance,
    bootstrap_interval,
    holm,
    model_variance,
    normal_interval,
    paired,
)
from urank.log.dataset import Block, Dataset, sample_to_fit
from urank.log.ragged import pad, where_items
from urank.log.splits import SPLITS
from urank.progress import Report, silent
from urank.ranking.policies import LoggedOrder, Policy
from urank.ranking.utility import FLOOR, utility

__all__ = [
    "CalibrationTest",
    "Cell",
    "Evaluation",
    "PolicyValue",
    "QueryTotals",
    "Specification",
    "Support",
    "evaluate_policies",
    "query_bytes",
    "support",
]


@dataclass(frozen=True)
class Support:
    """How far a log can tell the value of a policy.

    Args:
        placements: how many items have a place under the policy.
        as_logged: the share of them at their logged position.
        floored: the share of them whose weight is floored.
        effective: the effective sample size of the ratio weights, (Σ w)² / Σ w².
        effective_ips: the same of the IPS weights; this and coverage are None when propensities are not known.
        largest_query: the largest share of |Σ c w b| that one query carries, by the ratio weights or the IPS weights.
        coverage: Σ w' / placements, near 1 if the logging could have produced all of them; of the rest, the log by
            itself says nothing.
        coverage_error: its standard error.
        warnings: a sentence for each reason to doubt the estimates.
        unseen: the share of them that the logged list did not show, candidates below the last position.
    """

    placements: int
    as_logged: float
    floored: float
    effective: float
    effective_ips: float | None
    largest_query: float
    coverage: float | None
    coverage_error: float | None
    warnings: list[str]
    unseen: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with null for what is not a finite number."""
        return {
            name: None if isinstance(figure, float) and not isfinite(figure) else figure
            for name, figure in asdict(self).items()
        }


def support(terms: Terms) -> Support:
    """Whether the log can support a claim about the policy. Shares of nothing are NaN.

    Args:
        terms: one entry for each query.
    """
    placements = terms.placed.sum()
    effective_ips = coverage = coverage_error = None
    largest_query = _largest_share(terms.ratio.clicked)
    if terms.ips is not None:
        effective_ips = _effective(terms.ips)
        coverage = _share(terms.ips.weight.sum(), placements)
        coverage_error = normal_interval(linearised([terms.ips.weight], [terms.placed])).error
        largest_query = float(np.fmax(largest_query, _largest_share(terms.ips.clicked)))
    found = Support(
        placements=int(placements),
        as_logged=_share(terms.as_logged.sum(), placements),
        floored=_share(terms.floored.sum(), placements),
        effective=_effective(terms.ratio),
        effective_ips=effective_ips,
        largest_query=largest_query,
        coverage=coverage,
        coverage_error=coverage_error,
        warnings=[],
        unseen=_share(terms.unseen.sum(), placements),
    )
    return replace(found, warnings=_warnings(found))


def _warnings(found: Support) -> list[str]:
    if found.placements == 0:
        return ["this policy gives no item a place"]
    warnings = []
    if found.coverage is None and found.as_logged < 0.2:
        warnings.append(
            f"only {_percent(found.as_logged)} of this policy's placements are the logged ones and propensities are "
            "not known; the estimates rest on the click model"
        )
    if found.coverage is not None and found.coverage_error is not None:
        # Twice the error, so that chance alone does not speak; one query has no error and gets no such leave.
        leave = 2 * found.coverage_error if isfinite(found.coverage_error) else 0.0
        if found.coverage + leave < 0.9:
            warnings.append(
                f"only {_percent(found.coverage)} of this policy's placements could have been logged; "
                "the rest rests on the click model, and is nothing to IPS"
            )
        if found.coverage - leave > 1.1:
            warnings.append(
                f"the IPS weights add up to {_percent(found.coverage)} of this policy's placements; "
                "the propensities are too low for how the log came about"
            )
    if found.floored > 0.05:
        warnings.append(
            f"{_percent(found.floored)} of this policy's placements have a logged click probability below the floor; "
            "the ratio estimate is too low"
        )
    if found.unseen > 0.05:
        warnings.append(
            f"{_percent(found.unseen)} of this policy's placements are items that the logged list did not show, of "
            "which only the click model tells; the ratio estimate counts nothing for them and is too low"
        )
    if found.effective < max(100, 0.05 * found.placements):
        warnings.append(_uneven("ratio", found.placements, found.effective))
    # A fixed order meets a random one in 1/K of its placements, by design; more uneven than that is a warning.
    as_logged = round(found.as_logged * found.placements)
    if found.effective_ips is not None and found.effective_ips < max(100, 0.05 * as_logged):
        warnings.append(_uneven("IPS", found.placements, found.effective_ips))
    if found.largest_query > 0.1:
        warnings.append(f"one query carries {_percent(found.largest_query)} of the estimate")
    return warnings


def _uneven(kind: str, placements: int, effective: float) -> str:
    return (
        f"by their {kind} weights, this policy's {placements:,} placements tell as much as {effective:,.0f} even ones"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def _effective(weighted: Weighted) -> float:
    squared = float(weighted.weight_squared.sum())
    return float(weighted.weight.sum()) ** 2 / squared if squared > 0 else 0.0


def _largest_share(sums: Sums) -> float:
    sizes = np.abs(sums)
    return _share(sizes.max(initial=0), sizes.sum())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else nan


LEVELS = 3
MISFIT_LEVEL = 0.01
"""The p-value, adjusted for the number of cells, below which the model is said to be off."""


@dataclass(frozen=True)
class Cell:
    """Rows at one position for which the model sees about the same chance of a click.

    Attributes:
        position: 1-based.
        level: 1 for the third of the rows at this position that the model thinks least likely to be clicked, to 3.
        rows, predicted, observed: how many, and the mean click rates.
        z: their difference in standard errors, clustered by query.
        p_value: adjusted for the number of cells (Holm).
    """

    position: int
    level: int
    rows: int
    predicted: float
    observed: float
    z: float
    p_value: float


@dataclass(frozen=True)
class Specification:
    """Predicted against observed clicks on held-out queries.

    Attributes:
        cells: by position and level.
        warnings: a sentence when the model is off.
    """

    cells: list[Cell]
    warnings: list[str]


class CalibrationTest:
    """Gathers predicted and observed clicks; `judge` says whether they agree."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self._sums = np.zeros((6, positions * LEVELS))  # rows, predicted, observed, Σ d, Σ d², Σ p (1 − p)

    def add(self, logged: LoggedBatch, query: NDArray[np.uint64]) -> None:
        """Add logged lists; `query` `[B]` tells which belong to one query."""
        queries, home = np.unique(query, return_inverse=True)
        where, place = logged.shown, logged.position - 1
        chance = np.take_along_axis(logged.table, np.where(where, place, 0)[..., None], axis=2)[..., 0][where]
        click, place = logged.click[where], place[where]
        cell = place * LEVELS + _levels(chance, place, self.positions)
        cells = self.positions * LEVELS
        owner = np.broadcast_to(home[:, None], where.shape)[where]
        off = np.bincount(owner * cells + cell, click - chance, len(queries) * cells).reshape(len(queries), cells)
        rows, predicted, observed, spread = (
            np.bincount(cell, each, cells) for each in (np.ones(len(cell)), chance, click, chance * (1 - chance))
        )
        self._sums += np.stack([rows, predicted, observed, off.sum(axis=0), (off**2).sum(axis=0), spread])

    def judge(self) -> Specification:
        """Where predicted and observed clicks, of all workers of a team, differ by more than chance."""
        sums = np.array(distributed.all_reduce_sum(self._sums.ravel().tolist())).reshape(self._sums.shape)
        rows, predicted, observed, off, squares, spread = sums
        # Σ d² knows only of clicks that came: where a few were to be expected and none came it is far too small. There
        # the variance of independent clicks counts, times what all cells say clicks of one query hang together.
        together = max(1.0, squares.sum() / max(spread.sum(), 1e-300))
        variance = np.maximum(squares, together * spread)
        seen = np.flatnonzero(variance > 0)
        z = off[seen] / np.sqrt(variance[seen])
        p_values = holm(2 * norm.sf(np.abs(z)))
        cells = [
            Cell(
                position=int(cell) // LEVELS + 1,
                level=int(cell) % LEVELS + 1,
                rows=int(rows[cell]),
                predicted=float(predicted[cell] / rows[cell]),
                observed=float(observed[cell] / rows[cell]),
                z=float(z[number]),
                p_value=float(p_values[number]),
            )
            for number, cell in enumerate(seen)
        ]
        return Specification(cells, _warnings_specification(cells))


def _levels(chance: NDArray[np.float64], place: NDArray[np.int64], positions: int) -> NDArray[np.int64]:
    """The third of the rows of its position, by rising chance, to which each row belongs, from 0."""
    order = np.lexsort((chance, place))
    counts = np.bincount(place, minlength=positions)
    rank = np.empty(len(place), dtype=np.int64)
    rank[order] = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank * LEVELS // counts[place]


def _warnings_specification(cells: list[Cell]) -> list[str]:
    off = [cell for cell in cells if cell.p_value < MISFIT_LEVEL]
    if not off:
        return []
    worst = min(off, key=lambda cell: cell.p_value)
    return [
        f"the click model of this evaluation is off: at position {worst.position} it expects {worst.predicted:.2%} "
        f"where {worst.observed:.2%} were clicked ({worst.rows:,} rows, p = {worst.p_value:.1g}; {len(off)} of "
        f"{len(cells)} groups of rows are off), so intervals that rest on it may not cover the truth"
    ]


TERMS, TERMS_BY_PROPENSITY = 11, 15
"""Numbers that an estimate needs of each query."""


def query_bytes(policies: int, places: int, *, propensity: bool) -> int:
    """What an evaluation takes for a query: its sums, and as much again while they are joined and made into values."""
    return 2 * 8 * (TERMS_BY_PROPENSITY if propensity else TERMS) * policies * places


class QueryTotals:
    """Per-query sums of what the estimators need, for each policy and cutoff."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = list(places)
        self.rows = 0
        self._queries: list[NDArray[np.uint64]] = []
        self._terms: dict[tuple[int, int], list[Terms]] = {}
        self._totals: dict[tuple[int, int], list[Terms]] = {}
        self._true: dict[tuple[int, int], list[NDArray[np.float64]]] = {}

    def add(
        self,
        block: Block,
        logged: Sequence[LoggedBatch],
        orders: Sequence[NDArray[np.int64]],
        true: NDArray[np.float64] | None,
        floor: float,
    ) -> None:
        """Add the lists of a block, judged first by the table of the evaluation, then by that of each model alone."""
        queries, home = np.unique(block.query_hash, return_inverse=True)
        whole = np.zeros_like(home)
        self._queries.append(queries)
        self.rows += int(block.offsets[-1])
        for policy, positions in enumerate(orders):
            for place in self.places:
                key = (policy, place)
                own, *others = (list_terms(each, positions, cutoff=place, floor=floor) for each in logged)
                self._terms.setdefault(key, []).append(own.by(home, len(queries)))
                self._add_totals(key, [terms.by(whole, 1) for terms in others])
                if true is not None:
                    earned = utility(true, positions, value=logged[0].value, where=logged[0].where, cutoff=place)
                    self._true.setdefault(key, []).append(_added(home, earned, len(queries)))

    def done(self) -> None:
        """Join what several blocks, or several workers of a team, have of one query."""
        if distributed.size() > 1:
            self._gather()
        queries, home = np.unique(np.concatenate(self._queries), return_inverse=True)
        self.queries = len(queries)
        self.terms: dict[tuple[int, int], Terms] = {}
        for key in list(self._terms):  # parts are let go at once: they take as much as what they are joined to
            self.terms[key] = Terms.concatenate(self._terms.pop(key)).by(home, len(queries))
        self.true = {
            key: linearised([_added(home, np.concatenate(parts), len(queries))], [self.terms[key].lists])
            for key, parts in self._true.items()
        }

    def _gather(self) -> None:
        """Have the sums of every worker, the same in each of them."""
        mine: dict[str, NDArray[Any]] = {"queries": np.concatenate([*self._queries, np.empty(0, np.uint64)])}
        for (policy, place), parts in self._terms.items():
            mine[f"terms {policy} {place}"] = Terms.concatenate(parts).to_array()
            mine[f"totals {policy} {place}"] = Terms.concatenate(self._totals[policy, place]).to_array()
        for (policy, place), found in self._true.items():
            mine[f"true {policy} {place}"] = np.concatenate(found)
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **mine)
        self.rows = int(distributed.all_reduce_sum([self.rows])[0])
        self._queries, self._terms, self._totals, self._true = [], {}, {}, {}
        for data in distributed.all_gather_bytes(buffer.getvalue()):
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                self._queries.append(arrays["queries"])
                for name in arrays.files[1:]:
                    kind, policy, place = name.split()
                    self._take(kind, (int(policy), int(place)), arrays[name])

    def _take(self, kind: str, key: tuple[int, int], array: NDArray[np.float64]) -> None:
        if kind == "true":
            self._true.setdefault(key, []).append(array)
        elif kind == "terms":
            self._terms.setdefault(key, []).append(Terms.from_array(array))
        else:
            self._add_totals(key, [Terms.from_array(array[:, model : model + 1]) for model in range(array.shape[1])])

    def _add_totals(self, key: tuple[int, int], totals: list[Terms]) -> None:
        known = self._totals.get(key)
        self._totals[key] = [a + b for a, b in zip(known, totals, strict=True)] if known else totals

    def values(self, policy: int, place: int, estimator: str) -> NDArray[np.float64]:
        """The per-query values of an estimate."""
        return _values(self.terms[policy, place], estimator, logged=policy == 0)

    def by_model(self, policy: int, place: int, estimator: str) -> NDArray[np.float64]:
        """The estimate by each model alone, `[cuts, 2]`."""
        found = [_values(total, estimator, logged=policy == 0).mean() for total in self._totals[policy, place]]
        return np.array(found).reshape(-1, 2)


def _values(terms: Terms, estimator: str, *, logged: bool) -> NDArray[np.float64]:
    """What the logged order earned is known and needs no weights; only `direct` compares with what a model expects."""
    return logged_values(terms) if logged and estimator != "direct" else query_values(terms, estimator)


def _added(home: NDArray[np.int64], values: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    return np.bincount(home, values, groups).astype(np.float64)


Truth = Callable[[Block], NDArray[np.float64]]

BLOCK_ENTRIES = 50 * 2**16
"""Entries of all click tables of the impressions that are judged at once, padding included."""


@dataclass(frozen=True)
class PolicyValue:
    """What is known of one policy.

    Attributes:
        name: of the policy.
        utility: cutoff -> the estimate; the last cutoff is K, all positions.
        estimates: estimator -> the estimate at K.
        bootstrap: the chosen estimate at K with a bootstrap interval.
        difference: to the logged order at K, paired by query; none for the logged order itself.
        support: what the log can say about it.
        true: cutoff -> the true utility, where a simulation knows it.
        true_difference: to the logged order at K.
        values: per-query values of the chosen estimator at K, for comparisons between policies.
        by_model: the estimate by each click model of the evaluation alone, `[cuts, 2]`.
    """

    name: str
    utility: dict[int, Interval]
    estimates: dict[str, Interval]
    bootstrap: Interval
    difference: Comparison | None
    support: Support
    true: dict[int, float] | None
    true_difference: Comparison | None
    values: NDArray[np.float64]
    by_model: NDArray[np.float64]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without the per-query values."""
        told = asdict(self)
        del told["values"], told["by_model"]
        as_json: dict[str, Any] = to_jsonable(told)
        return as_json


@dataclass(frozen=True)
class Evaluation:
    """Policies side by side.

    Attributes:
        policies: their values; the logged order comes first.
        estimator: the one that was chosen.
        measure: what a utility counts: clicks, or value.
        splits, queries, lists, rows: of the log, what they were judged by.
        clicks: the click models of the folds.
        specification: how well these describe the log.
        floor: the least that a logged click probability counts as.
        all_rows: of these splits; more than `rows` when only a sample of the queries fitted the memory.
    """

    policies: list[PolicyValue]
    estimator: str
    measure: str
    splits: list[str]
    queries: int
    lists: int
    rows: int
    clicks: list[str]
    specification: Specification
    floor: float
    all_rows: int

    def __getitem__(self, name: str) -> PolicyValue:
        found = {policy.name: policy for policy in self.policies}
        if name not in found:
            raise KeyError(f"no policy is called '{name}'; there are {', '.join(found)}")
        return found[name]

    def __str__(self) -> str:
        """A line for each policy; `urank.report.evaluation_report` says more."""
        lines = [f"{self.measure} a list by {self.estimator}, {self.queries:,} queries"]
        for policy in self.policies:
            *_, told = policy.utility.values()
            line = f"{policy.name:<12} {told.mean:.4f} ({told.low:.4f} to {told.high:.4f})"
            gap = policy.difference
            if gap is not None:
                line += f", to logged {gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f}), p = {gap.p_value:.2g}"
            lines.append(line)
        return "\n".join([*lines, *self.warnings])

    def compare(self, better: str, worse: str) -> Comparison:
        """The difference between two policies, paired by query."""
        one, other = self[better], self[worse]
        models = model_variance(one.by_model - other.by_model)
        return add_model_variance(paired(one.values, other.values), models, len(one.by_model))

    @property
    def warnings(self) -> list[str]:
        """What to keep in mind before believing it."""
        own = [f"{policy.name}: {sentence}" for policy in self.policies for sentence in policy.support.warnings]
        return [*self._sample, *self.specification.warnings, *own]

    @property
    def _sample(self) -> list[str]:
        if self.rows >= self.all_rows:
            return []
        return [
            f"judged by a sample of the queries, {self.rows:,} of {self.all_rows:,} impressions, which is what the "
            "memory has room for (allow more with --memory)"
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "estimator": self.estimator,
            "measure": self.measure,
            "splits": self.splits,
            "queries": self.queries,
            "lists": self.lists,
            "rows": self.rows,
            "all_rows": self.all_rows,
            "clicks": self.clicks,
            "floor": self.floor,
            "specification": to_jsonable(asdict(self.specification)),
            "warnings": self.warnings,
            "policies": [policy.to_dict() for policy in self.policies],
        }


def evaluate_policies(
    policies: Sequence[Policy],
    dataset: Dataset,
    *,
    splits: Sequence[str] = ("test",),
    estimator: str = "auto",
    cutoffs: Sequence[int] = (1, 3, 5),
    floor: float = FLOOR,
    config: CrossfitConfig | None = None,
    truth: Truth | None = None,
    report: Report = silent,
) -> Evaluation:
    """Estimate what policies would earn.

    Args:
        policies: what to judge, besides the logged order, which is always judged.
        dataset: a prepared log; its queries must be new to the policies. When its memory has no room for all of
            them a sample is judged, of as many as there is room for.
        splits: which of its parts to judge by.
        estimator: one of `ESTIMATORS`, or `auto`: doubly robust when the log knows its propensities, else Eq. 3.
        cutoffs: also the utility of so many first positions.
        floor: least that a logged click probability counts as.
        config: the evaluation's own click model.
        truth: gives the true click table `[rows, K]` of a block, where a simulation knows it.
        report: told how far it is.
    """
    has_propensity = dataset.has("propensity")
    chosen = ("doubly_robust" if has_propensity else "ratio") if estimator == "auto" else estimator
    if chosen not in ESTIMATORS:
        raise ConfigError(f"estimator must be auto or one of {', '.join(ESTIMATORS)}; got '{estimator}'")
    if needs_propensity(chosen) and not has_propensity:
        raise ConfigError(f"estimator {chosen} needs the column propensity, which {dataset.folder} does not have")
    if any(split not in SPLITS for split in splits) or not splits:
        raise ConfigError(f"splits must be some of {', '.join(SPLITS)}; got '{', '.join(splits)}'")
    config = CrossfitConfig() if config is None else config
    judged: list[Policy] = [LoggedOrder(), *policies]
    names = [policy.name for policy in judged]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"policies must have names of their own; '{twice}' occurs twice")
    _check_columns(policies, dataset)
    K = dataset.positions
    places = [*sorted({cutoff for cutoff in cutoffs if cutoff < K}), K]
    all_rows = sum(dataset.rows(split) for split in splits)
    most_queries = dataset.memory.sums_bytes / query_bytes(len(judged), len(places), propensity=has_propensity)
    dataset = sample_to_fit(dataset, splits, most_queries * dataset.rows_of_query(splits))
    sums, calibration = QueryTotals(places), CalibrationTest(K)
    roles = [name for name in ("position", "click", "value", "propensity", "item_id") if dataset.has(name)]
    columns = dict.fromkeys([*dataset.features, *(name for policy in policies for name in policy.columns)])
    judges = fit_cross_fitted(dataset, splits, config, report=report)
    most_rows = max(1, BLOCK_ENTRIES // (K * (1 + 2 * config.cuts)))
    for block in _own_blocks(dataset, splits, [*columns, *roles], config.seed, most_rows):
        tables = judges.tables(block)
        logged = [
            _logged(block, table) for table in (judges.own(block, tables), *tables.reshape(-1, *tables.shape[2:]))
        ]
        calibration.add(logged[0], block.query_hash)
        orders = [pad(policy.positions(block), block.offsets, fill=1) for policy in judged]
        sums.add(block, logged, orders, pad(truth(block), block.offsets) if truth is not None else None, floor)
        report("judging", sums.rows * distributed.size(), sum(dataset.rows(split) for split in splits))
    sums.done()
    usable = [name for name in ESTIMATORS if has_propensity or not needs_propensity(name)]
    found = [_policy_value(sums, number, policy.name, chosen, usable, config) for number, policy in enumerate(judged)]
    return Evaluation(
        policies=found,
        estimator=chosen,
        measure="value" if dataset.has("value") else "clicks",
        splits=list(splits),
        queries=sums.queries,
        lists=int(sums.terms[0, K].lists.sum()),
        rows=sums.rows,
        clicks=[model.name for cut in judges.models for model in cut],
        specification=calibration.judge(),
        floor=floor,
        all_rows=all_rows,
    )


def _own_blocks(
    dataset: Dataset, splits: Sequence[str], columns: Sequence[str], seed: int, most_rows: int
) -> Iterator[Block]:
    """Lists with their items in random order, some at a time; of a team, those of this worker's row groups."""
    for split in splits:
        groups = dataset.groups(split)
        for number in distributed.share(len(groups)):
            rng = np.random.default_rng([seed, SPLITS.index(split), number])
            for part in dataset.read(groups[number], columns).parts(most_rows):
                yield part.shuffled(rng)


def _check_columns(policies: Sequence[Policy], dataset: Dataset) -> None:
    """Refuse what a policy lacks before the click models are fitted, which takes longer."""
    known = {*dataset.features, *dataset.description["roles"]}
    for policy in policies:
        absent = next((name for name in policy.columns if name not in known), None)
        if absent is not None:
            raise DataError(f"policy '{policy.name}' needs the column '{absent}', which the log does not have")


def _policy_value(
    sums: QueryTotals, number: int, name: str, chosen: str, usable: Sequence[str], config: CrossfitConfig
) -> PolicyValue:
    K = sums.places[-1]

    def estimate(place: int, estimator: str) -> Interval:
        variance = model_variance(sums.by_model(number, place, estimator))
        return add_model_variance(normal_interval(sums.values(number, place, estimator)), variance, config.cuts)

    values, baseline = sums.values(number, K, chosen), sums.values(0, K, chosen)
    apart = model_variance(sums.by_model(number, K, chosen) - sums.by_model(0, K, chosen))
    shown = support(sums.terms[number, K])
    return PolicyValue(
        name=name,
        utility={place: estimate(place, chosen) for place in sums.places},
        estimates={estimator: estimate(K, estimator) for estimator in usable},
        bootstrap=bootstrap_interval(values, rng=config.seed),
        difference=add_model_variance(paired(values, baseline), apart, config.cuts) if number else None,
        support=shown if number else replace(shown, warnings=[]),
        true={place: float(sums.true[number, place].mean()) for place in sums.places} if sums.true else None,
        true_difference=paired(sums.true[number, K], sums.true[0, K]) if sums.true and number else None,
        values=values,
        by_model=sums.by_model(number, K, chosen),
    )


def _logged(block: Block, table: NDArray[np.float64]) -> LoggedBatch:
    names = block.items.column_names
    padded = {
        name: pad(block.column(name), block.offsets)
        for name in ("position", "click", "value", "propensity")
        if name in names
    }
    return LoggedBatch(
        table=pad(table, block.offsets),
        position=padded["position"].astype(np.int64),
        click=padded["click"],
        value=padded.get("value", np.ones(padded["click"].shape)),
        where=where_items(block.offsets),
        propensity=padded.get("propensity"),
    )
