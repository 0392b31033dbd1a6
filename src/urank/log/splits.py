"""Split queries into train, validation and test, by a stable hash or by time.

The hash depends on nothing but the id, so a query keeps its split when data is added.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import ConfigError

SPLITS = ("train", "valid", "test")

CHUNK_BYTES = 1 << 20

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def mix_bits(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix bits by the finaliser of SplitMix64: every input bit affects every output bit."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def hash_factors(count: int) -> NDArray[np.uint64]:
    """Return fixed odd multipliers, one for each column of a row to hash."""
    return mix_bits(np.arange(1, count + 1, dtype=np.uint64) * _MULTIPLIER) | np.uint64(1)


def stable_hash(ids: pl.Series, *, seed: int = 0) -> NDArray[np.uint64]:
    """Hash the text of each id to 64 bits: the same on every machine and in every version, unlike Polars' own hash.

    A polynomial in the bytes modulo 2⁶⁴, then mixed. Ids are hashed as text, so 17 and "17" agree.

    >>> a, b = stable_hash(pl.Series(["17", "18"])), stable_hash(pl.Series([17, 18]))
    >>> bool((a == b).all()), bool(a[0] != a[1])
    (True, True)
    """
    if len(ids) == 0:
        return np.zeros(0, dtype=np.uint64)
    run_starts = (ids != ids.shift(1)).fill_null(True).to_numpy()
    if not run_starts.all():
        heads = stable_hash(ids.filter(pl.Series(run_starts)), seed=seed)
        return heads.take(np.cumsum(run_starts) - 1)
    text = ids.cast(pl.String).to_arrow().cast(pa.large_string())
    if isinstance(text, pa.ChunkedArray):
        text = text.combine_chunks()
    _, starts_buffer, bytes_buffer = text.buffers()
    bounds = np.frombuffer(starts_buffer, dtype=np.int64)[text.offset : text.offset + len(text) + 1]
    lengths = np.diff(bounds)
    if bytes_buffer is None:
        return mix_bits(np.full(len(ids), seed + 1, dtype=np.uint64) * _MULTIPLIER)
    letters = np.frombuffer(bytes_buffer, dtype=np.uint8)
    powers = np.full(int(lengths.max()) + 1, _MULTIPLIER, dtype=np.uint64).cumprod(dtype=np.uint64)
    polynomial = np.empty(len(ids), dtype=np.uint64)
    first = 0
    while first < len(ids):  # in chunks: the intermediate arrays take 40 bytes per byte of text
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + CHUNK_BYTES, side="right")) - 1)
        polynomial[first:last] = _polynomials(letters, bounds[first : last + 1], powers)
        first = last
    with np.errstate(over="ignore"):
        return mix_bits(mix_bits(polynomial) + np.uint64(seed + 1) * _MULTIPLIER)


def _polynomials(
    letters: NDArray[np.uint8], bounds: NDArray[np.int64], powers: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Compute Σ (byte + 1) · multiplier^(place + 1) modulo 2⁶⁴ for each text between two bounds."""
    data = letters[bounds[0] : bounds[-1]].astype(np.uint64)
    ends = bounds - bounds[0]
    place = np.arange(len(data)) - np.repeat(ends[:-1], np.diff(ends))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((data + np.uint64(1)) * powers[place], dtype=np.uint64)])
    return np.asarray(sums[ends[1:]] - sums[ends[:-1]])


def check_shares(valid: float, test: float) -> None:
    """Refuse shares that are not fractions of 1."""
    if not (0 <= valid <= 1 and 0 <= test <= 1 and valid + test <= 1):
        raise ConfigError(f"the shares of valid and test must be from 0 to 1 and sum to at most 1; got {valid}, {test}")


def split_by_hash(hashes: NDArray[np.uint64], *, valid: float, test: float) -> NDArray[np.uint8]:
    """Return the index in `SPLITS` of each query, given the hash of its id.

    >>> split_by_hash(np.array([0, 2**63, 2**64 - 1], dtype=np.uint64), valid=0.1, test=0.1).tolist()
    [2, 0, 0]
    """
    check_shares(valid, test)
    share = hashes.astype(np.float64) / 2.0**64
    return np.where(share < test, 2, np.where(share < test + valid, 1, 0)).astype(np.uint8)


def split_by_time(latest: NDArray[np.int64], *, valid: float, test: float) -> tuple[int, int]:
    """Return the two times that divide queries, each given by its latest showing, into train | valid | test.

    A query belongs to the period of its latest showing, so nothing in train is newer than the held-out queries. Queries
    of one time stay together; the cuts are the nearest to the requested shares that leave no split empty, if possible.

    >>> split_by_time(np.array([1, 2, 3, 4, 5, 5, 5, 5]), valid=0.2, test=0.2)
    (3, 4)
    """
    check_shares(valid, test)
    times, counts = np.unique(latest, return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)]) / len(latest)  # the share of queries up to each cut
    some_train, some_valid, some_test = valid + test < 1 - 1e-9, valid > 0, test > 0
    second = _nearest(ends, 1 - test, some_train + some_valid, len(times) - some_test, least=int(some_train))
    first = _nearest(ends[: second + 1], 1 - valid - test, int(some_train), second - some_valid, least=int(some_train))
    cuts = [int(times[cut - 1]) if cut else int(times[0]) - 1 for cut in (first, second)]
    return cuts[0], cuts[1]


def _nearest(ends: NDArray[np.float64], share: float, low: int, high: int, *, least: int) -> int:
    """Return the cut in `low … high` whose share is nearest to the requested one; `least` if the range is empty."""
    high = max(high, least)
    low = min(low, high)
    return low + int(np.abs(ends[low : high + 1] - share).argmin())
