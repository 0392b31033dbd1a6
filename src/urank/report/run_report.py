"""The report of a whole run: expected utility, how the model ranks, click curves, click model, and the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from urank.report.click_report import FitReport, curve_figure, curve_table, fit_sections
from urank.report.evaluation_report import POLICIES, ReferenceValues, evaluation_sections, evaluation_summary
from urank.report.inspection_report import inspection_sections, inspection_summary
from urank.report.page import Chart, Section, write_page

if TYPE_CHECKING:
    from urank.clicks.item_curves import ItemCurve
    from urank.evaluation.policy_evaluation import Evaluation
    from urank.log.inspection import Inspection


_CURVES = (
    "Of two items, the one whose clicks fall faster has more to lose at a low position. The decay is the exponent a of "
    "the best fit 1/kᵃ to the curve: 0 is flat, with 1 the rate halves at position 2."
)


def write_run(
    path: str | Path,
    *,
    inspection: Inspection,
    fit: FitReport,
    evaluation: Evaluation,
    reference: ReferenceValues | None = None,
    chosen: str,
    why: str,
    curves: Sequence[ItemCurve] | None = None,
    by: str = "item_id",
    next_step: str = "",
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Write the page with plots.

    Args:
        evaluation: of the policies. The summary is about the policy named `chosen` if it was evaluated, since it is the
            one that ranks; else about the best.
        reference: known utilities to show beside the estimates.
        chosen, why: the method by which the model ranks, and the reason for that choice, as in `ModelFit.why`.
        curves: click curves of some items or groups by the column `by`; omitted if there are none.
        next_step: what to do about a clear gain.
        report: as in `write_page`.
    """
    evaluated = any(policy.name == chosen for policy in evaluation.policies)
    method = f"The model ranks by {chosen}{f': {POLICIES[chosen]}' if chosen in POLICIES else ''}."
    curve_section, log = None, inspection_summary(inspection)
    if curves:
        chart = Chart(partial(curve_figure, curves), f"P(click | item, position) by the click model, by {by}.")
        curve_section = Section("Click curves", paragraphs=[_CURVES], charts=[chart], tables=[curve_table(curves, by)])
    write_page(
        path,
        f"A ranking for {Path(inspection.facts.name).name}",
        evaluation_summary(evaluation, chosen if evaluated else None, reference, next_step),
        [
            Section("Expected utility", sections=evaluation_sections(evaluation, reference)),
            Section("How it ranks", paragraphs=[method, f"Why {chosen}: {why.removesuffix('.')}."]),
            curve_section,
            Section("The click model", paragraphs=[f"{fit.sentence}."], sections=fit_sections(fit)),
            Section("The log", paragraphs=[log.answer, log.evidence], sections=inspection_sections(inspection)),
        ],
        report=report,
    )
