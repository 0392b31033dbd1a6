"""What is asked of a server, and how its answers are read: functions that send nothing."""

from __future__ import annotations

import io
import json
import math
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import httpx
import numpy as np
import polars as pl
import polars.selectors as cs

from urank.client.errors import failed, refused, strange
from urank.client.schemas import (
    Explanation,
    ModelFacts,
    RankedItem,
    Ranking,
    Reloaded,
    read_explanation,
    read_model,
    read_ranking,
    read_reloaded,
)
from urank.errors import ConfigError, DataError
from urank.log.reader import table_frame

if TYPE_CHECKING:
    from urank.ranking.positions import Method

__all__ = [
    "Call",
    "Candidates",
    "Connection",
    "Outcome",
    "Rows",
    "click_call",
    "conclude",
    "explain_call",
    "feedback_call",
    "is_ready",
    "model_call",
    "pause",
    "rank_call",
    "rank_many_call",
    "rank_table_call",
    "ready_call",
    "reload_call",
    "worth_repeating",
]

KEY_VARIABLE = "URANK_API_KEY"
CONNECT_SECONDS = 5.0
IDLE_SECONDS = 60.0
"""How long a connection is kept for the next request: less than the 75 seconds after which the server closes it."""


@dataclass(frozen=True)
class Connection:
    """What both clients are made with.

    Attributes:
        address: where `urank serve` listens, as it prints it.
        key: what the server asks for; that of URANK_API_KEY when none is given.
        timeout: seconds to wait for a connection (at most 5), for a part of the body to go, for a part of the answer.
        retries: how often a request is sent again.
        connections: how many are kept at most.
        verify: whether the certificate of an https address is checked, or what to check it with.
    """

    address: str
    key: str | None = field(repr=False)
    timeout: float
    retries: int
    connections: int
    verify: ssl.SSLContext | bool = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", _checked_address(self.address))
        object.__setattr__(self, "key", _checked_key(self.key))
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout must be a number of seconds above 0; got {self.timeout}")
        if self.retries < 0:
            raise ConfigError(f"retries must be at least 0; got {self.retries}")
        if self.connections < 1:
            raise ConfigError(f"connections must be at least 1; got {self.connections}")

    def arguments(self) -> dict[str, Any]:
        """Of `httpx.Client` and `httpx.AsyncClient`."""
        headers = {"user-agent": f"urank/{version('urank')}"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"  # httpx hides it where it shows headers
        return {
            "base_url": self.address,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECT_SECONDS)),
            "limits": httpx.Limits(
                max_connections=self.connections,
                max_keepalive_connections=self.connections,
                keepalive_expiry=IDLE_SECONDS,
            ),
            "verify": self.verify,
            "follow_redirects": False,  # another host must not be shown the key
        }


def _checked_address(address: str) -> str:
    """An address, without the slash at its end.

    >>> _checked_address("http://127.0.0.1:8000/")
    'http://127.0.0.1:8000'
    """
    if "@" in address:  # not shown, since what stands before it is secret
        raise ConfigError(f"address must not hold a name or password; pass key, or set {KEY_VARIABLE}")
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(f"address must be that of a server, as http://127.0.0.1:8000; got '{address}'")
    return address.rstrip("/")


def _checked_key(key: str | None) -> str | None:
    """A key as it can stand in a header; that of the environment when none is given."""
    source = "key"
    if key is None:
        key, source = os.environ.get(KEY_VARIABLE) or None, KEY_VARIABLE
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:  # not shown, since it may be nearly right
        raise ConfigError(f"{source} must be printable ASCII characters without spaces; got something else")
    return key


FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
PASSING = (502, 503, 504)


def worth_repeating(outcome: httpx.Response | httpx.RequestError, *, repeatable: bool) -> bool:
    """Whether to send again what had this outcome.

    >>> refused, broken = httpx.ConnectError("refused"), httpx.ReadError("broken")
    >>> [worth_repeating(error, repeatable=False) for error in (refused, broken)]
    [True, False]
    >>> [worth_repeating(error, repeatable=True) for error in (refused, broken, httpx.ReadTimeout("slow"))]
    [True, True, False]
    >>> [worth_repeating(httpx.Response(status), repeatable=True) for status in (503, 500, 422)]
    [True, False, False]
    """
    if isinstance(outcome, httpx.ConnectError):
        return True
    if not repeatable:
        return False
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in PASSING
    return isinstance(outcome, httpx.NetworkError | httpx.RemoteProtocolError)


