"""`urank feedback`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import Json, Quiet, print_json
from urank.errors import ConfigError
from urank.progress import bars
from urank.serve.feedback_export import CompactionStats, LogParts, compact, shadow_agreement


def feedback_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Feedback log of `urank serve --log`.")],
    window: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long rankings wait for clicks before they are exported. 0 exports everything that no server is "
            "writing to.",
        ),
    ] = 600.0,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="OTHER",
            help="Feedback log of another server, which is only read: join its feedback on rankings of this one. May "
            "be repeated, and may be DIR itself.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export the feedback log of a server to Parquet for training.

    A server appends rankings and feedback to write-ahead files. This command joins them into one row for each item
    shown, clicked or not, as `urank prepare` and `urank abtest analyse` read it. Each click counts once, however often
    it was reported. Clicks that arrive after the export of their ranking are joined later. The command may run while
    the server does, as often as you like, and may be interrupted at any time: nothing is lost or counted twice.

    Feedback on rankings that are not in this folder is kept in DIR/unmatched. With several servers, each with its own
    folder, `--with` joins the feedback that others received.

    Example: `urank feedback served --window 0`, or `urank feedback a --with b`
    """
    with bars(quiet=quiet or json) as report:
        found = compact(folder, also=also or [], window_seconds=window, report=report)
    if found is None:
        raise ConfigError(f"{folder} is being exported by another process; wait until it has ended")
    logs = [path for path in LogParts(folder).folders if any(path.glob("[!.]*.parquet"))]
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
        f"{found.conversions:,} conversions exported",
        f"feedback: {found.late:,} late, {found.repeated:,} repeated, {found.unmatched:,} unmatched",
    ]
    if found.valueless:
        lines.append(f"values dropped, since their rankings were logged without values: {found.valueless:,}")
    if found.torn or found.damaged:
        lines.append(f"skipped: {found.torn:,} bytes of interrupted writes, {found.damaged:,} damaged bytes")
    if found.waiting:
        within = f", within {window:g} s of the last write" if window else ""
        lines.append(f"write-ahead files waiting: {found.waiting:,} (open{within}, or with clicks on such)")
    if ranked:
        lines.append(f"the shadow had the same item first in {agreed:,} of {ranked:,} rankings ({agreed / ranked:.1%})")
    if len(logs) > 1:
        lines.append(f"the columns changed, so there are {len(logs)} logs: {', '.join(map(str, logs))}")
    if logs:
        lines.append(f"next: urank prepare {max(logs, key=_newest)} -o prepared")
    return lines


def _newest(log: Path) -> str:
    """Return the name of its newest part, which begins with the time."""
    return max(path.name for path in log.glob("[!.]*.parquet"))
