"""Settings of a server, and the key that requests must present."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from urank.errors import ConfigError
from urank.serve.list_ranking import Exploration
from urank.serve.models import ModelSources
from urank.serve.request_schemas import Limits

KEY_VARIABLE = "URANK_API_KEY"
MIN_KEY = 16


@dataclass(frozen=True)
class ServeConfig:
    """Everything but the socket.

    Attributes:
        sources: The models.
        key: Key that requests must present; None only on a loopback address.
        hosts: Allowed names in the Host header, without port; any if empty.
        limits: Limits of requests.
        log: Folder of the feedback log; None keeps no log.
        exploration: How lists are randomised; None leaves them as ranked.
        sample: Log with lists for the playground.
        playground: Whether to serve the playground.
        ignore_unknown: Accept candidates with features that no model has.
        segment_bytes, segment_seconds: Size and age at which a write-ahead file is closed.
        join_seconds: How long a closed write-ahead file waits for late clicks before it becomes Parquet.
        seed: Seed of the exploration; None draws one from the system.
    """

    sources: ModelSources
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
    """Read the key from a file, by default from the environment; None if there is none."""
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
        raise ConfigError(f"{source} must be a key of at least {MIN_KEY} printable ASCII characters without spaces")
    return key


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
