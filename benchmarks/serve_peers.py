"""What the server is measured against, as processes of their own.

    python -m benchmarks.serve_peers bare MODEL CALLS BODY...     decode JSON and call the graphs, nothing else
    python -m benchmarks.serve_peers fastapi|strict               a FastAPI endpoint that only parses the body

`fastapi` is an endpoint as the manual has it: the framework decodes the body and validates it. `strict` reads the body
and has Pydantic validate it straight from the bytes, which is faster. Both run on Uvicorn as the server does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Times = dict[str, list[float]]


def bare(model: Path, bodies: Sequence[bytes], calls: int) -> Times:
    """Milliseconds of each call, from a process of its own: `strict`, `json`, and the graphs alone as `graphs`."""
    with tempfile.TemporaryDirectory(prefix="urank-bare-") as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(bodies))]
        for file, body in zip(files, bodies, strict=True):
            file.write_bytes(body)
        command = [sys.executable, "-m", "benchmarks.serve_peers", "bare", model, calls, *files]
        done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    times: Times = json.loads(done.stdout)
    return times


def _bare(folder: Path, bodies: Sequence[bytes], calls: int) -> Times:
    import onnxruntime
    from pydantic_core import from_json

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(folder / name, options) for name in ("clicks.onnx", "scorer.onnx")]
    first = json.loads(bodies[0])["candidates"]
    numeric = np.array([list(each["features"].values()) for each in first], dtype=np.float32)
    given = {"numeric": numeric, "categorical": np.zeros((len(numeric), 0), dtype=np.int64)}
    graphs = [(graph, {entry.name: given[entry.name] for entry in graph.get_inputs()}) for graph in sessions]

    def whole(decode: Callable[[bytes], object], number: int) -> float:
        begun = time.perf_counter()
        decode(bodies[number % len(bodies)])
        for graph, feed in graphs:
            graph.run(None, feed)
        return 1e3 * (time.perf_counter() - begun)

    ways: dict[str, Callable[[bytes], object]] = {"strict": from_json, "json": json.loads, "graphs": len}
    for number in range(50):
        for decode in ways.values():
            whole(decode, number)
    return {name: [whole(decode, number) for number in range(calls)] for name, decode in ways.items()}


def _peer(kind: str) -> None:
    """Serve an endpoint that parses, until a signal ends it."""
    import uvicorn
    from fastapi import FastAPI, Request

    from urank.serve.processes import open_socket
    from urank.serve.request_schemas import NumericFeatures, RankQuery

    app = FastAPI()
    query_type = RankQuery[NumericFeatures]

    async def whole(body: query_type) -> dict[str, int]:
        return {"candidates": len(body.candidates)}

    async def strict(request: Request) -> dict[str, int]:
        return {"candidates": len(query_type.model_validate_json(await request.body()).candidates)}

    async def ready() -> dict[str, int]:
        return {}

    # The annotations of this module are text, and these types are known here alone.
    whole.__annotations__ = {"body": query_type, "return": dict[str, int]}
    strict.__annotations__ = {"request": Request, "return": dict[str, int]}
    app.post("/v1/rank")(whole if kind == "fastapi" else strict)
    ready.__annotations__ = {"return": dict[str, int]}
    app.get("/readyz")(ready)
    sock = open_socket("127.0.0.1", 0)
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, ws="none"
    )
    uvicorn.Server(settings).run(sockets=[sock])


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "bare":
        folder, calls, *files = rest
        print(json.dumps(_bare(Path(folder), [Path(file).read_bytes() for file in files], int(calls))))
    else:
        _peer(kind)
