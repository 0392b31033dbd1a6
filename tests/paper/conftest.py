"""One seed with its data, and one small run of everything, for all tests of the paper's experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from paper.tiny import TINY, config
from urank.paper.config import EXPERIMENTS
from urank.paper.reproduce import reproduce
from urank.paper.results import Reproduction
from urank.paper.store_trial import StoreTrial
from urank.paper.trial import Trial
from urank.progress import silent


@pytest.fixture(scope="session")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A seed whose data is made and on which nothing has learned yet; tests leave it so."""
    trial = Trial(tmp_path_factory.mktemp("trial") / "seed-1", config().seeded(1))
    trial.make_data(silent)
    return trial


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> StoreTrial:
    """A seed of the app store, likewise."""
    trial = StoreTrial(tmp_path_factory.mktemp("store") / "seed-1" / "store", config("table3").seeded(1).store)
    trial.make_data(silent)
    return trial


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reproduction, Path]:
    """All tables and figures of two seeds, and the folder."""
    folder = tmp_path_factory.mktemp("everything") / "reproduction"
    return reproduce(EXPERIMENTS, folder, seeds=2, workers=1, overrides=TINY), folder
