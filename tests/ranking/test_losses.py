"""U-rank's loss (Eq. 7), its bound (Theorems 1–3) and its derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log2

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from urank.log.ragged import positions_by_score
from urank.ranking.losses import (
    hinge_loss,
    lambdaloss_weight,
    preferences,
    softmax_loss,
    swap_derivatives,
    swap_loss,
    swaps,
)
from urank.ranking.matching import match
from urank.ranking.ranking_settings import Form
from urank.ranking.utility import delta_utility, earned

GAINS = np.array([[[0.5, 0.4, 0.1], [0.9, 0.2, 0.1], [0.6, 0.5, 0.4]]])
SCORES = np.array([[0.3, 2.0, -1.0]])


@dataclass(frozen=True)
class Case:
    scores: NDArray[np.float64]
    gains: NDArray[np.float64]
    where: NDArray[np.bool_]


@st.composite
def cases(draw: st.DrawFn, *, falling: bool = False, wide: bool = False) -> Case:
    """Up to three padded lists of 1 to 6 items, 1 to 5 positions; `falling` gains never rise with the position."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    n = max(lengths)
    K = n if wide else draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    where = np.arange(n) < np.array(lengths)[:, None]
    gains = rng.random((len(lengths), n, K)) * rng.choice([1.0, 10.0], (len(lengths), n, 1))
    if falling:
        gains = -np.sort(-gains, axis=2)
    return Case(np.round(rng.normal(0, 2, where.shape), 1), gains * where[..., None], where)


def loss_by_loop(case: Case, form: Form, sigma: float, scores: NDArray[np.float64] | None = None) -> list[float]:
    """Eq. 7 as it is written, from positions by `case.scores`, at other scores if they are given."""
    positions = positions_by_score(case.scores, where=case.where)
    scores = case.scores if scores is None else scores
    losses = []
    for b in range(len(positions)):
        delta = delta_utility(case.gains[b : b + 1], positions[b : b + 1])[0]
        items = np.flatnonzero(case.where[b])
        total = 0.0
        for i in items:
            for j in items:
                if positions[b, j] < positions[b, i]:
                    apart = sigma * (scores[b, i] - scores[b, j])
                    if form == "paper":
                        total += delta[i, j] * log2(1 + exp(-apart))
                    elif delta[i, j] != 0:
                        total += abs(delta[i, j]) * log2(1 + exp(-apart * np.sign(delta[i, j])))
        losses.append(total)
    return losses


@pytest.mark.parametrize("form", ["paper", "stable"])
@given(case=cases(), sigma=st.sampled_from([0.5, 1.0, 2.0]))
def test_the_loss_is_that_of_the_paper(form: Form, case: Case, sigma: float) -> None:
    found = swaps(case.scores, case.gains, where=case.where)
    loss = swap_loss(torch.from_numpy(case.scores), found, form=form, sigma=sigma)
    np.testing.assert_allclose(loss, loss_by_loop(case, form, sigma), rtol=1e-4, atol=1e-5)


def test_the_loss_of_three_items_by_hand() -> None:
    # The order is 1, 0, 2. Swapping 1 and 0 gains 0.5 + 0.2 − 0.9 − 0.4 = −0.6; 1 and 2: 0.6 + 0.1 − 0.9 − 0.4 = −0.6;
    # 0 and 2: 0.5 + 0.1 − 0.4 − 0.4 = −0.2.
    paper = -0.6 * log2(1 + exp(1.7)) - 0.6 * log2(1 + exp(3.0)) - 0.2 * log2(1 + exp(1.3))
    stable = 0.6 * log2(1 + exp(-1.7)) + 0.6 * log2(1 + exp(-3.0)) + 0.2 * log2(1 + exp(-1.3))
    found = swaps(SCORES, GAINS)
    assert swap_loss(torch.from_numpy(SCORES), found, form="paper").item() == pytest.approx(paper, rel=1e-5)
    assert swap_loss(torch.from_numpy(SCORES), found, form="stable").item() == pytest.approx(stable, rel=1e-5)


