"""The folder of one seed: what is there need not be made again, for all of it appears by rename when it is complete."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SeedFolder"]


@dataclass(frozen=True, eq=False)
class SeedFolder:
    """What all experiments keep of a seed.

    Attributes:
        folder: of the seed, with `data/` and `results/` in it.
    """

    folder: Path

    def path(self, name: str) -> Path:
        """Where a step or a method leaves what it made."""
        return self.folder / "results" / f"{name}.parquet"

    def has(self, name: str) -> bool:
        """Whether a step or a method is done."""
        return self.path(name).exists()

    def sweep(self) -> None:
        """Remove what a killed run left half-written; the states from which training goes on stay."""
        for path in (*self.folder.glob(".*.*"), *self.folder.glob("results/.*.*")):
            _remove(path)

    def clean(self) -> None:
        """Remove what methods learned from and the states of their training; it can be made again."""
        for path in (self.folder / "data", *self.folder.glob(".*")):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
