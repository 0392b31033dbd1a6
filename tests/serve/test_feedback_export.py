"""Compaction: rows equal those of a plain join, whenever it runs and wherever it is killed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import urank
from serve.served_log import (
    PLAIN,
    VALUED,
    OpenSegment,
    Reference,
    event,
    files,
    logged,
    ranking,
    sealed,
    segment_name,
    taken,
    unmatched,
)
from urank.errors import ConfigError, DataError
from urank.serve import feedback_export as compacting
from urank.serve.feedback_export import CompactionStats, LogParts, compact, shadow_agreement
from urank.serve.feedback_store import FeedbackRecord, RankingRecord, ShadowRecord, WalWriter, encode, framed

ONE, TWO, THREE = map(segment_name, (1, 2, 3))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "wal").iterdir())


# what comes out


def test_rows(tmp_path: Path) -> None:
    """Every column of two rankings, one of which is clicked."""
    shown = ranking(ONE, ("a", "b"), columns=VALUED, query="q1", user="u", arm="A", time_us=1_700_000_000_000_000)
    other = ranking(ONE, ("b",), columns=VALUED, query="q2", seed=1, time_us=1_700_000_000_000_001)
    clicked = event(shown, "b", conversion=True, value=2.5)
    sealed(tmp_path, 1, shown, other, clicked)
    found = taken(tmp_path)
    assert found == CompactionStats(segments=1, rankings=2, impressions=3, clicks=1, conversions=1, parts=1)
    assert left(tmp_path) == []
    frame = pl.read_parquet(tmp_path / "log" / f"{ONE}.parquet")
    assert shown.value is not None and other.value is not None  # noqa: PT018
    assert shown.propensity is not None and other.propensity is not None  # noqa: PT018
    numbers = np.concatenate([shown.numeric, other.numeric])
    expected = pl.DataFrame(
        {
            "query_id": ["q1", "q1", "q2"],
            "session_id": [shown.ranking_id, shown.ranking_id, other.ranking_id],
            "item_id": ["a", "b", "b"],
            "position": pl.Series([1, 2, 1], dtype=pl.Int32),
            "click": pl.Series([0, 1, 0], dtype=pl.Int8),
            "conversion": pl.Series([0, 1, 0], dtype=pl.Int8),
            "value": pl.Series([shown.value[0], 2.5, other.value[0]], dtype=pl.Float32),
            "policy": ["m1"] * 3,
            "propensity": [*shown.propensity, *other.propensity],
            "ranked_position": pl.Series([2, 1, 1], dtype=pl.Int32),
            "user_id": ["u", "u", None],
            "arm": ["A", "A", None],
            "timestamp": [datetime(2023, 11, 14, 22, 13, 20, microsecond, tzinfo=UTC) for microsecond in (0, 0, 1)],
            "price": pl.Series(numbers[:, 0]),
            "age": pl.Series([None, numbers[1, 1], None], dtype=pl.Float32),
            "brand": [None, "brand 1", None],
        }
    )
    assert frame.equals(expected)
    assert frame.schema == expected.schema
    columns = json.loads((tmp_path / "log" / "columns.json").read_text())
    assert columns == {"format": "urank feedback log", **VALUED.to_dict()}


def test_it_is_a_log_as_it_is(tmp_path: Path) -> None:
    for number in range(3):
        lists = [ranking(segment_name(number), query=f"q{each}", seed=each) for each in range(5)]
        sealed(tmp_path, number, *lists, event(lists[0], "a"))
    taken(tmp_path)
    log = urank.read(tmp_path / "log")
    assert log.schema.named("numeric") == ["price", "age"]
    assert log.schema.named("categorical") == ["brand"]
    frame = log.frame()
    assert (frame.height, frame["click"].sum()) == (3 * 5 * 3, 3)
    assert frame["session_id"].n_unique() == 15


def test_feedback_from_every_segment_counts_once(tmp_path: Path) -> None:
    shown = ranking(ONE, columns=VALUED)
    sealed(tmp_path, 1, shown, event(shown, "a"))
    sealed(
        tmp_path, 2, event(shown, "a", time_us=9), event(shown, "a", conversion=True), event(shown, "b", click=False)
    )
    values = [event(shown, "c", value=value, time_us=time) for value, time in ((3.0, 5), (7.0, 8), (7.0, 9), (5.0, 8))]
    sealed(tmp_path, 3, *values)
    found = taken(tmp_path)
    rows = {row[1]: row[3:6] for row in logged(tmp_path)}
    assert shown.value is not None
    assert rows == {"a": (1, 1, shown.value[0]), "b": (0, 0, shown.value[1]), "c": (1, 0, 7.0)}
    # New were a click on a (at 9), its conversion, and of c: 3.0 at 5, 7.0 or 5.0 at 8 (with 7.0 last).
    assert (found.clicks, found.conversions, found.unmatched, found.late) == (2, 1, 0, 0)
    assert found.repeated == 2 + 2  # a once more, b told nothing; 7.0 again, and 5.0 at 8 after 7.0


def test_later_values_win_across_compactions(tmp_path: Path) -> None:
    shown = ranking(ONE, columns=VALUED)
    sealed(tmp_path, 1, shown)
    taken(tmp_path)
    steps = [
        # value, time, the value that counts then, whether that is new
        (3.0, 50, 3.0, True),
        (4.0, 40, 3.0, False),
        (5.0, 50, 5.0, True),
        (5.0, 60, 5.0, False),
        (2.0, 55, 5.0, False),  # older than the second time that 5 was told
        (1.0, 61, 1.0, True),
    ]
    for number, (value, time, kept, new) in enumerate(steps, 2):
        sealed(tmp_path, number, event(shown, "b", value=value, time_us=time, click=False))
        found = taken(tmp_path)
        assert logged(tmp_path)[1][5] == kept
        assert (found.late, found.repeated) == (int(new), int(not new))


def test_values_of_rankings_without_values_are_left_out(tmp_path: Path) -> None:
    shown = ranking(ONE)
    sealed(tmp_path, 1, shown, event(shown, "b", value=2.0))
    found = taken(tmp_path)
    assert (found.valueless, found.clicks, found.repeated) == (1, 1, 0)
    assert "value" not in pl.read_parquet(tmp_path / "log" / f"{ONE}.parquet").columns


def test_late_feedback_is_joined_to_the_part(tmp_path: Path) -> None:
    shown = ranking(ONE)
    sealed(tmp_path, 1, shown)
    taken(tmp_path)
    sealed(tmp_path, 2, event(shown, "b"), event(shown, "b", time_us=7), event(shown, "x"))
    found = taken(tmp_path)
    assert found == CompactionStats(segments=1, late=1, repeated=1, unmatched=1, parts=1)
    assert [row[3] for row in logged(tmp_path)] == [0, 1, 0]
    assert left(tmp_path) == []
    assert unmatched(tmp_path) == {TWO: [event(shown, "x")]}
    before = files(tmp_path)
    sealed(tmp_path, 3, event(shown, "b"))
    assert taken(tmp_path) == CompactionStats(segments=1, repeated=1)
    assert files(tmp_path) == before  # nothing new, nothing written


def test_unmatched_feedback_is_counted_once_and_kept(tmp_path: Path) -> None:
    shown = ranking(ONE)
    nowhere = ranking(segment_name(77))
    lost = [event(nowhere, "a"), event(shown, "x"), event(f"{ONE}-{'0' * 12}", "a")]
    sealed(tmp_path, 1, shown, lost[0], event(shown, "a"), *lost[1:])
    sealed(tmp_path, 2, event(nowhere, "a"), event(shown, "b"), ShadowRecord(nowhere.ranking_id, "m2", 5, ("a",)))
    empty = event(f"{TWO}-{'0' * 12}", "a")  # a segment that has no rankings
    sealed(tmp_path, 3, empty, event(shown, "c"))
    sealed(tmp_path, 4, event(shown, "c"))
    found = taken(tmp_path)
    assert (found.unmatched, found.rankings, found.clicks, found.segments) == (5 + 1, 1, 3, 4)
    assert left(tmp_path) == []
    assert unmatched(tmp_path) == {ONE: lost, TWO: lost[:1], THREE: [empty]}
    before = files(tmp_path)
    assert taken(tmp_path) == CompactionStats()
    assert files(tmp_path) == before


def test_the_same_ranking_twice_has_rows_once(tmp_path: Path) -> None:
    shown = ranking(ONE)
    sealed(tmp_path, 1, shown, shown, event(shown, "a"))
    found = taken(tmp_path)
    assert (found.rankings, found.impressions, found.clicks) == (1, 3, 1)
    assert [row[3] for row in logged(tmp_path)] == [1, 0, 0]


# what has to wait


def test_a_segment_waits_for_its_window(tmp_path: Path) -> None:
    shown = ranking(ONE)
    sealed(tmp_path, 1, shown)
    sealed(tmp_path, 2, event(shown, "a"))
    os.utime(tmp_path / "wal" / f"{ONE}.wal", (1_000, 1_000))
    os.utime(tmp_path / "wal" / f"{TWO}.wal", (1_300, 1_300))
    assert taken(tmp_path, window_seconds=600, now=1_599) == CompactionStats(waiting=2)
    first = taken(tmp_path, window_seconds=600, now=1_600)
    assert first == CompactionStats(segments=1, rankings=1, impressions=3, clicks=1, parts=1, waiting=1)
    again = taken(tmp_path, window_seconds=600, now=1_800)
    assert again == CompactionStats(waiting=1)  # the click was joined, but its segment is not due
    last = taken(tmp_path, window_seconds=600, now=1_900)
    assert last == CompactionStats(segments=1)  # and it does not count again
    assert left(tmp_path) == []
    assert logged(tmp_path) == Reference([shown], [event(shown, "a")]).rows()


def test_a_segment_that_is_written_to_is_left_alone(tmp_path: Path) -> None:
    active = OpenSegment(tmp_path, ONE)
    shown = ranking(ONE)
    active.write(shown)
    sealed(tmp_path, 2, event(shown, "b"), event(ranking(segment_name(9)), "a"))
    assert taken(tmp_path) == CompactionStats(segments=1, waiting=2)
    assert left(tmp_path) == [f"{ONE}.wal", f"{TWO}.joined"]
    assert taken(tmp_path) == CompactionStats(waiting=2)
    active.write(event(shown, "c"))
    active.seal()
    assert (
        taken(tmp_path).to_dict()
        == CompactionStats(segments=1, rankings=1, impressions=3, clicks=2, unmatched=1, parts=1).to_dict()
    )
    assert left(tmp_path) == []
    assert [row[3] for row in logged(tmp_path)] == [0, 1, 1]


def test_one_at_a_time(tmp_path: Path) -> None:
    shown = ranking(ONE)
    sealed(tmp_path, 1, shown)
    with (tmp_path / "compact.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert compact(tmp_path, window_seconds=0) is None
        assert left(tmp_path) == [f"{ONE}.wal"]
    assert taken(tmp_path).rankings == 1


def test_folders_that_are_no_feedback_log(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="is not a feedback log of `urank serve --log`"):
            compact(folder)
        assert not list(tmp_path.iterdir())
    (tmp_path / "wal").mkdir()
    assert taken(tmp_path) == CompactionStats()
    for window in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"the window must be at least 0 seconds; got {window}"):
            compact(tmp_path, window_seconds=window)


# columns


def test_each_set_of_columns_has_a_folder(tmp_path: Path) -> None:
    lists = [ranking(ONE), ranking(ONE, columns=VALUED, seed=1), ranking(ONE, seed=2)]
    sealed(tmp_path, 1, *lists, event(lists[0], "a"), event(lists[1], "b"))
    found = taken(tmp_path)
    assert (found.rankings, found.parts, found.clicks) == (3, 2, 2)
    later = ranking(TWO, columns=VALUED)
    sealed(tmp_path, 2, later, event(lists[1], "c"))
    sealed(tmp_path, 3, event(lists[2], "c"))
    assert taken(tmp_path).late == 2
    heights = {str(path.relative_to(tmp_path)): pl.read_parquet(path).height for path in tmp_path.rglob("*.parquet")}
    assert heights == {f"log/{ONE}.parquet": 6, f"log-2/{ONE}.parquet": 3, f"log-2/{TWO}.parquet": 3}
    events = [event(lists[0], "a"), event(lists[1], "b"), event(lists[1], "c"), event(lists[2], "c")]
    assert logged(tmp_path) == Reference([*lists, later], events).rows()
    assert [folder.name for folder in LogParts(tmp_path).folders] == ["log", "log-2"]


def test_folders_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "mine.parquet").write_bytes(b"not urank's")
    (tmp_path / "log-2").mkdir()
    (tmp_path / "log-2" / ".columns.json").write_bytes(b"left behind by a kill")
    sealed(tmp_path, 1, ranking(ONE))
    taken(tmp_path)
    assert (tmp_path / "log-2" / f"{ONE}.parquet").is_file()
    assert files(tmp_path / "log") == {"mine.parquet": b"not urank's"}
    assert sorted(files(tmp_path / "log-2")) == [f"{ONE}.parquet", "columns.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "urank feedback log"}', '{"format": "other"}'])
def test_columns_that_are_not_told(tmp_path: Path, text: str) -> None:
    sealed(tmp_path, 1, ranking(ONE))
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "columns.json").write_text(text)
    with pytest.raises(DataError, match=r"columns.json must contain the columns of its folder"):
        compact(tmp_path)
    assert left(tmp_path) == [f"{ONE}.wal"]


# damage


def test_torn_and_damaged_bytes_are_counted_once(tmp_path: Path) -> None:
    lists = [ranking(ONE, seed=seed) for seed in range(3)]
    odd = ranking(TWO)  # in a segment that is not its home
    malformed = [framed(b"\x03????"), framed(b"\x02????"), framed(b"\x63????")]
    segment = OpenSegment(tmp_path, ONE)
    segment.write(lists[0])
    segment.write_bytes(b"garbage" + b"".join(malformed))
    segment.write(odd, lists[1], event(lists[1], "a"))
    segment.write_bytes(framed(encode(lists[2]))[:-1])
    segment.seal()
    os.utime(segment.path, (1_000, 1_000))
    assert taken(tmp_path, window_seconds=600, now=1_100) == CompactionStats(waiting=1)
    found = taken(tmp_path)
    assert (found.rankings, found.clicks) == (2, 1)
    assert found.torn == len(framed(encode(lists[2]))) - 1
    assert found.damaged == len(b"garbage") + 3 * 5 + len(encode(odd))
    assert logged(tmp_path) == Reference(lists[:2], [event(lists[1], "a")]).rows()


def test_a_damaged_part(tmp_path: Path) -> None:
    shown = ranking(ONE)
    sealed(tmp_path, 1, shown)
    taken(tmp_path)
    (tmp_path / "log" / f"{ONE}.parquet").write_bytes(b"PAR1")
    sealed(tmp_path, 2, event(shown, "a"))
    with pytest.raises(DataError, match=rf"{ONE}.parquet is not a readable Parquet file; move it away"):
        compact(tmp_path, window_seconds=0)
    assert left(tmp_path) == [f"{TWO}.wal"]
    (tmp_path / "log" / f"{ONE}.parquet").unlink()
    assert taken(tmp_path).unmatched == 1


# a silent model


def test_shadow(tmp_path: Path) -> None:
    lists = [ranking(ONE, query=f"q{number}", time_us=number) for number in range(3)]
    orders = [("a", "c", "d"), ("b", "a", "c")]
    shadows = [ShadowRecord(shown.ranking_id, "m2", 9, items) for shown, items in zip(lists[:2], orders, strict=True)]
    again = ShadowRecord(lists[0].ranking_id, "m3", 10, ("c",))
    stray = ShadowRecord(f"{ONE}-{'0' * 12}", "m2", 9, ("a",))
    sealed(tmp_path, 1, *lists, shadows[0], again, stray, event(lists[0], "c"), event(lists[0], "d"))
    sealed(tmp_path, 2, shadows[1])  # written after the segment of its ranking gave way
    found = taken(tmp_path)
    assert (found.parts, found.unmatched) == (2, 2)  # the stray order, and a click on what was not shown
    frame = pl.read_parquet(tmp_path / "shadow" / f"{ONE}.parquet")
    assert frame.columns == [
        *("query_id", "session_id", "item_id", "position", "shadow_position", "click"),
        *("model", "shadow_model", "timestamp"),
    ]
    short = frame.select("query_id", "item_id", "position", "shadow_position", "click").rows()
    assert short == [
        ("q0", "a", 1, 1, 0),
        ("q0", "b", 2, None, 0),
        ("q0", "c", 3, 2, 1),
        ("q0", "d", None, 3, None),
        ("q1", "a", 1, 2, 0),
        ("q1", "b", 2, 1, 0),
        ("q1", "c", 3, 3, 0),
    ]
    assert frame["session_id"].to_list() == [lists[0].ranking_id] * 4 + [lists[1].ranking_id] * 3
    assert frame.select("model", "shadow_model").unique().rows() == [("m1", "m2")]
    assert frame["timestamp"].cast(pl.Int64).to_list() == [0] * 4 + [1] * 3
    assert shadow_agreement(tmp_path) == (2, 1)

    sealed(tmp_path, 3, event(lists[1], "b"), event(lists[1], "a"), ShadowRecord(lists[2].ranking_id, "m2", 9, ("a",)))
    found = taken(tmp_path)
    assert (found.late, found.unmatched, found.parts) == (2, 1, 2)  # an order that comes late has no place
    after = pl.read_parquet(tmp_path / "shadow" / f"{ONE}.parquet")
    assert after["click"].to_list() == [0, 0, 1, None, 1, 1, 0]
    assert after.drop("click").equals(frame.drop("click"))
    assert after.schema == frame.schema


# at any time, in any order, killed anywhere


class Killed(BaseException):
    """Not an exception that anything could handle."""


def killer(at: int) -> Callable[..., None]:
    """A report that kills the compaction at its step of this number."""
    steps = iter(range(at + 1))

    def report(*_: object) -> None:
        if next(steps) == at:
            raise Killed

    return report


class World:
    """Segments that are written, sealed and compacted in some order, and all that was ever written to them.

    There may be several servers, each with a folder, and feedback comes to any of them.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.made = 0
        self.open = [self.new_segment(folder) for folder in folders * 2]
        self.used: set[str] = set()
        self.all = Reference()
        self.heard: dict[Path, list[FeedbackRecord]] = {folder: [] for folder in folders}
        self.counts = CompactionStats().to_dict()
        self.killed = False

    def new_segment(self, folder: Path) -> OpenSegment:
        self.made += 1
        return OpenSegment(folder, segment_name(self.made))

    def step(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(self.open))
        kinds = ["rank", "rank", "feedback", "feedback", "feedback", "shadow", "seal", "compact", "killed"]
        match data.draw(st.sampled_from(kinds)):
            case "rank":
                self.rank(segment, data)
            case "feedback" if self.all.rankings:
                of = data.draw(st.sampled_from(self.all.rankings)).ranking_id
                if data.draw(st.integers(0, 9)) == 0:
                    of = data.draw(st.sampled_from([segment_name(99), segment.name])) + "-" + "0" * 12
                value = data.draw(st.none() | st.sampled_from([1.0, 2.0, 3.5]))
                flags = data.draw(st.tuples(st.booleans(), st.booleans()))
                item, time = data.draw(st.sampled_from("abcx")), data.draw(st.integers(0, 5))
                self.write(segment, FeedbackRecord(of, item, *flags, value, time))
            case "shadow" if self.all.rankings:
                of = data.draw(st.sampled_from(self.all.rankings)).ranking_id
                self.write(segment, ShadowRecord(of, "m2", 5, ("b", "a")))
            case "seal":
                segment.seal()
                self.open.remove(segment)
                self.open.append(self.new_segment(segment.folder))
            case "compact":
                self.compact(data)
            case "killed":
                self.killed = True
                with suppress(Killed):
                    self.compact(data, report=killer(data.draw(st.integers(0, 12))))

    def rank(self, segment: OpenSegment, data: st.DataObject) -> None:
        columns = data.draw(st.sampled_from([PLAIN, PLAIN, VALUED]))
        items = data.draw(st.permutations("abc"))[: data.draw(st.integers(1, 3))]
        self.write(segment, ranking(segment.name, items, columns=columns, seed=len(self.all.rankings)))

    def write(self, segment: OpenSegment, record: RankingRecord | FeedbackRecord | ShadowRecord) -> None:
        segment.write(record)
        self.used.add(segment.name)
        if isinstance(record, FeedbackRecord):
            self.heard[segment.folder].append(record)
        kept: list[Any] = {
            RankingRecord: self.all.rankings,
            FeedbackRecord: self.all.events,
            ShadowRecord: self.all.shadows,
        }[type(record)]
        kept.append(record)

    def compact(self, data: st.DataObject, **options: Any) -> None:
        folder = data.draw(st.sampled_from(self.folders))
        if len(self.folders) > 1:
            options["also"] = data.draw(st.lists(st.sampled_from(self.folders), max_size=2))
        if data.draw(st.booleans()):  # some are within the window
            for path in (folder / "wal").glob("*.wal"):
                time = data.draw(st.sampled_from([1_000, 2_000]))
                os.utime(path, (time, time))
            options |= {"window_seconds": 600, "now": 2_000}
        found = taken(folder, **options).to_dict()
        self.counts = {key: self.counts[key] + found[key] for key in found}

    def finish(self, *folders: Path, also: Sequence[Path] = ()) -> None:
        """Seal all, and compact each folder once, in this order."""
        for segment in self.open:
            segment.seal()
        for folder in folders:
            found = taken(folder, also=also).to_dict()
            self.counts = {key: self.counts[key] + found[key] for key in found}


