"""Within-list features: how the values of an item compare with those of the other items of its list.

A price of 80 is high in one list and low in another. For each feature x of a list of n items, with x' its signed log
and mean' and std' those of x' over the known values of the list:

    z      (x' − mean') / std', from −4 to 4; 0 if all values are equal
    rank   (average rank − ½) / number of known values, between 0 and 1; ties have the mean of their ranks
    mean   the inverse signed log of mean', the same for all items of the list
    size   n

z and rank are NaN where x is missing, and mean is NaN where all values of the list are. The values of a list do not
depend on other lists that are computed together with it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from urank.log.signed_log import inverse_signed_log, signed_log

LARGEST_Z = 4.0
SMALLEST_STD = 1e-6
SHORT_LIST = 32
"""Longest list whose ranks are counted by comparing all pairs; longer ones are sorted."""
CHUNK_CELLS = 2**19
"""Cells of the largest temporary arrays: at most 8 bytes each, and few enough for the cache."""
_PADDING = 1.25  # longer lists are padded to at most this multiple of their length
_LARGEST = np.finfo(np.float32).max

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def within_list(values: Floats, offsets: Ints, *, out: Floats | None = None) -> Floats:
    """Compare the values of items within their lists.

    Args:
        values: `[rows, W]`, NaN where missing.
        offsets: `[lists + 1]`, the bounds of the lists.
        out: where to write the result; a new array by default.

    Returns:
        `[rows, 3 W + 1]`: the z-scores, the ranks and the list means of the W features, and the size of the list.

    >>> within_list(np.array([[0], [3], [5]], np.float32), np.array([0, 2, 3])).tolist()
    [[-1.0, 0.25, 1.0, 2.0], [1.0, 0.75, 1.0, 2.0], [0.0, 0.5, 5.0, 1.0]]
    """
    rows, width = values.shape
    columns = np.empty((rows, within_width(width)), dtype=np.float32) if out is None else out
    if len(offsets) == 2 and 0 < rows * width <= CHUNK_CELLS // 2:  # a request; most have a single list
        compressed = signed_log(values)
        if np.isfinite(compressed).all():
            return _within_known(values, compressed, columns)
    lengths = np.diff(offsets)
    columns[:, -1] = np.repeat(lengths, lengths)
    filled = np.flatnonzero(lengths)
    if len(filled) == 0 or width == 0:
        return columns
    starts, lengths = offsets[filled], lengths[filled]
    _write_moments(values, starts, lengths, columns[:, :width], columns[:, 2 * width : -1])
    _write_ranks(values, starts, lengths, columns[:, width : 2 * width])
    return columns


def within_width(width: int) -> int:
    """Return the number of columns that compare so many features."""
    return 3 * width + 1


def _within_known(values: Floats, compressed: NDArray[np.float64], columns: Floats) -> Floats:
    """Compare the values of one list without missing ones, in the same order of additions as many lists."""
    n, width = values.shape
    means = np.add.reduceat(compressed, [0], axis=0) / n
    deviation = compressed - means
    std = np.sqrt(np.add.reduceat(deviation**2, [0], axis=0) / n)
    std[std < SMALLEST_STD] = np.inf
    deviation /= std
    columns[:, :width] = deviation.clip(-LARGEST_Z, LARGEST_Z, out=deviation)
    columns[:, width : 2 * width] = (_by_pairs(values) if n <= SHORT_LIST else _by_sorting(values)) / (2 * n)
    columns[:, 2 * width : -1] = inverse_signed_log(means)
    columns[:, -1] = n
    return columns


def within_squares(compressed: NDArray[np.float64], offsets: Ints) -> float:
    """Sum the squared deviations of known values `[rows]` from the mean of their list.

    >>> within_squares(np.array([1.0, 3.0, np.nan, 7.0]), np.array([0, 3, 4]))  # 1² + 1²
    2.0
    """
    filled = offsets[:-1][np.diff(offsets) > 0]
    if len(filled) == 0:
        return 0.0
    lengths = np.diff(np.append(filled, offsets[-1]))
    deviation, _, _ = _deviations(compressed[:, None], filled, lengths)
    return float(np.nansum(deviation**2))


def _write_moments(values: Floats, starts: Ints, lengths: Ints, z: Floats, mean: Floats) -> None:
    """Write z-scores and list means, for chunks of whole lists."""
    most_rows = max(1, CHUNK_CELLS // values.shape[1])
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(starts + lengths, starts[first] + most_rows, side="right")))
        rows, own = slice(int(starts[first]), int(starts[last - 1] + lengths[last - 1])), lengths[first:last]
        compressed = signed_log(np.clip(values[rows], -_LARGEST, _LARGEST))
        deviation, means, known = _deviations(compressed, starts[first:last] - rows.start, own)
        squares = np.add.reduceat(np.nan_to_num(deviation**2), starts[first:last] - rows.start, axis=0)
        std = np.sqrt(squares / np.maximum(known, 1))
        deviation /= np.repeat(np.where(std < SMALLEST_STD, np.inf, std), own, axis=0)
        z[rows] = np.clip(deviation, -LARGEST_Z, LARGEST_Z)
        mean[rows] = np.repeat(inverse_signed_log(means), own, axis=0)
        first = last


def _deviations(
    compressed: NDArray[np.float64], starts: Ints, lengths: Ints
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the deviations `[rows, W]` from the list means `[lists, W]`, and the known values `[lists, W]`."""
    missing = np.isnan(compressed)
    known = lengths[:, None] - np.add.reduceat(missing, starts, axis=0, dtype=np.int64)
    total = np.add.reduceat(np.where(missing, 0.0, compressed), starts, axis=0)
    means = np.divide(total, known, out=np.full_like(total, np.nan), where=known > 0)
    return compressed - np.repeat(means, lengths, axis=0), means, known


