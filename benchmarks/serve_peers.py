"""What the server is measured against, as processes of their own.

    python -m benchmarks.serve_peers bare MODEL CALLS BODY...     decode JSON and call the graph, nothing else
    python -m benchmarks.serve_peers fastapi MODEL                a minimal application of FastAPI and ONNX Runtime

The minimal application is as the manual has it: the framework decodes and validates the body, the handler makes a
matrix, adds the within-list columns by the server's own function, runs the graph of the click model, sorts by expected
utility at the first position, and returns the items. It checks no key, logs nothing and counts nothing. It runs on
Uvicorn as the server does.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Times = dict[str, list[float]]


def bare(model: Path, bodies: Sequence[bytes], calls: int) -> Times:
    """Milliseconds of each call, from a process of its own: decoded by msgspec, by the json module, and not; and
    the mean CPU time of the last."""
    with tempfile.TemporaryDirectory(prefix="urank-bare-") as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(bodies))]
        for file, body in zip(files, bodies, strict=True):
            file.write_bytes(body)
        command = [sys.executable, "-m", "benchmarks.serve_peers", "bare", model, calls, *files]
        done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    times: Times = json.loads(done.stdout)
    return times


def _bare(folder: Path, bodies: Sequence[bytes], calls: int) -> Times:
    import msgspec

    from urank.learning.features import Featurizer

    session = _session(folder / "clicks.onnx")
    featurizer = Featurizer.from_dict(json.loads((folder / "features.json").read_text(encoding="utf-8")))
    first = json.loads(bodies[0])["candidates"]
    raw = np.array([list(each["features"].values()) for each in first], dtype=np.float32)
    numeric = featurizer.add_within(raw, np.array([0, len(raw)]))
    feed = {"numeric": numeric, "categorical": np.zeros((len(raw), 0), dtype=np.int64)}

    def whole(decode: Callable[[bytes], object], number: int) -> float:
        begun = time.perf_counter()
        decode(bodies[number % len(bodies)])
        session.run(None, feed)
        return 1e3 * (time.perf_counter() - begun)

    ways: dict[str, Callable[[bytes], object]] = {"decoded": msgspec.json.decode, "json": json.loads, "graph": len}
    for number in range(50):
        for decode in ways.values():
            whole(decode, number)
    begun = time.process_time()
    for number in range(calls):
        whole(len, number)
    cpu = 1e3 * (time.process_time() - begun) / calls
    times = {name: [whole(decode, number) for number in range(calls)] for name, decode in ways.items()}
    return {**times, "graph, CPU time": [cpu]}


def _peer(folder: Path) -> None:
    """Serve a minimal application until a signal ends it: parse, run the graph, sort, answer."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    from urank.learning.features import Featurizer

    class Item(BaseModel):
        item_id: str
        features: dict[str, float | None]
        value: float = 1.0

    class Query(BaseModel):
        query_id: str
        candidates: list[Item]

    class Ranked(BaseModel):
        item_id: str
        position: int
        click: float
        utility: float

    class Ranking(BaseModel):
        query_id: str
        utility: float
        items: list[Ranked]

    featurizer = Featurizer.from_dict(json.loads((folder / "features.json").read_text(encoding="utf-8")))
    names = [feature.name for feature in featurizer.numeric]
    session = _session(folder / "clicks.onnx")
    positions = np.arange(session.get_outputs()[0].shape[1])
    app = FastAPI()

    async def rank(query: Query) -> Ranking:
        rows = [[item.features[name] for name in names] for item in query.candidates]
        numeric = featurizer.add_within(np.array(rows, dtype=np.float32), np.array([0, len(rows)]))
        feed = {"numeric": numeric, "categorical": np.zeros((len(rows), 0), dtype=np.int64)}
        table = np.exp(session.run(None, feed)[0])
        values = np.array([item.value for item in query.candidates])
        best = np.argsort(-table[:, 0] * values, kind="stable")[: len(positions)]
        clicks = table[best, positions[: len(best)]].tolist()
        items = [
            Ranked(item_id=query.candidates[row].item_id, position=k, click=click, utility=click * values[row])
            for k, (row, click) in enumerate(zip(best, clicks, strict=True), 1)
        ]
        return Ranking(query_id=query.query_id, utility=sum(item.utility for item in items), items=items)

    async def ready() -> dict[str, int]:
        return {}

    # The annotations of this module are text, and these types are known here alone.
    rank.__annotations__ = {"query": Query, "return": Ranking}
    ready.__annotations__ = {"return": dict[str, int]}
    app.post("/v1/rank")(rank)
    app.get("/readyz")(ready)
    sock = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, ws="none"
    )
    uvicorn.Server(settings).run(sockets=[sock])


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "bare":
        folder, calls, *files = rest
        print(json.dumps(_bare(Path(folder), [Path(file).read_bytes() for file in files], int(calls))))
    else:
        _peer(Path(rest[0]))
