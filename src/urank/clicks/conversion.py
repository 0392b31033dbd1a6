"""The conversion rate c(i) = P(conversion | click, i), by which a click table becomes one of conversions.

    P(conversion | i, k) = P(click | i, k) · c(i),     logit c(i) = b + w'z_i + Σ_f v_f[category f of i]

z are the standardised inputs of networks, within-list columns included. Conversions are few, so this is a ridge
regression: columns that all items of a list share have one penalty, the others a second. Each is the largest whose
held-out log loss is within a standard error of the best; an infinite one drops its columns. If the log does not support
that conversion differs by item, c is the same for all items of a list, and the order is that of clicks. The position is
not an input: it decides who clicks, not who converts after a click.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit, logit
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

from urank import distributed
from urank.clicks.shrunk import in_words, standard_score
from urank.errors import DataError
from urank.learning.features import Featurizer, Inputs
from urank.learning.networks import FeatureLayer
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids

PENALTIES = (inf, 1000.0, 300.0, 100.0, 30.0, 10.0)
"""Penalties of a squared weight, in clicks: 100 is a prior standard deviation of 0.1 in logits."""
INTERCEPT_PENALTY = 1e-3
FOLDS = 4
MOST_CLICKS, CHOICE_CLICKS = 50_000, 20_000
"""Clicks the rate is fitted on, at most, and clicks the penalties are chosen on."""
CELL_BYTES = 64
"""Memory of an entry of the regression: its column, the sparse or dense copies of it, and its indicator."""

Floats = NDArray[np.float64]


class ConversionRate(nn.Module):
    """The regression as a module: raw inputs in, log c `[rows]` out; c = ½ before it is fitted."""

    def __init__(self, featurizer: Featurizer) -> None:
        super().__init__()
        self.features = FeatureLayer(featurizer)
        self.bias = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(1, self.features.width))
        self.categories = nn.ParameterList(torch.zeros(n, 1) for n in featurizer.cardinalities)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        logits = linear(self.features(numeric), self.weight, self.bias)
        for place, table in enumerate(self.categories):
            logits = logits + table[categorical[:, place]]
        return logsigmoid(logits[:, 0])

    def log_rate(self, inputs: Inputs) -> NDArray[np.float32]:
        """Predict log c `[rows]`."""
        with torch.inference_mode():
            log_c: Tensor = self(torch.from_numpy(inputs.numeric), torch.from_numpy(inputs.categorical))
            return log_c.numpy()

    def set_weights(self, weights: Sequence[float]) -> None:
        """Set intercept, weights of the numbers and weights of the categories, in the order of `_columns`."""
        nn.utils.vector_to_parameters(torch.tensor(weights), self.parameters())


@dataclass(frozen=True)
class ConversionEvidence:
    """What the clicks of the train split say about conversion: standard scores of the held-out gain from a rate that
    differs by list, and from one that also differs by item."""

    lists: float
    items: float

    @property
    def sentence(self) -> str:
        """What the log supports, in words.

        >>> ConversionEvidence(3.0, 0.0).sentence
        'conversion differs by list: yes; by item: no sign of it, so the order is that of clicks'
        """
        so = "" if self.items > 0 else ", so the order is that of clicks"
        return f"conversion differs by list: {in_words(self.lists)}; by item: {in_words(self.items)}{so}"


def fit_conversions(dataset: Dataset, featurizer: Featurizer) -> tuple[ConversionRate, ConversionEvidence]:
    """Fit the conversion rate on the clicked impressions of the train split, in the first process."""
    rate = ConversionRate(featurizer)

    def fitted() -> dict[str, Any]:
        inputs, converted, query, shared = _clicks(dataset, featurizer)
        if not converted.any():
            raise DataError(f"no click of the train split of {dataset.folder} led to a conversion; use --goal clicks")
        columns = _columns(rate.features, featurizer, inputs)
        of_list = np.zeros(columns.shape[1], dtype=bool)
        of_list[1 : 1 + len(shared)] = shared
        groups, few = (of_list, ~of_list & (np.arange(len(of_list)) > 0)), slice(CHOICE_CLICKS)
        penalty, scores = choose_penalties(columns[few], converted[few], query[few], groups)
        return {"weights": fit_logistic(columns, converted, penalty).tolist(), "scores": scores}

    found = distributed.broadcast(fitted)
    rate.set_weights(found["weights"])
    return rate, ConversionEvidence(*found["scores"])


def _clicks(dataset: Dataset, featurizer: Featurizer) -> tuple[Inputs, Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """Read the first clicked impressions of the train split.

    Returns inputs, conversions, numbers of the queries, and which numeric inputs are shared by all items of a list.
    """
    most = min(MOST_CLICKS, dataset.memory.held_bytes // (CELL_BYTES * featurizer.width))
    parts, rows, shared = [], 0, np.ones(len(featurizer.inputs), dtype=bool)
    for block in dataset.blocks("train", [*featurizer.names, "position", "click", "conversion"]):
        inputs, shown = featurizer.encode_shown(block, dataset.positions)
        clicked, lists = np.flatnonzero(shown.column("click")), list_ids(shown.offsets)
        first = inputs.numeric[shown.offsets[lists]]
        shared &= ((inputs.numeric == first) | (np.isnan(inputs.numeric) & np.isnan(first))).all(axis=0)
        columns = shown.column("conversion"), shown.query_hash[lists]
        parts.append([each[clicked] for each in (inputs.numeric, inputs.categorical, *columns)])
        rows += len(clicked)
        if rows >= most:
            break
    numeric, categorical, converted, query = (np.concatenate(part)[:most] for part in zip(*parts, strict=True))
    number = np.unique(query, return_inverse=True)[1]
    return Inputs(numeric, categorical), converted.astype(np.float64), number, shared


def _columns(features: FeatureLayer, featurizer: Featurizer, inputs: Inputs) -> Any:
    """Return the columns of the regression: 1, the scaled numbers, and an indicator of each category (then sparse)."""
    scaled = features(torch.from_numpy(inputs.numeric)).double().numpy()
    dense = np.column_stack([np.ones(len(scaled)), scaled])
    if not featurizer.categorical:
        return dense
    rows = np.arange(len(scaled))
    indicators = [
        sparse.csr_array((np.ones(len(rows)), (rows, codes)), shape=(len(rows), n))
        for codes, n in zip(inputs.categorical.T, featurizer.cardinalities, strict=True)
    ]
    return sparse.hstack([sparse.csr_array(dense), *indicators], format="csr")


def choose_penalties(
    columns: Any, converted: Floats, query: NDArray[np.int64], groups: Sequence[NDArray[np.bool_]]
) -> tuple[Floats, list[float]]:
    """Choose the penalty of one group of columns after the other, by cross-validation over queries.

    Args:
        columns: `[rows, width]`, of which the first is the intercept.
        converted, query: `[rows]`, whether a click was followed by a conversion, and the number of its query.
        groups: `[width]` each, the columns that share a penalty.

    Returns:
        the penalty of each column, infinite where it is to be left out, and for each group by how many standard errors
        it lowers the held-out loss.
    """
    penalty = np.append(INTERCEPT_PENALTY, np.full(columns.shape[1] - 1, inf))
    scores = []
    for group in groups:
        losses: dict[float, Floats] = {}
        for each in PENALTIES if group.any() else (inf,):
            losses[each] = _held_out_losses(columns, converted, query, np.where(group, each, penalty))
            if losses[each].sum() > min(other.sum() for other in losses.values()):
                break
        chosen = largest_within_error(losses)
        penalty[group] = chosen
        scores.append(standard_score(losses[chosen], losses[inf]))
    return penalty, scores


def largest_within_error(losses: Mapping[float, Floats]) -> float:
    """Return the largest penalty whose loss, over queries `[queries]`, is within a standard error of the best.

    >>> largest_within_error({inf: np.array([3.0, 3.0]), 10.0: np.array([2.0, 2.1]), 1.0: np.array([2.1, 1.9])})
    10.0
    """
    best = min(losses, key=lambda penalty: float(losses[penalty].sum()))
    return max(p for p in losses if p == best or standard_score(losses[best], losses[p]) <= 1)


def _held_out_losses(columns: Any, converted: Floats, query: NDArray[np.int64], penalty: Floats) -> Floats:
    """Compute the log loss of each query `[queries]` by regressions that did not see it."""
    losses = np.zeros(len(converted))
    for fold in range(FOLDS):
        out = query % FOLDS == fold
        if out.any() and not out.all():
            logits = columns[out] @ fit_logistic(columns[~out], converted[~out], penalty)
            losses[out] = np.logaddexp(0, logits) - converted[out] * logits
    return np.asarray(np.bincount(query, losses), dtype=np.float64)


def fit_logistic(columns: Any, outcome: Floats, penalty: Floats) -> Floats:
    """Fit a ridge logistic regression by L-BFGS.

        minimise  Σ_n log(1 + exp(x_n'w)) − y_n x_n'w  +  ½ Σ_j λ_j (w_j − m_j)²

    Args:
        columns: x `[rows, width]`, dense or sparse; the first column is 1.
        outcome: y `[rows]`, 0 or 1.
        penalty: λ `[width]`; a weight with an infinite one is 0.

    m is the log-odds of the mean outcome for the intercept and 0 for the others.
    """
    rows, kept = len(outcome), np.flatnonzero(np.isfinite(penalty))
    x, strength = columns[:, kept], penalty[kept] / rows
    centre = np.zeros(len(kept))
    centre[0] = logit((outcome.sum() + 0.5) / (rows + 1))

    def objective(weights: Floats) -> tuple[float, Floats]:
        logits, off = x @ weights, weights - centre
        value = float(np.mean(np.logaddexp(0, logits) - outcome * logits) + 0.5 * strength @ off**2)
        return value, x.T @ (expit(logits) - outcome) / rows + strength * off

    weights = np.zeros(columns.shape[1])
    weights[kept] = minimize(objective, centre, jac=True, method="L-BFGS-B", options={"gtol": 1e-6, "maxiter": 500}).x
    return weights
