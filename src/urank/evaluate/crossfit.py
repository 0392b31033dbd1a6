"""The click models of an evaluation: fitted by query on the evaluation log itself, never on the queries they judge.

A policy that was optimised on a click table looks good by that table: it seeks out the table's errors. So an evaluation
has click models of its own. The queries are cut into folds, and each fold is judged by a model that was trained,
stopped and calibrated on the others; that is done several times with other cuts, and the tables are averaged, which
takes out much of the chance in a single cut. How far models of one cut disagree tells how far they can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from urank.clicks.config import ClickConfig
from urank.clicks.fit import fit_clicks
from urank.clicks.model import ClickModel
from urank.config import Settings
from urank.log.dataset import Block, Dataset
from urank.log.folds import fold_of, folds
from urank.progress import Report, silent

__all__ = ["CrossfitConfig", "Judges", "fit_judges"]


class CrossfitConfig(Settings):
    """How an evaluation makes its own click models."""

    cuts: int = Field(2, ge=1, le=100, description="times that the queries are cut in two halves, each time anew")
    clicks: ClickConfig = ClickConfig(families=("monotone", "pbm"))
    seed: int = Field(0, ge=0, description="of the cuts and of all random numbers")


@dataclass(frozen=True, eq=False)
class Judges:
    """Fitted click models: for each cut, one for each half, trained on the other half."""

    models: list[list[ClickModel]]
    seed: int

    def tables(self, block: Block) -> NDArray[np.float64]:
        """P(click | item, k) of the items of a block `[cuts, 2, rows, K]`, by every model."""
        return np.array(
            [[np.exp(model.log_ctr(block.items)) for model in cut] for cut in self.models], dtype=np.float64
        )

    def own(self, block: Block, tables: NDArray[np.float64]) -> NDArray[np.float64]:
        """The table `[rows, K]` that judges each query: the mean over the cuts of the model that did not see it."""
        lengths = np.diff(block.offsets)
        rows = np.arange(tables.shape[2])
        chosen = []
        for number, cut in enumerate(tables):
            half = np.repeat(fold_of(block, 2, self.seed + number), lengths)
            chosen.append(cut[half, rows])
        return np.asarray(np.mean(chosen, axis=0))


def fit_judges(dataset: Dataset, splits: Sequence[str], config: CrossfitConfig, *, report: Report = silent) -> Judges:
    """Fit the click models of an evaluation.

    Args:
        dataset: the prepared log.
        splits: those to judge by.
        config: settings.
        report: told how far it is.
    """
    models: list[list[ClickModel]] = []
    for number in range(config.cuts):
        models.append([])
        for half, fold in enumerate(folds(dataset, splits, count=2, seed=config.seed + number)):
            name = f"judge {2 * number + half + 1} of {2 * config.cuts}"

            def told(step: str, done: float, total: float | None, note: str = "", /, name: str = name) -> None:
                report(f"{name}: {step}", done, total, note)

            seed = config.seed + config.clicks.seed + 2 * number + half
            clicks = config.clicks.model_copy(update={"seed": seed})
            models[-1].append(fit_clicks(fold, clicks, reference=False, report=told).model)
    return Judges(models, config.seed)
