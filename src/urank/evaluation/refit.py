"""Refitted click models: the representation of networks trained on other queries, re-estimated on held-out clicks.

A held-out split is too small to learn from scratch how clicks fall with position for each item, and the table that a
policy was optimised on flatters that policy. So two networks, trained on halves of the train split, provide the
representation f of an item, and the numbers are estimated on the clicks of the evaluation itself:

    log q(x, k) = log σ(a(x) + f'α) − softplus(s(x) + f'γ) · g(k),      g(k) = Σ_{l<k} softplus(τ_l)

with a, s and τ₀ of the network and f = [1, last hidden layer, numeric features], standardised. α = γ = 0 and τ = τ₀ is
the network itself. The click log-likelihood of the evaluated queries minus

    ½ · 10 · (|α|² + |γ|²) + ½ |τ − τ₀|²      (intercepts are nearly free)

is maximised by Fisher scoring. With k_i the position that a policy gives item i and k_i^log the logged one, its gain
per list is

    θ = mean of Σ_i b_i · (q(i, k_i) − q(i, k_i^log))

so items that do not move cancel. Re-estimation is part of the error: with H the Fisher information plus the penalty,
S_q the score of query q, n_q its lists, and N all lists, the influence of a query is

    φ_q = (v_q − θ n_q) / N + g'H⁻¹ (S_q − mean S),      g = ∂θ/∂(α, γ, τ),  v_q = Σ over the lists of q

It is averaged over both networks (related: debiased machine learning with a Riesz representer in the span of f).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit

from urank import distributed
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.families import MonotoneHead
from urank.learning.features import Inputs
from urank.learning.networks import Perceptron

RIDGE, FREE = 10.0, 1e-3
"""Penalty of α and γ, and that of their intercepts."""

MOST_STEPS = 25
CONVERGED = 1e-2
"""Gain in log-likelihood that a further step promises, below which there is none."""

CHUNK_ROWS = 2**15
LARGEST = 1 - 1e-6
"""Largest click probability."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The rows of an evaluation.

    Attributes:
        inputs: encoded items `[rows]`.
        position, click, value: `[rows]`; an item beyond position K was not shown.
        query: `[rows]`, the hash of the query of each row.
        list_query: `[lists]`, the hash of the query of each list.
        home: `[cuts, rows]`, the network of each cut that represents a row.
        orders: `[rows]` of each policy, the positions it gives.
    """

    inputs: Inputs
    position: Ints
    click: Floats
    value: Floats
    query: NDArray[np.uint64]
    list_query: NDArray[np.uint64]
    home: NDArray[np.int64]
    orders: Sequence[Ints]


@dataclass(frozen=True, eq=False)
class Refitted:
    """What refitted click models estimate.

    Attributes:
        tables: `[rows, K]` of each cut, P(click | item, k).
        gains: `[policies, places, cuts]`, θ by the networks of each cut.
        influence: `[policies, places, queries]`, φ_q averaged over the cuts; queries in rising order of their hash.
        degrees: effective number of refitted parameters.
    """

    tables: list[NDArray[np.float32]]
    gains: Floats
    influence: Floats
    degrees: float


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that one network represents; `logged` is 0 for items that were not shown."""

    features: NDArray[np.float32]
    relevance: Floats
    slope: Floats
    logged: Ints
    click: Floats

    def chunks(self) -> Iterator[slice]:
        return (slice(start, start + CHUNK_ROWS) for start in range(0, len(self.click), CHUNK_ROWS))


@dataclass(frozen=True, eq=False)
class _Parameters:
    alpha: Floats
    gamma: Floats
    steps: Floats

    @property
    def curve(self) -> Floats:
        """g(k) `[K]`."""
        return np.append(0.0, np.cumsum(np.logaddexp(0, self.steps)))

    @property
    def curve_steps(self) -> Floats:
        """∂g(k)/∂τ_l `[K, K − 1]`."""
        K = len(self.steps) + 1
        return np.tril(np.ones((K, K - 1)), -1) * expit(self.steps)

    def moved(self, step: Floats) -> _Parameters:
        width = len(self.alpha)
        parts = step[:width], step[width : 2 * width], step[2 * width :]
        return _Parameters(self.alpha + parts[0], self.gamma + parts[1], self.steps + parts[2])


