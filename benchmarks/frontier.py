"""What a second of training earns: true utility against training time, ours and every peer's.

    python -m benchmarks frontier                     the default simulation and MSLR, 3 seeds each
    python -m benchmarks frontier --only mslr         one of both

A point is a way to train a ranker: its true utility on the test split relative to the logged order, the mean over the
seeds, and its training seconds, the median. All have the same threads. Ours are measured from the prepared Parquet, so
reading is in them, and a ranker's time has that of its click model in it; peers are measured from arrays in memory, in
processes of their own. A point is dominated when another has at least its utility in at most its time, and more of the
one or less of the other; what nothing dominates is on the frontier. The goals: the highest point of the frontier is
ours, and so is the best point within every budget of at least `LEAST_BUDGET` seconds.

Peers live in a venv of their own (`make .venv-peers/.installed`, or $URANK_PEERS).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.harness import REAL_DATA, Bar, Figure, median_seconds
from benchmarks.peer_runs import peers_python, run_peer, write_arrays
from benchmarks.peers import all_peers, rows_of
from benchmarks.simulated import simulated
from benchmarks.truth import Candidates
from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.lab.letor_simulation import SimulationConfig
from urank.learning.features import Inputs, fit_featurizer
from urank.learning.lightgbm_data import matrix
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.log.ragged import pad, where_items
from urank.ranking.matching import match
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.urank_network import fit_urank
from urank.ranking.urank_trees import fit_trees

THREADS = 2
"""Of everyone; a quick run has one, as it may be run beside other work."""

SCORED_ROWS = 100_000
"""Scoring is timed on the test rows, again and again up to so many; the scripts of the peers do the same."""

LEAST_BUDGET = 2.0
"""Seconds of training from which the best point within a budget should be ours."""

CLICK_MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "monotone": {"families": ("monotone",)},
    "monotone, 2 epochs": {"families": ("monotone",), "training": TrainingConfig(epochs=2)},
    "monotone, 1 epoch": {"families": ("monotone",), "training": TrainingConfig(epochs=1)},
}
"""Click models by name, from what a user gets by default to the quickest."""

WITH_RANKERS = ("default", "monotone")
"""The click models that rankers are trained on; the others are there for who has no time."""

console = Console(stderr=True)


@dataclass
class Point:
    """One way to train, over the seeds."""

    name: str
    ours: bool
    utility: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rows_per_second: list[float] = field(default_factory=list)
    load_seconds: list[float] = field(default_factory=list)
    version: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ours": self.ours,
            "utility": float(np.mean(self.utility)),
            "utility_sd": float(np.std(self.utility)),
            "seconds": statistics.median(self.seconds),
            "rows_per_second": statistics.median(self.rows_per_second),
            "load_seconds": statistics.median(self.load_seconds) if self.load_seconds else None,
            "version": self.version,
            "each": {"utility": self.utility, "seconds": self.seconds},
        }


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar | Figure]:
    peers_python()
    threads = 1 if quick else THREADS
    known = _parts(quick=quick)
    absent = [name for name in only if name not in known]
    if absent:
        raise SystemExit(f"frontier has no part '{absent[0]}'; its parts are {', '.join(known)}")
    for part in only or known:
        title, configs = known[part]
        points: dict[str, Point] = {}
        rows = 0
        with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
            for config in configs:
                rows = _measure(Path(name) / str(config.seed), config, threads, points)
        facts = {"train_rows": rows, "threads": threads, "seeds": len(configs)}
        yield from judged(part, title, [point.to_dict() for point in points.values()], facts)


def _parts(*, quick: bool) -> dict[str, tuple[str, list[SimulationConfig]]]:
    seeds = range(1 if quick else 3)
    size = {"queries": 300} if quick else {}
    found = {"simulation": ("default simulation", [SimulationConfig(seed=s, truth_split="all", **size) for s in seeds])}
    data = REAL_DATA / "mslr"
    if not data.is_dir():
        console.print(f"no real data at {data}: MSLR is left out")
        return found
    shares = {"sessions": 20 if quick else 200, "valid": 0.2, "test": 0.3}
    return found | {
        "mslr": ("MSLR", [SimulationConfig(data=str(data), seed=s, truth_split="all", **shares) for s in seeds]),
    }


def _measure(folder: Path, config: SimulationConfig, threads: int, points: dict[str, Point]) -> int:
    """Add what one seed gives to the points of all methods, and return the rows of its train split."""
    torch.set_num_threads(threads)
    dataset = simulated(folder, config)
    candidates = Candidates.read(folder / "simulation", config)
    logged = float(candidates.logged(dataset).mean())
    for name, seconds, rate, utility in _ours(dataset, candidates, config.seed, threads):
        point = points.setdefault(name, Point(name, ours=True))
        point.seconds.append(seconds)
        point.rows_per_second.append(rate)
        point.utility.append(utility / logged)
        _tell(point, config.seed)
    featurizer = fit_featurizer(dataset)
    train, valid = (rows_of(dataset, split, featurizer) for split in ("train", "valid"))
    write_arrays(folder / "arrays", train, valid, matrix(featurizer.encode(candidates.test), None))
    for peer in all_peers(threads, config.seed):
        done = run_peer(peer, folder / "arrays", threads=threads)
        point = points.setdefault(peer.name, Point(peer.name, ours=False, version=done.version))
        point.seconds.append(done.seconds)
        point.load_seconds.append(done.load_seconds)
        point.rows_per_second.append(done.rows_per_second)
        point.utility.append(float(candidates.utility(score=done.scores).mean()) / logged)
        _tell(point, config.seed)
    shutil.rmtree(folder)
    return dataset.rows("train")


def _tell(point: Point, seed: int) -> None:
    said = f"{point.utility[-1]:.4f} of the logged order in {point.seconds[-1]:.1f} s"
    console.print(f"seed {seed}: {point.name}: {said}, {point.rows_per_second[-1]:,.0f} rows/s", highlight=False)


def _click_config(name: str, seed: int) -> ClickConfig:
    return ClickConfig(seed=seed, **CLICK_MODELS[name])


def _ours(
    dataset: Dataset, candidates: Candidates, seed: int, threads: int
) -> Iterator[tuple[str, float, float, float]]:
    """Name, training seconds, rows scored per second and true utility of each of ours."""
    settings = RankerConfig(seed=seed)
    for kind in CLICK_MODELS:
        start = time.perf_counter()
        clicks = fit_clicks(dataset, _click_config(kind, seed), reference=False).model
        seconds = time.perf_counter() - start
        inputs = clicks.featurizer.encode(candidates.test)
        table = np.exp(clicks.log_ctr(inputs).astype(np.float64))
        weights = table * candidates.value[:, None]
        rate = _rate(inputs, lambda many, clicks=clicks: _matched(clicks, many, candidates))
        yield f"matching ({kind})", seconds, rate, float(candidates.utility(match=weights).mean())
        if kind not in WITH_RANKERS:
            continue
        for name, fit in _rankers(dataset, clicks, settings, threads).items():
            start = time.perf_counter()
            scorer = fit()[0]
            total = seconds + time.perf_counter() - start
            rate = _rate(inputs, lambda many, scorer=scorer: scorer.score(many, np.ones(len(many), np.float32)))
            utility = candidates.utility(score=scorer.score(inputs, candidates.value))
            yield f"{name} ({kind})", total, rate, float(utility.mean())


def _rankers(
    dataset: Dataset, clicks: ClickModel, settings: RankerConfig, threads: int
) -> dict[str, Callable[[], Any]]:
    return {
        "U-rank network": lambda: fit_urank(dataset, clicks, settings),
        "U-rank trees": lambda: fit_trees(dataset, clicks, settings, TreesConfig(threads=threads)),
    }


def _rate(inputs: Inputs, score: Callable[[Inputs], object]) -> float:
    """Rows per second from raw features in memory to scores, or to positions."""
    times = -(-SCORED_ROWS // len(inputs))
    many = Inputs(np.tile(inputs.numeric, (times, 1)), np.tile(inputs.categorical, (times, 1)))
    (seconds,) = median_seconds(lambda: score(many))
    return len(many) / seconds


def _matched(clicks: ClickModel, many: Inputs, candidates: Candidates) -> NDArray[np.int64]:
    """The best positions of the test lists, as many times over as there are inputs."""
    once = candidates.offsets
    lengths = np.tile(np.diff(once), len(many) // int(once[-1]))
    offsets = np.append(0, np.cumsum(lengths))
    return match(pad(np.exp(clicks.log_ctr(many)), offsets), where=where_items(offsets))


def judged(part: str, title: str, points: list[dict[str, Any]], facts: dict[str, Any]) -> Iterator[Bar | Figure]:
    """The bars of one data set, and the points for its plot."""
    best = not_dominated([(point["seconds"], point["utility"]) for point in points])
    points = [point | {"frontier": flag} for point, flag in zip(points, best, strict=True)]
    ours, theirs = ([point for point in points if point["ours"] is side] for side in (True, False))
    top, rival = (max(side, key=lambda point: point["utility"]) for side in (ours, theirs))
    lead = top["utility"] / rival["utility"]
    yield Bar(f"{title}: highest of ours ({top['name']}) / highest peer ({rival['name']})", lead, "", 1.0, part=part)
    above = sum(point["utility"] >= top["utility"] for point in theirs)
    yield Bar(f"{title}: peers at or above the highest of ours", above, "", at_most=0, part=part)
    count = sum(point["frontier"] for point in ours)
    yield Bar(f"{title}: ours on the frontier", count, f"of {sum(best)} points", at_least=1, part=part)
    faster = [point["name"] for point in theirs if point["frontier"]]
    named = f": {', '.join(faster)}" if faster else ""
    yield Bar(f"{title}: peers on the frontier, as they are faster{named}", len(faster), "", part=part)
    leaders = best_within(points, LEAST_BUDGET)
    rivals = [point["name"] for point in leaders if not point["ours"]]
    named = f" ({', '.join(rivals)})" if rivals else ""
    yield Bar(
        f"{title}: peers that are best within some budget of {LEAST_BUDGET:g} s or more{named}",
        len(rivals),
        "",
        at_most=0,
        part=part,
    )
    yield Figure("frontier", title, {**facts, "points": points}, part)


def best_within(points: Sequence[dict[str, Any]], least: float) -> list[dict[str, Any]]:
    """Return the points that have the highest utility within some budget of at least so many seconds.

    >>> best_within([{"seconds": s, "utility": u} for s, u in ((1, 0.8), (1.5, 0.9), (3, 0.7), (4, 1.1))], 2)
    [{'seconds': 1.5, 'utility': 0.9}, {'seconds': 4, 'utility': 1.1}]
    """
    budgets = sorted({least, *(point["seconds"] for point in points if point["seconds"] > least)})
    affordable = ([point for point in points if point["seconds"] <= budget] for budget in budgets)
    leaders = [max(group, key=lambda point: float(point["utility"])) for group in affordable if group]
    return [point for place, point in enumerate(leaders) if point not in leaders[:place]]


def not_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other point has at least the utility in at most the seconds, and is better in one of both.

    >>> not_dominated([(1.0, 0.9), (2.0, 1.1), (3.0, 1.0), (2.0, 1.1)])
    [True, True, False, True]
    """
    return [
        not any((s <= seconds and u >= utility) and (s < seconds or u > utility) for s, u in points)
        for seconds, utility in points
    ]
