"""Options that several commands share, options generated from settings, and printing."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

from urank.config import deep_merge
from urank.errors import ConfigError
from urank.log.dataset import is_prepared
from urank.progress import Report, bars
from urank.ray.cluster import Cluster

if TYPE_CHECKING:
    from urank.log.reader import Log


@contextmanager
def quick_imports() -> Iterator[None]:
    """Hide pandas and scikit-learn from LightGBM, which imports them for interfaces that no command uses.

    They take half a second of CPU time.
    """
    hidden: dict[str, Any] = {name: None for name in ("pandas", "sklearn") if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def command(
    settings: type[BaseModel] | None = None,
    flags: Mapping[str, str | Sequence[str]] | None = None,
    panels: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a command by expanding its compound parameters into options.

    A parameter annotated with a dataclass becomes one option per field and receives an instance. The parameter
    `settings`, if present, becomes one option per flag and receives the values given on the command line as a nested
    dict, to be validated by the settings class.

    Args:
        settings: Settings class that describes the flags: each takes its help, bounds and default from a field.
        flags: Flag -> dotted path of the field, or several paths that all receive the value.
        panels: Panel of the help -> paths of fields, separated by spaces. Those without a flag get one of their name,
            whose bounds are left to the settings class.
    """
    panel_of = {path: panel for panel, text in (panels or {}).items() for path in text.split()}
    renamed = set((flags or {}).values())
    named = {f"--{path.split('.')[-1].replace('_', '-')}": path for path in panel_of if path not in renamed}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[type[Any], list[str]]] = {}
        paths: dict[str, Sequence[str]] = {}
        readers: dict[str, Callable[[str], Any]] = {}
        for parameter in inspect.signature(function).parameters.values():
            hint = hints[parameter.name]
            if parameter.name == "settings" and settings is not None:
                for flag, path in {**(flags or {}), **named}.items():
                    name = flag.removeprefix("--").replace("-", "_")
                    paths[name] = (path,) if isinstance(path, str) else path
                    field, default = _field(settings, paths[name][0])
                    if reader := _tuple_reader(flag, field):
                        readers[name] = reader
                    panel, bounded = panel_of.get(paths[name][0]), flag not in named
                    parameters.append(_setting_parameter(name, flag, field, default, panel, bounded))
            elif is_dataclass(hint) and isinstance(hint, type):
                groups[parameter.name] = (hint, [field.name for field in fields(hint)])
                parameters += _group_parameters(hint)
            else:
                parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(function)
        def run(**given: Any) -> None:
            for name, (group, members) in groups.items():
                given[name] = group(**{member: given.pop(member) for member in members})
            if paths:
                nested: dict[str, Any] = {}
                for name, targets in paths.items():
                    value = given.pop(name)
                    value = readers[name](value) if name in readers and value is not None else value
                    for target in targets if value is not None else ():
                        nested = deep_merge(nested, _nested(target.split("."), value))
                given["settings"] = nested
            function(**given)

        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _group_parameters(group: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name])


def _field(settings: type[BaseModel], path: str) -> tuple[FieldInfo, Any]:
    """Return a field and its default."""
    *tables, key = path.split(".")
    default = functools.reduce(getattr, path.split("."), settings())
    for table in tables:
        settings = cast("type[BaseModel]", settings.model_fields[table].annotation)
    return settings.model_fields[key], default


def _kind(field: FieldInfo) -> Any:
    """Return the type of a field, other than None."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    return kinds[0] if get_origin(field.annotation) in (UnionType, Union) else field.annotation


def _words(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field takes instead of a tuple of names, as auto and off; none if it takes no other."""
    others = [kind for kind in get_args(field.annotation)[1:] if get_origin(kind) is Literal]
    return get_args(others[0]) if others and get_origin(field.annotation) in (UnionType, Union) else ()


