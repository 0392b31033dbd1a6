"""Networks that learn from Parquet against the same networks on tensors that are in memory already.

The ranker's click table is computed on the way, as a log that is too large to be kept has it in every epoch; the bare
loop has it ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.clicks import throughput
from benchmarks.harness import Bar, median_seconds
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.learning.batches import Stream
from urank.learning.features import Inputs
from urank.learning.training import seeded
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.ranking.ranking_settings import RankerConfig
from urank.ranking.urank_network import ScoreNetwork, build_scorer, fit_by_swaps, mean_swap_loss

GOAL = 0.7
LISTS, RATE = 256, 4e-3


def against_bare_loops(folder: Path, queries: int, dataset: Dataset) -> Iterator[Bar]:
    """The share of the speed of a bare loop that is left when all is read, checked and encoded on the way: of a click
    model on a simulation of so many queries, and of a ranker on a log of several row groups."""
    torch.set_num_threads(1)
    yield from throughput(folder / "clicks", queries, part="loop")
    yield from _ranker(dataset)


def _ranker(dataset: Dataset) -> Iterator[Bar]:
    clicks = ClickConfig(families=("monotone",), training=TrainingConfig(epochs=1))
    model = fit_clicks(dataset, clicks, reference=False).model
    config = RankerConfig(training=TrainingConfig(epochs=1, batch_lists=LISTS, learning_rate=RATE))

    def table(inputs: Inputs) -> NDArray[np.float32]:
        return np.exp(model.log_ctr(inputs))

    def scorer() -> ScoreNetwork:
        with seeded(0):
            return build_scorer(model.featurizer, None, config)

    train, valid = (
        Stream(dataset, split, model.featurizer, batch_lists=LISTS, cache_bytes=0, table=table)
        for split in ("train", "valid")
    )
    batches = list(train.batches(shuffle=(0, 0)))  # as ours meet them
    valid.groups = valid.groups[:0]  # that it is judged is not part of what is compared

    def ours() -> None:
        fit_by_swaps(scorer(), (train, valid), config.objective, config, name="network")

    def bare() -> None:
        network = scorer()
        network.train()
        optimiser = torch.optim.AdamW(network.parameters(), lr=RATE)
        for batch in batches:
            optimiser.zero_grad(set_to_none=True)
            scores = network(batch.numeric, batch.categorical, batch.value)
            mean_swap_loss(scores, batch, config.objective, config).backward()
            optimiser.step()

    seconds, bare_seconds = median_seconds(ours, bare)
    name = "U-rank's network"
    yield Bar(f"{name}: share of a bare loop in memory", bare_seconds / seconds, "", at_least=GOAL, part="loop")
    yield Bar(f"{name}: speed", train.rows / seconds / 1e3, "thousand rows/s", part="loop")
