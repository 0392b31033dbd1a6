"""Table 3 by hand: means, deviations, stars, and every claim of Section 6.1 both ways."""

from __future__ import annotations

from itertools import combinations
from math import isnan
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import ttest_rel

from lab.tiny import results, store_row, visits
from urank.lab.claims import _claims, read_store_results, store_claims, store_rows
from urank.lab.results import STORE_METRICS, Claim, StoreRow

LOGGED = ([0.45, 0.65, 1.05, 0.5], [0.45, 0.6, 0.21, 0.5])
DEEPFM = ([0.6, 0.75, 1.0, 0.7], [0.5, 0.5, 0.3, 0.6])
URANK = ([0.8, 0.85, 1.1, 0.8], [0.55, 0.75, 0.45, 0.7])
KM = ([0.9, 0.9, 1.2, 0.9], [0.6, 0.8, 0.5, 0.8])
KEYS = ("store-logged", "store-deepfm", "store-urank", "store-km")
METHODS = dict(zip(KEYS, (LOGGED, DEEPFM, URANK, KM), strict=True))


def truth(clicks: list[float]) -> list[float]:
    """Something that is not the estimate, and not the same for all visits."""
    return [each + 0.1 + 0.01 * number for number, each in enumerate(clicks)]


@pytest.fixture
def found() -> pl.DataFrame:
    return results(
        *(
            visits(key, clicks[seed], seed, true=truth(clicks[seed]))
            for key, clicks in METHODS.items()
            for seed in (0, 1)
        )
    )


def by_key(table: list[StoreRow]) -> dict[str, StoreRow]:
    return {each.key: each for each in table}


# --- rows ----------------------------------------------------------------------------------------------------------


def test_means_and_deviations_are_over_seeds(found: pl.DataFrame) -> None:
    table = store_rows(found, KEYS)
    assert [each.key for each in table] == list(KEYS)
    assert [each.kind for each in table] == ["baseline", "baseline", "ours", "oracle"]
    assert [each.name for each in table] == ["as logged", "DeepFM", "U-rank", "KM (oracle model)"]
    for each, clicks in zip(table, METHODS.values(), strict=True):
        first, second = (sum(seed) / 4 for seed in clicks)
        more = 0.1 + 0.01 * (0 + 1 + 2 + 3) / 4
        for metric in STORE_METRICS:
            assert each.mean[metric] == pytest.approx((first + second) / 2)
            assert each.true[metric] == pytest.approx((first + second) / 2 + more)
            assert each.deviation[metric] == pytest.approx(abs(first - second) / 2**0.5)  # n − 1 below the line
            assert each.true_deviation[metric] == pytest.approx(abs(first - second) / 2**0.5)
        assert each.seconds == pytest.approx((1.0 + 2.0) / 2)


def test_each_metric_is_its_own() -> None:
    one = {metric: [0.1 * number, 0.3 * number] for number, metric in enumerate(STORE_METRICS)}
    (row,) = store_rows(visits("store-dla", [9.0, 9.0], **one), ["store-dla"])
    assert row.mean == pytest.approx({metric: 0.2 * number for number, metric in enumerate(STORE_METRICS)})
    assert row.true == row.mean


def test_seeds_weigh_alike_however_many_visits_they_have() -> None:
    found = results(visits("store-dla", [1.0], 0), visits("store-dla", [0.0, 0.0, 0.0], 1))
    assert store_rows(found, ["store-dla"])[0].mean["#click"] == (1.0 + 0.0) / 2


def test_one_seed_has_no_deviation(found: pl.DataFrame) -> None:
    for each in store_rows(found.filter(pl.col("seed") == 0), KEYS):
        assert all(isnan(each.deviation[metric]) and isnan(each.true_deviation[metric]) for metric in STORE_METRICS)


def test_published_figures_stand_beside_ours(found: pl.DataFrame) -> None:
    table = by_key(store_rows(found, KEYS))
    assert table["store-urank"].published["Revenue@1"] == 1.264
    assert table["store-km"].published == table["store-logged"].published == {}  # which the paper does not have


