"""`urank train` and `urank curves` as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from contracts import raw_inputs, run_graph
from urank.model_io import load_model

QUICK = """
[clicks]
families = ["monotone"]
training = {epochs = 1}
[scorer]
hidden = [8]
sigma = 2.0
training = {epochs = 1}
[trees]
trees = 5
threads = 1
"""


def urank(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "urank", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    assert urank("simulate", "-o", folder / "sim", "--queries", 150, "--features", 4, "-q").returncode == 0
    flags = ("--click-model", "monotone", "--epochs", 2, "--truth", folder / "sim", "--html", folder / "fit.html")
    result = urank("train", folder / "sim" / "log.parquet", "-o", folder / "model", *flags)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "below the constant" in said
    assert "oracle" in said
    assert "network on monotone ranks by " in said
    assert f"The model is in {folder / 'model'}" in said
    return folder


def test_a_tiny_log_is_a_warning(folder: Path, tmp_path: Path, command: Any) -> None:
    log = pl.read_parquet(folder / "sim" / "log.parquet")
    names = log["query_id"].unique(maintain_order=True)
    log.filter(pl.col("query_id").is_in(names[:5].to_list())).write_parquet(tmp_path / "log.parquet")
    quick = ("--click-model", "pbm", "--ranker", "none", "--epochs", 1)
    for source, warned in ((tmp_path / "log.parquet", True), (folder / "sim" / "log.parquet", False)):
        done = command("train", source, "-o", tmp_path / f"model-{warned}", *quick)
        assert done.code == 0, done.stderr
        assert ("training lists, so that its order may be no better than chance" in done.stdout) is warned


def test_model_and_page(folder: Path) -> None:
    names = {path.name for path in (folder / "model").iterdir()}
    weights = {f"{name}.safetensors" for name in ("member-0", "scorer", "judge-0", "judge-1")}
    assert names == {"manifest.json", "features.json", "clicks.onnx", "scorer.onnx", *weights}
    manifest = json.loads((folder / "model" / "manifest.json").read_text())
    assert manifest["version"] == 2
    assert manifest["name"] == "network on monotone"
    assert manifest["method"] in ("score", "match")  # auto
    assert manifest["why"] == "there are too few queries to compare methods"
    assert manifest["quality"]["qualities"]["test"]["monotone"]["rows"] > 0
    assert load_model(folder / "model").method == manifest["method"]
    assert (folder / "fit.html").read_text().startswith("<!doctype html>")
    assert {path.name for path in folder.iterdir()} == {"sim", "model", "fit.html"}


def test_graphs_say_what_the_model_says(folder: Path) -> None:
    model, log = load_model(folder / "model"), pl.read_parquet(folder / "sim" / "log.parquet").head(200)
    inputs = raw_inputs(model.clicks.featurizer, log)
    inputs["categorical"] = np.zeros((log.height, 0), dtype=np.int64)  # this log has no text
    table = run_graph(folder / "model" / "clicks.onnx", "log_ctr", inputs)
    np.testing.assert_allclose(table, model.log_ctr(log), atol=1e-5)
    scores = run_graph(folder / "model" / "scorer.onnx", "score", inputs)
    np.testing.assert_allclose(scores, model.score(log), rtol=1e-5, atol=1e-5)


def test_curves(folder: Path, command: Any) -> None:
    log = folder / "sim" / "log.parquet"
    result = command("curves", folder / "model", log, "--by", "policy", "-o", folder / "model" / "curves.svg")
    assert result.code == 0, result.stderr
    assert "logger-1" in result.stdout
    assert (folder / "model" / "curves.svg").read_text().startswith("<svg")
    (folder / "model" / "curves.svg").unlink()
    curves = json.loads(command("curves", folder / "model", log, "--json", "--most", 3).stdout)
    assert len(curves) == 3
    assert len(curves[0]["rate"]) == 10


def train(command: Any, folder: Path, output: Path, *flags: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the command says as JSON, and the manifest it writes."""
    (output.parent / "quick.toml").write_text(QUICK)
    flags = ("--config", output.parent / "quick.toml", "--no-onnx", "--json", *flags)
    result = command("train", folder / "sim" / "log.parquet", "-o", output, *flags)
    assert result.code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout), json.loads((output / "manifest.json").read_text())


