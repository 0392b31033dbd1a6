"""Arrow IPC bodies: the same answers as JSON, and nothing that a body can hold fails or grows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cases import KINDS, candidates, client, example, frame, lists_of, loaded, reader_of
from urank.serve.request_arrays import ARROW_TYPE, MISSING, CandidateReader, RequestLists, read_arrow
from urank.serve.request_schemas import Problem
from urank.serve.server_settings import Limits

READER = CandidateReader(("a", "b"), ("c", "d"), Limits())
HEADERS = {"content-type": ARROW_TYPE}
seeds = st.integers(0, 2**32 - 1)


def stream(table: pa.Table, rows: int | None = None, **options: Any) -> bytes:
    """A table as a stream, so many rows in a batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return bytes(sink.getvalue().to_pybytes())


def table(**columns: Any) -> pa.Table:
    """Two lists of two items."""
    given_: dict[str, Any] = {
        "query_id": ["q", "q", "r", "r"],
        "item_id": ["w", "x", "w", "y"],
        "a": [1.5, 2.0, None, -0.5],
        "b": pa.array([1, 2, 3, None], pa.int32()),
        "c": ["red", None, "", "blue"],
        "d": ["long enough to be more than a view"] * 4,
    }
    merged = {name: column for name, column in (given_ | columns).items() if column is not None}
    return pa.table(merged)


def read(found: pa.Table | bytes, reader: CandidateReader = READER) -> RequestLists:
    return read_arrow(found if isinstance(found, bytes) else stream(found), reader)


def refusal(found: pa.Table | bytes, reader: CandidateReader = READER) -> Problem:
    with pytest.raises(Problem) as error:
        read(found, reader)
    assert 400 <= error.value.status < 500
    return error.value


def same(one: RequestLists, other: RequestLists) -> bool:
    ours, theirs = one.items, other.items
    return (
        (list(one.query_ids), list(one.item_ids)) == (list(other.query_ids), list(other.item_ids))
        and (list(one.user_ids), list(one.positions)) == (list(other.user_ids), list(other.positions))
        and list(one.methods) == list(other.methods)
        and np.array_equal(ours.numeric, theirs.numeric, equal_nan=True)
        and ours.categorical.tolist() == theirs.categorical.tolist()
        and np.array_equal(ours.value, theirs.value)
        and np.array_equal(ours.offsets, theirs.offsets)
    )


@given(st.sampled_from(KINDS), seeds, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 9))
def test_the_arrays_are_those_of_json(kind: str, seed: int, lengths: list[int], rows: int) -> None:
    """However many rows there are in a batch."""
    model, rng = loaded(kind), np.random.default_rng(seed)
    queries = [
        {"query_id": f"q{number}", "candidates": candidates(model, rng, length)}
        for number, length in enumerate(lengths)
    ]
    reader = reader_of(model)
    assert same(read(stream(frame(queries).to_arrow(), rows), reader), lists_of(reader, queries))


def test_what_belongs_to_a_list_is_that_of_its_first_row() -> None:
    found = read(
        table(
            user_id=["u", None, "v", "w"],
            positions=pa.array([3, None, None, 7], pa.uint8()),
            method=["match", "no method", "ctr1", "score"],
            value=[2.0, None, 0.0, 1e30],
        )
    )
    assert (found.query_ids, found.item_ids) == (["q", "r"], ["w", "x", "w", "y"])
    assert (found.user_ids, found.positions, found.methods) == (["u", "v"], [3, None], ["match", "ctr1"])
    assert found.items.value.tolist() == [2.0, 1.0, 0.0, float(np.float32(1e30))]
    assert found.items.offsets.tolist() == [0, 2, 4]
    plain = read(table())
    assert (plain.user_ids, plain.positions, plain.methods) == ([None] * 2, [None] * 2, [None] * 2)
    assert (plain.has_values, found.has_values) == ([False, False], [True, True])
    empty = {name: pa.nulls(4) for name in ("user_id", "positions", "method", "value")}
    assert same(read(table(**empty)), plain)


def test_large_strings_and_chunks() -> None:
    plain = table(user_id=["u", "u", "v", "v"], method=["match"] * 4)
    names = ("query_id", "item_id", "c", "d", "user_id", "method")
    changed = table(**{name: plain[name].cast(pa.large_string()) for name in names})
    for rows in (None, 1, 3):
        assert same(read(stream(changed, rows)), read(plain))


@pytest.mark.parametrize("name", ["query_id", "item_id", "c", "d"])
def test_dictionaries_and_views_are_refused(name: str) -> None:
    """A few bytes of them may stand for gigabytes."""
    problem = refusal(table(**{name: table()[name].dictionary_encode()}))
    assert (problem.status, "plain strings" in problem.detail) == (415, True)
    problem = refusal(table(**{name: table()[name].cast(pa.string_view())}))
    assert (problem.status, problem.errors) == (422, [(name, "is string_view")])


