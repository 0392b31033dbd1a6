"""Settings of rankers and of a whole model. They do not import torch or LightGBM, which are slow to load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self, get_args

from pydantic import Field, model_validator

from urank.clicks.click_settings import ClickConfig
from urank.config import Settings
from urank.learning.training_settings import Backbone, GrowthConfig, TrainingConfig
from urank.propensity.examination import CLIP
from urank.ranking.utility import FLOOR

if TYPE_CHECKING:
    from urank.ranking.objectives import UtilityTarget

Goal = Literal["clicks", "conversions"]
Form = Literal["stable", "paper"]
Baseline = Literal[
    "lambdarank", "lambdarank-trees", "ranknet", "lambdaloss", "ranksvm", "dla", "unbiased-lambdamart", "regression-em"
]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
WEIGHTED_BASELINES: tuple[Baseline, ...] = ("lambdarank", "lambdarank-trees", "ranknet", "lambdaloss", "ranksvm")
"""Those that take an estimate of examination, or labels; the others learn examination themselves, from clicks."""
TREE_BASELINES: tuple[Baseline, ...] = ("lambdarank-trees", "unbiased-lambdamart", "regression-em")


class RankerConfig(Settings):
    """Settings of U-rank's scorer."""

    target: Literal["model", "counterfactual", "blend"] = Field(
        "model",
        description="the utility u(i, k) to maximise: the click model's expectation (model), Eq. 3 on the logged "
        "clicks (counterfactual, as in the paper), or both (blend)",
    )
    blend: float = Field(0.5, ge=0, le=1, description="share of the counterfactual target in the blend")
    floor: float = Field(FLOOR, gt=0, le=1, description="lower bound of a logged click probability in Eq. 3")
    form: Form = Field("stable", description="the loss: stable, or paper (Eq. 7 as printed, with clipped scores)")
    sigma: float = Field(1.0, gt=0, description="σ of the pairwise logistic loss")
    clip: float = Field(5.0, gt=0, description="C: scores are clipped to [−C, C] in the paper's form of the loss")
    backbone: Backbone = Field("mlp", description="network architecture: mlp, deepfm, pnn or pin")
    hidden: tuple[int, ...] = Field((128, 64), description="sizes of the hidden layers; none for a linear score")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of hidden units dropped at each step")
    warm_start: bool = Field(False, description="initialise with the hidden layers of the click model")
    training: TrainingConfig = Field(
        TrainingConfig(), description="as for click models, but by default with a third of the passes"
    )
    seed: int = Field(0, ge=0, description="seed of all random numbers")

    @property
    def objective(self) -> UtilityTarget:
        """The target, with λ the share of Eq. 3."""
        from urank.ranking.objectives import UtilityTarget

        return UtilityTarget({"model": 0.0, "counterfactual": 1.0, "blend": self.blend}[self.target], self.floor)


class TreesConfig(GrowthConfig):
    """Settings of the trees."""

    l2: float = Field(
        1.0, ge=0, description="L2 regularisation of leaf values; 1 weighs as much as an average impression"
    )
    early_stopping: int = Field(
        20, ge=1, description="trees without a better estimated utility of the valid split before training stops"
    )


class BaselineConfig(Settings):
    """What the rankers of other papers learn from."""

    learn_from: Literal["clicks", "relevance"] = Field(
        "clicks", description="clicks, or the labels in the column relevance"
    )
    examination: str = Field(
        "none",
        description="how clicks are weighted by 1 / examination: none, randomised, harvest, cpbm, em, or a file "
        "written by `urank examination`",
    )
    clip: float = Field(CLIP, ge=1, description="upper bound of the weight of a click")


class RankSvmConfig(Settings):
    """Settings of a RankSVM."""

    c: float = Field(1.0, gt=0, description="C: weight of a unit of hinge loss relative to ½ |w|²")
    training: TrainingConfig = TrainingConfig(epochs=15, learning_rate=1e-2, weight_decay=0.0)
    seed: int = Field(0, ge=0, description="seed of all random numbers")


class UrankConfig(Settings):
    """Settings of the click model, the scorer that learns from it, and the ranking method."""

    goal: Goal = Field(
        "clicks",
        description="what an order is to earn: clicks or conversions, each times its value",
    )
    ranker: Literal["network", "trees", Baseline, "none"] = Field(
        "network",
        description="what scores items: U-rank, a ranker of another paper, or none (`urank help rankers`)",
    )
    method: Literal["auto", "score", "match", "ctr1"] = Field(
        "auto",
        description="how lists are ranked: by score, match or ctr1 (`urank help methods`)",
    )
    judges: bool = Field(
        True, description="also train two small networks on halves of the train split, which evaluations refit"
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
        for key in ("examination", "learn_from"):
            given = getattr(self.baseline, key)
            if given != BaselineConfig.model_fields[key].default and self.ranker not in WEIGHTED_BASELINES:
                rankers = ", ".join(WEIGHTED_BASELINES)
                raise ValueError(f"{key} is only for the rankers {rankers}; got {given!r} with {self.ranker!r}")
        if self.baseline.learn_from == "relevance" and self.baseline.examination != "none":
            raise ValueError("examination weights clicks, which learn_from 'relevance' does not use")
        return self
