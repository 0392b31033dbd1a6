"""What goes wrong with a server, as one sentence. None of them ever holds the key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from urank.errors import UrankError

__all__ = ["ServerError", "failed", "refused", "strange"]

_MOST_PLACES = 3
_MOST_TEXT = 300


class ServerError(UrankError):
    """A server refused a request, or could not be asked.

    Attributes:
        status: of HTTP; none when there was no answer.
        detail: the server's own sentence, or what happened instead of an answer.
        errors: where in the body, and what is wrong there, as pairs.
    """

    def __init__(
        self, message: str, *, status: int | None = None, detail: str = "", errors: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail
        self.errors = tuple(errors)


def refused(response: httpx.Response, address: str, path: str) -> ServerError:
    """What an answer that is no success says."""
    detail, errors = _problem(response)
    places = [f"{at} {problem}" for at, problem in errors[:_MOST_PLACES]]
    if more := len(errors) - len(places):
        places.append(f"and {more} more")
    where = f" ({'; '.join(places)})" if places else ""
    status = response.status_code
    return ServerError(
        f"{address} refused {path} with {status}: {detail}{where}", status=status, detail=detail, errors=errors
    )


def failed(error: httpx.RequestError, address: str, path: str) -> ServerError:
    """What happened instead of an answer."""
    reason = _one_line(str(error)) or type(error).__name__
    if isinstance(error, httpx.PoolTimeout):
        detail = f"was not asked for {path}: all connections of this client are in use"
    elif isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        detail = f"cannot be reached: {reason}"
    elif isinstance(error, httpx.TimeoutException):
        detail = f"did not answer {path} in time"
    else:
        detail = f"broke off the answer to {path}: {reason}"
    return ServerError(f"{address} {detail}", detail=detail)


def strange(response: httpx.Response, address: str, path: str) -> ServerError:
    """A success that is not what `urank serve` answers, as when something else listens there."""
    detail = f"did not answer {path} as urank serve does"
    return ServerError(f"{address} {detail}", status=response.status_code, detail=detail)


def _problem(response: httpx.Response) -> tuple[str, list[tuple[str, str]]]:
    """Detail and places of a problem+json; the words of the status when a body is none, as that of a proxy."""
    try:
        found: Any = response.json()
        detail = _one_line(found["detail"])
        errors = [(_one_line(each["at"]), _one_line(each["problem"])) for each in found.get("errors", [])]
    except (ValueError, KeyError, TypeError, AttributeError):
        return httpx.codes.get_reason_phrase(response.status_code) or "it says no more", []
    return detail, errors


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}…"