def test_a_category_has_a_largest_length() -> None:
    assert read(table(c=["x" * 4_096] * 4)).items.categorical[0, 0] == "x" * 4_096
    assert refusal(table(c=["x", "x", "x" * 4_097, "x"])).errors == [("c", "is too long")]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint64()])
def test_ids_may_be_numbers(kind: pa.DataType) -> None:
    found = read(table(query_id=pa.array([7, 7, 0, 0], kind), item_id=pa.array([1, 2, 1, 2], kind)))
    assert (found.query_ids, found.item_ids) == (["7", "0"], ["1", "2", "1", "2"])


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.null()])
def test_numbers_of_every_kind(kind: pa.DataType) -> None:
    numbers = [None] * 4 if kind == pa.null() else [1, 2, None, 4]
    found = read(table(a=pa.array(numbers, kind), value=pa.array(numbers, kind)))
    wanted = np.array([np.nan if each is None else each for each in numbers], dtype=np.float32)
    np.testing.assert_array_equal(found.items.numeric[:, 0], wanted)
    assert found.items.value.tolist() == [1.0 if each is None else each for each in numbers]


def test_categories_may_be_numbers() -> None:
    for column, wanted in (
        (pa.array([1, 2, None, -3]), ["1", "2", MISSING, "-3"]),
        (pa.array([1.0, 2.5, None, float("nan")]), ["1", "2.5", MISSING, MISSING]),
        (pa.array([2.1, 3.0, None, 1.0], pa.float32()), ["2.1", "3", MISSING, "1"]),
        (pa.array([True, False, None, True]), ["true", "false", MISSING, "true"]),
        (pa.nulls(4), [MISSING] * 4),
    ):
        assert read(table(c=column)).items.categorical[:, 0].tolist() == wanted


def test_nan_is_missing_and_infinity_refused() -> None:
    found = read(table(a=[float("nan"), 1, 2, 3]))
    assert np.isnan(found.items.numeric[0, 0])
    for column in ([float("inf"), 1, 2, 3], [1e39, 1, 2, 3], [1, 2, 3, -1e300]):
        problem = refusal(table(a=pa.array(column, pa.float64())))
        assert (problem.status, [at for at, _ in problem.errors]) == (422, ["a"])
    assert [at for at, _ in refusal(table(c=[1.0, float("inf"), 2, 3])).errors] == ["c"]
    for value in ([float("nan"), 1, 1, 1], [-1, 1, 1, 1], [1e31, 1, 1, 1], [float("inf"), 1, 1, 1]):
        assert [at for at, _ in refusal(table(value=pa.array(value, pa.float64()))).errors] == ["value"]


@pytest.mark.parametrize(
    ("columns", "status", "place"),
    [
        ({"query_id": None}, 422, "query_id"),
        ({"item_id": None}, 422, "item_id"),
        ({"a": None}, 422, "a"),
        ({"c": None}, 422, "c"),
        ({"colour": ["red"] * 4}, 422, "colour"),
        ({"query_id": ["q", "r", "q", "r"]}, 422, "query_id"),
        ({"item_id": ["w", "w", "x", "y"]}, 422, "item_id"),
        ({"item_id": ["w", None, "w", "y"]}, 422, "item_id"),
        ({"item_id": ["w", "", "w", "y"]}, 422, "item_id"),
        ({"item_id": ["w", "x" * 513, "w", "y"]}, 422, "item_id"),
        ({"item_id": [1.0, 2.0, 3.0, 4.0]}, 422, "item_id"),
        ({"query_id": [True, True, False, False]}, 422, "query_id"),
        ({"query_id": pa.nulls(4)}, 422, "query_id"),
        ({"user_id": ["u", "u", None, None]}, 422, "user_id"),
        ({"positions": [0, 0, 1, 1]}, 422, "positions"),
        ({"positions": [10_001] * 4}, 422, "positions"),
        ({"positions": [1.0] * 4}, 422, "positions"),
        ({"positions": ["1"] * 4}, 422, "positions"),
        ({"method": ["magic"] * 4}, 422, "method"),
        ({"method": [1] * 4}, 422, "method"),
        ({"value": ["1"] * 4}, 422, "value"),
        ({"value": [True] * 4}, 422, "value"),
        ({"a": ["1"] * 4}, 422, "a"),
        ({"a": [True] * 4}, 422, "a"),
        ({"a": [[1.0]] * 4}, 422, "a"),
        ({"a": pa.array([1, 2, 3, 4], pa.decimal128(5))}, 422, "a"),
        ({"a": pa.array([1, 2, 3, 4], pa.timestamp("us"))}, 422, "a"),
        ({"c": [b"x"] * 4}, 422, "c"),
        ({"c": [{"x": 1}] * 4}, 422, "c"),
        ({"item_id": pa.RunEndEncodedArray.from_arrays(pa.array([4], pa.int32()), ["x"])}, 422, "item_id"),
    ],
)
def test_tables_that_will_not_do(columns: dict[str, Any], status: int, place: str) -> None:
    problem = refusal(table(**columns))
    assert (problem.status, [at for at, _ in problem.errors]) == (status, [place])


