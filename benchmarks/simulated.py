"""A simulation as benchmarks take it: written, and prepared without what a learner must not see."""

from __future__ import annotations

import shutil
from pathlib import Path

import urank
from urank.lab.letor_simulation import SimulationConfig, simulate, write_simulation
from urank.log.dataset import Dataset


def simulated(folder: Path, config: SimulationConfig) -> Dataset:
    """A simulation, written and prepared; what a learner must not see is left out."""
    write_simulation(simulate(config), folder / "simulation", overwrite=True)
    log = urank.read(folder / "simulation" / "log.parquet", drop=["relevance", "propensity"])
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    urank.prepare(log, folder / "prepared", valid=config.valid, test=config.test)
    return Dataset(folder / "prepared")
