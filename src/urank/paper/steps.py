"""Every step of every experiment, by name: what it needs, whether it is done, and how to do it."""

from __future__ import annotations

from pathlib import Path

from urank.paper.config import ExperimentConfig
from urank.paper.methods import needs_of, run_step
from urank.paper.store_methods import STORE_METHODS, STORE_STEPS, run_store_step, store_needs
from urank.paper.store_trial import StoreTrial
from urank.paper.trial import Trial
from urank.progress import Report

__all__ = ["DATA", "SeedRun", "needs"]

DATA = ("data", "store-data")
"""The steps whose results are removed when all that learn from them are done."""


def needs(name: str) -> tuple[tuple[str, ...], float]:
    """The steps before a step or a method, and its cost."""
    return store_needs(name) if _of_store(name) else needs_of(name)


def _of_store(name: str) -> bool:
    return name in STORE_METHODS or name in STORE_STEPS


class SeedRun:
    """All that is done for one seed.

    Args:
        folder: of the seed.
        config: of the experiment, with this seed.
    """

    def __init__(self, folder: Path, config: ExperimentConfig) -> None:
        self.trial = Trial(folder, config)
        self.store = StoreTrial(folder / "store", config.store)

    def has(self, name: str) -> bool:
        """Whether a step or a method is done."""
        return self.store.has(name) if _of_store(name) else self.trial.has(name)

    def run(self, name: str, report: Report) -> None:
        """Do one step, or train and judge one method."""
        if _of_store(name):
            run_store_step(self.store, name, report)
        else:
            run_step(self.trial, name, report)

    def sweep(self) -> None:
        """Remove what a killed run left half-written."""
        self.trial.sweep()
        self.store.sweep()

    def clean(self) -> None:
        """Remove what can be made again."""
        self.trial.clean()
        self.store.clean()