@dataclass(frozen=True, eq=False)
class _Point:
    """The model at some rows: σ(a + f'α), the slope with its derivative, and g with its derivative."""

    chance: Floats
    slope: Floats
    slope_rate: Floats
    curve: Floats
    curve_steps: Floats

    @classmethod
    def of(cls, rows: _Rows, at: slice, found: _Parameters) -> _Point:
        features = rows.features[at]
        slope = rows.slope[at] + features @ found.gamma
        chance = expit(rows.relevance[at] + features @ found.alpha)
        return cls(chance, np.logaddexp(0, slope), expit(slope), found.curve, found.curve_steps)

    @property
    def table(self) -> Floats:
        """P(click) `[rows, K]`."""
        return np.minimum(self.chance[:, None] * np.exp(-self.slope[:, None] * self.curve), LARGEST)

    def at(self, position: Ints) -> Floats:
        """g `[rows]` at 1-based positions; 0 at position 0."""
        return np.append(0.0, self.curve)[position]

    def q(self, position: Ints) -> Floats:
        """P(click) `[rows]` at 1-based positions; 0 at position 0."""
        found = np.minimum(self.chance * np.exp(-self.slope * self.at(position)), LARGEST)
        return np.where(position > 0, found, 0.0)

    def derivatives(self, position: Ints) -> tuple[Floats, Floats, Floats]:
        """∂ log q / ∂(a + f'α), ∂(s + f'γ) `[rows]` and ∂τ `[rows, K − 1]`; 0 at position 0."""
        placed = position > 0
        by_step = np.concatenate([np.zeros((1, self.curve_steps.shape[1])), self.curve_steps])[position]
        return placed * (1 - self.chance), -self.slope_rate * self.at(position), -self.slope[:, None] * by_step


def refit(
    cuts: Sequence[Sequence[ClickModel]], held_out: HeldOut, places: Sequence[int], report: Callable[[int], None]
) -> Refitted:
    """Refit the networks of each cut on held-out clicks, and estimate the gains of policies over the logged order.

    In a process group, each worker passes its own rows, and gets its own tables and the influence of all queries.

    Args:
        cuts: for each cut, one network for all queries, or one for each half of them.
        held_out: rows and policies.
        places: cutoffs, counting that many first positions.
        report: called with the number of networks that were refitted.
    """
    shape = (len(held_out.orders), len(places))
    queries = np.unique(np.concatenate([_from_bytes(each) for each in _all_gather(held_out.list_query)]))
    counts = np.bincount(np.searchsorted(queries, held_out.list_query), minlength=len(queries))
    lists = _all_reduce(counts.astype(np.float64))
    tables, gains, influences, degrees = [], [], [], 0.0
    for number, models in enumerate(cuts):
        table = np.zeros((len(held_out.click), models[0].positions), dtype=np.float32)
        gained, influence = (np.zeros((len(queries), shape[0] * shape[1])) for _ in range(2))
        for half, model in enumerate(models):
            chosen = np.flatnonzero(held_out.home[number] == half)
            home = np.searchsorted(queries, held_out.query[chosen])
            rows, start = _represented(model, held_out, chosen)
            found, solve, degree = _fisher_scoring(rows, start)
            for at in rows.chunks():
                table[chosen[at]] = _Point.of(rows, at, found).table
            own, gradient = _gains(rows, found, held_out, chosen, places, home, len(queries))
            gained += own
            influence += _scores(rows, found, solve(_all_reduce(gradient) / lists.sum()), home, len(queries))
            degrees += degree / len(cuts)
            report(number * len(models) + half + 1)
        gained, influence = _all_reduce(gained), _all_reduce(influence)
        gain = gained.sum(axis=0) / lists.sum()
        gains.append(gain)
        influences.append(influence - influence.mean(axis=0) + (gained - lists[:, None] * gain) / lists.sum())
        tables.append(table)
    by_policy = np.mean(influences, axis=0).T.reshape(*shape, len(queries))
    return Refitted(tables, np.stack(gains, axis=-1).reshape(*shape, len(cuts)), by_policy, degrees)


