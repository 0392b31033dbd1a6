"""One report of the whole job: what a model would earn, how it ranks, its click model and curves, and the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from urank.clicks.item_curves import ItemCurve
from urank.log.inspection import Inspection
from urank.report.click_report import FitReport, curve_figure, curve_table, fit_sections
from urank.report.evaluation_report import ReferenceValues, evaluation_sections, evaluation_sentence
from urank.report.inspection_report import inspection_lead, inspection_sections
from urank.report.page import Chart, Section, write_page

if TYPE_CHECKING:
    from urank.evaluation.policy_evaluation import Evaluation

__all__ = ["write_job"]

_METHODS = {
    "score": "a network or trees, trained to put the list in the order that earns the most, give each item a score, "
    "and the list is sorted by it",
    "match": "the click model tells what each item would earn at each position, and the items are matched to positions "
    "so that the sum is the largest that there is",
    "ctr1": "the list is sorted by what each item would earn at position 1",
}
_CURVES = (
    "Of two items, the one whose clicks fall faster has more to lose at a low position. The decay is the exponent a of "
    "the curve's best fit 1/kᵃ: 0 is clicked alike everywhere, 1 halves at position 2."
)


def write_job(
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
) -> None:
    """Write the page with the plots.

    Args:
        path: of the page.
        inspection: of the log.
        fit: the report of the click model.
        evaluation: what the model would earn. The lead tells of the policy named as `chosen` if there is one, since it
            is the one that ranks; else of the best.
        reference: known utilities to show beside the estimates.
        chosen: the method by which the model ranks.
        why: how that was chosen, in words, as `ModelFit.why` has it.
        curves: click curves of some items or groups; left out when there are none.
        by: what these are: item_id, or what makes a group.
    """
    judged = any(policy.name == chosen for policy in evaluation.policies)
    lead = f"{evaluation_sentence(evaluation, chosen if judged else None, reference)}."
    sections = [
        Section("What it would earn", sections=evaluation_sections(evaluation, reference)),
        Section("How it ranks", paragraphs=[_method(chosen), f"Why {chosen}: {why.removesuffix('.')}."]),
        _curve_section(curves, by) if curves else None,
        Section("The click model", paragraphs=[f"{fit.sentence}."], sections=fit_sections(fit)),
        Section("The log", paragraphs=[inspection_lead(inspection)], sections=inspection_sections(inspection)),
    ]
    title = f"A ranking for {Path(inspection.facts.name).name}"
    write_page(path, title, lead, [section for section in sections if section is not None], footer="urank")


def _method(chosen: str) -> str:
    told = f": {_METHODS[chosen]}" if chosen in _METHODS else ""
    return f"The model ranks by {chosen}{told}."


def _curve_section(curves: Sequence[ItemCurve], by: str) -> Section:
    chart = Chart(curve_figure(curves), f"P(click | item, position) by the click model, by {by}.")
    return Section("Click curves", paragraphs=[_CURVES], charts=[chart], tables=[curve_table(curves, by)])
