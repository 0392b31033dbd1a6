"""What the benchmark of the server needs: a model of full size, requests as bytes, and servers as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.serve_load import Connection

FEATURES = tuple(f"f{number}" for number in range(1, 137))
POSITIONS = 10
JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
KEY = "a-key-of-the-benchmark"


def write_served_model(folder: Path, *, features: int = len(FEATURES), seed: int = 0) -> Path:
    """A model of the default kind, networks and trees on features and their within-list columns. How fast it is does
    not depend on its weights, so these are random."""
    import lightgbm  # slow to load, as torch, and not needed by what only asks a server
    import torch

    from urank.clicks.calibration import Calibration
    from urank.clicks.click_model import ClickModel
    from urank.clicks.shrunk import TREE_PARAMETERS, ShrunkClicks, ShrunkNetwork, tree_model
    from urank.learning.features import Featurizer, Numeric
    from urank.model_io import save_model
    from urank.ranking.ranking_model import RankingModel
    from urank.ranking.ranking_settings import UrankConfig
    from urank.ranking.urank_network import NetworkScorer, ScoreNetwork

    names = FEATURES[:features]
    raw = tuple(Numeric(name, 1.0, 1.0, missing=False) for name in names)
    compared = (f"{name} in list: {kind}" for kind in ("z", "rank", "mean") for name in names)
    derived = tuple(Numeric(name, 0.5, 1.0, missing=False) for name in (*compared, "list size"))
    featurizer = Featurizer(raw, (), names, derived)
    rng = np.random.default_rng(seed)
    rows, clicked = rng.lognormal(size=(4_000, 3 * features)), rng.random(4_000) < 0.2
    parameters = {**TREE_PARAMETERS, "num_threads": 1, "min_data_in_leaf": 10}
    booster = lightgbm.train(parameters, lightgbm.Dataset(rows, clicked, group=[20] * 200), num_boost_round=100)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = ShrunkNetwork(featurizer, POSITIONS, (64,), 0.0).eval()
        scorer = NetworkScorer(ScoreNetwork(featurizer, None).eval())
    member = ShrunkClicks(network, (tree_model(booster.model_to_string(), featurizer),))
    clicks = ClickModel(featurizer, POSITIONS, (member,), Calibration(POSITIONS, monotone=True))
    save_model(RankingModel(clicks, scorer, "match"), UrankConfig(), folder)
    return folder


def write_items(path: Path, items: int, features: int) -> Path:
    """Features of items for `--items`."""
    values = np.random.default_rng(0).lognormal(size=(items, features)).astype(np.float32)
    columns = {"item_id": [f"item-{number}" for number in range(items)]}
    pq.write_table(pa.table(columns | dict(zip(FEATURES, values.T, strict=False))), path)
    return path


def columnar(body: bytes) -> bytes:
    """A query as columns."""
    query = json.loads(body)
    listed = query.pop("candidates")
    columns = {name: [each["features"][name] for each in listed] for name in listed[0]["features"]}
    query |= {"item_id": [each["item_id"] for each in listed], "features": columns}
    return json.dumps(query, separators=(",", ":")).encode()


def by_id_requests(candidates: int, items: int, count: int = 8) -> list[bytes]:
    """Lists of items that the server holds."""
    rng = np.random.default_rng(0)
    drawn = [rng.choice(items, candidates, replace=False).tolist() for _ in range(count)]
    bodies = [{"query_id": "q", "item_id": [f"item-{number}" for number in each]} for each in drawn]
    return [post("/v1/rank", json.dumps(body, separators=(",", ":")).encode()) for body in bodies]


def features_of(candidates: int, seed: int, features: int = len(FEATURES)) -> NDArray[np.float32]:
    """Numbers with six digits, as the files of MSLR have them; more digits would make every parser slower."""
    values = np.random.default_rng(seed).lognormal(size=(candidates, features))
    return np.array([[float(f"{value:.6g}") for value in row] for row in values], dtype=np.float32)


def json_body(candidates: int, seed: int, method: str | None = None, features: int = len(FEATURES)) -> bytes:
    """A query as JSON."""
    rows = [[float(f"{value:.6g}") for value in row] for row in features_of(candidates, seed, features).tolist()]
    listed = [
        {"item_id": f"item-{seed}-{number}", "features": dict(zip(FEATURES, row, strict=False))}
        for number, row in enumerate(rows)
    ]
    query = {"query_id": f"query-{seed}", **({} if method is None else {"method": method}), "candidates": listed}
    return json.dumps(query, separators=(",", ":")).encode()


def arrow_body(candidates: int, seed: int) -> bytes:
    """The same query as an Arrow stream."""
    values = features_of(candidates, seed)
    columns: dict[str, object] = {
        "query_id": [f"query-{seed}"] * candidates,
        "item_id": [f"item-{seed}-{number}" for number in range(candidates)],
    }
    columns |= {name: values[:, place] for place, name in enumerate(FEATURES)}
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def post(path: str, body: bytes, kind: str = JSON, *headers: str) -> bytes:
    """A request, ready to be sent."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str) -> bytes:
    """A request without a body."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def rank_requests(
    candidates: int, *, kind: str = JSON, methods: Sequence[str | None] = (None,), count: int = 8
) -> list[bytes]:
    """Different lists of one length, those of each method in turn."""
    if kind == ARROW:
        return [post("/v1/rank", arrow_body(candidates, seed), ARROW) for seed in range(count)]
    return [post("/v1/rank", json_body(candidates, seed, method)) for seed in range(count) for method in methods]


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        process: leads a group of its own.
        port: on the loopback address.
        start_seconds: until it answered.
    """

    process: subprocess.Popen[str]
    port: int
    start_seconds: float

    @property
    def cpu_seconds(self) -> float:
        """User and system time so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def kill(self) -> None:
        """End it and all that it started, as a loss of power would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def started(*command: object, errors: Path) -> Iterator[Running]:
    """A server that prints its address, as a process group of its own; what it complains about goes to a file."""
    begun = time.perf_counter()
    with errors.open("a", encoding="utf-8") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "URANK_API_KEY": ""},
            start_new_session=True,
        )
    try:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if found is None:
            told = errors.read_text(encoding="utf-8")[-2_000:]
            raise RuntimeError(f"{' '.join(map(str, command))} did not start: {told}")
        with Connection(int(found[1])) as connection:
            connection.ask(get("/readyz"))
        yield Running(process, int(found[1]), time.perf_counter() - begun)
    finally:
        _end(process)


def urank_server(model: Path, errors: Path, *options: object) -> AbstractContextManager[Running]:
    """`urank serve` on a free port."""
    return started("urank", "serve", model, "--port", 0, *options, errors=errors)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    process.stdout.close()
