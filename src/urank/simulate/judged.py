"""A simulated live test, judged as a real one would be: the A/B test, the A/A tests around it, and then the truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl

from urank.abtest.analysis import analyse
from urank.abtest.estimate import Effect
from urank.abtest.exposures import Exposures, read_exposures
from urank.abtest.metrics import Metric
from urank.abtest.results import Analysis, percent
from urank.plain import plain
from urank.progress import Report, silent
from urank.simulate.abtest import CONTROL, TREATMENT, AbTestRun
from urank.simulate.appstore import FIRST_DAY

__all__ = ["JudgedTest", "Verdict", "day_name", "judge_abtest"]

AA_BEFORE, AB, AA_AFTER = "A/A before", "A/B", "A/A after"


@dataclass(frozen=True)
class Verdict:
    """One metric in one part of the test.

    Attributes:
        period: the part: "A/A before", "A/B", "A/A after".
        start, end: its first and its last day.
        metric: what was measured.
        effect: of the treatment, in this part alone.
        true_lift: over its days together; 0 in an A/A test.
    """

    period: str
    start: str
    end: str
    metric: Metric
    effect: Effect
    true_lift: float

    @property
    def holds_zero(self) -> bool:
        """Whether the interval holds 0: no difference was found."""
        return self.effect.lift.low <= 0 <= self.effect.lift.high

    @property
    def holds_truth(self) -> bool:
        """Whether the interval holds the true lift."""
        return self.effect.lift.low <= self.true_lift <= self.effect.lift.high


@dataclass(frozen=True, eq=False)
class JudgedTest:
    """What a simulated test came to.

    Attributes:
        run: the test.
        ab: the A/B test, with the first A/A test as the time before it.
        aa_before, aa_after: the A/A tests, each alone; the second is none when there was no such test.
    """

    run: AbTestRun
    ab: Analysis
    aa_before: Analysis
    aa_after: Analysis | None

    @property
    def true_lifts(self) -> dict[str, float]:
        """Day -> the true lift on it, of downloads a visit."""
        days, lifts = (self.run.truth[name].to_list() for name in ("day", "lift"))
        return {day_name(int(day)): float(lift) for day, lift in zip(days, lifts, strict=True)}

    @property
    def true_lift(self) -> float:
        """The true lift over the days of the A/B test."""
        return self._lift_over(self.ab)

    @property
    def verdicts(self) -> list[Verdict]:
        """By the parts of the test, then by metric."""
        return list(self._verdicts())

    @property
    def sentence(self) -> str:
        """The A/B test by clicks per impression, and the truth beside it."""
        lift = self.ab.result("ctr").effect.lift
        held = "holds" if lift.low <= self.true_lift <= lift.high else "misses"
        return (
            f"{self.ab.result('ctr').sentence} The true lift was {percent(self.true_lift)}, "
            f"which the {100 * (1 - self.ab.alpha):g} % interval {held}."
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        verdicts = [
            asdict(each) | {"holds_zero": each.holds_zero, "holds_truth": each.holds_truth} for each in self.verdicts
        ]
        told: dict[str, Any] = plain(
            {
                "sentence": self.sentence,
                "true_lift": self.true_lift,
                "true_lifts": self.true_lifts,
                "verdicts": verdicts,
                "learned": [asdict(each) for each in self.run.learned],
            }
        )
        analyses = {"ab": self.ab, "aa_before": self.aa_before, "aa_after": self.aa_after}
        return told | {name: None if found is None else found.to_dict() for name, found in analyses.items()}

    def _verdicts(self) -> Iterator[Verdict]:
        parts = {AA_BEFORE: self.aa_before, AB: self.ab}
        parts |= {} if self.aa_after is None else {AA_AFTER: self.aa_after}
        for period, found in parts.items():
            true = self._lift_over(found)
            for result in found.results:
                if result.metric.numerator != "revenue":  # the truth is of downloads
                    yield Verdict(period, found.start, found.end, result.metric, result.effect, true)

    def _lift_over(self, found: Analysis) -> float:
        """Of sums over days, as an estimate is; the mean of daily lifts is another when the control changes."""
        days = [found.start <= day_name(int(day)) <= found.end for day in self.run.truth["day"]]
        part = self.run.truth.filter(pl.Series(days))
        return float(part[TREATMENT].sum()) / float(part[CONTROL].sum()) - 1


def day_name(day: int) -> str:
    """What an exposure log calls a day of the test, the first of which is 1.

    >>> day_name(8)
    '2020-05-13'
    """
    return (FIRST_DAY + timedelta(days=day - 1)).date().isoformat()


def judge_abtest(
    run: AbTestRun, *, name: str = "", splits: int = 1000, seed: int = 0, report: Report = silent
) -> JudgedTest:
    """Analyse a simulated test three times: the A/B test, the A/A test before it and that after it.

    The A/A tests are analysed each alone. Before the second is the A/B test, and what users did in it is due to it.

    Args:
        run: what `simulate_abtest` left.
        name: what the analyses call the log; its path when left out.
        splits: random halves by which false positives are counted.
        seed: of the halves.
        report: told how far it is.

    Raises:
        DataError: when an arm has no users in one of the tests.
    """
    config = run.config
    log = read_exposures(Path(run.folder) / "exposures.parquet", report=report)
    log = replace(log, name=name or log.name)
    launch, last = config.before + 1, config.before + config.during

    def judged(seen: Exposures, first: int, final: int) -> Analysis:
        return analyse(
            seen,
            control=CONTROL,
            treatment=TREATMENT,
            start=day_name(first),
            end=day_name(final),
            splits=splits,
            seed=seed,
            report=report,
        )

    def alone(first: int, final: int) -> Analysis:
        return judged(_cut(log, first, final), first, final)

    after = alone(last + 1, config.days) if config.after else None
    return JudgedTest(run, judged(log, launch, last), alone(1, config.before), after)


def _cut(log: Exposures, first: int, last: int) -> Exposures:
    """The log of some days; the others stay, but nobody is seen on them."""
    names = {day_name(day) for day in range(first, last + 1)}
    kept = pl.Series(log.days).is_in(list(names)).to_numpy()
    return log.where(kept[log.day])
