"""The report of a simulated live test: the result and the truth of each of its parts, and the rankers it learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from urank.report.abtest_report import LIFTS, OUTCOME_STYLES, analysis_sections, level, outcome
from urank.report.page import Section, write_page
from urank.report.tables import Table, bullet, number, percent, print_tables

if TYPE_CHECKING:
    from rich.console import Console

    from urank.lab.live_test import JudgedTest


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
    """Print the rankers and the parts of the test, then the sentence."""
    print_tables(console, (_learned_table(judged), _verdict_table(judged)))
    for warning in judged.ab.warnings:
        bullet(console, "beware", warning)
    if judged.ab.warnings:
        console.print()
    console.print(Text(judged.sentence, style=OUTCOME_STYLES[outcome(judged.ab.result("ctr"))]))


def write_judged(judged: JudgedTest, path: str | Path) -> None:
    """Write the page with plots."""
    write_page(path, "A simulated live test", judged.sentence, judged_sections(judged), footer="urank abtest simulate")


def judged_sections(judged: JudgedTest) -> list[Section]:
    """Return the sections of the page."""
    parts = "A/A, A/B, A/A" if judged.aa_after is not None else "A/A, A/B"
    *found, how = analysis_sections(
        judged.ab, truth=judged.true_lift, true_lifts=judged.true_lifts, periods=LIVE_PERIODS
    )
    return [
        Section(parts, paragraphs=[_WHAT], tables=[_verdict_table(judged)], notes=[_VERDICTS, _PAPER]),
        *found,
        Section("Rankers", paragraphs=[_RANKERS], tables=[_learned_table(judged)]),
        how,
    ]


def _verdict_table(judged: JudgedTest) -> Table:
    """The estimated and the true lift of each part of the test."""
    found = judged.verdicts
    lifts = [each.effect.lift for each in found]
    return Table.of_columns(
        {
            "test": [each.period for each in found],
            "metric": [each.metric.name.upper() for each in found],
            "lift": [percent(lift.value, sign=True) for lift in lifts],
            f"{level(judged.ab.alpha)} interval": [LIFTS.changes(lift.low, lift.high) for lift in lifts],
            "0 inside": ["yes" if each.holds_zero else "no" for each in found],
            "true lift": [percent(each.true_lift, sign=True) if each.true_lift else "0 %" for each in found],
            "truth inside": ["yes" if each.holds_truth else "no" for each in found],
            "days": [f"{each.start} – {each.end}" for each in found],
        }
    )


def _learned_table(judged: JudgedTest) -> Table:
    """The rankers that were trained during the test."""
    learned = judged.run.learned
    return Table.of_columns(
        {
            "arm": [each.arm for each in learned],
            "from day": [str(each.day) for each in learned],
            "model": [each.model for each in learned],
            "impressions": [f"{each.impressions:,}" for each in learned],
            "seconds": [number(each.seconds, 1) for each in learned],
        }
    )
