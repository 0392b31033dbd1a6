"""The simulated live test of Section 6.2: the test, its analysis against the truth, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import polars as pl
import tomli_w
from numpy.typing import NDArray
from pydantic import Field, model_validator
from rich.text import Text

from urank.abtest.analysis import Analysis, analyse
from urank.abtest.analysis import percent as short_percent
from urank.abtest.effects import Effect
from urank.abtest.exposures import Exposures, assign_arms, read_exposures
from urank.abtest.metrics import Metric
from urank.clicks.fitting import ClickConfig
from urank.config import Settings, to_jsonable
from urank.errors import ConfigError
from urank.lab.appstore import (
    FIRST_DAY,
    PRODUCTION,
    Ranker,
    Requests,
    ServedVisits,
    draw_requests,
    expected_downloads,
    learn,
    production_ranker,
    ranked_by,
    serve,
    write_days,
)
from urank.lab.market import MORE_DAYS, Market, MarketConfig, build_market
from urank.progress import Report, silent
from urank.ranking.ranking_model import RankingModel
from urank.ranking.urank_network import RankerConfig
from urank.report.abtest_report import LIFTS, OUTCOME_STYLES, analysis_sections, level, outcome
from urank.report.page import Section, write_page
from urank.report.tables import Table, bullet, number, percent, print_tables
from urank.storage import new_folder

if TYPE_CHECKING:
    from rich.console import Console

CONTROL, TREATMENT = "DeepFM", "U-rank"
"""The arms, named after their rankers in the A/B test."""


class AbTestConfig(Settings):
    """Settings of a simulated A/B test; the same settings give the same bytes."""

    market: MarketConfig = Field(
        MarketConfig(users=60_000, visits=0.4, warmup_days=1),
        description="users and apps, as in `urank appstore`",
    )
    share: float = Field(0.15, gt=0, le=0.5, description="share of the users in each of the two arms")
    before: int = Field(7, ge=1, le=365, description="days of the first A/A test")
    during: int = Field(10, ge=1, le=365, description="days of the A/B test")
    after: int = Field(7, ge=0, le=365, description="days of the second A/A test")
    retrain: int = Field(5, ge=1, le=365, description="days between trainings of the arms' rankers")
    window: int = Field(7, ge=1, le=365, description="days of an arm's log on which its ranker is trained")
    method: Literal["score", "match"] = Field("score", description="U-rank's order: by score, or by the matching")
    production: ClickConfig = Field(PRODUCTION, description="DeepFM, the production ranker")
    clicks: ClickConfig = Field(
        ClickConfig(families=("monotone",), backbone="deepfm"), description="the click model of U-rank"
    )
    scorer: RankerConfig = Field(RankerConfig(backbone="deepfm"), description="U-rank's scorer")
    seed: int = Field(0, ge=0, description="added to all other seeds")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.days > self.market.days + MORE_DAYS:
            raise ValueError(f"before, during and after must be {self.market.days + MORE_DAYS} days in all at most")
        return self

    @property
    def days(self) -> int:
        """Days of the whole test."""
        return self.before + self.during + self.after

    def seeded(self) -> AbTestConfig:
        """Add the seed to all other seeds, and set it to 0."""
        parts = {name: getattr(self, name) for name in ("market", "production", "clicks", "scorer")}
        moved = {name: part.model_copy(update={"seed": part.seed + self.seed}) for name, part in parts.items()}
        return self.model_copy(update=moved | {"seed": 0})


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

    Attributes:
        folder: with `exposures.parquet`, which `urank abtest analyse` reads, and `abtest.toml`.
        config: the settings, with the seed added to all seeds.
        learned: the rankers trained during the test.
        truth: a row for each day: the expected downloads per visit of each arm, relative to the production ranker on
            the same visits, and the lift of the treatment.
    """

    folder: Path
    config: AbTestConfig
    learned: list[Learned]
    truth: pl.DataFrame


class _RunningTest:
    """The state of a simulated test."""

    def __init__(self, config: AbTestConfig, report: Report) -> None:
        self.config, self.report = config, report
        self.market: Market = build_market(config.market)
        names = pl.Series(self.market.user_names)
        shares = {CONTROL: config.share, TREATMENT: config.share}
        self.arm = assign_arms(names, shares, salt=f"appstore-{config.market.seed}")
        self.treated = (self.arm == TREATMENT).fill_null(False).to_numpy()
        self.logs: list[pl.DataFrame] = []
        self.learned: list[Learned] = []
        self.truth: list[dict[str, float]] = []
        self.report("learn the production ranker", 0, None)
        self.production = production_ranker(self.market, config.production, report=report)
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
        requests = draw_requests(self.market, day, among=self.arm.is_not_null().to_numpy())
        orders = {arm: ranked_by(model, self._method(model)) for arm, model in self.rankers.items()}
        treated = self.treated[requests.user]
        if treated.all() or not treated.any():
            raise ConfigError(f"an arm has no visits on day {day}; users · share · visits must be larger")
        self.truth.append({"day": day, **self._truth(requests, orders, treated)})
        ranker = _by_arm(orders, treated)
        served = serve(requests, ranker, policy="live")
        users = served.log["user_id"].str.slice(len("user-")).cast(pl.Int64).to_numpy()
        log = served.log.with_columns(self.arm[users].alias("arm"))
        self.logs = [*self.logs, log][-self.config.window :]
        return ServedVisits(log, served.table)

    def _truth(self, requests: Requests, orders: dict[str, Ranker], treated: NDArray[np.bool_]) -> dict[str, float]:
        """Compute the expected downloads per visit of each arm, relative to the production ranker, and the lift.

        Over the arm's own users, on whom its ranker was trained; relative to a common ranker, so that differences
        between the users of the arms cancel.
        """
        found = {}
        for arm, chosen in ((CONTROL, ~treated), (TREATMENT, treated)):
            own = requests.only(chosen)
            base = expected_downloads(own, ranked_by(self.production, "ctr1"))
            found[arm] = expected_downloads(own, orders[arm]) / base if base > 0 else float("nan")
        return {**found, "lift": found[TREATMENT] / found[CONTROL] - 1}

    def _method(self, model: RankingModel) -> Literal["score", "match", "ctr1"]:
        return "ctr1" if model.scorer is None else self.config.method

    def _learn(self, arm: str, day: int) -> RankingModel:
        config = self.config
        log = pl.concat(self.logs).filter(pl.col("arm") == arm)
        started = time.perf_counter()
        if arm == CONTROL:
            model = learn(log, config.production, report=self.report)
        else:
            model = learn(log, config.clicks, config.scorer, report=self.report)
        self.learned.append(Learned(day, arm, model.name, log.height, time.perf_counter() - started))
        return model


