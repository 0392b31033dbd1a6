"""The conversion rate: the regression, its penalties, and the table of conversions that it makes of a click table."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

import urank
from contracts import check_saved_loaded_and_exported
from urank.clicks.calibration import Calibration
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.click_settings import ClickConfig
from urank.clicks.conversion import (
    INTERCEPT_PENALTY,
    ConversionEvidence,
    ConversionRate,
    choose_penalties,
    fit_conversions,
    fit_logistic,
    largest_within_error,
)
from urank.clicks.families import build_network
from urank.errors import DataError
from urank.export.onnx import export_onnx
from urank.learning.features import Categorical, Featurizer, Inputs, Numeric, fit_featurizer
from urank.log.dataset import Dataset
from urank.model_io import load_model
from urank.ranking.ranking_model import RankingModel

Floats = NDArray[np.float64]
FEATURIZER = Featurizer(
    (Numeric("price", 3.0, 1.5, missing=True), Numeric("age", 1.0, 0.5, missing=False)),
    (Categorical("shop", ("a", "b")),),
)


def clicks(rows: int, *weights: float, seed: int = 0) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Columns 1 and normal ones, outcomes by a logistic regression with these weights, and queries of two rows."""
    rng = np.random.default_rng(seed)
    columns = np.column_stack([np.ones(rows), rng.normal(size=(rows, len(weights) - 1))])
    return columns, (rng.random(rows) < expit(columns @ np.array(weights))).astype(float), np.arange(rows) // 2


# The regression


def test_the_fit_is_that_of_scikit_learn() -> None:
    columns, outcome, _ = clicks(400, -1.0, 1.0, 0.0, -0.5)
    known = LogisticRegression(C=1 / 20.0, tol=1e-10).fit(columns[:, 1:], outcome)
    found = fit_logistic(columns, outcome, np.array([INTERCEPT_PENALTY, 20.0, 20.0, 20.0]))
    np.testing.assert_allclose(found, [*known.intercept_, *known.coef_[0]], atol=2e-4)
    again = fit_logistic(sparse.csr_array(columns), outcome, np.array([INTERCEPT_PENALTY, 20.0, 20.0, 20.0]))
    np.testing.assert_allclose(again, found, atol=1e-6)


def test_each_column_has_its_own_penalty() -> None:
    """Where the gradient of the penalised log-likelihood vanishes; a column with an infinite penalty is left out."""
    columns, outcome, _ = clicks(300, 0.5, 1.0, 1.0, 1.0)
    penalty = np.array([INTERCEPT_PENALTY, 1.0, 50.0, inf])
    found = fit_logistic(columns, outcome, penalty)
    assert found[3] == 0
    mean = (outcome.sum() + 0.5) / (len(outcome) + 1)
    centre = np.array([log(mean / (1 - mean)), 0, 0])
    score = columns[:, :3].T @ (outcome - expit(columns @ found)) - penalty[:3] * (found[:3] - centre)
    assert np.abs(score).max() < 300 * 2e-5
    assert abs(found[1]) > abs(found[2])


def test_outcomes_that_are_all_alike_give_a_rate_close_to_their_own() -> None:
    columns, _, _ = clicks(50, 0.0, 0.0)
    found = fit_logistic(columns, np.ones(50), np.array([INTERCEPT_PENALTY, 100.0]))
    assert expit(columns @ found).min() > 0.98


# Its penalties

ITEM = (np.array([False, False, False]), np.array([False, True, True]))


def test_a_difference_is_kept_and_noise_is_not() -> None:
    penalty, (of_lists, of_items) = choose_penalties(*clicks(2000, -1.0, 0.8, 0.0), ITEM)
    assert of_lists == 0
    assert of_items > 2
    assert np.isfinite(penalty[1:]).all()
    kept = [choose_penalties(*clicks(2000, -1.0, 0.0, 0.0, seed=seed), ITEM)[0][1] for seed in range(10)]
    assert sum(np.isfinite(kept)) <= 3  # by chance alone, in one case of six


