"""Rankings of a request: each list by the model of its arm, what is shown, what is logged, and chance only if asked."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cases import KINDS, candidates, frame, lists_of, loaded, ranker, reader_of, saved
from urank.abtest.exposures import assign_arms
from urank.client.wire_schemas import Ranking
from urank.ranking.utility import utility
from urank.serve.feedback_records import new_home, new_ranking_id
from urank.serve.list_ranking import Exploration, RankedList, log_columns, log_record, rank_lists, shadow_orders
from urank.serve.models import ActiveModels, UserSplit
from urank.serve.request_arrays import MISSING, RequestLists
from urank.serve.request_schemas import Problem

seeds = st.integers(0, 2**32 - 1)
METHODS = ("score", "match", "ctr1")


def two_models(share: float = 0.5, name: str = "test") -> ActiveModels:
    """Arm A has trees on features of both kinds, arm B a click model on numbers alone; the silent one is a third."""
    test = UserSplit(saved("numbers"), share, name)
    return ActiveModels(loaded("trees"), loaded("network"), loaded("numbers"), test)


def queries_for(
    served: ActiveModels, rng: np.random.Generator, lengths: list[int], **settings: Any
) -> list[dict[str, Any]]:
    made = []
    for number, length in enumerate(lengths):
        query = {"query_id": f"q{number}", "candidates": candidates(served.main, rng, length), **settings}
        if served.test is not None:
            query["user_id"] = f"u{rng.integers(10**6)}"
        made.append(query)
    return made


def ranked(
    served: ActiveModels, queries: list[dict[str, Any]], exploration: Exploration | None = None, seed: int = 0
) -> tuple[RequestLists, list[RankedList], list[dict[str, Any]]]:
    lists = lists_of(reader_of(served), queries)
    shown = rank_lists(served, lists, exploration=exploration, rng=np.random.default_rng(seed))
    answers = [msgspec.to_builtins(each.answer(lists, "id")) for each in shown]
    for answer in answers:
        msgspec.convert(answer, Ranking)
    return lists, shown, answers


@given(
    st.sampled_from(KINDS), seeds, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.none() | st.integers(1, 8)
)
def test_utility_is_that_of_the_order(kind: str, seed: int, lengths: list[int], asked: int | None) -> None:
    """Σ click · value, against `urank.ranking.utility`; items beyond the last known position earn 0."""
    model, rng = loaded(kind), np.random.default_rng(seed)
    queries = queries_for(ActiveModels(model), rng, lengths, positions=asked)
    lists, shown, answers = ranked(ActiveModels(model), queries)
    table = np.exp(model.log_ctr(lists.items).astype(np.float64))
    for query, each, answer, (start, end) in zip(
        queries, shown, answers, pairwise(lists.items.offsets.tolist()), strict=True
    ):
        ids = [candidate["item_id"] for candidate in query["candidates"]]
        positions = np.full(len(ids), 10_000) + np.arange(len(ids))
        for item in answer["items"]:
            positions[ids.index(item["item_id"])] = item["position"]
        value = lists.items.value[None, start:end].astype(np.float64)
        wanted = utility(table[None, start:end], positions[None], value=value)[0]
        assert answer["utility"] == pytest.approx(wanted, rel=1e-6, abs=1e-12)
        assert answer["utility"] == pytest.approx(sum(item["utility"] for item in answer["items"]))
        assert each.policy == answer["model"] == model.version
        assert answer["query_id"] == query["query_id"]
        for item in answer["items"]:
            known = item["position"] <= model.positions
            assert (item["probability"] is not None) == known
            assert known or item["utility"] == 0


@given(st.sampled_from(KINDS), seeds, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_batch_is_its_queries(kind: str, seed: int, lengths: list[int]) -> None:
    """With a method and positions of their own. Chances may differ in the last digits, and so the order of equals."""
    model, rng = loaded(kind), np.random.default_rng(seed)
    queries = queries_for(ActiveModels(model), rng, lengths)
    for query in queries:
        query["positions"] = int(rng.integers(1, 9))
        query["method"] = str(rng.choice(model.methods))
    together = ranked(ActiveModels(model), queries)[2]
    alone = [ranked(ActiveModels(model), [query])[2][0] for query in queries]
    for query, one, other in zip(queries, together, alone, strict=True):
        kinds = {each["item_id"]: (each["features"], each.get("value", 1.0)) for each in query["candidates"]}
        assert {**one, "utility": 0, "items": 0} == {**other, "utility": 0, "items": 0}
        assert one["utility"] == pytest.approx(other["utility"], rel=1e-5, abs=1e-7)
        assert [item["position"] for item in one["items"]] == [item["position"] for item in other["items"]]
        if query["method"] == "score" or len(set(map(str, kinds.values()))) == len(kinds):
            assert _sorted_alike(one, other)


def _sorted_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same items in the same places, but for places where they are as good."""
    pairs = zip(one["items"], other["items"], strict=True)
    return all(a["item_id"] == b["item_id"] or a["utility"] == pytest.approx(b["utility"], abs=1e-5) for a, b in pairs)