def _represented(model: ClickModel, held_out: HeldOut, chosen: Ints) -> tuple[_Rows, _Parameters]:
    """Compute the representation of rows by a network, and the parameters of the network itself."""
    (member,) = model.members
    assert isinstance(member, NetworkClicks)  # noqa: S101 - for mypy
    assert isinstance(member.network, MonotoneHead)  # noqa: S101 - for mypy
    network = member.network.eval()
    assert isinstance(network.backbone, Perceptron)  # noqa: S101 - for mypy
    raw = len(model.featurizer.numeric)
    features = np.empty((len(chosen), 1 + network.backbone.width + raw), dtype=np.float32)
    outputs = np.empty((len(chosen), 2))
    with torch.inference_mode():
        for start in range(0, len(chosen), CHUNK_ROWS):
            at = slice(start, start + CHUNK_ROWS)
            numeric, categorical = (
                torch.from_numpy(each[chosen[at]]) for each in (held_out.inputs.numeric, held_out.inputs.categorical)
            )
            hidden = network.backbone(numeric, categorical)
            scaled = network.backbone.features(numeric)[:, :raw]
            features[at, 1:] = torch.cat([hidden, scaled], dim=1).numpy()
            outputs[at] = network.output(hidden).numpy()
    _standardise(features)
    shown = held_out.position[chosen] <= model.positions
    logged = np.where(shown, held_out.position[chosen], 0)
    rows = _Rows(features, outputs[:, 0], outputs[:, 1], logged, np.where(shown, held_out.click[chosen], 0.0))
    none = np.zeros(features.shape[1])
    return rows, _Parameters(none, none, network.steps.detach().double().numpy())


def _standardise(features: NDArray[np.float32]) -> None:
    """Standardise all columns but the first, which becomes 1, in place; constant columns become 0."""
    features[:, 0] = 1
    columns = features[:, 1:].astype(np.float64)
    sums = _all_reduce(np.stack([columns.sum(axis=0), (columns**2).sum(axis=0)]))
    (count,) = distributed.all_reduce_sum([len(features)])
    mean = sums[0] / max(count, 1)
    deviation = np.sqrt(np.maximum(sums[1] / max(count, 1) - mean**2, 0))
    varies = deviation > 1e-6
    features[:, 1:] = np.where(varies, (columns - mean) / np.where(varies, deviation, 1.0), 0.0).clip(-8, 8)


Solve = Callable[[Floats], Floats]
"""Computes H⁻¹ x."""


def _fisher_scoring(rows: _Rows, start: _Parameters) -> tuple[_Parameters, Solve, float]:
    """Maximise the penalised log-likelihood; return parameters, H⁻¹ and the effective number of parameters."""
    width = len(start.alpha)
    ridge = np.full(width, RIDGE)
    ridge[0] = FREE
    penalty = np.concatenate([ridge, ridge, np.ones(len(start.steps))])

    def penalised(found: _Parameters) -> tuple[float, Floats, Floats]:
        likelihood, score, fisher = _likelihood(rows, found)
        moved = np.concatenate([found.alpha, found.gamma, found.steps - start.steps])
        return likelihood - 0.5 * float(penalty @ moved**2), score - penalty * moved, fisher

    found, (likelihood, score, fisher) = start, penalised(start)
    for _ in range(MOST_STEPS):
        step = cho_solve(cho_factor(fisher + np.diag(penalty)), score)
        if float(score @ step) / 2 < CONVERGED:
            break
        for shorter in (1.0, 0.5, 0.25, 0.1, 0.02):
            tried = found.moved(shorter * step)
            at_tried = penalised(tried)
            if at_tried[0] > likelihood:
                break
        else:
            break
        found, (likelihood, score, fisher) = tried, at_tried
    factor = cho_factor(fisher + np.diag(penalty))
    degrees = float(np.trace(cho_solve(factor, fisher)))
    return found, lambda right: np.asarray(cho_solve(factor, right)), degrees


