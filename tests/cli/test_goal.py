"""`--goal conversions` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import urank

QUICK = ("--click-model", "monotone", "--ranker", "none", "--epochs", 1, "-q")


@pytest.fixture
def booked(tmp_path: Path, command: Any) -> Path:
    """A simulated log in which every second click is followed by a booking."""
    sizes = ("--queries", 150, "--features", 3, "--candidates", 5, "--positions", 5)
    assert command("simulate", "-o", tmp_path / "sim", *sizes, "-q").code == 0
    path = tmp_path / "sim" / "log.parquet"
    log = pl.read_parquet(path).with_row_index()
    log.with_columns(booked=((pl.col("index") % 2 == 0) & (pl.col("click") == 1)).cast(pl.Int8)).drop(
        "index"
    ).write_parquet(tmp_path / "log.parquet")
    return tmp_path


def test_train_and_evaluate(booked: Path, command: Any) -> None:
    log, role = booked / "log.parquet", ("-c", "conversion=booked")
    assert command("prepare", log, "-o", booked / "prepared", *role, "--valid", 0.2, "--test", 0.3).code == 0
    for goal in ("clicks", "conversions"):
        found = command("train", booked / "prepared", "-o", booked / goal, "--goal", goal, *QUICK)
        assert found.code == 0, found.stderr
    manifest = json.loads((booked / "conversions" / "manifest.json").read_text())
    assert manifest["config"]["goal"] == "conversions"
    assert "conversion differs by list: " in manifest["why"]
    measures = {
        flags: json.loads(command("evaluate", booked / "conversions", booked / "prepared", "--json", *flags).stdout)[
            "measure"
        ]
        for flags in ((), ("--goal", "clicks"))
    }
    assert measures == {(): "conversions", ("--goal", "clicks"): "clicks"}
    told = command("guard", booked / "conversions", booked / "prepared", "--levels", "1")
    assert "conversions@5" in told.stdout
    two = command("evaluate", booked / "clicks", booked / "conversions", booked / "prepared")
    assert two.refusal.startswith("the models have different goals")
    true = command("evaluate", booked / "conversions", booked / "prepared", "--truth", booked / "sim")
    assert true.refusal == "--truth knows the clicks of a simulation, not its conversions; leave out --truth"


def test_the_whole_job(booked: Path, command: Any) -> None:
    flags = ("-c", "conversion=booked", "--goal", "conversions", "--click-model", "monotone", "--ranker", "none")
    found = command("run", booked / "log.parquet", "-o", booked / "job", *flags, "--test", 0.3, "--force")
    assert found.code == 0, found.stderr
    said = " ".join(found.stdout.split())
    assert "conversions (95 % interval" in said
    assert "conversion differs by list" in said
    assert json.loads((booked / "job" / "evaluation.json").read_text())["measure"] == "conversions"


def test_a_log_without_the_role_is_refused(booked: Path, command: Any) -> None:
    log = booked / "log.parquet"
    urank.prepare(urank.read(log), booked / "prepared")
    for name, source in (("train", booked / "prepared"), ("train", log), ("run", log)):
        found = command(name, source, "-o", booked / "model", "--goal", "conversions")
        assert found.refusal == (
            f"--goal conversions needs the role conversion, which {log} does not have; name its column: "
            "-c conversion=COLUMN"
        )
        assert not (booked / "model").exists()
