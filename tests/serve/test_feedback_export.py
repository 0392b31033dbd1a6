"""The export: rows equal those of a plain join, whenever it runs, wherever it is killed, and while servers write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import urank
from serve.cases import client, example, saved
from serve.load import wait_for
from serve.served_log import PLAIN, VALUED, Reference, click, exported, logged, shadow, show, writing
from urank.errors import ConfigError, DataError
from urank.serve import feedback_export
from urank.serve.feedback_export import export_feedback, shadow_agreement
from urank.serve.list_ranking import Exploration


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "records").glob("*.sqlite"))


def test_rows(tmp_path: Path) -> None:
    """Every column of a ranking, one of whose items is clicked."""

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            of = {"columns": VALUED, "query": "q1", "user": "u", "arm": "A", "time_us": 1_700_000_000_000_000}
            shown = await show(sink, ("a", "b"), **of)  # type: ignore[arg-type]
            await click(sink, shown, "b", conversion=True, value=2.5)
        found = exported(tmp_path)
        assert (found.rankings, found.impressions, found.clicks, found.conversions) == (1, 2, 1, 1)
        frame = pl.read_parquet(tmp_path / "log" / "*.parquet")
        assert frame.select("query_id", "session_id", "policy", "user_id", "arm", "timestamp").unique().rows() == [
            ("q1", shown.ranking_id, "m1", "u", "A", datetime.fromtimestamp(1_700_000_000, UTC))
        ]
        assert shown.value is not None
        assert shown.propensity is not None
        assert frame.select("item_id", "position", "click", "conversion", "value", "ranked_position").rows() == [
            ("a", 1, 0, 0, float(shown.value[0]), 2),
            ("b", 2, 1, 1, 2.5, 1),
        ]
        assert frame["propensity"].to_list() == shown.propensity.tolist()
        assert frame["price"].to_numpy().tolist() == shown.numeric[:, 0].tolist()
        assert frame["age"].to_list() == [None, float(shown.numeric[1, 1])]
        assert frame["brand"].to_list() == [None, "brand 1"]

    run(scenario)


def test_it_exports_while_a_server_writes_and_amends_later(tmp_path: Path) -> None:
    """Clicks reach the Parquet files at once; those that come later amend them."""

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = await show(sink)
            assert exported(tmp_path).rankings == 1
            await click(sink, shown, "b")
            await click(sink, shown, "b")
            found = exported(tmp_path)
            assert (found.rankings, found.amended, found.unmatched, found.waiting) == (0, 1, 0, 0)
            assert [row[3] for row in logged(tmp_path)] == [0, 1, 0]
            await click(sink, shown, "b")
            assert (exported(tmp_path).amended, exported(tmp_path).parts) == (0, 0)
            assert len(files(tmp_path)) == 1
        exported(tmp_path)
        assert files(tmp_path) == []  # nobody writes to it, and all of it is in Parquet
        assert [row[3] for row in logged(tmp_path)] == [0, 1, 0]

    run(scenario)


def test_a_click_on_an_old_day_amends_its_part(tmp_path: Path) -> None:
    """Its file was exported and removed, and another worker receives the click."""

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = await show(sink, columns=VALUED)
            first = await click(sink, shown, "a", value=3.0)
        exported(tmp_path)
        assert files(tmp_path) == []
        async with writing(tmp_path) as sink:
            last = await click(sink, shown, "b", click=False, conversion=True, value=4.5)
        assert exported(tmp_path).amended == 1
        assert logged(tmp_path) == Reference([shown], [first, last]).rows()

    run(scenario)


def test_a_ranking_waits_for_its_clicks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            old, new = await show(sink, time_us=100_000_000), await show(sink, time_us=200_000_000)
            reports = [await click(sink, old, "a"), await click(sink, new, "b")]
            found = exported(tmp_path, window_seconds=60, now=161)
            assert (found.rankings, found.clicks, found.waiting, found.unmatched) == (1, 1, 1, 0)
            assert exported(tmp_path, window_seconds=60, now=162).parts == 0
            found = exported(tmp_path, window_seconds=60, now=260)
            assert (found.rankings, found.clicks, found.waiting) == (1, 1, 0)
            assert logged(tmp_path) == Reference([old, new], reports).rows()

    run(scenario)


def test_the_last_value_to_arrive_counts_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, and in the next, even if all files were exported and removed in between."""
    hour, clock = 3_600_000_000_000, [time.time_ns()]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = await show(sink, columns=VALUED)
            reports = [await click(sink, shown, "a", value=1.0)]
            clock[0] -= hour
            reports.append(await click(sink, shown, "a", value=2.0))
        clock[0] -= hour
        async with writing(tmp_path) as sink:
            reports.append(await click(sink, shown, "a", value=3.0))
        exported(tmp_path)
        assert files(tmp_path) == []
        assert logged(tmp_path) == Reference([shown], reports).rows()
        clock[0] -= hour
        async with writing(tmp_path) as sink:
            reports.append(await click(sink, shown, "a", value=4.0))
        exported(tmp_path)
        assert logged(tmp_path) == Reference([shown], reports).rows()

    run(scenario)


