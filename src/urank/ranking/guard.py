"""Guard: keep a new order close to the current one, for a safe first launch.

All functions take two orders of padded lists `[B, n]`, the wanted and the current one, and compare ranks: current
positions 1, 3 and 7 are the ranks 1, 2 and 3. They return positions 1 to n, as a ranker does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.log.ragged import positions_by_score
from urank.ranking.utility import Array, Mask, check_mask, check_order

GuardKind = Literal["shift", "blend"]

_DECIMALS = 9  # of a mean of ranks; smaller differences are rounding and must not break ties


def limit_shift(positions: Array, current: Array, most: int, *, where: Mask | None = None) -> NDArray[np.int64]:
    """Return the order closest to the wanted one in which no item moves more than `most` places from its rank r.

    Places are filled from the top: place k gets the item that is due, r + most = k; if none is, the most wanted item
    that may move there, r − most ≤ k.

    There always is such an item: k + most items, or all of them, may move to place k, and k − 1 are placed. None is
    late: ranks are distinct, so at most one item is due at a place, and it is placed there if not before. So whatever
    is placed, the rest can be filled, and each place gets the most wanted item that it can have after those above it:
    read from the top, no order within the bound precedes this one. `most` = 0 gives the current order, n − 1 or more
    the wanted one.

    Args:
        positions: `[B, n]`, the wanted position of each item, distinct within a list.
        current: `[B, n]`, the current one; gaps are allowed in both.
        most: how many places an item may move, up or down.
        where: `[B, n]`, true where there is an item; all by default.

    Returns:
        `[B, n]`, each row a permutation of 1 to n in which padding comes last.

    Of the two items that may come first, the second is wanted more; after it the first is due.

    >>> limit_shift(np.array([[4, 3, 2, 1]]), np.array([[1, 2, 3, 4]]), 1).tolist()
    [[2, 1, 4, 3]]
    >>> limit_shift(np.array([[4, 3, 2, 1]]), np.array([[1, 2, 3, 4]]), 2).tolist()
    [[3, 4, 1, 2]]
    """
    if most < 0:
        raise ValueError(f"most must be a whole number from 0 up; got {most}")
    wanted, rank = _ranks(positions, where), _ranks(current, where)
    lists, n = np.arange(len(rank)), rank.shape[1]
    left = _by_rank(wanted, rank)  # the wanted rank of the item at each current rank, until it is placed
    places = np.empty_like(left)
    for k in range(n):
        first = max(0, k - most)
        chosen = first + left[:, first : k + most + 1].argmin(axis=1)
        if k >= most:
            chosen = np.where(left[:, first] <= n, first, chosen)  # it is due
        left[lists, chosen] = n + 1
        places[lists, chosen] = k + 1
    return np.asarray(places[lists[:, None], rank - 1])


def blend_ranks(positions: Array, current: Array, share: float, *, where: Mask | None = None) -> NDArray[np.int64]:
    """Return the order by the weighted mean of an item's current and wanted rank.

        (1 − share) · current rank + share · wanted rank      rising, ties in the current order

    `share` = 0 gives the current order, 1 the wanted one. Other arguments and result as in `limit_shift`.

    >>> blend_ranks(np.array([[4, 3, 2, 1]]), np.array([[1, 2, 3, 4]]), 0.5).tolist()  # all have the mean 2.5
    [[1, 2, 3, 4]]
    >>> blend_ranks(np.array([[4, 1, 2, 3]]), np.array([[1, 2, 3, 4]]), 0.5).tolist()  # 2.5, 1.5, 2.5, 3.5
    [[2, 1, 3, 4]]
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1; got {share}")
    wanted, rank = _ranks(positions, where), _ranks(current, where)
    means = (1 - share) * np.arange(1, rank.shape[1] + 1) + share * _by_rank(wanted, rank)
    places = positions_by_score(-means.round(_DECIMALS))  # ties in input order, which is by current rank
    return np.asarray(places[np.arange(len(rank))[:, None], rank - 1])


