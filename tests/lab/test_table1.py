"""Table 1 by hand: means, deviations, stars, and every claim of Section 5.4 both ways."""

from __future__ import annotations

from math import isnan, nan
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import ttest_rel

from lab.tiny import lists, results, row
from urank.lab.claims import claims, claims_over_seeds, query_values, read_results, rows
from urank.lab.results import METRICS, Row

SVM = ([0.45, 0.65, 1.05], [0.45, 0.6, 0.21])
LAMBDA = ([0.6, 0.75, 1.0], [0.5, 0.5, 0.3])
URANK = ([0.8, 0.85, 1.1], [0.55, 0.75, 0.45])
KM = ([0.9, 0.9, 1.2], [0.6, 0.8, 0.5])
KEYS = ("svm-none", "lambdarank-none", "urank", "km")


@pytest.fixture
def found() -> pl.DataFrame:
    parts = zip(KEYS, (SVM, LAMBDA, URANK, KM), strict=True)
    return results(*(lists(key, clicks[seed], seed) for key, clicks in parts for seed in (0, 1)))


def by_key(table: list[Row]) -> dict[str, Row]:
    return {each.key: each for each in table}


# --- rows ----------------------------------------------------------------------------------------------------------


def test_means_and_deviations_are_over_seeds(found: pl.DataFrame) -> None:
    table = rows(found, KEYS)
    assert [each.key for each in table] == list(KEYS)
    assert [each.kind for each in table] == ["baseline", "baseline", "ours", "oracle"]
    for each, clicks in zip(table, (SVM, LAMBDA, URANK, KM), strict=True):
        first, second = (sum(seed) / 3 for seed in clicks)
        for metric in METRICS:
            assert each.mean[metric] == pytest.approx((first + second) / 2)
            assert each.deviation[metric] == pytest.approx(abs(first - second) / 2**0.5)  # n − 1 below the line
        assert each.seconds == pytest.approx((1.0 + 2.0) / 2)
        assert each.published == {}


def test_seeds_weigh_alike_however_many_queries_they_have() -> None:
    found = results(lists("svm-none", [1.0], 0), lists("svm-none", [0.0, 0.0, 0.0], 1))
    assert rows(found, ["svm-none"])[0].mean["#Click"] == (1.0 + 0.0) / 2


def test_one_seed_has_no_deviation(found: pl.DataFrame) -> None:
    table = rows(found.filter(pl.col("seed") == 0), KEYS)
    assert all(isnan(each.deviation[metric]) for each in table for metric in METRICS)


def test_published_figures_stand_beside_ours(found: pl.DataFrame) -> None:
    table = by_key(rows(found, KEYS, "yahoo"))
    assert table["km"].published["#Click"] == 0.684
    assert table["urank"].published == {}  # the paper's U-rank is the one as printed


# --- stars ---------------------------------------------------------------------------------------------------------


def test_p_values_are_holms_of_the_paired_t_test(found: pl.DataFrame) -> None:
    """Two baselines: the smaller p-value is doubled, the larger kept, and of the two the larger counts."""
    ours = np.mean(URANK, axis=0)
    p = sorted(ttest_rel(ours, np.mean(other, axis=0)).pvalue for other in (SVM, LAMBDA))
    expected = max(min(1, 2 * p[0]), p[1])
    table = by_key(rows(found, KEYS))
    for metric in METRICS:
        assert table["urank"].p_value[metric] == pytest.approx(expected)
    assert p[1] < expected < 0.05  # so that the correction is seen
    assert table["urank"].significant("#Click")


def test_only_ours_are_compared_and_never_with_oracles(found: pl.DataFrame) -> None:
    table = by_key(rows(found, KEYS))
    assert all(table[key].p_value == {} and not table[key].significant("#Click") for key in KEYS if key != "urank")
    without = by_key(rows(found.filter(pl.col("method") != "km"), KEYS[:3]))
    assert without["urank"].p_value == table["urank"].p_value
    # The oracle is better, and that takes no star away.
    assert table["km"].mean["#Click"] > table["urank"].mean["#Click"]


def test_ours_are_not_compared_with_one_another(found: pl.DataFrame) -> None:
    better = results(*(lists("urank-match", clicks, seed) for seed, clicks in enumerate(KM)))
    table = by_key(rows(pl.concat([found, better]), [*KEYS, "urank-match"]))
    assert table["urank"].p_value == by_key(rows(found, KEYS))["urank"].p_value
    assert table["urank-match"].significant("#Click")


