"""Tables 1 to 3 and Figures 3 and 4 by arithmetic, and every claim both ways."""

from __future__ import annotations

import json
from itertools import combinations
from math import isnan, nan, pi, tan
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import ttest_rel

from lab.tiny import lists, results, row, store_row, visits
from urank.lab.claims import (
    architecture_claims,
    architecture_difference,
    architecture_rows,
    claims_over_seeds,
    curve_claims,
    differences,
    list_example,
    live_claims,
    live_rows,
    method_claims,
    method_rows,
    position_curves,
    query_values,
    read_results,
    store_claims,
    store_rows,
)
from urank.lab.experiment import read_experiment
from urank.lab.experiment_results import (
    METRICS,
    STORE_METRICS,
    ArchitectureRow,
    Claim,
    MethodRow,
    PositionCurve,
    Reproduction,
    StoreRow,
)
from urank.lab.letor_experiment import METHODS, STEPS, list_metrics

SVM = ([0.45, 0.65, 1.05], [0.45, 0.6, 0.21])
LAMBDA = ([0.6, 0.75, 1.0], [0.5, 0.5, 0.3])
URANK = ([0.8, 0.85, 1.1], [0.55, 0.75, 0.45])
KM = ([0.9, 0.9, 1.2], [0.6, 0.8, 0.5])
KEYS = ("svm-none", "lambdarank-none", "urank", "km")


@pytest.fixture
def found() -> pl.DataFrame:
    parts = zip(KEYS, (SVM, LAMBDA, URANK, KM), strict=True)
    return results(*(lists(key, clicks[seed], seed) for key, clicks in parts for seed in (0, 1)))


def by_key(table: list[MethodRow]) -> dict[str, MethodRow]:
    return {each.key: each for each in table}


# --- method_rows ------------------------------------------------------------------------------------------------------


def test_means_and_deviations_are_over_seeds(found: pl.DataFrame) -> None:
    table = method_rows(found, KEYS)
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
    assert method_rows(found, ["svm-none"])[0].mean["#Click"] == (1.0 + 0.0) / 2


def test_one_seed_has_no_deviation(found: pl.DataFrame) -> None:
    table = method_rows(found.filter(pl.col("seed") == 0), KEYS)
    assert all(isnan(each.deviation[metric]) for each in table for metric in METRICS)


def test_published_figures_stand_beside_ours(found: pl.DataFrame) -> None:
    table = by_key(method_rows(found, KEYS, "yahoo"))
    assert table["km"].published["#Click"] == 0.684
    assert table["urank"].published == {}  # the paper's U-rank is the one as printed


# --- stars ------------------------------------------------------------------------------------------------------------


def test_p_values_are_holms_of_the_paired_t_test(found: pl.DataFrame) -> None:
    """Two baselines: the smaller p-value is doubled, the larger kept, and of the two the larger counts."""
    ours = np.mean(URANK, axis=0)
    p = sorted(ttest_rel(ours, np.mean(other, axis=0)).pvalue for other in (SVM, LAMBDA))
    expected = max(min(1, 2 * p[0]), p[1])
    table = by_key(method_rows(found, KEYS))
    for metric in METRICS:
        assert table["urank"].p_value[metric] == pytest.approx(expected)
    assert p[1] < expected < 0.05  # so that the correction is seen
    assert table["urank"].significant("#Click")


def test_only_ours_are_compared_and_never_with_oracles(found: pl.DataFrame) -> None:
    table = by_key(method_rows(found, KEYS))
    assert all(table[key].p_value == {} and not table[key].significant("#Click") for key in KEYS if key != "urank")
    without = by_key(method_rows(found.filter(pl.col("method") != "km"), KEYS[:3]))
    assert without["urank"].p_value == table["urank"].p_value
    # The oracle is better, and that takes no star away.
    assert table["km"].mean["#Click"] > table["urank"].mean["#Click"]


def test_ours_are_not_compared_with_one_another(found: pl.DataFrame) -> None:
    better = results(*(lists("urank-match", clicks, seed) for seed, clicks in enumerate(KM)))
    table = by_key(method_rows(pl.concat([found, better]), [*KEYS, "urank-match"]))
    assert table["urank"].p_value == by_key(method_rows(found, KEYS))["urank"].p_value
    assert table["urank-match"].significant("#Click")


