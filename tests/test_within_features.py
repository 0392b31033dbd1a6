"""A model with within-list features ranks the same by every path, from whole lists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from polars.testing import assert_frame_equal

import urank
from cli.test_train import urank as run_cli
from contracts import run_graph
from serve.cases import client, frame
from serve.test_request_arrow import HEADERS, stream
from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import GbdtConfig
from urank.clicks.item_curves import click_curves_of
from urank.clicks.trees import fit_gbdt
from urank.errors import ConfigError
from urank.export.onnx import export_onnx
from urank.export.vespa import export_vespa
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.learning.batches import Stream
from urank.learning.features import Featurizer, fit_featurizer
from urank.learning.lightgbm_data import lightgbm_dataset
from urank.learning.within_list import within_list
from urank.log.dataset import Dataset
from urank.model_io import load_model
from urank.ranking.policies import ModelPolicy
from urank.ranking.ranking_model import RankingModel

POSITIONS = 4
"""K, less than the length of a list."""
METHODS = ("score", "match", "ctr1")


@pytest.fixture(scope="module")
def log() -> pl.DataFrame:
    settings: dict[str, Any] = {"queries": 200, "sessions": 3, "features": 3, "seed": 5, "values": (1, 10)}
    made = simulate(SimulationConfig(**settings)).log.drop("relevance", "propensity")
    rng = np.random.default_rng(0)
    query_mean = made.select(pl.col("f3").mean().over("query_id")).to_series()
    return made.with_columns(
        click=pl.when(pl.col("position") <= POSITIONS).then(pl.col("click")).otherwise(0),
        f2=pl.when(pl.Series(rng.random(made.height) < 0.9)).then(pl.col("f2")),
        f3=query_mean.cast(pl.Float32),  # a feature of the query: it does not vary within lists
        shape=pl.when(pl.col("f1") > made["f1"].median()).then(pl.lit("round")).otherwise(pl.lit("square")),
    )


@pytest.fixture(scope="module")
def dataset(log: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("within") / "prepared"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urank.log.prepare.ROW_GROUP_BYTES", 2**16)  # several row groups
        urank.prepare(urank.read(log), folder, positions=POSITIONS, valid=0.2, test=0.2)
    return Dataset(folder)


@pytest.fixture(scope="module", params=["network", "trees"])
def model(dataset: Dataset, request: pytest.FixtureRequest) -> urank.URank:
    quick = {"epochs": 2, "batch_lists": 64}
    trees = {"trees": 5, "threads": 1}
    families = {"families": ["monotone", "deepfm", "gbdt"], "mix": True, "hidden": [8], "trees": trees}
    clicks = {**families, "within_list": "auto", "training": quick}
    scorer = {"hidden": [8], "training": quick}
    return urank.URank(ranker=request.param, method="score", clicks=clicks, scorer=scorer, trees=trees).fit(
        dataset.folder
    )


@pytest.fixture(scope="module")
def folder(model: urank.URank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def candidates(log: pl.DataFrame) -> pl.DataFrame:
    """Lists of several lengths, each a row per candidate."""
    place = pl.int_range(pl.len()).over("query_id", "session_id")
    lists = log.filter(pl.col("session_id") == pl.col("session_id").first().over("query_id"))
    lists = lists.filter(place < 1 + pl.col("query_id").rank("dense") % 9).head(300)
    features = ["f1", "f2", "f3", "shape"]
    return lists.select(pl.col("query_id").cast(pl.String), pl.col("item_id").cast(pl.String), "value", *features)


def columns_by_hand(featurizer: Featurizer, rows: pl.DataFrame) -> NDArray[np.float32]:
    raw = rows.select(pl.col(each.name for each in featurizer.numeric).fill_null(float("nan"))).to_numpy()
    raw = raw.astype(np.float32)
    starts = np.flatnonzero(rows.select(pl.col("query_id").rle_id().diff().fill_null(1)).to_series().to_numpy())
    names = [each.name for each in featurizer.numeric]
    compared = raw[:, [names.index(name) for name in featurizer.within]]
    return np.concatenate([raw, within_list(compared, np.append(starts, rows.height))], axis=1)


def test_auto_chooses_what_varies_within_lists(dataset: Dataset, model: urank.URank) -> None:
    featurizer = model.model_.clicks.featurizer
    assert featurizer.within == ("f1", "f2")
    kinds = [f"{name} in list: {kind}" for kind in ("z", "rank", "mean") for name in ("f1", "f2")]
    assert [each.name for each in featurizer.derived] == [*kinds, "list size"]
    assert featurizer.names == dataset.features  # what a user supplies
    assert featurizer.width == len(dataset.features) + 7
    z, rank = featurizer.derived[0], featurizer.derived[2]
    assert (z.mean, z.std) == pytest.approx((0, 0.6), abs=0.1)  # of the signed log
    assert rank.mean == pytest.approx(np.mean(np.log1p(np.linspace(0.05, 0.95, 10))), abs=0.02)
    assert featurizer.numeric[1].missing
    assert not featurizer.derived[1].missing  # the indicator of the raw feature suffices


def test_scales_of_large_logs_come_from_a_sample(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit_featurizer(dataset, within_list="auto")
    monkeypatch.setattr("urank.learning.features.SAMPLE_ROWS", 1)
    sampled = fit_featurizer(dataset, within_list="auto")
    assert len(dataset.groups("train")) > 1
    assert replace(sampled, derived=()) == replace(whole, derived=())
    assert sampled.derived != whole.derived


def test_names_are_taken_as_given(dataset: Dataset) -> None:
    assert fit_featurizer(dataset, within_list=("f3",)).within == ("f3",)
    assert fit_featurizer(dataset).inputs == fit_featurizer(dataset).numeric
    for name, reason in {"price": "is not in the log", "shape": "is categorical"}.items():
        with pytest.raises(ConfigError, match=f"'{name}' {reason}.*--within-list"):
            fit_featurizer(dataset, within_list=("f1", name))


def test_lists_of_one_item_have_nothing_to_compare(log: pl.DataFrame, tmp_path: Path) -> None:
    first = log.filter(pl.col("position") == 1)
    urank.prepare(urank.read(first), tmp_path / "prepared", valid=0.2, test=0.2)
    for setting in ("auto", ("f1",)):
        assert fit_featurizer(Dataset(tmp_path / "prepared"), within_list=setting).within == ()


def test_artifact_and_old_artifacts(model: urank.URank, folder: Path) -> None:
    featurizer = model.model_.clicks.featurizer
    assert load_model(folder).clicks.featurizer == featurizer
    stored = json.loads((folder / "features.json").read_text())
    assert stored["within"] == ["f1", "f2"]
    old = {key: stored[key] for key in ("numeric", "categorical")}
    assert Featurizer.from_dict(old) == replace(featurizer, within=(), derived=())
    assert json.loads(json.dumps(Featurizer.from_dict(old).to_dict())) == old


@pytest.mark.parametrize("method", METHODS)
def test_lists_do_not_depend_on_each_other(model: urank.URank, candidates: pl.DataFrame, method: str) -> None:
    together = model.rank(candidates, method=method)
    alone = [model.rank(each, method=method) for each in candidates.partition_by("query_id", maintain_order=True)[:20]]
    assert_frame_equal(
        together[: sum(each.height for each in alone)], pl.concat(alone), check_exact=False, rel_tol=1e-5
    )
    assert len({each.height for each in alone}) > 5


def test_a_list_without_ids_is_one_list(model: urank.URank, candidates: pl.DataFrame) -> None:
    one = candidates.partition_by("query_id", maintain_order=True)[7]
    np.testing.assert_array_equal(model.log_ctr(one), model.log_ctr(one.drop("query_id")))
    assert one.height > 1
    assert np.abs(model.log_ctr(one)[:1] - model.log_ctr(one[:1])).max() > 1e-4  # the others matter


@pytest.mark.parametrize("method", METHODS)
def test_parquet_in_small_batches(
    model: urank.URank,
    folder: Path,
    candidates: pl.DataFrame,
    method: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates.write_parquet(tmp_path / "candidates.parquet", row_group_size=7)
    monkeypatch.setattr("urank.log.candidates.FIRST_ROWS", 8)
    monkeypatch.setattr("urank.log.candidates.BATCH_BYTES", 4096)
    loaded = load_model(folder)
    source = loaded.candidates(tmp_path / "candidates.parquet")
    assert len(list(source.lists())) > 5
    found = loaded.rank(tmp_path / "candidates.parquet", method=method)
    assert_frame_equal(found, model.rank(candidates, method=method), check_exact=False, rel_tol=1e-5)


def test_evaluation_and_training_see_whole_lists(model: urank.URank, dataset: Dataset) -> None:
    ranker, featurizer = model.model_, model.model_.clicks.featurizer
    columns = [*featurizer.names, "position", "value", "click"]
    streams = {shown: Stream(dataset, "test", featurizer, shown=shown) for shown in (False, True)}
    for number, group in enumerate(dataset.groups("test")):
        block = dataset.read(group, columns)
        whole = featurizer.encode(block.items, block.offsets)
        np.testing.assert_array_equal(whole.numeric[:, -1], np.repeat(np.diff(block.offsets), np.diff(block.offsets)))
        shown = block.column("position") <= POSITIONS
        assert not shown.all()
        np.testing.assert_array_equal(streams[False].lists(number).inputs.numeric, whole.numeric)
        np.testing.assert_array_equal(streams[True].lists(number).inputs.numeric, whole.numeric[shown])
        np.testing.assert_array_equal(streams[True].lists(number).inputs.categorical, whole.categorical[shown])
        tables = np.exp(ranker.clicks.log_ctr(block.items, block.offsets))
        np.testing.assert_allclose(tables, np.exp(ranker.log_ctr(whole)), rtol=1e-5)
        for method in METHODS:
            expected = ranker.order(whole, block.offsets, value=block.column("value"), method=method)
            np.testing.assert_array_equal(ModelPolicy("x", ranker, method).positions(block), expected)


@pytest.mark.parametrize("in_memory", [True, False])
def test_trees_see_whole_lists(dataset: Dataset, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.setattr("urank.learning.lightgbm_data.IN_MEMORY_BYTES", 0)
    featurizer = fit_featurizer(dataset, within_list="auto")
    rows: list[int] = []
    options: dict[str, Any] = {"extra": "position", "shown": True}
    data = lightgbm_dataset(
        dataset, "valid", featurizer, {"verbosity": -1}, lambda step, done, total: rows.append(int(done)), **options
    )
    stream = Stream(dataset, "valid", featurizer, shown=True)
    clicks = np.concatenate([stream.lists(number).click for number in range(len(stream.groups))])
    np.testing.assert_array_equal(data.get_label(), clicks)
    assert data.num_feature() == featurizer.width + 1
    assert rows[-1] == len(clicks) < dataset.rows("valid")
    grown = fit_gbdt(dataset, featurizer, seed=0, config=GbdtConfig(trees=2, threads=1))
    assert grown.n_numeric == len(featurizer.inputs)


def requests(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Lists as JSON requests."""
    made = []
    for own in rows.partition_by("query_id", maintain_order=True):
        items = [
            {"item_id": each.pop("item_id"), "value": each.pop("value"), "features": each}
            for each in own.drop("query_id").to_dicts()
        ]
        made.append({"query_id": own["query_id"][0], "candidates": items})
    return made


