"""XGBoost's `rank:ndcg` with `lambdarank_unbiased` on clicks; it takes the position from the order of the rows.

Without patience there is no early stopping, and it learns from both splits.
"""

from __future__ import annotations

from typing import Any

import xgboost
from exchange import Predict, Split, run


def fit(train: Split, valid: Split, settings: dict[str, Any]) -> Predict:
    threads = settings["params"]["nthread"]

    def data(split: Split) -> xgboost.DMatrix:
        return xgboost.DMatrix(split.features, split.click, qid=split.list_of_row, nthread=threads)

    patience, trees = settings["patience"], settings["trees"]
    if not patience:
        booster = xgboost.train(settings["params"], data(train.joined(valid)), num_boost_round=trees)
        return lambda features: booster.predict(xgboost.DMatrix(features, nthread=threads))
    booster = xgboost.train(
        settings["params"],
        data(train),
        num_boost_round=trees,
        evals=[(data(valid), "valid")],
        early_stopping_rounds=patience,
        verbose_eval=False,
    )
    used = (0, min(max(booster.best_iteration + 1, settings["least_trees"]), booster.num_boosted_rounds()))
    return lambda features: booster.predict(xgboost.DMatrix(features, nthread=threads), iteration_range=used)


if __name__ == "__main__":
    run("xgboost-cpu", fit)