@pytest.mark.parametrize(("outside", "item"), [(20.0, 1), (-20.0, 2)])
def test_scores_are_clipped_from_above_and_below(outside: float, item: int) -> None:
    """The loss is that of the clipped scores, and a score beyond the clip has no gradient."""
    scores = torch.tensor(SCORES, requires_grad=True)
    with torch.no_grad():
        scores[0, item] = outside
    found = swaps(scores.detach().numpy(), GAINS)
    loss = swap_loss(scores, found, form="paper", clip=5.0)
    assert loss.item() == pytest.approx(swap_loss(scores.detach().clamp(-5.0, 5.0), found, form="paper").item())
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad[0, item] == 0
    assert scores.grad[0, 0] != 0


@pytest.mark.parametrize("name", ["ranknet", "lambdaloss"])
@given(case=cases(), sigma=st.sampled_from([0.5, 1.0]))
def test_ranknet_and_lambdaloss_are_sums_over_pairs_of_different_gain(name: str, case: Case, sigma: float) -> None:
    """RankNet: Σ_{g_i > g_j} (g_i − g_j) log₂(1 + e^{−σ(s_i − s_j)}); LambdaLoss also weights by the ranks."""
    gain = case.gains[:, :, 0].round(1)  # with ties
    n = gain.shape[1]
    weight = lambdaloss_weight(n, mu=3) if name == "lambdaloss" else None
    found = preferences(case.scores, gain, weight=weight, where=case.where)
    loss = swap_loss(torch.from_numpy(case.scores), found, sigma=sigma)
    ranks = positions_by_score(case.scores, where=case.where)
    for b in range(len(gain)):
        total = 0.0
        items = np.flatnonzero(case.where[b])
        for i in items:
            for j in items:
                if gain[b, i] > gain[b, j]:
                    by_rank = 1.0
                    if name == "lambdaloss":
                        own, other = (float(ranks[b, item]) for item in (i, j))
                        apart = abs(own - other)
                        by_rank = abs(1 / log2(1 + own) - 1 / log2(1 + other))
                        by_rank += 3 * (1 / log2(1 + apart) - 1 / log2(2 + apart))
                    pair = log2(1 + exp(-sigma * (case.scores[b, i] - case.scores[b, j])))
                    total += by_rank * (gain[b, i] - gain[b, j]) * pair
        assert loss[b].item() == pytest.approx(total, rel=1e-4, abs=1e-5)


@given(case=cases(falling=True, wide=True), sigma=st.sampled_from([0.5, 1.0, 2.0]))
def test_the_loss_bounds_the_regret(case: Case, sigma: float) -> None:
    """Theorems 1 and 2: L_r ≤ L''_r ≤ L'_r + C₂, with logarithms to base 2 and scores within [−C, C]."""
    C = float(np.abs(case.scores[case.where]).max())
    positions = positions_by_score(case.scores, where=case.where)
    loss = loss_by_loop(case, "paper", sigma)
    C1 = max(log2(1 + exp(2 * sigma * C)), 2)
    best = match(case.gains, where=case.where)
    for b in range(len(positions)):
        u, k, s = case.gains[b], positions[b], case.scores[b]
        items = np.flatnonzero(case.where[b])
        between = sum(abs(u[i, k[j] - 1] - u[i, k[i] - 1]) for i in items for j in items if s[i] < s[j])
        C2 = C1 * sum(u[j, k[j] - 1] - u[j, k[i] - 1] for j in items for i in items if k[i] > k[j])
        regret = earned(u[None], best[b : b + 1])[0] - earned(u[None], k[None])[0]
        assert between <= loss[b] + C2 + 1e-9
        if len(set(s[items])) == len(items):  # ties have no order of their own
            assert regret <= between + 1e-9


def test_the_bound_of_lemma_1_needs_logarithms_to_base_2() -> None:
    assert np.log(1 + exp(-0.3)) < 1 <= np.log2(1 + exp(0.0))


@given(case=cases(), sigma=st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=50)
def test_derivatives_are_those_of_the_loss(case: Case, sigma: float) -> None:
    """Against differences of the loss with the weights held fixed, and against autograd."""
    found = swaps(case.scores, case.gains, where=case.where)
    gradient, hessian = swap_derivatives(case.scores, found, sigma=sigma)
    scores = torch.from_numpy(case.scores).requires_grad_()
    swap_loss(scores, found, sigma=sigma).sum().backward()
    assert scores.grad is not None
    np.testing.assert_allclose(gradient, scores.grad, rtol=1e-4, atol=1e-5)
    step = 1e-4
    for b, i in np.argwhere(case.where):
        moved = [case.scores.copy() for _ in range(3)]
        moved[0][b, i] -= step
        moved[2][b, i] += step
        low, middle, high = (loss_by_loop(case, "stable", sigma, each)[b] for each in moved)
        assert gradient[b, i] == pytest.approx((high - low) / (2 * step), rel=1e-3, abs=1e-4)
        assert hessian[b, i] == pytest.approx((high - 2 * middle + low) / step**2, rel=1e-2, abs=1e-3)
    assert (hessian >= 0).all()
    assert (gradient[~case.where] == 0).all()