def test_other_columns() -> None:
    both = table(colour=["red"] * 4, nested=[[[1]]] * 4)
    lenient = CandidateReader(READER.numeric, READER.categorical, Limits(), ignore_unknown=True)
    assert same(read(both, lenient), read(table()))
    names = [*table().column_names, "a"]
    twice = pa.Table.from_arrays([*table().columns, table()["a"]], names=names)
    assert refusal(twice).detail == "column names must be unique"
    assert refusal(twice, lenient).detail == "column names must be unique"
    assert refusal(table().slice(0, 0)).detail == "a stream needs at least one row"
    long = table(**{"x" * 5_000: ["red"] * 4})
    assert len(refusal(long).errors[0][0]) <= 100


def test_limits() -> None:
    def limited(**limits: int) -> CandidateReader:
        return CandidateReader(READER.numeric, READER.categorical, Limits(**limits))

    assert len(read(table(), limited(candidates=2, queries=2, rows=4)).items) == 4
    assert "at most 1 candidates" in refusal(table(), limited(candidates=1)).detail
    assert "at most 1 queries" in refusal(table(), limited(queries=1)).detail
    assert "at most 3 rows" in refusal(table(), limited(rows=3)).detail
    sink = pa.BufferOutputStream()
    batch = table().to_batches()[0]
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(10_001):
            writer.write_batch(batch.slice(0, 0))
    assert "a stream has at most 10000 messages" in refusal(bytes(sink.getvalue().to_pybytes())).detail


POOLS: list[pa.MemoryPool] = []  # they must outlive all that was taken from them


class Grown:
    """How many bytes Arrow took at most."""

    def __enter__(self) -> Grown:
        self.before = pa.default_memory_pool()
        self.pool = pa.proxy_memory_pool(self.before)
        POOLS.append(self.pool)
        pa.set_memory_pool(self.pool)
        return self

    def __exit__(self, *_: object) -> None:
        pa.set_memory_pool(self.before)
        self.bytes = self.pool.max_memory() or 0


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_streams_are_refused_and_not_inflated(codec: str) -> None:
    body = stream(pa.table({"a": np.zeros(50_000_000, dtype=np.float32)}), compression=codec)  # 200 MB
    texts = stream(table(c=table()["c"].dictionary_encode()), compression=codec)
    assert len(body) < 2_000_000
    with Grown() as grown:
        assert refusal(body).detail == "an Arrow IPC stream must not be compressed"
        assert (refusal(body).status, refusal(texts).status) == (415, 415)
    assert grown.bytes < 2**24


def test_compression_by_an_older_way_is_refused_too() -> None:
    """Arrow 0.17 said in a note beside the message that buffers are compressed; it is still understood."""
    size = 2**32
    packed = struct.pack("<q", size) + bytes(pa.compress(b"\0" * 2**20, codec="zstd", asbytes=True))
    batch = pa.record_batch({"a": pa.array(np.frombuffer(packed, dtype=np.uint8))})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "ZSTD"})
    with Grown() as grown:
        assert refusal(bytes(sink.getvalue().to_pybytes())).status == 415
    assert grown.bytes < 2**24


def bombs() -> list[Any]:
    """FeedbackColumns of 20,000 rows that share one text of a megabyte: 20 GB, if each had its own."""
    n, text = 20_000, "x" * 2**20
    view = struct.pack("<i4sii", len(text), b"xxxx", 0, 0) * n
    views = pa.Array.from_buffers(pa.string_view(), n, [None, pa.py_buffer(view), pa.py_buffer(text.encode())])
    zeros = pa.array(np.zeros(n, dtype=np.int8))
    return [
        pa.DictionaryArray.from_arrays(zeros, pa.array([text])),
        pa.DictionaryArray.from_arrays(zeros, pa.array([text], pa.large_string())),
        pa.DictionaryArray.from_arrays(zeros, pa.array([text], pa.string_view())),
        views,
    ]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", ["query_id", "item_id", "c", "user_id"])
def test_texts_that_many_rows_share_do_not_grow(number: int, name: str) -> None:
    n = 20_000
    ids = pa.array([str(row) for row in range(n)])
    columns = {"query_id": pa.array(["q"] * n), "item_id": ids, "a": pa.nulls(n), "b": pa.nulls(n), "c": ids, "d": ids}
    body = stream(pa.table(columns | {name: bombs()[number]}))
    assert len(body) < 4 * 2**20
    with Grown() as grown:
        assert refusal(body).status in (415, 422)
    assert grown.bytes < 2**26