@given(seeds, st.floats(0.05, 0.95), st.text(min_size=1, max_size=5), st.integers(1, 30))
def test_arms_are_those_of_assign_arms(seed: int, share: float, name: str, count: int) -> None:
    served, rng = two_models(share, name), np.random.default_rng(seed)
    queries = queries_for(served, rng, [2] * count)
    _, shown, answers = ranked(served, queries)
    users = pl.Series([query["user_id"] for query in queries])
    wanted = assign_arms(users, {"A": 1 - share, "B": share}, salt=name).to_list()
    assert [answer["arm"] for answer in answers] == wanted
    assert [each.number for each in shown] == list(range(count))
    versions = {"A": loaded("trees").version, "B": loaded("numbers").version}
    assert [answer["model"] for answer in answers] == [versions[arm] for arm in wanted]
    methods = {"A": "score", "B": "match"}
    assert [answer["method"] for answer in answers] == [methods[arm] for arm in wanted]


@given(seeds, st.lists(st.integers(1, 8), min_size=2, max_size=12))
def test_each_arm_ranks_as_its_model_does(seed: int, lengths: list[int]) -> None:
    """Two models with different features: requests bring all of them, each model sees its own."""
    served, rng = two_models(), np.random.default_rng(seed)
    assert set(served.numeric) == {feature.name for feature in loaded("trees").featurizer.numeric}
    queries = queries_for(served, rng, lengths)
    _, _, answers = ranked(served, queries)
    for query, answer in zip(queries, answers, strict=True):
        kind = {"A": "trees", "B": "numbers"}[answer["arm"]]
        names = [feature.name for feature in loaded(kind).featurizer.numeric]
        names += [feature.name for feature in loaded(kind).featurizer.categorical]
        own = [{**each, "features": {name: each["features"][name] for name in names}} for each in query["candidates"]]
        (wanted,) = ranked(ActiveModels(loaded(kind)), [{"query_id": query["query_id"], "candidates": own}])[2]
        assert answer == {**wanted, "arm": answer["arm"]}


def test_a_test_needs_to_know_the_user() -> None:
    queries = queries_for(two_models(), np.random.default_rng(0), [2, 2])
    del queries[1]["user_id"]
    with pytest.raises(Problem) as error:
        ranked(two_models(), queries)
    assert (error.value.status, error.value.errors) == (422, [("queries.1.user_id", "is required")])


def test_a_method_that_the_model_of_the_arm_lacks() -> None:
    served = two_models()
    queries = queries_for(served, np.random.default_rng(0), [2] * 20, method="score")
    arms = [answer["arm"] for answer in ranked(served, [{**query, "method": None} for query in queries])[2]]
    with pytest.raises(Problem) as error:
        ranked(served, queries)
    assert error.value.status == 422
    assert error.value.detail == "the model ranks by match, ctr1; got 'score'"
    assert error.value.errors == [(f"queries.{arms.index('B')}.method", "is not available")]


@given(seeds, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.none() | st.integers(1, 7))
def test_the_silent_model_is_not_heard(seed: int, lengths: list[int], asked: int | None) -> None:
    """What it would show is what it shows when it is asked, and as many; what is shown is not changed by it."""
    rng = np.random.default_rng(seed)
    served = ActiveModels(loaded("trees"), loaded("network"))
    queries = queries_for(served, rng, lengths, positions=asked)
    lists, shown, answers = ranked(served, queries)
    assert answers == ranked(ActiveModels(loaded("trees")), queries)[2]
    wanted = ranked(ActiveModels(loaded("network")), queries)[2]
    assert shadow_orders(served, lists, shown) == [[item["item_id"] for item in each["items"]] for each in wanted]


