"""Who is in which arm of a test: decided by a stable hash, so that nobody has to store it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from urank.errors import ConfigError, DataError
from urank.log.cells import role_expr
from urank.log.split import stable_hash

__all__ = ["assign_arms", "check_arm_shares"]

_ROUNDING = 1e-9


def assign_arms(user_ids: pl.Series, shares: Mapping[str, float], *, salt: str) -> pl.Series:
    """The arm of each user: the same user has the same arm on every machine and on every day.

        u = hash(salt, id) / 2⁶⁴,      arm j  when  share_1 + … + share_{j−1} ≤ u < share_1 + … + share_j

    Users beyond the last share are not in the test and have null. The order of the arms counts: `{"A": 0.1, "B": 0.1}`
    keeps its users when a third arm is appended, or when the share of the last one is raised; raising that of A moves
    users of B to A. Each test needs a salt of its own, by which its arms are independent of those of every other test.

    Args:
        user_ids: text or numbers; 17 and "17" are one user.
        shares: arm -> its share of all users, in all at most 1.
        salt: the name of the test.

    Returns:
        the names of the arms, or null.

    >>> ids = pl.Series(range(10_000))
    >>> arms = assign_arms(ids, {"A": 0.5, "B": 0.3}, salt="new ranker")
    >>> [round(share, 2) for share in ((arms == "A").sum() / 1e4, (arms == "B").sum() / 1e4, arms.null_count() / 1e4)]
    [0.5, 0.3, 0.2]
    """
    check_arm_shares(shares)
    if not salt:
        raise ConfigError("salt must name the test; got an empty text")
    text = user_ids.alias("id").to_frame().select(role_expr("session_id", user_ids.dtype, "id")).to_series()
    if text.null_count():
        raise DataError(f"user_ids must not be missing; got nothing at row {int(text.is_null().arg_max() or 0) + 1}")
    hashes = stable_hash(pl.select(pl.concat_str(pl.lit(f"{salt}\x00"), pl.lit(text))).to_series())
    place = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53  # below 1, also for the largest hash
    ends = np.cumsum(list(shares.values()))
    ends[np.abs(ends - 1) < _ROUNDING] = 1.0
    names = pl.Series("arm", [*shares, None], dtype=pl.String)
    return names.gather(np.searchsorted(ends, place, side="right"))


def check_arm_shares(shares: Mapping[str, float]) -> None:
    """Refuse shares that are not parts of a whole."""
    if not shares:
        raise ConfigError("shares must name at least one arm; got none")
    for arm, share in shares.items():
        if not 0 < share <= 1:
            raise ConfigError(f"the share of an arm must be above 0 and at most 1; got {share} for '{arm}'")
    if sum(shares.values()) > 1 + _ROUNDING:
        raise ConfigError(f"the shares of the arms must sum to at most 1; got {sum(shares.values()):g}")
