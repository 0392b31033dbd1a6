"""What a ranker maximises: u(i, k), the gain of every item at every position, from what a log tells of its lists.

U-rank's is the utility of Eq. 3 or of the click table. LambdaRank's is the discounted gain of nDCG: one number for an
item, wherever it stands, times one curve for all items. So LambdaRank is U-rank under a click model that knows nothing
but a curve, and both learn by the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from urank.errors import DataError
from urank.log.dataset import Block, Dataset
from urank.log.lists import pad, where_items
from urank.propensity.model import CLIP, Propensity, inverse_propensity
from urank.stream import Batch, Lists
from urank.utility import FLOOR, item_gains

__all__ = [
    "BaselineConfig",
    "ClickGain",
    "DiscountedGain",
    "LabelGain",
    "Padded",
    "Target",
    "UtilityTarget",
    "dcg_discount",
    "gain_of",
]


@dataclass(frozen=True, eq=False)
class Padded:
    """Lists as a target sees them: `[B, n]` each, the table `[B, n, K]`; `where` is true where there is an item."""

    position: NDArray[Any]
    click: NDArray[Any]
    value: NDArray[Any]
    table: NDArray[Any] | None
    gain: NDArray[Any] | None
    where: NDArray[np.bool_] | None

    @classmethod
    def of_batch(cls, batch: Batch) -> Padded:
        """All lists of a batch."""
        offsets = batch.offsets.numpy(force=True)
        tensors = (batch.position, batch.click, batch.value, batch.table, batch.gain)
        padded = [pad(each.numpy(force=True), offsets) if each is not None else None for each in tensors]
        return cls(*padded, where_items(offsets))  # type: ignore[arg-type,call-arg]

    @classmethod
    def of_rows(cls, lists: Lists, rows: NDArray[np.int64]) -> Padded:
        """Lists of the same length, by the numbers `[B, n]` of their rows."""
        arrays = (lists.position, lists.click, lists.value, lists.table, lists.gain)
        return cls(*(each[rows] if each is not None else None for each in arrays), None)  # type: ignore[arg-type,call-arg]


Target = Callable[[Padded], NDArray[Any]]
"""u(i, k) `[B, n, K]` of some lists, 0 in the padding."""


@dataclass(frozen=True)
class UtilityTarget:
    """The utility of `urank.utility.item_gains`, with the share λ of Eq. 3 and its floor."""

    blend: float = 0.0
    floor: float = FLOOR

    def __call__(self, lists: Padded) -> NDArray[np.float64]:
        assert lists.table is not None  # noqa: S101 - the streams of a ranker have one
        return item_gains(
            lists.table,
            value=lists.value,
            click=lists.click,
            logged=lists.position,
            where=lists.where,
            blend=self.blend,
            floor=self.floor,
        )


def dcg_discount(K: int) -> NDArray[np.float64]:
    """1 / log₂(1 + k) for k = 1 … K.

    >>> dcg_discount(3).round(2).tolist()
    [1.0, 0.63, 0.5]
    """
    return np.asarray(1 / np.log2(np.arange(2, K + 2)))


@dataclass(frozen=True)
class DiscountedGain:
    """g_i / log₂(1 + k): ΔUtil (Eq. 8) of it is what a swap changes in DCG, LambdaRank's |Δ| (Burges 2010).

    Attributes:
        positions: K; an item further down gains nothing.
        normalised: divide by the best that the list can reach, as nDCG does. For clicks that are weighed by their
            propensities it is left out, as a ratio of two estimates is biased.
    """

    positions: int
    normalised: bool = False

    def __call__(self, lists: Padded) -> NDArray[np.float64]:
        assert lists.gain is not None  # noqa: S101 - the streams of LambdaRank have one
        gain = lists.gain if lists.where is None else np.where(lists.where, lists.gain, 0.0)
        discount = dcg_discount(self.positions)
        if self.normalised:
            best = -np.sort(-gain, axis=1)[:, : self.positions]
            ideal = (best * discount[: best.shape[1]]).sum(axis=1, keepdims=True)
            gain = gain / np.where(ideal > 0, ideal, 1.0)
        return np.asarray(gain[..., None] * discount)


class BaselineConfig(BaseModel):
    """What the rankers of other papers learn from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    learn_from: Literal["clicks", "relevance"] = Field(
        "clicks", description="clicks, or the labels of the column relevance"
    )
    propensity: str = Field(
        "none",
        description="how clicks are weighed by 1 / examination: none, randomised, harvest, cpbm, em, or a file that "
        "`urank propensity` wrote",
    )
    clip: float = Field(CLIP, ge=1, description="the most that one click counts after weighing")


@dataclass(frozen=True, eq=False)
class ClickGain:
    """c_i · b_i / p(k_i, ·): a click, what it is worth, and how unlikely it was to be looked at.

    Attributes:
        propensity: the estimate of examination; none for clicks as they are.
        clip: the most that 1 / p counts.
        takes_value: whether the log has values.
    """

    propensity: Propensity | None = None
    clip: float = CLIP
    takes_value: bool = False

    @property
    def columns(self) -> Sequence[str]:
        return self.propensity.columns if self.propensity is not None else ()

    def __call__(self, block: Block) -> NDArray[np.float32]:
        gain = block.column("click").astype(np.float64)
        if self.takes_value:
            gain = gain * block.column("value")
        if self.propensity is not None:
            gain = gain * inverse_propensity(self.propensity, block, clip=self.clip)
        return gain.astype(np.float32)


@dataclass(frozen=True)
class LabelGain:
    """2^y − 1 of the label y, as nDCG counts it; an item without a label counts as one with 0."""

    columns: tuple[str, ...] = ("relevance",)

    def __call__(self, block: Block) -> NDArray[np.float32]:
        return (2.0 ** np.nan_to_num(block.column("relevance").astype(np.float64)) - 1).astype(np.float32)


def gain_of(dataset: Dataset, config: BaselineConfig, propensity: Propensity | None) -> ClickGain | LabelGain:
    """What each item of a log is worth by itself, as a configuration asks."""
    if config.learn_from == "clicks":
        return ClickGain(propensity, config.clip, takes_value=dataset.has("value"))
    if not dataset.has("relevance"):
        raise DataError(f"learning from relevance needs the column relevance, which {dataset.folder} does not have")
    return LabelGain()
