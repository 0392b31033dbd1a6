"""Impressions become queries: nothing lost, nothing split, the same whatever the order and the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import urank
from urank.errors import ConfigError, DataError
from urank.log import prepare
from urank.log.splits import SPLITS, split_by_hash, stable_hash


def impressions(queries: int, seed: int = 0, *, sessions: int = 1) -> pl.DataFrame:
    """A log with gaps, lists below the top, missing values, text, and rows in no order."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, queries * sessions)
    rows = int(lengths.sum())
    of = np.repeat(np.arange(queries * sessions), lengths)
    position = np.concatenate([rng.choice(np.arange(1, 12), n, replace=False) for n in lengths])
    frame = pl.DataFrame(
        {
            "query_id": [f"q{i // sessions}" for i in of],
            "session_id": of % sessions,
            "item_id": rng.integers(0, 50, rows),
            "position": position,
            "click": rng.integers(0, 2, rows),
            "timestamp": of // 3,
            "price": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(size=rows)),
            "brand": rng.choice(["x", "y", "zebra"], rows),
        }
    )
    frame = frame if sessions > 1 else frame.drop("session_id")
    return frame.sample(fraction=1.0, shuffle=True, seed=seed)


def read_back(folder: Path) -> pl.DataFrame:
    return pl.concat(
        pl.read_parquet(path).with_columns(split=pl.lit(split))
        for split in SPLITS
        for path in sorted((folder / split).glob("*.parquet"))
    )


def flat(lists: pl.DataFrame) -> pl.DataFrame:
    columns = [name for name, dtype in lists.schema.items() if isinstance(dtype, pl.List)]
    return lists.explode(columns)


@given(queries=st.integers(1, 40), sessions=st.integers(1, 3), seed=st.integers(0, 10**6), rows=st.integers(1, 10**4))
@settings(max_examples=25, deadline=None)
def test_every_impression_comes_back_once(
    tmp_path_factory: pytest.TempPathFactory, queries: int, sessions: int, seed: int, rows: int
) -> None:
    log = impressions(queries, seed, sessions=sessions)
    folder = tmp_path_factory.mktemp("prepared") / "out"
    opened = urank.read(log)
    urank.prepare(opened, folder, bucket_bytes=rows * opened.row_bytes)
    lists = read_back(folder)
    keys = ["query_id", *(["session_id"] if sessions > 1 else [])]
    assert not lists.select(keys).is_duplicated().any()
    assert all(positions == sorted(positions) for positions in lists["position"].to_list())
    assert lists.group_by("query_id").agg(pl.col("split").n_unique())["split"].max() == 1
    order = [*keys, "position"]
    back = flat(lists).select(log.columns).sort(order)
    expected = opened.frame().select(log.columns).sort(order)
    # the time of a list is that of one of its items; in this log they are all the same
    assert back.equals(expected, null_equal=True)


def test_split_is_that_of_the_hash_and_stable_when_data_is_added(tmp_path: Path) -> None:
    log = impressions(300)
    some = log.filter(pl.col("query_id").str.slice(1).cast(pl.Int64) < 150)
    urank.prepare(urank.read(log), tmp_path / "all", valid=0.2, test=0.3)
    urank.prepare(urank.read(some), tmp_path / "some", valid=0.2, test=0.3)
    everything = dict(read_back(tmp_path / "all").select("query_id", "split").iter_rows())
    part = dict(read_back(tmp_path / "some").select("query_id", "split").iter_rows())
    assert part == {query: everything[query] for query in part}
    hashes = stable_hash(pl.Series(list(everything)))
    assert list(everything.values()) == [SPLITS[s] for s in split_by_hash(hashes, valid=0.2, test=0.3)]


