"""Another model takes the place of the one that is served, while requests come in."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from serve.cases import example, saved
from serve.load import Promises, load
from serve.server import running, save_served

if TYPE_CHECKING:  # torch is slow to load
    from urank.pipeline import ModelFit

pytestmark = pytest.mark.slow

KEY = "a-key-of-the-tests-0123"


@pytest.fixture(scope="module")
def other_model(fitted: ModelFit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, but for its method, and so of another version."""
    return save_served(fitted, tmp_path_factory.mktemp("other") / "model", "match")


def replace_folder(target: Path, source: Path) -> None:
    """Put a copy of a folder in the place of another, as `urank train --overwrite` does: by rename."""
    new, old = target.with_name("new"), target.with_name("old")
    shutil.copytree(source, new)
    target.rename(old)
    new.rename(target)
    shutil.rmtree(old)


def query_of(url: str, headers: dict[str, str] | None = None) -> dict[str, object]:
    sample = httpx.get(f"{url}/v1/samples/0", headers=headers).json()
    return {"query_id": sample["query_id"], "candidates": sample["candidates"]}


def wait_until(happened: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < last, f"{what}: waited for a minute"
        time.sleep(0.02)


def is_served(url: str, version: str) -> bool:
    return str(httpx.get(f"{url}/v1/model").json()["version"]) == version


def test_reload_under_load_fails_no_request(
    served_model: Path, other_model: Path, served_log: Path, tmp_path: Path
) -> None:
    current = tmp_path / "current"
    shutil.copytree(served_model, current)
    broken = tmp_path / "broken"
    shutil.copytree(other_model, broken)
    (broken / "clicks.onnx").write_bytes((other_model / "clicks.onnx").read_bytes()[:1000])
    output = tmp_path / "output"
    promises = Promises()
    with running(current, "--sample", served_log, "--log", tmp_path / "feedback", output=output) as (url, process):
        first = httpx.get(f"{url}/v1/model").json()["version"]
        with load(url, query_of(url), promises, clients=3) as ended:
            for number in range(6):
                source = (other_model, served_model)[number % 2]
                replace_folder(current, source)
                os.kill(process.pid, signal.SIGHUP)
                back = bool(number % 2)
                wait_until(lambda back=back: is_served(url, first) == back, "a new model")
                replace_folder(current, broken)
                os.kill(process.pid, signal.SIGHUP)
                before = len(promises.rankings)
                wait_until(lambda least=before + 5: len(promises.rankings) >= least, "requests")
                assert not ended.is_set()
        assert process.poll() is None
    assert promises.failures == []
    assert len(promises.versions) == 2
    assert "the models were not replaced" in output.read_text()


def test_all_workers_reload(served_model: Path, other_model: Path, tmp_path: Path) -> None:
    current = tmp_path / "current"
    shutil.copytree(served_model, current)
    headers = {"authorization": f"Bearer {KEY}"}
    with running(current, "--workers", 2, environment={"URANK_API_KEY": KEY}) as (url, _):
        replace_folder(current, other_model)
        version = httpx.post(f"{url}/v1/reload", headers=headers).json()["version"]
        in_a_row: list[str] = []

        def all_serve_it() -> bool:
            """Thirty times in a row, each on a connection of its own, which either worker may take."""
            in_a_row.append(httpx.get(f"{url}/v1/model", headers=headers).json()["version"])
            return len(in_a_row) >= 30 and set(in_a_row[-30:]) == {version}

        wait_until(all_serve_it, "all workers")


def test_the_share_of_a_test_changes_without_a_restart(tmp_path: Path) -> None:
    """In all workers, of models by name; a broken file changes nothing."""
    share, feedback = tmp_path / "share", tmp_path / "feedback"
    share.write_text("0")
    options = ("--model", f"home={saved('trees')}", "--model", f"search={saved('numbers')}", "--log", feedback)
    body = example("trees")

    def arms(url: str, count: int = 40) -> set[str]:
        """The arms of many users; each connection may reach another worker."""
        bodies = [body | {"user_id": f"u{number}"} for number in range(count)]
        return {httpx.post(f"{url}/v1/rank", json=each).json()["arm"] for each in bodies}

    with running(None, *options, "--arm-b", saved("clicks"), "--arm-b-share", share, "--workers", 2) as (url, _):
        assert arms(url) == {"A"}
        share.write_text("1")
        wait_until(lambda: arms(url) == {"B"}, "the new share")
        share.write_text("a half")
        time.sleep(2.5)
        assert arms(url) == {"B"}
        assert httpx.get(f"{url}/v1/model").json()["test"]["share"] == 1
        assert httpx.post(f"{url}/v1/models/search/rank", json=example("numbers")).json()["arm"] is None
