"""`urank appstore`, and the commands that come after it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from urank.lab.market import MarketConfig

TINY = (
    *("--users", "200", "--apps", "40", "--candidates", "12", "--positions", "6", "--visits", "1.2"),
    *("--log-days", "3", "--warmup-days", "1", "--random-days", "5", "--random-visits", "50", "--bids", "1:5"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, with its log cut at the last day into `first.parquet` and `last.parquet`."""
    folder = tmp_path_factory.mktemp("appstore") / "store"
    command = [sys.executable, "-m", "urank", "appstore", "-o", str(folder), *TINY, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    log = pl.read_parquet(folder / "log.parquet")
    told = json.loads(done.stdout)
    downloads = int(log["click"].cast(pl.Int64).sum())
    assert told["folder"] == str(folder)
    assert (told["impressions"], told["visits"], told["downloads"]) == (log.height, log.height // 6, downloads)
    assert told["downloads_per_visit"] == downloads / (log.height // 6)
    assert (told["config"]["users"], told["config"]["bids"]) == (200, [1.0, 5.0])
    assert told["config"]["drift"] == MarketConfig().drift
    day = pl.col("timestamp").dt.date()
    last = log.select(day.max()).item()
    log.filter(day == last).write_parquet(folder.parent / "last.parquet")
    log.filter(day < last).write_parquet(folder.parent / "first.parquet")
    assert log.select(day.min()).item() == last - timedelta(days=2)
    return folder


def test_the_log_has_the_columns_that_the_help_tells(store: Path, command: Any) -> None:
    text = command("appstore", "--help").stdout
    log = pl.read_parquet(store / "log.parquet")
    assert all(name.rpartition("_")[0] in text or name in text for name in log.columns)
    assert log["value"].is_between(1, 5).all()
    default = MarketConfig()
    shown = (f"[{default.users}]", f"[{default.bids[0]:g}:{default.bids[1]:g}]")
    commands = ("urank inspect", "urank examination", "urank run", "urank evaluate")
    assert [told for told in ("Example:", "--json", *shown, *commands) if told not in text] == []


def test_the_configuration_makes_the_same_bytes_again_and_flags_come_before_it(
    store: Path, tmp_path: Path, command: Any
) -> None:
    done = command("appstore", "-o", tmp_path / "again", "--config", store / "appstore.toml")
    log = pl.read_parquet(store / "log.parquet")
    rate = log["click"].cast(pl.Int64).sum() / (log.height // 6)
    assert done.stdout == (
        f"{log.height:,} impressions in {log.height // 6:,} visits, {rate:.3f} downloads per visit, "
        f"written to {tmp_path / 'again'}\n"
    )
    for name in ("log.parquet", "random.parquet", "appstore.toml", "truth/candidates.parquet"):
        assert (tmp_path / "again" / name).read_bytes() == (store / name).read_bytes()
    flags = ("--config", store / "appstore.toml", "--seed", 4, "--random-days", 1, "--overwrite", "--quiet")
    done = command("appstore", "-o", tmp_path / "again", *flags)
    assert (done.code, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "again" / "log.parquet").read_bytes() != (store / "log.parquet").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--users", 1), "users in the app store: input should be greater than or equal to 2; got 1"),
        (("--bids", "1-10"), "--bids takes 2 numbers separated by colons; got '1-10'"),
        (("--bids", "0:1"), "bids must be a lowest bid above 0 and a highest; got (0.0, 1.0)"),
        (
            ("--positions", 40, "--candidates", 20, "--apps", 400),
            "positions must be at most candidates, and candidates at most apps; got 40, 20 and 400",
        ),
        (("--config", "absent.toml"), "absent.toml cannot be read: No such file or directory"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any, arguments: tuple[object, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("appstore", "-o", "out", *arguments).refusal == sentence
    assert list(tmp_path.iterdir()) == []


def test_a_taken_folder_is_refused(store: Path, tmp_path: Path, command: Any) -> None:
    assert "exists already; choose another name or pass --overwrite" in command("appstore", "-o", store, *TINY).refusal
    (tmp_path / "notes.txt").write_text("years of work")
    assert "holds something else" in command("appstore", "-o", tmp_path, *TINY, "--overwrite").refusal


# What comes next


def test_inspect(store: Path, command: Any) -> None:
    found = json.loads(command("inspect", store / "log.parquet", "--json").stdout)
    assert found["verdict"]["level"] in ("learnable", "partly learnable")
    assert command("inspect", store / "random.parquet").code == 0


def test_examination_by_category(store: Path, command: Any) -> None:
    flags = ("--by", "category", "--json")
    found = json.loads(command("examination", "randomised", store / "random.parquet", *flags).stdout)
    assert len(found["overall"]["examination"]) == 6
    assert set(found["categories"]) <= set(pl.read_parquet(store / "random.parquet")["category"])


def test_evaluate_the_last_day_beside_the_truth(store: Path, tmp_path: Path, command: Any) -> None:
    last, first, model = store.parent / "last.parquet", store.parent / "first.parquet", tmp_path / "model"
    assert command("prepare", first, "-o", tmp_path / "prepared", "-q").code == 0
    trained = ("--click-model", "pbm", "--ranker", "none", "--no-onnx", "-q")
    assert command("train", tmp_path / "prepared", "-o", model, *trained).code == 0
    flags = ("--split", "all", "--truth", store, "--json")
    judged = json.loads(command("evaluate", model, last, *flags).stdout)
    log = pl.read_parquet(last)
    assert (judged["rows"], judged["queries"], judged["measure"]) == (log.height, log.height // 6, "value")
    table = pl.read_parquet(store / "truth" / "candidates.parquet")["table"]  # in the order of the log
    worth = log.with_columns(table).select(pl.col("table").list.get(pl.col("position") - 1) * pl.col("value"))
    (logged,) = (policy for policy in judged["policies"] if policy["name"] == "logged")
    assert logged["true"]["6"] == pytest.approx(worth.to_series().sum() / (log.height // 6), rel=1e-5)
