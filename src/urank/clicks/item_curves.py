"""Mean click curves of items or groups (the paper's Figure 1, right), and their sensitivity to the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.clicks.click_model import ClickModel
from urank.errors import ConfigError
from urank.learning.features import Featurizer, Inputs
from urank.log.candidates import LIST_KEYS, list_offsets, whole_lists
from urank.log.dataset import shown_positions
from urank.log.reader import Log

MOST_ROWS = 200_000
"""Rows that a curve is averaged over, at most."""


@dataclass(frozen=True)
class ItemCurve:
    """The mean click curve of the rows of an item or group."""

    name: str  # name, rows: the item or group, and the number of impressions averaged over
    rows: int
    rate: list[float]  # p(click) at positions 1 … K
    decay: float  # the exponent a of the best fit P ∝ 1/kᵃ; 0 is flat, 1 is 1/k

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each position."""
        return pl.DataFrame({"position": range(1, len(self.rate) + 1), "rate": self.rate}).select(
            pl.lit(self.name).alias("name"), pl.all()
        )


def decay(log_rate: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit the exponent a `[...]` of log P(k) = c − a log k to curves `[..., K]` by least squares; 0 if K is 1.

    >>> float(decay(np.log(1 / np.arange(1, 6) ** 0.5)).round(6))
    0.5
    """
    K = log_rate.shape[-1]
    if K == 1:
        return np.zeros(log_rate.shape[:-1])
    x = np.log(np.arange(1, K + 1))
    x = x - x.mean()
    return np.asarray(-(log_rate @ x) / (x @ x))


def click_curves_of(
    model: ClickModel, log: Log, *, by: str = "item_id", names: Sequence[str] = (), most: int = 5
) -> list[ItemCurve]:
    """Compute the curves of the named items or groups, or of the most frequent ones.

    Args:
        model, log: the click model, and the items with their features.
        by: the grouping column: item_id, category, policy, query_id, or a categorical feature.
        names, most: which groups; by default the `most` most frequent.
    """
    known = [role for role in ("item_id", "query_id", "policy") if role in log.schema.roles]
    known += log.schema.named("categorical")
    if by not in known:
        raise ConfigError(f"by must be one of {', '.join(known)}; got '{by}'")
    counts = [frame.filter(_shown(log)).group_by(pl.col(by).alias("name")).len() for frame, _ in log.batches()]
    total = pl.concat(counts).group_by("name").agg(pl.col("len").sum()).drop_nulls()
    absent = [name for name in names if name not in set(total["name"].to_list())]
    if absent:
        raise ConfigError(f"no row of {log.name} has the {by} '{absent[0]}'")
    chosen = list(names) or total.sort(["len", "name"], descending=[True, False])["name"].head(most).to_list()
    curves = []
    for name, own in _first_inputs(model.featurizer, log, by, chosen, MOST_ROWS).items():
        table = np.exp(model.log_ctr(own).astype(np.float64)).mean(axis=0)
        curves.append(ItemCurve(name, len(own), table.tolist(), float(decay(np.log(table)))))
    return curves


def _shown(log: Log) -> pl.Expr:
    """Return whether a row was shown, rather than a candidate beyond the last position."""
    last = shown_positions(log.name)
    return pl.lit(True) if last is None else pl.col("position") <= last


def _first_inputs(featurizer: Featurizer, log: Log, by: str, names: Sequence[str], most: int) -> dict[str, Inputs]:
    """Encode the first rows of each group, `most` at most.

    Lists are encoded as a whole, with the items that were not shown. A list whose rows are apart in the log counts as
    one in each batch.
    """
    left = dict.fromkeys(names, most)
    parts: dict[str, list[Inputs]] = {name: [] for name in names}
    shown = _shown(log)
    for frame, _ in whole_lists(log.batches()):
        if featurizer.within:
            frame = frame.sort([key for key in LIST_KEYS if key in frame.columns], maintain_order=True)
        group = frame.select(pl.when(shown).then(pl.col(by))).to_series()
        wanted = {name: (group == name).arg_true()[:rows_left] for name, rows_left in left.items()}
        if not any(map(len, wanted.values())):
            continue
        inputs = featurizer.encode(frame, list_offsets(frame))
        for name, rows in wanted.items():
            parts[name].append(inputs[rows.to_numpy()])
            left[name] -= len(rows)
    return {
        name: Inputs(np.concatenate([each.numeric for each in own]), np.concatenate([each.categorical for each in own]))
        for name, own in parts.items()
    }