@contextmanager
def events_at_once(count: int) -> Iterator[None]:
    before, compacting.EVENTS_AT_ONCE = compacting.EVENTS_AT_ONCE, count
    try:
        yield
    finally:
        compacting.EVENTS_AT_ONCE = before


@pytest.mark.slow
@settings(max_examples=50)
@given(st.data(), st.sampled_from([1, 3, 10_000]))
def test_rows_are_those_of_a_plain_join(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, at_once: int
) -> None:
    folder = tmp_path_factory.mktemp("world")
    world = World(folder)
    with events_at_once(at_once):
        for _ in range(data.draw(st.integers(1, 40))):
            world.step(data)
        world.finish(folder)
    assert logged(folder) == world.all.rows()
    assert left(folder) == []
    assert_kept(world)
    assert list(folder.rglob(".*")) == []
    settled = files(folder)
    assert taken(folder) == CompactionStats()
    assert files(folder) == settled
    if not world.killed:  # then each count is exact, however often it was compacted
        assert_counts(world)
    assert_shadows(world)
    shutil.rmtree(folder)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.data(), st.sampled_from([1, 3, 10_000]))
def test_rows_of_several_servers_are_those_of_a_plain_join(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, at_once: int
) -> None:
    """Once for each folder is enough, in any order, whatever happened before; repeating it changes nothing."""
    root = tmp_path_factory.mktemp("worlds")
    world = World(root / "a", root / "b")
    orders = st.permutations(world.folders)
    with events_at_once(at_once):
        for _ in range(data.draw(st.integers(1, 40))):
            world.step(data)
        world.finish(*data.draw(orders), also=data.draw(orders))
    assert logged(*world.folders) == world.all.rows()
    assert [left(folder) for folder in world.folders] == [[], []]
    assert_kept(world)
    for folder in data.draw(orders):
        again = taken(folder, also=data.draw(orders))
        assert again == CompactionStats(repeated=again.repeated, valueless=again.valueless, parts=again.parts)
    settled = files(root)
    for folder in data.draw(orders):
        assert taken(folder, also=data.draw(orders)) == CompactionStats()
    assert files(root) == settled
    assert logged(*world.folders) == world.all.rows()
    assert list(root.rglob(".*")) == []
    if not world.killed:  # an event is unmatched once, where it was heard of, and whoever has its ranking
        kept = sum(len(events) for folder in world.folders for events in unmatched(folder).values())
        assert 0 <= world.counts["unmatched"] - kept <= len(world.all.shadows)
    assert_shadows(world)
    shutil.rmtree(root)


