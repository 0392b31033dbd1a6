"""Values as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """The same in lists and dictionaries: null for what is not finite, text for keys, lists for arrays.

    >>> plain({1: (0.5, float("nan")), "a": np.array([2.0, np.inf])})
    {'1': [0.5, None], 'a': [2.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
