"""Lists of a log, as the playground shows them: what they hold can be sent back as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from serve.cases import client, lists_of, loaded, reader_of
from urank.errors import ConfigError, UrankError
from urank.serve.playground import read_samples

NUMBERS, TEXTS = ["price", "emb[0]", "2nd rate"], ["shop", "if"]


def log(lists: int = 3, **columns: object) -> pl.DataFrame:
    """Lists of two items, the lower one first in the file."""
    n = 2 * lists
    given = {
        "query_id": [f"q{row // 2}" for row in range(n)],
        "item_id": [f"i{row}" for row in range(n)],
        "position": [2, 1] * lists,
        "click": [1, 0] * lists,
        "price": np.arange(n, dtype=np.float64) + 0.1,
        "emb[0]": [None, 1.5] * lists,
        "2nd rate": np.full(n, np.nan),
        "shop": ["a", None] * lists,
        "if": pl.Series(["d", "e"] * lists, dtype=pl.Categorical),
    }
    return pl.DataFrame(given | columns)


def samples(frame: pl.DataFrame, tmp_path: Path, **settings: int):  # type: ignore[no-untyped-def]
    frame.write_parquet(tmp_path / "log.parquet")
    return read_samples(str(tmp_path / "log.parquet"), NUMBERS, TEXTS, **settings)


def test_lists_as_they_were_shown(tmp_path: Path) -> None:
    found = samples(log(), tmp_path)
    assert [each.query_id for each in found] == ["q0", "q1", "q2"]
    first = found[0]
    assert (first.logged, first.clicked) == (["i1", "i0"], ["i0"])
    assert [each["item_id"] for each in first.candidates] == ["i1", "i0"]
    features = {"price": pytest.approx(1.1), "emb[0]": 1.5, "2nd rate": None, "shop": None, "if": "e"}
    assert first.candidates[0]["features"] == features
    assert first.candidates[1]["features"]["shop"] == "a"
    assert "value" not in first.candidates[0]


def test_they_can_be_ranked(tmp_path: Path) -> None:
    found = samples(log(value=[2.0, 0.5] * 3), tmp_path)
    assert [each["value"] for each in found[0].candidates] == [0.5, 2.0]
    queries = [{"query_id": each.query_id, "candidates": each.candidates} for each in found]
    assert len(lists_of(reader_of(loaded("trees")), queries)) == 3


def test_of_the_sessions_of_a_query_the_first_is_shown(tmp_path: Path) -> None:
    frame = log(query_id=["q", "q", "r", "r", "q", "q"], session_id=["a", "a", "a", "a", "b", "b"])
    assert [(each.query_id, each.logged) for each in samples(frame, tmp_path)] == [
        *(("q", ["i1", "i0"]), ("r", ["i3", "i2"]))
    ]


def test_items_without_or_with_the_same_id_are_told_apart(tmp_path: Path) -> None:
    assert samples(log().drop("item_id"), tmp_path)[0].logged == ["item 1", "item 2"]
    twice = samples(log(item_id=["x"] * 6), tmp_path)
    assert twice[0].logged == ["x at 1", "x at 2"]
    assert twice[0].clicked == ["x at 2"]


def test_logs_that_will_not_do(tmp_path: Path) -> None:
    log().drop("shop").write_parquet(tmp_path / "few.parquet")
    with pytest.raises(ConfigError, match=r"few\.parquet must have the features of the model; it lacks 'shop'"):
        read_samples(str(tmp_path / "few.parquet"), NUMBERS, TEXTS)
    with pytest.raises(UrankError):
        read_samples(str(tmp_path / "absent.parquet"), NUMBERS, TEXTS)


def test_lists_that_the_server_changes_most_come_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = log(lists=20, price=rng.normal(size=40), value=rng.uniform(0.1, 10, 40))
    frame.write_parquet(tmp_path / "log.parquet")
    with client("network", method="match", sample=str(tmp_path / "log.parquet")) as http:
        found = [http.get(f"/v1/samples/{n}").json() for n in range(20)]
        for each in found:
            answer = http.post("/v1/explain", json={"candidates": each["candidates"]}).json()
            (served,) = (order["items"] for order in answer["orders"] if order["name"] == answer["method"])
            places = [abs(each["logged"].index(item) - place) for place, item in enumerate(served)]
            assert each["moved"] == sum(places) / len(places)
    moved = [each["moved"] for each in found]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1]


def test_over_http(tmp_path: Path) -> None:
    log().write_parquet(tmp_path / "log.parquet")
    with client("trees", sample=str(tmp_path / "log.parquet")) as http:
        listed = http.get("/v1/samples").json()["samples"]
        assert [(each["number"], each["items"]) for each in listed] == [(n, 2) for n in range(3)]
        assert {each["query_id"] for each in listed} == {"q0", "q1", "q2"}
        first = next(
            each for each in (http.get(f"/v1/samples/{n}").json() for n in range(3)) if each["query_id"] == "q0"
        )
        assert (first["logged"], first["clicked"]) == (["i1", "i0"], ["i0"])
        body = {"query_id": first["query_id"], "candidates": first["candidates"]}
        assert http.post("/v1/rank", json=body).status_code == 200
        for number in ("3", "-1", "1.0", "x", "٢", "1" * 5_000, "0x1", "%00", "+1", " 1"):
            answer = http.get(f"/v1/samples/{number}")
            assert (answer.status_code, answer.json()["title"]) == (404, "Not Found")
    with client("trees", sample=str(tmp_path / "log.parquet"), playground=False) as http:
        assert {http.get(path).status_code for path in ("/", "/v1/samples", "/v1/samples/0")} == {404}
    with client("trees") as http:
        assert http.get("/v1/samples").json() == {"samples": []}


def test_columns_are_those_of_the_log_that_the_model_learned_from(tmp_path: Path) -> None:
    named = {"query_id": "anfrage", "position": "place"}
    log().rename(named).write_parquet(tmp_path / "log.parquet")
    found = read_samples(str(tmp_path / "log.parquet"), NUMBERS, TEXTS, columns=named)
    assert [(each.query_id, each.logged) for each in found[:2]] == [("q0", ["i1", "i0"]), ("q1", ["i3", "i2"])]
