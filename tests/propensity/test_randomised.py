"""Examination from randomised lists: what is compared, standard errors, curves by category and their shrinkage."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from numpy.typing import NDArray

import urank
from propensity.logs import STEEPNESS, prepared, shuffled, swapped
from urank.errors import ConfigError, DataError
from urank.log.dataset import Block, Dataset
from urank.log.ragged import list_ids, offsets_of_runs
from urank.propensity.examination import ExaminationCurve, inverse_propensity
from urank.propensity.methods import fit_propensity, load_propensity, save_propensity
from urank.propensity.randomised import (
    MIN_CLICKS,
    ByCategory,
    Counts,
    category_curves,
    credibility,
    fit_by_category,
    fit_randomised,
    group_rates,
    list_counts,
    relative_rates,
    sum_by_key,
)

K = 5
LOGS = 100


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


def test_only_the_items_ranked_first_are_compared(tmp_path: Path) -> None:
    """All items ranked second were clicked at position 1: compared with all items, position 2 would get 2/18."""
    second = (pl.col("ranked_position") == 2) & (pl.col("position") == 1)
    log = swapped(8, 2).with_columns(click=pl.when(second).then(1).otherwise("click"), category=pl.lit("all"))
    dataset = prepared(tmp_path, log)
    assert fit_randomised(dataset).values == (1.0, (2 / 10) / (8 / 10))
    by_category = fit_by_category(dataset, min_clicks=1)
    assert by_category.overall.values == (1.0, (2 / 10) / (8 / 10))
    assert by_category.curves["all"].values == (1.0, (2 / 10) / (8 / 10))


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
    with pytest.raises(ConfigError, match="which has plain, swap; got 'none'"):
        fit_randomised(dataset, policies=["none"])


def test_shuffles_without_ranks_take_all_items(tmp_path: Path) -> None:
    shuffled = swapped(8, 2, policy="shuffle").drop("ranked_position")
    dataset = prepared(tmp_path / "one", shuffled)
    assert fit_randomised(dataset).values == pytest.approx((1.0, (2 / 20) / (8 / 20)))
    other = shuffled.with_columns(policy=pl.lit("plain"), session_id=pl.lit("x") + pl.col("session_id"))
    dataset = prepared(tmp_path / "two", pl.concat([shuffled, other]))
    with pytest.raises(DataError, match="it has plain, shuffle"):
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


# By category


def overall_curve(query: NDArray[Any], counts: Counts) -> ExaminationCurve:
    _, counts = sum_by_key([query], counts)
    values, errors = relative_rates(counts)
    return ExaminationCurve("randomised", tuple(values.tolist()), tuple(errors.tolist()))


def counted(log: pl.DataFrame) -> tuple[Counts, NDArray[np.int64], ExaminationCurve]:
    """The counts of all categories, in the order of the alphabet, where each begins, and the overall curve."""
    offsets = offsets_of_runs(log["session_id"].to_numpy())
    names = log["category"].rank("dense").to_numpy().astype(np.int64)
    pairs, part = np.unique(list_ids(offsets) * (names.max() + 1) + names, return_inverse=True)
    position, click = log["position"].to_numpy(), log["click"].to_numpy()
    counts = list_counts(position, click, offsets, K, part=part)
    query = log["query_id"].to_numpy()[offsets[:-1]][pairs // (names.max() + 1)]
    (category, query), counts = sum_by_key([pairs % (names.max() + 1), query], counts)
    return counts, offsets_of_runs(category), overall_curve(query, counts)


def items(categories: list[str | None], column: str = "category") -> Block:
    """A list of items of these categories."""
    table = pa.table({column: pa.array(categories, pa.string()), "position": np.arange(len(categories)) + 1})
    return Block(pa.table({"query_id": ["q"]}), table, np.array([0, len(categories)]))


# Counts of categories


def test_counts_of_the_parts_of_a_list() -> None:
    # One list shows a, b, a; another b, a. Part 0 and 1 are a and b of the first, 2 and 3 of the second.
    position, click, offsets = np.array([1, 2, 3, 1, 2]), np.array([1, 1, 0, 1, 0]), np.array([0, 3, 5])
    counts = list_counts(position, click, offsets, 3, part=np.array([0, 1, 0, 3, 2]))
    assert counts[0].tolist() == [[1, 0, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1]]  # a at 1, in a list that shows all three
    assert counts[1].tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]  # b not at 1
    assert counts[2].tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert counts[3].tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0]]  # nothing to compare at 3
    assert counts.sum(axis=0).tolist() == list_counts(position, click, offsets, 3).sum(axis=0).tolist()


def test_rates_of_groups_are_those_of_each() -> None:
    counts, offsets, _ = counted(shuffled(0, 400, queries=100))
    ratio, error = group_rates(counts, offsets)
    for group, (start, end) in enumerate(pairwise(offsets)):
        expected = relative_rates(counts[start:end])
        np.testing.assert_allclose((ratio[group], error[group]), expected, atol=1e-15)


def test_clicks_over_shows_of_a_category(tmp_path: Path) -> None:
    # Of the items of category a 40 of 50 were clicked at 1 and 10 of 50 at 2; of those of b 30 and 20.
    a, b = swapped(40, 10, lists=100), swapped(30, 20, lists=100)
    b = b.with_columns(query_id="b" + pl.col("query_id"), session_id="b" + pl.col("session_id"))
    log = pl.concat([a.with_columns(category=pl.lit("a")), b.with_columns(category=pl.lit("b"))])
    found = fit_by_category(prepared(tmp_path, log), min_clicks=1)
    own = np.array([(10 / 50) / (40 / 50), (20 / 50) / (30 / 50)])
    overall = (30 / 100) / (70 / 100)
    noise = np.array([1 / (50 * 40 / 50 * overall) + 1 / 40, 1 / (50 * 30 / 50 * overall) + 1 / 30])
    deviation, precision = own / overall - 1, 1 / noise
    spread = ((precision * deviation**2).sum() - 1) / (precision.sum() - (precision**2).sum() / precision.sum())
    weight = spread / (spread + noise)
    assert found.overall.values == pytest.approx((1, overall))
    assert [curve.values[0] for curve in found.curves.values()] == [1, 1]
    values = [found.curves[name].values[1] for name in "ab"]
    assert values == pytest.approx(overall + weight * (own - overall))
    assert (found.name, found.column, list(found.curves)) == ("randomised by category", "category", ["a", "b"])


# Shrinkage


def two_positions(shows: list[int], ratio: list[float], top_rate: float = 0.5) -> tuple[NDArray[Any], NDArray[Any]]:
    """The ratios and the sums of categories that were shown so often at 1, and as often at 2."""
    n, own = np.array(shows, dtype=np.float64), np.array(ratio)
    sums = np.stack([n, n * top_rate, n, n * top_rate], axis=1)[:, :, None].repeat(2, axis=2)
    sums[:, 1, 1] *= own
    return np.stack([np.ones(len(n)), own], axis=1), sums


def test_weights_grow_with_the_clicks() -> None:
    ratio, sums = two_positions([100, 1000, 10_000, 10_000], [0.4, 0.5, 0.2, 0.6])
    weight, spread = credibility(ratio, sums, np.array([1, 0.4]), np.full((4, 2), True))
    assert 0 < weight[0, 1] < weight[1, 1] < weight[2, 1] == weight[3, 1] < 1
    assert spread[1] == pytest.approx(np.var([0.2 / 0.4, 0.6 / 0.4], ddof=1), rel=0.2)  # these two tell most
    assert (spread[0], weight[:, 0].tolist()) == (0, [0, 0, 0, 0])


def test_curves_that_do_not_differ_are_one() -> None:
    ratio, sums = two_positions([100, 100], [0.4, 0.4])
    for usable in (np.full((2, 2), True), np.full((2, 2), False)):
        weight, spread = credibility(np.where(usable, ratio, np.nan), sums * usable[0, 0], np.array([1, 0.4]), usable)
        assert (weight.tolist(), spread.tolist()) == ([[0, 0], [0, 0]], [0, 0])


def test_positions_where_categories_look_alike_learn_from_the_others() -> None:
    ratio, sums = two_positions([1000, 1000], [0.3, 0.5])
    ratio, sums = (np.concatenate([each, each[..., 1:]], axis=-1) for each in (ratio, sums))
    ratio[:, 2] = 0.4
    _, spread = credibility(ratio, sums, np.array([1, 0.4, 0.4]), np.full((2, 3), True))
    alone = credibility(ratio[:, :2], sums[:, :, :2], np.array([1, 0.4]), np.full((2, 2), True))[1]
    assert spread[1] == alone[1]
    noise = 1 / (1000 * 0.5 * 0.4) + 1 / (1000 * 0.5)
    assert spread[2] == pytest.approx(
        (2 * (0.1 / 0.4) ** 2 / noise - 1 - 1) / (2 * (2 - 1) / noise)
    )  # the mean of both


@pytest.mark.parametrize("kind", ["shuffle", "swap"])
def test_one_category_has_the_overall_curve(tmp_path: Path, kind: str) -> None:
    log = shuffled(3, 500, queries=50) if kind == "shuffle" else swapped(40, 15, lists=100)
    dataset = prepared(tmp_path, log.with_columns(category=pl.lit("all")))
    found, curve = fit_by_category(dataset), fit_randomised(dataset)
    assert found.curves == {"all": curve}
    assert found.overall == curve
    assert fit_propensity("randomised", dataset, by="category") == found


def test_shrinking_is_better_than_not_to() -> None:
    rng = np.random.default_rng(5)
    places = np.arange(1, K + 1)
    squares: dict[str, list[float]] = {"shrunk": [], "own": [], "overall": []}
    z = []
    for seed in range(6):
        steepness = {f"{c:02}": gamma for c, gamma in enumerate(rng.normal(1, 0.3, size=30))}
        truth = places ** -np.array(list(steepness.values()))[:, None]
        counts, offsets, overall = counted(shuffled(seed, 6000, steepness=steepness))
        curves = category_curves(counts, offsets, overall, min_clicks=MIN_CLICKS)
        shrunk = np.array([(curve or overall).values for curve in curves])
        own = np.where([[curve is not None] for curve in curves], group_rates(counts, offsets)[0], overall.values)
        for name, values in (("shrunk", shrunk), ("own", own), ("overall", np.array(overall.values))):
            squares[name].append(float(((values - truth) ** 2).mean()))
        errors = np.array([curve.errors for curve in curves if curve is not None and curve.errors is not None])
        z.append(((shrunk - truth)[[curve is not None for curve in curves]] / np.maximum(errors, 1e-12))[:, 1:])
    shrunk, own, overall = (np.mean(squares[name]) for name in ("shrunk", "own", "overall"))
    assert shrunk < 0.9 * min(own, overall)
    assert np.sqrt((np.concatenate(z) ** 2).mean()) == pytest.approx(1, rel=0.2)  # errors count the shrinkage too


# Against the truth


def test_the_truth_of_each_category(tmp_path: Path) -> None:
    found = fit_by_category(prepared(tmp_path, shuffled(0, 20_000)))
    assert list(found.curves) == sorted(STEEPNESS)
    for name, gamma in STEEPNESS.items():
        curve = found.curves[name]
        truth = np.arange(1, K + 1) ** -gamma
        assert (curve.values[0], np.array(curve.errors)[0]) == (1, 0)
        assert (np.abs(np.array(curve.values) - truth)[1:] < 3 * np.array(curve.errors)[1:]).all()
        assert (np.array(curve.errors) < 0.1 * truth**0.5).all()  # so that this says something
    assert (np.abs(found.curves["news"].values - np.array(found.curves["tools"].values))[1:] > 0.3).all()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [6000, 500])
def test_stated_errors_are_the_spread_over_logs(queries: int) -> None:
    own, own_error, shrunk, shrunk_error = [], [], [], []
    for seed in range(LOGS):
        counts, offsets, overall = counted(shuffled(seed, 6000, queries=queries))
        ratio, error = group_rates(counts, offsets)
        curves = [
            curve for curve in category_curves(counts, offsets, overall, min_clicks=MIN_CLICKS) if curve is not None
        ]
        own.append(ratio)
        own_error.append(error)
        shrunk.append([curve.values for curve in curves])
        shrunk_error.append([curve.errors for curve in curves])
    truth = np.arange(1, K + 1) ** -np.array([[STEEPNESS[name]] for name in sorted(STEEPNESS)])
    # A deviation estimated from n values has a relative error of about 1/√(2n); 3.5 of them, since there are 12 cells.
    chance = 3.5 / (2 * LOGS) ** 0.5
    # That the spread of categories is an estimate is not counted: with three of them errors are some 10 % too small.
    for values, errors, more in ((own, own_error, 0.0), (shrunk, shrunk_error, 0.1)):
        deviation, stated = (np.array(values) - truth)[:, :, 1:], np.array(errors, dtype=np.float64)[:, :, 1:]
        assert np.sqrt((deviation**2).mean(axis=0)) == pytest.approx(stated.mean(axis=0), rel=chance + more)
    z = ((np.array(own) - truth) / np.maximum(own_error, 1e-12))[:, :, 1:]
    assert (np.abs(z.mean(axis=0)) * LOGS**0.5 < 3.5).all()


# Rare, unseen and missing


def test_rare_categories_take_the_overall_curve(tmp_path: Path) -> None:
    log = shuffled(1, 2000)
    first = pl.int_range(pl.len()).over("category") < 8
    log = log.with_columns(
        category=pl.when(first & (pl.col("category") == "news")).then(pl.lit("rare")).otherwise("category")
    )
    found = fit_by_category(prepared(tmp_path, log))
    assert set(found.curves) == set(STEEPNESS)
    table = found.examination(items(["games", "rare", "never seen", None, "tools"]))
    expected = [found.curves["games"], found.overall, found.overall, found.overall, found.curves["tools"]]
    np.testing.assert_array_equal(table, [curve.values for curve in expected])
    none = fit_by_category(prepared(tmp_path / "again", log), min_clicks=10**6)
    assert (none.curves, none.overall) == ({}, found.overall)
    np.testing.assert_array_equal(none.examination(items(["games"])), [found.overall.values])


def test_as_many_clicks_as_required_are_enough() -> None:
    """Two categories, 8 and 12 queries with a click at 1: curves of their own from exactly so many on."""

    def queries(number: int, clicks_at_two: int) -> list[list[list[int]]]:
        return [[[500, 500], [100, clicks_at_two], [500, 500], [100, 100]]] * number

    counts = np.array(queries(8, 20) + queries(12, 80), dtype=np.int32)
    offsets, overall = np.array([0, 8, 20]), ExaminationCurve("randomised", (1.0, 0.5), (0.0, 0.01))
    for required, has_curve in ((8, [True, True]), (9, [False, True]), (12, [False, True]), (13, [False, False])):
        found = category_curves(counts, offsets, overall, min_clicks=required)
        assert [curve is not None for curve in found] == has_curve
    first, second = (curve.values[1] for curve in category_curves(counts, offsets, overall, min_clicks=8) if curve)
    assert (first, second) == pytest.approx((0.2, 0.8), abs=0.02)  # so many clicks are hardly shrunk
    alone = category_curves(counts, offsets, overall, min_clicks=12)[1]
    assert alone is not None
    assert alone.values[1] == 0.5  # one category says nothing of how much categories differ


def test_items_that_were_not_shown_are_not_compared(tmp_path: Path) -> None:
    """A candidate below the last position in every list changes nothing."""
    log = swapped(8, 2)
    below = log.filter(pl.col("position") == 2).with_columns(
        pl.lit(3, pl.Int64).alias("position"),
        pl.lit(3, pl.Int64).alias("ranked_position"),
        pl.lit(0, log.schema["click"]).alias("click"),
        pl.col("item_id") + "-below",
    )
    urank.prepare(urank.read(pl.concat([log, below])), tmp_path / "prepared", valid=0, test=0, positions=2)
    curve = fit_randomised(Dataset(tmp_path / "prepared"))
    assert curve == fit_randomised(prepared(tmp_path / "without", log))


def test_clicks_of_one_query_count_once(tmp_path: Path) -> None:
    log = shuffled(1, 2000, queries=MIN_CLICKS - 1)
    assert fit_by_category(prepared(tmp_path, log)).curves == {}


def test_what_a_category_does_not_tell_of_a_position_the_others_do(tmp_path: Path) -> None:
    log = shuffled(1, 4000).filter((pl.col("category") != "news") | (pl.col("position") != 3))
    found = fit_by_category(prepared(tmp_path, log))
    curve = found.curves["news"]
    assert curve.values[2] == found.overall.values[2]
    assert curve.errors is not None
    assert found.overall.errors is not None
    assert curve.errors[2] > 2 * found.overall.errors[2]  # since categories are known to differ


def test_missing_categories_count_for_the_overall_curve_alone(tmp_path: Path) -> None:
    log = shuffled(1, 1000)
    named = fit_by_category(prepared(tmp_path / "a", log))
    log = log.with_columns(category=pl.when(pl.col("category") != "news").then("category"))
    found = fit_by_category(prepared(tmp_path / "b", log))
    assert (list(found.curves), found.overall) == (["games", "tools"], named.overall)
    nothing = log.with_columns(category=pl.lit(None, pl.String))
    assert fit_by_category(prepared(tmp_path / "c", nothing)) == ByCategory(found.name, "category", named.overall, {})


def test_any_categorical_column_may_be_named(tmp_path: Path) -> None:
    log = shuffled(1, 1000)
    dataset = prepared(tmp_path / "a", log.rename({"category": "kind"}))
    found = fit_by_category(dataset, column="kind")
    expected = fit_by_category(prepared(tmp_path / "b", log))
    assert (found.columns, found.curves) == (("kind",), expected.curves)
    for column in ("f1", "category", "position"):
        with pytest.raises(ConfigError, match=f"column must name a categorical .* which has kind; got '{column}'"):
            fit_by_category(dataset, column=column)
    with pytest.raises(ConfigError, match="which has none; got 'category'"):
        fit_by_category(prepared(tmp_path / "c", log.drop("category")))
    with pytest.raises(ConfigError, match="min_clicks must be at least 1; got 0"):
        fit_by_category(dataset, column="kind", min_clicks=0)
    with pytest.raises(ConfigError, match="by can only be used with the method randomised; got the method 'harvest'"):
        fit_propensity("harvest", dataset, by="kind")


def test_policies_are_those_of_randomised_lists(tmp_path: Path) -> None:
    log = shuffled(1, 1000)
    plain = log.with_columns(click=1, session_id=-1 - pl.col("session_id"), policy=pl.lit("plain"))
    dataset = prepared(
        tmp_path / "a", pl.concat([log.with_columns(policy=pl.lit("random")), plain], how="vertical_relaxed")
    )
    with pytest.raises(DataError, match="it has plain, random"):
        fit_by_category(dataset)
    assert fit_by_category(dataset, policies=["random"]) == fit_by_category(prepared(tmp_path / "b", log))


# As a propensity, and as a file


def test_clicks_are_weighed_by_category() -> None:
    found = ByCategory("x", "kind", ExaminationCurve("x", (1.0, 0.5)), {"a": ExaminationCurve("x", (1.0, 0.25))})
    assert inverse_propensity(found, items(["a", "a"], "kind")).tolist() == [1, 1 / 0.25]
    assert inverse_propensity(found, items(["a", "b"], "kind")).tolist() == [1, 1 / 0.5]
    with pytest.raises(DataError, match="must cover all positions of the log, up to 3; it covers 2"):
        inverse_propensity(found, items(["a", "b", "b"], "kind"))


ODD = ByCategory(
    "randomised by kind",
    "kind",
    ExaminationCurve("randomised", (1.0, 0.1 + 0.2), (0.0, 0.01)),
    {
        name: ExaminationCurve("randomised", (1.0, 1 / 3), (0.0, 0.02))
        for name in ("", "ä „b“", 'a "quoted"\n', "column", "7")
    },
)


@pytest.mark.parametrize("propensity", [ODD, ByCategory("x", "c", ODD.overall, {})], ids=["odd names", "no categories"])
def test_comes_back_from_a_file(tmp_path: Path, propensity: ByCategory) -> None:
    save_propensity(propensity, tmp_path / "curves.json")
    assert load_propensity(tmp_path / "curves.json") == ByCategory(
        propensity.name, propensity.column, propensity.overall, propensity.curves
    )


@pytest.mark.parametrize(
    "change",
    [
        {"column": 3},
        {"column": None},
        {"overall": None},
        {"overall": {"values": [1.0], "errors": None}},
        {"categories": None},
        {"categories": ["a"]},
        {"categories": {"a": None}},
        {"categories": {"a": {"values": [1.0, 0.5]}}},
        {"categories": {"a": {"values": [1.0, -0.5], "errors": None}}},
        {"categories": {"a": {"values": [1.0, 0.5, 0.3], "errors": None}}},
        {"categories": {"a": {"values": [1.0, 0.5], "errors": [0.0]}}},
        {"version": "x"},
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "curves.json"
    save_propensity(ODD, path)
    told = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(told | change))
    with pytest.raises(DataError, match="is not an estimate of `urank examination`, or it is damaged"):
        load_propensity(path)
    for key in ("overall", "categories", "name"):
        path.write_text(json.dumps({name: value for name, value in told.items() if name != key}))
        with pytest.raises(DataError, match="is not an estimate"):
            load_propensity(path)
    path.write_text(json.dumps(told | {"version": 99}))
    with pytest.raises(DataError, match="newer version"):
        load_propensity(path)
