"""What policies would earn, from a log: estimates with intervals, side by side, beside the truth where it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank import team
from urank.errors import ConfigError, DataError
from urank.evaluate.crossfit import CrossfitConfig, fit_judges
from urank.evaluate.disagreement import disagreement, widened
from urank.evaluate.offpolicy import ESTIMATORS, Logged, needs_propensity
from urank.evaluate.specification import Calibration, Specification
from urank.evaluate.stats import Comparison, Interval, bootstrap_interval, normal_interval, paired
from urank.evaluate.sums import Sums, query_bytes
from urank.evaluate.support import Support, support
from urank.log.dataset import Block, Dataset
from urank.log.lists import pad, where_items
from urank.log.sample import that_fits
from urank.log.split import SPLITS
from urank.plain import plain
from urank.progress import Report, silent
from urank.rankers.policies import Logged as LoggedOrder
from urank.rankers.policies import Policy
from urank.utility import FLOOR

__all__ = ["Evaluation", "PolicyValue", "evaluate_policies"]

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
        as_json: dict[str, Any] = plain(told)
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
        """A line for each policy; `urank.report.evaluation` says more."""
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
        models = disagreement(one.by_model - other.by_model)
        return widened(paired(one.values, other.values), models, len(one.by_model))

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
            "specification": plain(asdict(self.specification)),
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
    dataset = that_fits(dataset, splits, most_queries * dataset.rows_of_query(splits))
    sums, calibration = Sums(places), Calibration(K)
    roles = [name for name in ("position", "click", "value", "propensity", "item_id") if dataset.has(name)]
    columns = dict.fromkeys([*dataset.features, *(name for policy in policies for name in policy.columns)])
    judges = fit_judges(dataset, splits, config, report=report)
    most_rows = max(1, BLOCK_ENTRIES // (K * (1 + 2 * config.cuts)))
    for block in _own_blocks(dataset, splits, [*columns, *roles], config.seed, most_rows):
        tables = judges.tables(block)
        logged = [
            _logged(block, table) for table in (judges.own(block, tables), *tables.reshape(-1, *tables.shape[2:]))
        ]
        calibration.add(logged[0], block.query_hash)
        orders = [pad(policy.positions(block), block.offsets, fill=1) for policy in judged]
        sums.add(block, logged, orders, pad(truth(block), block.offsets) if truth is not None else None, floor)
        report("judging", sums.rows * team.size(), sum(dataset.rows(split) for split in splits))
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
        for number in team.share(len(groups)):
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
    sums: Sums, number: int, name: str, chosen: str, usable: Sequence[str], config: CrossfitConfig
) -> PolicyValue:
    K = sums.places[-1]

    def estimate(place: int, estimator: str) -> Interval:
        variance = disagreement(sums.by_model(number, place, estimator))
        return widened(normal_interval(sums.values(number, place, estimator)), variance, config.cuts)

    values, baseline = sums.values(number, K, chosen), sums.values(0, K, chosen)
    apart = disagreement(sums.by_model(number, K, chosen) - sums.by_model(0, K, chosen))
    shown = support(sums.terms[number, K])
    return PolicyValue(
        name=name,
        utility={place: estimate(place, chosen) for place in sums.places},
        estimates={estimator: estimate(K, estimator) for estimator in usable},
        bootstrap=bootstrap_interval(values, rng=config.seed),
        difference=widened(paired(values, baseline), apart, config.cuts) if number else None,
        support=shown if number else replace(shown, warnings=[]),
        true={place: float(sums.true[number, place].mean()) for place in sums.places} if sums.true else None,
        true_difference=paired(sums.true[number, K], sums.true[0, K]) if sums.true and number else None,
        values=values,
        by_model=sums.by_model(number, K, chosen),
    )


def _logged(block: Block, table: NDArray[np.float64]) -> Logged:
    names = block.items.column_names
    padded = {
        name: pad(block.column(name), block.offsets)
        for name in ("position", "click", "value", "propensity")
        if name in names
    }
    return Logged(
        table=pad(table, block.offsets),
        position=padded["position"].astype(np.int64),
        click=padded["click"],
        value=padded.get("value", np.ones(padded["click"].shape)),
        where=where_items(block.offsets),
        propensity=padded.get("propensity"),
    )
