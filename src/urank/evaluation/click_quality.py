"""Quality of click models: log loss, AUC and calibration of predictions at the logged positions.

Log loss, the training objective, measures ranking and calibration together, AUC the order of rows only, the expected
calibration error the rates only. All are pure functions of flat arrays, a row for each impression, and scale to tens of
millions of rows; `quality` computes them over all rows and by position. An undefined figure, such as the AUC of rows
without a click, is NaN.

scikit-learn's log loss takes probabilities, which lose precision near 0, and returns a single number; the tests compare
with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank.config import to_jsonable
from urank.log.inspection import wilson_interval

# As in training (clicks.families.click_loss): predicting 1 without a click has a loss of 16, not infinity.
_HIGHEST = -1e-7


def log_loss_metric(log_p: NDArray[Any], click: NDArray[Any]) -> NDArray[np.float64]:
    """Compute the log loss of each row (Eq. 2) in log space, numerically stable at both ends.

        −click · log p − (1 − click) · log(1 − p)

    Args:
        log_p: `[rows]`, the log of the predicted click probability.
        click: `[rows]`, 0 or 1.

    >>> log_loss_metric(np.log([0.25, 0.5]), np.array([1, 0])).round(4).tolist()  # −log 0.25, −log(1 − 0.5)
    [1.3863, 0.6931]
    """
    log_p, clicked = _check(log_p, click, "log_p")
    bounded = np.minimum(log_p, _HIGHEST)
    # Each form of log(1 − eˣ) is exact on its side of log ½ (Mächler 2012).
    near, far = np.log(-np.expm1(np.maximum(bounded, -1.0))), np.log1p(-np.exp(bounded))
    return np.where(clicked, np.maximum(-log_p, 0.0), -np.where(bounded > -np.log(2), near, far))


def auc_metric(score: NDArray[Any], click: NDArray[Any]) -> float:
    """Compute the area under the ROC curve: the share of pairs in which the clicked row scores higher, ties half.

        AUC = (|{(i, j) : s_i > s_j}| + ½ |{(i, j) : s_i = s_j}|) / (clicked · not clicked),   i clicked, j not

    Args:
        score: `[rows]`, any increasing function of the click probability.
        click: `[rows]`, 0 or 1.

    Returns:
        From 0 to 1; NaN if all rows were clicked or none was.

    >>> auc_metric(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))  # (3 + ½) / (2 · 2)
    0.875
    """
    score, clicked = _check(score, click, "score")
    above, below = np.sort(score[clicked]), np.sort(score[~clicked])
    if len(above) == 0 or len(below) == 0:
        return float("nan")
    # Integer counts, so that the AUC of a reversed score is exactly the complement.
    twice = np.searchsorted(below, above, side="left").sum() + np.searchsorted(below, above, side="right").sum()
    return int(twice) / (2 * len(above) * len(below))


@dataclass(frozen=True)
class Reliability:
    """Predicted and observed click rates and rows by bin, rising with the prediction.

    `low` and `high` are the 95 % interval of the observed rate (Wilson).
    """

    predicted: list[float]
    observed: list[float]
    count: list[int]
    low: list[float]
    high: list[float]


def reliability(p: NDArray[Any], click: NDArray[Any], bins: int = 15) -> Reliability:
    """Compute predicted and observed rates in bins of about equally many rows, for a reliability plot.

    Rows with equal predictions share a bin, so the order of rows does not matter, and a model with few distinct
    predictions has fewer bins.

    Args:
        p: `[rows]`, the predicted click probability.
        click: `[rows]`, 0 or 1.
        bins: the most bins.

    >>> found = reliability(np.array([0.1, 0.1, 0.6, 0.8]), np.array([0, 0, 1, 0]), bins=2)
    >>> found.predicted, found.observed, found.count
    ([0.1, 0.7], [0.0, 0.5], [2, 2])
    """
    p, clicked = _check(p, click, "p")
    if bins < 1:
        raise ValueError(f"bins must be from 1 up; got {bins}")
    if len(p) == 0:
        return Reliability([], [], [], [], [])
    edges = np.unique(np.sort(p)[len(p) * np.arange(1, bins) // bins])
    number = np.searchsorted(edges, p, side="right")
    count = np.bincount(number)
    total, clicks = np.bincount(number, p), np.bincount(number, clicked)
    filled = count > 0
    count, total, clicks = count[filled], total[filled], clicks[filled]
    low, high = wilson_interval(clicks.astype(np.int64), count)
    return Reliability((total / count).tolist(), (clicks / count).tolist(), count.tolist(), low.tolist(), high.tolist())


def expected_calibration_error(p: NDArray[Any], click: NDArray[Any], bins: int = 15) -> float:
    """Compute the expected calibration error (Naeini et al. 2015), over bins of about equally many rows.

        ECE = Σ_bins rows in bin / rows · |mean p of the bin − click rate of the bin|

    By chance, a perfect model has about √(2 / π) · √(rate (1 − rate) · bins / rows), so compare models on the same rows
    only. Arguments as for `reliability`.

    >>> round(expected_calibration_error(np.array([0.1, 0.1, 0.6, 0.8]), np.array([0, 0, 1, 0]), bins=2), 4)
    0.15
    """
    found = reliability(p, click, bins)
    count, gap = np.array(found.count), np.abs(np.array(found.predicted) - np.array(found.observed))
    return float(count @ gap / count.sum()) if len(count) > 0 else float("nan")


@dataclass(frozen=True)
class Quality:
    """The quality of predictions over some rows, and by position: K entries, empty within those."""

    rows: int
    clicks: int
    log_loss: float
    auc: float
    ece: float
    predicted: float
    observed: float
    by_position: tuple[Quality, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, with None for figures that are not finite."""
        figures = {name: to_jsonable(value) for name, value in vars(self).items() if name != "by_position"}
        return figures | ({"by_position": [each.to_dict() for each in self.by_position]} if self.by_position else {})