def pause(attempt: int, chance: float) -> float:
    """Seconds to wait after an attempt, counted from 0: twice as long each time, and half of it left to chance, so that
    clients whose server went away do not come back all at once.

    >>> [pause(attempt, chance=1.0) for attempt in (0, 1, 2, 10)]
    [0.1, 0.2, 0.4, 5.0]
    >>> pause(1, chance=0.0)
    0.1
    """
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**attempt)
    return longest * (0.5 + 0.5 * chance)


JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
NOT_FEATURES = ("item_id", "value")
OF_THE_LIST = ("query_id", "user_id", "positions", "method")

AnswerT = TypeVar("AnswerT")
Rows = Sequence[Mapping[str, object]]
Candidates = Rows | Any
"""Dicts as in the API, or a table of Polars, pandas or PyArrow."""
Outcome = httpx.Response | httpx.RequestError


@dataclass(frozen=True, eq=False)
class Call(Generic[AnswerT]):
    """A request, and how its answer is read.

    Attributes:
        method, path: of HTTP.
        read: makes a value of a success.
        content, kind: the body, and what it is.
        repeatable: whether it does no harm to send it again when nobody knows what became of it.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], AnswerT]
    content: bytes | None = field(default=None, repr=False)
    kind: str = JSON
    repeatable: bool = False

    def arguments(self) -> dict[str, Any]:
        """Of httpx's `request`."""
        headers = {} if self.content is None else {"content-type": self.kind}
        return {"method": self.method, "url": self.path, "content": self.content, "headers": headers}


def conclude(call: Call[AnswerT], outcome: Outcome, address: str) -> AnswerT:
    """The value of an answer.

    Raises:
        ServerError: when the server refused, did not answer, or is not one of ours.
    """
    if isinstance(outcome, httpx.RequestError):
        raise failed(outcome, address, call.path) from outcome
    if not outcome.is_success:
        raise refused(outcome, address, call.path)
    try:
        return call.read(outcome)
    except (ValueError, KeyError, TypeError, IndexError, OSError, pl.exceptions.PolarsError):
        raise strange(outcome, address, call.path) from None


def is_ready(outcome: Outcome, address: str) -> bool:
    """Whether a server says that requests can be served; one that cannot be reached does not."""
    if isinstance(outcome, httpx.RequestError) or outcome.status_code == 503:
        return False
    return conclude(ready_call(), outcome, address)


def rank_call(
    candidates: Candidates,
    *,
    query_id: str,
    user_id: str | None = None,
    positions: int | None = None,
    method: Method | None = None,
) -> Call[Ranking]:
    """Rank one list."""
    given = {"query_id": query_id, "user_id": user_id, "positions": positions, "method": method}
    asked = {name: each for name, each in given.items() if each is not None}
    if _are_rows(candidates):
        content = _json({**asked, "candidates": list(candidates)}, "candidates")
        return Call("POST", "/v1/rank", lambda response: read_ranking(response.json()), content)
    frame = _table(candidates, "candidates")
    for name in OF_THE_LIST:
        if name in frame.columns:
            raise DataError(f"candidates must not have a column '{name}', which is an argument; or use rank_table")
    frame = frame.with_columns(pl.lit(each).alias(name) for name, each in asked.items())
    return Call("POST", "/v1/rank", lambda response: _only_ranking(response, method), _stream(frame), ARROW)


def rank_many_call(queries: Rows) -> Call[list[Ranking]]:
    """Rank several lists."""

    def read(response: httpx.Response) -> list[Ranking]:
        return [read_ranking(each) for each in response.json()["rankings"]]

    return Call("POST", "/v1/rank", read, _json({"queries": list(queries)}, "queries"))


def rank_table_call(table: Any) -> Call[pl.DataFrame]:
    """Rank the lists of a table."""
    return Call("POST", "/v1/rank", _frame, _stream(_table(table, "table")), ARROW)


