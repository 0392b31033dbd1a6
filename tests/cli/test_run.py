"""`urank run`: the whole job, as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    sizes = ("--queries", 150, "--features", 4, "--sessions", 4, "--valid", 0.2, "--test", 0.3)
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
    assert (job / "prepared" / "schema.json").is_file()
    candidates = pl.read_parquet(sim / "truth" / "candidates.parquet")
    assert model.rank(candidates)["position"].max() == 10


def test_refusals_leave_nothing_behind(folder: Path, command: Any) -> None:
    for flags, sentence in (
        (("--truth", folder / "absent"), "no truth"),
        (("--ranker", "magic"), "ranker"),
        (("--column", "position=nowhere"), "has no column 'nowhere'"),
    ):
        done = command("run", folder / "sim" / "log.parquet", "-o", folder / "refused", *flags)
        assert sentence in done.refusal
        assert not (folder / "refused").exists()