@pytest.mark.parametrize("method", METHODS)
def test_servers_compute_the_columns(model: urank.URank, folder: Path, candidates: pl.DataFrame, method: str) -> None:
    few = candidates.head(100)
    lists = requests(few)
    assert_frame_equal(frame(lists), few, check_dtypes=False)
    expected = model.rank(few, method=method, top=POSITIONS)
    with client(folder, method=method) as server:
        facts = server.get("/v1/model").json()
        assert set(facts["features"]["numeric"]) == {"f1", "f2", "f3"}
        mixed = [{**query, "method": method} if number % 2 else query for number, query in enumerate(lists)]
        answer = server.post("/v1/rank", json={"queries": mixed})
        assert answer.status_code == 200, answer.text
        items = [{"query_id": each["query_id"], **item} for each in answer.json()["rankings"] for item in each["items"]]
        table = few.with_columns(pl.col("f1", "f2", "f3").cast(pl.Float32)).to_arrow()
        arrow = server.post("/v1/rank", content=stream(table), headers=HEADERS)
        assert arrow.status_code == 200, arrow.text
    names = ["query_id", "item_id", "position", "probability", "utility", *(["score"] if method == "score" else [])]
    for each in (pl.DataFrame(items), pl.DataFrame(pa.ipc.open_stream(arrow.content).read_all())):
        assert method == "score" or each["score"].null_count() == each.height  # a server computes only what it needs
        assert_frame_equal(
            each.select(names), expected.select(names), check_dtypes=False, check_exact=False, rel_tol=1e-5
        )