def assert_kept(world: World) -> None:
    """All that a server heard of is in its log or kept, wherever it was killed."""
    for folder in world.folders:
        shown = {row[:2] for row in logged(folder)}
        lost = [each for each in world.heard[folder] if (each.ranking_id, each.item_id) not in shown]
        kept = [each for events in unmatched(folder).values() for each in events]
        assert sorted(kept, key=repr) == sorted(lost, key=repr)


def assert_counts(world: World) -> None:
    shown = {(each.ranking_id, item) for each in world.all.rankings for item in each.items}
    known = [each for each in world.all.events if (each.ranking_id, each.item_id) in shown]
    rows = world.all.rows()
    counts = world.counts
    assert counts["segments"] == len(world.used)
    assert counts["rankings"] == len(world.all.rankings)
    assert counts["impressions"] == len(rows)
    clicked = {(each.ranking_id, each.item_id) for each in known if each.click}
    assert len(clicked) == sum(int(str(row[3])) for row in rows)
    lost = len(world.all.events) - len(known)
    late_orders = counts["unmatched"] - lost
    assert 0 <= late_orders <= len(world.all.shadows)
    valueless = {each.ranking_id for each in world.all.rankings if each.value is None}
    assert counts["valueless"] == sum(each.value is not None and each.ranking_id in valueless for each in known)
    assert counts["repeated"] + counts["late"] <= len(known)
    assert (counts["torn"], counts["damaged"]) == (0, 0)


