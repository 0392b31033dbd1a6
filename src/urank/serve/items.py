"""Candidates of requests as arrays: names of features checked, missing values marked, ids told apart.

The way of a JSON body into arrays is what a request takes longest for after its parsing, so it is done by functions
that run in C: `itemgetter` picks the features of a candidate in order, `struct` writes them as 32-bit numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.rankers.order import Method
from urank.serve.bodies import Candidate, ExplainQuery, Limits, RankQuery
from urank.serve.problems import MOST_ERRORS, Problem
from urank.serve.runtime import MISSING, Items

__all__ = ["Lists", "Reader", "category_text", "check_sizes"]

_NAN = float("nan")
_WHOLE = 2.0**63  # the log knows whole numbers below
Row = Mapping[str, Any]
Named = Sequence[tuple[str, Sequence[Candidate[Any]]]]


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of a request.

    Attributes:
        query_ids, user_ids, positions, methods: of each list; None where the request does not say.
        item_ids: of each row of `items`.
        items: the candidates of all lists.
        valued: whether each list came with values.
        batch: whether the places of refusals are those in a batch, though it may have but one list.
    """

    query_ids: Sequence[str]
    user_ids: Sequence[str | None]
    positions: Sequence[int | None]
    methods: Sequence[Method | None]
    item_ids: Sequence[str]
    items: Items
    valued: Sequence[bool]
    batch: bool = True

    def __len__(self) -> int:
        return len(self.query_ids)


