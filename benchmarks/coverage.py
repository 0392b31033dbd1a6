"""Do 95 % intervals of off-policy estimates cover the truth? Many small logs from one population of queries."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

import urank
from benchmarks.harness import Bar
from urank.clicks.click_settings import ClickConfig, ClickFamily
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.evaluation.policy_evaluation import Evaluation, evaluate_policies
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.lab.truth import true_table
from urank.lab.user_models import User
from urank.log.dataset import Block, Dataset
from urank.log.ragged import pad, positions_by_score, where_items
from urank.log.splits import SPLITS
from urank.ranking.policies import Random

QUERIES = 400


@dataclass(frozen=True)
class ByFeature:
    """A fixed order by one feature: a policy that no log had a part in."""

    feature: str = "f1"
    name: str = "by feature"
    columns: tuple[str, ...] = ("f1",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        where = where_items(block.offsets)
        return positions_by_score(pad(block.column(self.feature), block.offsets), where=where)[where]


def coverage(folder: Path, logs: int) -> Iterator[Bar]:
    """Share of logs whose interval holds the mean true utility over the whole population of queries."""
    cases: tuple[tuple[str, User, ClickFamily, bool], ...] = (
        ("position-based users, monotone model", "pbm", "monotone", True),
        ("item-specific users, monotone model", "item", "monotone", False),
    )
    for name, user, family, held in cases:
        covered: dict[str, list[bool]] = {}
        warned = []
        _population(folder / "population", user, logs)
        with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
            some = logs if held else max(2, logs // 4)
            found = list(pool.map(one_log, *zip(*((folder, family, n) for n in range(some)), strict=True)))
        truth = np.load(folder / "population" / "truth.npz")
        for estimates, differences, warning in found:
            warned.append(warning)
            for key, (low, high) in estimates.items():
                covered.setdefault(key, []).append(low <= truth[key.split(", ")[0]] <= high)
            for key, (low, high) in differences.items():
                gain = truth[key.split(" to logged")[0]] - truth["logged"]
                covered.setdefault(key, []).append(low <= gain <= high)
        for key, holds in covered.items():
            share = float(np.mean(holds))
            judged = held and logs >= 100 and key.endswith("ratio")  # the estimator that is shown by default
            bounds = {"at_least": 0.90, "at_most": 0.98} if judged else {}
            yield Bar(f"coverage, {name}: {key} ({len(holds)} logs)", share, "", **bounds)
        yield Bar(f"coverage, {name}: logs whose report doubts the click model", float(np.mean(warned)), "")
        shutil.rmtree(folder / "population")


def _population(folder: Path, user: User, logs: int) -> None:
    """One large simulation, cut into logs of 400 queries, and the true mean utility of each policy over all of it."""
    folder.mkdir(parents=True)
    config = SimulationConfig(user=user, queries=QUERIES * logs, sessions=5, features=10, truth_split="all", seed=1)
    simulation = simulate(config)
    number = simulation.log["query_id"].rle_id() // QUERIES
    log = simulation.log.drop("relevance", "propensity", "policy").with_columns(part=number)
    truth = simulation.candidates.select("item_id", "table")
    log.join(truth, on="item_id", how="left", maintain_order="left").write_parquet(folder / "log.parquet")
    urank.prepare(urank.read(log.drop("part")), folder / "prepared", valid=0, test=1)
    look_up, dataset, sums = true_table(simulation.candidates), Dataset(folder / "prepared"), dict[str, float]()
    for block in dataset.blocks("test", ["item_id", "position", "f1"]):
        table, rows = look_up(block), np.arange(block.items.num_rows)
        for policy in (Random(), ByFeature()):
            sums[policy.name] = sums.get(policy.name, 0) + table[rows, policy.positions(block) - 1].sum()
        sums["logged"] = sums.get("logged", 0) + table[rows, block.column("position") - 1].sum()
    lists = QUERIES * logs * config.sessions
    np.savez(folder / "truth.npz", **{name: total / lists for name, total in sums.items()})
    shutil.rmtree(folder / "prepared")


def one_log(
    folder: Path, family: ClickFamily, number: int
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]], bool]:
    """The intervals of one log: of utilities by several estimators, of differences, and whether there is a doubt."""
    torch.set_num_threads(1)
    log = pl.scan_parquet(folder / "population" / "log.parquet").filter(pl.col("part") == number).drop("part", "table")
    prepared = folder / f"log-{number}"
    urank.prepare(urank.read(log.collect()), prepared, valid=0, test=1)
    config = CrossfitConfig(clicks=ClickConfig(families=(family,), hidden=(32, 16), dropout=0.0))
    found = evaluate_policies(
        [Random(), ByFeature()], Dataset(prepared), splits=SPLITS[2:], estimator="ratio", cutoffs=(), config=config
    )
    shutil.rmtree(prepared)
    return _intervals(found)


def _intervals(
    found: Evaluation,
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]], bool]:
    estimates = {
        f"{policy.name}, {estimator}": (interval.low, interval.high)
        for policy in found.policies
        for estimator, interval in policy.estimates.items()
        if estimator in ("direct", "ratio")
    }
    differences = {
        f"{policy.name} to logged, ratio": (policy.difference.low, policy.difference.high)
        for policy in found.policies
        if policy.difference is not None
    }
    return estimates, differences, bool(found.specification.warnings)
