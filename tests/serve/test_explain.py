"""What is said of a list: its click table, and the utility of every order of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from serve.cases import KINDS, candidates, lists_of, loaded, reader_of, saved
from urank.client.wire_schemas import Explanation
from urank.ranking.utility import utility, utility_of_items
from urank.serve.list_ranking import explain, rank_lists
from urank.serve.models import ActiveModels, load_served
from urank.serve.request_schemas import Problem

seeds = st.integers(0, 2**32 - 1)


def explained(kind: str, query: dict[str, Any], orders: dict[str, list[str]] | None = None) -> dict[str, Any]:
    model = loaded(kind)
    answer = explain(ActiveModels(model), lists_of(reader_of(model), [query]), orders or {})
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    return found


@given(st.sampled_from(KINDS), seeds, st.integers(1, 12), st.none() | st.integers(1, 9))
def test_utilities_are_those_of_the_table(kind: str, seed: int, count: int, asked: int | None) -> None:
    model, rng = loaded(kind), np.random.default_rng(seed)
    query = {"query_id": "q", "candidates": candidates(model, rng, count), "positions": asked}
    ids = [each["item_id"] for each in query["candidates"]]
    mine = [ids[place] for place in rng.permutation(count)[: rng.integers(1, count + 1)]]
    answer = explained(kind, query, {"mine": mine})
    msgspec.convert(answer, Explanation)
    places = min(asked or 5, 5)
    assert answer["positions"] == places
    assert [item["item_id"] for item in answer["items"]] == ids
    clicks = np.array([item["clicks"] for item in answer["items"]])
    value = np.array([item["value"] for item in answer["items"]])
    assert clicks.shape == (count, places)
    assert value.tolist() == [each.get("value", 1.0) for each in query["candidates"]]
    assert [order["name"] for order in answer["orders"]] == [*model.methods, "mine"]
    for order in answer["orders"]:
        positions = np.full(count, 100) + np.arange(count)  # without a place
        positions[[ids.index(each) for each in order["items"]]] = np.arange(1, len(order["items"]) + 1)
        wanted = utility(clicks[None], positions[None], value=value[None])[0]
        terms = utility_of_items(clicks[None], positions[None], value=value[None])[0]
        assert order["utility"] == pytest.approx(wanted, rel=1e-12)
        assert order["utilities"] == pytest.approx([terms[ids.index(each)] for each in order["items"]], rel=1e-12)
        assert len(order["items"]) == min(places, len(mine) if order["name"] == "mine" else count)
    by_name = {order["name"]: order for order in answer["orders"]}
    assert by_name["mine"]["items"] == mine[:places]
    for order in answer["orders"]:
        assert by_name["match"]["utility"] >= order["utility"] * (1 - 1e-6)


@given(st.sampled_from(KINDS), seeds, st.integers(1, 12), st.none() | st.integers(1, 5))
def test_it_is_what_ranking_shows(kind: str, seed: int, count: int, asked: int | None) -> None:
    model, rng = loaded(kind), np.random.default_rng(seed)
    query = {"query_id": "q", "candidates": candidates(model, rng, count), "positions": asked}
    answer = explained(kind, query)
    assert answer["model"] == model.version
    assert answer["method"] == model.method
    for order in answer["orders"]:
        lists = lists_of(reader_of(model), [{**query, "method": order["name"]}])
        (shown,) = rank_lists(ActiveModels(model), lists, exploration=None, rng=rng)
        ranked = msgspec.to_builtins(shown.answer(lists, "id"))
        assert [item["item_id"] for item in ranked["items"]] == order["items"]
        assert ranked["utility"] == pytest.approx(order["utility"])
        assert [item["utility"] for item in ranked["items"]] == pytest.approx(order["utilities"])
        rows = {item["item_id"]: item for item in answer["items"]}
        for item in ranked["items"]:
            assert item["probability"] == pytest.approx(rows[item["item_id"]]["clicks"][item["position"] - 1])
            assert item["score"] == (rows[item["item_id"]]["score"] if order["name"] == "score" else None)


def test_a_table_that_is_rounded_up_is_no_failure(tmp_path: Path) -> None:
    """A graph in 32 bits may say that a click is a little more than certain."""
    shutil.copytree(saved("numbers"), tmp_path / "model")
    graph = onnx.load(tmp_path / "model" / "clicks.onnx")
    above = helper.make_tensor("c", TensorProto.FLOAT, (2, 5), np.full(10, 5e-5, dtype=np.float32))
    del graph.graph.node[:], graph.graph.initializer[:]
    graph.graph.node.append(helper.make_node("Constant", [], [graph.graph.output[0].name], value=above))
    (tmp_path / "model" / "clicks.onnx").write_bytes(graph.SerializeToString())
    model = load_served(tmp_path / "model")
    query = {"query_id": "q", "candidates": candidates(model, np.random.default_rng(0), 2, values=False)}
    answer = explain(ActiveModels(model), lists_of(reader_of(model), [query]), {})
    assert [item.clicks for item in answer.items] == [(1.0,) * 5] * 2
    assert [order.utility for order in answer.orders] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("orders", "detail", "place"),
    [
        ({"mine": ["i000", "nobody"]}, "an order must consist of candidates", "orders.mine.1"),
        ({"mine": ["i000", "i001", "i000"]}, "an order must contain each candidate at most once", "orders.mine"),
        ({"fine": ["i000"], "match": ["i000"]}, "'match' is a method; an order needs another name", "orders.match"),
    ],
)
def test_orders_that_are_none(orders: dict[str, list[str]], detail: str, place: str) -> None:
    query = {"query_id": "q", "candidates": candidates(loaded("trees"), np.random.default_rng(0), 3)}
    with pytest.raises(Problem) as error:
        explained("trees", query, orders)
    assert (error.value.status, error.value.detail) == (422, detail)
    assert [at for at, _ in error.value.errors] == [place]


def test_the_name_of_a_method_that_the_model_lacks_is_free() -> None:
    query = {"query_id": "q", "candidates": candidates(loaded("numbers"), np.random.default_rng(0), 3)}
    assert [order["name"] for order in explained("numbers", query, {"score": ["i001"]})["orders"]] == [
        *("match", "ctr1", "score")
    ]