@given(case=cases())
def test_swaps_of_long_lists_are_only_those_with_a_place(case: Case) -> None:
    found = swaps(case.scores, case.gains, where=case.where)
    positions = positions_by_score(case.scores, where=case.where)
    delta = delta_utility(case.gains, positions)
    B, n, m = found.delta.shape
    assert m == min(n, case.gains.shape[2])
    for b in range(B):
        for r in range(n):
            for p in range(n):
                i, j = found.order[b, r], found.order[b, p]
                expected = delta[b, i, j] if r > p and case.where[b, i] else 0.0
                if p < m:
                    assert found.delta[b, r, p] == pytest.approx(expected, abs=1e-5)
                else:
                    assert abs(expected) < 1e-12


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="scores must be numbers; got NaN"):
        swaps(np.array([[np.nan, 1.0, 2.0]]), GAINS)


def test_repeated_steps_come_near_the_best_order() -> None:
    """The EM-like procedure with free scores, on curves rel / kᵃ that fall at different speeds."""
    rng = np.random.default_rng(5)
    gains = rng.random((50, 8, 1)) / np.arange(1, 9) ** rng.uniform(0.2, 2, (50, 8, 1))
    scores = torch.zeros(50, 8, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([scores], lr=0.05)
    best = earned(gains, match(gains)).sum()
    by_first = earned(gains, positions_by_score(gains[:, :, 0])).sum()
    for _ in range(300):
        optimiser.zero_grad()
        swap_loss(scores, swaps(scores.detach().numpy(), gains)).sum().backward()
        optimiser.step()
    reached = earned(gains, positions_by_score(scores.detach().numpy())).sum()
    assert by_first < reached <= best
    assert reached >= 0.98 * best


# Other rankers


@given(cases())
def test_hinge_loss(case: Case) -> None:
    """Both sums as they are written."""
    weight = np.round(case.gains[..., 0], 0) * case.where
    n, (scores, where) = case.scores.shape[1], (torch.from_numpy(case.scores), torch.from_numpy(case.where))
    for graded in (False, True):
        expected = []
        for b in range(len(case.scores)):
            total = 0.0
            for i in range(n):
                for j in range(n):
                    if not (case.where[b, i] and case.where[b, j]) or i == j:
                        continue
                    hinge = max(0.0, 1 - (case.scores[b, i] - case.scores[b, j]))
                    if graded:
                        total += hinge * (weight[b, i] > weight[b, j])
                    else:
                        total += hinge * weight[b, i]
            expected.append(total)
        found = hinge_loss(scores, torch.from_numpy(weight), where=where, graded=graded)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


@given(cases())
def test_softmax_loss(case: Case) -> None:
    """−Σ w log(e^s / Σ e^s) over the items that are there; gradients are finite beside padding."""
    weight = case.gains[..., 0]
    scores = torch.from_numpy(case.scores).requires_grad_()
    found = softmax_loss(scores, torch.from_numpy(weight), where=torch.from_numpy(case.where))
    expected = []
    for b, there in enumerate(case.where):
        share = np.exp(case.scores[b, there]) / np.exp(case.scores[b, there]).sum()
        expected.append(-(weight[b, there] * np.log(share)).sum())
    np.testing.assert_allclose(found.numpy(force=True), expected, atol=1e-9)
    found.sum().backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    # d/ds_i of the loss of a list: share_i Σ w − w_i
    for b, there in enumerate(case.where):
        share = np.exp(case.scores[b, there]) / np.exp(case.scores[b, there]).sum()
        gradient = share * weight[b, there].sum() - weight[b, there]
        np.testing.assert_allclose(scores.grad[b, there].numpy(), gradient, atol=1e-9)
