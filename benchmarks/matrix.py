"""Simulated logs of many kinds: true clicks of our default beside its other methods, LightGBM 150 and the logged order.

    python -m benchmarks matrix --resume runs.jsonl                       every cell, three seeds each
    python -m benchmarks matrix --only item1.5 pbm --queries 200 1000     some users and sizes
    python -m benchmarks matrix --seed 400                                seeds for choosing settings: 400 to 899

A cell is a kind of users, a number of loggers, and the number of queries to learn from (train and valid; the default
sessions per query). Users: `item` with η 1.5, 0.7 and 0.3 (the paper's item-specific attention), `pbm`, `query`,
`trust` and `cascade`. Each cell is judged on about `TEST_QUERIES` further queries by the true click probabilities.
Cascade users see 5 of 10 candidates: if they saw all, every order would earn the same. Loggers are trained on the
labels of as many queries as in a simulation without the further ones.

A difference is the mean over the seeds of paired differences by query, z that over its standard error, over queries and
seeds. A cell is flagged where the default is below ctr1 (sorted by the click probability at position 1), LightGBM 150
or the logged order with z < −2, or match is below ctr1. By chance alone one comparison in 44 would be flagged.

Two processes work, with one thread each. `--resume` names a file to which the result of each cell and seed is appended,
so that an interrupted run resumes; results of another commit are ignored. Results are kept only of a run with default
options (`--only`, `--resume` and `--workers` aside).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from rich.console import Console

import urank
from benchmarks.harness import Bar, Figure
from benchmarks.peers import lightgbm_150, rows_of
from urank.lab.letor_simulation import Simulation, SimulationConfig, simulate
from urank.lab.provenance import commit
from urank.learning.features import fit_featurizer
from urank.learning.lightgbm_data import matrix
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids, offsets_of_runs
from urank.pipeline import fit_model
from urank.ranking.matching import positions_in_lists
from urank.ranking.ranking_model import UrankConfig

USERS: dict[str, dict[str, Any]] = {
    "item1.5": {"user": "item", "eta": 1.5},
    "item0.7": {"user": "item", "eta": 0.7},
    "item0.3": {"user": "item", "eta": 0.3},
    "pbm": {"user": "pbm"},
    "query": {"user": "query"},
    "trust": {"user": "trust"},
    "cascade": {"user": "cascade", "positions": 5},
}
LOGGERS: Sequence[int] = (1, 2)
QUERIES = (200, 1_000, 3_000, 10_000)
TEST_QUERIES = 1_000
VALID_SHARE, LABEL_SHARE = 0.2, 0.01
SEED, SEEDS = 900, 3
BELOW = -2.0
COMPARISONS = (("default", "ctr1"), ("default", "LightGBM 150"), ("default", "logged"), ("match", "ctr1"))

Floats = NDArray[np.float64]
console = Console(stderr=True)


@dataclass(frozen=True)
class Cell:
    """A kind of log."""

    users: str
    loggers: int
    queries: int

    @property
    def name(self) -> str:
        return f"{self.users}/{self.loggers}/{self.queries}"

    def config(self, seed: int, test_queries: int) -> SimulationConfig:
        """Return a simulation with test queries beside the queries to learn from."""
        total = self.queries + test_queries
        return SimulationConfig(
            queries=total,
            loggers=self.loggers,
            label_share=LABEL_SHARE * self.queries / total,
            valid=VALID_SHARE * self.queries / total,
            test=test_queries / total,
            seed=seed,
            **USERS[self.users],
        )


def run(
    *,
    quick: bool,
    only: Sequence[str] = (),
    queries: Sequence[int] = QUERIES,
    seed: int = SEED,
    resume: Path | None = None,
    workers: int = 2,
) -> Iterator[Bar | Figure]:
    absent = [name for name in only if name not in USERS]
    if absent:
        raise SystemExit(f"matrix has no users '{absent[0]}'; it has {', '.join(USERS)}")
    users: Sequence[str] = only or tuple(USERS)
    loggers, seeds, test_queries = LOGGERS, list(range(seed, seed + SEEDS)), TEST_QUERIES
    if quick:
        users, loggers, queries, seeds, test_queries = only or ("item1.5", "cascade"), (2,), (200,), [seed], 200
    cells = [Cell(each, number, size) for size in sorted(queries) for each in users for number in loggers]
    found = measured(cells, seeds, test_queries, resume, workers)
    for each in users:
        yield from summarised(each, [row for row in found if row["users"] == each])


def measured(
    cells: Sequence[Cell], seeds: Sequence[int], test_queries: int, resume: Path | None, workers: int
) -> list[dict[str, Any]]:
    """Measure all cells that were not measured before, and return a row for each."""
    version = {"commit": commit(), "test_queries": test_queries}
    done = _read(resume, version)
    jobs = [(cell, seed) for cell in cells for seed in seeds if (cell.name, seed) not in done]
    console.print(f"{len(jobs)} simulations, {len(cells) * len(seeds) - len(jobs)} done before", highlight=False)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers, which inherit it
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(one_simulation, cell, seed, test_queries): (cell, seed) for cell, seed in jobs}
        for future in as_completed(waiting):
            cell, seed = waiting[future]
            done[cell.name, seed] = result = future.result()
            ratios = (f"{name} {mean / result['means']['logged']:.4f}" for name, mean in result["means"].items())
            console.print(f"{cell.name}, seed {seed}: {', '.join(ratios)}", highlight=False, soft_wrap=True)
            if resume is not None:
                with resume.open("a", encoding="utf-8") as file:  # the last line may be truncated: start a new one
                    file.write("\n" + json.dumps({"cell": cell.name, "seed": seed, **version, **result}))
    return [pooled(cell, [done[cell.name, seed] for seed in seeds]) for cell in cells]


def _read(resume: Path | None, version: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Read the results of an interrupted run of this version; a truncated line is ignored."""
    done = {}
    if resume is not None and resume.exists():
        for line in resume.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if version.items() <= row.items():
                done[row["cell"], row["seed"]] = row
    return done


