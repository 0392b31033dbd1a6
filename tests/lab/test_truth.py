"""The truth is found again for every item of a log, by its id or, where it depends on the visit, by both ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import urank
from urank.errors import DataError
from urank.lab.appstore import ServedVisits, by_chance, draw_requests, serve, with_table
from urank.lab.market import MarketConfig, build_market
from urank.lab.truth import oracle_predictions, read_truth, true_table
from urank.log.dataset import Block, Dataset
from urank.propensity.examination import Known

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
    with pytest.raises(DataError, match=r"^the truth does not know the item 'd' of the log$"):
        true_table(ITEMS)(block(["q1"], ["a", "d"], [0, 2]))
    with pytest.raises(DataError, match=r"^the truth does not know the item 'b' of query 'v2' of the log; urank appst"):
        true_table(VISITS)(block(["v1", "v2"], ["b", "b"], [0, 1, 2]))
    nameless = Block(pa.table({"query_id": ["v1"]}), pa.table({"position": [1]}), np.array([0, 1]))
    for truth in (ITEMS, VISITS):
        with pytest.raises(DataError, match=r"^the log does not name its items \(item_id\), so the truth cannot be"):
            true_table(truth)(nameless)
    with pytest.raises(DataError, match=r"^the truth has more than one table of the item 'a' of query 'v1'$"):
        true_table(pl.concat([VISITS, VISITS[:1]]))
    with pytest.raises(DataError, match="holds no truth: urank simulate and urank appstore write truth/candidates"):
        read_truth(tmp_path)
