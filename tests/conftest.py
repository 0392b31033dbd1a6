"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # torch is slow to load
    from simulated import Small
    from urank.pipeline import ModelFit

# A time limit on each example would only measure how busy the machine is.
settings.register_profile("urank", deadline=None)
settings.load_profile("urank")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real datasets, which are not part of the repository."""
    folder = Path(os.environ.get("URANK_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set URANK_DATA to the folder that holds mq2008/, mslr/ and expedia/")
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A small log with values, propensities, a text feature and missing numbers."""
    from simulated import make

    folder = tmp_path_factory.mktemp("small")
    return make(folder, categories=True, queries=400, sessions=6, features=6, seed=5, values=(1, 10))


@pytest.fixture(scope="session")
def fitted(small: Small) -> ModelFit:
    """A model that can rank in every way, hardly trained."""
    from urank.config import validate
    from urank.pipeline import fit_model
    from urank.ranking.ranking_settings import UrankConfig

    quick = {"epochs": 6, "batch_lists": 64}
    settings = {
        "method": "score",
        "clicks": {"families": ["monotone"], "within_list": "off", "training": quick},
        "scorer": {"training": quick},
    }
    return fit_model(small.dataset, validate(UrankConfig, settings))


@pytest.fixture(scope="session")
def saved(fitted: ModelFit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that model, without graphs."""
    from urank.model_io import save_model
    from urank.ranking.ranking_settings import UrankConfig

    folder = tmp_path_factory.mktemp("saved") / "model"
    save_model(fitted.model, UrankConfig(method="score"), folder, onnx=False)
    return folder
