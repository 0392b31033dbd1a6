"""Ranking losses: U-rank's (Eq. 7) with its derivatives, RankNet's, LambdaLoss's, pairwise hinge, listwise softmax.

U-rank's E step orders each list by the current scores and weights all pairs by ΔUtil (`swaps`); the M step minimises
the loss with these weights held fixed (`swap_loss` for networks, `swap_derivatives` for trees). Both take the items of
a list in the order of their positions, so that pairs form a triangle: row r, column p, r > p, item r below item p.

Logarithms are to base 2: with natural ones Lemma 1, and with it Theorem 3, does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from urank.log.ragged import order_by_score
from urank.ranking.ranking_settings import Form
from urank.ranking.utility import Array, Mask


@dataclass(frozen=True, eq=False)
class Swaps:
    """The gains of all swaps in a batch of lists.

    Attributes:
        order: `[B, n]`, the item at each place; padding comes last.
        delta: `[B, n, m]`, ΔUtil of the items at places r and p, for r > p, and 0 elsewhere. m is the number of places
            that earn anything, at most K: two items without a place gain nothing from a swap.
    """

    order: NDArray[np.int64]
    delta: NDArray[np.float32]


def swaps(scores: Array, gains: Array, *, where: Mask | None = None) -> Swaps:
    """Compute the E step: positions by the scores, and ΔUtil (Eq. 6) of every pair at these positions.

    Args:
        scores: `[B, n]`.
        gains: `[B, n, K]`, u(i, k), 0 in the padding.
        where: `[B, n]`, true where there is an item; all by default.

    >>> found = swaps(np.array([[0.0, 1.0]]), np.array([[[0.50, 0.48], [0.45, 0.30]]]))
    >>> found.order.tolist(), found.delta.astype(float).round(2).tolist()
    ([[1, 0]], [[[0.0, 0.0], [-0.13, 0.0]]])
    """
    B, n, K = gains.shape
    order = order_by_score(scores, where=where)
    ordered = gains.reshape(B * n, K).take(_flat(order), axis=0)
    in_order = _delta_in_order(np.ascontiguousarray(ordered.transpose(2, 1, 0)))
    delta = in_order.transpose(2, 1, 0).astype(np.float32, copy=False)
    if where is not None:  # C order, since torch is faster on contiguous memory
        delta = np.multiply(delta, (np.arange(n) < where.sum(axis=1)[:, None])[..., None], order="C")
    return Swaps(order, delta)


def _delta_in_order(gains: Array) -> Array:
    """Compute Eq. 6 as in `utility.delta_utility`, `[m, n, B]`, for items `[K, n, B]` in the order of their places.

    Then every look-up is a slice, and with the lists last every slice is long: `swaps` takes a sixth of the time of the
    general form, or less. Items that earn the same gain exactly 0.
    """
    n, m = gains.shape[1], min(gains.shape[:2])
    own = gains[np.arange(m), np.arange(m)]
    delta = np.zeros_like(gains[:m])
    for p in range(m):
        np.subtract(gains[p, p + 1 : n], own[p], out=delta[p, p + 1 :])
        delta[p, p + 1 : m] += gains[p + 1 : m, p] - own[p + 1 :]
    return delta


def preferences(scores: Array, gain: Array, *, weight: Array | None = None, where: Mask | None = None) -> Swaps:
    """Compute the pairs of RankNet and LambdaLoss as `Swaps`, so that the same losses train them.

    Items of different gain are a pair. In the stable form its loss is |w (g_i − g_j)| · log₂(1 + e^{−σ(s_i − s_j)}),
    with i the item of the higher gain.

    Args:
        scores, gain: `[B, n]`.
        weight: `[n, n]`, w by the places of the two items in the order of the scores; 1 by default.
        where: `[B, n]`, true where there is an item; all by default.

    >>> found = preferences(np.array([[0.0, 1.0]]), np.array([[3.0, 1.0]]))
    >>> found.order.tolist(), found.delta[0, 1, 0].item()
    ([[1, 0]], 2.0)
    """
    n = scores.shape[1]
    order = order_by_score(scores, where=where)
    ordered = np.take_along_axis(gain, order, axis=1).astype(np.float32)
    below = np.tril(np.ones((n, n), dtype=np.float32) if weight is None else weight.astype(np.float32), -1)
    delta = (ordered[:, :, None] - ordered[:, None, :]) * below
    if where is not None:
        there = np.arange(n) < where.sum(axis=1)[:, None]
        delta *= there[:, :, None]
    return Swaps(order, delta)


def lambdaloss_weight(n: int, mu: float = 10.0) -> NDArray[np.float64]:
    """Compute the weight `[n, n]` of two places in NDCG-Loss2++ (Wang et al. 2018, The LambdaLoss Framework).

        |1/D(i) − 1/D(j)| + μ |1/D(|i − j|) − 1/D(|i − j| + 1)|,      D(k) = log₂(1 + k)

    The first part is LambdaRank's; the second is that of a bound of nDCG.

    >>> lambdaloss_weight(2)[1, 0].round(4) == np.round((1 - 1 / np.log2(3)) + 10 * (1 - 1 / np.log2(3)), 4)
    np.True_
    """
    k = np.arange(1, n + 1)
    discount = 1 / np.log2(1 + k)
    apart = np.abs(k[:, None] - k)
    near = 1 / np.log2(1 + np.maximum(apart, 1)) - 1 / np.log2(2 + np.maximum(apart, 1))
    return np.asarray(np.abs(discount[:, None] - discount) + mu * near * (apart > 0))


def swap_loss(
    scores: Tensor, found: Swaps, *, form: Form = "stable", sigma: float = 1.0, clip: float | None = None
) -> Tensor:
    """Compute the loss of each list, `[B]`, with the weights of the E step held fixed: the M step.

        paper    Σ_i Σ_{j : k_j < k_i} ΔUtil(i, j) · log₂(1 + e^{−σ(s_i − s_j)})                          (Eq. 7)
        stable   Σ_i Σ_{j : k_j < k_i} |ΔUtil(i, j)| · log₂(1 + e^{−σ(s_i − s_j) · sign ΔUtil(i, j)})

    As printed, the loss has no lower bound: for pairs that a swap would harm, it falls as the scores drift apart. The
    paper therefore clips the scores, and an item whose score is beyond the clip has no gradient. The stable form
    reverses such pairs and rewards keeping their order. Both have the same gradient at s_i = s_j.

    Args:
        scores: `[B, n]`, in the order of the items, not of the places.
        found: the weights.
        form: `stable` or `paper`.
        sigma: σ.
        clip: C; scores are clipped to [−C, C] first. The paper's form is bounded only with a clip.

    >>> found = swaps(np.array([[0.0, 1.0]]), np.array([[[0.45, 0.30], [0.50, 0.48]]]))
    >>> loss = swap_loss(torch.tensor([[0.0, 1.0]]), found)  # a swap would gain 0.45 + 0.48 - 0.30 - 0.50 = 0.13
    >>> bool(torch.isclose(loss, 0.13 * torch.log2(1 + torch.exp(torch.tensor(1.0)))).all())
    True
    """
    delta = torch.from_numpy(np.ascontiguousarray(found.delta)).to(scores.device)
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    placed = torch.gather(scores, 1, torch.from_numpy(found.order).to(scores.device))
    apart = sigma * (placed[:, :, None] - placed[:, None, : delta.shape[2]])
    each = delta * softplus(-apart) if form == "paper" else delta.abs() * softplus(-apart * delta.sign())
    return each.sum(dim=(1, 2)) / log(2)


def swap_derivatives(
    scores: Array, found: Swaps, *, sigma: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute the first and second derivatives of the stable `swap_loss` by each score, `[B, n]` each, for trees.

    With q = 1 / (1 + e^{σ(s_i − s_j)}), a pair adds ∓σ (|ΔUtil| q + min(ΔUtil, 0)) / ln 2 to the gradients of its two
    items and σ² |ΔUtil| q (1 − q) / ln 2 to both second derivatives. The paper's form has negative second
    derivatives and cannot be used for trees.

    >>> found = swaps(np.array([[0.0, 0.0]]), np.array([[[0.50, 0.48], [0.45, 0.30]]]))
    >>> gradient, hessian = swap_derivatives(np.array([[0.0, 0.0]]), found)
    >>> bool(np.allclose(gradient, np.array([[1, -1]]) * 0.13 * 0.5 / np.log(2)))
    True
    >>> bool(np.allclose(hessian, 0.13 * 0.25 / np.log(2)))
    True
    """
    at = _flat(found.order)
    placed = np.ascontiguousarray((np.asarray(scores, dtype=np.float32) * np.float32(sigma)).take(at).T)
    gradient, hessian = np.zeros_like(placed), np.zeros_like(placed)
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is 0, the correct limit
        for p, of_place in enumerate(found.delta.transpose(2, 1, 0)):
            below, delta = slice(p + 1, None), of_place[p + 1 :]
            share = np.exp(placed[below] - placed[p])
            share += 1
            np.reciprocal(share, out=share)
            second = np.abs(delta) * share
            first = np.minimum(delta, 0) + second
            second -= second * share
            gradient[below] -= first
            gradient[p] += first.sum(axis=0)
            hessian[below] += second
            hessian[p] += second.sum(axis=0)
    by_item = np.empty((2, at.size), dtype=np.float32)
    by_item[0, at] = gradient.T * np.float32(sigma / log(2))
    by_item[1, at] = hessian.T * np.float32(sigma**2 / log(2))
    return by_item[0].reshape(at.shape), by_item[1].reshape(at.shape)


