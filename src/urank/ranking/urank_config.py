"""The configuration of a whole ranking model, as read from TOML by `urank train --config`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from urank.clicks.fitting import ClickConfig
from urank.config import Settings
from urank.ranking.baselines import WEIGHTED_BASELINES, RankSvmConfig
from urank.ranking.objectives import BaselineConfig
from urank.ranking.urank_network import RankerConfig
from urank.ranking.urank_trees import TreesConfig


class UrankConfig(Settings):
    """Settings of the click model, the scorer that learns from it, and the ranking method."""

    ranker: Literal["network", "trees", "lambdarank", "lambdarank-trees", "ranksvm", "dla", "none"] = Field(
        "network",
        description="the scorer: U-rank as a network or as LightGBM trees, a ranker of another paper (lambdarank, "
        "lambdarank-trees, ranksvm, dla), or none (then the matching ranks)",
    )
    method: Literal["auto", "score", "match", "ctr1"] = Field(
        "auto",
        description="the ranking method: by score, by the exact matching of the click table, or by expected utility "
        "at position 1; auto chooses the better of score and match by a cross-fitted estimate on the validation split, "
        "and score for the rankers of other papers",
    )
    clicks: ClickConfig = ClickConfig()
    scorer: RankerConfig = RankerConfig()
    trees: TreesConfig = TreesConfig()
    baseline: BaselineConfig = BaselineConfig()
    svm: RankSvmConfig = RankSvmConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ranker == "none" and self.method == "score":
            raise ValueError("method score needs a ranker with scores; got ranker 'none'")
        if self.ranker == "trees" and self.scorer.form == "paper":
            raise ValueError("ranker trees needs the stable form of the loss; got form 'paper'")
        for key in ("propensity", "learn_from"):
            given = getattr(self.baseline, key)
            if given != BaselineConfig.model_fields[key].default and self.ranker not in WEIGHTED_BASELINES:
                raise ValueError(
                    f"{key} is only for the rankers {', '.join(WEIGHTED_BASELINES)}; got {given!r} with {self.ranker!r}"
                )
        if self.baseline.learn_from == "relevance" and self.baseline.propensity != "none":
            raise ValueError("propensity weights clicks, which learn_from 'relevance' does not use")
        return self
