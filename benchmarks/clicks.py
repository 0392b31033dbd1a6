"""Click models: how near they come to the truth, and how fast they train.

    python -m benchmarks clicks            the default two-logger simulation, 5 seeds; MSLR and MQ2008 where the data is
                                           at hand

Real data is looked for in ../shared/data or $URANK_DATA; without it those parts are left out, and it is said.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.harness import REAL_DATA, Bar, median_seconds
from benchmarks.simulated import simulated
from urank.clicks.click_settings import ClickConfig, ClickFamily, GbdtConfig
from urank.clicks.families import build_network, click_loss
from urank.clicks.fitting import Fit, fit_clicks, predictions
from urank.evaluation.click_quality import quality
from urank.lab.letor_simulation import SimulationConfig
from urank.lab.truth import oracle_predictions, read_truth
from urank.learning.batches import Batch, Stream
from urank.learning.features import Featurizer
from urank.learning.training import seeded, train
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset

FAMILIES: tuple[ClickFamily, ...] = ("shrunk", "monotone", "factorised", "vector", "position", "gbdt")
console = Console(stderr=True)


def run(*, quick: bool) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        folder = Path(name)
        yield from _accuracy(folder, seeds=1 if quick else 5, queries=500 if quick else None)
        yield from throughput(folder, queries=1_000 if quick else 10_000)
        if REAL_DATA.is_dir():
            yield from _letor(folder, quick=quick)
        else:
            console.print(f"no real data at {REAL_DATA}: MSLR and MQ2008 are left out")


def _accuracy(folder: Path, seeds: int, queries: int | None) -> Iterator[Bar]:
    """Test log loss of every family against pbm and the oracle."""
    losses: dict[str, list[float]] = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(one_seed, folder / str(seed), seed, queries) for seed in range(seeds)]
        for seed, job in enumerate(jobs):
            ratios = job.result()
            for name, ratio in ratios.items():
                losses.setdefault(name, []).append(ratio)
            shown = ", ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items())
            console.print(f"seed {seed}: log loss / oracle's: {shown}", highlight=False)
    for family in FAMILIES:
        ahead = max(np.array(losses[family]) / np.array(losses["pbm"]))
        yield Bar(f"{family}: log loss / pbm's, worst seed", float(ahead), "", at_most=0.99999)
    for name, values in losses.items():
        spread = float(np.std(values))
        goal = 1.01 if name == "best on valid, ensemble of 3" else None
        yield Bar(f"{name}: log loss / oracle's, mean (sd {spread:.4f})", float(np.mean(values)), "", at_most=goal)


def one_seed(folder: Path, seed: int, queries: int | None) -> dict[str, float]:
    """Log loss on test, as a ratio to the oracle's, of every family."""
    torch.set_num_threads(1)
    config = SimulationConfig(seed=seed) if queries is None else SimulationConfig(seed=seed, queries=queries)
    dataset = simulated(folder, config)
    truth = oracle_predictions(read_truth(folder / "simulation"), dataset, "test")
    oracle = quality(*truth, positions=dataset.positions).log_loss
    trees = GbdtConfig(threads=1)
    fit = fit_clicks(dataset, ClickConfig(families=FAMILIES, ensemble=3, seed=seed, trees=trees))
    models = {**fit.tried, "pbm": fit.reference, "best on valid, ensemble of 3": fit.model}
    ratios = {
        name: quality(*predictions({"": model}, dataset, "test")[""], positions=dataset.positions).log_loss / oracle
        for name, model in models.items()
    }
    shutil.rmtree(folder)
    return ratios


def throughput(folder: Path, queries: int, part: str = "") -> Iterator[Bar]:
    """Rows per second of training from the prepared Parquet, against the same network on tensors in memory."""
    dataset = simulated(folder, SimulationConfig(queries=queries))
    featurizer = _featurizer(dataset)
    lists, rate = 256, 4e-3
    config = TrainingConfig(epochs=1, batch_lists=lists, learning_rate=rate)
    stream = Stream(dataset, "train", featurizer, batch_lists=lists, cache_bytes=0)
    batches = list(stream.batches())

    def network() -> torch.nn.Module:
        with seeded(0):
            return build_network("monotone", featurizer, dataset.positions)

    def ours() -> None:
        train(network(), _loss, stream, lambda _: 0.0, config, seed=0)

    def bare() -> None:
        model = network()
        optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
        model.train()
        for batch in batches:
            optimiser.zero_grad(set_to_none=True)
            _loss(model, batch).backward()
            optimiser.step()

    seconds, bare_seconds = median_seconds(ours, bare)
    share = bare_seconds / seconds
    yield Bar("training: share of a bare loop on tensors in memory", share, "", at_least=0.7, part=part)
    yield Bar("training: speed", stream.rows / seconds / 1e3, "thousand rows/s", part=part)


def _letor(folder: Path, *, quick: bool) -> Iterator[Bar]:
    """The simulated clicks on real documents."""
    for name, path in (("MSLR", REAL_DATA / "mslr"), ("MQ2008", REAL_DATA / "mq2008")):
        sessions = 20 if quick else 200 if name == "MSLR" else 50
        dataset = simulated(folder, SimulationConfig(data=str(path), sessions=sessions, valid=0.2, test=0.2))
        fit = fit_clicks(dataset, ClickConfig())
        model, pbm = (_test_loss(dataset, fit, reference) for reference in (False, True))
        truth = oracle_predictions(read_truth(folder / "simulation"), dataset, "test")
        oracle = quality(*truth, positions=dataset.positions).log_loss
        yield Bar(f"{name}: log loss of {fit.model.name} / oracle's", model / oracle, "")
        yield Bar(f"{name}: log loss of {fit.model.name} / pbm's", model / pbm, "")


def _featurizer(dataset: Dataset) -> Featurizer:
    blocks = dataset.blocks("train", dataset.features)
    return Featurizer.fit(blocks, dataset.numeric, dataset.categorical)


def _test_loss(dataset: Dataset, fit: Fit, reference: bool) -> float:
    model = fit.reference if reference else fit.model
    return quality(*predictions({"": model}, dataset, "test")[""], positions=dataset.positions).log_loss


def _loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return click_loss(network.at(batch.numeric, batch.categorical, batch.item, batch.position), batch.click)  # type: ignore[operator]
