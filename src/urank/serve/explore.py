"""Exploration: a stated share of lists is shown in an order that chance decides, so that the next model can learn what
positions do. What was done, and how likely it was, goes into the log.

With share ε and m places, of which the item ranked r got place k:

    swap      the item ranked first changes places with the one at a place drawn evenly from 1 to m (itself included)
              P(r = 1 at k) = (1 − ε) · 1[k = 1] + ε / m
              P(r > 1 at r) = 1 − ε / m,      P(r > 1 at 1) = ε / m
    shuffle   all m items are shown in an order drawn evenly
              P(r at k) = (1 − ε) · 1[k = r] + ε / m

`swap` costs little and is what `urank propensity --method randomised` compares the places by; `shuffle` shows every
item everywhere, which costs more and lets estimates by propensities hold for any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from urank.errors import ConfigError

__all__ = ["Exploration", "ExplorationKind"]

ExplorationKind = Literal["swap", "shuffle"]


@dataclass(frozen=True)
class Exploration:
    """How lists are randomised.

    Attributes:
        kind: `swap` or `shuffle`.
        share: of lists, above 0 and at most 1.

    >>> str(Exploration.parse("swap:0.05"))
    'swap:0.05'
    >>> Exploration.parse("swap:5")
    Traceback (most recent call last):
    urank.errors.ConfigError: the share of lists that are explored must be above 0 and at most 1; got 5
    """

    kind: ExplorationKind
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"the share of lists that are explored must be above 0 and at most 1; got {self.share:g}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` makes of it."""
        kind, _, share = text.partition(":")
        found = next((each for each in get_args(ExplorationKind) if each == kind), None)
        try:
            number = float(share)
        except ValueError:
            found, number = None, 0.0
        if found is None:
            raise ConfigError(f"exploration is swap:SHARE, as swap:0.05, or shuffle:SHARE; got '{text}'")
        return cls(found, number)

    def __str__(self) -> str:
        return f"{self.kind}:{np.format_float_positional(self.share, trim='-')}"

    def order(self, places: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], bool]:
        """The rank, from 1, of the item shown at each of the places, and whether chance was asked.

        >>> Exploration("swap", 1.0).order(4, np.random.default_rng(1))
        (array([4, 2, 3, 1]), True)
        """
        ranks = np.arange(1, places + 1)
        if rng.random() >= self.share:
            return ranks, False
        if self.kind == "shuffle":
            return rng.permutation(ranks), True
        other = int(rng.integers(places))
        ranks[0], ranks[other] = ranks[other], ranks[0]
        return ranks, True

    def propensities(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """P(item ranked r at place k) for the rank at each place; see above.

        >>> Exploration("swap", 0.2).propensities(np.array([2, 1, 3, 4])).tolist()  # 0.2 / 4 and 1 - 0.2 / 4
        [0.05, 0.05, 0.95, 0.95]
        """
        m = len(ranks)
        stays = ranks == np.arange(1, m + 1)
        by_chance = self.share / m
        if self.kind == "shuffle":
            return np.where(stays, 1 - self.share, 0.0) + by_chance
        kept = np.where(ranks == 1, 1 - self.share + by_chance, 1 - by_chance)
        return np.where(stays, kept, by_chance)
