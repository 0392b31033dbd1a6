"""Sums over users from which every estimate is made: of their numbers, and of the products of these.

A user has k numbers: what the metric counts, what it is divided by, and perhaps covariates. Their number, sums and sums
of products add up: over days, over random blocks, over the halves of a split. So estimates are made from sums alone,
for a thousand splits or for each day at once, and there is one formula for all of them (`estimate.compare`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCKS", "Moments", "moments", "random_blocks"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCKS = 10_000
"""The most blocks of users that are drawn from or split."""


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of some groups of users.

    Attributes:
        n: `[...]`, users.
        sums: `[..., k]`, of their numbers.
        products: `[..., k, k]`, sums of the products of two of them.
    """

    n: Floats
    sums: Floats
    products: Floats

    def __getitem__(self, index: Any) -> Moments:
        """The groups at an index of the leading dimensions."""
        return Moments(self.n[index], self.sums[index], self.products[index])

    def __sub__(self, other: Moments) -> Moments:
        """The users of these groups that are not in the others."""
        return Moments(self.n - other.n, self.sums - other.sums, self.products - other.products)

    @property
    def mean(self) -> Floats:
        """`[..., k]`"""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.sums / self.n[..., None])

    @property
    def covariance(self) -> Floats:
        """`[..., k, k]`, with n − 1 in the denominator; NaN for fewer than two users."""
        with np.errstate(divide="ignore", invalid="ignore"):
            off = self.products - self.sums[..., :, None] * self.sums[..., None, :] / self.n[..., None, None]
            return np.asarray(off / np.where(self.n > 1, self.n - 1, np.nan)[..., None, None])

    def reshape(self, *shape: int) -> Moments:
        """The same groups in other leading dimensions."""
        k = self.sums.shape[-1]
        return Moments(self.n.reshape(shape), self.sums.reshape(*shape, k), self.products.reshape(*shape, k, k))

    def over_days(self) -> Moments:
        """Changes by day, the first dimension, added up: what is known at the end of each day."""
        return Moments(self.n.cumsum(axis=0), self.sums.cumsum(axis=0), self.products.cumsum(axis=0))


def moments(columns: Floats, group: NDArray[Any], groups: int, before: Floats | None = None) -> Moments:
    """The moments of each group.

    Args:
        columns: `[rows, k]`, the numbers of a user, of which the second is above 0.
        group: `[rows]`, from 0 to `groups` − 1.
        groups: how many there are.
        before: `[rows, k]`, the numbers that the same user had so far: what comes back is by how much the moments
            change. A user is new when the second number was 0.

    >>> found = moments(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([0, 0, 1]), 2)
    >>> found.n.tolist(), found.sums.tolist(), found.products[0].tolist()
    ([2.0, 1.0], [[4.0, 6.0], [5.0, 6.0]], [[10.0, 14.0], [14.0, 20.0]])
    """
    k = columns.shape[1]

    def summed(weights: NDArray[Any]) -> Floats:
        return np.bincount(group, weights=weights, minlength=groups).astype(np.float64, copy=False)

    sums, products = np.empty((groups, k)), np.empty((groups, k, k))
    for i in range(k):
        sums[:, i] = summed(columns[:, i] if before is None else columns[:, i] - before[:, i])
        for j in range(i + 1):
            product = columns[:, i] * columns[:, j]
            products[:, i, j] = products[:, j, i] = summed(
                product if before is None else product - before[:, i] * before[:, j]
            )
    new = np.ones(len(columns)) if before is None else before[:, 1] == 0
    return Moments(summed(new), sums, products)


def random_blocks(users: int, rng: np.random.Generator) -> Ints:
    """The block of each user: each its own up to `BLOCKS` users, otherwise as many blocks of random users.

    A sum over a random block of users is to the blocks what a user's number is to the users: the variance of what all
    add up to is the same on average (up to √(2 / BLOCKS), 1.4 %, by chance), and so is its skewness.
    """
    return np.arange(users) if users <= BLOCKS else rng.permutation(users) % BLOCKS
