"""Families of neural click models: a head on a shared backbone decides how clicks depend on the position.

Each is a module whose `forward(numeric, categorical)` returns `log_ctr[rows, K]`, log P(click | item, position),
computed in log space throughout. `at(numeric, categorical, item, position)` returns the entries of some items and
positions, which is all that training needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from urank.clicks.calibration import log_sigmoid
from urank.clicks.click_settings import NetworkFamily
from urank.learning.features import Categorical, Featurizer
from urank.learning.networks import build_backbone
from urank.learning.training_settings import Backbone


class Head(nn.Module):
    """A backbone, one linear layer, and the family's function from its outputs to the table."""

    outputs: int | None = None  # width of the linear layer; None for K
    takes_position = False  # whether the position is one more field of the backbone

    def __init__(
        self, featurizer: Featurizer, positions: int, backbone: Backbone, hidden: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.positions = positions
        if self.takes_position:
            place = Categorical("position", tuple(str(k) for k in range(1, positions + 1)))  # position k has code k
            featurizer = replace(featurizer, categorical=(*featurizer.categorical, place))
        self.backbone = build_backbone(backbone, featurizer, hidden, dropout, one_hot_last=self.takes_position)
        self.output = nn.Linear(self.backbone.width, self.outputs or positions)

    def fast_parameters(self) -> list[str]:
        """Return the names of parameters that learn faster, without decay: the bias of the head, and the curve."""
        return [name for name, _ in self.named_parameters() if name in ("output.bias", "steps", "seen")]

    def table(self, outputs: Tensor) -> Tensor:
        """Compute the table `[rows, K]` from the outputs of the linear layer."""
        raise NotImplementedError

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        return self.table(self.output(self.backbone(numeric, categorical)))

    def at(self, numeric: Tensor, categorical: Tensor, item: Tensor, position: Tensor) -> Tensor:
        """Compute log P(click) `[rows]` of the indices of items and their 1-based positions, `[rows]` each."""
        table: Tensor = self(numeric, categorical)
        return table.flatten().gather(0, item * self.positions + position - 1)


class VectorHead(Head):
    """The paper's A1: K independent outputs, one for each position."""

    def table(self, outputs: Tensor) -> Tensor:
        return log_sigmoid(outputs)


class FactorisedHead(Head):
    """examination(item, k) · relevance(item), as in the paper's released code; examination at position 1 is 1."""

    def table(self, outputs: Tensor) -> Tensor:
        relevance = log_sigmoid(outputs[:, :1])
        examination = log_sigmoid(outputs[:, 1:])
        return torch.cat([relevance, relevance + examination], dim=1)


class MonotoneHead(Head):
    """One global decreasing curve, steeper or flatter by item, as Theorems 1 and 2 assume.

        log P(click | item, k) = log r(item) − s(item) · g(k),      r in (0, 1),  s ≥ 0,  g(1) = 0,  g increasing

    With g = log k and s = max(wᵀx + 1, 0) this is the oracle of Section 5.2.
    """

    outputs = 2

    def __init__(self, featurizer: Featurizer, positions: int, *shape: Any) -> None:
        super().__init__(featurizer, positions, *shape)
        k = torch.arange(1, positions + 1, dtype=torch.float32)
        steps = torch.log(k[1:]) - torch.log(k[:-1])
        self.steps = nn.Parameter(torch.log(torch.expm1(steps)))  # the curve starts as log k
        with torch.no_grad():
            self.output.bias[1] = 0.54  # softplus(0.54) = 1: the examination 1/k

    def curve(self) -> Tensor:
        """Compute g(k) `[K]`."""
        return torch.cat([self.steps.new_zeros(1), torch.cumsum(softplus(self.steps), dim=0)])

    def table(self, outputs: Tensor) -> Tensor:
        return log_sigmoid(outputs[:, :1]) - softplus(outputs[:, 1:]) * self.curve()


class PBMHead(MonotoneHead):
    """One curve for all items: the position-based model, relevance(item) · examination(k)."""

    def table(self, outputs: Tensor) -> Tensor:
        return log_sigmoid(outputs[:, :1]) - self.curve()


class PALHead(Head):
    """PAL (Guo et al. 2019): P(seen | k) · P(click | item, seen), both free; ranking by it is method ctr1.

    The position-based model with a curve that may also rise; PAL's product of a module of the position alone and one of
    the item alone.
    """

    outputs = 1

    def __init__(self, featurizer: Featurizer, positions: int, *shape: Any) -> None:
        super().__init__(featurizer, positions, *shape)
        self.seen = nn.Parameter(torch.zeros(positions))

    def table(self, outputs: Tensor) -> Tensor:
        return log_sigmoid(outputs) + log_sigmoid(self.seen)


class PositionHead(Head):
    """The paper's A2 (RQ2): the item's features concatenated with the one-hot position in, one value out.

    With the backbones deepfm, pnn and pin the position is one of their fields. A hidden layer is required.
    """

    outputs = 1
    takes_position = True

    def table(self, outputs: Tensor) -> Tensor:
        return log_sigmoid(outputs[..., 0])

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        return self.table(self.output(self.backbone.for_each_last(numeric, categorical)))

    def at(self, numeric: Tensor, categorical: Tensor, item: Tensor, position: Tensor) -> Tensor:
        fields = torch.cat([categorical[item], position[:, None]], dim=1)
        return self.table(self.output(self.backbone(numeric[item], fields)))


class DeepFMHead(PositionHead):
    """DeepFM (Guo et al. 2017) with the position as a field, as clicks are predicted in production.

    The position has an embedding and a weight like any category: it is part of the linear terms, of the pairs with
    every feature, and of the hidden layers. The linear layer weighs the three parts, which Guo et al. add up. The
    backbone is always a DeepFM, whatever that of the other families. Ranking by it as usual is method ctr1.
    """

    def __init__(self, featurizer: Featurizer, positions: int, _: Backbone, *shape: Any) -> None:
        super().__init__(featurizer, positions, "deepfm", *shape)


_HEADS: dict[NetworkFamily, type[Head]] = {
    "vector": VectorHead,
    "position": PositionHead,
    "deepfm": DeepFMHead,
    "factorised": FactorisedHead,
    "monotone": MonotoneHead,
    "pbm": PBMHead,
    "pal": PALHead,
}


def build_network(
    family: NetworkFamily,
    featurizer: Featurizer,
    positions: int,
    *,
    backbone: Backbone = "mlp",
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.05,
) -> Head:
    """Build a network with fresh weights from torch's global generator."""
    if family not in _HEADS:
        raise ValueError(f"family must be one of {', '.join(_HEADS)}; got {family!r}")
    return _HEADS[family](featurizer, positions, backbone, hidden, dropout)


def log1m_exp(x: Tensor) -> Tensor:
    """Compute log(1 − eˣ) for x < 0, without loss of precision at either end.

    >>> bool(torch.isclose(log1m_exp(torch.log(torch.tensor(0.25))), torch.log(torch.tensor(0.75))))
    True
    """
    x = torch.clamp(x, max=-1e-7)
    return torch.where(x > -0.6931472, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def click_loss(log_ctr: Tensor, click: Tensor) -> Tensor:
    """Compute the cross-entropy of Eq. 2, the mean over rows, of log P(click) `[rows]` and clicks `[rows]`.

    >>> p, c = torch.tensor([0.25, 0.5]), torch.tensor([1.0, 0.0])
    >>> bool(torch.isclose(click_loss(torch.log(p), c), -(torch.log(p[0]) + torch.log(1 - p[1])) / 2))
    True
    """
    return -(click * log_ctr + (1 - click) * log1m_exp(log_ctr)).mean()
