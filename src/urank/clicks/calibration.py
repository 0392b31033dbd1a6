"""Calibration of a click table by position, fitted on the validation split.

A click model may rank well and still predict 0.20 where one in ten is clicked; ratios and sums of its table are then
wrong. A `Calibration` maps the probabilities of each position, `log_ctr[rows, K] -> log_ctr[rows, K]`, by an increasing
curve. It is a torch module of operations that ONNX has, so that Python and an exported graph compute the same formula.

Both kinds shrink towards the identity: a position with few clicks moves little, one without rows not at all. An
increasing curve keeps the order of items within a position, but not between positions: `monotone` takes the running
minimum over positions, for families in which clicks never rise with k.

scikit-learn calibrates classifiers, not tables, and its `CalibratedClassifierCV` has no prior and no export; the
isotonic regression used here is scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, minimize
from scipy.special import expit
from torch import Tensor, nn
from torch.nn.functional import softplus

from urank.clicks.click_settings import CalibrationKind

Floats = NDArray[np.float64]

PRIOR_CLICKS = 20.0
"""Strength of the prior a = 1, b = 0 of a temperature, in clicks."""

KNOT_CLICKS = 1.0
"""Strength of the prior of each isotonic knot, the uncalibrated rate, in clicks."""

KNOTS = 32
LEAST_SLOPE = 0.05
FLOOR = 1e-6
"""Bounds of an isotonic curve: this and one minus this."""

# log P = −1e-7 is the last float32 below P = 1 that has a logit; `families.log1m_exp` clamps at the same place.
HIGHEST = -1e-7
_LOWEST = -50.0
_CHUNK_ROWS = 1024  # the ramps of that many rows fit the cache


class Calibration(nn.Module):
    """Identity, and base class of the other kinds. `forward(log_ctr[rows, K]) -> log_ctr[rows, K]`.

    Args:
        positions: K.
        numbers: the buffers named in `buffer_names`, `[K]` or `[K, J]` each.
        monotone: make every row of the result non-increasing in k.
    """

    kind: CalibrationKind = "none"
    buffer_names: tuple[str, ...] = ()

    def __init__(self, positions: int, *numbers: list[Any], monotone: bool = False) -> None:
        super().__init__()
        self.positions, self.monotone = positions, monotone
        for name, values in zip(self.buffer_names, numbers, strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32))

    def curve(self, log_ctr: Tensor) -> Tensor:
        """Apply the curve of each position to its column."""
        return log_ctr

    def forward(self, log_ctr: Tensor) -> Tensor:
        calibrated = self.curve(log_ctr)
        return running_minimum(calibrated) if self.monotone and self.kind != "none" else calibrated

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        numbers = {name: buffer.tolist() for name, buffer in self.named_buffers()}
        return {"kind": self.kind, "positions": self.positions, "monotone": self.monotone, **numbers}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Calibration:
        """Restore a calibration from `to_dict`.

        >>> values = fit_calibration("none", np.zeros(0), np.zeros(0, int), np.zeros(0), 3).to_dict()
        >>> Calibration.from_dict(values).to_dict() == values
        True
        """
        kind = _check_kind(values["kind"])
        return kind(values["positions"], *(values[each] for each in kind.buffer_names), monotone=values["monotone"])


class Temperature(Calibration):
    """Platt scaling by position (Platt 1999; temperature scaling, Guo et al. 2017, when b = 0).

        logit P'(click | item, k) = a_k · logit P(click | item, k) + b_k,      a_k > 0

    Its numbers are the slopes a `[K]` and the intercepts b `[K]`.
    """

    kind, buffer_names = "temperature", ("slope", "intercept")
    slope: Tensor
    intercept: Tensor

    def curve(self, log_ctr: Tensor) -> Tensor:
        return log_sigmoid(self.slope * logit_of_log(log_ctr) + self.intercept)


class Isotonic(Calibration):
    """Increasing piecewise-linear curve by position, from (0, 0) through the knots (x_j, y_j) to (1, 1).

        P' = Σ_j (y_{j+1} − y_j) · clip((P − x_j) / (x_{j+1} − x_j), 0, 1),      clipped to [1e-6, 1 − 1e-6]

    All terms of the sum are non-negative: unlike a sum of ReLUs it loses nothing to cancellation, and is increasing in
    float32 too.

    Its numbers are x_j, x_{j+1} − x_j and y_{j+1} − y_j, `[K, J]` each; positions with fewer pieces are padded with
    pieces of rise 0.
    """

    kind, buffer_names = "isotonic", ("start", "width", "rise")
    start: Tensor
    width: Tensor
    rise: Tensor

    def curve(self, log_ctr: Tensor) -> Tensor:
        ramps = torch.clamp((torch.exp(log_ctr)[:, :, None] - self.start) / self.width, 0.0, 1.0)
        return torch.log(torch.clamp((self.rise * ramps).sum(dim=2), FLOOR, 1 - FLOOR))


_KINDS: dict[str, type[Calibration]] = {each.kind: each for each in (Calibration, Temperature, Isotonic)}


def fit_calibration(
    kind: CalibrationKind,
    log_ctr: NDArray[Any],
    position: NDArray[Any],
    click: NDArray[Any],
    positions: int,
    *,
    monotone: bool = False,
) -> Calibration:
    """Fit a curve for each position to the clicks logged there.

    Args:
        kind: "temperature", "isotonic" or "none".
        log_ctr: `[rows]`, log P(click) before calibration, at the logged position.
        position, click: `[rows]`, the logged position, 1 … K, and 0 or 1.
        positions, monotone: as for `Calibration`.

    A model that predicts 0.2 where 0.1 is clicked:

    >>> rng = np.random.default_rng(0)
    >>> click = rng.random(100_000) < 0.1
    >>> log_ctr, position = np.full(100_000, np.log(0.2)), np.ones(100_000, dtype=int)
    >>> calibration = fit_calibration("temperature", log_ctr, position, click, positions=2)
    >>> np.exp(calibrate(calibration, np.log([[0.2, 0.2]]))).round(2).tolist()  # position 2 has no data
    [[0.1, 0.2]]
    """
    _check_kind(kind)
    log_ctr, position, click = _check_rows(log_ctr, position, click, positions)
    if kind == "none":
        return Calibration(positions, monotone=monotone)
    order = np.argsort(position, kind="stable")
    ends = np.cumsum(np.bincount(position - 1, minlength=positions))
    by_position = [(log_ctr[rows], click[rows]) for rows in np.split(order, ends[:-1])]
    if kind == "temperature":
        lines = [_fit_line(x, c) for x, c in by_position]
        return Temperature(positions, [a for a, _ in lines], [b for _, b in lines], monotone=monotone)
    knots = [_fit_knots(x, c) for x, c in by_position]
    pieces = max(len(x) for x, _ in knots) - 1
    start, width, rise = np.ones((positions, pieces)), np.ones((positions, pieces)), np.zeros((positions, pieces))
    for k, (x, y) in enumerate(knots):
        n = len(x) - 1
        start[k, :n], width[k, :n], rise[k, :n] = x[:-1], np.diff(x), np.diff(y)
    return Isotonic(positions, start.tolist(), width.tolist(), rise.tolist(), monotone=monotone)


def calibrate(calibration: Calibration, log_ctr: NDArray[Any]) -> NDArray[Any]:
    """Calibrate a table of log probabilities `[rows, K]`, in chunks of rows; the dtype stays."""
    if np.ndim(log_ctr) != 2 or log_ctr.shape[1] != calibration.positions:
        needed = f"[rows, {calibration.positions}]"
        raise ValueError(f"log_ctr must have shape {needed}; got shape {list(np.shape(log_ctr))}")
    result = np.empty_like(log_ctr)
    with torch.no_grad():
        for first in range(0, len(log_ctr), _CHUNK_ROWS):
            rows = slice(first, first + _CHUNK_ROWS)
            result[rows] = calibration(torch.from_numpy(log_ctr[rows].copy())).numpy()
    return result


def logit_of_log(log_p: Tensor) -> Tensor:
    """Compute logit P from log P < 0, stable at both ends, by operations that ONNX has (no expm1, no log1p).

        log(P / (1 − P)) = log P − log tanh(−log P / 2) − log(1 + P)

    >>> p = torch.tensor([1e-9, 0.25, 1 - 1e-4], dtype=torch.float64)
    >>> bool(torch.allclose(logit_of_log(torch.log(p)), torch.logit(p)))
    True
    """
    log_p = torch.clamp(log_p, max=HIGHEST)
    return log_p - torch.log(torch.tanh(-log_p / 2)) - softplus(log_p)


def log_sigmoid(x: Tensor) -> Tensor:
    """Compute log(1 / (1 + e⁻ˣ)) as −softplus(−x), the form in which it is exported.

    >>> bool(torch.isclose(log_sigmoid(torch.tensor(0.5)), torch.nn.functional.logsigmoid(torch.tensor(0.5))))
    True
    """
    return -softplus(-x)


def running_minimum(table: Tensor) -> Tensor:
    """Compute the running minimum of each row `[rows, K]`.

    >>> running_minimum(torch.tensor([[3.0, 1.0, 2.0]])).tolist()
    [[3.0, 1.0, 1.0]]
    """
    columns = (table[:, k] for k in range(table.shape[1]))
    return torch.stack(list(accumulate(columns, torch.minimum)), dim=1)


def _fit_line(log_ctr: Floats, click: Floats) -> tuple[float, float]:
    """Fit a and b of one position by cross-entropy with a data-based prior.

        Σ_rows H(click, P') + w · H(P, P'),      H(c, P') = −c log P' − (1 − c) log(1 − P')

    The second term is a ridge towards a = 1, b = 0 in the units of the data: the loss of `w` further rows for each row,
    clicked as the model predicts (a prior as in Clogg et al. 1991).
    """
    if len(click) == 0:
        return 1.0, 0.0
    p = np.exp(log_ctr)
    z = logit_of_log(torch.from_numpy(log_ctr)).numpy()
    centre = float(np.average(z, weights=p * (1 - p)))  # where slope and intercept are nearly uncorrelated
    spread = z - centre
    weight = float(prior_weight(PRIOR_CLICKS, len(p), p.mean(), click.mean()))
    target = (click + weight * p) / (1 + weight)
    scale = len(p) * max(p.mean(), click.mean())

    def objective(parameters: Floats) -> tuple[float, Floats]:
        tilt, level = parameters
        scores = z + tilt * spread + level
        residual = expit(scores) - target
        loss = np.logaddexp(0.0, scores).sum() - target @ scores
        return float(loss) / scale, np.array([residual @ spread, residual.sum()]) / scale

    bounds = [(LEAST_SLOPE - 1, None), (None, None)]
    options: Any = {"ftol": 1e-12, "gtol": 1e-8, "maxiter": 200}
    found = minimize(objective, np.zeros(2), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    tilt, level = (float(parameter) for parameter in found.x)
    return 1 + tilt, level - tilt * centre


def prior_weight(clicks: float, rows: Any, predicted: Any, observed: Any) -> Any:
    """Convert the strength of a prior from clicks to pseudo-rows per row.

        w = clicks / (rows · max(predicted (1 − predicted), observed (1 − observed)))

    r (1 − r) is the information a row at rate r has about its logit, so the unit is a click when clicks are rare, and a
    row without a click when clicks are the rule.

    >>> float(prior_weight(20, rows=1000, predicted=0.1, observed=0.0).round(3))  # 20 / (1000 · 0.1 · 0.9)
    0.222
    """
    return clicks / (rows * np.maximum(predicted * (1 - predicted), observed * (1 - observed)))


def _fit_knots(log_ctr: Floats, click: Floats) -> tuple[Floats, Floats]:
    """Fit the knots x and y of one position, both increasing, from (0, 0) to (1, 1), at most 32.

    The isotonic regression of the clicks on P (Zadrozny and Elkan 2002) is a step function. Its steps become knots, at
    the mean P of their rows as in centred isotonic regression (Oron and Flournoy 2017), which is strictly increasing
    and continuous; small neighbours are pooled. Each knot has a prior of one click at its x: the first and the last
    step tend to be 0 and 1, where a single contrary click would have infinite loss.
    """
    if len(click) == 0:
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    order = np.argsort(log_ctr, kind="stable")
    p, click = np.exp(log_ctr[order]), click[order]
    _, index, ties = np.unique(p, return_inverse=True, return_counts=True)
    fitted = isotonic_regression(np.bincount(index, click) / ties, weights=ties).x[index]
    step = np.cumsum(np.diff(fitted, prepend=fitted[0]) > 1e-12)
    knots = _pool(np.bincount(step), np.bincount(step, p), np.bincount(step, click))
    rows = knots[:, 0]
    x, observed = knots[:, 1] / rows, knots[:, 2] / rows
    weight = prior_weight(KNOT_CLICKS, rows, x, observed)
    y = np.maximum.accumulate((observed + weight * x) / (1 + weight))
    return np.concatenate([[0.0], x, [1.0]]), np.concatenate([[0.0], y, [1.0]])


def _pool(rows: NDArray[Any], total: NDArray[Any], clicks: NDArray[Any]) -> Floats:
    """Pool neighbouring steps: rows, sum of P and clicks `[knots, 3]`, at most 30 knots.

    The mean of a knot's share of the rows and its share of the expected clicks is at least a thirtieth, so that there
    are knots where the rows are and where the clicks are. Knots are 1 % apart: a steep piece would magnify rounding.
    """
    steps = np.column_stack([rows, total, clicks]).astype(np.float64)
    size = (rows / rows.sum() + total / total.sum()) / 2
    least = 1 / (KNOTS - 2)
    knots, sizes = [steps[0]], [size[0]]
    for step, share in zip(steps[1:], size[1:], strict=True):
        apart = step[1] / step[0] > 1.01 * knots[-1][1] / knots[-1][0] + FLOOR
        if sizes[-1] >= least and apart:
            knots.append(step)
            sizes.append(share)
        else:
            knots[-1] = knots[-1] + step
            sizes[-1] += share
    if sizes[-1] < least and len(knots) > 1:
        knots[-2:] = [knots[-2] + knots[-1]]
    return np.array(knots)


def _check_kind(kind: Any) -> type[Calibration]:
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}; got {kind!r}")
    return _KINDS[kind]


def _check_rows(
    log_ctr: NDArray[Any], position: NDArray[Any], click: NDArray[Any], positions: int
) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Validate the rows; clip log P to where it has a logit."""
    if not np.shape(log_ctr) == np.shape(position) == np.shape(click) or np.ndim(click) != 1:
        shapes = "{}, {} and {}".format(*(list(np.shape(each)) for each in (log_ctr, position, click)))
        raise ValueError(f"log_ctr, position and click must have the same shape [rows]; got shapes {shapes}")
    if positions < 1:
        raise ValueError(f"positions must be from 1 up; got {positions}")
    checks = {
        "log_ctr must be the log of a probability": (log_ctr, log_ctr <= 1e-6),
        f"position must be from 1 to {positions}": (position, (position >= 1) & (position <= positions)),
        "click must be 0 or 1": (click, (click == 0) | (click == 1)),
    }
    for requirement, (values, sound) in checks.items():
        if not sound.all():
            row = int(np.argmin(sound))
            raise ValueError(f"{requirement}; got {values[row]} at row {row}")
    bounded = np.clip(np.asarray(log_ctr, dtype=np.float64), _LOWEST, HIGHEST)
    return bounded, np.asarray(position, dtype=np.int64), np.asarray(click, dtype=np.float64)
