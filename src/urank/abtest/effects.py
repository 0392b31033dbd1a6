"""The lift of a treatment over the control, with users as the sampling unit.

    rate R = Σ_u x_u / Σ_u y_u,      lift = R_B / R_A − 1,      difference = R_B − R_A

The impressions of one user are correlated, so standard errors that treat them as independent are too small. The delta
method (Deng, Knoblich and Lu, KDD 2018) linearises the rate of an arm in the means over its users,

    g(x̄, ȳ) ≈ g(μ) + ∇g · ((x̄, ȳ) − μ),      Var g ≈ ∇gᵀ S ∇g / n      with S the covariance of (x_u, y_u)

and the variances of two arms, which share no users, add up.

Intervals of the lift are computed on the log scale, log R_B − log R_A ± z · error, and transformed back. A ratio is
skewed to the right, its log hardly; the interval never falls below −100 %, and swapping the arms inverts it. Tests and
always-valid intervals (`always_valid`) use the same scale.

The behaviour of users before the test predicts part of their behaviour in it and cannot be caused by the test.
Covariates c_u from that time remove this part (CUPED; Deng, Xu, Kohavi and Walker, WSDM 2013):

    adjusted = estimate − θᵀ (c̄_B − c̄_A),      θ minimises the variance of this

With equally large arms this is the least-squares regression of the linearised metric on c within the arms. One formula
covers both cases, with and without covariates.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, pdtr

from urank.errors import ConfigError

Floats = NDArray[np.float64]
Scale = Literal["log", "difference"]

BLOCKS = 10_000
"""The largest number of units that are resampled or split; more users are grouped into blocks."""
_ROUNDING = 1e-13  # variances below this multiple of the squared means are rounding errors
_DRAWS_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of groups of users."""

    n: Floats  # `[...]`, number of users
    sums: Floats  # `[..., k]`, sums of their k variables
    products: Floats  # `[..., k, k]`, sums of products of two variables

    def __getitem__(self, index: Any) -> Moments:
        """Index the leading dimensions."""
        return Moments(self.n[index], self.sums[index], self.products[index])

    def __sub__(self, other: Moments) -> Moments:
        """Remove the users of other groups, which are subsets of these."""
        return Moments(self.n - other.n, self.sums - other.sums, self.products - other.products)

    @property
    def mean(self) -> Floats:
        """Means, `[..., k]`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.sums / self.n[..., None])

    @property
    def covariance(self) -> Floats:
        """Sample covariances (n − 1 in the denominator), `[..., k, k]`; NaN for fewer than two users."""
        with np.errstate(divide="ignore", invalid="ignore"):
            off = self.products - self.sums[..., :, None] * self.sums[..., None, :] / self.n[..., None, None]
            return np.asarray(off / np.where(self.n > 1, self.n - 1, np.nan)[..., None, None])

    def reshape(self, *shape: int) -> Moments:
        """Reshape the leading dimensions."""
        k = self.sums.shape[-1]
        return Moments(self.n.reshape(shape), self.sums.reshape(*shape, k), self.products.reshape(*shape, k, k))

    def cumsum(self) -> Moments:
        """Accumulate over the first dimension: from daily changes to totals at the end of each day."""
        return Moments(self.n.cumsum(axis=0), self.sums.cumsum(axis=0), self.products.cumsum(axis=0))


def moments(columns: Floats, group: NDArray[Any], groups: int, before: Floats | None = None) -> Moments:
    """Compute the moments of each group, or their changes.

    Args:
        columns: `[rows, k]`, the variables of each user; the second is positive.
        group: `[rows]`, from 0 to `groups` − 1.
        groups: number of groups.
        before: `[rows, k]`, previous values of the same users. If given, the result is the change of the moments;
            users whose second variable was 0 are new.

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
            change = product if before is None else product - before[:, i] * before[:, j]
            products[:, i, j] = products[:, j, i] = summed(change)
    new = np.ones(len(columns)) if before is None else before[:, 1] == 0
    return Moments(summed(new), sums, products)


