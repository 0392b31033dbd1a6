"""Examination from randomised lists: what is compared with what, and the standard errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from propensity.logs import prepared, swapped
from urank.errors import ConfigError, DataError
from urank.propensity.randomised import fit_randomised, list_counts, relative_rates


def test_counts_compare_with_lists_that_show_the_position() -> None:
    position, click = np.array([1, 2, 3, 1, 2]), np.array([1, 0, 1, 0, 1])
    shows, clicks, top_shows, top_clicks = list_counts(position, click, np.array([0, 3, 5]), 3).sum(axis=0)
    assert shows.tolist() == [2, 2, 1]
    assert clicks.tolist() == [1, 1, 1]
    assert top_shows.tolist() == [2, 2, 1]  # one list alone shows a third item
    assert top_clicks.tolist() == [1, 1, 1]


def test_counts_of_some_items_still_know_what_the_list_shows() -> None:
    first = np.array([False, True, True, False])
    counts = list_counts(np.array([1, 2, 1, 2]), np.array([1, 1, 1, 1]), np.array([0, 2, 4]), 2, where=first)
    assert counts[0].tolist() == [[0, 1], [0, 1], [0, 0], [0, 0]]
    assert counts[1].tolist() == [[1, 0], [1, 0], [1, 1], [1, 1]]


def test_ratio_and_its_error() -> None:
    # Two queries; at position 1 both rates are 1/2, at position 2 they are 1/4 and 0.
    counts = np.array([[[8, 8], [4, 2], [8, 8], [4, 4]], [[8, 8], [4, 0], [8, 8], [4, 4]]])
    ratio, error = relative_rates(counts)
    assert ratio.tolist() == [1, (2 / 16) / (8 / 16)]
    influence = (2 - 1 / 8 * 8) / 16 / (1 / 2)  # of the first query; of the second it is the negative
    np.testing.assert_allclose(error, [0, np.sqrt(2 / (2 - 1) * 2 * influence**2)])


def test_error_without_clicks_is_that_of_one_click() -> None:
    counts = np.array([[[8, 8], [4, 0], [8, 8], [4, 4]]] * 2)
    ratio, error = relative_rates(counts)
    assert (ratio[1], error[1]) == (0, 1 / 16 / (1 / 2))


def test_errors_agree_with_the_bootstrap() -> None:
    rng = np.random.default_rng(0)
    rate = rng.beta(2, 6, size=400)  # queries differ
    shows = np.full((400, 2), 30)
    clicks = rng.binomial(30, rate[:, None] * [1, 0.5])
    top = np.repeat(clicks[:, :1], 2, axis=1)
    counts = np.stack([shows, clicks, shows, top], axis=1)
    drawn = [relative_rates(counts[rng.integers(400, size=400)])[0][1] for _ in range(400)]
    assert relative_rates(counts)[1][1] == pytest.approx(np.std(drawn), rel=0.15)


def test_swaps(tmp_path: Path) -> None:
    curve = fit_randomised(prepared(tmp_path, swapped(8, 2)))
    assert (curve.name, curve.values) == ("randomised", (1.0, (2 / 10) / (8 / 10)))
    assert curve.errors is not None
    assert curve.errors[0] == 0 < curve.errors[1]


def test_lists_that_were_not_randomised_are_left_out(tmp_path: Path) -> None:
    plain = swapped(10, 0, policy="plain").with_columns(
        pl.col("ranked_position").alias("position"), session_id=pl.lit("x") + pl.col("session_id")
    )
    log = pl.concat([swapped(8, 2, policy="swap"), plain])
    dataset = prepared(tmp_path, log)
    assert fit_randomised(dataset).values == (1.0, (2 / 10) / (8 / 10))
    assert fit_randomised(dataset, policies=["swap"]).values == (1.0, (2 / 10) / (8 / 10))
    with pytest.raises(DataError, match="ranked_position must differ from position"):
        fit_randomised(dataset, policies=["plain"])
    with pytest.raises(ConfigError, match="plain, swap; got 'none'"):
        fit_randomised(dataset, policies=["none"])


def test_shuffles_without_ranks_take_all_items(tmp_path: Path) -> None:
    shuffled = swapped(8, 2, policy="shuffle").drop("ranked_position")
    dataset = prepared(tmp_path / "one", shuffled)
    assert fit_randomised(dataset).values == pytest.approx((1.0, (2 / 20) / (8 / 20)))
    other = shuffled.with_columns(policy=pl.lit("plain"), session_id=pl.lit("x") + pl.col("session_id"))
    dataset = prepared(tmp_path / "two", pl.concat([shuffled, other]))
    with pytest.raises(DataError, match="must be named; it has plain, shuffle"):
        fit_randomised(dataset)
    assert fit_randomised(dataset, policies=["shuffle"]).values == pytest.approx((1.0, (2 / 20) / (8 / 20)))


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"clicks at position 1 to compare with .* there are none for 1–2"):
        fit_randomised(prepared(tmp_path / "a", swapped(0, 2)))
    still = swapped(8, 2).with_columns(pl.col("ranked_position").alias("position"))
    with pytest.raises(DataError, match="it never does in the train split"):
        fit_randomised(prepared(tmp_path / "b", still))
    with pytest.raises(ConfigError, match="has no such column"):
        fit_randomised(prepared(tmp_path / "c", swapped(8, 2)), policies=["swap"])
    third = swapped(8, 2, policy="swap").with_columns(position=pl.col("position") * 2 - 1)
    with pytest.raises(DataError, match=r"needs shows .* there are none for 2"):
        fit_randomised(prepared(tmp_path / "d", third))
