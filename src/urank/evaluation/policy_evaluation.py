"""Off-policy evaluation: estimate the utility of policies from a log, with intervals, beside the logged order.

`evaluate_policies` refits click networks on the evaluated clicks (`urank.evaluation.refit`), sums the terms of the
other estimators by query (`QueryTotals`), and turns both into intervals (`urank.evaluation.intervals`). Two checks show
how far the estimates can be trusted: `support`, whether the log contains evidence about a policy at all, and
`CalibrationTest`, whether predicted and observed clicks agree on held-out queries.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from math import isfinite, nan
from typing import Any, TypedDict, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.special import ndtr

from urank import distributed
from urank.clicks.click_model import ClickModel
from urank.config import to_jsonable
from urank.errors import ConfigError, DataError
from urank.evaluation import intervals
from urank.evaluation.cross_fitting import CUTS, CrossfitConfig, fit_judges
from urank.evaluation.estimators import (
    ESTIMATORS,
    REFIT,
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
from urank.evaluation.independence import IndependenceTest, ScoreTest, independence_test
from urank.evaluation.randomised_lists import RandomisedEvaluation, RandomisedLists, evaluate_randomised
from urank.evaluation.refit import HeldOut, Refitted, refit
from urank.learning.features import Inputs
from urank.log.dataset import Block, Dataset, sample_to_fit
from urank.log.folds import fold_of
from urank.log.ragged import list_ids, pad, where_items
from urank.log.splits import SPLITS
from urank.progress import Report, silent
from urank.ranking.policies import LoggedOrder, Policy
from urank.ranking.utility import FLOOR

IntervalT = TypeVar("IntervalT", bound=intervals.Interval)

BLOCK_ENTRIES = 50 * 2**16
"""Entries, padding included, of all click tables that are computed at once."""


@dataclass(frozen=True)
class PolicyValue:
    """The estimated utility of one policy."""

    name: str
    utility: dict[int, intervals.Interval]  # cutoff -> the estimate; the last cutoff is K, all positions
    estimates: dict[str, intervals.Interval]  # estimator -> the estimate at K
    bootstrap: intervals.Interval  # the chosen estimate at K with a bootstrap interval
    difference: intervals.Comparison | None  # to the logged order at K, paired by query; None for that order itself
    support: Support
    values: NDArray[np.float64]  # per-query values of the chosen estimator at K, for comparisons between policies
    by_model: NDArray[np.float64]  # the estimate by each network, or each cut, of the evaluation alone, `[1, 2]`

    def to_row(self) -> dict[str, float | None]:
        """Return the estimate over all positions and the difference to the logged order, as for `to_frame`."""
        *_, whole = self.utility.values()
        gap, row = self.difference, {"utility": whole.mean, "low": whole.low, "high": whole.high}
        names = {"difference": "mean", "difference_low": "low", "difference_high": "high", "p_value": "p_value"}
        return row | {name: None if gap is None else getattr(gap, end) for name, end in names.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, without the per-query values."""
        hidden = ("values", "by_model")
        return {name: to_jsonable(value) for name, value in asdict(self).items() if name not in hidden}


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Policies evaluated on the same queries."""

    policies: list[PolicyValue]  # the logged order comes first
    estimator: str
    measure: str  # the unit of a utility: clicks, conversions, or value
    splits: list[str]
    queries: int
    lists: int
    rows: int
    clicks: list[str]  # names of the refitted networks
    specification: Specification  # the calibration test of these models
    floor: float  # lower bound of a logged click probability in a ratio
    all_rows: int  # rows of these splits; more than `rows` when only a sample of the queries fitted the memory
    independence: IndependenceTest | None = None  # of clicks from the items above
    randomised: RandomisedEvaluation | None = None  # on lists in random order, if some are marked as such
    main: str | None = None  # the policy to be shipped, which a conclusion is about; None for the best

    def __getitem__(self, name: str) -> PolicyValue:
        found = {policy.name: policy for policy in self.policies}
        if name not in found:
            raise KeyError(f"no policy is called '{name}'; there are {', '.join(found)}")
        return found[name]

    def __repr__(self) -> str:
        """Return a line for each policy, and the warnings; `urank.report.evaluation_report` has the full report."""
        lines = [f"{self.measure} per list by {self.estimator}, {self.queries:,} queries"]
        for policy in self.policies:
            *_, whole = policy.utility.values()
            line = f"{policy.name:<12} {whole.mean:.4f} ({whole.low:.4f} to {whole.high:.4f})"
            gap = policy.difference
            if gap is not None:
                line += f", to logged {gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f}), p = {gap.p_value:.2g}"
            lines.append(line)
        return "\n".join([*lines, *self.warnings])

    def compare(self, better: str, worse: str) -> intervals.Comparison:
        """Compute the difference between two policies, paired by query."""
        one, other = self[better], self[worse]
        return _compared(self.estimator, one.values, other.values, one.by_model - other.by_model)

    @property
    def positions(self) -> int:
        """K, the last cutoff."""
        return list(self.policies[0].utility)[-1]

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the estimates, a sentence each."""
        sample = [
            f"evaluated on a sample of the queries, {self.rows:,} of {self.all_rows:,} impressions, as many as fit "
            "into the memory (allow more with --memory)"
        ]
        by_sentence: dict[str, list[str]] = {}
        for policy in self.policies:
            for sentence in policy.support.warnings:
                by_sentence.setdefault(sentence, []).append(policy.name)
        own = [f"{', '.join(names)}: {sentence}" for sentence, names in by_sentence.items()]
        depends = self.independence is not None and not self.independence.independent
        apart = [self.independence.sentence] if self.independence is not None and depends else []
        absent = [] if self.randomised is None or self.randomised.warning is None else [self.randomised.warning]
        return [*(sample if self.rows < self.all_rows else []), *self.specification.warnings, *apart, *absent, *own]

    @property
    def alarms(self) -> list[str]:
        """Signs that the estimates are wrong, a clause each."""
        found = []
        for policy in self.policies[1:]:
            if policy.name == "random" and policy.difference is not None and policy.difference.low > 0:
                found.append("a random order seems to earn more than the logged one")
            chosen = policy.estimates[self.estimator]
            for name in ("self_normalised", "doubly_robust", "ips", "snips"):
                other = policy.estimates.get(name, chosen)
                if other.low > chosen.high or other.high < chosen.low:
                    found.append(f"the estimators {self.estimator} and {name} contradict each other on {policy.name}")
        return found

    def to_frame(self) -> pl.DataFrame:
        """Return the utility of each policy over all positions, and its difference to the logged order.

        There is a row for each policy; differences are null for the logged order. Ends of 95 % intervals are in the
        columns `low` and `high`, `difference_low` and `difference_high`.
        """
        return pl.DataFrame(
            [{"policy": each.name, **each.to_row()} for each in self.policies], infer_schema_length=None
        )

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return str(import_module("urank.report.evaluation_report").evaluation_html(self))  # of a higher layer

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        names = ("estimator", "measure", "splits", "queries", "lists", "rows", "all_rows", "clicks", "floor")
        return {
            **{name: getattr(self, name) for name in names},
            "specification": to_jsonable(asdict(self.specification)),
            "warnings": self.warnings,
            "alarms": self.alarms,
            "independence": None if self.independence is None else to_jsonable(asdict(self.independence)),
            "randomised": None if self.randomised is None else to_jsonable(asdict(self.randomised)),
            "policies": [policy.to_dict() for policy in self.policies],
        }


