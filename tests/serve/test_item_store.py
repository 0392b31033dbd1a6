"""Features of items that the server holds: what requests may leave out, and how the items are kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from serve.cases import client, frame, items_file, lists_of, loaded, reader_of, saved
from serve.server import running
from urank.client import Client
from urank.errors import DataError, UrankError
from urank.serve.item_store import ItemStore, load_items, put_items
from urank.serve.models import ActiveModels
from urank.serve.request_arrays import ARROW_TYPE, MISSING, CandidateReader, read_arrow
from urank.serve.request_schemas import Problem
from urank.serve.server_settings import Limits

KEY = "a-key-of-the-tests-0123"
RIGHT = {"x-api-key": KEY}


def rows(path: Path) -> list[dict[str, Any]]:
    """The items of a file as candidates."""
    table = pl.read_parquet(path)
    names = [name for name in table.columns if name not in ("item_id", "value")]
    return [{"item_id": row["item_id"], "features": {name: row[name] for name in names}} for row in table.to_dicts()]


def holding(path: Path, **settings: Any) -> CandidateReader:
    active = ActiveModels(loaded("trees"))
    items = load_items(path, active.numeric, active.categorical, MISSING)
    return CandidateReader(active.numeric, active.categorical, Limits(), items=items, **settings)


def held(path: Path) -> ItemStore:
    store = holding(path).items
    assert store is not None
    return store


def test_ids_stand_for_features(tmp_path: Path) -> None:
    """In every form, and whatever the order of the columns; what a request has itself comes first."""
    path = items_file(tmp_path)
    chosen = rows(path)[::-2]
    ids = [each["item_id"] for each in chosen]
    plain, reader = reader_of(loaded("trees")), holding(path)
    wanted = lists_of(plain, [{"query_id": "q", "candidates": chosen}]).items
    for body in ({"item_id": ids}, {"candidates": [{"item_id": each} for each in ids]}):
        found = lists_of(reader, [{"query_id": "q", **body}]).items
        np.testing.assert_array_equal(found.numeric, wanted.numeric)
        assert found.categorical.tolist() == wanted.categorical.tolist()
    changed = [{**each, "features": each["features"] | {"price": 7.0, "shop": "new"}} for each in chosen]
    changed[1]["features"]["price"] = None
    wanted = lists_of(plain, [{"query_id": "q", "candidates": changed}]).items
    own = [{"item_id": each} for each in ids]
    own[1]["features"] = {"price": None}
    prices = [7.0] * len(ids)
    prices[1] = None
    for body in (
        {"candidates": own, "context": {"price": 7, "shop": "new"}},
        {"item_id": ids, "features": {"price": prices}, "context": {"shop": "new"}},
    ):
        found = lists_of(reader, [{"query_id": "q", **body}]).items
        np.testing.assert_array_equal(found.numeric, wanted.numeric)
        assert found.categorical.tolist() == wanted.categorical.tolist()


def test_a_file_may_have_some_features_in_any_order_and_values(tmp_path: Path) -> None:
    path = items_file(tmp_path)
    table = pl.read_parquet(path).select("2nd rate", "if", "item_id", "price", value=pl.int_range(pl.len()))
    table.write_parquet(path)
    reader, ids = holding(path), ["i003", "i000"]
    with pytest.raises(Problem) as error:
        lists_of(reader, [{"query_id": "q", "item_id": ids}])
    assert [at for at, _ in error.value.errors] == ["queries.0.features.emb[0]", "queries.0.features.shop"]
    context = {"emb[0]": 0.5, "shop": None}
    found = lists_of(reader, [{"query_id": "q", "item_id": ids, "context": context}])
    wanted = table[[3, 0]]
    np.testing.assert_array_equal(found.items.numeric[:, 0], wanted["price"].cast(pl.Float32).fill_null(np.nan))
    np.testing.assert_array_equal(found.items.numeric[:, 2], wanted["2nd rate"].cast(pl.Float32).fill_null(np.nan))
    assert found.items.numeric[:, 1].tolist() == [0.5, 0.5]
    assert found.items.categorical.tolist() == [[MISSING, each] for each in wanted["if"].fill_null(MISSING)]
    assert (found.items.value.tolist(), found.has_values) == ([3.0, 0.0], (True,))
    given = [{"item_id": "i003", "value": 8}, {"item_id": "i000"}]
    found = lists_of(reader, [{"query_id": "q", "candidates": given, "context": context}])
    assert found.items.value.tolist() == [8.0, 0.0]


def test_unknown_items(tmp_path: Path) -> None:
    path = items_file(tmp_path)
    query = {"query_id": "q", "item_id": ["i001", "new", "i002"]}
    with pytest.raises(Problem) as error:
        lists_of(holding(path), [query])
    assert "'new'" in error.value.detail
    assert error.value.errors == [("queries.0.item_id.1", "is unknown")]
    found = lists_of(holding(path, rank_unknown=True), [query | {"context": {"price": 2.5}}]).items
    assert np.isnan(found.numeric[1]).tolist() == [False, True, True]
    assert found.numeric[:, 0].tolist() == [2.5] * 3
    assert found.categorical[1].tolist() == [MISSING, MISSING]
    complete = rows(path)[0] | {"item_id": "new"}  # whose features are all in the request
    assert len(lists_of(holding(path), [{"query_id": "q", "candidates": [complete]}]).items) == 1


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"item_id": pl.lit("same")}, "each item must occur once"),
        ({"item_id": pl.lit("")}, "item_id must have 1 to 512 characters"),
        ({"item_id": pl.lit(None, pl.String)}, "item_id must have 1 to 512 characters"),
        ({"price": pl.lit(1e39)}, "price must be finite"),
        ({"price": pl.lit("cheap")}, "cannot be used"),
        ({"value": pl.lit(-1.0)}, "value must be from 0 to 1e+30"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    path = items_file(tmp_path, **columns)
    with pytest.raises(DataError) as error:
        holding(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_no_file_and_no_items(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be used"):
        holding(tmp_path / "absent.parquet")
    path = items_file(tmp_path)
    pl.read_parquet(path).clear().write_parquet(path)
    with pytest.raises(DataError, match="has no items"):
        holding(path)


def test_the_mapped_copy_follows_the_file(tmp_path: Path) -> None:
    path, mapped = items_file(tmp_path), tmp_path / ".items.parquet.arrow"
    first = held(path)
    before = mapped.stat()
    np.testing.assert_array_equal(held(path).numeric, first.numeric)
    assert mapped.stat().st_mtime_ns == before.st_mtime_ns  # not written again
    items_file(tmp_path, seed=4)
    second = held(path)
    assert not np.array_equal(second.numeric, first.numeric, equal_nan=True)
    (tmp_path / "damaged").write_bytes(mapped.read_bytes()[:1_000])
    (tmp_path / "damaged").replace(mapped)
    np.testing.assert_array_equal(held(path).numeric, second.numeric)


def test_a_broken_file_leaves_the_items_of_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also at a start: a worker that is replaced must not end the server."""
    path = items_file(tmp_path)
    before = held(path)
    for content in (b"broken", b""):
        path.write_bytes(content)
        np.testing.assert_array_equal(held(path).numeric, before.numeric)
        assert "the items of before stay" in caplog.text
        caplog.clear()
    with client("trees", items=path, key=KEY, headers=RIGHT) as http:
        assert http.post("/v1/rank", json={"query_id": "q", "item_id": ["i001"]}).status_code == 200
        answer = http.put("/v1/items", json={"items": [{"item_id": "a"}]})
        assert (answer.status_code, "nothing is acknowledged" in answer.json()["detail"]) == (503, True)
    assert path.read_bytes() == b""
    items_file(tmp_path, seed=4)
    assert not np.array_equal(held(path).numeric, before.numeric, equal_nan=True)


