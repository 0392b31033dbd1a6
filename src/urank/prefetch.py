"""Let the next item be made ready in a thread while the current one is worked on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import Full, Queue
from typing import TypeVar

__all__ = ["prefetch"]

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
