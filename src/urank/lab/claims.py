"""The paper's tables and figures from the results of its methods, and whether the paper's claims hold.

In order: Table 1 and Section 5.4, Table 2 (RQ2), Table 3 and Section 6.1, the live test and Section 6.2, the effect of
each deviation from the paper, and Figures 3 and 4 (RQ1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import kendalltau

from urank.evaluation.intervals import Interval, holm, normal_interval, paired
from urank.lab.appstore_experiment import STORE_METHODS
from urank.lab.experiment import ComparedMethod, table_array
from urank.lab.experiment_results import (
    DATASETS,
    METRICS,
    PUBLISHED_FLUCTUATION,
    PUBLISHED_LIFTS,
    STORE_METRICS,
    ArchitectureRow,
    Claim,
    Difference,
    ListExample,
    LiveRow,
    MethodRow,
    PositionCurve,
    StoreRow,
    published_architectures,
    published_metrics,
    published_store,
)
from urank.lab.letor_experiment import METHODS
from urank.lab.live_test import AA_AFTER, AA_BEFORE, AB


def read_results(folders: Sequence[Path], keys: Sequence[str]) -> pl.DataFrame:
    """Read the results of methods: a row for each seed, method and test query or visit."""
    return pl.concat(
        pl.read_parquet(folder / "results" / f"{key}.parquet").select(
            pl.lit(seed, pl.Int32).alias("seed"), pl.lit(key).alias("method"), pl.all()
        )
        for seed, folder in enumerate(folders)
        for key in keys
    )


def _deviation(by_seed: NDArray[np.float64]) -> float:
    return float(by_seed.std(ddof=1)) if len(by_seed) > 1 else float("nan")


ByList = Callable[[str, str], NDArray[np.float64]]
"""Returns a metric of a method by query or visit, in the same order for all methods."""


def _figures(
    results: pl.DataFrame, key: str, metrics: Sequence[str], rivals: Sequence[str], values: ByList, suffix: str = ""
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return the mean and the deviation over seeds of each metric, and the p-value against the rivals, if any.

    The p-value is the largest Holm-corrected one of paired t-tests against all rivals; 1 if one of them is not worse.
    """
    own = results.filter(pl.col("method") == key).group_by("seed", maintain_order=True)
    by_seed = own.agg(pl.col(metric + suffix).fill_nan(None).mean().alias(metric) for metric in metrics)
    columns = {metric: by_seed[metric].to_numpy() for metric in metrics}
    p_value = {}
    for metric in metrics if rivals else ():
        ours = values(key, metric + suffix)
        compared = [paired(ours, values(rival, metric + suffix)) for rival in rivals]
        worse = all(difference.mean > 0 for difference in compared)
        p_value[metric] = float(np.max(holm([each.p_value for each in compared]))) if worse else 1.0
    mean = {metric: float(column.mean()) for metric, column in columns.items()}
    return mean, {metric: _deviation(column) for metric, column in columns.items()}, p_value


def _rivals(methods: Mapping[str, ComparedMethod[Any, Any]], key: str, keys: Sequence[str]) -> list[str]:
    """Return the baselines that a method of ours is compared with; none for other methods."""
    return [each for each in keys if methods[key].kind == "ours" and methods[each].kind == "baseline"]


def _seconds(results: pl.DataFrame, key: str) -> float:
    own = results.filter(pl.col("method") == key).group_by("seed", maintain_order=True)
    return float(own.agg(pl.col("seconds").first())["seconds"].to_numpy().mean())


def claims_over_seeds(claims: Callable[[pl.DataFrame], list[Claim]], results: pl.DataFrame) -> list[Claim]:
    """Check claims on the mean over seeds and, if there are several seeds, also on each seed alone.

    A claim must then hold on most seeds. A seed is other data and other users, so that one seed with many clicks could
    decide the mean. `claims` makes the same claims of any results.
    """
    together = claims(results)
    alone = [claims(part) for part in results.partition_by("seed", maintain_order=True)]
    if len(alone) < 2:
        return together
    counts = [sum(bool(claim.holds) for claim in same) for same in zip(*alone, strict=True)]
    found = []
    for claim, count in zip(together, counts, strict=True):
        figures = f"{claim.figures}; holds on {count} of {len(alone)} seeds alone"
        found.append(Claim(claim.text, bool(claim.holds) and 2 * count > len(alone), figures))
    return found