def test_put_items_adds_and_replaces(tmp_path: Path) -> None:
    path = items_file(tmp_path)
    before = {each["item_id"]: each["features"] for each in rows(path)}
    new = pl.DataFrame({"item_id": ["i001", "new"], "price": [1.5, 2.5], "shop": ["a", None]})
    stored = put_items(path, new, 100)
    assert (stored.added, stored.replaced, stored.items) == (1, 1, 21)
    after = {each["item_id"]: each["features"] for each in rows(path)}
    absent = {"emb[0]": None, "2nd rate": None, "if": None}
    assert after["i001"] == {"price": 1.5, "shop": "a"} | absent
    assert after["new"] == {"price": 2.5, "shop": None} | absent
    assert {key: each for key, each in after.items() if key not in ("i001", "new")} == {
        key: each for key, each in before.items() if key != "i001"
    }
    with pytest.raises(DataError, match="at most 21 items"):
        put_items(path, new.with_columns(item_id=pl.lit("more") + pl.col("item_id")), 21)
    assert len(rows(path)) == 21


def test_put_and_rank(tmp_path: Path) -> None:
    path = items_file(tmp_path)
    items = rows(path)
    with client("trees", items=path, key=KEY, headers=RIGHT) as http:
        assert http.get("/v1/model").json()["items"] == 20
        by_id = http.post("/v1/rank", json={"query_id": "q", "item_id": [each["item_id"] for each in items]}).json()
        whole = http.post("/v1/rank", json={"query_id": "q", "candidates": items}).json()
        assert by_id["items"] == whole["items"]
        explained = http.post("/v1/explain", json={"item_id": ["i000", "i001"], "orders": {"mine": ["i001"]}})
        assert explained.status_code == 200
        batch = http.post("/v1/rank", json={"queries": [{"query_id": "q", "item_id": ["i003"]}]})
        assert batch.json()["rankings"][0]["items"][0]["item_id"] == "i003"
        assert http.post("/v1/rank", json={"query_id": "q", "item_id": ["new"]}).status_code == 422
        new = items[0] | {"item_id": "new"}
        assert http.put("/v1/items", json={"items": [new]}).json() == {"added": 1, "replaced": 0, "items": 21}
        ranked = http.post("/v1/rank", json={"query_id": "q", "item_id": ["new"]}).json()["items"]
        alone = http.post("/v1/rank", json={"query_id": "q", "candidates": [new]}).json()["items"]
        assert ranked == alone
        table = frame([{"query_id": "q", "candidates": [new | {"item_id": "newer"}]}]).drop("query_id").to_arrow()
        body = stream_of(table)
        answer = http.put("/v1/items", content=body, headers={"content-type": ARROW_TYPE})
        assert answer.json() == {"added": 1, "replaced": 0, "items": 22}
        again = http.post("/v1/rank", json={"query_id": "q", "item_id": ["newer"]}).json()["items"]
        assert [each | {"item_id": "new"} for each in again] == ranked


