"""`urank reproduce`, as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w

from lab.tiny import TINY, half_written
from pages import Page
from urank.lab.experiment import EXPERIMENTS
from urank.lab.letor_experiment import METHODS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tiny") / "tiny.toml"
    training = {"epochs": 1, "batch_lists": 64}
    once = {name: {**TINY[name], "training": training} for name in ("clicks", "scorer", "faithful", "svm", "cpbm")}
    enough = {"simulation": {**TINY["simulation"], "features": 12, "queries": 120}}  # attention depends on up to 10
    file.write_text(tomli_w.dumps(TINY | once | enough))
    return file


@pytest.mark.slow
def test_everything_from_start_to_end(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "reproduction"
    arguments = ("all", "-o", output, "--config", tiny, "--seeds", 2, "--workers", 1, "--json")
    done = subprocess.run(
        [sys.executable, "-m", "urank", "reproduce", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["what"] == list(EXPERIMENTS)
    assert told["seeds"] == 2
    assert {name: len(tables) for name, tables in told["sweeps"].items()} == {"attention": 5, "users": 6}
    assert told["provenance"]["command"] == "urank reproduce all --seeds 2 --config tiny.toml"
    clicks = {row["key"]: row["mean"]["#Click"] for row in told["rows"]}
    assert max(clicks, key=lambda key: clicks[key]) == "km"
    results = pl.read_parquet(output / "results.parquet")
    assert results.height == len(METHODS) * told["queries"]
    page = Page()
    page.feed((output / "report.html").read_text(encoding="utf-8"))
    assert {"table", "svg"} <= set(page.tags)
    assert page.fetched == []
    assert half_written(output) == []


def test_terminal_page_and_quiet(tiny: Path, tmp_path: Path, command: Any) -> None:
    flags = ("-o", tmp_path / "out", "--config", tiny, "--seeds", 1, "--workers", 1)
    done = command("reproduce", "fig-result-list", *flags)
    assert (done.code, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())
    assert "KM (oracle model)" in said
    assert said.endswith(f"The report is {tmp_path / 'out' / 'report.html'}")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Figure 3" in page
    assert "Table 1" not in page
    quiet = command("reproduce", "fig-result-list", *flags, "--quiet")
    assert (quiet.code, quiet.stdout, quiet.stderr) == (0, "", "")


def test_refusals(tiny: Path, tmp_path: Path, command: Any) -> None:
    def refused(*arguments: object) -> str:
        sentence: str = command("reproduce", *arguments, "-o", tmp_path / "out", "--workers", 1).refusal
        return sentence

    assert refused("table9").startswith("there are the experiments table1")
    assert refused("table1", "--config", tmp_path / "no.toml").endswith(
        "no.toml cannot be read: No such file or directory"
    )
    assert refused("table1", "--dataset", "letor").endswith("got 'letor'")
    assert refused("table1", "--dataset", "yahoo").startswith("dataset names the given data")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[scorer]\nsigmoid = 1\n")
    assert refused("table1", "--config", wrong).startswith(f"scorer.sigmoid is not a key of {wrong}")
    assert not (tmp_path / "out").exists()

    assert "absent.txt" in refused("table1", "--config", tiny, "--data", tmp_path / "absent.txt", "--seeds", 1)
    assert half_written(tmp_path / "out") == []
    done = command(
        "reproduce", "fig-result-list", "-o", tmp_path / "out", "--config", tiny, "--seeds", 1, "--workers", 1
    )
    assert done.code == 0
    assert "other settings" in refused("fig-result-list", "--seeds", 1)
