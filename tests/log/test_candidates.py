"""Candidates: schema, validation, and reading whole lists."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from urank.errors import ConfigError, DataError
from urank.log import candidates as module
from urank.log.candidates import Candidates, CandidateSchema, candidate_schema, read_candidates
from urank.log.columns import Feature

DTYPES: Mapping[str, pl.DataType] = {
    "query_id": pl.Int64(),
    "item_id": pl.String(),
    "price": pl.Float64(),
    "brand": pl.String(),
    "emb": pl.Array(pl.Float64, 2),
    "value": pl.Float64(),
    "note": pl.List(pl.Int64),
}
MODEL_FEATURES: dict[str, Any] = {"numeric": ["price", "emb[0]", "emb[1]"], "categorical": ["brand"]}


def schema_of(dtypes: Mapping[str, pl.DataType] = DTYPES, **changes: Any) -> CandidateSchema:
    return candidate_schema(dtypes, "the candidates", **{**MODEL_FEATURES, **changes})


def test_roles_and_features_find_their_columns() -> None:
    schema = schema_of()
    assert schema.roles == {"query_id": "query_id", "item_id": "item_id", "value": "value"}
    assert schema.features == (
        Feature("price", "numeric", "price"),
        Feature("emb[0]", "numeric", "emb", 0),
        Feature("emb[1]", "numeric", "emb", 1),
        Feature("brand", "categorical", "brand"),
    )
    assert schema.categories == ["brand"]
    assert "note" not in schema.columns


def test_columns_of_other_names() -> None:
    assert schema_of(columns={"query_id": "item_id"}).roles == {"query_id": "item_id", "value": "value"}
    schema = schema_of(columns={"category": "item_id"}, categorical=["category"])
    assert schema.roles["item_id"] == "item_id"
    assert schema.features[-1] == Feature("category", "categorical", "item_id")


def test_a_column_may_have_a_place_in_its_name() -> None:
    places = {"query_id": pl.Int64(), "emb[0]": pl.Float64(), "emb[1]": pl.Float64()}
    schema = schema_of(places, numeric=["emb[0]", "emb[1]"], categorical=[])
    assert schema.features == (Feature("emb[0]", "numeric", "emb[0]"), Feature("emb[1]", "numeric", "emb[1]"))


def test_lists_of_a_query_hold_the_types() -> None:
    lists = {name: pl.List(dtype) if name != "query_id" else dtype for name, dtype in DTYPES.items()}
    assert schema_of(lists) == schema_of()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"price": pl.String()}, "the model takes the feature 'price' as a number; .* is of type String$"),
        ({"price": pl.List(pl.String)}, "takes the feature 'price' as a number; .* is of type String$"),
        ({"brand": pl.Struct({"a": pl.Int64})}, "the model takes the feature 'brand' as a category; .* is of type Str"),
        ({"item_id": pl.Struct({"a": pl.Int64})}, "is of type Struct.*, which cannot play the role item_id$"),
        (
            {"emb": pl.List(pl.Float64)},
            r"'emb\[0\]', so column 'emb' of the candidates must contain fixed-size lists of 2 numbers; it is of type "
            r"List\(Float64\)$",
        ),
        ({"emb": pl.Array(pl.Float64, 3)}, "must contain fixed-size lists of 2 numbers; it is of type Array"),
        ({"emb": pl.Array(pl.String, 2)}, "must contain fixed-size lists of 2 numbers; it is of type Array"),
    ],
)
def test_types_that_are_refused(changes: dict[str, pl.DataType], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        schema_of({**DTYPES, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"numeric": ["size"]}, "needs the feature 'size', which is not there: the columns of the candidates are "),
        ({"numeric": ["size[0]"]}, r"needs the feature 'size\[0\]', which is not there: the columns of the"),
        ({"categorical": ["colour"]}, "needs the feature 'colour', which is not there"),
        ({"required": ("query_id", "session_id")}, "no column 'session_id'; name the one .* -c session_id=NAME"),
        ({"columns": {"value": "sum"}}, r"has no column 'sum' \(asked for as value\); it has query_id"),
    ],
)
def test_what_is_absent_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        schema_of(**changes)


def test_roles_of_a_log_only_are_refused() -> None:
    sentence = "'click' is not a role that a column of candidates can play; the roles are query_id, "
    with pytest.raises(ConfigError, match=sentence):
        schema_of(columns={"click": "price"})


def test_the_current_position_is_read_only_where_it_is_asked_for() -> None:
    dtypes = {**DTYPES, "position": pl.Int64(), "rank": pl.Int64()}
    assert "position" not in schema_of(dtypes).roles
    assert "position" not in schema_of(dtypes, columns={"position": "rank"}).roles
    asked: dict[str, Any] = {"required": ("query_id", "position")}
    assert schema_of(dtypes, **asked).roles["position"] == "position"
    assert schema_of(dtypes, columns={"position": "rank"}, **asked).roles["position"] == "rank"
    with pytest.raises(DataError, match=r"the candidates has no column 'position'; name the one .* -c position="):
        schema_of(**asked)


TABLE = pl.DataFrame(
    {
        "query_id": [7, 7, 7, 3, 9, 9],
        "item_id": ["a", "b", "c", "a", "d", "b"],
        "price": [1.5, None, 2.0, 3.0, 4.0, 5.0],
        "stock": [1, 2, 3, 4, 5, None],
        "brand": ["x", "y", None, "x", "x", "z"],
        "position": [1, 2, 3, 1, 1, 2],
        "click": [0, 1, 0, 0, 1, 0],
        "note": [[1], [2, 3], [], [4], [5], [6]],
    }
)
FEATURES: dict[str, Any] = {"numeric": ["price", "stock"], "categorical": ["brand"]}


def lists(found: Candidates) -> list[list[tuple[Any, ...]]]:
    """The rows of each list, missing numbers as None."""
    result = []
    for some in found.lists():
        rows = some.frame.with_columns(pl.col(pl.Float32).fill_nan(None)).rows()
        bounds = zip(some.offsets[:-1], some.offsets[1:], strict=True)
        result += [rows[first:last] for first, last in bounds]
    return result


EXPECTED = [
    [(7, "a", 1.5, 1.0, "x"), (7, "b", None, 2.0, "y"), (7, "c", 2.0, 3.0, None)],
    [(3, "a", 3.0, 4.0, "x")],
    [(9, "d", 4.0, 5.0, "x"), (9, "b", 5.0, None, "z")],
]


def test_tables_and_files_give_the_same_lists(tmp_path: Path) -> None:
    flat = TABLE.drop("note")
    assert lists(read_candidates(TABLE, **FEATURES)) == EXPECTED
    assert lists(read_candidates(TABLE.lazy(), **FEATURES)) == EXPECTED
    assert lists(read_candidates(TABLE.to_arrow(), **FEATURES)) == EXPECTED
    assert lists(read_candidates(pd.DataFrame(flat.to_dict(as_series=False)), **FEATURES)) == EXPECTED
    TABLE.write_parquet(tmp_path / "candidates.parquet", row_group_size=2)
    assert lists(read_candidates(tmp_path / "candidates.parquet", **FEATURES)) == EXPECTED
    flat.write_csv(tmp_path / "candidates.csv")
    in_text = [[(str(row[0]), *row[1:]) for row in rows] for rows in EXPECTED]
    assert lists(read_candidates(str(tmp_path / "candidates.csv"), **FEATURES)) == in_text


@pytest.mark.parametrize("batch_bytes", [1, 100, 200, 400, 2**20])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5])
def test_batches_and_files_may_cut_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int, cut: int
) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", batch_bytes)
    TABLE[:cut].write_parquet(tmp_path / "a.parquet")
    TABLE[cut:].write_parquet(tmp_path / "b.parquet")
    found = read_candidates(tmp_path, **FEATURES)
    assert lists(found) == EXPECTED
    assert lists(found) == EXPECTED
    parts = list(found.lists())
    assert parts[-1].done == found.size
    assert len(parts) <= 3
    assert lists(read_candidates(TABLE, **FEATURES)) == EXPECTED


def test_work_makes_batches_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 10_000)
    TABLE.write_parquet(tmp_path / "c.parquet")
    assert len(list(read_candidates(tmp_path, **FEATURES).lists())) == 1
    assert len(list(read_candidates(tmp_path, **FEATURES, work_bytes=10_000).lists())) == 3


def test_large_tables_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 1_000)
    table = pl.concat([TABLE.with_columns(query_id=pl.col("query_id") + 10 * i) for i in range(40)])
    parts = list(read_candidates(table, **FEATURES).lists())
    assert len(parts) > 3
    assert pl.concat([part.frame["query_id"] for part in parts]).equals(table["query_id"])
    assert sum(len(part.offsets) - 1 for part in parts) == 120


def test_sessions_are_lists_of_their_own() -> None:
    table = TABLE.with_columns(query_id=1, session_id=pl.Series(["s", "s", "t", "u", "u", "u"]))
    assert [len(rows) for rows in lists(read_candidates(table, **FEATURES))] == [2, 1, 3]
    assert [len(rows) for rows in lists(read_candidates(table.drop("session_id"), **FEATURES))] == [6]
    assert [len(rows) for rows in lists(read_candidates(TABLE.drop("query_id"), **FEATURES))] == [6]


@pytest.mark.parametrize("batch_bytes", [1, 300, 2**20])
def test_a_list_that_comes_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", batch_bytes)
    table = TABLE.with_columns(query_id=pl.Series([7, 7, 3, 9, 7, 7]))
    table[:3].write_parquet(tmp_path / "a.parquet")
    table[3:].write_parquet(tmp_path / "b.parquet")
    sentence = rf"must lie together; query 7 comes again, after others, at row 2 of {tmp_path}/b\.parquet \(if this is"
    with pytest.raises(DataError, match=sentence):
        lists(read_candidates(tmp_path, **FEATURES))
    with pytest.raises(DataError, match="query 7 comes again, after others, at row 5 of the candidates"):
        lists(read_candidates(table, **FEATURES))
    sessions = TABLE.with_columns(session_id=pl.Series(["s", "t", "s", "s", "s", "t"]))
    with pytest.raises(DataError, match=r"query 7, session s comes again, after others, at row 3 of the candidates$"):
        lists(read_candidates(sessions, **FEATURES))


def test_hashes_remember_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, 5000, dtype=np.uint64, endpoint=False)
    hashes, known = module._HashSet(), set()
    for some in np.split(np.append(values, rng.choice(values, 100)), np.sort(rng.integers(0, 5100, 300))):
        expected = [value in known or value in some[:i] for i, value in enumerate(some)]
        assert hashes.add(some).tolist() == expected
        known |= set(some)
    assert sum(map(len, hashes._arrays)) <= 5100
    assert len(hashes._arrays) <= 14


def test_ids_keep_their_types_where_files_agree(tmp_path: Path) -> None:
    dates = TABLE.with_columns(session_id=pl.lit(date(2020, 1, 31)), item_id=pl.col("item_id").cast(pl.Categorical))
    frame = next(read_candidates(dates, **FEATURES).lists()).frame
    assert [frame.schema[name] for name in ("query_id", "session_id")] == [pl.Int64, pl.Date]
    TABLE[:1].write_parquet(tmp_path / "a.parquet")
    TABLE[1:].with_columns(pl.col("query_id").cast(pl.String)).write_parquet(tmp_path / "b.parquet")
    found = lists(read_candidates(tmp_path, **FEATURES))
    assert [rows[0][0] for rows in found] == ["7", "3", "9"]
    assert [len(rows) for rows in found] == [3, 1, 2]


def test_columns_of_other_names_are_read() -> None:
    table = TABLE.rename({"query_id": "search", "brand": "category", "stock": "value"}).with_columns(value=2.5)
    wanted: dict[str, Any] = {"numeric": ["price"], "categorical": ["category"]}
    found = read_candidates(table, **wanted, columns={"query_id": "search"})
    assert lists(found)[1] == [(3, "a", 2.5, 3.0, "x")]
    table = table.rename({"category": "kind"})
    found = read_candidates(table, **wanted, columns={"query_id": "search", "category": "kind"})
    assert lists(found)[1] == [(3, "a", 2.5, 3.0, "x")]


def test_numbers_as_a_log_takes_them(tmp_path: Path) -> None:
    table = TABLE.with_columns(
        value=pl.Series(["1", " 2.5", "3e1", "4", "5", "6"]),
        price=pl.Series([Decimal("1.5"), None, Decimal("2.0"), Decimal(3), Decimal(4), Decimal(5)]),
        brand=pl.Series([1.0, 2.0, None, 1.0, 1.0, 3.0]),
    )
    assert lists(read_candidates(table, **FEATURES))[0] == [
        (7, "a", 1.0, 1.5, 1.0, "1"),
        (7, "b", 2.5, None, 2.0, "2"),
        (7, "c", 30.0, 2.0, 3.0, None),
    ]
    path = tmp_path / "codes.csv"
    path.write_text("query_id,price,stock,brand,new\n01,1,NA,007,True\n01,,5,8,False\n")
    found = read_candidates(path, numeric=["price", "stock"], categorical=["brand", "new"])
    assert lists(found) == [[("01", 1.0, None, "007", "true"), ("01", None, 5.0, "8", "false")]]


def test_a_csv_column_of_nothing_but_na(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("query_id,price,country\n1,NA,NA\n1,NULL,NA\n")
    found = read_candidates(path, numeric=["price"], categorical=["country"])
    assert lists(found) == [[("1", None, "NA"), ("1", None, "NA")]]
    found = read_candidates(path, numeric=["price"], categorical=["category"], columns={"category": "country"})
    assert lists(found) == [[("1", None, "NA"), ("1", None, "NA")]]
    assert lists(read_candidates(path, numeric=["price", "country"], categorical=[])) == [[("1", None, None)] * 2]


def test_fixed_size_lists_are_expanded(tmp_path: Path) -> None:
    pairs = pl.Series([[float(i), -float(i)] for i in range(6)], dtype=pl.Array(pl.Float64, 2))
    table = TABLE.select("query_id", emb=pairs)
    expected = [
        [(7, 0.0, 0.0), (7, 1.0, -1.0), (7, 2.0, -2.0)],
        [(3, 3.0, -3.0)],
        [(9, 4.0, -4.0), (9, 5.0, -5.0)],
    ]
    wanted: dict[str, Any] = {"numeric": ["emb[0]", "emb[1]"], "categorical": []}
    assert lists(read_candidates(table, **wanted)) == expected
    table.write_parquet(tmp_path / "c.parquet")
    assert lists(read_candidates(tmp_path / "c.parquet", **wanted)) == expected
    grouped = table.group_by("query_id", maintain_order=True).agg("emb")
    assert lists(read_candidates(grouped, **wanted)) == expected
    flat = table.select("query_id", *[pl.col("emb").arr.get(i).alias(f"emb[{i}]") for i in (0, 1)])
    assert lists(read_candidates(flat, **wanted)) == expected


def test_one_row_per_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    grouped = TABLE.group_by("query_id", maintain_order=True).agg("item_id", "price", "stock", "brand")
    assert lists(read_candidates(grouped, **FEATURES)) == EXPECTED
    grouped.write_parquet(tmp_path / "grouped.parquet")
    assert lists(read_candidates(tmp_path / "grouped.parquet", **FEATURES)) == EXPECTED
    bad = grouped.with_columns(price=pl.Series([[1.0, 2.0, 3.0], [float("inf")], [1.0, 2.0]]))
    with pytest.raises(
        DataError, match="feature 'price' must be finite or missing; got inf at row 2 of the candidates"
    ):
        lists(read_candidates(bad, **FEATURES))
    short = grouped.with_columns(price=pl.Series([[1.0, 2.0, 3.0], [1.0], [1.0]]))
    with pytest.raises(DataError, match=r"the lists of a query must have equal lengths; .* at row 3 of the candidates"):
        lists(read_candidates(short, **FEATURES))


def test_nothing_gives_one_empty_part(tmp_path: Path) -> None:
    TABLE[:0].write_parquet(tmp_path / "none.parquet")
    for source in (TABLE[:0], tmp_path / "none.parquet", TABLE[:0].drop("query_id")):
        [some] = read_candidates(source, **FEATURES).lists()
        assert some.frame.height == 0
        assert some.offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"price": [1.0, 2.0, float("inf"), 1.0, 1.0, 1.0]}, "'price' must be finite or missing; got inf at row 3 of "),
        ({"price": [1.0, 1e39, 1.0, 1.0, 1.0, 1.0]}, r"'price' must be finite or missing; got 1e\+39 at row 2 of "),
        ({"value": [1.0, 2.0, 3.0, float("nan"), 1.0, 1.0]}, "value must be a finite number from 0 up; got nothing at"),
        ({"value": [1, 2, -3, 4, 5, 6]}, "value must be a finite number from 0 up; got -3 at row 3 of the candidates"),
        ({"value": ["1", "2", "x", "4", "5", "6"]}, "value must be a finite number from 0 up; got 'x' at row 3 of"),
        ({"query_id": [1, 1, 1, 2, 2, None]}, "query_id must not be missing; got nothing at row 6 of the candidates"),
        ({"query_id": [1, 1, 1, 2, 2, float("nan")]}, "query_id must not be missing; got nothing at row 6"),
        ({"item_id": ["a", None, "b", "c", "d", "e"]}, "item_id must not be missing; got nothing at row 2"),
    ],
)
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    table = TABLE.with_columns(**{name: pl.Series(values, strict=False) for name, values in changes.items()})
    with pytest.raises(DataError, match=sentence):
        lists(read_candidates(table, **FEATURES))


def test_current_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are checked as those of a log are, and must be distinct in a list, however it is cut."""
    asked: dict[str, Any] = {**FEATURES, "required": ("position",)}
    table = TABLE.with_columns(position=pl.Series([4, 1, 9, 4, 2, 4]))
    [some] = read_candidates(table, **asked).lists()
    assert some.frame.schema["position"] == pl.Int32
    assert some.frame["position"].to_list() == [4, 1, 9, 4, 2, 4]
    grouped = table.group_by("query_id", maintain_order=True).agg("position", "price", "stock", "brand")
    assert [len(rows) for rows in lists(read_candidates(grouped, **asked))] == [3, 1, 2]
    for position, sentence in {
        0: "position must be a whole number from 1 to 10000; got 0 at row 3 of the candidates",
        None: "position must be a whole number from 1 to 10000; got nothing at row 3 of the candidates",
        4: "a current position must occur once in a list; 4 comes again at row 3 of the candidates",
    }.items():
        bad = table.with_columns(position=pl.Series([4, 1, position, 4, 2, 4]))
        with pytest.raises(DataError, match=sentence):
            lists(read_candidates(bad, **asked))
        lists(read_candidates(bad, **FEATURES))  # which does not look at them
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    bad.write_parquet(tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"4 comes again at row 3 of .*c\.parquet"):
        lists(read_candidates(tmp_path / "c.parquet", **asked))