def method_rows(results: pl.DataFrame, keys: Sequence[str], dataset: str = "") -> list[MethodRow]:
    """Compute the rows of Table 1.

    A row of ours is compared with every baseline by paired t-tests on queries, each averaged over its seeds, since
    given documents have the same test queries with every seed.
    """
    published = published_metrics(dataset)
    values = partial(query_values, results)
    rows = []
    for key in keys:
        figures = _figures(results, key, METRICS, _rivals(METHODS, key, keys), values)
        known = published.get(key, {}), _seconds(results, key)
        rows.append(MethodRow(key, METHODS[key].name, METHODS[key].kind, *figures, *known))
    return rows


def query_values(results: pl.DataFrame, key: str, metric: str) -> NDArray[np.float64]:
    """Return a metric by query, averaged over the seeds that have a value, in the same order for all methods."""
    own = results.filter(pl.col("method") == key).group_by("query_id").agg(pl.col(metric).fill_nan(None).mean())
    return own.sort("query_id")[metric].fill_null(float("nan")).to_numpy()


def method_claims(rows: Sequence[MethodRow]) -> list[Claim]:
    """Check the claims of Section 5.4 on Table 1."""
    by_key = {row.key: row for row in rows}
    baselines = [row for row in rows if row.kind == "baseline"]
    claims: list[Claim] = []
    for key, name in (("urank", "U-rank"), ("urank-paper", "U-rank as printed")):
        if key in by_key and baselines:
            claims += [_significantly_best(by_key[key], baselines, metric, name) for metric in ("#Click", "CTR")]
            claims.append(_most_relevant(by_key[key], baselines, name))
    for ranker, name in (("lambdarank", "LambdaRank"), ("svm", "SVMRank")):
        claims += _propensity_claims(by_key, ranker, name)
    for other, name in (("ctr1", "CTR-1, with which it shares the click model"), ("dla", "DLA")):
        if {"urank", other} <= set(by_key):
            claims.append(_more_clicks(f"U-rank outperforms {name}", by_key["urank"], by_key[other]))
    others = [row for row in rows if row.key != "km"]
    if "km" in by_key and others:
        best = max(others, key=lambda row: row.mean["#Click"])
        claims.append(_more_clicks("KM on the oracle model produces the best utility", by_key["km"], best, equal=True))
    return claims


def _significantly_best(ours: MethodRow, baselines: Sequence[MethodRow], metric: str, name: str) -> Claim:
    best = max(baselines, key=lambda row: row.mean[metric])
    p_value = ours.p_value.get(metric)
    p = "" if p_value is None else ", p < 1e-16" if p_value < 1e-16 else f", p = {p_value:.1g}"
    figures = f"{ours.mean[metric]:.4f} against {best.mean[metric]:.4f} of {best.name}, the best baseline{p}"
    text = f"{name} is significantly better than every baseline on {metric}"
    return Claim(text, ours.mean[metric] > best.mean[metric] and ours.significant(metric), figures)


def _most_relevant(ours: MethodRow, baselines: Sequence[MethodRow], name: str) -> Claim:
    counts = {metric: sum(ours.mean[metric] > row.mean[metric] for row in baselines) for metric in ("MAP", "nDCG@10")}
    figures = ", ".join(f"above {count} of {len(baselines)} on {metric}" for metric, count in counts.items())
    text = f"{name} outperforms most of the baselines on MAP and nDCG"
    return Claim(text, all(2 * count > len(baselines) for count in counts.values()), figures)


