"""Records: what is written is read again, and nothing else is ever taken for a record."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from serve.served_log import PLAIN, VALUED, event, ranking, segment_name
from urank.errors import DataError
from urank.serve.feedback_store import (
    RANKING_ID,
    SEGMENT,
    FeedbackColumns,
    FeedbackRecord,
    RankingRecord,
    Record,
    RecordKind,
    ShadowRecord,
    decode,
    encode,
    kind_of,
    new_ranking_id,
    new_segment,
    segment_of,
)

HOME = segment_name(1)

# Every character that UTF-8 can hold, so no half ones.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ids = st.from_regex(re.compile(RANKING_ID.replace("$", r"\Z"), re.ASCII))
times = st.integers(0, 253_402_300_799_999_999)
item_lists = st.lists(texts, min_size=1, max_size=6, unique=True).map(tuple)
values = st.floats(0, float(np.finfo(np.float32).max))


@st.composite
def rankings(draw: st.DrawFn) -> RankingRecord:
    items = draw(item_lists)
    count, width = len(items), draw(st.integers(0, 3))
    numbers = st.floats(width=32, allow_infinity=False)
    row = st.tuples(*[st.none() | texts] * width)
    explored = draw(st.booleans())
    return RankingRecord(
        ranking_id=draw(ids),
        query_id=draw(texts),
        user_id=draw(st.none() | texts),
        arm=draw(st.none() | texts),
        policy=draw(texts),
        model=draw(texts),
        columns=draw(texts),
        time_us=draw(times),
        items=items,
        numeric=draw(arrays(np.float32, (count, draw(st.integers(0, 4))), elements=numbers)),
        categorical=tuple(draw(row) for _ in range(count)),
        value=draw(st.none() | arrays(np.float32, count, elements=st.floats(0, 2.0**99, width=32))),
        propensity=draw(arrays(np.float64, count, elements=st.floats(1e-9, 1))) if explored else None,
        ranked_position=tuple(draw(st.integers(1, 10_000)) for _ in range(count)) if explored else None,
    )


feedback = st.builds(FeedbackRecord, ids, texts, st.booleans(), st.booleans(), st.none() | values, times)
shadows = st.builds(ShadowRecord, ids, texts, times, item_lists)
names = st.lists(texts.map("f{}".format), max_size=6, unique=True)
columns = names.flatmap(
    lambda found: st.integers(0, len(found)).flatmap(
        lambda cut: st.builds(
            FeedbackColumns, st.just(tuple(found[:cut])), st.just(tuple(found[cut:])), st.booleans(), st.booleans()
        )
    )
)
records = rankings() | feedback | shadows | columns


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)
    return type(a) is type(b) and a == b


@given(records)
def test_what_is_written_is_read_again(record: Record) -> None:
    found = decode(encode(record))
    assert type(found) is type(record)
    for each in fields(record):
        assert same(getattr(found, each.name), getattr(record, each.name)), each.name


def test_kinds() -> None:
    made = ranking(HOME)
    shadow = ShadowRecord(made.ranking_id, "m2", 5, ("a",))
    found = [kind_of(encode(record)) for record in (PLAIN, made, event(made, "a"), shadow)]
    assert found == [RecordKind.columns, RecordKind.ranking, RecordKind.feedback, RecordKind.shadow]
    assert kind_of(b"") == 0


def refused_or_read(payload: bytes) -> None:
    try:
        record = decode(payload)
    except DataError:
        return
    encode(record)  # what is taken for a record can be written again


@given(st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    refused_or_read(payload)


@given(records, st.data())
def test_mutated_bytes(record: Record, data: st.DataObject) -> None:
    payload = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    refused_or_read(bytes(payload))


@given(records, st.data())
def test_a_payload_that_is_cut_short_or_runs_on_is_refused(record: Record, data: st.DataObject) -> None:
    payload = encode(record)
    with pytest.raises(DataError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))])
    with pytest.raises(DataError):
        decode(payload + data.draw(st.binary(min_size=1, max_size=9)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def with_head(kind: int, head: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<BI", kind, len(head)) + head + rest


@given(records, st.data())
def test_heads_that_tell_something_else(record: Record, data: st.DataObject) -> None:
    payload = encode(record)
    length = struct.unpack_from("<I", payload, 1)[0]
    head = json.loads(payload[5 : 5 + length])
    key = data.draw(st.sampled_from(sorted(head)))
    if data.draw(st.booleans()):
        del head[key]
    else:
        head[key] = data.draw(json_values)
    refused_or_read(with_head(payload[0], json.dumps(head).encode(), payload[5 + length :]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        with_head(3, b"[" * 100_000),
        with_head(3, b"[]"),
        with_head(3, b'{"id": "\xff"}'),
        with_head(9, b"{}"),
        with_head(2, b'{"items": ["a"], "features": -1, "ranked": null, "value": false}'),
        with_head(3, encode(event(ranking(HOME), "a"))[5:].replace(b'"value":null', b'"value":1' + b"0" * 400)),
        with_head(3, encode(event(ranking(HOME), "a"))[5:].replace(b'"item":"a"', b'"item":"\\ud800"')),
    ],
)
def test_odd_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(DataError):
        decode(payload)


def test_a_backslash_is_not_half_a_character() -> None:
    record = event(ranking(HOME), "c:\\udine")
    assert decode(encode(record)) == record


MADE = ranking(HOME, columns=VALUED)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranking_id": "q1"}, "ranking_id must be an id of a server"),
    ({"ranking_id": f"{MADE.ranking_id}\n"}, "ranking_id must be an id of a server"),
    ({"time_us": -1}, "time_us must be microseconds since 1970"),
    ({"items": ()}, "a list must have from 1 to 10000 items; got 0"),
    ({"items": ("a", "b", "a")}, "an item must occur once in a list"),
    ({"numeric": MADE.numeric[:2]}, "numeric must be float32 of shape [3, 2]; got float32 of shape [2, 2]"),
    ({"numeric": MADE.numeric.astype(np.float64)}, "numeric must be float32 of shape [3, 2]; got float64"),
    ({"numeric": np.full((3, 2), np.inf, np.float32)}, "numeric must be finite or missing"),
    ({"categorical": MADE.categorical[:2]}, "categorical must have a row of one length for each of 3 items"),
    ({"categorical": (("x",), (), ("y",))}, "categorical must have a row of one length"),
    ({"value": np.array([1, np.nan, 2], np.float32)}, "value must be finite and at least 0"),
    ({"value": np.array([1, -1, 2], np.float32)}, "value must be finite and at least 0"),
    ({"propensity": np.array([0.5, 0.0, 1.0])}, "propensity must be above 0 and at most 1"),
    ({"propensity": None}, "ranked_position must come with propensity"),
    ({"ranked_position": (1, 2)}, "ranked_position must come with propensity, one for each of 3 items"),
    ({"ranked_position": (0, 1, 2)}, "ranked_position must be from 1 to 10000"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_a_ranking_that_cannot_be_learned_from_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=re.escape(sentence)):
        replace(MADE, **changes)


def test_other_refusals() -> None:
    for value in (-1.0, float("nan"), 1e39):
        with pytest.raises(DataError, match="value must be a finite number of at least 0"):
            event(MADE, "a", value=value)
    with pytest.raises(DataError, match="a feature must not have the name of a column of the feedback log; got 'arm'"):
        FeedbackColumns(("price",), ("arm",), value=False, explored=False)
    with pytest.raises(DataError, match="features must have unique names; got price, price"):
        FeedbackColumns(("price",), ("price",), value=False, explored=False)
    with pytest.raises(DataError, match="a feedback record must contain valid Unicode"):
        encode(event(MADE, "\ud800"))


def test_digests_tell_sets_of_columns_apart() -> None:
    changes: list[dict[str, Any]] = [{}, {"numeric": ("age", "price")}, {"value": True}, {"explored": True}]
    changes.append({"numeric": ("price",), "categorical": ("age", "brand")})
    assert len({replace(PLAIN, **change).digest for change in changes}) == len(changes)
    assert re.fullmatch("[0-9a-f]{12}", PLAIN.digest)
    assert decode(encode(PLAIN)) == PLAIN


def test_which_rankings_fit_columns() -> None:
    plain = ranking(HOME)
    assert plain.fits(PLAIN)
    assert MADE.fits(VALUED)
    assert not plain.fits(VALUED)
    assert not plain.fits(replace(PLAIN, numeric=("price",)))
    assert not plain.fits(replace(PLAIN, categorical=()))


def test_ids() -> None:
    now = 0x0192F3A4B5C6
    segments = {new_segment(now) for _ in range(50)}
    assert len(segments) == 50
    for segment in segments:
        assert re.fullmatch(SEGMENT, segment)
        assert segment.startswith("0192f3a4b5c6-")
        ranking_id = new_ranking_id(segment)
        assert re.fullmatch(RANKING_ID, ranking_id)
        assert segment_of(ranking_id) == segment
    assert new_segment(now) < new_segment(now + 1)  # names sort by time
