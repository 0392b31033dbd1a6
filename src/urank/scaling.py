"""How numbers of any scale are compressed: one formula for features, loggers, oracle and inspection."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["signed_log"]


def signed_log(x: NDArray[Any]) -> NDArray[np.float64]:
    """sign(x) · log(1 + |x|): compresses heavy tails on both sides of 0 and keeps the order.

    >>> signed_log(np.array([-(np.e - 1), 0.0, np.e - 1])).tolist()
    [-1.0, 0.0, 1.0]
    """
    x = np.asarray(x, dtype=np.float64)
    compressed: NDArray[np.float64] = np.copysign(np.log1p(np.abs(x)), x)
    return compressed
