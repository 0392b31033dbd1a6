"""The paper's metrics from a log of six impressions, by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from abtest.helpers import log_of
from benchmarks.ab_visits import simulate_visits
from urank.abtest.exposures import read_exposures
from urank.abtest.metrics import METRICS, by_row, by_user, cumulative, first_earned, metric_named, metrics_of
from urank.errors import ConfigError

LOG = log_of([(1, "A", 0, 0, 0.0), (1, "A", 0, 1, 2.0), (1, "A", 2, 1, 3.0), (2, "B", 1, 0, 0.0), (2, "B", 2, 1, 4.0)])
CTR, CVR, REVENUE = METRICS


def test_each_day_alone() -> None:
    assert by_row(LOG, CTR).tolist() == [[1, 2], [1, 1], [0, 1], [1, 1]]
    assert by_row(LOG, CVR).tolist() == [[1, 1], [1, 1], [0, 1], [1, 1]]
    assert by_row(LOG, REVENUE).tolist() == [[2, 1], [3, 1], [0, 1], [4, 1]]


def test_all_days_of_a_user_count_it_once() -> None:
    assert by_user(LOG, CTR).tolist() == [[2, 3], [1, 2]]
    assert by_user(LOG, CVR).tolist() == [[2, 1], [1, 1]]
    assert by_user(LOG, REVENUE).tolist() == [[5, 1], [4, 1]]
    assert by_user(LOG.between(0, 0), CVR).tolist() == [[1, 1], [0, 0]]  # the second was not seen


def test_what_users_have_so_far() -> None:
    now, before = cumulative(LOG, CTR)
    assert now.tolist() == [[1, 2], [2, 3], [0, 1], [1, 2]]
    assert before.tolist() == [[0, 0], [1, 2], [0, 0], [0, 1]]
    now, before = cumulative(LOG, REVENUE)
    assert now.tolist() == [[2, 1], [5, 1], [0, 1], [4, 1]]
    assert before.tolist() == [[0, 0], [2, 1], [0, 0], [0, 1]]
    assert first_earned(LOG, CTR).tolist() == [True, False, False, True]


@pytest.mark.parametrize("metric", METRICS)
def test_the_last_of_so_far_is_the_sum(metric: object) -> None:
    log = simulate_visits(300, rng=np.random.default_rng(0))
    now, _ = cumulative(log, metric)  # type: ignore[arg-type]
    last = np.append(np.diff(log.user) != 0, True)
    np.testing.assert_allclose(now[last], by_user(log, metric), atol=1e-9)  # type: ignore[arg-type]
    assert first_earned(log, metric).sum() == (by_user(log, metric)[:, 0] > 0).sum()  # type: ignore[arg-type]


def test_revenue_needs_values() -> None:
    frame = pl.DataFrame({"user_id": [1, 2], "arm": ["A", "B"], "click": [1, 0]})
    log = read_exposures(frame)
    assert [metric.name for metric in metrics_of(log)] == ["ctr", "cvr"]
    with pytest.raises(ConfigError, match="metric must be one of ctr, cvr for the table; got 'revenue'"):
        metric_named("revenue", log)
    assert metric_named("cvr", log) == CVR
