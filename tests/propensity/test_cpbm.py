"""The contextual model: its loss, its context, and that the same seed gives the same curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

from propensity.logs import prepared, swapped
from simulated import Small, make
from urank.errors import DataError
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Block
from urank.propensity.cpbm import Contextual, CpbmConfig, build_contextual, fit_cpbm, list_means, pairs_loss
from urank.propensity.examination import Propensity, examination_quantiles
from urank.propensity.harvest import pair_numbers

QUICK = CpbmConfig(training=TrainingConfig(epochs=2, batch_lists=32), seed=3)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("cpbm")
    return make(folder, categories=True, queries=120, sessions=6, features=4, positions=4, candidates=4, user="query")


@pytest.fixture(scope="module")
def fitted(log: Small) -> Contextual:
    return fit_cpbm(log.dataset, QUICK)


def test_loss_is_that_of_every_ordered_pair() -> None:
    h, g = torch.tensor([[0.8, 0.4, 0.2]]), torch.tensor([[0.5, 0.3, 0.7]])  # of the pairs (1, 2), (1, 3), (2, 3)
    rates = torch.tensor([[0.25, 0.5, torch.nan]])
    expected = -(
        0.25 * np.log(0.8 * 0.5) + 0.75 * np.log(1 - 0.8 * 0.5) + 0.5 * np.log(0.4 * 0.5) + 0.5 * np.log(1 - 0.4 * 0.5)
    )
    pair = torch.from_numpy(pair_numbers(3))
    assert float(pairs_loss(h.log(), g.log(), rates, pair)) == pytest.approx(expected, rel=1e-5)
    alone = torch.tensor([[0.25, torch.nan, torch.nan]])
    assert float(pairs_loss(h.log(), g.log(), alone, pair)) == 0
    both = torch.cat([rates, alone])
    assert float(pairs_loss(h.log().repeat(2, 1), g.log().repeat(2, 1), both, pair)) == pytest.approx(expected / 2)


def test_gradient_of_the_loss() -> None:
    torch.manual_seed(0)
    h, g = (torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (4, 6))
    rates = torch.rand(3, 4, dtype=torch.float64)
    rates[0, 1] = rates[2, 3] = torch.nan
    pair = torch.from_numpy(pair_numbers(4))

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return pairs_loss(torch.nn.functional.logsigmoid(a), torch.nn.functional.logsigmoid(b), rates, pair)

    assert torch.autograd.gradcheck(loss, (h, g))


def test_means_of_lists_that_may_be_empty() -> None:
    means = list_means(torch.tensor([[2.0, 0.0], [4.0, 2.0], [5.0, 1.0]]), torch.tensor([0, 2, 2, 3]))
    assert means.tolist() == [[3.0, 1.0], [3.0, 1.0], [5.0, 1.0]]


def test_examination_is_relative_and_by_list(log: Small, fitted: Contextual) -> None:
    propensity: Propensity = fitted
    assert (propensity.name, list(propensity.columns)) == ("cpbm", log.featurizer.names)
    block = next(log.dataset.blocks("test", propensity.columns))
    table = propensity.examination(block)
    assert table.shape == (block.items.num_rows, 4)
    assert (table[:, 0] == 1).all()
    assert (table > 0).all()
    first, second = block.offsets[:2]
    np.testing.assert_array_equal(table[first:second], np.repeat(table[:1], second - first, axis=0))
    assert (np.ptp(table, axis=0)[1:] > 0).all()
    alone = Block(block.lists.slice(0, 1), block.items.slice(first, second - first), block.offsets[:2])
    np.testing.assert_allclose(propensity.examination(alone), table[first:second], rtol=1e-5)


def test_items_may_be_the_context(log: Small) -> None:
    model = build_contextual(log.featurizer, 4, CpbmConfig(context="item"))
    block = next(log.dataset.blocks("test", model.columns))
    table = model.examination(block)
    assert np.ptp(table[: block.offsets[1], 1]) > 0
    order = pa.array(np.arange(block.items.num_rows)[::-1])
    np.testing.assert_allclose(
        model.examination(Block(block.lists, block.items.take(order), block.offsets)), table[::-1], rtol=1e-5
    )


def test_same_seed_same_curve(log: Small, fitted: Contextual) -> None:
    block = next(log.dataset.blocks("test", fitted.columns))
    np.testing.assert_array_equal(fit_cpbm(log.dataset, QUICK).examination(block), fitted.examination(block))


def test_spread_over_the_items_shown(log: Small, fitted: Contextual) -> None:
    mean, low, high = examination_quantiles(fitted, log.dataset, "train", levels=(0.1, 0.9))
    assert mean[0] == low[0] == high[0] == 1
    assert (low[1:] < mean[1:]).all()
    assert (mean[1:] < high[1:]).all()


def test_without_valid_or_features_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no valid queries"):
        fit_cpbm(prepared(tmp_path / "a", swapped(8, 2)))
    plain = pl.DataFrame(swapped(8, 2, lists=200).drop("f1"))
    with pytest.raises(DataError, match="has no features"):
        fit_cpbm(prepared(tmp_path / "b", plain, valid=0.3))
