"""Intervention harvesting with all pairs of positions (Agarwal et al. 2019): one curve, without randomisation.

An item that some lists showed at k and others at k' has the same relevance at both, so its clicks compare the two
positions. That takes lists of the same query that differ by the ranker that made them, not by the user who asked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logit

from urank.log.dataset import Dataset
from urank.propensity.model import Curve
from urank.propensity.pairs import check_joined, harvested, weighted_clicks

__all__ = ["fit_harvest", "harvest_curve", "harvest_loss", "pair_numbers"]

Floats = NDArray[np.float64]


def pair_numbers(K: int) -> NDArray[np.int64]:
    """A number for each unordered pair of positions `[K, K]`, the same for (k, k') and (k', k); the diagonal is 0.

    >>> pair_numbers(3).tolist()
    [[0, 0, 1], [0, 0, 2], [1, 2, 0]]
    """
    numbers = np.zeros((K, K), dtype=np.int64)
    upper = np.triu_indices(K, 1)
    numbers[upper] = np.arange(len(upper[0]))
    return numbers + numbers.T


def harvest_loss(parameters: Floats, clicked: Floats, not_clicked: Floats) -> tuple[float, Floats]:
    """The negative log likelihood, by weight of one showing, and its gradient (Agarwal et al. 2019, Eq. 9).

        − Σ_{k≠k'} [ĉ[k, k'] log(p_k r_kk') + ¬ĉ[k, k'] log(1 − p_k r_kk')] / Σ (ĉ + ¬ĉ)

    Args:
        parameters: `[K + K(K − 1)/2]`, the logits of p_k, then those of r_kk', numbered as `pair_numbers` does.
        clicked: ĉ `[K, K]`, 0 on the diagonal.
        not_clicked: ¬ĉ `[K, K]`, likewise.
    """
    K = len(clicked)
    pair = pair_numbers(K)
    of_position, of_pair = parameters[:K], parameters[K:]
    log_rate = log_expit(of_position)[:, None] + log_expit(of_pair)[pair]
    unclicked = -np.expm1(log_rate)
    total = clicked.sum() + not_clicked.sum()
    loss = -(clicked * log_rate + not_clicked * np.log(np.maximum(unclicked, 1e-300))).sum() / total
    by_log_rate = -(clicked - not_clicked * np.exp(log_rate) / np.maximum(unclicked, 1e-300)) / total
    gradient = np.concatenate(
        [
            by_log_rate.sum(axis=1) * expit(-of_position),
            np.bincount(pair.ravel(), weights=by_log_rate.ravel(), minlength=len(of_pair)) * expit(-of_pair),
        ]
    )
    return float(loss), gradient


def harvest_curve(clicked: NDArray[np.float64], not_clicked: NDArray[np.float64]) -> Floats:
    """p(k) / p(1) `[K]` that makes the weighted clicks most likely.

    Args:
        clicked: ĉ `[K, K]`, 0 on the diagonal.
        not_clicked: ¬ĉ `[K, K]`, likewise.

    >>> p, shown = np.array([1, 0.5]), np.array([[0, 100], [100, 0]])  # 100 items of relevance 0.3, seen at both
    >>> harvest_curve(shown * 0.3 * p[:, None], shown * (1 - 0.3 * p[:, None])).round(4).tolist()
    [1.0, 0.5]
    """
    K = len(clicked)
    if K == 1:
        return np.ones(1)
    upper = np.triu_indices(K, 1)
    both = clicked + clicked.T
    rate = both / np.maximum(both + not_clicked + not_clicked.T, 1e-12)
    # p starts at ½, the middle of its range, and r where it explains the clicks of its pair.
    start = np.concatenate([np.zeros(K), logit(np.clip(2 * rate[upper], 1e-3, 0.9))])
    found = minimize(
        harvest_loss,
        start,
        args=(clicked, not_clicked),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 20_000, "maxfun": 40_000, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-10},
    )
    log_p = log_expit(found.x[:K])
    return np.asarray(np.exp(log_p - log_p[0]))


def fit_harvest(dataset: Dataset, split: str = "train") -> Curve:
    """One curve from the items that the lists of a query showed at different positions.

    Args:
        dataset: a prepared log that names its items and shows queries more than once.
        split: the part of it that is looked at.

    Raises:
        DataError: when a position is not joined to position 1 by any items.
    """
    clicked, not_clicked = weighted_clicks(harvested(dataset, split))
    check_joined(clicked, f"the {split} split of {dataset.folder}")
    return Curve("harvest", tuple(harvest_curve(clicked, not_clicked).tolist()))