def _write_ranks(values: Floats, starts: Ints, lengths: Ints, ranks: Floats) -> None:
    """Write ranks, for chunks of lists of similar length."""
    width = values.shape[1]
    for lists in _similar_lengths(lengths):
        n = int(lengths[lists].max())
        cells = n * min(n, SHORT_LIST)  # of a list and a feature
        step = max(1, CHUNK_CELLS // (cells * width))
        some_columns = max(1, CHUNK_CELLS // cells)
        for chunk in (lists[first : first + step] for first in range(0, len(lists), step)):
            where = np.arange(n)[:, None] < lengths[chunk]  # [n, B]
            rows = np.where(where, starts[chunk] + np.arange(n)[:, None], starts[chunk])
            for columns in (slice(first, first + some_columns) for first in range(0, width, some_columns)):
                padded = np.ascontiguousarray(values[rows, columns])  # [n, B, W]
                padded[~where] = np.nan
                missing = np.isnan(padded)
                twice = _by_pairs(padded) if n <= SHORT_LIST else _by_sorting(padded)
                known = n - np.add.reduce(missing, axis=0, dtype=np.int64)
                found = (twice / (2 * np.maximum(known, 1))).astype(np.float32)
                found[missing] = np.nan
                ranks[rows[where], columns] = found[where]


def _similar_lengths(lengths: Ints) -> Iterator[Ints]:
    """Group lists by length: short ones with others of the same, long ones with others that need little padding."""
    octave = np.floor(np.log(np.maximum(lengths, SHORT_LIST + 1)) / np.log(_PADDING)).astype(np.int64)
    key = np.where(lengths <= SHORT_LIST, lengths, SHORT_LIST + octave)
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[order])) + 1
    return iter(np.split(order, ends))


def _by_pairs(values: Floats) -> NDArray[np.uint8]:
    """Return twice the average rank, less 1, of values `[n, ...]` along the first axis: the pairs < and ≤."""
    less = (values[:, None] < values).view(np.uint8)
    no_more = (values[:, None] <= values).view(np.uint8)
    return np.asarray(np.add.reduce(less, axis=0, dtype=np.uint8) + np.add.reduce(no_more, axis=0, dtype=np.uint8))


def _by_sorting(values: Floats) -> NDArray[np.int64]:
    """Return the same by sorting: ties are a run of equal neighbours."""
    lists = np.ascontiguousarray(np.moveaxis(values, 0, -1))
    n = lists.shape[-1]
    order = np.argsort(lists, axis=-1)
    ordered = np.take_along_axis(lists, order, axis=-1)
    differs = np.ones((*lists.shape[:-1], n + 1), dtype=np.bool_)
    differs[..., 1:-1] = ordered[..., 1:] != ordered[..., :-1]
    before = np.maximum.accumulate(np.where(differs[..., :-1], np.arange(n), 0), axis=-1)
    until = np.minimum.accumulate(np.where(differs[..., 1:], np.arange(1, n + 1), n)[..., ::-1], axis=-1)[..., ::-1]
    twice = np.empty_like(order)
    np.put_along_axis(twice, order, before + until, axis=-1)
    return np.moveaxis(twice, -1, 0)
