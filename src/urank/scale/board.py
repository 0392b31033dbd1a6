"""What the workers of a job tell the process that started it: how far they are, and in the end what they made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from urank.errors import ConfigError, DataError, TooFewError, UrankError
from urank.progress import Report

__all__ = ["Board", "followed", "refuse_as"]

SECONDS = 0.5


class Board:
    """Lives in a process of Ray; everybody writes to it, the starting process reads it now and then."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, float | None, str]] = {}
        self._result: Any = None
        self._refusal: tuple[str, str] | None = None

    def tell(self, step: str, done: float, total: float | None, note: str) -> None:
        """Note how far a step is."""
        self._told[step] = done, total, note

    def told(self) -> dict[str, tuple[float, float | None, str]]:
        """What was noted since the last time."""
        told, self._told = self._told, {}
        return told

    def hand_in(self, result: Any) -> None:
        """Leave what the job made."""
        self._result = result

    def refuse(self, kind: str, sentence: str) -> None:
        """Leave why the job cannot be done: wrong data or settings, which no other try would change."""
        self._refusal = kind, sentence

    def result(self) -> Any:
        """What the job made."""
        return self._result

    def refusal(self) -> tuple[str, str] | None:
        """Why it cannot be done."""
        return self._refusal


@contextmanager
def followed(report: Report) -> Iterator[Any]:
    """A board of a job, whose progress is reported here as long as the block lasts."""
    import ray

    board = ray.remote(num_cpus=0)(Board).remote()
    stopped = Event()

    def pass_on() -> None:
        for step, (done, total, note) in ray.get(board.told.remote()).items():
            report(step, done, total, note)

    def follow() -> None:
        while not stopped.wait(SECONDS):
            pass_on()

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield board
        stopped.set()
        thread.join()
        pass_on()
    finally:
        stopped.set()
        thread.join()
        ray.kill(board)


def refuse_as(board: Any) -> None:
    """Raise what the job refused, if it did."""
    import ray

    refusal = ray.get(board.refusal.remote())
    if refusal is not None:
        kinds = (ConfigError, DataError, TooFewError)
        raise next((kind for kind in kinds if kind.__name__ == refusal[0]), UrankError)(refusal[1])
