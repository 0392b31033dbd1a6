"""Reading and preparing logs: against scikit-learn, against a bare Polars sort, and how memory grows with the log."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_svmlight_file

import urank
from benchmarks.harness import Bar, median_seconds, peak_memory
from urank.lab.letor_simulation import SimulationConfig, simulate, write_simulation
from urank.log.svmlight import read_letor

FEATURES = 30


def run(*, quick: bool) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        folder = Path(name)
        yield from _letor(folder, lines=3_000 if quick else 60_000)
        yield from _prepare(folder, rows=100_000 if quick else 2_000_000)
        yield from _memory(folder, quick=quick)
        yield from _simulate(folder, queries=500 if quick else 12_800)


def _letor(folder: Path, lines: int) -> Iterator[Bar]:
    """Speed against scikit-learn's reader, on a dense file (like MSLR) and on a sparse one (like Yahoo)."""
    rng = np.random.default_rng(0)
    for kind, width, kept in (("dense", 136, 136), ("sparse", 700, 60)):
        path = folder / f"{kind}.txt"
        with path.open("w", encoding="ascii") as file:
            for line in range(lines):
                places = range(width) if kept == width else np.sort(rng.choice(width, kept, replace=False))
                pairs = " ".join(f"{i + 1}:{x:.6g}" for i, x in zip(places, rng.lognormal(size=kept), strict=True))
                file.write(f"{line % 5} qid:{line // 100 + 1} {pairs} \n")
        ours, theirs = median_seconds(lambda p=path: read_letor(p), lambda p=path: load_svmlight_file(p, query_id=True))
        yield Bar(f"LETOR {kind}: speed against scikit-learn", theirs / ours, "times", at_least=1)
        path.unlink()


def _prepare(folder: Path, rows: int) -> Iterator[Bar]:
    """Time against a bare Polars scan, sort and write of the same file."""
    log = write_log(folder / "log.parquet", rows)

    def ours() -> None:
        urank.prepare(urank.read(log), folder / "prepared", overwrite=True)

    def bare() -> None:
        pl.scan_parquet(log).sort("query_id", "position").sink_parquet(folder / "bare.parquet")

    seconds, bare_seconds = median_seconds(ours, bare)
    yield Bar(f"prepare {rows:,} rows: time against a bare Polars sort", seconds / bare_seconds, "times", at_most=3)
    yield Bar(f"prepare {rows:,} rows: speed", rows / seconds / 1e6, "million rows/s")
    shutil.rmtree(folder / "prepared")
    log.unlink()


def _memory(folder: Path, *, quick: bool) -> Iterator[Bar]:
    """Peak memory of `urank prepare` and `urank inspect` at two sizes."""
    for rows in (20_000, 200_000) if quick else (2_000_000, 20_000_000):
        log = write_log(folder / "log.parquet", rows)
        megabytes, _ = peak_memory("-m", "urank", "prepare", log, "-o", folder / "prepared", "--quiet")
        yield Bar(f"prepare {rows:,} rows: peak memory", megabytes, "MB", at_most=2048)
        megabytes, seconds = peak_memory("-m", "urank", "inspect", log, "--quiet")
        yield Bar(f"inspect {rows:,} rows: peak memory", megabytes, "MB", at_most=2048)
        yield Bar(f"inspect {rows:,} rows: time", seconds, "s")
        shutil.rmtree(folder / "prepared")
        log.unlink()


def _simulate(folder: Path, queries: int) -> Iterator[Bar]:
    """Time to simulate and write about a million impressions."""
    config = SimulationConfig(queries=queries)
    (seconds,) = median_seconds(
        lambda: write_simulation(simulate(config), folder / "simulation", overwrite=True), repeats=1
    )
    rows = pq.ParquetFile(folder / "simulation" / "log.parquet").metadata.num_rows
    yield Bar(f"simulate {rows:,} impressions: time for a million", seconds / rows * 1e6, "s", at_most=10)


def write_log(path: Path, rows: int, *, chunk: int = 1_000_000) -> Path:
    """A log of lists of ten with float32 features, shuffled within each million rows."""
    rng = np.random.default_rng(0)
    writer = None
    for start in range(0, rows, chunk):
        row = rng.permutation(np.arange(start, min(start + chunk, rows)))
        columns = {
            "query_id": row // 10,
            "item_id": rng.integers(0, 100_000, len(row)),
            "position": row % 10 + 1,
            "click": (rng.random(len(row)) < 0.1).astype(np.int8),
        }
        columns |= {f"f{j}": rng.standard_normal(len(row), dtype=np.float32) for j in range(FEATURES)}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None  # noqa: S101 - there is at least one row
    writer.close()
    return path
