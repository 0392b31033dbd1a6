"""The click model: raw features in, the table log P(click | item, position) out, or that of conversions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray

from urank.clicks.calibration import Calibration, calibrate
from urank.clicks.click_settings import NetworkFamily
from urank.clicks.conversion import ConversionRate
from urank.clicks.families import Head
from urank.learning.features import Featurizer, Inputs
from urank.learning.networks import chunk_rows


class Member(Protocol):
    """One model of an ensemble."""

    @property
    def family(self) -> str: ...

    def log_ctr(self, inputs: Inputs) -> NDArray[np.float32]:
        """Predict log P(click | item, k) `[rows, K]`."""


@dataclass(frozen=True, eq=False)
class NetworkClicks:
    """A network as a member."""

    family: NetworkFamily
    network: Head

    def log_ctr(self, inputs: Inputs) -> NDArray[np.float32]:
        """Predict log P(click | item, k) `[rows, K]`, in chunks of rows."""
        self.network.eval()
        device = next(self.network.parameters()).device
        table = np.empty((len(inputs), self.network.positions), dtype=np.float32)
        with torch.inference_mode():
            step = chunk_rows(device)
            for start in range(0, len(inputs), step):
                rows = inputs[start : start + step]
                numeric, categorical = torch.from_numpy(rows.numeric), torch.from_numpy(rows.categorical)
                table[start : start + step] = self.network(numeric.to(device), categorical.to(device)).cpu().numpy()
        return table


@dataclass(frozen=True, eq=False)
class ClickModel:
    """The calibrated mean of the members' tables, `[rows, K]` with K `positions`.

    With a conversion rate, the table is that of conversions: P(click | item, k) · P(conversion | click, item).
    """

    featurizer: Featurizer
    positions: int
    members: tuple[Member, ...]
    calibration: Calibration
    conversion: ConversionRate | None = None

    @property
    def name(self) -> str:
        """The families and the number of members of each, such as `monotone ×3`."""
        families = [member.family for member in self.members]
        counts = {family: families.count(family) for family in dict.fromkeys(families)}
        name = " + ".join(family if n == 1 else f"{family} ×{n}" for family, n in counts.items())
        return name if self.conversion is None else f"{name} · conversion"

    def log_ctr(
        self, inputs: Inputs | pl.DataFrame | pa.Table, offsets: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Predict log P(click | item, k) `[rows, K]`, or of conversions, for encoded inputs or a table of raw features.

        `offsets` are the bounds of the lists of a table; by default as in `Featurizer.encode`.
        """
        if not isinstance(inputs, Inputs):
            inputs = self.featurizer.encode(inputs, offsets)
        table = log_mean_exp([member.log_ctr(inputs) for member in self.members])
        table = calibrate(self.calibration, table).astype(np.float32)
        return table if self.conversion is None else table + self.conversion.log_rate(inputs)[:, None]


def log_mean_exp(tables: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Compute the log of the mean of exp(table) over the tables.

    >>> bool(np.isclose(log_mean_exp([np.log([[0.2]]), np.log([[0.4]])]), np.log(0.3)).all())
    True
    """
    if len(tables) == 1:
        return tables[0]
    total = np.logaddexp.reduce(np.stack(tables), axis=0)
    return np.asarray(total - np.log(len(tables)), dtype=tables[0].dtype)
