"""The write-ahead log: what is acknowledged is read back, after kills, full disks and damage."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve.served_log import PLAIN, VALUED, OpenSegment, event, ranking, segment_name
from urank.errors import DataError
from urank.serve import feedback_store
from urank.serve.feedback_store import (
    FeedbackColumns,
    FeedbackRecord,
    RankingRecord,
    WalWriter,
    decode,
    encode,
    framed,
    is_closed,
    open_segment,
    read_segment,
    segment_of,
)

HEADER = 12


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "wal").glob("*.wal"))


def payloads(folder: Path) -> list[bytes]:
    """All that is in a log, every byte of which must be a record."""
    found: list[bytes] = []
    for path in segments(folder):
        some, torn, damaged = read_segment(path)
        assert (torn, damaged) == (0, 0)
        found += some
    return found


async def until(met: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if met():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


# reading


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.data())
def test_a_write_that_was_cut_off(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("wal") / "cut"
    whole = b"".join(map(framed, parts))
    kept = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:kept])
    ends = list(accumulate(HEADER + len(part) for part in parts))
    complete = sum(end <= kept for end in ends)
    torn = kept - ([0, *ends][complete])
    assert read_segment(path) == (parts[:complete], torn, 0)


@given(
    st.lists(st.binary(min_size=1, max_size=40) | st.just(b"urk1" * 9), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.integers(0, 99),
)
@example([b"x"], 0, 13, 0)
def test_a_damaged_stretch(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], start: int, length: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("wal") / "damaged"
    whole = bytearray(b"".join(map(framed, parts)))
    start %= len(whole)
    stop = min(start + length, len(whole))
    whole[start:stop] = bytes(255 - byte for byte in whole[start:stop])
    if seed % 2:  # garbage of another length
        whole[start:stop] = Random(seed).randbytes(seed)
    path.write_bytes(whole)
    ends = list(accumulate(HEADER + len(part) for part in parts))
    spans = list(zip(parts, [0, *ends], ends, strict=False))
    intact = [part for part, first, end in spans if end <= start or first >= stop]
    found, torn, damaged = read_segment(path)
    assert found == intact
    assert torn + damaged == len(whole) - sum(HEADER + len(part) for part in intact)
    if stop <= spans[-1][1]:
        assert torn == 0
    if start >= spans[-1][1]:
        assert damaged == 0


# sealing


def test_a_segment_is_closed_when_its_owner_lets_go(tmp_path: Path) -> None:
    segment = OpenSegment(tmp_path, segment_name(1))
    assert not is_closed(segment.path)
    segment.write(PLAIN)
    assert not is_closed(segment.path)
    segment.seal()
    assert is_closed(segment.path)
    assert not is_closed(tmp_path / "absent.wal")
    with pytest.raises(FileExistsError):
        open_segment(segment.path)


# writing


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work(), 60)  # who is forgotten would wait for ever

    asyncio.run(within())


def test_what_is_awaited_is_on_the_disk(tmp_path: Path) -> None:
    async def work() -> None:
        writer = WalWriter(tmp_path / "deep" / "log")
        made = ranking(writer.segment)
        await writer.append([encode(made)], PLAIN)
        assert [decode(each) for each in payloads(tmp_path / "deep" / "log")[:-1]] == [PLAIN]
        await writer.append([encode(event(made, "a")), encode(event(made, "b"))])
        await writer.append([])
        columns, first, *events = [decode(each) for each in payloads(tmp_path / "deep" / "log")]
        assert isinstance(first, RankingRecord)
        assert (columns, first.ranking_id, events) == (PLAIN, made.ranking_id, [event(made, "a"), event(made, "b")])
        assert segments(tmp_path / "deep" / "log")[0].stem == segment_of(made.ranking_id)
        assert (writer.waiting, writer.healthy) == (0, True)
        await writer.close()

    run(work)


def test_many_at_once_in_many_segments(tmp_path: Path) -> None:
    ids: list[str] = []

    async def client(writer: WalWriter, number: int) -> None:
        for turn in range(20):
            made = ranking(writer.segment, seed=number)
            waiter = writer.append([encode(made)], [PLAIN] if (number + turn) % 2 else [VALUED, PLAIN])
            ids.append(made.ranking_id)
            await waiter

    async def work() -> None:
        writer = WalWriter(tmp_path, segment_bytes=4_000)
        await asyncio.gather(*[client(writer, number) for number in range(20)])
        await writer.close()

    run(work)
    assert len(segments(tmp_path)) > 10
    found: list[str] = []
    for path in segments(tmp_path):
        assert is_closed(path)
        known: list[FeedbackColumns] = []
        for record in map(decode, read_segment(path)[0]):
            if isinstance(record, FeedbackColumns):
                known.append(record)
            else:
                assert isinstance(record, RankingRecord)
                assert segment_of(record.ranking_id) == path.stem
                assert record.columns in {each.digest for each in known}
                found.append(record.ranking_id)
        assert len(known) == len(set(known)) <= 2
    assert sorted(found) == sorted(ids)
    assert len(set(ids)) == 400


def test_an_idle_segment_is_closed_by_age(tmp_path: Path) -> None:
    async def work() -> None:
        writer = WalWriter(tmp_path, segment_seconds=0.1)
        used = writer.segment
        await writer.append([b"one"])
        path = tmp_path / "wal" / f"{used}.wal"
        assert not is_closed(path)
        await asyncio.sleep(0.1)
        assert not is_closed(path)
        writer.maybe_rotate()
        await until(lambda: is_closed(path))
        assert writer.segment != used
        await writer.append([b"two"])
        assert len(segments(tmp_path)) == 2
        await writer.close()

    run(work)
    assert payloads(tmp_path) == [b"one", b"two"]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """What a full disk does: a write stops short, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(tmp_path: Path) -> None:
    async def work() -> None:
        writer = WalWriter(tmp_path)
        await writer.append([b"before" * 10])
        failed_segment = writer.segment
        with files_no_larger_than(10_000):
            waiters = [
                writer.append([bytes([number]) * 4_000 for number in range(3)]),
                writer.append([b"same segment"]),
            ]
            outcomes = await asyncio.gather(*waiters, return_exceptions=True)
            assert [str(each) for each in outcomes] == [
                f"the feedback log {tmp_path} cannot be written: File too large",
            ] * 2
            assert all(isinstance(each, DataError) for each in outcomes)
            assert (writer.healthy, writer.waiting) == (False, 0)
            assert writer.segment != failed_segment
            second = writer.segment
            with pytest.raises(DataError, match="cannot be written: File too large"):
                await writer.append([b"x" * 20_000])
            assert not (tmp_path / "wal" / f"{second}.wal").exists()  # nothing in it was ever acknowledged
            await writer.append([b"small"])
            assert writer.healthy
        await writer.append([b"after"])
        await writer.close()
        assert is_closed(tmp_path / "wal" / f"{failed_segment}.wal")

    run(work)
    assert payloads(tmp_path) == [b"before" * 10, b"small", b"after"]  # and no byte of what failed


