"""A plain DeepFM in PyTorch: binary cross-entropy on clicks, all in memory, stopped by the loss of the valid split."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from exchange import Predict, Split, run
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


class DeepFM(nn.Module):
    """Linear part, products of feature embeddings, and a multilayer perceptron over these, added up to a logit."""

    def __init__(self, features: int, embedding: int, hidden: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        self.embedding = nn.Parameter(0.01 * torch.randn(features, embedding))
        sizes = [features * embedding, *hidden]
        layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
        self.deep = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, x: Tensor) -> Tensor:
        fields = x[:, :, None] * self.embedding
        pairs = 0.5 * (fields.sum(dim=1) ** 2 - (fields**2).sum(dim=1)).sum(dim=1)
        return self.linear(x)[:, 0] + pairs + self.deep(fields.flatten(1))[:, 0]


def fit(train: Split, valid: Split, settings: dict[str, Any]) -> Predict:
    torch.manual_seed(settings["seed"])
    torch.set_num_threads(settings["threads"])
    compressed = _compressed(train.features)
    mean, deviation = compressed.mean(axis=0), compressed.std(axis=0)
    deviation[deviation < 1e-6] = 1

    def scaled(features: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy((_compressed(features) - mean) / deviation)

    x, y = scaled(train.features), torch.from_numpy(train.click)
    held_x, held_y = scaled(valid.features), torch.from_numpy(valid.click)
    network = DeepFM(x.shape[1], settings["embedding"], settings["hidden"])
    optimiser = torch.optim.Adam(network.parameters(), lr=settings["learning_rate"])
    best, best_state, waited = float("inf"), copy.deepcopy(network.state_dict()), 0
    for _ in range(settings["epochs"]):
        network.train()
        for rows in torch.randperm(len(x)).split(settings["batch"]):
            optimiser.zero_grad(set_to_none=True)
            binary_cross_entropy_with_logits(network(x[rows]), y[rows]).backward()
            optimiser.step()
        loss = float(binary_cross_entropy_with_logits(_logits(network, held_x), held_y))
        if loss < best:
            best, best_state, waited = loss, copy.deepcopy(network.state_dict()), 0
        elif (waited := waited + 1) >= settings["patience"]:
            break
    network.load_state_dict(best_state)
    return lambda features: _logits(network, scaled(features)).numpy()


def _compressed(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Features of documents have long tails; their logarithms do not."""
    known = np.nan_to_num(features)
    return np.sign(known) * np.log1p(np.abs(known))


def _logits(network: DeepFM, x: Tensor) -> Tensor:
    network.eval()
    with torch.inference_mode():
        return torch.cat([network(part) for part in x.split(16_384)])


if __name__ == "__main__":
    run("torch", fit)
