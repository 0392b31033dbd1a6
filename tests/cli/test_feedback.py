"""`urank feedback` as a person runs it, and the commands that read what it makes."""

from __future__ import annotations

import asyncio
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from serve.served_log import PLAIN, VALUED, Reference, click, logged, shadow, show, writing

USERS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of two days: a list for each user, by turns in arm A and B.

    Users of A click the first item, and those of B the second too.
    """
    folder = tmp_path / "served"

    async def visits() -> None:
        async with writing(folder) as sink:
            for number in range(2 * USERS):
                day, user = divmod(number, USERS)
                time = 1_700_000_000_000_000 + 86_400_000_000 * day + user
                arm = "AB"[user % 2]
                shown = await show(sink, query=f"q{number}", user=f"u{user}", arm=arm, seed=user, time_us=time)
                for item in {"A": "a", "B": "ab"}[arm]:
                    await click(sink, shown, item)

    asyncio.run(visits())
    return folder


def test_feedback(folder: Path, command: Any) -> None:
    result = command("feedback", folder)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "120 rankings with 360 impressions, 180 clicks and 0 conversions exported",
        "earlier impressions amended: 0; reports unmatched: 0, waiting for their rankings: 0",
        f"next: urank prepare {folder / 'log'} -o prepared",
    ]

    async def more() -> None:
        async with writing(folder) as sink:
            shown, later = await show(sink), await show(sink, columns=VALUED)
            await click(sink, str(logged(folder)[0][0]), "c")
            await click(sink, later, "z")
            await click(sink, shown, "a", value=2.0)
            await shadow(sink, shown, ("a", "b"))
            await shadow(sink, later, ("a", "b"))  # before exploration, "c" was first

    asyncio.run(more())
    result = command("feedback", folder, "--upload", f"file://{folder.parent}/bucket")
    assert result.stdout.splitlines() == [
        "2 rankings with 6 impressions, 1 clicks and 0 conversions exported",
        "earlier impressions amended: 1; reports unmatched: 1, waiting for their rankings: 0",
        "values dropped, since their rankings were logged without values: 1",
        "the shadow had the same item first in 1 of 2 rankings (50.0%)",
        "files uploaded: 6",
        f"the columns changed, so there are 2 logs: {folder / 'log'}, {folder / 'log-2'}",
        f"next: urank prepare {folder / 'log'} -o prepared",
    ]


def test_for_machines_and_quietly(folder: Path, command: Any) -> None:
    assert command("feedback", folder, "--window", 10**12, "--quiet").stdout == ""
    assert not (folder / "log").exists()
    result = command("feedback", folder, "--json")
    assert (result.code, result.stderr) == (0, "")
    wanted = {"rankings": 120, "impressions": 360, "clicks": 180, "conversions": 0, "parts": 1}
    nothing = ("amended", "unmatched", "waiting", "valueless", "uploaded")
    logs = {"logs": [str(folder / "log")], "shadow": None}
    assert json.loads(result.stdout) == {**wanted, **dict.fromkeys(nothing, 0), **logs}


def test_others_read_it_as_it_is(folder: Path, tmp_path: Path, command: Any) -> None:
    assert command("feedback", folder, "-q").code == 0
    told = json.loads(command("prepare", folder / "log", "-o", tmp_path / "prepared", "--json").stdout)
    assert sum(counts["rows"] for counts in told["counts"].values()) == 360
    assert sum(counts["clicks"] for counts in told["counts"].values()) == 180
    assert {feature["name"]: feature["kind"] for feature in told["features"]} == {
        **dict.fromkeys(PLAIN.numeric, "numeric"),
        **dict.fromkeys(PLAIN.categorical, "categorical"),
    }
    assert "impressions 360" in " ".join(command("inspect", folder / "log").stdout.split())
    result = command("abtest", "analyse", folder / "log", "--json", "--halves", 0)
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
    known = Reference()

    async def visits() -> None:
        async with writing(here) as a, writing(there) as b:
            known.rankings += [await show(a), await show(b)]
            known.reports += [await click(a, known.rankings[0], "a"), await click(a, known.rankings[1], "c")]
            known.reports += [await click(b, known.rankings[0], "b", conversion=True)]

    asyncio.run(visits())
    assert "reports unmatched: 1" in command("feedback", here).stdout
    assert command("feedback", there, "-q").code == 0
    amended = [command("feedback", each, "--with", here, "--with", there, "--json") for each in (here, there, here)]
    assert [json.loads(each.stdout)["amended"] for each in amended] == [1, 1, 0]
    assert logged(here, there) == known.rows()


def test_refusals(folder: Path, tmp_path: Path, command: Any) -> None:
    missing = f"{tmp_path} is not a feedback log of `urank serve --log`: it has no folder records"
    assert command("feedback", tmp_path).refusal == missing
    assert list(tmp_path.iterdir()) == [folder]
    assert command("feedback", folder, "--with", folder, "--with", tmp_path).refusal == missing
    assert [path.name for path in folder.iterdir()] == ["records"]
    with (folder / "export.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refusal = command("feedback", folder).refusal
    assert refusal == f"{folder} is being exported by another process; wait until it has ended"
    result = command("feedback", folder, "--window", -1)
    assert result.code == 2
    assert "'--window'" in result.stderr
    assert "needs a folder" in command("feedback", "postgresql://127.0.0.1:1/urank").refusal
