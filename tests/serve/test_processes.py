"""Workers that die, signals, the socket, logs and traces: real servers and their processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve.cases import example, saved
from serve.server import running

pytestmark = pytest.mark.slow

KEY = "a-key-of-the-tests-0123"


def wait_until(happened: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < last, f"{what}: waited for a minute"
        time.sleep(0.05)


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return sorted(psutil.Process(process.pid).children(), key=lambda each: each.pid)


def rank(url: str) -> httpx.Response:
    headers = {"connection": "close"}
    return httpx.post(f"{url}/v1/rank", json=example("trees"), headers=headers, timeout=60)  # while workers start


def versions(url: str, count: int = 30) -> set[str]:
    """The versions that answer, each time on a connection of its own, which any worker may take."""
    return {str(rank(url).json()["model"]) for _ in range(count)}


def gauge(url: str, name: str) -> list[str]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return [line for line in lines if re.match(rf"{name}[ {{]", line)]


def replaced(process: subprocess.Popen[bytes], dead: int) -> bool:
    pids = [each.pid for each in workers_of(process)]
    return len(pids) == 2 and dead not in pids


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved("trees"), tmp_path / "model"))


@pytest.mark.parametrize("damage", ["garbage", "removed"])
def test_a_broken_model_on_disk_ends_nothing(model: Path, tmp_path: Path, damage: str) -> None:
    """Workers that are killed are replaced by others with the model that was served before."""
    output = tmp_path / "output"
    with running(model, "--workers", 2, output=output) as (url, process):
        (version,) = versions(url)
        if damage == "garbage":
            (model / "clicks.onnx").write_bytes(b"garbage")
        else:
            shutil.rmtree(model)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the models were not replaced" in output.read_text(), "a refusal")
        for _ in range(2):
            victim = workers_of(process)[0].pid  # the older one
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: replaced(process, victim), "a new worker")
        wait_until(lambda: output.read_text().count("served from a copy") >= 2, "their models")
        wait_until(lambda: gauge(url, "urank_model_stale") == ["urank_model_stale 1.0"], "the metric")
        assert versions(url) == {version}
        assert process.poll() is None
        if damage == "removed":
            return
        shutil.copy(saved("trees") / "clicks.onnx", model / "clicks.onnx")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: gauge(url, "urank_model_stale") == ["urank_model_stale 0.0"], "a reload")


def test_a_replacement_serves_what_the_others_do(model: Path, tmp_path: Path) -> None:
    """A model that was put in place but not reloaded is not served by one worker alone; after a reload it is by all."""
    with running(model, "--workers", 2) as (url, process):
        (version,) = versions(url)
        shutil.rmtree(model)
        shutil.copytree(saved("trees", 1), model)
        victim = workers_of(process)[0].pid
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: replaced(process, victim), "a new worker")
        wait_until(lambda: gauge(url, "urank_model_stale") == ["urank_model_stale 1.0"], "the metric")
        assert versions(url) == {version}
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: version not in versions(url), "a reload")
        (other,) = versions(url)
        info = gauge(url, "urank_model_info")
        assert [other in line for line in info] == [True], "the series of the old version must go"
        victim = workers_of(process)[0].pid
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: replaced(process, victim), "a new worker")
        assert versions(url) == {other}


def test_a_worker_that_starts_during_a_reload_reloads_as_well(model: Path) -> None:
    with running(model, "--workers", 2) as (url, process):
        (version,) = versions(url)
        shutil.rmtree(model)
        shutil.copytree(saved("trees", 1), model)
        victim = workers_of(process)[0].pid
        os.kill(victim, signal.SIGKILL)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: replaced(process, victim), "a new worker")
        wait_until(lambda: version not in versions(url, 50), "a reload")
        wait_until(lambda: gauge(url, "urank_model_stale") == ["urank_model_stale 0.0"], "the metric")
        assert len(versions(url)) == 1


def test_the_series_of_an_old_model_is_removed(model: Path) -> None:
    with running(model) as (url, process):
        (before,) = gauge(url, "urank_model_info")
        shutil.rmtree(model)
        shutil.copytree(saved("trees", 1), model)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: before not in gauge(url, "urank_model_info"), "a reload")
        assert len(gauge(url, "urank_model_info")) == 1


def test_a_server_that_cannot_start_says_why_once(model: Path) -> None:
    (model / "clicks.onnx").write_bytes(b"garbage")
    command = [sys.executable, "-m", "urank", "serve", str(model), "--port", "0", "--workers", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("is damaged and cannot be served") == 1


def test_nobody_can_connect_before_the_models_are_loaded(model: Path) -> None:
    """A taken port is reported at once; the first connection that succeeds is answered."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "urank", "serve", str(model), "--port", str(port), "--workers", "2"]
        refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert refused.returncode == 2
        assert f"cannot listen at 127.0.0.1 port {port}" in refused.stderr
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=1).status_code == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_resets_no_connection(workers: int) -> None:
    """Requests are answered, or refused before they are sent, and nothing hangs."""
    outcomes: list[str] = []
    ended = threading.Event()

    def ask(url: str) -> None:
        while not ended.is_set():
            try:
                outcomes.append(str(rank(url).status_code))
            except httpx.ConnectError:
                outcomes.append("refused")
                return
            except httpx.HTTPError as error:
                outcomes.append(repr(error))

    with running(saved("trees"), "--workers", workers) as (url, process):
        address = httpx.URL(url)
        slow = socket.create_connection((address.host, address.port), timeout=30)
        body = json.dumps(example("trees")).encode()
        slow.sendall(
            b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body[:-1])
        )
        threads = [threading.Thread(target=ask, args=(url,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(outcomes) > 50, "requests")
        process.terminate()
        for thread in threads:
            thread.join(10)
        ended.set()
        assert not any(thread.is_alive() for thread in threads)
        assert process.poll() is None, "a request is still in flight"
        slow.sendall(body[-1:])
        assert slow.recv(65_536).startswith(b"HTTP/1.1 200 ")
        slow.close()
        assert process.wait(30) == 0
    assert set(outcomes) == {"200", "refused"}


def test_nothing_is_left_behind_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    with running(saved("trees"), "--workers", 2, environment=environment) as (_, process):
        assert len(list(tmp_path.glob("urank*"))) == 1
        workers = workers_of(process)
        process.kill()
        psutil.wait_procs(workers, timeout=30)
        wait_until(lambda: not list(tmp_path.glob("urank*")), "the folder")
    with running(saved("trees"), "--workers", 2, environment=environment) as (_, process):
        process.terminate()
        assert process.wait(30) == 0
    assert not list(tmp_path.glob("urank*"))


def test_the_supervisor_is_small_and_imports_nothing() -> None:
    code = "import sys, urank.serve.processes; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    outside = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert {name for name in outside if not name.startswith("_")} == {"urank"}
    with running(saved("trees"), "--workers", 2) as (_, process):
        assert psutil.Process(process.pid).memory_info().rss < 60 * 2**20


@pytest.mark.parametrize("workers", [1, 2])
def test_logs_are_json_with_request_ids(tmp_path: Path, workers: int) -> None:
    output = tmp_path / "output"
    options = ("--workers", workers, "--access-log", "--log-format", "json")
    with running(saved("trees"), *options, output=output) as (url, _):
        given = httpx.post(f"{url}/v1/rank", json=example("trees"), headers={"x-request-id": "trace-17.a"})
        made = httpx.get(f"{url}/v1/model")
        forged = httpx.get(f"{url}/nothing", headers={"x-request-id": 'a" b'})
    assert given.headers["x-request-id"] == "trace-17.a"
    assert re.fullmatch("[0-9a-f]{16}", made.headers["x-request-id"])
    assert re.fullmatch("[0-9a-f]{16}", forged.headers["x-request-id"])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    by_id = {line["request_id"]: line for line in lines if "request_id" in line}
    line = by_id["trace-17.a"]
    assert (line["level"], line["message"], line["status"], line["candidates"]) == ("INFO", "POST /v1/rank", 200, 6)
    assert line["ms"] > 0
    assert by_id[forged.headers["x-request-id"]]["status"] == 404


def test_text_logs_have_times(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running(saved("trees"), "--access-log", output=output) as (url, _):
        httpx.get(f"{url}/v1/model", headers={"x-request-id": "a1"})
    (line,) = (line for line in output.read_text().splitlines() if "request_id=a1" in line)
    assert re.match(r"20\S+Z INFO urank\.access: GET /v1/model request_id=a1 status=200 ms=", line)


class Collector(HTTPServer):
    """A receiver of OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.bodies: list[bytes] = []


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/traces"
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_traces_reach_a_collector() -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever).start()
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
        trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        with running(saved("trees"), "--trace", environment=variables) as (url, _):
            headers = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "r1"}
            assert httpx.post(f"{url}/v1/rank", json=example("trees"), headers=headers).status_code == 200
            assert httpx.post(f"{url}/v1/rank", json={}).status_code == 422
        collector.shutdown()
    found = [service.ExportTraceServiceRequest.FromString(body) for body in collector.bodies]
    resources = [each for request in found for each in request.resource_spans]
    names = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    assert names["service.name"] == "urank"
    spans = [span for each in resources for part in each.scope_spans for span in part.spans]
    ranked, refused = (span for span in spans if span.name == "POST /v1/rank")
    assert (ranked.trace_id.hex(), ranked.parent_span_id.hex()) == (trace, parent)
    values = {each.key: each.value for each in ranked.attributes}
    assert values["http.route"].string_value == "/v1/rank"
    assert values["http.response.status_code"].int_value == 200
    assert values["urank.candidates"].int_value == 6
    assert values["urank.request_id"].string_value == "r1"
    assert "urank.queue_ms" in values
    assert {each.key: each.value.int_value for each in refused.attributes}["http.response.status_code"] == 422


def test_nothing_of_opentelemetry_is_imported_without_trace() -> None:
    code = "import sys, urank.serve.app; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"opentelemetry.sdk", "torch", "lightgbm", "scipy", "onnx"} & set(modules)
