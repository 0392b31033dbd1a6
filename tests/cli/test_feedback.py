"""`urank feedback` as a person runs it, and the commands that read what it makes."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from serve.served_log import PLAIN, VALUED, OpenSegment, Reference, event, logged, ranking, sealed, segment_name
from urank.serve.feedback_store import FeedbackRecord, RankingRecord, Record, ShadowRecord

USERS = 60


def visits(number: int) -> list[Record]:
    """A list for each user, by turns in arm A and B; users of A click the first item, and those of B the second too."""
    found: list[RankingRecord] = []
    events: list[FeedbackRecord] = []
    for user in range(USERS):
        arm = "AB"[user % 2]
        time = 1_700_000_000_000_000 + 86_400_000_000 * number + user
        query = f"q{number}.{user}"
        shown = ranking(segment_name(number), query=query, user=f"u{user}", arm=arm, seed=user, time_us=time)
        found.append(shown)
        events += [event(shown, item) for item in {"A": "a", "B": "ab"}[arm]]
    return [*found, *events]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a server leaves behind after two segments, with a third that it still writes to."""
    folder = tmp_path / "served"
    for number in (1, 2):
        sealed(folder, number, *visits(number))
    return folder


def test_feedback(folder: Path, command: Any) -> None:
    active = OpenSegment(folder, segment_name(3))
    shown = ranking(active.name)
    active.write(shown, ShadowRecord(shown.ranking_id, "m2", 5, ("a", "b")))
    result = command("feedback", folder, "--window", 0)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "120 rankings with 360 impressions, 180 clicks and 0 conversions exported",
        "feedback: 0 late, 0 repeated, 0 unmatched",
        "write-ahead files waiting: 1 (open, or with clicks on such)",
        f"next: urank prepare {folder / 'log'} -o prepared",
    ]
    later = ranking(active.name, columns=VALUED)
    active.write(later, event(later, "a"), event(later, "a"), event(later, "z"), event(shown, "a", value=2.0))
    active.write(ShadowRecord(later.ranking_id, "m2", 5, ("b", "a")))
    active.write_bytes(b"urk1 cut")
    active.seal()
    clicked = pl.read_parquet(folder / "log" / f"{segment_name(1)}.parquet")["session_id"][0]
    sealed(folder, 4, event(clicked, "c"))
    result = command("feedback", folder, "--window", 0)
    assert result.stdout.splitlines() == [
        "2 rankings with 6 impressions, 2 clicks and 0 conversions exported",
        "feedback: 1 late, 1 repeated, 1 unmatched",
        "values dropped, since their rankings were logged without values: 1",
        "skipped: 8 bytes of interrupted writes, 0 damaged bytes",
        "the shadow had the same item first in 1 of 2 rankings (50.0%)",
        f"the columns changed, so there are 2 logs: {folder / 'log'}, {folder / 'log-2'}",
        f"next: urank prepare {folder / 'log'} -o prepared",
    ]


def test_what_is_within_the_window_waits(folder: Path, command: Any) -> None:
    result = command("feedback", folder)
    assert result.stdout.splitlines() == [
        "0 rankings with 0 impressions, 0 clicks and 0 conversions exported",
        "feedback: 0 late, 0 repeated, 0 unmatched",
        "write-ahead files waiting: 2 (open, within 600 s of the last write, or with clicks on such)",
    ]
    assert not (folder / "log").exists()


