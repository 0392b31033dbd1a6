"""What the paper's experiments share: trials, steps, and the methods that a trial compares.

A trial is one seed of an experiment and owns a folder. Its steps (data, click models, propensities, and one step per
method) each leave one output in that folder, which appears by rename when it is complete. An experiment is therefore a
graph of steps that can resume after a crash.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, model_validator

from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.config import Settings, deep_merge, read_toml, validate
from urank.errors import ConfigError
from urank.lab.appstore import PRODUCTION
from urank.lab.experiment_results import MethodKind
from urank.lab.letor_simulation import SimulationConfig
from urank.lab.market import AbTestSchedule, MarketConfig
from urank.lab.provenance import provenance
from urank.lab.user_models import User
from urank.learning.features import Featurizer
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Block, Dataset
from urank.log.ragged import offsets_of_runs
from urank.model_io import save_model
from urank.progress import Report
from urank.propensity.cpbm import CpbmConfig
from urank.ranking.baselines import fit_baseline
from urank.ranking.policies import ScorerPolicy
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import (
    Baseline,
    BaselineConfig,
    RankerConfig,
    RankSvmConfig,
    TreesConfig,
    UrankConfig,
)
from urank.storage import new_file

PAPER_CLICKS = ClickConfig(families=("monotone", "factorised", "vector"), within_list="off")
"""The click model of the paper's experiments: the best of these families, or their mean, on raw features as all
baselines."""

PAPER_TRAINING = TrainingConfig(share=1.0)
"""The training of U-rank, and of baselines with the same network: as many passes for all."""

PRESENTATION = {"title", "methods", "settings", "seeds"}
"""Settings of an experiment on which no result depends."""

EXPERIMENTS = (
    "table1",
    "table2",
    "table3",
    "live-test",
    "fig-ctr-by-position",
    "fig-result-list",
    "differences",
    "attention",
    "users",
)


class AbTestConfig(AbTestSchedule):
    """Settings of a simulated A/B test; the same settings give the same bytes."""

    production: ClickConfig = Field(PRODUCTION, description="DeepFM, the production ranker")
    clicks: ClickConfig = Field(
        ClickConfig(families=("monotone",), backbone="deepfm", within_list="off"),
        description="the click model of U-rank",
    )
    scorer: RankerConfig = Field(
        RankerConfig(backbone="deepfm", training=PAPER_TRAINING), description="U-rank's scorer"
    )

    def seeded(self) -> AbTestConfig:
        """Add the seed to all other seeds, and set it to 0."""
        return add_seed(self, self.seed, ("market", "production", "clicks", "scorer")).model_copy(update={"seed": 0})


class StoreConfig(Settings):
    """Settings of the app store experiments (Table 3, and the live test)."""

    market: MarketConfig = Field(MarketConfig(), description="users, apps and days, as in `urank appstore`")
    test_visits: int = Field(
        40_000, ge=1, description="visits on the test day: more than on other days, to reduce the variance"
    )
    production: ClickConfig = Field(
        PRODUCTION, description="DeepFM: the ranker that produced the log and, trained on that log, a row of the table"
    )
    clicks: ClickConfig = Field(
        PAPER_CLICKS.model_copy(update={"backbone": "deepfm"}),
        description="the click model of U-rank and the matching",
    )
    scorer: RankerConfig = Field(
        RankerConfig(backbone="deepfm", training=PAPER_TRAINING),
        description="U-rank; LambdaRank and DLA use the same network",
    )
    svm: RankSvmConfig = RankSvmConfig()
    baseline: BaselineConfig = Field(BaselineConfig(), description="clipping of inverse propensities")
    live: AbTestConfig = Field(AbTestConfig(), description="the live test, as in `urank abtest simulate`")

    def seeded(self, seed: int) -> StoreConfig:
        """Add `seed` to every seed."""
        return add_seed(self, seed, ("market", "production", "clicks", "scorer", "svm", "live"))


class SimulationOverrides(Settings):
    """Changes to the users of a simulation."""

    user: User | None = Field(None, description="user model")
    eta: float | None = Field(None, description="η")
    attention_features: int | None = Field(None, description="number of features that attention depends on")


class ExperimentConfig(Settings):
    """Settings of an experiment."""

    title: str = Field("", description="the paper's name of the table or figure")
    methods: tuple[str, ...] = Field((), description="the methods to compare")
    settings: dict[str, SimulationOverrides] = Field(
        {}, description="repeat the experiment with each of these changes to the simulation, by name"
    )
    seeds: int | None = Field(None, ge=1, description="number of seeds at most with each of the settings")
    dataset: str = Field("", description="the paper's name of the data, if used: yahoo, mslr-web10k or istella-s")
    simulation: SimulationConfig = Field(
        SimulationConfig(truth_split="all"), description="documents, loggers and users, as in `urank simulate`"
    )
    swap_sessions: int = Field(
        2, ge=1, description="sessions per query in the online experiment with random swaps (Randomization)"
    )
    clicks: ClickConfig = Field(PAPER_CLICKS, description="the click model of U-rank, the matching and CTR-1")
    scorer: RankerConfig = Field(
        RankerConfig(training=PAPER_TRAINING), description="U-rank; LambdaRank and DLA use the same network"
    )
    faithful: RankerConfig = Field(
        RankerConfig(target="counterfactual", form="paper", training=PAPER_TRAINING),
        description="U-rank as printed in the paper, on A1",
    )
    trees: TreesConfig = TreesConfig(threads=1)
    svm: RankSvmConfig = RankSvmConfig()
    baseline: BaselineConfig = Field(BaselineConfig(), description="clipping of inverse propensities")
    cpbm: CpbmConfig = CpbmConfig()
    store: StoreConfig = Field(StoreConfig(), description="the app store of Section 6 (Table 3 and live-test)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.simulation.values is not None:
            raise ValueError("simulation.values must be left out: every click counts 1 in the paper's tables")
        if self.seeds is not None and not self.settings:
            raise ValueError("seeds limits an experiment with settings only; use --seeds")
        return self

    def same_settings(self, other: ExperimentConfig) -> bool:
        """Return whether the results of both are comparable."""
        some = {*PRESENTATION, "dataset"}
        return self.model_dump(exclude=some) == other.model_dump(exclude=some)

    def with_setting(self, name: str) -> ExperimentConfig:
        """Return the experiment with one of the `settings`."""
        changes = self.settings[name].model_dump(exclude_none=True)
        simulation = SimulationConfig.model_validate(self.simulation.model_dump(exclude_unset=True) | changes)
        return self.model_copy(update={"simulation": simulation, "settings": {}})

    def seeded(self, seed: int) -> ExperimentConfig:
        """Add `seed` to every seed."""
        moved = add_seed(self, seed, ("simulation", "clicks", "scorer", "faithful", "svm", "cpbm"))
        return moved.model_copy(update={"store": self.store.seeded(seed)})


C = TypeVar("C", bound=Settings)


def add_seed(config: C, seed: int, names: tuple[str, ...]) -> C:
    """Add `seed` to the seeds of some parts of the settings."""
    parts = {name: getattr(config, name) for name in names}
    moved = {name: part.model_copy(update={"seed": part.seed + seed}) for name, part in parts.items()}
    return config.model_copy(update=moved)


def read_experiment(name: str, overrides: dict[str, Any] | None = None, source: str = "") -> ExperimentConfig:
    """Read an experiment by name and merge `overrides` into its settings."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"an experiment is one of {', '.join(EXPERIMENTS)}; got '{name}'")
    path = files("urank.lab").joinpath("experiments", f"{name}.toml")
    values = deep_merge(read_toml(str(path)), overrides or {})
    return validate(ExperimentConfig, values, source or f"{name}.toml")


