"""The guardrail: within its bound, the closest order there is; each end exact; counts by hand; refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulated import Small
from urank.errors import ConfigError
from urank.pipeline import ModelFit
from urank.ranking.guard import Guard, Moves, blend_ranks, count_moves, limit_shift
from urank.ranking.policies import Guarded, LoggedOrder, ModelPolicy, Random

Orders = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]


@st.composite
def orders(draw: st.DrawFn) -> Orders:
    """Wanted and current positions of lists with gaps, items in any order, and anything in the padding."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    n = max(lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    wanted, current = (rng.integers(-5, 50, (len(lengths), n)) for _ in range(2))
    where = np.zeros((len(lengths), n), dtype=np.bool_)
    for row, length in enumerate(lengths):
        where[row, rng.permutation(n)[:length]] = True
        wanted[row, where[row]] = 1 + rng.permutation(3 * length)[:length]
        current[row, where[row]] = 1 + rng.permutation(3 * length)[:length]
    return wanted, current, where


def ranks(positions: NDArray[np.int64]) -> list[int]:
    """Of one list, from 1."""
    return [sorted(positions).index(each) + 1 for each in positions]


def each_list(found: NDArray[np.int64], given: Orders) -> list[tuple[list[int], list[int], list[int]]]:
    """The new positions, the wanted ranks and the current ranks of each list."""
    wanted, current, where = given
    rows = zip(found, wanted, current, where, strict=True)
    return [(new[mask].tolist(), ranks(want[mask]), ranks(now[mask])) for new, want, now, mask in rows]


# Bounded


@given(orders(), st.integers(0, 10))
def test_nothing_moves_further_than_the_bound(given: Orders, most: int) -> None:
    found = limit_shift(given[0], given[1], most, where=given[2])
    for new, _, now in each_list(found, given):
        assert sorted(new) == list(range(1, len(new) + 1))
        assert all(abs(a - b) <= most for a, b in zip(new, now, strict=True))


@given(orders(), st.integers(9, 1000))
def test_both_ends_are_exact(given: Orders, most: int) -> None:
    wanted, current, where = given
    for new, _, now in each_list(limit_shift(wanted, current, 0, where=where), given):
        assert new == now
    for new, want, _ in each_list(limit_shift(wanted, current, most, where=where), given):
        assert new == want
    for new, _, now in each_list(blend_ranks(wanted, current, 0.0, where=where), given):
        assert new == now
    for new, want, _ in each_list(blend_ranks(wanted, current, 1.0, where=where), given):
        assert new == want


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_no_order_within_the_bound_is_closer(n: int) -> None:
    """Of all that are allowed, it is the first when they are read from the top by how much each item is wanted."""
    everything = list(permutations(range(1, n + 1)))
    current = np.arange(1, n + 1)
    for most in range(n):
        allowed = [order for order in everything if (np.abs(np.array(order) - current) <= most).all()]
        found = limit_shift(np.array(everything), np.tile(current, (len(everything), 1)), most)
        for wanted, new in zip(everything, found.tolist(), strict=True):
            assert from_the_top(new, wanted) == min(from_the_top(order, wanted) for order in allowed)


@given(orders(), st.integers(0, 10))
def test_a_larger_bound_comes_no_further_from_the_wanted_order(given: Orders, most: int) -> None:
    """Read from the top: what a bound allows, a larger one does."""
    near, far = (limit_shift(given[0], given[1], each, where=given[2]) for each in (most, most + 1))
    for (small, want, _), (large, _, _) in zip(each_list(near, given), each_list(far, given), strict=True):
        assert from_the_top(large, want) <= from_the_top(small, want)


def from_the_top(new: tuple[int, ...] | list[int], wanted: tuple[int, ...] | list[int]) -> list[int]:
    """The wanted rank of the item at each place."""
    return [want for _, want in sorted(zip(new, wanted, strict=True))]


@given(orders(), st.sampled_from([Guard("shift", 2), Guard("blend", 0.4)]), st.integers(0, 2**32 - 1))
def test_padding_and_the_order_of_the_items_mean_nothing(given: Orders, guard: Guard, seed: int) -> None:
    wanted, current, where = given
    found = guard.apply(wanted, current, where=where)
    rng = np.random.default_rng(seed)
    other = [np.where(where, each, rng.integers(-9, 99, each.shape)) for each in (wanted, current)]
    np.testing.assert_array_equal(guard.apply(*other, where=where)[where], found[where])
    mixed = rng.permutation(wanted.shape[1])
    again = guard.apply(wanted[:, mixed], current[:, mixed], where=where[:, mixed])
    np.testing.assert_array_equal(again[where[:, mixed]], found[:, mixed][where[:, mixed]])
    for row in range(len(wanted)):  # as if it were alone
        alone = where[row]
        np.testing.assert_array_equal(
            guard.apply(wanted[row : row + 1, alone], current[row : row + 1, alone])[0], found[row, alone]
        )


# Blended


