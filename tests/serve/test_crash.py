"""`kill -9` under load: nothing that was acknowledged is lost, and nothing is left unreadable."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import polars as pl
import pytest

import urank
from serve.load import Promises, load
from serve.server import running
from urank.serve.feedback_export import compact

pytestmark = pytest.mark.slow

KILLS = 10


def test_kill_under_load_loses_nothing_that_was_acknowledged(
    served_model: Path, served_log: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    folder = tmp_path / "feedback"
    promises = Promises()
    for number in range(KILLS):
        # Small segments, so that files are also begun and sealed while the process dies.
        options = ("--log", folder, "--sample", served_log, "--segment-mb", 1, "--join-seconds", 0)
        before = len(promises.rankings)
        with running(served_model, *options) as (url, process):
            sample = httpx.get(f"{url}/v1/samples/{number}").json()
            query = {"query_id": sample["query_id"], "candidates": sample["candidates"]}
            with load(url, query, promises) as ended:
                while len(promises.rankings) < before + 5:  # so that there is something to lose
                    ended.wait(0.01)
                ended.wait(float(rng.uniform(0.0, 0.4)))
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if number % 3 == 2:
            compact(folder, window_seconds=0)
    compact(folder, window_seconds=0)

    assert len(promises.rankings) >= 5 * KILLS
    log = pl.read_parquet(folder / "log" / "*.parquet").sort("session_id", "position")
    shown = {str(group["session_id"][0]): group for group in log.partition_by("session_id", maintain_order=True)}
    assert set(promises.rankings) <= set(shown)
    for ranking, items in promises.rankings.items():
        assert shown[ranking]["item_id"].to_list() == items
        assert shown[ranking]["position"].to_list() == list(range(1, len(items) + 1))
    clicked = set(log.filter(pl.col("click") == 1).select("session_id", "item_id").iter_rows())
    assert promises.clicks <= clicked
    # What was written and not acknowledged may be there: a click at most for each client that was cut off.
    assert len(clicked - promises.clicks) <= 4 * KILLS
    assert not list((folder / "wal").iterdir())
    urank.prepare(urank.read(folder / "log"), tmp_path / "prepared")
