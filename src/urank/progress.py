"""Progress of long work, and reading ahead in a background thread.

The library reports numbers, the command line draws them. A function that may take longer than two seconds accepts
`report`, a progress callback that receives the name of the step, the amount done, the total (`None` if unknown) and
optionally a note such as the current loss. The default callback is silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from queue import Full, Queue
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

T = TypeVar("T")

SECONDS_BEFORE, SECONDS_BETWEEN = 2.0, 10.0
"""Time until something is printed where there is no terminal, and between two lines of the same step."""

SECONDS_BETWEEN_DRAWINGS = 0.2
"""Of the progress in a notebook, which every drawing sends to a browser."""


class Report(Protocol):
    """Progress callback."""

    def __call__(self, step: str, done: float, total: float | None, note: str = "", /) -> None: ...


def silent(step: str, done: float, total: float | None, note: str = "", /) -> None:
    """Ignore progress."""


class Overall:
    """Overall progress of a job, from the reports of its steps.

    >>> overall = Overall({"reading": 3, "writing": 1})
    >>> overall.update("reading", 5, 10), overall.share
    ('reading', 0.375)
    >>> overall.update("reading", 10, 10), overall.share
    ('writing', 0.75)
    """

    def __init__(self, plan: Mapping[str, float] | None = None) -> None:
        """Create the progress of a job with the plan of its steps: the beginning of each name, and its typical time.

        Without a plan, or for steps that are not in it, the overall progress is that of the step.
        """
        self.share = 0.0
        self._plan = dict(plan or {})
        self._step = ""

    def update(self, step: str, done: float, total: float | None) -> str:
        """Take a report, and return the name of the step that runs now; the share never decreases during a plan."""
        part = min(done / total, 1.0) if total else 0.0
        known = max((name for name in self._plan if step.startswith(name)), key=len, default=None)
        if known is None:
            if not self._plan:
                self.share = part
            return step
        names = list(self._plan)
        place = names.index(known)
        before = sum(self._plan[name] for name in names[:place])
        self.share = max(self.share, (before + part * self._plan[known]) / sum(self._plan.values()))
        return names[place + 1] if part == 1 and place + 1 < len(names) else step


@contextmanager
def bars(plan: Mapping[str, float] | None = None, *, quiet: bool = False) -> Iterator[Report]:
    """Draw one bar of the overall progress on standard error, or a line now and then if that is not a terminal.

        with urank.bars() as report:
            model = urank.URank().fit(log, report=report)

    Args:
        plan: As in `Overall`.
        quiet: Draw nothing.
    """
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield silent
    elif console.is_jupyter:
        with _notebook_bar(Overall(plan)) as report:
            yield report
    elif console.is_terminal:
        with _bar(console, Overall(plan)) as report:
            yield report
    else:
        yield _Lines(console, Overall(plan))


@contextmanager
def _bar(console: Console, overall: Overall) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=36)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        _TimeLeftColumn(),
    )
    with Progress(*columns, console=console, expand=True, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def draw(step: str, done: float, total: float | None, note: str = "", /) -> None:
            name = overall.update(step, done, total)
            progress.update(task, description=name, completed=overall.share)

        yield draw


class _TimeLeftColumn(ProgressColumn):
    """The estimate of `time_left`, which grows while a step reports nothing."""

    def render(self, task: Task) -> Text:
        return Text(time_left(task.elapsed or 0.0, task.completed))


class _Lines:
    """Progress as plain lines: nothing in the first seconds, then one for each step, but not too many."""

    def __init__(self, console: Console, overall: Overall) -> None:
        self._console, self._overall = console, overall
        self._started = time.monotonic()
        self._printed, self._name = self._started, ""

    def __call__(self, step: str, done: float, total: float | None, note: str = "", /) -> None:
        now = time.monotonic()
        name = self._overall.update(step, done, total)
        least = SECONDS_BEFORE if name != self._name else SECONDS_BETWEEN
        if now - self._printed < least:
            return
        self._printed, self._name = now, name
        seconds = now - self._started
        left = time_left(seconds, self._overall.share)
        words = [f"{self._overall.share:4.0%} {name}", clock(seconds), *([left] if left else [])]
        self._console.print(", ".join(words), markup=False, soft_wrap=True)


def time_left(seconds: float, share: float) -> str:
    """Estimate the remaining time of a job, in words; empty while too little is known.

    >>> time_left(30, 0.25), time_left(30, 0.01)
    ('1:30 left', '')
    """
    known = seconds >= SECONDS_BEFORE and 0.05 <= share < 1
    return f"{clock(seconds * (1 - share) / share)} left" if known else ""


def clock(seconds: float) -> str:
    """Format a duration.

    >>> clock(75), clock(3723)
    ('1:15', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _notebook_bar(overall: Overall) -> Iterator[Report]:
    """Draw the progress in the output of a notebook's cell; it disappears at the end."""
    from IPython.display import HTML, display

    shown = display(HTML(""), display_id=True)
    last = 0.0

    def draw(step: str, done: float, total: float | None, note: str = "", /) -> None:
        nonlocal last
        name = overall.update(step, done, total)
        if time.monotonic() - last < SECONDS_BETWEEN_DRAWINGS and done != total:
            return
        last = time.monotonic()
        bar = f'<progress value="{overall.share:.3f}"></progress>'
        shown.update(HTML(f"{bar} {escape(name)} <small>{escape(note)}</small>"))

    try:
        yield draw
    finally:
        shown.update(HTML(""))


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
