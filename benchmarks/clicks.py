"""Click models: how near they come to the truth, how fast they train, and how memory grows with the log.

    python -m benchmarks clicks            the default two-logger simulation, 5 seeds; MSLR, MQ2008 and the hotel log
                                           where the data is at hand

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
import polars as pl
import torch
from rich.console import Console

import urank
from benchmarks.harness import REAL_DATA, Bar, median_seconds, peak_memory
from benchmarks.log import write_log
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
from urank.log.ragged import at_positions

FAMILIES: tuple[ClickFamily, ...] = ("monotone", "factorised", "vector", "position", "gbdt")
console = Console(stderr=True)


def run(*, quick: bool) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        folder = Path(name)
        yield from _accuracy(folder, seeds=1 if quick else 5, queries=500 if quick else None)
        yield from throughput(folder, queries=1_000 if quick else 10_000)
        yield from _memory(folder, quick=quick)
        if REAL_DATA.is_dir():
            yield from _letor(folder, quick=quick)
            yield from _hotel(folder, quick=quick)
        else:
            console.print(f"no real data at {REAL_DATA}: MSLR, MQ2008 and the hotel log are left out")


def _accuracy(folder: Path, seeds: int, queries: int | None) -> Iterator[Bar]:
    """Test log loss of every family against pbm and the oracle, and the paper's RQ2: AUC of A1 and A2."""
    losses: dict[str, list[float]] = {}
    areas: dict[str, list[float]] = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(one_seed, folder / str(seed), seed, queries) for seed in range(seeds)]
        for seed, job in enumerate(jobs):
            ratios, auc = job.result()
            for name, ratio in ratios.items():
                losses.setdefault(name, []).append(ratio)
            for name, area in auc.items():
                areas.setdefault(name, []).append(area)
            shown = ", ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items())
            console.print(f"seed {seed}: log loss / oracle's: {shown}", highlight=False)
    for family in FAMILIES:
        ahead = max(np.array(losses[family]) / np.array(losses["pbm"]))
        yield Bar(f"{family}: log loss / pbm's, worst seed", float(ahead), "", at_most=0.99999)
    for name, values in losses.items():
        spread = float(np.std(values))
        goal = 1.01 if name == "best on valid, ensemble of 3" else None
        yield Bar(f"{name}: log loss / oracle's, mean (sd {spread:.4f})", float(np.mean(values)), "", at_most=goal)
    for name, values in areas.items():
        yield Bar(f"RQ2 {name}: AUC", float(np.mean(values)), "")


def one_seed(folder: Path, seed: int, queries: int | None) -> tuple[dict[str, float], dict[str, float]]:
    """Log loss on test, as a ratio to the oracle's, of every family; AUC of A1 and A2 on every split."""
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
    areas = {
        f"{name} {split}": quality(
            *predictions({"": fit.tried[family]}, dataset, split)[""], positions=dataset.positions
        ).auc
        for name, family in (("A1", "vector"), ("A2", "position"))
        for split in ("train", "valid", "test")
    }
    shutil.rmtree(folder)
    return ratios, areas


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


def _memory(folder: Path, *, quick: bool) -> Iterator[Bar]:
    """Peak memory of `urank train` at two sizes of the log."""
    peaks = []
    for rows in (20_000, 200_000) if quick else (1_000_000, 10_000_000):
        log = write_log(folder / "log.parquet", rows)
        urank.prepare(urank.read(log, drop=["item_id"]), folder / "prepared", overwrite=True)
        flags = ("--click-model", "pbm", "--epochs", 1, "--no-onnx", "--quiet", "--overwrite")
        megabytes, _ = peak_memory("-m", "urank", "train", folder / "prepared", "-o", folder / "model", *flags)
        peaks.append(megabytes)
        yield Bar(f"train on {rows:,} rows: peak memory", megabytes, "MB")
        log.unlink()
    yield Bar("train: memory at ten times the rows", peaks[1] / peaks[0], "times", at_most=1.5)


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


def _hotel(folder: Path, *, quick: bool) -> Iterator[Bar]:
    """The real hotel log: learned on ranked searches, click curves compared with those of the randomised ones."""
    names = {"query_id": "srch_id", "click": "click_bool", "item_id": "prop_id", "policy": "random_bool"}
    outcomes = ["booking_bool", "gross_bookings_usd", "date_time"]
    raw = pl.read_csv(REAL_DATA / "expedia" / "searches.csv.gz", infer_schema_length=None).filter(
        pl.col("position") <= 30
    )
    ranked, randomised = (raw.filter(pl.col("random_bool") == flag) for flag in (0, 1))
    urank.prepare(urank.read(ranked, columns=names, drop=outcomes), folder / "hotel", valid=0.2, test=0)
    dataset = Dataset(folder / "hotel")
    fit = fit_clicks(dataset, ClickConfig(ensemble=1 if quick else 3))
    log = urank.read(randomised, columns=names, drop=outcomes).frame()
    position, click = log["position"].to_numpy().astype(np.int64), log["click"].to_numpy()
    constant = np.full(len(click), np.log(click.mean()))
    for who, log_p in {
        fit.model.name: at_positions(fit.model.log_ctr(log), position),
        "pbm": at_positions(fit.reference.log_ctr(log), position),
        "constant": constant,
    }.items():
        found = quality(log_p, position, click, positions=dataset.positions)
        yield Bar(f"hotel, randomised searches: log loss of {who}", found.log_loss, "")
        yield Bar(f"hotel, randomised searches: AUC of {who}", found.auc, "")
    predicted = np.exp(at_positions(fit.model.log_ctr(log), position))
    stars = np.nan_to_num(log["prop_starrating"].to_numpy())
    for group, rows in {"up to 3 stars": stars <= 3, "4 stars and more": stars >= 4}.items():
        for places, inside in {
            "1–3": position <= 3,
            "4–10": (position > 3) & (position <= 10),
            "11–30": position > 10,
        }.items():
            chosen = rows & inside
            error = np.sqrt(click[chosen].mean() * (1 - click[chosen].mean()) / chosen.sum())
            gap = (predicted[chosen].mean() - click[chosen].mean()) / error
            rates = f"{predicted[chosen].mean():.3f} predicted, {click[chosen].mean():.3f} observed"
            yield Bar(f"hotel, {group}, positions {places}: {rates}; gap in standard errors", float(gap), "")


def _featurizer(dataset: Dataset) -> Featurizer:
    blocks = dataset.blocks("train", dataset.features)
    return Featurizer.fit(blocks, dataset.numeric, dataset.categorical)


def _test_loss(dataset: Dataset, fit: Fit, reference: bool) -> float:
    model = fit.reference if reference else fit.model
    return quality(*predictions({"": model}, dataset, "test")[""], positions=dataset.positions).log_loss


def _loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return click_loss(network.at(batch.numeric, batch.categorical, batch.item, batch.position), batch.click)  # type: ignore[operator]
