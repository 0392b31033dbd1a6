"""LightGBM's `lambdarank` on clicks, with or without its correction of position bias.

Without patience there is no early stopping, and it learns from both splits.
"""

from __future__ import annotations

from typing import Any

import lightgbm
from exchange import Predict, Split, run


def fit(train: Split, valid: Split, settings: dict[str, Any]) -> Predict:
    params, patience = settings["params"], settings["patience"]
    train, valid = (split.shuffled(params["seed"]) for split in (train, valid))
    learned = train if patience else train.joined(valid)
    data = lightgbm.Dataset(
        learned.features,
        learned.click,
        group=learned.lengths,
        position=learned.position - 1 if settings["position"] else None,
        params={"verbose": -1},
    )
    stopping: dict[str, Any] = {}
    if patience:
        stopping["valid_sets"] = [data.create_valid(valid.features, valid.click, group=valid.lengths)]
        stopping["callbacks"] = [lightgbm.early_stopping(patience, verbose=False)]
    booster = lightgbm.train(params, data, num_boost_round=settings["trees"], **stopping)
    trees = max(booster.best_iteration, settings["least_trees"]) if patience else settings["trees"]
    return lambda features: booster.predict(features, num_iteration=trees, num_threads=params["num_threads"])


if __name__ == "__main__":
    run("lightgbm", fit)
