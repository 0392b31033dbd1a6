"""The command line: thin commands over the pipeline. A refusal is one sentence on standard error and exit code 2."""

from __future__ import annotations

import codecs
import shlex
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from urank.cli.help import CompactCommand
from urank.errors import UrankError

COMMANDS = {
    "run": ("urank.cli.train", "Do the whole job: inspect, prepare, train, evaluate, and write one report."),
    "inspect": ("urank.cli.log", "Check whether position effects can be learned from a log."),
    "prepare": (
        "urank.cli.log",
        "Turn an impression log into one row per query, split into train, valid and test.",
    ),
    "train": ("urank.cli.train", "Train a ranker on a log."),
    "evaluate": ("urank.cli.evaluate", "Estimate from a log what models would earn, with intervals."),
    "guard": ("urank.cli.evaluate", "Estimate what a model would earn if it stayed close to the logged order."),
    "rank": ("urank.cli.rank", "Rank lists of candidates, best first."),
    "curves": ("urank.cli.model", "Show how the clicks of items or groups fall with position."),
    "serve": ("urank.cli.serve", "Serve a model over HTTP."),
    "feedback": ("urank.cli.serve", "Turn what a server logged into a click log."),
    "export": ("urank.cli.model", "Write a model for a search engine or another runtime."),
    "examination": ("urank.cli.log", "Estimate examination by position."),
    "abtest": ("urank.cli.abtest", "Plan, analyse and simulate A/B tests."),
    "simulate": ("urank.cli.lab", "Simulate a click log with a known truth."),
    "appstore": ("urank.cli.lab", "Simulate the log of an app store."),
    "reproduce": ("urank.cli.lab", "Reproduce the tables and figures of the paper."),
    "help": ("urank.cli.help", "Explain a topic: columns, click models, rankers, methods, estimators."),
}
"""Name -> module and summary; a module is loaded when its command is used, so that `--help` is fast."""

_STYLE: dict[str, Any] = {"rich_markup_mode": "markdown", "pretty_exceptions_enable": False}


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Return a stub that is enough for the list of commands."""
        return TyperCommand(cmd_name, short_help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if name is None or stub is None else load_command(name), rest


def load_command(name: str) -> Any:
    """Import a command."""
    module = import_module(COMMANDS[name][0])
    group = getattr(module, f"{name}_app", None)
    if group is None:
        group = typer.Typer(add_completion=False, **_STYLE)
        group.command(name, cls=CompactCommand)(getattr(module, f"{name}_command"))
    return typer.main.get_command(group)


app = typer.Typer(
    name="urank",
    cls=LazyGroup,
    help="Learn, from the click log a ranking system already writes, the order that earns the most clicks or revenue.",
    no_args_is_help=True,
    **_STYLE,
)


def _version(wanted: bool) -> None:
    if wanted:
        from urank import __version__

        typer.echo(f"urank {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


_ASCII = {"–": "-", "−": "-", "…": "...", "█": "#", "²": "2", "’": "'"}


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that the output cannot encode: bars by #, dashes by -, others by a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


_RESUMABLE = ("run", "train", "reproduce")


def _terminate(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # unwinds, so that half-written output is removed


def _interrupted(arguments: list[str]) -> str:
    """Return what an interrupted command leaves behind, and how it resumes.

    >>> _interrupted(["train", "log.csv", "-o", "my model"])
    "Interrupted; to resume, give the same command again: urank train log.csv -o 'my model'"
    """
    if arguments and arguments[0] in _RESUMABLE:
        return f"Interrupted; to resume, give the same command again: {shlex.join(['urank', *arguments])}"
    return "Interrupted; nothing half-written is left behind"


def main() -> None:
    """Run the command line."""
    codecs.register_error("urank", _replace)
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (stream.encoding or "").lower() and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="urank")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    try:
        app(prog_name="urank")
    except UrankError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "urank":
            raise
        _refuse(f"this command needs {error.name}, which is not installed; run pip install urank")
    except SystemExit as ended:
        if ended.code == 128 + signal.SIGINT:
            _print(_interrupted(sys.argv[1:]))
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        _refuse(f"{error.filename or 'a file'}: {error.strerror or error}")


def _refuse(sentence: str) -> None:
    _print(f"Error: {sentence}")
    sys.exit(2)


def _print(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(sentence, markup=False)
