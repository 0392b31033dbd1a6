"""Candidates of a request as arrays: every number exact, every refusal with its place."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cases import lists_of
from urank.log.columns import feature_expr
from urank.serve.request_arrays import MISSING, CandidateReader, RequestLists, category_text
from urank.serve.request_schemas import Problem, parse, request_types
from urank.serve.server_settings import Limits

NUMBERS = ("price", "age", "rate")
TEXTS = ("brand", "size")
LARGEST = float(np.finfo(np.float32).max)
FIRST_TOO_LARGE = LARGEST + 2.0**103  # half a step above the largest of 32 bits, which rounds up to infinity

numbers = st.none() | st.floats(-LARGEST, LARGEST, allow_subnormal=True) | st.integers(-(2**70), 2**70).map(float)
texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def reader(numeric: tuple[str, ...] = NUMBERS, categorical: tuple[str, ...] = TEXTS, **options: Any) -> CandidateReader:
    limits = Limits(**options.pop("limits", {}))
    return CandidateReader(numeric, categorical, limits, **options)


def candidate(item: str = "a", **features: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"price": 1.0, "age": 2.0, "rate": 3.0, "brand": "x", "size": "y"}
    return {"item_id": item, "features": defaults | features}


def query(*candidates: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"query_id": "q", "candidates": list(candidates), **settings}


def refusal(found: CandidateReader, *queries: dict[str, Any], batch: bool = False) -> Problem:
    with pytest.raises(Problem) as error:
        lists_of(found, queries, batch=batch)
    assert error.value.status == 422
    return error.value


def places(problem: Problem) -> list[str]:
    return [place for place, _ in problem.errors]


@given(st.lists(st.tuples(numbers, numbers, numbers, texts, texts), min_size=1, max_size=8), st.randoms())
def test_features_become_arrays(rows: list[tuple[Any, ...]], random: Any) -> None:
    """In the order of the model, whatever that of the request; a number is the nearest of 32 bits."""
    names = [*NUMBERS, *TEXTS]
    candidates = []
    for number, row in enumerate(rows):
        pairs = list(zip(names, row, strict=True))
        random.shuffle(pairs)
        candidates.append({"item_id": str(number), "features": dict(pairs)})
    items = lists_of(reader(), [query(*candidates)]).items
    wanted = np.array([[np.nan if each is None else each for each in row[:3]] for row in rows]).astype(np.float32)
    np.testing.assert_array_equal(items.numeric, wanted)
    assert items.numeric.dtype == np.float32
    assert items.categorical.tolist() == [[MISSING if each is None else each for each in row[3:]] for row in rows]
    assert items.value.tolist() == [1.0] * len(rows)
    assert items.offsets.tolist() == [0, len(rows)]


def test_what_belongs_to_lists() -> None:
    first = query(candidate("a") | {"value": 2.5}, candidate("b"), user_id="u", positions=3, method="match")
    lists = lists_of(reader(), [first, query(candidate("a")) | {"query_id": "r"}])
    assert len(lists) == 2
    assert (lists.query_ids, lists.user_ids) == (["q", "r"], ["u", None])
    assert (lists.positions, lists.methods) == ([3, None], ["match", None])
    assert (lists.item_ids, lists.has_values) == (["a", "b", "a"], (True, False))
    assert lists.items.value.tolist() == [2.5, 1.0, 1.0]
    assert lists.items.offsets.tolist() == [0, 2, 3]


def test_the_list_to_explain() -> None:
    body = msgspec.json.encode({"candidates": [candidate("a")], "positions": 4})
    lists = reader().lists([parse(request_types(NUMBERS, TEXTS, Limits()).explain, body)], batch=False)
    assert (lists.query_ids, lists.positions, lists.item_ids) == ([""], [4], ["a"])


def columns_of(*candidates: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The same list as columns."""
    names = candidates[0]["features"]
    columns = {name: [each["features"][name] for each in candidates] for name in names}
    ids = [each["item_id"] for each in candidates]
    return {"query_id": "q", "item_id": ids, "features": columns, **settings}


