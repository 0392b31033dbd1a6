"""The client for programs that run on asyncio."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from random import SystemRandom
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx
import polars as pl

from urank.client import calls
from urank.client.answers import Explanation, ModelFacts, Ranking, Reloaded
from urank.client.calls import Call, Candidates, Outcome, Rows
from urank.client.retries import pause, worth_repeating
from urank.client.settings import Settings

if TYPE_CHECKING:  # a client needs nothing of a ranker but this name
    from urank.rankers.order import Method

__all__ = ["AsyncClient"]

AnswerT = TypeVar("AnswerT")
_chance = SystemRandom()


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
        self._settings = Settings(address, key, timeout, retries, connections, verify)
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
            calls.rank_call(candidates, query_id=query_id, user_id=user_id, positions=positions, method=method)
        )

    async def rank_many(self, queries: Rows) -> list[Ranking]:
        """Rank several lists; see `Client.rank_many`."""
        return await self._send(calls.rank_many_call(queries))

    async def rank_table(self, table: Any) -> pl.DataFrame:
        """Rank the lists of a table; see `Client.rank_table`."""
        return await self._send(calls.rank_table_call(table))

    async def explain(
        self,
        candidates: Candidates,
        *,
        query_id: str | None = None,
        positions: int | None = None,
        orders: Mapping[str, Sequence[str]] | None = None,
    ) -> Explanation:
        """The click table of a list and the utility of orders; see `Client.explain`."""
        return await self._send(calls.explain_call(candidates, query_id=query_id, positions=positions, orders=orders))

    async def feedback(self, events: Rows) -> int:
        """Say what happened to items of rankings; see `Client.feedback`."""
        return await self._send(calls.feedback_call(events))

    async def click(
        self, ranking: Ranking | str, item_id: str, *, conversion: bool = False, value: float | None = None
    ) -> None:
        """Say that an item was clicked; see `Client.click`."""
        await self._send(calls.click_call(ranking, item_id, conversion=conversion, value=value))

    async def model(self) -> ModelFacts:
        """What is served, and what it takes."""
        return await self._send(calls.model_call())

    async def ready(self) -> bool:
        """Whether requests can be served; see `Client.ready`."""
        return calls.is_ready(await self._try(calls.ready_call()), self._settings.address)

    async def reload(self) -> Reloaded:
        """Have the server load its models anew; see `Client.reload`."""
        return await self._send(calls.reload_call())

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
                return calls.conclude(call, outcome, self._settings.address)
            await asyncio.sleep(pause(attempt, _chance.random()))
        return calls.conclude(call, await self._try(call), self._settings.address)

    async def _try(self, call: Call[AnswerT]) -> Outcome:
        try:
            return await self._http.request(**call.arguments())
        except httpx.RequestError as error:
            return error