def _likelihood(rows: _Rows, found: _Parameters) -> tuple[float, Floats, Floats]:
    """Compute the log-likelihood of the clicks, its gradient, and the Fisher information, over all workers."""
    width, steps = len(found.alpha), len(found.steps)
    total, score, fisher = 0.0, np.zeros(2 * width + steps), np.zeros((2 * width + steps,) * 2)
    for at in rows.chunks():
        point, features, logged, click = _Point.of(rows, at, found), rows.features[at], rows.logged[at], rows.click[at]
        q = point.q(logged)
        total += float(np.sum(click * np.log(np.maximum(q, 1e-300)) + (1 - click) * np.log1p(-q), where=logged > 0))
        residual, information = (click - q) / (1 - q), q / (1 - q)
        by_relevance, by_slope, by_step = point.derivatives(logged)
        score += np.concatenate(
            [features.T @ (residual * by_relevance), features.T @ (residual * by_slope), by_step.T @ residual]
        )
        columns = np.concatenate(
            [features * by_relevance[:, None], features * by_slope[:, None], by_step], axis=1, dtype=np.float32
        )
        columns *= np.sqrt(information, dtype=np.float32, casting="same_kind")[:, None]
        fisher += columns.T @ columns
    both = _all_reduce(np.concatenate([[total], score, fisher.ravel()]))
    return float(both[0]), both[1 : 1 + len(score)], both[1 + len(score) :].reshape(fisher.shape)


def _gains(
    rows: _Rows,
    found: _Parameters,
    held_out: HeldOut,
    chosen: Ints,
    places: Sequence[int],
    home: Ints,
    queries: int,
) -> tuple[Floats, Floats]:
    """Compute what each policy gains at each cutoff by query `[queries, n]`, and the gradient of the sum `[P, n]`."""
    width, count = len(found.alpha), len(held_out.orders) * len(places)
    gains, gradient = np.zeros((queries, count)), np.zeros((2 * width + len(found.steps), count))
    for at in rows.chunks():
        point, features, value = _Point.of(rows, at, found), rows.features[at], held_out.value[chosen[at]]
        cut = [np.where(rows.logged[at] <= place, rows.logged[at], 0) for place in places]
        before = [(point.q(logged) * value, logged) for logged in cut]
        for number, order in enumerate(held_out.orders):
            given = order[chosen[at]]
            for place, (q_before, logged) in zip(range(len(places)), before, strict=True):
                column = number * len(places) + place
                new = np.where(given <= places[place], given, 0)
                q_after = point.q(new) * value
                gains[:, column] += np.bincount(home[at], q_after - q_before, queries)
                relevance = (1 - point.chance) * (q_after - q_before)
                slope = -point.slope_rate * (q_after * point.at(new) - q_before * point.at(logged))
                gradient[:width, column] += features.T @ relevance
                gradient[width : 2 * width, column] += features.T @ slope
                moved = [
                    np.bincount(where, point.slope * q, len(point.curve) + 1)[1:]
                    for q, where in ((q_after, new), (q_before, logged))
                ]
                gradient[2 * width :, column] -= (moved[0] - moved[1]) @ point.curve_steps
    return gains, gradient


def _scores(rows: _Rows, found: _Parameters, weights: Floats, home: Ints, queries: int) -> Floats:
    """Compute weights' S_q of each query, `[queries, n]`, for weights `[P, n]`."""
    width = len(found.alpha)
    scores = np.zeros((queries, weights.shape[1]))
    for at in rows.chunks():
        point, features, logged = _Point.of(rows, at, found), rows.features[at], rows.logged[at]
        q = point.q(logged)
        residual = np.where(logged > 0, (rows.click[at] - q) / (1 - q), 0.0)
        by_relevance, by_slope, by_step = point.derivatives(logged)
        each = by_relevance[:, None] * (features @ weights[:width])
        each += by_slope[:, None] * (features @ weights[width : 2 * width]) + by_step @ weights[2 * width :]
        each *= residual[:, None]
        for column in range(weights.shape[1]):
            scores[:, column] += np.bincount(home[at], each[:, column], queries)
    return scores


def _all_reduce(values: Floats) -> Floats:
    """Sum arrays over the workers."""
    if distributed.size() == 1:
        return values
    return np.array(distributed.all_reduce_sum(values.ravel().tolist())).reshape(values.shape)


def _all_gather(hashes: NDArray[np.uint64]) -> list[bytes]:
    return distributed.all_gather_bytes(np.unique(hashes).tobytes())


def _from_bytes(data: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(data, dtype=np.uint64)
