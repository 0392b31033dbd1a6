"""How a client connects: checked arguments, and what httpx makes of them."""

from __future__ import annotations

import math
import os
import ssl
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import httpx

from urank.errors import ConfigError

__all__ = ["Settings"]

KEY_VARIABLE = "URANK_API_KEY"
CONNECT_SECONDS = 5.0
IDLE_SECONDS = 60.0
"""How long a connection is kept for the next request: less than the 75 seconds after which the server closes it."""


@dataclass(frozen=True)
class Settings:
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
