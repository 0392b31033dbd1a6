"""Table 1 and the claims of Section 5.4 that rest on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.evaluate.stats import holm, paired
from urank.paper.methods import METHODS
from urank.paper.published import published_metrics
from urank.paper.results import METRICS, Claim, Row, over_seeds

__all__ = ["above_all", "claims", "claims_over_seeds", "query_values", "read_results", "rows"]


def read_results(folders: Sequence[Path], keys: Sequence[str]) -> pl.DataFrame:
    """What all methods did on all seeds: a row for each seed, method and test query."""
    parts = [
        pl.read_parquet(folder / "results" / f"{key}.parquet").select(
            pl.lit(seed, pl.Int32).alias("seed"), pl.lit(key).alias("method"), pl.all()
        )
        for seed, folder in enumerate(folders)
        for key in keys
    ]
    return pl.concat(parts)


def rows(results: pl.DataFrame, keys: Sequence[str], dataset: str = "") -> list[Row]:
    """The rows of Table 1 from what the methods did.

    Deviations are over the means of the seeds. A row of ours is compared with every baseline by the paired t-test on
    queries, each the mean over its seeds, since given documents have the same test queries with every seed; the
    p-values of one metric are Holm-corrected over the baselines, and the largest is kept.
    """
    of_paper = published_metrics(dataset)
    found = []
    baselines = [key for key in keys if METHODS[key].kind == "baseline"]
    for key in keys:
        own = results.filter(pl.col("method") == key)
        by_seed = own.group_by("seed", maintain_order=True).agg(
            *(pl.col(metric).fill_nan(None).mean() for metric in METRICS), pl.col("seconds").first()
        )
        p_value = {}
        if METHODS[key].kind == "ours" and baselines:
            p_value = {metric: _against_all(results, key, baselines, metric) for metric in METRICS}
        deviation = {
            metric: float(by_seed[metric].to_numpy().std(ddof=1)) if by_seed.height > 1 else float("nan")
            for metric in METRICS
        }
        found.append(
            Row(
                key=key,
                name=METHODS[key].name,
                kind=METHODS[key].kind,
                mean={metric: float(by_seed[metric].to_numpy().mean()) for metric in METRICS},
                deviation=deviation,
                p_value=p_value,
                published=of_paper.get(key, {}),
                seconds=float(by_seed["seconds"].to_numpy().mean()),
            )
        )
    return found


def _against_all(results: pl.DataFrame, key: str, baselines: Sequence[str], metric: str) -> float:
    others = [query_values(results, other, metric) for other in baselines]
    return above_all(query_values(results, key, metric), others)


def above_all(own: NDArray[np.float64], others: Sequence[NDArray[np.float64]]) -> float:
    """The largest Holm-corrected p-value of paired t-tests against all others; 1 when some of them is not worse."""
    differences = [paired(own, other) for other in others]
    if any(not difference.mean > 0 for difference in differences):
        return 1.0
    return float(np.max(holm([difference.p_value for difference in differences])))


def query_values(results: pl.DataFrame, key: str, metric: str) -> NDArray[np.float64]:
    """Of each query, the mean over its seeds that have a value, in an order that all methods share."""
    own = results.filter(pl.col("method") == key).group_by("query_id").agg(pl.col(metric).fill_nan(None).mean())
    return own.sort("query_id")[metric].fill_null(float("nan")).to_numpy()


def claims_over_seeds(results: pl.DataFrame, found: Sequence[Row]) -> list[Claim]:
    """The claims on the means over seeds, which also must hold on most seeds taken alone.

    Args:
        results: what the methods did.
        found: the rows made of them.
    """
    keys = [row.key for row in found]
    parts = results.partition_by("seed", maintain_order=True)
    return over_seeds(claims(found), [claims(rows(part, keys)) for part in parts])


def claims(found: Sequence[Row]) -> list[Claim]:
    """What Section 5.4 says of Table 1, sentence by sentence, and whether it holds here."""
    by_key = {row.key: row for row in found}
    baselines = [row for row in found if row.kind == "baseline"]
    told: list[Claim] = []
    for key, name in (("urank", "U-rank"), ("urank-paper", "U-rank as printed")):
        if key in by_key and baselines:
            told += [_best(by_key[key], baselines, metric, name) for metric in ("#Click", "CTR")]
            told.append(_most_relevant(by_key[key], baselines, name))
    for ranker, shown in (("lambdarank", "LambdaRank"), ("svm", "SVMRank")):
        told += _propensities(by_key, ranker, shown)
    for other, why in (
        ("ctr1", "U-rank outperforms CTR-1, with which it shares the click model"),
        ("dla", "U-rank outperforms DLA"),
    ):
        if {"urank", other} <= set(by_key):
            told.append(_above(why, by_key["urank"], by_key[other]))
    if "km" in by_key:
        others = [row for row in found if row.key != "km"]
        if others:
            best = max(others, key=lambda row: row.mean["#Click"])
            told.append(_above("KM on the oracle model produces the best utility", by_key["km"], best, tie=True))
    return told


def _best(ours: Row, baselines: Sequence[Row], metric: str, name: str) -> Claim:
    best = max(baselines, key=lambda row: row.mean[metric])
    p_value = ours.p_value.get(metric)
    p = "" if p_value is None else ", p < 1e-16" if p_value < 1e-16 else f", p = {p_value:.1g}"
    figures = f"{_amount(ours, metric)} against {_amount(best, metric)} of {best.name}, the best baseline{p}"
    text = f"{name} is significantly better than every baseline on {metric}"
    return Claim(text, ours.mean[metric] > best.mean[metric] and ours.significant(metric), figures)


def _most_relevant(ours: Row, baselines: Sequence[Row], name: str) -> Claim:
    counts = {metric: sum(ours.mean[metric] > row.mean[metric] for row in baselines) for metric in ("MAP", "nDCG@10")}
    figures = ", ".join(f"above {count} of {len(baselines)} on {metric}" for metric, count in counts.items())
    text = f"{name} outperforms most of the baselines on MAP and nDCG"
    return Claim(text, all(2 * count > len(baselines) for count in counts.values()), figures)


def _propensities(by_key: Mapping[str, Row], ranker: str, shown: str) -> list[Claim]:
    """What is said of the estimates of examination, for one ranker."""
    found = {
        variant: by_key[f"{ranker}-{variant}"]
        for variant in ("none", "randomised", "cpbm", "truth")
        if f"{ranker}-{variant}" in by_key
    }
    if len(found) < 4:
        return []
    figures = ", ".join(f"{row.name.split(', ')[1]} {_amount(row, '#Click')}" for row in found.values())
    clicks = {variant: row.mean["#Click"] for variant, row in found.items()}
    return [
        Claim(
            f"{shown} with ground-truth propensities has the best utility of {shown}'s variants",
            max(clicks, key=lambda variant: clicks[variant]) == "truth",
            figures,
        ),
        Claim(
            f"{shown} with CPBM is the second best of those with propensities, above Randomization",
            clicks["truth"] > clicks["cpbm"] > clicks["randomised"],
            figures,
        ),
        Claim(
            f"Randomization fails to perform well: {shown} earns no more with it than without",
            clicks["randomised"] <= clicks["none"],
            figures,
        ),
    ]


def _above(text: str, better: Row, worse: Row, *, tie: bool = False) -> Claim:
    gain = better.mean["#Click"] / worse.mean["#Click"] - 1
    figures = (
        f"#Click {_amount(better, '#Click')} against {_amount(worse, '#Click')} of {worse.name}, {100 * gain:+.1f} %"
    )
    return Claim(text, gain > 0 or (tie and gain == 0), figures)


def _amount(row: Row, metric: str) -> str:
    return f"{row.mean[metric]:.4f}"
