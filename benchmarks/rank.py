"""`urank rank`: Parquet in and Parquet out, against bare ONNX Runtime on arrays in memory, and how memory grows.

The peer runs the graphs of the same artifact, with as many threads as there are cores, on rows that are in memory and
encoded already, and throws away what comes out. It neither reads, checks, sorts, matches nor writes. The goal is held
against both graphs, since what is written holds the answers of both; what decides the order alone is told beside it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.harness import Bar, median_seconds, peak_memory
from urank.cli import app
from urank.cli.options import MethodName
from urank.memory import Memory

FEATURES = tuple(f"f{number}" for number in range(30))
POSITIONS = 10
LENGTHS = (20, 100)
MEMORY = "2GB"
PEER_ROWS = 4_096  # a call; ONNX Runtime was slower with 1,024 and with 16,384
GOAL = 0.5

Graphs = dict[str, ort.InferenceSession]


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar]:
    wanted = only or ("score", "match", "memory")
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        folder = Path(name)
        model = write_model(folder / "model")
        methods = [method for method in (MethodName.score, MethodName.match) if method.value in wanted]
        if methods:
            yield from _speed(folder, model, methods, quick=quick)
        if "memory" in wanted:
            yield from _memory(folder, model, rows=50_000 if quick else 2_000_000)


def _speed(folder: Path, model: Path, methods: Sequence[MethodName], *, quick: bool) -> Iterator[Bar]:
    """Rows a second of the command in this process, and as a process of its own, beside those of the peer."""
    rows = 50_000 if quick else 2_000_000
    graphs = {name: _session(model / f"{name}.onnx") for name in ("scorer", "clicks")}
    for length in LENGTHS:
        candidates = write_candidates(folder / "candidates.parquet", rows, length)
        table = pq.read_table(candidates, columns=list(FEATURES))
        numeric = np.column_stack([table[name].to_numpy() for name in FEATURES])
        del table
        for method in methods:
            yield from _against_peers(folder, model, candidates, numeric, graphs, method, length, quick=quick)
        del numeric
        candidates.unlink()


def _against_peers(
    folder: Path,
    model: Path,
    candidates: Path,
    numeric: NDArray[np.float32],
    graphs: Graphs,
    method: MethodName,
    length: int,
    *,
    quick: bool,
) -> Iterator[Bar]:
    alone = "scorer" if method == MethodName.score else "clicks"
    label = f"{method.value}, {len(numeric):,} rows in lists of {length}"
    seconds, one, both = median_seconds(
        _command(folder, model, candidates, method),
        lambda: _peer([graphs[alone]], numeric),
        lambda: _peer(list(graphs.values()), numeric),
        repeats=1 if quick else 3,
    )
    goal = None if quick else GOAL  # too few rows to be worth the start
    words = {"scorer": "the scorer", "clicks": "the click model"}[alone]
    graphs_named = f"{label}: against ONNX Runtime on scorer and click model, whose answers are written"
    yield Bar(graphs_named, both / seconds, "times", at_least=goal, part=method.value)
    yield Bar(f"{label}: against ONNX Runtime on {words} alone", one / seconds, "times", part=method.value)
    yield Bar(f"{label}: speed", len(numeric) / seconds / 1e6, "million rows/s", part=method.value)
    yield Bar(f"{label}: ONNX Runtime on {words}", len(numeric) / one / 1e6, "million rows/s", part=method.value)
    whole, start = _processes(folder, model, candidates, method)
    yield Bar(f"{label}: as a process", len(numeric) / whole / 1e6, "million rows/s", part=method.value)
    if whole > start:  # with few rows it is all start
        after = len(numeric) / (whole - start) / 1e6
        yield Bar(f"{label}: as a process, less its start", after, "million rows/s", part=method.value)
    yield Bar(f"{label}: start of the process", start, "s", part=method.value)


def _memory(folder: Path, model: Path, rows: int) -> Iterator[Bar]:
    """Peak memory at two sizes, the least that can be asked for being given."""
    most = Memory.parse(MEMORY).total / 2**20
    for times in (1, 10):
        candidates = write_candidates(folder / "candidates.parquet", times * rows, LENGTHS[1])
        for method in (MethodName.score, MethodName.match):
            arguments = _arguments(folder, model, candidates, method)
            megabytes, _ = peak_memory("-m", "urank", *arguments, "--memory", MEMORY)
            name = f"{method.value}, {times * rows:,} rows: peak memory with --memory {MEMORY}"
            yield Bar(name, megabytes, "MB", at_most=most, part="memory")
        candidates.unlink()


def _command(folder: Path, model: Path, candidates: Path, method: MethodName) -> Callable[[], None]:
    """The whole command in this process, the model read anew."""
    arguments = [str(each) for each in _arguments(folder, model, candidates, method)]
    return lambda: app(arguments, standalone_mode=False)


def _processes(folder: Path, model: Path, candidates: Path, method: MethodName) -> tuple[float, float]:
    """The seconds of the command as a process, and those of one that has a single list to rank."""
    few = write_candidates(folder / "few.parquet", LENGTHS[0], LENGTHS[0])
    _, start = peak_memory("-m", "urank", *_arguments(folder, model, few, method))
    _, whole = peak_memory("-m", "urank", *_arguments(folder, model, candidates, method))
    return whole, start


def _arguments(folder: Path, model: Path, candidates: Path, method: MethodName) -> list[object]:
    output = folder / "ranked.parquet"
    return ["rank", model, candidates, "-o", output, "--method", method.value, "--overwrite", "--quiet"]


def _session(graph: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = os.cpu_count() or 1
    options.inter_op_num_threads = 1
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _peer(graphs: Sequence[ort.InferenceSession], numeric: NDArray[np.float32]) -> None:
    for graph in graphs:
        taken = {entry.name for entry in graph.get_inputs()}
        for start in range(0, len(numeric), PEER_ROWS):
            rows = numeric[start : start + PEER_ROWS]
            feed = {"numeric": rows, "categorical": np.zeros((len(rows), 0), dtype=np.int64)}
            graph.run(None, {name: values for name, values in feed.items() if name in taken})


def write_model(folder: Path, *, seed: int = 0) -> Path:
    """A scorer and a click model of the default size. How fast they are does not depend on their weights, so these are
    random."""
    import torch  # slow to load

    from urank.clicks.calibration import Temperature
    from urank.clicks.click_model import ClickModel, NetworkClicks
    from urank.clicks.click_settings import ClickConfig
    from urank.clicks.families import build_network
    from urank.learning.features import Featurizer, Numeric
    from urank.model_io import save_model
    from urank.ranking.ranking_model import RankingModel
    from urank.ranking.ranking_settings import UrankConfig
    from urank.ranking.urank_network import NetworkScorer, ScoreNetwork

    featurizer = Featurizer(tuple(Numeric(name, 0.0, 1.0, missing=False) for name in FEATURES), ())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_network("monotone", featurizer, POSITIONS).eval()
        scorer = NetworkScorer(ScoreNetwork(featurizer, None).eval())
    calibration = Temperature(POSITIONS, [1.1] * POSITIONS, [0.1] * POSITIONS, monotone=True)
    clicks = ClickModel(featurizer, POSITIONS, (NetworkClicks("monotone", network),), calibration)
    save_model(RankingModel(clicks, scorer, "score"), UrankConfig(clicks=ClickConfig(families=("monotone",))), folder)
    return folder


def write_candidates(path: Path, rows: int, length: int, *, chunk: int = 250_000) -> Path:
    """Lists of one length with float32 features, as PyArrow writes them, in row groups of a quarter million rows."""
    rng = np.random.default_rng(0)
    writer = None
    for start in range(0, rows, chunk):
        row = np.arange(start, min(start + chunk, rows))
        columns = {"query_id": row // length, "item_id": rng.integers(0, 100_000, len(row))}
        columns |= {name: rng.standard_normal(len(row), dtype=np.float32) for name in FEATURES}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None  # noqa: S101 - there is at least one row
    writer.close()
    return path
