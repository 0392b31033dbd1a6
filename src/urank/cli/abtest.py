"""`urank abtest`, and `urank abtest analyse`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from urank.cli.help import CompactCommand
from urank.cli.lab import abtest_simulate_command
from urank.cli.options import PLOTS, Column, Html, PrintOptions, SeedOption, command, role_columns
from urank.errors import ConfigError, UrankError
from urank.progress import Report

if TYPE_CHECKING:
    from urank.abtest.analysis import IntervalKind
    from urank.abtest.planning import Plan

abtest_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False
)

_CONTROLS = ("control", "A")
_FACTORS = (0.5, 1, 2)
_POINTS = 16
_LEAST_DAYS, _MOST_DAYS = 14, 365

Alpha = Annotated[float, typer.Option(help="Significance level; intervals have the level 1 - alpha.")]
_EXPECTED_LIFT = "The lift the test was planned for, where always-valid intervals are tightest."


@abtest_app.command("plan", cls=CompactCommand)
@command()
def plan_command(
    log: Annotated[
        str | None,
        typer.Argument(
            metavar="LOG",
            help="An earlier log, with or without arms, as `urank abtest analyse` takes it. Without one, --mean and "
            "--deviation tell what it would.",
            show_default=False,
        ),
    ] = None,
    lift: Annotated[float | None, typer.Option(help="The lift that is to be found, as 0.02 for 2 %.")] = None,
    days: Annotated[int | None, typer.Option(help="Instead: how long the test may take.")] = None,
    users_per_arm: Annotated[int | None, typer.Option(help="Instead: how many users each arm may have.")] = None,
    metric: Annotated[
        str,
        typer.Option(
            metavar="ctr|cvr|revenue", help="Clicks per impression, conversions per user or revenue per user."
        ),
    ] = "ctr",
    power: Annotated[float, typer.Option(help="The chance to find the lift.")] = 0.8,
    alpha: Alpha = 0.05,
    share: Annotated[float, typer.Option(help="Share of all users that is in the test, both arms together.")] = 1.0,
    expected_lift: Annotated[
        float | None, typer.Option(help=_EXPECTED_LIFT, show_default="the lift, else 0.05")
    ] = None,
    mean: Annotated[float | None, typer.Option(help="Without a log: the mean of the metric per user.")] = None,
    deviation: Annotated[
        float | None, typer.Option(help="Without a log: the standard deviation of the metric among users.")
    ] = None,
    users_per_day: Annotated[
        float | None, typer.Option(help="Without a log: users that come for the first time on a day, to tell the days.")
    ] = None,
    column: Column = None,
    html: Html = None,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Compute how many users and days a test needs to find a lift, or which lift it finds with a given number.

    Give one of `--lift`, `--days` and `--users-per-arm`; half and twice of it are planned too, each for a test with a
    single look at its end, and for one with daily looks that stops when the lift is found. A log shows how much users
    differ and how fast new ones arrive.

    Examples: `urank abtest plan log.parquet --lift 0.02 --share 0.3`, `urank abtest plan log.parquet --days 14`,
    `urank abtest plan --lift 0.05 --mean 0.4 --deviation 1.1 --users-per-day 5000`
    """
    from urank.abtest.exposures import read_exposures  # slow to load, with all of scipy
    from urank.abtest.planning import plan
    from urank.report.abtest_report import print_plans, write_plans

    columns = role_columns(column)
    _check(log, days, mean, deviation, users_per_day)
    wanted: dict[str, Any] = {"lift": lift, "days": days, "users": users_per_arm}
    with printing.progress() as report:
        exposures = None if log is None else read_exposures(log, columns=columns, arms=False, report=report)
        variance = None if deviation is None else deviation**2
        make = partial(plan, exposures, metric=metric, mean=mean, variance=variance, daily_users=users_per_day)
        make = partial(make, share=share, power=power, alpha=alpha)
        meant = make(**wanted, expected_lift=expected_lift)
        make = partial(make, expected_lift=meant.expected_lift)
        plans = list(_possible(make, _around(wanted)))
        if html is not None:
            dated = log is not None or users_per_day is not None
            write_plans(plans, meant, _curve(make, meant, dated=dated, report=report), html)
    notes = [f"\nThe same with a plot: {html}"] if html is not None else []
    document = meant.to_dict() | {"plans": [each.to_dict() for each in plans]}
    printing.show(document, lambda console: print_plans(plans, meant, console), *notes)