def test_no_star_where_one_baseline_is_better(found: pl.DataFrame) -> None:
    """By far better than one and a little worse than the other."""
    better = results(*(lists("dla", [each + 0.001 for each in clicks], seed) for seed, clicks in enumerate(URANK)))
    table = by_key(method_rows(pl.concat([found, better]), [*KEYS, "dla"]))
    assert table["urank"].p_value == dict.fromkeys(METRICS, 1.0)
    same = results(*(lists("dla", clicks, seed) for seed, clicks in enumerate(URANK)))
    assert by_key(method_rows(pl.concat([found, same]), [*KEYS, "dla"]))["urank"].p_value["CTR"] == 1.0


def test_without_baselines_there_is_nothing_to_be_better_than(found: pl.DataFrame) -> None:
    assert by_key(method_rows(found, ["urank", "km"]))["urank"].p_value == {}


def test_queries_without_a_value_are_left_out_of_both() -> None:
    """Those of either method; the mean of a row leaves out its own only."""
    ours, theirs = [0.9, nan, 0.8, 0.7, 0.95], [0.5, 0.1, 0.3, nan, 0.6]
    found = results(lists("urank", [1.0] * 5, MAP=ours), lists("svm-none", [0.5] * 5, MAP=theirs))
    table = by_key(method_rows(found, ["urank", "svm-none"]))
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


# --- method_claims ----------------------------------------------------------------------------------------------------

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
    found = method_claims(table)
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
        assert {claim.text: claim.holds for claim in method_claims(table)}[text] is holds
    # On both metrics, not on one.
    half = row("urank", 0.5, "ours", mean={"MAP": 0.9, "nDCG@10": 0.1, "#Click": 0.5, "CTR": 0.5})
    assert {claim.text: claim.holds for claim in method_claims([half, *others[:3]])}[text] is False


def test_better_but_perhaps_by_chance_is_not_significantly_better() -> None:
    ours = row("urank", 0.9, "ours", p_value={"#Click": 0.06, "CTR": 0.04})
    found = {claim.text: claim for claim in method_claims([ours, row("dla", 0.5)])}
    clicks = found["U-rank is significantly better than every baseline on #Click"]
    assert clicks.holds is False
    assert clicks.figures == "0.9000 against 0.5000 of dla, the best baseline, p = 0.06"
    assert found["U-rank is significantly better than every baseline on CTR"].holds is True
    gain = 100 * (0.9 / 0.5 - 1)
    assert found["U-rank outperforms DLA"].figures == f"#Click 0.9000 against 0.5000 of dla, {gain:+.1f} %"


def test_only_what_was_run_is_claimed_of() -> None:
    assert method_claims([]) == []
    assert method_claims([row("km", 1.0, "oracle")]) == []
    assert method_claims([row("svm-none", 0.5), row("svm-truth", 0.6, "oracle")]) == []
    assert [claim.text for claim in method_claims([row("svm-none", 0.5), row("km", 0.6, "oracle")])] == [
        "KM on the oracle model produces the best utility"
    ]


def test_claims_must_hold_on_most_seeds() -> None:
    """U-rank is above CTR-1 on the mean, by the first of three seeds alone."""
    clicks = {"ctr1": ([0.1, 0.2], [0.5, 0.6], [0.5, 0.6]), "urank": ([0.9, 0.8], [0.45, 0.55], [0.45, 0.55])}
    found = results(*(lists(key, each, seed) for key, seeds in clicks.items() for seed, each in enumerate(seeds)))
    table = method_rows(found, list(clicks))
    (whole,) = [claim for claim in method_claims(table) if "CTR-1" in claim.text]
    assert whole.holds

    def claims(some: pl.DataFrame) -> list[Claim]:
        return method_claims(method_rows(some, list(clicks)))

    (told,) = [claim for claim in claims_over_seeds(claims, found) if "CTR-1" in claim.text]
    assert told.holds is False
    assert told.figures == f"{whole.figures}; holds on 1 of 3 seeds alone"
    one = found.filter(pl.col("seed") == 0)
    assert claims_over_seeds(claims, one) == claims(one)


