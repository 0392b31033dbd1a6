"""The hash is stable, even, and never splits a query."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from urank.errors import ConfigError
from urank.log import splits
from urank.log.splits import SPLITS, split_by_hash, split_by_time, stable_hash


def reference_hash(text: str, seed: int = 0) -> int:
    """The same hash with Python's whole numbers, one byte at a time."""
    mask, multiplier = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(h: int) -> int:
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
        return h ^ (h >> 31)

    total, power = 0, 1
    for byte in text.encode():
        power = power * multiplier & mask
        total = (total + (byte + 1) * power) & mask
    return mix((mix(total) + (seed + 1) * multiplier) & mask)


@given(st.lists(st.text(max_size=12), min_size=1, max_size=30), st.integers(0, 1000))
def test_equals_the_plain_computation(ids: list[str], seed: int) -> None:
    assert stable_hash(pl.Series(ids), seed=seed).tolist() == [reference_hash(text, seed) for text in ids]


def test_known_values_never_change() -> None:
    # were these to change, every query of every prepared log would move to another split
    assert stable_hash(pl.Series(["q1", "query 17", ""])).tolist() == [
        17681330621255172570,
        13357600819963178872,
        16294208416658607535,
    ]


def test_shares_are_even() -> None:
    hashes = stable_hash(pl.Series([f"q{i}" for i in range(200_000)]))
    counts = np.bincount(split_by_hash(hashes, valid=0.1, test=0.2), minlength=3)
    expected = 200_000 * np.array([0.7, 0.1, 0.2])
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()
    assert len(np.unique(hashes)) == 200_000
    assert (np.abs(np.bincount(hashes % np.uint64(64)) - 3125) < 5 * np.sqrt(3125)).all()


def test_all_may_be_held_out_or_nothing() -> None:
    hashes = stable_hash(pl.Series(range(100)))
    assert set(split_by_hash(hashes, valid=0, test=0)) == {SPLITS.index("train")}
    assert set(split_by_hash(hashes, valid=0, test=1)) == {SPLITS.index("test")}
    assert set(split_by_hash(hashes, valid=1, test=0)) == {SPLITS.index("valid")}


def test_time_cuts_are_times_of_queries() -> None:
    first, second = split_by_time(np.arange(1, 101), valid=0.1, test=0.2)
    assert (first, second) == (70, 80)


def test_refuses_shares_over_one() -> None:
    with pytest.raises(ConfigError, match=r"sum to at most 1; got 0\.7, 0\.7"):
        split_by_hash(np.zeros(1, dtype=np.uint64), valid=0.7, test=0.7)


@pytest.mark.parametrize(
    ("times", "valid", "test", "sizes"),
    [
        (range(10), 0.9, 0.1, (0, 9, 1)),
        (range(10), 0.0, 1.0, (0, 0, 10)),
        (range(10), 1.0, 0.0, (0, 10, 0)),
        (range(10), 0.0, 0.0, (10, 0, 0)),
        ([1, 2, 3, 4, 5, 5, 5, 5], 0.1, 0.1, (3, 1, 4)),  # the newest instant alone is more than was asked for
        ([1, 1, 1, 1, 2], 0.1, 0.1, (4, 0, 1)),
        ([7, 7, 7], 0.1, 0.1, (3, 0, 0)),
    ],
)
def test_time_cuts_with_ties_and_at_the_ends(times: object, valid: float, test: float, sizes: tuple[int, ...]) -> None:
    latest = np.array(list(times))  # type: ignore[call-overload]
    first, second = split_by_time(latest, valid=valid, test=test)
    assert np.bincount((latest > first).astype(int) + (latest > second), minlength=3).tolist() == list(sizes)


def test_long_texts_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = pl.Series(["a" * 50, "", "b" * 3, "c" * 200, "", "d"])
    whole = stable_hash(texts)
    monkeypatch.setattr(splits, "CHUNK_BYTES", 60)
    assert stable_hash(texts).tolist() == whole.tolist()
