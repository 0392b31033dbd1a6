"""What each difference between U-rank as the paper prints it and as it is here is worth, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from urank.evaluate.stats import paired
from urank.paper.methods import METHODS
from urank.paper.results import Difference
from urank.paper.table1 import query_values

__all__ = ["differences"]

_STEPS = (
    (
        "the stable form of the loss in place of Eq. 9 as printed, with clipped scores",
        "urank-paper",
        "urank-counterfactual",
    ),
    ("the click table as the target in place of Eq. 3 on the logged clicks", "urank-counterfactual", "urank-a1"),
    ("the stable form of the loss, when the target is the click table", "urank-printed-model", "urank-a1"),
    ("the best of three click models, or their mean, in place of A1", "urank-a1", "urank"),
    ("the exact matching in place of sorting by scores", "urank", "urank-match"),
    ("CTR-1 read at position 1, not at 2 as in the released code", "ctr2", "ctr1"),
)


def differences(results: pl.DataFrame, keys: Sequence[str]) -> list[Difference]:
    """#Click before and after each change, with the paired t-test on queries, each the mean over its seeds."""
    found = []
    for text, before, after in _STEPS:
        if before in keys and after in keys:
            own, other = query_values(results, after, "#Click"), query_values(results, before, "#Click")
            compared = paired(own, other)
            found.append(
                Difference(
                    text,
                    METHODS[before].name,
                    METHODS[after].name,
                    float(other.mean()),
                    float(own.mean()),
                    compared.p_value,
                )
            )
    return found
