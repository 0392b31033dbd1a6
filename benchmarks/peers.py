"""The rankers that people would otherwise use, on clicks: LightGBM's `lambdarank`, XGBoost's `lambdarank_unbiased`,
CatBoost's `YetiRank`, and a plain DeepFM.

Two kinds of settings:

- regularised, without early stopping, trained on train + valid: "LightGBM 150" (8 leaves, rate 0.04, 150 trees), its
  counterpart "XGBoost 150", and "LightGBM, tuned", whose size is chosen from a small grid by nDCG@10 on valid before it
  is refitted on both splits;
- trees of the size of ours, stopped by nDCG@10 of the valid split, at the earliest after `LEAST_TREES`: on few queries
  early stopping is noisy, so these only serve where there are many (`frontier`, `utility`).

LightGBM runs in this process (`lightgbm_150`, `lightgbm_tuned`, `lightgbm_ranker`); `peer_runs` runs every peer in a
venv of its own. LightGBM gets the items of a list in random order: while scores are tied, its gradients and nDCG take
the order of the rows, which would be that of the logger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightgbm
import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.evaluation.ranking_metrics import ndcg_metric
from urank.learning.features import Featurizer
from urank.learning.lightgbm_data import matrix
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids, pad, positions_by_score, where_items
from urank.log.signed_log import signed_log

TREES, PATIENCE, RATE, LEAVES, LEAST = 300, 20, 0.1, 31, 50
LEAST_TREES = 10

REGULARISED_TREES = 150
REGULARISED: dict[str, Any] = {
    "num_leaves": 8,
    "learning_rate": 0.04,
    "min_data_in_leaf": 100,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 5.0,
}
GRID = sorted(
    ((leaves, trees, rate) for leaves in (8, 31) for trees in (100, 150, 400) for rate in (0.04, 0.1)),
    key=lambda size: (size[0] * size[1], size[2]),
)
"""Leaves, trees and learning rate of "LightGBM, tuned", from the smallest model to the largest."""

WITHIN_SHARE = 0.01
"""Features with at least this share of their variance inside lists get within-list features."""

Features = NDArray[np.float32]
Score = Callable[[Features, NDArray[np.int64]], NDArray[np.float64]]
"""Scores `[rows]` from features `[rows, F]` and the offsets of the lists."""


@dataclass(frozen=True)
class Peer:
    """A peer as `peer_runs` knows it: the script that trains it and its settings; without `patience` there is no early
    stopping, and it learns from train + valid."""

    name: str
    script: str
    settings: dict[str, Any]


def all_peers(threads: int, seed: int) -> list[Peer]:
    """Every peer, ready to run."""
    rounds = {"trees": TREES, "patience": PATIENCE, "least_trees": LEAST_TREES}
    by_150 = {"params": lambdarank_settings(threads, seed) | REGULARISED, "trees": REGULARISED_TREES, "patience": None}
    by_lightgbm = {"params": lambdarank_settings(threads, seed), **rounds}
    by_xgboost = {"params": xgboost_settings(threads, seed), **rounds}
    return [
        Peer("LightGBM 150", "train_lightgbm.py", by_150 | {"position": False}),
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


def xgboost_150(threads: int, seed: int) -> Peer:
    """XGBoost, regularised like LightGBM 150 and without early stopping; each list must be sorted by position."""
    params = xgboost_settings(threads, seed) | {
        "eta": REGULARISED["learning_rate"],
        "max_leaves": REGULARISED["num_leaves"],
        "colsample_bytree": REGULARISED["feature_fraction"],
        "subsample": REGULARISED["bagging_fraction"],
        "lambda": REGULARISED["lambda_l2"],
        "min_child_weight": 1.0,
    }
    return Peer("XGBoost 150", "train_xgboost.py", {"params": params, "trees": REGULARISED_TREES, "patience": None})


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
        "best_model_min_trees": LEAST_TREES,
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
    """Lists in memory, the items of each by rising position, from which XGBoost takes the position."""

    features: Features  # [rows, F]: numbers, then codes of categories
    click: NDArray[np.float32]
    position: NDArray[np.int64]
    offsets: NDArray[np.int64]
    numeric: int  # the number of numeric features

    def joined(self, other: Rows) -> Rows:
        """Append the lists of other rows."""
        return Rows(
            np.concatenate([self.features, other.features]),
            np.concatenate([self.click, other.click]),
            np.concatenate([self.position, other.position]),
            np.append(self.offsets, self.offsets[-1] + other.offsets[1:]),
            self.numeric,
        )

    def shuffled(self, seed: int) -> Rows:
        """Shuffle the items of each list."""
        rng = np.random.default_rng(seed)
        order = np.lexsort((rng.random(len(self.click)), list_ids(self.offsets)))
        return replace(self, features=self.features[order], click=self.click[order], position=self.position[order])


def rows_of(dataset: Dataset, split: str, featurizer: Featurizer) -> Rows:
    """Read a split of a prepared log."""
    parts = []
    for block in dataset.blocks(split, [*featurizer.names, "position", "click"]):
        position = block.column("position").astype(np.int64)
        order = np.lexsort((position, list_ids(block.offsets)))
        features = matrix(featurizer.encode(block.items))[order]
        click = block.column("click").astype(np.float32)[order]
        parts.append((features, click, position[order], np.diff(block.offsets)))
    features, click, position, lengths = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Rows(features, click, position, np.append(0, np.cumsum(lengths)), len(featurizer.numeric))


def within_columns(rows: Rows) -> NDArray[np.int64]:
    """Return the numeric features that vary inside lists: above `WITHIN_SHARE` of the variance of their signed log."""
    frame = _signed_log_frame(rows.features[:, : rows.numeric], rows.offsets)
    x = pl.exclude("list")
    inside = frame.select((x - x.mean().over("list")).var(ddof=0)).row(0)
    total = frame.select(x.var(ddof=0)).row(0)
    share = [within > WITHIN_SHARE * whole if whole else False for within, whole in zip(inside, total, strict=True)]
    return np.flatnonzero(share)


def within_list(features: Features, offsets: NDArray[np.int64]) -> Features:
    """Compute each feature's z-score and rank inside its list, `[rows, 2F]`, on the signed log; NaN where missing.

    The rank is (r - ½) / n with r from 1 for the lowest of n known values, ties at their mean. A feature that is
    constant in a list has z-score 0 and rank ½.

    >>> within_list(np.array([[0.0], [9.0], [5.0]], np.float32), np.array([0, 2, 3])).tolist()
    [[-1.0, 0.25], [1.0, 0.75], [0.0, 0.5]]
    """
    x = pl.exclude("list")
    mean, deviation = x.mean().over("list"), x.std(ddof=0).over("list")
    score = pl.when(deviation > 1e-6).then((x - mean) / deviation).when(x.is_not_null()).then(0.0)
    rank = (x.rank("average").over("list") - 0.5) / x.count().over("list")
    frame = _signed_log_frame(features, offsets)
    return np.concatenate([frame.select(each).to_numpy() for each in (score, rank)], axis=1, dtype=np.float32)


def _signed_log_frame(features: Features, offsets: NDArray[np.int64]) -> pl.DataFrame:
    columns = {f"{number}": column for number, column in enumerate(signed_log(features).T)}
    return pl.DataFrame(columns).fill_nan(None).with_columns(list=pl.Series(list_ids(offsets)))


def with_within(rows: Rows) -> tuple[Rows, Callable[[Features, NDArray[np.int64]], Features]]:
    """Append within-list features; also return the function that appends them to other lists."""
    columns = within_columns(rows)

    def extend(features: Features, offsets: NDArray[np.int64]) -> Features:
        return np.concatenate([features, within_list(features[:, columns], offsets)], axis=1)

    return replace(rows, features=extend(rows.features, rows.offsets)), extend


def lightgbm_150(
    rows: Rows, *, within: bool = False, position: bool = False, threads: int = 1, seed: int = 0, **changes: Any
) -> Score:
    """LightGBM's `lambdarank`, regularised and without early stopping.

    Args:
        rows: Train + valid.
        within: Add within-list features.
        position: Use LightGBM's own correction of position bias.
        threads, seed: Of LightGBM.
        changes: Of its parameters; `trees` is their number.
    """
    extend = None
    if within:
        rows, extend = with_within(rows)
    trees = changes.pop("trees", REGULARISED_TREES)
    settings = lambdarank_settings(threads, seed) | REGULARISED | changes
    booster = lightgbm.train(settings, _lightgbm_data(rows, seed, position=position), num_boost_round=trees)

    def score(features: Features, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(booster.predict(features if extend is None else extend(features, offsets)))

    return score


def lightgbm_tuned(
    train: Rows, valid: Rows, *, within: bool = False, position: bool = False, threads: int = 1, seed: int = 0
) -> tuple[Score, tuple[int, int, float]]:
    """LightGBM of the size in `GRID` with the highest nDCG@10 on valid, ties to the smaller, refitted on both splits.

    Also returns leaves, trees and learning rate.
    """
    learned, asked = train, valid.shuffled(seed)
    if within:
        learned, extend = with_within(train)
        asked = replace(asked, features=extend(asked.features, asked.offsets))
    data = _lightgbm_data(learned, seed, position=position)
    base = lambdarank_settings(threads, seed) | REGULARISED
    most = max(trees for _, trees, _ in GRID)
    boosters = {
        (leaves, rate): lightgbm.train(base | {"num_leaves": leaves, "learning_rate": rate}, data, num_boost_round=most)
        for leaves, rate in {(leaves, rate) for leaves, _, rate in GRID}
    }
    quality = [
        _mean_ndcg(np.asarray(boosters[leaves, rate].predict(asked.features, num_iteration=trees)), asked)
        for leaves, trees, rate in GRID
    ]
    leaves, trees, rate = GRID[int(np.argmax(quality))]  # the first of the highest is the smallest
    chosen = {"num_leaves": leaves, "trees": trees, "learning_rate": rate}
    both = train.joined(valid)
    score = lightgbm_150(both, within=within, position=position, threads=threads, seed=seed, **chosen)
    return score, (leaves, trees, rate)


def _mean_ndcg(scores: NDArray[np.float64], rows: Rows) -> float:
    where = where_items(rows.offsets)
    positions = positions_by_score(pad(scores, rows.offsets), where=where)
    return float(np.nanmean(ndcg_metric(positions, pad(rows.click, rows.offsets), where=where, cutoff=10)))


def _lightgbm_data(rows: Rows, seed: int, *, position: bool) -> lightgbm.Dataset:
    rows = rows.shuffled(seed)
    places = rows.position - 1 if position else None
    params = {"verbose": -1}
    return lightgbm.Dataset(
        rows.features, rows.click, group=np.diff(rows.offsets), position=places, params=params, free_raw_data=False
    )


def lightgbm_ranker(train: Rows, valid: Rows, *, position: bool, threads: int, seed: int = 0) -> Score:
    """LightGBM's `lambdarank` with early stopping, with or without its own correction of position bias."""
    data, held_out = _lightgbm_data(train, seed, position=position), valid.shuffled(seed)
    booster = lightgbm.train(
        lambdarank_settings(threads, seed),
        data,
        num_boost_round=TREES,
        valid_sets=[data.create_valid(held_out.features, held_out.click, group=np.diff(held_out.offsets))],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )
    trees = max(booster.best_iteration, LEAST_TREES)
    return lambda features, _: np.asarray(booster.predict(features, num_iteration=trees))


def xgboost_ranker(train: Rows, valid: Rows, *, threads: int, seed: int = 0) -> Score:
    """XGBoost's `rank:ndcg` with `lambdarank_unbiased` and early stopping."""
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
    used = (0, min(max(booster.best_iteration + 1, LEAST_TREES), booster.num_boosted_rounds()))
    return lambda features, _: booster.predict(xgboost.DMatrix(features, nthread=threads), iteration_range=used)
