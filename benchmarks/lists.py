"""Long lists of candidates: what an item costs in lists of 1,000 against lists of 100, of which 20 are shown.

python -m benchmarks lists                       a million items in lists of each length
python -m benchmarks lists --only network        one part: network, trees, memory or padding
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import urank
from benchmarks.harness import Bar, median_seconds, peak_memory
from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.learning.batches import Stream
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.log.ragged import where_items
from urank.ranking.objectives import by_length
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.urank_network import fit_urank
from urank.ranking.urank_trees import fit_trees

SHORT, LONG, SHOWN, FEATURES = 100, 1_000, 20, 30
PARTS = ("network", "trees", "memory", "padding")
QUICK_CLICKS = ClickConfig(families=("pbm",), training=TrainingConfig(epochs=1))


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar]:
    parts = only or PARTS
    rows = 20_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        folder = Path(name)
        if "network" in parts or "trees" in parts:
            yield from _time(folder, rows, parts, repeats=1 if quick else 3)
        if "memory" in parts:
            yield from _memory(folder, rows)
        if "padding" in parts:
            yield from _padding(folder, rows // 2)


def _time(folder: Path, rows: int, parts: Sequence[str], repeats: int) -> Iterator[Bar]:
    """Time to train a scorer for one item, reading and the click table included."""
    logs = [_learned(folder / str(length), np.full(rows // length, length)) for length in (SHORT, LONG)]
    items = [dataset.rows("train") for dataset, _ in logs]
    config = RankerConfig(training=TrainingConfig(epochs=2))
    trees = TreesConfig(trees=30, early_stopping=30)
    trained = {
        "network": lambda dataset, clicks: fit_urank(dataset, clicks, config),
        "trees": lambda dataset, clicks: fit_trees(dataset, clicks, config, trees),
    }
    for part, fit in trained.items():
        if part in parts:
            fit(*logs[0])  # what is loaded and built once is not the item's
            actions = [lambda fit=fit, log=log: fit(*log) for log in logs]
            seconds = median_seconds(*actions, repeats=repeats)
            short, long = (1e6 * each / n for each, n in zip(seconds, items, strict=True))
            yield Bar(f"{part}: time for an item in lists of {SHORT}", short, "µs", part=part)
            yield Bar(f"{part}: time for an item in lists of {LONG:,}", long, "µs", part=part)
            ratio = f"{part}: time for an item, lists of {LONG:,} against {SHORT}, K = {SHOWN}"
            yield Bar(ratio, long / short, "times", at_most=3, part=part)


def _memory(folder: Path, rows: int) -> Iterator[Bar]:
    """Peak memory of `urank train` on the long lists."""
    prepared = _prepared(folder / "memory", np.full(rows // LONG, LONG)).folder
    flags = ("--click-model", "pbm", "--epochs", 1, "--no-onnx", "--quiet", "--overwrite")
    for ranker in ("network", "trees"):
        megabytes, _ = peak_memory("-m", "urank", "train", prepared, "-o", folder / ranker, "--ranker", ranker, *flags)
        name = f"urank train --ranker {ranker}, {rows:,} items in lists of {LONG:,}: peak memory"
        yield Bar(name, megabytes, "MB", at_most=4000, part="memory")


def _padding(folder: Path, rows: int) -> Iterator[Bar]:
    """Lists of 10 to 1,000 items: the share of what is worked on that is padding, a batch at once and in chunks."""
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.uniform(np.log(10), np.log(LONG), size=max(1, rows // 215))).astype(np.int64)
    dataset, clicks = _learned(folder / "mixed", lengths)
    stream = Stream(dataset, "train", clicks.featurizer)
    items = whole = chunked = 0
    for batch in stream.batches(shuffle=(0, 0)):
        items += len(batch)
        whole += where_items(batch.offsets.numpy()).size
        chunked += sum(numbers.size for numbers, _ in by_length(batch))
    kind = f"lists of 10 to {LONG:,}"
    yield Bar(f"{kind}: padding, a batch at once", 1 - items / whole, "share", part="padding")
    yield Bar(f"{kind}: padding, in chunks by length", 1 - items / chunked, "share", at_most=0.1, part="padding")


def _learned(folder: Path, lengths: NDArray[np.int64]) -> tuple[Dataset, ClickModel]:
    dataset = _prepared(folder, lengths)
    return dataset, fit_clicks(dataset, QUICK_CLICKS, reference=False).model


def _prepared(folder: Path, lengths: NDArray[np.int64]) -> Dataset:
    """Lists of these lengths, of which the first items were shown, prepared."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    query = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(query)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    features = {f"f{j}": rng.standard_normal(len(query), dtype=np.float32) for j in range(FEATURES)}
    chance = 1 / (1 + np.exp(1 - features["f0"])) / np.sqrt(position)
    clicked = (position <= SHOWN) & (rng.random(len(query)) < chance)
    columns = {"query_id": query, "position": position, "click": clicked.astype(np.int8), **features}
    pq.write_table(pa.table(columns), folder / "log.parquet")
    urank.prepare(urank.read(folder / "log.parquet"), folder / "prepared", positions=SHOWN)
    (folder / "log.parquet").unlink()
    return Dataset(folder / "prepared")
