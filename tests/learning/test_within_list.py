"""Within-list columns are those of a naive loop, and a list does not depend on its neighbours."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import rankdata

from urank.learning import within_list as module
from urank.learning.within_list import SHORT_LIST, within_list, within_squares
from urank.log.signed_log import signed_log

NAN = float("nan")
NUMBERS = st.one_of(st.just(NAN), st.sampled_from([0.0, -0.0, 1.0, 2.5]), st.floats(-1e6, 1e6, width=32))


def offsets_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.append(0, np.cumsum(lengths)).astype(np.int64)


def naive(values: NDArray[np.float32], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """The formulas, a list and a feature at a time."""
    rows, width = values.shape
    found = np.full((rows, 3 * width + 1), np.nan)
    for start, end in pairwise(offsets):
        found[start:end, -1] = end - start
        for place in range(width):
            x = values[start:end, place].astype(np.float64)
            known = ~np.isnan(x)
            if not known.any():
                continue
            log = signed_log(x[known])
            z = (log - log.mean()) / log.std() if log.std() >= 1e-6 else 0 * log
            own = np.flatnonzero(known) + start
            found[own, place] = np.clip(z, -4, 4)
            found[own, width + place] = (rankdata(x[known]) - 0.5) / known.sum()
            found[start:end, 2 * width + place] = np.sign(log.mean()) * np.expm1(abs(log.mean()))
    return found


def random_values(lengths: Sequence[int], width: int, seed: int = 0, missing: float = 0.2) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    values = np.round(rng.standard_cauchy((sum(lengths), width)), 1).astype(np.float32)  # with ties
    values[rng.random(values.shape) < missing] = np.nan
    return values


@pytest.mark.parametrize(
    "lengths",
    [[3], [1, 1], [0, 4, 0, 2, 0], [15] * 40, [32, 33, 31, 34, 80, 1], list(range(70)), [500, 3, 700, 90]],
    ids=str,
)
@pytest.mark.parametrize("width", [1, 4])
def test_columns_are_those_of_a_naive_loop(lengths: list[int], width: int) -> None:
    values, offsets = random_values(lengths, width), offsets_of(lengths)
    found = within_list(values, offsets)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, naive(values, offsets), rtol=1e-5, atol=1e-5)


@given(st.lists(st.lists(NUMBERS, max_size=6), max_size=6))
def test_columns_of_any_lists(lists: list[list[float]]) -> None:
    values = np.array([x for each in lists for x in each], dtype=np.float32)[:, None]
    offsets = offsets_of([len(each) for each in lists])
    np.testing.assert_allclose(within_list(values, offsets), naive(values, offsets), rtol=1e-5, atol=1e-5)


@given(st.lists(NUMBERS, min_size=1, max_size=SHORT_LIST + 8))
def test_columns_move_with_the_items(numbers: list[float]) -> None:
    order = np.random.default_rng(len(numbers)).permutation(len(numbers))
    values = np.array(numbers, dtype=np.float32)[:, None]
    offsets = offsets_of([len(numbers)])
    np.testing.assert_allclose(
        within_list(values[order], offsets), within_list(values, offsets)[order], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("chunk", [2**6, 2**19])
def test_a_list_alone_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, chunk: int, missing: bool) -> None:
    lengths = [1, 15, 7, 33, 15, 40, 41, 300, 2, 0, 64, 15]
    values, offsets = random_values(lengths, 3), offsets_of(lengths)
    values = values if missing else np.nan_to_num(values, nan=2.0, posinf=3.0, neginf=-3.0)
    monkeypatch.setattr(module, "CHUNK_CELLS", chunk)
    together = within_list(values, offsets)
    monkeypatch.undo()
    for start, end in pairwise(offsets):
        alone = within_list(np.ascontiguousarray(values[start:end]), np.array([0, end - start]))
        assert alone.tobytes() == together[start:end].tobytes()


def test_layout_in_memory_does_not_matter() -> None:
    values, offsets = random_values([15, 40], 3), offsets_of([15, 40])
    assert within_list(np.asfortranarray(values), offsets).tobytes() == within_list(values, offsets).tobytes()


def test_values_at_the_edge() -> None:
    values = np.array([[NAN, 5, 0, np.inf], [NAN, 5, NAN, 1]], dtype=np.float32)
    z, rank, mean, size = np.split(within_list(values, np.array([0, 2])), [4, 8, 12], axis=1)
    np.testing.assert_array_equal(z, [[NAN, 0, 0, 1], [NAN, 0, NAN, -1]])
    np.testing.assert_array_equal(rank, [[NAN, 0.5, 0.5, 0.75], [NAN, 0.5, NAN, 0.25]])
    np.testing.assert_allclose(mean[0, :3], [NAN, 5, 0], rtol=1e-6)
    assert np.isfinite(mean[0, 3])
    assert size.tolist() == [[2], [2]]


def test_z_is_bounded() -> None:
    values = np.zeros((100, 1), dtype=np.float32)
    values[7] = 1
    assert within_list(values, np.array([0, 100]))[7, 0] == 4


def test_no_rows_and_no_features() -> None:
    assert within_list(np.zeros((0, 2), np.float32), np.zeros(1, np.int64)).shape == (0, 7)
    assert within_list(np.zeros((3, 0), np.float32), np.array([0, 3])).tolist() == [[3], [3], [3]]


def test_squares_within_lists() -> None:
    values, lengths = random_values([5, 0, 1, 8], 1)[:, 0].astype(np.float64), [5, 0, 1, 8]
    parts = np.split(values, np.cumsum(lengths)[:-1])
    expected = sum(np.nansum((part - np.nanmean(part)) ** 2) for part in parts if np.isfinite(part).any())
    assert within_squares(values, offsets_of(lengths)) == pytest.approx(expected)
    assert within_squares(np.zeros(0), np.zeros(1, np.int64)) == 0


def test_memory_of_long_lists_is_bounded() -> None:
    values, offsets = random_values([20_000, 20_000], 20), offsets_of([20_000, 20_000])
    tracemalloc.start()
    within_list(values, offsets)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 2**20 + 4 * values.shape[0] * (3 * values.shape[1] + 1)


def test_it_needs_numpy_only() -> None:
    check = (
        "import sys, urank.learning.within_list; print([m for m in ('torch', 'polars', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