VALID = [
    stream(table(value=[1.0, 2, 3, 4], positions=[2] * 4, user_id=["u"] * 4), 2),
    stream(table(**{name: table()[name].dictionary_encode() for name in ("query_id", "c", "d")}), 2),
]
ODD = [struct.pack("<i", number) for number in (0, 1, -1, 255, 2**31 - 1, -(2**31), 2**16)]
ODD += [struct.pack("<q", number) for number in (0, -1, 2**63 - 1, 2**40)]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A stream with a few bytes changed, put in, or taken out, mostly in what describes the rest."""
    body = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(body) - 1))
        change = draw(st.sampled_from(["byte", "odd", "cut", "copy", "end"]))
        if change == "byte":
            body[place] = draw(st.integers(0, 255))
        elif change == "odd":
            odd = draw(st.sampled_from(ODD))
            body[place : place + len(odd)] = odd
        elif change == "cut":
            del body[place : place + draw(st.integers(1, 40))]
        elif change == "copy":
            other = draw(st.integers(0, len(body) - 1))
            body[place:place] = body[other : other + draw(st.integers(1, 40))]
        else:
            del body[place:]
        if not body:
            break
    return bytes(body)


def answered(body: bytes) -> RequestLists | Problem:
    """What becomes of a body; anything but lists and refusals fails the test."""
    try:
        return read_arrow(body, READER)
    except Problem as problem:
        found = problem
    assert 400 <= found.status < 500
    return found


@pytest.mark.slow
@given(mutated())
def test_mutated_streams_are_read_or_refused(body: bytes) -> None:
    answered(body)


@given(st.binary(max_size=200))
def test_so_are_bytes(body: bytes) -> None:
    assert isinstance(answered(body), Problem)


@pytest.mark.parametrize("cut", range(0, len(VALID[0]), 97))
def test_streams_that_break_off(cut: int) -> None:
    answered(VALID[0][:cut])


def rankings(body: bytes) -> list[dict[str, Any]]:
    """The answers of a stream, as JSON has them, without the ids of rankings."""
    with pa.ipc.open_stream(body) as found:
        answer = pl.DataFrame(found.read_all())
    made = []
    for part in answer.partition_by("ranking_id", maintain_order=True):
        first = part.row(0, named=True)
        items = part.select("item_id", "position", "score", "probability", "utility").to_dicts()
        head = {name: first[name] for name in ("query_id", "model", "method", "policy", "arm")}
        made.append({**head, "utility": part["utility"].sum(), "items": items})
    return made


def without_ids(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({answer["ranking_id"] for answer in answers}) == len(answers)
    return [{name: value for name, value in answer.items() if name != "ranking_id"} for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_json(kind: str) -> None:
    """To the last digit: both go the same way from the arrays on."""
    model, rng = loaded(kind), np.random.default_rng(2)
    with client(kind) as http:
        for number in range(15):
            lengths = rng.integers(1, 9, size=rng.integers(1, 6)).tolist()
            queries = [
                {"query_id": f"q{place}", "user_id": f"u{place}", "candidates": candidates(model, rng, length)}
                for place, length in enumerate(lengths)
            ]
            asked = {"positions": int(rng.integers(1, 9)), "method": str(rng.choice(model.methods))}
            queries = [query | (asked if number % 2 else {}) for query in queries]
            as_json = http.post("/v1/rank", json={"queries": queries}).json()["rankings"]
            sent = frame(queries).with_columns(
                user_id=pl.col("query_id").str.replace("q", "u"),
                **({k: pl.lit(v) for k, v in asked.items()} if number % 2 else {}),
            )
            as_arrow = http.post("/v1/rank", content=stream(sent.to_arrow()), headers=HEADERS)
            assert as_arrow.status_code == 200
            assert as_arrow.headers["content-type"] == ARROW_TYPE
            for one, other in zip(rankings(as_arrow.content), without_ids(as_json), strict=True):
                assert one["utility"] == pytest.approx(other["utility"], rel=1e-12)
                assert {**one, "utility": 0} == {**other, "utility": 0}


def test_refusals_are_problems_here_too() -> None:
    with client("trees") as http:
        for body in (b"", b"ARROW1", VALID[0], VALID[0][:200], b"\xff" * 1_000):
            answer = http.post("/v1/rank", content=body, headers=HEADERS)
            assert 400 <= answer.status_code < 500
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == answer.status_code
        good = frame([example("trees")]).to_arrow()
        assert http.post("/v1/rank", content=stream(good), headers=HEADERS).status_code == 200
        assert http.post("/v1/explain", content=stream(good), headers=HEADERS).status_code == 415