class EvaluationOptions(TypedDict, total=False):
    """Options that every evaluation forwards to `evaluate_policies`."""

    estimator: str
    floor: float
    config: CrossfitConfig | None
    judges: Sequence[ClickModel]
    randomised: Collection[str]
    report: Report


def evaluate_policies(
    policies: Sequence[Policy],
    dataset: Dataset,
    *,
    splits: Sequence[str] = ("test",),
    estimator: str = "auto",
    cutoffs: Sequence[int] = (1, 3, 5),
    floor: float = FLOOR,
    config: CrossfitConfig | None = None,
    judges: Sequence[ClickModel] = (),
    randomised: Collection[str] = (),
    report: Report = silent,
) -> Evaluation:
    """Estimate the expected utility of policies from a log.

    Args:
        policies: those to evaluate besides the logged order, which is always included.
        dataset: a prepared log; its queries must be new to the policies. If its memory is too small for all queries, a
            sample of them is used.
        splits: the splits to evaluate on.
        estimator: `refit`, which is also `auto`, or one of `ESTIMATORS`.
        cutoffs: also estimate the utility of this many first positions.
        floor: lower bound of a logged click probability in a ratio.
        config: settings of the judges, for a log without any, and the seed.
        judges: two networks that were trained on other queries; by default they are trained on halves of these splits.
        randomised: marks `COLUMN=VALUE` of lists in random order, which are also evaluated on their own.
        report: Progress callback.
    """
    has_propensity = dataset.has("propensity")
    chosen = REFIT if estimator == "auto" else estimator
    if chosen not in (REFIT, *ESTIMATORS):
        raise ConfigError(f"estimator must be auto, {REFIT} or one of {', '.join(ESTIMATORS)}; got '{estimator}'")
    if chosen != REFIT and needs_propensity(chosen) and not has_propensity:
        raise ConfigError(f"estimator {chosen} needs the column propensity, which {dataset.folder} does not have")
    if any(split not in SPLITS for split in splits) or not splits:
        raise ConfigError(f"splits must be some of {', '.join(SPLITS)}; got '{', '.join(splits)}'")
    config = CrossfitConfig() if config is None else config
    evaluated: list[Policy] = [LoggedOrder(), *policies]
    _check_policies(evaluated, dataset)
    K = dataset.positions
    places = [*sorted({cutoff for cutoff in cutoffs if cutoff < K}), K]
    all_rows = sum(dataset.rows(split) for split in splits)
    dataset = evaluation_sample(dataset, splits, query_bytes(len(evaluated), len(places), propensity=has_propensity))
    marks = check_marks(randomised, dataset, splits)
    cuts = _judges(dataset, splits, judges, config, report)
    totals, calibration = QueryTotals(places), CalibrationTest(K)
    roles = [name for name in ("position", "click", "value", "propensity", "item_id") if dataset.has(name)]
    read = [
        *dataset.features,
        *(name for policy in policies for name in policy.columns),
        *roles,
        *(column for column, _ in marks),
    ]
    columns = dict.fromkeys(read)
    blocks: list[Block] = []
    orders: list[list[NDArray[np.int64]]] = []
    rows, all_own = 0, sum(dataset.rows(split) for split in splits)
    for block in evaluation_blocks(dataset, splits, list(columns), seed=config.seed):
        blocks.append(block)
        orders.append([policy.positions(block) for policy in evaluated])
        rows += block.items.num_rows
        report("ranking the held-out lists", rows * distributed.size(), all_own)
    held_out = _held_out(blocks, orders, cuts, config.seed, len(evaluated))
    found = refit(cuts, held_out, places, lambda done: report("refitting the judges", done, sum(map(len, cuts))))
    first = 0
    for block, given in zip(blocks, orders, strict=True):
        tables = [table[first : first + block.items.num_rows].astype(np.float64) for table in found.tables]
        first += block.items.num_rows
        logged = [_logged_batch(block, table) for table in (np.mean(tables, axis=0), *tables)]
        calibration.add(logged[0], block.query_hash)
        totals.add(block.query_hash, logged, [pad(each, block.offsets, fill=1) for each in given], floor)
        report("evaluating", totals.rows * distributed.size(), all_own)
    totals.done()
    totals.refitted = found
    names = [policy.name for policy in evaluated]
    on_random = _on_random_lists(blocks, orders, names, marks, dataset) if marks else None
    usable = [name for name in ESTIMATORS if has_propensity or not needs_propensity(name)]
    return Evaluation(
        policies=[_policy_value(totals, n, policy.name, chosen, usable, config) for n, policy in enumerate(evaluated)],
        estimator=chosen,
        measure="value" if dataset.has("value") else dataset.outcome,
        splits=list(splits),
        queries=totals.queries,
        lists=int(totals.terms[0, K].lists.sum()),
        rows=totals.rows,
        clicks=[model.name for cut in cuts for model in cut],
        specification=calibration.result(),
        floor=floor,
        all_rows=all_rows,
        independence=_independence(blocks, np.mean(found.tables, axis=0), K),
        randomised=on_random,
    )


