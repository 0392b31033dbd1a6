"""Progress of long work: the library reports numbers, the command line draws them.

A function that may take longer than two seconds accepts `report`, a callable that is told the name of the step, how
much of it is done, how much there is in all (`None` when that is not known), and perhaps a note such as the current
loss. By default nobody listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

__all__ = ["Report", "bars", "silent"]


class Report(Protocol):
    """Told how far a step is."""

    def __call__(self, step: str, done: float, total: float | None, note: str = "", /) -> None: ...


def silent(step: str, done: float, total: float | None, note: str = "", /) -> None:
    """Report to nobody."""


@contextmanager
def bars(*, quiet: bool = False) -> Iterator[Report]:
    """Draw one bar for each step on standard error; nothing when quiet or when that is not a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield silent
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeLeftColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    # Some steps come minutes apart, and what is left can be told from them all the same.
    with Progress(*columns, console=console, speed_estimate_period=900) as progress:
        tasks: dict[str, TaskID] = {}

        def draw(step: str, done: float, total: float | None, note: str = "", /) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total, note=note)
            progress.update(tasks[step], completed=done, total=total, note=note)

        yield draw
