"""One seed with its data, and one small run of everything, for all tests of the paper's experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tiny import ONE_SETTING, TINY, config
from urank.lab.appstore_experiment import StoreTrial
from urank.lab.experiment_results import Reproduction
from urank.lab.letor_experiment import LetorTrial
from urank.lab.reproduction import reproduce
from urank.progress import silent


@pytest.fixture(scope="session")
def trial(tmp_path_factory: pytest.TempPathFactory) -> LetorTrial:
    """A seed whose data is made and on which nothing has learned yet; tests leave it so."""
    trial = LetorTrial(tmp_path_factory.mktemp("trial") / "seed-1", config().seeded(1))
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
    """All tables and figures of two seeds with one setting, and the folder."""
    folder = tmp_path_factory.mktemp("everything") / "reproduction"
    return reproduce(ONE_SETTING, folder, seeds=2, workers=1, overrides=TINY), folder
