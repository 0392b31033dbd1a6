"""The report of an evaluation: in the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from urank.evaluation.policy_evaluation import CALIBRATION_LEVELS, MISFIT_LEVEL, Cell, Specification
from urank.log.splits import SPLITS
from urank.report import style as theme
from urank.report.page import Chart, Section, Summary, notebook_html, write_page
from urank.report.tables import UNKNOWN, Table, Units, counted, number, p_text, percent, print_tables, print_warnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from urank.evaluation.intervals import Comparison, Interval
    from urank.evaluation.policy_evaluation import Evaluation, PolicyValue


SIGNIFICANCE = 0.05
"""The p-value below which a policy differs significantly from the logged order; its 95 % interval then excludes 0."""
_MOST_CELLS = 20
_STYLES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_IN_WORDS = {
    "refit": "refitted networks",
    "direct": "the click model alone",
    "ratio": "Eq. 3",
    "self_normalised": "Eq. 3 (self-normalised)",
    "doubly_robust": "the doubly robust estimator",
    "ips": "inverse propensities",
    "snips": "inverse propensities (self-normalised)",
}
_METHOD = {
    "refit": "an order earns what the log earned, plus the difference of the click probabilities at the new and the "
    "logged positions by two networks that were refitted on these clicks; the interval contains the error of refitting",
    "direct": "each item earns the click model's expectation at its new position",
    "ratio": "each logged click is transferred to the item's new position and weighted by the ratio of the click "
    "probabilities there and at the logged position (Eq. 3 of the paper)",
    "self_normalised": "each logged click is transferred to the item's new position (Eq. 3 of the paper), and the sum "
    "is divided by its expectation under the click model",
    "doubly_robust": "each item earns the click model's expectation at its new position, corrected by the difference "
    "between logged and expected clicks",
    "ips": "clicks on items that keep their logged position count, each divided by the probability that the logging "
    "policy put the item there",
    "snips": "clicks on items that keep their logged position count, each divided by the probability that the logging "
    "policy put the item there, and the sum is divided by that of these weights",
}
POLICIES = {
    "logged": "the order that the log shows",
    "match": "items are assigned to positions such that the expected utility of the whole list, by the click model, is "
    "largest",
    "score": "a network or trees, trained for the order with the highest utility, score each item, and the list is "
    "sorted by the scores",
    "ctr1": "the list is sorted by the expected utility of each item at position 1, as rankers by relevance do",
    "random": "a shuffled list, for scale: a sensible ranker earns more",
}
"""The meaning of the names of policies."""
_INTERVALS = (
    "A query is one observation, however many lists it has. Differences are paired by query, so two policies may "
    "differ significantly although their own intervals overlap. Percentages are relative to the logged order. Each "
    "interval holds for its own number: the best of many policies looks better than it is."
)
_LIMITS = (
    "What the numbers cannot show: whether a click also depends on the items around it (they assume that it depends on "
    "the item and its position alone); whether the click model is wrong in a way that its test on the log misses; the "
    "value of items that these lists did not contain; and whether people will click as they did in this log. Only an "
    "experiment shows that."
)
_SUPPORT = (
    "As logged: the share of a policy's placements that occur in the log. Effective: the effective sample size of "
    "their weights. Floored: the share with a logged click probability below the floor of {floor:g}, which count for "
    "less than they should."
)
_COVERAGE = " Coverage: the share of the placements that the logging policy could have produced, 100 % up to chance."


@dataclass(frozen=True)
class ReferenceValues:
    """Known utilities of the policies, to be shown beside their estimates."""

    noun: str  # in a legend or a sentence, such as "truth"
    adjective: str  # the prefix of their columns, such as "true"
    utility: Mapping[str, float]  # policy -> utility over all positions
    difference: Mapping[str, float]  # policy -> difference to the logged order
    explanation: str  # a paragraph about their origin

    def columns(self, policies: Sequence[str], units: Units, K: int) -> dict[str, list[str]]:
        """Return the table columns of these policies: utilities, and gains in percent of the logged order's."""
        own_units = Units.of(self.utility[policies[0]])
        gains = [own_units.change(self.difference[name]) if name in self.difference else UNKNOWN for name in policies]
        utilities = [units.amount(self.utility[name]) for name in policies]
        return {f"{self.adjective}@{K}": utilities, f"{self.adjective} gain": gains}

    def scaled_differences(self, policies: Sequence[str], logged: str, *, in_percent: bool) -> list[float]:
        """Return the differences of these policies, if asked in percent of the logged order's utility."""
        scale = 100 / (self.utility[logged] or nan) if in_percent else 1.0
        return [self.difference[name] * scale for name in policies]


