"""Per-query sums over the blocks of a log, for each policy and cutoff: all that the estimates need of it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank import team
from urank.evaluate.offpolicy import Logged, Terms, linearised, list_terms, logged_values, query_values
from urank.log.dataset import Block
from urank.utility import utility

__all__ = ["Sums", "query_bytes"]

TERMS, TERMS_BY_PROPENSITY = 11, 15
"""Numbers that an estimate needs of each query."""


def query_bytes(policies: int, places: int, *, propensity: bool) -> int:
    """What an evaluation takes for a query: its sums, and as much again while they are joined and made into values."""
    return 2 * 8 * (TERMS_BY_PROPENSITY if propensity else TERMS) * policies * places


class Sums:
    """Per-query sums of what the estimators need, for each policy and cutoff."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = list(places)
        self.rows = 0
        self._queries: list[NDArray[np.uint64]] = []
        self._terms: dict[tuple[int, int], list[Terms]] = {}
        self._totals: dict[tuple[int, int], list[Terms]] = {}
        self._true: dict[tuple[int, int], list[NDArray[np.float64]]] = {}

    def add(
        self,
        block: Block,
        logged: Sequence[Logged],
        orders: Sequence[NDArray[np.int64]],
        true: NDArray[np.float64] | None,
        floor: float,
    ) -> None:
        """Add the lists of a block, judged first by the table of the evaluation, then by that of each model alone."""
        queries, home = np.unique(block.query_hash, return_inverse=True)
        whole = np.zeros_like(home)
        self._queries.append(queries)
        self.rows += int(block.offsets[-1])
        for policy, positions in enumerate(orders):
            for place in self.places:
                key = (policy, place)
                own, *others = (list_terms(each, positions, cutoff=place, floor=floor) for each in logged)
                self._terms.setdefault(key, []).append(own.by(home, len(queries)))
                self._add_totals(key, [terms.by(whole, 1) for terms in others])
                if true is not None:
                    earned = utility(true, positions, value=logged[0].value, where=logged[0].where, cutoff=place)
                    self._true.setdefault(key, []).append(_added(home, earned, len(queries)))

    def done(self) -> None:
        """Join what several blocks, or several workers of a team, have of one query."""
        if team.size() > 1:
            self._gather()
        queries, home = np.unique(np.concatenate(self._queries), return_inverse=True)
        self.queries = len(queries)
        self.terms: dict[tuple[int, int], Terms] = {}
        for key in list(self._terms):  # parts are let go at once: they take as much as what they are joined to
            self.terms[key] = Terms.concatenate(self._terms.pop(key)).by(home, len(queries))
        self.true = {
            key: linearised([_added(home, np.concatenate(parts), len(queries))], [self.terms[key].lists])
            for key, parts in self._true.items()
        }

    def _gather(self) -> None:
        """Have the sums of every worker, the same in each of them."""
        mine: dict[str, NDArray[Any]] = {"queries": np.concatenate([*self._queries, np.empty(0, np.uint64)])}
        for (policy, place), parts in self._terms.items():
            mine[f"terms {policy} {place}"] = Terms.concatenate(parts).to_array()
            mine[f"totals {policy} {place}"] = Terms.concatenate(self._totals[policy, place]).to_array()
        for (policy, place), found in self._true.items():
            mine[f"true {policy} {place}"] = np.concatenate(found)
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **mine)
        self.rows = int(team.total([self.rows])[0])
        self._queries, self._terms, self._totals, self._true = [], {}, {}, {}
        for data in team.gathered_bytes(buffer.getvalue()):
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                self._queries.append(arrays["queries"])
                for name in arrays.files[1:]:
                    kind, policy, place = name.split()
                    self._take(kind, (int(policy), int(place)), arrays[name])

    def _take(self, kind: str, key: tuple[int, int], array: NDArray[np.float64]) -> None:
        if kind == "true":
            self._true.setdefault(key, []).append(array)
        elif kind == "terms":
            self._terms.setdefault(key, []).append(Terms.from_array(array))
        else:
            self._add_totals(key, [Terms.from_array(array[:, model : model + 1]) for model in range(array.shape[1])])

    def _add_totals(self, key: tuple[int, int], totals: list[Terms]) -> None:
        known = self._totals.get(key)
        self._totals[key] = [a + b for a, b in zip(known, totals, strict=True)] if known else totals

    def values(self, policy: int, place: int, estimator: str) -> NDArray[np.float64]:
        """The per-query values of an estimate."""
        return _values(self.terms[policy, place], estimator, logged=policy == 0)

    def by_model(self, policy: int, place: int, estimator: str) -> NDArray[np.float64]:
        """The estimate by each model alone, `[cuts, 2]`."""
        found = [_values(total, estimator, logged=policy == 0).mean() for total in self._totals[policy, place]]
        return np.array(found).reshape(-1, 2)


def _values(terms: Terms, estimator: str, *, logged: bool) -> NDArray[np.float64]:
    """What the logged order earned is known and needs no weights; only `direct` compares with what a model expects."""
    return logged_values(terms) if logged and estimator != "direct" else query_values(terms, estimator)


def _added(home: NDArray[np.int64], values: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    return np.bincount(home, values, groups).astype(np.float64)
