"""`urank evaluate`: the table, the page, JSON, and refusals in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pages import Page
from simulated import Small
from urank.model_io import save_model
from urank.pipeline import ModelFit
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import UrankConfig

QUICK = ("--seed", 0)


def test_table_and_page(small: Small, saved: Path, tmp_path: Path) -> None:
    """As a person runs it."""
    page = tmp_path / "evaluation.html"
    arguments = [saved, small.dataset.folder, *QUICK, "--html", page, "--truth", small.folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    result = subprocess.run(
        [sys.executable, "-m", "urank", "evaluate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for name in ("logged", "score", "match", "ctr1", "random"):
        assert any(line.split()[:1] == [name] for line in lines), result.stdout
    said = " ".join(result.stdout.split())
    assert said.startswith(("New ranking (", "No clear gain: ", "Keep the logged order: "))
    for word in ("doubly_robust", "self_normalised", "value@10", "true@10"):
        assert word in said
    assert said.endswith(f"The same as a page: {page}")
    parsed = Page()
    parsed.feed(page.read_text())
    assert "table" in parsed.tags
    assert all(source.startswith("data:") for source in parsed.fetched)  # nothing is loaded from elsewhere


@pytest.fixture
def found(small: Small, saved: Path, command: Any) -> dict[str, Any]:
    result = command("evaluate", saved, small.dataset.folder, "--json", "--truth", small.folder, *QUICK)
    assert (result.code, result.stderr) == (0, "")
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_json(small: Small, found: dict[str, Any]) -> None:
    assert [policy["name"] for policy in found["policies"]] == ["logged", "score", "match", "ctr1", "random"]
    assert (found["estimator"], found["measure"], found["splits"]) == ("refit", "value", ["test"])
    assert found["rows"] == small.dataset.rows("test")
    assert len(found["clicks"]) == 2
    for policy in found["policies"]:
        assert list(policy["utility"]) == ["1", "3", "5", "10"]
        assert policy["true"]["10"] > 0
    score = found["policies"][1]
    assert score["true_difference"]["mean"] > 0  # what was learned is better than what was logged
    assert set(score["estimates"]) == {"refit", "direct", "ratio", "self_normalised", "doubly_robust", "ips", "snips"}


def test_several_models(small: Small, saved: Path, fitted: ModelFit, tmp_path: Path, command: Any) -> None:
    save_model(RankingModel(fitted.model.clicks), UrankConfig(ranker="none"), tmp_path / "other", onnx=False)
    result = command("evaluate", saved, tmp_path / "other", small.dataset.folder, "--json", *QUICK)
    assert result.code == 0, result.stderr
    told = json.loads(result.stdout)
    names = [policy["name"] for policy in told["policies"]]
    assert names == ["logged", "model score", "model match", "model ctr1", "other match", "other ctr1", "random"]
    by_name = {policy["name"]: policy for policy in told["policies"]}
    assert by_name["model match"]["utility"] == by_name["other match"]["utility"]  # the same click model
    assert "true" not in by_name["logged"]


def test_a_log_that_is_not_prepared(small: Small, saved: Path, tmp_path: Path, command: Any) -> None:
    """Names of columns can be given, and every query counts if asked for."""
    log = small.simulation.log.rename({"click": "clicked"}).drop("propensity")
    log.filter(pl.col("query_id") < "q000200").write_parquet(tmp_path / "new.parquet")
    flags = ("-c", "click=clicked", "--split", "all", "--estimator", "ratio", "--floor", 0.05, "--seed", 2)
    result = command("evaluate", saved, tmp_path / "new.parquet", *flags, "--json", *QUICK)
    assert result.code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["queries"], told["splits"]) == (200, ["train", "valid", "test"])
    assert (told["estimator"], told["floor"]) == ("ratio", 0.05)
    earned = log.filter(pl.col("query_id") < "q000200").select((pl.col("clicked") * pl.col("value")).sum()).item()
    assert told["policies"][0]["utility"]["10"]["mean"] == pytest.approx(earned / told["lists"])
    assert set(told["policies"][1]["estimates"]) == {"refit", "direct", "ratio", "self_normalised", "doubly_robust"}


def test_quiet(small: Small, saved: Path, tmp_path: Path, command: Any) -> None:
    page = tmp_path / "page.html"
    result = command("evaluate", saved, small.dataset.folder, "-q", "--html", page, *QUICK)
    assert (result.code, result.stdout, result.stderr) == (0, "", "")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("paths", "flags", "sentence"),
    [
        (("MODEL",), (), "urank evaluate takes one or more models and, last, a log; got only one path"),
        (("MODEL", "LOG"), ("--split", "tset"), "split must be train, valid, test or all; got 'tset'"),
        (("MODEL", "LOG"), ("--estimator", "magic"), "estimator must be auto, refit or one of direct, ratio, "),
        (("MODEL", "LOG"), ("--truth", "nowhere"), "nowhere holds no truth"),
        (("MODEL", "LOG"), ("--drop", "f1"), "LOG is prepared already: options about its columns belong to"),
        (("LOG", "LOG"), (), "LOG is not a urank model: its manifest.json cannot be read"),
        (("nowhere", "LOG"), (), "nowhere is not a urank model: it does not exist"),
        (("MODEL", "MODEL", "LOG"), (), "policies must have distinct names; 'MODEL score' occurs twice"),
        (("MODEL", "nowhere.parquet"), (), "nowhere.parquet does not exist"),
        (("MODEL", "FEWER"), (), "policy 'score' needs the column 'f4', which the log does not have"),
        (("MODEL", "CHEAP"), ("--estimator", "direct"), "policy 'score' needs the column 'value', which the log does"),
        (("MODEL", "CHEAP"), ("--estimator", "ips"), "estimator ips needs the column propensity"),
        (("MODEL", "LOG"), ("--memory", "lots"), "memory must be a number with one of MB, GB, TB"),
        (("MODEL", "LOG"), ("--address", "auto"), "--address belongs to --engine ray; the engine is local"),
        (("MODEL", "CHEAP"), ("--engine", "ray"), "the engine ray evaluates on a prepared log; run urank prepare"),
    ],
)
def test_refusals(
    small: Small,
    saved: Path,
    tmp_path: Path,
    command: Any,
    paths: tuple[str, ...],
    flags: tuple[object, ...],
    sentence: str,
) -> None:
    names = {"MODEL": saved, "LOG": small.dataset.folder}
    names |= {name: tmp_path / f"{name}.parquet" for name in ("FEWER", "CHEAP")}
    small.simulation.log.drop("f4").write_parquet(names["FEWER"])
    small.simulation.log.drop("value", "propensity").write_parquet(names["CHEAP"])
    refusal = command("evaluate", *(names.get(path, path) for path in paths), *flags).refusal
    for name, path in names.items():
        refusal = refusal.replace(str(path), name)
    assert sentence in refusal


def test_flags_out_of_range_exit_with_2(small: Small, saved: Path, command: Any) -> None:
    for flags in (("--floor", 2), ("--seed", -1), ("--colour", "red")):
        result = command("evaluate", saved, small.dataset.folder, *flags)
        assert (result.code, result.stdout) == (2, "")
        assert str(flags[0]) in result.stderr


def test_a_damaged_model(small: Small, saved: Path, tmp_path: Path, command: Any) -> None:
    shutil.copytree(saved, tmp_path / "model")
    (tmp_path / "model" / "scorer.safetensors").write_bytes(b"garbage")
    refusal = command("evaluate", tmp_path / "model", small.dataset.folder).refusal
    assert "is damaged and cannot be loaded" in refusal


def test_help(command: Any) -> None:
    text = command("evaluate", "--help").stdout
    assert "Example:" in text
    for flag in ("--json", "--html", "--truth", "--split"):
        assert flag in text
