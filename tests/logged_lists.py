"""Random logged lists and orders, for the tests of off-policy estimates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from urank.evaluation.estimators import LoggedBatch
from urank.log.ragged import pad, positions_by_score, where_items

__all__ = ["batch", "policy"]


def batch(
    seed: int, lists: int, *, items: int = 4, K: int = 5, least: float = 0.02, known: bool = False
) -> LoggedBatch:
    """Random lists of up to so many items, with padding that would be refused as items."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *rng.integers(0, items + 1, size=lists)])
    rows = int(offsets[-1])
    # Places 1 … K in random order, the first n of which a list of n items takes: gaps and all.
    order = positions_by_score(rng.random((lists, K)))[:, :items]
    where = where_items(offsets, width=items)
    return LoggedBatch(
        table=pad(rng.uniform(least, 1, size=(rows, K)), offsets, fill=np.nan, width=items),
        position=np.where(where, order, -1),
        click=pad(rng.integers(0, 2, size=rows), offsets, fill=9, width=items),
        value=pad(rng.uniform(0, 10, size=rows), offsets, fill=np.inf, width=items),
        where=where,
        propensity=pad(rng.uniform(0.1, 1, size=rows), offsets, fill=0, width=items) if known else None,
    )


def policy(seed: int, logged: LoggedBatch) -> NDArray[np.int64]:
    """Positions of a policy; up to two more than there are places."""
    B, n, K = logged.table.shape
    return positions_by_score(np.random.default_rng(seed).random((B, K + 2)))[:, :n]
