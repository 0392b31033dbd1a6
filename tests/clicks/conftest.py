"""A small simulated log, prepared once for all tests of click models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import pytest
import torch

import urank
from urank.features import Featurizer
from urank.log.dataset import Dataset
from urank.simulate.config import SimulationConfig
from urank.simulate.letor import Simulation, simulate, write_simulation


@dataclass(frozen=True)
class Small:
    """A simulation, where it was written, and its log as prepared."""

    simulation: Simulation
    folder: Path
    dataset: Dataset
    featurizer: Featurizer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Test processes run side by side: more threads in each would only get into each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    simulation = simulate(
        SimulationConfig(queries=400, sessions=6, features=6, seed=5, values=(1, 10), valid=0.2, test=0.2)
    )
    middle = simulation.log["f1"].median()
    shape = pl.when(pl.col("f1") > middle).then(pl.lit("round")).otherwise(pl.lit("square"))
    more = {"shape": shape, "f2": pl.when(pl.col("f2") > 0).then(pl.col("f2"))}
    simulation = replace(
        simulation, log=simulation.log.with_columns(**more), candidates=simulation.candidates.with_columns(**more)
    )
    write_simulation(simulation, folder / "simulation")
    urank.prepare(urank.read(simulation.log), folder / "prepared", valid=0.2, test=0.2)
    dataset = Dataset(folder / "prepared")
    blocks = (block.items for block in dataset.blocks("train", dataset.features))
    return Small(
        simulation, folder / "simulation", dataset, Featurizer.fit(blocks, dataset.numeric, dataset.categorical)
    )
