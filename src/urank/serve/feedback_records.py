"""Records of the feedback log: rankings, feedback, and orders of the shadow model.

A worker numbers its records one after the other in its *home*: a file of `sqlite_sink`, or rows of `postgres_sink`. The
id of a ranking consists of its home, its number and random digits, so that feedback finds it whichever worker receives
it, and ids of one home sort by number.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from urank.errors import DataError

HOME = re.compile("[0-9a-f]{12}-[0-9a-f]{6}")
"""Name of a home: milliseconds since 1970, and random digits."""
RANKING_ID = "^[0-9a-f]{12}-[0-9a-f]{6}-[0-9a-f]{12}$"
"""Id of a ranking: its home, its number in six digits, and six random digits."""
MAX_NUMBER = 0xFFFFFF

OWN_COLUMNS = (
    *("query_id", "session_id", "item_id", "position", "click", "conversion", "value", "policy"),
    *("propensity", "ranked_position", "user_id", "arm", "timestamp"),
)
"""Columns of a feedback log that are not features."""

_HOME_LENGTH = 12 + 1 + 6
_NUMBER = slice(_HOME_LENGTH + 1, _HOME_LENGTH + 7)
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class FeedbackColumns:
    """The columns of rankings that vary: features, values, and those of exploration.

    >>> FeedbackColumns(("price",), ("brand",), value=False, explored=False).digest
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
                raise DataError(f"a feature must not have the name of a column of the feedback log; got '{name}'")
        if len(set(names)) < len(names):
            raise DataError(f"features must have unique names; got {', '.join(names)}")

    @cached_property
    def digest(self) -> str:
        """Id of this set of columns in rankings."""
        return sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        lists = {"numeric": list(self.numeric), "categorical": list(self.categorical)}
        return {**lists, "value": self.value, "explored": self.explored}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FeedbackColumns:
        """Return the columns of a dict from `to_dict`, which may have other fields as well."""
        numeric, categorical = ([str(name) for name in fields[key]] for key in ("numeric", "categorical"))
        return cls(
            tuple(numeric), tuple(categorical), value=fields["value"] is True, explored=fields["explored"] is True
        )


feedback_columns = lru_cache(maxsize=64)(FeedbackColumns)
"""`FeedbackColumns`, without validating the same names for each request."""


class RankingRecord(NamedTuple):
    """A list as it was shown."""

    ranking_id: str
    query_id: str  # query_id, user_id, arm: those of the request
    user_id: str | None
    arm: str | None
    policy: str  # logging policy
    model: str  # version of the model
    columns: str  # digest of its columns
    time_us: int  # microseconds since 1970
    items: Sequence[str]  # the items at positions 1 to m
    numeric: NDArray[np.float32]  # `[m, F]`, NaN if missing
    categorical: Sequence[Sequence[str | None]]  # m rows of C texts, None if missing
    value: NDArray[np.float32] | None = None  # `[m]`, the value of a click
    propensity: NDArray[np.float64] | None = None  # `[m]`, the probability of the item to be at its position
    ranked_position: Sequence[int] | None = None  # m positions before exploration


class FeedbackRecord(NamedTuple):
    """Feedback on an item of a ranking: click, conversion, and actual value."""

    ranking_id: str
    item_id: str
    click: bool
    conversion: bool
    value: float | None


class ShadowRecord(NamedTuple):
    """The order of the shadow model, best first."""

    ranking_id: str
    model: str
    items: Sequence[str]


class RankingRow(NamedTuple):
    """A ranking as it is stored: lists of text as JSON, arrays as little-endian bytes."""

    number: int
    ranking_id: str
    time_us: int
    columns: str
    query_id: str
    user_id: str | None
    arm: str | None
    policy: str
    model: str
    items: str
    categorical: str | None
    ranked_position: bytes | None
    value: bytes | None
    propensity: bytes | None
    numeric: bytes


Row = tuple[Any, ...]

TABLES: dict[str, tuple[str, ...]] = {
    "rankings": RankingRow._fields,
    "feedback": ("number", *FeedbackRecord._fields, "arrival"),  # by which the reports of all homes are ordered
    "shadows": ("number", *ShadowRecord._fields),
}
"""Columns of each table."""


class RecordReader:
    """Reads the records of a home with SQL.

    Args:
        query: Runs a query and returns its rows.
        prefix: Prefix of the tables.
        where: Condition that selects the home.
    """

    def __init__(self, query: Callable[[str], Iterable[Row]], prefix: str = "", where: str = "true") -> None:
        self.query, self._prefix, self._where = query, prefix, where

    def last(self, table: str, condition: str = "true") -> int:
        """Return the largest number in a table, of rows that meet a condition; 0 if there is none."""
        [(number,)] = self.query(f"SELECT max(number) {self._from(table)} AND {condition}")
        return number or 0

    def rows(self, table: str, after: int, upto: int) -> Iterable[Row]:
        """Return the rows of a table with these numbers."""
        numbers = f"number > {after} AND number <= {upto} ORDER BY number"
        return self.query(f"SELECT {', '.join(TABLES[table])} {self._from(table)} AND {numbers}")

    def columns(self) -> dict[str, FeedbackColumns]:
        """Return the sets of columns by digest."""
        found = self.query(f"SELECT digest, definition FROM {self._prefix}columns")  # noqa: S608
        return {digest: FeedbackColumns.from_dict(json.loads(text)) for digest, text in found}

    def close_for_good(self) -> bool:
        """Return whether nobody can write to the home any more, so that it may be removed."""
        return False

    def remove(self) -> None:
        """Remove a home that was closed for good."""

    def _from(self, table: str) -> str:
        return f"FROM {self._prefix}{table} WHERE {self._where}"


def new_home(now_us: int) -> str:
    """Return the name of a new home at this time, in microseconds since 1970."""
    return f"{now_us // 1_000:012x}-{secrets.token_hex(3)}"


def new_ranking_id(home: str, number: int) -> str:
    """Return an id for the ranking with this number in a home."""
    return f"{home}-{number:06x}{secrets.token_hex(3)}"


def home_of(ranking_id: str) -> str:
    """Return the home of a ranking, or of a part of the export.

    >>> home_of("0192f3a4b5c6-3f9a1c-00002a33aabb")
    '0192f3a4b5c6-3f9a1c'
    """
    return ranking_id[:_HOME_LENGTH]


def number_of(ranking_id: str) -> int:
    """Return the number of a ranking in its home.

    >>> number_of("0192f3a4b5c6-3f9a1c-00002a33aabb")
    42
    """
    return int(ranking_id[_NUMBER], 16)


def ranking_row(record: RankingRecord) -> RankingRow:
    """Encode a ranking."""
    value, propensity, ranked = record.value, record.propensity, record.ranked_position
    return RankingRow(
        number_of(record.ranking_id),
        record.ranking_id,
        record.time_us,
        record.columns,
        record.query_id,
        record.user_id,
        record.arm,
        record.policy,
        record.model,
        _to_json(record.items),
        _to_json(record.categorical) if record.categorical and record.categorical[0] else None,
        None if ranked is None else np.array(ranked, "<i4").tobytes(),
        None if value is None else value.astype("<f4", copy=False).tobytes(),
        None if propensity is None else propensity.astype("<f8", copy=False).tobytes(),
        record.numeric.astype("<f4", copy=False).tobytes(),
    )


def shadow_row(number: int, record: ShadowRecord) -> Row:
    """Encode an order of the shadow model."""
    return number, record.ranking_id, record.model, _to_json(record.items)