def assert_shadows(world: World) -> None:
    """What is there of the silent model agrees with the log."""
    clicks = {(row[0], row[1]): row[3] for row in world.all.rows()}
    for path in [path for folder in world.folders for path in (folder / "shadow").glob("*.parquet")]:
        frame = pl.read_parquet(path)
        for session, item, position, click in frame.select("session_id", "item_id", "position", "click").rows():
            assert click == (None if position is None else clicks[session, item])


CHILD = """
import os, signal, sys
from urank.serve.feedback_export import compact

steps = iter(range(int(sys.argv[2]) + 1))

def report(*_):
    if next(steps) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

compact(sys.argv[1], window_seconds=0, report=report)
"""


@pytest.mark.slow
def test_killed_for_good_at_every_step(tmp_path: Path) -> None:
    """The process itself is killed, at its first step, then at its second, until it comes to the end."""
    folder = tmp_path / "served"
    parts = [ranking(ONE), ranking(ONE, columns=VALUED, seed=1), ranking(TWO, seed=2)]
    sealed(folder, 1, *parts[:2], ShadowRecord(parts[0].ranking_id, "m2", 5, ("b", "a")))
    taken(folder)
    late = [event(parts[0], "a"), event(parts[1], "b", value=2.5)]
    lost = [event(ranking(segment_name(77)), "a"), event(parts[0], "x")]
    sealed(folder, 2, parts[2], *late[:1], event(parts[2], "c"), *lost)
    sealed(folder, 3, *late[1:], event(parts[2], "a", conversion=True))
    expected = Reference(parts, [*late, event(parts[2], "c"), event(parts[2], "a", conversion=True)]).rows()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for step in range(20):
        copy = tmp_path / f"killed {step}"
        shutil.copytree(folder, copy)
        # What a kill in the middle of a write leaves behind.
        (copy / "log" / f".{ONE}.parquet").write_bytes(b"PAR1 and no more")
        ended = subprocess.run([sys.executable, "-c", CHILD, str(copy), str(step)], check=False, env=environment)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
        taken(copy)
        assert logged(copy) == expected
        assert left(copy) == []
        assert list(copy.rglob(".*")) == []
        assert unmatched(copy) == {TWO: lost}
    # Three parts and a shadow are written, three segments taken up, what is unmatched is written, two are removed.
    assert step == 4 + 3 + 1 + 2
    assert logged(copy) == expected
    assert unmatched(copy) == {TWO: lost}


