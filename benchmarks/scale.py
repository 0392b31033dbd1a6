"""Logs of a million and of a hundred million impressions: the cost of a row, and memory under one setting; and Ray.

    python -m benchmarks scale [--only rows|trees|loop|ray]

`rows` needs about 45 GB of disk for its larger log (in the folder `$URANK_BENCHMARK_DIR`, or that of temporary files)
and half an hour; `trees` grows trees on a log of which they can hold only a part. The cost of a row is the time of the
training loop itself, with measuring the held-out loss, over the rows that it learned from, all in one epoch: what a
command needs to start would make the small log look dear.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import urank
from benchmarks.harness import Bar, peak_memory
from benchmarks.rank import write_candidates
from urank.log.dataset import Dataset

FEATURES, LENGTH, CHUNK = 30, 10, 1_000_000
MOST_CANDIDATES = 10_000_000
MEMORY = "4GB"
PARTS = ("rows", "trees", "loop", "ray")

CONFIG = """
method = "score"
[clicks]
families = ["monotone"]
[clicks.training]
epochs = 1
patience = 1000
[scorer.training]
epochs = 1
patience = 1000
"""


TREES_CONFIG = """
method = "score"
ranker = "trees"
[clicks.trees]
trees = 5
[trees]
trees = 5
"""


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar]:
    wanted = only or PARTS
    with tempfile.TemporaryDirectory(prefix="urank-scale-", dir=os.environ.get("URANK_BENCHMARK_DIR")) as name:
        folder = Path(name)
        if "rows" in wanted:
            yield from at_two_sizes(folder, (20_000, 200_000) if quick else (1_000_000, 100_000_000))
        if "trees" in wanted:
            yield from _trees(folder, 50_000 if quick else 25_000_000)
        if "loop" in wanted:
            from benchmarks.scale_loop import against_bare_loops

            dataset = _prepared(folder, 50_000 if quick else 3_000_000)
            yield from against_bare_loops(folder, 300 if quick else 10_000, dataset)
        if "ray" in wanted:
            from benchmarks.scale_ray import against_one_process

            yield from against_one_process(folder, queries=300 if quick else 3_000)


def at_two_sizes(folder: Path, sizes: tuple[int, int]) -> Iterator[Bar]:
    """Prepare, train, evaluate and rank two logs, one a hundred times the other."""
    limit = float(MEMORY.removesuffix("GB")) * 1e9 / 2**20
    costs: dict[str, list[float]] = {}
    for rows in sizes:
        log = write_log(folder / f"log-{rows}", rows)
        prepared, model, config = folder / "prepared", folder / "model", folder / "train.toml"
        config.write_text(CONFIG, encoding="utf-8")
        candidates = write_candidates(folder / "candidates.parquet", min(rows, MOST_CANDIDATES), LENGTH)
        steps = {
            "prepare": (log, "-o", prepared),
            "train": (prepared, "-o", model, "--config", config, "--click-model", "monotone"),
            "evaluate": (model, prepared),
            "rank": (model, candidates, "-o", folder / "ranked.parquet"),
        }
        for step, arguments in steps.items():
            told = folder / "told.json"
            options = ("--memory", MEMORY, "--json" if step == "train" else "--quiet")
            megabytes, seconds = peak_memory("-m", "urank", step, *arguments, *options, output=told)
            size = min(rows, MOST_CANDIDATES) if step == "rank" else rows
            yield Bar(f"{step} {size:,} rows: peak memory", megabytes, "MB", at_most=limit, part="rows")
            yield Bar(f"{step} {size:,} rows: time", seconds, "s", part="rows")
            if step == "prepare":
                shutil.rmtree(log)
            if step == "train":
                for name, cost in _costs(json.loads(told.read_text(encoding="utf-8"))["rounds"]).items():
                    costs.setdefault(name, []).append(cost)
                    yield Bar(f"train {rows:,} rows: {name}", cost * 1e6, "µs a row", part="rows")
        for path in (prepared, model):
            shutil.rmtree(path)
        for path in (candidates, folder / "ranked.parquet"):
            path.unlink()
    for name, (small, large) in costs.items():
        ratio = large / small
        yield Bar(f"cost of a row, {sizes[1]:,} / {sizes[0]:,}: {name}", ratio, "times", at_most=1.15, part="rows")


def _trees(folder: Path, rows: int) -> Iterator[Bar]:
    """Trees as click model and as ranker, on a log of which they can hold only a part."""
    prepared, config, told = _prepared(folder, rows).folder, folder / "trees.toml", folder / "trees.json"
    config.write_text(TREES_CONFIG, encoding="utf-8")
    command = ("-m", "urank", "train", prepared, "-o", folder / "trees", "--config", config, "--no-onnx")
    megabytes, seconds = peak_memory(*command, "--click-model", "gbdt", "--memory", MEMORY, "--json", output=told)
    shutil.rmtree(prepared)
    found = json.loads(told.read_text(encoding="utf-8"))
    limit = float(MEMORY.removesuffix("GB")) * 1e9 / 2**20
    yield Bar(f"trees, {rows:,} rows: peak memory", megabytes, "MB", at_most=limit, part="trees")
    yield Bar(f"trees, {rows:,} rows: time", seconds, "s", part="trees")
    learned = found["rounds"]["scorer"][0]["rows"] / (0.8 * rows)
    yield Bar(f"trees, {rows:,} rows: share of them that the ranker's trees learned from", learned, "", part="trees")


def _prepared(folder: Path, rows: int) -> Dataset:
    """A log of so many impressions, prepared."""
    log, prepared = write_log(folder / f"written-{rows}", rows), folder / f"prepared-{rows}"
    urank.prepare(urank.read(str(log)), prepared)
    shutil.rmtree(log)
    return Dataset(prepared)


def _costs(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Seconds a row of every training, and of all of them."""
    seconds = {name: sum(each["seconds"] for each in of) for name, of in rounds.items()}
    rows = {name: sum(each["rows"] for each in of) for name, of in rounds.items()}
    alone = {name.partition("-")[0]: seconds[name] / rows[name] for name in rounds}
    return alone | {"all": sum(seconds.values()) / max(rows.values())}


def write_log(folder: Path, rows: int) -> Path:
    """A folder of files of a million impressions: lists of ten, whose clicks follow features and position."""
    folder.mkdir()
    for number, start in enumerate(range(0, rows, CHUNK)):
        rng = np.random.default_rng([7, number])
        row = rng.permutation(np.arange(start, min(start + CHUNK, rows)))
        features = rng.standard_normal((FEATURES, len(row)), dtype=np.float32)
        position = row % LENGTH + 1
        steepness = np.exp(0.3 * features[1])
        logit = -1.5 + 0.8 * features[0] + 0.4 * features[2] * features[3] - 0.6 * np.log(position) * steepness
        click = rng.random(len(row)) < 1 / (1 + np.exp(-logit))
        columns = {
            "query_id": row // LENGTH,
            "item_id": rng.integers(0, 100_000, len(row)),
            "position": position,
            "click": click.astype(np.int8),
        }
        columns |= {f"f{j}": features[j] for j in range(FEATURES)}
        pq.write_table(
            pa.table(columns), folder / f"part-{number:05d}.parquet", compression="none", use_dictionary=False
        )
    return folder
