"""The command line: thin commands over the API. A refusal is one sentence on standard error and exit code 2."""

from __future__ import annotations

import codecs
import signal
import sys
from types import FrameType

import typer
from rich.console import Console

from urank import __version__
from urank.cli.abtest import abtest_app
from urank.cli.curves import curves_command
from urank.cli.evaluate import evaluate_command
from urank.cli.export import export_command
from urank.cli.feedback import feedback_command
from urank.cli.guard import guard_command
from urank.cli.inspect import inspect_command
from urank.cli.lab import appstore_command, reproduce_command, simulate_command
from urank.cli.prepare import prepare_command
from urank.cli.propensity import propensity_command
from urank.cli.rank import rank_command
from urank.cli.run import run_command
from urank.cli.serve import serve_command
from urank.cli.train import train_command
from urank.errors import UrankError

__all__ = ["app", "main"]

app = typer.Typer(
    name="urank",
    help="Learn, from the click log a ranking system already writes, the order that earns the most clicks or revenue.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"urank {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Say which version it is."),
) -> None:
    pass


app.command("run")(run_command)
app.command("simulate")(simulate_command)
app.command("appstore")(appstore_command)
app.command("prepare")(prepare_command)
app.command("inspect")(inspect_command)
app.command("train")(train_command)
app.command("evaluate")(evaluate_command)
app.command("guard")(guard_command)
app.command("rank")(rank_command)
app.command("curves")(curves_command)
app.command("serve")(serve_command)
app.command("feedback")(feedback_command)
app.command("export")(export_command)
app.command("propensity")(propensity_command)
app.command("reproduce")(reproduce_command)
app.add_typer(abtest_app, name="abtest", help="Plan, analyse and simulate A/B tests.")


_PLAIN = {"–": "-", "−": "-", "…": "...", "█": "#", "²": "2", "’": "'"}


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """What stands for characters that the output cannot hold: bars of #, plain dashes, otherwise a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


def _ended(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that what is half-written is taken back, as after Ctrl-C


def main() -> None:
    """Run the command line."""
    codecs.register_error("urank", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (stream.encoding or "").lower() and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="urank")
    signal.signal(signal.SIGTERM, _ended)
    try:
        app()
    except UrankError as error:
        _refuse(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        _refuse(f"{error.filename or 'a file'}: {error.strerror or error}")


def _refuse(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print("Error:", sentence, markup=False)
    sys.exit(2)