def test_graphs_take_the_columns(model: urank.URank, folder: Path, candidates: pl.DataFrame, tmp_path: Path) -> None:
    ranker: RankingModel = model.model_
    numeric = columns_by_hand(ranker.clicks.featurizer, candidates)
    text = candidates.select(pl.col("shape").fill_null("")).to_numpy().astype(object)
    inputs = {"numeric": numeric, "categorical": text}
    found = run_graph(folder / "clicks.onnx", "log_ctr", inputs)
    np.testing.assert_allclose(found, model.log_ctr(candidates), rtol=1e-5, atol=1e-5)
    export = export_onnx(ranker, tmp_path / "export")
    described = json.loads((tmp_path / "export" / "inputs.json").read_text())["inputs"]["numeric"]
    assert described["features"] == [each.name for each in ranker.clicks.featurizer.inputs]
    assert described["within_list"] == ["f1", "f2"]
    assert "in list: rank" in (tmp_path / "export" / "README.md").read_text()
    assert export.renamed == {}
    value = candidates["value"].to_numpy().astype(np.float32)
    scores = run_graph(tmp_path / "export" / "urank.onnx", "score", {**inputs, "value": value})
    np.testing.assert_allclose(scores, model.score(candidates), rtol=1e-5, atol=1e-5)