def test_flags_and_the_tables_of_a_file(folder: Path, tmp_path: Path, command: Any) -> None:
    flags = ("--method", "match", "--target", "counterfactual", "--form", "paper", "--seed", 3, "--epochs", 2)
    said, manifest = train(command, folder, tmp_path / "model", *flags)
    assert (said["model"], said["method"], said["why"]) == ("network on monotone", "match", "asked for")
    assert (manifest["method"], manifest["why"]) == ("match", "asked for")
    config = manifest["config"]
    assert (config["ranker"], config["method"]) == ("network", "match")
    assert (config["clicks"]["families"], config["clicks"]["seed"]) == (["monotone"], 3)
    assert config["clicks"]["training"]["epochs"] == 2  # the flag comes before the file
    scorer = {name: config["scorer"][name] for name in ("target", "form", "seed", "hidden", "sigma")}
    assert scorer == {"target": "counterfactual", "form": "paper", "seed": 3, "hidden": [8], "sigma": 2.0}
    assert config["scorer"]["training"]["epochs"] == 1
    assert config["trees"]["trees"] == 5
    assert load_model(tmp_path / "model").method == "match"


def test_a_folder_for_checkpoints_keeps_what_else_is_in_it(folder: Path, tmp_path: Path, command: Any) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "precious.txt").write_text("mine")
    train(command, folder, tmp_path / "model", "--checkpoints", state, "--method", "score")
    assert [path.name for path in state.iterdir()] == ["precious.txt"]


def test_what_is_in_the_way_is_told_before_the_training(folder: Path, tmp_path: Path, command: Any) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    arguments = (
        "train",
        folder / "sim" / "log.parquet",
        "-o",
        taken,
        "--overwrite",
        "--config",
        tmp_path / "none.toml",
    )
    assert "none.toml cannot be read" in command(*arguments).refusal  # so far it comes
    refusal = command(*arguments[:-2], "--truth", folder / "sim").refusal
    assert "holds something else (it has no manifest.json), so it is not replaced" in refusal
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]


def test_outcomes_of_the_click_are_left_out_and_named_first(folder: Path, tmp_path: Path, command: Any) -> None:
    log = tmp_path / "log.parquet"
    simulated = pl.read_parquet(folder / "sim" / "log.parquet")
    simulated.with_columns(dwell=pl.col("click") * 7.5, paid=pl.col("click") * 2).write_parquet(log)
    (tmp_path / "quick.toml").write_text(QUICK)
    flags = ("--config", tmp_path / "quick.toml", "--ranker", "none", "--no-onnx")
    first = command("train", log, "-o", tmp_path / "model", *flags).stdout.splitlines()[0]
    assert first.startswith("dwell, paid: known only after a click")
    assert "--keep NAME" in first
    assert not {"dwell", "paid"} & set(load_model(tmp_path / "model").clicks.featurizer.names)

    prepared, kept = tmp_path / "prepared", tmp_path / "kept"
    assert command("prepare", log, "-o", prepared, "--keep", "paid").stdout.splitlines()[0].startswith("dwell: known")
    said = json.loads(command("train", prepared, "-o", kept, *flags, "--json").stdout)
    assert said["left_out"] == ["dwell"]
    assert "paid" in load_model(kept).clicks.featurizer.names
    assert "--keep belongs to urank prepare" in command("train", prepared, "-o", kept, "--keep", "dwell").refusal
    # What a model was trained with is there when it is evaluated on a raw log.
    assert command("evaluate", kept, log, "--split", "all", "--json").code == 0


def test_trees(folder: Path, tmp_path: Path, command: Any) -> None:
    said, manifest = train(command, folder, tmp_path / "model", "--ranker", "trees", "--method", "score")
    assert said["model"] == "trees on monotone"
    assert manifest["scorer"]["file"] == "scorer.txt"
    assert (tmp_path / "model" / "scorer.txt").is_file()
    log = pl.read_parquet(folder / "sim" / "log.parquet").head(50)
    assert load_model(tmp_path / "model").score(log).shape == (50,)


def test_deepfm_ranked_as_is_usual(folder: Path, tmp_path: Path, command: Any) -> None:
    flags = ("--click-model", "deepfm", "--ranker", "none", "--method", "ctr1")
    said, manifest = train(command, folder, tmp_path / "model", *flags)
    assert (said["model"], said["method"]) == ("deepfm", "ctr1")
    assert [member["family"] for member in manifest["members"]] == ["deepfm"]
    log = pl.read_parquet(folder / "sim" / "log.parquet").head(50)
    assert load_model(tmp_path / "model").log_ctr(log).shape == (50, 10)


def test_no_ranker(folder: Path, tmp_path: Path, command: Any) -> None:
    said, manifest = train(command, folder, tmp_path / "model", "--ranker", "none")
    assert (said["model"], said["method"]) == ("monotone", "match")
    assert manifest["scorer"] is None
    assert not list((tmp_path / "model").glob("scorer*"))


