"""The report of a simulated live test: what each of its parts found, what was true, and the rankers it learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from urank.report.abtest_report import OUTCOMES, analysis_sections, learned_table, outcome, verdict_table
from urank.report.tables import bullet, terminal_table

if TYPE_CHECKING:
    from urank.lab.live_test import JudgedTest
    from urank.report.page import Section

__all__ = ["LIVE_PERIODS", "judged_sections", "print_judged", "write_judged"]

LIVE_PERIODS = {"before": "A/A", "test": "A/B", "after": "A/A"}
_WHAT = (
    "The live test of the paper's Section 6.2, in a simulated app store. In the A/A tests both arms are served by the "
    "same ranker; in the A/B test each has a ranker of its own, learned from the log of that arm alone: DeepFM in the "
    "control, U-rank in the treatment."
)
_VERDICTS = (
    "CTR is downloads per impression, CVR downloads per user. An A/A test should hold 0; by chance, one interval in "
    "twenty does not. The true lift compares the expected downloads a visit of the two arms, each over what the "
    "production ranker would bring for the same visitors, summed over days."
)
_PAPER = (
    "In the paper's own store, CTR rose by 19.2 % and CVR by 20.8 % on average over the ten days of the A/B test, and "
    "both stayed within 8 % in the A/A tests. These figures are of another store; what compares is the course: no "
    "difference, a step, no difference."
)
_RANKERS = "The rankers that were learned while the test ran. Each serves its arm from that day on."


def print_judged(judged: JudgedTest, console: Console) -> None:
    """Print the parts of the test and the rankers, the sentence that counts last."""
    for table in (learned_table(judged), verdict_table(judged)):
        console.print(terminal_table(table))
        console.print()
    for warning in judged.ab.warnings:
        bullet(console, "beware", Text(warning))
    if judged.ab.warnings:
        console.print()
    console.print(Text(judged.sentence, style=OUTCOMES[outcome(judged.ab.result("ctr"))]))


def write_judged(judged: JudgedTest, path: str | Path) -> None:
    """Write the page with the plots."""
    from urank.report.page import write_page  # matplotlib is slow to load

    write_page(path, "A simulated live test", judged.sentence, judged_sections(judged), footer="urank abtest simulate")


def judged_sections(judged: JudgedTest) -> list[Section]:
    """What the page tells, in order."""
    from urank.report.page import Section

    parts = "A/A, A/B, A/A" if judged.aa_after is not None else "A/A, A/B"
    *found, how = analysis_sections(
        judged.ab, truth=judged.true_lift, true_lifts=judged.true_lifts, periods=LIVE_PERIODS
    )
    return [
        Section(parts, paragraphs=[_WHAT], tables=[verdict_table(judged)], notes=[_VERDICTS, _PAPER]),
        *found,
        Section("Rankers", paragraphs=[_RANKERS], tables=[learned_table(judged)]),
        how,
    ]