def _tuple_reader(flag: str, field: FieldInfo) -> Callable[[str], Any] | None:
    """Return the parser of an option that is a tuple: numbers separated by colons, or names by commas."""
    kind, kinds, words = _kind(field), get_args(_kind(field)), _words(field)
    if get_origin(kind) is not tuple:
        return None
    if kinds[0] is float:
        return lambda text: numbers(flag, text, None if ... in kinds else len(kinds))
    if words:
        return lambda text: text if text in words else tuple(part.strip() for part in text.split(","))
    return lambda text: None if text == "auto" else tuple(part.strip() for part in text.split(","))


def _setting_parameter(
    name: str, flag: str, field: FieldInfo, default: Any, panel: str | None, bounded: bool
) -> inspect.Parameter:
    """Make an option of a settings field; None leaves the setting alone."""
    kind: Any = _kind(field)
    names = _literals(kind)
    metavar: str | None = None
    shown = str(default) if default is not None else False
    if get_origin(kind) is Literal:
        kind, metavar = str, _choices(get_args(kind))
    elif get_origin(kind) is tuple and get_args(kind)[0] is float:
        metavar = "NUMBER:…" if ... in get_args(kind) else "LOW:HIGH"
        kind, shown = str, ":".join(f"{each:g}" for each in default) if default is not None else False
    elif get_origin(kind) is tuple and (words := _words(field)):
        kind, metavar = str, "|".join((*words, "NAME,…"))
    elif get_origin(kind) is tuple:  # several names separated by commas; auto is the default
        kind, metavar, shown = str, "NAME,…", "auto"
    options: dict[str, Any] = {"help": _sentence(field.description), "rich_help_panel": panel}
    if names:
        options["autocompletion"] = lambda incomplete: [name for name in names if name.startswith(incomplete)]
    if kind is not bool:
        options |= {"metavar": metavar, "show_default": shown}
        for constraint in field.metadata if bounded else ():
            if isinstance(constraint, annotated_types.Ge):
                options["min"] = constraint.ge
            elif isinstance(constraint, annotated_types.Le):
                options["max"] = constraint.le
    hint = Annotated[kind | None, typer.Option(flag, **options)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def _literals(kind: Any) -> tuple[str, ...]:
    """Return the names that a field takes: one of them, or several in a tuple."""
    kinds = get_args(kind)
    if get_origin(kind) is tuple and get_origin(kinds[0]) is Literal:
        return get_args(kinds[0])
    return kinds if get_origin(kind) is Literal else ()


def _choices(names: Sequence[str]) -> str:
    """Return the metavar of an option that takes one of some names; many of them are left to a help topic."""
    return "|".join(names) if len(names) <= 4 else "NAME"


def _sentence(description: str | None) -> str:
    text = f"{(description or '').removesuffix('.')}."
    return text[0].upper() + text[1:] if text[0].isascii() else text


class GoalName(StrEnum):
    """What a ranking is to earn."""

    clicks = "clicks"
    conversions = "conversions"


class MethodName(StrEnum):
    """How a list is ranked."""

    score = "score"
    match = "match"
    ctr1 = "ctr1"


class SplitBy(StrEnum):
    """How queries are divided into train, valid and test."""

    hash = "hash"
    time = "time"


PLOTS = "\nThe same as a page: {}"

Column = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        "-c",
        metavar="ROLE=NAME",
        help="Column that plays a role, as `position=rank` (`urank help columns`). May be repeated.",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file with any setting. Flags override it.")
]
Estimator = Annotated[
    str, typer.Option("--estimator", metavar="NAME", help="Estimator of the first table (`urank help estimators`).")
]
Floor = Annotated[float, typer.Option(min=0.0, max=1.0, help="Lower bound of the logged click probability in a ratio.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with charts.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON, for machines, on standard output.")]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Feature to keep even if it looks like an outcome of the click, as a booking. May be repeated.",
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory budget of the process, at least 2GB.",
    ),
]
MethodOption = Annotated[
    MethodName | None,
    typer.Option(
        "--method",
        help="How lists are ranked: by score, match or ctr1 (`urank help methods`).",
        show_default="the model's own",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Randomised = Annotated[
    list[str] | None,
    typer.Option(
        "--randomised",
        metavar="COLUMN=VALUE",
        help="Lists that were shown in random order, as `policy=shuffle`. May be repeated.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random numbers.")]
SplitName = Annotated[
    str,
    typer.Option(
        metavar="test|valid|train|all",
        help="Queries to evaluate on. **test** was not used in training; **all** is for a log that is new to the "
        "models.",
    ),
]
Truth = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Output of `urank simulate` or `urank appstore`: show the truth as well."),
]
GoalOption = Annotated[
    GoalName | None,
    typer.Option(
        help="What an order is to earn: clicks or conversions, each times its value.", show_default="the model's"
    ),
]


def check_truth(goal: str) -> None:
    """Refuse the truth of a simulation for a goal that it does not know."""
    if goal != "clicks":
        raise ConfigError(f"--truth knows the clicks of a simulation, not its {goal}; leave out --truth")


@dataclass(frozen=True)
class LogOptions:
    """How the columns of a log are read."""

    column: Column = None
    categorical: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Numeric column that contains ids or codes. May be repeated."),
    ] = None
    drop: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Column to leave out. May be repeated.")] = None
    first_position: Annotated[
        int, typer.Option(min=0, max=1, help="Number of the top position in the log.", metavar="0|1")
    ] = 1
    binarise: Annotated[
        bool, typer.Option("--binarise", help="Read counts of clicks above 0, yes and true as one click.")
    ] = False

    def open(self, source: str, models: Sequence[str | Path] = ()) -> Log:
        """Open a raw log, and say on standard error which columns were recognised: by their names, or since models know
        them from the logs they were trained on.
        """
        from urank.log.reader import read  # Polars is slow to load
        from urank.model_manifest import read_manifest

        log = read(
            source,
            columns=role_columns(self.column),
            categorical=self.categorical or (),
            drop=self.drop or (),
            known={role: name for model in models for role, name in read_manifest(model).get("columns", {}).items()},
            first_position=self.first_position,
            binarise=self.binarise,
        )
        if log.schema.guesses:
            Console(stderr=True).print(log.schema.guesses, highlight=False, soft_wrap=True)
        return log

    def source(self, log: str, keep: Sequence[str] | None = None, models: Sequence[str | Path] = ()) -> Log | str:
        """Open a raw log as `open` does; return the path of a prepared one, whose columns are already chosen."""
        if not is_prepared(log):
            return self.open(log, models)
        if self != LogOptions():
            raise ConfigError(f"{log} is prepared already: options about its columns belong to urank prepare")
        if keep:
            raise ConfigError(f"{log} is prepared already: --keep belongs to urank prepare")
        return log


