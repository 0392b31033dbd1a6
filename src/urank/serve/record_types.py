"""What a server writes down: rankings, feedback, orders of a silent model, and the columns they have.

A record that exists is one that can be learned from: whatever breaks a rule of a log is refused when it is made.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.schema import MAX_POSITION

__all__ = [
    "OWN_COLUMNS",
    "RANKING_ID",
    "SEGMENT",
    "Columns",
    "FeedbackRecord",
    "RankingRecord",
    "Record",
    "ShadowRecord",
    "new_ranking_id",
    "new_segment",
    "segment_of",
]

SEGMENT = "^[0-9a-f]{12}-[0-9a-f]{6}$"
"""The name of a segment: milliseconds since 1970 and chance."""
RANKING_ID = "^[0-9a-f]{12}-[0-9a-f]{6}-[0-9a-f]{12}$"
"""The id of a ranking: the segment that it is written to, its home, and chance."""

OWN_COLUMNS = (
    *("query_id", "session_id", "item_id", "position", "click", "conversion", "value", "policy"),
    *("propensity", "ranked_position", "user_id", "arm", "timestamp"),
)
"""The columns of a feedback log that are not features."""

_RANKING_ID = re.compile(RANKING_ID)
_SEGMENT_LENGTH = 12 + 1 + 6
_LAST_TIME = 253_402_300_799_999_999  # the last microsecond of the year 9999
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """The columns that some rankings have beyond those of all: features, values, and those of exploration.

    >>> Columns(("price",), ("brand",), value=False, explored=False).digest
    '738e29717a7b'
    """

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    value: bool
    explored: bool

    def __post_init__(self) -> None:
        names = [*self.numeric, *self.categorical]
        for name in names:
            if name in OWN_COLUMNS:
                raise DataError(f"a feature must not be called as a column of the feedback log is; got '{name}'")
        if len(set(names)) < len(names):
            raise DataError(f"features must have a name of their own; got {', '.join(names)}")

    @cached_property
    def digest(self) -> str:
        """What rankings call this set of columns."""
        return sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        lists = {"numeric": list(self.numeric), "categorical": list(self.categorical)}
        return {**lists, "value": self.value, "explored": self.explored}


@dataclass(frozen=True, slots=True, eq=False)
class RankingRecord:
    """A list as it was shown.

    Attributes:
        ranking_id: its id, the segment first.
        query_id, user_id, arm: of the request.
        policy: what made the order.
        model: the version of the model.
        columns: the digest of its columns.
        time_us: microseconds since 1970.
        items: the items at positions 1 to m.
        numeric: `[m, F]`, NaN where missing.
        categorical: m rows of C texts, none where missing.
        value: `[m]`, what a click is worth.
        propensity: `[m]`, the probability with which the item came to its position.
        ranked_position: m positions, before exploration.
    """

    ranking_id: str
    query_id: str
    user_id: str | None
    arm: str | None
    policy: str
    model: str
    columns: str
    time_us: int
    items: tuple[str, ...]
    numeric: Floats
    categorical: tuple[tuple[str | None, ...], ...]
    value: Floats | None = None
    propensity: Doubles | None = None
    ranked_position: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        _check_items(self.items)
        count = len(self.items)
        _check_array("numeric", self.numeric, np.float32, (count, self.numeric.shape[-1]))
        if np.isinf(self.numeric).any():
            raise DataError(f"numeric must be finite or missing in ranking {self.ranking_id}; got an infinite number")
        widths = set(map(len, self.categorical))
        if len(self.categorical) != count or len(widths) > 1:
            raise DataError(f"categorical must have a row of one length for each of {count} items")
        if self.value is not None:
            _check_array("value", self.value, np.float32, (count,))
            if not ((self.value >= 0) & (self.value <= _FLOAT32_MAX)).all():
                raise DataError(f"value must be finite numbers from 0 up in ranking {self.ranking_id}")
        if self.propensity is not None:
            _check_array("propensity", self.propensity, np.float64, (count,))
            if not ((self.propensity > 0) & (self.propensity <= 1)).all():
                raise DataError(f"propensity must be above 0 and at most 1 in ranking {self.ranking_id}")
        ranked = self.ranked_position
        if (ranked is None) != (self.propensity is None) or (ranked is not None and len(ranked) != count):
            raise DataError(f"ranked_position must come with propensity, one for each of {count} items")
        if ranked is not None and not all(1 <= position <= MAX_POSITION for position in ranked):
            raise DataError(f"ranked_position must be from 1 to {MAX_POSITION} in ranking {self.ranking_id}")

    def fits(self, columns: Columns) -> bool:
        """Whether it has what these columns hold, and nothing else."""
        return (
            self.numeric.shape[1] == len(columns.numeric)
            and len(self.categorical[0]) == len(columns.categorical)
            and (self.value is not None) == columns.value
            and (self.propensity is not None) == columns.explored
        )


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """What became of an item of a ranking: whether it was clicked, led to what counts, and what that was worth."""

    ranking_id: str
    item_id: str
    click: bool
    conversion: bool
    value: float | None
    time_us: int

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        if self.value is not None and not 0 <= self.value <= _FLOAT32_MAX:
            raise DataError(f"value must be a finite number from 0 up; got {self.value} for item {self.item_id}")


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """The order that a silent model would have shown, the items at positions 1 and below."""

    ranking_id: str
    model: str
    time_us: int
    items: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        _check_items(self.items)


Record = Columns | RankingRecord | FeedbackRecord | ShadowRecord


def new_segment(now_ms: int) -> str:
    """A name for a new segment at this time, in milliseconds since 1970."""
    return f"{now_ms:012x}-{secrets.token_hex(3)}"


def new_ranking_id(segment: str) -> str:
    """A new id for a ranking that is written to this segment."""
    return f"{segment}-{secrets.token_hex(6)}"


def segment_of(ranking_id: str) -> str:
    """The home of a ranking: the segment that it was written to.

    >>> segment_of("0192f3a4b5c6-3f9a1c-00112233aabb")
    '0192f3a4b5c6-3f9a1c'
    """
    if not _RANKING_ID.fullmatch(ranking_id):
        raise DataError(f"a ranking id must be as the server made it; got '{ranking_id[:60]}'")
    return ranking_id[:_SEGMENT_LENGTH]


def _check_origin(ranking_id: str, time_us: int) -> None:
    segment_of(ranking_id)
    if not 0 <= time_us <= _LAST_TIME:
        raise DataError(f"time_us must be microseconds since 1970, before the year 10000; got {time_us}")


def _check_items(items: Sequence[str]) -> None:
    if not 1 <= len(items) <= MAX_POSITION:
        raise DataError(f"a list must have from 1 to {MAX_POSITION} items; got {len(items)}")
    if len(set(items)) < len(items):
        raise DataError("an item must occur once in a list; got one twice")


def _check_array(name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        wanted = f"{np.dtype(dtype).name} of shape {list(shape)}"
        raise DataError(f"{name} must be {wanted}; got {array.dtype.name} of shape {list(array.shape)}")
