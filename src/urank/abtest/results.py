"""What an A/B test found: the numbers that a report shows, and the sentence that it begins with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from urank.abtest.checks import SampleRatio, SplitCheck
from urank.abtest.estimate import Effect
from urank.abtest.metrics import Metric
from urank.abtest.sequential import Look
from urank.plain import plain

__all__ = ["Analysis", "ArmTotals", "Cuped", "DayEffect", "Result", "percent"]


@dataclass(frozen=True)
class ArmTotals:
    """What the users of an arm were shown and did in the test; `revenue` is none in a log without values."""

    name: str
    users: int
    impressions: int
    clicks: int
    conversions: int
    revenue: float | None


@dataclass(frozen=True)
class Cuped:
    """The effect with what users did before the test taken out.

    Attributes:
        effect: adjusted; the rates of the arms are not.
        variance_reduction: by which share the variance of the log lift is smaller.
        seen_before: share of the users of the test that were seen before it.
    """

    effect: Effect
    variance_reduction: float
    seen_before: float


@dataclass(frozen=True)
class DayEffect:
    """One day alone, over the users that were seen on it: the paper's Figures 5 and 6.

    Attributes:
        day: its name.
        period: before, in or after the test: "before", "test", "after".
        effect: of that day.
    """

    day: str
    period: str
    effect: Effect


@dataclass(frozen=True)
class Result:
    """One metric of one treatment against the control.

    Attributes:
        metric: what was measured.
        control, treatment: the names of the arms.
        alpha: one less the level of all intervals.
        effect: over the whole test, for those who look once at its end.
        adjusted_p: the p-value corrected for the number of treatments (Holm).
        cuped: the effect with the time before the test taken out; none when there is no such time.
        looks: at the end of each day.
        daily: each day alone.
    """

    metric: Metric
    control: str
    treatment: str
    alpha: float
    effect: Effect
    adjusted_p: float
    cuped: Cuped | None
    looks: list[Look]
    daily: list[DayEffect]

    @property
    def differs(self) -> bool:
        """Whether the arms are told apart at the end of the test."""
        return self.adjusted_p < self.alpha

    @property
    def decided(self) -> str | None:
        """The first day by whose end the always-valid interval left out 0; none when it never did."""
        return next((look.day for look in self.looks if look.always_low > 0 or look.always_high < 0), None)

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        lift, level = self.effect.lift, f"{100 * (1 - self.alpha):g} %"
        if isnan(lift.value):
            return f"There is no lift in {self.metric.title}, since {self.control} has none at all."
        less = "less" if self.metric.numerator == "revenue" else "fewer"
        more = f"{percent(abs(lift.value))} {'more' if lift.value >= 0 else less} {self.metric.title}"
        p = f"p = {_p(self.effect.p_value)}"
        if self.adjusted_p != self.effect.p_value:
            p += f", corrected for several treatments {_p(self.adjusted_p)}"
        found = (
            f"{self.treatment} earned {more} than {self.control} ({level} interval {_ends(lift.low, lift.high)}, {p})"
        )
        if not self.differs:
            found = f"{self.treatment} and {self.control} cannot be told apart: {found}"
        return "; ".join([found, *self._looked, *self._adjusted]) + "."

    @property
    def _looked(self) -> list[str]:
        if len(self.looks) < 2:
            return []
        found = next((look for look in self.looks if look.day == self.decided), None)
        if found is None:
            ends = _ends(self.looks[-1].always_low, self.looks[-1].always_high)
            return [f"for those who looked daily it is not sure: always-valid interval {ends}"]
        ends = _ends(found.always_low, found.always_high)
        return [f"looking daily was safe from the end of {found.day} on: always-valid interval then {ends}"]

    @property
    def _adjusted(self) -> list[str]:
        if self.cuped is None or isnan(self.cuped.effect.lift.value):
            return []
        lift, less = self.cuped.effect.lift, percent(max(self.cuped.variance_reduction, 0))
        ends = _ends(lift.low, lift.high)
        return [f"with what users did before taken out {percent(lift.value)} ({ends}), {less} less variance"]


@dataclass(frozen=True)
class Analysis:
    """An A/B test.

    Attributes:
        name: of the log.
        control, treatments: the names of the arms.
        days: of the log.
        start, end: the first and the last day of the test.
        alpha: one less the level of all intervals.
        interval: how those of the effect were made: "delta" or "bootstrap".
        expected_lift: what the always-valid intervals were made for.
        arms: totals of the test, the control first.
        results: by metric, then treatment.
        sample_ratio: whether the arms have as many users as they should.
        splits: by metric, how often the test calls nothing something; without those that cannot be told.
        crossed: users seen in two arms, who are left out.
        unassigned: users without an arm, who are left out.
        warnings: what puts the results in doubt, in words.
    """

    name: str
    control: str
    treatments: list[str]
    days: list[str]
    start: str
    end: str
    alpha: float
    interval: str
    expected_lift: float
    arms: list[ArmTotals]
    results: list[Result]
    sample_ratio: SampleRatio
    splits: list[SplitCheck]
    crossed: int
    unassigned: int
    warnings: list[str]

    def result(self, metric: str, treatment: str | None = None) -> Result:
        """The result of a metric, of the first treatment when none is named."""
        wanted = self.treatments[0] if treatment is None else treatment
        for found in self.results:
            if (found.metric.name, found.treatment) == (metric, wanted):
                return found
        raise KeyError(f"nothing is known of metric '{metric}' and treatment '{wanted}'")

    def __str__(self) -> str:
        """A line for each result, then the warnings."""
        return "\n".join([*(result.sentence for result in self.results), *self.warnings])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        told = asdict(self)
        for each, result in zip(told["results"], self.results, strict=True):
            each |= {"differs": result.differs, "decided": result.decided, "sentence": result.sentence}
        told["sample_ratio"]["sound"] = self.sample_ratio.sound
        for each, check in zip(told["splits"], self.splits, strict=True):
            each["sound"] = check.sound
        as_json: dict[str, Any] = plain(told)
        return as_json


def percent(share: float) -> str:
    """A share in percent, with two digits at least.

    >>> percent(0.0524), percent(-0.0524), percent(0.0004), percent(12.3)
    ('5.2 %', '−5.2 %', '0.04 %', '1,230 %')
    """
    if isnan(share):
        return "–"
    size = abs(100 * share)
    return f"{100 * share:z,.{2 if size < 1 else 1 if size < 100 else 0}f} %".replace("-", "−")


def _ends(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"


def _p(p_value: float) -> str:
    return "–" if isnan(p_value) else f"{p_value:.2g}" if p_value >= 0.001 else f"{p_value:.0e}"