def test_what_comes_before_the_failure_is_known_is_not_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk recovers between two groups of one segment: what failed left a gap, so the second must fail too."""

    def fails_once(handle: int) -> None:
        monkeypatch.setattr(feedback_store, "_sync", os.fsync)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(feedback_store, "_sync", fails_once)

    async def work() -> None:
        writer = WalWriter(tmp_path)
        first = writer.append([b"first"])
        while feedback_store._sync is fails_once:  # without giving the loop a chance to hear of it
            time.sleep(0.001)
        second = writer.append([b"second"])
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert [str(each)[-18:] for each in outcomes] == ["Input/output error"] * 2
        await writer.append([b"third"])
        await writer.close()

    run(work)
    assert payloads(tmp_path) == [b"third"]


def test_it_hears_of_a_disk_that_recovers_without_being_asked(tmp_path: Path) -> None:
    async def work() -> None:
        writer = WalWriter(tmp_path)
        (tmp_path / "wal").rmdir()
        with pytest.raises(DataError):
            await writer.append([b"lost"])
        for _ in range(3):
            writer.maybe_rotate()
            await until(lambda: writer.waiting == 0)
            assert not writer.healthy
        (tmp_path / "wal").mkdir()
        writer.maybe_rotate()
        await until(lambda: writer.healthy)
        writer.maybe_rotate()  # now there is nothing to try
        await writer.append([b"kept"])
        await writer.close()

    run(work)
    tried, kept = payloads(tmp_path)
    assert decode(tried) == FeedbackColumns((), (), value=False, explored=False)
    assert kept == b"kept"


def test_too_much_that_waits_is_refused_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        writer = WalWriter(tmp_path, backlog_bytes=1_000)
        first = writer.append([b"x" * 900])
        with pytest.raises(DataError, match=r"cannot be written fast enough: 912 bytes wait"):
            writer.append([b"y" * 900], PLAIN)
        await first
        await writer.append([b"z" * 100, encode(ranking(writer.segment))], PLAIN)  # which are not forgotten
        await writer.close()
        with pytest.raises(DataError, match="is closed"):
            writer.append([b"late"])
        await writer.close()

    run(work)
    assert [each[:1] for each in payloads(tmp_path)] == [b"x", b"\x01", b"z", b"\x02"]


CHILD = """
import asyncio, sys
from pathlib import Path
from serve.served_log import PLAIN, event, ranking
from urank.serve.feedback_store import encode
from urank.serve.feedback_store import WalWriter

async def client(writer, number):
    while True:
        made = ranking(writer.segment)
        await writer.append([encode(made)], PLAIN)
        print(made.ranking_id, flush=True)
        await writer.append([encode(event(made, "b", time_us=number))])
        print(made.ranking_id + " b", flush=True)

async def work():
    writer = WalWriter(Path(sys.argv[1]), segment_bytes=20_000, segment_seconds=0.2)
    await asyncio.gather(*[client(writer, number) for number in range(8)])

asyncio.run(work())
"""


def test_kill(tmp_path: Path) -> None:
    """A process that appends is killed again and again: each id that it printed was acknowledged, so it is there."""
    printed: set[str] = set()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for turn in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert child.stdout is not None
        with child, child.stdout as lines:
            told = [lines.readline() for _ in range(50 + 37 * turn)]
            child.send_signal(signal.SIGKILL)
            told += lines.readlines()
        assert child.returncode == -signal.SIGKILL
        printed |= {line.strip() for line in told if line.endswith("\n")}
    found: set[str] = set()
    for path in segments(tmp_path):
        if not is_closed(path):
            assert not path.exists()  # killed between making the file and writing to it: it was empty and is removed
            continue
        some, _, damaged = read_segment(path)
        assert damaged == 0
        for record in map(decode, some):
            if isinstance(record, RankingRecord):
                found.add(record.ranking_id)
            elif isinstance(record, FeedbackRecord):
                found.add(f"{record.ranking_id} {record.item_id}")
    assert len(printed) > 10 * 50
    assert printed <= found
