"""The report of an evaluation: in the terminal, and as a page with plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from urank.report.evaluation_tables import (
    all_positions,
    calibration_tables,
    estimator_table,
    evaluation_tables,
    policy_table,
    support_table,
)
from urank.report.evaluation_words import (
    best_policy,
    evaluation_sentence,
    how_it_is_made,
    how_it_is_supported,
    how_it_is_tested,
    told_apart,
)
from urank.report.terminal import bullet, terminal_table

if TYPE_CHECKING:  # torch and matplotlib are slow to load
    from urank.evaluate.compare import Evaluation
    from urank.report.page import Chart, Section

__all__ = [
    "evaluation_sections",
    "evaluation_sentence",
    "evaluation_tables",
    "print_evaluation",
    "write_evaluation",
]

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
    from urank.report.evaluation_figures import cutoffs_plot
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
    from urank.report.evaluation_figures import differences_plot, estimates_plot
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