def test_items_that_are_refused(tmp_path: Path) -> None:
    path = items_file(tmp_path)
    before = path.read_bytes()
    with client("trees", items=path, key=KEY, headers=RIGHT, limits=Limits(items=20)) as http:
        item = {"item_id": "a", "features": {"price": 1.0}}
        for wrong, place in (
            ({"items": [item, item]}, "item_id"),
            ({"items": [{"features": {}}]}, "items.0.item_id"),
            ({"items": [item | {"features": {"colour": 1}}]}, "items.0.features.colour"),
            ({"items": [item | {"features": {"price": 1e39}}]}, "items.0.features.price"),
            ({"items": [item | {"features": {"price": "1"}}]}, "items.0.features.price"),
            ({"items": [item | {"value": -1}]}, "items.0.value"),
            ({"items": []}, "items"),
        ):
            answer = http.put("/v1/items", json=wrong)
            assert (answer.status_code, answer.json()["errors"][0]["at"]) == (422, place)
        answer = http.put("/v1/items", json={"items": [item]})
        assert (answer.status_code, "at most 20 items" in answer.json()["detail"]) == (422, True)
        assert http.put("/v1/items", content=b"x", headers={"content-type": ARROW_TYPE}).status_code == 400
        assert http.put("/v1/items", json={"items": [item]}, headers={"x-api-key": "wrong"}).status_code == 401
    assert path.read_bytes() == before
    with client("trees", items=path) as http:
        assert http.put("/v1/items", json={"items": [item]}).status_code == 403
    with client("trees", key=KEY, headers=RIGHT) as http:
        assert http.put("/v1/items", json={"items": [item]}).status_code == 409


def until(condition: Any) -> None:
    last = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.05)


