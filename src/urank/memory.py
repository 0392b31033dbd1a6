"""The memory budget of a command and its division.

No command holds its whole input: data passes through buckets, row groups and batches whose sizes follow from one
setting. The shares below were measured (`python -m benchmarks scale`) and leave room for the libraries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from urank.errors import ConfigError

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(rf"\s*(\d{{1,9}}(?:\.\d{{1,9}})?)\s*({'|'.join(_UNITS)})\s*")
_MIN_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Memory:
    """Memory limit of a process.

    Attributes:
        total: Bytes, including Python and its libraries.
    """

    total: int = 4 * 10**9

    @classmethod
    def parse(cls, text: str) -> Memory:
        """Parse a size with a unit.

        >>> Memory.parse("4GB").total
        4000000000
        """
        found = _SIZE.fullmatch(text)
        if found is None:
            raise ConfigError(f"memory must be a number with one of {', '.join(_UNITS)}, as in 4GB; got '{text}'")
        total = int(float(found[1]) * _UNITS[found[2]])
        if total < _MIN_BYTES:
            raise ConfigError(f"memory must be at least 2GB, about half of which the libraries need; got '{text}'")
        return cls(total)

    @property
    def bucket_bytes(self) -> int:
        """`urank prepare`: the rows sorted at once."""
        return self.total // 32

    @property
    def cache_bytes(self) -> int:
        """Network training: the part of a split that is cached between epochs."""
        return self.total // 12

    @property
    def sums_bytes(self) -> int:
        """Evaluation: the totals of all evaluated queries."""
        return self.total // 4

    @property
    def held_bytes(self) -> int:
        """Algorithms that need all their rows at once, such as trees."""
        return self.total // 2


DEFAULT_MEMORY = Memory()