AUC = {"vector": ((0.70, 0.65, 0.66), (0.72, 0.61, 0.68)), "position": ((0.75, 0.7, 0.71), (0.77, 0.72, 0.73))}


def auc_folders(folder: Path) -> list[Path]:
    for family, parts in AUC.items():
        for seed, (train, test, valid) in enumerate(parts):
            path = folder / f"seed-{seed}" / STEPS[f"auc-{family}"].output
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"train": train, "valid": valid, "test": test}))
    return [folder / f"seed-{seed}" for seed in (0, 1)]


def test_architectures_by_arithmetic(tmp_path: Path) -> None:
    clicks = {"urank-a1": ([0.9, 0.7], [0.6, 0.8]), "urank-a2": ([0.5, 0.7], [0.4, 0.6])}
    found = results(*(lists(key, part, seed) for key, parts in clicks.items() for seed, part in enumerate(parts)))
    a1, a2 = architecture_rows(auc_folders(tmp_path), found, list(clicks), "mslr-web10k")
    assert [a1.name, a2.name] == ["A1 (vector)", "A2 (position)"]
    assert (a1.train, a1.test, a1.valid) == pytest.approx((0.71, 0.63, 0.67))
    assert (a2.train, a2.test, a2.valid) == pytest.approx((0.76, 0.71, 0.72))
    assert a1.clicks == a1.ctr == pytest.approx((0.9 + 0.7 + 0.6 + 0.8) / 4)
    assert a2.clicks == pytest.approx((0.5 + 0.7 + 0.4 + 0.6) / 4)
    assert a1.deviation["train"] == pytest.approx((0.72 - 0.70) / 2**0.5)
    assert a1.deviation["test"] == pytest.approx((0.65 - 0.61) / 2**0.5)
    assert a1.deviation["#Click"] == pytest.approx(np.std([0.8, 0.7], ddof=1))
    assert a1.published["#Click"] == 0.903
    assert a2.published["train"] == 0.701
    # A2 − A1 on the test split by seed: 0.05 and 0.11; t of one degree of freedom at 97.5 % is tan(0.475 π).
    difference = architecture_difference(a2, a1, "test")
    half = tan(0.475 * pi) * 0.03
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.08, 0.08 - half, 0.08 + half))


def test_architectures_of_one_seed(tmp_path: Path) -> None:
    (a1,) = architecture_rows(auc_folders(tmp_path)[:1], results(lists("urank-a1", [0.5, 0.5])), ["urank-a1"])
    assert isnan(a1.deviation["train"])
    assert a1.published == {}
    assert architecture_claims([a1]) == []
    (claim, _) = architecture_claims([a1, a1])
    assert claim.holds is None
    assert claim.figures.endswith("on one seed")


def test_architecture_claims_need_an_interval_without_zero() -> None:
    def row_of(test: list[float], clicks: list[float]) -> ArchitectureRow:
        return ArchitectureRow("x", 0.9, 0.9, 0.9, 0.9, 0.09, {}, {}, {"test": test, "#Click": clicks})

    def holds(a1: ArchitectureRow, a2: ArchitectureRow) -> list[bool | None]:
        return [claim.holds for claim in architecture_claims([a1, a2])]

    low, high, mixed = [0.61, 0.60, 0.62], [0.71, 0.70, 0.73], [0.61, 0.59, 0.63]
    assert holds(row_of(low, high), row_of(high, low)) == [True, True]
    assert holds(row_of(high, low), row_of(low, high)) == [False, False]
    assert holds(row_of(low, low), row_of(mixed, mixed)) == [None, None]


