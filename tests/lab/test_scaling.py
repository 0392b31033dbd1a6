"""Scaling to [0, 1]."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.testing import assert_allclose, assert_array_equal

from urank.errors import ConfigError
from urank.lab.oracle import Scaling, query_means, scale01, scaling_bounds
from urank.log.columns import signed_log

METHODS: list[Scaling] = ["minmax", "log", "rank"]
floats = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.floats(-1e6, 1e6, width=32))


def test_minmax_and_log_by_hand() -> None:
    x = np.array([[0.0], [1.0], [7.0]])
    assert_allclose(scale01(x, "minmax").ravel(), [0, 1 / 7, 1])
    assert_allclose(scale01(x, "log").ravel(), [0, np.log(2) / np.log(8), 1])


def test_rank_is_the_share_below() -> None:
    x = np.array([[5.0], [0.0], [0.0], [9.0], [1e9]])
    assert_allclose(scale01(x, "rank").ravel(), [2 / 4, 0, 0, 3 / 4, 1])


@pytest.mark.parametrize("method", METHODS)
@given(x=floats)
def test_stays_in_range_and_keeps_the_order(method: Scaling, x: np.ndarray) -> None:
    scaled = scale01(x, method)
    assert scaled.shape == x.shape
    assert ((scaled >= 0) & (scaled <= 1)).all()
    order = np.argsort(x, axis=0, kind="stable")
    assert (np.diff(np.take_along_axis(scaled, order, axis=0), axis=0) >= 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_constant_missing_and_empty_columns_become_zero(method: Scaling) -> None:
    x = np.array([[3.0, np.nan, np.nan], [3.0, 1.0, np.nan], [3.0, 2.0, np.nan]])
    assert_array_equal(scale01(x, method), [[0, 0, 0], [0, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("method", ["minmax", "log"])
def test_bounds_scale_new_rows_as_the_old(method: Scaling) -> None:
    x = np.random.default_rng(0).lognormal(size=(50, 4))
    bounds = scaling_bounds(x, method)
    assert_array_equal(scale01(x[:7], method, bounds=bounds), scale01(x, method)[:7])
    assert_array_equal(scale01(np.full((1, 4), 1e9), method, bounds=bounds), 1.0)


def test_signed_log_is_odd() -> None:
    x = np.array([0.5, 3.0, 1e8])
    assert_array_equal(signed_log(-x), -signed_log(x))


def test_query_means_with_an_empty_query() -> None:
    means = query_means(np.array([[0.0, 1.0], [1.0, 0.0], [0.25, 0.5]]), np.array([0, 2, 2, 3]))
    assert_array_equal(means, [[0.5, 0.5], [0.5, 0.5], [0.25, 0.5]])


def test_refuses_unknown_methods_and_bounds_of_ranks() -> None:
    x = np.ones((2, 1))
    with pytest.raises(ConfigError, match="scaling must be one of minmax, log, rank; got 'zscore'"):
        scale01(x, "zscore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scaling by rank has no bounds"):
        scale01(x, "rank", bounds=np.zeros((2, 1)))
