"""The experiment of Section 6.1 as a configuration: the market, and the settings of every method."""

from __future__ import annotations

from pydantic import Field

from urank.clicks.config import ClickConfig
from urank.config import Settings
from urank.rankers.ranksvm import RankSvmConfig
from urank.rankers.targets import BaselineConfig
from urank.rankers.urank import RankerConfig
from urank.simulate.market import MarketConfig
from urank.simulate.production import PRODUCTION

__all__ = ["StoreConfig"]


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
