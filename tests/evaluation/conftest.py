"""Fixtures of the tests of off-policy estimates."""

from __future__ import annotations

import numpy as np
import pytest

from urank.evaluation.estimators import LoggedBatch, Terms, list_terms
from urank.log.ragged import positions_by_score


@pytest.fixture(scope="module")
def many() -> Terms:
    """400 queries of 1 to 4 lists, which lean the same way within a query, under a logger with known propensities."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(400), rng.integers(1, 5, size=400))
    B = len(group)
    position = positions_by_score(rng.random((B, 3)))
    lean = rng.uniform(0.2, 1, size=400)[group]
    table = lean[:, None, None] * rng.uniform(0.02, 1, size=(B, 3, 1)) * np.array([1.0, 0.7, 0.4])
    chance = np.take_along_axis(table, position[..., None] - 1, axis=2)[..., 0]
    logged = LoggedBatch(
        table=table,
        position=position,
        click=(rng.random((B, 3)) < chance).astype(int),
        value=rng.uniform(0.5, 2, size=(B, 3)),
        where=np.ones((B, 3), dtype=bool),
        propensity=np.full((B, 3), 1 / 3),
    )
    return list_terms(logged, np.tile([2, 1, 3], (B, 1)), floor=0.05).by(group, 400)
