"""The live test of Section 6.2, simulated: A/A, then U-rank against the production ranker, then A/A again.

Of all users, 15 % are in the control and 15 % in the treatment, by a stable hash. In the A/A days the production ranker
serves both. In between, each arm has a ranker of its own, learned anew every few days from the log of that arm alone:
DeepFM in the control, U-rank in the treatment. Nobody tells the rankers anything that a live system would not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import polars as pl
import tomli_w
from numpy.typing import NDArray
from pydantic import Field, model_validator

from urank.abtest.assign import assign_arms
from urank.clicks.config import ClickConfig
from urank.config import Settings
from urank.errors import ConfigError
from urank.files import new_folder
from urank.progress import Report, silent
from urank.rankers.ranking import RankingModel
from urank.rankers.urank import RankerConfig
from urank.simulate.appstore import Ranker, Requests, Served, draw_requests, expected_downloads, serve
from urank.simulate.market import MORE_DAYS, Market, MarketConfig, build_market
from urank.simulate.production import PRODUCTION, learn, production_ranker, ranked_by, write_days

__all__ = ["CONTROL", "TREATMENT", "AbTestConfig", "AbTestRun", "Learned", "simulate_abtest"]

CONTROL, TREATMENT = "DeepFM", "U-rank"
"""The arms, called after what serves them in the test itself."""


class AbTestConfig(Settings):
    """All that decides a simulated A/B test; the same config gives the same bytes."""

    market: MarketConfig = Field(
        MarketConfig(users=60_000, visits=0.4, warmup_days=1),
        description="users and apps, as `urank appstore` takes them",
    )
    share: float = Field(0.15, gt=0, le=0.5, description="share of the users in each of the two arms")
    before: int = Field(7, ge=1, le=365, description="days of the first A/A test")
    during: int = Field(10, ge=1, le=365, description="days of the A/B test")
    after: int = Field(7, ge=0, le=365, description="days of the second A/A test")
    retrain: int = Field(5, ge=1, le=365, description="days after which the arms' rankers are learned anew")
    window: int = Field(7, ge=1, le=365, description="days of an arm's log that its ranker learns from")
    method: Literal["score", "match"] = Field("score", description="how U-rank ranks: by score, or by the matching")
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
        """Of the whole test."""
        return self.before + self.during + self.after

    def seeded(self) -> AbTestConfig:
        """The same with the seed added everywhere, and itself 0."""
        parts = {name: getattr(self, name) for name in ("market", "production", "clicks", "scorer")}
        moved = {name: part.model_copy(update={"seed": part.seed + self.seed}) for name, part in parts.items()}
        return self.model_copy(update=moved | {"seed": 0})


@dataclass(frozen=True)
class Learned:
    """A ranker that was learned: the first day it served, its arm, the impressions it was learned from, the seconds."""

    day: int
    arm: str
    model: str
    impressions: int
    seconds: float


@dataclass(frozen=True, eq=False)
class AbTestRun:
    """What a simulated test left.

    Attributes:
        folder: with `exposures.parquet`, which `urank abtest analyse` reads, and `abtest.toml`.
        config: what was asked for, with the seed added everywhere.
        learned: the rankers of the arms.
        truth: a row for each day: the expected downloads a visit of each arm, over those that the production ranker
            would bring for the same visitors, and the lift of one over the other.
    """

    folder: Path
    config: AbTestConfig
    learned: list[Learned]
    truth: pl.DataFrame


class _Test:
    """A test while it runs."""

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

    def days(self) -> Iterator[Served]:
        """One day after another, with rankers learned from those before."""
        config = self.config
        launch, last = config.before + 1, config.before + config.during
        for day in range(1, config.days + 1):
            if launch <= day <= last and (day - launch) % config.retrain == 0:
                self.rankers = {arm: self._learn(arm, day) for arm in (CONTROL, TREATMENT)}
            elif day == last + 1:
                # Not the control's latest, which has learned of one arm's users alone.
                self.rankers = {CONTROL: self.production, TREATMENT: self.production}
            yield self._serve(day)

    def _serve(self, day: int) -> Served:
        requests = draw_requests(self.market, day, among=self.arm.is_not_null().to_numpy())
        orders = {arm: ranked_by(model, self._method(model)) for arm, model in self.rankers.items()}
        treated = self.treated[requests.user]
        if treated.all() or not treated.any():
            raise ConfigError(f"nobody of an arm came on day {day}; users · share · visits must be larger")
        self.truth.append({"day": day, **self._truth(requests, orders, treated)})
        ranker = _by_arm(orders, treated)
        served = serve(requests, ranker, policy="live")
        users = served.log["user_id"].str.slice(len("user-")).cast(pl.Int64).to_numpy()
        log = served.log.with_columns(self.arm[users].alias("arm"))
        self.logs = [*self.logs, log][-self.config.window :]
        return Served(log, served.table)

    def _truth(self, requests: Requests, orders: dict[str, Ranker], treated: NDArray[np.bool_]) -> dict[str, float]:
        """Expected downloads a visit of each arm by its ranker, over those by the production ranker, and their lift.

        By the users of the arm itself, of whom its ranker has learned; over a ranker that is the same for both, so that
        it does not matter whether an arm happens to have the keener users.
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
    """Each visit by the ranker of its user's arm."""

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
        folder: a new or empty folder; it appears when all of it is complete.
        overwrite: replace an earlier test. A folder that holds anything else is never replaced.
        finish: writes what else belongs into the folder before it appears; its run is in a folder to be moved.
        report: told how far it is.
    """
    folder = Path(folder)
    config = config.seeded()
    try:
        with new_folder(folder, marker="abtest.toml", overwrite=overwrite) as target:
            test = _Test(config, report)
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
