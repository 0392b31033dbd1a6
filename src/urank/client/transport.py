"""Requests, answers and retries of the clients, without I/O.

The functions `rank` to `reload` are the methods of both clients. Each builds a `Call`: a request, how its answer is
read, and whether it is retried, which depends on whether a second copy does harm:

    no connection was made             every call
    503 with Retry-After               every call: the server refused it before doing anything
    connection lost, 502, 503, 504     only calls that are safe to repeat: not a ranking, which is logged each time
    timeout, any other answer          never
"""

from __future__ import annotations

import io
import json
import math
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import polars as pl
import polars.selectors as cs

from urank.client.wire_schemas import Accepted, Explanation, ItemsStored, ModelFacts, Ranking, RankingBatch, Reloaded
from urank.errors import ConfigError, DataError, UrankError
from urank.log.reader import table_frame

if TYPE_CHECKING:
    from urank.ranking.matching import Method

_MAX_SHOWN_ERRORS = 3
_MAX_TEXT = 300


class ServerError(UrankError):
    """A server refused a request, could not be reached, or sent an invalid answer.

    Attributes:
        status: HTTP status; None without an answer.
        detail: The server's own sentence, or what happened instead of an answer.
        errors: Pairs of a location in the body and what is wrong there.
    """

    def __init__(
        self, message: str, *, status: int | None = None, detail: str = "", errors: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.status, self.detail, self.errors = status, detail, tuple(errors)


def refusal_error(response: httpx.Response, address: str, path: str) -> ServerError:
    """Return the error for an answer with a status other than success."""
    status = response.status_code
    try:  # problem+json; anything else comes from a proxy or another server
        problem: Any = response.json()
        detail = _one_line(problem["detail"])
        errors = [(_one_line(each["at"]), _one_line(each["problem"])) for each in problem.get("errors", [])]
    except (ValueError, KeyError, TypeError, AttributeError):
        detail, errors = httpx.codes.get_reason_phrase(status) or "no reason given", []
    shown = [f"{at} {problem}" for at, problem in errors[:_MAX_SHOWN_ERRORS]]
    if more := len(errors) - len(shown):
        shown.append(f"and {more} more")
    where = f" ({'; '.join(shown)})" if shown else ""
    message = f"{address} refused {path} with {status}: {detail}{where}"
    return ServerError(message, status=status, detail=detail, errors=errors)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}…"


KEY_VARIABLE = "URANK_API_KEY"
MAX_CONNECT_SECONDS = 5.0
IDLE_SECONDS = 60.0
"""Lifetime of an idle connection: less than the 75 seconds after which the server closes it."""
FIRST_DELAY, MAX_DELAY = 0.1, 5.0
TRANSIENT_STATUSES = (502, 503, 504)
JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"

AnswerT = TypeVar("AnswerT")
Rows = Sequence[Mapping[str, object]]
Candidates = Rows | Sequence[str] | Any
"""Dicts as in the API, ids of items that the server holds, or a Polars, pandas or PyArrow table."""
Outcome = httpx.Response | httpx.RequestError

_random = SystemRandom()


def http_arguments(
    address: str, key: str | None, timeout: float, retries: int, connections: int, verify: ssl.SSLContext | bool
) -> dict[str, Any]:
    """Validate the arguments of a client, and return those of `httpx.Client` and `httpx.AsyncClient`."""
    address, key = _validate_address(address), _validate_key(key)
    if not 0 < timeout < math.inf:
        raise ConfigError(f"timeout must be a number of seconds above 0; got {timeout}")
    if retries < 0:
        raise ConfigError(f"retries must be at least 0; got {retries}")
    if connections < 1:
        raise ConfigError(f"connections must be at least 1; got {connections}")
    bearer = {} if key is None else {"authorization": f"Bearer {key}"}  # httpx hides it in its repr
    return {
        "base_url": address,
        "headers": {"user-agent": f"urank/{version('urank')}", **bearer},
        "timeout": httpx.Timeout(timeout, connect=min(timeout, MAX_CONNECT_SECONDS)),
        "limits": httpx.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_SECONDS
        ),
        "verify": verify,
        "follow_redirects": False,  # the key must not reach another host
    }


def _validate_address(address: str) -> str:
    """Return an address without its trailing slash.

    >>> _validate_address("http://127.0.0.1:8000/")
    'http://127.0.0.1:8000'
    """
    if "@" in address:  # not echoed, since it contains a secret
        raise ConfigError(f"address must not contain a user name or password; pass key, or set {KEY_VARIABLE}")
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(f"address must be the URL of a server, as http://127.0.0.1:8000; got '{address}'")
    return address.rstrip("/")