def test_the_papers_own_table_is_held_against_its_claims() -> None:
    """CPBM is not the second best of SVMRank's variants on MSLR-WEB10K: 0.751 against 0.820 of Randomization."""
    variants = ("none", "randomised", "cpbm", "truth")
    rows = [row(f"{ranker}-{each}", 0.5, name=f"x, {each}") for ranker in ("svm", "lambdarank") for each in variants]
    own = {claim.text: claim.figures[-len("2 of 3 sets") :] for claim in method_claims(rows)}
    assert own == {
        "LambdaRank with ground-truth propensities has the best utility of LambdaRank's variants": "3 of 3 sets",
        "LambdaRank with CPBM is the second best of those with propensities, above Randomization": "3 of 3 sets",
        "Randomization fails to perform well: LambdaRank earns no more with it than without": "3 of 3 sets",
        "SVMRank with ground-truth propensities has the best utility of SVMRank's variants": "3 of 3 sets",
        "SVMRank with CPBM is the second best of those with propensities, above Randomization": "2 of 3 sets",
        "Randomization fails to perform well: SVMRank earns no more with it than without": "3 of 3 sets",
    }


STORE_LOGGED = ([0.45, 0.65, 1.05, 0.5], [0.45, 0.6, 0.21, 0.5])
STORE_DEEPFM = ([0.6, 0.75, 1.0, 0.7], [0.5, 0.5, 0.3, 0.6])
STORE_URANK = ([0.8, 0.85, 1.1, 0.8], [0.55, 0.75, 0.45, 0.7])
STORE_KM = ([0.9, 0.9, 1.2, 0.9], [0.6, 0.8, 0.5, 0.8])
STORE_KEYS = ("store-logged", "store-deepfm", "store-urank", "store-km")
STORE_METHODS = dict(zip(STORE_KEYS, (STORE_LOGGED, STORE_DEEPFM, STORE_URANK, STORE_KM), strict=True))


def truth(clicks: list[float]) -> list[float]:
    """Something that is not the estimate, and not the same for all visits."""
    return [each + 0.1 + 0.01 * number for number, each in enumerate(clicks)]


@pytest.fixture
def visited() -> pl.DataFrame:
    return results(
        *(
            visits(key, clicks[seed], seed, true=truth(clicks[seed]))
            for key, clicks in STORE_METHODS.items()
            for seed in (0, 1)
        )
    )


def store_by_key(table: list[StoreRow]) -> dict[str, StoreRow]:
    return {each.key: each for each in table}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_store_means_and_deviations_are_over_seeds(visited: pl.DataFrame) -> None:
    table = store_rows(visited, STORE_KEYS)
    assert [each.key for each in table] == list(STORE_KEYS)
    assert [each.kind for each in table] == ["baseline", "baseline", "ours", "oracle"]
    assert [each.name for each in table] == ["as logged", "DeepFM", "U-rank", "KM (oracle model)"]
    for each, clicks in zip(table, STORE_METHODS.values(), strict=True):
        first, second = (sum(seed) / 4 for seed in clicks)
        more = 0.1 + 0.01 * (0 + 1 + 2 + 3) / 4
        for metric in STORE_METRICS:
            assert each.mean[metric] == pytest.approx((first + second) / 2)
            assert each.true[metric] == pytest.approx((first + second) / 2 + more)
            assert each.deviation[metric] == pytest.approx(abs(first - second) / 2**0.5)  # n − 1 below the line
            assert each.true_deviation[metric] == pytest.approx(abs(first - second) / 2**0.5)
        assert each.seconds == pytest.approx((1.0 + 2.0) / 2)


# --- stars ------------------------------------------------------------------------------------------------------------


def expected_p(ours: np.ndarray, *others: np.ndarray) -> float:
    """Of two baselines: the smaller p-value is doubled, the larger kept, and of the two the larger counts."""
    p = sorted(float(ttest_rel(ours, other).pvalue) for other in others)
    assert p[1] < max(2 * p[0], p[1])  # so that the correction is seen
    return max(min(1, 2 * p[0]), p[1])