def print_evaluation(
    evaluation: Evaluation,
    console: Console,
    policy: str | None = None,
    reference: ReferenceValues | None = None,
    notes: Sequence[str] = (),
    next_step: str = "",
) -> None:
    """Print the answer, the notes on it and the next step, then the tables, then the warnings.

    The answer is about the named policy, which is the one to be shipped: choosing the best would overstate it. The next
    step is printed only if it earns significantly more than the logged order.
    """
    subject = _best_policy(evaluation) if policy is None else evaluation[policy]
    style = "bold" if subject is None else _STYLES[-1 if evaluation.alarms else _significance(subject)]
    in_one_line = not console.is_terminal
    console.print(Text(evaluation_headline(evaluation, policy), style=style), soft_wrap=in_one_line)
    gains = subject is not None and _significance(subject) > 0 and not evaluation.alarms
    for note in (*notes, *([f"Next: {next_step}"] if next_step and gains else [])):
        console.print(note, highlight=False, soft_wrap=in_one_line, markup=False, emoji=False)
    console.print()
    found = evaluation.randomised if evaluation.randomised and evaluation.randomised.utility else None
    tables = [policy_table(evaluation, reference), *([randomised_table(evaluation)] if found else [])]
    print_tables(console, [*tables, estimator_table(evaluation)])
    if found is not None:
        console.print(Text(f"{_first_upper(found.check.sentence)}."))
    print_warnings(console, evaluation.warnings)


def write_evaluation(
    evaluation: Evaluation,
    path: str | Path,
    policy: str | None = None,
    reference: ReferenceValues | None = None,
    next_step: str = "",
) -> None:
    """Write the page with the plots; its summary is about the named policy, or the best."""
    summary = evaluation_summary(evaluation, policy, reference, next_step)
    write_page(path, "Evaluation", summary, evaluation_sections(evaluation, reference))


def evaluation_html(evaluation: Evaluation) -> str:
    """Return the view in a notebook."""
    beware = Section("Beware", bullets=evaluation.warnings) if evaluation.warnings else None
    sections = [policy_section(evaluation), randomised_section(evaluation), beware]
    return notebook_html(evaluation_summary(evaluation, evaluation.main), sections)


def evaluation_sections(evaluation: Evaluation, reference: ReferenceValues | None = None) -> list[Section]:
    """Return the sections of the page."""
    by_cutoff = f"The {evaluation.measure} of the first positions only; a bar is the 95 % interval."
    estimators = (
        f"The figures above are those of {evaluation.estimator}. The others make other assumptions; where they differ "
        "by more than their intervals, some assumption is wrong. ± is half of the 95 % interval; the bootstrap "
        "interval allows for skewed values, but ignores the variance of the click models."
    )
    tested = (
        "The rows of each position are divided into thirds by their predicted click probability, and predicted click "
        "rates are compared with observed ones on queries that the click model was not trained on: "
        f"{_calibration_result(evaluation.specification)}."
    )
    misfits = calibration_table(evaluation.specification)
    sections = [
        policy_section(evaluation, reference),
        randomised_section(evaluation),
        Section("Beware", bullets=evaluation.warnings) if evaluation.warnings else None,
        Section("By cutoff", charts=[Chart(partial(cutoffs_plot, evaluation), by_cutoff)]),
        Section("By estimator", paragraphs=[estimators], tables=[estimator_table(evaluation)]),
        support_section(evaluation),
        Section("Is the click model right?", paragraphs=[tested], tables=[] if misfits is None else [misfits]),
        Section("How these numbers are made", paragraphs=list(method_paragraphs(evaluation, reference))),
    ]
    return [section for section in sections if section is not None]