def _mark(text: str, dataset: Dataset) -> tuple[str, str]:
    """Parse a mark COLUMN=VALUE of lists in random order; the column may have its name in the source."""
    column, equals, value = text.partition("=")
    column = {name: role for role, name in dataset.columns.items()}.get(column, column)
    known = [*dataset.features, *dataset.description["roles"]]
    if not equals or column not in known or column in ("query_id", "session_id"):
        raise ConfigError(f"randomised must be COLUMN=VALUE with a column of the log; got '{text}'")
    if column in dataset.numeric and not _is_number(value):
        raise ConfigError(f"randomised must name a number, since {column} has numbers; got '{text}'")
    return column, value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_marks(randomised: Collection[str], dataset: Dataset, splits: Sequence[str]) -> list[tuple[str, str]]:
    """Fail fast: parse marks `COLUMN=VALUE` of lists in random order, and refuse those that no evaluated list has."""
    marks = [_mark(text, dataset) for text in randomised]
    columns = list(dict.fromkeys(column for column, _ in marks))
    found = (_marked(block, marks).any() for split in splits for block in dataset.blocks(split, columns))
    if marks and not any(found):
        named = " or ".join("=".join(mark) for mark in marks)
        raise DataError(
            f"no list of the splits {', '.join(splits)} has {named} (--randomised); leave it out, or evaluate a "
            "larger share of the log"
        )
    return marks


