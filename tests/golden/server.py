"""A server that is asked what clients ask: by JSON and by Arrow, with feedback and with mistakes."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pyarrow as pa

from golden.values import Json, cleaned

__all__ = ["visit"]

START_SECONDS = 60.0
END_SECONDS = 30.0
ARROW = "application/vnd.apache.arrow.stream"
RANK, EXPLAIN, CLICKS, MODEL = "/v1/rank", "/v1/explain", "/v1/feedback", "/v1/model"
# Names that differ from run to run: of rankings, and of models, which are known by the hash of their files.
NAMES = frozenset({"ranking_id", "model", "policy", "version"})


def visit(
    folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Its description, and what it answers."""
    with serving(folder, command, environment) as url, httpx.Client(base_url=url, timeout=START_SECONDS) as client:
        told = answers(client, pl.read_parquet(folder / "made" / "store" / "log.parquet"))
        description = client.get("/openapi.json").json()
        told["metrics"] = metrics(client.get("/metrics").text)
    return shape_of(description), told


@contextmanager
def serving(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The address of a server, which is ended afterwards."""
    said = folder / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
    try:
        yield _address(process, said)
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _address(process: subprocess.Popen[bytes], said: Path) -> str:
    last = time.monotonic() + START_SECONDS
    while time.monotonic() < last and process.poll() is None:
        found = re.search(r"http://[\w.]+:\d+", said.read_text())
        if found is not None:
            try:
                if httpx.get(f"{found[0]}/readyz", timeout=START_SECONDS).status_code == 200:
                    return found[0]
            except httpx.TransportError:
                pass
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{said.read_text()}")


def answers(client: httpx.Client, log: pl.DataFrame) -> dict[str, Json]:
    """What it says to rankings, feedback, explanations and mistakes, one request after the other."""
    features = client.get(MODEL).json()["features"]
    names = [*features["numeric"], *features["categorical"]]
    visits = log.partition_by("query_id", maintain_order=True)
    one, two, three, four = (_query(visit.head(6), names) for visit in visits[:4])
    del one["candidates"][2]["value"]
    one["candidates"][3]["features"] |= {names[0]: None, names[-1]: "never seen"}
    ranked = client.post(RANK, json=one | {"user_id": "u1"})
    batch = client.post(RANK, json={"queries": [two | {"positions": 3}, three | {"method": "match"}]})
    rows, response = arrow(client, pl.concat([visits[4].head(4), visits[5].head(3)]), names)
    first, second = (ranking["items"] for ranking in (ranked.json(), batch.json()["rankings"][0]))
    events = [
        {"ranking_id": ranked.json()["ranking_id"], "item_id": first[1]["item_id"]},
        {"ranking_id": ranked.json()["ranking_id"], "item_id": first[0]["item_id"], "conversion": True, "value": 7.5},
        {"ranking_id": batch.json()["rankings"][0]["ranking_id"], "item_id": second[0]["item_id"]},
        {"ranking_id": response["ranking_id"][0].as_py(), "item_id": response["item_id"][0].as_py()},
    ]
    shown = [candidate["item_id"] for candidate in four["candidates"]]
    mistaken = four | {"candidates": [{"item_id": "a", "features": {"nothing": 1}}]}
    return {
        "model": _said(client.get(MODEL)),
        "limits": client.get(MODEL).json()["limits"],
        "health": _said(client.get("/healthz")),
        "ready": _said(client.get("/readyz")),
        "samples": _said(client.get("/v1/samples"))["body"]["samples"][:3],
        "sample": _said(client.get("/v1/samples/0"))["body"]["candidates"][:1],
        "rank": _said(ranked),
        "rank batch": _said(batch),
        "arrow request": {name: str(kind) for name, kind in zip(rows.schema.names, rows.schema.types, strict=True)},
        "arrow response": {
            "columns": {
                name: str(kind) for name, kind in zip(response.schema.names, response.schema.types, strict=True)
            },
            "metadata": sorted(key.decode() for key in response.schema.metadata or {}),
            "rows": [_nameless(row) for row in response.to_pylist()],
        },
        "explain": _said(client.post(EXPLAIN, json=four | {"orders": {"shown": shown, "turned": shown[::-1]}})),
        "clicks": _said(client.post(CLICKS, json={"events": events})),
        "clicks again": _said(client.post(CLICKS, json={"events": events[:1]})),
        "wrong features": _said(client.post(RANK, json=mistaken)),
        "no candidates": _said(client.post(RANK, json={"query_id": "q", "candidates": []})),
        "no json": _said(client.post(RANK, content=b"{", headers={"content-type": "application/json"})),
        "no arrow": _said(client.post(RANK, content=b"none", headers={"content-type": ARROW})),
        "no type": _said(client.post(RANK, content=b"none", headers={"content-type": "text/plain"})),
        "no key": _said(client.post("/v1/reload")),
        "no page": _said(client.get("/v1/nothing")),
    }


def arrow(client: httpx.Client, rows: pl.DataFrame, names: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """A request as an Arrow IPC stream, and its answer."""
    table = rows.select("query_id", "item_id", "user_id", "value", *names).to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    response = client.post(RANK, content=sink.getvalue().to_pybytes(), headers={"content-type": ARROW})
    assert (response.status_code, response.headers["content-type"]) == (200, ARROW), response.text
    with pa.ipc.open_stream(response.content) as reader:
        return table, reader.read_all()


def metrics(text: str) -> list[str]:
    """The names of the metrics and of their labels."""
    found = set()
    for line in text.splitlines():
        series = re.match(r"(\w+)(?:\{(.*)\})?", line)
        if series is not None and not series[1].endswith(("_bucket", "_created")):
            labels = ",".join(re.findall(r"(\w+)=", series[2] or ""))
            found.add(f"{series[1]}{{{labels}}}")
    return sorted(found)


def shape_of(description: Mapping[str, Any]) -> dict[str, Json]:
    """Paths, operation ids and schemas of a description, without texts.

    Schemas are numbered in the order of their use, since they are named by classes.
    """
    schemas: dict[str, Json] = {}
    paths = {path: _shape(item, description, schemas) for path, item in sorted(description["paths"].items())}
    numbers = list(schemas)
    return {
        "openapi": description["openapi"],
        "paths": paths,
        "schemas": {str(numbers.index(name)): schema for name, schema in schemas.items()},
    }


def _shape(found: Json, description: Mapping[str, Any], schemas: dict[str, Json], *, names: bool = False) -> Json:
    """One part of it; where keys are names of properties, all of them are kept."""
    if isinstance(found, list):
        return [_shape(value, description, schemas) for value in found]
    if not isinstance(found, dict):
        return found
    if "$ref" in found and not names:
        name = found["$ref"].rsplit("/", 1)[1]
        if name not in schemas:
            schemas[name] = None
            schemas[name] = _shape(description["components"]["schemas"][name], description, schemas)
        return {"schema": list(schemas).index(name)}
    texts = () if names else ("title", "description", "summary", "example", "examples", "tags")
    return {
        key: _shape(value, description, schemas, names=key == "properties" and not names)
        for key, value in found.items()
        if key not in texts
    }


def _query(visit: pl.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    """A visit of the log as a request."""
    rows = visit.to_dicts()
    candidates = [
        {"item_id": row["item_id"], "features": {name: row[name] for name in names}, "value": row["value"]}
        for row in rows
    ]
    return {"query_id": rows[0]["query_id"], "candidates": candidates}


def _said(response: httpx.Response) -> Json:
    """The status, the type and the body of an answer."""
    kind = response.headers["content-type"]
    return {"status": response.status_code, "type": kind.split(";")[0], "body": _nameless(cleaned(response.json()))}


def _nameless(found: Json) -> Json:
    """Without names that differ from run to run; whether they are there is kept."""
    if isinstance(found, dict):
        return {
            key: "<name>" if key in NAMES and isinstance(value, str) else _nameless(value)
            for key, value in found.items()
        }
    return [_nameless(value) for value in found] if isinstance(found, list) else found
