"""Table 3 and the claims of Section 6.1, on a simulated app store whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import isnan
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import kendalltau

from urank.evaluate.stats import paired
from urank.paper.published import published_store
from urank.paper.results import STORE_METRICS, Claim, StoreRow, over_seeds
from urank.paper.store_methods import STORE_METHODS
from urank.paper.table1 import above_all

__all__ = ["read_store_results", "store_claims", "store_rows"]


def read_store_results(folders: Sequence[Path], keys: Sequence[str]) -> pl.DataFrame:
    """What all methods did on all seeds: a row for each seed, method and visit."""
    return pl.concat(
        pl.read_parquet(folder / "results" / f"{key}.parquet").select(
            pl.lit(seed, pl.Int32).alias("seed"), pl.lit(key).alias("method"), pl.all()
        )
        for seed, folder in enumerate(folders)
        for key in keys
    )


def store_rows(results: pl.DataFrame, keys: Sequence[str]) -> list[StoreRow]:
    """The rows of Table 3; visits are compared one by one, and every visit of every seed is another."""
    baselines = [key for key in keys if STORE_METHODS[key].kind == "baseline"]
    of_paper = published_store()
    values = _Values(results)
    found = []
    for key in keys:
        method = STORE_METHODS[key]
        own = results.filter(pl.col("method") == key).drop("method", "query_id")
        by_seed = own.group_by("seed", maintain_order=True).mean()
        told: dict[str, dict[str, float]] = {}
        for prefix, ending in (("", ""), ("true_", " true")):
            columns = {metric: by_seed[metric + ending].to_numpy() for metric in STORE_METRICS}
            told[prefix or "mean"] = {metric: float(column.mean()) for metric, column in columns.items()}
            told[f"{prefix}deviation"] = {
                metric: float(column.std(ddof=1)) if len(column) > 1 else float("nan")
                for metric, column in columns.items()
            }
            told[f"{prefix}p_value"] = {
                metric: above_all(values(key, metric + ending), [values(other, metric + ending) for other in baselines])
                for metric in STORE_METRICS
                if method.kind == "ours" and baselines
            }
        found.append(
            StoreRow(
                key=key,
                name=method.name,
                kind=method.kind,
                published=of_paper.get(key, {}),
                seconds=float(by_seed["seconds"].to_numpy().mean()),
                true=told.pop("true_"),
                **told,
            )
        )
    return found


class _Values:
    """The metrics of a method by visit, in an order that all methods share."""

    def __init__(self, results: pl.DataFrame) -> None:
        parts = results.sort("seed", "query_id").partition_by("method", as_dict=True)
        self._parts = {str(key[0]): part for key, part in parts.items()}

    def __call__(self, key: str, column: str) -> NDArray[np.float64]:
        return self._parts[key][column].to_numpy()


def store_claims(results: pl.DataFrame, found: Sequence[StoreRow]) -> list[Claim]:
    """What Section 6.1 says of Table 3, and whether the paper's way to judge can be trusted; on most seeds too."""
    keys = [row.key for row in found]
    parts = results.partition_by("seed", maintain_order=True)
    alone = [_claims(part, store_rows(part, keys)) for part in parts]
    return over_seeds(_claims(results, found), alone)


def _claims(results: pl.DataFrame, found: Sequence[StoreRow]) -> list[Claim]:
    by_key = {row.key: row for row in found}
    baselines = [row for row in found if row.kind == "baseline"]
    told = []
    if "store-urank" in by_key and baselines:
        told += [_best(by_key["store-urank"], baselines, metric) for metric in STORE_METRICS]
    if {"store-urank", "store-deepfm"} <= set(by_key):
        told += [
            _above_deepfm(by_key["store-urank"], by_key["store-deepfm"], metric) for metric in ("#click", "Revenue")
        ]
    judged = [row for row in found if row.kind != "oracle"]
    if len(judged) > 1:
        values = _Values(results)
        told += [_agrees(values, judged, metric) for metric in STORE_METRICS]
    return told


def _best(ours: StoreRow, baselines: Sequence[StoreRow], metric: str) -> Claim:
    best = max(baselines, key=lambda row: row.mean[metric])
    truly = max(baselines, key=lambda row: row.true[metric])
    figures = (
        f"{ours.mean[metric]:.3f} against {best.mean[metric]:.3f} of {best.name}, the best baseline; truly "
        f"{ours.true[metric]:.3f} against {truly.true[metric]:.3f} of {truly.name}"
    )
    holds = ours.p_value.get(metric, 1.0) < 0.05
    return Claim(f"{ours.name} is significantly better than every baseline on {metric}", holds, figures)


def _above_deepfm(ours: StoreRow, deepfm: StoreRow, metric: str) -> Claim:
    text = f"U-rank performs better than DeepFM, the production ranker, on {metric}"
    figures = (
        f"{_change(ours.mean[metric], deepfm.mean[metric])}, truly {_change(ours.true[metric], deepfm.true[metric])}"
    )
    return Claim(text, ours.mean[metric] > deepfm.mean[metric], figures)


def _change(after: float, before: float) -> str:
    """In percent, unless there was nothing: a small log may have no download where a method would have shown it."""
    return f"{100 * (after / before - 1):+.1f} %" if before > 0 else f"{after - before:+.3f}"


def _agrees(values: _Values, judged: Sequence[StoreRow], metric: str) -> Claim:
    """Whether no two methods are told apart by the estimate, and by the truth the other way round; with as many pairs
    as there are, at a level of 0.05 for all of them together (Bonferroni)."""
    tau = float(kendalltau([row.mean[metric] for row in judged], [row.true[metric] for row in judged]).statistic)
    pairs = list(combinations(judged, 2))
    wrong = []
    for one, other in pairs:
        if (one.mean[metric] - other.mean[metric]) * (one.true[metric] - other.true[metric]) < 0:
            estimated = paired(values(one.key, metric), values(other.key, metric))
            true = paired(values(one.key, f"{metric} true"), values(other.key, f"{metric} true"))
            if max(estimated.p_value, true.p_value) < 0.05 / len(pairs):
                wrong.append(f"{one.name} and {other.name}")
    figures = "all tie" if isnan(tau) else f"rank correlation (Kendall) {tau:.2f}"
    figures += f"; the other way round: {', '.join(wrong)}" if wrong else ""
    return Claim(f"the debiased {metric} orders the methods as the truth does", not wrong, figures)
