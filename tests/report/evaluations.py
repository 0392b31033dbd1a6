"""Evaluations made by hand, so that every figure of a report can be checked against arithmetic."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np

from urank.evaluation.intervals import Comparison, Interval
from urank.evaluation.policy_evaluation import Cell, Evaluation, PolicyValue, Specification, Support

__all__ = ["cell", "comparison", "evaluation", "interval", "policy", "without_intervals"]

K = 10
CUTOFFS = (1, 3, 5, K)
LOGGED = 0.8
QUERIES = 1012


def interval(mean: float, half: float = 0.02) -> Interval:
    """The mean with an interval of so much to either side."""
    return Interval(mean=mean, error=half / 1.96, low=mean - half, high=mean + half, n=QUERIES)


def comparison(mean: float, half: float = 0.008, p_value: float = 2e-16) -> Comparison:
    """A difference with an interval of so much to either side."""
    return Comparison(mean=mean, error=half / 1.96, low=mean - half, high=mean + half, n=QUERIES, p_value=p_value)


def policy(
    name: str,
    mean: float,
    difference: Comparison | None = None,
    estimators: tuple[str, ...] = ("direct", "ratio", "self_normalised", "doubly_robust"),
    warnings: tuple[str, ...] = (),
) -> PolicyValue:
    """A policy that earns k/K of its utility on the first k positions."""
    return PolicyValue(
        name=name,
        utility={k: interval(mean * k / K) for k in CUTOFFS},
        estimates={each: interval(mean + 0.001 * number, 0.03) for number, each in enumerate(estimators)},
        bootstrap=Interval(mean=mean, error=0.01, low=mean - 0.015, high=mean + 0.025, n=QUERIES),
        difference=difference,
        support=Support(
            placements=10_120,
            as_logged=0.254,
            floored=0.004,
            effective=5123.4,
            effective_ips=None,
            largest_query=0.0031,
            coverage=None,
            coverage_error=None,
            warnings=list(warnings),
        ),
        values=np.full(3, mean),
        by_model=np.full((2, 2), mean),
    )


def evaluation(*others: PolicyValue, logged: PolicyValue | None = None, cells: tuple[Cell, ...] = ()) -> Evaluation:
    """The policies beside the logged order."""
    return Evaluation(
        policies=[policy("logged", LOGGED) if logged is None else logged, *others],
        estimator="ratio",
        measure="clicks",
        splits=["test"],
        queries=QUERIES,
        lists=5060,
        rows=50_600,
        clicks=["monotone", "monotone"],
        specification=Specification([cell(position=1), *cells], ["the click model is off"] if cells else []),
        floor=0.01,
        all_rows=50_600,
    )


def cell(position: int, p_value: float = 0.5) -> Cell:
    """Rows of which 12 % should be clicked and 15 % were."""
    return Cell(position=position, level=2, rows=3400, predicted=0.12, observed=0.15, z=4.8, p_value=p_value)


def without_intervals(of: PolicyValue) -> PolicyValue:
    """The same policy, judged by one query."""

    def one(found: Interval) -> Interval:
        return replace(found, error=nan, low=nan, high=nan, n=1)

    return replace(
        of,
        utility={k: one(each) for k, each in of.utility.items()},
        estimates={name: one(each) for name, each in of.estimates.items()},
        bootstrap=one(of.bootstrap),
        difference=None if of.difference is None else replace(one(of.difference), p_value=nan),
    )
