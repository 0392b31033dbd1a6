"""All tables and figures at a size of seconds, and what is refused before anything is run."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import combinations
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from lab.tiny import ONE_SETTING, TINY, config, half_written
from urank.errors import ConfigError, UrankError
from urank.lab.appstore_experiment import STORE_METHODS
from urank.lab.experiment import EXPERIMENTS
from urank.lab.experiment_results import METRICS, STORE_METRICS, Reproduction
from urank.lab.letor_experiment import METHODS
from urank.lab.letor_simulation import simulate
from urank.lab.reproduction import experiment_names, reproduce

Everything = tuple[Reproduction, Path]


@pytest.mark.slow
def test_a_row_for_each_seed_method_and_query(everything: Everything) -> None:
    found, folder = everything
    results = pl.read_parquet(folder / "results.parquet")
    queries = [
        pl.read_parquet(folder / f"seed-{seed}" / "candidates.parquet")["query_id"].n_unique() for seed in (0, 1)
    ]
    assert sum(queries) > 20
    assert results.height == len(METHODS) * sum(queries)
    assert found.queries == sum(queries)
    counts = results.group_by("seed", "method").len()
    assert counts.height == 2 * len(METHODS)
    assert set(results["method"]) == set(METHODS)
    assert {*counts["len"]} == {*queries}
    assert results.select("seed", "method", "query_id").is_unique().all()


@pytest.mark.slow
def test_no_two_methods_are_the_same(everything: Everything) -> None:
    """Hardly trained as they are: a row that got the settings or the model of another would show."""
    results = pl.read_parquet(everything[1] / "results.parquet").sort("seed", "query_id")
    orders = {key: str(results.filter(pl.col("method") == key)["position"].to_list()) for key in METHODS}
    same = [keys for keys in combinations(orders, 2) if orders[keys[0]] == orders[keys[1]]]
    assert not same


@pytest.mark.slow
def test_no_query_earns_more_than_the_matching_of_the_truth(everything: Everything) -> None:
    results = pl.read_parquet(everything[1] / "results.parquet")
    best = results.filter(pl.col("method") == "km").select("seed", "query_id", most="#Click", most_ctr="CTR")
    joined = results.join(best, on=["seed", "query_id"])
    assert joined.height == results.height
    assert (joined["#Click"] <= joined["most"] + 1e-9).all()
    assert (joined["CTR"] <= joined["most_ctr"] + 1e-9).all()
    means = {row.key: row.mean["#Click"] for row in everything[0].rows}
    assert max(means, key=lambda key: means[key]) == "km"


@pytest.mark.slow
def test_metrics_follow_from_the_positions(everything: Everything) -> None:
    """Of every method and query: the clicks by the true table, summed up again."""
    _, folder = everything
    results = pl.read_parquet(folder / "results.parquet")
    for seed in (0, 1):
        truth = pl.read_parquet(folder / f"seed-{seed}" / "candidates.parquet").select("item_id", "table")
        own = results.filter(pl.col("seed") == seed)
        placed = own.select("method", "query_id", "item_id", "position").explode("item_id", "position")
        clicks = placed.join(truth, on="item_id").with_columns(pl.col("table").list.get(pl.col("position") - 1))
        again = clicks.group_by("method", "query_id").agg(pl.col("table").cast(pl.Float64).sum())
        joined = own.join(again, on=["method", "query_id"])
        assert joined.height == own.height
        assert np.allclose(joined["#Click"], joined["table"], atol=1e-6)


@pytest.mark.slow
def test_all_of_it_is_there(everything: Everything) -> None:
    found, folder = everything
    assert found.what == ONE_SETTING
    assert [row.name for row in found.architectures] == ["A1 (vector)", "A2 (position)"]
    assert all(0.3 < auc < 1 for row in found.architectures for auc in (row.train, row.test, row.valid))
    assert len(found.claims) == 2 * 3 + 2 * 3 + 2 + 1
    assert (len(found.architecture_claims), len(found.curve_claims)) == (2, 2)
    assert len(found.differences) == 6
    assert found.seconds > 0
    assert found.data.startswith("60 generated queries, 8 features")
    assert "; a simulated app store with 200 users and 40 apps; " in found.data
    assert found.data.endswith("; a live test of 6 days in one with 1,500 users")
    table = pl.read_parquet(folder / "table1.parquet")
    assert table["method"].to_list() == [row.key for row in found.rows]
    assert table["#Click"].to_list() == [row.mean["#Click"] for row in found.rows]
    assert pl.read_parquet(folder / "table2.parquet")["test"].to_list() == [row.test for row in found.architectures]
    assert half_written(folder) == []
    assert not [*folder.glob("seed-*/data"), *folder.glob("seed-*/store/data")]


@pytest.mark.slow
def test_all_of_the_store_is_there(everything: Everything) -> None:
    found, folder = everything
    visits = TINY["store"]["test_visits"]
    assert [row.key for row in found.store] == list(STORE_METHODS)
    assert (len(found.store_claims), found.visits) == (8 + 2 + 8, 2 * visits)
    table = pl.read_parquet(folder / "table3.parquet")
    assert table["method"].to_list() == list(STORE_METHODS)
    for metric in STORE_METRICS:
        assert table[metric].to_list() == [row.mean[metric] for row in found.store]
        assert table[f"{metric} true"].to_list() == [row.true[metric] for row in found.store]
        assert table[f"{metric} p"].to_list() == [row.p_value.get(metric) for row in found.store]
        assert table[f"{metric} true p"].to_list() == [row.true_p_value.get(metric) for row in found.store]
        assert table[f"{metric} published"].to_list() == [row.published.get(metric) for row in found.store]
    results = pl.read_parquet(folder / "store-results.parquet")
    assert results.height == len(STORE_METHODS) * found.visits
    assert results.select("seed", "method", "query_id").is_unique().all()
    assert not results.select(pl.col(pl.Float64).is_nan().any()).row(0).count(True)


@pytest.mark.slow
def test_the_live_test_is_there(everything: Everything) -> None:
    found, folder = everything
    results = pl.read_parquet(folder / "live-test.parquet")
    assert results.height == 2 * 3 * 2  # seeds, periods and metrics
    assert len(found.live) == 3 * 2
    assert len(found.live_claims) == 1 + 2 + 2 + 1
    assert found.live[0].lift == pytest.approx(results.filter(period="A/A before", metric="CTR")["lift"].mean())
    assert set(results.filter(pl.col("period") != "A/B")["true_lift"]) == {0.0}
    assert not list(folder.glob("seed-*/store/live"))  # the exposure logs are removed


@pytest.mark.slow
def test_no_two_methods_of_the_store_are_the_same(everything: Everything) -> None:
    """But for the matching and that for the cut-off, which are the same where all positions count."""
    results = pl.read_parquet(everything[1] / "store-results.parquet").sort("seed", "query_id")
    for metric, same in (("#click true", 1), ("#click@3 true", 0), ("Revenue true", 1), ("Revenue@3 true", 0)):
        earned = {str(results.filter(pl.col("method") == key)[metric].to_list()) for key in STORE_METHODS}
        assert len(earned) == len(STORE_METHODS) - same, metric


@pytest.mark.slow
def test_settings_make_the_same_again(everything: Everything) -> None:
    found, folder = everything
    written = (folder / "settings.toml").read_text()
    assert found.settings == written
    assert config(**tomllib.loads(written)).same_settings(config())


@pytest.mark.slow
def test_json_holds_all_of_it(everything: Everything) -> None:
    found, _ = everything
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [row["key"] for row in told["rows"]] == [row.key for row in found.rows]
    assert told["rows"][0]["mean"] == dict(found.rows[0].mean)
    assert len(told["curves"]) == 4
    assert found.example is not None
    assert told["example"]["query"] == found.example.query
    assert told["example"]["positions"]["U-rank"] == found.example.positions["U-rank"].tolist()
    assert len(told["differences"]) == 6
    assert [row["true"] for row in told["store"]] == [dict(row.true) for row in found.store]
    assert [claim["text"] for claim in told["store_claims"]] == [claim.text for claim in found.store_claims]
    assert told["visits"] == found.visits
    assert all(isfinite(value) for row in told["rows"] for value in row["deviation"].values())


@pytest.mark.slow
def test_seeds_differ_and_the_first_stays(everything: Everything, tmp_path: Path) -> None:
    found, folder = everything
    results = pl.read_parquet(folder / "results.parquet").filter(pl.col("method") == "km")
    assert not np.isclose(*(results.filter(pl.col("seed") == seed)["#Click"].mean() for seed in (0, 1)))
    alone = reproduce(["fig-result-list"], tmp_path, seeds=1, workers=1, overrides=TINY | {"methods": ["km"]})
    mine = pl.read_parquet(tmp_path / "results.parquet").drop("seconds")
    assert mine.equals(results.filter(pl.col("seed") == 0).drop("seconds"))
    assert alone.rows == ()
    assert alone.example is not None
    assert found.example is not None
    assert alone.example.query == found.example.query
    told = alone.to_dict()
    assert (told["rows"], told["curves"]) == ([], [])


@pytest.mark.slow
def test_another_experiment_in_the_same_folder(everything: Everything) -> None:
    """What is there serves it, whatever the order of asking."""
    found, folder = everything
    kept = {name: (folder / name).read_bytes() for name in ("results.parquet", "table1.parquet", "table2.parquet")}
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("seed-*/*") if path.is_file()}
    again = reproduce(["table2"], folder, seeds=2, workers=1, overrides=TINY)
    assert again.architectures == found.architectures
    assert again.rows == ()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("seed-*/*") if path.is_file()} == before
    for name, content in kept.items():
        (folder / name).write_bytes(content)


@pytest.mark.slow
def test_the_store_alone(everything: Everything) -> None:
    """It needs nothing of the others, nor makes anything of theirs, and counts its own seconds."""
    found, folder = everything
    written = {name: (folder / name).read_bytes() for name in ("results.parquet", "table1.parquet", "table3.parquet")}
    again = reproduce(["table3"], folder, seeds=2, workers=1, overrides=TINY)
    assert again.store == found.store
    assert again.store_claims == found.store_claims
    assert (again.rows, again.claims, again.queries) == ((), (), 0)
    assert again.data == "a simulated app store with 200 users and 40 apps"
    assert 0 < again.seconds < found.seconds
    assert {name: (folder / name).read_bytes() for name in written} == written


def test_table_1_by_setting(tmp_path: Path) -> None:
    """Each setting has its users and its own folder."""
    overrides = TINY | {"methods": ["svm-none", "km"]}
    run: dict[str, Any] = {"seeds": 1, "workers": 1, "command": "urank reproduce users"}
    found = reproduce(["table1", "users"], tmp_path, **run, overrides=overrides)
    tables = {table.name: {row.key: row for row in table.rows} for table in found.sweeps["users"]}
    assert list(tables) == [f"users '{user}'" for user in ("item", "grid", "carousel", "fold", "neighbour", "patience")]
    assert {row.key: row.mean for row in found.rows} == {key: row.mean for key, row in tables["users 'item'"].items()}
    for name, rows in tables.items():
        if name == "users 'neighbour'":
            assert [*rows] == ["svm-none"]  # without a table there is no matching of the truth
        else:
            assert rows["km"].mean["#Click"] > rows["svm-none"].mean["#Click"]
    assert len({rows["svm-none"].mean["#Click"] for rows in tables.values()}) == len(tables)
    written = pl.read_parquet(tmp_path / "users.parquet")
    assert written["setting"].unique(maintain_order=True).to_list() == list(tables)
    assert sorted(path.name for path in (tmp_path / "settings").iterdir()) == [
        "carousel",
        "fold",
        "grid",
        "item",
        "neighbour",
        "patience",
    ]
    assert found.setting == "users of the kind 'item' (η 1.5, all features), relevance over 2^y_max − 1"
    assert found.provenance["command"] == "urank reproduce users"
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|", found.provenance["commit"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("results/*.parquet")}
    again = reproduce(["users"], tmp_path, **run, overrides=overrides)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("results/*.parquet")} == before
    assert str(again.sweeps) == str(found.sweeps)  # with one seed, deviations are NaN


@pytest.mark.parametrize("user", ["cascade", "neighbour"])
def test_users_without_a_table_are_judged_by_their_clicks(tmp_path: Path, user: str) -> None:
    simulation = {"simulation": {**TINY["simulation"], "user": user, "positions": 4}}
    run: dict[str, Any] = {"seeds": 1, "workers": 1}
    with pytest.raises(
        ConfigError, match=rf"simulation.user must have a click table for table1: .*'{user}'.*; got .*km"
    ):
        reproduce(["table1"], tmp_path / "refused", **run, overrides=TINY | simulation)
    overrides = TINY | simulation | {"methods": ["svm-none"]}
    with pytest.raises(ConfigError, match="must have a click table for fig-result-list"):
        reproduce(["fig-result-list"], tmp_path / "refused", **run, overrides=overrides)
    assert not (tmp_path / "refused").exists()
    reproduce(["table1"], tmp_path / "out", **run, overrides=overrides)
    results = pl.read_parquet(tmp_path / "out" / "results.parquet")
    made = simulate(config(**simulation).seeded(0).simulation)
    truth = made.candidates.select("item_id", made.oracle.truth_name)
    for row in results.head(5).iter_rows(named=True):
        order = [item for _, item in sorted(zip(row["position"], row["item_id"], strict=True))][:4]
        known = dict(truth.filter(pl.col("item_id").is_in(order)).iter_rows())
        if user == "cascade":
            reached = np.cumprod([1.0, *(1 - known[item] for item in order)])
            expected = sum(known[item] * share for item, share in zip(order, reached, strict=False))
        else:
            above = [0.0, *(known[item][0] for item in order)]
            expected = sum(known[item][k] * (1 - above[k] / 2) for k, item in enumerate(order))
        assert row["#Click"] == pytest.approx(expected, rel=1e-5)
        assert row["CTR"] == pytest.approx(expected / len(order), rel=1e-5)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "settings", "sentence"),
    [
        (["table1"], {"seeds": 0}, "seeds must be a whole number from 1 up; got 0"),
        (["table1"], {"dataset": "letor"}, "the paper's data sets are yahoo, mslr-web10k, istella-s; got 'letor'"),
        (["table1"], {"overrides": {"dataset": "letor"}}, "the paper's data sets are .*; got 'letor'"),
        (
            ["table1"],
            {"dataset": "yahoo"},
            "dataset names the given data, .*; got 'yahoo' alone",
        ),
        (["table1"], {"overrides": {"methods": ["svm"]}}, "methods of table1 must be some of svm-none, .*; got 'svm'"),
        (["table1"], {"overrides": {"methods": []}}, "methods of table1 must name at least one of svm-none"),
        (["table1"], {"overrides": {"methods": ["clicks"]}}, "methods of table1 must be some of .*; got 'clicks'"),
        (
            ["table3"],
            {"overrides": {"methods": ["km"]}},
            "methods of table3 must be some of store-logged, .*; got 'km'",
        ),
        (["table1"], {"overrides": {"methods": ["store-km"]}}, "methods of table1 must be some of .*; got 'store-km'"),
        (["table3"], {"overrides": {"methods": ["store-clicks"]}}, "methods of table3 must be some of store-logged"),
        (["table3"], {"overrides": {"methods": []}}, "methods of table3 must name at least one of store-logged"),
        (["table1", "table2"], {"overrides": {"methods": ["km"]}}, "methods of table2 must be urank-a1, .*; got km"),
    ],
)
def test_refused_before_anything_is_run(
    tmp_path: Path, what: list[str], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        reproduce(what, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_names_of_experiments() -> None:
    assert experiment_names("all") == list(EXPERIMENTS)
    assert experiment_names("table2") == ["table2"]
    with pytest.raises(ConfigError, match=r"there are the experiments table1, .*, and all; got 'table9'"):
        experiment_names("table9")


def quick(folder: Path, **settings: Any) -> Reproduction:
    return reproduce(["table1"], folder, seeds=1, workers=1, overrides=TINY | {"methods": ["km"]} | settings)


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    quick(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="results of other settings"):
        quick(tmp_path, swap_sessions=3)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="something else"):
        quick(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        quick(tmp_path / "file")
    (tmp_path / "settings.toml").write_text("[tool]\nof = 'another program'\n")
    with pytest.raises(ConfigError, match=r"tool is not a key of .*settings.toml"):
        quick(tmp_path)


def test_data_that_cannot_be_read_spoils_no_folder(tmp_path: Path) -> None:
    """Neither a path that is not there nor a file that is not of the form leaves a folder behind."""
    with pytest.raises(ConfigError, match=r"absent\.txt does not exist; data must be a LETOR file or a folder"):
        reproduce(["table1"], tmp_path / "out", data=str(tmp_path / "absent.txt"), seeds=1, workers=1, overrides=TINY)
    assert list(tmp_path.iterdir()) == []
    letor = tmp_path / "letor.txt"
    letor.write_text("0 qid:1 1:x\n")
    with pytest.raises(UrankError, match=r"letor\.txt"):
        reproduce(["table1"], tmp_path / "out", data=str(letor), seeds=1, workers=1, overrides=TINY)
    assert not (tmp_path / "out").exists()
    rng = np.random.default_rng(0)
    letor.write_text(
        "".join(
            f"{rng.integers(5)} qid:{q} " + " ".join(f"{j}:{rng.random():.3f}" for j in range(1, 9)) + "\n"
            for q in range(1, 61)
            for _ in range(12)
        )
    )
    overrides = TINY | {"methods": ["svm-none", "km"]}
    found = reproduce(
        ["table1"], tmp_path / "out", data=str(letor), dataset="yahoo", seeds=1, workers=1, overrides=overrides
    )
    assert found.data.startswith("documents of Yahoo! LETOR set 1")
    svm, km = found.rows
    assert svm.published == dict(zip(METRICS, (0.702, 0.845, 0.599, 0.0641), strict=True))
    assert km.mean["#Click"] >= svm.mean["#Click"]
    candidates = pl.read_parquet(tmp_path / "out" / "seed-0" / "candidates.parquet")
    assert candidates.group_by("query_id").len()["len"].unique().to_list() == [10]  # of twelve