def same(one: RequestLists, other: RequestLists) -> None:
    np.testing.assert_array_equal(one.items.numeric, other.items.numeric)
    assert one.items.categorical.tolist() == other.items.categorical.tolist()
    assert one.items.value.tolist() == other.items.value.tolist()
    assert (one.item_ids, one.has_values) == (other.item_ids, other.has_values)


@given(st.lists(st.tuples(numbers, numbers, numbers, texts, texts), min_size=1, max_size=8))
def test_columns_are_the_same_list(rows: list[tuple[Any, ...]]) -> None:
    names = [*NUMBERS, *TEXTS]
    made = [{"item_id": str(k), "features": dict(zip(names, row, strict=True))} for k, row in enumerate(rows)]
    same(lists_of(reader(), [columns_of(*made)]), lists_of(reader(), [query(*made)]))
    valued = [each | {"value": float(k)} for k, each in enumerate(made)]
    columns = columns_of(*made, value=[float(k) for k in range(len(made))])
    same(lists_of(reader(), [columns, columns_of(*made)]), lists_of(reader(), [query(*valued), query(*made)]))


@given(st.lists(st.tuples(numbers, numbers, numbers, texts, texts), min_size=1, max_size=6), st.data())
def test_a_context_is_the_same_for_all(rows: list[tuple[Any, ...]], data: Any) -> None:
    """In both forms; what an item has itself comes first."""
    names = [*NUMBERS, *TEXTS]
    context = dict(zip(names, data.draw(st.tuples(numbers, numbers, numbers, texts, texts)), strict=True))
    absent = data.draw(st.lists(st.sets(st.sampled_from(names)), min_size=len(rows), max_size=len(rows)))
    whole, partial = [], []
    for number, (row, without) in enumerate(zip(rows, absent, strict=True)):
        features = dict(zip(names, row, strict=True))
        given_ = {name: each for name, each in features.items() if name not in without}
        whole.append({"item_id": str(number), "features": context | given_})
        partial.append({"item_id": str(number)} | ({"features": given_} if given_ else {}))
    same(lists_of(reader(), [query(*partial, context=context)]), lists_of(reader(), [query(*whole)]))
    for_all = data.draw(st.sets(st.sampled_from(names)))
    columns = columns_of(*whole, context=context)
    columns["features"] = {name: each for name, each in columns["features"].items() if name not in for_all}
    wanted = [{**each, "features": each["features"] | {name: context[name] for name in for_all}} for each in whole]
    same(lists_of(reader(), [columns]), lists_of(reader(), [query(*wanted)]))


def test_columns_that_are_refused() -> None:
    good = columns_of(candidate("a"), candidate("b"))
    changed: list[tuple[dict[str, Any], str]] = [
        ({"features": good["features"] | {"age": [1.0]}}, "features.age"),
        ({"features": good["features"] | {"size": ["x"] * 3}}, "features.size"),
        ({"features": good["features"] | {"age": [1.0, 1e39]}}, "features.age"),
        ({"value": [1.0]}, "value"),
        ({"item_id": ["a", "a"]}, "item_id.1"),
        ({"candidates": [candidate("a")]}, "item_id"),
        ({"context": {"age": -1e39}}, "context.age"),
        ({"features": {name: each for name, each in good["features"].items() if name != "age"}}, "features.age"),
    ]
    for change, place in changed:
        assert places(refusal(reader(), good | change)) == [place]
        assert places(refusal(reader(), good, good | change, batch=True)) == [f"queries.1.{place}"]
    assert places(refusal(reader(), {"query_id": "q"})) == ["candidates"]
    assert places(refusal(reader(), {"query_id": "q", "features": good["features"]})) == ["candidates"]
    assert len(refusal(reader(), {"query_id": "q", "item_id": ["a"]}).errors) == 5


