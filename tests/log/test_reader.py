"""Files, folders, globs, partitions and tables: the same log whatever it comes in."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import urank
from urank.errors import DataError

LOG = pl.DataFrame(
    {
        "query_id": [1, 1, 2, 2, 3, 3],
        "position": [1, 2, 1, 2, 2, 5],
        "click": [0, 1, 0, 0, 1, 0],
        "price": [1.5, None, 2.0, 3.0, 4.0, 5.0],
        "brand": ["x", "y", None, "x", "x", "z"],
    }
)


def rows(source: object) -> list[tuple[object, ...]]:
    frame = urank.read(source).frame()
    return (
        frame.select(sorted(set(frame.columns) - {"__urank_row"})).with_columns(pl.col("price").fill_nan(None)).rows()
    )


def test_every_form_gives_the_same_log(tmp_path: Path) -> None:
    expected = rows(LOG)
    LOG.write_parquet(tmp_path / "log.parquet", row_group_size=2)
    LOG.write_csv(tmp_path / "log.csv")
    LOG.write_csv(tmp_path / "log.tsv", separator="\t")
    (tmp_path / "zipped.csv.gz").write_bytes(gzip.compress((tmp_path / "log.csv").read_bytes()))
    for source in ("log.parquet", "log.csv", "log.tsv", "zipped.csv.gz"):
        assert rows(tmp_path / source) == expected, source
    assert rows(LOG.lazy()) == expected
    assert rows(LOG.to_arrow()) == expected
    assert rows(pd.DataFrame(LOG.to_dict(as_series=False))) == expected


def test_folders_globs_and_partitions(tmp_path: Path) -> None:
    for day, part in enumerate((LOG[:2], LOG[2:])):
        folder = tmp_path / "log" / f"day={day}"
        folder.mkdir(parents=True)
        part.write_parquet(folder / "part.parquet")
    log = urank.read(tmp_path / "log")
    assert log.schema.named("numeric") == ["price", "day"]
    assert log.frame()["day"].to_list() == [0, 0, 1, 1, 1, 1]
    assert urank.read(f"{tmp_path}/log/*/*.parquet").frame().equals(log.frame())
    assert rows(f"{tmp_path}/log/day=0/*.parquet") == rows(LOG[:2])
    by_policy = urank.read(tmp_path / "log", columns={"policy": "day"})
    assert by_policy.frame()["policy"].to_list() == ["0", "0", "1", "1", "1", "1"]


def test_numbers_that_come_late_in_a_csv_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    lines = ["query_id,position,click,late", *(f"{q},1,0," for q in range(5000)), "5000,1,1,2.5"]
    path.write_text("\n".join(lines) + "\n")
    log = urank.read(path)
    assert log.schema.named("numeric") == ["late"]
    assert log.frame()["late"].drop_nans().to_list() == [2.5]


def test_errors_name_the_file_of_the_row(tmp_path: Path) -> None:
    LOG.write_parquet(tmp_path / "a.parquet")
    LOG.with_columns(position=pl.Series([1, 2, 1, 2, 0, 3])).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=rf"got 0 at row 5 of {tmp_path}/b\.parquet"):
        urank.read(f"{tmp_path}/*.parquet").frame()


def test_conflicting_types_between_files(tmp_path: Path) -> None:
    LOG.write_parquet(tmp_path / "a.parquet")
    LOG.with_columns(pl.col("price").cast(pl.String)).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'price' is Float64 in .*a\.parquet but String in .*b\.parquet"):
        urank.read(tmp_path)
    LOG.drop("price").write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'price' is in .*a\.parquet but not in .*b\.parquet"):
        urank.read(tmp_path)
    LOG.with_columns(more=1).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'more' is in .*b\.parquet but not in .*a\.parquet"):
        urank.read(tmp_path)
    LOG.with_columns(pl.col("price").cast(pl.Int64)).write_parquet(tmp_path / "b.parquet")
    assert urank.read(tmp_path).frame().height == 2 * LOG.height


@pytest.mark.parametrize("keep", [0, 3, 100, -40, -4])
def test_truncated_parquet(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "log.parquet"
    LOG.write_parquet(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"log\.parquet is not a readable Parquet file"):
        urank.read(path).frame()


def test_damaged_pages(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pl.concat([LOG] * 1000).write_parquet(path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[40:400] = b"\xff" * 360
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"log\.parquet is not a readable Parquet file"):
        urank.read(path).frame()


def test_csv_that_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"log\.csv is empty; the first line must name the columns"):
        urank.read(path)
    path.write_text("query_id,position,click\n1,1,0\n1,2\n2,1,1,7,8\n")
    with pytest.raises(DataError, match=r"log\.csv is not a readable CSV file"):
        urank.read(path).frame()
    cut = tmp_path / "log.csv.gz"
    cut.write_bytes(gzip.compress(b"query_id,position,click\n" + b"1,1,0\n" * 1000)[:40])
    with pytest.raises(DataError, match=r"log\.csv\.gz is not a readable CSV file"):
        urank.read(cut).frame()


def test_empty_logs_and_missing_files(tmp_path: Path) -> None:
    LOG[:0].write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log\.parquet is empty; a log needs at least one impression"):
        urank.read(tmp_path / "log.parquet").frame()
    with pytest.raises(DataError, match="the table is empty"):
        urank.read(LOG[:0]).frame()
    with pytest.raises(DataError, match=r"absent\.parquet does not exist"):
        urank.read(tmp_path / "absent.parquet")
    with pytest.raises(DataError, match="no file matches"):
        urank.read(f"{tmp_path}/*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty contains no Parquet or CSV file"):
        urank.read(tmp_path / "empty")


def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "letor.txt").write_text("2 qid:1 1:0.5 2:0.25\n")
    with pytest.raises(DataError, match="LETOR file, which has labels but no clicks and serves only to simulate"):
        urank.read(tmp_path / "letor.txt")
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(DataError, match=r"notes\.txt is not a file that can be read; the name must end in \.parquet"):
        urank.read(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"must be a path or a table .* got builtins\.list"):
        urank.read([1, 2])


def test_hotel_log(data_dir: Path) -> None:
    columns = {"query_id": "srch_id", "click": "click_bool", "item_id": "prop_id", "timestamp": "date_time"}
    log = urank.read(data_dir / "expedia" / "searches.csv.gz", columns=columns, drop=["booking_bool"])
    frame = log.frame()
    assert frame["query_id"].n_unique() == 1794
    assert frame.height == 44334
    assert int(frame["click"].cast(pl.Int64).sum()) == 1981
    assert log.schema.named("categorical") == []
    assert len(log.schema.named("numeric")) == 54 - 6


def csv(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_ids_in_a_csv_stay_as_they_are_written(tmp_path: Path) -> None:
    text = "query_id,position,click,item_id,shop,price\n00017,1,0,1e5,007,1\n00017,2,1,9007199254740993,8,2.5\n"
    path = csv(tmp_path / "log.csv", text)
    frame = urank.read(path, categorical=["shop"]).frame()
    assert frame["query_id"].to_list() == ["00017", "00017"]
    assert frame["item_id"].to_list() == ["1e5", "9007199254740993"]
    assert frame["shop"].to_list() == ["007", "8"]
    assert frame["price"].to_list() == [1, 2.5]
    mapped = urank.read(path, columns={"policy": "shop"}).frame()
    assert mapped["policy"].to_list() == ["007", "8"]


@pytest.mark.parametrize("token", ["NULL", "null", "NA", "N/A", "nan", "NaN", "None", "", " ", " NA "])
def test_missing_numbers_in_a_csv(tmp_path: Path, token: str) -> None:
    text = f"query_id,position,click,x,country\n1,1,0,{token},NA\n1,2,0, 5 ,DE\n1,3,1,-1e3,DE\n"
    log = urank.read(csv(tmp_path / "log.csv", text))
    assert log.schema.named("numeric") == ["x"]
    assert log.frame()["x"].fill_nan(None).to_list() == [None, 5, -1000]
    assert log.frame()["country"].to_list() == ["NA", "DE", "DE"]


@pytest.mark.parametrize("tokens", [("NA", "NA"), ("NULL", " NA "), ("nan", ""), ("", ""), (" ", " ")])
def test_a_csv_column_of_nothing_but_missing_numbers(tmp_path: Path, tokens: tuple[str, str]) -> None:
    text = "query_id,position,click,x\n" + "".join(f"1,{k},0,{token}\n" for k, token in enumerate(tokens, start=1))
    log = urank.read(csv(tmp_path / "log.csv", text))
    assert log.schema.named("numeric") == ["x"]
    assert log.frame()["x"].is_nan().all()
    assert urank.inspect(log).facts.rows == 2
    with pytest.raises(DataError, match=r"value must be a finite number from 0 up; got nothing at row 1 of .*log\.csv"):
        urank.read(tmp_path / "log.csv", columns={"value": "x"}).frame()


def test_missing_numbers_may_be_names_in_other_files(tmp_path: Path) -> None:
    head = "query_id,position,click,x,country\n"
    csv(tmp_path / "0.csv", head + "1,1,0,NA,NA\n")
    csv(tmp_path / "1.csv", head + "1,2,1,2,DE\n")
    log = urank.read(tmp_path)
    assert (log.schema.named("numeric"), log.schema.named("categorical")) == (["x"], ["country"])
    assert log.frame()["x"].fill_nan(None).to_list() == [None, 2]
    assert log.frame()["country"].to_list() == ["NA", "DE"]
    named = urank.read(tmp_path / "0.csv", categorical=["country"])
    assert named.frame()["country"].to_list() == ["NA"]


def test_text_in_a_csv_stays_text(tmp_path: Path) -> None:
    log = urank.read(csv(tmp_path / "log.csv", 'query_id,position,click,x\n1,1,0,"1,234"\n1,2,0,5\n'))
    assert log.schema.named("categorical") == ["x"]
    assert log.frame()["x"].to_list() == ["1,234", "5"]


def test_the_index_of_pandas_is_left_out(tmp_path: Path) -> None:
    table = LOG.to_pandas()
    table.to_csv(tmp_path / "log.csv")
    assert rows(tmp_path / "log.csv") == rows(LOG)
    by_letter = table.set_index(pd.Index(list("abcdef")))
    by_letter.to_parquet(tmp_path / "log.parquet")
    assert rows(tmp_path / "log.parquet") == rows(by_letter) == rows(LOG)


def test_headers_that_are_wrong(tmp_path: Path) -> None:
    path = csv(tmp_path / "log.csv", "query_id,position,click,x,x\n1,1,0,2,3\n")
    with pytest.raises(DataError, match=r"log\.csv has two columns named 'x'; rename one"):
        urank.read(path)
    with pytest.raises(DataError, match=r"column 4 of .*log\.csv has no name"):
        urank.read(csv(path, "query_id,position,click,\n1,1,0,2\n"))


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    names = ["query_id", "position", "click", "click"]
    table = pa.table([pa.array([1])] * 4, names=names)
    with pytest.raises(DataError, match="the table has two columns named 'click'"):
        urank.read(table)
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log\.parquet has two columns named 'click'"):
        urank.read(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="the table has a column that cannot be read: Duplicate column names"):
        urank.read(pd.DataFrame([[1, 1, 0, 0]], columns=names))


def test_a_column_of_mixed_types() -> None:
    table = pd.DataFrame({"query_id": [1, 1], "position": [1, 2], "click": [0, 1], "x": [1, "a"]})
    with pytest.raises(DataError, match="the table has a column that cannot be read") as refusal:
        urank.read(table)
    assert "\n" not in str(refusal.value)


def test_brackets_in_a_name_are_no_glob(tmp_path: Path) -> None:
    LOG.write_csv(tmp_path / "log[1].csv")
    LOG[:2].write_csv(tmp_path / "log1.csv")
    assert rows(tmp_path / "log[1].csv") == rows(LOG)


def test_a_file_in_which_a_column_is_empty_says_nothing_of_its_type(tmp_path: Path) -> None:
    head = "query_id,position,click,x,y\n"
    for number, body in enumerate(("", "1,1,0,,\n", "1,2,1,red,2.5\n", "1,3,1,,\n")):
        csv(tmp_path / f"{number}.csv", head + body)
    log = urank.read(tmp_path)
    assert (log.schema.named("categorical"), log.schema.named("numeric")) == (["x"], ["y"])
    assert log.frame()["x"].to_list() == [None, "red", None]
    folder = tmp_path / "parquet"
    folder.mkdir()
    LOG.with_columns(brand=pl.lit(None)).write_parquet(folder / "a.parquet")
    LOG.write_parquet(folder / "b.parquet")
    assert urank.read(folder).frame()["brand"].to_list() == [None] * 6 + LOG["brand"].to_list()


def test_files_that_disagree_can_be_read_as_text_or_without_the_column(tmp_path: Path) -> None:
    LOG.write_parquet(tmp_path / "a.parquet")
    LOG.with_columns(pl.col("price").cast(pl.String)).write_parquet(tmp_path / "b.parquet")
    assert urank.read(tmp_path, categorical=["price"]).frame()["price"][0] == "1.5"
    assert urank.read(tmp_path, drop=["price"]).frame().height == 12


def test_whole_and_fractional_seconds_in_two_files(tmp_path: Path) -> None:
    LOG.with_columns(timestamp=pl.lit(2)).write_parquet(tmp_path / "a.parquet")
    LOG.with_columns(timestamp=pl.lit(2.5)).write_parquet(tmp_path / "b.parquet")
    assert set(urank.read(tmp_path).frame()["timestamp"]) == {2_000_000, 2_500_000}


@pytest.mark.parametrize(
    ("folders", "values"),
    [
        (("day=1", "day=-2"), [1.0, -2.0]),
        (("day=01", "day=02"), ["01", "02"]),
        (("day=a%20b", "day=c"), ["a b", "c"]),
        (("day=1", "day=__HIVE_DEFAULT_PARTITION__"), [1.0, None]),
        (("day=--5", "day=5"), ["--5", "5"]),
    ],
)
def test_values_of_partitions(tmp_path: Path, folders: tuple[str, str], values: list[object]) -> None:
    for folder in folders:
        (tmp_path / "log" / folder).mkdir(parents=True)
        LOG[:1].write_parquet(tmp_path / "log" / folder / "part.parquet")
    for source in (tmp_path / "log", f"{tmp_path}/log/day=*/*.parquet"):
        day = urank.read(source).frame()["day"]
        found = day.fill_nan(None).to_list() if day.dtype.is_float() else day.to_list()
        assert sorted(map(str, found)) == sorted(map(str, values))


def test_long_texts_count_in_the_size_of_a_row() -> None:
    short, long = (urank.read(LOG.with_columns(brand=pl.lit("x" * n))) for n in (1, 5000))
    assert short.row_bytes < 300
    assert 5000 < long.row_bytes < 6000


LINES = ("query_id", "position", "click", "price")


def csv_of(path: Path, separator: str, price: Sequence[str], *, encoding: str = "utf-8") -> Path:
    rows = [("q1", "1", "0", price[0]), ("q1", "2", "1", price[1])]
    path.write_text("\n".join(separator.join(row) for row in (LINES, *rows)) + "\n", encoding=encoding)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found(tmp_path: Path, separator: str) -> None:
    log = urank.read(csv_of(tmp_path / "log.csv", separator, ["9.5", "3.25"]))
    assert log.frame()["price"].to_list() == [9.5, 3.25]


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_decimal_commas_between_semicolons(tmp_path: Path, name: str) -> None:
    path = csv_of(tmp_path / "plain.csv", ";", ["9,5", "-3,25"])
    if name.endswith(".gz"):
        packed = tmp_path / name
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    assert urank.read(path).frame()["price"].to_list() == [9.5, -3.25]


def test_utf_16_is_told_with_the_remedy(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "log.csv", ",", ["9.5", "3.25"], encoding="utf-16")
    with pytest.raises(DataError, match="is UTF-16 text; convert it to UTF-8: iconv"):
        urank.read(path)


def test_ids_under_a_usual_name_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("srch_id,position,click\n0017,1,0\n0017,2,1\n")
    assert urank.read(path).frame()["query_id"].to_list() == ["0017", "0017"]
