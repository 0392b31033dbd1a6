"""Simulated click logs: the documents, the log and its truth, and the folder they are written to."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from polars.testing import assert_frame_equal
from pydantic import ValidationError

from urank.errors import ConfigError
from urank.lab import letor_simulation
from urank.lab.letor_simulation import (
    LABEL_SHARES,
    Simulation,
    SimulationConfig,
    draw_candidates,
    generate_letor,
    graded_labels,
    simulate,
    write_simulation,
)
from urank.lab.user_models import scale01
from urank.log.splits import split_by_hash, stable_hash
from urank.log.svmlight import Letor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sesions": 3}, "Extra inputs are not permitted"),
        ({"queries": 0}, "greater than or equal to 1"),
        ({"positions": 0}, "greater than or equal to 1"),
        ({"user": "robot"}, "Input should be 'item', 'query', 'pbm', 'cascade', 'trust', 'grid', .*'patience'"),
        ({"scaling": "zscore"}, "Input should be 'minmax', 'log' or 'rank'"),
        ({"eta": -1}, "greater than or equal to 0"),
        ({"eta": float("nan")}, "finite number"),
        ({"epsilon": 1.0}, "less than 1"),
        ({"label_share": 0}, "greater than 0"),
        ({"traffic": (1.0,)}, "traffic must have one share for each of 2 loggers"),
        ({"traffic": (0.5, 0.6)}, "traffic must be shares above 0 that sum to 1"),
        ({"traffic": (1.0, 0.0)}, "traffic must be shares above 0 that sum to 1"),
        ({"randomise": "swap"}, "randomise and randomise_share must be given together"),
        ({"randomise_share": 0.1}, "randomise and randomise_share must be given together"),
        ({"values": (2.0, 1.0)}, "values must be a lowest value from 0 up and a highest"),
        ({"values": (-1.0, 1.0)}, "values must be a lowest value from 0 up and a highest"),
        ({"valid": 0.6, "test": 0.6}, "sum to at most 1"),
        ({"seed": -1}, "greater than or equal to 0"),
    ],
)
def test_config_refuses_what_it_does_not_know(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SimulationConfig(**changes)


@pytest.fixture(scope="module")
def documents() -> Letor:
    return generate_letor(1500, features=30, min_items=5, max_items=25, rng=np.random.default_rng(3))


def test_shapes_and_types(documents: Letor) -> None:
    rows = len(documents.label)
    assert documents.features.shape == (rows, 30)
    assert documents.features.dtype == documents.label.dtype == np.float32
    assert documents.query.dtype == documents.offsets.dtype == np.int64
    assert np.isfinite(documents.features).all()
    assert_array_equal(documents.query, np.repeat(np.arange(1500), np.diff(documents.offsets)))


def test_label_shares_are_those_of_mslr(documents: Letor) -> None:
    shares = np.bincount(documents.label.astype(int)) / len(documents.label)
    assert_allclose(shares, LABEL_SHARES, atol=1 / len(documents.label) + 1e-9)


def test_labels_follow_relevance() -> None:
    relevance = np.random.default_rng(0).standard_normal(1000)
    labels = graded_labels(relevance)
    assert (np.diff(labels[np.argsort(relevance)]) >= 0).all()


def test_features_are_of_three_kinds(documents: Letor) -> None:
    heavy, counts, bounded = (documents.features[:, kind::3] for kind in range(3))
    assert (heavy.max(axis=0) > 10 * np.median(heavy, axis=0)).all()
    assert_array_equal(counts, np.round(counts))
    assert ((bounded >= 0) & (bounded <= 1)).all()


def test_one_feature_in_ten_belongs_to_the_query(documents: Letor) -> None:
    starts = documents.offsets[:-1]
    constant = np.array(
        [(np.maximum.reduceat(f, starts) == np.minimum.reduceat(f, starts)).all() for f in documents.features.T]
    )
    assert np.flatnonzero(constant).tolist() == [9, 19, 29]


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


SMALL: dict[str, Any] = {"queries": 60, "features": 6, "sessions": 5, "truth_split": "all"}
LIST = ["query_id", "session_id"]


def run(**changes: Any) -> Simulation:
    return simulate(SimulationConfig(**{**SMALL, **changes}))


@pytest.fixture(scope="module")
def plain() -> Simulation:
    return run()


@pytest.fixture(scope="module")
def rich() -> Simulation:
    """Three loggers with unequal traffic, randomised traffic, values, and more candidates than positions."""
    return run(
        loggers=3,
        traffic=(0.5, 0.3, 0.2),
        randomise="swap",
        randomise_share=0.4,
        values=(0.5, 2.0),
        candidates=8,
        positions=5,
        sessions=40,
    )


def test_columns_and_their_types(plain: Simulation, rich: Simulation) -> None:
    features = [f"f{j}" for j in range(1, 7)]
    start = ["query_id", "session_id", "item_id", "position", "click"]
    assert plain.log.columns == [*start, "policy", "propensity", "relevance", *features]
    assert rich.log.columns == [*start, "value", "policy", "propensity", "ranked_position", "relevance", *features]
    assert plain.log.select(features).dtypes == [pl.Float32] * 6
    assert plain.log.select(start[:3]).dtypes == [pl.String, pl.Int64, pl.String]
    assert set(plain.log["click"].to_list()) <= {0, 1}
    assert plain.log.null_count().sum_horizontal().item() == 0


def test_sorted_and_every_list_filled_from_the_top(rich: Simulation) -> None:
    keys = rich.log.select("query_id", "session_id", "position")
    assert_frame_equal(keys, keys.sort(keys.columns))
    lists = rich.log.group_by(LIST).agg(pl.col("position").max(), pl.len(), pl.col("item_id").n_unique().alias("items"))
    assert lists["position"].to_list() == lists["len"].to_list() == lists["items"].to_list()
    assert lists["len"].max() == 5
    assert len(lists) == 60 * 40


def test_short_queries_show_all_they_have() -> None:
    simulation = run(candidates=5, positions=10)
    lengths = simulation.candidates.group_by("query_id").len()
    shown = simulation.log.group_by(LIST).len().join(lengths, on="query_id")
    assert_array_equal(shown["len"], shown["len_right"])
    assert set(lengths["len"]) == {4, 5}


def test_item_ids_name_one_document_of_one_query(plain: Simulation) -> None:
    assert plain.candidates["item_id"].n_unique() == len(plain.candidates)
    assert plain.log.group_by("item_id").agg(pl.col("query_id").n_unique())["query_id"].max() == 1
    assert plain.log["query_id"][0] == "q000000"


def test_features_and_labels_of_the_log_are_those_of_the_candidates(rich: Simulation) -> None:
    columns = ["item_id", "relevance", "value", *(f"f{j}" for j in range(1, 7))]
    joined = rich.log.select("item_id").join(
        rich.candidates.select(columns), on="item_id", how="left", maintain_order="left"
    )
    assert_frame_equal(joined, rich.log.select(columns), check_dtypes=True)


def test_values_lie_in_their_range_and_belong_to_the_item(rich: Simulation) -> None:
    value = rich.candidates["value"].to_numpy()
    assert ((value >= 0.5) & (value <= 2.0)).all()
    assert np.ptp(value) > 1.2


def test_table_is_that_of_the_oracle(plain: Simulation) -> None:
    candidates = plain.candidates
    x = scale01(candidates.select("^f[0-9]+$").to_numpy(), "log", bounds=plain.bounds)
    exponent = np.maximum(x @ np.array(plain.oracle.weights) + 1, 0)
    r = 0.1 + 0.9 * (2.0 ** candidates["relevance"].to_numpy() - 1) / 15
    expected = r[:, None] * np.arange(1, 11) ** -exponent[:, None]
    assert_allclose(np.array(candidates["table"].to_list()), expected, rtol=1e-6)
    assert candidates.schema["table"] == pl.List(pl.Float32)


def test_policies_follow_the_traffic(rich: Simulation) -> None:
    sessions = rich.log.unique(LIST).sort(LIST)["policy"]
    shares = {"logger-1": 0.3, "logger-2": 0.18, "logger-3": 0.12}
    expected = shares | {f"{name}+swap": share * 0.4 / 0.6 for name, share in shares.items()}
    assert set(sessions) == set(expected)
    for policy, p in expected.items():
        assert abs((sessions == policy).mean() - p) < 4 * np.sqrt(p * (1 - p) / len(sessions))


def test_a_logger_shows_a_query_always_in_the_same_order(plain: Simulation, rich: Simulation) -> None:
    places = plain.log.group_by("policy", "item_id").agg(pl.col("position").n_unique())
    assert places["position"].max() == 1
    ranks = rich.log.with_columns(pl.col("policy").str.slice(0, 8)).group_by("policy", "item_id")
    assert ranks.agg(pl.col("ranked_position").n_unique())["ranked_position"].max() == 1


def test_unrandomised_sessions_keep_the_ranked_position(rich: Simulation) -> None:
    moved = pl.col("position") != pl.col("ranked_position")
    assert not rich.log.filter(~pl.col("policy").str.contains("+", literal=True)).select(moved.any()).item()
    swapped = rich.log.filter(pl.col("policy").str.contains("+", literal=True))
    assert set(swapped.group_by(LIST).agg(moved.sum().alias("moved"))["moved"]) == {0, 2}
    assert_array_equal(
        swapped.group_by(LIST, maintain_order=True).agg(pl.col("ranked_position").sort())["ranked_position"].to_list(),
        swapped.group_by(LIST, maintain_order=True).agg("position")["position"].to_list(),
    )


def test_propensity_of_two_loggers_that_disagree_is_one_half(plain: Simulation) -> None:
    shown = plain.log.group_by("item_id").agg(pl.col("policy").n_unique(), pl.col("position").n_unique(), "propensity")
    both = shown.filter(pl.col("policy") == 2)
    expected = np.where(both["position"] == 1, 1.0, 0.5)
    assert_array_equal(both["propensity"].list.min(), expected)
    assert_array_equal(both["propensity"].list.max(), expected)
    assert set(expected) == {0.5, 1.0}


@pytest.mark.parametrize("kind", ["none", "swap", "adjacent", "shuffle"])
def test_propensity_sums_to_one_over_the_positions_of_an_item_always_shown(kind: str) -> None:
    """Nothing is left out of the list here, and with so many sessions nearly every possible place was seen."""
    simulation = run(queries=5, candidates=4, sessions=3000, randomise=kind, randomise_share=0.5 * (kind != "none"))
    places = simulation.log.group_by("item_id", "position").agg(pl.col("propensity").unique())
    assert places["propensity"].list.len().max() == 1
    total = places.explode("propensity").group_by("item_id").agg(pl.col("propensity").sum())["propensity"]
    assert_allclose(total, 1.0, atol=1e-6)


def test_propensity_is_the_frequency_of_the_place() -> None:
    sessions = 4000
    simulation = run(queries=4, candidates=7, positions=4, sessions=sessions, randomise="adjacent", randomise_share=0.6)
    places = simulation.log.group_by("item_id", "position").agg(pl.len(), pl.col("propensity").first())
    p = places["propensity"].to_numpy().astype(np.float64)
    error = np.abs(places["len"].to_numpy() / sessions - p)
    assert (error <= 4 * np.sqrt(p * (1 - p) / sessions) + 1e-6).all()


def test_candidates_are_a_random_part_of_each_query() -> None:
    offsets = np.array([0, 3, 40, 50])
    draws = np.array([draw_candidates(offsets, 10, np.random.default_rng(seed)) for seed in range(2000)])
    assert draws[:, :3].all()
    assert draws[:, 40:].all()
    assert_array_equal(draws[:, 3:40].sum(axis=1), 10)
    p = 10 / 37
    assert_allclose(draws[:, 3:40].mean(axis=0), p, atol=4.5 * np.sqrt(p * (1 - p) / 2000))


def test_truth_of_the_test_queries_only() -> None:
    simulation = run(queries=200, truth_split="test", test=0.25)
    ids = simulation.log["query_id"].unique()
    in_test = set(ids.filter(split_by_hash(stable_hash(ids), valid=0.1, test=0.25) == 2))
    assert set(simulation.candidates["query_id"]) == in_test
    assert 0 < len(in_test) < 100


def test_cascade_gives_relevance_instead_of_a_table() -> None:
    simulation = run(user="cascade")
    assert "table" not in simulation.candidates.columns
    r = 0.1 + 0.9 * (2.0 ** simulation.candidates["relevance"].to_numpy() - 1) / 15
    assert_allclose(simulation.candidates["relevance_probability"], r, rtol=1e-6)
    assert simulation.log.group_by(LIST).agg(pl.col("click").sum())["click"].max() == 1


def test_attention_depends_on_the_selected_features_only() -> None:
    weights = np.array(run(features=30, attention_features=10).oracle.weights)
    assert len(weights) == 30
    assert np.count_nonzero(weights) == 10


def test_neighbour_has_no_table() -> None:
    simulation = run(user="neighbour")
    assert "table" not in simulation.candidates.columns
    assert np.array(simulation.candidates["table_alone"].to_list()).shape == (simulation.candidates.height, 10)


def test_parts_do_not_disturb_one_another(plain: Simulation) -> None:
    """More sessions change neither documents nor users nor loggers; other users change only the clicks."""
    longer = run(sessions=7)
    assert_frame_equal(longer.candidates, plain.candidates)
    place = ["policy", "item_id", "position"]
    common = longer.log.select(place).unique().join(plain.log.select(place).unique(), on=["policy", "item_id"])
    assert_array_equal(common["position"], common["position_right"])
    other = run(user="pbm")
    assert_frame_equal(other.log.drop("click"), plain.log.drop("click"))


def test_same_seed_same_simulation_and_other_seed_another(plain: Simulation) -> None:
    assert_frame_equal(run().log, plain.log)
    assert not run(seed=1).log.equals(plain.log)


def letor_file(folder: Path, labels: list[int]) -> str:
    lines = [f"{y} qid:{7 + i // 4} 1:{i % 5} 2:{(i * 7) % 11} 3:0.5" for i, y in enumerate(labels)]
    path = folder / "letor.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_letor_file_instead_of_generated_documents(tmp_path: Path) -> None:
    simulation = run(data=letor_file(tmp_path, [0, 1, 2, 0] * 10), candidates=3)
    assert simulation.log["query_id"].unique(maintain_order=True).to_list() == [str(7 + q) for q in range(10)]
    assert simulation.oracle.label_max == 2
    assert simulation.oracle.denominator == 3
    assert len(simulation.oracle.weights) == 3
    assert set(simulation.candidates.group_by("query_id").len()["len"]) == {3}
    assert run(data=letor_file(tmp_path, [0, 1, 2, 0]), label_max=4).oracle.denominator == 15


@pytest.mark.parametrize("method", ["minmax", "log", "rank"])
def test_real_documents(data_dir: Path, method: str) -> None:
    simulation = run(data=str(data_dir / "mq2008" / "S1.txt"), eta=0.5, scaling=method, sessions=2)
    assert simulation.oracle.label_max == 2
    table = np.array(simulation.candidates["table"].to_list())
    assert ((table > 0) & (table <= 1)).all()
    assert (simulation.bounds is None) == (method == "rank")


def test_labels_and_parameters_must_fit_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="label_max must be at least the highest label in the data, 2; got 1"):
        run(data=letor_file(tmp_path, [0, 1, 2, 0]), label_max=1)
    with pytest.raises(ConfigError, match=r"every label of .*letor\.txt is 0, .* label_max must be above 0; got 0"):
        run(data=letor_file(tmp_path, [0, 0, 0, 0]))
    with pytest.raises(ConfigError, match=r"labels are grades from 0 to 64; .*letor\.txt has 2000"):
        run(data=letor_file(tmp_path, [0, 1, 2000, 0]))
    with pytest.raises(ConfigError, match="denominator must be at least"):
        run(denominator=3)


FILES = ["log.parquet", "simulation.toml", "truth/candidates.parquet", "truth/oracle.json"]


def run_small(**changes: Any) -> Simulation:
    return simulate(SimulationConfig(**{"queries": 40, "features": 5, "sessions": 3, "test": 0.3, **changes}))


def write(simulation: Simulation, folder: Path, **options: Any) -> dict[str, bytes]:
    write_simulation(simulation, folder, **options)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return run_small()


def test_all_files_are_there_and_hold_what_was_simulated(simulation: Simulation, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "sim"
    write_simulation(simulation, folder)
    assert sorted(contents(folder)) == FILES
    assert_frame_equal(pl.read_parquet(folder / "log.parquet"), simulation.log)
    assert_frame_equal(pl.read_parquet(folder / "truth" / "candidates.parquet"), simulation.candidates)
    assert pq.ParquetFile(folder / "log.parquet").metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize(
    "changes",
    [{}, {"values": (1, 3), "randomise": "shuffle", "randomise_share": 0.2}, {"user": "patience"}, {"scaling": "rank"}],
)
def test_same_seed_same_bytes(changes: dict[str, Any], tmp_path: Path) -> None:
    first, again = (write(run_small(**changes), tmp_path / name) for name in ("a", "b"))
    assert first == again
    other = write(run_small(**changes, seed=1), tmp_path / "c")
    assert {name for name in FILES if other[name] != first[name]} >= {"log.parquet", "simulation.toml"}


def test_the_config_and_the_oracle_come_back(simulation: Simulation, tmp_path: Path) -> None:
    folder = tmp_path / "sim"
    write_simulation(simulation, folder)
    assert SimulationConfig(**tomllib.loads((folder / "simulation.toml").read_text())) == simulation.config
    truth = json.loads((folder / "truth" / "oracle.json").read_text())
    assert truth["oracle"] == simulation.oracle.to_dict()
    assert truth["oracle"]["label_max"] == 4
    assert truth["oracle"]["denominator"] == 2**4 - 1
    assert truth["oracle"]["positions"] == 10
    assert simulation.bounds is not None
    assert [truth["scaling"]["low"], truth["scaling"]["high"]] == simulation.bounds.tolist()


def test_row_groups_are_bounded(simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letor_simulation, "ROW_GROUP_BYTES", simulation.log.estimated_size() // 3)
    folder = tmp_path / "sim"
    write_simulation(simulation, folder)
    assert pq.ParquetFile(folder / "log.parquet").metadata.num_row_groups in (3, 4)
    assert_frame_equal(pl.read_parquet(folder / "log.parquet"), simulation.log)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_no_leftovers_after_a_failure(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, overwrite: bool
) -> None:
    before = write(simulation, tmp_path / "sim") if overwrite else {}
    written: list[str] = []
    real = letor_simulation._write_parquet

    def fail_at_the_log(frame: pl.DataFrame, path: Path) -> None:
        if path.name == "log.parquet":
            raise error
        real(frame, path)
        written.append(path.name)

    monkeypatch.setattr(letor_simulation, "_write_parquet", fail_at_the_log)
    expected = ConfigError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_simulation(simulation, tmp_path / "sim", overwrite=overwrite)
    assert written == ["candidates.parquet"]
    assert [path.name for path in tmp_path.iterdir()] == (["sim"] if overwrite else [])
    assert contents(tmp_path / "sim") == before