def _marked(block: Block, marks: Sequence[tuple[str, str]]) -> NDArray[np.bool_]:
    """Return the mask `[lists]` of the lists with one of the marks."""
    marked = np.zeros(len(block.offsets) - 1, dtype=np.bool_)
    for column, value in marks:
        values = pl.Series(block.items[column].combine_chunks()).gather(block.offsets[:-1])
        same = values == float(value) if values.dtype.is_numeric() else values.cast(pl.String) == value
        marked |= same.fill_null(False).to_numpy()
    return marked


def _on_random_lists(
    blocks: Sequence[Block],
    orders: Sequence[Sequence[NDArray[np.int64]]],
    names: Sequence[str],
    marks: Sequence[tuple[str, str]],
    dataset: Dataset,
) -> RandomisedEvaluation:
    """Evaluate the policies on the lists that are marked as random, by the values of columns.

    A policy also ranks candidates that were not shown. What it would earn with them at the slots of a list is unknown
    here, so that the items shown share the slots in the order that the policy gives them.
    """
    parts = []
    for block, given in zip(blocks, orders, strict=True):
        shown = block.column("position") <= dataset.positions
        rows = np.repeat(_marked(block, marks), np.diff(block.offsets)) & shown
        lengths = np.bincount(list_ids(block.offsets)[rows], minlength=len(block.offsets) - 1)
        marked = lengths > 0
        parts.append((block, rows, lengths[marked], block.query_hash[marked], given))

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([block.column(name)[rows] for block, rows, *_ in parts])

    lists = RandomisedLists(
        position=joined("position"),
        click=joined("click"),
        offsets=np.append(0, np.cumsum(np.concatenate([lengths for _, _, lengths, _, _ in parts]))),
        query=np.concatenate([queries for *_, queries, _ in parts]),
        value=joined("value") if dataset.has("value") else None,
    )
    given_orders = {
        name: _ranks_of_shown(np.concatenate([given[number][rows] for _, rows, _, _, given in parts]), lists)
        for number, name in enumerate(names)
        if number
    }
    return evaluate_randomised(lists, {name: joined(name) for name in dataset.numeric}, given_orders)


def _ranks_of_shown(positions: NDArray[np.int64], lists: RandomisedLists) -> NDArray[np.int64]:
    """Return the rank of each item among those of its list, `[rows]` from 1, given positions among all candidates."""
    ranks = np.empty(len(positions), dtype=np.int64)
    ranks[np.lexsort((positions, lists.lists))] = np.arange(len(positions)) - lists.offsets[lists.lists] + 1
    return ranks


def _independence(blocks: Sequence[Block], table: NDArray[np.float32], K: int) -> IndependenceTest:
    """Test whether clicks depend on the items above; in a process group, on the lists of one worker."""
    own = asdict(_independence_of(blocks, table, K)) if blocks else None
    found = next(each for each in distributed.all_gather(own) if each is not None)
    tests = {name: ScoreTest(**found[name]) for name in ("clicks_above", "item_above")}
    return IndependenceTest(**{**found, **tests})


def _independence_of(blocks: Sequence[Block], table: NDArray[np.float32], K: int) -> IndependenceTest:
    position = np.concatenate([block.column("position") for block in blocks]).astype(np.int64)
    shown = position <= K
    lengths = np.concatenate([np.diff(block.offsets) for block in blocks])
    owner = np.repeat(np.arange(len(lengths)), lengths)[shown]
    kept = np.bincount(owner, minlength=len(lengths))
    query = np.concatenate([block.query_hash for block in blocks])[kept > 0]
    click = np.concatenate([block.column("click") for block in blocks])[shown]
    chance = table[np.flatnonzero(shown), position[shown] - 1].astype(np.float64)
    offsets = np.append(0, np.cumsum(kept[kept > 0]))
    return independence_test(chance, click, position[shown], offsets, query)


def evaluation_sample(dataset: Dataset, splits: Sequence[str], bytes_per_query: int) -> Dataset:
    """Return the dataset, or a view of as many of its queries as fit into its memory; see `query_bytes`."""
    rows = dataset.rows_of_query(splits)
    most_queries = dataset.memory.sums_bytes / (bytes_per_query + rows * row_bytes(dataset))
    return sample_to_fit(dataset, splits, most_queries * rows)


def row_bytes(dataset: Dataset) -> int:
    """Estimate the memory of an evaluated row: its columns and inputs, its representation, and two tables."""
    return 40 * len(dataset.features) + 20 * dataset.positions + 200


def _judges(
    dataset: Dataset, splits: Sequence[str], judges: Sequence[ClickModel], config: CrossfitConfig, report: Report
) -> list[list[ClickModel]]:
    """Return the networks of each cut: the judges, or networks trained on halves of these splits."""
    if judges:
        return [[judge] for judge in judges]
    first = fit_judges(dataset, splits, config, report=report)
    shared = first[0].featurizer
    more = [fit_judges(dataset, splits, config, featurizer=shared, cut=cut, report=report) for cut in range(1, CUTS)]
    return [first, *more]


