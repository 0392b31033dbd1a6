"""What policies would earn, from a log: estimates with intervals, side by side, beside the truth where it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.evaluate.crossfit import CrossfitConfig, fit_judges
from urank.evaluate.disagreement import disagreement, widened
from urank.evaluate.offpolicy import (
    ESTIMATORS,
    Logged,
    Terms,
    linearised,
    list_terms,
    logged_values,
    needs_propensity,
    query_values,
)
from urank.evaluate.specification import Calibration, Specification
from urank.evaluate.stats import Comparison, Interval, bootstrap_interval, normal_interval, paired
from urank.evaluate.support import Support, support
from urank.log.dataset import Block, Dataset
from urank.log.lists import pad, where_items
from urank.log.split import SPLITS
from urank.progress import Report, silent
from urank.rankers.policies import Logged as LoggedOrder
from urank.rankers.policies import Policy
from urank.utility import FLOOR, utility

__all__ = ["Evaluation", "PolicyValue", "evaluate_policies"]

Truth = Callable[[Block], NDArray[np.float64]]


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

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without the per-query values."""
        told = asdict(self)
        del told["values"]
        plain: dict[str, Any] = _plain(told)
        return plain


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

    def __getitem__(self, name: str) -> PolicyValue:
        found = {policy.name: policy for policy in self.policies}
        if name not in found:
            raise KeyError(f"no policy is called '{name}'; there are {', '.join(found)}")
        return found[name]

    def compare(self, better: str, worse: str) -> Comparison:
        """The difference between two policies, paired by query."""
        return paired(self[better].values, self[worse].values)

    @property
    def warnings(self) -> list[str]:
        """What to keep in mind before believing it."""
        own = [f"{policy.name}: {sentence}" for policy in self.policies for sentence in policy.support.warnings]
        return [*self.specification.warnings, *own]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "estimator": self.estimator,
            "measure": self.measure,
            "splits": self.splits,
            "queries": self.queries,
            "lists": self.lists,
            "rows": self.rows,
            "clicks": self.clicks,
            "floor": self.floor,
            "specification": _plain(asdict(self.specification)),
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
        dataset: a prepared log; its queries must be new to the policies.
        splits: which of its parts to judge by.
        estimator: one of `ESTIMATORS`, or `auto`: doubly robust when the log knows its propensities, else direct.
        cutoffs: also the utility of so many first positions.
        floor: least that a logged click probability counts as.
        config: the evaluation's own click model.
        truth: gives the true click table `[rows, K]` of a block, where a simulation knows it.
        report: told how far it is.
    """
    has_propensity = dataset.has("propensity")
    chosen = ("doubly_robust" if has_propensity else "direct") if estimator == "auto" else estimator
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
    sums, calibration = _Sums(places), Calibration(K)
    roles = [name for name in ("position", "click", "value", "propensity", "item_id") if dataset.has(name)]
    columns = dict.fromkeys([*dataset.features, *(name for policy in policies for name in policy.columns)])
    judges = fit_judges(dataset, splits, config, report=report)
    for split in splits:
        for number, written in enumerate(dataset.blocks(split, [*columns, *roles])):
            block = written.shuffled(np.random.default_rng([config.seed, SPLITS.index(split), number]))
            tables = judges.tables(block)
            logged = [
                _logged(block, table) for table in (judges.own(block, tables), *tables.reshape(-1, *tables.shape[2:]))
            ]
            calibration.add(logged[0], block.query_hash)
            orders = [pad(policy.positions(block), block.offsets, fill=1) for policy in judged]
            sums.add(block, logged, orders, pad(truth(block), block.offsets) if truth is not None else None, floor)
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
    )


def _check_columns(policies: Sequence[Policy], dataset: Dataset) -> None:
    """Refuse what a policy lacks before the click models are fitted, which takes longer."""
    known = {*dataset.features, *dataset.description["roles"]}
    for policy in policies:
        absent = next((name for name in policy.columns if name not in known), None)
        if absent is not None:
            raise DataError(f"policy '{policy.name}' needs the column '{absent}', which the log does not have")


def _policy_value(
    sums: _Sums, number: int, name: str, chosen: str, usable: Sequence[str], config: CrossfitConfig
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
    )


class _Sums:
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
        logged: Sequence[Logged],
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
                totals = [terms.by(whole, 1) for terms in others]
                known = self._totals.get(key)
                self._totals[key] = [a + b for a, b in zip(known, totals, strict=True)] if known else totals
                if true is not None:
                    earned = utility(true, positions, value=logged[0].value, where=logged[0].where, cutoff=place)
                    self._true.setdefault(key, []).append(_added(home, earned, len(queries)))

    def done(self) -> None:
        """Join what several blocks have of one query."""
        queries, home = np.unique(np.concatenate(self._queries), return_inverse=True)
        self.queries = len(queries)
        self.terms = {key: Terms.concatenate(parts).by(home, len(queries)) for key, parts in self._terms.items()}
        self.true = {
            key: linearised([_added(home, np.concatenate(parts), len(queries))], [self.terms[key].lists])
            for key, parts in self._true.items()
        }

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


def _added(home: NDArray[np.int64], values: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    return np.bincount(home, values, groups).astype(np.float64)


def _plain(value: Any) -> Any:
    """As JSON has it: null for what is not finite, text for keys."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
