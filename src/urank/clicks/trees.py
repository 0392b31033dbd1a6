"""Click model of LightGBM trees, with the position as one more feature under a monotone constraint.

The constraint holds for every tree, so the table never rises with the position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightgbm
import numpy as np

from urank.clicks.click_settings import GbdtConfig
from urank.errors import DataError
from urank.learning.features import Featurizer, Inputs
from urank.learning.lightgbm_data import CHUNK_BYTES, Floats, TreeModel, lightgbm_dataset, matrix, sample_for_trees
from urank.log.dataset import Dataset, drop_unseen
from urank.progress import Report, silent


@dataclass(frozen=True)
class GbdtClicks(TreeModel):
    """Fitted trees for K `positions`; models with equal text are equal."""

    positions: int

    @classmethod
    def from_text(cls, text: str, positions: int, featurizer: Featurizer) -> GbdtClicks:
        """Restore a model from its text; a DataError if that is not a LightGBM model of these features."""
        return cls(text, len(featurizer.inputs), len(featurizer.categorical), "position", positions).checked()

    @property
    def family(self) -> str:
        return "gbdt"

    def log_ctr(self, inputs: Inputs) -> Floats:
        """Predict log P(click) `[rows, K]` of each item at each position."""
        K = self.positions
        table = np.empty((len(inputs), K), dtype=np.float32)
        step = max(1, CHUNK_BYTES // (4 * self.width * K))
        for start in range(0, len(inputs), step):
            rows = slice(start, start + step)
            chunk = np.repeat(matrix(inputs[rows], np.zeros(len(table[rows]))), K, axis=0)
            chunk[:, -1] = np.tile(np.arange(1, K + 1), len(table[rows]))
            raw = np.asarray(self.booster.predict(chunk, raw_score=True))
            table[rows] = -np.logaddexp(0, -raw).reshape(-1, K)
        return table


def fit_gbdt(
    dataset: Dataset, featurizer: Featurizer, *, seed: int, config: GbdtConfig, report: Report = silent
) -> GbdtClicks:
    """Grow trees on the train split, with early stopping on the valid split if it has rows.

    Args:
        dataset: the prepared log; it is sampled if it does not fit in its memory budget.
        featurizer: fitted on the train split.
        seed: equal seeds give equal text.
        config, report: settings of the trees, and progress callback.

    Raises:
        DataError: the train split is empty.
    """
    if dataset.rows("train") == 0:
        raise DataError(f"the train split of {dataset.folder} must have impressions; it has none")
    params = _params(config, seed, featurizer.width)
    dataset = sample_for_trees(dataset, config.row_bytes(featurizer.width))
    load = partial(lightgbm_dataset, featurizer=featurizer, params=params, report=report, extra="position", shown=True)
    train = load(dataset, "train")
    callbacks: list[Callable[..., Any]] = [lambda env: report("growing trees", env.iteration + 1, env.end_iteration)]
    valid_sets = []
    if drop_unseen(dataset).rows("valid"):
        valid_sets = [load(dataset, "valid", reference=train)]
        callbacks.append(lightgbm.early_stopping(config.early_stopping, verbose=False))
    booster = lightgbm.train(
        params, train, num_boost_round=config.trees, valid_sets=valid_sets, valid_names=["valid"], callbacks=callbacks
    )
    return GbdtClicks.from_text(booster.model_to_string(), dataset.positions, featurizer)


def _params(config: GbdtConfig, seed: int, n_features: int) -> dict[str, Any]:
    return {
        "objective": "binary",
        "metric": "binary_logloss",
        "monotone_constraints": [0] * n_features + [-1],
        # The other methods constrain less, but violated the constraint where values were missing (LightGBM 4.7:
        # intermediate in 0.7 %, advanced in 11 % of 2,540 random fits, basic in none).
        "monotone_constraints_method": "basic",
        **config.params(seed),
    }