def test_no_star_where_one_baseline_is_better(found: pl.DataFrame) -> None:
    """By far better than one and a little worse than the other."""
    better = results(*(lists("dla", [each + 0.001 for each in clicks], seed) for seed, clicks in enumerate(URANK)))
    table = by_key(rows(pl.concat([found, better]), [*KEYS, "dla"]))
    assert table["urank"].p_value == dict.fromkeys(METRICS, 1.0)
    same = results(*(lists("dla", clicks, seed) for seed, clicks in enumerate(URANK)))
    assert by_key(rows(pl.concat([found, same]), [*KEYS, "dla"]))["urank"].p_value["CTR"] == 1.0


def test_without_baselines_there_is_nothing_to_be_better_than(found: pl.DataFrame) -> None:
    assert by_key(rows(found, ["urank", "km"]))["urank"].p_value == {}


def test_queries_without_a_value_are_left_out_of_both() -> None:
    """Those of either method; the mean of a row leaves out its own only."""
    ours, theirs = [0.9, nan, 0.8, 0.7, 0.95], [0.5, 0.1, 0.3, nan, 0.6]
    found = results(lists("urank", [1.0] * 5, MAP=ours), lists("svm-none", [0.5] * 5, MAP=theirs))
    table = by_key(rows(found, ["urank", "svm-none"]))
    assert table["urank"].mean["MAP"] == pytest.approx((0.9 + 0.8 + 0.7 + 0.95) / 4)
    assert table["svm-none"].mean["MAP"] == pytest.approx((0.5 + 0.1 + 0.3 + 0.6) / 4)
    both = [0, 2, 4]
    expected = ttest_rel(np.array(ours)[both], np.array(theirs)[both]).pvalue
    assert table["urank"].p_value["MAP"] == pytest.approx(expected)


def test_queries_are_means_over_seeds_and_paired_by_name(found: pl.DataFrame) -> None:
    for key, clicks in zip(KEYS, (SVM, LAMBDA, URANK, KM), strict=True):
        np.testing.assert_allclose(query_values(found, key, "#Click"), np.mean(clicks, axis=0))


def test_results_are_read_by_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}" / "results").mkdir(parents=True)
        for key in ("km", "svm-none"):
            path = tmp_path / f"seed-{seed}" / "results" / f"{key}.parquet"
            lists(key, [seed + 0.5]).drop("seed", "method").write_parquet(path)
    found = read_results([tmp_path / "seed-0", tmp_path / "seed-1"], ["svm-none", "km"])
    assert found.columns[:3] == ["seed", "method", "query_id"]
    assert found.select("seed", "method", "#Click").rows() == [
        (0, "svm-none", 0.5),
        (0, "km", 0.5),
        (1, "svm-none", 1.5),
        (1, "km", 1.5),
    ]


# --- claims --------------------------------------------------------------------------------------------------------

AS_PUBLISHED = {
    "svm-none": 0.60,
    "svm-randomised": 0.55,
    "svm-cpbm": 0.605,
    "svm-truth": 0.62,
    "lambdarank-none": 0.61,
    "lambdarank-randomised": 0.58,
    "lambdarank-cpbm": 0.615,
    "lambdarank-truth": 0.63,
    "dla": 0.56,
    "ctr1": 0.57,
    "urank-paper": 0.64,
    "urank": 0.65,
    "km": 0.70,
}


def judged_claims(**clicks: float) -> dict[str, bool | None]:
    """Each claim and whether it holds, when these methods earn something else than in the paper."""
    earned = AS_PUBLISHED | {key.replace("_", "-"): value for key, value in clicks.items()}
    table = []
    for key, value in earned.items():
        kind = "ours" if key.startswith("urank") else "oracle" if key == "km" or key.endswith("truth") else "baseline"
        name = f"{key.split('-')[0]}, {key.split('-')[1]}" if key.startswith(("svm", "lambda")) else key
        p_value = dict.fromkeys(METRICS, 0.001) if kind == "ours" else {}
        table.append(row(key, value, kind, name=name, p_value=p_value))
    found = claims(table)
    assert len({claim.text for claim in found}) == len(found)
    assert all(claim.figures for claim in found)
    return {claim.text: claim.holds for claim in found}


def test_all_claims_hold_on_figures_like_the_papers() -> None:
    found = judged_claims()
    assert set(found.values()) == {True}
    assert len(found) == 2 * 3 + 2 * 3 + 2 + 1


