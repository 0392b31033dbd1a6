"""Admission of requests under overload: a queue that is bounded by waiting time, and early refusals.

Ranking is work for the processor, and one event loop does it. Requests with complete bodies take turns: in each
iteration of the loop one, or as many as take the time that the rest of the iteration took, most of it for connections.
A request that would wait too long is refused as soon as its headers are read, before its body is. A burst from idle
may wait for `BURST_SECONDS`, but a queue that stands is overload however short it is (the idea of CoDel): it makes
everybody wait and answers nobody earlier. In overload few may wait, so that those accepted are answered nearly as fast
as ever.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

BURST_SECONDS = 0.25
STANDING_TURNS, STANDING_SECONDS = 10, 0.02
"""A queue of more turns, which also take longer than so many seconds, must not stand."""
STAND_SECONDS = 0.1
"""Time after which a queue stands."""
SHORT_QUEUE = 2
"""Longest queue in overload."""
WINDOW_SECONDS = 1.0
OVERLOAD_SHARE = 0.2
"""Share of requests refused in a window above which the next one begins with the short queue."""
MAX_DISCARDS = 16
ARRIVAL_SECONDS = 0.1
"""Time after which a request whose body has not arrived does not count as waiting: its client is slow."""
_WEIGHT = 0.1  # of the newest interval in their moving average


class Ticket:
    """An admitted request: whether its body is wanted, and how long it waited for its turn once that had arrived."""

    __slots__ = ("is_read", "waited")

    def __init__(self) -> None:
        self.is_read, self.waited = False, 0.0


class Discards:
    """Connections with the rest of a refused body, of which few are read at a time, since bodies may be large."""

    def __init__(self) -> None:
        self._reading: set[asyncio.Transport] = set()
        self._paused: dict[asyncio.Transport, None] = {}

    def enter(self, transport: asyncio.Transport) -> None:
        """Pause a connection until it may go on."""
        if len(self._reading) < MAX_DISCARDS:
            self._reading.add(transport)
        else:
            transport.pause_reading()
            self._paused[transport] = None

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection whose body has ended, and let another go on."""
        self._paused.pop(transport, None)
        self._reading.discard(transport)
        while self._paused and len(self._reading) < MAX_DISCARDS:
            following = next(iter(self._paused))
            del self._paused[following]
            self._reading.add(following)
            following.resume_reading()


class Admission:
    """The queue of one event loop; all methods must be called in its thread."""

    def __init__(self) -> None:
        self.discards = Discards()
        self._arriving: dict[Ticket, float] = {}  # by the time of admission
        self._ready: deque[asyncio.Future[None]] = deque()
        self._turn_seconds, self._other_seconds = 0.001, 0.0  # of a turn, and of the rest of an iteration; averages
        self._turns = 0  # given in this iteration of the loop
        self._began = self._ended = 0.0  # the turns of this iteration
        self._overloaded, self._window, self._short = False, 0.0, 0.0  # the last time that the queue was short
        self._admitted = self._refused = 0

    def admit(self) -> Ticket | None:
        """Return the ticket of a request; None if it must be refused."""
        now = time.monotonic()
        if now - self._window > WINDOW_SECONDS:
            self._overloaded = self._refused > OVERLOAD_SHARE * (self._refused + self._admitted)
            self._window, self._admitted, self._refused = now, 0, 0
        while self._arriving and now - next(iter(self._arriving.values())) > ARRIVAL_SECONDS:
            del self._arriving[next(iter(self._arriving))]
        waiting = len(self._arriving) + len(self._ready)
        share = max(1.0, self._other_seconds / self._turn_seconds)  # turns in an iteration
        seconds = waiting * (self._turn_seconds + self._other_seconds / share)
        if waiting <= STANDING_TURNS or seconds <= STANDING_SECONDS:
            self._short = now
        stands = now - self._short > STAND_SECONDS
        if waiting >= SHORT_QUEUE + share and (self._overloaded or stands or seconds > BURST_SECONDS):
            self._overloaded = True
            self._refused += 1
            return None
        self._admitted += 1
        ticket = Ticket()
        self._arriving[ticket] = now
        return ticket

    async def turn(self, ticket: Ticket) -> None:
        """Wait for the turn of a request whose body has arrived."""
        self.leave(ticket)
        if self._turns:
            arrived = time.monotonic()
            future = asyncio.get_running_loop().create_future()
            self._ready.append(future)
            await future
            ticket.waited = time.monotonic() - arrived
        else:  # nothing was given a turn in this iteration
            self._turns, self._began, self._ended = 1, time.monotonic(), time.monotonic()
            asyncio.get_running_loop().call_soon(self._next_turns)

    def leave(self, ticket: Ticket) -> None:
        """Forget a request that ended before its turn."""
        self._arriving.pop(ticket, None)

    def _next_turns(self) -> None:
        """Give the next requests their turns; called in each iteration of the loop, after its turns."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self._turn_seconds += _WEIGHT * ((now - self._began) / self._turns - self._turn_seconds)
        self._other_seconds += _WEIGHT * (self._began - self._ended - self._other_seconds)
        self._ended, wanted = now, max(1.0, self._other_seconds / self._turn_seconds)
        loop.call_soon(self._begin_turns)
        self._turns = 0
        while self._ready and self._turns < wanted:
            if not (future := self._ready.popleft()).done():  # else it was cancelled
                future.set_result(None)
                self._turns += 1
        if self._turns:
            loop.call_soon(self._next_turns)

    def _begin_turns(self) -> None:
        self._began = time.monotonic()