def _propensity_claims(by_key: Mapping[str, MethodRow], ranker: str, name: str) -> list[Claim]:
    """Check the claims on the estimates of examination, for one ranker, and on how many of the paper's own data sets
    they hold by its Table 1."""
    variants = ("none", "randomised", "cpbm", "truth")
    if any(f"{ranker}-{variant}" not in by_key for variant in variants):
        return []
    rows = {variant: by_key[f"{ranker}-{variant}"] for variant in variants}
    listed = ", ".join(f"{row.name.split(', ')[1]} {row.mean['#Click']:.4f}" for row in rows.values())
    ours = {variant: row.mean["#Click"] for variant, row in rows.items()}
    papers = [published_metrics(dataset) for dataset in DATASETS]
    published = [{variant: paper[f"{ranker}-{variant}"]["#Click"] for variant in variants} for paper in papers]
    texts = {
        f"{name} with ground-truth propensities has the best utility of {name}'s variants": _truth_is_best,
        f"{name} with CPBM is the second best of those with propensities, above Randomization": _cpbm_is_second,
        f"Randomization fails to perform well: {name} earns no more with it than without": _randomisation_fails,
    }
    found = []
    for text, holds in texts.items():
        own = sum(map(holds, published))
        found.append(Claim(text, holds(ours), f"{listed}; in the paper's own Table 1 on {own} of {len(papers)} sets"))
    return found


def _truth_is_best(clicks: Mapping[str, float]) -> bool:
    return max(clicks, key=lambda variant: clicks[variant]) == "truth"


def _cpbm_is_second(clicks: Mapping[str, float]) -> bool:
    return clicks["truth"] > clicks["cpbm"] > clicks["randomised"]


def _randomisation_fails(clicks: Mapping[str, float]) -> bool:
    return clicks["randomised"] <= clicks["none"]


def _more_clicks(text: str, better: MethodRow, worse: MethodRow, *, equal: bool = False) -> Claim:
    one, other = better.mean["#Click"], worse.mean["#Click"]
    gain = one / other - 1
    figures = f"#Click {one:.4f} against {other:.4f} of {worse.name}, {100 * gain:+.1f} %"
    return Claim(text, gain > 0 or (equal and gain == 0), figures)


_FAMILIES = {"urank-a1": "vector", "urank-a2": "position"}


def architecture_rows(
    folders: Sequence[Path], results: pl.DataFrame, keys: Sequence[str], dataset: str = ""
) -> list[ArchitectureRow]:
    """Compute the rows of Table 2 from the results of `urank-a1` and `urank-a2`, and the AUC in the folders."""
    published = published_architectures(dataset)
    found = []
    for key in keys:
        family = _FAMILIES[key]
        parts = [json.loads((folder / f"auc-{family}.json").read_text(encoding="utf-8")) for folder in folders]
        own = results.filter(pl.col("method") == key).group_by("seed").agg(pl.col("#Click", "CTR").mean()).sort("seed")
        by_seed = {split: np.array([part[split] for part in parts]) for split in ("train", "test", "valid")}
        by_seed |= {metric: own[metric].to_numpy() for metric in ("#Click", "CTR")}
        train, test, valid, clicks, ctr = (float(values.mean()) for values in by_seed.values())
        deviation = {name: _deviation(values) for name, values in by_seed.items()}
        values = {name: each.tolist() for name, each in by_seed.items()}
        name = f"{key[-2:].upper()} ({family})"
        known = published.get(key, {})
        found.append(ArchitectureRow(name, train, test, valid, clicks, ctr, deviation, known, values))
    return found


def architecture_claims(rows: Sequence[ArchitectureRow]) -> list[Claim]:
    """Check the claims of RQ2 by the interval of the difference over seeds; undecided if it contains 0."""
    if len(rows) < 2:
        return []
    a1, a2 = rows
    return [
        _over_seeds("A2 achieves the better AUC", a2, a1, "test", "test AUC"),
        _over_seeds("A1 leads to the higher utility", a1, a2, "#Click", "#Click"),
    ]


def architecture_difference(better: ArchitectureRow, other: ArchitectureRow, column: str) -> Interval:
    """Compute the mean difference of two architectures over seeds, with its 95 % interval; NaN with one seed."""
    return normal_interval(np.subtract(better.by_seed[column], other.by_seed[column]))


