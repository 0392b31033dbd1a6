"""Objectives of rankers: u(i, k), the gain of every item at every position, computed from logged lists.

U-rank maximises the utility of Eq. 3 or of the click table, LambdaRank the discounted gain of nDCG: one number per item
times one curve for all items. So LambdaRank is U-rank under a click model with a single curve, and both are
trained by the same loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from urank.errors import DataError
from urank.learning.batches import Batch, ListArrays
from urank.log.dataset import Block, Dataset
from urank.propensity.examination import CLIP, Propensity, inverse_propensity
from urank.ranking.losses import Swaps, lambdaloss_weight, preferences, swaps
from urank.ranking.ranking_settings import BaselineConfig
from urank.ranking.utility import FLOOR, item_gains

CHUNK_ROWS = 2**13
"""Rows per chunk, padding included: enough to amortise the calls, few enough for the cache."""
CHUNK_PADDING = 400
"""Most padding rows per chunk; about as many rows as could be processed during the overhead of another chunk."""


@dataclass(frozen=True, eq=False)
class PaddedLists:
    """Padded lists, the input of a target: `[B, n]` each, the table `[B, n, K]`.

    `where` is true where there is an item; None if nothing is padded. `weight` `[B]` is the number of logged lists that
    each list represents; None for 1.
    """

    position: NDArray[Any]
    click: NDArray[Any]
    value: NDArray[Any]
    table: NDArray[Any] | None
    gain: NDArray[Any] | None
    where: NDArray[np.bool_] | None
    weight: NDArray[np.int64] | None = None

    @classmethod
    def of_rows(
        cls, lists: ListArrays | Batch, rows: NDArray[np.int64], where: NDArray[np.bool_] | None = None
    ) -> PaddedLists:
        """Select lists by the indices `[B, n]` of their rows; without `where` they have equal lengths."""
        items = _array(lists.item)[rows]
        columns = (lists.position, lists.click, lists.value, lists.table, lists.gain)
        places = (rows, rows, items, items, rows)
        padded = [_array(each)[at] if each is not None else None for each, at in zip(columns, places, strict=True)]
        for each in padded:
            if where is not None and each is not None:
                each[~where] = 0
        return cls(*padded, where)  # type: ignore[arg-type,call-arg]


def by_length(
    batch: Batch, most_rows: int = CHUNK_ROWS, most_padding: int = CHUNK_PADDING
) -> Iterator[tuple[NDArray[np.int64], PaddedLists]]:
    """Iterate over the lists of a batch in chunks of similar length, the longest first, with little padding.

    A chunk has at most `most_rows` rows, of which `most_padding` are padding; a longer list is a chunk by itself, and
    empty lists are left out. Yields the indices `[B, n]` of the rows in the batch, arbitrary in the padding, and the
    lists.
    """
    offsets = batch.offsets.numpy(force=True)
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    first = 0
    while first < len(order):
        n = int(lengths[order[first]])
        chosen = order[first : first + max(1, most_rows // n)]
        padding = np.cumsum(n - lengths[chosen])  # starts at 0, so the first list is always included
        chosen = chosen[: np.searchsorted(padding, most_padding, side="right")]
        first += len(chosen)
        where = np.arange(n) < lengths[chosen][:, None]
        rows = offsets[chosen][:, None] + np.arange(n) * where
        padded = PaddedLists.of_rows(batch, rows, None if where.all() else where)
        yield rows, padded if batch.weight is None else replace(padded, weight=_array(batch.weight)[chosen])


def _array(values: Tensor | NDArray[Any]) -> NDArray[Any]:
    return values.numpy(force=True) if isinstance(values, Tensor) else values


class Target(ABC):
    """Computes u(i, k) `[B, n, K]` of some lists, 0 in the padding."""

    @property
    @abstractmethod
    def by_session(self) -> bool:
        """Whether it depends on more than the table and the values, so that lists of the same items may differ."""

    @abstractmethod
    def __call__(self, lists: PaddedLists) -> NDArray[Any]: ...

    def swaps(self, scores: NDArray[Any], lists: PaddedLists) -> Swaps:
        """Compute the weights of all pairs at the positions by the scores `[B, n]`: the E step."""
        return swaps(scores, self(lists), where=lists.where)


@dataclass(frozen=True)
class UtilityTarget(Target):
    """The utility of `urank.ranking.utility.item_gains`, with the share λ of Eq. 3 and its floor."""

    blend: float = 0.0
    floor: float = FLOOR

    @property
    def by_session(self) -> bool:
        return self.blend > 0

    def __call__(self, lists: PaddedLists) -> NDArray[np.float64]:
        assert lists.table is not None  # noqa: S101 - the streams of a ranker have one
        logged = {"value": lists.value, "click": lists.click, "logged": lists.position, "where": lists.where}
        return item_gains(lists.table, blend=self.blend, floor=self.floor, **logged)


def dcg_discount(K: int) -> NDArray[np.float64]:
    """Return 1 / log₂(1 + k) for k = 1 … K.

    >>> dcg_discount(3).round(2).tolist()
    [1.0, 0.63, 0.5]
    """
    return np.asarray(1 / np.log2(np.arange(2, K + 2)))


@dataclass(frozen=True)
class DiscountedGain(Target):
    """g_i / log₂(1 + k): its ΔUtil (Eq. 6) is the change of DCG by a swap, LambdaRank's |Δ| (Burges 2010).

    Attributes:
        positions: K; an item further down gains nothing.
        normalised: divide by the ideal DCG of the list, as nDCG does. Not used for propensity-weighted clicks, since a
            ratio of two estimates is biased.
    """

    positions: int
    normalised: bool = False

    @property
    def by_session(self) -> bool:
        return True

    def __call__(self, lists: PaddedLists) -> NDArray[np.float64]:
        return np.asarray(self._gain(lists)[..., None] * dcg_discount(self.positions))

    def _gain(self, lists: PaddedLists) -> NDArray[Any]:
        assert lists.gain is not None  # noqa: S101 - the streams of LambdaRank have one
        gain = lists.gain if lists.where is None else np.where(lists.where, lists.gain, 0.0)
        if not self.normalised:
            return gain
        best = -np.sort(-gain, axis=1)[:, : self.positions]
        ideal = (best * dcg_discount(self.positions)[: best.shape[1]]).sum(axis=1, keepdims=True)
        return np.asarray(gain / np.where(ideal > 0, ideal, 1.0))


@dataclass(frozen=True)
class RankNetGain(DiscountedGain):
    """RankNet (Burges et al. 2005): every pair of items with different gains counts, wherever they are.

    A pair counts the difference of the gains, which for clicks is the weight of the click, and 1 for labels
    (`normalised`). Training still stops early by the discounted gain.
    """

    def swaps(self, scores: NDArray[Any], lists: PaddedLists) -> Swaps:
        found = preferences(scores, self._gain(lists), where=lists.where)
        return replace(found, delta=np.sign(found.delta)) if self.normalised else found


@dataclass(frozen=True)
class LambdaLossGain(DiscountedGain):
    """LambdaLoss (Wang et al. 2018): pairs weighted as in NDCG-Loss2++, see `lambdaloss_weight`."""

    def swaps(self, scores: NDArray[Any], lists: PaddedLists) -> Swaps:
        return preferences(scores, self._gain(lists), weight=lambdaloss_weight(scores.shape[1]), where=lists.where)


@dataclass(frozen=True, eq=False)
class ClickGain:
    """c_i · b_i / p(k_i, ·): a click times its value over the probability of examination.

    Without a propensity clicks are unweighted; `clip` is the upper bound of 1 / p. Items below position K were not
    shown and have no click.
    """

    propensity: Propensity | None = None
    clip: float = CLIP
    takes_value: bool = False
    positions: int | None = None

    @property
    def columns(self) -> Sequence[str]:
        return self.propensity.columns if self.propensity is not None else ()

    def __call__(self, block: Block) -> NDArray[np.float32]:
        gain = block.column("click").astype(np.float64)
        if self.takes_value:
            gain = gain * block.column("value")
        if self.propensity is not None:
            gain = gain * inverse_propensity(self.propensity, block, clip=self.clip, positions=self.positions)
        return gain.astype(np.float32)


@dataclass(frozen=True)
class LabelGain:
    """2^y − 1 of the label y, as in nDCG; a missing label counts as 0."""

    columns: tuple[str, ...] = ("relevance",)

    def __call__(self, block: Block) -> NDArray[np.float32]:
        return (2.0 ** np.nan_to_num(block.column("relevance").astype(np.float64)) - 1).astype(np.float32)


def gain_of(dataset: Dataset, config: BaselineConfig, propensity: Propensity | None) -> ClickGain | LabelGain:
    """Return the gain of single items that a configuration asks for."""
    if config.learn_from == "clicks":
        return ClickGain(propensity, config.clip, takes_value=dataset.has("value"), positions=dataset.positions)
    if not dataset.has("relevance"):
        raise DataError(f"learning from relevance needs the column relevance, which {dataset.folder} does not have")
    return LabelGain()
