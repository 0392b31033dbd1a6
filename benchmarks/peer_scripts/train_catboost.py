"""CatBoost's `YetiRank` on clicks."""

from __future__ import annotations

from typing import Any

from catboost import CatBoost, Pool
from exchange import Predict, Split, run


def fit(train: Split, valid: Split, settings: dict[str, Any]) -> Predict:
    data, held_out = (Pool(each.features, each.click, group_id=each.list_of_row) for each in (train, valid))
    model = CatBoost(settings["params"])
    model.fit(data, eval_set=held_out)
    threads = settings["params"]["thread_count"]
    return lambda features: model.predict(features, thread_count=threads)


if __name__ == "__main__":
    run("catboost", fit)
