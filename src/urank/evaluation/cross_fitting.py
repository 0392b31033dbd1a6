"""Judges: click networks that represent the items of an evaluation, never trained on the queries they judge.

A policy that was optimised on a click table exploits the errors of that table and looks good by it, so an evaluation
has networks of its own, which `urank.evaluation.refit` refits on the evaluated clicks. Two are trained with each model,
on halves of its train split, and saved with it. For a log that no judge was trained for, queries are cut into halves,
and each half is judged by a network trained on the other, with two cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.config import Settings
from urank.learning.features import Featurizer
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.log.folds import folds
from urank.progress import Report, silent


class CrossfitConfig(Settings):
    """Settings of the judges of an evaluation."""

    clicks: ClickConfig = ClickConfig(
        families=("monotone",), hidden=(64, 32), calibration="none", training=TrainingConfig(share=0.5)
    )
    seed: int = Field(0, ge=0, description="seed of all random numbers")


CUTS = 2
"""Cuts of a log without judges; their difference measures what networks add to the error."""


def fit_judges(
    dataset: Dataset,
    splits: Sequence[str],
    config: CrossfitConfig,
    *,
    featurizer: Featurizer | None = None,
    cut: int = 0,
    report: Report = silent,
) -> list[ClickModel]:
    """Train a network for each half of the queries of some splits, on the other half.

    Args:
        dataset, splits: a prepared log, and its splits to train on.
        config: settings.
        featurizer: encoding of the items; by default that of the first half.
        cut: number of the cut into halves.
        report: Progress callback.
    """
    judges: list[ClickModel] = []
    for half, fold in enumerate(folds(dataset, splits, count=2, seed=config.seed + cut)):
        name = f"judge {2 * cut + half + 1}"

        def prefixed(step: str, done: float, total: float | None, note: str = "", /, name: str = name) -> None:
            report(f"{name}: {step}", done, total, note)

        clicks = config.clicks.model_copy(update={"seed": config.seed + config.clicks.seed + 2 * cut + half})
        judges.append(fit_clicks(fold, clicks, featurizer=featurizer, reference=False, report=prefixed).model)
        featurizer = judges[0].featurizer
    return judges
