"""Features scaled to [0, 1], as the attention bias of the oracle wants them.

The paper's data sets come with features of very different kinds. Raw counts and lengths have heavy tails: dividing by
the largest value leaves nearly all documents at 0, where wᵀx tells no two of them apart. Hence the logarithm first.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.log.lists import list_ids
from urank.scaling import signed_log

__all__ = ["Scaling", "query_means", "scale01", "scaling_bounds"]

Scaling = Literal["minmax", "log", "rank"]


def scaling_bounds(features: NDArray[Any], method: Scaling) -> NDArray[np.float64]:
    """The lowest and highest finite value of each column `[2, F]`, after the logarithm for `log`.

    >>> scaling_bounds(np.array([[1.0, np.nan], [3.0, 5.0]]), "minmax").tolist()
    [[1.0, 5.0], [3.0, 5.0]]
    """
    if method not in get_args(Scaling):
        raise ConfigError(f"scaling must be one of {', '.join(get_args(Scaling))}; got {method!r}")
    # The logarithm keeps the order, so that of the bounds is enough; the data may be large.
    finite = np.isfinite(features)
    known = finite.any(axis=0)
    low = np.where(known, np.min(features, axis=0, where=finite, initial=np.inf), 0)
    high = np.where(known, np.max(features, axis=0, where=finite, initial=-np.inf), 0)
    bounds: NDArray[np.float64] = np.stack([low, high]).astype(np.float64)
    return signed_log(bounds) if method == "log" else bounds


def scale01(
    features: NDArray[Any], method: Scaling = "log", *, bounds: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Features `[rows, F]` scaled to [0, 1], each column over the whole data set. Constant columns and NaN become 0.

    Args:
        features: raw features.
        method: `minmax`: (x − low) / (high − low). `log`: the same after `signed_log`. `rank`: the share of rows with a
            smaller value (the empirical distribution function), stretched so that the largest value gets 1.
        bounds: from `scaling_bounds`, to scale new rows as the old ones were; beyond them the result is cut to [0, 1].

    >>> scale01(np.array([[0.0, 7.0], [1.0, 7.0], [3.0, np.nan]])).round(3).tolist()
    [[0.0, 0.0], [0.5, 0.0], [1.0, 0.0]]
    >>> scale01(np.array([[0.0], [0.0], [9.0], [1e9]]), "rank").ravel().round(3).tolist()
    [0.0, 0.0, 0.667, 1.0]
    """
    if method == "rank":
        if bounds is not None:
            raise ConfigError("scaling by rank has no bounds: it compares the rows given with one another")
        return _scale_by_rank(np.asarray(features, dtype=np.float64))
    low, high = scaling_bounds(features, method) if bounds is None else bounds
    x = signed_log(features) if method == "log" else np.asarray(features, dtype=np.float64)
    width = np.where(high > low, high - low, 1.0)
    scaled = np.clip((x - low) / width, 0, 1)
    return np.where(np.isnan(scaled) | (high <= low), 0.0, scaled)


def _scale_by_rank(features: NDArray[np.float64]) -> NDArray[np.float64]:
    below = np.zeros(features.shape)
    for column, target in zip(features.T, below.T, strict=True):
        known = ~np.isnan(column)
        target[known] = np.searchsorted(np.sort(column[known]), column[known], side="left")
    scaled: NDArray[np.float64] = below / np.maximum(below.max(axis=0, initial=0), 1)
    return scaled


def query_means(x: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean feature vector of its query, for each row `[rows, F]`: the context of CPBM.

    >>> query_means(np.array([[0.0], [1.0], [0.2]]), np.array([0, 2, 3])).ravel().tolist()
    [0.5, 0.5, 0.2]
    """
    sums = np.zeros((len(offsets) - 1, x.shape[1]))
    filled = np.diff(offsets) > 0
    sums[filled] = np.add.reduceat(x.astype(np.float64), offsets[:-1][filled], axis=0) if filled.any() else 0
    means: NDArray[np.float64] = (sums / np.maximum(np.diff(offsets), 1)[:, None])[list_ids(offsets)]
    return means
