"""U-rank's objective on trees against LightGBM's own `lambdarank`: the same number and size of trees, the same data."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import lightgbm
import numpy as np

from benchmarks.harness import Bar
from benchmarks.peers import lambdarank_settings, rows_of
from benchmarks.simulated import simulated
from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.lab.letor_simulation import SimulationConfig
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.urank_trees import fit_trees

TREES = 50


def trees_time(folder: Path, queries: int) -> Iterator[Bar]:
    """Time to grow 50 trees, reading and binning included, of both."""
    dataset = simulated(folder / "trees", SimulationConfig(queries=queries))
    quick = ClickConfig(families=("pbm",), training=TrainingConfig(epochs=1))
    clicks = fit_clicks(dataset, quick, reference=False).model
    ours, theirs = [], []
    for _ in range(3):  # in turns, so that a slow moment of the machine hits both
        ours.append(_ours(dataset, clicks))
        theirs.append(_theirs(dataset, clicks))
    shutil.rmtree(folder / "trees")
    ratio = float(np.median(ours) / np.median(theirs))
    yield Bar("U-rank trees: time against LightGBM lambdarank, the same trees", ratio, "times", at_most=2.0)


def _ours(dataset: Dataset, clicks: ClickModel) -> float:
    config = TreesConfig(trees=TREES, early_stopping=TREES, feature_share=1.0, row_share=1.0)
    start = time.perf_counter()
    fit_trees(dataset, clicks, RankerConfig(), config)
    return time.perf_counter() - start


def _theirs(dataset: Dataset, clicks: ClickModel) -> float:
    start = time.perf_counter()
    train, valid = (rows_of(dataset, split, clicks.featurizer) for split in ("train", "valid"))
    settings = lambdarank_settings(0, 0)
    data = lightgbm.Dataset(train.features, train.click, group=np.diff(train.offsets), params={"verbose": -1})
    held_out = lightgbm.Dataset(valid.features, valid.click, group=np.diff(valid.offsets), reference=data)
    lightgbm.train(settings, data, num_boost_round=TREES, valid_sets=[held_out])
    return time.perf_counter() - start