def test_split_by_time_holds_out_the_newest(tmp_path: Path) -> None:
    log = impressions(300, sessions=2)
    described = urank.prepare(urank.read(log), tmp_path / "out", split_by="time", valid=0.1, test=0.2)
    lists = read_back(tmp_path / "out")
    latest = lists.group_by("query_id").agg(pl.col("timestamp").max(), pl.col("split").first())
    newest = {s: latest.filter(pl.col("split") == s)["timestamp"].max() for s in SPLITS}
    oldest = {s: latest.filter(pl.col("split") == s)["timestamp"].min() for s in SPLITS}
    assert newest["train"] < oldest["valid"] <= newest["valid"] < oldest["test"]
    assert described["split"]["train_until"] == newest["train"]
    shares = latest["split"].value_counts(normalize=True)
    assert dict(shares.iter_rows())["test"] == pytest.approx(0.2, abs=0.02)


def test_on_disk_and_in_memory_agree_and_order_does_not_matter(tmp_path: Path) -> None:
    log = impressions(500)
    opened = urank.read(log)
    urank.prepare(opened, tmp_path / "memory")
    urank.prepare(opened, tmp_path / "disk", bucket_bytes=100 * opened.row_bytes)
    urank.prepare(urank.read(log.sort("price")), tmp_path / "sorted")
    by_query = read_back(tmp_path / "memory").sort("query_id")
    assert read_back(tmp_path / "disk").sort("query_id").equals(by_query)
    for split in SPLITS:
        files = [tmp_path / name / split / "part-00000.parquet" for name in ("memory", "sorted")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_two_ids_with_one_hash_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "stable_hash", lambda ids: np.full(len(ids), 7, dtype=np.uint64))
    log = impressions(20)
    urank.prepare(urank.read(log), tmp_path / "out")
    assert read_back(tmp_path / "out")["query_id"].n_unique() == 20
    assert flat(read_back(tmp_path / "out")).height == log.height


def test_row_groups_and_files_have_the_size_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ROW_GROUP_BYTES", 20_000)
    monkeypatch.setattr(prepare, "FILE_BYTES", 100_000)
    log = impressions(3000)
    urank.prepare(urank.read(log), tmp_path / "out")
    files = sorted((tmp_path / "out" / "train").glob("*.parquet"))
    assert len(files) > 2
    groups = [pq.ParquetFile(files[0]).metadata.row_group(i) for i in range(pq.ParquetFile(files[0]).num_row_groups)]
    assert 3 <= len(groups) <= 8
    assert all(5_000 < group.total_byte_size < 40_000 for group in groups)
    assert flat(read_back(tmp_path / "out")).height == log.height


def test_schema_json(tmp_path: Path) -> None:
    log = impressions(400)
    described = urank.prepare(urank.read(log), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "schema.json").read_text()) == described
    lists = read_back(tmp_path / "out")
    assert described["positions"] == log["position"].max()
    for split, counts in described["counts"].items():
        part = lists.filter(pl.col("split") == split)
        assert counts["lists"] == counts["queries"] == part.height
        assert counts["rows"] == flat(part).height
        assert counts["clicks"] == int(flat(part)["click"].cast(pl.Int64).sum())
    train = flat(lists.filter(pl.col("split") == "train"))
    price = next(feature for feature in described["features"] if feature["name"] == "price")
    known = train["price"].drop_nans().cast(pl.Float64)
    assert price["missing"] == train.height - len(known)
    assert price["mean"] == pytest.approx(known.mean())
    assert price["std"] == pytest.approx(known.std(ddof=0))
    assert (price["min"], price["max"]) == (known.min(), known.max())
    brand = next(feature for feature in described["features"] if feature["name"] == "brand")
    assert brand["categories"] == 3
    assert brand["most_frequent"]["zebra"] == (train["brand"] == "zebra").sum()


def test_a_prepared_log_can_be_read_and_inspected_again(tmp_path: Path) -> None:
    log = impressions(200, sessions=2)
    urank.prepare(urank.read(log), tmp_path / "out")
    again = urank.read(tmp_path / "out")
    assert again.schema.named("numeric") == ["price"]
    assert again.schema.named("categorical") == ["brand"]
    assert urank.inspect(again).facts.rows == log.height