def test_lists_and_items_are_told_apart() -> None:
    """What lists share explains all, so that the columns of items are not used."""
    groups = (np.array([False, True, False]), np.array([False, False, True]))
    penalty, (of_lists, _) = choose_penalties(*clicks(2000, 0.0, 1.0, 0.0), groups)
    assert of_lists > 2
    assert penalty.tolist() == [INTERCEPT_PENALTY, penalty[1], inf]
    assert np.isfinite(penalty[1])


def test_the_largest_penalty_within_an_error_of_the_best() -> None:
    better, best = np.array([1.0, 1.2, 0.9, 1.1]), np.array([1.0, 1.0, 1.0, 1.0])
    assert best.sum() < better.sum()
    assert largest_within_error({inf: best + 1 + better, 30.0: better, 10.0: best}) == 30
    assert largest_within_error({inf: better, 10.0: best}) == inf
    assert largest_within_error({inf: best}) == inf


def test_few_clicks_support_nothing() -> None:
    for rows in (1, 2, 3, 8):
        columns, _, query = clicks(rows, 0.0, 1.0, 1.0)
        penalty, scores = choose_penalties(columns, np.ones(rows), query, ITEM)
        assert penalty[1:].tolist() == [inf, inf]
        assert scores == [0, 0]


def test_evidence_in_words() -> None:
    assert ConversionEvidence(0, 4.0).sentence == "conversion differs by list: no sign of it; by item: yes"


# Fitted to a log


def prepared(folder: Path, rate: pl.Expr, *, lists: int = 1500) -> Dataset:
    """Lists of four random items, of which half are clicked, that convert at a rate that depends on `x` and `kind`."""
    rng = np.random.default_rng(1)
    rows = 4 * lists
    log = pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(lists), 4),
            "position": np.tile(np.arange(1, 5), lists),
            "click": rng.integers(0, 2, rows),
            "x": rng.normal(size=rows),
            "q": np.repeat(rng.normal(size=lists), 4),
            "kind": rng.choice(["a", "b", "c"], rows),
        }
    )
    converts = pl.Series(rng.random(rows)) < log.select(rate).to_series()
    log = log.with_columns(conversion=(converts & (log["click"] == 1)).cast(pl.Int8))
    urank.prepare(urank.read(log), folder, valid=0.2, test=0)
    return Dataset(folder)


LOGIT = 1.5 * pl.col("x").sign() * pl.col("x").abs().log1p() + pl.when(pl.col("kind") == "c").then(1.0).otherwise(-1.0)


def test_a_known_rate_is_found(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "prepared", 1 / (1 + (-LOGIT).exp()))
    assert dataset.features == ["x", "q", "kind"]  # an outcome of the click is no feature
    rate, evidence = fit_conversions(dataset, fit_featurizer(dataset, within_list="auto"))
    assert "by item: yes" in evidence.sentence
    (block,) = dataset.blocks("valid", [*dataset.features])
    found = np.exp(rate.log_rate(fit_featurizer(dataset, within_list="auto").encode(block.items, block.offsets)))
    true = pl.DataFrame(pl.from_arrow(block.items)).select(1 / (1 + (-LOGIT).exp())).to_series().to_numpy()
    assert np.abs(found - true).mean() < 0.05  # a constant is off by 0.24
    assert abs(found.mean() - true.mean()) < 0.03