def hinge_loss(scores: Tensor, weight: Tensor, *, where: Tensor, graded: bool = False) -> Tensor:
    """Compute the pairwise hinge loss of propensity-weighted SVMRank (Joachims et al. 2017), `[B]`.

        clicks    Σ_{i : w_i > 0} w_i Σ_{j ≠ i} max(0, 1 − (s_i − s_j))
        graded    Σ_{i, j : w_i > w_j} max(0, 1 − (s_i − s_j))

    Args:
        scores: `[B, n]`.
        weight: `[B, n]`, 1 / p of clicked items and 0 of all others; if graded, any increasing function of the label.
        where: `[B, n]`, true where there is an item.
        graded: compare items of different labels, as in the original SVMRank.

    >>> s, w, where = torch.tensor([[0.5, 0.0, 2.0]]), torch.tensor([[4.0, 0.0, 0.0]]), torch.ones(1, 3, dtype=bool)
    >>> hinge_loss(s, w, where=where).tolist()  # 4 · (0.5 + 2.5)
    [12.0]
    """
    lists, items = torch.nonzero((weight > 0) & where, as_tuple=True)
    own = weight[lists, items]
    lower = weight[lists] < own[:, None]
    others = where[lists] & lower if graded else where[lists].scatter(1, items[:, None], False)
    apart = scores[lists, items][:, None] - scores[lists]
    each = (torch.relu(1 - apart) * others).sum(dim=1) * (1.0 if graded else own)
    return scores.new_zeros(len(scores)).index_add(0, lists, each)


def softmax_loss(scores: Tensor, weight: Tensor, *, where: Tensor) -> Tensor:
    """Compute the softmax cross-entropy of each list, `[B]`: Σ_i w_i · −log(e^{s_i} / Σ_j e^{s_j}) (Ai et al. 2018).

    All arguments are `[B, n]`; weights are from 0 up, and `where` is true where there is an item.

    >>> s, where = torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[True, True, False]])
    >>> loss = softmax_loss(s, torch.tensor([[3.0, 0.0, 0.0]]), where=where)
    >>> bool(torch.isclose(loss, 3 * torch.tensor([2.0]).log()))
    True
    """
    log_share = torch.log_softmax(scores.masked_fill(~where, float("-inf")), dim=1)
    return -(weight * log_share.masked_fill(~where, 0.0)).sum(dim=1)


def _flat(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the items of an order `[B, n]` as indices into a flat array."""
    B, n = order.shape
    return np.asarray(order + n * np.arange(B)[:, None])