def test_results_are_read_by_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}" / "results").mkdir(parents=True)
        path = tmp_path / f"seed-{seed}" / "results" / "store-km.parquet"
        visits("store-km", [seed + 0.5]).drop("seed", "method").write_parquet(path)
    found = read_store_results([tmp_path / "seed-0", tmp_path / "seed-1"], ["store-km"])
    assert found.columns[:3] == ["seed", "method", "query_id"]
    assert found.select("seed", "method", "#click").rows() == [(0, "store-km", 0.5), (1, "store-km", 1.5)]


# --- stars ---------------------------------------------------------------------------------------------------------


def expected_p(ours: np.ndarray, *others: np.ndarray) -> float:
    """Of two baselines: the smaller p-value is doubled, the larger kept, and of the two the larger counts."""
    p = sorted(float(ttest_rel(ours, other).pvalue) for other in others)
    assert p[1] < max(2 * p[0], p[1])  # so that the correction is seen
    return max(min(1, 2 * p[0]), p[1])


def test_p_values_are_holms_of_the_paired_t_test_on_all_visits() -> None:
    """Visits of two seeds are eight, though they have the same names: each seed is another store."""
    true = METHODS | {"store-deepfm": tuple([each - 0.05 * (each == 0.6) for each in seed] for seed in DEEPFM)}
    found = results(
        *(visits(key, METHODS[key][seed], seed, true=true[key][seed]) for key in KEYS[:3] for seed in (0, 1))
    )
    ours = by_key(store_rows(found, KEYS[:3]))["store-urank"]
    for of, p_value in ((METHODS, ours.p_value), (true, ours.true_p_value)):
        logged, deepfm, urank = (np.concatenate(of[key]) for key in KEYS[:3])
        assert p_value == pytest.approx(dict.fromkeys(STORE_METRICS, expected_p(urank, logged, deepfm)))
    assert ours.p_value["#click"] != pytest.approx(ours.true_p_value["#click"])


def test_only_ours_are_compared_and_never_with_oracles(found: pl.DataFrame) -> None:
    table = by_key(store_rows(found, KEYS))
    assert all(table[key].p_value == table[key].true_p_value == {} for key in KEYS if key != "store-urank")
    without = by_key(store_rows(found.filter(pl.col("method") != "store-km"), KEYS[:3]))
    assert without["store-urank"].p_value == table["store-urank"].p_value
    assert by_key(store_rows(found, ["store-urank", "store-km"]))["store-urank"].p_value == {}


def test_no_star_where_one_baseline_is_better(found: pl.DataFrame) -> None:
    """By the estimate; by the truth ours is better than all."""
    more = [visits("store-dla", [each + 0.001 for each in URANK[seed]], seed, true=LOGGED[seed]) for seed in (0, 1)]
    table = by_key(store_rows(pl.concat([found, *more]), [*KEYS, "store-dla"]))
    assert table["store-urank"].p_value == dict.fromkeys(STORE_METRICS, 1.0)
    assert max(table["store-urank"].true_p_value.values()) < 0.05


# --- claims --------------------------------------------------------------------------------------------------------


def claims_of(found: pl.DataFrame, keys: tuple[str, ...] = KEYS) -> dict[str, Claim]:
    told = _claims(found, store_rows(found, keys))
    assert len({claim.text for claim in told}) == len(told)
    return {claim.text: claim for claim in told}


def test_all_claims_hold_where_ours_is_better_by_both(found: pl.DataFrame) -> None:
    told = claims_of(found)
    assert len(told) == 8 + 2 + 8
    assert {claim.holds for claim in told.values()} == {True}
    best = told["U-rank is significantly better than every baseline on #click"]
    ours, rival = (np.mean(clicks) for clicks in (URANK, DEEPFM))
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
    found = results(*(visits(key, [1.0, 2.0]) for key in ("a", "b", "store-urank")))
    told = {claim.text.split()[-1]: claim for claim in _claims(found, [*baselines, ours])[:8]}
    assert told["#click"].figures == "0.800 against 0.600 of b, the best baseline; truly 0.700 against 0.900 of a"
    assert {metric for metric, claim in told.items() if claim.holds} == {"#click"}


