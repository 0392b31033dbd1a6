"""All that decides a model that ranks, as a configuration; `urank train --config` reads it from TOML."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from urank.clicks.fitting import ClickConfig
from urank.config import Settings
from urank.ranking.baselines import WEIGHED, RankSvmConfig
from urank.ranking.objectives import BaselineConfig
from urank.ranking.urank_network import RankerConfig
from urank.ranking.urank_trees import TreesConfig

__all__ = ["UrankConfig"]


class UrankConfig(Settings):
    """A click model, a scorer that learns from it, and how they rank."""

    ranker: Literal["network", "trees", "lambdarank", "lambdarank-trees", "ranksvm", "dla", "none"] = Field(
        "network",
        description="what gives scores: U-rank as a network or as LightGBM trees, a ranker of another paper "
        "(lambdarank, lambdarank-trees, ranksvm, dla), or none (then the matching ranks)",
    )
    method: Literal["auto", "score", "match", "ctr1"] = Field(
        "auto",
        description="how it ranks: by score, by the exact matching of the click table, or by the expected utility at "
        "position 1; auto takes the better of score and match by a cross-fitted estimate on the validation split, and "
        "score for the rankers of other papers",
    )
    clicks: ClickConfig = ClickConfig()
    scorer: RankerConfig = RankerConfig()
    trees: TreesConfig = TreesConfig()
    baseline: BaselineConfig = BaselineConfig()
    svm: RankSvmConfig = RankSvmConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ranker == "none" and self.method == "score":
            raise ValueError("method score needs a ranker that gives scores; got ranker 'none'")
        if self.ranker == "trees" and self.scorer.form == "paper":
            raise ValueError("ranker trees needs the stable form of the loss; got form 'paper'")
        for key in ("propensity", "learn_from"):
            given = getattr(self.baseline, key)
            if given != BaselineConfig.model_fields[key].default and self.ranker not in WEIGHED:
                raise ValueError(f"{key} is for the rankers {', '.join(WEIGHED)}; got {given!r} with {self.ranker!r}")
        if self.baseline.learn_from == "relevance" and self.baseline.propensity != "none":
            raise ValueError("propensity weighs clicks; with learn_from 'relevance' there are none to weigh")
        return self