class Reader:
    """Turns candidates into arrays for models with these features.

    Args:
        numeric, categorical: the names of the features, in the order of the arrays.
        ignore_unknown: let candidates bring other features too.
    """

    def __init__(
        self, numeric: Sequence[str], categorical: Sequence[str], limits: Limits, *, ignore_unknown: bool = False
    ) -> None:
        self.numeric = tuple(numeric)
        self.categorical = tuple(categorical)
        self.limits = limits
        self.ignore_unknown = ignore_unknown
        self._numbers = _getter(self.numeric)
        self._texts = _getter(self.categorical)
        self._pack = struct.Struct(f"={len(self.numeric)}f").pack

    def lists(self, queries: Sequence[RankQuery[Any]], *, batch: bool) -> Lists:
        """The lists of a request; `batch` tells how its refusals name their places.

        Raises:
            Problem: when there are too many, an id occurs twice in a list, or the features are not those of the model.
        """
        named = [(f"queries.{number}." if batch else "", query.candidates) for number, query in enumerate(queries)]
        return Lists(
            query_ids=[query.query_id for query in queries],
            user_ids=[query.user_id for query in queries],
            positions=[query.positions for query in queries],
            methods=[query.method for query in queries],
            item_ids=[candidate.item_id for _, candidates in named for candidate in candidates],
            items=self._items(named),
            valued=[any(each.value is not None for each in candidates) for _, candidates in named],
            batch=batch,
        )

    def list_of(self, query: ExplainQuery[Any]) -> Lists:
        """The one list of a request to explain."""
        asked = RankQuery[Any].model_construct(
            query_id=query.query_id or "",
            user_id=None,
            positions=query.positions,
            method=None,
            candidates=query.candidates,
        )
        return self.lists([asked], batch=False)

    def _items(self, named: Named) -> Items:
        for before, candidates in named:
            check_sizes([len(candidates)], self.limits, before)
            _check_ids(before, [candidate.item_id for candidate in candidates])
        check_sizes([len(candidates) for _, candidates in named], self.limits)
        rows = [candidate.features for _, candidates in named for candidate in candidates]
        try:
            numeric, categorical = self._numeric(rows), self._categorical(rows)
        except (KeyError, TypeError, ValueError, OverflowError, struct.error):
            raise self._wrong_features(named) from None
        width = len(self.numeric) + len(self.categorical)
        if not self.ignore_unknown and any(len(row) != width for row in rows):
            raise self._wrong_features(named)
        values = [candidate.value for _, candidates in named for candidate in candidates]
        value = np.array([1.0 if each is None else each for each in values], dtype=np.float32)
        return Items(numeric, categorical, value, np.cumsum([0, *(len(candidates) for _, candidates in named)]))

    def _numeric(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        pack, numbers = self._pack, self._numbers
        if self.categorical:  # the parser let text and booleans pass
            packed = [pack(*[_number(each) for each in numbers(row)]) for row in rows]
        else:
            try:
                packed = [pack(*numbers(row)) for row in rows]
            except struct.error:  # something is missing
                packed = [pack(*[_NAN if each is None else each for each in numbers(row)]) for row in rows]
        return np.frombuffer(b"".join(packed), dtype=np.float32).reshape(len(rows), len(self.numeric))

    def _categorical(self, rows: Sequence[Row]) -> NDArray[np.object_]:
        texts = np.empty((len(rows), len(self.categorical)), dtype=object)
        if self.categorical:
            texts[:] = [[category_text(each) for each in self._texts(row)] for row in rows]
        return texts

    def _wrong_features(self, named: Named) -> Problem:
        """Which candidate has which feature wrong, from the first one on."""
        errors: list[tuple[str, str]] = []
        for before, candidates in named:
            for number, candidate in enumerate(candidates):
                place = f"{before}candidates.{number}.features"
                errors += [(f"{place}.{name}", problem) for name, problem in self._wrong(candidate.features)]
                if len(errors) >= MOST_ERRORS:
                    break
        return Problem(422, "the features are not those of the model; see /v1/model", errors)

    def _wrong(self, row: Row) -> list[tuple[str, str]]:
        known = {*self.numeric, *self.categorical}
        wrong = [(name, "is needed; send null where it is missing") for name in known.difference(row)]
        if not self.ignore_unknown:
            wrong += [(name[:100], "is not a feature of the model") for name in row if name not in known]
        for name in self.numeric:
            if name in row and not _fits(row[name]):
                wrong.append((name, "must be a number that fits 32 bits, or null"))
        return sorted(wrong)


def check_sizes(lengths: Sequence[int], limits: Limits, before: str = "") -> None:
    """Refuse more lists, or longer ones, than the limits allow."""
    if len(lengths) > limits.queries:
        raise Problem(422, f"a batch has at most {limits.queries} queries; got {len(lengths)}")
    if (total := sum(lengths)) > limits.rows:
        raise Problem(422, f"a batch has at most {limits.rows} candidates in all; got {total}")
    if (longest := max(lengths)) > limits.candidates:
        places = [(f"{before}candidates", f"at most {limits.candidates}")]
        raise Problem(422, f"a query has at most {limits.candidates} candidates; got {longest}", places)


def _check_ids(before: str, ids: Sequence[str]) -> None:
    """Refuse an item that stands in a list twice."""
    if len(set(ids)) == len(ids):
        return
    seen: dict[str, int] = {}
    for number, each in enumerate(ids):
        if each in seen:
            places = [(f"{before}candidates.{number}.item_id", f"is also that of {before}candidates.{seen[each]}")]
            raise Problem(422, "an item may stand in a list once", places)
        seen[each] = number


def category_text(value: str | bool | float | None) -> str:
    """A category as the log has it: whole numbers without a point, booleans in lower case.

    >>> [category_text(each) for each in ("red", 3.0, 2.5, True)]
    ['red', '3', '2.5', 'true']
    """
    if isinstance(value, str):
        return value
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (abs(value) < _WHOLE and value == int(value)):
        return str(int(value))
    return str(pl.Series([value]).cast(pl.String)[0])  # as Polars writes it, which reads the log


def _number(value: Any) -> float:
    if value is None:
        return _NAN
    if isinstance(value, str | bool):
        raise TypeError
    return float(value)


def _fits(value: Any) -> bool:
    """Whether a value is a number of 32 bits, or missing."""
    try:
        struct.pack("=f", _number(value))
    except (TypeError, OverflowError):
        return False
    return True


def _getter(names: Sequence[str]) -> Callable[[Row], tuple[Any, ...]]:
    """Picks the values of these names, always as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda row: tuple(row[name] for name in names)
