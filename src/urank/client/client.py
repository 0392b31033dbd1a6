"""The clients: `Client`, and `AsyncClient` for asyncio.

Both have one method for each call of `urank.client.transport`, with its arguments and documentation; they differ only
in how a call is sent.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from urank.client import transport
from urank.client.transport import Call, Outcome, delay_after, http_arguments

AnswerT = TypeVar("AnswerT")
P = ParamSpec("P")


def _method(build: Callable[P, Call[AnswerT]]) -> Callable[Concatenate[Client, P], AnswerT]:
    """Return a method of `Client` that sends the call."""

    @wraps(build)
    def method(self: Client, /, *args: P.args, **options: P.kwargs) -> AnswerT:
        return self._send(build(*args, **options))

    method.__signature__ = _with_self(build)  # type: ignore[attr-defined]
    return method


def _async_method(
    build: Callable[P, Call[AnswerT]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AnswerT]]:
    """Return a method of `AsyncClient` that sends the call."""

    @wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> AnswerT:
        return await self._send(build(*args, **options))

    method.__signature__ = _with_self(build)  # type: ignore[attr-defined]
    return method


def _with_self(build: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(build)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


class _BaseClient:
    _open: Callable[..., Any]

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        timeout: float = 10.0,
        retries: int = 3,
        connections: int = 20,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        arguments = http_arguments(address, key, timeout, retries, connections, verify)
        self._address, self._retries = arguments["base_url"], retries
        self._http = self._open(**arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address!r})"


class Client(_BaseClient):
    """A client of `urank serve`, safe to share between threads. Close it, or use it in a `with` block.

    Every method raises `ServerError` if the server refuses a request or cannot be reached. Requests are retried with
    exponential backoff where that is safe (`urank.client.transport`). A ranking whose answer was lost is not retried.

    Args:
        address: URL of the server, as it prints it: `http://127.0.0.1:8000`.
        key: API key of the server; by default that of the environment variable URANK_API_KEY.
        timeout: Seconds to wait for each step: to connect (at most 5), to send, to receive.
        retries: Largest number of retries of a request.
        connections: Largest number of open connections.
        verify: Whether to verify the certificate of an https address, or the context to verify it with.

    >>> Client("http://127.0.0.1:8000", key="secret-of-the-server")
    Client('http://127.0.0.1:8000')
    >>> Client("127.0.0.1")
    Traceback (most recent call last):
    urank.errors.ConfigError: address must be the URL of a server, as http://127.0.0.1:8000; got '127.0.0.1'
    """

    _open = httpx.Client

    rank = _method(transport.rank)
    rank_many = _method(transport.rank_many)
    rank_table = _method(transport.rank_table)
    explain = _method(transport.explain)
    put_items = _method(transport.put_items)
    feedback = _method(transport.feedback)
    click = _method(transport.click)
    model = _method(transport.model)
    ready = _method(transport.ready)
    reload = _method(transport.reload)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call[AnswerT]) -> AnswerT:
        outcome: Outcome
        for attempt in count():
            try:
                outcome = self._http.request(**call.arguments())
            except httpx.RequestError as error:
                outcome = error
            if attempt == self._retries or not call.should_retry(outcome):
                break
            time.sleep(delay_after(outcome, attempt))
        return call.conclude(outcome, self._address)


class AsyncClient(_BaseClient):
    """`urank.Client` with methods to await; many requests may be in flight at once.

        async with urank.AsyncClient("http://127.0.0.1:8000") as client:
            rankings = await asyncio.gather(*(client.rank(each, query_id=name) for name, each in lists.items()))

    The arguments are those of `Client`; requests beyond the number of connections wait for one.
    """

    _open = httpx.AsyncClient

    rank = _async_method(transport.rank)
    rank_many = _async_method(transport.rank_many)
    rank_table = _async_method(transport.rank_table)
    explain = _async_method(transport.explain)
    put_items = _async_method(transport.put_items)
    feedback = _async_method(transport.feedback)
    click = _async_method(transport.click)
    model = _async_method(transport.model)
    ready = _async_method(transport.ready)
    reload = _async_method(transport.reload)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, call: Call[AnswerT]) -> AnswerT:
        outcome: Outcome
        for attempt in count():
            try:
                outcome = await self._http.request(**call.arguments())
            except httpx.RequestError as error:
                outcome = error
            if attempt == self._retries or not call.should_retry(outcome):
                break
            await asyncio.sleep(delay_after(outcome, attempt))
        return call.conclude(outcome, self._address)