@pytest.mark.parametrize(
    ("arguments", "family"),
    [
        (("--ranker", "ranksvm", "--examination", "harvest"), "linear"),
        (("--ranker", "lambdarank", "--learn-from", "relevance"), "network"),
        (("--ranker", "lambdarank-trees"), "trees"),
    ],
)
def test_rankers_of_other_papers(
    folder: Path, tmp_path: Path, command: Any, arguments: tuple[object, ...], family: str
) -> None:
    (tmp_path / "quick.toml").write_text(QUICK + "[svm]\ntraining = {epochs = 1}\n")
    flags = ("--config", tmp_path / "quick.toml", "--no-onnx", "--seed", 3, *arguments)
    result = command("train", folder / "sim" / "log.parquet", "-o", tmp_path / "model", *flags)
    assert result.code == 0, result
    assert f"ranks by score: {arguments[1]} ranks by its scores" in " ".join(result.stdout.split())
    model = load_model(tmp_path / "model")
    assert model.scorer is not None
    assert (model.scorer.family, model.method) == (family, "score")
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert manifest["config"]["ranker"] == arguments[1]
    assert manifest["config"]["svm"]["seed"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "quick.toml"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--examination", "em"),
            "examination is only for the rankers lambdarank, lambdarank-trees, ranknet, ",
        ),
        (("--ranker", "ranksvm", "--examination", "nowhere.json"), "nowhere.json"),
        (("--ranker", "lambdarank", "--learn-from", "hearsay"), "baseline.learn_from in the model: input should be"),
        (("--click-model", "oracle"), "clicks.families.0 in the model: input should be 'shrunk'"),
        (("--calibration", "magic"), "clicks.calibration in the model: input should be 'none'"),
        (("--device", "abacus"), "clicks.training.device in the model: input should be 'auto'"),
        (("--ranker", "magic"), "ranker in the model: input should be 'network', 'trees', 'lambdarank', "),
        (("--method", "magic"), "method in the model: input should be 'auto', 'score', 'match' or 'ctr1'; got 'magic'"),
        (("--target", "truth"), "scorer.target in the model: input should be 'model', 'counterfactual' or 'blend'"),
        (("--form", "best"), "scorer.form in the model: input should be 'stable' or 'paper'; got 'best'"),
        (("--backbone", "bert"), "clicks.backbone in the model: input should be 'mlp', 'deepfm', 'pnn' or 'pin'; got "),
        (("--ranker", "none", "--method", "score"), "method score needs a ranker with scores; got ranker 'none'"),
        (("--ranker", "trees", "--form", "paper"), "ranker trees needs the stable form of the loss; got form 'paper'"),
        (("--truth", "nowhere"), "nowhere holds no truth"),
        (("--memory", "4"), "memory must be a number with one of MB, GB"),
        (
            ("--output", "s3://bucket/model"),
            "--output must be a local folder, not a URL; got s3:/bucket/model",
        ),
        (("--memory", "1GB"), "memory must be at least 2GB"),
        (("--workers", 2), "--workers belongs to --engine ray; the engine is local"),
        (("--config", "nowhere.toml"), "nowhere.toml cannot be read: No such file or directory"),
    ],
)
def test_refusals(folder: Path, tmp_path: Path, command: Any, arguments: tuple[object, ...], sentence: str) -> None:
    result = command("train", folder / "sim" / "log.parquet", "-o", tmp_path / "out", "--epochs", 1, *arguments)
    assert sentence in result.refusal
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[clicks]\ntraining = 3", "clicks.training in FILE: input should be a valid dictionary"),
        (
            "families = ['pbm']",
            "families is not a key of FILE; the keys are goal, ranker, method, judges, clicks",
        ),
        ("[scorer]\ncolour = 1", "scorer.colour is not a key of FILE"),
        ("[trees]\nleaves = 1", "trees.leaves in FILE: input should be greater than or equal to 2; got 1"),
        ("clicks = 3", "clicks in FILE: input should be a valid dictionary"),
        ("baseline = 3", "baseline in FILE: input should be a valid dictionary"),
        ("svm = 'c'", "svm in FILE: input should be a valid dictionary"),
        ("[clicks", "FILE is not TOML: "),
    ],
)
def test_files_that_are_refused(folder: Path, tmp_path: Path, command: Any, text: str, sentence: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    result = command("train", folder / "sim" / "log.parquet", "-o", tmp_path / "out", "--config", file)
    assert sentence.replace("FILE", str(file)) in result.refusal
    assert [path.name for path in tmp_path.iterdir()] == ["settings.toml"]


def test_an_existing_model_is_kept(folder: Path, command: Any) -> None:
    result = command("train", folder / "sim" / "log.parquet", "-o", folder / "model")
    assert result.refusal.endswith("exists already; choose another name or pass --overwrite")
