"""XGBoost's `rank:ndcg` with `lambdarank_unbiased` on clicks; it takes the position from the order of the rows."""

from __future__ import annotations

from typing import Any

import xgboost
from exchange import Predict, Split, run


def fit(train: Split, valid: Split, settings: dict[str, Any]) -> Predict:
    threads = settings["params"]["nthread"]

    def data(split: Split) -> xgboost.DMatrix:
        return xgboost.DMatrix(split.features, split.click, qid=split.list_of_row, nthread=threads)

    booster = xgboost.train(
        settings["params"],
        data(train),
        num_boost_round=settings["trees"],
        evals=[(data(valid), "valid")],
        early_stopping_rounds=settings["patience"],
        verbose_eval=False,
    )
    best = (0, booster.best_iteration + 1)
    return lambda features: booster.predict(xgboost.DMatrix(features, nthread=threads), iteration_range=best)


if __name__ == "__main__":
    run("xgboost-cpu", fit)
