"""Logs of a server, as text or JSON lines with times in UTC, and what is noted about each request.

Imported by the supervisor, so it uses the standard library alone.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
REQUEST: ContextVar[dict[str, Any]] = ContextVar("request")
"""Facts of the request that is being handled, by name: `request_id`, `status`, `candidates`, `queue_ms`."""
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


def request_id(header: str | None) -> str:
    """Return the id that a client sent, or a new one if it sent none or an invalid one.

    >>> request_id("4bf92f35-77b3"), len(request_id("two words"))
    ('4bf92f35-77b3', 16)
    """
    return header if header is not None and _REQUEST_ID.fullmatch(header) else secrets.token_hex(8)


def configure_logging(log_format: LogFormat, *, quiet: bool) -> None:
    """Write all logs of this process to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(log_format))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler], force=True)
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _Formatter(logging.Formatter):
    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self.as_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        identity = REQUEST.get({}).get("request_id")
        facts = {} if identity is None else {"request_id": identity}
        facts |= getattr(record, "facts", {})
        error = self.formatException(record.exc_info) if record.exc_info else None
        if self.as_json:
            line = {"time": when, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
            return json.dumps({**line, **facts, **({"error": error} if error else {})}, ensure_ascii=False, default=str)
        pairs = "".join(f" {name}={value}" for name, value in facts.items())
        text = f"{when} {record.levelname} {record.name}: {record.getMessage()}{pairs}"
        return f"{text}\n{error}" if error else text
