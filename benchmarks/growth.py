"""How training time grows with the log: slopes of log time against log size.

    python -m benchmarks growth                     all of it, about 5 minutes
    python -m benchmarks growth --only rows         with the rows; others: features, length, positions

What is timed is one epoch of the click model (monotone) and of U-rank's network, and 20 of U-rank's trees, from
prepared Parquet on one thread, the median of three; a slope is that of the line of least squares. Rankers are given a
click table by formula, so that their own time is seen. Goals:

    rows        at most 1.15: linear is 1, and ten times the rows may cost 1.4 times as much each, not more
    features    at most 1.15: all that grows with them is reading and the first layer, which is linear
    length      at most 0.48, at a fixed number of rows and K = 10: each item is compared with the K on top, not with
                all others, so 0 would be ideal; log₁₀ 3 = 0.48 is three times the cost per item in lists that are ten
                times as long
    positions   at most 1.15, in lists of 80: each item is compared with K others
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from rich.console import Console

import urank
from benchmarks.harness import Bar, Figure, median_seconds
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.learning.batches import Stream, train_and_valid
from urank.learning.features import Inputs, fit_featurizer
from urank.learning.training import seeded
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.urank_network import build_scorer, fit_by_swaps
from urank.ranking.urank_trees import grow_by_swaps

TREES = 20
REPEATS = 3
console = Console(stderr=True)


@dataclass(frozen=True)
class Size:
    """The size of a log; positions is K, and lists may be longer."""

    rows: int = 100_000
    features: int = 20
    length: int = 10
    positions: int = 10


@dataclass(frozen=True)
class Sweep:
    """What grows, and the goal of its slope; the click model only learns from what was shown, so not all concern it."""

    sizes: tuple[int, ...]
    base: Size
    at_most: float
    what: tuple[str, ...] = ("click model", "network", "trees")


RANKERS = ("network", "trees")
SWEEPS = {
    "rows": Sweep((100_000, 200_000, 400_000, 800_000), Size(), 1.15),
    "features": Sweep((20, 40, 80, 160), Size(rows=50_000), 1.15),
    "length": Sweep((20, 40, 80, 160, 320), Size(rows=102_400), 0.48, RANKERS),
    "positions": Sweep((5, 10, 20, 40), Size(rows=100_000, length=80), 1.15, RANKERS),
}


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar | Figure]:
    absent = [name for name in only if name not in SWEEPS]
    if absent:
        raise SystemExit(f"growth has no part '{absent[0]}'; its parts are {', '.join(SWEEPS)}")
    torch.set_num_threads(1)
    for name in only or SWEEPS:
        sweep = SWEEPS[name]
        if quick:
            sweep = replace(sweep, base=replace(sweep.base, rows=sweep.base.rows // 20))
            sweep = replace(sweep, sizes=tuple(size // (20 if name == "rows" else 1) for size in sweep.sizes[:3]))
        seconds = _seconds(name, sweep, repeats=1 if quick else REPEATS)
        for what, each in seconds.items():
            title = f"{name} from {sweep.sizes[0]:,} to {sweep.sizes[-1]:,}: slope of the {what}"
            yield Bar(title, slope(sweep.sizes, each), "", at_most=sweep.at_most, part=name)
        yield Figure("growth", name, {"sizes": list(sweep.sizes), "seconds": seconds, "goal": sweep.at_most}, name)


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """That of the line of least squares through the logarithms.

    >>> round(slope([1, 10, 100], [2.0, 20.0, 200.0]), 6)
    1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def _seconds(name: str, sweep: Sweep, repeats: int) -> dict[str, list[float]]:
    """The median seconds of each thing that is trained, by size."""
    found: dict[str, list[float]] = {what: [] for what in sweep.what}
    for number in sweep.sizes:
        size = replace(sweep.base, **{name: number})
        with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as folder:
            trainings = _trainings(_dataset(Path(folder), size), size)
            actions = [trainings[what] for what in sweep.what]
            if number == sweep.sizes[0]:  # what is slow only once must not be taken for the cost of a small log
                median_seconds(*actions, repeats=1)
            for what, seconds in zip(sweep.what, median_seconds(*actions, repeats=repeats), strict=True):
                found[what].append(seconds)
        said = ", ".join(f"{what} {each[-1]:.2f} s" for what, each in found.items())
        console.print(f"{name} {number:,}: {said}", highlight=False)
    return found


def _trainings(dataset: Dataset, size: Size) -> dict[str, Callable[[], object]]:
    """One epoch of each network, and the trees."""
    featurizer = fit_featurizer(dataset)
    config = RankerConfig(training=TrainingConfig(epochs=1))

    def table(inputs: Inputs) -> NDArray[np.float32]:
        return by_formula(inputs.numeric, size.positions)

    def clicks() -> None:
        fit_clicks(dataset, ClickConfig(families=("monotone",), training=TrainingConfig(epochs=1)), reference=False)

    def network() -> None:
        splits = train_and_valid(dataset, featurizer, table=table)
        with seeded(0):
            scorer = build_scorer(featurizer, None, config)
        fit_by_swaps(scorer, splits, config.objective, config, name="network")

    def trees() -> None:
        streams = [Stream(dataset, split, featurizer, cache_bytes=0, table=table) for split in ("train", "valid")]
        growth = TreesConfig(trees=TREES, early_stopping=TREES, threads=1)
        grow_by_swaps(streams, config.objective, config, growth)

    return {"click model": clicks, "network": network, "trees": trees}


def by_formula(features: NDArray[np.float32], positions: int) -> NDArray[np.float32]:
    """P(click | item, k) `[rows, K]`: one feature decides the click, another how fast attention falls."""
    falls = np.exp(-0.5 * np.abs(features[:, 1:2]) * np.log(np.arange(1, positions + 1, dtype=np.float32)))
    return (falls / (1 + np.exp(-features[:, :1]))).astype(np.float32)


def _dataset(folder: Path, size: Size) -> Dataset:
    """A prepared log of lists of one length, whose users click by the formula."""
    rng = np.random.default_rng(0)
    lists = size.rows // size.length
    rows = lists * size.length
    features = rng.standard_normal((rows, size.features), dtype=np.float32)
    position = np.tile(np.arange(1, size.length + 1), lists)
    shown = position <= size.positions  # items further down are candidates that nobody saw
    chance = shown * by_formula(features, size.length)[np.arange(rows), position - 1]
    columns = {"query_id": np.arange(rows) // size.length, "position": position}
    columns["click"] = (rng.random(rows) < chance).astype(np.int8)
    columns |= {f"f{number}": features[:, number] for number in range(size.features)}
    pq.write_table(pa.table(columns), folder / "log.parquet")
    urank.prepare(urank.read(folder / "log.parquet"), folder / "prepared", positions=size.positions)
    return Dataset(folder / "prepared")
