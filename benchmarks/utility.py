"""The ranker: true utility against the libraries, and what the matching costs.

    python -m benchmarks utility                    the default two-logger simulation, 5 seeds; bids; MSLR and MQ2008
                                                    where the data is at hand
    python -m benchmarks utility --only bids        one part; the results of the others stay as they are

Real data is looked for in ../shared/data or $URANK_DATA; without it those parts are left out, and it is said. XGBoost
comes with `pip install -e .[bench]`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from scipy.optimize import linear_sum_assignment

from benchmarks.harness import REAL_DATA, Bar
from benchmarks.peers import lightgbm_150, lightgbm_ranker, rows_of, xgboost_ranker
from benchmarks.simulated import simulated
from benchmarks.trees_time import trees_time
from benchmarks.truth import Candidates
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.click_settings import ClickConfig
from urank.clicks.families import click_loss
from urank.clicks.fitting import fit_clicks
from urank.evaluation.intervals import paired
from urank.lab.letor_simulation import SimulationConfig
from urank.learning.batches import Batch, Stream
from urank.learning.features import Inputs
from urank.learning.lightgbm_data import matrix
from urank.learning.training import mean_loss, seeded, train
from urank.log.dataset import Dataset
from urank.ranking.matching import match
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.urank_network import fit_urank
from urank.ranking.urank_trees import fit_trees
from urank.ranking.utility import utility

LIBRARIES = (
    "LightGBM lambdarank",
    "LightGBM lambdarank, position",
    "XGBoost lambdarank_unbiased",
    "LightGBM 150",
)
OTHERS = (*LIBRARIES, "CTR-1", "logged")
TAUGHT = ("matching of the truth", "U-rank on the true table", "matching, taught")
console = Console(stderr=True)

Values = dict[str, NDArray[np.float64]]


def parts(*, quick: bool) -> dict[str, Callable[[Path], Iterator[Bar]]]:
    """What can be measured on its own, each from a folder to work in."""
    seeds, queries = 1 if quick else 5, 300 if quick else None
    found: dict[str, Callable[[Path], Iterator[Bar]]] = {
        "matching": lambda _: _matching(),
        "simulation": lambda folder: _simulated(folder, seeds=seeds, queries=queries),
        "bids": lambda folder: _bids(folder, seeds=min(seeds, 2), queries=queries),
        "trees": lambda folder: trees_time(folder, queries=300 if quick else 10_000),
    }
    if not REAL_DATA.is_dir():
        console.print(f"no real data at {REAL_DATA}: MSLR and MQ2008 are left out")
        return found
    return found | {
        "mslr": lambda folder: _letor(folder, "MSLR", REAL_DATA / "mslr", 20 if quick else 200, min(seeds, 2)),
        "mq2008": lambda folder: _letor(folder, "MQ2008", REAL_DATA / "mq2008", 20 if quick else 50, min(seeds, 2)),
    }


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar]:
    known = parts(quick=quick)
    absent = [name for name in only if name not in known]
    if absent:
        raise SystemExit(f"utility has no part '{absent[0]}'; its parts are {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        for part in only or known:
            for bar in known[part](Path(name)):
                yield replace(bar, part=part)


def _matching() -> Iterator[Bar]:
    """What the matching of 1,000 candidates to 10 positions costs, and whether it is the optimum."""
    rng = np.random.default_rng(0)
    lists = [rng.random((1, 1000, 1)) / np.arange(1, 11) ** rng.uniform(0.2, 2, (1, 1000, 1)) for _ in range(200)]
    seconds = []
    for weights in lists * 5:
        start = time.perf_counter()
        match(weights)
        seconds.append(time.perf_counter() - start)
    yield Bar("matching 1,000 candidates to 10 positions, median", 1000 * float(np.median(seconds)), "ms", at_most=0.3)
    apart = 0.0
    for weights in lists[:20]:
        square = np.zeros((1000, 1000))
        square[:, :10] = weights[0]
        rows, columns = linear_sum_assignment(square, maximize=True)
        apart = max(apart, abs(float(utility(weights, match(weights))[0]) - square[rows, columns].sum()))
    yield Bar("matching: largest distance to scipy's optimum of the square problem", apart, "", at_most=1e-9)


def _simulated(folder: Path, seeds: int, queries: int | None) -> Iterator[Bar]:
    """Every ranker on the default simulation; utilities are true ones."""
    found = _over_seeds(folder, seeds, queries, values=None)
    yield from _table("default simulation", found)
    for other in OTHERS:
        worst = max(paired(values["U-rank"], values[other]).p_value for values in found)
        lead = min(float(values["U-rank"].mean() / values[other].mean()) for values in found)
        yield Bar(f"U-rank (score) / {other}, worst seed", lead, "", at_least=1.0)
        yield Bar(f"U-rank (score) against {other}: largest p-value", worst, "", at_most=0.05)
    lead = min(float(values["matching"].mean() / values["U-rank"].mean()) for values in found)
    yield Bar("matching / U-rank (score), worst seed", lead, "", at_least=1.0)
    shares = {
        "U-rank (score): share of the same ranker on the true table": ("U-rank", "U-rank on the true table", 0.97),
        "matching: share of that of a click model fitted to the true table": ("matching", "matching, taught", 0.985),
        "matching: share of the matching of the true table itself": ("matching", "matching of the truth", None),
    }
    for name, (ours, other, goal) in shares.items():
        share = float(np.mean([values[ours].mean() / values[other].mean() for values in found]))
        yield Bar(name, share, "", at_least=goal)


def _bids(folder: Path, seeds: int, queries: int | None) -> Iterator[Bar]:
    """Revenue, with bids drawn from 1 to 10."""
    found = _over_seeds(folder, seeds, queries, values=(1.0, 10.0))
    yield from _table("bids from 1 to 10", found)
    for other in (*LIBRARIES, "CTR-1", "CTR-1 without bids", "matching without bids", "logged"):
        shown = "bid · CTR-1" if other == "CTR-1" else other
        worst = max(paired(values["U-rank"], values[other]).p_value for values in found)
        lead = min(float(values["U-rank"].mean() / values[other].mean()) for values in found)
        yield Bar(f"bids: revenue of U-rank (score) / {shown}, worst seed", lead, "", at_least=1.0)
        yield Bar(f"bids: U-rank (score) against {shown}: largest p-value", worst, "", at_most=0.05)


def _letor(folder: Path, name: str, path: Path, sessions: int, seeds: int) -> Iterator[Bar]:
    """Simulated clicks on real documents: few queries, many sessions each."""
    found = _each(
        folder,
        [
            SimulationConfig(data=str(path), sessions=sessions, valid=0.2, test=0.3, seed=seed, truth_split="all")
            for seed in range(seeds)
        ],
    )
    yield from _table(name, found)
    best = max(LIBRARIES, key=lambda library: _mean(found, library))
    others = [other for other in found[0] if other not in TAUGHT]
    second = max((other for other in others if other != "matching"), key=lambda other: _mean(found, other))
    lead = _mean(found, "matching") / _mean(found, second)
    yield Bar(f"{name}: matching / the best of all others ({second})", lead, "", at_least=1.0)
    yield Bar(f"{name}: U-rank (score) / {best}", _mean(found, "U-rank") / _mean(found, best), "", at_least=1.0)
    yield Bar(
        f"{name}: matching / LightGBM lambdarank, position",
        _mean(found, "matching") / _mean(found, "LightGBM lambdarank, position"),
        "",
    )


def _mean(found: list[Values], name: str) -> float:
    return float(np.mean([values[name].mean() for values in found]))


def _table(title: str, found: list[Values]) -> Iterator[Bar]:
    """The true utility of every ranker, relative to the logged order."""
    for name in sorted(found[0], key=lambda name: -_mean(found, name)):
        relative = [float(values[name].mean() / values["logged"].mean()) for values in found]
        yield Bar(f"{title}: {name} / logged (sd {np.std(relative):.4f})", float(np.mean(relative)), "")


def _over_seeds(folder: Path, seeds: int, queries: int | None, values: tuple[float, float] | None) -> list[Values]:
    size = {} if queries is None else {"queries": queries}
    return _each(
        folder, [SimulationConfig(seed=seed, values=values, truth_split="all", **size) for seed in range(seeds)]
    )


def _each(folder: Path, configs: list[SimulationConfig]) -> list[Values]:
    """The values of several simulations, as many at a time as there are cores."""
    found = []
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(one_simulation, folder / str(config.seed), config) for config in configs]
        for config, job in zip(configs, jobs, strict=True):
            found.append(job.result())
            shown = ", ".join(f"{name} {each.mean():.4f}" for name, each in found[-1].items())
            console.print(f"seed {config.seed}: {shown}", highlight=False)
    return found


def one_simulation(folder: Path, config: SimulationConfig, threads: int = 1) -> Values:
    """The true utility of each test query in the order of every ranker."""
    torch.set_num_threads(threads)  # two simulations run at a time
    dataset = simulated(folder, config)
    candidates = Candidates.read(folder / "simulation", config)
    clicks = fit_clicks(dataset, ClickConfig(seed=config.seed), reference=False).model
    settings = RankerConfig(seed=config.seed)
    true_table = candidates.true_table(clicks.featurizer.encode)
    scorer, _ = fit_urank(dataset, clicks, settings)
    trees, _ = fit_trees(dataset, clicks, settings, TreesConfig(threads=threads))
    on_truth, _ = fit_urank(dataset, clicks, settings, table=true_table)
    inputs, value = clicks.featurizer.encode(candidates.test), candidates.value
    table = np.exp(clicks.log_ctr(inputs).astype(np.float64))
    model = RankingModel(clicks, scorer)
    found = {
        "matching": candidates.utility(match=table * value[:, None]),
        "U-rank": candidates.utility(score=model.score(inputs, value)),
        "U-rank, trees": candidates.utility(score=trees.score(inputs, value)),
        "CTR-1": candidates.utility(score=table[:, 0] * value),
        "matching of the truth": candidates.utility(match=candidates.table * value[:, None]),
        "U-rank on the true table": candidates.utility(score=on_truth.score(inputs, value)),
        "matching, taught": candidates.utility(match=taught(dataset, clicks, true_table, inputs) * value[:, None]),
        "logged": candidates.logged(dataset),
    }
    if config.values is not None:
        found["CTR-1 without bids"] = candidates.utility(score=table[:, 0])
        found["matching without bids"] = candidates.utility(match=table)
    train, valid = (rows_of(dataset, split, clicks.featurizer) for split in ("train", "valid"))
    scores = {
        LIBRARIES[0]: lightgbm_ranker(train, valid, position=False, threads=threads, seed=config.seed),
        LIBRARIES[1]: lightgbm_ranker(train, valid, position=True, threads=threads, seed=config.seed),
        LIBRARIES[2]: xgboost_ranker(train, valid, threads=threads, seed=config.seed),
        LIBRARIES[3]: lightgbm_150(train.joined(valid), threads=threads, seed=config.seed),
    }
    features, offsets = matrix(inputs), candidates.offsets
    found |= {name: candidates.utility(score=score(features, offsets)) for name, score in scores.items()}
    shutil.rmtree(folder)
    return found


def taught(
    dataset: Dataset,
    clicks: ClickModel,
    true_table: Callable[[Inputs], NDArray[np.float32]],
    inputs: Inputs,
) -> NDArray[np.float64]:
    """The table of a click model of the same kind that was taught the true table: what its features can tell."""
    config = ClickConfig()
    streams = [
        Stream(dataset, split, clicks.featurizer, batch_lists=lists, table=true_table)
        for split, lists in (("train", 256), ("valid", 2048))
    ]

    def loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return click_loss(network(batch.numeric, batch.categorical), batch.table)

    with seeded(0):
        network = config.network("vector", clicks.featurizer, dataset.positions)
    train(network, loss, streams[0], lambda network: mean_loss(network, loss, streams[1]), config.training, seed=0)
    return np.exp(NetworkClicks("vector", network).log_ctr(inputs).astype(np.float64))
