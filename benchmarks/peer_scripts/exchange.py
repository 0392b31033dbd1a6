"""What the scripts of all peers share: the arrays they read, the clock, and what they write.

They run in a Python of their own and know nothing of urank: `python train_NAME.py ARRAYS SETTINGS OUT`, with a folder
of `.npy` files, the settings as a JSON file, and a folder for `scores.npy` and `result.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Predict = Callable[[NDArray[np.float32]], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of a split, list by list, the items of a list by rising position."""

    features: NDArray[np.float32]
    click: NDArray[np.float32]
    position: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def joined(self, other: Split) -> Split:
        """Append the lists of another split."""
        names = ("features", "click", "position", "lengths")
        return Split(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))

    def shuffled(self, seed: int) -> Split:
        """Shuffle the items of each list, so that ties are broken at random."""
        order = np.lexsort((np.random.default_rng(seed).random(len(self.click)), self.list_of_row))
        return Split(self.features[order], self.click[order], self.position[order], self.lengths)

    @property
    def list_of_row(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def run(package: str, fit: Callable[[Split, Split, dict[str, Any]], Predict]) -> None:
    """Load, train, score; training is from arrays in memory to a model that scores."""
    arrays, settings, out = (Path(argument) for argument in sys.argv[1:4])
    start = time.perf_counter()
    train, valid = (
        Split(*(np.load(arrays / f"{split}_{name}.npy") for name in ("features", "click", "position", "lengths")))
        for split in ("train", "valid")
    )
    test = np.load(arrays / "test_features.npy")
    loaded = time.perf_counter()
    predict = fit(train, valid, json.loads(settings.read_text(encoding="utf-8")))
    trained = time.perf_counter()
    np.save(out / "scores.npy", np.asarray(predict(test), dtype=np.float64))
    many = np.tile(test, (-(-100_000 // len(test)), 1))
    result = {
        "load_seconds": loaded - start,
        "train_seconds": trained - loaded,
        "score_seconds": _median_seconds(lambda: predict(many)),
        "score_rows": len(many),
        "version": version(package),
    }
    (out / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _median_seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
