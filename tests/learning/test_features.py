"""Scales and vocabularies come from train alone, survive JSON, and encode what was never seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from urank.errors import DataError
from urank.learning.features import Featurizer
from urank.learning.networks import FeatureLayer
from urank.log.dataset import Block
from urank.log.signed_log import signed_log

ROWS = pl.DataFrame(
    {
        "price": [1.0, 3.0, None, 100.0],
        "score": [0.5, 0.5, 0.5, 0.5],
        "brand": ["x", "x", "y", None],
    },
    schema={"price": pl.Float32, "score": pl.Float32, "brand": pl.String},
).with_columns(pl.col("price").fill_null(float("nan")))


def block(frame: pl.DataFrame, offsets: Sequence[int] | None = None) -> Block:
    return Block(pa.table({}), frame.to_arrow(), np.array([0, frame.height] if offsets is None else offsets))


def fit(frame: pl.DataFrame = ROWS, **options: Any) -> Featurizer:
    parts = [block(frame[:1]), block(frame[1:])]
    return Featurizer.fit(parts, ["price", "score"], ["brand"], **options)


def test_moments_are_those_of_the_known_signed_logs() -> None:
    price, score = fit().numeric
    logs = np.log1p([1.0, 3.0, 100.0])
    assert price.mean == pytest.approx(logs.mean())
    assert price.std == pytest.approx(logs.std())
    assert price.missing
    assert (score.std, score.missing) == (1.0, False)  # a constant is not blown up


def test_vocabulary_by_count_and_unknown_values() -> None:
    assert fit(min_count=1).categorical[0].vocabulary == ("x", "y")
    assert fit(min_count=2).categorical[0].vocabulary == ("x",)
    assert fit(min_count=2).cardinalities == [2]
    new = ROWS.with_columns(brand=pl.Series(["y", "x", "zebra", None]))
    assert fit(min_count=1).encode(new).categorical[:, 0].tolist() == [2, 1, 0, 0]


def test_json_round_trip_is_exact() -> None:
    featurizer = fit(min_count=1)
    assert Featurizer.from_dict(json.loads(json.dumps(featurizer.to_dict()))) == featurizer


def test_an_absent_feature_is_named() -> None:
    with pytest.raises(DataError, match="the model needs the feature 'brand'"):
        fit().encode(ROWS.drop("brand"))


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=20))
def test_layer_is_the_formula(values: list[float]) -> None:
    layer = FeatureLayer(fit())
    x = np.array([[v, np.nan] for v in values], dtype=np.float32)
    got = layer(torch.from_numpy(x)).numpy()
    price = fit().numeric[0]
    expected = np.clip((signed_log(x[:, 0]) - price.mean) / price.std, -8, 8)
    np.testing.assert_allclose(got[:, 0], expected, rtol=2e-5, atol=2e-5)
    assert (got[:, 1] == 0).all()  # a missing number is the mean
    assert got.shape == (len(values), 3)
    assert (got[:, 2] == 0).all()  # price was there


def test_layer_tells_of_missing_values() -> None:
    layer = FeatureLayer(fit())
    got = layer(torch.tensor([[float("nan"), 0.5], [1.0, 0.5]])).numpy()
    assert got[:, 2].tolist() == [1.0, 0.0]
    assert got[0, 0] == 0


def test_features_of_one_kind_only() -> None:
    only_text = Featurizer.fit([block(ROWS)], [], ["brand"], min_count=1)
    inputs = only_text.encode(ROWS)
    assert inputs.numeric.shape == (4, 0)
    assert inputs.categorical.shape == (4, 1)
    assert Featurizer.fit([block(ROWS)], ["price"], []).encode(ROWS).categorical.shape == (4, 0)
