"""Failures of requests as one-sentence errors. No error ever contains the key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from urank.errors import UrankError

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
        self.status = status
        self.detail = detail
        self.errors = tuple(errors)


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
    return ServerError(
        f"{address} refused {path} with {status}: {detail}{where}", status=status, detail=detail, errors=errors
    )


def connection_error(error: httpx.RequestError, address: str, path: str) -> ServerError:
    """Return the error for a request without an answer."""
    reason = _one_line(str(error)) or type(error).__name__
    if isinstance(error, httpx.PoolTimeout):
        detail = f"got no request for {path}: all connections of this client are in use"
    elif isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        detail = f"cannot be reached: {reason}"
    elif isinstance(error, httpx.TimeoutException):
        detail = f"did not answer {path} in time"
    else:
        detail = f"broke off the answer to {path}: {reason}"
    return ServerError(f"{address} {detail}", detail=detail)


def invalid_answer_error(response: httpx.Response, address: str, path: str) -> ServerError:
    """Return the error for a success that `urank serve` would not send, as when another server listens there."""
    detail = f"did not answer {path} as urank serve does"
    return ServerError(f"{address} {detail}", status=response.status_code, detail=detail)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}…"