@dataclass(frozen=True)
class PrepareOptions:
    """How a log is divided into train, valid and test, and what of it is kept."""

    split_by: Annotated[
        SplitBy,
        typer.Option(help="Split queries by the hash of their id, which is stable when data is added, or by time."),
    ] = SplitBy.hash
    valid: Annotated[float, typer.Option(min=0, max=1, help="Share of the queries for validation.")] = 0.1
    test: Annotated[float, typer.Option(min=0, max=1, help="Share of the queries for the test.")] = 0.1
    positions: Annotated[
        int | None,
        typer.Option(min=1, help="Number of positions shown. Items further down are unseen candidates."),
    ] = None
    keep: Keep = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `prepare`."""
        shares = {"split_by": self.split_by.value, "valid": self.valid, "test": self.test}
        return {**shares, "positions": self.positions, "keep": self.keep or ()}


@dataclass(frozen=True)
class PrintOptions:
    """What a command prints."""

    json: Json = False
    quiet: Quiet = False

    def progress(self, plan: Mapping[str, float] | None = None) -> AbstractContextManager[Report]:
        """Draw the progress unless the output is for machines; the plan is as in `bars`."""
        return bars(plan, quiet=self.quiet or self.json)

    def show(self, document: Any, text: Callable[[Console], None], *notes: str) -> None:
        """Print a result: the document as JSON, or the text followed by notes."""
        if self.json:
            print_json(document)
        elif not self.quiet:
            console = Console()
            text(console)
            for note in notes:
                console.print(note, highlight=False, soft_wrap=not console.is_terminal, markup=False, emoji=False)


_PANEL = "Where it runs"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class EngineName(StrEnum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


@dataclass(frozen=True)
class EngineOptions:
    """Where a command runs."""

    engine: Annotated[
        EngineName,
        typer.Option(
            help="**local**: this process. **ray**: workers of a Ray cluster, or of one that is started on this "
            "machine (needs `pip install 'urank[ray]'`). Logs may then be at URLs, as `s3://bucket/log`.",
            rich_help_panel=_PANEL,
        ),
    ] = EngineName.local
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of worker processes. Belongs to the engine ray.",
            show_default="2",
            rich_help_panel=_PANEL,
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of a running Ray cluster, as `auto` or `head:6379`.",
            show_default="a cluster on this machine",
            rich_help_panel=_PANEL,
        ),
    ] = None

    @property
    def cluster(self) -> Cluster | None:
        """The Ray cluster; None for this process."""
        if self.engine is EngineName.ray:
            return Cluster(self.workers or 2, self.address)
        for flag, given in (("--workers", self.workers), ("--address", self.address)):
            if given is not None:
                raise ConfigError(f"{flag} belongs to --engine ray; the engine is local")
        return None


def numbers(flag: str, text: str, count: int | None = None) -> tuple[float, ...]:
    """Parse an option such as LOW:HIGH.

    >>> numbers("--bids", "0.2:10", 2)
    (0.2, 10.0)
    """
    try:
        found = tuple(float(part) for part in text.split(":"))
    except ValueError:
        found = ()
    if not found or (count is not None and len(found) != count):
        raise ConfigError(f"{flag} takes {count or 'some'} numbers separated by colons; got '{text}'")
    return found


def role_columns(entries: Sequence[str] | None) -> dict[str, str]:
    """Parse ROLE=NAME entries."""
    columns: dict[str, str] = {}
    for entry in entries or ():
        role, equals, name = entry.partition("=")
        if not equals or not role or not name:
            raise ConfigError(f"--column takes ROLE=NAME, as position=rank; got '{entry}'")
        columns[role] = name
    return columns


def left_out_notes(names: Sequence[str]) -> list[str]:
    """Return a sentence that names the columns that were left out as outcomes of the click; none without any."""
    if not names:
        return []
    sentence = f"{', '.join(names)}: known only after a click, so left out of the features"
    return [f"{sentence} (--keep NAME brings a column back)."]


def print_notes(notes: Sequence[str], console: Console) -> None:
    """Print sentences followed by an empty line; nothing without any."""
    for note in (*notes, *([""] if notes else [])):
        console.print(note, highlight=False, soft_wrap=not console.is_terminal, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print a value as JSON, escaping what the output's encoding lacks."""
    typer.echo(json_text(value, ascii_only="utf" not in (sys.stdout.encoding or "").lower()))


def json_text(value: Any, *, ascii_only: bool = False) -> str:
    """Format a value as JSON."""
    return json.dumps(value, indent=2, ensure_ascii=ascii_only, allow_nan=False)


def refuse_url(path: Path, flag: str) -> None:
    """Refuse a URL where only a local folder will do; as a path it would name a folder called `s3:`."""
    if _URL.match(str(path)):
        raise ConfigError(f"{flag} must be a local folder, not a URL; got {path}")
