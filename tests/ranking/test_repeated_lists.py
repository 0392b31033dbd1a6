"""Losses of a log whose repeated lists are stored once: the same value and gradient as without collapsing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

import urank
from urank.clicks import fitting
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.learning import batches
from urank.learning.features import fit_featurizer
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.ranking import baselines, urank_network
from urank.ranking.baselines import fit_dla, fit_pairwise, fit_ranksvm
from urank.ranking.objectives import ClickGain
from urank.ranking.ranking_settings import RankerConfig, RankSvmConfig
from urank.ranking.urank_network import fit_urank

torch.set_num_threads(1)

CONFIG = RankerConfig(hidden=(), dropout=0.0)
"""A linear scorer: a network may give ties, which are broken by the order in which a list was logged."""


@pytest.fixture(scope="module", params=[None, (1.0, 5.0)], ids=["clicks", "values"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("repeated")
    log = simulate(SimulationConfig(queries=40, sessions=6, features=4, values=request.param, seed=2)).log
    log = log.drop("relevance", "propensity").with_columns(pl.col("click") * (pl.col("position") <= 5))
    urank.prepare(urank.read(log), folder / "log", valid=0.2, test=0, positions=5)
    return Dataset(folder / "log")


class StoppedError(Exception):
    """A training that was stopped before its first step."""

    def __init__(self, network: nn.Module, loss: Any, stream: Any, held_out: Any) -> None:
        self.network, self.loss, self.stream, self.held_out = network, loss, stream, held_out


def stop(network: nn.Module, loss: Any, stream: Any, held_out: Any, *_: Any, **__: Any) -> None:
    raise StoppedError(network, loss, stream, held_out)


def clicks(dataset: Dataset, family: Any) -> None:
    fit_clicks(dataset, ClickConfig(families=(family,), hidden=(8,), dropout=0.0), reference=False)


def scorer(dataset: Dataset, target: str) -> None:
    fit_urank(dataset, MODELS[str(dataset.folder)], CONFIG.model_copy(update={"target": target}))


MODELS: dict[str, Any] = {}

FITS: dict[str, Callable[[Dataset], Any]] = {
    **{family: lambda log, family=family: clicks(log, family) for family in ("monotone", "position", "deepfm")},
    **{name: lambda log, name=name: scorer(log, name) for name in ("model", "counterfactual", "blend")},
    "lambdarank": lambda log: fit_pairwise("lambdarank", log, fit_featurizer(log), ClickGain(), CONFIG),
    "ranksvm": lambda log: fit_ranksvm(log, fit_featurizer(log), ClickGain(), RankSvmConfig()),
    "dla": lambda log: fit_dla(log, fit_featurizer(log), CONFIG),
}


@pytest.mark.parametrize("name", FITS)
def test_same_loss_and_gradient(name: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    if str(dataset.folder) not in MODELS:
        quick = ClickConfig(families=("pbm",), hidden=(8,), training=TrainingConfig(epochs=1))
        MODELS[str(dataset.folder)] = fit_clicks(dataset, quick, reference=False).model
    for module, function in ((fitting, "train"), (baselines, "train_by_lists"), (urank_network, "train_by_lists")):
        monkeypatch.setattr(module, function, stop)
    found = []
    for least in (0.2, 2.0):  # the second is never reached
        monkeypatch.setattr(batches, "LEAST_REPEATED", least)
        with pytest.raises(StoppedError) as stopped:
            FITS[name](dataset)
        run = stopped.value
        assert (run.stream.repeats > 1) == (least < 1)
        (batch,) = run.stream.batches(batch_lists=10**6)
        with torch.no_grad():  # scores that differ between items
            for parameter in run.network.parameters():
                parameter.copy_(torch.from_numpy(np.random.default_rng(parameter.numel()).normal(size=parameter.shape)))
        loss = run.loss(run.network, batch)
        loss.backward()
        gradients = [parameter.grad for parameter in run.network.parameters()]
        found.append((batch, loss, gradients, run.held_out(run.network)))
    (once, loss, gradients, held_out), (plain, expected, expected_gradients, expected_held_out) = found
    assert len(once) == len(plain) == len(plain.numeric) > 2 * len(once.numeric)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)
    assert held_out == pytest.approx(expected_held_out, rel=1e-5)