def _validate_key(key: str | None) -> str | None:
    """Return a key that is safe in a header, by default that of the environment."""
    source = "key" if key is not None else KEY_VARIABLE
    key = key if key is not None else os.environ.get(KEY_VARIABLE) or None
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:  # not echoed: it may be nearly right
        raise ConfigError(f"{source} must be printable ASCII characters without spaces; got something else")
    return key


@dataclass(frozen=True, eq=False)
class Call(Generic[AnswerT]):
    """A request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx.Response], AnswerT]
    content: bytes | None = field(default=None, repr=False)
    content_type: str = JSON
    repeatable: bool = False  # whether sending it twice does no harm

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of httpx's `request`."""
        headers = {} if self.content is None else {"content-type": self.content_type}
        return {"method": self.method, "url": self.path, "content": self.content, "headers": headers}

    def should_retry(self, outcome: Outcome) -> bool:
        """Return whether to send it again after this outcome.

        >>> refused, broken = httpx.ConnectError("refused"), httpx.ReadError("broken")
        >>> [rank_many([]).should_retry(error) for error in (refused, broken)]
        [True, False]
        >>> [model().should_retry(error) for error in (refused, broken, httpx.ReadTimeout("slow"))]
        [True, True, False]
        >>> [model().should_retry(httpx.Response(status)) for status in (503, 500, 422)]
        [True, False, False]
        """
        if isinstance(outcome, httpx.ConnectError) or _retry_after(outcome):
            return True
        if not self.repeatable:
            return False
        if isinstance(outcome, httpx.Response):
            return outcome.status_code in TRANSIENT_STATUSES
        return isinstance(outcome, httpx.NetworkError | httpx.RemoteProtocolError)

    def conclude(self, outcome: Outcome, address: str) -> AnswerT:
        """Return the answer, or raise a `ServerError`."""
        if isinstance(outcome, httpx.RequestError):
            detail = self._failure(outcome)
            raise ServerError(f"{address} {detail}", detail=detail) from outcome
        if not outcome.is_success:
            raise refusal_error(outcome, address, self.path)
        try:
            return self.read(outcome)
        except (ValueError, KeyError, TypeError, IndexError, OSError, pl.exceptions.PolarsError):
            detail = f"did not answer {self.path} as urank serve does"  # as when another server listens there
            raise ServerError(f"{address} {detail}", status=outcome.status_code, detail=detail) from None

    def _failure(self, error: httpx.RequestError) -> str:
        """Return the detail of a request without an answer."""
        reason = _one_line(str(error)) or type(error).__name__
        if isinstance(error, httpx.PoolTimeout):
            return f"got no request for {self.path}: all connections of this client are in use"
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
            return f"cannot be reached: {reason}"
        if isinstance(error, httpx.TimeoutException):
            return f"did not answer {self.path} in time"
        return f"broke off the answer to {self.path}: {reason}"


class _ReadyCall(Call[bool]):
    """A readiness probe: it is sent once, and a server that is away is not ready."""

    def should_retry(self, outcome: Outcome) -> bool:
        return False

    def conclude(self, outcome: Outcome, address: str) -> bool:
        if isinstance(outcome, httpx.RequestError) or outcome.status_code == 503:
            return False
        return super().conclude(outcome, address)


def delay_after(outcome: Outcome, attempt: int) -> float:
    """Return the seconds to wait after an attempt: as long as the server asks for, or exponential backoff."""
    jitter = _random.random()
    return max(retry_delay(attempt, jitter), min(MAX_DELAY, _retry_after(outcome)) * (1.0 + 0.5 * jitter))


def retry_delay(attempt: int, jitter: float) -> float:
    """Return the seconds to wait after an attempt, counted from 0: exponential backoff, of which half is jitter.

    >>> [retry_delay(attempt, jitter=1.0) for attempt in (0, 1, 2, 10)]
    [0.1, 0.2, 0.4, 5.0]
    >>> retry_delay(1, jitter=0.0)
    0.1
    """
    return min(MAX_DELAY, FIRST_DELAY * 2.0**attempt) * (0.5 + 0.5 * jitter)


def _retry_after(outcome: Outcome) -> int:
    """Return the seconds after which an overloaded server wants the request again; 0 if it does not.

    >>> _retry_after(httpx.Response(503, headers={"Retry-After": "2"})), _retry_after(httpx.Response(503))
    (2, 0)
    """
    if isinstance(outcome, httpx.RequestError) or outcome.status_code != 503:
        return 0
    text = outcome.headers.get("retry-after", "")
    return int(text[:9]) if text.isascii() and text.isdigit() else 0


