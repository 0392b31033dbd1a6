"""Does the click model of an evaluation describe the log it judges by? A test on queries that it never saw.

An estimate that carries clicks from one position to another is as good as the table. Its intervals count the chance in
the clicks, not an error of the model; so the model is put to a test that it fails when it is wrong: predicted against
observed clicks, by position and by how likely the model thinks a click is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from urank import team
from urank.evaluate.offpolicy import Logged
from urank.evaluate.stats import holm

__all__ = ["Calibration", "Cell", "Specification"]

LEVELS = 3
DOUBT = 0.01
"""The p-value, adjusted for the number of cells, below which the model is said to be off."""


@dataclass(frozen=True)
class Cell:
    """Rows at one position for which the model sees about the same chance of a click.

    Attributes:
        position: 1-based.
        level: 1 for the third of the rows at this position that the model thinks least likely to be clicked, to 3.
        rows, predicted, observed: how many, and the mean click rates.
        z: their difference in standard errors, clustered by query.
        p_value: adjusted for the number of cells (Holm).
    """

    position: int
    level: int
    rows: int
    predicted: float
    observed: float
    z: float
    p_value: float


@dataclass(frozen=True)
class Specification:
    """Predicted against observed clicks on held-out queries.

    Attributes:
        cells: by position and level.
        warnings: a sentence when the model is off.
    """

    cells: list[Cell]
    warnings: list[str]


class Calibration:
    """Gathers predicted and observed clicks; `judge` says whether they agree."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self._sums = np.zeros((6, positions * LEVELS))  # rows, predicted, observed, Σ d, Σ d², Σ p (1 − p)

    def add(self, logged: Logged, query: NDArray[np.uint64]) -> None:
        """Add logged lists; `query` `[B]` tells which belong to one query."""
        queries, home = np.unique(query, return_inverse=True)
        where, place = logged.shown, logged.position - 1
        chance = np.take_along_axis(logged.table, np.where(where, place, 0)[..., None], axis=2)[..., 0][where]
        click, place = logged.click[where], place[where]
        cell = place * LEVELS + _levels(chance, place, self.positions)
        cells = self.positions * LEVELS
        owner = np.broadcast_to(home[:, None], where.shape)[where]
        off = np.bincount(owner * cells + cell, click - chance, len(queries) * cells).reshape(len(queries), cells)
        rows, predicted, observed, spread = (
            np.bincount(cell, each, cells) for each in (np.ones(len(cell)), chance, click, chance * (1 - chance))
        )
        self._sums += np.stack([rows, predicted, observed, off.sum(axis=0), (off**2).sum(axis=0), spread])

    def judge(self) -> Specification:
        """Where predicted and observed clicks, of all workers of a team, differ by more than chance."""
        sums = np.array(team.total(self._sums.ravel().tolist())).reshape(self._sums.shape)
        rows, predicted, observed, off, squares, spread = sums
        # Σ d² knows only of clicks that came: where a few were to be expected and none came it is far too small. There
        # the variance of independent clicks counts, times what all cells say clicks of one query hang together.
        together = max(1.0, squares.sum() / max(spread.sum(), 1e-300))
        variance = np.maximum(squares, together * spread)
        seen = np.flatnonzero(variance > 0)
        z = off[seen] / np.sqrt(variance[seen])
        p_values = holm(2 * norm.sf(np.abs(z)))
        cells = [
            Cell(
                position=int(cell) // LEVELS + 1,
                level=int(cell) % LEVELS + 1,
                rows=int(rows[cell]),
                predicted=float(predicted[cell] / rows[cell]),
                observed=float(observed[cell] / rows[cell]),
                z=float(z[number]),
                p_value=float(p_values[number]),
            )
            for number, cell in enumerate(seen)
        ]
        return Specification(cells, _warnings(cells))


def _levels(chance: NDArray[np.float64], place: NDArray[np.int64], positions: int) -> NDArray[np.int64]:
    """The third of the rows of its position, by rising chance, to which each row belongs, from 0."""
    order = np.lexsort((chance, place))
    counts = np.bincount(place, minlength=positions)
    rank = np.empty(len(place), dtype=np.int64)
    rank[order] = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank * LEVELS // counts[place]


def _warnings(cells: list[Cell]) -> list[str]:
    off = [cell for cell in cells if cell.p_value < DOUBT]
    if not off:
        return []
    worst = min(off, key=lambda cell: cell.p_value)
    return [
        f"the click model of this evaluation is off: at position {worst.position} it expects {worst.predicted:.2%} "
        f"where {worst.observed:.2%} were clicked ({worst.rows:,} rows, p = {worst.p_value:.1g}; {len(off)} of "
        f"{len(cells)} groups of rows are off), so intervals that rest on it may not cover the truth"
    ]