def random_blocks(users: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Assign users to blocks: one user per block up to `BLOCKS` users, otherwise `BLOCKS` random blocks.

    Resampling sums over random blocks preserves the variance of the total in expectation (with a relative standard
    deviation of √(2 / BLOCKS), 1.4 %), and its skewness.
    """
    return np.arange(users) if users <= BLOCKS else rng.permutation(users) % BLOCKS


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error, and the ends of its interval."""

    value: float
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class Effect:
    """The rates of control and treatment, their difference and lift, and the two-sided p-value of no lift."""

    control: float
    treatment: float
    control_users: int
    treatment_users: int
    difference: Estimate
    lift: Estimate
    p_value: float


def rates(arm: Moments) -> Floats:
    """Return Σ x / Σ y of each group, `[...]`; NaN for a group without users."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(arm.sums[..., 0] / arm.sums[..., 1])


def compare(control: Moments, treatment: Moments, scale: Scale) -> tuple[Floats, Floats]:
    """Estimate the difference between two arms and its standard error, each `[...]`.

    Args:
        control, treatment: moments of (x, y), or of (x, y, c_1, …, c_p) to adjust for the covariates c.
        scale: "log" for log R_B − log R_A, "difference" for R_B − R_A.

    >>> a = moments(np.array([[1.0, 4.0], [2.0, 4.0], [0.0, 2.0], [1.0, 2.0]]), np.zeros(4, int), 1)
    >>> b = moments(np.array([[2.0, 4.0], [2.0, 3.0], [1.0, 2.0], [1.0, 3.0]]), np.zeros(4, int), 1)
    >>> [part.round(4).tolist() for part in compare(a, b, "difference")]  # 6/12 − 4/12, √(10/9/3/36 + 1/2/3/36)
    [[0.1667], [0.1221]]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        (value_a, gradient_a), (value_b, gradient_b) = (_linear(arm, scale) for arm in (control, treatment))
        theta = _theta(control, gradient_a, treatment, gradient_b)
        apart = treatment.mean[..., 2:] - control.mean[..., 2:]
        value = value_b - value_a - (theta * apart).sum(axis=-1)
        variance = _variance(control, gradient_a, theta) + _variance(treatment, gradient_b, theta)
        return np.asarray(value), np.sqrt(variance)


def _linear(arm: Moments, scale: Scale) -> tuple[Floats, Floats]:
    """Return the rate or its log, `[...]`, and the gradient with respect to the means of x and y, `[..., 2]`."""
    x, y = arm.mean[..., 0], arm.mean[..., 1]
    if scale == "log":
        return np.log(x / y), np.stack([1 / x, -1 / y], axis=-1)
    return x / y, np.stack([1 / y, -x / y**2], axis=-1)


def _theta(control: Moments, gradient_a: Floats, treatment: Moments, gradient_b: Floats) -> Floats:
    """Return θ `[..., p]` = (Σ S_cc / n)⁻¹ Σ S_cg / n over both arms, which minimises the variance.

    S_cc is the covariance of the covariates in an arm, S_cg their covariance with ∇g · (x, y).
    """
    if control.sums.shape[-1] == 2:
        return np.zeros((*control.n.shape, 0))
    arms = control, treatment
    of_means = [arm.covariance / arm.n[..., None, None] for arm in arms]
    of_covariates = sum(covariance[..., 2:, 2:] for covariance in of_means)
    of_metric = sum(
        np.einsum("...i,...ij->...j", gradient, covariance[..., :2, 2:])
        for gradient, covariance in zip((gradient_a, gradient_b), of_means, strict=True)
    )
    # Scale by the standard deviations, or small covariates would count as rounding errors; constants drop out.
    squares = np.einsum("...ii->...i", of_covariates)
    products = sum(arm.products[..., 2:, 2:] / (arm.n * (arm.n - 1))[..., None, None] for arm in arms)
    rounding = _ROUNDING * np.einsum("...ii->...i", products)
    size = np.where(squares > rounding, np.sqrt(squares), np.inf)
    inverse = np.linalg.pinv(of_covariates / (size[..., :, None] * size[..., None, :]), hermitian=True)
    return np.asarray(np.einsum("...ij,...j->...i", inverse, of_metric / size) / size)


def _variance(arm: Moments, gradient: Floats, theta: Floats) -> Floats:
    """Return the variance of the mean of the adjusted linearised metric of an arm, `[...]`."""
    weights = np.concatenate([gradient, -theta], axis=-1)
    each = np.einsum("...i,...ij,...j->...", weights, arm.covariance, weights)
    rounding = _ROUNDING * ((gradient * arm.mean[..., :2]) ** 2).sum(axis=-1)
    return np.asarray(np.where((each > rounding) | np.isnan(each), each, 0.0) / arm.n)


def relative_variance(arm: Moments) -> Floats:
    """Return n · Var log R, `[...]`: variance between users of the linearised rate, relative to the squared rate."""
    with np.errstate(divide="ignore", invalid="ignore"):
        _, gradient = _linear(arm, "log")
        return np.asarray(_variance(arm, gradient, np.zeros((*arm.n.shape, 0))) * arm.n)


def p_values(value: NDArray[np.float64], error: NDArray[np.float64]) -> Floats:
    """Return two-sided p-values of normal estimates, P(|Z| ≥ |value| / error); 1 if value and error are 0.

    >>> p_values(np.array([1.96, 0.0, 1.0]), np.array([1.0, 0.0, 0.0])).round(3).tolist()
    [0.05, 1.0, 0.0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(np.abs(value) > 1e-12, np.abs(value) / error, np.where(np.isnan(error), np.nan, 0.0))
    return np.asarray(2 * ndtr(-z))


def effects(control: Moments, treatment: Moments, *, alpha: float = 0.05) -> list[Effect]:
    """Estimate rates, difference and lift of two arms, with intervals, for each group.

    The log scale needs positive rates. If R_B = 0, the lift and its interval are those of the difference divided by
    R_A: −100 % without covariates, shifted by the adjustment with them. If R_A = 0, the lift is NaN. The p-value is
    then that of the difference.

    Args:
        control, treatment: moments `[groups]`, with or without covariates.
        alpha: 1 − level of the intervals.

    >>> columns = np.stack([np.tile([0.0, 1.0, 2.0], 50), np.full(150, 10.0)], axis=1)
    >>> a, b = (moments(columns * scale, np.zeros(150, int), 1) for scale in ([1.0, 1.0], [1.1, 1.0]))
    >>> [found] = effects(a, b)
    >>> round(found.lift.value, 3), round(found.lift.low, 3), round(found.lift.high, 3), round(found.p_value, 2)
    (0.1, -0.086, 0.324, 0.31)
    """
    check_alpha(alpha)
    z = critical_value(alpha)
    rate = rates(control)
    difference, error = compare(control, treatment, "difference")
    value, log_error = compare(control, treatment, "log")
    on_log = np.isfinite(value) & np.isfinite(log_error)
    p = np.where(on_log, p_values(value, log_error), p_values(difference, error))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        base = np.where(rate > 0, rate, np.nan)
        ends = np.expm1([value - z * log_error, value + z * log_error])
        by_log = np.stack([np.expm1(value), np.exp(value) * log_error, *ends])
        by_difference = np.stack([difference, error, difference - z * error, difference + z * error])
        lift = np.where(on_log, by_log, by_difference / base)
    lift[2] = np.maximum(lift[2], -1.0)
    rows = zip(rate, rates(treatment), control.n, treatment.n, by_difference.T, lift.T, p, strict=True)
    return [
        Effect(float(a), float(b), int(n), int(m), Estimate(*d.tolist()), Estimate(*each.tolist()), float(p_value))
        for a, b, n, m, d, each, p_value in rows
    ]


def effect(control: Moments, treatment: Moments, *, alpha: float = 0.05) -> Effect:
    """Estimate the effect for one group; see `effects`."""
    return effects(control[None], treatment[None], alpha=alpha)[0]


def bootstrap_lift(
    control: Floats, treatment: Floats, *, alpha: float = 0.05, rng: np.random.Generator | int, resamples: int = 2000
) -> tuple[float, float]:
    """Return the interval of the lift by the Poisson bootstrap over users (Chamandy et al., Google 2012).

    Each resample counts each user, with all its impressions, Poisson(1) times; the ends are quantiles of the lifts of
    all resamples. It needs no linearisation but much more time. Arms of more than 10,000 users are resampled in
    10,000 random blocks of users: O(users + resamples · 10,000) time and O(users) memory.

    Args:
        control, treatment: `[users, 2]`, x and y of each user.
        alpha: 1 − level of the interval.
        rng: a generator or a seed.
        resamples: number of resamples.

    >>> columns = np.stack([np.tile([0.0, 1.0, 2.0], 50), np.full(150, 10.0)], axis=1)
    >>> low, high = bootstrap_lift(columns, columns * [1.1, 1.0], rng=0)
    >>> abs(low + 0.086) < 0.02, abs(high - 0.324) < 0.03  # by the delta method −0.086 and 0.324
    (True, True)
    """
    check_alpha(alpha)
    generator = np.random.default_rng(rng)
    lifts = np.zeros(resamples)
    for columns, sign in ((control, -1), (treatment, 1)):
        block = random_blocks(len(columns), generator)
        sums = moments(columns, block, int(block.max()) + 1).sums
        at_once = max(1, _DRAWS_AT_ONCE // len(sums))
        for start in range(0, resamples, at_once):
            drawn = _poisson(generator, (min(at_once, resamples - start), len(sums))) @ sums
            with np.errstate(divide="ignore", invalid="ignore"):
                lifts[start : start + at_once] += sign * np.log(drawn[:, 0] / drawn[:, 1])
    if np.isnan(lifts).any():
        return nan, nan
    low, high = np.quantile(lifts, [alpha / 2, 1 - alpha / 2], method="nearest")
    return float(np.expm1(low)), float(np.expm1(high))


def _poisson(rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Draw from Poisson(1) with probabilities rounded to 2⁻¹⁶, in a fifth of the time of exact draws."""
    ends = np.round(pdtr(np.arange(9), 1.0) * 2**16).astype(np.int64)
    table = np.repeat(np.arange(9.0), np.diff(ends, prepend=0))
    return table[rng.integers(len(table), size=size, dtype=np.uint16)]


def critical_value(alpha: float) -> float:
    """Return the normal quantile z_{1−α/2}, also for α near 0.

    >>> round(critical_value(0.05), 3), round(critical_value(1e-20), 3)
    (1.96, 9.336)
    """
    return -float(ndtri(max(alpha / 2, 5e-324)))


def check_alpha(alpha: float) -> None:
    """Raise `ConfigError` unless alpha is between 0 and 1."""
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha must be between 0 and 1; got {alpha}")