def quality(log_p: NDArray[Any], position: NDArray[Any], click: NDArray[Any], *, positions: int) -> Quality:
    """Compute all figures, over all rows and by position.

    Args:
        log_p: `[rows]`, the log of the predicted click probability at the logged position.
        position: `[rows]`, that position, 1 … K.
        click: `[rows]`, 0 or 1.
        positions: K.

    >>> found = quality(np.log([0.5, 0.25, 0.5]), np.array([1, 2, 1]), np.array([1, 0, 0]), positions=2)
    >>> found.rows, found.clicks, found.auc, [each.rows for each in found.by_position]
    (3, 1, 0.75, [2, 1])
    """
    log_p, clicked = _check(log_p, click, "log_p")
    if np.shape(position) != log_p.shape:
        raise ValueError(f"position must have shape {list(log_p.shape)}; got shape {list(np.shape(position))}")
    if len(position) > 0 and not (position.min() >= 1 and position.max() <= positions):
        raise ValueError(f"position must be from 1 to {positions}; got {position.min()} to {position.max()}")
    order = np.argsort(position, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(position - 1, minlength=positions))])
    by_position = [_quality(log_p[order[a:b]], clicked[order[a:b]]) for a, b in pairwise(ends)]
    return replace(_quality(log_p, clicked), by_position=tuple(by_position))


def _quality(log_p: NDArray[np.float64], clicked: NDArray[np.bool_]) -> Quality:
    rows, clicks = len(clicked), int(clicked.sum())
    if rows == 0:
        return Quality(0, 0, nan, nan, nan, nan, nan)
    p, log_loss = np.exp(log_p), float(log_loss_metric(log_p, clicked).mean())
    ece = expected_calibration_error(p, clicked)
    return Quality(rows, clicks, log_loss, auc_metric(log_p, clicked), ece, float(p.mean()), clicks / rows)


def table_error(log_table: NDArray[Any], true_table: NDArray[Any]) -> dict[str, Any]:
    """Compute the error of a click table, given the true one of a simulation.

        mean absolute error = mean over items i and positions k of |exp(log_table[i, k]) − true_table[i, k]|

    Args:
        log_table: `[rows, K]`, the log of the predicted click probability of each item at each position.
        true_table: `[rows, K]`, the true probabilities.

    Returns:
        `mean_absolute_error`, and `by_position`, the K errors that it averages.

    >>> error = table_error(np.log([[0.5, 0.25]]), np.array([[0.75, 0.25]]))
    >>> error["mean_absolute_error"], error["by_position"]
    (0.125, [0.25, 0.0])
    """
    shapes = [list(np.shape(each)) for each in (log_table, true_table)]
    if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
        given = f"got shapes {shapes[0]} and {shapes[1]}"
        raise ValueError(f"log_table and true_table must have the same shape [rows, K]; {given}")
    # By column, to avoid a second table in float64.
    by_position = [
        float(np.abs(np.exp(predicted, dtype=np.float64) - true).mean())
        for predicted, true in zip(log_table.T, true_table.T, strict=True)
    ]
    return {"mean_absolute_error": float(np.mean(by_position)), "by_position": by_position}


def _check(values: NDArray[Any], click: NDArray[Any], name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Validate, and return the values as float64 and which rows were clicked."""
    shapes = [list(np.shape(each)) for each in (values, click)]
    if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
        raise ValueError(f"{name} and click must have the same shape [rows]; got shapes {shapes[0]} and {shapes[1]}")
    values, click = np.asarray(values, dtype=np.float64), np.asarray(click)
    clicked = click == 1
    not_binary = ~clicked & (click != 0)
    for requirement, given, wrong in (
        (f"{name} must be a number", values, np.isnan(values)),
        ("click must be 0 or 1", click, not_binary),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(f"{requirement}; got {given[row]} at row {row}")
    return values, clicked
