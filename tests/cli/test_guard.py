"""`urank guard`: the table, the page, JSON, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pages import Page
from simulated import Small

QUICK = ("--seed", 0)


def test_table_and_page(small: Small, saved: Path, tmp_path: Path, command: Any) -> None:
    page = tmp_path / "guard.html"
    result = command("guard", saved, small.dataset.folder, *QUICK, "--html", page, "--truth", small.folder)
    assert result.code == 0, result.stderr
    starts = [line.split()[:2] for line in result.stdout.splitlines()]
    for name in (["shift", "1"], ["shift", "2"], ["shift", "3"], ["shift", "5"]):
        assert name in starts
    assert {"logged", "unbounded"} <= {line[0] for line in starts if line}
    said = " ".join(result.stdout.split())
    for word in ("value@10", "mean move", "largest", "other first", "true gain"):
        assert word in said
    assert "launch score " in said or "no level is recommended: " in said
    assert said.endswith(f"The same as a page: {page}")
    parsed = Page()
    parsed.feed(page.read_text())
    assert {"table", "svg"} <= set(parsed.tags)
    assert all(source.startswith("data:") for source in parsed.fetched)


def test_json(small: Small, saved: Path, command: Any) -> None:
    flags = ("--kind", "blend", "--levels", "0.5,0.2", "--method", "match", "--truth", small.folder, "--json")
    result = command("guard", saved, small.dataset.folder, *flags, *QUICK)
    assert (result.code, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert (told["kind"], told["policy"], told["estimator"], told["splits"]) == ("blend", "match", "refit", ["test"])
    assert [level["guard"] for level in told["levels"]] == ["blend:0.2", "blend:0.5", "blend:1"]
    assert told["logged"]["name"] == "logged"
    assert told["rows"] == small.dataset.rows("test")
    true = [told["logged"]["true"]["10"], *(level["true"] for level in told["levels"])]
    assert true[0] < true[-1]  # what was learned is better than what was logged
    assert all(true[0] - 0.01 < each < true[-1] + 0.01 * true[-1] for each in true)
    moved = [level["mean_move"] for level in told["levels"]]
    assert 0 < moved[0] < moved[1] < moved[2]
    assert told["recommended"] in (None, "blend 0.2", "blend 0.5", "blend 1")
    for level in told["levels"]:
        assert level["difference"]["low"] < level["difference"]["high"]
        assert 0 <= level["other_first"] <= 1


def test_a_log_that_is_not_prepared(small: Small, saved: Path, tmp_path: Path, command: Any) -> None:
    log = small.simulation.log.filter(pl.col("query_id") < "q000100").rename({"click": "clicked"})
    log.write_parquet(tmp_path / "new.parquet")
    flags = ("-c", "click=clicked", "--split", "all", "--levels", 1, "--json")
    result = command("guard", saved, tmp_path / "new.parquet", *flags, *QUICK)
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout)["queries"] == 100


def test_quiet(small: Small, saved: Path, tmp_path: Path, command: Any) -> None:
    page = tmp_path / "page.html"
    result = command("guard", saved, small.dataset.folder, "-q", "--levels", 2, "--html", page, *QUICK)
    assert (result.code, result.stdout, result.stderr) == (0, "", "")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("paths", "flags", "sentence"),
    [
        (
            ("MODEL", "LOG"),
            ("--levels", "1,two"),
            "--levels takes numbers separated by commas, as 1,2,5; got '1,two'",
        ),
        (("MODEL", "LOG"), ("--levels", ""), "--levels takes numbers separated by commas, as 1,2,5; got ''"),
        (("MODEL", "LOG"), ("--levels", "1.5"), "the level of a shift must be a whole number from 0 up; got 1.5"),
        (("MODEL", "LOG"), ("--kind", "blend", "--levels", "2"), "the level of a blend must be from 0 to 1; got 2"),
        (
            ("MODEL", "LOG"),
            ("--estimator", "snips"),
            "estimator snips cannot evaluate a guard, which follows the logged",
        ),
        (("MODEL", "LOG"), ("--split", "tset"), "split must be train, valid, test or all; got 'tset'"),
        (("MODEL", "LOG"), ("--truth", "nowhere"), "nowhere holds no truth"),
        (("MODEL", "LOG"), ("--drop", "f1"), "LOG is prepared already: options about its columns belong to"),
        (("nowhere", "LOG"), (), "nowhere is not a urank model: it does not exist"),
        (("MODEL", "nowhere.parquet"), (), "nowhere.parquet does not exist"),
        (("MODEL", "FEWER"), (), "policy 'score, shift 1' needs the column 'f4', which the log does not have"),
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
    names = {"MODEL": saved, "LOG": small.dataset.folder, "FEWER": tmp_path / "fewer.parquet"}
    small.simulation.log.drop("f4").write_parquet(names["FEWER"])
    refusal = command("guard", *(names.get(path, path) for path in paths), *flags).refusal
    for name, path in names.items():
        refusal = refusal.replace(str(path), name)
    assert sentence in refusal


def test_flags_out_of_range_exit_with_2(small: Small, saved: Path, command: Any) -> None:
    for flags in (("--kind", "jump"), ("--method", "magic"), ("--floor", 2), ("--seed", -1)):
        result = command("guard", saved, small.dataset.folder, *flags)
        assert (result.code, result.stdout) == (2, "")
        assert str(flags[0]) in result.stderr


def test_help(command: Any) -> None:
    text = command("guard", "--help").stdout
    assert "Example:" in text
    for flag in ("--kind", "--levels", "--method", "--json", "--html", "--truth", "--split"):
        assert flag in text