def _by_arm(rankers: dict[str, Ranker], treated: NDArray[np.bool_]) -> Ranker:
    """Return a ranker that serves each visit by the ranker of its user's arm."""

    def rank(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> NDArray[np.int64]:
        positions = np.empty(frame.height, dtype=np.int64)
        for arm, chosen in ((CONTROL, ~treated), (TREATMENT, treated)):
            rows = np.repeat(chosen, requests.app.shape[1])
            if chosen.any():
                positions[rows] = rankers[arm](requests.only(chosen), frame.filter(pl.Series(rows)), rng)
        return positions

    return rank


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
        folder: a new or empty folder, written atomically.
        overwrite: replace an earlier test. A folder with anything else in it is never replaced.
        finish: writes further files into the folder before it is renamed.
        report: progress callback.
    """
    folder = Path(folder)
    config = config.seeded()
    try:
        with new_folder(folder, marker="abtest.toml", overwrite=overwrite) as target:
            test = _RunningTest(config, report)
            write_days(target / "exposures.parquet", test.days(), config.days, "days of the test", report)
            truth = pl.DataFrame(test.truth)
            truth.write_parquet(target / "truth.parquet")
            settings = config.model_dump(mode="json", exclude_none=True)
            (target / "abtest.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
            if finish is not None:
                finish(AbTestRun(target, config, test.learned, truth))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return AbTestRun(folder, config, test.learned, truth)


AA_BEFORE, AB, AA_AFTER = "A/A before", "A/B", "A/A after"


@dataclass(frozen=True)
class PeriodVerdict:
    """One metric in one period of the test.

    Attributes:
        period: "A/A before", "A/B" or "A/A after".
        start, end: its first and last day.
        metric: the metric.
        effect: of the treatment, in this period alone.
        true_lift: over the period; 0 in an A/A test.
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
    """The analysis of a simulated test.

    Attributes:
        run: the test.
        ab: the A/B test, with the first A/A test as its pre-period.
        aa_before, aa_after: the A/A tests, each alone; `aa_after` is None if there was none.
    """

    run: AbTestRun
    ab: Analysis
    aa_before: Analysis
    aa_after: Analysis | None

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
        """By period, then by metric."""
        return list(self._verdicts())

    @property
    def sentence(self) -> str:
        """The result of the A/B test by clicks per impression, and the true lift."""
        lift = self.ab.result("ctr").effect.lift
        contains = "contains" if lift.low <= self.true_lift <= lift.high else "misses"
        return (
            f"{self.ab.result('ctr').sentence} The true lift was {short_percent(self.true_lift)}, "
            f"which the {100 * (1 - self.ab.alpha):g} % interval {contains}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        verdicts = [
            asdict(each) | {"holds_zero": each.holds_zero, "holds_truth": each.holds_truth} for each in self.verdicts
        ]
        summary: dict[str, Any] = to_jsonable(
            {
                "sentence": self.sentence,
                "true_lift": self.true_lift,
                "true_lifts": self.true_lifts,
                "verdicts": verdicts,
                "learned": [asdict(each) for each in self.run.learned],
            }
        )
        analyses = {"ab": self.ab, "aa_before": self.aa_before, "aa_after": self.aa_after}
        return summary | {name: None if found is None else found.to_dict() for name, found in analyses.items()}

    def _verdicts(self) -> Iterator[PeriodVerdict]:
        parts = {AA_BEFORE: self.aa_before, AB: self.ab}
        parts |= {} if self.aa_after is None else {AA_AFTER: self.aa_after}
        for period, found in parts.items():
            true = self._lift_over(found)
            for result in found.results:
                if result.metric.numerator != "revenue":  # the truth is of downloads
                    yield PeriodVerdict(period, found.start, found.end, result.metric, result.effect, true)

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
    """Remove the exposures of other days; the days stay."""
    names = {day_name(day) for day in range(first, last + 1)}
    kept = pl.Series(log.days).is_in(list(names)).to_numpy()
    return log.where(kept[log.day])


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