def rank(
    candidates: Candidates,
    *,
    query_id: str,
    user_id: str | None = None,
    positions: int | None = None,
    method: Method | None = None,
    context: Mapping[str, object] | None = None,
    model: str | None = None,
) -> Call[Ranking]:
    """Rank one list.

    Args:
        candidates: Dicts with `item_id`, `features` and optionally `value`, as in the API; or the ids of items that
            the server holds (`urank serve --items`); or a Polars, pandas or PyArrow table with a row for each
            candidate, the columns `item_id`, optionally `value`, and one for each feature, which is sent as Arrow.
        query_id: Name of the query in the log.
        user_id: Decides the arm of an A/B test, and is logged.
        positions: Number of items shown; by default as many as the model knows.
        method: How to rank; by default the server's method.
        context: Features that are the same for all candidates, as the hour; those of a candidate replace them.
        model: Name of the model, if the server has several.
    """
    options: dict[str, object] = {"query_id": query_id, "user_id": user_id, "positions": positions, "method": method}
    path = _path("rank", model)
    if _is_rows(candidates):
        content = _json({**options, "context": context, **_listed(candidates)}, "candidates")
        return Call("POST", path, _reader(Ranking), content)
    frame = _frame(candidates, "candidates")
    for name in options:
        if name in frame.columns:
            raise DataError(f"candidates must not have a column '{name}', which is an argument; or use rank_table")
    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: value for name, value in (context or {}).items() if name not in frame.columns}
    frame = frame.with_columns(pl.lit(value).alias(name) for name, value in given.items())
    return Call("POST", path, _read_only_ranking, _arrow(frame), ARROW)


def rank_many(queries: Rows, *, model: str | None = None) -> Call[list[Ranking]]:
    """Rank several lists, each a dict as in the API: `query_id`, `candidates`, and the options of `rank`."""
    content = _json({"queries": list(queries)}, "queries")
    return Call("POST", _path("rank", model), lambda each: list(_reader(RankingBatch)(each).rankings), content)


def rank_table(table: Any, *, model: str | None = None) -> Call[pl.DataFrame]:
    """Rank the lists of a table, which is sent as Arrow.

    Args:
        table: A row for each candidate, with `query_id`, `item_id`, a column for each feature, and optionally `value`,
            `user_id`, `positions` and `method`. The rows of a list must be adjacent.

    Returns:
        A row for each item shown, best first in each list: `ranking_id`, `query_id`, `item_id`, `position`, `score`,
        `probability`, `utility`, `method`, `policy`, `arm` and `model`.
    """
    return Call("POST", _path("rank", model), _read_frame, _arrow(_frame(table, "table")), ARROW)


def explain(
    candidates: Candidates,
    *,
    query_id: str | None = None,
    positions: int | None = None,
    orders: Mapping[str, Sequence[str]] | None = None,
    context: Mapping[str, object] | None = None,
    model: str | None = None,
) -> Call[Explanation]:
    """Return the click table of a list and the expected utility of orders of it.

    Args:
        candidates: As for `rank`.
        query_id: Optional.
        positions: Number of items shown; at most as many as the model knows.
        orders: Orders to evaluate, by name: item ids, best first.
        context, model: As for `rank`.
    """
    rows = candidates if _is_rows(candidates) else _rows(_frame(candidates, "candidates"))
    given = {name: list(ids) for name, ids in (orders or {}).items()}
    body = {"query_id": query_id, "positions": positions, "context": context, "orders": given, **_listed(rows)}
    content = _json(body, "candidates and orders")
    return Call("POST", _path("explain", model), _reader(Explanation), content, repeatable=True)


def put_items(items: Candidates) -> Call[ItemsStored]:
    """Add items to those that the server holds, or replace them, which needs a key.

    Args:
        items: Dicts with `item_id`, `features` and optionally `value`, or a table as for `rank`. Features that are left
            out are missing.
    """
    if _is_rows(items):
        content, kind = _json({"items": list(items)}, "items"), JSON
    else:
        content, kind = _arrow(_frame(items, "items")), ARROW
    return Call("PUT", "/v1/items", _reader(ItemsStored), content, kind, repeatable=True)


def feedback(events: Rows) -> Call[int]:
    """Report events, which are durable when this returns; reporting them twice does no harm.

    Args:
        events: Dicts with `ranking_id`, `item_id`, and optionally `click` (true), `conversion` (false) and `value`.

    Returns:
        The number of events accepted.
    """
    content = _json({"events": list(events)}, "events")
    return Call("POST", "/v1/feedback", lambda each: _reader(Accepted)(each).accepted, content, repeatable=True)