def test_shadow_orders_belong_to_their_lists_in_a_mixed_batch() -> None:
    """Lists with the same method and number of positions are ranked together, out of their order."""
    served = ActiveModels(loaded("trees"), loaded("network"))
    queries = queries_for(served, np.random.default_rng(1), [4, 5, 6, 7])
    for query, positions in zip(queries, (2, 3, 2, 3), strict=True):
        query["positions"] = positions
        for candidate in query["candidates"]:
            candidate["item_id"] = f"{query['query_id']}-{candidate['item_id']}"
    lists, shown, _ = ranked(served, queries)
    orders = shadow_orders(served, lists, shown)
    assert [{item.split("-")[0] for item in order} for order in orders] == [{q["query_id"]} for q in queries]


@pytest.mark.parametrize(
    ("kind", "method"), [(kind, method) for kind in KINDS for method in METHODS[kind in ("clicks", "numbers") :]]
)
def test_without_exploration_it_is_what_the_model_itself_ranks(kind: str, method: Any) -> None:
    rng = np.random.default_rng(11)
    queries = queries_for(ActiveModels(loaded(kind)), rng, [7] * 20, method=method)
    _, _, answers = ranked(ActiveModels(loaded(kind)), queries)
    best = ranker(kind).rank(frame(queries), method=method, top=5)
    for answer in answers:
        want = best.filter(query_id=answer["query_id"])
        assert answer["utility"] == pytest.approx(want["utility"].sum(), rel=1e-5, abs=1e-7)


@given(seeds, st.sampled_from(["swap", "shuffle"]), st.integers(1, 9), st.none() | st.integers(1, 7))
def test_exploration_moves_what_is_shown_and_nothing_else(seed: int, kind: Any, count: int, asked: int | None) -> None:
    model, exploration = loaded("trees"), Exploration(kind, 0.5)
    queries = queries_for(ActiveModels(model), np.random.default_rng(seed), [count] * 8, positions=asked)
    plain = ranked(ActiveModels(model), queries)[2]
    lists, shown, answers = ranked(ActiveModels(model), queries, exploration, seed)
    columns = log_columns(ActiveModels(model), lists, exploration)
    assert columns.explored
    for answer, before, each in zip(answers, plain, shown, strict=True):
        ids, old = ([item["item_id"] for item in found["items"]] for found in (answer, before))
        assert sorted(ids) == sorted(old)
        assert [old[rank - 1] for rank in each.ranks.tolist()] == ids
        assert answer["policy"] in (model.version, f"{model.version}+{kind}")
        if answer["policy"] == model.version:
            assert answer == before
        record = log_record(
            each, lists, columns, ranking_id=new_ranking_id(new_home(0), 1), exploration=exploration, time_us=1
        )
        assert record.propensity is not None
        assert record.propensity.tolist() == exploration.propensities(each.ranks).tolist()
        assert record.ranked_position == tuple(each.ranks.tolist())


def test_what_is_logged_is_what_was_sent() -> None:
    served, rng = ActiveModels(loaded("trees")), np.random.default_rng(3)
    queries = queries_for(served, rng, [6, 4], positions=3, user_id="u")
    lists, shown, answers = ranked(served, queries)
    columns = log_columns(served, lists, None)
    assert (columns.numeric, columns.categorical) == (served.numeric, served.categorical)
    assert (columns.value, columns.explored) == (True, False)
    for query, each, answer in zip(queries, shown, answers, strict=True):
        sent = {candidate["item_id"]: candidate for candidate in query["candidates"]}
        record = log_record(
            each, lists, columns, ranking_id=new_ranking_id(new_home(0), 1), exploration=None, time_us=5
        )
        assert record.items == tuple(item["item_id"] for item in answer["items"])
        assert (record.query_id, record.user_id, record.arm, record.time_us) == (query["query_id"], "u", None, 5)
        assert (record.model, record.policy) == (answer["model"], answer["policy"])
        assert (record.propensity, record.ranked_position) == (None, None)
        assert record.value is not None
        for place, item in enumerate(record.items):
            features = sent[item]["features"]
            numbers = [np.nan if features[name] is None else np.float32(features[name]) for name in served.numeric]
            np.testing.assert_array_equal(record.numeric[place], np.array(numbers, dtype=np.float32))
            assert record.categorical[place] == tuple(features[name] for name in served.categorical)
            assert record.value[place] == np.float32(sent[item].get("value", 1.0))
            assert MISSING not in record.categorical[place]


def test_values_are_logged_where_there_are_some() -> None:
    rng = np.random.default_rng(3)
    served = ActiveModels(loaded("numbers"))
    for values in (True, False):
        query = {"query_id": "q", "candidates": candidates(served.main, rng, 30, values=values)}
        lists = lists_of(reader_of(served), [query])
        assert log_columns(served, lists, None).value == values