def test_p_values_are_holms_of_the_paired_t_test_on_all_visits() -> None:
    """Visits of two seeds are eight, though they have the same names: each seed is another store."""
    true = STORE_METHODS | {
        "store-deepfm": tuple([each - 0.05 * (each == 0.6) for each in seed] for seed in STORE_DEEPFM)
    }
    visited = results(
        *(
            visits(key, STORE_METHODS[key][seed], seed, true=true[key][seed])
            for key in STORE_KEYS[:3]
            for seed in (0, 1)
        )
    )
    ours = store_by_key(store_rows(visited, STORE_KEYS[:3]))["store-urank"]
    for of, p_value in ((STORE_METHODS, ours.p_value), (true, ours.true_p_value)):
        logged, deepfm, urank = (np.concatenate(of[key]) for key in STORE_KEYS[:3])
        assert p_value == pytest.approx(dict.fromkeys(STORE_METRICS, expected_p(urank, logged, deepfm)))
    assert ours.p_value["#click"] != pytest.approx(ours.true_p_value["#click"])


def test_store_no_star_where_one_baseline_is_better(visited: pl.DataFrame) -> None:
    """By the estimate; by the truth ours is better than all."""
    more = [
        visits("store-dla", [each + 0.001 for each in STORE_URANK[seed]], seed, true=STORE_LOGGED[seed])
        for seed in (0, 1)
    ]
    table = store_by_key(store_rows(pl.concat([visited, *more]), [*STORE_KEYS, "store-dla"]))
    assert table["store-urank"].p_value == dict.fromkeys(STORE_METRICS, 1.0)
    assert max(table["store-urank"].true_p_value.values()) < 0.05


# --- claims -----------------------------------------------------------------------------------------------------------


def claims_of(visited: pl.DataFrame, keys: tuple[str, ...] = STORE_KEYS) -> dict[str, Claim]:
    told = store_claims(visited, store_rows(visited, keys))
    assert len({claim.text for claim in told}) == len(told)
    return {claim.text: claim for claim in told}


def test_all_claims_hold_where_ours_is_better_by_both(visited: pl.DataFrame) -> None:
    told = claims_of(visited)
    assert len(told) == 8 + 2 + 8
    assert {claim.holds for claim in told.values()} == {True}
    best = told["U-rank is significantly better than every baseline on #click"]
    ours, rival = (np.mean(clicks) for clicks in (STORE_URANK, STORE_DEEPFM))
    more = 0.1 + 0.015
    assert best.figures == (
        f"{ours:.3f} against {rival:.3f} of DeepFM, the best baseline; truly "
        f"{ours + more:.3f} against {rival + more:.3f} of DeepFM"
    )
    above = told["U-rank performs better than DeepFM, the production ranker, on Revenue"]
    gains = (100 * (ours / rival - 1), 100 * ((ours + more) / (rival + more) - 1))
    assert above.figures == f"{gains[0]:+.1f} %, truly {gains[1]:+.1f} %"


def test_the_best_baseline_may_be_another_in_truth() -> None:
    baselines = [store_row("a", 0.5, true=0.9), store_row("b", 0.6, true=0.4)]
    ours = store_row("store-urank", 0.8, "ours", true=0.7, name="U-rank", p_value={"#click": 0.04, "Revenue": 0.05})
    visited = results(*(visits(key, [1.0, 2.0]) for key in ("a", "b", "store-urank")))
    told = {claim.text.split()[-1]: claim for claim in store_claims(visited, [*baselines, ours])[:8]}
    assert told["#click"].figures == "0.800 against 0.600 of b, the best baseline; truly 0.700 against 0.900 of a"
    assert {metric for metric, claim in told.items() if claim.holds} == {"#click"}


def test_a_log_without_downloads_has_no_percents() -> None:
    """A small store may have none on its last day; that is no reason to fail."""
    nothing = {key: visits(key, [0.0, 0.0], true=[0.2, 0.3]) for key in ("store-urank", "store-deepfm")}
    told = claims_of(results(*nothing.values()), tuple(nothing))
    above = told["U-rank performs better than DeepFM, the production ranker, on #click"]
    assert (above.holds, above.figures) == (False, "+0.000, truly +0.0 %")


def test_store_only_what_was_run_is_claimed_of(visited: pl.DataFrame) -> None:
    assert claims_of(visited, ("store-km",)) == {}
    assert claims_of(visited, ("store-urank", "store-km")) == {}
    assert [text for text in claims_of(visited, ("store-urank", "store-logged")) if "DeepFM" in text] == []
    alone = claims_of(visited, ("store-logged", "store-deepfm"))
    assert list(alone) == [f"the debiased {metric} orders the methods as the truth does" for metric in STORE_METRICS]


