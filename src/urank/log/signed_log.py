"""The signed log, which compresses the heavy tails of numeric features, and its inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def signed_log(x: NDArray[Any]) -> NDArray[np.float64]:
    """Compress heavy tails on both sides of 0, keeping the order: sign(x) · log(1 + |x|).

    >>> signed_log(np.array([-(np.e - 1), 0.0, np.e - 1])).tolist()
    [-1.0, 0.0, 1.0]
    """
    x = np.asarray(x, dtype=np.float64)
    return np.asarray(np.copysign(np.log1p(np.abs(x)), x))


def inverse_signed_log(compressed: Any) -> NDArray[np.float64]:
    """Invert `signed_log`, within the range of float32.

    >>> inverse_signed_log([0.0, -np.log(3)]).round(6).tolist()
    [0.0, -2.0]
    """
    compressed = np.asarray(compressed, dtype=np.float64)
    return np.asarray(np.sign(compressed) * np.expm1(np.minimum(np.abs(compressed), 80)))