@pytest.mark.slow
def test_all_workers_and_restarts_see_the_items(tmp_path: Path) -> None:
    """By PUT, by a file that was replaced, and not by a broken one."""
    path, key = items_file(tmp_path), tmp_path / "key"
    key.write_text(KEY)
    options = ("--items", path, "--workers", 2, "--key-file", key, "--unknown-items", "refuse")

    def known(url: str, item: str, times: int = 30) -> bool:
        """Whether every worker knows an item; each connection may reach another."""
        body = {"query_id": "q", "item_id": [item]}
        return all(httpx.post(f"{url}/v1/rank", json=body, headers=RIGHT).status_code == 200 for _ in range(times))

    with running(saved("trees"), *options) as (url, _):
        with Client(url, key=KEY) as urank:
            stored = urank.put_items([{"item_id": "new", "features": {"price": 1.0}}])
            assert (stored.added, stored.items) == (1, 21)
            until(lambda: known(url, "new"))
            ranking = urank.rank(["new", "i001"], query_id="q", context={"price": 3.0})
            assert sorted(ranking.ids) == ["i001", "new"]
            assert len(urank.explain(["new", "i001"]).items) == 2
        other = pl.read_parquet(path).with_columns(item_id=pl.lit("other ") + pl.col("item_id"))
        other.write_parquet(tmp_path / "next")
        (tmp_path / "next").replace(path)
        until(lambda: known(url, "other i001"))
        (tmp_path / "broken").write_bytes(b"broken")
        (tmp_path / "broken").replace(path)
        time.sleep(2.5)
        assert known(url, "other i001")
    other.write_parquet(path)
    with running(saved("trees"), *options) as (url, _):
        assert known(url, "other new", times=1)


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def test_streams_may_leave_out_what_the_server_holds(tmp_path: Path) -> None:
    path = items_file(tmp_path, value=pl.int_range(pl.len()).cast(pl.Float64))
    reader, plain = holding(path), reader_of(loaded("trees"))
    ids = ["i004", "i002", "i007"]
    chosen = {each["item_id"]: each for each in rows(path)}
    wanted = [{**chosen[each], "features": chosen[each]["features"] | {"price": 2.0}} for each in ids]
    whole = lists_of(plain, [{"query_id": "q", "candidates": wanted}]).items
    found = read_arrow(stream_of(pa.table({"query_id": ["q"] * 3, "item_id": ids, "price": [2.0] * 3})), reader)
    np.testing.assert_array_equal(found.items.numeric, whole.numeric)
    assert found.items.categorical.tolist() == whole.categorical.tolist()
    assert found.items.value.tolist() == [4.0, 2.0, 7.0]
    with pytest.raises(Problem) as error:
        read_arrow(stream_of(pa.table({"query_id": ["q"], "item_id": ["new"]})), reader)
    assert error.value.errors == [("item_id.0", "is unknown")]


def test_the_client_names_items_and_models(tmp_path: Path) -> None:
    path, key = items_file(tmp_path), tmp_path / "key"
    key.write_text(KEY)
    options = ("--model", f"home={saved('trees')}", "--items", path, "--key-file", key, "--unknown-items", "context")
    with running(None, *options) as (url, _), Client(url, key=KEY) as urank:
        ids = ["i001", "i002", "i003"]
        context = {"price": 2.5, "shop": "a"}
        chosen = [each for each in rows(path) if each["item_id"] in ids]
        whole = [{**each, "features": each["features"] | context} for each in chosen]
        ranking = urank.rank(ids, query_id="q", context=context)
        assert ranking.items == urank.rank(whole, query_id="q", model="home").items
        table = pl.DataFrame({"item_id": ids}).with_columns(pl.lit("a").cast(pl.Categorical).alias("shop"))
        assert urank.rank(table, query_id="q", context={"price": 2.5}).ids == ranking.ids
        assert urank.explain(ids, context=context, model="home").items == urank.explain(whole).items
        new = pl.DataFrame({"item_id": ["i001", "new"], "price": [1.0, 2.0], "value": [3.0, None]})
        stored = urank.put_items(new)
        assert (stored.added, stored.replaced, stored.items) == (1, 1, 21)
        assert urank.model("home").items == urank.model().items == 21
        assert set(urank.rank(["new", "nobody"], query_id="q").ids) == {"new", "nobody"}


def test_a_client_names_items_or_models_that_are_not_there(tmp_path: Path) -> None:
    with running(saved("trees")) as (url, _), Client(url) as urank:
        with pytest.raises(UrankError, match="the features are not those of the model"):
            urank.rank(["a"], query_id="q")
        with pytest.raises(UrankError, match="there is no model of this name"):
            urank.model("other")
        with pytest.raises(UrankError, match="403"):
            urank.put_items([{"item_id": "a"}])
