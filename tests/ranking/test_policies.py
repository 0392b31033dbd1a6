"""Policies: the logged order, a random one that is the same everywhere, and those of a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from simulated import Small
from urank.errors import DataError
from urank.log.dataset import Block
from urank.log.ragged import list_ids
from urank.pipeline import ModelFit
from urank.ranking.matching import METHODS, Method
from urank.ranking.policies import LoggedOrder, ModelPolicy, Random
from urank.ranking.ranking_model import RankingModel


@pytest.fixture(scope="module")
def block(small: Small) -> Block:
    (block,) = small.dataset.blocks("test", [*small.dataset.features, "position", "value"])
    return block


def some(block: Block, lists: list[int]) -> Block:
    """These lists of a block, in this order."""
    rows = np.concatenate([np.arange(block.offsets[i], block.offsets[i + 1]) for i in lists])
    lengths = np.diff(block.offsets)[lists]
    return Block(block.lists.take(lists), block.items.take(rows), np.append(0, np.cumsum(lengths)))


def assert_orders(block: Block, positions: np.ndarray) -> None:
    """Every list has the positions 1 to n."""
    assert positions.dtype == np.int64
    for first, last in zip(block.offsets[:-1], block.offsets[1:], strict=True):
        assert sorted(positions[first:last]) == list(range(1, last - first + 1))


def test_logged(block: Block) -> None:
    policy = LoggedOrder()
    assert (policy.name, list(policy.columns)) == ("logged", ["position"])
    assert policy.positions(block).tolist() == block.column("position").tolist()
    assert_orders(block, policy.positions(block))


def test_random_is_of_the_list_and_the_seed(block: Block) -> None:
    policy = Random()
    positions = policy.positions(block)
    assert_orders(block, positions)
    np.testing.assert_array_equal(policy.positions(block), positions)
    assert not np.array_equal(Random(seed=1).positions(block), positions)
    lists = [17, 3, 40]
    rows = np.concatenate([np.arange(block.offsets[i], block.offsets[i + 1]) for i in lists])
    np.testing.assert_array_equal(policy.positions(some(block, lists)), positions[rows])
    mixed = block.shuffled(np.random.default_rng(0))
    rows = block.offsets[list_ids(block.offsets)] + mixed.column("position") - 1  # where each item stood before
    np.testing.assert_array_equal(policy.positions(mixed), positions[rows])


def test_random_differs_between_sessions_of_a_query_and_favours_nobody(block: Block) -> None:
    positions = Random().positions(block)
    orders = [tuple(positions[a:b]) for a, b in zip(block.offsets[:-1], block.offsets[1:], strict=True)]
    assert len(set(orders)) > 0.95 * len(orders)
    place = np.arange(block.offsets[-1]) - block.offsets[list_ids(block.offsets)]
    lengths = np.diff(block.offsets)[list_ids(block.offsets)]
    for k in range(3):  # wherever an item was logged, its position is uniform: mean (n + 1) / 2, variance (n² − 1) / 12
        chosen = place == k
        off = positions[chosen] - (lengths[chosen] + 1) / 2
        assert abs(off.sum()) < 4 * np.sqrt(((lengths[chosen] ** 2 - 1) / 12).sum())


def test_random_without_sessions(block: Block) -> None:
    alone = replace(block, lists=block.lists.select(["query_id"]))
    assert_orders(alone, Random().positions(alone))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_ranks_as_it_does_elsewhere(fitted: ModelFit, block: Block, method: Method) -> None:
    policy = ModelPolicy("mine", fitted.model, method)
    positions = policy.positions(block)
    assert_orders(block, positions)
    expected = fitted.model.order(block.items, block.offsets, value=block.column("value"), method=method)
    np.testing.assert_array_equal(positions, expected)
    lists = [9, 2]
    rows = np.concatenate([np.arange(block.offsets[i], block.offsets[i + 1]) for i in lists])
    np.testing.assert_array_equal(policy.positions(some(block, lists)), positions[rows])


def test_the_columns_that_a_model_needs(fitted: ModelFit) -> None:
    names = fitted.model.clicks.featurizer.names
    columns = {method: list(ModelPolicy("mine", fitted.model, method).columns) for method in METHODS}
    assert columns == {"score": [*names, "value"], "match": names, "ctr1": names}
    assert list(ModelPolicy("mine", RankingModel(fitted.model.clicks), "match").columns) == names


def test_values_that_are_not_there(fitted: ModelFit, block: Block) -> None:
    """They are 1 for the matching; a scorer that was trained on them refuses."""
    without = replace(block, items=block.items.drop_columns(["value"]))
    ones = pa.array(np.ones(block.items.num_rows, dtype=np.float32))
    as_one = replace(block, items=without.items.append_column("value", ones))
    for method in ("match", "ctr1"):
        policy = ModelPolicy("mine", fitted.model, method)
        np.testing.assert_array_equal(policy.positions(without), policy.positions(as_one))
    with pytest.raises(DataError, match="needs the column 'value', which is not there"):
        ModelPolicy("mine", fitted.model, "score").positions(without)