@pytest.mark.slow
def test_beside_servers_that_write(tmp_path: Path) -> None:
    """Two writers rotate quickly and hear of clicks on each other's rankings while it runs again and again."""
    everything = Reference()

    async def client(writers: list[WalWriter], number: int) -> None:
        for turn in range(25):
            writer = writers[(number + turn) % 2]
            shown = ranking(writer.segment, seed=turn, time_us=turn)
            await writer.append([encode(shown)], PLAIN)
            everything.rankings.append(shown)  # from here on a user may see it
            clicked = event(everything.rankings[(7 * turn + number) % len(everything.rankings)], "b", time_us=turn)
            await writers[number % 2].append([encode(clicked)])
            everything.events.append(clicked)
            await asyncio.sleep(0.001)

    async def work() -> list[CompactionStats]:
        writers = [WalWriter(tmp_path, segment_bytes=3_000), WalWriter(tmp_path, segment_bytes=2_000)]
        clients = asyncio.gather(*[client(writers, number) for number in range(8)])
        found = []
        while not clients.done():
            found.append(await asyncio.to_thread(taken, tmp_path))
        await clients
        await asyncio.gather(*[writer.close() for writer in writers])
        return [*found, taken(tmp_path)]

    found = asyncio.run(work())
    assert logged(tmp_path) == everything.rows()
    assert left(tmp_path) == []
    assert sum(each.rankings for each in found) == len(everything.rankings) == 200
    assert sum(each.unmatched + each.torn + each.damaged for each in found) == 0
    assert sum(each.clicks + each.late for each in found) == len({each.ranking_id for each in everything.events})
