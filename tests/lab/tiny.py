"""Experiments that take seconds: few queries, a small store, and networks that are hardly trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from urank.lab.experiment import EXPERIMENTS, ExperimentConfig, read_experiment
from urank.lab.experiment_results import METRICS, STORE_METRICS, MethodKind, MethodRow, StoreRow
from urank.lab.runner import EVERY_STEP

__all__ = [
    "FEW",
    "KNOWN",
    "ONE_SETTING",
    "QUICK",
    "TINY",
    "config",
    "half_written",
    "lists",
    "results",
    "row",
    "store_row",
    "visits",
]

KNOWN = tuple(EVERY_STEP)
QUICK = {"epochs": 2, "batch_lists": 64}
MARKET = {
    "users": 200,
    "apps": 40,
    "candidates": 8,
    "positions": 6,
    "random_days": 4,
    "random_visits": 250,
    "log_days": 3,
    "warmup_days": 1,
}
TINY: dict[str, Any] = {
    "simulation": {"queries": 60, "sessions": 3, "features": 8, "valid": 0.2, "test": 0.3, "label_share": 0.1},
    "clicks": {"families": ["monotone"], "training": QUICK},
    "scorer": {"training": QUICK},
    "faithful": {"training": QUICK},
    "svm": {"training": {"epochs": 4, "batch_lists": 4}},  # few steps would hardly move a linear score
    "cpbm": {"training": QUICK},
    "trees": {"trees": 3, "threads": 1},
    "store": {
        "market": MARKET,
        "test_visits": 80,
        "production": {"training": QUICK},
        "clicks": {"families": ["monotone"], "training": QUICK},
        "scorer": {"training": QUICK},
        "svm": {"training": QUICK},
        "live": {
            "market": {"users": 1500, "visits": 0.5, "apps": 40, "candidates": 10, "positions": 6, "random_days": 1},
            "before": 2,
            "during": 2,
            "after": 2,
            "production": {"training": QUICK},
            "clicks": {"training": QUICK},
            "scorer": {"training": QUICK},
        },
    },
}
ONE_SETTING = [name for name in EXPERIMENTS if name not in ("attention", "users")]
FEW = ("svm-none", "lambdarank-truth", "urank", "km")


def config(experiment: str = "table1", **settings: Any) -> ExperimentConfig:
    """The tiny experiment with other settings, table by table."""
    return read_experiment(experiment, TINY | settings)


def half_written(folder: Path) -> list[Path]:
    """What is there under a name that nothing complete has."""
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


def lists(method: str, clicks: list[float], seed: int = 0, **metrics: list[float]) -> pl.DataFrame:
    """What a method did on a few queries: its #Click, and the other metrics likewise if they are not given."""
    values = {name: metrics.get(name, clicks) for name in METRICS}
    names = [f"q{number}" for number in range(len(clicks))]
    frame = pl.DataFrame({"query_id": names, **values, "seconds": float(seed + 1)})
    return frame.select(pl.lit(seed, pl.Int32).alias("seed"), pl.lit(method).alias("method"), pl.all())


def results(*parts: pl.DataFrame) -> pl.DataFrame:
    """All of them in one frame, the queries of each method in an order of its own."""
    return pl.concat(part.sample(fraction=1, shuffle=True, seed=number) for number, part in enumerate(parts))


def row(key: str, clicks: float, kind: MethodKind = "baseline", **fields: Any) -> MethodRow:
    """A row of Table 1 whose metrics are all the same."""
    means = dict.fromkeys(METRICS, clicks)
    return MethodRow(**{"key": key, "name": key, "kind": kind, "mean": means, "deviation": means, **fields})


def visits(
    method: str, clicks: list[float], seed: int = 0, *, true: list[float] | None = None, **metrics: list[float]
) -> pl.DataFrame:
    """What a method did on a few visits: its debiased #click and the true one, the same when it is not given, and the
    other metrics likewise."""
    values = {name: metrics.get(name, clicks) for name in STORE_METRICS}
    truth = {f"{name} true": metrics.get(name, true or clicks) for name in STORE_METRICS}
    names = [f"visit-{number}" for number in range(len(clicks))]
    frame = pl.DataFrame({"query_id": names, **values, **truth, "seconds": float(seed + 1)})
    return frame.select(pl.lit(seed, pl.Int32).alias("seed"), pl.lit(method).alias("method"), pl.all())


def store_row(
    key: str, clicks: float, kind: MethodKind = "baseline", true: float | None = None, **fields: Any
) -> StoreRow:
    """A row of Table 3 whose metrics are all the same."""
    means = dict.fromkeys(STORE_METRICS, clicks)
    truth = dict.fromkeys(STORE_METRICS, clicks if true is None else true)
    given = {"mean": means, "deviation": means, "true": truth, "true_deviation": truth, **fields}
    return StoreRow(**{"key": key, "name": key, "kind": kind, **given})
