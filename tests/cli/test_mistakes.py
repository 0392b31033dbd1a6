"""What a newcomer's first log gets wrong: one sentence with the remedy, exit code 2, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

if TYPE_CHECKING:
    from cli.conftest import Command


QUERIES = 60


def log() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    rows = 5 * QUERIES
    return pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(QUERIES), 5),
            "item_id": rng.integers(0, 40, rows),
            "position": np.tile(np.arange(1, 6), QUERIES),
            "click": (rng.random(rows) < 0.2).astype(int),
            "price": rng.random(rows),
        }
    )


def text(frame: pl.DataFrame, encoding: str = "utf-8") -> bytes:
    return frame.write_csv().encode(encoding)


MISTAKES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "positions from 0": ("log.csv", lambda: text(log().with_columns(pl.col("position") - 1)), "--first-position 0"),
    "yes and no": (
        "log.csv",
        lambda: text(
            log().with_columns(click=pl.when(pl.col("click") == 1).then(pl.lit("yes")).otherwise(pl.lit("no")))
        ),
        "--binarise",
    ),
    "counts of clicks": ("log.csv", lambda: text(log().with_columns(pl.col("click") * 3)), "--binarise"),
    "UTF-16": ("log.csv", lambda: text(log(), "utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "a list twice": ("log.csv", lambda: text(pl.concat([log(), log().head(3)])), "--column session_id=NAME"),
    "a missing click": (
        "log.csv",
        lambda: text(log().with_columns(pl.col("click").replace(1, None))),
        "write 0 where nothing was clicked",
    ),
    "a tiny log": (
        "log.csv",
        lambda: text(log().head(5)),
        "is not learnable: it has only 1 list, and no item at two positions; collect more lists",
    ),
    "one position": ("log.csv", lambda: text(log().filter(pl.col("position") == 1)), "--column position=NAME"),
    "no clicks": ("log.csv", lambda: text(log().with_columns(click=pl.lit(0))), "--column click=NAME"),
    "other names": (
        "log.csv",
        lambda: text(log().rename({"query_id": "search", "click": "n_clicks"})),
        "-c query_id=NAME -c click=n_clicks",
    ),
    "no features": ("log.csv", lambda: text(log().drop("price")), "add columns that describe the items"),
    "an empty file": ("log.csv", lambda: b"", "is empty; the first line must name the columns"),
    "Latin-1": ("log.csv", lambda: text(log().with_columns(city=pl.lit("Zürich")), "latin-1"), "iconv -f WINDOWS-1252"),
    "prose": ("log.csv", lambda: b"Dear Bob,\nhere is the log.\n", "the first line must name the columns"),
    "another column": (
        "log.csv",
        lambda: text(log().rename({"click": "x", "price": "click"})),
        "name it: -c click=NAME",
    ),
    "another kind of file": ("log.txt", lambda: b"hello", "the name must end in .parquet"),
    "a damaged file": ("log.parquet", lambda: b"PAR1 hello", "is not a readable Parquet file"),
    "no such file": ("", lambda: b"", "give a Parquet or CSV file, a folder of them, or a glob in quotes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sentence_with_the_remedy(command: Command, tmp_path: Path, mistake: str) -> None:
    name, content, remedy = MISTAKES[mistake]
    source = tmp_path / (name or "missing.csv")
    if name:
        source.write_bytes(content())
    told = command("run", source, "-o", tmp_path / "job", "--quiet").refusal
    assert remedy in told
    assert str(tmp_path) not in told.replace(str(source), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ([name] if name else [])


@pytest.mark.parametrize(("separator", "comma"), [(";", True), (";", False), ("\t", False)])
def test_other_separators_and_decimal_commas_simply_work(
    command: Command, tmp_path: Path, separator: str, comma: bool
) -> None:
    lines = text(log()).decode()
    lines = lines.replace(",", separator).replace(".", ",") if comma else lines.replace(",", separator)
    (tmp_path / "log.csv").write_text(lines)
    ended = command("inspect", tmp_path / "log.csv", "--json")
    assert ended.code == 0, ended.stderr
