"""The options of commands that can also run on a cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from urank.errors import ConfigError
from urank.log.columns import ROLES
from urank.log.dataset import is_prepared
from urank.log.reader import Log, read
from urank.ray.cluster import Cluster

__all__ = [
    "Address",
    "Categorical",
    "Column",
    "Cuts",
    "Drop",
    "Engine",
    "EngineName",
    "Floor",
    "Json",
    "MemoryOption",
    "Overwrite",
    "Quiet",
    "Truth",
    "Workers",
    "cluster_of",
    "column_option",
    "config_option",
    "json_text",
    "numbers",
    "open_log",
    "print_json",
    "refuse_columns",
    "refuse_url",
    "role_columns",
]


def column_option(roles: Mapping[str, str], example: str) -> Any:
    """The option that says which column plays a role; `roles` has the meaning of each."""
    meanings = "; ".join(f"**{role}**: {meaning}" for role, meaning in roles.items())
    words = f"Which column plays a role, where its name differs, as `{example}`. May be repeated. {meanings}."
    return typer.Option("--column", "-c", metavar="ROLE=NAME", help=words)


_COLUMN = "position=rank"

Column = Annotated[list[str] | None, column_option(ROLES, _COLUMN)]
Categorical = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A column of numbers that are names (ids, codes). May be repeated."),
]
Drop = Annotated[list[str] | None, typer.Option(metavar="NAME", help="A column to leave out. May be repeated.")]
Cuts = Annotated[
    int, typer.Option(min=1, max=100, help="Times that the queries are halved to fit the evaluation's own models.")
]
Floor = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Least that a logged click probability counts as in a ratio.")
]
Truth = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="What `urank simulate` or `urank appstore` wrote: the true utilities beside the estimates.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines on standard output, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and print nothing but errors.")]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="What the process may take, as 4GB; at least 2GB. How much is held at once follows from it, however large "
        "the log is.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]


def open_log(
    source: str, column: Sequence[str] | None, categorical: Sequence[str] | None, drop: Sequence[str] | None
) -> Log:
    """Open the log that the shared options describe."""
    return read(source, columns=role_columns(column, _COLUMN), categorical=categorical or (), drop=drop or ())


def config_option(
    model: type[BaseModel], key: str, *flags: str, metavar: str | None = None, panel: str = "Options"
) -> Any:
    """An option that carries the description and the default of a configuration's key."""
    field = model.model_fields[key]
    text = f"{field.description}."
    text = text[0].upper() + text[1:] if text[0].isascii() else text
    default = field.default
    if isinstance(default, tuple):  # as `numbers` reads it
        default = ":".join(f"{number:g}" for number in default)
    shown = False if default is None else str(default)
    return typer.Option(*flags, help=text, show_default=shown, metavar=metavar, rich_help_panel=panel)


def numbers(flag: str, text: str | None, count: int | None = None) -> tuple[float, ...] | None:
    """What an option such as LOW:HIGH holds, so many numbers if told; none when it is left out.

    >>> numbers("--bids", "0.2:10", 2)
    (0.2, 10.0)
    """
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(":"))
    except ValueError:
        found = ()
    if not found or (count is not None and len(found) != count):
        raise ConfigError(f"{flag} takes {count or 'some'} numbers with colons between them; got '{text}'")
    return found


def refuse_columns(
    log: str, column: Sequence[str] | None, categorical: Sequence[str] | None, drop: Sequence[str] | None
) -> None:
    """Refuse to choose columns of a log in which they are chosen already."""
    if is_prepared(log) and (column or categorical or drop):
        raise ConfigError(f"{log} is prepared already: --column, --categorical and --drop belong to urank prepare")


def role_columns(entries: Sequence[str] | None, example: str) -> dict[str, str]:
    """The role and the column of each ROLE=NAME; a refusal shows the example."""
    columns: dict[str, str] = {}
    for entry in entries or ():
        role, equals, name = entry.partition("=")
        if not equals or not role or not name:
            raise ConfigError(f"--column takes ROLE=NAME, as {example}; got '{entry}'")
        columns[role] = name
    return columns


def print_json(value: Any) -> None:
    """Print a value for machines; where the output cannot hold every character, as JSON's own escapes."""
    typer.echo(json_text(value, narrow="utf" not in (sys.stdout.encoding or "").lower()))


def json_text(value: Any, *, narrow: bool = False) -> str:
    """A value as JSON."""
    return json.dumps(value, indent=2, ensure_ascii=narrow, allow_nan=False)


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
