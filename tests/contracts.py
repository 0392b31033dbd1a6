"""The checks that every click model, and those that every scorer, must pass; `test_*.py` files call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import pytest
from numpy.typing import NDArray

from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import ClickConfig
from urank.errors import DataError
from urank.learning.features import Featurizer
from urank.model_io import load_model, save_model
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import UrankConfig

__all__ = [
    "CHECKS",
    "SCORER_CHECKS",
    "check_saved_loaded_and_exported",
    "check_scorer_exported",
    "check_scorer_saved_and_loaded",
    "raw_inputs",
    "run_graph",
]

# Click models


def check_table(model: ClickModel, rows: pl.DataFrame) -> None:
    """A log probability for each row and position, finite, and the same every time it is asked for."""
    table = model.log_ctr(rows)
    assert table.shape == (rows.height, model.positions)
    assert table.dtype == np.float32
    assert np.isfinite(table).all()
    assert (table <= 0).all()
    np.testing.assert_array_equal(model.log_ctr(rows), table)


def check_rows_are_independent(model: ClickModel, rows: pl.DataFrame) -> None:
    """A batch is its rows: what else is asked about changes nothing."""
    table, inputs = model.log_ctr(rows), model.featurizer.encode(rows)
    np.testing.assert_allclose(model.log_ctr(inputs[7:8]), table[7:8], atol=1e-5)
    reverse = np.arange(len(table))[::-1]
    np.testing.assert_allclose(model.log_ctr(inputs[reverse]), table[reverse], atol=1e-5)


def check_unknown_and_missing_values(model: ClickModel, rows: pl.DataFrame) -> None:
    """Categories never seen, missing values and numbers far off give probabilities too."""
    for odd in odd_rows(rows):
        assert np.isfinite(model.log_ctr(odd)).all()


def check_bad_input_is_refused(model: ClickModel, rows: pl.DataFrame) -> None:
    """An absent feature is named."""
    with pytest.raises(DataError, match="the model needs the feature 'f2'"):
        model.log_ctr(rows.drop("f2"))


def check_monotone(model: ClickModel, rows: pl.DataFrame) -> None:
    """Families that promise it never let clicks rise with the position."""
    if all(member.family in ("monotone", "pbm", "gbdt") for member in model.members):
        table = model.log_ctr(rows)
        assert (np.diff(table, axis=1) <= 1e-6).all()


CHECKS: tuple[Callable[[ClickModel, pl.DataFrame], None], ...] = (
    check_table,
    check_rows_are_independent,
    check_unknown_and_missing_values,
    check_bad_input_is_refused,
    check_monotone,
)


def check_saved_loaded_and_exported(model: ClickModel, rows: pl.DataFrame, config: ClickConfig, folder: Path) -> None:
    """The artifact gives the same table; so does the ONNX graph, from raw numbers and text."""
    ranking = RankingModel(model)
    save_model(ranking, UrankConfig(ranker="none", goal=ranking.goal, clicks=config), folder / "model")
    table = model.log_ctr(rows)
    loaded = load_model(folder / "model")
    assert (loaded.name, loaded.method, loaded.scorer) == (model.name, "match", None)
    np.testing.assert_array_equal(loaded.clicks.log_ctr(rows), table)
    assert not (folder / "model" / "scorer.onnx").exists()
    exported = run_graph(folder / "model" / "clicks.onnx", "log_ctr", raw_inputs(model.featurizer, rows))
    np.testing.assert_allclose(exported, table, atol=1e-5)


# Scorers, inside the model that ranks by them


def check_scores(model: RankingModel, rows: pl.DataFrame) -> None:
    """A finite score for each row, not all the same, and the same every time it is asked for."""
    scores = score(model, rows)
    assert scores.shape == (rows.height,)
    assert scores.dtype == np.float32
    assert np.isfinite(scores).all()
    assert len(np.unique(scores)) > rows.height / 10
    np.testing.assert_array_equal(score(model, rows), scores)
    assert score(model, rows[:0]).shape == (0,)


def check_scores_of_rows_are_independent(model: RankingModel, rows: pl.DataFrame) -> None:
    """A batch is its rows: what else is scored changes nothing."""
    scores, inputs = score(model, rows), model.clicks.featurizer.encode(rows)
    value = rows["value"].to_numpy() if "value" in rows.columns else np.ones(rows.height, dtype=np.float32)
    for some in (np.array([7]), np.arange(rows.height)[::-1]):
        np.testing.assert_allclose(model.score(inputs[some], value[some]), scores[some], rtol=1e-5, atol=1e-5)


def check_unknown_and_missing_values_are_scored(model: RankingModel, rows: pl.DataFrame) -> None:
    """Categories never seen, missing values and numbers far off have scores too."""
    for odd in odd_rows(rows):
        assert np.isfinite(score(model, odd)).all()


def check_bad_input_is_not_scored(model: RankingModel, rows: pl.DataFrame) -> None:
    """An absent feature is named; so is the value where the scorer was trained on values, and only there."""
    with pytest.raises(DataError, match="the model needs the feature 'f2'"):
        score(model, rows.drop("f2"))
    assert model.scorer is not None
    if model.scorer.takes_value:
        with pytest.raises(DataError, match="trained on values and needs the column 'value'"):
            model.score(rows.drop("value"))
        np.testing.assert_array_equal(model.score(rows), score(model, rows))  # a table brings its own along
        np.testing.assert_array_equal(model.score(rows.to_arrow()), score(model, rows))
        assert not np.array_equal(score(model, rows.with_columns(pl.col("value") * 3)), score(model, rows))
    else:
        np.testing.assert_array_equal(model.score(rows), model.score(rows, np.full(rows.height, 7.0)))


SCORER_CHECKS: tuple[Callable[[RankingModel, pl.DataFrame], None], ...] = (
    check_scores,
    check_scores_of_rows_are_independent,
    check_unknown_and_missing_values_are_scored,
    check_bad_input_is_not_scored,
)


def check_scorer_saved_and_loaded(
    model: RankingModel, rows: pl.DataFrame, config: UrankConfig, folder: Path, *, onnx: bool = False
) -> None:
    """The artifact gives the same scores."""
    save_model(model, config, folder / "model", onnx=onnx)
    scores = score(model, rows)
    loaded = load_model(folder / "model")
    assert (loaded.name, loaded.method) == (model.name, model.method)
    assert loaded.scorer is not None
    assert model.scorer is not None
    assert loaded.scorer.takes_value == model.scorer.takes_value
    np.testing.assert_array_equal(score(loaded, rows), scores)
    np.testing.assert_array_equal(loaded.log_ctr(rows), model.log_ctr(rows))


def check_scorer_exported(model: RankingModel, rows: pl.DataFrame, graph: Path | bytes) -> None:
    """The ONNX graph gives the same scores, from raw numbers and text, and from values if it was trained on them."""
    assert model.scorer is not None
    inputs = raw_inputs(model.clicks.featurizer, rows)
    if model.scorer.takes_value:
        inputs["value"] = rows["value"].to_numpy().astype(np.float32)
    for some in (slice(None), slice(1), slice(0)):
        exported = run_graph(graph, "score", {name: each[some] for name, each in inputs.items()})
        np.testing.assert_allclose(exported, score(model, rows)[some], rtol=1e-5, atol=1e-5)


def score(model: RankingModel, rows: pl.DataFrame) -> NDArray[np.float32]:
    """The scores of rows with their values."""
    return model.score(rows, rows["value"].to_numpy() if "value" in rows.columns else None)


def odd_rows(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """The rows with a category never seen, missing values and a number far off."""
    far = {"f1": pl.lit(float("nan"), dtype=pl.Float32), "f3": pl.lit(1e30, dtype=pl.Float32)}
    return [
        rows.with_columns(shape=pl.lit("triangle"), **far),
        rows.with_columns(shape=pl.lit(None, dtype=pl.String)),
    ]


def raw_inputs(featurizer: Featurizer, rows: pl.DataFrame) -> dict[str, NDArray[Any]]:
    """Build the inputs of a graph: numbers, with within-list columns, and raw text with "" where it is missing."""
    text = rows.select(pl.col(feature.name).fill_null("") for feature in featurizer.categorical)
    return {"numeric": featurizer.encode(rows).numeric, "categorical": text.to_numpy().astype(object)}


def run_graph(graph: Path | bytes, output: str, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Run a graph in ONNX Runtime; it must have all of these inputs."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    (result,) = session.run([output], inputs)
    return result
