"""The PostgreSQL sink against a real server, which is killed and restarted under load."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from serve.cases import example, saved
from serve.load import Promises, load, wait_for
from serve.postgres import PASSWORD, PostgresServer, postgres_server
from serve.served_log import VALUED, Reference, click, exported, logged, shadow, show
from serve.server import running
from urank.errors import ConfigError, DataError
from urank.serve.feedback_export import shadow_agreement
from urank.serve.postgres_sink import PostgresSink, connect, place_of

KILLS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as found:
        yield found


@pytest.fixture
def database(server: PostgresServer) -> str:
    """The URL of the server, whose tables are empty."""
    with psycopg.connect(server.url) as connection:
        for table in ("homes", "columns", "rankings", "feedback", "shadows"):
            connection.execute(f"DROP TABLE IF EXISTS urank_{table}")
    return server.url


@pytest.mark.slow
def test_rows(database: str, tmp_path: Path) -> None:
    """Two workers and an export between them; the last value to arrive counts."""

    async def scenario() -> None:
        first, second = PostgresSink(database), PostgresSink(database)
        shown = [await show(first, columns=VALUED, user="u\x00", arm="A"), await show(second, ("a\x00", "\ud7ff"))]
        await shadow(second, shown[0], ("c", "b"))
        reports = [await click(second, shown[0], "a", value=1.0)]
        assert exported(database, output=tmp_path).rankings == 2
        reports += [
            await click(first, shown[0], "a", value=2.0),
            await click(first, shown[1], "a\x00", conversion=True),
        ]
        found = exported(database, output=tmp_path)
        assert (found.rankings, found.amended, found.unmatched) == (0, 2, 0)
        shown.append(await show(second, seed=1))
        await first.close()
        await second.close()
        assert exported(database, output=tmp_path).rankings == 1
        assert exported(database, output=tmp_path).parts == 0
        assert logged(tmp_path) == Reference(shown, reports).rows()
        assert shadow_agreement(tmp_path) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.slow
def test_killed_and_restarted_under_load(server: PostgresServer, database: str, tmp_path: Path) -> None:
    """While it is down, requests get 503 and readiness fails; then it recovers, and nothing acknowledged is lost."""
    promises, output = Promises(), tmp_path / "output"
    with running(saved("trees"), "--sink", database, "--workers", 2, output=output) as (url, _):
        for _ in range(KILLS):
            before = len(promises.rankings)
            with load(url, example("trees", 20), promises):
                wait_for(lambda last=before: len(promises.rankings) > last + 20)  # type: ignore[misc]
                promises.failures.clear()
                server.kill()
                wait_for(lambda: "rank 503" in promises.failures)
                wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 503)
            assert httpx.get(f"{url}/healthz").status_code == 200
            server.start()
            wait_for(lambda: all(httpx.get(f"{url}/readyz").status_code == 200 for _ in range(10)))
    exported(database, output=tmp_path / "log")
    assert len(promises.rankings) > 20 * KILLS
    promises.check(tmp_path / "log")
    assert PASSWORD not in output.read_text()
    assert "w0rd" not in output.read_text()


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for bad in ("mysql://db", f"postgresql://u:{PASSWORD}@x@db/urank", "postgresql://db:port/urank"):
        with pytest.raises(ConfigError, match="must be a URL as postgresql://") as refused:
            place_of(bad)
        assert PASSWORD not in str(refused.value)
    with pytest.raises(DataError, match=r"postgresql://127.0.0.1:1/urank cannot be reached") as refused:
        connect(f"postgresql://u:{PASSWORD}@127.0.0.1:1/urank")
    assert PASSWORD not in str(refused.value)
    with pytest.raises(ConfigError, match="options"):
        connect(f"postgresql://u:{PASSWORD}@127.0.0.1:1/urank?no_such={PASSWORD}")
    (tmp_path / "records").mkdir()
    with pytest.raises(ConfigError, match="needs its own folder"):
        exported("postgresql://127.0.0.1:1/urank", output=tmp_path)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"run pip install 'urank\[postgres\]'"):
        connect("postgresql://127.0.0.1:1/urank")
