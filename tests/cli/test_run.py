"""`urank run`: the whole job, as a person runs it."""

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

from pages import Page
from urank.model_io import load_model


def urank(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "urank", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    sizes = ("--queries", 150, "--features", 4, "--sessions", 8, "--valid", 0.2, "--test", 0.3)
    assert urank("simulate", "-o", folder / "sim", *sizes, "-q").returncode == 0
    return folder


def test_the_whole_job(folder: Path) -> None:
    sim, job = folder / "sim", folder / "job"
    flags = ("--click-model", "pbm", "--drop", "relevance", "--drop", "propensity", "--valid", 0.2, "--test", 0.3)
    done = urank("run", sim / "log.parquet", "-o", job, *flags, "--truth", sim)
    assert done.returncode == 0, done.stderr
    for word in ("logged", "match", "score", "ctr1", "random", "true@10", "clicks@10", str(job / "report.html")):
        assert word in done.stdout
    page = Page()
    page.feed((job / "report.html").read_text(encoding="utf-8"))
    assert "svg" in page.tags
    assert page.fetched == []
    told = json.loads((job / "evaluation.json").read_text(encoding="utf-8"))
    assert {policy["name"] for policy in told["policies"]} == {"logged", "match", "score", "ctr1", "random"}
    model = load_model(job / "model")
    assert told["method"] == model.method
    assert "left_out" not in told
    assert (job / "prepared" / "schema.json").is_file()
    candidates = pl.read_parquet(sim / "truth" / "candidates.parquet")
    assert model.rank(candidates)["position"].max() == 10


def with_outcomes(folder: Path) -> Path:
    """The simulated log with two outcomes of the click."""
    path = folder / "outcomes.parquet"
    log = pl.read_parquet(folder / "sim" / "log.parquet").drop("relevance", "propensity")
    log.with_columns(dwell=pl.col("click") * 7.5, bought=pl.col("click") == 1).write_parquet(path)
    return path


def test_outcomes_of_the_click_are_left_out_and_named_first(folder: Path, tmp_path: Path, command: Any) -> None:
    flags = ("--click-model", "pbm", "--ranker", "none", "--keep", "bought")
    done = command("run", with_outcomes(folder), "-o", tmp_path / "job", *flags)
    assert done.code == 0, done.stderr
    assert any("dwell" in line and "--keep NAME" in line for line in done.stdout.splitlines()[:4])
    assert json.loads((tmp_path / "job" / "evaluation.json").read_text(encoding="utf-8"))["left_out"] == ["dwell"]
    names = load_model(tmp_path / "job" / "model").clicks.featurizer.names
    assert "bought" in names
    assert "dwell" not in names


def test_it_takes_what_its_parts_take(folder: Path, tmp_path: Path, command: Any) -> None:
    """Shuffled lists over time, with the value of an order, through every flag of prepare, train and evaluate."""
    rng, log = np.random.default_rng(0), pl.read_parquet(folder / "sim" / "log.parquet")
    lists, query = ["query_id", "session_id"], pl.col("query_id").rank("dense")
    log.with_columns(chance=pl.Series(rng.random(log.height)), price=pl.Series(rng.integers(1, 9, log.height))).select(
        "query_id",
        "session_id",
        "item_id",
        "click",
        pl.col("^f[0-9]+$"),
        "price",
        position=pl.col("chance").rank("ordinal").over(lists),
        traffic=pl.when(query % 2 == 0).then(pl.lit("shuffle")).otherwise(pl.lit("production")),
        bought=pl.col("click") * (query % 3 > 0).cast(pl.Int64),
        shown=pl.datetime(2026, 1, 1) + pl.duration(hours=query),
    ).write_parquet(tmp_path / "log.parquet")
    roles = {"policy": "traffic", "value": "price", "conversion": "bought", "timestamp": "shown"}
    columns = [word for role, name in roles.items() for word in ("-c", f"{role}={name}")]
    flags = ("--split-by", "time", "--test", 0.3, "--positions", 10, "--randomised", "policy=shuffle")
    quick = ("--goal", "conversions", "--click-model", "pbm", "--ranker", "none", "--force")
    done = command("run", tmp_path / "log.parquet", "-o", tmp_path / "job", *columns, *flags, *quick)
    assert done.code == 0, done.stderr
    schema = json.loads((tmp_path / "job" / "prepared" / "schema.json").read_text(encoding="utf-8"))
    assert (schema["split"]["by"], schema["split"]["test"], schema["positions"]) == ("time", 0.3, 10)
    told = json.loads((tmp_path / "job" / "evaluation.json").read_text(encoding="utf-8"))
    assert told["randomised"]["lists"] > 0
    model = load_model(tmp_path / "job" / "model")
    assert (model.goal, dict(model.columns)) == ("conversions", roles)


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"click": pl.lit(0)}, "nothing was ever clicked", "check the column that plays 'click'"),
        ({"click": pl.lit(1)}, "everything was clicked", "also log the items that were shown and not clicked"),
        (
            {"item_id": pl.col("position")},
            "every item was always shown at the same position",
            "show a small share of the traffic in randomised order",
        ),
    ],
)
def test_a_log_that_is_not_learnable_is_refused(
    folder: Path, tmp_path: Path, command: Any, change: dict[str, pl.Expr], reason: str, remedy: str
) -> None:
    path = tmp_path / "log.parquet"
    pl.read_parquet(folder / "sim" / "log.parquet").with_columns(**change).write_parquet(path)
    refusal = command("run", path, "-o", tmp_path / "job").refusal
    assert refusal.startswith(f"{path} is not learnable: {reason}; {remedy}")
    assert refusal.endswith(", or go on with --force")
    assert list(tmp_path.iterdir()) == [path]


def test_force_goes_on_with_a_log_that_is_not_learnable(folder: Path, tmp_path: Path, command: Any) -> None:
    path = tmp_path / "log.parquet"
    log = pl.read_parquet(folder / "sim" / "log.parquet").with_columns(item_id=pl.col("position"))
    log.drop("relevance", "propensity").write_parquet(path)
    flags = ("--click-model", "pbm", "--ranker", "none", "--force")
    done = command("run", path, "-o", tmp_path / "job", *flags)
    assert done.code == 0, done.stderr
    assert "The log is not learnable: every item was always shown at the same position." in done.stdout


@pytest.mark.parametrize("verb", ["run", "train"])
def test_a_truth_of_other_queries_is_refused_before_the_training(
    folder: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was trained")

    monkeypatch.setattr("urank.pipeline.fit_model", fail)
    log, split = folder / "sim" / "log.parquet", ("--test", 0.5)
    if verb == "train":
        assert command("prepare", log, "-o", folder / "prepared", *split, "-q").code == 0
        log, split = folder / "prepared", ()
    refusal = command(verb, log, "-o", tmp_path / "job", "--truth", folder / "sim", *split).refusal
    assert "the truth does not contain the item" in refusal
    assert "--test" in refusal
    assert list(tmp_path.iterdir()) == []


def test_refusals_leave_nothing_behind(folder: Path, command: Any) -> None:
    for flags, sentence in (
        (("--truth", folder / "absent"), "no truth"),
        (("--ranker", "magic"), "ranker"),
        (("--column", "position=nowhere"), "has no column 'nowhere'"),
        (("--keep", "nowhere"), "keep must name features; got 'nowhere'"),
    ):
        done = command("run", folder / "sim" / "log.parquet", "-o", folder / "refused", *flags)
        assert sentence in done.refusal
        assert not (folder / "refused").exists()