# --- whether the estimate agrees with the truth -----------------------------------------------------------------------

AGREES = "the debiased #click orders the methods as the truth does"
NOISE = (-0.02, 0.0, 0.02, 0.01)


def kendall(estimate: list[float], true: list[float]) -> float:
    """(concordant − discordant pairs) / all pairs, where nothing is tied."""
    signs = [
        np.sign((estimate[i] - estimate[j]) * (true[i] - true[j])) for i, j in combinations(range(len(estimate)), 2)
    ]
    return float(np.mean(signs))


def around(level: float, noise: float = 1.0) -> list[float]:
    """Visits whose differences to those of another level are not all the same."""
    return [level + noise * step * (1 + level) for step in NOISE]


def agreement(levels: dict[str, tuple[float, float]], noise: float = 1.0) -> Claim:
    """The claim on methods with this estimate and this truth."""
    visited = results(*(visits(key, around(one, noise), true=around(other)) for key, (one, other) in levels.items()))
    return claims_of(visited, tuple(levels))[AGREES]


def test_the_same_order_agrees() -> None:
    claim = agreement({"store-logged": (0.1, 0.3), "store-dla": (0.5, 0.4), "store-deepfm": (0.9, 0.5)})
    assert (claim.holds, claim.figures) == (True, "rank correlation (Kendall) 1.00")


def test_two_told_apart_the_other_way_round_do_not_agree() -> None:
    levels = {
        "store-logged": (0.1, 0.3),
        "store-dla": (0.9, 0.5),
        "store-deepfm": (0.5, 0.7),
        "store-urank": (1.5, 1.4),
    }
    claim = agreement(levels)
    tau = kendall(*map(list, zip(*levels.values(), strict=True)))
    assert tau == pytest.approx(1 - 2 / 6)
    assert claim.holds is False
    assert claim.figures == f"rank correlation (Kendall) {tau:.2f}; reversed: DLA and DeepFM"


def test_the_other_way_round_by_chance_is_no_contradiction() -> None:
    """The same levels, with an estimate that cannot tell them apart: the correlation says so, the claim holds."""
    levels = {"store-logged": (0.1, 0.3), "store-dla": (0.52, 0.5), "store-deepfm": (0.5, 0.7)}
    claim = agreement(levels, noise=50.0)
    assert (claim.holds, claim.figures) == (True, f"rank correlation (Kendall) {1 - 2 / 3:.2f}")


def test_oracles_are_not_asked() -> None:
    levels = {"store-logged": (0.1, 0.3), "store-dla": (0.5, 0.4), "store-km": (0.2, 0.9)}
    assert agreement(levels).figures == "rank correlation (Kendall) 1.00"


def test_each_metric_agrees_by_itself() -> None:
    """Revenue@3 alone is the other way round."""
    one = visits("store-dla", around(0.9), true=around(0.9)).with_columns(pl.Series("Revenue@3", around(0.1)))
    told = claims_of(results(one, visits("store-deepfm", around(0.5))), ("store-dla", "store-deepfm"))
    assert [text for text, claim in told.items() if not claim.holds] == [
        "the debiased Revenue@3 orders the methods as the truth does"
    ]


# --- over seeds -------------------------------------------------------------------------------------------------------


def live(seed: int = 0, ab: float = 0.2, after: float = 0.0, day: float = 0.05) -> pl.DataFrame:
    """A live test: intervals are 4 % wide, and the truth is the lift."""
    lifts = {"A/A before": 0.0, "A/B": ab, "A/A after": after}
    rows = [
        {"period": period, "metric": metric, "lift": lift, "low": lift - 0.02, "high": lift + 0.02, "true_lift": lift}
        for period, lift in lifts.items()
        for metric in ("CTR", "CVR")
    ]
    return pl.DataFrame(rows).with_columns(seed=pl.lit(seed), largest_day=pl.lit(day))


