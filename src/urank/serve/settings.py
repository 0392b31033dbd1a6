"""What decides how a server runs."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from urank.errors import ConfigError
from urank.serve.models import Sources
from urank.serve.ranking import Exploration
from urank.serve.schemas import Limits

__all__ = ["KEY_VARIABLE", "ServeConfig", "is_loopback", "read_key"]

KEY_VARIABLE = "URANK_API_KEY"
MIN_KEY = 16


@dataclass(frozen=True)
class ServeConfig:
    """All of it but the socket.

    Attributes:
        sources: the models.
        key: what requests must show; none only on a loopback address.
        hosts: the names under which the server may be called, without port; any when empty.
        limits: how much a request may ask for.
        log: the folder of the feedback log; none keeps no log.
        exploration: how lists are randomised; none leaves them as ranked.
        sample: a log from which the playground shows lists.
        playground: whether there is one.
        ignore_unknown: let candidates bring features that no model has.
        segment_bytes, segment_seconds: when a write-ahead file gives way to the next.
        join_seconds: how long a sealed write-ahead file waits for late clicks before it becomes Parquet.
        seed: of exploration; none draws it from the system.
    """

    sources: Sources
    key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    log: Path | None = None
    exploration: Exploration | None = None
    sample: str | None = None
    playground: bool = True
    ignore_unknown: bool = False
    segment_bytes: int = 64 * 2**20
    segment_seconds: float = 300.0
    join_seconds: float = 600.0
    seed: int | None = None


def read_key(file: Path | None) -> str | None:
    """The key of a file, or of the environment; none when there is neither."""
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--key-file {file} cannot be read") from error
        source = f"--key-file {file}"
    else:
        key, source = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
        if not key:
            return None
    if len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source} must hold a key of at least {MIN_KEY} printable ASCII characters without spaces")
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
