"""Progress of long work: the library reports numbers, the command line draws them.

A function that may take longer than two seconds accepts `report`, a callable that is told the name of the step, how
much of it is done, how much there is in all (`None` when that is not known), and perhaps a note such as the current
loss. By default nobody listens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Full, Queue
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

__all__ = ["Report", "bars", "prefetch", "silent"]

T = TypeVar("T")


def prefetch(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The same items in the same order, up to `depth` of them ahead; what the source raises is raised here.

    >>> list(prefetch(range(3)))
    [0, 1, 2]
    """
    queue: Queue[tuple[T | None, BaseException | None, bool]] = Queue(maxsize=depth)
    stopped = threading.Event()

    def put(entry: tuple[T | None, BaseException | None, bool]) -> bool:
        while not stopped.is_set():
            try:
                queue.put(entry, timeout=0.1)
            except Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((item, None, False)):
                    return
            put((None, None, True))
        except BaseException as error:
            put((None, error, True))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error, last = queue.get()
            if error is not None:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


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
