"""An experiment as a configuration: the documents, the users, and every setting of every method.

The TOML files in `experiments/`, one for each table or figure, say which methods it needs; what they leave out has the
defaults below, so that all experiments in one folder can share what was trained.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Self

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

__all__ = ["EXPERIMENTS", "ExperimentConfig", "StoreConfig", "read_experiment"]


class StoreConfig(Settings):
    """All that decides Table 3 but for the seed, which is added to every seed below."""

    market: MarketConfig = Field(MarketConfig(), description="users, apps and days, as `urank appstore` takes them")
    test_visits: int = Field(
        40_000,
        ge=1,
        description="visits of the last day, which judge: more than on others, so that less is left to chance",
    )
    production: ClickConfig = Field(
        PRODUCTION, description="DeepFM: the ranker that made the log, and the same trained on it, a row of the table"
    )
    clicks: ClickConfig = Field(
        ClickConfig(backbone="deepfm"), description="the click model of U-rank and the matching"
    )
    scorer: RankerConfig = Field(
        RankerConfig(backbone="deepfm"), description="U-rank; LambdaRank and DLA have the same network"
    )
    svm: RankSvmConfig = RankSvmConfig()
    baseline: BaselineConfig = Field(BaselineConfig(), description="clipping of inverse propensities")

    def seeded(self, seed: int) -> StoreConfig:
        """The same with other random numbers everywhere."""
        names = ("market", "production", "clicks", "scorer", "svm")
        each = {name: getattr(self, name) for name in names}
        return self.model_copy(
            update={name: part.model_copy(update={"seed": part.seed + seed}) for name, part in each.items()}
        )


EXPERIMENTS = ("table1", "table2", "table3", "fig-ctr-by-position", "fig-result-list", "differences")


class ExperimentConfig(Settings):
    """All that decides an experiment but for the seed, which is added to every seed below."""

    title: str = Field("", description="what the paper calls it")
    methods: tuple[str, ...] = Field((), description="the methods it needs")
    dataset: str = Field("", description="the paper's name of the data, if it is the paper's: yahoo, mslr-web10k …")
    simulation: SimulationConfig = Field(
        SimulationConfig(truth="all"), description="documents, loggers and users, as `urank simulate` takes them"
    )
    swap_sessions: int = Field(
        2, ge=1, description="sessions of each query in the online experiment with random swaps (Randomization)"
    )
    clicks: ClickConfig = Field(ClickConfig(), description="the click model of U-rank, the matching and CTR-1")
    scorer: RankerConfig = Field(RankerConfig(), description="U-rank; LambdaRank and DLA have the same network")
    faithful: RankerConfig = Field(
        RankerConfig(target="counterfactual", form="paper"), description="U-rank as the paper prints it, on A1"
    )
    trees: TreesConfig = TreesConfig(threads=1)
    svm: RankSvmConfig = RankSvmConfig()
    baseline: BaselineConfig = Field(BaselineConfig(), description="clipping of inverse propensities")
    cpbm: CpbmConfig = CpbmConfig()
    store: StoreConfig = Field(StoreConfig(), description="the app store of Section 6.1, for Table 3 alone")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.simulation.values is not None:
            raise ValueError("simulation.values must be left out: every click counts 1 in the paper's tables")
        return self

    def same_settings(self, other: ExperimentConfig) -> bool:
        """Whether results of the two can stand side by side."""
        asks = {"title", "methods", "dataset"}  # which decide nothing but what is shown
        return self.model_dump(exclude=asks) == other.model_dump(exclude=asks)

    def seeded(self, seed: int) -> ExperimentConfig:
        """The same with other random numbers everywhere."""
        moved = {
            name: getattr(self, name).model_copy(update={"seed": getattr(self, name).seed + seed})
            for name in ("simulation", "clicks", "scorer", "faithful", "svm", "cpbm")
        }
        return self.model_copy(update=moved | {"store": self.store.seeded(seed)})


def read_experiment(name: str, overrides: dict[str, Any] | None = None, source: str = "") -> ExperimentConfig:
    """The experiment of this name, with settings laid over it, table by table; what they leave out stays."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"an experiment is one of {', '.join(EXPERIMENTS)}; got '{name}'")
    path = files("urank.lab").joinpath("experiments", f"{name}.toml")
    values = deep_merge(read_toml(str(path)), overrides or {})
    return validate(ExperimentConfig, values, source or f"{name}.toml")