@pytest.mark.parametrize(
    ("clicks", "fall"),
    [
        (
            {"dla": 0.645},
            {
                "U-rank as printed is significantly better than every baseline on #Click",
                "U-rank as printed is significantly better than every baseline on CTR",
            },
        ),
        (
            {"ctr1": 0.66},
            {
                *(
                    f"{name} is significantly better than every baseline on {metric}"
                    for name in ("U-rank", "U-rank as printed")
                    for metric in ("#Click", "CTR")
                ),
                "U-rank outperforms CTR-1, with which it shares the click model",
            },
        ),
        (
            {"lambdarank_truth": 0.612},
            {
                "LambdaRank with ground-truth propensities has the best utility of LambdaRank's variants",
                "LambdaRank with CPBM is the second best of those with propensities, above Randomization",
            },
        ),
        (
            {"lambdarank_none": 0.635},
            {"LambdaRank with ground-truth propensities has the best utility of LambdaRank's variants"},
        ),
        (
            {"svm_cpbm": 0.54},
            {"SVMRank with CPBM is the second best of those with propensities, above Randomization"},
        ),
        (
            {"svm_randomised": 0.601},
            {"Randomization fails to perform well: SVMRank earns no more with it than without"},
        ),
        ({"km": 0.649}, {"KM on the oracle model produces the best utility"}),
    ],
)
def test_claims_fall_one_by_one(clicks: dict[str, float], fall: set[str]) -> None:
    found = judged_claims(**clicks)
    assert {text for text, holds in found.items() if not holds} == fall


def test_most_baselines_is_more_than_half() -> None:
    text = "U-rank outperforms most of the baselines on MAP and nDCG"
    ours = row("urank", 0.5, "ours")
    others = [row("dla", 0.4), row("ctr1", 0.4), row("svm-none", 0.6), row("deepfm", 0.6)]
    for table, holds in (([ours, *others], False), ([ours, *others[:3]], True)):
        assert {claim.text: claim.holds for claim in claims(table)}[text] is holds
    # On both metrics, not on one.
    half = row("urank", 0.5, "ours", mean={"MAP": 0.9, "nDCG@10": 0.1, "#Click": 0.5, "CTR": 0.5})
    assert {claim.text: claim.holds for claim in claims([half, *others[:3]])}[text] is False


def test_better_but_perhaps_by_chance_is_not_significantly_better() -> None:
    ours = row("urank", 0.9, "ours", p_value={"#Click": 0.06, "CTR": 0.04})
    found = {claim.text: claim for claim in claims([ours, row("dla", 0.5)])}
    clicks = found["U-rank is significantly better than every baseline on #Click"]
    assert clicks.holds is False
    assert clicks.figures == "0.9000 against 0.5000 of dla, the best baseline, p = 0.06"
    assert found["U-rank is significantly better than every baseline on CTR"].holds is True
    gain = 100 * (0.9 / 0.5 - 1)
    assert found["U-rank outperforms DLA"].figures == f"#Click 0.9000 against 0.5000 of dla, {gain:+.1f} %"


def test_only_what_was_run_is_claimed_of() -> None:
    assert claims([]) == []
    assert claims([row("km", 1.0, "oracle")]) == []
    assert claims([row("svm-none", 0.5), row("svm-truth", 0.6, "oracle")]) == []
    assert [claim.text for claim in claims([row("svm-none", 0.5), row("km", 0.6, "oracle")])] == [
        "KM on the oracle model produces the best utility"
    ]


def test_claims_must_hold_on_most_seeds() -> None:
    """U-rank is above CTR-1 on the mean, by the first of three seeds alone."""
    clicks = {"ctr1": ([0.1, 0.2], [0.5, 0.6], [0.5, 0.6]), "urank": ([0.9, 0.8], [0.45, 0.55], [0.45, 0.55])}
    found = results(*(lists(key, each, seed) for key, seeds in clicks.items() for seed, each in enumerate(seeds)))
    table = rows(found, list(clicks))
    (whole,) = [claim for claim in claims(table) if "CTR-1" in claim.text]
    assert whole.holds
    (told,) = [claim for claim in claims_over_seeds(found, table) if "CTR-1" in claim.text]
    assert told.holds is False
    assert told.figures == f"{whole.figures}; holds on 1 of 3 seeds alone"
    one = found.filter(pl.col("seed") == 0)
    assert claims_over_seeds(one, rows(one, list(clicks))) == claims(rows(one, list(clicks)))
