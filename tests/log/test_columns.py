"""What a log must hold: every refusal names the rule, the value, the file and the row."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import urank
from urank.errors import ConfigError, DataError
from urank.log.columns import LogSchema
from urank.log.dataset import Dataset

INF, NAN = float("inf"), float("nan")


def make_log(**changes: Any) -> pl.DataFrame:
    columns: dict[str, Any] = {
        "query_id": ["a", "a", "b", "b"],
        "item_id": [1, 2, 1, 3],
        "position": [1, 2, 1, 2],
        "click": [0, 1, 0, 0],
        "value": [1.0, 2.0, 0.0, 4.5],
        "price": [9.5, None, NAN, 3.0],
        "brand": ["x", None, "y", "x"],
    }
    return pl.DataFrame({**columns, **changes}, strict=False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"position": [1, 0, 1, 2]}, "position must be a whole number from 1 to 10000; got 0 at row 2 of "),
        ({"position": [1, 2, -3, 2]}, "position must be a whole number from 1 to 10000; got -3 at row 3 of "),
        ({"position": [1, 1.5, 1, 2]}, "position must be a whole number from 1 to 10000; got 1.5 at row 2 of "),
        ({"position": [1, 2, None, 2]}, "position must be a whole number from 1 to 10000; got nothing at row 3 of "),
        ({"position": [1, 2, 10001, 2]}, "position must be a whole number from 1 to 10000; got 10001 at row 3 of "),
        (
            {"position": ["1", "two", "1", "2"]},
            "position must be a whole number from 1 to 10000; got 'two' at row 2 of ",
        ),
        ({"click": [0, 1, 2, 0]}, "click must be 0 or 1; got 2 at row 3 of "),
        ({"click": [0, 0.5, 1, 0]}, "click must be 0 or 1; got 0.5 at row 2 of "),
        ({"click": [0, None, 1, 0]}, "click must be 0 or 1; got nothing at row 2 of "),
        ({"conversion": [0, 1, 3, 0]}, "conversion must be 0 or 1; got 3 at row 3 of "),
        ({"conversion": [0, 1, None, 0]}, "conversion must be 0 or 1; got nothing at row 3 of "),
        ({"value": [1.0, -2.0, 1, 1]}, "value must be a finite number from 0 up; got -2.0 at row 2 of "),
        ({"value": [1.0, 1, NAN, 1]}, "value must be a finite number from 0 up; got nothing at row 3 of "),
        ({"value": [1.0, 1, INF, 1]}, "value must be a finite number from 0 up; got inf at row 3 of "),
        ({"price": [1.0, 1, 1, INF]}, "feature 'price' must be finite or missing; got inf at row 4 of "),
        ({"price": [1.0, -INF, 1, 1]}, "feature 'price' must be finite or missing; got -inf at row 2 of "),
        ({"price": [1.0, 1e39, 1, 1]}, "feature 'price' must be finite or missing; got 1e+39 at row 2 of "),
        ({"query_id": ["a", None, "b", "b"]}, "query_id must not be missing; got nothing at row 2 of "),
        ({"item_id": [1, 2, None, 3]}, "item_id must not be missing; got nothing at row 3 of "),
        ({"propensity": [1, 0.5, 0, 1]}, "propensity must be above 0 and at most 1; got 0.0 at row 3 of "),
        ({"relevance": [1, -1, 0, 1]}, "relevance must be a finite number from 0 up, or missing; got -1 at row 2 of "),
        ({"timestamp": ["2020-01-01", "soon", "2020-01-01", "2020-01-02"]}, "timestamp must be a date or time (as "),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "csv", "table"])
def test_refuses_and_names_the_row(tmp_path: Path, changes: dict[str, Any], sentence: str, form: str) -> None:
    frame = make_log(**changes)
    source: Any = frame
    name = "the table"
    if form != "table":
        source = tmp_path / f"log.{form}"
        name = str(source)
        getattr(frame, f"write_{form}")(source)
    with pytest.raises(DataError) as refusal:
        urank.read(source).frame()
    message = str(refusal.value)
    if form == "csv":  # a CSV has no types: a whole number may come back as a fraction
        sentence = sentence.split("; got")[0]
    assert message.startswith(sentence)
    assert f"of {name}" in message
    assert "\n" not in message


@pytest.mark.parametrize("column", ["query_id", "position", "click"])
def test_refuses_a_missing_column(column: str) -> None:
    with pytest.raises(DataError, match=f"the table has no column '{column}'; name the one .* -c {column}=NAME"):
        urank.read(make_log().drop(column))


def test_refuses_roles_and_columns_that_do_not_exist() -> None:
    with pytest.raises(
        ConfigError, match="'rank' is not a role that a column of a log can play; the roles are query_id"
    ):
        urank.read(make_log(), columns={"rank": "position"})
    with pytest.raises(DataError, match=r"no column 'place' \(asked for as position\)"):
        urank.read(make_log(), columns={"position": "place"})
    with pytest.raises(DataError, match="no column 'weight'"):
        urank.read(make_log(), drop=["weight"])
    with pytest.raises(ConfigError, match="has a column 'value' besides 'price'"):
        urank.read(make_log(), columns={"value": "price"})


def test_refuses_a_column_that_is_neither_number_nor_text() -> None:
    with pytest.raises(DataError, match=r"column 'tags' of the table is of type List.* cannot be a feature"):
        urank.read(make_log(tags=[["a"], ["b"], [], ["c"]]))


def test_gives_each_column_its_kind() -> None:
    frame = make_log(
        clicked_before=[True, False, None, True],
        code=[10, 20, 10, 30],
        colour=pl.Series(["red", "red", "blue", "blue"], dtype=pl.Categorical),
        embedding=pl.Series([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=pl.Array(pl.Float32, 2)),
        category=["c", "c", "d", None],
    )
    schema = urank.read(frame, categorical=["code"], drop=["brand"]).schema
    assert schema.named("numeric") == ["price", "embedding[0]", "embedding[1]"]
    assert schema.named("categorical") == ["category", "clicked_before", "code", "colour"]
    assert set(schema.roles) == {"query_id", "item_id", "position", "click", "value", "category"}


def test_canonical_types_and_missing_values() -> None:
    frame = make_log(embedding=pl.Series([[1.0, 2.0]] * 4, dtype=pl.Array(pl.Float64, 2)))
    result = urank.read(frame).frame()
    expected = {
        "query_id": pl.String,
        "item_id": pl.String,
        "position": pl.Int32,
        "click": pl.Int8,
        "value": pl.Float32,
        "price": pl.Float32,
        "brand": pl.String,
        "embedding[0]": pl.Float32,
        "embedding[1]": pl.Float32,
    }
    assert {name: result.schema[name] for name in expected} == expected
    assert result["price"].is_nan().to_list() == [False, True, True, False]
    assert result["brand"].to_list() == ["x", None, "y", "x"]
    assert result["embedding[1]"].to_list() == [2.0] * 4


@pytest.mark.parametrize("ids", [[7, 7, 8, 8], [7.0, 7.0, 8.0, 8.0], ["7", "7", "8", "8"]])
def test_ids_are_text_whatever_their_type(ids: list[Any]) -> None:
    assert urank.read(make_log(query_id=ids)).frame()["query_id"].to_list() == ["7", "7", "8", "8"]


@pytest.mark.parametrize("cast", [lambda c: c, lambda c: c.cast(pl.Boolean), lambda c: c.cast(pl.Float64)])
def test_clicks_may_be_numbers_or_booleans(cast: Callable[[pl.Expr], pl.Expr]) -> None:
    frame = make_log().with_columns(cast(pl.col("click")))
    assert urank.read(frame).frame()["click"].to_list() == [0, 1, 0, 0]


def test_times_may_be_dates_text_or_numbers() -> None:
    day = 24 * 3600 * 1_000_000
    texts = ["1970-01-02 00:00:00", "1970-01-02 00:00:01", "1970-01-03 00:00:00", "1970-01-04 00:00:00"]
    microseconds = [day, day + 1_000_000, 2 * day, 3 * day]
    as_text = make_log(timestamp=texts)
    as_date = as_text.with_columns(pl.col("timestamp").str.to_datetime())
    for frame in (as_text, as_date, make_log(timestamp=microseconds)):
        assert urank.read(frame).frame()["timestamp"].to_list() == microseconds


def test_one_row_per_query_with_list_columns_is_a_log_too() -> None:
    frame = make_log()
    lists = frame.group_by("query_id", maintain_order=True).agg(pl.all())
    assert urank.read(lists).frame().drop("__urank_row").equals(urank.read(frame).frame().drop("__urank_row"))


def test_refuses_a_query_without_items_and_lists_of_unequal_length() -> None:
    lists = pl.DataFrame({"query_id": ["a", "b"], "position": [[1, 2], []], "click": [[0, 1], []]})
    with pytest.raises(DataError, match="a query must have items; got none at row 2 of the table"):
        urank.read(lists).frame()
    lists = pl.DataFrame({"query_id": ["a", "b"], "position": [[1, 2], [1]], "click": [[0, 1], [1, 0]]})
    with pytest.raises(DataError, match="position has 1 items and click 2 at row 2 of the table"):
        urank.read(lists).frame()


def test_infer_is_pure() -> None:
    dtypes = dict(make_log().schema)
    before = dict(dtypes)
    LogSchema.infer(dtypes, "x", columns={"position": "position"})
    assert dtypes == before


def test_refuses_types_that_cannot_play_a_role() -> None:
    columns: dict[str, Any] = {
        "List(Int64)": [[1], [2], [3], [4]],
        "Struct": [{"a": 1}] * 4,
        "Binary": [b"1"] * 4,
        "Time": [time(1)] * 4,
        "Duration": [timedelta(1)] * 4,
        "Array": pl.Series([[1, 2]] * 4, dtype=pl.Array(pl.Int64, 2)),
    }
    for kind, values in columns.items():
        for role in ("position", "click", "query_id", "item_id", "value", "policy", "timestamp", "arm", "conversion"):
            if (kind, role) == ("List(Int64)", "position"):
                continue  # lists of positions are a log with one row per query
            sentence = (
                rf"column '{role}' of the table is of type {re.escape(kind)}.*, which cannot play the role {role}$"
            )
            with pytest.raises(DataError, match=sentence):
                urank.read(make_log(**{role: values}))
        if kind != "Array":
            with pytest.raises(DataError, match="which cannot be a feature"):
                urank.read(make_log(x=values), categorical=["x"])


@pytest.mark.parametrize("role", ["click", "value", "item_id"])
def test_dictionaries_and_decimals_are_what_they_hold(role: str) -> None:
    plain = urank.read(make_log(**{role: ["0", "1", "0", "1"]})).frame()
    for values in (pa.array(["0", "1", "0", "1"]).dictionary_encode(), pa.array([0, 1, 0, 1]).dictionary_encode()):
        table = make_log().drop(role).to_arrow().append_column(role, values)
        assert urank.read(table).frame()[role].to_list() == plain[role].to_list()
    decimals = make_log(value=[Decimal("1.50"), Decimal("2.25"), Decimal("0"), Decimal("3")])
    assert urank.read(decimals).frame()["value"].to_list() == [1.5, 2.25, 0, 3]


def test_an_infinite_place_of_a_fixed_size_list_is_named() -> None:
    embedding = pl.Series([[1.0, 2.0], [3.0, INF], [5.0, 6.0], [7.0, 8.0]], dtype=pl.Array(pl.Float32, 2))
    with pytest.raises(DataError, match=r"feature 'e\[1\]' must be finite or missing; got inf at row 2 of the table"):
        urank.read(make_log(e=embedding)).frame()
    clash = make_log(e=embedding).with_columns(pl.lit(1.0).alias("e[0]"))
    with pytest.raises(DataError, match=r"two columns of the table would make the feature 'e\[0\]'"):
        urank.read(clash)


def test_a_column_may_be_the_category_and_play_its_own_role() -> None:
    frame = urank.read(make_log(), columns={"category": "item_id"}).frame()
    assert frame["item_id"].to_list() == frame["category"].to_list() == ["1", "2", "1", "3"]


EXPERIMENT = {"user_id": [7, 7, None, 8], "arm": ["new", "new", None, "old"], "conversion": [False, True, False, False]}


def test_users_arms_and_conversions_are_kept_and_are_no_features(tmp_path: Path) -> None:
    log = urank.read(make_log(**EXPERIMENT))
    assert log.schema.named("numeric") == ["price"]
    assert log.schema.named("categorical") == ["brand"]
    frame = log.frame()
    assert [frame.schema[role] for role in EXPERIMENT] == [pl.String, pl.String, pl.Int8]
    assert frame["user_id"].to_list() == ["7", "7", None, "8"]
    description = urank.prepare(log, tmp_path / "prepared", valid=0, test=0)
    assert set(EXPERIMENT) <= set(description["roles"])
    dataset = Dataset(tmp_path / "prepared")
    assert dataset.features == ["price", "brand"]
    (block,) = dataset.blocks("train", list(EXPERIMENT))
    kept = pl.DataFrame(block.items).sort("user_id", "conversion", nulls_last=True)
    assert kept.rows() == [("7", "new", 0), ("7", "new", 1), ("8", "old", 0), (None, None, 0)]
    again = urank.read(tmp_path / "prepared" / "train").frame()  # what was prepared is a log as well
    assert again.select(*EXPERIMENT).sort(*EXPERIMENT).equals(frame.select(*EXPERIMENT).sort(*EXPERIMENT))


def test_inspect_is_the_same_with_and_without_an_experiment() -> None:
    told = [urank.inspect(urank.read(log)).to_dict() for log in (make_log(**EXPERIMENT), make_log())]
    assert told[0] == told[1]


def test_users_and_arms_of_a_csv_are_text(tmp_path: Path) -> None:
    make_log(who=["007", "007", None, "8"], arm=["1", "1", "2", None]).write_csv(tmp_path / "log.csv")
    frame = urank.read(tmp_path / "log.csv", columns={"user_id": "who"}).frame()
    assert frame["user_id"].to_list() == ["007", "007", None, "8"]
    assert frame["arm"].to_list() == ["1", "1", "2", None]


def test_a_user_may_be_a_feature_as_the_category() -> None:
    schema = urank.read(make_log(**EXPERIMENT), columns={"category": "user_id"}).schema
    assert schema.named("categorical") == ["category", "brand"]
    assert schema.roles["user_id"] == schema.roles["category"] == "user_id"


def test_a_required_role_that_is_taken_or_dropped() -> None:
    with pytest.raises(ConfigError, match="the table needs its column 'click', which --drop leaves out"):
        urank.read(make_log(), drop=["click"])
    with pytest.raises(ConfigError, match="column 'click' of the table is mapped to position, so nothing plays click;"):
        urank.read(make_log().drop("position"), columns={"position": "click"})


ODD_NAMES = ("_row", "_query", "_session", "_item", "_list", "n", "name", "clicks", "x", "top", "bottom", "v", "count")


def test_features_may_have_any_name_but_those_kept_for_urank(tmp_path: Path) -> None:
    names = [*ODD_NAMES, "value_counts", "bits", "len", "s"]
    numbers = {name: [float(i), 1.0, 2.0, 3.0] for i, name in enumerate(names)}
    texts = {f"{name} ": ["a", "b", "a", "c"] for name in names} | {"category": ["a", "b", "b", "a"]}
    for columns in (numbers, texts, {name: ["a", "b", "a", "c"] for name in names}):
        log = urank.read(make_log(**columns))
        assert urank.inspect(log).facts.rows == 4
        description = urank.prepare(log, tmp_path / "out", overwrite=True)
        assert set(columns) <= {feature["name"] for feature in description["features"]}
    with pytest.raises(DataError, match="column '__urank_row' of the table begins with __urank_, which is reserved"):
        urank.read(make_log(__urank_row=[1, 2, 3, 4]))
    assert urank.read(make_log(__urank_row=[1, 2, 3, 4]), drop=["__urank_row"]).frame().height == 4


@pytest.mark.parametrize(
    ("texts", "seconds"),
    [
        (["1970-01-02T00:00:00Z", "1970-01-02T02:00:00+02:00"], [86400, 86400]),
        (["1970-01-02", "1970-01-02 00:00:00.25"], [86400, 86400.25]),
        (["1970-01-02T00:00", "1970-01-01T22:30:00-0130"], [86400, 86400]),
        (["1970-01-02 00:00:00 +01", "1970-01-02T00:00:00.5z"], [82800, 86400.5]),
        ([1.5, 86400.25], [1.5, 86400.25]),
    ],
)
def test_times_with_offsets_and_fractions(texts: list[Any], seconds: list[float]) -> None:
    found = urank.read(make_log(timestamp=[*texts, *texts])).frame()["timestamp"].to_list()
    assert found[:2] == [round(1_000_000 * second) for second in seconds]


@pytest.mark.parametrize("text", ["01/02/2020", "2020-13-01", "2020-01-01T25:00:00Z", "January 2020"])
def test_times_that_are_not_iso_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=f"timestamp must be a date or time .* got '{text}' at row 2 of the table"):
        urank.read(make_log(timestamp=["2020-01-01", text, "2020-01-01", "2020-01-01"])).frame()


def test_whole_numbers_that_lose_digits_are_told() -> None:
    log = urank.read(make_log(stamp=[1_700_000_001, 3, 4, 5], big=[2**24, 2**25, 0, -(2**40)], half=[1e9 + 0.5] * 4))
    facts = urank.inspect(log).facts
    assert facts.losing_digits == ["stamp"]
    huge = urank.read(make_log(big=[9007199254740993, 1, 2, 3]))
    found = urank.inspect(huge)
    assert found.facts.losing_digits == ["big"]
    assert any("big: whole numbers that lose digits as 32-bit floats" in warning for warning in found.verdict.warnings)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"position": [0, 1, 0, 1]}, "; if positions count from 0, say --first-position 0"),
        ({"click": [0, 7, 1, 0]}, "; for counts, or yes and no, say --binarise"),
        ({"click": ["no", "Yes", "no", "no"]}, "; for counts, or yes and no, say --binarise"),
        ({"click": [0, 0.5, 1, 0]}, "; if another column has the click, name it: -c click=NAME"),
        ({"position": [1, -3, 1, 2]}, "; if another column has the position, name it: -c position=NAME"),
        (
            {"click": [0, None, 1, 0]},
            "; write 0 where nothing was clicked, or leave the row out if it was not recorded",
        ),
    ],
)
def test_tells_how_to_mend_a_value(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(DataError) as refusal:
        urank.read(make_log(**changes)).frame()
    assert str(refusal.value).endswith(remedy)


def test_positions_from_zero() -> None:
    log = urank.read(make_log(position=[0, 1, 0, 1]), first_position=0)
    assert log.frame()["position"].to_list() == [1, 2, 1, 2]
    with pytest.raises(DataError, match="from 0 to 9999; got -1 at"):
        urank.read(make_log(position=[0, -1, 0, 1]), first_position=0).frame()


@pytest.mark.parametrize(
    "click", [[0, 7, 1, 0], ["no", "Yes", "TRUE ", "0"], [False, True, True, False], ["0", "2", "1.0", "f"]]
)
def test_counts_and_words_become_clicks(click: list[Any]) -> None:
    assert urank.read(make_log(click=click), binarise=True).frame()["click"].to_list() == [0, 1, 1, 0]


@pytest.mark.parametrize("click", [["no", "maybe", "no", "no"], [0, None, 1, 0], [0, -1, 1, 0], ["0", "", "1", "0"]])
def test_what_is_no_count_is_still_refused(click: list[Any]) -> None:
    with pytest.raises(DataError, match="click must be 0 or 1"):
        urank.read(make_log(click=click), binarise=True).frame()


def test_unmistakable_names_are_found_and_said() -> None:
    renamed = make_log().rename({"query_id": "SRCH_ID", "position": "Rank", "click": "click_bool"})
    log = urank.read(renamed)
    assert (
        dict(log.schema.roles) | {"query_id": "SRCH_ID", "position": "Rank", "click": "click_bool"} == log.schema.roles
    )
    assert log.schema.guesses.startswith("reading SRCH_ID as query_id, Rank as position, click_bool as click; say -c")
    assert urank.read(make_log()).schema.guesses == ""


def test_a_name_that_two_columns_could_have_is_not_guessed() -> None:
    two = make_log().rename({"position": "rank"}).with_columns(pl.col("rank").alias("pos"))
    with pytest.raises(DataError, match=r"no column 'position'; name the one .*: -c position=rank \("):
        urank.read(two)


def test_an_assigned_role_or_a_role_of_its_own_name_is_not_guessed() -> None:
    both = make_log().with_columns(rank=pl.lit(3.0))
    assert "rank" in urank.read(both).schema.named("numeric")
    assigned = both.rename({"position": "place"})
    assert "rank" in urank.read(assigned, columns={"position": "place"}).schema.named("numeric")


def test_all_missing_roles_are_named_at_once() -> None:
    frame = make_log().rename({"query_id": "search", "position": "shown_at", "click": "n_clicks"})
    with pytest.raises(DataError) as refusal:
        urank.read(frame)
    assert "no column 'query_id' or 'position' or 'click'; name them:" in str(refusal.value)
    assert "-c query_id=NAME -c position=NAME -c click=n_clicks" in str(refusal.value)