def click(ranking: Ranking | str, item_id: str, *, conversion: bool = False, value: float | None = None) -> Call[int]:
    """Report a click, as one event of `feedback`.

    Args:
        ranking: The result of `rank`, or its id.
        item_id: The item that was clicked.
        conversion: Whether it led to a purchase, an installation or the like.
        value: Its actual value, which replaces the value by which it was ranked.
    """
    if isinstance(ranking, Ranking) and item_id not in ranking.ids:
        raise DataError(f"item_id must be one of ranking {ranking.ranking_id}; got '{item_id}'")
    ranking_id = ranking.ranking_id if isinstance(ranking, Ranking) else ranking
    event = {"ranking_id": ranking_id, "item_id": item_id, "click": True, "conversion": conversion}
    return feedback([event if value is None else {**event, "value": value}])


def model(name: str | None = None) -> Call[ModelFacts]:
    """Describe the models in use, or the one of this name, and what requests must contain."""
    path = "/v1/model" if name is None else f"/v1/models/{quote(name, safe='')}"
    return Call("GET", path, _reader(ModelFacts), repeatable=True)


def ready() -> Call[bool]:
    """Return whether the server can serve requests; False if it cannot be reached. Never retried."""
    return _ReadyCall("GET", "/readyz", lambda response: bool(response.json()["status"] == "ready"))


def reload() -> Call[Reloaded]:
    """Reload the models, which needs a key; a broken model is refused."""
    # Not repeatable: a second reload would report that nothing changed.
    return Call("POST", "/v1/reload", _reader(Reloaded))


def _path(action: str, model: str | None) -> str:
    return f"/v1/{action}" if model is None else f"/v1/models/{quote(model, safe='')}/{action}"


def _reader(schema: type[AnswerT]) -> Callable[[httpx.Response], AnswerT]:
    return lambda response: msgspec.json.decode(response.content, type=schema)


def _listed(candidates: Rows | Sequence[str]) -> dict[str, object]:
    """Return the fields of a list: the ids of items, or candidates."""
    by_id = bool(candidates) and all(isinstance(each, str) for each in candidates)
    return {"item_id" if by_id else "candidates": list(candidates)}


def _is_rows(candidates: Candidates) -> bool:
    return isinstance(candidates, Sequence) and not isinstance(candidates, str | bytes)


def _frame(table: Any, name: str) -> pl.DataFrame:
    """Convert a table, without the index column that pandas adds after rows were dropped."""
    if not isinstance(table, pl.LazyFrame) and not hasattr(table, "__arrow_c_stream__"):
        allowed = "a list of dicts or a table" if name == "candidates" else "a table"
        kind = f"{type(table).__module__}.{type(table).__name__}"
        raise DataError(f"{name} must be {allowed} of Polars, pandas or PyArrow; got {kind}")
    return table_frame(table, name, name).select(~cs.matches(r"^__index_level_\d+__$"))


def _rows(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Convert a table of candidates to dicts as in the API."""
    frame = frame.with_columns(cs.float().fill_nan(None))
    own = [name for name in ("item_id", "value") if name in frame.columns]
    return [{**{name: row.pop(name) for name in own}, "features": row} for row in frame.iter_rows(named=True)]


def _arrow(frame: pl.DataFrame) -> bytes:
    """Write an Arrow IPC stream, with strings in the layout that every reader supports."""
    sink = io.BytesIO()
    frame = frame.with_columns((cs.categorical() | cs.enum()).cast(pl.String))
    frame.write_ipc_stream(sink, compression="uncompressed", compat_level=pl.CompatLevel.oldest())
    return sink.getvalue()


def _json(body: Mapping[str, object], name: str) -> bytes:
    """Write the fields of a body that are given."""

    def convert(value: object) -> object:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"got {type(value).__module__}.{type(value).__name__}")

    try:
        given = {key: value for key, value in body.items() if value is not None}
        return json.dumps(given, allow_nan=False, separators=(",", ":"), default=convert).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must be made of text, finite numbers, booleans and None: {error}") from error


def _read_frame(response: httpx.Response) -> pl.DataFrame:
    return pl.read_ipc_stream(io.BytesIO(response.content))


def _read_only_ranking(response: httpx.Response) -> Ranking:
    """Read the one ranking of an Arrow stream."""
    frame = _read_frame(response)
    rows = frame.to_dicts()
    return msgspec.convert({**rows[0], "utility": float(frame["utility"].sum()), "items": rows}, Ranking)
