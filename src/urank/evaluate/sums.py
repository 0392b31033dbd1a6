"""Per-query sums over the blocks of a log, for each policy and cutoff: all that the estimates need of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from urank.evaluate.offpolicy import Logged, Terms, linearised, list_terms, logged_values, query_values
from urank.log.dataset import Block
from urank.utility import utility

__all__ = ["Sums"]


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
                totals = [terms.by(whole, 1) for terms in others]
                known = self._totals.get(key)
                self._totals[key] = [a + b for a, b in zip(known, totals, strict=True)] if known else totals
                if true is not None:
                    earned = utility(true, positions, value=logged[0].value, where=logged[0].where, cutoff=place)
                    self._true.setdefault(key, []).append(_added(home, earned, len(queries)))

    def done(self) -> None:
        """Join what several blocks have of one query."""
        queries, home = np.unique(np.concatenate(self._queries), return_inverse=True)
        self.queries = len(queries)
        self.terms = {key: Terms.concatenate(parts).by(home, len(queries)) for key, parts in self._terms.items()}
        self.true = {
            key: linearised([_added(home, np.concatenate(parts), len(queries))], [self.terms[key].lists])
            for key, parts in self._true.items()
        }

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
