"""The contextual position-based model (Fang, Agarwal and Joachims 2019): examination that depends on the context.

    P(click | q, i, k) = h(k, x) · r(q, i)

Two small networks are trained on harvested clicks by query and item: examination h(k, x), and g(k, k', x), the mean
relevance of the items shown at both k and k'. Both are identified up to a factor, which cancels in h(k, x) / h(1, x).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from urank.clicks.families import log1m_exp
from urank.config import Settings
from urank.learning.batches import VALID_LISTS, Batch, ListArrays, MemoryStream
from urank.learning.features import Featurizer, fit_featurizer
from urank.learning.networks import Perceptron, hidden_layers
from urank.learning.training import mean_loss, seeded, train
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Block, Dataset
from urank.progress import Report, silent
from urank.propensity.harvest import QueryItems, check_connected, count_query_items, pair_numbers, weighted_clicks


class CpbmConfig(Settings):
    """Settings of a contextual model."""

    context: Literal["query", "item"] = Field(
        "query", description="context x: the mean features of the list, as in the paper, or the features of the item"
    )
    hidden: tuple[int, ...] = Field((32,), min_length=1, description="sizes of the hidden layers of both networks")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate of the hidden layers")
    training: TrainingConfig = TrainingConfig(epochs=60, batch_lists=128, learning_rate=3e-3, weight_decay=1e-2)
    seed: int = Field(0, ge=0, description="random seed")


def list_means(values: Tensor, offsets: Tensor) -> Tensor:
    """Compute the mean over its list `[rows, F]` for each row of `values` `[rows, F]`.

    >>> list_means(torch.tensor([[0.0], [1.0], [0.25]]), torch.tensor([0, 2, 3])).ravel().tolist()
    [0.5, 0.5, 0.25]
    """
    lengths = offsets.diff()
    lists = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    sums = values.new_zeros(len(lengths), values.shape[1]).index_add_(0, lists, values)
    return (sums / lengths.clamp(min=1)[:, None])[lists]


def pairs_loss(log_examination: Tensor, log_relevance: Tensor, rates: Tensor, pair: Tensor) -> Tensor:
    """Compute the mean negative log likelihood of the harvested click rates (Fang et al. 2019, Section 4.2).

        − Σ_{k≠k', both shown} [c_k log(h_k g_kk') + (1 − c_k) log(1 − h_k g_kk')]      of each query and item

    Args:
        log_examination: log h `[rows, K]`.
        log_relevance: log g `[rows, K(K − 1)/2]`, in the order of `pair_numbers`.
        rates: c `[rows, K]`, clicks over shows; NaN where the item was not shown.
        pair: `[K, K]`, the result of `pair_numbers`.
    """
    shown = ~torch.isnan(rates)
    both = shown[:, :, None] & shown[:, None, :] & ~torch.eye(shown.shape[1], dtype=torch.bool, device=rates.device)
    row, k, other = torch.nonzero(both, as_tuple=True)  # an item was shown at few of the K² pairs
    log_rate = log_examination[row, k] + log_relevance[row, pair[k, other]]
    rate = rates[row, k]
    return -(rate * log_rate + (1 - rate) * log1m_exp(log_rate)).sum() / max(len(rates), 1)


class ContextNetwork(nn.Module):
    """Networks of log h(k, x) and log g(k, k', x) on the same context."""

    pair: Tensor

    def __init__(self, featurizer: Featurizer, positions: int, config: CpbmConfig) -> None:
        super().__init__()
        self.by_query = config.context == "query"
        self.fields = Perceptron(featurizer, (), 0.0)
        hidden, dropout, width = config.hidden, config.dropout, self.fields.width
        self.examination = nn.Sequential(hidden_layers(width, hidden, dropout), nn.Linear(hidden[-1], positions))
        pairs = positions * (positions - 1) // 2
        self.relevance = nn.Sequential(hidden_layers(width, hidden, dropout), nn.Linear(hidden[-1], pairs))
        self.register_buffer("pair", torch.from_numpy(pair_numbers(positions)), persistent=False)

    def context(self, numeric: Tensor, categorical: Tensor, offsets: Tensor) -> Tensor:
        """Compute x `[rows, width]`."""
        fields: Tensor = self.fields(numeric, categorical)
        return list_means(fields, offsets) if self.by_query else fields

    def forward(self, numeric: Tensor, categorical: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.context(numeric, categorical, offsets)
        return logsigmoid(self.examination(x)), logsigmoid(self.relevance(x))

    def log_examination(self, numeric: Tensor, categorical: Tensor, offsets: Tensor) -> Tensor:
        """Compute log h(k, x) − log h(1, x) `[rows, K]`."""
        log_h = logsigmoid(self.examination(self.context(numeric, categorical, offsets)))
        return log_h - log_h[:, :1]


@dataclass(frozen=True, eq=False)
class Contextual:
    """A curve for every context."""

    featurizer: Featurizer
    positions: int
    config: CpbmConfig
    network: ContextNetwork
    name: str = "cpbm"

    @property
    def columns(self) -> list[str]:
        return self.featurizer.names

    def examination(self, block: Block) -> NDArray[np.float64]:
        """Estimate h(k, x) / h(1, x) `[rows, K]`; the context of a query is the mean over the items of the list."""
        self.network.eval()
        inputs = self.featurizer.encode(block.items, block.offsets)
        device = next(self.network.parameters()).device
        arrays = (inputs.numeric, inputs.categorical, block.offsets)
        with torch.inference_mode():
            log_ratio = self.network.log_examination(*(torch.from_numpy(array).to(device) for array in arrays))
        return np.exp(log_ratio.cpu().numpy().astype(np.float64))


def build_contextual(featurizer: Featurizer, positions: int, config: CpbmConfig) -> Contextual:
    """Build a contextual model with fresh weights from the seed."""
    with seeded(config.seed):
        network = ContextNetwork(featurizer, positions, config)
    return Contextual(featurizer, positions, config, network)


def fit_cpbm(
    dataset: Dataset, config: CpbmConfig | None = None, *, checkpoint: Path | None = None, report: Report = silent
) -> Contextual:
    """Learn examination by context from items that the lists of a query showed at different positions.

    In training the context of a query is the mean over all items that its lists showed, each once.

    Args:
        dataset: a prepared log with item_id; train is fitted, valid is for early stopping, test is not used.
        config, checkpoint, report: settings, and as in `urank.learning.training.train`.

    Raises:
        DataError: a position is not connected to position 1 by any items.
    """
    config = config if config is not None else CpbmConfig()
    featurizer = fit_featurizer(dataset)
    pairs = {}
    for number, split in enumerate(("train", "valid"), start=1):
        pairs[split] = count_query_items(dataset, split, featurizer)
        report("harvesting", number, 2)
    check_connected(weighted_clicks(pairs["train"])[0], f"the train split of {dataset.folder}")
    model = build_contextual(featurizer, dataset.positions, config)
    stream = MemoryStream(_lists(pairs["train"]))
    valid = MemoryStream(_lists(pairs["valid"]), batch_lists=VALID_LISTS)
    held_out = partial(mean_loss, loss=_loss, stream=valid)
    run: dict[str, Any] = {"checkpoint": checkpoint, "report": report, "name": "train cpbm"}
    train(model.network, _loss, stream, held_out, config.training, seed=config.seed, **run)
    return model


def _lists(pairs: QueryItems) -> ListArrays:
    """Convert to a list for each query and a row for each of its items, with the click rates as the table."""
    assert pairs.inputs is not None  # noqa: S101 - they were requested
    zeros, rates = np.zeros(len(pairs.shows), dtype=np.float32), pairs.rates.astype(np.float32)
    position = np.ones(len(zeros), dtype=np.int64)
    columns = {"position": position, "click": zeros, "value": zeros, "table": rates}
    return ListArrays.from_rows(pairs.inputs, offsets=pairs.offsets, **columns)


def _loss(network: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(network, ContextNetwork)  # noqa: S101 - for mypy
    assert batch.table is not None  # noqa: S101 - set by `_lists`
    log_h, log_g = network(batch.numeric, batch.categorical, batch.offsets)
    return pairs_loss(log_h, log_g, batch.table, network.pair)