def _over_seeds(text: str, better: ArchitectureRow, other: ArchitectureRow, column: str, name: str) -> Claim:
    difference = architecture_difference(better, other, column)
    ours, theirs = (float(np.mean(row.by_seed[column])) for row in (better, other))
    figures = f"{name} {ours:.4f} against {theirs:.4f}, difference {difference.mean:+.4f}"
    if difference.n < 2:
        return Claim(text, None, f"{figures} on one seed")
    figures += f" (95 % interval over {difference.n} seeds {difference.low:+.4f} to {difference.high:+.4f})"
    return Claim(text, True if difference.low > 0 else False if difference.high < 0 else None, figures)


def store_rows(results: pl.DataFrame, keys: Sequence[str]) -> list[StoreRow]:
    """Compute the rows of Table 3. The t-tests are on visits; every seed has other visits."""
    published, values = published_store(), _visit_metrics(results)
    rows = []
    for key in keys:
        method, rivals = STORE_METHODS[key], _rivals(STORE_METHODS, key, keys)
        debiased, true = (_figures(results, key, STORE_METRICS, rivals, values, suffix) for suffix in ("", " true"))
        known = published.get(key, {}), _seconds(results, key)
        rows.append(StoreRow(key, method.name, method.kind, *debiased, *known, *true))
    return rows


def _visit_metrics(results: pl.DataFrame) -> ByList:
    parts = results.sort("seed", "query_id").partition_by("method", as_dict=True)
    return lambda key, column: parts[(key,)][column].to_numpy()


def store_claims(results: pl.DataFrame, rows: Sequence[StoreRow]) -> list[Claim]:
    """Check the claims of Section 6.1, and whether the paper's debiased metrics order the methods correctly."""
    by_key = {row.key: row for row in rows}
    baselines = [row for row in rows if row.kind == "baseline"]
    claims = []
    if "store-urank" in by_key and baselines:
        claims += [_best_in_store(by_key["store-urank"], baselines, metric) for metric in STORE_METRICS]
    if {"store-urank", "store-deepfm"} <= set(by_key):
        ours, deepfm = by_key["store-urank"], by_key["store-deepfm"]
        claims += [_above_deepfm(ours, deepfm, metric) for metric in ("#click", "Revenue")]
    compared = [row for row in rows if row.kind != "oracle"]
    if len(compared) > 1:
        values = _visit_metrics(results)
        claims += [_same_order(values, compared, metric) for metric in STORE_METRICS]
    return claims


def _best_in_store(ours: StoreRow, baselines: Sequence[StoreRow], metric: str) -> Claim:
    best = max(baselines, key=lambda row: row.mean[metric])
    truly = max(baselines, key=lambda row: row.true[metric])
    figures = (
        f"{ours.mean[metric]:.3f} against {best.mean[metric]:.3f} of {best.name}, the best baseline; truly "
        f"{ours.true[metric]:.3f} against {truly.true[metric]:.3f} of {truly.name}"
    )
    text = f"{ours.name} is significantly better than every baseline on {metric}"
    return Claim(text, ours.significant(metric), figures)


def _above_deepfm(ours: StoreRow, deepfm: StoreRow, metric: str) -> Claim:
    text = f"U-rank performs better than DeepFM, the production ranker, on {metric}"
    estimated = _change(ours.mean[metric], deepfm.mean[metric])
    figures = f"{estimated}, truly {_change(ours.true[metric], deepfm.true[metric])}"
    return Claim(text, ours.mean[metric] > deepfm.mean[metric], figures)


def _change(after: float, before: float) -> str:
    """Format a change in percent; a small log may have no downloads before, then absolute."""
    return f"{100 * (after / before - 1):+.1f} %" if before > 0 else f"{after - before:+.3f}"