@dataclass(frozen=True)
class Guard:
    """How close an order must stay to the current one.

    Attributes:
        kind: `shift` limits how many places an item moves (`limit_shift`), `blend` averages the ranks of both orders
            (`blend_ranks`).
        level: the places, from 0 up; or the share of the wanted order, from 0 to 1.

    >>> guard = Guard.parse("shift:2")
    >>> guard, str(guard), guard.name
    (Guard(kind='shift', level=2), 'shift:2', 'shift 2')
    >>> Guard.parse("shift:two")
    Traceback (most recent call last):
    urank.errors.ConfigError: a guard is shift:PLACES, as shift:2, or blend:SHARE, as blend:0.5; got 'shift:two'
    """

    kind: GuardKind
    level: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuardKind):
            raise ConfigError(f"the kind of a guard must be {' or '.join(get_args(GuardKind))}; got '{self.kind}'")
        if self.kind == "blend" and not 0 <= self.level <= 1:
            raise ConfigError(f"the level of a blend must be from 0 to 1; got {self.level:g}")
        if self.kind == "shift":
            if not isfinite(self.level) or self.level < 0 or self.level != int(self.level):
                raise ConfigError(f"the level of a shift must be a whole number from 0 up; got {self.level:g}")
            object.__setattr__(self, "level", int(self.level))

    @classmethod
    def parse(cls, text: str | Self) -> Self:
        """Parse the output of `str`; a guard is returned as it is."""
        if isinstance(text, cls):
            return text
        kind, _, level = str(text).partition(":")
        try:
            known, number = {each: each for each in get_args(GuardKind)}[kind], float(level)
        except (KeyError, ValueError):
            usage = "a guard is shift:PLACES, as shift:2, or blend:SHARE, as blend:0.5"
            raise ConfigError(f"{usage}; got '{text}'") from None
        return cls(known, number)

    def __str__(self) -> str:
        return f"{self.kind}:{np.format_float_positional(self.level, trim='-')}"

    @property
    def name(self) -> str:
        """Name in tables."""
        return str(self).replace(":", " ")

    def apply(self, positions: Array, current: Array, *, where: Mask | None = None) -> NDArray[np.int64]:
        """Return the guarded order; see `limit_shift`."""
        if self.kind == "shift":
            return limit_shift(positions, current, int(self.level), where=where)
        return blend_ranks(positions, current, self.level, where=where)


@dataclass(frozen=True)
class Moves:
    """How far orders are from the current ones; those of several lists can be added."""

    items: int = 0
    lists: int = 0
    places: int = 0  # that all items moved, up or down
    largest: int = 0  # the largest move
    firsts: int = 0  # lists with another first item

    def __add__(self, other: Moves) -> Moves:
        total = {name: count + getattr(other, name) for name, count in asdict(self).items()}
        return Moves(**(total | {"largest": max(self.largest, other.largest)}))

    @property
    def mean(self) -> float:
        """The mean number of places that an item moved."""
        return self.places / self.items if self.items else nan

    @property
    def other_first(self) -> float:
        """The share of lists with another first item."""
        return self.firsts / self.lists if self.lists else nan


def count_moves(positions: Array, current: Array, *, where: Mask | None = None) -> Moves:
    """Measure how far orders `[B, n]` are from the current ones, by rank.

    >>> found = count_moves(np.array([[2, 1, 3], [1, 3, 2]]), np.array([[1, 2, 3], [1, 2, 3]]))
    >>> found.mean, found.largest, found.other_first  # 4 places by 6 items; the first of one list of two
    (0.6666666666666666, 1, 0.5)
    """
    new, old = _ranks(positions, where), _ranks(current, where)
    mask = check_mask(where, new.shape)
    moved = np.where(mask, np.abs(new - old), 0)
    return Moves(
        items=int(mask.sum()),
        lists=int(mask.any(axis=1).sum()),
        places=int(moved.sum()),
        largest=int(moved.max(initial=0)),
        firsts=int((mask & (old == 1) & (new != 1)).sum()),
    )


def _ranks(positions: Array, where: Mask | None) -> NDArray[np.int64]:
    """Return the rank `[B, n]` of each item in its list, from 1; padding comes last."""
    check_order(positions, where)
    return positions_by_score(-positions.astype(np.int64), where=where)


def _by_rank(values: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return values `[B, n]` sorted by rank."""
    sorted_values = np.empty_like(values)
    sorted_values[np.arange(len(rank))[:, None], rank - 1] = values
    return sorted_values