def policy_section(evaluation: Evaluation, reference: ReferenceValues | None = None) -> Section:
    """Return the section that compares the policies, with the meaning of their names."""
    names = {policy.name.rpartition(" ")[2] for policy in evaluation.policies}
    terms = {name: meaning for name, meaning in POLICIES.items() if name in names}
    charts, table = _forest_charts(evaluation, reference), policy_table(evaluation, reference)
    return Section("Policies side by side", charts=charts, terms=terms, tables=[table])


def randomised_section(evaluation: Evaluation) -> Section | None:
    """Return the section on lists in random order; None without an estimate on any."""
    found = evaluation.randomised
    if found is None or not found.utility:
        return None
    about = (
        "On lists that were shown in random order, the position curve is known up to a factor from their clicks alone, "
        "and a policy earns, for each click, the curve at the item's new position relative to the mean of its list. "
        f"This assumes one curve for all items. {_first_upper(found.check.sentence)}."
    )
    return Section("On lists in random order", paragraphs=[about], tables=[randomised_table(evaluation)])


def randomised_table(evaluation: Evaluation) -> Table:
    """Return what policies earn on lists in random order, beside that order."""
    found = evaluation.randomised
    assert found is not None  # noqa: S101 - checked by the callers
    units, names = Units.of(found.utility["as shown"].mean), list(found.utility)
    gains = [found.difference.get(name) for name in names]
    return Table.of_columns(
        {
            f"{found.lists:,} random lists": names,
            f"{evaluation.measure}@{evaluation.positions}": [units.amount(found.utility[name].mean) for name in names],
            "vs shown": [UNKNOWN if gain is None else units.change(gain.mean) for gain in gains],
            "95 % interval": [UNKNOWN if gain is None else units.changes(gain.low, gain.high) for gain in gains],
        }
    )


def support_section(evaluation: Evaluation) -> Section:
    """Return the section on the evidence in the log about each policy."""
    known = any(policy.support.coverage is not None for policy in evaluation.policies)
    text = _SUPPORT.format(floor=evaluation.floor) + (_COVERAGE if known else "")
    return Section("What the log supports", paragraphs=[text], tables=[support_table(evaluation)])


def method_paragraphs(evaluation: Evaluation, reference: ReferenceValues | None = None) -> Iterator[str]:
    """Explain in paragraphs how the estimates are computed."""
    yield (
        f"What would people have clicked in another order? By the estimator {evaluation.estimator}, "
        f"{_METHOD[evaluation.estimator]}."
    )
    halves = ", each trained on one half of them and refitted on the other" if len(evaluation.clicks) > 2 else ""
    yield (
        f"The click probabilities of the {evaluation.queries:,} queries ({evaluation.lists:,} lists, "
        f"{evaluation.rows:,} rows) come from {len(evaluation.clicks)} networks{halves}. Their last layer and position "
        "curve are re-estimated on clicks of queries that they were not trained on. None of them is under test, "
        "so none of those profits from its own errors."
    )
    yield _INTERVALS
    if evaluation.independence is not None:
        yield f"Do clicks depend on the items around? {_first_upper(evaluation.independence.sentence)}."
    yield _LIMITS
    if reference is not None:
        yield reference.explanation


# The conclusion


