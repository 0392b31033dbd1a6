"""Requests that are wrong in every way: malformed, huge, of wrong types, and made to hurt.

`hostile_requests` makes as many as are wanted, the same ones for the same seed. Most are wrong, but not all: what is
allowed may well be answered.
"""

from __future__ import annotations

import gzip
import json
import random
import string
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["ARROW", "JSON", "Request", "changed_bodies", "hostile_requests", "valid_bodies", "valid_stream"]

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
Request = tuple[str, str, dict[str, str], bytes]
Facts = Mapping[str, Any]
Maker = Callable[[Facts, random.Random], Request]

PATHS = ("/v1/rank", "/v1/explain", "/v1/feedback")
RANKING_ID = "0192f3a4b5c6-3f9a1c-00112233aabb"
HERE = "\u2603 here \u2603"
MOST_FEATURES = 4  # of each kind, at whose places everything is tried: a wide model would make it a matter of gigabytes

# What takes the place of each node of a valid body in turn, as text: not all of it is JSON.
ODD = (
    *("null", "true", "false", "0", "-1", "1.5", "1e999", "-1e400", "1e-999", "NaN", "-Infinity", "01", "9" * 5_000),
    *("9007199254740993", "1e39", '""', '"text"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\u202e\u2066"'),
    *('"__proto__"', '"' + "x" * 2_000 + '"', "[]", "{}", "[[]]", '[null, "a"]', '{"a": 1}', '{"$ref": "#"}', ""),
)
TYPES = (
    *("text/plain", "application/xml", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""),
    *(
        "application/json; charset=utf-16",
        "APPLICATION/JSON",
        "application/json, text/html",
        "application/jsonp",
        "*/*",
    ),
    *("application/vnd.apache.arrow.file", "application/octet-stream", "a" * 5_000, "application/json;;;=", "/"),
)
TARGETS = (
    *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/samples/../../../etc/passwd", "/v1/rank%00", "/%ff%fe"),
    *("/v1/samples/-1", "/v1/samples/99999999999999999999", "/v1/samples/%D9%A1", "/v1/samples/0;id", "/v1/samples/"),
    *("//evil.org/", "/\\evil.org", "/v1/rank?a=1&a=2", "/v1/rank/", "/v1/model?" + "x" * 10_000, "/" + "a/" * 2_000),
    *("/v1%2frank", "/V1/RANK", "//v1/rank", "/v1/\u20ac", "/%", "/%zz", "/a b", "/\t", "/v1/samples/\u00b2", "x"),
    *("/v1/samples/0.5", "/v1/samples/1e3", "/v1/samples/%20", "/v1/samples/0/../0", "/healthz?" + "%00" * 50),
    *("/v1/rank#fragment", "/.env", "/docs/../metrics", "/v1/" + "%41" * 2_000, "http://evil.org/v1/rank", "*"),
)
METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "get", "PURGE", "X" * 2_000, "P\u00dcT")