def test_live_tests_are_averaged_over_seeds() -> None:
    rows = live_rows(pl.concat([live(0, ab=0.1, day=0.03), live(1, ab=0.3)]))
    assert [(row.period, row.metric) for row in rows][2:4] == [("A/B", "CTR"), ("A/B", "CVR")]
    assert rows[2].lift == pytest.approx((0.1 + 0.3) / 2)
    assert rows[2].low == pytest.approx((0.1 + 0.3) / 2 - 0.02)
    assert rows[2].largest_day == 0.05


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (live(), [True, True, True, True, True, True]),
        (live(day=0.081), [False, True, True, True, True, True]),
        (live(ab=0.015), [True, False, False, False, False, False]),  # nor can it drop
        (live(ab=0.1), [True, True, True, False, False, True]),
        (live(after=0.03), [True, True, True, True, True, False]),
        (live().filter(pl.col("period") != "A/A after"), [True, True, True, True, True]),
    ],
)
def test_claims_of_the_live_test_both_ways(found: pl.DataFrame, holds: list[bool]) -> None:
    assert [claim.holds for claim in live_claims(live_rows(found))] == holds


def test_differences_by_arithmetic() -> None:
    before, after = ([0.5, 0.7, 0.6], [0.4, 0.8, 0.3]), ([0.6, 0.9, 0.6], [0.5, 0.9, 0.2])
    parts = [lists(key, clicks[seed], seed) for key, clicks in (("ctr2", before), ("ctr1", after)) for seed in (0, 1)]
    (found,) = differences(results(*parts), ["ctr1", "ctr2", "urank"])
    assert (found.before, found.after) == (METHODS["ctr2"].name, METHODS["ctr1"].name)
    assert found.clicks_before == pytest.approx(np.mean(before))
    assert found.clicks_after == pytest.approx(np.mean(after))
    assert found.p_value == pytest.approx(ttest_rel(np.mean(after, axis=0), np.mean(before, axis=0)).pvalue)


def test_every_method_of_the_experiment_is_compared() -> None:
    keys = read_experiment("differences").methods
    found = differences(results(*(lists(key, [0.5, 0.6]) for key in keys)), keys)
    compared = {each.before for each in found} | {each.after for each in found}
    assert compared == {METHODS[key].name for key in keys}
    assert all(each.p_value == 1 for each in found)  # nothing differs


TABLE = [[0.5, 0.25, 0.1], [0.4, 0.3, 0.2], [0.9, 0.6, 0.3], [0.2, 0.1, 0.05], [0.8, 0.7, 0.65], [0.3, 0.2, 0.1]]
CANDIDATES = pl.DataFrame(
    {
        "query_id": ["b", "b", "a", "a", "a", "a"],
        "item_id": ["b1", "b2", "a1", "a2", "a3", "a4"],
        "relevance": [1, 2, 3, 0, 4, 1],
        "table": TABLE,
    }
)
ORDERS = {  # of b1, b2 and of a1 … a4, of which one gets no place
    "urank": ([1, 2, 2, 4, 1, 3], [2, 1, 1, 3, 2, 4]),
    "km": ([2, 1, 1, 4, 2, 3], [2, 1, 1, 4, 2, 3]),
}


@pytest.fixture
def made(tmp_path: Path) -> tuple[list[Path], pl.DataFrame]:
    """Two seeds with the same two queries."""
    folders = [tmp_path / "seed-0", tmp_path / "seed-1"]
    for seed, folder in enumerate(folders):
        (folder / "results").mkdir(parents=True)
        CANDIDATES.write_parquet(folder / "candidates.parquet")
        for key, orders in ORDERS.items():
            frame = list_metrics(CANDIDATES, np.array(orders[seed])).with_columns(seconds=0.0)
            frame.write_parquet(folder / "results" / f"{key}.parquet")
    return folders, read_results(folders, list(ORDERS))