T = TypeVar("T", bound="Trial[Any]")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Trial(ABC, Generic[R]):
    """One seed of an experiment. `R` is the type of a trained method.

    The folder has `data/`, the outputs that methods share, and `results/`.
    """

    folder: Path

    @abstractmethod
    def judge(self, trained: R) -> pl.DataFrame:
        """Compute the metrics of a trained method, a row for each test query."""

    def sweep(self) -> None:
        """Remove partial outputs of an interrupted run; training checkpoints stay."""
        for path in (*self.folder.glob(".*.*"), *self.folder.glob("results/.*.*")):
            _remove(path)

    def clean(self) -> None:
        """Remove the training data and the checkpoints."""
        for path in (self.folder / "data", *self.folder.glob(".*")):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class ExperimentStep(Generic[T]):
    """A unit of work of a trial, done if its output exists in the trial's folder.

    `needs` names the steps that come before; `cost` is the approximate duration, relative to other steps.
    """

    run: Callable[[T, Report], None]
    output: str
    needs: tuple[str, ...] = ()
    cost: float = 1.0


@dataclass(frozen=True)
class ComparedMethod(Generic[T, R]):
    """A row of a table: its label, kind and training; `needs` (besides the data) and `cost` as of a step."""

    name: str
    kind: MethodKind
    train: Callable[[T, Report], R]
    needs: tuple[str, ...] = ()
    cost: float = 2.0


