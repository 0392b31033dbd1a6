"""The client for programs that run on asyncio."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from random import SystemRandom
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx
import polars as pl

from urank.client import transport
from urank.client.schemas import Explanation, ModelFacts, Ranking, Reloaded
from urank.client.transport import Call, Candidates, Connection, Outcome, Rows, pause, worth_repeating

if TYPE_CHECKING:
    from urank.ranking.positions import Method

__all__ = ["AsyncClient", "Client"]

AnswerT = TypeVar("AnswerT")
_chance = SystemRandom()


class Client:
    """A client of `urank serve`; threads may share it. Close it, or use it in a `with` block.

    Every method raises `ServerError` when the server refuses or cannot be reached. A request is sent again after a
    pause when it cannot have done anything yet, or when doing it twice does no harm (`urank.client.transport`); a
    ranking whose answer was lost is not.

    Args:
        address: where the server listens, as it prints it: `http://127.0.0.1:8000`.
        key: what the server asks for; that of the environment variable URANK_API_KEY when none is given.
        timeout: seconds to wait for the server at each step: to connect (at most 5), to send, to hear of it.
        retries: how often a request is sent again.
        connections: how many are kept at most.
        verify: whether the certificate of an https address is checked, or the context to check it with.

    >>> Client("http://127.0.0.1:8000", key="secret-of-the-server")
    Client('http://127.0.0.1:8000')
    >>> Client("127.0.0.1")
    Traceback (most recent call last):
    urank.errors.ConfigError: address must be that of a server, as http://127.0.0.1:8000; got '127.0.0.1'
    """

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
        self._settings = Connection(address, key, timeout, retries, connections, verify)
        self._http = httpx.Client(**self._settings.arguments())

    def rank(
        self,
        candidates: Candidates,
        *,
        query_id: str,
        user_id: str | None = None,
        positions: int | None = None,
        method: Method | None = None,
    ) -> Ranking:
        """Rank one list.

        Args:
            candidates: dicts with `item_id`, `features` and optionally `value`, as in the API; or a table of Polars,
                pandas or PyArrow with a row for each, which has `item_id`, a column for each feature and optionally
                `value`, and goes over as Arrow.
            query_id: what the log calls it.
            user_id: who will see it; decides the arm of an A/B test, and is logged.
            positions: how many will be shown; as many as the model knows when left out.
            method: how to rank; the server's own when left out.
        """
        return self._send(
            transport.rank_call(candidates, query_id=query_id, user_id=user_id, positions=positions, method=method)
        )

    def rank_many(self, queries: Rows) -> list[Ranking]:
        """Rank several lists, each a dict as in the API: `query_id`, `candidates`, and what else `rank` takes."""
        return self._send(transport.rank_many_call(queries))

    def rank_table(self, table: Any) -> pl.DataFrame:
        """Rank the lists of a table, which goes over as Arrow.

        Args:
            table: a row for each candidate, with `query_id`, `item_id`, a column for each feature, and optionally
                `value`, `user_id`, `positions` and `method`. The rows of a list lie together.

        Returns:
            a row for each item shown, best first in each list: `ranking_id`, `query_id`, `item_id`, `position`,
            `score`, `click`, `utility`, `policy`, `arm` and `model`.
        """
        return self._send(transport.rank_table_call(table))

    def explain(
        self,
        candidates: Candidates,
        *,
        query_id: str | None = None,
        positions: int | None = None,
        orders: Mapping[str, Sequence[str]] | None = None,
    ) -> Explanation:
        """The click table of a list, what each way of ranking makes of it, and the utility of orders.

        Args:
            candidates: as for `rank`.
            query_id: is not needed.
            positions: how many would be shown; at most as many as the model knows.
            orders: orders to judge, by name: item ids from the top.
        """
        return self._send(transport.explain_call(candidates, query_id=query_id, positions=positions, orders=orders))

    def feedback(self, events: Rows) -> int:
        """Say what happened to items of rankings; they are durable when this returns, and sending them twice does no
        harm.

        Args:
            events: dicts with `ranking_id`, `item_id`, and optionally `click` (true), `conversion` (false) and `value`.

        Returns:
            how many were taken.
        """
        return self._send(transport.feedback_call(events))

    def click(
        self, ranking: Ranking | str, item_id: str, *, conversion: bool = False, value: float | None = None
    ) -> None:
        """Say that an item was clicked.

        Args:
            ranking: what `rank` gave, or its id.
            item_id: which.
            conversion: whether it was bought, installed, or what else counts.
            value: what it turned out to be worth; replaces the value by which it was ranked.
        """
        self._send(transport.click_call(ranking, item_id, conversion=conversion, value=value))

    def model(self) -> ModelFacts:
        """What is served, and what it takes."""
        return self._send(transport.model_call())

    def ready(self) -> bool:
        """Whether requests can be served; false when the server says no or cannot be reached. It is asked once."""
        return transport.is_ready(self._try(transport.ready_call()), self._settings.address)

    def reload(self) -> Reloaded:
        """Have the server load its models anew, for which it needs a key; what is broken is refused."""
        return self._send(transport.reload_call())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address!r})"

    def _send(self, call: Call[AnswerT]) -> AnswerT:
        """The answer to a call, which is made again where that is safe."""
        for attempt in range(self._settings.retries):
            outcome = self._try(call)
            if not worth_repeating(outcome, repeatable=call.repeatable):
                return transport.conclude(call, outcome, self._settings.address)
            time.sleep(pause(attempt, _chance.random()))
        return transport.conclude(call, self._try(call), self._settings.address)

    def _try(self, call: Call[AnswerT]) -> Outcome:
        try:
            return self._http.request(**call.arguments())
        except httpx.RequestError as error:
            return error


class AsyncClient:
    """`urank.Client` with methods to await; many requests may be under way at once.

        async with urank.AsyncClient("http://127.0.0.1:8000") as client:
            rankings = await asyncio.gather(*(client.rank(each, query_id=name) for name, each in lists.items()))

    Args:
        address, key, timeout, retries, connections, verify: as of `Client`; more requests than connections wait for
            one another.
    """

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
        self._settings = Connection(address, key, timeout, retries, connections, verify)
        self._http = httpx.AsyncClient(**self._settings.arguments())

    async def rank(
        self,
        candidates: Candidates,
        *,
        query_id: str,
        user_id: str | None = None,
        positions: int | None = None,
        method: Method | None = None,
    ) -> Ranking:
        """Rank one list; see `Client.rank`."""
        return await self._send(
            transport.rank_call(candidates, query_id=query_id, user_id=user_id, positions=positions, method=method)
        )

    async def rank_many(self, queries: Rows) -> list[Ranking]:
        """Rank several lists; see `Client.rank_many`."""
        return await self._send(transport.rank_many_call(queries))

    async def rank_table(self, table: Any) -> pl.DataFrame:
        """Rank the lists of a table; see `Client.rank_table`."""
        return await self._send(transport.rank_table_call(table))

    async def explain(
        self,
        candidates: Candidates,
        *,
        query_id: str | None = None,
        positions: int | None = None,
        orders: Mapping[str, Sequence[str]] | None = None,
    ) -> Explanation:
        """The click table of a list and the utility of orders; see `Client.explain`."""
        return await self._send(
            transport.explain_call(candidates, query_id=query_id, positions=positions, orders=orders)
        )

    async def feedback(self, events: Rows) -> int:
        """Say what happened to items of rankings; see `Client.feedback`."""
        return await self._send(transport.feedback_call(events))

    async def click(
        self, ranking: Ranking | str, item_id: str, *, conversion: bool = False, value: float | None = None
    ) -> None:
        """Say that an item was clicked; see `Client.click`."""
        await self._send(transport.click_call(ranking, item_id, conversion=conversion, value=value))

    async def model(self) -> ModelFacts:
        """What is served, and what it takes."""
        return await self._send(transport.model_call())

    async def ready(self) -> bool:
        """Whether requests can be served; see `Client.ready`."""
        return transport.is_ready(await self._try(transport.ready_call()), self._settings.address)

    async def reload(self) -> Reloaded:
        """Have the server load its models anew; see `Client.reload`."""
        return await self._send(transport.reload_call())

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address!r})"

    async def _send(self, call: Call[AnswerT]) -> AnswerT:
        """The answer to a call, which is made again where that is safe."""
        for attempt in range(self._settings.retries):
            outcome = await self._try(call)
            if not worth_repeating(outcome, repeatable=call.repeatable):
                return transport.conclude(call, outcome, self._settings.address)
            await asyncio.sleep(pause(attempt, _chance.random()))
        return transport.conclude(call, await self._try(call), self._settings.address)

    async def _try(self, call: Call[AnswerT]) -> Outcome:
        try:
            return await self._http.request(**call.arguments())
        except httpx.RequestError as error:
            return error