def test_curves_by_arithmetic(made: tuple[list[Path], pl.DataFrame]) -> None:
    ours, best = position_curves(*made, ["urank", "km"])
    assert (ours.name, best.name) == (METHODS["urank"].name, METHODS["km"].name)
    # Seed 0 shows b1 b2 and a3 a1 a4; seed 1 b2 b1 and a1 a3 a2. Each seed has two lists; b has no third item.
    first = np.array([0.5 + 0.8, 0.3 + 0.6, 0.1]) / 2
    second = np.array([0.4 + 0.9, 0.25 + 0.7, 0.05]) / 2
    assert ours.mean == pytest.approx((first + second) / 2)
    assert ours.deviation == pytest.approx(abs(first - second) / 2**0.5)
    assert best.deviation == pytest.approx(np.zeros(3))


@pytest.mark.slow
def test_a_curve_adds_up_to_the_clicks(everything: tuple[Reproduction, Path]) -> None:
    found, _ = everything
    clicks = {row.name: row.mean["#Click"] for row in found.rows}
    assert len(found.curves) == 4
    for curve in found.curves:
        assert curve.mean.shape == (10,)
        assert curve.mean.sum() == pytest.approx(clicks[curve.name], rel=1e-6)


def test_claims_of_the_curves_both_ways() -> None:
    names = [METHODS[key].name for key in ("lambdarank-truth", "urank", "km")]

    def holds(lambdarank: list[float], ours: list[float], oracle: list[float]) -> list[bool | None]:
        curves = [
            PositionCurve(name, np.array(mean), np.zeros(len(mean)))
            for name, mean in zip(names, (lambdarank, ours, oracle), strict=True)
        ]
        return [claim.holds for claim in curve_claims(curves)]

    # From the first to the last: L by 8, U by 4, O by 2.
    assert holds([0.8, 0.1], [0.8, 0.2], [0.8, 0.4]) == [True, True]
    assert holds([0.8, 0.2], [0.8, 0.1], [0.8, 0.4]) == [False, False]
    # U falls by 2 and O by 4: as far from L's 16 as a factor of 4, and from U as one of 2.
    assert holds([0.8, 0.05], [0.4, 0.2], [0.8, 0.2]) == [False, True]
    # No list is so long that it has a third item.
    assert holds([0.8, 0.1, 0], [0.8, 0.2, 0], [0.8, 0.4, 0]) == [True, True]


def test_the_example_is_one_query_for_all(made: tuple[list[Path], pl.DataFrame]) -> None:
    folders, results = made
    found = list_example(folders[0], results, ["urank", "km"])
    assert found.query == "a"  # the first by name, though b stands first
    assert found.items == ["a3", "a1", "a4", "a2"]  # by falling label
    assert found.label.tolist() == [4, 3, 1, 0]
    assert found.table.tolist() == [TABLE[4], TABLE[2], TABLE[5], TABLE[3]]
    assert found.positions["U-rank"].tolist() == [1, 2, 3, 4]
    assert found.positions["KM (oracle model)"].tolist() == [2, 1, 3, 4]
    assert found.clicks["U-rank"] == pytest.approx(0.8 + 0.6 + 0.1)
    assert found.clicks["KM (oracle model)"] == pytest.approx(0.7 + 0.9 + 0.1)
    assert found.ndcg["U-rank"] == pytest.approx(1.0)
    gains, discounts = np.array([15.0, 7.0, 1.0, 0.0]), 1 / np.log2([2, 3, 4, 5])
    assert found.ndcg["KM (oracle model)"] == pytest.approx((gains[[1, 0, 2, 3]] @ discounts) / (gains @ discounts))


@pytest.mark.slow
def test_the_example_of_a_run(everything: tuple[Reproduction, Path]) -> None:
    found, folder = everything
    example = found.example
    assert example is not None
    assert list(example.positions) == [METHODS[key].name for key in ("lambdarank-truth", "urank", "km")]
    candidates = pl.read_parquet(folder / "seed-0" / "candidates.parquet")
    assert example.query == candidates["query_id"].min()
    assert sorted(example.items) == sorted(candidates.filter(pl.col("query_id") == example.query)["item_id"])
    items = np.arange(len(example.items))
    for name, position in example.positions.items():
        assert sorted(position) == (items + 1).tolist()
        assert example.clicks[name] == pytest.approx(example.table[items, position - 1].sum(), rel=1e-6)
    assert max(example.clicks, key=lambda name: example.clicks[name]) == "KM (oracle model)"