def one_simulation(cell: Cell, seed: int, test_queries: int) -> dict[str, Any]:
    """Measure one simulation: mean true clicks of each order, and mean and standard error of paired differences."""
    torch.set_num_threads(1)
    found = true_clicks(cell.config(seed, test_queries))
    return {
        "means": {name: float(clicks.mean()) for name, clicks in found.items()},
        "differences": {
            f"{ours} − {other}": _mean_and_error(found[ours] - found[other])
            for ours, other in COMPARISONS
            if ours in found and other in found
        },
    }


def _mean_and_error(differences: Floats) -> tuple[float, float]:
    return float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences)))


def true_clicks(config: SimulationConfig) -> dict[str, Floats]:
    """Fit on a simulated log, and compute the true clicks of each test query in every order."""
    simulation = simulate(config)
    candidates, offsets, truth = shuffled_candidates(simulation)
    oracle = simulation.oracle
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        log = urank.read(simulation.log, drop=["relevance", "propensity"])
        urank.prepare(log, Path(name) / "prepared", valid=config.valid, test=config.test)
        dataset = Dataset(Path(name) / "prepared")
        model = fit_model(dataset, UrankConfig()).model
        orders = {"default": model.order(candidates, offsets)}
        orders |= {method: model.order(candidates, offsets, method=method) for method in model.methods}
        featurizer = fit_featurizer(dataset)
        train, valid = (rows_of(dataset, split, featurizer) for split in ("train", "valid"))
        score = lightgbm_150(train.joined(valid), seed=config.seed)
        scores = score(matrix(featurizer.encode(candidates)), offsets)
        orders["LightGBM 150"] = positions_in_lists(scores, offsets)
    found = {
        name: _sums(oracle.click_probabilities(truth, positions, offsets), offsets)
        for name, positions in orders.items()
    }
    return found | {"logged": logged_clicks(simulation, candidates, truth)}


def shuffled_candidates(simulation: Simulation) -> tuple[pl.DataFrame, NDArray[np.int64], Floats]:
    """Return the candidates of the test queries in random order, the offsets of the queries, and the truth."""
    frame = simulation.candidates
    query = frame["query_id"].rle_id().to_numpy()
    frame = frame[np.lexsort((np.random.default_rng(simulation.config.seed).random(frame.height), query))]
    name = simulation.oracle.truth_name
    truth = np.array(frame[name].to_list(), dtype=np.float64)
    return frame.drop(name, "relevance"), offsets_of_runs(query), truth


def logged_clicks(simulation: Simulation, candidates: pl.DataFrame, truth: Floats) -> Floats:
    """Compute the true clicks of each test query as it was shown, on average over its sessions."""
    rows = candidates.select("item_id", query=pl.col("query_id").rle_id()).with_row_index("row")
    shown = simulation.log.join(rows, on="item_id", how="inner", maintain_order="left")
    sessions = offsets_of_runs(shown["session_id"].to_numpy())
    position, row = shown["position"].to_numpy().astype(np.int64), shown["row"].to_numpy().astype(np.int64)
    clicks = _sums(simulation.oracle.click_probabilities(truth, position, sessions, rows=row), sessions)
    query = shown["query"].to_numpy()[sessions[:-1]]
    return np.asarray(np.bincount(query, clicks) / np.bincount(query))


def _sums(values: Floats, offsets: NDArray[np.int64]) -> Floats:
    return np.bincount(list_ids(offsets), values, len(offsets) - 1).astype(np.float64)


def pooled(cell: Cell, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the seeds of a cell: means relative to the logged order, differences with z, and flags."""
    names = [name for name in results[0]["means"] if all(name in each["means"] for each in results)]
    ratios = {name: float(np.mean([r["means"][name] / r["means"]["logged"] for r in results])) for name in names}
    differences = {}
    for pair in results[0]["differences"]:
        each = np.array([result["differences"][pair] for result in results])
        mean, error = each[:, 0].mean(), np.sqrt((each[:, 1] ** 2).sum()) / len(each)
        differences[pair] = {"mean": float(mean), "z": float(mean / error) if error else 0.0}
    return {
        "cell": cell.name,
        "users": cell.users,
        "ratios": ratios,
        "differences": differences,
        "flags": [pair for pair, found in differences.items() if found["z"] < BELOW],
    }


def summarised(users: str, rows: list[dict[str, Any]]) -> Iterator[Bar | Figure]:
    """Yield the bars and the table of a kind of users."""
    for row in rows:
        name = row["cell"]
        yield Bar(f"{name}: default, true clicks / logged", row["ratios"]["default"], "", part=users)
        which = f": {', '.join(row['flags'])}" if row["flags"] else ""
        yield Bar(f"{name}: significantly below{which}", len(row["flags"]), "comparisons", at_most=0, part=users)
    yield Figure("matrix", f"{users} users: users/loggers/queries", {"rows": rows}, users)