def _held_out(
    blocks: Sequence[Block],
    orders: Sequence[Sequence[NDArray[np.int64]]],
    cuts: Sequence[Sequence[ClickModel]],
    seed: int,
    policies: int,
) -> HeldOut:
    """Join the blocks of an evaluation as rows; a worker may have none."""
    featurizer = cuts[0][0].featurizer
    nothing = Inputs(
        np.empty((0, len(featurizer.inputs)), np.float32), np.empty((0, len(featurizer.categorical)), np.int64)
    )
    inputs = [nothing, *(featurizer.encode(block.items, block.offsets) for block in blocks)]
    of_policies = list(zip(*orders, strict=True)) if orders else [()] * policies

    def joined(parts: Iterable[NDArray[Any]], kind: type) -> NDArray[Any]:
        return np.concatenate([np.empty(0, kind), *parts])

    def homes(block: Block) -> NDArray[np.int64]:
        lists = [fold_of(block, len(models), seed + n) for n, models in enumerate(cuts)]
        return np.stack([each[list_ids(block.offsets)] for each in lists])

    def values(block: Block) -> NDArray[np.float64]:
        known = "value" in block.items.column_names
        return block.column("value").astype(np.float64) if known else np.ones(block.items.num_rows)

    return HeldOut(
        inputs=Inputs(
            np.concatenate([each.numeric for each in inputs]), np.concatenate([each.categorical for each in inputs])
        ),
        position=joined((block.column("position").astype(np.int64) for block in blocks), np.int64),
        click=joined((block.column("click").astype(np.float64) for block in blocks), np.float64),
        value=joined((values(block) for block in blocks), np.float64),
        query=joined((block.query_hash[list_ids(block.offsets)] for block in blocks), np.uint64),
        list_query=joined((block.query_hash for block in blocks), np.uint64),
        home=np.concatenate([np.empty((len(cuts), 0), np.int64), *(homes(block) for block in blocks)], axis=1),
        orders=[joined(each, np.int64) for each in of_policies],
    )


def evaluation_blocks(dataset: Dataset, splits: Sequence[str], columns: Sequence[str], *, seed: int) -> Iterator[Block]:
    """Iterate over the lists of an evaluation, items shuffled so that ties are not broken in the logged order.

    The order of the items depends on the dataset, the splits and `seed` alone: a second pass with the same arguments,
    such as one that compares an evaluation with known utilities, breaks ties alike. In a process group, each worker
    iterates over its share of the row groups. The dataset is that of `evaluation_sample`, the seed that of the
    evaluation's `CrossfitConfig`.
    """
    most_rows = max(1, BLOCK_ENTRIES // (dataset.positions * (1 + CUTS)))
    for split in splits:
        groups = dataset.groups(split)
        for number in distributed.share(len(groups)):
            rng = np.random.default_rng([seed, SPLITS.index(split), number])
            for part in dataset.read(groups[number], columns).parts(most_rows):
                yield part.shuffled(rng)


def _check_policies(policies: Sequence[Policy], dataset: Dataset) -> None:
    """Fail fast: validate names and columns before click models are fitted."""
    names = [policy.name for policy in policies]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"policies must have distinct names; '{twice[0]}' occurs twice")
    known = {*dataset.features, *dataset.description["roles"]}
    for policy in policies:
        if absent := [name for name in policy.columns if name not in known]:
            raise DataError(f"policy '{policy.name}' needs the column '{absent[0]}', which the log does not have")


def _logged_batch(block: Block, table: NDArray[np.float64]) -> LoggedBatch:
    names = {"position", "click", "value", "propensity"} & set(block.items.column_names)
    padded = {name: pad(block.column(name), block.offsets) for name in names}
    return LoggedBatch(
        table=pad(table, block.offsets),
        position=padded["position"].astype(np.int64),
        click=padded["click"],
        value=padded.get("value", np.ones(padded["click"].shape)),
        where=where_items(block.offsets),
        propensity=padded.get("propensity"),
    )


def _with_models(found: IntervalT, by_model: NDArray[np.float64]) -> IntervalT:
    """Add the variance between click models to an interval over queries, given the estimate by each `[cuts, 2]`."""
    return intervals.add_model_variance(found, intervals.model_variance(by_model), len(by_model))


def _compared(
    estimator: str, values: NDArray[np.float64], other: NDArray[np.float64], by_model: NDArray[np.float64]
) -> intervals.Comparison:
    """Compute the difference between two policies from their values and the difference by each network."""
    if estimator == REFIT:
        return intervals.refitted_interval(values - other, by_model)
    return _with_models(intervals.paired(values, other), by_model)


