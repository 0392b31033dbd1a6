"""The checks that every click model must pass, whatever its family; `test_*.py` files call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import polars as pl
import pytest

from urank.clicks.config import ClickConfig
from urank.clicks.model import ClickModel
from urank.errors import DataError
from urank.model import load_model, save_model

__all__ = ["CHECKS"]


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
    table = model.log_ctr(rows)
    np.testing.assert_allclose(model.log_ctr(rows[7:8]), table[7:8], atol=1e-5)
    np.testing.assert_allclose(model.log_ctr(rows[::-1]), table[::-1], atol=1e-5)


def check_unknown_and_missing_values(model: ClickModel, rows: pl.DataFrame) -> None:
    """Categories never seen, missing values and numbers far off give probabilities too."""
    odd = rows.with_columns(
        shape=pl.lit("triangle"), f1=pl.lit(float("nan"), dtype=pl.Float32), f3=pl.lit(1e30, dtype=pl.Float32)
    )
    assert np.isfinite(model.log_ctr(odd)).all()
    assert np.isfinite(model.log_ctr(rows.with_columns(shape=pl.lit(None, dtype=pl.String)))).all()


def check_bad_input_is_refused(model: ClickModel, rows: pl.DataFrame) -> None:
    """An absent feature is named."""
    with pytest.raises(DataError, match="the model needs the feature 'f2', which is not there"):
        model.log_ctr(rows.drop("f2"))


def check_monotone(model: ClickModel, rows: pl.DataFrame) -> None:
    """Families that promise it never let clicks rise with the position."""
    if all(member.family in ("monotone", "pbm", "gbdt") for member in model.members):
        table = model.log_ctr(rows)
        assert (np.diff(table, axis=1) <= 1e-6).all()


def check_saved_loaded_and_exported(model: ClickModel, rows: pl.DataFrame, config: ClickConfig, folder: Path) -> None:
    """The artifact gives the same table; so does the ONNX graph, from raw numbers and text."""
    save_model(model, config, folder / "model")
    table = model.log_ctr(rows)
    np.testing.assert_array_equal(load_model(folder / "model").log_ctr(rows), table)
    session = onnxruntime.InferenceSession(folder / "model" / "model.onnx", providers=["CPUExecutionProvider"])
    numeric = rows.select(feature.name for feature in model.featurizer.numeric).to_numpy().astype(np.float32)
    text = rows.select(pl.col(f.name).fill_null("") for f in model.featurizer.categorical).to_numpy().astype(object)
    (exported,) = session.run(["log_ctr"], {"numeric": numeric, "categorical": text})
    np.testing.assert_allclose(exported, table, atol=1e-5)


CHECKS: tuple[Callable[[ClickModel, pl.DataFrame], None], ...] = (
    check_table,
    check_rows_are_independent,
    check_unknown_and_missing_values,
    check_bad_input_is_refused,
    check_monotone,
)
