"""A model that ranks: each method by hand, lists apart from each other, and refusals in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from urank.clicks.calibration import Calibration
from urank.clicks.click_model import ClickModel
from urank.errors import ConfigError, DataError
from urank.learning.features import Featurizer, Inputs, Numeric
from urank.log.ragged import pad, positions_by_score, where_items
from urank.ranking.matching import METHODS, Method, match
from urank.ranking.ranking_model import RankingModel

K = 2
FEATURIZER = Featurizer(tuple(Numeric(name, 0.0, 1.0, False) for name in ("first", "second", "grade")), ())


@dataclass(frozen=True)
class Given:
    """A click model whose table stands in the features."""

    family: str = "given"

    def log_ctr(self, inputs: Inputs) -> NDArray[np.float32]:
        return np.log(inputs.numeric[:, :K])


@dataclass(frozen=True)
class Graded:
    """A scorer whose scores stand in the features; if it takes values, they are multiplied by these."""

    takes_value: bool = False
    family: str = "network"

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
        return inputs.numeric[:, K] * (value if self.takes_value else 1)


CLICKS = ClickModel(FEATURIZER, K, (Given(),), Calibration(K))
MODEL = RankingModel(CLICKS, Graded(), "match")

# The apps of the paper's introduction: the first is more relevant, but hardly minds its position; a third has no place.
APPS = pl.DataFrame(
    {"item_id": ["a", "b", "c"], "first": [0.50, 0.45, 0.20], "second": [0.48, 0.30, 0.10], "grade": [0.0, 1.0, 3.0]}
)


def test_methods_by_hand() -> None:
    offsets = np.array([0, 3])
    assert MODEL.order(APPS, offsets).tolist() == [2, 1, 3]  # 0.48 + 0.45, not 0.50 + 0.30
    assert MODEL.order(APPS, offsets, method="ctr1").tolist() == [1, 2, 3]
    assert MODEL.order(APPS, offsets, method="score").tolist() == [3, 2, 1]
    value = np.array([1.0, 1.0, 9.0])  # now c is worth 9 · 0.20 at position 1 and 9 · 0.10 at position 2
    assert MODEL.order(APPS, offsets, value=value).tolist() == [2, 3, 1]  # 1.80 + 0.48 is the most
    assert MODEL.order(APPS, offsets, value=value, method="ctr1").tolist() == [2, 3, 1]
    assert RankingModel(CLICKS, Graded(), "ctr1").order(APPS, offsets).tolist() == [1, 2, 3]


def test_ties_keep_the_input_order() -> None:
    same = pl.concat([APPS[1:2]] * 3)
    for method in METHODS:
        assert MODEL.order(same, np.array([0, 3]), method=method).tolist() == [1, 2, 3]


@pytest.mark.parametrize("method", METHODS)
def test_rank_tells_positions_clicks_and_utility(method: Method) -> None:
    value = np.array([2.0, 1.0, 9.0])
    ranked = MODEL.rank(APPS.with_columns(value=pl.Series(value)), method=method)
    position = MODEL.order(APPS, np.array([0, 3]), value=value, method=method)
    order = np.argsort(position)
    assert ranked.columns == ["item_id", "position", "score", "probability", "utility"]
    assert ranked["position"].to_list() == [1, 2, 3]
    assert ranked["item_id"].to_list() == [APPS["item_id"][int(i)] for i in order]
    np.testing.assert_allclose(ranked["score"], APPS["grade"].to_numpy()[order])
    table = APPS.select("first", "second").to_numpy()
    expected = [table[i, place] for place, i in enumerate(order[:2])]
    assert ranked["probability"][2] is None  # without a place there is no click
    np.testing.assert_allclose(ranked["probability"][:2], expected, rtol=1e-6)
    np.testing.assert_allclose(ranked["utility"], [*(np.array(expected) * value[order[:2]]), 0.0], rtol=1e-6)
    for top in (1, 2, 3, 9):
        assert MODEL.rank(APPS.with_columns(value=pl.Series(value)), method=method, top=top).equals(ranked.head(top))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_list_is_ranked_as_if_it_were_alone(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    offsets = np.append(0, np.cumsum(lengths))
    rows = int(offsets[-1])
    table = np.round(rng.uniform(0.01, 1, (rows, K)), 1).clip(0.1)  # with ties
    inputs = Inputs(np.column_stack([table, rng.integers(0, 3, rows)]).astype(np.float32), np.zeros((rows, 0), int))
    value = rng.integers(1, 4, rows).astype(np.float32)
    where = where_items(offsets)
    weights = np.exp(CLICKS.log_ctr(inputs).astype(np.float64)) * value[:, None]
    expected = {
        "score": positions_by_score(pad(inputs.numeric[:, K], offsets), where=where),
        "ctr1": positions_by_score(pad(weights[:, 0], offsets), where=where),
        "match": match(pad(weights, offsets), where=where),
    }
    for method in METHODS:
        whole = MODEL.order(inputs, offsets, value=value, method=method)
        assert whole.tolist() == expected[method][where].tolist()
        for first, last in pairwise(offsets):
            alone = slice(int(first), int(last))
            found = MODEL.order(inputs[alone], np.array([0, last - first]), value=value[alone], method=method)
            assert found.tolist() == whole[alone].tolist()


def test_names_and_methods() -> None:
    assert (MODEL.name, MODEL.methods) == ("network on given", ("score", "match", "ctr1"))
    alone = RankingModel(CLICKS)
    assert (alone.name, alone.method, alone.methods) == ("given", "match", ("match", "ctr1"))
    assert "score" not in alone.rank(APPS).columns
    np.testing.assert_array_equal(alone.log_ctr(APPS), CLICKS.log_ctr(APPS))


def test_the_value_is_1_where_it_is_not_given() -> None:
    ones = np.ones(3)
    np.testing.assert_array_equal(MODEL.score(APPS), MODEL.score(APPS, ones))
    for method in METHODS:
        offsets = np.array([0, 3])
        assert (
            MODEL.order(APPS, offsets, method=method).tolist()
            == MODEL.order(APPS, offsets, value=ones, method=method).tolist()
        )


def test_a_table_brings_its_values_along() -> None:
    value, offsets = np.array([1.0, 1.0, 9.0]), np.array([0, 3])
    table = APPS.with_columns(value=pl.Series(value))
    model = RankingModel(CLICKS, Graded(takes_value=True))
    for items in (table, table.to_arrow()):
        np.testing.assert_array_equal(model.score(items), model.score(APPS, value))
        assert model.score(items, np.ones(3)).tolist() == [0.0, 1.0, 3.0]  # unless others are given
        for method in METHODS:
            expected = model.order(APPS, offsets, value=value, method=method).tolist()
            assert model.order(items, offsets, method=method).tolist() == expected
            assert model.rank(table, method=method)["position"].to_list() == [1, 2, 3]


def test_a_scorer_that_takes_values_must_have_them() -> None:
    model = RankingModel(CLICKS, Graded(takes_value=True), "score")
    sentence = "the model was trained on values and needs the column 'value', which is not there"
    for refused in (
        lambda: model.score(APPS),
        lambda: model.order(APPS, np.array([0, 3])),
        lambda: model.rank(APPS),
    ):
        with pytest.raises(DataError, match=sentence):
            refused()
    assert model.order(APPS, np.array([0, 3]), method="match").tolist() == [2, 1, 3]  # the table needs none
    assert model.rank(APPS.with_columns(value=pl.Series([1, 9, 1])))["item_id"].to_list() == ["b", "c", "a"]


@pytest.mark.parametrize("scorer", [None, Graded()])
def test_methods_that_it_does_not_have_are_refused(scorer: Any) -> None:
    wrong: Any = "score" if scorer is None else "magic"
    known = "match, ctr1" if scorer is None else "score, match, ctr1"
    with pytest.raises(ConfigError, match=f"this model ranks by {known}; got '{wrong}'"):
        RankingModel(CLICKS, scorer, wrong)
    model = RankingModel(CLICKS, scorer)
    for refused in (
        lambda: model.rank(APPS, method=wrong),
        lambda: model.order(APPS, np.array([0, 3]), method=wrong),
    ):
        with pytest.raises(ConfigError, match=f"this model ranks by {known}; got '{wrong}'"):
            refused()


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="this model has no scorer, only a click model; use method match or ctr1"):
        RankingModel(CLICKS).score(APPS)
    with pytest.raises(ConfigError, match="top must be a whole number from 1 up; got 0"):
        MODEL.rank(APPS, top=0)
    with pytest.raises(DataError, match="the model needs the feature 'second'"):
        MODEL.rank(APPS.drop("second"))
