"""The dual learning algorithm (Ai et al. 2018): a ranker and a propensity model that teach each other.

    ranking      Σ_{i clicked} g(1)/g(k_i) · −log softmax(f)_i         g: softmax over the positions of the list
    propensity   Σ_{i clicked} f̂(1)/f̂(i) · −log softmax(g)_{k_i}       f̂: softmax of f; f̂(1) of the item at the top

Both are averages over lists and lowered together; the weights are taken without gradient and clipped. It needs no
randomised traffic, and assumes one examination curve for all items.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from urank.features import Featurizer
from urank.log.dataset import Dataset
from urank.losses import softmax_loss
from urank.progress import Report, silent
from urank.propensity.model import CLIP, Curve
from urank.rankers.network import NetworkScorer, ScoreNetwork, pad_tensor, value_feature
from urank.rankers.urank import RankerConfig, build_scorer
from urank.stream import Batch, train_and_valid
from urank.training import History, mean_loss, seeded, train

__all__ = ["DualNetwork", "dual_weights", "fit_dla"]


PACE = 20.0
"""A step of Adam moves a number by about its learning rate, whatever the gradient. So small a step is right for the
weights of a network, but the K numbers of g would need thousands of them; they are kept divided by this."""


class DualNetwork(nn.Module):
    """The two models: `scorer` gives f, `places` the log of g up to a constant."""

    def __init__(self, scorer: ScoreNetwork, positions: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.slow_places = nn.Parameter(torch.zeros(positions))

    @property
    def places(self) -> Tensor:
        """log g(k) `[K]`."""
        return PACE * self.slow_places

    def curve(self) -> Curve:
        """The examination that it learned, relative to position 1."""
        relative = torch.exp(self.places.detach() - self.places.detach()[0])
        return Curve("dla", tuple(relative.double().tolist()))


def _of_batch(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """f, log g, what a click was worth, the position, where there is an item, and where one was shown, `[B, n]` each.

    An item below position K was not shown: f orders it with the others, but g knows nothing of it.
    """
    assert isinstance(network, DualNetwork)  # noqa: S101 - this module trains no other
    scores, where = pad_tensor(network.scorer(batch.numeric, batch.categorical, batch.value), batch)
    click, position = (pad_tensor(each, batch)[0] for each in (batch.click * batch.value, batch.position))
    K = len(network.slow_places)
    return scores, network.places[position.clamp(1, K) - 1], click, position, where, where & (position <= K)


def dual_weights(
    scores: Tensor, places: Tensor, position: Tensor, *, where: Tensor, clip: float = CLIP
) -> tuple[Tensor, Tensor]:
    """g(1)/g(k_i) and f̂(1)/f̂(i) of every item, `[B, n]` each, without gradient.

    Args:
        scores: `[B, n]`, f.
        places: `[B, n]`, the log of g at these positions.
        position: `[B, n]`, the logged positions, from 1 to K; the lowest of a list is its top.
        where: `[B, n]`, true where there is an item.
        clip: the most that a weight may be.

    >>> scores, places, position = torch.tensor([[0.0, 1.0]]), torch.tensor([[-2.0, 0.0]]), torch.tensor([[2, 1]])
    >>> weights = dual_weights(scores, places, position, where=torch.tensor([[True, True]]))
    >>> [weight.log().round().tolist() for weight in weights]  # log e^(0 + 2), log e^0; log e^(1 − 0), log e^0
    [[[2.0, 0.0]], [[1.0, 0.0]]]
    """
    with torch.no_grad():
        top = torch.where(where, position, torch.iinfo(position.dtype).max).argmin(dim=1, keepdim=True)
        examined = torch.exp(places.gather(1, top) - places).clamp(max=clip)
        relevant = torch.exp(scores.gather(1, top) - scores).clamp(max=clip)
    return examined, relevant


def fit_dla(
    dataset: Dataset,
    featurizer: Featurizer,
    config: RankerConfig,
    *,
    clip: float = CLIP,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[NetworkScorer, Curve, History]:
    """Train both models on the clicks of a prepared log.

    Args:
        dataset: train teaches, valid stops, test is not looked at.
        featurizer: fitted on train.
        config: the network, its training and the seed.
        clip: the most that a weight may be.
        checkpoint: a file from which a run that was killed goes on.
        report: told how far it is.

    Returns:
        the ranker, the examination that was learned with it, and the rounds.
    """
    train_split, valid_split = train_and_valid(dataset, featurizer, config.training.batch_lists)
    with seeded(config.seed):
        network = DualNetwork(build_scorer(featurizer, value_feature(dataset), config), dataset.positions)

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        scores, at, click, position, where, shown = _of_batch(network, batch)
        examined, relevant = dual_weights(scores, at, position, where=where, clip=clip)
        ranking = softmax_loss(scores, click * examined, where=where)
        return (ranking + softmax_loss(at, click * relevant, where=shown)).mean()

    def surprise(network: nn.Module, batch: Batch) -> Tensor:
        # Both losses weigh clicks by what has been learned, so that they cannot be compared from round to round. Which
        # items of a list were clicked, by the product of both models, can.
        scores, at, click, _, _, shown = _of_batch(network, batch)
        return softmax_loss(scores + at, click, where=shown).mean()

    history = train(
        network,
        loss,
        train_split,
        lambda network: mean_loss(network, surprise, valid_split),
        config.training,
        seed=config.seed,
        checkpoint=checkpoint,
        report=report,
        name="train dla",
        weigh=lambda batch: batch.lists,
    )
    return NetworkScorer(network.scorer), network.curve(), history
