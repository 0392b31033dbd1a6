"""The thread that reads ahead changes nothing but the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from urank.progress import prefetch


@pytest.mark.parametrize("depth", [1, 3])
def test_same_items_same_order(depth: int) -> None:
    assert list(prefetch(iter(range(100)), depth)) == list(range(100))
    assert list(prefetch([], depth)) == []


def test_errors_come_through_after_what_was_before_them() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("second")

    got = []
    with pytest.raises(KeyError, match="second"):
        for item in prefetch(items()):
            got.append(item)  # noqa: PERF402 - what came before the error is what is asked
    assert got == [1]


def test_stopping_early_ends_the_thread() -> None:
    before = threading.active_count()
    reader = prefetch(iter(range(10**9)))
    assert next(reader) == 0
    reader.close()
    assert threading.active_count() == before
