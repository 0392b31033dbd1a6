"""`urank feedback`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import Json, Quiet, print_json
from urank.errors import ConfigError
from urank.progress import bars
from urank.serve.feedback_export import CompactionStats, Parts, compact, shadow_agreement

__all__ = ["feedback_command"]


def feedback_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `urank serve --log` writes to.")],
    window: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long rankings wait for their clicks before they go into the log. 0 takes all that no server "
            "writes to any more.",
        ),
    ] = 600.0,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="OTHER",
            help="The folder of another server, which is only read: join what that one heard of rankings of this one. "
            "May be given several times, and may name DIR too.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn what a server wrote down into a log that can be learned from.

    A server writes rankings and feedback to write-ahead files, one after the other as they come. This joins them: one
    row for each item shown, clicked or not, in Parquet, as `urank prepare` and `urank abtest analyse` read it. Each
    click counts once, however often it was reported. Clicks that come after their ranking went into the log are joined
    there. It may run beside the server and as often as you like, and may be stopped at any time: nothing is lost and
    nothing counts twice.

    Feedback on rankings that are not in this folder is kept in DIR/unmatched. Where several servers share the work,
    each with a folder of its own, `--with` joins what others heard.

    Example: `urank feedback served --window 0`, or `urank feedback a --with b`
    """
    with bars(quiet=quiet or json) as report:
        found = compact(folder, also=also or [], window_seconds=window, report=report)
    if found is None:
        raise ConfigError(f"{folder} is being turned into a log by another process; wait until that has ended")
    logs = [path for path in Parts(folder).folders if any(path.glob("[!.]*.parquet"))]
    ranked, agreed = shadow_agreement(folder)
    if json:
        shadow: dict[str, Any] | None = {"rankings": ranked, "same_first": agreed} if ranked else None
        print_json({**found.to_dict(), "logs": [str(path) for path in logs], "shadow": shadow})
    elif not quiet:
        console = Console()
        for line in _lines(found, logs, window, ranked, agreed):
            console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _lines(found: CompactionStats, logs: list[Path], window: float, ranked: int, agreed: int) -> list[str]:
    lines = [
        f"{found.rankings:,} rankings with {found.impressions:,} impressions, {found.clicks:,} clicks and "
        f"{found.conversions:,} conversions came into the log",
        f"feedback: {found.late:,} late, {found.repeated:,} repeated, {found.unmatched:,} unmatched",
    ]
    if found.valueless:
        lines.append(f"values left out, since their rankings were logged without values: {found.valueless:,}")
    if found.torn or found.damaged:
        lines.append(f"left out: {found.torn:,} bytes of writes that were cut off, {found.damaged:,} damaged bytes")
    if found.waiting:
        within = f", within {window:g} s of the last write" if window else ""
        lines.append(
            f"write-ahead files that wait: {found.waiting:,} (still written to{within}, or with clicks on such)"
        )
    if ranked:
        lines.append(f"the shadow had the same item first in {agreed:,} of {ranked:,} rankings ({agreed / ranked:.1%})")
    if len(logs) > 1:
        lines.append(f"columns changed, so there are {len(logs)} logs: {', '.join(map(str, logs))}")
    if logs:
        lines.append(f"learn from it: urank prepare {max(logs, key=_newest)} -o prepared")
    return lines


def _newest(log: Path) -> str:
    """The name of its newest part, which begins with the time."""
    return max(path.name for path in log.glob("[!.]*.parquet"))
