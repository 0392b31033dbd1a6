"""Settings of a server: the limits of requests, and the key that they must present."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from urank.errors import ConfigError

if TYPE_CHECKING:
    from urank.serve.list_ranking import Exploration
    from urank.serve.models import ModelSources

KEY_VARIABLE = "URANK_API_KEY"
MIN_KEY = 16


class Limits(BaseModel):
    """Largest size and duration of requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(16 * 2**20, ge=1_024, description="bytes of a body")
    candidates: int = Field(2_000, ge=1, le=1_000_000, description="largest number of candidates of a query")
    queries: int = Field(100, ge=1, le=1_000_000, description="largest number of queries of a batch")
    rows: int = Field(20_000, ge=1, le=10_000_000, description="largest number of candidates of a batch in total")
    json_bytes: int = Field(4 * 2**20, ge=1_024, description="bytes of a JSON body, which takes longer to parse")
    items: int = Field(2_000_000, ge=1, le=100_000_000, description="largest number of items of PUT /v1/items in total")
    requests: int = Field(1_000, ge=1, le=100_000, description="largest number of concurrent requests per worker")
    seconds: float = Field(10.0, ge=0.1, le=600, description="seconds for a body to arrive, and for the answer")


@dataclass(frozen=True)
class ServeConfig:
    """Everything but the socket."""

    sources: ModelSources
    name: str = "default"  # of this model
    others: Mapping[str, ModelSources] = field(default_factory=dict)  # more models by name
    items: Path | None = None  # Parquet file with the features of items
    rank_unknown: bool = False  # rank items that are not in that file, with missing features
    key: str | None = field(default=None, repr=False)  # that requests must present; None only on a loopback address
    hosts: tuple[str, ...] = ()  # allowed names in the Host header, without port; any if empty
    limits: Limits = field(default_factory=Limits)
    log: Path | None = None  # folder of the feedback log
    sink: str | None = field(default=None, repr=False)  # URL of the database that takes its place; None keeps no log
    exploration: Exploration | None = None  # how lists are randomised; None leaves them as ranked
    sample: str | None = None  # log with lists for the playground
    playground: bool = True
    ignore_unknown: bool = False  # accept features that no model has
    access_log: bool = False  # log a line for every request
    trace: bool = False  # export spans by OpenTelemetry
    seed: int | None = None  # of the exploration; None draws one from the system


def read_key(file: Path | None) -> str | None:
    """Read the key from a file, by default from the environment; None if there is none."""
    source = KEY_VARIABLE if file is None else f"--key-file {file}"
    try:
        key = (os.environ.get(KEY_VARIABLE, "") if file is None else file.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read") from error
    if file is None and not key:
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