def evaluation_headline(evaluation: Evaluation, policy: str | None = None) -> str:
    """Return the answer in a sentence a person can act on: what a policy, by default the best, would change."""
    subject = _best_policy(evaluation) if policy is None else evaluation[policy]
    if subject is None or subject.difference is None or isnan(subject.difference.mean):
        return f"{_first_upper(evaluation_sentence(evaluation, policy))}."
    units, gain = evaluation_units(evaluation), subject.difference
    size = f"{units.change(gain.mean)} {evaluation.measure}"
    evidence = f"(95 % interval {units.changes(gain.low, gain.high)}), estimated on {_queries(evaluation)}"
    headline = {
        1: f"New ranking ({subject.name}): {size} {evidence}.",
        0: f"No clear gain: the new ranking ({subject.name}) changes {size} {evidence}. Collect more data, or keep the "
        "logged order.",
        -1: f"Keep the logged order: the new ranking ({subject.name}) would bring {size} {evidence}.",
    }[_significance(subject)]
    alarms = list(dict.fromkeys(evaluation.alarms))
    return f"{headline} But do not trust this: {'; '.join(alarms)}." if alarms else headline


def after_a_gain(model: str | Path, log: str | Path) -> str:
    """Return what to do with a model that would earn more than the order of a log."""
    return f"`urank guard {model} {log}` for a safe first launch, `urank abtest plan` for a test on live traffic."


def evaluation_summary(
    evaluation: Evaluation,
    policy: str | None = None,
    reference: ReferenceValues | None = None,
    next_step: str = "",
) -> Summary:
    """Return the answer in plain words, the evidence for it, and what to do; `next_step` is for a clear gain."""
    subject = _best_policy(evaluation) if policy is None else evaluation[policy]
    evidence = f"{_first_upper(evaluation_sentence(evaluation, policy, reference))}."
    if subject is None or subject.difference is None or isnan(subject.difference.mean):
        return Summary("There is no new ranking to compare with the logged order.", evidence)
    if evaluation.alarms:
        answer = f"Do not trust this estimate: {'; '.join(dict.fromkeys(evaluation.alarms))}."
        return Summary(answer, evidence, "keep the logged order, and see what the log supports below.", "bad")
    size, measure = evaluation_units(evaluation).size(subject.difference.mean), evaluation.measure
    return {
        1: Summary(
            f"The new ranking would earn about {size} more {measure} than the logged order.",
            evidence,
            next_step or after_a_gain("MODEL", "LOG"),
            "good",
        ),
        0: Summary(
            "No clear gain: this log cannot tell the new ranking from the logged order.",
            evidence,
            "keep the logged order, or collect more lists and evaluate again.",
        ),
        -1: Summary(
            f"Keep the logged order: the new ranking would earn about {size} less.",
            evidence,
            "see the warnings below, and try other features or `urank train` with another `--ranker`.",
            "bad",
        ),
    }[_significance(subject)]


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def evaluation_sentence(
    evaluation: Evaluation, policy: str | None = None, reference: ReferenceValues | None = None
) -> str:
    """Return the conclusion in a sentence: the utility of a policy, by default the best, against the logged order."""
    units, K = evaluation_units(evaluation), evaluation.positions
    subject = _best_policy(evaluation) if policy is None else evaluation[policy]
    how = f"estimated by {_IN_WORDS[evaluation.estimator]} on {_queries(evaluation)}"
    if subject is None or subject.difference is None:
        logged = evaluation.policies[0].utility[K]
        utility = f"the logged order earns {_amount(evaluation, logged.mean)}"
        return f"{utility} (95 % interval {units.within(logged.low, logged.high)}), {how}"
    if isnan(subject.utility[K].mean):
        return f"the utility of {subject.name} cannot be {how}"
    utility = f"{subject.name} would earn {_amount(evaluation, subject.utility[K].mean)}"
    sentence = f"{utility}, {_compared(subject.difference, units)}, {how}"
    if reference is None:
        return sentence
    return f"{sentence}; the {reference.noun} is {units.amount(reference.utility[subject.name])}"


