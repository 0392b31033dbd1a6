"""LightGBM's `lambdarank` on clicks, with or without its correction of position bias."""

from __future__ import annotations

from typing import Any

import lightgbm
from exchange import Predict, Split, run


def fit(train: Split, valid: Split, settings: dict[str, Any]) -> Predict:
    data = lightgbm.Dataset(
        train.features,
        train.click,
        group=train.lengths,
        position=train.position - 1 if settings["position"] else None,
        params={"verbose": -1},
    )
    held_out = lightgbm.Dataset(valid.features, valid.click, group=valid.lengths, reference=data)
    booster = lightgbm.train(
        settings["params"],
        data,
        num_boost_round=settings["trees"],
        valid_sets=[held_out],
        callbacks=[lightgbm.early_stopping(settings["patience"], verbose=False)],
    )
    threads = settings["params"]["num_threads"]
    return lambda features: booster.predict(features, num_threads=threads)


if __name__ == "__main__":
    run("lightgbm", fit)
