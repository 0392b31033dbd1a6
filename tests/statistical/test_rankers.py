"""Under the position-based model, rankers that correct for position beat those that do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from simulated import Small, make
from urank.evaluation.intervals import paired
from urank.lab.truth import true_table
from urank.log.ragged import pad, where_items
from urank.propensity.examination import Known
from urank.ranking.baselines import (
    fit_dla,
    fit_lambdarank_trees,
    fit_pairwise,
    fit_regression_em,
    fit_unbiased_lambdamart,
)
from urank.ranking.objectives import ClickGain
from urank.ranking.policies import ScorerPolicy
from urank.ranking.ranking_model import Scorer
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.utility import utility


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Steep position bias and weak loggers: clicks as they are tell more of the loggers than of the documents."""
    folder: Path = tmp_path_factory.mktemp("pbm")
    return make(folder, queries=1500, sessions=6, features=10, user="pbm", gamma=1.5, seed=11)


def values(world: Small, scorer: Scorer) -> NDArray[np.float64]:
    """The true clicks of each test list in the order of a scorer."""
    (block,) = world.dataset.blocks("test", world.dataset.features)
    positions = ScorerPolicy("x", world.featurizer, scorer).positions(block)
    table = world.table(world.featurizer.encode(block.items)).astype(np.float64)
    return utility(
        pad(table, block.offsets), pad(positions, block.offsets, fill=1), where=where_items(block.offsets)
    ).reshape(-1)


def test_dla_and_true_propensities_beat_clicks_as_they_are(world: Small) -> None:
    """By the paired t-test on the true clicks of held-out lists."""
    config = RankerConfig(hidden=(32,))
    known = Known(true_table(world.simulation.candidates))
    biased, _ = fit_pairwise("lambdarank", world.dataset, world.featurizer, ClickGain(), config)
    weighed, _ = fit_pairwise("lambdarank", world.dataset, world.featurizer, ClickGain(known), config)
    dual, curve, _ = fit_dla(world.dataset, world.featurizer, config)
    for better in (dual, weighed):
        difference = paired(values(world, better), values(world, biased))
        assert difference.mean > 0
        assert difference.p_value < 0.01
    # The curve falls as 1/k^1.5: it was off by 6 % on average at positions 2 to 5, and by a factor of 3.7 before its
    # numbers had a pace of their own.
    log_error = np.log(curve.values) + 1.5 * np.log(np.arange(1, 11))
    assert np.abs(log_error[1:5]).mean() < 0.15


def test_trees_that_learn_examination_beat_clicks_as_they_are(world: Small) -> None:
    """Likewise; t⁺ of Unbiased LambdaMART is the square root of examination, by its exponent 1 / (1 + p) = ½."""
    config, trees = RankerConfig(), TreesConfig(threads=1)
    biased, _ = fit_lambdarank_trees(world.dataset, world.featurizer, ClickGain(), config, trees)
    unbiased, bias, _ = fit_unbiased_lambdamart(world.dataset, world.featurizer, config, trees)
    relevant, _ = fit_regression_em(world.dataset, world.featurizer, config, trees)
    for better in (unbiased, relevant):
        difference = paired(values(world, better), values(world, biased))
        assert difference.mean > 0
        assert difference.p_value < 0.01
    np.testing.assert_allclose(bias.plus[:5], np.arange(1, 6) ** -0.75, rtol=0.15)
