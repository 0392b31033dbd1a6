"""The truth of a simulation: looked up for every item of a log, and the true utility of evaluated policies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import urank
from known_judges import QUICK_JUDGES
from simulated import Small, true_utility
from urank.errors import DataError
from urank.evaluation.policy_evaluation import evaluate_policies, query_bytes, row_bytes
from urank.lab.appstore import ServedVisits, by_chance, draw_requests, serve, with_table
from urank.lab.market import MarketConfig, build_market
from urank.lab.truth import (
    add_true_utilities,
    oracle_predictions,
    read_truth,
    true_guard_utilities,
    true_reference,
    true_table,
    true_utilities,
)
from urank.log.dataset import Block, Dataset
from urank.log.splits import SPLITS
from urank.memory import Memory
from urank.pipeline import ModelFit, guard_levels
from urank.propensity.examination import Known
from urank.ranking.policies import LoggedOrder, ModelPolicy, Random, TableMatch

ITEMS = pl.DataFrame({"query_id": ["q1", "q1", "q2"], "item_id": ["a", "b", "c"], "table": [[0.5], [0.4], [0.3]]})
VISITS = pl.DataFrame(
    {"query_id": ["v1", "v1", "v2", "v2"], "item_id": ["a", "b", "a", "c"], "table": [[0.5], [0.4], [0.3], [0.2]]}
)


def block(queries: list[str], items: list[str], offsets: list[int]) -> Block:
    return Block(pa.table({"query_id": queries}), pa.table({"item_id": items}), np.array(offsets))


@pytest.fixture(scope="module")
def served() -> ServedVisits:
    """A day of a store, where the same apps come up again and again."""
    market = build_market(MarketConfig(users=100, apps=15, candidates=8, positions=5, random_days=1, visits=2))
    return serve(draw_requests(market, 1), by_chance, policy="random")


@pytest.fixture(scope="module")
def dataset(served: ServedVisits, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("truth") / "prepared"
    urank.prepare(urank.read(served.log), folder, valid=0.2, test=0.2)
    return Dataset(folder)


def test_items_with_ids_of_their_own_are_found_in_any_query() -> None:
    assert_array_equal(true_table(ITEMS)(block(["x", "q1"], ["c", "a", "b"], [0, 1, 3])), [[0.3], [0.5], [0.4]])


def test_where_an_item_has_several_tables_the_visit_decides() -> None:
    look_up = true_table(VISITS)
    assert_array_equal(look_up(block(["v2", "v1"], ["c", "a", "a"], [0, 2, 3])), [[0.2], [0.3], [0.5]])


def test_a_log_finds_its_own_truth_again(served: ServedVisits, dataset: Dataset) -> None:
    assert served.log["item_id"].n_unique() < served.log.height
    truth = with_table(served)
    look_up, rows = true_table(truth), 0
    names = {name: row for row, name in enumerate(served.log.select("query_id", "item_id").iter_rows())}
    for split in ("train", "valid", "test"):
        for each in dataset.blocks(split, ["item_id"]):
            shuffled = each.shuffled(np.random.default_rng(0))
            queries = np.repeat(each.lists["query_id"].to_pylist(), np.diff(each.offsets))
            expected = [names[pair] for pair in zip(queries, shuffled.items["item_id"].to_pylist(), strict=True)]
            assert_allclose(look_up(shuffled), served.table[expected], rtol=1e-6)
            relative = Known(look_up).examination(shuffled)
            assert_allclose(relative, (served.table / served.table[:, :1])[expected], rtol=1e-5)
            rows += len(expected)
    assert rows == served.log.height


def test_the_oracle_predicts_what_was_clicked(served: ServedVisits, dataset: Dataset) -> None:
    log_p, position, click = oracle_predictions(with_table(served), dataset, "train")
    assert len(log_p) == dataset.rows("train")
    expected = np.exp(log_p.astype(np.float64))
    assert abs(click.sum() - expected.sum()) < 4 * np.sqrt((expected * (1 - expected)).sum())
    assert expected[position == 1].mean() > 3 * expected[position == 5].mean()


def test_what_is_not_there_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the truth does not contain the item 'd' of the log; urank simulate"):
        true_table(ITEMS)(block(["q1"], ["a", "d"], [0, 2]))
    with pytest.raises(DataError, match="does not contain the item 'b' of query 'v2' of the log; urank appstore keeps"):
        true_table(VISITS)(block(["v1", "v2"], ["b", "b"], [0, 1, 2]))
    nameless = Block(pa.table({"query_id": ["v1"]}), pa.table({"position": [1]}), np.array([0, 1]))
    for truth in (ITEMS, VISITS):
        with pytest.raises(DataError, match="the truth is looked up by item_id, which the log does not have"):
            true_table(truth)(nameless)
    with pytest.raises(DataError, match=r"the truth has more than one table of the item 'a' of query 'v1'$"):
        true_table(pl.concat([VISITS, VISITS[:1]]))
    with pytest.raises(DataError, match=r"holds no truth: .* urank simulate or urank appstore"):
        read_truth(tmp_path)


# The true utility of evaluated policies

QUICK = QUICK_JUDGES.model_copy(update={"seed": 3})
K = 10


def test_true_utilities_of_an_evaluation(small: Small, fitted: ModelFit) -> None:
    policies = [ModelPolicy("score", fitted.model, "score"), Random()]
    found = evaluate_policies(policies, small.dataset, config=QUICK)
    true = true_utilities(found, policies, small.dataset, small.folder, seed=QUICK.seed)
    assert list(true) == ["logged", "score", "random"]
    for policy in (LoggedOrder(), *policies):
        by_cutoff = true[policy.name].by_cutoff
        assert list(by_cutoff) == [1, 3, 5, K]
        assert by_cutoff[K] == pytest.approx(true_utility(small, policy.positions), rel=1e-5)
        assert list(by_cutoff.values()) == sorted(by_cutoff.values())
    assert true["logged"].difference is None
    difference = true["score"].difference
    assert difference is not None
    assert difference.mean == pytest.approx(true["score"].by_cutoff[K] - true["logged"].by_cutoff[K])
    assert difference.n == found.queries
    document = add_true_utilities(found.to_dict(), true)
    assert [policy["true"]["10"] for policy in document["policies"]] == [each.by_cutoff[K] for each in true.values()]
    assert document["policies"][0]["true_difference"] is None
    assert document["policies"][1]["true_difference"]["mean"] == difference.mean
    reference = true_reference(true)
    assert reference.utility["score"] == true["score"].by_cutoff[K]
    assert reference.difference == {"score": difference.mean, "random": true["random"].difference.mean}  # type: ignore[union-attr]


def test_ties_are_broken_as_in_the_evaluation(small: Small) -> None:
    """A policy that cannot distinguish items keeps the shuffled order, which estimate and truth share."""
    seen: list[list[int]] = []

    class Tied(TableMatch):
        def positions(self, block: Block) -> np.ndarray:
            seen.append(block.column("position").tolist())
            return super().positions(block)

    policy = Tied("tied", lambda block: np.full((block.items.num_rows, K), 0.5), ("position",))
    found = evaluate_policies([policy], small.dataset, config=QUICK)
    true_utilities(found, [policy], small.dataset, small.folder, seed=QUICK.seed)
    assert len(seen) % 2 == 0
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_the_same_sample_of_the_queries(small: Small) -> None:
    rows = small.dataset.rows_of_query(SPLITS)
    by_query = query_bytes(2, 4, propensity=True) + rows * row_bytes(small.dataset)
    dataset = Dataset(small.dataset.folder, memory=Memory(round(4 * 100 * by_query)))
    found = evaluate_policies([Random()], dataset, splits=SPLITS, config=QUICK)
    true = true_utilities(found, [Random()], dataset, small.folder, seed=QUICK.seed)
    assert found.rows < found.all_rows
    assert true["random"].difference.n == found.queries  # type: ignore[union-attr]


def test_true_utilities_of_a_guard(small: Small, fitted: ModelFit) -> None:
    policy = ModelPolicy("score", fitted.model, "score")
    found = guard_levels(policy, small.dataset, levels=[1], config=QUICK)
    true = true_guard_utilities(found, policy, small.dataset, small.folder, seed=QUICK.seed)
    document = add_true_utilities(found.to_dict(), true)
    assert document["logged"]["true"] == {"10": true["logged"].by_cutoff[K]}
    assert [level["true"] for level in document["levels"]] == [each.by_cutoff[K] for each in list(true.values())[1:]]
    assert document["levels"][0]["true_difference"]["n"] == found.evaluation.queries


def test_a_truth_of_other_items(small: Small) -> None:
    found = evaluate_policies([], small.dataset, config=QUICK)
    with pytest.raises(DataError, match="the truth does not contain the item"):
        true_utilities(found, [], small.dataset, read_truth(small.folder).head(3))