def test_better_but_perhaps_by_chance_is_not_significantly_better() -> None:
    found = results(visits("store-urank", [0.9, 0.2, 0.5]), visits("store-deepfm", [0.2, 0.6, 0.4]))
    told = claims_of(found, ("store-urank", "store-deepfm"))
    assert told["U-rank is significantly better than every baseline on #click"].holds is False
    assert told["U-rank performs better than DeepFM, the production ranker, on #click"].holds is True


def test_a_log_without_downloads_has_no_percents() -> None:
    """A small store may have none on its last day; that is no reason to fail."""
    nothing = {key: visits(key, [0.0, 0.0], true=[0.2, 0.3]) for key in ("store-urank", "store-deepfm")}
    told = claims_of(results(*nothing.values()), tuple(nothing))
    above = told["U-rank performs better than DeepFM, the production ranker, on #click"]
    assert (above.holds, above.figures) == (False, "+0.000, truly +0.0 %")


def test_only_what_was_run_is_claimed_of(found: pl.DataFrame) -> None:
    assert claims_of(found, ("store-km",)) == {}
    assert claims_of(found, ("store-urank", "store-km")) == {}
    assert [text for text in claims_of(found, ("store-urank", "store-logged")) if "DeepFM" in text] == []
    alone = claims_of(found, ("store-logged", "store-deepfm"))
    assert list(alone) == [f"the debiased {metric} orders the methods as the truth does" for metric in STORE_METRICS]


# --- whether the estimate agrees with the truth --------------------------------------------------------------------

AGREES = "the debiased #click orders the methods as the truth does"
STEPS = (-0.02, 0.0, 0.02, 0.01)


def kendall(estimate: list[float], true: list[float]) -> float:
    """(concordant − discordant pairs) / all pairs, where nothing is tied."""
    signs = [
        np.sign((estimate[i] - estimate[j]) * (true[i] - true[j])) for i, j in combinations(range(len(estimate)), 2)
    ]
    return float(np.mean(signs))


def around(level: float, noise: float = 1.0) -> list[float]:
    """Visits whose differences to those of another level are not all the same."""
    return [level + noise * step * (1 + level) for step in STEPS]


def agreement(levels: dict[str, tuple[float, float]], noise: float = 1.0) -> Claim:
    """The claim on methods with this estimate and this truth."""
    found = results(*(visits(key, around(one, noise), true=around(other)) for key, (one, other) in levels.items()))
    return claims_of(found, tuple(levels))[AGREES]


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
    assert claim.figures == f"rank correlation (Kendall) {tau:.2f}; the other way round: DLA and DeepFM"


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


# --- over seeds ----------------------------------------------------------------------------------------------------


def test_claims_must_hold_on_most_seeds() -> None:
    """U-rank is above DeepFM on the mean, by the first of three seeds alone."""
    clicks = {
        "store-deepfm": ([0.1, 0.2], [0.5, 0.6], [0.5, 0.6]),
        "store-urank": ([0.9, 0.8], [0.45, 0.55], [0.45, 0.55]),
    }
    found = results(*(visits(key, each, seed) for key, seeds in clicks.items() for seed, each in enumerate(seeds)))
    table = store_rows(found, list(clicks))
    text = "U-rank performs better than DeepFM, the production ranker, on #click"
    whole = claims_of(found, tuple(clicks))[text]
    assert whole.holds
    (told,) = [claim for claim in store_claims(found, table) if claim.text == text]
    assert told.holds is False
    assert told.figures == f"{whole.figures}; holds on 1 of 3 seeds alone"
    one = found.filter(pl.col("seed") == 0)
    assert store_claims(one, store_rows(one, list(clicks))) == list(claims_of(one, tuple(clicks)).values())