def _check(
    log: str | None, days: int | None, mean: float | None, deviation: float | None, users_per_day: float | None
) -> None:
    """Refuse what the log tells already, or what nothing tells, by the names that the flags have."""
    if log is not None:
        flags = {"--mean": mean, "--deviation": deviation, "--users-per-day": users_per_day}
        for flag, number in flags.items():
            if number is not None:
                raise ConfigError(f"{flag} is for a plan without a log; {log} tells it itself")
        return
    if mean is None or deviation is None:
        raise ConfigError("a plan needs a LOG, or --mean and --deviation")
    if not mean > 0 or not deviation > 0:
        raise ConfigError(f"--mean and --deviation must be above 0; got {mean:g} and {deviation:g}")
    from urank.abtest.planning import check_numbers  # slow to load, with all of scipy

    check_numbers(mean, deviation, users_per_day, ("--mean", "--deviation", "--users-per-day"))
    if days is not None and users_per_day is None:
        raise ConfigError("--days needs a LOG, or --users-per-day, to tell how many users come")


def _around(wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return half, all and twice of what was asked for, as far as there are such lifts, users or days.

    >>> _around({"lift": 0.1, "days": None}), _around({"days": 1})
    ([{'lift': 0.05}, {'lift': 0.1}, {'lift': 0.2}], [{'days': 1}, {'days': 2}])
    """
    [(name, value)] = [(name, value) for name, value in wanted.items() if value is not None]
    if name == "lift":
        values = [factor * value for factor in _FACTORS if factor * value > -1]
    else:
        values = sorted({max(1, round(factor * value)) for factor in _FACTORS})
    return [{name: each} for each in values]


def _possible(make: Callable[..., Plan], around: list[dict[str, Any]]) -> Iterator[Plan]:
    """Plans around one that can be made, without those that cannot: of a lift too small, or too early a day."""
    for each in around:
        with suppress(UrankError):
            yield make(**each)


def _curve(make: Callable[..., Plan], meant: Plan, *, dated: bool, report: Report) -> list[Plan]:
    """Tests of growing length: by days when it is known how many users come, else by users."""
    import numpy as np

    from urank.abtest.planning import MOST_USERS

    if dated:
        longest = max(found.days or _MOST_DAYS for found in (meant.once, meant.daily))
        name, least, most = "days", 1, min(max(_LEAST_DAYS, 2 * longest), max(_MOST_DAYS, longest))
    else:
        most = min(2 * meant.daily.users, MOST_USERS)
        name, least = "users", max(1, min(meant.daily.users, MOST_USERS) // 25)
    places = np.unique(np.geomspace(least, most, _POINTS).round().astype(int)).tolist()
    found: list[Plan] = []
    for number, place in enumerate(places):
        report("draw", number, len(places))
        found += _possible(make, [{name: place}])
    report("draw", len(places), len(places))
    return found or [meant]


@abtest_app.command("analyse", cls=CompactCommand)
@command()
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
    alpha: Alpha = 0.05,
    expected_lift: Annotated[float, typer.Option(help=_EXPECTED_LIFT)] = 0.05,
    halves: Annotated[
        int, typer.Option(min=0, help="Random halves by which false positives are counted; 0 for none.")
    ] = 1000,
    seed: SeedOption = 0,
    column: Column = None,
    html: Html = None,
    printing: PrintOptions = PrintOptions(),
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
    from urank.report.abtest_report import print_analysis, write_analysis

    columns, wanted = role_columns(column), _shares(shares)
    with printing.progress() as report:
        exposures = read_exposures(log, columns=columns, report=report)
        arms = ", ".join(exposures.arms[:10])
        for arm in wanted or ():
            if arm not in exposures.arms:
                raise ConfigError(f"--shares must name arms of {log}, {arms}; got '{arm}'")
        if control is None:
            control = next((name for name in _CONTROLS if name in exposures.arms), None)
        if control is None:
            raise ConfigError(f"--control must name the arm that others are held against, one of {arms}")
        found = analyse(
            exposures,
            control=control,
            treatment=treatment,
            start=start,
            end=end,
            shares=wanted,
            alpha=alpha,
            interval=cast("IntervalKind", interval),
            expected_lift=expected_lift,
            splits=halves,
            seed=seed,
            report=report,
        )
    if html is not None:
        write_analysis(found, html)
    notes = [PLOTS.format(html)] if html is not None else []
    printing.show(found.to_dict(), lambda console: print_analysis(found, console), *notes)


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


abtest_app.command("simulate", cls=CompactCommand)(abtest_simulate_command)
