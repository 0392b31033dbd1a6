"""Simulated users: feature scaling, and the formulas of every user model."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.testing import assert_allclose, assert_array_equal

from urank.errors import ConfigError
from urank.lab.user_models import (
    Oracle,
    Scaling,
    attention_weights,
    cascade_probabilities,
    examination,
    query_means,
    relevance_denominator,
    relevance_probability,
    scale01,
    scaling_bounds,
    table_probabilities,
    trust_curves,
)
from urank.log.signed_log import signed_log

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
    with pytest.raises(ConfigError, match="scaling by rank takes no bounds"):
        scale01(x, "rank", bounds=np.zeros((2, 1)))


OFFSETS = np.array([0, 2, 5])
X = np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0], [0.2, 0.4], [0.3, 0.8]])
LABEL = np.array([0, 1, 2, 4, 0])


def oracle(user: str, **parameters: object) -> Oracle:
    return Oracle(**{"user": user, "positions": 3, "label_max": 4.0, "weights": (0.7, -0.7), **parameters})  # type: ignore[arg-type]


@given(features=st.integers(1, 200), eta=st.floats(0, 10), seed=st.integers(0, 2**32))
def test_weights_sum_to_zero_and_lie_in_range(features: int, eta: float, seed: int) -> None:
    w = attention_weights(features, eta, np.random.default_rng(seed))
    assert w.shape == (features,)
    assert abs(w.sum()) <= 1e-12 * max(eta, 1) * features
    assert (np.abs(w) <= 2 * eta).all()
    assert np.ptp(w) <= 2 * eta


def test_weights_fill_the_range_before_they_are_centred() -> None:
    w = attention_weights(10_000, 0.5, np.random.default_rng(0))
    assert_allclose([w.min(), w.max()], [-0.5, 0.5], atol=0.02)


def test_examination_is_a_power_of_the_position() -> None:
    curve = examination(np.array([[0.5], [-3.0]]), [1.0], 3)
    assert_allclose(curve[0], [1.0, 2**-1.5, 3**-1.5])
    assert_array_equal(curve[1], 1.0)  # max(wᵀx + 1, 0) = 0: seen wherever it stands


@given(st.lists(st.floats(0, 1), min_size=2, max_size=2), st.integers(1, 20))
def test_examination_falls_from_one(x: list[float], K: int) -> None:
    curve = examination(np.array([x]), [2.0, -2.0], K)[0]
    assert curve[0] == 1.0
    assert (np.diff(curve) <= 0).all()
    assert (curve > 0).all()


def test_relevance_probability_as_in_the_text_and_as_in_the_released_code() -> None:
    text = relevance_probability([0, 1, 2, 3, 4], label_max=4)
    assert_allclose(text, [0.1, 0.1 + 0.9 * 1 / 15, 0.1 + 0.9 * 3 / 15, 0.1 + 0.9 * 7 / 15, 1.0])
    code = relevance_probability([3], label_max=4, denominator=2**5 - 1, epsilon=0.2)
    assert_allclose(code, 0.2 + 0.8 * 7 / 31)
    assert relevance_denominator(2) == 3.0


@pytest.mark.parametrize("label", [-1, 5, np.nan])
def test_labels_outside_the_grades_are_refused(label: float) -> None:
    with pytest.raises(ValueError, match="label must be from 0 to label_max, 4"):
        relevance_probability([0.0, label], label_max=4)


def test_item_table_is_examination_times_relevance() -> None:
    table = oracle("item").table(X, LABEL, OFFSETS)
    r = 0.1 + 0.9 * (2.0**LABEL - 1) / 15
    exponent = np.maximum(0.7 * X[:, 0] - 0.7 * X[:, 1] + 1, 0)
    assert_allclose(table, r[:, None] * np.array([1, 2, 3]) ** -exponent[:, None])


def test_pbm_equals_the_item_user_without_weights() -> None:
    pbm = oracle("pbm", gamma=1.0).table(X, LABEL, OFFSETS)
    assert_allclose(pbm, oracle("item", weights=[0.0, 0.0]).table(X, LABEL, OFFSETS))
    assert_allclose(oracle("pbm", gamma=0.5).examination(X, OFFSETS)[0], [1, 2**-0.5, 3**-0.5])


def test_query_user_sees_the_mean_features_of_the_query() -> None:
    curve = oracle("query").examination(X, OFFSETS)
    assert_array_equal(curve[0], curve[1])
    assert_allclose(curve[2, 1], 2 ** -(0.7 * (1.0 + 0.2 + 0.3) / 3 - 0.7 * (0.0 + 0.4 + 0.8) / 3 + 1))


@given(K=st.integers(1, 50), gamma=st.floats(0, 5))
def test_default_trust_curves_fall_and_leave_room(K: int, gamma: float) -> None:
    alpha, beta = trust_curves(K, gamma=gamma)
    assert (np.diff(alpha) <= 0).all()
    assert (np.diff(beta) <= 0).all()
    assert (alpha + beta <= 1 + 1e-12).all()


def test_trust_table_is_affine_in_relevance() -> None:
    user = oracle("trust", alpha=[0.5, 0.4, 0.3], beta=[0.2, 0.1, 0.0])
    r = user.relevance(LABEL)
    assert_allclose(user.table(X, LABEL, OFFSETS)[:, 1], 0.4 * r + 0.1)


def test_look_up_of_showings_and_of_items_without_a_place() -> None:
    table = np.array([[0.9, 0.5], [0.4, 0.3]])
    shown = table_probabilities(table, np.array([1, 2, 3, 2]), rows=np.array([1, 0, 0, 1]))
    assert_array_equal(shown, [0.4, 0.5, 0.0, 0.3])


def brute_force_cascade(relevance: list[float]) -> np.ndarray:
    """Add up the probability of every pattern of appeal; the first appealing item from the top is clicked."""
    clicked = np.zeros(len(relevance))
    for pattern in product([0, 1], repeat=len(relevance)):
        if any(pattern):
            clicked[pattern.index(1)] += np.prod([r if a else 1 - r for a, r in zip(pattern, relevance, strict=True)])
    return clicked


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_cascade_against_enumeration(relevance: list[float], random: object) -> None:
    order = list(range(len(relevance)))
    random.shuffle(order)  # type: ignore[attr-defined]
    positions = np.argsort(order) + 1  # order[k] stands at position k + 1
    got = cascade_probabilities(np.array(relevance), positions, np.array([0, len(relevance)]))
    assert_allclose(got[order], brute_force_cascade([relevance[i] for i in order]), atol=1e-12)


def test_cascade_of_several_lists_with_an_empty_one_and_items_without_a_place() -> None:
    user = oracle("cascade", positions=2)
    truth = np.array([0.5, 0.25, 0.2, 1.0, 0.4])
    positions = np.array([2, 1, 3, 1, 2])
    got = user.click_probabilities(truth, positions, np.array([0, 3, 3, 5]))
    assert_allclose(got, [0.75 * 0.5, 0.25, 0.0, 1.0, 0.0])


def test_cascade_samples_at_most_one_click_a_list_and_never_past_the_last_position() -> None:
    user = oracle("cascade", positions=2)
    positions = np.tile([3, 1, 2], 200)
    clicks = user.sample_clicks(
        np.array([1.0, 0.3, 0.3]),
        positions,
        np.arange(0, 601, 3),
        np.random.default_rng(0),
        rows=np.tile([0, 1, 2], 200),
    )
    assert clicks.reshape(200, 3).sum(axis=1).max() == 1
    assert not clicks[positions == 3].any()
    assert 0 < clicks.sum() < 200


def test_the_cascade_has_no_table_but_a_truth() -> None:
    user = oracle("cascade")
    with pytest.raises(ConfigError, match="cascade user has no click table"):
        user.table(X, LABEL, OFFSETS)
    with pytest.raises(ConfigError, match="no examination probability apart"):
        user.examination(X, OFFSETS)
    assert_array_equal(user.truth(X, LABEL, OFFSETS), user.relevance(LABEL))
    assert_array_equal(oracle("item").truth(X, LABEL, OFFSETS), oracle("item").table(X, LABEL, OFFSETS))


S = np.maximum(0.7 * X[:, 0] - 0.7 * X[:, 1] + 1, 0)  # the exponent of each row of X


def test_grid_has_two_columns_and_the_right_one_gets_less() -> None:
    curve = oracle("grid", positions=5).examination(X, OFFSETS)
    for row, s in enumerate(S):
        assert_allclose(curve[row], [1, 0.6, 2**-s, 0.6 * 2**-s, 3**-s])
    assert (curve[0, 2] > curve[0, 1]) == (2 ** -S[0] > 0.6)
    assert (np.diff(curve, axis=1) > 0).any()  # no family with a falling curve contains it


def test_carousel_attention_rises_at_the_start_of_a_shelf() -> None:
    curve = oracle("carousel", positions=12).examination(X, OFFSETS)
    for row, s in enumerate(S):
        tiles = [1, 2**-s, 3**-s, 4**-s, 5**-s]
        assert_allclose(curve[row], [*tiles, *np.divide(tiles, 2), *np.divide(tiles[:2], 3)])


def test_fold_steps_at_screens_whose_size_depends_on_the_query() -> None:
    curve = oracle("fold", positions=8).examination(X, OFFSETS)
    means = [S[:2].mean(), S[2:].mean()]
    assert means[0] < 1 <= means[1]
    for row, s in enumerate(S):
        screens = [1, 1, 1, 1, 1, 1, 2, 2] if row < 2 else [1, 1, 1, 2, 2, 2, 3, 3]
        assert_allclose(curve[row], [screen**-s for screen in screens])


def test_no_falling_curve_times_a_slope_fits_the_new_tables() -> None:
    """log P = log r − s(i) g(k): in `monotone` the falls of two items are proportional, in these they are not."""
    for user, proportional in (("item", True), ("grid", False), ("carousel", False), ("fold", False)):
        falls = -np.log(oracle(user, positions=8).examination(X, OFFSETS))[:, 1:]
        rank = np.linalg.matrix_rank(falls, tol=1e-9)
        assert (rank == 1) == proportional, user


def test_neighbour_loses_half_the_relevance_of_the_item_above() -> None:
    user = oracle("neighbour")
    truth = user.truth(X, LABEL, OFFSETS)
    r = user.relevance(LABEL)
    assert_allclose(truth, oracle("item").table(X, LABEL, OFFSETS))
    positions = np.array([2, 1, 4, 1, 2])  # the third item has no place
    expected = [
        r[0] * 2 ** -S[0] * (1 - r[1] / 2),
        r[1],
        0.0,
        r[3],
        r[4] * 2 ** -S[4] * (1 - r[3] / 2),
    ]
    assert_allclose(user.click_probabilities(truth, positions, OFFSETS), expected)
    with pytest.raises(ConfigError, match="neighbour user has no click table"):
        user.table(X, LABEL, OFFSETS)


def test_patience_differs_between_sessions_and_is_shared_within_one() -> None:
    user = oracle("patience", positions=4)
    table = user.table(X, LABEL, OFFSETS)
    exponents = [0.25, 0.5, 1, 2, 4]
    mean = [np.mean([k ** -(m * S[2]) for m in exponents]) for k in (1, 2, 3, 4)]
    assert_allclose(table[2], user.relevance(LABEL)[2] * np.array(mean))
    two = Oracle("patience", positions=4, label_max=4.0, weights=(1.0, -1.0))
    x, sessions = np.array([[1.0, 0.0], [1.0, 0.0]]), 20_000  # s = 2: at positions 3 and 4 patience decides
    truth = two.truth(x, [4, 4], np.array([0, 2]))
    clicks = two.sample_clicks(
        truth,
        np.tile([3, 4], sessions),
        np.arange(0, 2 * sessions + 1, 2),
        np.random.default_rng(0),
        rows=np.tile([0, 1], sessions),
        x=x,
    ).reshape(sessions, 2)
    both = np.mean([3.0 ** (-2 * m) * 4.0 ** (-2 * m) for m in exponents])
    assert abs(clicks.all(axis=1).mean() - both) < 4 * np.sqrt(both / sessions)
    assert both > 2 * truth[0, 2] * truth[1, 3]  # far from independent


def test_selected_features_alone_have_a_weight() -> None:
    w = attention_weights(30, 0.7, np.random.default_rng(0), selected=10)
    assert np.count_nonzero(w) == 10
    assert abs(w.sum()) < 1e-12
    with pytest.raises(ConfigError, match="attention_features must be from 1 to the number of features, 30; got 31"):
        attention_weights(30, 0.7, np.random.default_rng(0), selected=31)


def test_the_denominator_used_is_always_recorded() -> None:
    assert oracle("pbm").to_dict()["denominator"] == 15.0
    assert oracle("pbm", denominator=31.0).to_dict()["denominator"] == 31.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": "patience", "weights": ()}, "the user 'patience' needs weights"),
        ({"user": "robot"}, "user must be one of item, query, pbm, cascade, trust, grid, .*; got 'robot'"),
        ({"positions": 0}, "positions must be at least 1; got 0"),
        ({"label_max": 0.0}, "label_max must be above 0; got 0"),
        ({"denominator": 14.0}, "denominator must be at least .* = 15; got 14"),
        ({"weights": []}, "the user 'item' needs weights"),
        ({"user": "trust", "alpha": [0.5]}, "alpha and beta need 3 values; got 1, 3"),
        ({"user": "trust", "alpha": [0.9, 0.5, 0.5], "beta": [0.2, 0.0, 0.0]}, "sum to at most 1"),
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        oracle(**{"user": "item", **changes})  # type: ignore[arg-type]
