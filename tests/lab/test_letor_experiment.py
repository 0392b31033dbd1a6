"""One seed on simulated clicks: the data of learners, the metrics, and that no learner sees the truth."""

from __future__ import annotations

import shutil
from math import log2
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from lab.tiny import TINY, config
from urank.lab.experiment_results import METRICS
from urank.lab.letor_experiment import STEPS, LetorTrial, list_metrics
from urank.lab.letor_simulation import simulate
from urank.lab.truth import read_truth, true_table
from urank.log.dataset import Dataset
from urank.log.splits import SPLITS, split_by_hash, stable_hash
from urank.progress import silent
from urank.propensity.examination import Known

NAMES = ("query_id", "item_id", "position")


def rows_of(dataset: Dataset, split: str) -> pl.DataFrame:
    columns = ["item_id", "position", *dataset.features]
    parts = [pl.DataFrame(block.items) for block in dataset.blocks(split, columns)]
    return pl.concat(parts)


# --- what judges a method ---------------------------------------------------------------------------------------------


def test_judged_by_arithmetic() -> None:
    """Two queries, K = 2: a has three items of which one gets no place, b has nothing relevant."""
    candidates = pl.DataFrame(
        {
            "query_id": ["a", "a", "a", "b"],
            "item_id": ["a1", "a2", "a3", "b1"],
            "relevance": [2, 0, 1, 0],
            "table": [[0.5, 0.25], [0.3, 0.1], [0.4, 0.2], [0.125, 0.0625]],
        }
    )
    found = list_metrics(candidates, np.array([2, 1, 3, 1]))
    assert found.columns == ["query_id", "item_id", "position", *METRICS]
    assert found["query_id"].to_list() == ["a", "b"]
    assert found["item_id"].to_list() == [["a1", "a2", "a3"], ["b1"]]
    assert found["position"].to_list() == [[2, 1, 3], [1]]
    a, b = found.rows(named=True)
    assert a["#Click"] == pytest.approx(0.25 + 0.3)
    assert a["CTR"] == pytest.approx((0.25 + 0.3) / 2)  # the third has no place
    assert a["MAP"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    dcg = (2**2 - 1) / log2(1 + 2) + (2**1 - 1) / log2(1 + 3)
    assert a["nDCG@10"] == pytest.approx(dcg / ((2**2 - 1) / log2(2) + (2**1 - 1) / log2(3)))
    assert (b["#Click"], b["CTR"]) == (0.125, 0.125)
    assert np.isnan([b["MAP"], b["nDCG@10"]]).all()


# --- what a learner gets ----------------------------------------------------------------------------------------------


def test_a_learner_sees_features_and_clicks_alone(trial: LetorTrial) -> None:
    for dataset in (trial.dataset, trial.swaps):
        assert dataset.features == [f"f{number}" for number in range(1, 9)]
        assert not any(dataset.has(name) for name in ("relevance", "propensity", "table"))
        written = list(dataset.folder.rglob("*.parquet"))
        assert len(written) >= len(SPLITS)
        for path in written:
            assert not {"relevance", "propensity", "table"} & set(pl.read_parquet_schema(path))
    # The logs with more in them are gone; the truth stays beside them.
    assert not list((trial.folder / "data").rglob("log.parquet"))
    assert trial.featurizer.names == trial.dataset.features
    assert trial.dataset.rows("test") > 0
    assert trial.swaps.has("ranked_position")


def test_the_swaps_are_of_the_same_users_and_documents(trial: LetorTrial) -> None:
    key = ["item_id", *trial.dataset.features]
    everything = {}
    for name, dataset in (("log", trial.dataset), ("swaps", trial.swaps)):
        everything[name] = pl.concat(rows_of(dataset, split) for split in SPLITS).select(key).unique().sort(key)
    assert everything["log"].equals(everything["swaps"])
    # Of the swaps the truth is kept for test queries; it is that of the log.
    swapped = read_truth(trial.folder / "data" / "swapped")
    assert swapped.equals(trial.truth.join(swapped.select("item_id"), on="item_id", how="semi", maintain_order="left"))
    assert len(swapped) == len(trial.candidates)


def test_ground_truth_is_examination_not_clicks(trial: LetorTrial) -> None:
    """P(o = 1 | k, x) = 1 / k^max(w·x + 1, 0) (Section 5.2): 1 at the top, whatever the relevance."""
    oracle = simulate(trial.config.simulation).oracle
    for block in trial.dataset.blocks("train", ["item_id", "position"]):
        examined = Known(true_table(trial.truth)).examination(block)
        assert np.allclose(examined[:, 0], 1)
        exponent = -np.log(examined[:, 1:]) / np.log(np.arange(2, oracle.positions + 1))
        assert np.allclose(exponent, exponent[:, :1], atol=1e-4)  # one exponent for each item …
        assert exponent[:, 0].std() > 0.01  # … and not the same for all


# --- the candidates ---------------------------------------------------------------------------------------------------


def test_candidates_are_the_test_split(trial: LetorTrial) -> None:
    shares = {"valid": trial.config.simulation.valid, "test": trial.config.simulation.test}
    split = split_by_hash(stable_hash(trial.candidates["query_id"]), **shares)
    assert (split == SPLITS.index("test")).all()
    logged = {split: set(rows_of(trial.dataset, split)["item_id"]) for split in SPLITS}
    candidates = set(trial.candidates["item_id"])
    assert logged["test"] == candidates  # at most ten to a query, so that all are shown
    assert not (logged["train"] | logged["valid"]) & candidates
    assert len(candidates) == len(trial.candidates)
    # One run of rows for each query.
    assert trial.candidates["query_id"].rle_id().max() + 1 == trial.candidates["query_id"].n_unique()


def test_the_order_of_candidates_tells_nothing(trial: LetorTrial) -> None:
    """Neither that of the data nor that of the log: what breaks ties is chance."""
    mine = trial.candidates.group_by("query_id", maintain_order=True).agg("item_id", "relevance")
    made = trial.truth.group_by("query_id").agg(made="item_id")
    logged = rows_of(trial.dataset, "test").group_by("item_id").agg(pl.col("position").mean())
    both = mine.join(made, on="query_id", maintain_order="left")
    assert (both["item_id"] != both["made"]).mean() > 0.9
    assert both.select(pl.col("item_id").list.sort() == pl.col("made").list.sort()).to_series().all()
    place = trial.candidates.select("item_id", "relevance", place=pl.int_range(pl.len()).over("query_id"))
    joined = place.join(logged, on="item_id")
    # A correlation of n independent pairs has a standard error of 1/√n.
    for other in ("position", "relevance"):
        assert abs(np.corrcoef(joined["place"], joined[other])[0, 1]) < 4 / len(joined) ** 0.5


def test_a_policy_is_given_no_truth(trial: LetorTrial) -> None:
    block = trial.block
    assert block.items.column_names == ["query_id", "item_id", *trial.dataset.features]
    assert block.lists.column_names == ["query_id"]
    assert block.lists["query_id"].to_pylist() == trial.candidates["query_id"].unique(maintain_order=True).to_list()
    assert block.offsets[-1] == len(trial.candidates)


@pytest.mark.parametrize("method", ["svm-none", "lambdarank-none", "dla", "urank", "urank-match"])
def test_the_truth_reaches_no_learner(trial: LetorTrial, tmp_path: Path, method: str) -> None:
    """Other labels and other click tables, in the test and in the simulation: the same positions, other metrics."""
    honest, fooled = (LetorTrial(tmp_path / name, trial.config) for name in ("honest", "fooled"))
    for each in (honest, fooled):
        shutil.copytree(trial.folder, each.folder)
    for path in (fooled.folder / "candidates.parquet", fooled.folder / "data/simulation/truth/candidates.parquet"):
        truth = pl.read_parquet(path)
        lies = {"relevance": 4 - pl.col("relevance"), "table": pl.col("table").list.reverse()}
        truth.with_columns(**lies).write_parquet(path)
    for each in (honest, fooled):
        for step in ("clicks", method) if method.startswith("urank") else (method,):
            STEPS[step].run(each, silent)
    one, other = (pl.read_parquet(each.folder / STEPS[method].output) for each in (honest, fooled))
    assert one.select(NAMES).equals(other.select(NAMES))
    assert not np.allclose(one["#Click"], other["#Click"])


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_data(trial: LetorTrial, tmp_path: Path) -> None:
    again = LetorTrial(tmp_path / "again", trial.config)
    again.make_data(silent)
    assert again.candidates.equals(trial.candidates)
    for split in SPLITS:
        assert rows_of(again.dataset, split).equals(rows_of(trial.dataset, split))
    other = LetorTrial(tmp_path / "other", trial.config.seeded(1))
    other.make_data(silent)
    assert not other.candidates["f1"].equals(trial.candidates["f1"])


def test_sessions_of_given_documents(tmp_path: Path) -> None:
    """100,000 lists in all, but for those that were asked for; at most 200 of a query."""
    letor = tmp_path / "data.txt"
    letor.write_text("".join(f"{i % 3} qid:{q} 1:0.{i} 2:0.{q}\n" for q in range(1, 5) for i in range(10)))
    sizes = {key: value for key, value in TINY["simulation"].items() if key != "sessions"}
    given = LetorTrial(tmp_path / "a", config(simulation={**sizes, "data": str(letor)}).seeded(2))
    assert given._simulation().sessions == min(200, 100_000 // 4)
    asked = LetorTrial(tmp_path / "a", config(simulation={**sizes, "data": str(letor), "sessions": 3}).seeded(2))
    assert asked._simulation().sessions == 3
