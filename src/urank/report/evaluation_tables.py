"""The tables of an evaluation: policies side by side, by every estimator, and what their figures rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan
from typing import TYPE_CHECKING

from urank.evaluate.specification import DOUBT, LEVELS, Cell, Specification
from urank.report.numbers import UNKNOWN, Units, number, p_text, percent
from urank.report.tables import Table

if TYPE_CHECKING:  # torch is slow to load, and a report needs none of it
    from urank.evaluate.compare import Evaluation, PolicyValue
    from urank.evaluate.stats import Interval

__all__ = [
    "all_positions",
    "calibration_sentence",
    "calibration_tables",
    "estimator_table",
    "evaluation_tables",
    "policy_table",
    "ranked",
    "support_table",
    "units_of",
]

_MOST_CELLS = 20


def evaluation_tables(evaluation: Evaluation) -> Iterator[Table]:
    """Everything there is to tell, in order."""
    yield policy_table(evaluation)
    yield estimator_table(evaluation)
    yield support_table(evaluation)
    found = list(calibration_tables(evaluation.specification))
    yield from found or [Table(("click model", ""), [("calibration", calibration_sentence(evaluation.specification))])]


def all_positions(evaluation: Evaluation) -> int:
    """K, the last cutoff."""
    return list(evaluation.policies[0].utility)[-1]


def units_of(evaluation: Evaluation) -> Units:
    """How to write its figures: differences in percent of what the logged order earns."""
    return Units.of(evaluation.policies[0].utility[all_positions(evaluation)].mean)


def ranked(evaluation: Evaluation) -> list[PolicyValue]:
    """The logged order, then the others by falling estimate; those without one come last."""
    K = all_positions(evaluation)
    logged, *others = evaluation.policies

    def place(policy: PolicyValue) -> tuple[bool, float]:
        mean = policy.utility[K].mean
        return isnan(mean), 0.0 if isnan(mean) else -mean

    return [logged, *sorted(others, key=place)]


def policy_table(evaluation: Evaluation) -> Table:
    """What each policy would earn and how that differs from the logged order; the columns that matter most come first,
    since a narrow terminal leaves out the last."""
    units, K = units_of(evaluation), all_positions(evaluation)
    policies = ranked(evaluation)
    columns: dict[str, list[str]] = {
        "policy": [policy.name for policy in policies],
        f"{evaluation.measure}@{K}": [units.amount(policy.utility[K].mean) for policy in policies],
        "vs logged": [_difference(policy, units) for policy in policies],
        "95 % interval": [_difference_interval(policy, units) for policy in policies],
        "p": [UNKNOWN if (found := policy.difference) is None else p_text(found.p_value) for policy in policies],
    }
    if any(policy.true is not None for policy in policies):
        columns[f"true@{K}"] = [UNKNOWN if policy.true is None else units.amount(policy.true[K]) for policy in policies]
        columns["true gain"] = _true_gains(policies, K)
    for cutoff in evaluation.policies[0].utility:
        if cutoff != K:
            means = [units.amount(policy.utility[cutoff].mean) for policy in policies]
            columns[f"{evaluation.measure}@{cutoff}"] = means
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))


def _difference(policy: PolicyValue, units: Units) -> str:
    if policy.difference is None or isnan(policy.difference.mean):
        return UNKNOWN
    absolute = number(policy.difference.mean, units.decimals, sign=True)
    return f"{units.change(policy.difference.mean)} ({absolute})" if units.in_percent else absolute


def _difference_interval(policy: PolicyValue, units: Units) -> str:
    found = policy.difference
    return UNKNOWN if found is None else units.changes(found.low, found.high)


def _true_gains(policies: Sequence[PolicyValue], K: int) -> list[str]:
    """In percent of what the logged order truly earns."""
    logged = policies[0]
    units = Units.of(logged.true[K] if logged.true is not None else 0.0)
    gains = (policy.true_difference for policy in policies)
    return [UNKNOWN if gain is None else units.change(gain.mean) for gain in gains]


def estimator_table(evaluation: Evaluation) -> Table:
    """All estimates at K, that of the chosen estimator first, with half of their 95 % interval; last, its bootstrap."""
    units = units_of(evaluation)
    policies = ranked(evaluation)
    chosen = evaluation.estimator
    names = sorted(policies[0].estimates, key=lambda name: name != chosen)
    head = (f"{evaluation.measure}@{all_positions(evaluation)} ± 95 %", *names, f"{chosen}, bootstrap")
    rows = [
        (
            policy.name,
            *(_plus_minus(policy.estimates[name], units) for name in names),
            units.within(policy.bootstrap.low, policy.bootstrap.high),
        )
        for policy in policies
    ]
    return Table(head, rows)


def _plus_minus(estimate: Interval, units: Units) -> str:
    if isnan(estimate.mean):
        return UNKNOWN
    return f"{units.amount(estimate.mean)} ± {units.amount((estimate.high - estimate.low) / 2)}"


def support_table(evaluation: Evaluation) -> Table:
    """How far the log can tell the value of each policy."""
    policies = ranked(evaluation)
    found = [policy.support for policy in policies]
    columns: dict[str, list[str]] = {
        "support": [policy.name for policy in policies],
        "placements": [f"{each.placements:,}" for each in found],
        "as logged": [percent(each.as_logged) for each in found],
        "effective": [number(each.effective, 0) for each in found],
        "floored": [percent(each.floored) for each in found],
    }
    if any(each.coverage is not None for each in found):
        columns["coverage"] = [UNKNOWN if each.coverage is None else percent(each.coverage) for each in found]
    if any(each.effective_ips is not None for each in found):
        sizes = [UNKNOWN if each.effective_ips is None else number(each.effective_ips, 0) for each in found]
        columns["effective by IPS"] = sizes
    columns["largest query"] = [percent(each.largest_query) for each in found]
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))


def calibration_sentence(specification: Specification) -> str:
    """Whether the click model of the evaluation is off, in words."""
    cells, off = len(specification.cells), len(_off(specification))
    if cells == 0:
        return "there are no clicks to compare the predictions with"
    if off == 0:
        return f"none of {cells} groups of rows is off"
    return f"{off} of {cells} groups of rows {'is' if off == 1 else 'are'} off"


def calibration_tables(specification: Specification) -> Iterator[Table]:
    """The groups of rows for which the click model of the evaluation is off, the worst first, if there are any."""
    off = sorted(_off(specification), key=lambda cell: (cell.p_value, -abs(cell.z)))
    if off:
        head = ("position", "level", "predicted", "observed", "rows", "z", "p")
        yield Table(head, [_cell_row(cell) for cell in off[:_MOST_CELLS]])


def _off(specification: Specification) -> list[Cell]:
    return [cell for cell in specification.cells if cell.p_value < DOUBT]


def _cell_row(cell: Cell) -> tuple[str, ...]:
    rates = (f"{cell.predicted:.2%}", f"{cell.observed:.2%}")
    level = f"{cell.level} of {LEVELS}"
    return str(cell.position), level, *rates, f"{cell.rows:,}", number(cell.z, 1, sign=True), p_text(cell.p_value)