def hostile_requests(model_facts: dict[str, Any], seed: int, count: int) -> Iterator[Request]:
    """Method, path, headers and body of so many requests.

    Args:
        model_facts: what `GET /v1/model` says.
        seed: the same one gives the same requests.
        count: how many.
    """
    rng = random.Random(seed)
    changed = list(changed_bodies(model_facts))
    rng.shuffle(changed)
    makers = [maker for maker, weight in MAKERS for _ in range(weight)]
    slow = 0
    for number in range(count):
        if number % 2:
            path, text = changed[number // 2 % len(changed)]
            yield "POST", path, {"content-type": JSON}, text.encode("utf-8", "surrogatepass")
            continue
        maker = rng.choice(makers)
        if maker is _broken_off:
            slow += 1
            maker = maker if slow <= 3 else _random_bytes  # a server waits for these, and so would everybody
        yield maker(model_facts, rng)


def valid_bodies(facts: Facts, candidates: int = 3) -> dict[str, dict[str, Any]]:
    """A body for each path that takes one, and a batch."""
    features = {name: 0.5 + number for number, name in enumerate(facts["features"]["numeric"])}
    features |= dict.fromkeys(facts["features"]["categorical"], "red")
    items = [{"item_id": f"i{k}", "features": dict(features), "value": 1.5} for k in range(candidates)]
    query = {"query_id": "q", "user_id": "u", "positions": 5, "method": "match", "candidates": items}
    columns = {name: [value] * candidates for name, value in features.items()}
    context = columns.popitem()[0]
    by_column = {
        "query_id": "q",
        "positions": 5,
        "item_id": [f"i{k}" for k in range(candidates)],
        "features": columns,
        "value": [1.5] * candidates,
        "context": {context: features[context]},
    }
    event = {"ranking_id": RANKING_ID, "item_id": "i0", "click": True, "conversion": False, "value": 2.5}
    return {
        "/v1/rank": query,
        "/v1/rank batch": {"queries": [query, {**query, "query_id": "r"}]},
        "/v1/rank columns": by_column,
        "/v1/models/default/rank": {"queries": [by_column]},
        "/v1/explain columns": by_column | {"orders": {"mine": ["i0"]}},
        "/v1/explain": {"query_id": "q", "positions": 5, "candidates": items, "orders": {"mine": ["i1", "i0"]}},
        "/v1/feedback": {"events": [event, event]},
    }


def valid_stream(facts: Facts, candidates: int = 5, *, kind: pa.DataType | None = None, **options: Any) -> bytes:
    """An Arrow stream with a list; `kind` is that of its texts, where it is not plain."""
    texts = {name: ["red"] * candidates for name in facts["features"]["categorical"]}
    texts |= {"query_id": ["q"] * candidates, "item_id": [f"item number {k} of them" for k in range(candidates)]}
    columns: dict[str, Any] = {
        name: pa.array(column).dictionary_encode()
        if pa.types.is_dictionary(kind or pa.null())
        else pa.array(column, kind)
        for name, column in texts.items()
    }
    columns |= {name: np.arange(candidates, dtype=np.float32) for name in facts["features"]["numeric"]}
    columns["value"] = np.ones(candidates)
    return _stream(pa.table(columns), **options)


def _stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def changed_bodies(facts: Facts) -> list[tuple[str, str]]:
    """Every body with every one of its nodes replaced, left out, said twice, or under another name, and its path."""
    found = []
    passed_over = {name for names in facts["features"].values() for name in names[MOST_FEATURES:]}
    for name, body in valid_bodies(facts, candidates=2).items():
        path = name.partition(" ")[0]
        for place in _places(body):
            if passed_over.intersection(place):
                continue
            text = json.dumps(_with(body, place, HERE), ensure_ascii=False)
            found += [(path, text.replace(f'"{HERE}"', odd)) for odd in ODD]
            if place and isinstance(place[-1], str):
                key = json.dumps(place[-1])
                found.append((path, json.dumps(_without(body, place))))
                found.append((path, text.replace(f'{key}: "{HERE}"', f"{key}: 1, {key}: null")))
                found.append((path, text.replace(f'{key}: "{HERE}"', '"__proto__": {"a": 1}')))
                found.append((path, text.replace(f'{key}: "{HERE}"', f"{json.dumps(place[-1].upper() + ' ')}: 1")))
    return found


def _places(value: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where every node of a body is, itself included."""
    yield before
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from _places(each, (*before, key))


def _with(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    if not place:
        return new
    key, rest = place[0], place[1:]
    if isinstance(value, dict):
        return {**value, key: _with(value[key], rest, new)}
    return [_with(each, rest, new) if number == key else each for number, each in enumerate(value)]


def _without(value: Any, place: tuple[str | int, ...]) -> Any:
    key, rest = place[0], place[1:]
    if not rest:
        return {name: each for name, each in value.items() if name != key}
    if isinstance(value, dict):
        return {**value, key: _without(value[key], rest)}
    return [_without(each, rest) if number == key else each for number, each in enumerate(value)]


def _json(path: str, body: bytes | str, **headers: str) -> Request:
    data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    return "POST", path, {"content-type": JSON, **headers}, data


def _body(facts: Facts, rng: random.Random, candidates: int = 3) -> tuple[str, str]:
    name, body = rng.choice(list(valid_bodies(facts, candidates).items()))
    return name.partition(" ")[0], json.dumps(body)


def _random_bytes(facts: Facts, rng: random.Random) -> Request:
    kind = rng.choice([JSON, JSON, ARROW])
    return "POST", rng.choice(PATHS), {"content-type": kind}, rng.randbytes(rng.choice([0, 1, 5, 100, 5_000]))


def _cut_off(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    return _json(path, text[: rng.randrange(len(text))])


def _garbled(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return _json(path, bytes(data))


def _glued(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    return _json(
        path,
        rng.choice(["\ufeff", "", "// a comment\n", "\x00", ")]}'\n", "[", " " * 50_000])
        + text
        + rng.choice(["", "x", text]),
    )


def _deep(facts: Facts, rng: random.Random) -> Request:
    depth = rng.choice([50, 199, 201, 1_000, 100_000])
    begin, end = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"candidates":', "}]"), ('{"features":', "}")])
    return _json(rng.choice(PATHS), begin * depth + rng.choice(["", "1"]) + end * rng.choice([0, depth]))


def _huge_number(facts: Facts, rng: random.Random) -> Request:
    number = rng.choice(
        ["9" * 4_400, "9" * 100_000, "1e99999", "-" + "1" * 4_299, "0." + "0" * 5_000 + "1", "1" + "0" * 309]
    )
    path, text = _body(facts, rng)
    return _json(path, text.replace(rng.choice(["0.5", "1.5", "5"]), number, rng.choice([1, -1])))


def _huge_text(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    size = rng.choice([513, 10_000, 300_000])
    filler = rng.choice(["x", "\\u0000", "\\ud83d\\ude00", "\u202e", "\\n", "é"])
    return _json(
        path, text.replace(rng.choice(["i0", '"q"', "red", "mine"]), '"' + filler * size + '"', 1).replace('""', '"')
    )


def _many(facts: Facts, rng: random.Random) -> Request:
    """More of something than is allowed, or than anybody wants."""
    items = valid_bodies(facts, 1)["/v1/rank"]["candidates"]
    count = rng.choice([2_001, 5_000])
    named = json.dumps({"query_id": "q", "candidates": [{**items[0], "item_id": str(k % 2_001)} for k in range(count)]})
    event = json.dumps({"ranking_id": RANKING_ID, "item_id": "a"})
    return rng.choice(
        [
            _json("/v1/rank", named),
            _json("/v1/rank", '{"query_id": "q", "candidates": [' + "1, " * 10_000 + "1]}"),
            _json("/v1/rank", '{"queries": [' + "{}, " * 10_000 + "{}]}"),
            _json(
                "/v1/rank",
                '{"query_id": "q", "candidates": [{"item_id": "a", "features": {'
                + ", ".join(f'"{k}": []' for k in range(5_000))
                + "}}]}",
            ),
            _json("/v1/rank", "{" + ", ".join(f'"{k}": {k}' for k in range(10_000)) + "}"),
            _json("/v1/feedback", '{"events": [' + f"{event}, " * 10_000 + f"{event}]}}"),
            _json("/v1/explain", json.dumps({"candidates": items, "orders": {str(k): ["i0"] for k in range(5_000)}})),
            _json("/v1/explain", json.dumps({"candidates": items, "orders": {"mine": ["i0"] * 20_000}})),
        ]
    )


def _beyond(facts: Facts, rng: random.Random) -> Request:
    """One more than a limit allows, or none where one is needed."""
    limits, bodies = facts["limits"], valid_bodies(facts, 1)
    query, explained = bodies["/v1/rank"], bodies["/v1/explain"]
    most = min(limits["candidates"], limits["rows"])
    items = [{"item_id": str(number), "features": {}} for number in range(most)]
    changed: list[tuple[str, Any]] = [
        ("/v1/rank", query | {"positions": rng.choice([0, -1, 10_001, 2**31, 2**63, 2**64, 10**30])}),
        ("/v1/explain", explained | {"positions": rng.choice([0, facts["positions"] + 1, 10_001, 10**30])}),
        ("/v1/rank", query | {"candidates": query["candidates"] * rng.choice([0, 2, 50])}),
        ("/v1/rank", query | {"method": rng.choice(["", "SCORE", "none", "score ", "ctr1\u0000"])}),
        ("/v1/rank", {"queries": [query] * rng.choice([0, limits["queries"] + 1])}),
        ("/v1/rank", {"queries": [query | {"candidates": items}] * (limits["rows"] // most + 1)}),
        ("/v1/feedback", {"events": bodies["/v1/feedback"]["events"][:1] * rng.choice([0, 10_000])}),
    ]
    path, body = rng.choice(changed)
    return _json(path, json.dumps(body))


def _too_large(facts: Facts, rng: random.Random) -> Request:
    """More bytes than a body of its type may have."""
    kind = rng.choice([JSON, JSON, ARROW])
    size = facts["limits"]["body_bytes" if kind == ARROW else "json_bytes"] + rng.choice([1, 1_000])
    return "POST", rng.choice(PATHS), {"content-type": kind}, rng.choice([b" ", b"[", b"\x00", b"1"]) * size


def _orders(facts: Facts, rng: random.Random) -> Request:
    """Orders that are not orders of the list."""
    orders: tuple[Any, ...] = (
        *({"mine": each} for each in (["i9"], ["i0", "i0"], [], ["i0", "i1", "i2", "i3"], "i0i1", {"0": "i0"}, None)),
        *(
            {"mine": each}
            for each in ([0, 1], [None], [""], ["x" * 513], ["I0"], [["i0"]], ["i0"] * 5_000, ["i0\u0000"])
        ),
        *({name: ["i0"]} for name in ("", "score", "match", "x" * 65, "__proto__", "\u202e", "a\u0000b", "mine ")),
        *([], [["i0"]], "mine", 1, {str(number): ["i0"] for number in range(17)}),
    )
    return _json("/v1/explain", json.dumps(valid_bodies(facts)["/v1/explain"] | {"orders": rng.choice(orders)}))


def _events(facts: Facts, rng: random.Random) -> Request:
    """Clicks on what was never shown."""
    changed = (
        *(RANKING_ID.upper(), f"{RANKING_ID}\n", f" {RANKING_ID}", RANKING_ID[:-1], f"{RANKING_ID}0", RANKING_ID * 100),
        *(
            "",
            "../../log/x",
            "0" * 12 + "-000000-" + "0" * 12,
            "f" * 12 + "-ffffff-" + "f" * 12,
            f"{RANKING_ID}\u0000",
        ),
        *(RANKING_ID.replace("0", "\u0660"), RANKING_ID.replace("-", "/"), RANKING_ID),
    )
    event: dict[str, Any] = {"ranking_id": rng.choice(changed)}
    event["item_id"] = rng.choice(["i0", "\u0000", "\u202e", "x" * 512, "\U0010ffff", "../x"])
    event |= rng.choice(
        [{}, {"click": rng.choice([1, "true", None])}, {"value": rng.choice([-1, 1e31, 1e30, "1", -0.0])}]
    )
    return _json("/v1/feedback", json.dumps({"events": [event] * rng.choice([1, 2, 500])}))


def _not_utf8(facts: Facts, rng: random.Random) -> Request:
    """A text of bytes that no text in UTF-8 has: half a surrogate pair, too many bytes, too few."""
    path, text = _body(facts, rng)
    wrong = rng.choice(
        [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x1f", b"\\x41", b"\\"]
    )
    return _json(path, text.encode().replace(rng.choice([b"i0", b"red", b"mine", b"query_id"]), wrong))


def _keys_twice(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    key = rng.choice(["query_id", "candidates", "features", "item_id", "queries", "events", "__proto__", "constructor"])
    odd = rng.choice(ODD)
    return _json(path, f'{{"{key}": {odd}, ' + text[1:-1] + f', "{key}": {odd}}}')


def _other_type(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    return "POST", path, {"content-type": rng.choice(TYPES)}, text.encode()


def _no_type(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    return "POST", path, {}, text.encode()


def _encoded(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    coding = rng.choice(["gzip", "br", "deflate", "zstd", "gzip, gzip", "identity", "Identity", "none"])
    return "POST", path, {"content-type": JSON, "content-encoding": coding}, gzip.compress(text.encode(), mtime=0)


def _other_charset(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    coding = rng.choice(["utf-16", "utf-32", "utf-7", "cp037", "utf-8-sig"])
    return "POST", path, {"content-type": f"{JSON}; charset={coding}"}, text.encode(coding)


def _broken_off(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    return "POST", path, {"content-type": JSON, "content-length": str(len(text) + 100)}, text.encode()


def _too_long(facts: Facts, rng: random.Random) -> Request:
    """Said to be shorter than it is, or longer than is allowed, or no number at all."""
    path, text = _body(facts, rng)
    length = rng.choice(["0", "1", "10", "99999999999", "9" * 400, "-1", "x", "1, 2", "0x10", "1e3", ""])
    return "POST", path, {"content-type": JSON, "content-length": length}, text.encode()


def _chunked(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    data = text.encode()
    size = rng.choice(
        [b"%x" % len(data), b"%X;ext=1" % len(data), b"-1", b"zz", b"ffffffffffffffffff", b"0", b"%x" % (len(data) - 9)]
    )
    body = size + b"\r\n" + data + b"\r\n0\r\n" + rng.choice([b"\r\n", b"trailer: 1\r\n\r\n"])
    return "POST", path, {"content-type": JSON, "transfer-encoding": rng.choice(["chunked", "Chunked"])}, body


def _many_headers(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    count, size = rng.choice([(500, 10), (50, 500), (3, 10_000), (1, 20_000)])
    headers = {f"x-{number}": "a" * size for number in range(count)}
    return _json(path, text, **headers)


def _odd_headers(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    name = rng.choice(
        [
            "host",
            "host",
            "authorization",
            "x-api-key",
            "accept",
            "expect",
            "connection",
            "upgrade",
            "cookie",
            "te",
            "range",
        ]
    )
    value = rng.choice(
        [
            "",
            "x",
            "\u00e9",
            "Basic \u00e9",
            "Basic " + "QUJD" * 2_000,
            "Bearer  x  y",
            "101-continue",  # not 100, which would be answered twice
            "websocket",
            "h2c",
            "bytes=0-",
            "a" * 3_000,
            "localhost:99999",
        ]
    )
    return _json(path, text, **{name: value})


def _target(facts: Facts, rng: random.Random) -> Request:
    return rng.choice(["GET", "POST"]), rng.choice(TARGETS), {"content-type": JSON}, b""


def _method(facts: Facts, rng: random.Random) -> Request:
    path, text = _body(facts, rng)
    path = rng.choice([path, "/", "/metrics", "/v1/model", "/v1/reload", "/healthz", "/docs", "/openapi.json"])
    method = rng.choice(METHODS)
    return method, path, {"content-type": JSON}, b"" if method == "HEAD" else text.encode()


def _arrow(facts: Facts, rng: random.Random) -> Request:
    """A stream with a few bytes changed."""
    kind = rng.choice([None, pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
    data = bytearray(valid_stream(facts, kind=kind))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(data))
        odd = rng.choice(
            [
                bytes([rng.randrange(256)]),
                *(struct.pack("<i", each) for each in (0, -1, 2**31 - 1, 1_000)),
                struct.pack("<q", 2**60),
            ]
        )
        data[place : place + len(odd)] = odd
    return "POST", rng.choice(["/v1/rank"] * 9 + ["/v1/explain"]), {"content-type": ARROW}, bytes(data)


def _arrow_cut(facts: Facts, rng: random.Random) -> Request:
    data = valid_stream(facts)
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return (
        "POST",
        "/v1/rank",
        {"content-type": ARROW},
        rng.choice([data[:end], data[start:], data[:start] + data[end:]]),
    )


def _arrow_packed(facts: Facts, rng: random.Random) -> Request:
    return "POST", "/v1/rank", {"content-type": ARROW}, valid_stream(facts, compression=rng.choice(["lz4", "zstd"]))


def _arrow_bomb(facts: Facts, rng: random.Random) -> Request:
    """Rows that share one long text, which would be gigabytes if each had its own."""
    rows, text = 20_000, "x" * 200_000
    shared = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int8)), pa.array([text]))
    view = struct.pack("<i4sii", len(text), b"xxxx", 0, 0) * rows
    views = pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(view), pa.py_buffer(text.encode())])
    names = [*facts["features"]["numeric"], *facts["features"]["categorical"]]
    columns = {"query_id": ["q"] * rows, "item_id": [str(row) for row in range(rows)]} | dict.fromkeys(
        names, pa.nulls(rows)
    )
    columns[rng.choice(["query_id", "item_id", *names])] = rng.choice([shared, views])
    return "POST", "/v1/rank", {"content-type": ARROW}, _stream(pa.table(columns))


def _arrow_odd(facts: Facts, rng: random.Random) -> Request:
    """A table of other types or columns than are asked for."""
    columns: dict[str, Any] = {
        "query_id": ["q", "q"],
        "item_id": ["a", "b"],
        **{name: [1.0, 2.0] for name in facts["features"]["numeric"]},
        **{name: ["x", None] for name in facts["features"]["categorical"]},
    }
    odd = [
        *(
            pa.nulls(2),
            [[1], [2]],
            [{"a": 1}, {"a": 2}],
            [b"\xff", b"\x00"],
            [True, None],
            [float("inf"), float("nan")],
        ),
        *(pa.array([1, 2], pa.timestamp("ns")), pa.array([1, 2], pa.decimal128(9)), ["", "x" * 1_000], [2**63 - 1, -1]),
        pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), ["x"]),
        pa.DictionaryArray.from_arrays([0, 1], ["x", None]),
        pa.array(["x", "y"], pa.string_view()),
    ]
    own = ["value", "positions", "method", "user_id", "more", "\u202e", "".join(rng.choices(string.printable, k=30))]
    columns[rng.choice([*columns, *own])] = rng.choice(odd)
    if rng.random() < 0.2:
        del columns[rng.choice(list(columns))]
    return "POST", "/v1/rank", {"content-type": ARROW}, _stream(pa.table(columns))


def _arrow_shape(facts: Facts, rng: random.Random) -> Request:
    """Rows or columns too many, too few, twice, apart, or of what is no text; and the format of files."""
    with pa.ipc.open_stream(valid_stream(facts, 3)) as stream:
        table = stream.read_all()
    names, column = table.column_names, table.column(0)
    offsets = pa.py_buffer(struct.pack("<4i", 0, 1, 2, 4))
    no_text = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"\xff\xc0\xed\xa0")])
    beyond = pa.DictionaryArray.from_arrays(pa.array([0, 7, -1], pa.int32()), pa.array(["x"]), safe=False)
    changed = rng.choice(
        [
            *(table.slice(0, 0), pa.table({}), table.drop_columns([rng.choice(names)])),
            *(
                table.append_column(name, column)
                for name in ("item_id", rng.choice(names), "", "__proto__", "x" * 5_000)
            ),
            table.rename_columns([name.upper() for name in names]),
            pa.table([column] * 500, [f"c{number}" for number in range(500)]),
            pa.table(dict.fromkeys(names, pa.nulls(facts["limits"]["rows"] + 1))),
            table.take([0] * (facts["limits"]["candidates"] + 1)),
            *(
                _replaced(table, name, odd)
                for name in ("query_id", "item_id", rng.choice(names))
                for odd in (no_text, beyond)
            ),
            _replaced(table, "query_id", pa.array(["a", "b", "a"])),
            _replaced(table, "item_id", pa.array(["a", "b", "a"])),
        ]
    )
    if rng.random() < 0.1:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return "POST", "/v1/rank", {"content-type": ARROW}, bytes(sink.getvalue().to_pybytes())
    return "POST", "/v1/rank", {"content-type": rng.choice([ARROW, ARROW, ARROW, JSON])}, _stream(changed)


def _replaced(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


MAKERS: tuple[tuple[Maker, int], ...] = (
    (_random_bytes, 6),
    (_cut_off, 8),
    (_garbled, 8),
    (_glued, 3),
    (_deep, 4),
    (_huge_number, 4),
    (_huge_text, 3),
    (_many, 1),
    (_too_large, 1),
    (_beyond, 3),
    (_orders, 3),
    (_events, 4),
    (_not_utf8, 3),
    (_keys_twice, 5),
    (_other_type, 4),
    (_no_type, 1),
    (_encoded, 3),
    (_other_charset, 3),
    (_broken_off, 1),
    (_too_long, 3),
    (_chunked, 3),
    (_many_headers, 2),
    (_odd_headers, 6),
    (_target, 5),
    (_method, 4),
    (_arrow, 15),
    (_arrow_cut, 4),
    (_arrow_packed, 2),
    (_arrow_bomb, 1),
    (_arrow_odd, 6),
    (_arrow_shape, 5),
)