def _policy_value(
    totals: QueryTotals, number: int, name: str, chosen: str, usable: Sequence[str], config: CrossfitConfig
) -> PolicyValue:
    K = totals.places[-1]

    def estimate(place: int, estimator: str) -> intervals.Interval:
        values, by_model = totals.values(number, place, estimator), totals.by_model(number, place, estimator)
        if estimator == REFIT and number:
            found = intervals.refitted_interval(values, by_model)
            return intervals.Interval(max(found.mean, 0.0), found.error, max(found.low, 0.0), found.high, found.n)
        return _with_models(intervals.normal_interval(values), by_model)

    values, by_model = totals.values(number, K, chosen), totals.by_model(number, K, chosen)
    difference = None
    if number:
        baseline = totals.values(0, K, chosen)
        difference = _compared(chosen, values, baseline, by_model - totals.by_model(0, K, chosen))
    found = support(totals.terms[number, K], chosen)
    return PolicyValue(
        name=name,
        utility={place: estimate(place, chosen) for place in totals.places},
        estimates={estimator: estimate(K, estimator) for estimator in (REFIT, *usable)},
        bootstrap=intervals.bootstrap_interval(values, rng=config.seed),
        difference=difference,
        support=found if number else replace(found, warnings=[]),
        values=values,
        by_model=by_model,
    )


# Sums by query

TERMS, TERMS_WITH_PROPENSITY = 11, 15
"""Numbers that an estimate needs of each query."""


def query_bytes(policies: int, places: int, *, propensity: bool) -> int:
    """Estimate the memory of an evaluation per query: its sums, and as much again while they are joined."""
    return 2 * 8 * (TERMS_WITH_PROPENSITY if propensity else TERMS) * policies * places


class QueryTotals:
    """Sums of the estimators' terms by query, for each policy and cutoff."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = list(places)
        self.rows = 0
        self._queries: list[NDArray[np.uint64]] = []
        self._terms: dict[tuple[int, int], list[Terms]] = {}
        self._totals: dict[tuple[int, int], list[Terms]] = {}
        self.refitted: Refitted

    def add(
        self,
        query: NDArray[np.uint64],
        logged: Sequence[LoggedBatch],
        orders: Sequence[NDArray[np.int64]],
        floor: float,
    ) -> None:
        """Add the lists of a block; `query` `[B]` identifies the query of each.

        Args:
            logged: the lists with the mean of the refitted tables, then with the table of each model alone.
            orders: `[B, n]` of each policy, the positions it gives.
        """
        queries, home = np.unique(query, return_inverse=True)
        whole = np.zeros_like(home)
        self._queries.append(queries)
        self.rows += int(logged[0].where.sum())
        for policy, positions in enumerate(orders):
            for place in self.places:
                own, *others = (list_terms(each, positions, cutoff=place, floor=floor) for each in logged)
                self._terms.setdefault((policy, place), []).append(own.by(home, len(queries)))
                self._add_totals((policy, place), [terms.by(whole, 1) for terms in others])

    def done(self) -> None:
        """Join the sums that several blocks, or several workers, have of one query."""
        if distributed.size() > 1:
            self._gather()
        queries, home = np.unique(np.concatenate(self._queries), return_inverse=True)
        self.queries = len(queries)
        self.terms: dict[tuple[int, int], Terms] = {}
        for key in list(self._terms):  # freed one by one: the parts take as much memory as the joined terms
            self.terms[key] = Terms.concatenate(self._terms.pop(key)).by(home, len(queries))

    def _gather(self) -> None:
        """All-gather the sums, so that every worker has those of all."""
        arrays: dict[str, NDArray[Any]] = {"queries": np.concatenate([*self._queries, np.empty(0, np.uint64)])}
        for (policy, place), parts in self._terms.items():
            arrays[f"terms {policy} {place}"] = Terms.concatenate(parts).to_array()
            arrays[f"totals {policy} {place}"] = Terms.concatenate(self._totals[policy, place]).to_array()
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        self.rows = int(distributed.all_reduce_sum([self.rows])[0])
        self._queries, self._terms, self._totals = [], {}, {}
        for data in distributed.all_gather_bytes(buffer.getvalue()):
            with np.load(io.BytesIO(data), allow_pickle=False) as gathered:
                self._queries.append(gathered["queries"])
                for name in gathered.files[1:]:
                    kind, policy, place = name.split()
                    key, array = (int(policy), int(place)), gathered[name]
                    if kind == "terms":
                        self._terms.setdefault(key, []).append(Terms.from_array(array))
                    else:
                        self._add_totals(key, [Terms.from_array(array[:, n : n + 1]) for n in range(array.shape[1])])

    def _add_totals(self, key: tuple[int, int], totals: list[Terms]) -> None:
        known = self._totals.get(key)
        self._totals[key] = [a + b for a, b in zip(known, totals, strict=True)] if known else totals

    def values(self, policy: int, place: int, estimator: str) -> NDArray[np.float64]:
        """Return the per-query values of an estimate."""
        if estimator != REFIT:
            return _values(self.terms[policy, place], estimator, logged=policy == 0)
        observed, at = logged_values(self.terms[policy, place]), self.places.index(place)
        found = self.refitted
        spared = (self.queries - 1) / max(self.queries - found.degrees, self.queries / 2)  # refitting uses up degrees
        influence = self.queries * np.sqrt(max(spared, 1.0)) * found.influence[policy, at]
        return np.asarray(observed + found.gains[policy, at].mean() + influence)

    def by_model(self, policy: int, place: int, estimator: str) -> NDArray[np.float64]:
        """Return the estimate by the networks of each cut alone, `[1, 2]`."""
        if estimator == REFIT:
            observed = logged_values(self.terms[policy, place]).mean()
            return np.asarray(observed + self.refitted.gains[policy, self.places.index(place)]).reshape(1, -1)
        found = [_values(total, estimator, logged=policy == 0).mean() for total in self._totals[policy, place]]
        return np.array(found).reshape(-1, 2)


def _values(terms: Terms, estimator: str, *, logged: bool) -> NDArray[np.float64]:
    """The utility of the logged order is observed and needs no weights; only `direct` compares predictions."""
    return logged_values(terms) if logged and estimator != "direct" else query_values(terms, estimator)


# Support


@dataclass(frozen=True)
class Support:
    """How much evidence a log contains about a policy.

    Attributes:
        placements: how many items have a place under the policy.
        as_logged, floored, unseen: the share of them at their logged position; whose weight is floored; that the
            logged list did not show, candidates below the last position.
        effective: the effective sample size of the ratio weights, (Σ w)² / Σ w².
        effective_ips: the same of the IPS weights; this and coverage are None without propensities.
        largest_query: the largest share of |Σ c w b| that one query carries, by the ratio or the IPS weights.
        coverage: Σ w' / placements with its standard error, near 1 if the logging policy could have produced all of
            them; about the rest, the log alone contains no evidence.
        warnings: a sentence for each reason to doubt the estimates.
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


