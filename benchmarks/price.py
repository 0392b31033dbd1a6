"""The price of a training: CPU time of `urank train` with its defaults beside LightGBM's on the same prepared log.

    python -m benchmarks price                       all logs, three runs each
    python -m benchmarks price --only repeated       one of them

`repeated` is the default simulation, where each query returns in ten sessions; `distinct` has as many impressions, but
no list twice; `A` and `B` are the hotel logs of `real`. CPU time is that of the whole process, imports and children
included, from the prepared Parquet to the saved model, for ours with its ONNX graphs. LightGBM is `lambdarank` with 100
trees of 31 leaves, without early stopping. Ours and LightGBM alternate; the median of the runs is compared.
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

import urank
from benchmarks.harness import REAL_DATA, Bar
from benchmarks.real import expedia, hotel_random
from benchmarks.simulated import simulated
from urank.lab.letor_simulation import SimulationConfig

RUNS = 3
SCRIPT = Path(__file__).parent / "peer_scripts" / "train_lightgbm_from_parquet.py"
MOST = {"repeated": 2.0, "distinct": 3.0}
"""CPU time of ours over LightGBM's, at most."""

MORE_SECONDS = 5.0
"""CPU seconds on a hotel log beyond LightGBM's, at most."""


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar]:
    parts = ("repeated", "distinct", "A", "B")
    absent = [name for name in only if name not in parts]
    if absent:
        raise SystemExit(f"price has no part '{absent[0]}'; its parts are {', '.join(parts)}")
    for part in only or parts:
        if part not in MOST and not REAL_DATA.is_dir():
            continue
        with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
            yield from compared(part, prepared(part, Path(name), quick=quick), runs=1 if quick else RUNS)


def prepared(part: str, folder: Path, *, quick: bool) -> Path:
    """Prepare a log and return its folder."""
    if part in MOST:
        config = SimulationConfig(seed=0)
        queries = 200 if quick else config.queries
        if part == "distinct":
            queries, sessions = queries * config.sessions, 1
        else:
            sessions = config.sessions
        simulated(folder, SimulationConfig(seed=0, queries=queries, sessions=sessions))
        return folder / "prepared"
    log = expedia(REAL_DATA) if part == "A" else hotel_random(REAL_DATA)
    frame = log.frame
    if quick:
        frame = frame.filter(
            pl.col("query_id").is_in(frame["query_id"].unique(maintain_order=True).head(200).implode())
        )
    urank.prepare(urank.read(frame), folder / "prepared", valid=0.2, test=0)
    return folder / "prepared"


def compared(part: str, folder: Path, *, runs: int) -> Iterator[Bar]:
    """Train both in turn, and compare the medians."""
    compileall.compile_dir(Path(urank.__file__).parent, quiet=2)
    ours, theirs = [], []
    for number in range(runs):
        model = folder.with_name(f"model-{number}")
        ours.append(cpu_seconds("-m", "urank", "train", folder, "-o", model, "--quiet"))
        theirs.append(cpu_seconds(SCRIPT, folder, folder.with_name(f"trees-{number}.txt")))
    mine, peer = statistics.median(ours), statistics.median(theirs)
    yield Bar(f"{part}: urank train, CPU", mine, "s", part=part)
    yield Bar(f"{part}: LightGBM, 100 trees, CPU", peer, "s", part=part)
    if part in MOST:
        yield Bar(f"{part}: urank / LightGBM", mine / peer, "", at_most=MOST[part], part=part)
    else:
        yield Bar(f"{part}: urank − LightGBM", mine - peer, "s", at_most=MORE_SECONDS, part=part)


def cpu_seconds(*arguments: object) -> float:
    """Return the CPU time of `python ARGUMENTS`, its children included."""
    before = os.times()
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
