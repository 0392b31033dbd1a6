"""The columns of candidates: each role and each feature finds its column, and what is absent or unfit is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl
import pytest

from urank.errors import ConfigError, DataError
from urank.log.candidates import CandidateSchema, candidate_schema
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
FEATURES: dict[str, Any] = {"numeric": ["price", "emb[0]", "emb[1]"], "categorical": ["brand"]}


def schema_of(dtypes: Mapping[str, pl.DataType] = DTYPES, **changes: Any) -> CandidateSchema:
    return candidate_schema(dtypes, "the candidates", **{**FEATURES, **changes})


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
            r"'emb\[0\]', so column 'emb' of the candidates must hold fixed-size lists of 2 numbers; it is of type "
            r"List\(Float64\)$",
        ),
        ({"emb": pl.Array(pl.Float64, 3)}, "must hold fixed-size lists of 2 numbers; it is of type Array"),
        ({"emb": pl.Array(pl.String, 2)}, "must hold fixed-size lists of 2 numbers; it is of type Array"),
    ],
)
def test_types_that_are_refused(changes: dict[str, pl.DataType], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        schema_of({**DTYPES, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"numeric": ["size"]}, "needs the feature 'size', which is not there: the candidates has the columns query_"),
        ({"numeric": ["size[0]"]}, r"needs the feature 'size\[0\]', which is not there: the candidates has"),
        ({"categorical": ["colour"]}, "needs the feature 'colour', which is not there"),
        ({"required": ("query_id", "session_id")}, "no column 'session_id'; name the one .* --column session_id=NAME"),
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
    with pytest.raises(DataError, match=r"the candidates has no column 'position'; name the one .* --column position="):
        schema_of(**asked)