@pytest.mark.parametrize("categorical", [TEXTS, ()])
@pytest.mark.parametrize("size", [FIRST_TOO_LARGE, 1e39, -1e39, 1e300, -FIRST_TOO_LARGE])
def test_numbers_that_do_not_fit_are_refused(categorical: tuple[str, ...], size: float) -> None:
    found = reader(categorical=categorical)
    good = {name: value for name, value in candidate()["features"].items() if name in (*NUMBERS, *categorical)}
    bad = {"item_id": "b", "features": good | {"age": size}}
    problem = refusal(found, query({"item_id": "a", "features": good}, bad))
    assert problem.errors == [("candidates.1.features.age", "must be a number that fits 32 bits, or null")]


def test_the_largest_that_fits_is_not() -> None:
    just_below = float(np.nextafter(FIRST_TOO_LARGE, 0))
    items = lists_of(reader(), [query(candidate(price=just_below, age=LARGEST, rate=-LARGEST))]).items
    assert items.numeric.tolist() == [[LARGEST, LARGEST, -LARGEST]]


def test_features_that_lack() -> None:
    few = candidate("b")
    del few["features"]["age"], few["features"]["size"]
    assert refusal(reader(), query(candidate("a"), few)).errors == [
        ("candidates.1.features.age", "is required; send null if it is missing"),
        ("candidates.1.features.size", "is required; send null if it is missing"),
    ]
    assert len(refusal(reader(), query({"item_id": "a"})).errors) == 5


def test_places_in_a_batch() -> None:
    good, bad = query(candidate("a")), query(candidate("a"), candidate("b", rate=1e39))
    assert places(refusal(reader(), good, bad, batch=True)) == ["queries.1.candidates.1.features.rate"]
    assert places(refusal(reader(), bad, batch=True)) == ["queries.0.candidates.1.features.rate"]
    twice = query(candidate("a"), candidate("b"), candidate("a"))
    problem = refusal(reader(), good, twice, batch=True)
    assert problem.errors == [("queries.1.candidates.2.item_id", "is the same as queries.1.candidates.0.item_id")]
    assert places(refusal(reader(), twice)) == ["candidates.2.item_id"]


def test_unknown_features_may_be_ignored() -> None:
    found = reader(ignore_unknown=True)
    items = lists_of(found, [query(candidate(colour="red", weight=True))]).items
    assert items.numeric.tolist() == [[1.0, 2.0, 3.0]]
    few = candidate(colour="red")
    del few["features"]["age"]
    assert refusal(found, query(few)).errors == [
        ("candidates.0.features.age", "is required; send null if it is missing")
    ]


def test_limits() -> None:
    three = [candidate(str(k)) for k in range(3)]
    found = reader(limits={"candidates": 3, "queries": 2, "rows": 5})
    assert len(lists_of(found, [query(*three), query(*three[:2])]).items) == 5
    assert "at most 3 candidates; got 4" in refusal(found, query(*three, candidate("more"))).detail
    assert "a batch has at most 5 candidates in total; got 6" in refusal(found, query(*three), query(*three)).detail
    assert "a batch has at most 2 queries; got 3" in refusal(found, *[query(*three[:1])] * 3).detail


@given(st.integers(-(2**63) + 1, 2**63 - 1) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False))
def test_categories_are_called_as_in_a_log(value: float) -> None:
    """Where the same category is a number in a log and in a request, it is one category."""
    frame = pl.DataFrame({"c": [value]})
    in_log = frame.select(feature_expr("c", "c", None, frame.dtypes[0], categorical=True)).item()
    assert category_text(value) == in_log
    lists = lists_of(CandidateReader((), ("c",), Limits()), [query({"item_id": "a", "features": {"c": value}})])
    assert lists.items.categorical.tolist() == [[in_log]]
