"""What Figures 3 and 4 are drawn from: click probabilities by position, and the list of one query (RQ1)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import isnan
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import kendalltau

from urank.evaluation.intervals import holm, paired
from urank.lab.appstore_experiment import STORE_METHODS
from urank.lab.letor_experiment import METHODS
from urank.lab.results import (
    METRICS,
    STORE_METRICS,
    AucRow,
    Claim,
    Difference,
    ListExample,
    PositionCurve,
    Row,
    StoreRow,
    over_seeds,
    published_architectures,
    published_metrics,
    published_store,
)

__all__ = [
    "above_all",
    "architecture_claims",
    "architectures",
    "claims",
    "claims_over_seeds",
    "curve_claims",
    "differences",
    "list_example",
    "position_curves",
    "query_values",
    "read_results",
    "read_store_results",
    "rows",
    "store_claims",
    "store_rows",
]


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


_FAMILIES = {"urank-a1": "vector", "urank-a2": "position"}


def architectures(folders: Sequence[Path], found: Sequence[Row], dataset: str = "") -> list[AucRow]:
    """The rows of Table 2: AUC by split, and what U-rank earns on each architecture.

    Args:
        folders: of the seeds.
        found: the rows `urank-a1` and `urank-a2`, as `table1.rows` gives them.
        dataset: the paper's name of the data, if it is the paper's.
    """
    of_paper = published_architectures(dataset)
    told = []
    for row in found:
        paths = [folder / f"auc-{_FAMILIES[row.key]}.json" for folder in folders]
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        auc = {split: np.array([part[split] for part in parts]) for split in ("train", "test", "valid")}
        deviation = {split: float(each.std(ddof=1)) if len(each) > 1 else float("nan") for split, each in auc.items()}
        told.append(
            AucRow(
                name=f"{row.key[-2:].upper()} ({_FAMILIES[row.key]})",
                train=float(auc["train"].mean()),
                test=float(auc["test"].mean()),
                valid=float(auc["valid"].mean()),
                clicks=row.mean["#Click"],
                ctr=row.mean["CTR"],
                deviation={**deviation, "#Click": row.deviation["#Click"], "CTR": row.deviation["CTR"]},
                published=of_paper.get(row.key, {}),
            )
        )
    return told


def architecture_claims(found: Sequence[AucRow]) -> list[Claim]:
    """What RQ2 says."""
    if len(found) < 2:
        return []
    a1, a2 = found
    return [
        Claim("A2 achieves the better AUC", a2.test > a1.test, f"test AUC {a2.test:.4f} against {a1.test:.4f} of A1"),
        Claim(
            "A1 leads to the higher utility", a1.clicks > a2.clicks, f"#Click {a1.clicks:.4f} against {a2.clicks:.4f}"
        ),
    ]


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
        told += [_best_table3(by_key["store-urank"], baselines, metric) for metric in STORE_METRICS]
    if {"store-urank", "store-deepfm"} <= set(by_key):
        told += [
            _above_deepfm(by_key["store-urank"], by_key["store-deepfm"], metric) for metric in ("#click", "Revenue")
        ]
    judged = [row for row in found if row.kind != "oracle"]
    if len(judged) > 1:
        values = _Values(results)
        told += [_agrees(values, judged, metric) for metric in STORE_METRICS]
    return told


def _best_table3(ours: StoreRow, baselines: Sequence[StoreRow], metric: str) -> Claim:
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


_STEPS = (
    (
        "the stable form of the loss in place of Eq. 9 as printed, with clipped scores",
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
    """#Click before and after each change, with the paired t-test on queries, each the mean over its seeds."""
    found = []
    for text, before, after in _STEPS:
        if before in keys and after in keys:
            own, other = query_values(results, after, "#Click"), query_values(results, before, "#Click")
            compared = paired(own, other)
            found.append(
                Difference(
                    text,
                    METHODS[before].name,
                    METHODS[after].name,
                    float(other.mean()),
                    float(own.mean()),
                    compared.p_value,
                )
            )
    return found


