"""A map of where U-rank wins, ties and loses: true clicks on simulated logs of many kinds, beside other rankers.

    python -m benchmarks map --resume runs.jsonl                       the whole map; written to docs/map.md
    python -m benchmarks map --quick                                   the smallest logs only, one seed
    python -m benchmarks map --only item1.5 pbm --queries 200 1000     some users and sizes
    python -m benchmarks map --seed 400                                seeds for choosing settings: 400 to 899

A cell is a kind of users, the number of queries to learn from (train and valid; the default sessions per query), of
loggers, and the noise ε, the click probability of an examined document that is not relevant. A full factorial is out of
reach: all users and sizes have two loggers and the paper's ε; one logger (all users) and other ε (`NOISY`) are varied
one at a time, up to 1,000 queries. Users: `item` with η 1.5, 0.7 and 0.3 (the paper's item-specific attention),
`pbm`, `query`, `trust`, `cascade`, and those outside every click family (`urank.lab.user_models`). Each cell is judged
on about `TEST_QUERIES` further queries by the true click probabilities. Cascade users see 5 of 10 candidates: if they
saw all, every order would earn the same. Loggers are trained on the labels of as many queries as in a simulation
without the further ones.

A difference is the mean over the seeds of paired differences by query, z that over its standard error, over queries and
seeds. The default wins a comparison where z > 2, and loses it where z < −2; by chance alone it would lose one in 44.
Errors of ratios are standard errors over seeds.

Two processes work, with one thread each. `--resume` names a file to which the result of each cell and seed is appended,
so that an interrupted run resumes; results of another commit are ignored. Results are kept only of a run with default
options (`--only`, `--resume` and `--workers` aside).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
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
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.lab.experiment import ExperimentConfig, as_block, baseline_policy
from urank.lab.letor_simulation import Simulation, SimulationConfig, simulate
from urank.lab.provenance import commit
from urank.lab.user_models import WITHOUT_TABLE
from urank.learning.features import fit_featurizer
from urank.learning.lightgbm_data import matrix
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids, offsets_of_runs
from urank.pipeline import fit_model
from urank.ranking.matching import positions_in_lists
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import UrankConfig

USERS: dict[str, dict[str, Any]] = {
    "item1.5": {"user": "item", "eta": 1.5},
    "item0.7": {"user": "item", "eta": 0.7},
    "item0.3": {"user": "item", "eta": 0.3},
    "pbm": {"user": "pbm"},
    "query": {"user": "query"},
    "trust": {"user": "trust"},
    "cascade": {"user": "cascade", "positions": 5},
    "grid": {"user": "grid"},
    "carousel": {"user": "carousel"},
    "fold": {"user": "fold"},
    "neighbour": {"user": "neighbour"},
    "patience": {"user": "patience"},
}
SEEDS = {200: 4, 1_000: 3, 3_000: 3, 10_000: 1}
"""Seeds by the number of queries: small logs, whose results differ most, are cheap."""
LOGGERS, NOISE = 2, 0.1
NOISY, OTHER_NOISE = ("item1.5", "item0.3", "pbm", "grid"), (0.02, 0.3)
MOST_VARIED = 1_000
"""Queries up to which loggers and noise are varied."""
TEST_QUERIES = 1_000
VALID_SHARE, LABEL_SHARE = 0.2, 0.01
SEED = 900
SIGNIFICANT = 2.0
OURS, RIVALS = ("default", "score", "match"), ("ctr1", "LightGBM 150", "logged", "DeepFM", "LambdaRank")
JUDGED = [*(f"default − {rival}" for rival in RIVALS[:3]), "match − ctr1"]
"""The comparisons that must not be lost."""

DEEPFM = ClickConfig(families=("deepfm",), within_list="off")
Floats = NDArray[np.float64]
console = Console(stderr=True)


@dataclass(frozen=True)
class Cell:
    """A kind of log."""

    users: str
    queries: int
    loggers: int = LOGGERS
    noise: float = NOISE

    @property
    def name(self) -> str:
        varied = [f"/{self.loggers} logger"] * (self.loggers != LOGGERS) + [f"/ε {self.noise:g}"] * (
            self.noise != NOISE
        )
        return f"{self.users}/{self.queries}{''.join(varied)}"

    def config(self, seed: int, test_queries: int) -> SimulationConfig:
        """Return a simulation with test queries beside the queries to learn from."""
        total = self.queries + test_queries
        return SimulationConfig(
            queries=total,
            loggers=self.loggers,
            epsilon=self.noise,
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
    queries: Sequence[int] = tuple(SEEDS),
    seed: int = SEED,
    resume: Path | None = None,
    workers: int = 2,
) -> Iterator[Bar | Figure]:
    absent = [name for name in only if name not in USERS]
    if absent:
        raise SystemExit(f"map has no users '{absent[0]}'; it has {', '.join(USERS)}")
    users, sizes = only or tuple(USERS), sorted(queries)[:1] if quick else sorted(queries)
    seeds = {size: 1 if quick else SEEDS.get(size, min(SEEDS.values())) for size in sizes}
    found = measured(
        cells_of(users, sizes),
        {size: range(seed, seed + number) for size, number in seeds.items()},
        200 if quick else TEST_QUERIES,
        resume,
        workers,
    )
    for each in users:
        yield from summarised(each, [row for row in found if row["users"] == each])


def cells_of(users: Sequence[str], sizes: Sequence[int]) -> list[Cell]:
    """Return the design: users and sizes, and of small logs other loggers and noise, one at a time."""
    cells = [Cell(each, size) for each in users for size in sizes]
    small = [size for size in sizes if size <= MOST_VARIED]
    cells += [Cell(each, size, loggers=1) for each in users for size in small]
    cells += [
        Cell(each, size, noise=noise) for each in users if each in NOISY for noise in OTHER_NOISE for size in small
    ]
    return cells


def measured(
    cells: Sequence[Cell], seeds: Mapping[int, Sequence[int]], test_queries: int, resume: Path | None, workers: int
) -> list[dict[str, Any]]:
    """Measure all cells that were not measured before, with the seeds of their size, and return a row for each."""
    version = {"commit": commit(), "test_queries": test_queries}
    done = _read(resume, version)
    every = [(cell, seed) for cell in cells for seed in seeds[cell.queries]]
    jobs = [(cell, seed) for cell, seed in every if (cell.name, seed) not in done]
    jobs.sort(key=lambda job: -job[0].queries)  # the longest first, so that no worker ends alone with it
    console.print(f"{len(jobs)} simulations, {len(every) - len(jobs)} done before", highlight=False)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers, which inherit it
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(one_simulation, cell, seed, test_queries): (cell, seed) for cell, seed in jobs}
        for number, future in enumerate(as_completed(waiting), start=1):
            cell, seed = waiting[future]
            done[cell.name, seed] = result = future.result()
            ratios = (f"{name} {mean / result['means']['logged']:.4f}" for name, mean in result["means"].items())
            line = f"{number}/{len(jobs)} {cell.name}, seed {seed}, {result['seconds']:.0f} s: {', '.join(ratios)}"
            console.print(line, highlight=False, soft_wrap=True)
            if resume is not None:
                with resume.open("a", encoding="utf-8") as file:  # the last line may be truncated: start a new one
                    file.write("\n" + json.dumps({"cell": cell.name, "seed": seed, **version, **result}))
    return [pooled(cell, [done[cell.name, seed] for seed in seeds[cell.queries]]) for cell in cells]


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
    started = time.perf_counter()
    found = true_clicks(cell.config(seed, test_queries))
    return {
        "seconds": time.perf_counter() - started,
        "means": {name: float(clicks.mean()) for name, clicks in found.items()},
        "differences": {
            f"{ours} − {other}": _mean_and_error(found[ours] - found[other])
            for ours, other in product(OURS, RIVALS)
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
        deepfm = RankingModel(fit_clicks(dataset, DEEPFM, reference=False).model)
        orders["DeepFM"] = deepfm.order(candidates, offsets, method="ctr1")
        lambdarank = baseline_policy("lambdarank", dataset, featurizer, ExperimentConfig())
        orders["LambdaRank"] = lambdarank.positions(as_block(candidates))
    if oracle.user not in WITHOUT_TABLE:
        orders["KM"] = positions_in_lists(truth, offsets)
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
    """Combine the seeds of a cell: means relative to the logged order with standard errors, and differences with z."""
    names = [name for name in results[0]["means"] if all(name in each["means"] for each in results)]
    ratios, errors = {}, {}
    for name in names:
        by_seed = np.array([result["means"][name] / result["means"]["logged"] for result in results])
        ratios[name] = float(by_seed.mean())
        errors[name] = float(by_seed.std(ddof=1) / np.sqrt(len(by_seed))) if len(by_seed) > 1 else None
    differences = {}
    logged = float(np.mean([result["means"]["logged"] for result in results]))
    for pair in results[0]["differences"]:
        each = np.array([result["differences"][pair] for result in results if pair in result["differences"]])
        mean, error = each[:, 0].mean(), np.sqrt((each[:, 1] ** 2).sum()) / len(each)
        z = float(mean / error) if error else 0.0
        differences[pair] = {"mean": float(mean / logged), "z": z, "outcome": outcome(z)}
    return {
        "cell": cell.name,
        **asdict(cell),
        "seeds": len(results),
        "ratios": ratios,
        "errors": errors,
        "differences": differences,
        "lost": [pair for pair in JUDGED if pair in differences and differences[pair]["outcome"] == "loss"],
    }


def outcome(z: float) -> str:
    """Return `win`, `tie` or `loss`.

    >>> outcome(2.5), outcome(-1.9), outcome(-2.1)
    ('win', 'tie', 'loss')
    """
    return "win" if z > SIGNIFICANT else "loss" if z < -SIGNIFICANT else "tie"


def summarised(users: str, rows: list[dict[str, Any]]) -> Iterator[Bar | Figure]:
    """Yield the bars and the table of a kind of users."""
    for row in rows:
        name = row["cell"]
        yield Bar(f"{name}: default, true clicks / logged", row["ratios"]["default"], "", part=users)
        which = f": {', '.join(row['lost'])}" if row["lost"] else ""
        yield Bar(f"{name}: significantly below{which}", len(row["lost"]), "comparisons", at_most=0, part=users)
    yield Figure("map", f"{users} users", {"rows": rows}, users)
