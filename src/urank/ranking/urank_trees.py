"""U-rank's scorer as LightGBM trees, trained by the derivatives of the loss (Eq. 7, stable form).

Before each tree the scores of all trees so far give positions, ΔUtil at these positions weights the pairs, and the tree
is a Newton step on the loss with these weights: the EM-like procedure of the paper, one tree per step. As for networks,
training stops early by the estimated utility of the validation split.

Two differences to LightGBM's own `lambdarank`:

- The derivatives are not normalised by list: a list with more to earn counts more. They are scaled by one constant
  that brings the mean second derivative before the first tree to 1. This does not change Newton steps, but makes `l2`
  and LightGBM's minimal sum of second derivatives in a leaf independent of the unit of value.
- Ties, as before the first tree, are broken by a random order of each list, drawn once from the seed. In the logged
  order, the first trees would mostly learn the logging policy, and the estimated utility would credit them with its
  work. (The finished trees were as good either way, in eight trials.)

σ only sets the unit of the scores: the larger it is, the shorter a Newton step, and the trees rank the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import lightgbm
import numpy as np
import torch
from numpy.typing import NDArray

from urank.clicks.click_model import ClickModel
from urank.errors import ConfigError, DataError
from urank.learning.batches import Gain, ListArrays, Stream
from urank.learning.features import Featurizer, Inputs
from urank.learning.lightgbm_data import Floats, TreeModel, lightgbm_dataset, sample_for_trees
from urank.learning.training import History
from urank.log.dataset import Dataset
from urank.log.ragged import order_by_score
from urank.progress import Report, silent
from urank.ranking.losses import Swaps, swap_derivatives, swaps
from urank.ranking.objectives import PaddedLists, Target
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.urank_network import Table

CHUNK_PAIRS = 2**19
"""Pairs of items and places per chunk: enough to amortise the calls, few enough for the cache."""


@dataclass(frozen=True)
class TreesScorer(TreeModel):
    """A scorer backed by fitted trees; equal texts are equal scorers."""

    @classmethod
    def from_text(cls, text: str, featurizer: Featurizer, takes_value: bool) -> TreesScorer:
        """Restore a model from its text.

        Raises:
            DataError: if it is not the text of a LightGBM model with these features.
        """
        extra = "value" if takes_value else None
        return cls(text, len(featurizer.inputs), len(featurizer.categorical), extra).checked()

    @property
    def family(self) -> str:
        return "trees"

    @property
    def takes_value(self) -> bool:
        return self.extra is not None

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> Floats:
        """Return scores `[rows]`; the values `[rows]` are used only if it was trained on values."""
        return self.predict(inputs, value)


def fit_trees(
    dataset: Dataset,
    clicks: ClickModel,
    config: RankerConfig,
    trees: TreesConfig,
    *,
    table: Table | None = None,
    report: Report = silent,
) -> tuple[TreesScorer, History]:
    """Train the scorer on a prepared log.

    The gain of each item of train and valid at each position is computed once and kept in memory, 4 · K bytes per
    impression, beside LightGBM's bins, a byte or two per feature. If that exceeds the memory of the dataset, a sample
    of its queries is used.

    Args:
        dataset: trains on train, stops early on valid, does not read test; without valid, all trees are grown.
        clicks: the click model, from whose table the utility is computed.
        config: the target, σ and the seed; other settings are for networks.
        trees: settings of the trees.
        table: computes P(click | item, k) `[rows, K]` instead of the click model, such as an oracle.
        report: Progress callback.

    Returns:
        the scorer, with the trees up to the best round, and a round for each tree: the negative utility of train before
        it and of valid with it.
    """
    if config.form == "paper":
        reason = "since the paper's form has negative second derivatives"
        raise ConfigError(f"form must be 'stable' for trees, {reason}; got 'paper'")
    look_up = table if table is not None else lambda inputs: np.exp(clicks.log_ctr(inputs))
    streams = tree_streams(dataset, clicks.featurizer, trees, table=look_up)
    return grow_by_swaps(streams, config.objective, config, trees, report=report)


def tree_streams(
    dataset: Dataset,
    featurizer: Featurizer,
    trees: TreesConfig,
    *,
    table: Table | None = None,
    gain: Gain | None = None,
) -> list[Stream]:
    """Return train and valid, or as many of their queries as fit into memory."""
    fits = sample_for_trees(dataset, trees.row_bytes(featurizer.width, dataset.positions))
    return [Stream(fits, split, featurizer, cache_bytes=0, table=table, gain=gain) for split in ("train", "valid")]


class PairWeights(Protocol):
    """Changes the weights of the pairs before each tree; `update` is called when all lists were seen."""

    def __call__(self, rows: NDArray[np.int64], scores: Floats, found: Swaps) -> Swaps:
        """Weigh the pairs of lists `[B, n]` with these rows of the split and scores; may be called from threads."""

    def update(self) -> None: ...


def grow_by_swaps(
    streams: Sequence[Stream],
    target: Target,
    config: RankerConfig,
    trees: TreesConfig,
    *,
    weigh: PairWeights | None = None,
    report: Report = silent,
) -> tuple[TreesScorer, History]:
    """Train trees to maximise a target; of the configuration, σ and the seed are used.

    The streams are train and valid, with the columns that the target needs; `weigh` changes the weights of the pairs of
    train.
    """
    dataset, featurizer = streams[0].dataset, streams[0].featurizer
    if dataset.rows("train") == 0:
        raise DataError(f"the train split of {dataset.folder} must have impressions; it has none")
    extra = "value" if dataset.has("value") else None
    params = trees.params(config.seed)
    gains: dict[str, SplitGains] = {}
    data: dict[str, lightgbm.Dataset] = {}
    for stream in streams:
        if stream.rows:
            gains[stream.split] = SplitGains.read(stream, target, config.seed, report)
            data[stream.split] = lightgbm_dataset(
                dataset, stream.split, featurizer, params, report, extra=extra, reference=data.get("train")
            )
    booster, history = _grow(data, gains, config.sigma, trees, params, weigh, report)
    return TreesScorer.from_text(booster.model_to_string(), featurizer, extra is not None), history


@dataclass(frozen=True, eq=False)
class Chunk:
    """Lists of equal length: the indices of their rows `[B, n]`, and their gains `[B, n, K]`."""

    rows: NDArray[np.int64]
    gains: Floats

    def earned(self, order: NDArray[np.int64]) -> float:
        """Return the total gain with the items in this order `[B, n]`; see `utility.earned`."""
        B, n, K = self.gains.shape
        places = np.arange(min(n, K))
        found = np.take_along_axis(self.gains.reshape(B, n * K), K * order[:, : len(places)] + places, axis=1)
        return float(found.sum(dtype=np.float64))


@dataclass(frozen=True, eq=False)
class SplitGains:
    """The gains of the items of a split at each position, in chunks of lists of equal length.

    Nothing is padded, and the working set of a chunk fits into the cache of a core.
    """

    chunks: tuple[Chunk, ...]
    rows: int
    lists: int

    @classmethod
    def read(cls, stream: Stream, target: Target, seed: int, report: Report = silent) -> SplitGains:
        """Compute the gains of a split of a prepared log, a row group at a time."""
        rng = np.random.default_rng(seed)
        chunks: list[Chunk] = []
        rows = lists = 0
        for group in range(len(stream.groups)):
            block = stream.lists(group)
            chunks += _chunks(block, rows, target, stream.dataset.positions, rng)
            rows += int(block.offsets[-1])
            lists += len(block.offsets) - 1
            report(f"utilities of {stream.split}", rows, stream.rows)
        return cls(tuple(chunks), rows, lists)

    def derivatives(
        self,
        scores: NDArray[Any],
        *,
        sigma: float = 1.0,
        pool: Executor | None = None,
        weigh: PairWeights | None = None,
    ) -> tuple[Floats, Floats, float]:
        """Return the derivatives of the total loss by each score `[rows]`, and the mean utility of the lists."""
        scores = scores.astype(np.float32)
        gradient, hessian = np.empty_like(scores), np.empty_like(scores)

        def of_chunk(chunk: Chunk) -> float:
            here = scores[chunk.rows]
            found = swaps(here, chunk.gains)
            if weigh is not None:
                found = weigh(chunk.rows, here, found)
            gradient[chunk.rows], hessian[chunk.rows] = swap_derivatives(here, found, sigma=sigma)
            return chunk.earned(found.order)

        total = sum((map if pool is None else pool.map)(of_chunk, self.chunks))
        return gradient, hessian, total / self.lists

    def utility(self, scores: NDArray[Any]) -> float:
        """Return the mean utility of the lists in the order of the scores `[rows]`."""
        scores = scores.astype(np.float32)
        return sum(chunk.earned(order_by_score(scores[chunk.rows])) for chunk in self.chunks) / self.lists


def _chunks(lists: ListArrays, first_row: int, target: Target, K: int, rng: np.random.Generator) -> Iterator[Chunk]:
    lengths = np.diff(lists.offsets)
    for n in np.unique(lengths):
        of_length = rng.permuted(lists.offsets[:-1][lengths == n][:, None] + np.arange(n), axis=1)
        step = max(1, CHUNK_PAIRS // (int(n) * min(int(n), K)))
        for start in range(0, len(of_length), step):
            rows = of_length[start : start + step]
            yield Chunk(first_row + rows, target(PaddedLists.of_rows(lists, rows)).astype(np.float32))


def _grow(
    data: dict[str, lightgbm.Dataset],
    gains: dict[str, SplitGains],
    sigma: float,
    config: TreesConfig,
    params: dict[str, Any],
    weigh: PairWeights | None,
    report: Report,
) -> tuple[lightgbm.Booster, History]:
    """Grow trees until the utility of valid, if there is one, stops rising."""
    history, started = History(), time.perf_counter()
    train_utility, scale = 0.0, np.float32(0)

    def objective(scores: NDArray[np.float64], _: lightgbm.Dataset) -> tuple[Floats, Floats]:
        nonlocal train_utility, scale
        gradient, hessian, train_utility = gains["train"].derivatives(scores, sigma=sigma, pool=pool, weigh=weigh)
        if weigh is not None:
            weigh.update()
        if scale == 0:
            scale = np.float32(1 / (hessian.mean(dtype=np.float64) or 1))
        return gradient * scale, hessian * scale

    def metric(scores: NDArray[np.float64], _: lightgbm.Dataset) -> tuple[str, float, bool]:
        return "utility", gains["valid"].utility(scores), True

    def after_tree(env: lightgbm.callback.CallbackEnv) -> None:
        nonlocal started
        entry = {"round": env.iteration, "train": -train_utility, "step": config.learning_rate}
        entry |= {"rows": gains["train"].rows, "seconds": time.perf_counter() - started}
        note = f"train {train_utility:.4f}"
        if env.evaluation_result_list:
            utility = float(env.evaluation_result_list[0][2])
            entry["valid"], note = -utility, f"utility {utility:.4f} {note}"
            if -utility < history.best:
                history.best, history.best_round = -utility, env.iteration
        history.rounds.append(entry)
        report("growing trees", env.iteration + 1, config.trees, note)
        started = time.perf_counter()

    callbacks: list[Callable[..., Any]] = [after_tree]
    if "valid" in data:
        callbacks.append(lightgbm.early_stopping(config.early_stopping, verbose=False))
    with ThreadPoolExecutor(config.threads or torch.get_num_threads()) as pool:
        booster = lightgbm.train(
            params | {"objective": objective, "metric": "none"},
            data["train"],
            num_boost_round=config.trees,
            valid_sets=[data["valid"]] if "valid" in data else [],
            valid_names=["valid"],
            feval=metric,
            callbacks=callbacks,
        )
    return booster, history