def position_curves(folders: Sequence[Path], results: pl.DataFrame, keys: Sequence[str]) -> list[PositionCurve]:
    """Figure 4: for each method the mean true click probability at each position, over queries and seeds."""
    tables = [_true_tables(folder) for folder in folders]
    found = []
    for key in keys:
        means = np.array(
            [
                _by_position(table, results.filter((pl.col("seed") == seed) & (pl.col("method") == key)))
                for seed, table in enumerate(tables)
            ]
        )
        deviation = means.std(axis=0, ddof=1) if len(means) > 1 else np.full(means.shape[1], np.nan)
        found.append(PositionCurve(METHODS[key].name, means.mean(axis=0), deviation))
    return found


def _true_tables(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "candidates.parquet", columns=["item_id", "table"])


def _by_position(tables: pl.DataFrame, lists: pl.DataFrame) -> NDArray[np.float64]:
    """The mean `[K]` over lists of the true click probability at each position; a list without an item there has 0."""
    shown = lists.select("item_id", "position").explode("item_id", "position")
    K = len(tables["table"][0])
    at = pl.col("table").list.get(pl.col("position") - 1).alias("click")
    placed = shown.filter(pl.col("position") <= K).join(tables, on="item_id", how="left").select("position", at)
    sums = np.zeros(K)
    np.add.at(sums, placed["position"].to_numpy() - 1, placed["click"].to_numpy())
    return sums / lists.height


def curve_claims(found: Sequence[PositionCurve], lambdarank: str, ours: str, oracle: str) -> list[Claim]:
    """What RQ1 says of Figure 4, which holds for either data set of the paper."""
    by_name = {curve.name: curve for curve in found}
    if not {lambdarank, ours, oracle} <= set(by_name):
        return []
    total = {name: float(by_name[name].mean.sum()) for name in (lambdarank, ours, oracle)}
    last = np.flatnonzero(by_name[oracle].mean)[-1]  # lists may be shorter than there are positions
    steep = {name: float(by_name[name].mean[0] / by_name[name].mean[last]) for name in (lambdarank, ours, oracle)}
    nearer = abs(np.log(steep[ours] / steep[oracle])) < abs(np.log(steep[lambdarank] / steep[oracle]))
    return [
        Claim(
            f"{ours} has a larger sum of click probabilities over all positions than {lambdarank}",
            total[ours] > total[lambdarank],
            f"{total[ours]:.4f} against {total[lambdarank]:.4f} (oracle {total[oracle]:.4f})",
        ),
        Claim(
            "U-rank adapts to the severity of position bias: it falls from the first to the last position more as the "
            f"oracle does than {lambdarank} does",
            bool(nearer),
            ", ".join(f"{name} by a factor of {each:.1f}" for name, each in steep.items()),
        ),
    ]


def list_example(folder: Path, results: pl.DataFrame, keys: Sequence[str]) -> ListExample:
    """Figure 3: the first test query of the first seed, as the paper takes the first of its data."""
    own = results.filter((pl.col("seed") == 0) & pl.col("method").is_in(list(keys)))
    candidates = pl.read_parquet(folder / "candidates.parquet")
    query = candidates["query_id"].cast(pl.String).sort()[0]
    items = candidates.filter(pl.col("query_id").cast(pl.String) == query).sort("relevance", descending=True)
    names = items["item_id"].to_list()
    positions, clicks, ndcg = {}, {}, {}
    for key in keys:
        row = own.filter((pl.col("method") == key) & (pl.col("query_id").cast(pl.String) == query))
        place = dict(zip(row["item_id"][0].to_list(), row["position"][0].to_list(), strict=True))
        name = METHODS[key].name
        positions[name] = np.array([place[item] for item in names], dtype=np.int64)
        clicks[name], ndcg[name] = float(row["#Click"][0]), float(row["nDCG@10"][0])
    return ListExample(
        query=query,
        items=names,
        label=items["relevance"].to_numpy().astype(np.float64),
        table=np.array(items["table"].to_list(), dtype=np.float64),
        positions=positions,
        clicks=clicks,
        ndcg=ndcg,
    )
