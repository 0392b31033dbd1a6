"""When a request is sent again, and after how long.

    nothing was sent             any request           the server could not be connected to
    something may have happened  repeatable ones only  the connection broke, or a server or proxy says 502, 503 or 504

A ranking is not repeatable: when its answer is lost it may be in the log all the same, as a list that was shown and on
which nobody clicked, and each repetition would add one more. What has run out of time is not sent again either: the
time that the caller gave is over.
"""

from __future__ import annotations

import httpx

__all__ = ["pause", "worth_repeating"]

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
