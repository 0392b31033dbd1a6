"""Workers that judge together say what one process says."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulated import Small
from urank.clicks.click_settings import ClickConfig
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.learning.training_settings import TrainingConfig
from urank.pipeline import evaluate
from urank.ray.cluster import Cluster
from urank.ray.jobs import evaluate_on_ray

CONFIG = CrossfitConfig(clicks=ClickConfig(families=("monotone",), hidden=(16,), training=TrainingConfig(epochs=3)))


def test_the_estimates_are_those_of_one_process(small: Small, saved: Path, cluster: Cluster) -> None:
    here = evaluate([saved], small.dataset, config=CONFIG)
    there = evaluate_on_ray([str(saved)], small.dataset.folder, cluster, config=CONFIG)
    assert (there.queries, there.lists, there.rows) == (here.queries, here.lists, here.rows)
    assert [policy.name for policy in there.policies] == [policy.name for policy in here.policies]
    for one, other in zip(there.policies, here.policies, strict=True):
        *_, a = one.utility.values()
        *_, b = other.utility.values()
        # The click models differ a little, having met the lists in other batches; what was logged does not.
        assert a.mean == pytest.approx(b.mean, abs=0.5 * b.error if one.name != "logged" else 1e-9)
    assert [cell.rows for cell in there.specification.cells] == [cell.rows for cell in here.specification.cells]
