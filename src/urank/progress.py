"""Progress of long work, and reading ahead in a background thread.

The library reports numbers, the command line draws them. A function that may take longer than two seconds accepts
`report`, a progress callback that receives the name of the step, the amount done, the total (`None` if unknown) and
optionally a note such as the current loss. The default callback is silent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Full, Queue
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")


class Report(Protocol):
    """Progress callback."""

    def __call__(self, step: str, done: float, total: float | None, note: str = "", /) -> None: ...


def silent(step: str, done: float, total: float | None, note: str = "", /) -> None:
    """Ignore progress."""


@contextmanager
def bars(*, quiet: bool = False) -> Iterator[Report]:
    """Draw one progress bar per step on standard error; draw nothing if quiet or not on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield silent
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    # Updates may come minutes apart; the remaining time must be estimated from those, too.
    with Progress(*columns, console=console, speed_estimate_period=900) as progress:
        tasks: dict[str, TaskID] = {}

        def draw(step: str, done: float, total: float | None, note: str = "", /) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total, note=note)
            progress.update(tasks[step], completed=done, total=total, note=note)

        yield draw


def prefetch(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """Iterate in a background thread, up to `depth` items ahead, in the same order; re-raise its exceptions here.

    >>> list(prefetch(range(3)))
    [0, 1, 2]
    """
    queue: Queue[tuple[T | None, BaseException | None, bool]] = Queue(maxsize=depth)
    stopped = threading.Event()

    def put(entry: tuple[T | None, BaseException | None, bool]) -> bool:
        """Wait for room in the queue; False if the consumer has stopped."""
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