def explain_call(
    candidates: Candidates,
    *,
    query_id: str | None = None,
    positions: int | None = None,
    orders: Mapping[str, Sequence[str]] | None = None,
) -> Call[Explanation]:
    """Look into a list."""
    given = {"query_id": query_id, "positions": positions}
    asked: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
    asked["candidates"] = list(candidates) if _are_rows(candidates) else _rows(_table(candidates, "candidates"))
    asked["orders"] = {name: list(ids) for name, ids in (orders or {}).items()}
    content = _json(asked, "candidates and orders")
    return Call("POST", "/v1/explain", lambda response: read_explanation(response.json()), content, repeatable=True)


def feedback_call(events: Rows) -> Call[int]:
    """Say what happened; an event counts once however often it is sent."""
    content = _json({"events": list(events)}, "events")
    return Call("POST", "/v1/feedback", lambda response: int(response.json()["accepted"]), content, repeatable=True)


def click_call(
    ranking: Ranking | str, item_id: str, *, conversion: bool = False, value: float | None = None
) -> Call[int]:
    """Say that an item of a ranking was clicked."""
    if isinstance(ranking, Ranking) and item_id not in ranking.ids:
        raise DataError(f"item_id must be one of ranking {ranking.ranking_id}; got '{item_id}'")
    ranking_id = ranking.ranking_id if isinstance(ranking, Ranking) else ranking
    event = {"ranking_id": ranking_id, "item_id": item_id, "click": True, "conversion": conversion}
    return feedback_call([event if value is None else {**event, "value": value}])


def model_call() -> Call[ModelFacts]:
    """Ask what is served."""
    return Call("GET", "/v1/model", lambda response: read_model(response.json()), repeatable=True)


def ready_call() -> Call[bool]:
    """Ask whether requests can be served."""
    return Call("GET", "/readyz", lambda response: bool(response.json()["status"] == "ready"), repeatable=True)


def reload_call() -> Call[Reloaded]:
    """Load the models anew; told twice, it would say of the second time that nothing changed."""
    return Call("POST", "/v1/reload", lambda response: read_reloaded(response.json()))


def _are_rows(candidates: Candidates) -> bool:
    return isinstance(candidates, Sequence) and not isinstance(candidates, str | bytes)


def _table(table: Any, name: str) -> pl.DataFrame:
    """A table without the number of each row, which pandas sends along where rows were left out."""
    if not isinstance(table, pl.LazyFrame) and not hasattr(table, "__arrow_c_stream__"):
        what = "a list of dicts or a table" if name == "candidates" else "a table"
        got = f"{type(table).__module__}.{type(table).__name__}"
        raise DataError(f"{name} must be {what} of Polars, pandas or PyArrow; got {got}")
    return table_frame(table, name, name).select(~cs.matches(r"^__index_level_\d+__$"))


def _rows(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """The candidates of a table as in the API."""
    whole = frame.with_columns(cs.float().fill_nan(None))
    own = [name for name in NOT_FEATURES if name in whole.columns]
    others = whole.drop(own).rows(named=True)
    if not own:
        return [{"features": features} for features in others]
    return [{**one, "features": other} for one, other in zip(whole.select(own).rows(named=True), others, strict=True)]


def _stream(frame: pl.DataFrame) -> bytes:
    """An Arrow IPC stream with text in a form that every reader knows."""
    sink = io.BytesIO()
    frame.write_ipc_stream(sink, compression="uncompressed", compat_level=pl.CompatLevel.oldest())
    return sink.getvalue()


def _json(body: Mapping[str, object], name: str) -> bytes:
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":"), default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must be made of text, finite numbers, booleans and None: {error}") from error


def _plain(value: object) -> object:
    """What JSON has for a number of NumPy."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"got {type(value).__module__}.{type(value).__name__}")


def _frame(response: httpx.Response) -> pl.DataFrame:
    return pl.read_ipc_stream(io.BytesIO(response.content))


def _only_ranking(response: httpx.Response, method: Method | None) -> Ranking:
    """The one ranking of a stream."""
    frame = _frame(response)
    first = frame.row(0, named=True)
    columns = ("item_id", "position", "score", "click", "utility")
    return Ranking(
        **{name: first[name] for name in ("ranking_id", "query_id", "model", "policy", "arm")},
        method=first.get("method", method),
        utility=float(frame["utility"].sum()),
        items=tuple(RankedItem(*row) for row in frame.select(columns).rows()),
    )
