"""A limit is read as people write it, refused when it says nothing or too little, and divided."""

from __future__ import annotations

import pytest

from urank.errors import ConfigError
from urank.memory import DEFAULT_MEMORY, Memory


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("4GB", 4 * 10**9),
        ("2000MB", 2000 * 10**6),
        ("1TB", 10**12),
        ("2048MiB", 2048 * 2**20),
        ("2GiB", 2 * 2**30),
        ("1TiB", 2**40),
        ("2.5GB", 5 * 10**9 // 2),
        ("0.5TiB", 2**39),
        ("  16 GB ", 16 * 10**9),
    ],
)
def test_units(text: str, total: int) -> None:
    assert Memory.parse(text) == Memory(total)


@pytest.mark.parametrize("text", ["", "4", "GB", "4gb", "4 KB", "4G", "-4GB", "1e3GB", "4,5GB", ".5TB", "4GB free"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"memory must be a number with one of .*; got '{text}'"):
        Memory.parse(text)


@pytest.mark.parametrize("text", ["0GB", "1.999GB", "1999MB", "1.8GiB"])
def test_less_than_the_libraries_take_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"memory must be at least 2GB, .*; got '{text}'"):
        Memory.parse(text)


def test_two_gigabytes_are_enough() -> None:
    assert Memory.parse("2GB").total == 2 * 10**9


@pytest.mark.parametrize("memory", [Memory.parse("2GB"), DEFAULT_MEMORY, Memory.parse("1TiB")])
def test_shares_grow_with_the_whole_and_leave_room(memory: Memory) -> None:
    twice = Memory(2 * memory.total)
    shares = [(each.bucket_bytes, each.cache_bytes, each.held_bytes) for each in (memory, twice)]
    assert all(0 < share <= memory.total // 2 for share in shares[0])  # the libraries take about half of the least
    assert shares[1] == pytest.approx([2 * share for share in shares[0]], abs=1)
    assert all(isinstance(share, int) for share in shares[0])


def test_what_is_taken_when_nothing_is_said() -> None:
    assert Memory.parse("4GB") == DEFAULT_MEMORY
