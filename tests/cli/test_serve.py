"""`urank serve` as a person runs it: what it says of itself, what it refuses, and how it ends.

Refusals are asked for within this process, as other commands are; what ends by a signal is a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve.cases import example, saved
from serve.server import running
from urank.cli import load_command

KEY = "a-key-of-the-tests-0123"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key from outside, and the signals of this process as they were before a command that failed."""
    monkeypatch.delenv("URANK_API_KEY", raising=False)
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    gc.collect()  # what a command left open is found now, and not in a test that cannot help it
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def model() -> Path:
    return saved("trees")


def test_help_names_every_option_with_a_sentence(command: Any) -> None:
    result = command("serve", "--help")
    assert (result.code, result.stderr) == (0, "")
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", result.stdout).split())
    parameters = load_command("serve").params
    options = [each for each in parameters if each.opts[0].startswith("--")]
    assert len(options) > 20
    for option in options:
        (name,) = (text for text in option.opts if text.startswith("--"))
        sentence = " ".join(re.sub("[*`]", "", option.help).split())
        assert re.fullmatch(r"[A-Z][^.;]+ .*[.]", sentence), name
        assert re.search(rf" {name} .*{re.escape(sentence)}", said), name
    assert "Example: urank serve model --sample log.parquet --log feedback" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--explore", "swap:0.1"), "--explore randomises lists to learn from them, so it needs --log DIR"),
        (("--log", "new", "--sink", "postgresql://db/urank"), "choose one"),
        (("--sink", "postgresql://u:se@cret@db/urank"), "must be a URL as postgresql://user@host:5432/database"),
        (("--log", "new", "--explore", "magic:0.1"), "swap:SHARE"),
        (("--log", "new", "--explore", "swap"), "swap:SHARE"),
        (("--log", "new", "--explore", "swap:2"), "above 0 and at most 1; got 2"),
        (("--host", "0.0.0.0"), "--host 0.0.0.0 can be reached from outside, so a key is required"),  # noqa: S104
        (("--host", "::"), "--host :: can be reached from outside, so a key is required"),
        (("--key-file", "absent"), "--key-file absent cannot be read"),
        (("--key-file", "."), "--key-file . cannot be read"),
        (("--arm-b", "absent", "--arm-b-share", "1.5"), "must be from 0 to 1; got 1.5"),
        (("--arm-b", "absent", "--arm-b-share", "nan"), "must be from 0 to 1; got nan"),
        (
            ("--arm-b", "absent", "--arm-b-share", "half"),
            "--arm-b-share half must be a number, or a file",
        ),
        (("--model", "a=b"), "needs either MODEL or --model NAME=MODEL; got both"),
        (("--items", "absent.parquet"), "the items of absent.parquet cannot be used"),
        (("--arm-b", "absent", "--abtest-name", ""), "needs a name"),
        (("--arm-b", "absent"), "absent"),
        (("--shadow", "absent"), "absent"),
        (("--sample", "absent.parquet"), "absent.parquet"),
        (("--host", "192.0.2.1", "--key-file", "key"), "cannot listen at 192.0.2.1 port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_served_is_refused(
    arguments: tuple[str, ...],
    sentence: str,
    model: Path,
    command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each in one sentence, before anything is made."""
    monkeypatch.chdir(tmp_path)
    Path("key").write_text(KEY)
    refusal = command("serve", model, "--port", 0, *arguments).refusal
    assert sentence in refusal
    assert KEY not in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_that_is_none_is_refused_and_makes_no_log(workers: int, tmp_path: Path) -> None:
    """In a process of its own, as several workers are; one of them speaks for all."""
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    folders = [tmp_path / "absent", empty, broken] if workers == 1 else [tmp_path / "absent"]
    for folder in folders:
        options = ("--port", 0, "--workers", workers, "--log", tmp_path / "log")
        ended = urank("serve", folder, *options)
        assert ended.returncode == 2, ended
        assert ended.stdout == ""
        (line,) = ended.stderr.strip().splitlines()
        assert line.startswith("Error: ")
        assert f"{folder} is not a urank model" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "empty"]


def test_a_model_without_graphs_is_refused(saved: Path, command: Any, tmp_path: Path) -> None:
    refusal = command("serve", saved, "--port", 0, "--log", tmp_path / "log").refusal
    assert "clicks.onnx" in refusal
    assert str(saved) in refusal
    assert not list(tmp_path.iterdir())


def test_a_sample_without_the_features_is_refused(model: Path, command: Any, tmp_path: Path) -> None:
    import polars as pl

    log = tmp_path / "log.parquet"
    pl.DataFrame({"query_id": ["q", "q"], "position": [1, 2], "click": [0, 1], "other": [0.5, 1.5]}).write_parquet(log)
    refusal = command("serve", model, "--port", 0, "--sample", log).refusal
    assert "must have the features of the model; it lacks '" in refusal
    assert str(log) in refusal


def test_a_port_in_use_is_refused(model: Path, command: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refusal = command("serve", model, "--port", port, "--log", tmp_path / "log").refusal
    assert refusal == f"cannot listen at 127.0.0.1 port {port}: Address already in use"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "key", ["", "short", "a key that has spaces in it", "k\u00e9y-that-is-not-ascii", "tab\tin-the-midst-of-it"]
)
def test_a_bad_key_is_refused_and_not_told(
    key: str, model: Path, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(key, encoding="utf-8")
    rule = "must be a key of at least 16 printable ASCII characters without spaces"
    assert command("serve", model, "--port", 0, "--key-file", file).refusal == f"--key-file {file} {rule}"
    if key:
        monkeypatch.setenv("URANK_API_KEY", key)
        assert command("serve", model, "--port", 0).refusal == f"URANK_API_KEY {rule}"


def test_a_key_file_that_is_a_folder_is_refused(model: Path, command: Any, tmp_path: Path) -> None:
    assert (
        command("serve", model, "--port", 0, "--key-file", tmp_path).refusal == f"--key-file {tmp_path} cannot be read"
    )


def test_a_key_file_that_is_not_text_is_refused(model: Path, command: Any, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"\xff" * 20)
    assert command("serve", model, "--port", 0, "--key-file", file).refusal == f"--key-file {file} cannot be read"


@pytest.mark.parametrize(
    "arguments",
    [("--port", "70000"), ("--workers", "0"), ("--method", "best"), ("--timeout", "0"), ("--body-mb", "-1")],
)
def test_numbers_out_of_bounds_are_refused(arguments: tuple[str, str], model: Path, command: Any) -> None:
    ended = command("serve", model, *arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert arguments[0] in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_key_is_in_no_output(model: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "key", tmp_path / "output"
    file.write_text(KEY)
    options = ("--key-file", file, "--access-log", "--log", tmp_path / "log")
    with running(model, *options, output=output) as (url, _), httpx.Client(base_url=url) as client:
        for headers in ({}, {"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}, {"X-API-Key": f"{KEY}x"}):
            for path in ("/v1/model", "/openapi.json", "/docs", "/metrics", "/", "/nothing"):
                answer = client.get(path, headers=headers)
                assert KEY not in answer.text
                assert KEY not in str(answer.headers)
        assert client.post("/v1/rank", json=example("trees"), headers={"X-API-Key": KEY}).status_code == 200
        assert client.post("/v1/reload", headers={"X-API-Key": KEY}).status_code == 200
    assert "GET /v1/model" in output.read_text()  # so there was something to look at
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path != file):
        assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_finishes_the_request_at_hand(workers: int, model: Path, tmp_path: Path) -> None:
    """The server has said that it waits for the body when the signal comes; the body is still read, and answered."""
    query = example("trees", count=1_000)
    body = json.dumps(query).encode()
    lines = (
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Expect: 100-continue",
    )
    with running(model, "--workers", workers, "--log", tmp_path / "log") as (url, process):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as connection:
            connection.sendall("\r\n".join(["POST /v1/rank HTTP/1.1", *lines, "", ""]).encode())
            assert connection.recv(1_000).startswith(b"HTTP/1.1 100 ")
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)  # if it were to end at once, it would have
            assert process.poll() is None
            connection.sendall(body)
            answer = b""
            while part := connection.recv(65_536):
                answer += part
        assert process.wait(30) == 0
    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    items = [item["item_id"] for item in json.loads(text)["items"]]
    assert len(items) == 5
    assert set(items) <= {each["item_id"] for each in query["candidates"]}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")


@pytest.mark.slow
def test_a_killed_worker_is_replaced(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running(model, "--workers", 2, output=output) as (url, process):
        parent = psutil.Process(process.pid)
        before = {child.pid for child in parent.children()}
        assert len(before) == 2
        query = example("trees")
        expected = httpx.post(f"{url}/v1/rank", json=query).json()["items"]
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len({child.pid for child in parent.children()} - {killed}) == 2, "another worker")
        after = {child.pid for child in parent.children()}
        assert before & after == before - {killed}
        wait_until(lambda: answered(url, query) == expected, "an answer")
        os.kill(max(before), signal.SIGKILL)  # the one that was left, so that the new one has to answer
        wait_until(lambda: answered(url, query) == expected, "an answer")
    assert process.returncode == 0
    assert output.read_text().count("starting another") == 2


@pytest.mark.slow
def test_ctrl_c_ends_it_in_peace(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running(model, output=output) as (_, process):
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert "Traceback" not in output.read_text()


def answered(url: str, query: dict[str, Any]) -> Any:
    """The items of an answer; none while a connection breaks, as one that a killed worker had does."""
    try:
        return httpx.post(f"{url}/v1/rank", json=query).json()["items"]
    except httpx.TransportError:
        return None


def wait_until(happened: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < last, f"{what}: waited for a minute"
        time.sleep(0.02)


def urank(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`urank` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "urank", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
