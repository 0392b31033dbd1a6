"""Is the test itself sound? The sizes of the arms, and how often nothing is taken for something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, chdtrc

from urank.abtest.estimate import compare, p_values
from urank.abtest.moments import Floats, Moments, moments, random_blocks
from urank.errors import ConfigError

__all__ = ["SampleRatio", "SplitCheck", "sample_ratio", "split_check"]

SUSPICIOUS = 0.001
"""The p-value below which the sizes of the arms are not chance."""

_CERTAIN = 0.99
_SPLITS_AT_ONCE = 100


@dataclass(frozen=True)
class SampleRatio:
    """Users of each arm against those that its share lets expect.

    Attributes:
        users, expected: arm -> how many.
        chi_square: Σ (users − expected)² / expected.
        p_value: how likely chance alone makes it as large.
    """

    users: dict[str, int]
    expected: dict[str, float]
    chi_square: float
    p_value: float

    @property
    def sound(self) -> bool:
        """Whether the sizes of the arms may be chance."""
        return not self.p_value < SUSPICIOUS


@dataclass(frozen=True)
class SplitCheck:
    """How often the test calls two random halves of the same users different.

    Attributes:
        metric: which was tested.
        users: how many were split.
        splits: how many times.
        share: of the splits that had p < alpha.
        low, high: the 99 % interval of that share (Clopper and Pearson).
        alpha: what it should be.
    """

    metric: str
    users: int
    splits: int
    share: float
    low: float
    high: float
    alpha: float

    @property
    def sound(self) -> bool:
        """Whether the share may be alpha."""
        return self.low <= self.alpha <= self.high


def sample_ratio(users: Mapping[str, int], shares: Mapping[str, float] | None = None) -> SampleRatio:
    """Whether the arms have as many users as they should, by Pearson's χ² test.

    Arms of the wrong size mean that users got lost, or came twice, in one of them (Fabijan et al., KDD 2019). These are
    seldom users like all others, so that whatever the test says is in doubt. A p-value below 0.001 is taken for that.

    Args:
        users: arm -> how many were seen.
        shares: arm -> its intended share, of any sum; equal when left out.

    >>> found = sample_ratio({"A": 5100, "B": 4900})
    >>> found.chi_square, round(found.p_value, 3), found.sound  # 100² / 5000 twice
    (4.0, 0.046, True)
    """
    if shares is not None:
        for arm in users:
            if not shares.get(arm, 0) > 0:
                raise ConfigError(f"shares must give each arm a share above 0; got {shares.get(arm)} for '{arm}'")
    weights = dict.fromkeys(users, 1.0) if shares is None else {arm: shares[arm] for arm in users}
    total, whole = sum(users.values()), sum(weights.values())
    expected = {arm: total * weight / whole for arm, weight in weights.items()}
    chi_square = sum((count - expected[arm]) ** 2 / expected[arm] for arm, count in users.items()) if total else 0.0
    p_value = float(chdtrc(len(users) - 1, chi_square)) if len(users) > 1 else 1.0
    return SampleRatio(dict(users), expected, chi_square, p_value)


def split_check(
    columns: Floats, *, metric: str, rng: np.random.Generator | int, alpha: float = 0.05, splits: int = 1000
) -> SplitCheck:
    """Split users at random into two halves, again and again, and test them by the log lift as arms are tested.

    Nothing tells the halves apart, so a share alpha of the tests should have p < alpha. It is more when a few users
    earn most of the metric, too few for the normal distribution. It cannot tell whether users are the right unit.

    The test of a split is made from sums, which for all splits are products of one random matrix with the moments of
    users. Above 10,000 users, as many random blocks of users are split in their place.

    Args:
        columns: `[users, 2]`, x and y of each user, y above 0.
        metric: what it is called.
        rng: a generator or a seed.
        alpha: the p-value below which a difference is called one.
        splits: how many.

    >>> clicks = np.random.default_rng(0).binomial(10, 0.1, size=500)
    >>> found = split_check(np.stack([clicks, np.full(500, 10)], axis=1), metric="ctr", rng=0)
    >>> found.sound, 0.03 < found.share < 0.07
    (True, True)
    """
    generator = np.random.default_rng(rng)
    block = random_blocks(len(columns), generator)
    blocks = moments(np.asarray(columns, dtype=np.float64), block, int(block.max()) + 1 if len(block) else 1)
    flat = np.concatenate([blocks.n[:, None], blocks.sums, blocks.products.reshape(-1, 4)], axis=1)
    whole = _moments(flat.sum(axis=0))
    called = 0
    for start in range(0, splits, _SPLITS_AT_ONCE):
        drawn = generator.integers(2, size=(min(_SPLITS_AT_ONCE, splits - start), len(flat)), dtype=np.int8)
        half = _moments(drawn.astype(np.float64) @ flat)
        called += int((p_values(*compare(whole - half, half, "log")) < alpha).sum())
    tail = (1 - _CERTAIN) / 2
    low = float(betaincinv(called, splits - called + 1, tail)) if called else 0.0
    high = float(betaincinv(called + 1, splits - called, 1 - tail)) if called < splits else 1.0
    return SplitCheck(metric, len(columns), splits, called / splits, low, high, alpha)


def _moments(flat: Floats) -> Moments:
    """Moments `[...]` from their numbers in one row, `[..., 7]`."""
    return Moments(flat[..., 0], flat[..., 1:3], flat[..., 3:].reshape(*flat.shape[:-1], 2, 2))
