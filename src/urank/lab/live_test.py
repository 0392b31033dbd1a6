"""The simulated live test of Section 6.2: the test, its analysis against the truth, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.text import Text

from urank.abtest.analysis import Analysis, analyse
from urank.abtest.analysis import percent as short_percent
from urank.abtest.effects import Effect
from urank.abtest.exposures import Exposures, assign_arms, read_exposures
from urank.abtest.metrics import Metric
from urank.config import to_jsonable
from urank.errors import ConfigError
from urank.lab import appstore
from urank.lab.appstore import FIRST_DAY, Requests, ServedVisits, learn
from urank.lab.experiment import AbTestConfig
from urank.lab.letor_simulation import simulation_folder
from urank.lab.market import build_market
from urank.progress import Report, silent
from urank.ranking.ranking_model import RankingModel
from urank.report.abtest_report import LIFTS, OUTCOME_STYLES, analysis_sections, level, outcome
from urank.report.page import Section, Summary, write_page
from urank.report.tables import Table, bullet, number, percent, print_tables

if TYPE_CHECKING:
    from rich.console import Console

CONTROL, TREATMENT = "DeepFM", "U-rank"
"""The arms, named after their rankers in the A/B test."""


@dataclass(frozen=True)
class Learned:
    """A ranker trained during the test: its first day, its arm, the size of its log, and the training time."""

    day: int
    arm: str
    model: str
    impressions: int
    seconds: float


@dataclass(frozen=True, eq=False)
class AbTestRun:
    """The output of a simulated test.

    The folder has `exposures.parquet`, which `urank abtest analyse` reads, and `abtest.toml`. `truth` has a row for
    each day: the expected downloads per visit of each arm, relative to the production ranker on the same visits, and
    the lift of the treatment.
    """

    folder: Path
    config: AbTestConfig  # with the seed added to all seeds
    learned: list[Learned]
    truth: pl.DataFrame


class _RunningTest:
    """The state of a simulated test."""

    def __init__(self, config: AbTestConfig, report: Report) -> None:
        self.config, self.report = config, report
        self.market = build_market(config.market)
        shares = {CONTROL: config.arm_share, TREATMENT: config.arm_share}
        self.arm = assign_arms(pl.Series(self.market.user_names), shares, salt=f"appstore-{config.market.seed}")
        self.treated = (self.arm == TREATMENT).fill_null(False).to_numpy()
        self.logs: list[pl.DataFrame] = []
        self.learned: list[Learned] = []
        self.truth: list[dict[str, float]] = []
        report("learn the production ranker", 0, None)
        self.production = appstore.production_ranker(self.market, config.production, report=report)
        self.rankers = {CONTROL: self.production, TREATMENT: self.production}

    def days(self) -> Iterator[ServedVisits]:
        """Serve day after day, and train rankers on the days before."""
        config = self.config
        launch, last = config.before + 1, config.before + config.during
        for day in range(1, config.days + 1):
            if launch <= day <= last and (day - launch) % config.retrain == 0:
                self.rankers = {arm: self._learn(arm, day) for arm in (CONTROL, TREATMENT)}
            elif day == last + 1:
                # Not the control's latest ranker, which was trained on one arm's users only.
                self.rankers = {CONTROL: self.production, TREATMENT: self.production}
            yield self._serve(day)

    def _serve(self, day: int) -> ServedVisits:
        requests = appstore.draw_requests(self.market, day, among=self.arm.is_not_null().to_numpy())
        treated = self.treated[requests.user]
        if treated.all() or not treated.any():
            raise ConfigError(f"an arm has no visits on day {day}; users · share · visits must be larger")
        orders = {
            arm: appstore.ranked_by(model, "ctr1" if model.scorer is None else self.config.method)
            for arm, model in self.rankers.items()
        }
        visits = {CONTROL: ~treated, TREATMENT: treated}
        # Over the arm's own users, on whom its ranker was trained; relative to a common ranker, so that differences
        # between the users of the arms cancel.
        true = {}
        for arm, chosen in visits.items():
            own = requests.only(chosen)
            base = appstore.expected_downloads(own, appstore.ranked_by(self.production, "ctr1"))
            true[arm] = appstore.expected_downloads(own, orders[arm]) / base if base > 0 else float("nan")
        self.truth.append({"day": day, **true, "lift": true[TREATMENT] / true[CONTROL] - 1})

        def rank(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> NDArray[np.int64]:
            positions = np.empty(frame.height, dtype=np.int64)
            for arm, chosen in visits.items():
                rows = np.repeat(chosen, requests.app.shape[1])
                positions[rows] = orders[arm](requests.only(chosen), frame.filter(pl.Series(rows)), rng)
            return positions

        served = appstore.serve(requests, rank, policy="live")
        users = served.log["user_id"].str.slice(len("user-")).cast(pl.Int64).to_numpy()
        log = served.log.with_columns(self.arm[users].alias("arm"))
        self.logs = [*self.logs, log][-self.config.train_days :]
        return ServedVisits(log, served.table)

    def _learn(self, arm: str, day: int) -> RankingModel:
        config = self.config
        log = pl.concat(self.logs).filter(pl.col("arm") == arm)
        started = time.perf_counter()
        settings = (config.production,) if arm == CONTROL else (config.clicks, config.scorer)
        model = learn(log, *settings, report=self.report)
        self.learned.append(Learned(day, arm, model.name, log.height, time.perf_counter() - started))
        return model


def simulate_abtest(
    config: AbTestConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    finish: Callable[[AbTestRun], None] | None = None,
    report: Report = silent,
) -> AbTestRun:
    """Run the whole test and write its exposure log.

    Args:
        config: settings.
        folder: as in `write_appstore`.
        overwrite: as in `write_appstore`.
        finish: writes further files into the folder before it is renamed.
        report: progress callback.
    """
    folder = Path(folder)
    config = config.seeded()
    with simulation_folder(folder, "abtest.toml", config, overwrite=overwrite) as target:
        test = _RunningTest(config, report)
        appstore.write_days(target / "exposures.parquet", test.days(), config.days, "days of the test", report)
        truth = pl.DataFrame(test.truth)
        truth.write_parquet(target / "truth.parquet")
        if finish is not None:
            finish(AbTestRun(target, config, test.learned, truth))
    return AbTestRun(folder, config, test.learned, truth)


AA_BEFORE, AB, AA_AFTER = "A/A before", "A/B", "A/A after"


@dataclass(frozen=True)
class PeriodVerdict:
    """One metric in one period of the test ("A/A before", "A/B" or "A/A after"), from its first to its last day.

    The effect is of this period alone; the true lift is 0 in an A/A test.
    """

    period: str
    start: str
    end: str
    metric: Metric
    effect: Effect
    true_lift: float

    @property
    def holds_zero(self) -> bool:
        """Return whether the interval contains 0: no significant difference."""
        return self.effect.lift.low <= 0 <= self.effect.lift.high

    @property
    def holds_truth(self) -> bool:
        """Return whether the interval contains the true lift."""
        return self.effect.lift.low <= self.true_lift <= self.effect.lift.high


@dataclass(frozen=True, eq=False)
class JudgedTest:
    """The analysis of a simulated test."""

    run: AbTestRun
    ab: Analysis  # the A/B test, with the first A/A test as its pre-period
    aa_before: Analysis  # each A/A test alone
    aa_after: Analysis | None  # None if there was none

    @property
    def true_lifts(self) -> dict[str, float]:
        """Day -> true lift of downloads per visit."""
        days, lifts = (self.run.truth[name].to_list() for name in ("day", "lift"))
        return {day_name(int(day)): float(lift) for day, lift in zip(days, lifts, strict=True)}

    @property
    def true_lift(self) -> float:
        """The true lift over the days of the A/B test."""
        return self._lift_over(self.ab)

    @property
    def verdicts(self) -> list[PeriodVerdict]:
        """By period, then by metric; without revenue, since the truth is of downloads."""
        parts = {AA_BEFORE: self.aa_before, AB: self.ab}
        parts |= {} if self.aa_after is None else {AA_AFTER: self.aa_after}
        return [
            PeriodVerdict(period, found.start, found.end, result.metric, result.effect, self._lift_over(found))
            for period, found in parts.items()
            for result in found.results
            if result.metric.numerator != "revenue"
        ]

    @property
    def sentence(self) -> str:
        """The result of the A/B test by clicks per impression, and the true lift."""
        lift = self.ab.result("ctr").effect.lift
        contains = "contains" if lift.low <= self.true_lift <= lift.high else "misses"
        return (
            f"{self.ab.result('ctr').sentence} The true lift was {short_percent(self.true_lift)}, "
            f"which the {100 * (1 - self.ab.alpha):g} % interval {contains}."
        )

    def by_period(self) -> pl.DataFrame:
        """Return a row for each verdict: the lift with its interval, the largest of a day in size, and the truth."""
        analyses = {AA_BEFORE: self.aa_before, AB: self.ab, AA_AFTER: self.aa_after}
        rows = []
        for verdict in self.verdicts:
            found, lift = analyses[verdict.period], verdict.effect.lift
            assert found is not None  # noqa: S101 - it has a verdict
            daily = [
                day.effect.lift.value
                for day in found.result(verdict.metric.name).daily
                if found.start <= day.day <= found.end
            ]
            rows.append(
                {
                    "period": verdict.period,
                    "metric": verdict.metric.name.upper(),
                    "lift": lift.value,
                    "low": lift.low,
                    "high": lift.high,
                    "largest_day": float(np.nanmax(np.abs(daily))),
                    "true_lift": verdict.true_lift,
                }
            )
        return pl.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        verdicts = [
            asdict(each) | {"holds_zero": each.holds_zero, "holds_truth": each.holds_truth} for each in self.verdicts
        ]
        found = {"sentence": self.sentence, "true_lift": self.true_lift, "true_lifts": self.true_lifts}
        learned = [asdict(each) for each in self.run.learned]
        summary: dict[str, Any] = to_jsonable(found | {"verdicts": verdicts, "learned": learned})
        analyses = {"ab": self.ab, "aa_before": self.aa_before, "aa_after": self.aa_after}
        return summary | {name: None if found is None else found.to_dict() for name, found in analyses.items()}

    def _lift_over(self, found: Analysis) -> float:
        """Compute the lift of sums over days, like the estimate; it is not the mean of the daily lifts."""
        days = [found.start <= day_name(int(day)) <= found.end for day in self.run.truth["day"]]
        part = self.run.truth.filter(pl.Series(days))
        return float(part[TREATMENT].sum()) / float(part[CONTROL].sum()) - 1


def day_name(day: int) -> str:
    """Return the date of a day of the test, the first of which is 1.

    >>> day_name(8)
    '2020-05-13'
    """
    return (FIRST_DAY + timedelta(days=day - 1)).date().isoformat()


def judge_abtest(
    run: AbTestRun, *, name: str = "", splits: int = 1000, seed: int = 0, report: Report = silent
) -> JudgedTest:
    """Analyse the A/B test and the A/A tests before and after it.

    Each A/A test is analysed without the other days: the A/B test is no valid pre-period of the second one.

    Args:
        run: from `simulate_abtest`.
        name: of the log in the analyses; its path if left out.
        splits: number of random A/A splits by which false positives are counted.
        seed: of the splits.
        report: progress callback.

    Raises:
        DataError: when an arm has no users in one of the tests.
    """
    config = run.config
    log = read_exposures(Path(run.folder) / "exposures.parquet", report=report)
    log = replace(log, name=name or log.name)
    launch, last = config.before + 1, config.before + config.during

    def judged(seen: Exposures, first: int, final: int) -> Analysis:
        days: dict[str, Any] = {"start": day_name(first), "end": day_name(final)}
        return analyse(seen, control=CONTROL, treatment=TREATMENT, **days, splits=splits, seed=seed, report=report)

    def alone(first: int, final: int) -> Analysis:
        names = [day_name(day) for day in range(first, final + 1)]
        return judged(log.where(pl.Series(log.days).is_in(names).to_numpy()[log.day]), first, final)

    after = alone(last + 1, config.days) if config.after else None
    return JudgedTest(run, judged(log, launch, last), alone(1, config.before), after)


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
    parts = "A/A, A/B, A/A" if judged.aa_after is not None else "A/A, A/B"
    truth: dict[str, Any] = {"truth": judged.true_lift, "true_lifts": judged.true_lifts}
    *found, how = analysis_sections(judged.ab, **truth, periods=LIVE_PERIODS)
    sections = [
        Section(parts, paragraphs=[_WHAT], tables=[_verdict_table(judged)], notes=[_VERDICTS, _PAPER]),
        *found,
        Section("Rankers", paragraphs=[_RANKERS], tables=[_learned_table(judged)]),
        how,
    ]
    write_page(path, "A simulated live test", Summary(judged.sentence), sections)


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
    rows = [
        (each.arm, str(each.day), each.model, f"{each.impressions:,}", number(each.seconds, 1))
        for each in judged.run.learned
    ]
    return Table(("arm", "from day", "model", "impressions", "seconds"), rows)