def _compared(found: Comparison, units: Units) -> str:
    """Compare with the logged order."""
    if found.n > 1 and found.mean == 0 and found.error == 0:
        return "the same as the logged order"
    size = f"{units.size(found.mean)} {'less' if found.mean < 0 else 'more'}"
    if isnan(found.p_value):
        return f"not significantly different from the logged order ({size}, but one query has no interval)"
    p_value = p_text(found.p_value)
    equals = f"p < {p_value[1:]}" if p_value.startswith("<") else f"p = {p_value}"
    evidence = f"95 % interval {units.sizes(found.low, found.high)}, {equals}"
    if found.p_value < SIGNIFICANCE:
        return f"{size} than the logged order ({evidence})"
    return f"not significantly different from the logged order ({size}, {evidence})"


def _amount(evaluation: Evaluation, utility: float) -> str:
    shown, measure = evaluation_units(evaluation).amount(utility), evaluation.measure
    return f"a value of {shown} per list" if measure == "value" else f"{shown} {measure} per list"


def _queries(evaluation: Evaluation) -> str:
    queries = counted(evaluation.queries, "query", "queries")
    if evaluation.splits == ["test"]:
        return queries.replace(" ", " held-out ")
    if set(evaluation.splits) == set(SPLITS):
        return queries
    return f"{queries} of the {' and '.join(evaluation.splits)} split{'s' if len(evaluation.splits) > 1 else ''}"


def _best_policy(evaluation: Evaluation) -> PolicyValue | None:
    """Return the policy with the largest estimate, except the logged and the random order; None if absent."""
    return next((policy for policy in _sorted(evaluation)[1:] if policy.name != "random"), None)


def _significance(policy: PolicyValue) -> int:
    """Return 1 if the policy earns significantly more than the logged order, −1 if less, else 0."""
    found = policy.difference
    return 0 if found is None or not found.p_value < SIGNIFICANCE else 1 if found.mean > 0 else -1


def _sorted(evaluation: Evaluation) -> list[PolicyValue]:
    """Return the logged order, then the others by falling estimate; those without one come last."""
    logged, *others = evaluation.policies

    def key(policy: PolicyValue) -> tuple[bool, float]:
        mean = policy.utility[evaluation.positions].mean
        return isnan(mean), 0.0 if isnan(mean) else -mean

    return [logged, *sorted(others, key=key)]


def evaluation_units(evaluation: Evaluation) -> Units:
    """Return the number format: differences in percent of the logged order's utility."""
    return Units.of(evaluation.policies[0].utility[evaluation.positions].mean)


# Tables


def policy_table(evaluation: Evaluation, reference: ReferenceValues | None = None) -> Table:
    """Return the utility of each policy and its difference to the logged order.

    The most important columns come first, since a narrow terminal omits the last.
    """
    units, K = evaluation_units(evaluation), evaluation.positions
    policies = _sorted(evaluation)
    differences = [policy.difference for policy in policies]
    columns = {
        "policy": [policy.name for policy in policies],
        f"{evaluation.measure}@{K}": [units.amount(policy.utility[K].mean) for policy in policies],
        "vs logged": [UNKNOWN if each is None else _difference(each, units) for each in differences],
        "95 % interval": [UNKNOWN if each is None else units.changes(each.low, each.high) for each in differences],
        "p": [UNKNOWN if each is None else p_text(each.p_value) for each in differences],
    }
    if reference is not None:
        columns |= reference.columns([policy.name for policy in policies], units, K)
    for cutoff in list(policies[0].utility)[:-1]:
        columns[f"{evaluation.measure}@{cutoff}"] = [units.amount(each.utility[cutoff].mean) for each in policies]
    return Table.of_columns(columns)


def _difference(found: Comparison, units: Units) -> str:
    absolute = number(found.mean, units.decimals, sign=True)
    return f"{units.change(found.mean)} ({absolute})" if units.in_percent and not isnan(found.mean) else absolute