def test_vespa_cannot_compare_within_lists(model: urank.URank, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--within-list off"):
        export_vespa(model.model_, tmp_path / "vespa")


def test_curves_come_from_whole_lists(model: urank.URank, log: pl.DataFrame) -> None:
    clicks: ClickModel = model.model_.clicks
    ordered = log.sort("query_id", "session_id")
    table = np.exp(clicks.log_ctr(ordered).astype(np.float64))
    curves = click_curves_of(clicks, urank.read(log.sample(fraction=1, shuffle=True, seed=1)), by="shape")
    assert len(curves) == 2
    for curve in curves:
        rows = (ordered["shape"] == curve.name).to_numpy()
        assert curve.rows == rows.sum()
        np.testing.assert_allclose(curve.rate, table[rows].mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("setting", ["auto", "off", "f1, f3", "brand"])
def test_flag(dataset: Dataset, setting: str, tmp_path: Path) -> None:
    flags = ("--click-model", "pbm", "--epochs", 1, "--ranker", "none", "--no-onnx", "--within-list", setting)
    result = run_cli("train", dataset.folder, "-o", tmp_path / "model", *flags, "-q")
    if setting == "brand":
        assert result.returncode == 2
        assert "'brand' is not in the log" in " ".join(result.stderr.split())
        return
    assert result.returncode == 0, result.stderr
    within = {"auto": ("f1", "f2"), "off": (), "f1, f3": ("f1", "f3")}[setting]
    assert load_model(tmp_path / "model").clicks.featurizer.within == within