def test_a_position_twice_in_a_query_is_refused_with_both_rows(tmp_path: Path) -> None:
    log = impressions(50).sort("query_id", "position")
    twice = pl.concat([log, log[10:11]])
    path = tmp_path / "log.parquet"
    twice.write_parquet(path)
    query, position = log["query_id"][10], log["position"][10]
    sentence = (
        f"a position must occur once in a list; position {position} of query {query} is at row 11 of {path} "
        f"and again at row {twice.height} of {path} "
        "(if these are two showings, name their session with --column session_id=NAME)"
    )
    with pytest.raises(DataError) as refusal:
        urank.prepare(urank.read(path), tmp_path / "out")
    assert str(refusal.value) == sentence
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.parquet"]


@pytest.mark.parametrize("bad_row", [0, 700, -1])
def test_nothing_is_left_behind_after_a_refusal(tmp_path: Path, bad_row: int) -> None:
    log = impressions(400)
    click = log["click"].to_list()
    click[bad_row] = 3
    opened = urank.read(log.with_columns(click=pl.Series(click)))
    with pytest.raises(DataError, match="click must be 0 or 1; got 3"):
        urank.prepare(opened, tmp_path / "deep" / "out", bucket_bytes=50 * opened.row_bytes)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_asked(tmp_path: Path) -> None:
    log = urank.read(impressions(20))
    urank.prepare(log, tmp_path / "out")
    with pytest.raises(ConfigError, match="out exists already"):
        urank.prepare(log, tmp_path / "out")
    urank.prepare(urank.read(impressions(30)), tmp_path / "out", overwrite=True)
    assert read_back(tmp_path / "out").height == 30
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds something else \(it has no schema.json\), so it is not replaced"):
        urank.prepare(log, precious, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"valid": 0.6, "test": 0.6}, "shares of valid and test must be from 0 to 1 and sum to at most 1"),
        ({"valid": -0.1}, "shares of valid and test"),
        ({"split_by": "random"}, "split_by must be 'hash' or 'time'; got 'random'"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        urank.prepare(urank.read(impressions(5)), tmp_path / "out", **arguments)
    with pytest.raises(ConfigError, match="split_by 'time' needs a timestamp"):
        urank.prepare(urank.read(impressions(5).drop("timestamp")), tmp_path / "out", split_by="time")


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    told: dict[str, tuple[float, float | None]] = {}
    log = urank.read(impressions(100))
    urank.prepare(
        log, tmp_path / "out", bucket_bytes=20 * log.row_bytes, report=lambda s, d, t, _="": told.update({s: (d, t)})
    )
    assert told["writing"][0] == told["writing"][1]
    assert told["reading"][1] == log.size


def test_buckets_keep_queries_whole(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).integers(0, 500, 5000).astype(np.uint64)
    frame = pl.DataFrame({"__urank_query": keys, "x": np.arange(5000)})
    with prepare.Buckets(tmp_path / "b", row_bytes=1, bucket_bytes=400) as found:
        for start in range(0, 5000, 700):
            found.add(frame[start : start + 700])
        parts = list(found)
    assert len(parts) > 5
    assert sum(part["__urank_query"].n_unique() for part in parts) == len(np.unique(keys))
    assert sorted(pl.concat(parts)["x"].to_list()) == list(range(5000))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("source_bytes", [0, 60_000])
def test_a_bucket_that_became_too_large_is_scattered_again(tmp_path: Path, source_bytes: int) -> None:
    keys = np.random.default_rng(0).integers(0, 20_000, 60_000).astype(np.uint64)
    frame = pl.DataFrame({"__urank_query": keys, "x": np.arange(len(keys))})
    with prepare.Buckets(tmp_path / "b", row_bytes=1, bucket_bytes=400, source_bytes=source_bytes) as found:
        for start in range(0, len(keys), 7_000):
            found.add(frame[start : start + 7_000])
        count = len(found)
        parts = list(found)
    assert len(parts) == count
    assert max(part.height for part in parts) <= 400
    assert sum(part["__urank_query"].n_unique() for part in parts) == len(np.unique(keys))
    assert sorted(pl.concat(parts)["x"].to_list()) == list(range(len(keys)))
    assert not (tmp_path / "b").exists()


def test_preparing_again_gives_the_same_split(tmp_path: Path) -> None:
    log = impressions(200, sessions=2).with_columns(timestamp=pl.int_range(pl.len()).shuffle(seed=1))
    urank.prepare(urank.read(log), tmp_path / "once", split_by="time", valid=0.2, test=0.2)
    urank.prepare(urank.read(tmp_path / "once"), tmp_path / "twice", split_by="time", valid=0.2, test=0.2)
    once, twice = (read_back(tmp_path / name) for name in ("once", "twice"))
    assert once.equals(twice)
    latest = log.group_by("query_id", pl.col("session_id").cast(pl.String)).agg(pl.col("timestamp").max())
    joined = once.join(latest, on=["query_id", "session_id"], suffix="_latest")
    assert (joined["timestamp"] == joined["timestamp_latest"]).all()


def test_many_categories_are_counted_alike_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MAX_CATEGORIES", 20)
    log = impressions(300).with_columns(
        few=pl.int_range(pl.len()).mod(20).cast(pl.String), many=pl.int_range(pl.len()).mod(21).cast(pl.String)
    )
    features = []
    for number in range(2):
        described = urank.prepare(
            urank.read(log.sample(fraction=1.0, shuffle=True, seed=number)), tmp_path / str(number)
        )
        features.append({feature["name"]: feature for feature in described["features"]})
    assert features[0] == features[1]
    assert features[0]["few"]["categories"] == 20
    assert "more_categories" not in features[0]["few"]
    assert (features[0]["many"]["categories"], features[0]["many"]["more_categories"]) == (20, True)


def test_only_what_urank_wrote_is_replaced(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "schema.json").write_text('{"type": "record"}')
    with pytest.raises(ConfigError, match=r"other holds something else \(its schema.json is not urank's\)"):
        urank.prepare(urank.read(impressions(5)), other, overwrite=True)
    assert [path.name for path in other.iterdir()] == ["schema.json"]


def test_outcomes_of_the_click_are_left_out(tmp_path: Path) -> None:
    log = impressions(200).with_columns(
        dwell=pl.col("click") * 3.5, bought=pl.when(pl.col("click") == 1).then(pl.lit("yes"))
    )
    opened = urank.read(log)
    written = urank.prepare(opened, tmp_path / "default", bucket_bytes=20_000)
    assert written["left_out"] == ["dwell", "bought"]
    assert [feature["name"] for feature in written["features"]] == ["price", "brand"]
    assert not {"dwell", "bought"} & set(read_back(tmp_path / "default").columns)
    assert json.loads((tmp_path / "default" / "schema.json").read_text()) == written

    kept = urank.prepare(opened, tmp_path / "kept", keep=["dwell"])
    assert kept["left_out"] == ["bought"]
    assert "dwell" in [feature["name"] for feature in kept["features"]]
    assert "left_out" not in urank.prepare(opened, tmp_path / "both", keep=["dwell", "bought"])
    with pytest.raises(ConfigError, match="keep must name features; got 'click', but the table has price, brand"):
        urank.prepare(opened, tmp_path / "refused", keep=["click"])
    assert not (tmp_path / "refused").exists()


def test_of_the_hotel_log_bookings_are_left_out_and_nothing_else(data_dir: Path, tmp_path: Path) -> None:
    columns = {"query_id": "srch_id", "click": "click_bool", "item_id": "prop_id"}
    log = urank.read(data_dir / "expedia" / "searches.csv.gz", columns=columns)
    written = urank.prepare(log, tmp_path / "prepared")
    assert log.schema.guesses.startswith("reading booking_bool as conversion")
    assert written["left_out"] == ["gross_bookings_usd"]
    assert len(written["features"]) == len(log.schema.features) - 1