def method_steps(methods: Mapping[str, ComparedMethod[T, R]], data: str) -> dict[str, ExperimentStep[T]]:
    """Return a step for each method, after the step `data`: train and judge it, and store its results."""

    def train_and_judge(key: str, trial: T, report: Report) -> None:
        started = time.perf_counter()
        trained = methods[key].train(trial, report)
        seconds = time.perf_counter() - started
        keep_results(trial.folder, key, trial.judge(trained), seconds)

    return {
        key: ExperimentStep(partial(train_and_judge, key), f"results/{key}.parquet", (data, *method.needs), method.cost)
        for key, method in methods.items()
    }


def keep_results(folder: Path, key: str, results: pl.DataFrame, seconds: float) -> None:
    """Write the results of a method of a trial, with its training time and their commit and date."""
    made = provenance("")
    facts = {"seconds": seconds, "commit": made["commit"], "date": made["date"]}
    with new_file(folder / "results" / f"{key}.parquet") as working:
        results.with_columns(**{name: pl.lit(fact) for name, fact in facts.items()}).write_parquet(working)


def keep_click_model(dataset: Dataset, config: ClickConfig, path: Path, report: Report) -> None:
    """Train a click model and save it to `path`; interrupted training resumes from the checkpoint next to it."""
    found = fit_clicks(dataset, config, reference=False, checkpoints=path.parent / f".{path.name}", report=report)
    save_model(RankingModel(found.model), UrankConfig(ranker="none", clicks=config), path, onnx=False)


def baseline_policy(
    ranker: Baseline, dataset: Dataset, featurizer: Featurizer, config: ExperimentConfig | StoreConfig, **options: Any
) -> ScorerPolicy:
    """Train a baseline with the settings of an experiment; `options` as in `fit_baseline`."""
    settings: dict[str, Any] = {"config": config.baseline, "scorer": config.scorer, "svm": config.svm}
    scorer, _ = fit_baseline(ranker, dataset, featurizer, **settings, **({"trees": TreesConfig()} | options))
    return ScorerPolicy(ranker, featurizer, scorer)


def query_offsets(frame: pl.DataFrame) -> NDArray[np.int64]:
    """Return `[Q + 1]` offsets of the queries of a frame, whose rows are grouped by `query_id`."""
    return offsets_of_runs(frame["query_id"].rle_id().to_numpy())


def shuffled_lists(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    """Shuffle the rows of each query, so that their order does not reveal the position."""
    return frame[np.lexsort((rng.random(frame.height), frame["query_id"].rle_id().to_numpy()))]


def as_block(frame: pl.DataFrame) -> Block:
    """Return a frame, whose rows are grouped by `query_id`, as policies take it."""
    offsets = query_offsets(frame)
    queries = pa.table({"query_id": frame["query_id"].gather(offsets[:-1]).to_arrow()})
    return Block(queries, frame.to_arrow(), offsets)


def table_array(frame: pl.DataFrame) -> NDArray[np.float64]:
    """Return the list column `table` as an array `[rows, K]`."""
    return frame["table"].explode().to_numpy().reshape(frame.height, -1).astype(np.float64)
