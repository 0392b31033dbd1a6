"""The report of an evaluation: in the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite, isnan, nan
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.text import Text

from urank.evaluation.policy_evaluation import LEVELS, MISFIT_LEVEL, Cell, Specification
from urank.log.splits import SPLITS
from urank.report.style import COLOURS, plain_label
from urank.report.tables import UNKNOWN, Table, Units, bullet, counted, number, p_text, percent, terminal_table

if TYPE_CHECKING:
    from urank.evaluation.intervals import Comparison, Interval
    from urank.evaluation.policy_evaluation import Evaluation, PolicyValue
    from urank.report.page import Chart, Section
    from urank.report.tables import Units

__all__ = [
    "all_positions",
    "best_policy",
    "calibration_sentence",
    "calibration_tables",
    "cutoffs_plot",
    "differences_plot",
    "estimates_plot",
    "estimator_table",
    "evaluation_sections",
    "evaluation_sentence",
    "evaluation_tables",
    "how_it_is_made",
    "how_it_is_supported",
    "how_it_is_tested",
    "policy_table",
    "print_evaluation",
    "ranked",
    "support_table",
    "told_apart",
    "units_of",
    "write_evaluation",
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
    return [cell for cell in specification.cells if cell.p_value < MISFIT_LEVEL]


def _cell_row(cell: Cell) -> tuple[str, ...]:
    rates = (f"{cell.predicted:.2%}", f"{cell.observed:.2%}")
    level = f"{cell.level} of {LEVELS}"
    return str(cell.position), level, *rates, f"{cell.rows:,}", number(cell.z, 1, sign=True), p_text(cell.p_value)


_BLUE, _RED, _GREEN, *_, _GREY = COLOURS
_INK = "#1f2328"
_MARKERS = "os^Dv"
_NAME_WIDTH = 24


def estimates_plot(evaluation: Evaluation) -> Figure:
    """A forest plot: the estimate of each policy with its 95 % interval, a line at the logged order, the truth."""
    policies, K = ranked(evaluation), all_positions(evaluation)
    intervals = [policy.utility[K] for policy in policies]
    truth = [nan if policy.true is None else policy.true[K] for policy in policies]
    return _forest(
        [policy.name for policy in policies],
        intervals,
        truth,
        [_BLUE] * len(policies),
        across=f"{evaluation.measure}@{K}, a list",
        line=intervals[0].mean,
    )


def differences_plot(evaluation: Evaluation) -> Figure:
    """The same of the differences to the logged order: green above it, red below, grey when that cannot be told."""
    units, K = units_of(evaluation), all_positions(evaluation)
    shown = [(policy, found) for policy in ranked(evaluation) if (found := policy.difference) is not None]
    true_base = (evaluation.policies[0].true or {}).get(K, nan)
    scale, true_scale = (100 / units.base, 100 / (true_base or nan)) if units.in_percent else (1.0, 1.0)
    return _forest(
        [policy.name for policy, _ in shown],
        [replace(found, mean=found.mean * scale, low=found.low * scale, high=found.high * scale) for _, found in shown],
        [nan if (true := policy.true_difference) is None else true.mean * true_scale for policy, _ in shown],
        [_GREEN if found.low > 0 else _RED if found.high < 0 else _GREY for _, found in shown],
        across=f"difference in {evaluation.measure}@{K}" + (", %" if units.in_percent else ""),
        line=0.0,
    )


def cutoffs_plot(evaluation: Evaluation) -> Figure:
    """The estimates at each cutoff with their 95 % intervals, policies side by side."""
    policies = ranked(evaluation)
    places = list(policies[0].utility)
    figure = Figure(figsize=(6.4, 3.4))
    axes = _bare_axes(figure, "y")
    steps = np.linspace(-0.3, 0.3, len(policies)) if len(policies) > 1 else np.zeros(1)
    for index, (policy, step) in enumerate(zip(policies, steps, strict=True)):
        colour, marker = COLOURS[index % len(COLOURS)], _MARKERS[index // len(COLOURS) % len(_MARKERS)]
        found = [policy.utility[k] for k in places]
        at = np.arange(len(places)) + step
        bars = [(x, each.low, each.high) for x, each in zip(at, found, strict=True) if _bounded(each)]
        if bars:
            axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=1.2)
        means = [each.mean for each in found]
        label = plain_label(policy.name)
        axes.plot(at, means, color=colour, marker=marker, markersize=4, linestyle="none", label=label)
    axes.set_xticks(range(len(places)), [f"{evaluation.measure}@{k}" for k in places])
    axes.set_ylabel(f"{evaluation.measure} a list")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _forest(
    names: Sequence[str],
    intervals: Sequence[Interval],
    truth: Sequence[float],
    colours: Sequence[str],
    *,
    across: str,
    line: float,
) -> Figure:
    """Means with their intervals as horizontal bars, the first at the top."""
    figure = Figure(figsize=(6.4, 0.9 + 0.36 * len(names)))
    axes = _bare_axes(figure, "x")
    if isfinite(line):
        axes.axvline(line, color=_INK, linestyle=":", linewidth=1, label="logged order")
    for row, (interval, colour) in enumerate(zip(intervals, colours, strict=True)):
        if _bounded(interval):
            axes.hlines(row, interval.low, interval.high, color=colour, linewidth=2)
        axes.plot(interval.mean, row, color=colour, marker="o", markersize=5, linestyle="none")
    if np.isfinite(truth).any():
        axes.plot(
            truth,
            range(len(names)),
            linestyle="none",
            marker="D",
            markersize=7,
            markerfacecolor="none",
            markeredgecolor=_INK,
            label="truth",
        )
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(across)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    return figure


def _bare_axes(figure: Figure, lines: str) -> Axes:
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if lines == "x" else "y", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _bounded(interval: Interval) -> bool:
    return isfinite(interval.low) and isfinite(interval.high)


def _label(name: str) -> str:
    """A name beside its row, in several lines when it is long."""
    return "\n".join(plain_label(line) for line in wrap(name, _NAME_WIDTH) or [name])


DOUBT = 0.05
"""The p-value from which on a policy is not told apart from the logged order; its 95 % interval then holds 0."""

_IN_WORDS = {
    "direct": "the click model alone",
    "ratio": "Eq. 3",
    "self_normalised": "Eq. 3 (self-normalised)",
    "doubly_robust": "the doubly robust estimator",
    "ips": "inverse propensities",
    "snips": "inverse propensities (self-normalised)",
}
_METHOD = {
    "direct": "each item earns what the click model expects of it at its new position",
    "ratio": "each logged click is carried to the item's new position: it counts by how much more, or less, likely a "
    "click is there than where the item was shown (Eq. 3 of the paper)",
    "self_normalised": "each logged click is carried to the item's new position (Eq. 3 of the paper), and the sum is "
    "divided by what it would be if all clicks came as modelled",
    "doubly_robust": "each item earns what the click model expects of it at its new position, corrected by the clicks "
    "of the log that the model did not expect",
    "ips": "clicks on items that keep their logged position count, each divided by how likely the logging was to put "
    "the item there",
    "snips": "clicks on items that keep their logged position count, each divided by how likely the logging was to put "
    "the item there, and the sum is divided by that of these weights",
}
_INTERVALS = (
    "A query counts as one observation, however many lists it has. Differences are taken query by query, so two "
    "policies may be told apart although their own intervals overlap. Percents are of what the logged order earns. "
    "Each interval holds for its own number: the best of many policies looks better than it is."
)
_LIMITS = (
    "What the numbers cannot know: whether a click also depends on the items around it (they assume that it depends on "
    "the item and its position alone); whether the click model is wrong in a way that its test on the log does not "
    "show; what items would earn that these lists did not hold; and whether people click tomorrow as they did in this "
    "log. Only an experiment tells that."
)
_TRUTH = (
    "The log is simulated, so the truth is known: what the true click probabilities say that each order earns on the "
    "same lists."
)
_SUPPORT = (
    "As logged: the share of a policy's placements that the log has seen. Effective: so many evenly weighted ones tell "
    "as much. Floored: the share with a logged click probability below the floor of {floor:g}, which count for less "
    "than they should."
)
_COVERAGE = " Coverage: the share of the placements that the logging could have produced, 100 % up to chance."


def best_policy(evaluation: Evaluation) -> PolicyValue | None:
    """The policy with the largest estimate, the logged and a random order apart; none when there is no other."""
    others = [policy for policy in ranked(evaluation)[1:] if policy.name != "random"]
    return others[0] if others else None


def told_apart(policy: PolicyValue) -> int:
    """1 when it earns more than the logged order, −1 when less, 0 when that cannot be told."""
    found = policy.difference
    if found is None or not found.p_value < DOUBT:
        return 0
    return 1 if found.mean > 0 else -1


def evaluation_sentence(evaluation: Evaluation, policy: str | None = None) -> str:
    """The one line that counts: what a policy would earn, against the logged order.

    Args:
        evaluation: what was found.
        policy: the name of the one to tell of; the best when left out.
    """
    units, K = units_of(evaluation), all_positions(evaluation)
    told = best_policy(evaluation) if policy is None else evaluation[policy]
    how = f"estimated by {_IN_WORDS[evaluation.estimator]} on {_judged_by(evaluation)}"
    if told is None or told.difference is None:
        logged = evaluation.policies[0].utility[K]
        earned = f"the logged order earns {_amount(evaluation, logged.mean)}"
        return f"{earned} (95 % interval {units.within(logged.low, logged.high)}), {how}"
    if isnan(told.utility[K].mean):
        return f"what {told.name} would earn cannot be {how}"
    earned = f"{told.name} would earn {_amount(evaluation, told.utility[K].mean)}"
    sentence = f"{earned}{_against(told.difference, units)}, {how}"
    return sentence if told.true is None else f"{sentence}; the truth is {units.amount(told.true[K])}"


def _against(found: Comparison, units: Units) -> str:
    """How that stands to the logged order."""
    if found.n > 1 and found.mean == 0 and found.error == 0:
        return ", just as the logged order does"
    size = f"{units.size(found.mean)} {'less' if found.mean < 0 else 'more'}"
    if isnan(found.p_value):
        return f" and cannot be told apart from the logged order ({size}, but one query has no interval)"
    p_value = p_text(found.p_value)
    equals = f"p < {p_value[1:]}" if p_value.startswith("<") else f"p = {p_value}"
    evidence = f"95 % interval {units.sizes(found.low, found.high)}, {equals}"
    if found.p_value < DOUBT:
        return f", {size} than the logged order ({evidence})"
    return f" and cannot be told apart from the logged order ({size}, {evidence})"


def _amount(evaluation: Evaluation, utility: float) -> str:
    shown = units_of(evaluation).amount(utility)
    return f"{shown} clicks a list" if evaluation.measure == "clicks" else f"a {evaluation.measure} of {shown} a list"


def _judged_by(evaluation: Evaluation) -> str:
    queries = counted(evaluation.queries, "query", "queries")
    if evaluation.splits == ["test"]:
        return queries.replace(" ", " held-out ")
    if set(evaluation.splits) == set(SPLITS):
        return queries
    return f"{queries} of the {' and '.join(evaluation.splits)} split{'s' if len(evaluation.splits) > 1 else ''}"


def how_it_is_supported(evaluation: Evaluation) -> str:
    """What the columns of the support table mean."""
    known = any(policy.support.coverage is not None for policy in evaluation.policies)
    return _SUPPORT.format(floor=evaluation.floor) + (_COVERAGE if known else "")


def how_it_is_tested(evaluation: Evaluation) -> str:
    """How the click model of the evaluation is tested, and what came out."""
    found = calibration_sentence(evaluation.specification)
    return (
        "The rows of each position are cut into thirds by how likely the evaluation's click model thinks a click is, "
        "and predicted click rates are compared with observed ones, on queries that the model did not see: "
        f"{found}."
    )


def how_it_is_made(evaluation: Evaluation) -> Iterator[str]:
    """What the numbers mean, in paragraphs."""
    cuts = len(evaluation.clicks) // 2
    again = "" if cuts == 1 else f", {cuts} times in different ways"
    names = ", ".join(dict.fromkeys(evaluation.clicks))
    yield (
        f"What would people have clicked in another order? By the estimator {evaluation.estimator}, "
        f"{_METHOD[evaluation.estimator]}."
    )
    yield (
        f"The click probabilities are cross-fitted: the {evaluation.queries:,} queries ({evaluation.lists:,} lists, "
        f"{evaluation.rows:,} rows) are cut in halves{again}, and each half is judged by a click model ({names}) that "
        "was trained on the other. It is none of the models under test, so none of them gains by its own errors."
    )
    yield _INTERVALS
    yield _LIMITS
    if any(policy.true is not None for policy in evaluation.policies):
        yield _TRUTH


_STYLES = {1: "bold green", 0: "bold yellow", -1: "bold red"}


def print_evaluation(evaluation: Evaluation, console: Console, policy: str | None = None) -> None:
    """Print what a person should know, the sentence that counts last, where the eye is when it ends.

    It tells of the policy that is named, as the one that would be shipped: to pick the best here would flatter it.
    """
    for table in (policy_table(evaluation), estimator_table(evaluation)):
        console.print(terminal_table(table))
        console.print()
    for warning in evaluation.warnings:
        bullet(console, "beware", Text(warning))
    if evaluation.warnings:
        console.print()
    meant = best_policy(evaluation) if policy is None else evaluation[policy]
    style = "bold" if meant is None else _STYLES[told_apart(meant)]
    console.print(Text(evaluation_sentence(evaluation, policy), style=style))


def write_evaluation(evaluation: Evaluation, path: str | Path, policy: str | None = None) -> None:
    """Write the page with the plots; its lead tells of the policy that is named, or of the best."""
    from urank.report.page import write_page  # matplotlib is slow to load

    lead = f"{evaluation_sentence(evaluation, policy)}."
    write_page(path, "Evaluation", lead, evaluation_sections(evaluation), footer="urank evaluate")


def evaluation_sections(evaluation: Evaluation) -> list[Section]:
    """What the page tells, in order."""
    from urank.report.page import Chart, Section

    by_cutoff = Chart(
        cutoffs_plot(evaluation), f"The {evaluation.measure} of the first positions only; a bar is the 95 % interval."
    )
    estimators = (
        f"The figures above are those of {evaluation.estimator}. The others make other assumptions; where they differ "
        "by more than their intervals, some assumption is wrong. ± is half of the 95 % interval; the bootstrap's "
        "also follows skewed values, and counts the chance in the clicks alone."
    )
    sections = [
        Section("Policies side by side", charts=_forests(evaluation), tables=[policy_table(evaluation)]),
        Section("Beware", bullets=evaluation.warnings) if evaluation.warnings else None,
        Section("By cutoff", charts=[by_cutoff]),
        Section("By estimator", paragraphs=[estimators], tables=[estimator_table(evaluation)]),
        Section(
            "What the log can tell", paragraphs=[how_it_is_supported(evaluation)], tables=[support_table(evaluation)]
        ),
        Section(
            "Is the click model right?",
            paragraphs=[how_it_is_tested(evaluation)],
            tables=list(calibration_tables(evaluation.specification)),
        ),
        Section("How these numbers are made", paragraphs=list(how_it_is_made(evaluation))),
    ]
    return [section for section in sections if section is not None]


def _forests(evaluation: Evaluation) -> list[Chart]:
    from urank.report.page import Chart

    mark = " A diamond is the truth." if any(policy.true is not None for policy in evaluation.policies) else ""
    what = f"the {evaluation.measure} that a list earns over all {all_positions(evaluation)} positions"
    estimates = f"Estimates of {what}, with 95 % intervals.{mark}"
    differences = (
        "Differences to the logged order, query by query, with 95 % intervals: green for more, red for less, grey for "
        f"what cannot be told.{mark}"
    )
    charts = [Chart(estimates_plot(evaluation), estimates)]
    return [*charts, Chart(differences_plot(evaluation), differences)] if len(evaluation.policies) > 1 else charts