def test_sources_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^candidates must be a path or a table of Polars, .* got builtins\.list$"):
        read_candidates([1, 2], **FEATURES)
    (tmp_path / "letor.txt").write_text("2 qid:1 1:0.5 2:0.25\n")
    (tmp_path / "notes.txt").write_text("hello\n")
    for name, sentence in (("letor", "is a LETOR file, which has labels"), ("notes", "is not a file that can be read")):
        with pytest.raises(DataError, match=rf"{name}\.txt {sentence}") as refusal:
            read_candidates(tmp_path / f"{name}.txt", **FEATURES)
        assert " log " not in str(refusal.value)


def test_files_that_do_not_agree(tmp_path: Path) -> None:
    TABLE.write_parquet(tmp_path / "a.parquet")
    TABLE.drop("price").write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=rf"'price', which is not there: the columns of {tmp_path}/b\.parquet are"):
        read_candidates(tmp_path, **FEATURES)
    TABLE.drop("item_id", "note", "click").write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'item_id' is in .*a\.parquet but not in .*b\.parquet"):
        read_candidates(tmp_path, **FEATURES)
    TABLE.drop("note", "click").with_columns(price=pl.col("stock"), more=1).write_parquet(tmp_path / "b.parquet")
    assert read_candidates(tmp_path, **FEATURES).size > 0
