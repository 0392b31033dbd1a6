"""One seed of the app store: the data of learners, the metrics, and that these are right about the truth."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from lab.tiny import MARKET, TINY, config
from urank.errors import DataError
from urank.lab.appstore_experiment import STORE_METHODS, STORE_STEPS, Orders, StoreTrial, visit_metrics
from urank.lab.experiment_results import STORE_METRICS, Reproduction, store_metrics
from urank.log.dataset import Dataset
from urank.progress import silent

K = MARKET["positions"]
VISITS = TINY["store"]["test_visits"]


def fixed(positions: list[int] | NDArray[np.int64]) -> Orders:
    """The same order for every cut-off."""
    return lambda cutoff: np.array(positions)


def visits_of(dataset: Dataset) -> set[str]:
    blocks = (block for split in ("train", "valid") for block in dataset.blocks(split, ["position"]))
    return {visit for block in blocks for visit in block.lists["query_id"].to_pylist()}


# --- what judges a method ---------------------------------------------------------------------------------------------


def test_judged_by_arithmetic() -> None:
    """Two visits, K = 4; the second has two items only. Scenario 2 has an order of its own."""
    Q = [[1, 0.5, 0.25, 0.2], [1, 0.8, 0.6, 0.5], [1, 0.5, 0.25, 0.2], [1, 0.4, 0.3, 0.1], [1, 0.8, 0.6, 0.5], [1] * 4]
    table = [[0.4 * each for each in row] for row in Q]
    test = pl.DataFrame(
        {
            "query_id": ["a", "a", "a", "a", "b", "b"],
            "position": [2, 1, 4, 3, 1, 2],
            "click": [1, 0, 1, 1, 1, 0],
            "value": [2.0, 5.0, 3.0, 0.5, 4.0, 7.0],
            "table": table,
        }
    )
    found = visit_metrics(test, np.array(Q), fixed([1, 2, 3, 4, 2, 1]), fixed([4, 3, 2, 1, 1, 2]))
    assert found.columns == ["query_id", *(name + end for name in STORE_METRICS for end in ("", " true"))]
    assert found["query_id"].to_list() == ["a", "b"]
    a, b = found.rows(named=True)
    # Clicks on the first, third and fourth item of a, from 2, 4 and 3 to 1, 3 and 4; and in the other order.
    carried = [1 / 0.5, 0.25 / 0.2, 0.1 / 0.3]
    assert a["#click@1"] == pytest.approx(carried[0])
    assert a["#click@3"] == pytest.approx(carried[0] + carried[1])
    assert a["#click@5"] == a["#click"] == pytest.approx(sum(carried))
    bids = [0.2 / 0.5 * 2.0, 0.5 / 0.2 * 3.0, 1 / 0.3 * 0.5]
    assert a["Revenue@1"] == pytest.approx(bids[2])
    assert a["Revenue@3"] == pytest.approx(bids[2] + bids[1])
    assert a["Revenue@5"] == a["Revenue"] == pytest.approx(sum(bids))
    assert (b["#click@1"], b["#click"]) == (0, pytest.approx(0.8 / 1))
    assert b["Revenue@1"] == b["Revenue"] == pytest.approx(1 / 1 * 4.0)
    # The true ones, whoever clicked.
    assert a["#click@3 true"] == pytest.approx(0.4 * (1 + 0.8 + 0.25))
    assert a["#click true"] == pytest.approx(0.4 * (1 + 0.8 + 0.25 + 0.1))
    assert a["Revenue true"] == pytest.approx(0.4 * (0.2 * 2 + 0.6 * 5 + 0.5 * 3 + 1 * 0.5))
    assert (b["#click@1 true"], b["#click true"]) == pytest.approx((0.4 * 1, 0.4 * (1 + 0.8)))
    assert b["Revenue@1 true"] == pytest.approx(0.4 * 4.0)


def test_each_cutoff_may_have_an_order_of_its_own() -> None:
    test = pl.DataFrame(
        {"query_id": ["a", "a"], "position": [1, 2], "click": [1, 1], "value": [1.0, 1.0], "table": [[0.5, 0.4]] * 2}
    )
    asked: list[int] = []

    def orders(cutoff: int) -> NDArray[np.int64]:
        asked.append(cutoff)
        return np.array([1, 2] if cutoff == 1 else [2, 1])

    found = visit_metrics(test, np.array([[1, 0.5], [1, 0.25]]), orders, fixed([1, 2])).row(0, named=True)
    assert sorted(asked) == sorted(store_metrics("#click", 2).values()) == [1, 2, 2, 2]
    assert found["#click@1"] == 1 / 1  # the first item, where it was
    assert found["#click@3"] == found["#click"] == 0.5 / 1 + 1 / 0.25
    assert found["Revenue"] == 1 + 1


def again(trial: StoreTrial, key: str) -> pl.DataFrame:
    """The metrics of a method without arrays: joins, filters and sums by visit."""
    curves = {**trial.propensity.curves, "": trial.propensity.overall}
    known = pl.DataFrame(
        [(name, k + 1, value) for name, curve in curves.items() for k, value in enumerate(curve.values)],
        schema=["known", "position", "Q"],
        orient="row",
    ).with_columns(pl.col("position").cast(pl.Int64))
    named = pl.when(pl.col("category").is_in(list(trial.propensity.curves))).then("category").otherwise(pl.lit(""))
    shown = trial.test.with_columns(pl.col("position").cast(pl.Int64), known=named, row=pl.int_range(pl.len()))
    shown = shown.join(known.rename({"Q": "before"}), on=["known", "position"], maintain_order="left")
    told = trial.test.select("query_id").unique(maintain_order=True)
    trained = STORE_METHODS[key].train(trial, silent)
    for scenario, bids in (("#click", False), ("Revenue", True)):
        orders = trained[bids]
        for metric, cutoff in store_metrics(scenario, K).items():
            placed = shown.with_columns(position=pl.Series(orders(cutoff))).filter(pl.col("position") <= cutoff)
            placed = placed.join(known, on=["known", "position"])
            worth = pl.col("value").cast(pl.Float64) if bids else pl.lit(1.0)
            sums = placed.group_by("query_id").agg(
                (pl.col("Q") / pl.col("before") * pl.col("click") * worth).sum().alias(metric),
                (pl.col("table").list.get(pl.col("position") - 1) * worth).sum().alias(f"{metric} true"),
            )
            told = told.join(sums, on="query_id", how="left", maintain_order="left")
    return told


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_results_of_a_run_by_joins_and_sums(everything: tuple[Reproduction, Path], seed: int) -> None:
    trial = StoreTrial(everything[1] / f"seed-{seed}" / "store", config("table3").seeded(seed).store)
    assert set(trial.test["category"]) - set(trial.propensity.curves), "the overall curve is not used"
    kept = ("store-logged", "store-deepfm", "store-match", "store-match-cutoff", "store-ctr1-truth", "store-km")
    for key in kept:  # those whose models were kept
        found, expected = pl.read_parquet(trial.folder / STORE_STEPS[key].output), again(trial, key)
        assert found.columns == [*expected.columns, "seconds", "commit", "date"]
        assert found["query_id"].equals(expected["query_id"])
        assert found.height == VISITS
        for name in expected.columns[1:]:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=f"{key} {name}")


@pytest.mark.slow
def test_as_logged_counts_what_was_downloaded(everything: tuple[Reproduction, Path]) -> None:
    """Nothing is carried anywhere: the debiased downloads are those of the log."""
    folder = everything[1] / "seed-0" / "store"
    test = pl.read_parquet(folder / "test.parquet")
    found = pl.read_parquet(folder / "results" / "store-logged.parquet")
    for metric, most in store_metrics("#click", K).items():
        counted = test.filter(pl.col("position") <= most).group_by("query_id", maintain_order=True).agg(pl.sum("click"))
        assert found.join(counted, on="query_id").select((pl.col(metric) - pl.col("click")).abs().max()).item() < 1e-9


@pytest.mark.slow
def test_no_order_is_truly_better_than_the_oracle_made_for_it(everything: tuple[Reproduction, Path]) -> None:
    results = pl.read_parquet(everything[1] / "store-results.parquet")
    bests = {"#click true": "store-km", "Revenue true": "store-km"}
    bests |= {"#click@1 true": "store-ctr1-truth", "Revenue@1 true": "store-ctr1-truth"}
    for metric, key in bests.items():
        best = results.filter(pl.col("method") == key).select("seed", "query_id", most=metric)
        joined = results.join(best, on=["seed", "query_id"])
        assert joined.height == results.height
        assert (joined[metric] <= joined["most"] + 1e-9).all(), metric


def test_debiased_is_true_on_average(store: StoreTrial) -> None:
    """Clicks drawn again and again where the items were shown, with the true attention: each metric, of an order for
    downloads and one for bids, has the true value as its mean, within four standard errors."""
    rng = np.random.default_rng(0)
    at = store.test["position"].to_numpy() - 1
    chance = store.table[np.arange(len(at)), at]
    orders = STORE_METHODS["store-km"].train(store, silent)

    def drawn(examination: NDArray[np.float64]) -> pl.DataFrame:
        """The mean over visits, a row for each time."""
        clicks = (pl.Series("click", (rng.random(len(at)) < chance).astype(np.int8)) for _ in range(400))
        judged = (visit_metrics(store.test.with_columns(each), examination, *orders) for each in clicks)
        return pl.concat(each.drop("query_id").mean() for each in judged)

    def errors(means: pl.DataFrame, metric: str) -> float:
        """How many standard errors lie between the mean and the truth."""
        values = means[metric].to_numpy()
        return float(abs(values.mean() - means[f"{metric} true"][0]) / (values.std(ddof=1) / len(values) ** 0.5))

    means = drawn(store.table / store.table[:, :1])
    for metric in STORE_METRICS:
        assert means[f"{metric} true"].n_unique() == 1  # the truth does not depend on the clicks
        assert errors(means, metric) < 4, metric
    # With attention that never falls, downloads are carried as they are, and the test sees it.
    assert errors(drawn(np.ones_like(store.table)), "#click") > 8


# --- what a learner gets ----------------------------------------------------------------------------------------------

FEATURES = {"device", "region", "category", "app", "downloads", "thumbnail"}
FEATURES |= {f"{kind}_{number}" for kind in ("taste", "genre") for number in (1, 2, 3, 4)}


def test_a_learner_sees_features_and_clicks_alone(store: StoreTrial) -> None:
    for bids in (False, True):
        dataset = store.dataset(bids=bids)
        assert set(dataset.features) == FEATURES
        assert dataset.has("value") is bids
    written = list((store.folder / "data").rglob("*.parquet"))
    for path in written:
        hidden = {"user_id", "policy", "timestamp", "table", *(() if "bids" in path.parts else ("value",))}
        assert not hidden & set(pl.read_parquet_schema(path)), path
    # The logs with more in them are gone.
    assert {path.relative_to(store.folder / "data").parts[0] for path in written} == {"clicks", "bids"}
    assert set(store.featurizer.names) == FEATURES


def test_the_last_day_judges_and_the_days_before_teach(store: StoreTrial) -> None:
    days = MARKET["log_days"]
    learned = visits_of(store.dataset(bids=False))
    assert {visit.split("-")[0] for visit in learned} == {f"live+{day}" for day in range(1, days)}
    assert visits_of(store.dataset(bids=True)) == learned
    judging = store.test["query_id"]
    assert judging.str.starts_with(f"live+{days}-").all()
    assert judging.n_unique() == VISITS
    assert store.test["policy"].unique().to_list() == ["production"]


def test_a_ranker_is_given_no_truth(store: StoreTrial) -> None:
    for bids in (False, True):
        block = store.block(bids=bids)
        names = {"query_id", "item_id", "user_id", *FEATURES, *(("value",) if bids else ())}
        assert set(block.items.column_names) == names
        assert block.lists.column_names == ["query_id"]
        assert block.lists["query_id"].to_pylist() == store.test["query_id"].unique(maintain_order=True).to_list()
        assert block.offsets.tolist() == list(range(0, VISITS * K + 1, K))


def test_the_order_of_items_tells_nothing(store: StoreTrial) -> None:
    """Neither where they were shown nor whether they were downloaded: what breaks ties is chance."""
    lists = store.test.group_by("query_id", maintain_order=True).agg("position")
    assert lists.select(pl.col("position").list.sort() == list(range(1, K + 1))).to_series().all()
    sorted_ones = sum(each == list(range(1, K + 1)) for each in lists["position"].to_list())
    assert sorted_ones <= 3  # of 80, each with a chance of 1/720
    place = store.test.select("position", "click", place=pl.int_range(pl.len()).over("query_id"))
    # A correlation of n independent pairs has a standard error of 1/√n.
    for other in ("position", "click"):
        assert abs(np.corrcoef(place["place"], place[other])[0, 1]) < 4 / place.height**0.5
    assert store.test["query_id"].rle_id().max() + 1 == VISITS  # those of a visit lie together


@pytest.mark.parametrize("method", ["store-svm-truth", "store-lambdarank-none", "store-dla", "store-urank"])
def test_the_truth_reaches_no_learner(store: StoreTrial, tmp_path: Path, method: str) -> None:
    """Other clicks, positions and tables on the last day: the same orders."""
    honest, fooled = (StoreTrial(tmp_path / name, store.config) for name in ("honest", "fooled"))
    for each in (honest, fooled):
        shutil.copytree(store.folder, each.folder)
    lies = {
        "click": 1 - pl.col("click"),
        "position": K + 1 - pl.col("position"),
        "table": pl.col("table").list.reverse(),
    }
    store.test.with_columns(**lies).write_parquet(fooled.folder / "test.parquet")
    for step in STORE_METHODS[method].needs:
        for each in (honest, fooled):
            STORE_STEPS[step].run(each, silent)
    for one, other in zip(
        *([orders(K) for orders in STORE_METHODS[method].train(each, silent)] for each in (honest, fooled)), strict=True
    ):
        assert np.array_equal(one, other)
        assert np.array_equal(np.sort(one.reshape(-1, K), axis=1), np.tile(np.arange(1, K + 1), (VISITS, 1)))


def test_with_bids_an_order_is_for_what_downloads_are_worth(store: StoreTrial) -> None:
    for bids in (False, True):
        first = store.table[:, 0] * (store.test["value"].to_numpy() if bids else 1.0)
        order = STORE_METHODS["store-ctr1-truth"].train(store, silent)[bids](K)
        assert np.allclose(first[order == 1], first.reshape(-1, K).max(axis=1))
    one, other = (orders(K) for orders in STORE_METHODS["store-km"].train(store, silent))
    assert not np.array_equal(one, other)


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_data(store: StoreTrial, tmp_path: Path) -> None:
    again = StoreTrial(tmp_path / "again", store.config)
    again.make_data(silent)
    assert again.test.equals(store.test)
    for path in (store.folder / "data").rglob("*.parquet"):
        other = again.folder / path.relative_to(store.folder)
        assert pl.read_parquet(other).equals(pl.read_parquet(path))
    moved = StoreTrial(tmp_path / "moved", store.config.seeded(1))
    moved.make_data(silent)
    assert not moved.test["thumbnail"].equals(store.test["thumbnail"])


def test_too_little_random_traffic_is_refused_before_anything_is_trained(store: StoreTrial, tmp_path: Path) -> None:
    few = store.config.market.model_copy(update={"random_visits": 3})
    own = StoreTrial(tmp_path / "seed-0" / "store", store.config.model_copy(update={"market": few}))
    with pytest.raises(DataError, match=r"at every position|position 1"):
        own.make_data(silent)
    assert list(tmp_path.rglob("*")) in (
        [],
        [tmp_path / "seed-0"],
        [tmp_path / "seed-0", tmp_path / "seed-0" / "store"],
    )
