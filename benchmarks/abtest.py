"""A/B tests: how often nothing is taken for something, how often intervals cover the truth, and what it costs.

    python -m benchmarks abtest     tests of simulated users that come back, each with a week before and two of test;
                                    4,000 of them without a lift, 4,000 with one of 5 %; then the time of a whole
                                    analysis against a bare group-by of Polars over the same log

A share of 4,000 tests that should be 5 % is known up to 0.34 points (one standard error). Two ways that are wrong stand
beside, for contrast: intervals made for one look, looked at every day, and impressions taken for independent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

import numpy as np
import polars as pl
from rich.console import Console
from rich.progress import track

from benchmarks.ab_visits import impressions_of, simulate_visits
from benchmarks.harness import Bar, median_seconds
from urank.abtest.analysis import Result, analyse
from urank.abtest.exposures import Exposures, read_exposures

BEFORE, DAYS = 7, 14
USERS = 4_000
LIFT = 0.05
LEVEL = 0.05
METRICS = ("ctr", "cvr", "revenue")
console = Console(stderr=True)


@dataclass(frozen=True)
class Between(Bar):
    """A goal with two ends."""

    @property
    def goal(self) -> str:
        return f"{self.at_least:g} to {self.at_most:g}"


@dataclass
class Flags:
    """What was found in each test, by name and metric."""

    found: dict[tuple[str, str], list[bool]] = field(default_factory=dict)

    def add(self, name: str, metric: str, flag: bool) -> None:
        self.found.setdefault((name, metric), []).append(flag)

    def share(self, name: str, metric: str) -> float:
        return float(np.mean(self.found[name, metric]))


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar]:
    parts = {
        "errors": lambda: _errors(60 if quick else 4_000),
        "coverage": lambda: _coverage(60 if quick else 4_000),
        "speed": lambda: _speed(5_000 if quick else 120_000),
    }
    for name, part in parts.items():
        if not only or name in only:
            yield from part()


def _errors(tests: int) -> Iterator[Bar]:
    """Tests without a lift: how often each way to test finds one."""
    flags = Flags()
    reductions: dict[str, list[float]] = {}
    for visits, results in _tests(tests, lift=0.0, seed=1):
        flags.add("impressions", "ctr", _impression_error(visits)[0] > 1.96)
        for result in results:
            name = result.metric.name
            flags.add("once", name, result.effect.p_value < LEVEL)
            flags.add("daily", name, result.decided is not None)
            flags.add("naive", name, any(look.p_value < LEVEL for look in result.looks))
            if result.cuped is not None:
                flags.add("cuped", name, result.cuped.effect.p_value < LEVEL)
                reductions.setdefault(name, []).append(result.cuped.variance_reduction)
    told = f"({tests:,} tests)"
    for metric in METRICS:
        for name, words in (("once", "at the end"), ("cuped", "at the end, CUPED")):
            yield Between(
                f"false positives {words}: {metric} {told}",
                flags.share(name, metric),
                "",
                at_least=0.04,
                at_most=0.06,
                part="errors",
            )
        daily = flags.share("daily", metric)
        yield Bar(
            f"false positives, daily looks, always valid: {metric} {told}", daily, "", at_most=0.05, part="errors"
        )
        naive = flags.share("naive", metric)
        yield Bar(f"false positives, daily looks, made for one: {metric} {told}", naive, "", part="errors")
        yield Bar(f"variance that CUPED takes out: {metric}", float(np.mean(reductions[metric])), "", part="errors")
    wrong = flags.share("impressions", "ctr")
    yield Bar(f"false positives, impressions taken for independent: ctr {told}", wrong, "", part="errors")


def _coverage(tests: int) -> Iterator[Bar]:
    """Tests with a lift: how often intervals of 95 % hold it."""
    flags = Flags()
    for visits, results in _tests(tests, lift=LIFT, seed=2):
        flags.add("impressions", "ctr", _impression_error(visits, LIFT)[0] <= 1.96)
        for result in results:
            name, lift = result.metric.name, result.effect.lift
            flags.add("delta", name, lift.low <= LIFT <= lift.high)
            flags.add("always", name, all(look.always_low <= LIFT <= look.always_high for look in result.looks))
            if result.cuped is not None:
                adjusted = result.cuped.effect.lift
                flags.add("CUPED", name, adjusted.low <= LIFT <= adjusted.high)
    told = f"({tests:,} tests)"
    for metric in METRICS:
        for name in ("delta", "CUPED"):
            share = flags.share(name, metric)
            yield Between(
                f"coverage of a lift of 5 %, {name}: {metric} {told}",
                share,
                "",
                at_least=0.93,
                at_most=0.97,
                part="coverage",
            )
        always = flags.share("always", metric)
        yield Bar(
            f"coverage of all daily looks, always valid: {metric} {told}", always, "", at_least=0.95, part="coverage"
        )
    wrong = flags.share("impressions", "ctr")
    yield Bar(f"coverage, impressions taken for independent: ctr {told}", wrong, "", part="coverage")


def _tests(tests: int, *, lift: float, seed: int) -> Iterator[tuple[Exposures, list[Result]]]:
    """The visits of each test, without the time before, and its results."""
    for number in track(range(tests), description=f"lift {lift:g}", console=console, transient=True):
        rng = np.random.default_rng([seed, number])
        visits = simulate_visits(USERS, days=DAYS, before=BEFORE, lift=lift, rng=rng)
        results = analyse(visits, control="A", start=visits.days[BEFORE], splits=0).results
        yield visits.between(BEFORE, BEFORE + DAYS - 1), results


def _impression_error(visits: Exposures, lift: float = 0.0) -> tuple[float, float]:
    """How many errors the log lift of the CTR is off by, and that error, if impressions were independent."""
    arm = visits.arm[visits.user]
    clicks, shown = (np.bincount(arm, sums, 2) for sums in (visits.clicks, visits.impressions))
    rate = clicks / shown
    error = sqrt(float(((1 - rate) / clicks).sum()))
    return abs(float(np.log(rate[1] / rate[0])) - float(np.log1p(lift))) / error, error


def _speed(users: int) -> Iterator[Bar]:
    """A log of impressions, from the file to the whole analysis, against the sums by user and day alone."""
    visits = simulate_visits(users, days=DAYS, before=BEFORE, lift=LIFT, rng=np.random.default_rng(3))
    log = impressions_of(visits, np.random.default_rng(4))
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as folder:
        path = Path(folder) / "log.parquet"
        log.write_parquet(path)

        def bare() -> None:
            earned = (pl.col("click") * pl.col("value")).sum().alias("revenue")
            by = ("user_id", pl.col("timestamp").dt.date().alias("day"))
            pl.scan_parquet(path).group_by(by).agg(pl.len(), pl.col("click").sum(), earned).collect(engine="streaming")

        def whole() -> None:
            found = read_exposures(path)
            analyse(found, control="A", start=found.days[BEFORE])

        plain, ours = median_seconds(bare, whole, repeats=5)
    yield Bar(f"impressions of {users:,} users, {BEFORE + DAYS} days", log.height / 1e6, "million", part="speed")
    yield Bar("group-by of Polars by user and day", plain, "s", part="speed")
    yield Bar("reading and analysing it", ours, "s", part="speed")
    yield Bar("reading and analysing / group-by", ours / plain, "times", at_most=3.0, part="speed")