def test_for_machines_and_quietly(folder: Path, command: Any) -> None:
    assert command("feedback", folder, "--window", 3600, "--quiet").stdout == ""
    result = command("feedback", folder, "--window", 0, "--json")
    assert (result.code, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    wanted = {"segments": 2, "rankings": 120, "impressions": 360, "clicks": 180, "conversions": 0, "parts": 2}
    nothing = ("late", "repeated", "unmatched", "valueless", "torn", "damaged", "waiting")
    assert told == {**wanted, **dict.fromkeys(nothing, 0), "logs": [str(folder / "log")], "shadow": None}
    shown = ranking(segment_name(5))
    sealed(folder, 5, shown, ShadowRecord(shown.ranking_id, "m2", 5, ("a",)))
    told = json.loads(command("feedback", folder, "--window", 0, "--json").stdout)
    assert told["shadow"] == {"rankings": 1, "same_first": 1}
    assert command("feedback", folder, "--window", 0, "-q").stdout == ""


def test_others_read_it_as_it_is(folder: Path, tmp_path: Path, command: Any) -> None:
    assert command("feedback", folder, "--window", 0, "-q").code == 0
    told = json.loads(command("prepare", folder / "log", "-o", tmp_path / "prepared", "--json").stdout)
    assert sum(counts["rows"] for counts in told["counts"].values()) == 360
    assert sum(counts["clicks"] for counts in told["counts"].values()) == 180
    assert {feature["name"]: feature["kind"] for feature in told["features"]} == {
        **dict.fromkeys(PLAIN.numeric, "numeric"),
        **dict.fromkeys(PLAIN.categorical, "categorical"),
    }
    assert "impressions 360" in " ".join(command("inspect", folder / "log").stdout.split())
    result = command("abtest", "analyse", folder / "log", "--json", "--splits", 0)
    assert result.code == 0, result.stderr
    arms = {arm["name"]: arm for arm in json.loads(result.stdout)["arms"]}
    # Users of A click one item of three, those of B two.
    assert {name: (arm["users"], arm["impressions"], arm["clicks"]) for name, arm in arms.items()} == {
        "A": (30, 180, 60),
        "B": (30, 180, 120),
    }


def test_several_servers(tmp_path: Path, command: Any) -> None:
    """A click that came to the wrong server is joined where its ranking is, once."""
    here, there = tmp_path / "a", tmp_path / "b"
    lists = [ranking(segment_name(1)), ranking(segment_name(2))]
    clicks = [event(lists[0], "a"), event(lists[1], "c"), event(lists[0], "b", conversion=True)]
    sealed(here, 1, lists[0], *clicks[:2])
    sealed(there, 2, lists[1], *clicks[1:])
    first = command("feedback", here, "--window", 0)
    assert first.stdout.splitlines() == [
        "1 rankings with 3 impressions, 1 clicks and 0 conversions exported",
        "feedback: 0 late, 0 repeated, 1 unmatched",
        f"next: urank prepare {here / 'log'} -o prepared",
    ]
    assert command("feedback", there, "--window", 0, "-q").code == 0
    told = []
    for folder in (here, there, here, there):
        result = command("feedback", folder, "--with", here, "--with", there)
        assert (result.code, result.stderr) == (0, "")
        told.append(result.stdout.splitlines()[1])
    assert told == [
        "feedback: 1 late, 0 repeated, 0 unmatched",
        "feedback: 0 late, 1 repeated, 0 unmatched",
        *["feedback: 0 late, 0 repeated, 0 unmatched"] * 2,
    ]
    assert logged(here, there) == Reference(lists, clicks).rows()


def test_refusals(folder: Path, tmp_path: Path, command: Any) -> None:
    missing = f"{tmp_path} is not a feedback log of `urank serve --log`: it has no folder wal"
    assert command("feedback", tmp_path).refusal == missing
    assert list(tmp_path.iterdir()) == [folder]
    refusal = command("feedback", folder, "--with", folder, "--with", tmp_path).refusal
    assert refusal == f"{tmp_path} is not a feedback log: it has neither a folder wal nor unmatched"
    assert [path.name for path in folder.iterdir()] == ["wal"]
    with (folder / "compact.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refusal = command("feedback", folder).refusal
    assert refusal == f"{folder} is being exported by another process; wait until it has ended"
    result = command("feedback", folder, "--window", -1)
    assert result.code == 2
    assert "'--window'" in result.stderr
