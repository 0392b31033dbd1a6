"""`kill -9` under load: nothing that was acknowledged is lost, and nothing is left unreadable."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

import urank
from serve.load import Promises, load, wait_for
from serve.served_log import exported
from serve.server import running

pytestmark = pytest.mark.slow

KILLS = 10


def test_kill_under_load_loses_nothing_that_was_acknowledged(
    served_model: Path, served_log: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    folder = tmp_path / "feedback"
    promises = Promises()
    for number in range(KILLS):
        before = len(promises.rankings)
        with running(served_model, "--log", folder, "--sample", served_log) as (url, process):
            sample = httpx.get(f"{url}/v1/samples/{number}").json()
            query = {"query_id": sample["query_id"], "candidates": sample["candidates"]}
            with load(url, query, promises) as ended:
                wait_for(lambda last=before: len(promises.rankings) >= last + 5)  # type: ignore[misc]
                ended.wait(float(rng.uniform(0.0, 0.4)))
                if number % 2:
                    exported(folder)  # while it runs
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if number % 3 == 2:
            exported(folder)
    exported(folder)
    assert len(promises.rankings) >= 5 * KILLS
    promises.check(folder)
    assert not list((folder / "records").iterdir())
    urank.prepare(urank.read(folder / "log"), tmp_path / "prepared")
