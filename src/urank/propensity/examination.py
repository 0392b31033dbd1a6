"""Examination as the rest of urank sees it: lists in, the chance that each item is looked at by position out.

Under the position-based model a click takes two things, examination and relevance, P(c) = p(k, ·) · r(i). Clicks tell p
up to a factor only, so all estimates are relative to position 1, where they are 1. A click at position k then stands
for 1 / p(k, ·) clicks at the top (Joachims, Swaminathan and Schnabel 2017).
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

__all__ = ["ExaminationCurve", "Known", "Propensity", "inverse_propensity", "spread"]

CLIP = 100.0
"""The most that one click counts, unless told otherwise: an examination below 1 % counts as 1 %."""


MOST_ROWS = 200_000


class Propensity(Protocol):
    """An estimate of examination."""

    @property
    def name(self) -> str:
        """How it came about, such as `randomised`."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the items that it looks at."""
        ...

    def examination(self, block: Block) -> NDArray[np.float64]:
        """p(k, ·) / p(1, ·) of every item at every position, `[rows, K]`."""
        ...


@dataclass(frozen=True)
class ExaminationCurve:
    """One curve for all items.

    Attributes:
        name: how it was estimated.
        values: p(k) / p(1) for k = 1 … K.
        errors: their standard errors, where the method tells them.
    """

    name: str
    values: tuple[float, ...]
    errors: tuple[float, ...] | None = None
    columns: tuple[str, ...] = ()

    def examination(self, block: Block) -> NDArray[np.float64]:
        return np.tile(np.asarray(self.values, dtype=np.float64), (block.items.num_rows, 1))


@dataclass(frozen=True, eq=False)
class Known:
    """The truth of a simulation: examination is what the true click table falls by.

    Attributes:
        table: gives the true P(click | item, k) `[rows, K]`, as `urank.lab.truth.true_table` does.
    """

    table: Callable[[Block], NDArray[np.float64]]
    name: str = "ground truth"
    columns: tuple[str, ...] = ("item_id",)

    def examination(self, block: Block) -> NDArray[np.float64]:
        table = self.table(block)
        relative = np.ones_like(table)  # an item that nobody would ever click tells nothing, and is never weighed
        return np.divide(table, table[:, :1], out=relative, where=table[:, :1] > 0)


def inverse_propensity(
    propensity: Propensity, block: Block, *, clip: float = CLIP, positions: int | None = None
) -> NDArray[np.float64]:
    """What a click on each item counts, `[rows]`: 1 / p(k, ·) at its logged position, at most `clip`.

    Args:
        propensity: the estimate.
        block: lists with the column `position`, from 1 to K.
        clip: the most that one click counts. A lower one trades less variance for more bias.
        positions: items further down were not shown: they are not looked at, and count 0. All were when left out.
    """
    if positions is not None and (seen := block.column("position") <= positions).sum() < block.items.num_rows:
        weight = np.zeros(block.items.num_rows)
        weight[seen] = inverse_propensity(propensity, block.shown(positions), clip=clip)
        return weight
    position, examination = block.column("position").astype(np.int64), propensity.examination(block)
    if position.max(initial=0) > examination.shape[1]:
        raise DataError(
            f"the propensity '{propensity.name}' must know all positions of the log, up to {position.max()}; "
            f"it knows {examination.shape[1]}"
        )
    examined = at_positions(examination, position)
    return np.asarray(np.minimum(1 / np.maximum(examined, 1e-12), clip))


def spread(
    propensity: Propensity, dataset: Dataset, split: str, *, levels: Sequence[float]
) -> tuple[NDArray[np.float64], ...]:
    """The mean examination `[K]` over the items shown in a split, and its quantiles `[K]` at each of the levels.

    Blocks of lists are looked at until there are 200,000 items.
    """
    columns = list(propensity.columns) or ["position"]
    tables: list[NDArray[np.float64]] = []
    for block in drop_unseen(dataset).blocks(split, columns):
        tables.append(propensity.examination(block))
        if sum(len(table) for table in tables) >= MOST_ROWS:
            break
    table = np.concatenate(tables)
    return table.mean(axis=0), *np.quantile(table, levels, axis=0)