def _same_order(values: ByList, rows: Sequence[StoreRow], metric: str) -> Claim:
    """Check that no pair of methods differs significantly by the estimate, and in the opposite direction by the truth.

    The level is 0.05 for all pairs together (Bonferroni).
    """
    tau = float(kendalltau([row.mean[metric] for row in rows], [row.true[metric] for row in rows]).statistic)
    pairs = list(combinations(rows, 2))
    reversed_pairs = []
    for one, other in pairs:
        if (one.mean[metric] - other.mean[metric]) * (one.true[metric] - other.true[metric]) < 0:
            estimated = paired(values(one.key, metric), values(other.key, metric))
            true = paired(values(one.key, f"{metric} true"), values(other.key, f"{metric} true"))
            if max(estimated.p_value, true.p_value) < 0.05 / len(pairs):
                reversed_pairs.append(f"{one.name} and {other.name}")
    figures = "all tie" if isnan(tau) else f"rank correlation (Kendall) {tau:.2f}"
    figures += f"; reversed: {', '.join(reversed_pairs)}" if reversed_pairs else ""
    return Claim(f"the debiased {metric} orders the methods as the truth does", not reversed_pairs, figures)


def live_rows(results: pl.DataFrame) -> list[LiveRow]:
    """Average the live tests of all seeds, by period and metric."""
    columns = ("lift", "low", "high", "true_lift")
    by = results.group_by("period", "metric", maintain_order=True).agg(
        *(pl.col(name).mean() for name in columns), pl.col("largest_day").max()
    )
    return [LiveRow(**row) for row in by.iter_rows(named=True)]


def live_claims(rows: Sequence[LiveRow]) -> list[Claim]:
    """Check the claims of Section 6.2."""
    by = {(row.period, row.metric): row for row in rows}
    largest = {
        metric: max(by[period, metric].largest_day for period in _AA if (period, metric) in by) for metric in _LIVE
    }
    figures = ", ".join(f"{metric} by up to {100 * each:.1f} %" for metric, each in largest.items())
    found = [
        Claim(
            f"in the A/A tests CTR and CVR fluctuate within {100 * PUBLISHED_FLUCTUATION:.0f} %, day by day",
            max(largest.values()) <= PUBLISHED_FLUCTUATION,
            figures,
        )
    ]
    for metric in _LIVE:
        row = by[AB, metric]
        text = f"from the launch on U-rank significantly improves {metric} over DeepFM, the production ranker"
        found.append(Claim(text, row.low > 0, _lift_text(row)))
    for metric, published in PUBLISHED_LIFTS.items():
        row = by[AB, metric]
        text = f"{metric} improves by {100 * published:.1f} % on average, as in the paper's store"
        found.append(Claim(text, row.low <= published <= row.high, _lift_text(row)))
    after = [by[AA_AFTER, metric] for metric in _LIVE if (AA_AFTER, metric) in by]
    if after:
        gone = all(row.low <= 0 <= row.high and row.high < by[AB, row.metric].lift for row in after)
        text = "with DeepFM in both arms again, the improvement of CTR and CVR drops sharply and is gone"
        found.append(Claim(text, gone, "; ".join(f"{row.metric} {_lift_text(row)}" for row in after)))
    return found


_LIVE = tuple(PUBLISHED_LIFTS)
_AA = (AA_BEFORE, AA_AFTER)


def _lift_text(row: LiveRow) -> str:
    interval = f"95 % interval {100 * row.low:+.1f} to {100 * row.high:+.1f} %"
    return f"{100 * row.lift:+.1f} % ({interval}), truly {100 * row.true_lift:+.1f} %"


_CHANGES = (
    (
        "the stable form of the loss in place of Eq. 7 as printed, with clipped scores",
        "urank-paper",
        "urank-counterfactual",
    ),
    ("the click table as the target in place of Eq. 3 on the logged clicks", "urank-counterfactual", "urank-a1"),
    ("the stable form of the loss, when the target is the click table", "urank-printed-model", "urank-a1"),
    ("the best of three click models, or their mean, in place of A1", "urank-a1", "urank"),
    ("the exact matching in place of sorting by scores", "urank", "urank-match"),
    ("CTR-1 read at position 1, not at 2 as in the released code", "ctr2", "ctr1"),
)


def differences(results: pl.DataFrame, keys: Sequence[str]) -> list[Difference]:
    """Compare #Click before and after each change, by the paired t-test on queries, each averaged over its seeds."""
    found = []
    for text, before, after in _CHANGES:
        if before in keys and after in keys:
            old, new = (query_values(results, key, "#Click") for key in (before, after))
            names = METHODS[before].name, METHODS[after].name
            found.append(Difference(text, *names, float(old.mean()), float(new.mean()), paired(new, old).p_value))
    return found


