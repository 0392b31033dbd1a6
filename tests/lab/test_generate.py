"""Generated documents look like a benchmark."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from urank.errors import ConfigError
from urank.lab.letor_simulation import LABEL_SHARES, generate_letor, graded_labels
from urank.log.svmlight import Letor


@pytest.fixture(scope="module")
def data() -> Letor:
    return generate_letor(1500, features=30, min_items=5, max_items=25, rng=np.random.default_rng(3))


def test_shapes_and_types(data: Letor) -> None:
    rows = len(data.label)
    assert data.features.shape == (rows, 30)
    assert data.features.dtype == data.label.dtype == np.float32
    assert data.query.dtype == data.offsets.dtype == np.int64
    assert np.isfinite(data.features).all()
    assert_array_equal(data.query, np.repeat(np.arange(1500), np.diff(data.offsets)))


def test_list_lengths_vary_over_the_whole_range(data: Letor) -> None:
    assert set(np.diff(data.offsets)) == set(range(5, 26))


def test_label_shares_are_those_of_mslr(data: Letor) -> None:
    shares = np.bincount(data.label.astype(int)) / len(data.label)
    assert_allclose(shares, LABEL_SHARES, atol=1 / len(data.label) + 1e-9)


def test_labels_follow_relevance() -> None:
    relevance = np.random.default_rng(0).standard_normal(1000)
    labels = graded_labels(relevance)
    assert (np.diff(labels[np.argsort(relevance)]) >= 0).all()


def test_features_are_of_three_kinds(data: Letor) -> None:
    heavy, counts, bounded = (data.features[:, kind::3] for kind in range(3))
    assert (heavy.max(axis=0) > 10 * np.median(heavy, axis=0)).all()
    assert_array_equal(counts, np.round(counts))
    assert ((bounded >= 0) & (bounded <= 1)).all()


def test_one_feature_in_ten_belongs_to_the_query(data: Letor) -> None:
    starts = data.offsets[:-1]
    constant = np.array(
        [(np.maximum.reduceat(f, starts) == np.minimum.reduceat(f, starts)).all() for f in data.features.T]
    )
    assert np.flatnonzero(constant).tolist() == [9, 19, 29]


def test_features_hang_together(data: Letor) -> None:
    correlation = np.corrcoef(np.log1p(data.features.T))
    np.fill_diagonal(correlation, 0)
    assert (np.abs(correlation).max(axis=1) > 0.3).mean() > 0.8


def test_the_generator_decides_everything() -> None:
    first, again, other = (generate_letor(20, features=5, rng=np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert_array_equal(first.features, again.features)
    assert_array_equal(first.label, again.label)
    assert len(first.label) != len(other.label) or not np.array_equal(first.features, other.features)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": 0}, "queries and features must be at least 1; got 0 and 30"),
        ({"queries": 1, "min_items": 3, "max_items": 2}, "min_items must be from 1 to max_items; got 3 and 2"),
    ],
)
def test_refuses_impossible_sizes(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_letor(**arguments, rng=np.random.default_rng(0))