def estimator_table(evaluation: Evaluation) -> Table:
    """Return all estimates at K with half of their 95 % interval, the chosen one first, and its bootstrap interval."""
    units, policies = evaluation_units(evaluation), _sorted(evaluation)
    chosen = evaluation.estimator

    def shown(each: Interval) -> str:
        half = (each.high - each.low) / 2
        return UNKNOWN if isnan(each.mean) else f"{units.amount(each.mean)} ± {units.amount(half)}"

    names = sorted(policies[0].estimates, key=lambda name: name != chosen)
    columns = {f"{evaluation.measure}@{evaluation.positions} ± 95 %": [policy.name for policy in policies]}
    columns |= {name: [shown(policy.estimates[name]) for policy in policies] for name in names}
    columns[f"{chosen}, bootstrap"] = [units.within(each.bootstrap.low, each.bootstrap.high) for each in policies]
    return Table.of_columns(columns)


def support_table(evaluation: Evaluation) -> Table:
    """Return the evidence that the log contains about each policy."""
    policies = _sorted(evaluation)
    found = [policy.support for policy in policies]
    columns = {
        "support": [policy.name for policy in policies],
        "placements": [f"{each.placements:,}" for each in found],
        "as logged": [percent(each.as_logged) for each in found],
        "effective": [number(each.effective, 0) for each in found],
        "floored": [percent(each.floored) for each in found],
    }
    if any(each.coverage is not None for each in found):
        columns["coverage"] = [UNKNOWN if each.coverage is None else percent(each.coverage) for each in found]
    if any(each.effective_ips is not None for each in found):
        sizes = [each.effective_ips for each in found]
        columns["effective by IPS"] = [UNKNOWN if size is None else number(size, 0) for size in sizes]
    columns["largest query"] = [percent(each.largest_query) for each in found]
    return Table.of_columns(columns)


def calibration_table(specification: Specification) -> Table | None:
    """Return the miscalibrated groups of rows, the worst first; None if absent."""
    misfits = sorted(_misfits(specification), key=lambda cell: (cell.p_value, -abs(cell.z)))[:_MOST_CELLS]
    if not misfits:
        return None
    rows = []
    for cell in misfits:
        rates = (f"{cell.predicted:.2%}", f"{cell.observed:.2%}", f"{cell.rows:,}")
        level, z = f"{cell.level} of {CALIBRATION_LEVELS}", number(cell.z, 1, sign=True)
        rows.append((str(cell.position), level, *rates, z, p_text(cell.p_value)))
    return Table(("position", "level", "predicted", "observed", "rows", "z", "p"), rows)


def _calibration_result(specification: Specification) -> str:
    cells, misfits = len(specification.cells), len(_misfits(specification))
    if cells == 0:
        return "there are no clicks to compare the predictions with"
    return f"{misfits or 'none'} of {cells} groups of rows {'is' if misfits < 2 else 'are'} off"


def _misfits(specification: Specification) -> list[Cell]:
    return [cell for cell in specification.cells if cell.p_value < MISFIT_LEVEL]


# Plots


def estimates_plot(evaluation: Evaluation, reference: ReferenceValues | None = None) -> Figure:
    """Return a forest plot of the estimates with their 95 % intervals and a line at the logged order."""
    K = evaluation.positions
    found = {policy.name: policy.utility[K] for policy in _sorted(evaluation)}
    names, intervals, label = list(found), list(found.values()), f"{evaluation.measure}@{K} per list"
    figure, axes = _forest(names, intervals, [theme.BLUE] * len(names), label, intervals[0].mean)
    if reference is not None:
        theme.draw_truth(axes, [reference.utility[name] for name in names], range(len(names)), reference.noun)
    theme.legend(axes, 2, place="above")
    return figure