def test_other_columns_go_to_other_folders(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = [await show(sink, columns=each, seed=n) for n, each in enumerate([PLAIN, VALUED, PLAIN])]
            reports = [await click(sink, shown[1], "a", value=2.0), await click(sink, shown[2], "a", value=2.0)]
            found = exported(tmp_path)
            assert (found.rankings, found.parts, found.valueless) == (3, 2, 1)
            later = await show(sink, columns=VALUED, seed=3)
            exported(tmp_path)
        assert logged(tmp_path) == Reference([*shown, later], reports).rows()
        assert [len(list((tmp_path / name).glob("*.parquet"))) for name in ("log", "log-2")] == [1, 2]
        assert not (tmp_path / "log-3").exists()
        urank.read(tmp_path / "log-2")

    run(scenario)


def test_unmatched_feedback_is_kept(tmp_path: Path) -> None:
    """On an item that was not shown, a ranking that is not here, and a part that was moved away and comes back."""

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = await show(sink)
            exported(tmp_path)
            await click(sink, shown, "z")
            await click(sink, "0192f3a4b5c6-3f9a1c-000001aabbcc", "a")
            assert exported(tmp_path).unmatched == 2
            assert exported(tmp_path).unmatched == 2
            part = next((tmp_path / "log").glob("*.parquet"))
            part.rename(tmp_path / "away")
            report = await click(sink, shown, "b")
            assert exported(tmp_path).unmatched == 3
            (tmp_path / "away").rename(part)
            assert exported(tmp_path, also=[tmp_path]).unmatched == 2
            assert logged(tmp_path) == Reference([shown], [report]).rows()

    run(scenario)


def test_feedback_that_other_servers_received(tmp_path: Path) -> None:
    """A click that came to the wrong server is joined where its ranking is, once, in any order of exports."""
    here, there = tmp_path / "a", tmp_path / "b"

    async def scenario() -> None:
        async with writing(here) as a, writing(there) as b:
            shown = [await show(a, columns=VALUED), await show(b)]
            reports = [await click(a, shown[0], "a", value=1.0), await click(a, shown[1], "c")]
            reports += [await click(b, shown[0], "a", value=2.0), await click(b, shown[0], "b", conversion=True)]
            reports.append(await click(a, shown[0], "b", value=5.0))
            assert exported(here).unmatched == 1
            assert exported(here, also=[there]).amended == 2
            assert exported(here, also=[there, here]).parts == 0  # nothing changed
        exported(there)
        assert files(there) == []
        assert exported(here, also=[there]).parts == 0  # the same feedback, now from its catalogue
        assert exported(there, also=[here]).amended == 1
        assert exported(there, also=[here]).parts == 0
        assert logged(here, there) == Reference(shown, reports).rows()

    run(scenario)


def test_shadow_orders(tmp_path: Path) -> None:
    """They are compared with the order before exploration, also if they come after the export of their ranking."""

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            first, second = await show(sink, ("a", "b"), columns=VALUED), await show(sink, ("a", "b"))
            await shadow(sink, first, ("b", "c"))  # `show` logs that "b" was ranked first, and shown second
            exported(tmp_path)
            await click(sink, first, "b")
            await shadow(sink, second, ("b", "a"))
            exported(tmp_path)
        assert shadow_agreement(tmp_path) == (2, 1)
        frame = pl.read_parquet(tmp_path / "shadow" / "*.parquet")
        places = ("item_id", "position", "ranked_position", "shadow_position", "click")
        assert frame.filter(session_id=first.ranking_id).select(places).rows() == [
            ("a", 1, 2, None, 0),
            ("b", 2, 1, 1, 1),
            ("c", None, None, 2, None),
        ]
        later = frame.filter(session_id=second.ranking_id).select(places)
        assert later.rows() == [("a", 1, 1, 2, 0), ("b", 2, 2, 1, 0)]
        assert frame.select("query_id", "model", "shadow_model").unique().rows() == [("q", "m1", "m2")]

    run(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two workers that come and go, and exports at any time: the rows are those of a plain join."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(feedback_export, "PART_BYTES", 200)

    async def scenario() -> None:
        known = Reference()
        async with AsyncExitStack() as stack:
            sinks = [await stack.enter_async_context(writing(tmp_path)) for _ in range(2)]
            for step in range(60):
                place = int(rng.integers(2))
                draw = rng.random()
                if draw < 0.3 or not known.rankings:
                    columns = VALUED if rng.random() < 0.5 else PLAIN
                    known.rankings.append(await show(sinks[place], "abcd"[: rng.integers(1, 5)], columns=columns,
                                                     seed=step, time_us=step * 1_000_000))  # fmt: skip
                elif draw < 0.8:
                    of = known.rankings[rng.integers(len(known.rankings))]
                    value = None if rng.random() < 0.5 else float(rng.integers(9))
                    known.reports.append(await click(sinks[place], of, of.items[rng.integers(len(of.items))],
                                                     click=rng.random() < 0.7, value=value))  # fmt: skip
                elif draw < 0.95:
                    exported(tmp_path, window_seconds=float(rng.integers(2) * 20), now=float(step))
                else:
                    await sinks[place].close()
                    sinks[place] = await stack.enter_async_context(writing(tmp_path))
        exported(tmp_path)
        assert logged(tmp_path) == known.rows()
        assert files(tmp_path) == []

    run(scenario)


class Killed(BaseException):
    """The end of an export."""


def test_interrupted_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that ends before or after each of its writes; the next one has the same rows."""
    monkeypatch.setattr(feedback_export, "PART_BYTES", 100)
    write_part, left = feedback_export.write_part, [0]

    def write(*arguments: Any) -> None:
        for act in (lambda: None, lambda: write_part(*arguments)):
            act()
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    monkeypatch.setattr(feedback_export, "write_part", write)

    async def scenario() -> None:
        known, killed = Reference(), 0
        async with writing(tmp_path) as sink:
            for number in range(6):
                known.rankings.append(await show(sink, columns=(PLAIN, VALUED)[number % 2], seed=number))
                await shadow(sink, known.rankings[-1], ("a", "b"))
            exported(tmp_path)
            for number in range(48):
                known.reports.append(await click(sink, known.rankings[number % 6], "b", value=float(number)))
                if number % 3 == 0:
                    known.rankings.append(await show(sink, columns=VALUED, seed=number))
                left[0] = number % 12 + 1
                try:
                    exported(tmp_path)
                except Killed:
                    killed += 1
        left[0] = -1
        exported(tmp_path)
        assert killed > 12
        assert logged(tmp_path) == known.rows()
        assert (files(tmp_path), shadow_agreement(tmp_path)) == ([], (6, 3))
        clicked = pl.read_parquet(tmp_path / "shadow" / "*.parquet").filter(pl.col("click") == 1)
        shadowed = {each.ranking_id for each in known.rankings[:6]}
        assert set(clicked["session_id"]) == {row[0] for row in known.rows() if row[3]} == shadowed

    run(scenario)


def test_upload(tmp_path: Path) -> None:
    """New and changed files are copied, and nothing twice."""
    target = tmp_path / "bucket"

    async def scenario() -> None:
        async with writing(tmp_path / "log") as sink:
            shown = await show(sink)
            assert exported(tmp_path / "log", upload_to=f"file://{target}").uploaded == 2
            assert exported(tmp_path / "log", upload_to=f"file://{target}").uploaded == 0
            await click(sink, shown, "a")
            assert exported(tmp_path / "log", upload_to=f"file://{target}").uploaded == 1
            assert exported(tmp_path / "log", upload_to="memory://bucket").uploaded == 2
        assert logged(target) == logged(tmp_path / "log") != []
        with pytest.raises(ConfigError, match="scheme"):
            exported(tmp_path / "log", upload_to="nowhere://bucket")

    run(scenario)


def test_a_damaged_file_does_not_stop_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        for seed in range(2):
            async with writing(tmp_path) as sink:
                shown = await show(sink, seed=seed)
        damaged = sorted((tmp_path / "records").glob("*.sqlite"))[0]
        damaged.write_bytes(b"no database" * 1_000)
        with pytest.raises(DataError, match=str(damaged)):
            exported(tmp_path)
        assert logged(tmp_path) == Reference([shown]).rows()
        assert files(tmp_path) == [damaged.name]

    run(scenario)


def test_a_lost_catalogue_does_not_double_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = []
            for seed in range(3):
                shown.append(await show(sink, seed=seed))
                exported(tmp_path)
            (tmp_path / "export.sqlite").unlink()
            with pytest.raises(DataError, match=r"export\.sqlite is older than the log"):
                exported(tmp_path)
            assert logged(tmp_path) == Reference(shown).rows()

    run(scenario)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = await show(sink)
            (tmp_path / "log").write_text("in the way")
            with pytest.raises(DataError, match="was not completed"):
                exported(tmp_path)
            (tmp_path / "log").unlink()
            exported(tmp_path)
            assert logged(tmp_path) == Reference([shown]).rows()

    run(scenario)


def test_one_export_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            await show(sink)
            with feedback_export._exclusive_lock(tmp_path / "export.lock") as locked:
                assert locked
                assert export_feedback(tmp_path) is None

    run(scenario)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no folder records"):
        export_feedback(tmp_path)
    (tmp_path / "records").mkdir()
    with pytest.raises(ConfigError, match="at least 0 seconds"):
        export_feedback(tmp_path, window_seconds=-1)
    with pytest.raises(ConfigError, match="needs a folder"):
        export_feedback("postgresql://db/urank")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "columns.json").write_text("{}")
    with pytest.raises(DataError, match="must contain the columns"):
        export_feedback(tmp_path)


def test_the_shadow_agrees_as_the_metric_says(tmp_path: Path) -> None:
    """The same model as its own shadow, with every list explored: the first item before exploration is the same."""
    settings = {"log": tmp_path, "shadow": saved("trees"), "exploration": Exploration("swap", 1.0), "seed": 1}
    with client("trees", **settings) as http:
        for seed in range(10):
            assert http.post("/v1/rank", json=example("trees", 6, seed)).status_code == 200
        same = 'urank_shadow_lists_total{result="same first"} 10.0'
        wait_for(lambda: same in http.get("/metrics").text)
    exported(tmp_path)
    assert shadow_agreement(tmp_path) == (10, 10)
    shown = pl.read_parquet(tmp_path / "shadow" / "*.parquet").filter(pl.col("position") == 1)
    assert (shown["shadow_position"] != 1).any()
