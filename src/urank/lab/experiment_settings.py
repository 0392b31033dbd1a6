"""Settings of the paper's experiments.

Each TOML file in `experiments/` names the methods that one table or figure needs. Everything else has the defaults
below, so that all experiments in one folder share data and trained models.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from urank.clicks.fitting import ClickConfig
from urank.config import Settings, deep_merge, read_toml, validate
from urank.errors import ConfigError
from urank.lab.appstore import PRODUCTION
from urank.lab.letor_simulation import SimulationConfig
from urank.lab.market import MarketConfig
from urank.propensity.cpbm import CpbmConfig
from urank.ranking.baselines import RankSvmConfig
from urank.ranking.objectives import BaselineConfig
from urank.ranking.urank_network import RankerConfig
from urank.ranking.urank_trees import TreesConfig

EXPERIMENTS = ("table1", "table2", "table3", "fig-ctr-by-position", "fig-result-list", "differences")


class StoreConfig(Settings):
    """Settings of the app store experiment (Table 3)."""

    market: MarketConfig = Field(MarketConfig(), description="users, apps and days, as in `urank appstore`")
    test_visits: int = Field(
        40_000, ge=1, description="visits on the test day: more than on other days, to reduce the variance"
    )
    production: ClickConfig = Field(
        PRODUCTION, description="DeepFM: the ranker that produced the log and, trained on that log, a row of the table"
    )
    clicks: ClickConfig = Field(
        ClickConfig(backbone="deepfm"), description="the click model of U-rank and the matching"
    )
    scorer: RankerConfig = Field(
        RankerConfig(backbone="deepfm"), description="U-rank; LambdaRank and DLA use the same network"
    )
    svm: RankSvmConfig = RankSvmConfig()
    baseline: BaselineConfig = Field(BaselineConfig(), description="clipping of inverse propensities")

    def seeded(self, seed: int) -> StoreConfig:
        """Add `seed` to every seed."""
        return _add_seed(self, seed, ("market", "production", "clicks", "scorer", "svm"))


class ExperimentConfig(Settings):
    """Settings of an experiment."""

    title: str = Field("", description="the paper's name of the table or figure")
    methods: tuple[str, ...] = Field((), description="the methods to compare")
    dataset: str = Field("", description="the paper's name of the data, if used: yahoo, mslr-web10k or istella-s")
    simulation: SimulationConfig = Field(
        SimulationConfig(truth="all"), description="documents, loggers and users, as in `urank simulate`"
    )
    swap_sessions: int = Field(
        2, ge=1, description="sessions per query in the online experiment with random swaps (Randomization)"
    )
    clicks: ClickConfig = Field(ClickConfig(), description="the click model of U-rank, the matching and CTR-1")
    scorer: RankerConfig = Field(RankerConfig(), description="U-rank; LambdaRank and DLA use the same network")
    faithful: RankerConfig = Field(
        RankerConfig(target="counterfactual", form="paper"), description="U-rank as printed in the paper, on A1"
    )
    trees: TreesConfig = TreesConfig(threads=1)
    svm: RankSvmConfig = RankSvmConfig()
    baseline: BaselineConfig = Field(BaselineConfig(), description="clipping of inverse propensities")
    cpbm: CpbmConfig = CpbmConfig()
    store: StoreConfig = Field(StoreConfig(), description="the app store of Section 6.1 (Table 3 only)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.simulation.values is not None:
            raise ValueError("simulation.values must be left out: every click counts 1 in the paper's tables")
        return self

    def same_settings(self, other: ExperimentConfig) -> bool:
        """Return whether the results of both are comparable."""
        presentation = {"title", "methods", "dataset"}
        return self.model_dump(exclude=presentation) == other.model_dump(exclude=presentation)

    def seeded(self, seed: int) -> ExperimentConfig:
        """Add `seed` to every seed."""
        moved = _add_seed(self, seed, ("simulation", "clicks", "scorer", "faithful", "svm", "cpbm"))
        return moved.model_copy(update={"store": self.store.seeded(seed)})


C = TypeVar("C", bound=Settings)


def _add_seed(config: C, seed: int, names: tuple[str, ...]) -> C:
    parts = {name: getattr(config, name) for name in names}
    return config.model_copy(
        update={name: part.model_copy(update={"seed": part.seed + seed}) for name, part in parts.items()}
    )


def read_experiment(name: str, overrides: dict[str, Any] | None = None, source: str = "") -> ExperimentConfig:
    """Read an experiment by name and merge `overrides` into its settings."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"an experiment is one of {', '.join(EXPERIMENTS)}; got '{name}'")
    path = files("urank.lab").joinpath("experiments", f"{name}.toml")
    values = deep_merge(read_toml(str(path)), overrides or {})
    return validate(ExperimentConfig, values, source or f"{name}.toml")
