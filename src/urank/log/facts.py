"""What `inspect` finds in a log, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from urank.log.confounding import Confounding
from urank.log.interventions import Interventions

__all__ = ["MOST_ALIKE", "Curve", "Facts", "wilson_interval"]

MOST_ALIKE = 0.01
"""Features that two items of a list share in more of the lists than this do not tell items apart."""


@dataclass(frozen=True)
class Curve:
    """Click rate by position with its 95 % interval; one entry for each position that was shown."""

    position: list[int]
    impressions: list[int]
    clicks: list[int]
    rate: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Facts:
    """What was found in a log.

    Attributes:
        rows, clicks, queries, lists: counts; a list is one showing of a query.
        items: distinct items, when the log names them.
        alike: without item ids, the share of lists in which two items have the same features (1 when there are none).
        list_length: mean and percentiles.
        lists_without_click, lists_below_top, lists_with_gaps: shares of lists with no click, with nothing at
            position 1, with positions left out between the first and the last.
        features: the number of features.
        curve, by_policy, by_category: click rate by position, over all and for the largest groups.
        value: mean and percentiles of the value, and the share that is zero.
        missing: feature -> share of rows in which it is missing, where that ever happens.
        confounding, confounding_by_policy: how well features tell the position.
        outcomes, heavy_tails, id_like, losing_digits: features to be wary of.
        interventions: how positions hang together.
        same_query_moves: how often an item was seen at two positions of one query.
    """

    name: str
    rows: int
    clicks: int
    queries: int
    lists: int
    items: int | None
    alike: float
    list_length: dict[str, float]
    lists_without_click: float
    lists_below_top: float
    lists_with_gaps: float
    features: int
    curve: Curve
    by_policy: dict[str, Curve]
    by_category: dict[str, Curve]
    value: dict[str, float] | None
    missing: dict[str, float]
    confounding: Confounding | None
    confounding_by_policy: dict[str, Confounding]
    outcomes: list[str]
    heavy_tails: dict[str, tuple[float, float]]
    id_like: list[str]
    losing_digits: list[str]
    interventions: Interventions
    same_query_moves: int

    @property
    def tells_items(self) -> bool:
        """Whether items can be told apart: by their ids, or by features that hardly ever agree within a list."""
        return self.items is not None or self.alike <= MOST_ALIKE


def wilson_interval(
    clicks: NDArray[np.int64], impressions: NDArray[np.int64], z: float = 1.959964
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The 95 % interval of a rate (Wilson 1927); unlike the plain one it is sound for few or no clicks.

    >>> low, high = wilson_interval(np.array([0]), np.array([10]))
    >>> round(float(low[0]), 3), round(float(high[0]), 3)
    (0.0, 0.278)
    """
    rate = clicks / impressions
    centre = rate + z**2 / (2 * impressions)
    half = z * np.sqrt(rate * (1 - rate) / impressions + z**2 / (4 * impressions**2))
    scale = 1 + z**2 / impressions
    return np.maximum((centre - half) / scale, 0.0), np.minimum((centre + half) / scale, 1.0)
