"""The SQLite sink: what it acknowledges is in a file, and what it cannot write it refuses."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.cases import client, example, saved
from serve.load import Promises, load, wait_for
from serve.served_log import Reference, click, exported, logged, show, writing
from serve.server import running
from urank.errors import DataError
from urank.serve import feedback_export, feedback_sink, service
from urank.serve.sqlite_sink import check_folder


def stored(folder: Path, table: str) -> list[str]:
    """The ranking ids in the files of a log."""
    found: list[str] = []
    for path in sorted((folder / "records").glob("*.sqlite")):
        with sqlite3.connect(path) as database:
            found += [row[0] for row in database.execute(f"SELECT ranking_id FROM {table}")]  # noqa: S608
        database.close()
    return found


def test_group_commit(tmp_path: Path) -> None:
    """Many appends at once are all there, in one file in WAL mode."""

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = await asyncio.gather(*(show(sink, seed=seed) for seed in range(200)))
            await asyncio.gather(*(click(sink, each, "a") for each in shown))
            (path,) = (tmp_path / "records").glob("*.sqlite")
            with sqlite3.connect(path) as database:
                assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            database.close()
            assert sorted(stored(tmp_path, "rankings")) == sorted(each.ranking_id for each in shown)
            assert sorted(stored(tmp_path, "feedback")) == sorted(each.ranking_id for each in shown)
            assert {each.ranking_id[:19] for each in shown} == {path.stem}
        with pytest.raises(DataError, match="is closed"):
            sink.append()

    asyncio.run(scenario())


@pytest.mark.parametrize("removed", ["folder", "file", "wal"])
def test_what_was_removed_is_noticed_and_made_again(tmp_path: Path, removed: str) -> None:
    """Nothing is acknowledged into a file that is gone; the next append has a new one."""
    log = tmp_path / "log"

    async def scenario() -> None:
        async with writing(log) as sink:
            await show(sink)
            if removed == "folder":
                shutil.rmtree(log)
            else:
                (path,) = log.glob("records/*.sqlite" if removed == "file" else "records/*-wal")
                path.unlink()
            with pytest.raises(DataError, match="cannot be written"):
                await show(sink)
            assert not sink.healthy
            after = await show(sink)
            assert sink.healthy
            assert after.ranking_id in stored(log, "rankings")
            exported(log)
            assert after.ranking_id in {str(row[0]) for row in logged(log)}

    asyncio.run(scenario())


def test_a_removed_folder_is_noticed_without_requests(tmp_path: Path) -> None:
    """By the probe of each second; so `/readyz` fails, and recovers."""
    with client("trees", log=tmp_path / "log") as http:
        assert http.post("/v1/rank", json=example("trees")).status_code == 200
        shutil.rmtree(tmp_path / "log")
        (tmp_path / "log").write_text("in the way")
        wait_for(lambda: http.get("/readyz").status_code == 503)
        assert http.post("/v1/rank", json=example("trees")).status_code == 503
        (tmp_path / "log").unlink()
        wait_for(lambda: http.get("/readyz").status_code == 200)
        assert http.post("/v1/rank", json=example("trees")).status_code == 200


def test_a_new_day_and_a_full_file_begin_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.time_ns()]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])

    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            shown = [await show(sink)]
            clock[0] += 86_400 * 10**9
            shown += [await show(sink, seed=1), await show(sink, seed=2)]  # the day is noticed after an append
            monkeypatch.setattr(feedback_sink, "HOME_BYTES", 1)
            shown += [await show(sink, seed=3), await show(sink, seed=4)]
            assert len({each.ranking_id[:19] for each in shown}) == 3
            exported(tmp_path)
            assert len(list((tmp_path / "records").glob("*.sqlite"))) <= 1  # those that nobody writes to are gone
            assert logged(tmp_path) == Reference(shown).rows()

    asyncio.run(scenario())


def test_a_slow_disk_is_refused_instead_of_filling_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with writing(tmp_path) as sink:
            await show(sink)
            monkeypatch.setattr(feedback_sink, "STALL_SECONDS", 0.01)
            with sqlite3.connect(next((tmp_path / "records").glob("*.sqlite"))) as other:
                other.execute("BEGIN IMMEDIATE")  # nobody else may do this; it is as slow as a disk can be
                waiting = asyncio.ensure_future(show(sink))
                await asyncio.sleep(0.05)
                assert not sink.healthy
                monkeypatch.setattr(feedback_sink, "WAITING_BYTES", 100)
                with pytest.raises(DataError, match="too slow"):
                    await show(sink)
                other.execute("ROLLBACK")
            other.close()
            await waiting
            assert sink.healthy

    asyncio.run(scenario())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        check_folder(tmp_path / "log")
    check_folder(tmp_path / "other" / "log")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount")
    yield folder
    subprocess.run(["/bin/umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_acknowledged(small_disk: Path, tmp_path: Path) -> None:
    """Under load until it is full, then with room again: the export has all that was promised before and after."""
    log, promises = small_disk / "log", Promises()
    with running(saved("trees"), "--log", log) as (url, _):
        with load(url, example("trees", 40), promises):
            wait_for(lambda: "rank 503" in promises.failures)
            wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 503)
        full = len(promises.rankings)
        assert httpx.get(f"{url}/healthz").status_code == 200
        subprocess.run(["/bin/mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        with load(url, example("trees", 40), promises):
            wait_for(lambda: len(promises.rankings) > full + 20)
    exported(log)
    promises.check(log)


@pytest.mark.slow
def test_a_folder_removed_under_load_loses_nothing_acknowledged_afterwards(tmp_path: Path) -> None:
    log, before, after = tmp_path / "log", Promises(), Promises()
    with running(saved("trees"), "--log", log) as (url, _):
        with load(url, example("trees", 20), before):
            wait_for(lambda: len(before.rankings) > 20)
            shutil.rmtree(log)
            wait_for(lambda: any("503" in failure for failure in before.failures))
            wait_for(lambda: (log / "records").is_dir() and httpx.get(f"{url}/readyz").status_code == 200)
        with load(url, example("trees", 20), after):
            wait_for(lambda: len(after.rankings) > 20)
    exported(log)
    after.check(log)


@pytest.mark.slow
def test_a_server_exports_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranking becomes Parquet without a command, and a running export does not outlive the server."""
    monkeypatch.setattr(service, "EXPORT_SECONDS", 0.05)
    monkeypatch.setattr(service, "EXPORT_WINDOW", 0.0)
    with client("trees", log=tmp_path) as http:
        assert http.post("/v1/rank", json=example("trees")).status_code == 200
        wait_for(lambda: any(tmp_path.glob("log/*.parquet")))
    with feedback_export._exclusive_lock(tmp_path / "export.lock") as locked:
        assert locked