def support(terms: Terms, estimator: str = "ratio") -> Support:
    """Compute the support of a policy from terms with one entry for each query, for an estimator.

    Shares of nothing are NaN.
    """
    placements = terms.placed.sum()
    effective_ips = coverage = coverage_error = None
    largest_query = _largest_share(terms.ratio.clicked)
    if terms.ips is not None:
        effective_ips = _effective(terms.ips)
        coverage = _share(terms.ips.weight.sum(), placements)
        coverage_error = intervals.normal_interval(linearised([terms.ips.weight], [terms.placed])).error
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
    return replace(found, warnings=list(_support_warnings(found, weighted=estimator != REFIT)))


def _support_warnings(found: Support, *, weighted: bool) -> Iterator[str]:
    """Warn of weak support; that of weights only if the estimator has any."""
    if found.placements == 0:
        yield "this policy gives no item a place"
        return
    if weighted and found.coverage is None and found.as_logged < 0.2:
        yield (
            f"only {_percent(found.as_logged)} of this policy's placements are the logged ones and propensities are "
            "not known; the estimates rest on the click model"
        )
    if found.coverage is not None and found.coverage_error is not None:
        # Two standard errors, so that chance alone raises no warning; a single query has no error and no margin.
        margin = 2 * found.coverage_error if isfinite(found.coverage_error) else 0.0
        if found.coverage + margin < 0.9:
            yield (
                f"only {_percent(found.coverage)} of this policy's placements could have been logged; the rest relies "
                "on the click model and counts nothing in IPS"
            )
        if found.coverage - margin > 1.1:
            yield (
                f"the IPS weights add up to {_percent(found.coverage)} of this policy's placements; the logged "
                "propensities are too low"
            )
    if weighted and found.floored > 0.05:
        yield (
            f"{_percent(found.floored)} of this policy's placements have a logged click probability below the floor; "
            "the ratio estimate is too low"
        )
    if found.unseen > 0.05:
        yield (
            f"{_percent(found.unseen)} of this policy's placements are items that the logged list did not show; only "
            "the click model covers them"
            + (", and the ratio estimate, which counts nothing for them, is too low" if weighted else "")
        )
    # A fixed order meets a random one in 1/K of its placements, by design; more uneven than that is a warning.
    as_logged = round(found.as_logged * found.placements)
    sizes = {"ratio": (found.effective, found.placements), "IPS": (found.effective_ips, as_logged)}
    for kind, (effective, whole) in sizes.items() if weighted else ():
        if effective is not None and effective < max(100, 0.05 * whole):
            yield (
                f"the {kind} weights of this policy's {found.placements:,} placements have an effective sample size of "
                f"only {effective:,.0f}"
            )
    if weighted and found.largest_query > 0.1:
        yield f"one query carries {_percent(found.largest_query)} of the estimate"


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


