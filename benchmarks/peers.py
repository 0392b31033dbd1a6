"""The rankers that people would otherwise use, on clicks: LightGBM's `lambdarank`, XGBoost's `lambdarank_unbiased`,
CatBoost's `YetiRank`, and a plain DeepFM.

Each is trained on the clicks of the train split and stopped on those of the valid split, the trees by nDCG@10; trees
have the size of ours, and there are as many at most. The settings of all stand here. LightGBM and XGBoost can be run in
this process (`lightgbm_ranker`, `xgboost_ranker`); `peer_runs` runs all of them in a venv of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray

from urank.learning.batches import Stream
from urank.learning.features import Featurizer, Inputs
from urank.learning.lightgbm_data import matrix
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids

TREES, PATIENCE, RATE, LEAVES, LEAST = 300, 20, 0.1, 31, 50

Score = Callable[[Inputs], NDArray[np.float64]]


@dataclass(frozen=True)
class Peer:
    """A peer as `peer_runs` knows it: the script that trains it, and what that is told."""

    name: str
    script: str
    settings: dict[str, Any]


def all_peers(threads: int, seed: int) -> list[Peer]:
    """Every peer, ready to run."""
    rounds = {"trees": TREES, "patience": PATIENCE}
    by_lightgbm = {"params": lambdarank_settings(threads, seed), **rounds}
    by_xgboost = {"params": xgboost_settings(threads, seed), **rounds}
    return [
        Peer("LightGBM lambdarank", "train_lightgbm.py", by_lightgbm | {"position": False}),
        Peer("LightGBM lambdarank, position", "train_lightgbm.py", by_lightgbm | {"position": True}),
        Peer("XGBoost lambdarank_unbiased", "train_xgboost.py", by_xgboost),
        Peer("CatBoost YetiRank", "train_catboost.py", {"params": catboost_settings(threads, seed)}),
        Peer("DeepFM in PyTorch", "train_deepfm.py", deepfm_settings(threads, seed)),
    ]


def lightgbm_settings(threads: int, seed: int) -> dict[str, Any]:
    return {
        "learning_rate": RATE,
        "num_leaves": LEAVES,
        "min_data_in_leaf": LEAST,
        "num_threads": threads,
        "seed": seed,
        "verbose": -1,
    }


def lambdarank_settings(threads: int, seed: int) -> dict[str, Any]:
    return lightgbm_settings(threads, seed) | {"objective": "lambdarank", "metric": "ndcg", "eval_at": [10]}


def xgboost_settings(threads: int, seed: int) -> dict[str, Any]:
    return {
        "objective": "rank:ndcg",
        "eval_metric": "ndcg@10",
        "lambdarank_unbiased": True,
        "lambdarank_pair_method": "topk",
        "lambdarank_num_pair_per_sample": 10,
        "eta": RATE,
        "max_leaves": LEAVES,
        "max_depth": 0,
        "grow_policy": "lossguide",
        "tree_method": "hist",
        "min_child_weight": 0.1,
        "nthread": threads,
        "seed": seed,
    }


def catboost_settings(threads: int, seed: int) -> dict[str, Any]:
    """Its trees are symmetric: of depth 5 they have 32 leaves."""
    return {
        "loss_function": "YetiRank",
        "eval_metric": "NDCG:top=10;type=Base",
        "iterations": TREES,
        "learning_rate": RATE,
        "depth": LEAVES.bit_length(),
        "od_type": "Iter",
        "od_wait": PATIENCE,
        "use_best_model": True,
        "thread_count": threads,
        "random_seed": seed,
        "allow_writing_files": False,
        "verbose": False,
    }


def deepfm_settings(threads: int, seed: int) -> dict[str, Any]:
    """Hidden layers as in our networks; the rest as DeepFMs usually are."""
    return {
        "embedding": 8,
        "hidden": [128, 64],
        "learning_rate": 1e-3,
        "batch": 2048,
        "epochs": 20,
        "patience": 2,
        "threads": threads,
        "seed": seed,
    }


@dataclass(frozen=True, eq=False)
class Rows:
    """A split in memory, the items of a list by rising position, as XGBoost takes the position from the order."""

    features: NDArray[np.float32]
    click: NDArray[np.float32]
    position: NDArray[np.int64]
    offsets: NDArray[np.int64]


def rows_of(dataset: Dataset, split: str, featurizer: Featurizer) -> Rows:
    stream = Stream(dataset, split, featurizer, cache_bytes=0)
    parts = []
    for number in range(len(stream.groups)):
        lists = stream.lists(number)
        order = np.lexsort((lists.position, list_ids(lists.offsets)))
        features = matrix(lists.inputs, None)[order]
        parts.append((features, lists.click[order], lists.position[order], np.diff(lists.offsets)))
    features, click, position, lengths = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Rows(features, click, position, np.append(0, np.cumsum(lengths)))


def lightgbm_ranker(train: Rows, valid: Rows, *, position: bool, threads: int, seed: int = 0) -> Score:
    """LightGBM's `lambdarank`, with or without its own correction of position bias."""
    data = lightgbm.Dataset(
        train.features,
        train.click,
        group=np.diff(train.offsets),
        position=train.position - 1 if position else None,
        params={"verbose": -1},
    )
    held_out = lightgbm.Dataset(valid.features, valid.click, group=np.diff(valid.offsets), reference=data)
    booster = lightgbm.train(
        lambdarank_settings(threads, seed),
        data,
        num_boost_round=TREES,
        valid_sets=[held_out],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )
    return lambda inputs: np.asarray(booster.predict(matrix(inputs, None)))


def xgboost_ranker(train: Rows, valid: Rows, *, threads: int, seed: int = 0) -> Score:
    """XGBoost's `rank:ndcg` with `lambdarank_unbiased`."""
    import xgboost  # only benchmarks need it

    def data(rows: Rows) -> xgboost.DMatrix:
        return xgboost.DMatrix(rows.features, rows.click, qid=list_ids(rows.offsets), nthread=threads)

    booster = xgboost.train(
        xgboost_settings(threads, seed),
        data(train),
        num_boost_round=TREES,
        evals=[(data(valid), "valid")],
        early_stopping_rounds=PATIENCE,
        verbose_eval=False,
    )
    last = (0, booster.best_iteration + 1)
    return lambda inputs: booster.predict(xgboost.DMatrix(matrix(inputs, None), nthread=threads), iteration_range=last)