def position_curves(folders: Sequence[Path], results: pl.DataFrame, keys: Sequence[str]) -> list[PositionCurve]:
    """Compute Figure 4: by method, the mean true click probability at each position, over queries and seeds."""
    tables = [pl.read_parquet(folder / "candidates.parquet", columns=["item_id", "table"]) for folder in folders]
    curves = []
    for key in keys:
        own = results.filter(pl.col("method") == key)
        means = np.array([_by_position(table, own.filter(pl.col("seed") == seed)) for seed, table in enumerate(tables)])
        deviation = means.std(axis=0, ddof=1) if len(means) > 1 else np.full(means.shape[1], np.nan)
        curves.append(PositionCurve(METHODS[key].name, means.mean(axis=0), deviation))
    return curves


def _by_position(tables: pl.DataFrame, lists: pl.DataFrame) -> NDArray[np.float64]:
    """Return the mean true click probability at each position `[K]`; shorter lists have 0 there."""
    shown = lists.select("item_id", "position").explode("item_id", "position")
    K = len(tables["table"][0])
    at = pl.col("table").list.get(pl.col("position") - 1).alias("click")
    placed = shown.filter(pl.col("position") <= K).join(tables, on="item_id", how="left").select("position", at)
    sums = np.zeros(K)
    np.add.at(sums, placed["position"].to_numpy() - 1, placed["click"].to_numpy())
    return sums / lists.height


def curve_claims(curves: Sequence[PositionCurve]) -> list[Claim]:
    """Check the claims of RQ1 on Figure 4, which the paper makes for both of its data sets."""
    by_name = {curve.name: curve for curve in curves}
    lambdarank, ours, oracle = (METHODS[key].name for key in ("lambdarank-truth", "urank", "km"))
    if not {lambdarank, ours, oracle} <= set(by_name):
        return []
    total = {name: float(by_name[name].mean.sum()) for name in (lambdarank, ours, oracle)}
    last = np.flatnonzero(by_name[oracle].mean)[-1]  # lists may be shorter than there are positions
    steep = {name: float(by_name[name].mean[0] / by_name[name].mean[last]) for name in total}
    nearer = abs(np.log(steep[ours] / steep[oracle])) < abs(np.log(steep[lambdarank] / steep[oracle]))
    return [
        Claim(
            f"{ours} has a larger sum of click probabilities over all positions than {lambdarank}",
            total[ours] > total[lambdarank],
            f"{total[ours]:.4f} against {total[lambdarank]:.4f} (oracle {total[oracle]:.4f})",
        ),
        Claim(
            "U-rank adapts to the severity of position bias: from the first to the last position it falls more like "
            f"the oracle than {lambdarank} does",
            bool(nearer),
            ", ".join(f"{name} by a factor of {each:.1f}" for name, each in steep.items()),
        ),
    ]


def list_example(folder: Path, results: pl.DataFrame, keys: Sequence[str]) -> ListExample:
    """Compute Figure 3 for the first test query of the first seed; the paper also takes the first query of its data."""
    candidates = pl.read_parquet(folder / "candidates.parquet")
    query = candidates["query_id"].cast(pl.String).sort()[0]
    of_query = pl.col("query_id").cast(pl.String) == query
    items = candidates.filter(of_query).sort("relevance", descending=True)
    names = items["item_id"].to_list()
    positions, clicks, ndcg = {}, {}, {}
    for key in keys:
        row = results.filter((pl.col("seed") == 0) & (pl.col("method") == key) & of_query)
        place = dict(zip(row["item_id"][0].to_list(), row["position"][0].to_list(), strict=True))
        name = METHODS[key].name
        positions[name] = np.array([place[item] for item in names], dtype=np.int64)
        clicks[name], ndcg[name] = float(row["#Click"][0]), float(row["nDCG@10"][0])
    return ListExample(
        query=query,
        items=names,
        label=items["relevance"].to_numpy().astype(np.float64),
        table=table_array(items),
        positions=positions,
        clicks=clicks,
        ndcg=ndcg,
    )