# Calibration test

CALIBRATION_LEVELS = 3
MISFIT_LEVEL = 0.01
"""The p-value, adjusted for the number of cells, below which a cell is miscalibrated."""


@dataclass(frozen=True)
class Cell:
    """Rows at one position with similar predicted click probabilities, and their mean click rates."""

    position: int
    level: int  # from 1, the third of the position's rows with the lowest predictions, to 3
    rows: int
    predicted: float
    observed: float
    z: float  # the difference of both in standard errors, clustered by query
    p_value: float  # adjusted for the number of cells (Holm)


@dataclass(frozen=True)
class Specification:
    """Predicted against observed clicks on held-out queries, with a warning if the model is miscalibrated."""

    cells: list[Cell]
    warnings: list[str]


class CalibrationTest:
    """Test whether predicted and observed clicks agree, by position and level of the prediction."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self._sums = np.zeros((6, positions * CALIBRATION_LEVELS))  # rows, predicted, observed, Σ d, Σ d², Σ p (1 − p)

    def add(self, logged: LoggedBatch, query: NDArray[np.uint64]) -> None:
        """Add logged lists; `query` `[B]` identifies the query of each."""
        queries, home = np.unique(query, return_inverse=True)
        where, place = logged.shown, logged.position - 1
        chance = np.take_along_axis(logged.table, np.where(where, place, 0)[..., None], axis=2)[..., 0][where]
        click, place = logged.click[where], place[where]
        cell = place * CALIBRATION_LEVELS + _levels(chance, place, self.positions)
        cells = self.positions * CALIBRATION_LEVELS
        owner = np.broadcast_to(home[:, None], where.shape)[where]
        off = np.bincount(owner * cells + cell, click - chance, len(queries) * cells).reshape(len(queries), cells)
        sums = (np.ones(len(cell)), chance, click, chance * (1 - chance))
        rows, predicted, observed, spread = (np.bincount(cell, each, cells) for each in sums)
        self._sums += np.stack([rows, predicted, observed, off.sum(axis=0), (off**2).sum(axis=0), spread])

    def result(self) -> Specification:
        """Return the cells of all workers, with a warning if any differ by more than chance."""
        sums = np.array(distributed.all_reduce_sum(self._sums.ravel().tolist())).reshape(self._sums.shape)
        rows, predicted, observed, off, squares, spread = sums
        # Where few clicks were expected and none occurred, Σ d² is far too small. There the variance of independent
        # clicks is used, inflated by the dependence of clicks within a query over all cells.
        inflation = max(1.0, squares.sum() / max(spread.sum(), 1e-300))
        variance = np.maximum(squares, inflation * spread)
        seen = np.flatnonzero(variance > 0)
        z = off[seen] / np.sqrt(variance[seen])
        p_values = intervals.holm(2 * ndtr(-np.abs(z)))
        place, level = np.divmod(seen, CALIBRATION_LEVELS)
        counts, rates = rows[seen].astype(np.int64), (each[seen] / rows[seen] for each in (predicted, observed))
        columns = (place + 1, level + 1, counts, *rates, z, p_values)
        cells = [Cell(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        misfits = [cell for cell in cells if cell.p_value < MISFIT_LEVEL]
        if not misfits:
            return Specification(cells, [])
        worst = min(misfits, key=lambda cell: cell.p_value)
        warning = (
            f"the click model of this evaluation is off: at position {worst.position} it expects {worst.predicted:.2%} "
            f"where {worst.observed:.2%} were observed ({worst.rows:,} rows, p = {worst.p_value:.1g}; {len(misfits)} "
            f"of {len(cells)} groups of rows are off), so intervals that rely on it may not cover the truth"
        )
        return Specification(cells, [warning])


def _levels(chance: NDArray[np.float64], place: NDArray[np.int64], positions: int) -> NDArray[np.int64]:
    """Return the third of its position's rows, by rising probability, that each row belongs to, from 0."""
    order = np.lexsort((chance, place))
    counts = np.bincount(place, minlength=positions)
    rank = np.empty(len(place), dtype=np.int64)
    rank[order] = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank * CALIBRATION_LEVELS // counts[place]