def differences_plot(evaluation: Evaluation, reference: ReferenceValues | None = None) -> Figure:
    """Return a forest plot of the differences to the logged order, coloured by significance."""
    units, K = evaluation_units(evaluation), evaluation.positions
    found = {policy.name: policy.difference for policy in _sorted(evaluation) if policy.difference is not None}
    names, scale = list(found), 100 / units.base if units.in_percent else 1.0
    scaled = [{name: scale * getattr(each, name) for name in ("mean", "low", "high")} for each in found.values()]
    intervals = [replace(each, **ends) for each, ends in zip(found.values(), scaled, strict=True)]
    label = f"difference in {evaluation.measure}@{K}" + (", %" if units.in_percent else "")
    colours = [theme.difference_colour(each.low, each.high) for each in found.values()]
    figure, axes = _forest(names, intervals, colours, label, 0.0)
    if reference is not None:
        values = reference.scaled_differences(names, evaluation.policies[0].name, in_percent=units.in_percent)
        theme.draw_truth(axes, values, range(len(names)), reference.noun)
    theme.legend(axes, 2, place="above")
    return figure


def cutoffs_plot(evaluation: Evaluation) -> Figure:
    """Return the estimates at each cutoff with their 95 % intervals, policies side by side."""
    policies = _sorted(evaluation)
    places = list(policies[0].utility)
    figure, axes = theme.new_axes("", f"{evaluation.measure} per list", height=max(3.4, 0.5 + 0.2 * len(policies)))
    steps = np.linspace(-0.3, 0.3, len(policies)) if len(policies) > 1 else np.zeros(1)
    for index, (policy, step) in enumerate(zip(policies, steps, strict=True)):
        colour, marker = (
            theme.COLOURS[index % len(theme.COLOURS)],
            theme.MARKERS[index // len(theme.COLOURS) % len(theme.MARKERS)],
        )
        found = [policy.utility[k] for k in places]
        at = np.arange(len(places)) + step
        bars = [(x, each.low, each.high) for x, each in zip(at, found, strict=True) if isfinite(each.high - each.low)]
        if bars:
            axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=1.2)
        label = theme.plain_label(policy.name)
        means = [each.mean for each in found]
        axes.plot(at, means, color=colour, marker=marker, markersize=4, linestyle="none", label=label)
    axes.set_xticks(range(len(places)), [f"{evaluation.measure}@{k}" for k in places])
    theme.legend(axes, place="right")
    return figure


def _forest(
    names: Sequence[str], intervals: Sequence[Interval], colours: Sequence[str], label: str, line: float
) -> tuple[Figure, Axes]:
    """Draw means with their intervals as horizontal bars, the first at the top."""
    figure, axes = theme.new_axes(label, "", height=0.9 + 0.36 * len(names))
    theme.style_axes(axes, "x")
    axes.grid(visible=False, axis="y")
    if isfinite(line):
        axes.axvline(line, color=theme.INK, linestyle=":", linewidth=1, label="logged order")
    for row, (each, colour) in enumerate(zip(intervals, colours, strict=True)):
        theme.draw_interval(axes, row, (each.mean, each.low, each.high), colour=colour)
    axes.set_yticks(range(len(names)), [theme.wrapped_label(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    return figure, axes


def _forest_charts(evaluation: Evaluation, reference: ReferenceValues | None) -> list[Chart]:
    mark = "" if reference is None else f" A diamond is the {reference.noun}."
    over = f"per list over all {evaluation.positions} positions, with 95 % intervals"
    estimates = f"Estimated {evaluation.measure} {over}.{mark}"
    differences = (
        "Differences to the logged order, paired by query, with 95 % intervals: green for more, red for less, grey for "
        f"not significant.{mark}"
    )
    charts = [Chart(partial(estimates_plot, evaluation, reference), estimates)]
    if len(evaluation.policies) > 1:
        charts.append(Chart(partial(differences_plot, evaluation, reference), differences))
    return charts
