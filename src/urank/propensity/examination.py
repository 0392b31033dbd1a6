"""The contract of propensity estimates: lists in, the examination of each item at each position out.

Under the position-based model a click needs examination and relevance, P(c) = p(k, ·) · r(i). Clicks identify p only up
to a factor, so all estimates are relative to position 1, where they are 1. A click at position k then counts as
1 / p(k, ·) clicks at the top (Joachims, Swaminathan and Schnabel 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.dataset import Block, Dataset, drop_unseen
from urank.log.ragged import at_positions

CLIP = 100.0
"""Default largest weight of a click: an examination below 1 % counts as 1 %."""

MOST_ROWS = 200_000


class Propensity(Protocol):
    """An estimate of examination: the name of its method, such as `randomised`, and the item columns it needs."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Sequence[str]: ...

    def examination(self, block: Block) -> NDArray[np.float64]:
        """Estimate p(k, ·) / p(1, ·) of every item at every position, `[rows, K]`."""


@dataclass(frozen=True)
class ExaminationCurve:
    """One curve for all items: p(k) / p(1) for k = 1 … K, and their standard errors if the method has any."""

    name: str
    values: tuple[float, ...]
    errors: tuple[float, ...] | None = None
    columns: tuple[str, ...] = ()

    def examination(self, block: Block) -> NDArray[np.float64]:
        return np.tile(np.asarray(self.values, dtype=np.float64), (block.items.num_rows, 1))


@dataclass(frozen=True, eq=False)
class Known:
    """The known examination of a simulation: the true `table` P(click | item, k) relative to its first column."""

    table: Callable[[Block], NDArray[np.float64]]
    name: str = "ground truth"
    columns: tuple[str, ...] = ("item_id",)

    def examination(self, block: Block) -> NDArray[np.float64]:
        table = self.table(block)
        relative = np.ones_like(table)  # an item that is never clicked has no clicks to weight
        return np.divide(table, table[:, :1], out=relative, where=table[:, :1] > 0)


def inverse_propensity(
    propensity: Propensity, block: Block, *, clip: float = CLIP, positions: int | None = None
) -> NDArray[np.float64]:
    """Compute the weight of a click on each item, `[rows]`: 1 / p(k, ·) at its logged position, at most `clip`.

    Args:
        propensity, block: the estimate, and lists with the column `position`, from 1 to K.
        clip: the largest weight. A lower one trades bias for less variance.
        positions: items below this position were not shown and get weight 0; None if all were shown.
    """
    if positions is not None and (shown := block.column("position") <= positions).sum() < block.items.num_rows:
        weight = np.zeros(block.items.num_rows)
        weight[shown] = inverse_propensity(propensity, block.shown(positions), clip=clip)
        return weight
    position, examination = block.column("position").astype(np.int64), propensity.examination(block)
    if position.max(initial=0) > examination.shape[1]:
        raise DataError(
            f"the propensity '{propensity.name}' must cover all positions of the log, up to {position.max()}; "
            f"it covers {examination.shape[1]}; estimate it on a log with as many positions"
        )
    examined = at_positions(examination, position)
    return np.asarray(np.minimum(1 / np.maximum(examined, 1e-12), clip))


def examination_quantiles(
    propensity: Propensity, dataset: Dataset, split: str, *, levels: Sequence[float]
) -> tuple[NDArray[np.float64], ...]:
    """Compute the mean examination `[K]` over the items shown in a split, and its quantiles `[K]` at each level.

    At most about 200,000 items are read.
    """
    columns = list(propensity.columns) or ["position"]
    tables: list[NDArray[np.float64]] = []
    for block in drop_unseen(dataset).blocks(split, columns):
        tables.append(propensity.examination(block))
        if sum(len(table) for table in tables) >= MOST_ROWS:
            break
    table = np.concatenate(tables)
    return table.mean(axis=0), *np.quantile(table, levels, axis=0)
