"""How much memory a command may take, and how that is divided.

What a command reads is never held whole: it goes through buckets, row groups and batches whose sizes follow from one
setting. The shares below were measured (`python -m benchmarks scale`), with room for what libraries take besides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from urank.errors import ConfigError

__all__ = ["DEFAULT_MEMORY", "Memory"]

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TEXT = re.compile(rf"\s*(\d{{1,9}}(?:\.\d{{1,9}})?)\s*({'|'.join(_UNITS)})\s*")
LEAST = 2 * 10**9


@dataclass(frozen=True)
class Memory:
    """A limit of the memory of a process.

    Attributes:
        total: bytes in all, those of Python and its libraries included.
    """

    total: int = 4 * 10**9

    @classmethod
    def parse(cls, text: str) -> Memory:
        """A limit as people write it.

        >>> Memory.parse("4GB").total
        4000000000
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ConfigError(f"memory must be a number with one of {', '.join(_UNITS)}, as 4GB; got '{text}'")
        total = int(float(found[1]) * _UNITS[found[2]])
        if total < LEAST:
            raise ConfigError(f"memory must be at least 2GB, of which the libraries take about half; got '{text}'")
        return cls(total)

    @property
    def bucket_bytes(self) -> int:
        """Of a log that is being prepared: what is sorted at once."""
        return self.total // 32

    @property
    def cache_bytes(self) -> int:
        """Of a split that a network learns from: what is kept, so that it is not read again in every epoch."""
        return self.total // 12

    @property
    def sums_bytes(self) -> int:
        """Of an evaluation: the sums of all queries that it judges."""
        return self.total // 4

    @property
    def held_bytes(self) -> int:
        """What an algorithm may hold that needs all its rows at once, such as trees."""
        return self.total // 2


DEFAULT_MEMORY = Memory()
