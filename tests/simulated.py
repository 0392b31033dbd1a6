"""Small simulated logs with their truth, prepared as a learner gets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

import urank
from urank.lab.letor_simulation import Simulation, SimulationConfig, simulate, write_simulation
from urank.learning.features import Featurizer, Inputs
from urank.log.dataset import Block, Dataset
from urank.log.ragged import pad, where_items
from urank.ranking.utility import utility

__all__ = ["Small", "make", "true_utility"]

SHARES = {"valid": 0.2, "test": 0.2}


@dataclass(frozen=True)
class Small:
    """A simulation, where it was written, and its log as prepared."""

    simulation: Simulation
    folder: Path
    dataset: Dataset
    featurizer: Featurizer

    def table(self, inputs: Inputs) -> NDArray[np.float32]:
        """The true P(click | item, k) `[rows, K]`; no two items have the same numbers."""
        rows, table = self._known
        return table[[rows[each.tobytes()] for each in inputs.numeric[:, : len(self.dataset.numeric)]]]

    @cached_property
    def _known(self) -> tuple[dict[bytes, int], NDArray[np.float32]]:
        candidates = self.simulation.candidates
        numbers = candidates.select(pl.col(self.dataset.numeric).cast(pl.Float32).fill_null(float("nan"))).to_numpy()
        rows = {numbers[row].tobytes(): row for row in range(len(numbers))}
        assert len(rows) == len(numbers)
        return rows, np.array(candidates["table"].to_list(), dtype=np.float32)


def make(folder: Path, *, categories: bool = False, **settings: Any) -> Small:
    """Simulate, write and prepare a log.

    Args:
        folder: where all of it is written.
        categories: add the text feature `shape`, and let values of `f2` be missing.
        settings: of `SimulationConfig`.
    """
    torch.set_num_threads(1)  # test processes run side by side: more threads would get into each other's way
    simulation = simulate(SimulationConfig(**{**SHARES, "truth_split": "all", **settings}))
    if categories:
        middle = simulation.log["f1"].median()
        shape = pl.when(pl.col("f1") > middle).then(pl.lit("round")).otherwise(pl.lit("square"))
        more = {"shape": shape, "f2": pl.when(pl.col("f2") > 0).then(pl.col("f2"))}
        simulation = replace(
            simulation, log=simulation.log.with_columns(**more), candidates=simulation.candidates.with_columns(**more)
        )
    write_simulation(simulation, folder / "simulation")
    urank.prepare(urank.read(simulation.log), folder / "prepared", **SHARES)
    dataset = Dataset(folder / "prepared")
    blocks = dataset.blocks("train", dataset.features)
    featurizer = Featurizer.fit(blocks, dataset.numeric, dataset.categorical)
    return Small(simulation, folder / "simulation", dataset, featurizer)


def true_utility(small: Small, positions: Callable[[Block], NDArray[np.int64]], split: str = "test") -> float:
    """The mean true utility of the lists of a split when a policy gives every item its position."""
    value = ["value"] if small.dataset.has("value") else []
    total, lists = 0.0, 0
    for block in small.dataset.blocks(split, [*small.dataset.features, "position", *value]):
        total += utility(
            pad(small.table(small.featurizer.encode(block.items)).astype(np.float64), block.offsets),
            pad(positions(block), block.offsets, fill=1),
            value=pad(block.column("value"), block.offsets) if value else None,
            where=where_items(block.offsets),
        ).sum()
        lists += len(block.offsets) - 1
    return total / lists
