"""The options of commands that can also run on a cluster."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from urank.errors import ConfigError
from urank.scale.cluster import Cluster

__all__ = ["Address", "Engine", "EngineName", "Workers", "cluster_of", "refuse_url"]

_PANEL = "Where it runs"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class EngineName(StrEnum):
    """What does the work."""

    local = "local"
    ray = "ray"


Engine = Annotated[
    EngineName,
    typer.Option(
        help="**local**: this process. **ray**: workers of a Ray cluster, or of one that is started on this machine "
        "(needs `pip install 'urank[scale]'`). Logs may then be at URLs, as `s3://bucket/log`.",
        rich_help_panel=_PANEL,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Workers of the engine ray.", show_default="2", rich_help_panel=_PANEL),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Of a running Ray cluster, as `auto` or `head:6379`.",
        show_default="a cluster on this machine",
        rich_help_panel=_PANEL,
    ),
]


def refuse_url(path: Path, flag: str) -> None:
    """Refuse a URL where a folder of this machine is meant; as a path it would name one called `s3:`."""
    if _URL.match(str(path)):
        raise ConfigError(f"{flag} must be a folder of this machine, not a URL; got {path}")


def cluster_of(engine: EngineName, workers: int | None, address: str | None) -> Cluster | None:
    """The cluster that the options name; none for this process."""
    if engine is EngineName.ray:
        return Cluster(workers or 2, address)
    for flag, given in (("--workers", workers), ("--address", address)):
        if given is not None:
            raise ConfigError(f"{flag} belongs to --engine ray; the engine is local")
    return None