@pytest.mark.parametrize("within_list", ["auto", "off"])
@pytest.mark.parametrize("strength", [0.0, 1.5])
def test_without_a_difference_all_items_of_a_list_convert_alike(
    tmp_path: Path, strength: float, within_list: Any
) -> None:
    """Though conversion may differ by query."""
    rate_of_query = 1 / (1 + (1 - strength * pl.col("q")).exp())
    dataset = prepared(tmp_path / "prepared", rate_of_query, lists=600)
    featurizer = fit_featurizer(dataset, within_list=within_list)
    rate, evidence = fit_conversions(dataset, featurizer)
    assert (evidence.lists > 2) == (strength > 0)
    assert evidence.sentence.endswith("by item: no sign of it, so the order is that of clicks")
    (block,) = dataset.blocks("valid", dataset.features)
    found = np.exp(rate.log_rate(featurizer.encode(block.items, block.offsets)).reshape(-1, 4))
    np.testing.assert_allclose(found, found[:, :1].repeat(4, axis=1), rtol=1e-5)
    true = pl.DataFrame(pl.from_arrow(block.items)).select(rate_of_query).to_series().to_numpy()
    assert abs(found.mean() - true.mean()) < 4 * np.sqrt(0.2 / 960)


def test_a_log_without_conversions_is_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "prepared", pl.lit(0.0), lists=50)
    with pytest.raises(DataError, match=r"no click of the train split of .* led to a conversion; use --goal clicks"):
        fit_conversions(dataset, fit_featurizer(dataset))


# The table


@pytest.fixture
def model() -> ClickModel:
    torch.manual_seed(0)
    rate = ConversionRate(FEATURIZER)
    rate.set_weights([-0.5, 0.7, -0.2, 0.4, 0.0, 0.3, -0.6])
    member = NetworkClicks("monotone", build_network("monotone", FEATURIZER, 3, hidden=(8,)))
    return ClickModel(FEATURIZER, 3, (member,), Calibration(3), rate)


def test_the_table_is_the_click_table_times_the_rate(model: ClickModel) -> None:
    numeric = np.array([[np.e**4 - 1, np.e**1.5 - 1], [np.nan, np.e - 1]], dtype=np.float32)
    inputs = Inputs(numeric, np.array([[1], [0]]))
    price, age, missing, unknown, a = 0.7, -0.2, 0.4, 0.0, 0.3
    logits = [-0.5 + price * (4 - 3) / 1.5 + age * (1.5 - 1) / 0.5 + a, -0.5 + missing + age * 0 + unknown]
    clicked = replace(model, conversion=None).log_ctr(inputs)
    assert (model.name, replace(model, conversion=None).name) == ("monotone · conversion", "monotone")
    np.testing.assert_allclose(np.exp(model.log_ctr(inputs)), np.exp(clicked) * expit(logits)[:, None], rtol=1e-5)


def test_saved_loaded_and_exported(model: ClickModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {"price": rng.lognormal(3, 1, 20), "age": rng.lognormal(1, 1, 20), "shop": rng.choice(["a", "b", "new"], 20)}
    frame = pl.DataFrame(rows).with_columns(price=pl.when(pl.col("age") > 1).then("price"))
    config = ClickConfig(families=("monotone",), hidden=(8,))
    check_saved_loaded_and_exported(model, frame, config, tmp_path)
    assert load_model(tmp_path / "model").goal == "conversions"
    (tmp_path / "model" / "conversion.safetensors").unlink()
    with pytest.raises(DataError, match="is damaged"):
        load_model(tmp_path / "model")


def test_exported_without_numbers_or_without_categories(tmp_path: Path) -> None:
    for name, featurizer in (("a", replace(FEATURIZER, categorical=())), ("b", replace(FEATURIZER, numeric=()))):
        rate = ConversionRate(featurizer)
        rate.set_weights(np.linspace(-1, 1, sum(each.numel() for each in rate.parameters())).tolist())
        member = NetworkClicks("monotone", build_network("monotone", featurizer, 3, hidden=(8,)))
        made = RankingModel(ClickModel(featurizer, 3, (member,), Calibration(3), rate))
        found = export_onnx(made, tmp_path / name)  # compares the graph with the model
        assert found.content["outputs"]["log_ctr"]["meaning"] == "log P(conversion) at positions 1 to 3"