@given(orders(), st.floats(0, 1))
def test_a_blend_is_sorted_by_the_mean_rank(given: Orders, share: float) -> None:
    for new, want, now in each_list(blend_ranks(given[0], given[1], share, where=given[2]), given):
        assert sorted(new) == list(range(1, len(new) + 1))
        means = [(1 - share) * b + share * a for a, b in zip(want, now, strict=True)]
        in_order = [mean for _, mean in sorted(zip(new, means, strict=True))]
        assert all(b >= a - 1e-8 for a, b in pairwise(in_order))


def test_ties_stay_in_the_current_order_whatever_the_rounding() -> None:
    """0.8 · 3 + 0.2 · 6 and 0.8 · 4 + 0.2 · 2 are both 3.6, which floats do not know."""
    assert (1 - 0.2) * 3 + 0.2 * 6 > (1 - 0.2) * 4 + 0.2 * 2
    assert blend_ranks(np.array([[1, 3, 6, 2, 4, 5]]), np.arange(1, 7)[None], 0.2).tolist() == [[1, 2, 3, 4, 5, 6]]


# Guards


@given(
    st.one_of(
        st.builds(Guard, st.just("shift"), st.integers(0, 10**9)), st.builds(Guard, st.just("blend"), st.floats(0, 1))
    )
)
def test_a_guard_is_what_it_says(guard: Guard) -> None:
    assert Guard.parse(str(guard)) == guard
    assert Guard.parse(guard) is guard
    assert guard.name == str(guard).replace(":", " ")


def test_names() -> None:
    assert [str(Guard("shift", 2.0)), str(Guard("blend", 0.5)), str(Guard("blend", 1))] == [
        "shift:2",
        "blend:0.5",
        "blend:1",
    ]
    with pytest.raises(FrozenInstanceError):
        Guard("shift", 2).level = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2", "a guard is shift:PLACES, as shift:2, or blend:SHARE, as blend:0.5; got '2'"),
        ("", "a guard is shift:PLACES, as shift:2, or blend:SHARE, as blend:0.5; got ''"),
        ("shift", "a guard is shift:PLACES, as shift:2, or blend:SHARE, as blend:0.5; got 'shift'"),
        ("jump:2", "a guard is shift:PLACES, as shift:2, or blend:SHARE, as blend:0.5; got 'jump:2'"),
        ("shift:1.5", "the level of a shift must be a whole number from 0 up; got 1.5"),
        ("shift:-1", "the level of a shift must be a whole number from 0 up; got -1"),
        ("shift:inf", "the level of a shift must be a whole number from 0 up; got inf"),
        ("blend:2", "the level of a blend must be from 0 to 1; got 2"),
        ("blend:nan", "the level of a blend must be from 0 to 1; got nan"),
    ],
)
def test_texts_that_are_no_guard(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Guard.parse(text)
    assert str(refused.value) == sentence


def test_other_refusals() -> None:
    order = np.array([[1, 2]])
    with pytest.raises(ConfigError, match="the kind of a guard must be shift or blend; got 'jump'"):
        Guard("jump", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="most must be a whole number from 0 up; got -1"):
        limit_shift(order, order, -1)
    with pytest.raises(ValueError, match=r"share must be from 0 to 1; got 1\.5"):
        blend_ranks(order, order, 1.5)
    for refused in (
        lambda: limit_shift(order, np.array([[3, 3]]), 1),
        lambda: blend_ranks(np.array([[3, 3]]), order, 0.5),
    ):
        with pytest.raises(
            ValueError, match="positions must be distinct within a list; got 3 more than once in list 0"
        ):
            refused()


# Moves


def test_moves_by_hand() -> None:
    current = np.array([[1, 4, 9], [2, 3, 0]])  # ranks 1, 2, 3 and 1, 2
    where = np.array([[True, True, True], [True, True, False]])
    found = count_moves(np.array([[3, 1, 2], [1, 2, 7]]), current, where=where)
    assert found == Moves(items=5, lists=2, places=2 + 1 + 1, largest=2, firsts=1)
    assert (found.mean, found.other_first) == (4 / 5, 1 / 2)
    twice = found + count_moves(current, current, where=where)
    assert (twice.mean, twice.largest, twice.other_first) == (4 / 10, 2, 1 / 4)
    nothing = count_moves(np.zeros((2, 0), dtype=int), np.zeros((2, 0), dtype=int))
    assert nothing == Moves()
    assert np.isnan([nothing.mean, nothing.other_first]).all()


# The policy


def test_a_guarded_policy(small: Small, fitted: ModelFit) -> None:
    (written,) = small.dataset.blocks("test", [*small.dataset.features, "position", "value"])
    block = written.shuffled(np.random.default_rng(0))
    policy = ModelPolicy("score", fitted.model, "score")
    logged, wanted = LoggedOrder().positions(block), policy.positions(block)
    guarded = Guarded(policy, Guard("shift", 2))
    assert guarded.name == "score, shift 2"
    assert list(guarded.columns) == [*policy.columns, "position"]
    assert list(Guarded(Random(), Guard("blend", 0.5)).columns) == ["position"]
    moved = np.abs(guarded.positions(block) - logged)
    assert moved.max() == 2 < np.abs(wanted - logged).max()
    for guard, expected in (("shift:0", logged), ("shift:99", wanted), ("blend:0", logged), ("blend:1", wanted)):
        np.testing.assert_array_equal(Guarded(policy, Guard.parse(guard)).positions(block), expected)
