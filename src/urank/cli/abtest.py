"""`urank abtest`, and `urank abtest analyse`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from urank.abtest.sources import EXPOSURE_ROLES
from urank.cli.abtest_plan import plan_command
from urank.cli.abtest_simulate import simulate_command
from urank.cli.options import Json, Quiet, column_option, print_json, role_columns
from urank.errors import ConfigError
from urank.progress import bars

if TYPE_CHECKING:
    from urank.abtest.exposures import Exposures
    from urank.abtest.judge import IntervalKind

__all__ = ["abtest_app", "analyse_command"]

_COLUMN = "user_id=visitor"
_CONTROLS = ("control", "A")

abtest_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False
)


def analyse_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="The exposures, a row for each impression: Parquet or CSV (also gzipped), a folder of them, a glob.",
        ),
    ],
    control: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The arm that others are held against.", show_default="control, or A"),
    ] = None,
    treatment: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An arm to judge. May be repeated.", show_default="all others"),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="DAY", help="First day of the test, as 2020-05-13.", show_default="the log's first"),
    ] = None,
    end: Annotated[
        str | None, typer.Option(metavar="DAY", help="Last day of the test.", show_default="the log's last")
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(metavar="ARM=SHARE,…", help="How users were to be divided, as A=0.5,B=0.5.", show_default="equal"),
    ] = None,
    interval: Annotated[
        str,
        typer.Option(
            metavar="delta|bootstrap", help="How the interval of the lift is made; all others are by the delta method."
        ),
    ] = "delta",
    alpha: Annotated[float, typer.Option(help="One less the level of all intervals.")] = 0.05,
    expected_lift: Annotated[
        float, typer.Option(help="The lift the test was planned for, where always-valid intervals are tightest.")
    ] = 0.05,
    splits: Annotated[
        int, typer.Option(min=0, help="Random halves by which false positives are counted; 0 for none.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the halves and the bootstrap.")] = 0,
    column: Annotated[list[str] | None, column_option(EXPOSURE_ROLES, _COLUMN)] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with plots.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a treatment earned against the control, how sure that is, and whether the test is sound.

    For clicks per impression, conversions per user and, where the log has values, revenue per user: the lift with its
    interval and p-value for those who look once; an always-valid interval for those who look every day; and, when the
    log has days before `--start`, the lift with what users did then taken out (CUPED). Users are the sample. Checked
    are the sizes of the arms, users seen in two of them, and how often random halves of the same users differ.

    Example: `urank abtest analyse exposures.parquet --control A --start 2020-05-13 --html test.html`
    """
    from urank.abtest.analysis import analyse  # slow to load, with all of scipy
    from urank.abtest.exposures import read_exposures
    from urank.report.abtest import print_analysis, write_analysis

    columns, wanted = role_columns(column, _COLUMN), _shares(shares)
    with bars(quiet=quiet or json) as report:
        exposures = read_exposures(log, columns=columns, report=report)
        for arm in wanted or ():
            if arm not in exposures.arms:
                raise ConfigError(f"--shares must name arms of {log}, {_arms(exposures)}; got '{arm}'")
        found = analyse(
            exposures,
            control=_control(exposures) if control is None else control,
            treatment=treatment,
            start=start,
            end=end,
            shares=wanted,
            alpha=alpha,
            interval=cast("IntervalKind", interval),
            expected_lift=expected_lift,
            splits=splits,
            seed=seed,
            report=report,
        )
    if html is not None:
        write_analysis(found, html)
    if json:
        print_json(found.to_dict())
    elif not quiet:
        console = Console()
        print_analysis(found, console)
        if html is not None:
            console.print(f"\nThe same with plots: {html}", highlight=False, markup=False, emoji=False, soft_wrap=True)


def _control(exposures: Exposures) -> str:
    for name in _CONTROLS:
        if name in exposures.arms:
            return name
    raise ConfigError(f"--control must name the arm that others are held against, one of {_arms(exposures)}")


def _arms(exposures: Exposures) -> str:
    return ", ".join(exposures.arms[:10])


def _shares(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    refusal = ConfigError(f"--shares takes ARM=SHARE with commas between them, as A=0.5,B=0.5; got '{text}'")
    shares: dict[str, float] = {}
    for part in text.split(","):
        arm, _, share = part.rpartition("=")
        if arm in shares:
            raise ConfigError(f"--shares must name each arm once; got '{arm}' twice")
        try:
            shares[arm] = float(share)
        except ValueError:
            raise refusal from None
        if not arm or not shares[arm] > 0 or not isfinite(shares[arm]):
            raise refusal
    return shares


abtest_app.command("plan")(plan_command)
abtest_app.command("analyse")(analyse_command)
abtest_app.command("simulate")(simulate_command)
