"""Does inspect see what can be learned? Logs whose answer is known by construction, and the real hotel log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats

import urank
from urank.errors import ConfigError, DataError
from urank.log import identifiability, inspection
from urank.log.identifiability import ClickOutcomes, heavy_tails, id_like, position_graph, ranges, time_like
from urank.log.inspection import Inspection, wilson_interval


def make_log(positions_of_item: Any, *, lists: int = 400, seed: int = 0, rate: float = 0.5) -> pl.DataFrame:
    """Lists of items 0…n−1, each put where `positions_of_item(list number)` says."""
    rng = np.random.default_rng(seed)
    places = np.stack([positions_of_item(number) for number in range(lists)])
    n = places.shape[1]
    return pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(lists), n),
            "item_id": np.tile(np.arange(n), lists),
            "position": places.ravel(),
            "click": (rng.random(lists * n) < rate).astype(int),
            "x": rng.normal(size=lists * n),
        }
    )


def test_every_item_always_at_one_place_is_not_learnable() -> None:
    verdict = urank.inspect(urank.read(make_log(lambda _: np.arange(1, 6)))).verdict
    assert verdict.level == "not learnable"
    assert verdict.sentence == "not learnable: every item was always shown at the same position"
    assert any("randomised order" in advice for advice in verdict.advice)


def test_a_log_of_few_lists_is_too_small_to_blame_the_traffic() -> None:
    verdict = urank.inspect(urank.read(make_log(lambda _: np.arange(1, 6), lists=99))).verdict
    assert verdict.sentence == "not learnable: it has only 99 lists, and no item at two positions"
    assert verdict.advice[0].startswith("collect more lists")


def test_items_that_move_make_it_learnable() -> None:
    found = urank.inspect(urank.read(make_log(lambda i: np.roll(np.arange(1, 6), i % 5))))
    assert found.verdict.level == found.verdict.sentence == "learnable"
    assert found.facts.interventions.joined == [1, 2, 3, 4, 5]
    assert (found.facts.interventions.shared == 5).all()


def test_positions_that_do_not_mix_rest_on_extrapolation() -> None:
    """Items 0–4 rotate through positions 1–5; items 5 and 6 stay at 6 and 7."""
    log = make_log(lambda i: np.concatenate([np.roll(np.arange(1, 6), i % 5), [6, 7]]))
    found = urank.inspect(urank.read(log))
    assert found.verdict.level == "partly learnable"
    assert found.verdict.sentence == "learnable, but positions 6–7 rest on extrapolation"
    assert found.facts.interventions.lost == [6, 7]


def test_two_islands_of_positions_cannot_be_compared() -> None:
    """Positions 1–2 swap, 3–6 rotate: no item links the two groups, and the anchor is in the smaller one."""
    log = make_log(lambda i: np.concatenate([np.roll([1, 2], i % 2), 2 + np.roll(np.arange(1, 5), i % 4)]))
    log = log.with_columns(pl.when(pl.col("position") <= 2).then(1).otherwise(pl.col("click")).alias("click"))
    found = urank.inspect(urank.read(log)).verdict
    assert found.level == "not learnable"
    assert found.sentence == "not learnable: only positions 1–2 can be compared, 33% of the impressions"


def test_a_random_policy_joins_positions_without_shared_items() -> None:
    log = make_log(lambda _: np.arange(1, 6)).with_columns(item_id=pl.int_range(pl.len()), policy=pl.lit("shuffled"))
    assert urank.inspect(urank.read(log)).verdict.level == "not learnable"
    verdict = urank.inspect(urank.read(log), randomised=["policy=shuffled"]).verdict
    assert verdict.level == "learnable"
    with pytest.raises(ConfigError, match="has the policy 'other'; its policies are shuffled"):
        urank.inspect(urank.read(log), randomised=["policy=other"])
    with pytest.raises(ConfigError, match=r"--randomised policy=shuffled needs a column of .* that plays 'policy'"):
        urank.inspect(urank.read(log.drop("policy")), randomised=["policy=shuffled"])


def test_few_clicks_do_not_link() -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 4), i % 3), lists=12, rate=0.2)
    verdict = urank.inspect(urank.read(log)).verdict
    assert verdict.sentence == "not learnable: no two positions share items with 10 clicks or more on each side"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"click": pl.lit(0)}, "not learnable: nothing was ever clicked"),
        ({"click": pl.lit(1)}, "not learnable: everything was clicked"),
        (
            {"position": pl.lit(3), "query_id": pl.int_range(pl.len())},
            "not learnable: everything was shown at position 3",
        ),
    ],
)
def test_degenerate_logs(change: dict[str, pl.Expr], sentence: str) -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5)).with_columns(**change)
    verdict = urank.inspect(urank.read(log)).verdict
    assert (verdict.level, verdict.sentence) == ("not learnable", sentence)
    assert len(verdict.advice) == 1


def test_without_item_ids_equal_features_are_the_same_item() -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5)).with_columns(x=pl.col("item_id").cast(pl.Float64))
    found = urank.inspect(urank.read(log.drop("item_id")))
    assert found.facts.items is None
    assert found.facts.interventions.moved == 5
    assert found.verdict.level == "learnable"


def test_without_item_ids_and_features_items_cannot_be_told_apart() -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5)).drop("item_id", "x")
    found = urank.inspect(urank.read(log))
    assert found.verdict.sentence == "not learnable: items cannot be distinguished"
    assert found.verdict.reasons == ["the log does not distinguish items: it has neither item ids nor features"]
    assert any("--column item_id=NAME" in advice for advice in found.verdict.advice)
    assert (found.facts.interventions.items, found.facts.interventions.moved, found.facts.same_query_moves) == (0, 0, 0)
    random = urank.inspect(urank.read(log.with_columns(policy=pl.lit("r"))), randomised=["policy=r"])
    assert random.verdict.level == "learnable"


@pytest.mark.parametrize(("twins", "told_apart"), [(0.005, True), (0.05, False), (1.0, False)])
def test_features_that_are_equal_within_lists_do_not_tell_items_apart(twins: float, told_apart: bool) -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5), lists=1000).with_columns(
        x=pl.when((pl.col("query_id") < 1000 * twins) & (pl.col("item_id") == 1)).then(0).otherwise(pl.col("item_id"))
    )
    found = urank.inspect(urank.read(log.drop("item_id")))
    assert found.facts.alike == twins
    assert found.facts.distinguishes_items is told_apart
    assert found.verdict.level == ("learnable" if told_apart else "not learnable")
    if not told_apart:
        assert f"in {twins:.0%} of the lists two items have the same features" in found.verdict.reasons[0]
        assert any("--column item_id=NAME" in advice for advice in found.verdict.advice)
    named = urank.inspect(urank.read(log))
    assert named.verdict.level == "learnable"


def test_counts_and_rates() -> None:
    log = pl.DataFrame(
        {
            "query_id": [1, 1, 1, 2, 2, 3],
            "position": [1, 2, 4, 1, 2, 2],
            "click": [1, 0, 0, 1, 1, 0],
            "value": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            "category": ["a", "a", "b", "b", "b", None],
            "x": [None, 1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    facts = urank.inspect(urank.read(log)).facts
    assert (facts.rows, facts.clicks, facts.queries, facts.lists) == (6, 3, 3, 3)
    assert facts.lists_without_click == 1 / 3
    assert facts.lists_below_top == 1 / 3
    assert facts.lists_with_gaps == 1 / 3
    assert facts.curve.position == [1, 2, 4]
    assert facts.curve.rate == [2 / 2, 1 / 3, 0 / 1]
    assert facts.by_category["b"].impressions == [1, 1, 1]
    assert facts.by_category["missing"].clicks == [0]
    assert facts.missing == {"x": 1 / 6, "category": 1 / 6}
    assert facts.value is not None
    assert facts.value["zero"] == 1 / 6
    assert facts.value["p50"] == 2.5
    assert facts.list_length["p100"] == 3


def test_wilson_interval_solves_its_equation() -> None:
    clicks, n, z = np.array([0, 3, 50, 100]), np.array([10, 40, 100, 100]), stats.norm.ppf(0.975)
    low, high = wilson_interval(clicks, n)
    rate = clicks / n
    for bound in (low, high):
        inside = (bound > 0) & (bound < 1)
        assert np.allclose(((rate - bound) ** 2 - z**2 * bound * (1 - bound) / n)[inside], 0, atol=1e-7)
    assert ((low <= rate) & (rate <= high)).all()


def test_sampling_keeps_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    log = urank.read(
        make_log(lambda i: np.roll(np.arange(1, 6), i % 5), lists=2000).with_columns(
            item_id=pl.col("query_id") % 499 * 10 + pl.col("item_id")
        )
    )
    exact = urank.inspect(log).facts
    monkeypatch.setattr(inspection, "SAMPLE_ROWS", 2000)
    monkeypatch.setattr(inspection, "PAIR_ROWS", 1000)
    sampled = urank.inspect(log).facts
    assert sampled.curve == exact.curve
    assert sampled.lists == exact.lists
    assert sampled.interventions.joined == exact.interventions.joined
    # 2,495 items of which at least a thousand are kept: the estimate is binomial
    assert exact.interventions.items == 499 * 5
    assert abs(sampled.interventions.items - 2495) < 5 * np.sqrt(2495 * 1.5)
    assert exact.same_query_moves == 0
    exact_clicks, sampled_clicks = exact.interventions.evidence.sum(), sampled.interventions.evidence.sum()
    assert sampled_clicks == pytest.approx(exact_clicks, rel=0.2)


def test_a_few_items_are_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    log = urank.read(make_log(lambda i: np.roll([1, 2], i % 2), lists=5000))
    exact = urank.inspect(log).facts
    monkeypatch.setattr(inspection, "SAMPLE_ROWS", 500)
    monkeypatch.setattr(inspection, "PAIR_ROWS", 3)
    monkeypatch.setattr(inspection, "MERGE_ROWS", 100)
    sampled = urank.inspect(log)
    assert sampled.facts.items == 2
    assert sampled.verdict.level == "learnable"
    assert sampled.facts.interventions.evidence.tolist() == exact.interventions.evidence.tolist()


def test_clicks_at_random_are_exact_whatever_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item is seen once: only the random lists link positions, by the clicks they got."""
    log = make_log(lambda _: np.arange(1, 4), lists=3000).with_columns(
        item_id=pl.int_range(pl.len()), policy=pl.lit("random")
    )
    monkeypatch.setattr(inspection, "PAIR_ROWS", 100)
    facts = urank.inspect(urank.read(log), randomised=["policy=random"]).facts
    clicks = log.group_by("position").agg(pl.col("click").sum()).sort("position")["click"].to_numpy()
    assert sorted(facts.interventions.evidence)[-1] <= clicks.max() * 1.2
    assert sorted(facts.interventions.evidence)[:2] == sorted(clicks)[:2]


def test_one_query_with_many_showings_is_sampled_by_list(monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5), lists=500).rename({"query_id": "session_id"})
    monkeypatch.setattr(inspection, "SAMPLE_ROWS", 400)
    facts = urank.inspect(urank.read(log.with_columns(query_id=pl.lit("q")))).facts
    assert (facts.queries, facts.lists) == (1, 500)
    assert facts.confounding is not None
    assert 100 <= facts.confounding.rows <= 400
    assert facts.same_query_moves == 5
    monkeypatch.setattr(inspection, "SAMPLE_ROWS", 2)
    assert urank.inspect(urank.read(log.with_columns(query_id=pl.lit("q")))).facts.rows == 2500


@pytest.mark.parametrize("position", [3, 64, 65, 900])
def test_a_position_twice_in_a_list_is_refused(tmp_path: Path, position: int) -> None:
    log = make_log(lambda _: np.array([1, 2, position]), lists=300)
    extra = log.filter((pl.col("query_id") == 77) & (pl.col("position") == position))
    path = tmp_path / "log.parquet"
    pl.concat([log, extra]).write_parquet(path)
    with pytest.raises(DataError) as refusal:
        urank.inspect(urank.read(path))
    assert str(refusal.value) == (
        f"a position must occur once in a list; position {position} of query 77 is at row 234 of {path} and again at "
        f"row 901 of {path} (if these are two showings, name their session with --column session_id=NAME)"
    )
    sessions = pl.concat([log.with_columns(session_id=pl.lit("a")), extra.with_columns(session_id=pl.lit("b"))])
    assert urank.inspect(urank.read(sessions)).facts.lists == 301


def test_results_of_the_click_do_not_tell_the_position() -> None:
    log = make_log(lambda i: np.random.default_rng(i).permutation(5) + 1, rate=0.2)
    log = log.with_columns(paid=pl.when(pl.col("click") == 1).then(10.0 * pl.col("position")).otherwise(0.0))
    facts = urank.inspect(urank.read(log)).facts
    assert facts.outcomes == ["paid"]
    assert facts.confounding is not None
    assert list(facts.confounding.strongest) == ["x"]
    assert facts.confounding.share < 0.01


def test_columns_that_follow_from_others_do_not_count() -> None:
    rng = np.random.default_rng(4)
    log = make_log(lambda _: rng.permutation(6) + 1, lists=60)
    once = urank.inspect(urank.read(log)).facts.confounding
    many = log.with_columns(*((pl.col("x")).alias(f"x{i}") for i in range(20)), pl.lit("same").alias("brand"))
    twenty = urank.inspect(urank.read(many)).facts.confounding
    assert once is not None
    assert twenty is not None
    assert (twenty.share, twenty.p_value) == pytest.approx((once.share, once.p_value), abs=1e-6)


def test_many_columns_are_regressed_in_parts_or_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    log = make_log(lambda _: rng.permutation(6) + 1, lists=300)
    wide = log.with_columns(pl.Series(f"f{i}", rng.normal(size=log.height)) for i in range(30))
    wide = wide.with_columns(f7=pl.col("position") + pl.col("f7"))
    whole = urank.inspect(urank.read(wide)).facts.confounding
    monkeypatch.setattr(identifiability, "BLOCK_CELLS", 700)
    parts = urank.inspect(urank.read(wide)).facts.confounding
    assert whole is not None
    assert parts is not None
    assert parts.share == pytest.approx(whole.share, abs=1e-9)
    assert next(iter(parts.strongest)) == "f7"
    monkeypatch.setattr(identifiability, "MAX_WORK", 31**2 * 900)
    fewer = urank.inspect(urank.read(wide)).facts.confounding
    assert fewer is not None
    assert fewer.rows == 900
    monkeypatch.setattr(identifiability, "MAX_COLUMNS", 5)
    assert urank.inspect(urank.read(wide)).facts.confounding is not None


def test_the_largest_policies_and_those_said_to_be_random_are_looked_at() -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5), lists=1200)
    number = pl.col("query_id")
    name = pl.when(number < 30).then(pl.lit("a")).otherwise(pl.lit("p") + (number % 9).cast(pl.String))
    log = log.with_columns(policy=name)
    assert set(urank.inspect(urank.read(log)).facts.confounding_by_policy) < {f"p{i}" for i in range(9)}
    assert "a" in urank.inspect(urank.read(log), randomised=["policy=a"]).facts.confounding_by_policy


def test_advice_does_not_ask_for_what_is_there() -> None:
    log = make_log(lambda _: np.arange(1, 6), rate=0.02).with_columns(
        policy=pl.when(pl.col("query_id") < 50).then(pl.lit("random")).otherwise(pl.lit("ranker"))
    )
    plain, random = (urank.inspect(urank.read(log), randomised=names).verdict for names in ((), ("policy=random",)))
    assert any("show a small share of the traffic in randomised order" in advice for advice in plain.advice)
    assert not any("show a small share of the traffic in randomised order" in advice for advice in random.advice)
    assert any("show more of the traffic in random order" in advice for advice in random.advice)


def test_with_many_positions_the_table_of_shared_items_is_left_out() -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 202), i), lists=30)
    found = urank.inspect(urank.read(log))
    assert found.facts.interventions.shared is None
    plain = found.to_dict()["interventions"]
    assert plain["shared"] is None
    assert plain["note"] == "shared is left out, since there are more than 200 positions"
    assert "note" not in urank.inspect(urank.read(log.filter(pl.col("position") <= 200))).to_dict()["interventions"]


def test_confounding_is_seen_and_randomness_too() -> None:
    rng = np.random.default_rng(3)
    lists, n = 600, 8
    x = rng.normal(size=(lists, n))
    ranked = np.argsort(np.argsort(-x, axis=1), axis=1) + 1
    shuffled = rng.permuted(np.tile(np.arange(1, n + 1), (lists, 1)), axis=1)
    half = np.arange(lists)[:, None] % 2 == 0
    log = pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(lists), n),
            "item_id": rng.integers(0, 100, lists * n),
            "position": np.where(half, ranked, shuffled).ravel(),
            "click": rng.integers(0, 2, lists * n),
            "policy": np.repeat(np.where(half[:, 0], "ranker", "test"), n),
            "x": x.ravel(),
            "brand": rng.choice(["u", "v"], lists * n),
        }
    )
    found = urank.inspect(urank.read(log))
    by_policy = found.facts.confounding_by_policy
    assert by_policy["ranker"].share > 0.8
    assert by_policy["ranker"].strongest["x"] < -0.8
    assert by_policy["test"].share < 0.01
    assert by_policy["test"].looks_random
    assert not by_policy["ranker"].looks_random
    assert any("policy test looks randomised" in warning for warning in found.verdict.warnings)
    assert "if policy test was random by design, pass --randomised policy=test" in found.verdict.advice
    wrong = urank.inspect(urank.read(log), randomised=["policy=ranker", "policy=test"])
    assert any("policy ranker is declared random, but" in warning for warning in wrong.verdict.warnings)


def test_r_squared_is_that_of_least_squares() -> None:
    rng = np.random.default_rng(5)
    log = make_log(lambda _: rng.permutation(6) + 1, lists=50)
    log = log.with_columns(x=pl.col("position") + 3 * pl.col("x"))
    found = urank.inspect(urank.read(log)).facts.confounding
    assert found is not None
    squashed = log.with_columns(x=pl.col("x").cast(pl.Float32).cast(pl.Float64)).with_columns(
        x=pl.col("x").sign() * pl.col("x").abs().log1p()
    )
    centred = squashed.with_columns(pl.col("x", "position") - pl.col("x", "position").mean().over("query_id"))
    x, y = centred["x"].to_numpy(), centred["position"].to_numpy()
    rest = ((y - x * (x @ y) / (x @ x)) ** 2).sum()
    freedom = len(y) - 50 - 1
    assert found.share == pytest.approx(1 - (rest / freedom) / ((y @ y) / (freedom + 1)), abs=1e-4)


def test_columns_to_be_wary_of() -> None:
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5), rate=0.2)
    clicked = pl.col("click") == 1
    log = log.with_columns(
        booked=pl.when(clicked).then(pl.col("item_id") % 2).otherwise(0),
        paid=pl.when(clicked & (pl.col("item_id") > 2)).then(9.5),
        shop_id=pl.col("item_id") * 1000,
        shown=pl.format("2026-01-{} 10:15:00", pl.col("item_id").mod(20) + 10),
        season=pl.format("2026-{}", pl.col("item_id").mod(4)),
        price=pl.when(pl.int_range(pl.len()) == 7).then(1e9).otherwise(pl.col("x").abs()),
    )
    opened = urank.read(log)
    frame = opened.frame()
    assert id_like(frame, opened.schema) == ["shop_id"]
    assert time_like(frame, opened.schema) == ["shown"]
    assert list(heavy_tails(frame, opened.schema)) == ["price"]
    found = urank.inspect(opened)
    assert found.facts.outcomes == ["booked", "paid"]
    assert any(advice.startswith("-c timestamp=shown") for advice in found.verdict.advice)
    assert any(warning.startswith("booked, paid: known only after a click") for warning in found.verdict.warnings)


def outcomes(log: pl.DataFrame, *, batches: int = 1) -> list[str]:
    opened = urank.read(log)
    found = ClickOutcomes(opened.schema)
    for part in opened.frame().iter_slices(-(-log.height // batches)):
        found.add(part)
    return found.names()


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.7])
@pytest.mark.parametrize(("batches", "order"), [(1, ""), (40, ""), (40, "clicks first"), (40, "clicks last")])
def test_outcomes_of_every_kind(monkeypatch: pytest.MonkeyPatch, rate: float, batches: int, order: str) -> None:
    """Whatever stands for "no click": missing, 0, both, a sentinel or a category; a few late clicks were not logged."""
    monkeypatch.setattr(identifiability, "FIRST_ROWS", 700)
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5), lists=4000, rate=rate)
    log = log.sort("click", descending=order == "clicks first") if order else log
    clicked, value, even = pl.col("click") == 1, pl.col("x").abs() + 1, pl.col("item_id") % 2 == 0
    late = pl.int_range(pl.len()) % 5003 == 5002
    log = log.with_columns(
        again=pl.col("click"),
        skipped=1 - pl.col("click"),
        missing=pl.when(clicked).then(value),
        zero=pl.when(clicked | late).then(value).otherwise(0.0),
        known=pl.when(clicked).then(pl.when(even).then(1).otherwise(0)),
        both=pl.when(clicked).then(value).otherwise(pl.when(even).then(0.0)),
        sentinel=pl.when(clicked).then(value).otherwise(-1.0),
        flag=clicked & even,
        state=pl.when(clicked).then(pl.lit("sold")).otherwise(pl.lit("none")),
        clicked_at=pl.when(clicked).then(pl.lit("t") + pl.col("query_id").cast(pl.String)),
    )
    names = ["again", "skipped", "missing", "zero", "known", "both", "sentinel", "flag", "state", "clicked_at"]
    assert sorted(outcomes(log, batches=batches)) == sorted(names)


def test_strong_features_are_no_outcomes() -> None:
    """Clicks follow from the features, up to nine in ten; rare, constant and empty features are no evidence."""
    rng = np.random.default_rng(8)
    log = make_log(lambda i: np.roll(np.arange(1, 6), i % 5), lists=4000)
    strong = rng.random(log.height) < 0.1
    chance = np.where(strong, 0.9, 0.02)
    click = (rng.random(log.height) < chance).astype(int)
    few = (np.cumsum(click) <= 20) & (click == 1)
    log = log.with_columns(
        click=pl.Series(click),
        strong=pl.Series(strong.astype(float)),
        brand=pl.Series(np.where(strong, "best", "other")),
        known=pl.Series(np.where(strong, 1.0, np.nan)),
        probability=pl.Series(chance),
        few=pl.Series(few.astype(int)),
        constant=pl.lit(3.0),
        empty=pl.lit(None, dtype=pl.Float64),
        embedding=pl.concat_arr(pl.Series(click), pl.Series(click)),
        category=pl.Series(click.astype(str)),
    )
    assert outcomes(log) == outcomes(log, batches=7) == []
    assert outcomes(log.with_columns(click=pl.lit(1))) == outcomes(log.with_columns(click=pl.lit(0))) == []


def test_interventions_by_hand() -> None:
    """Item 0 at positions 1 (20 clicks) and 2 (15); item 1 at 2 (3) and 3 (30); item 2 at 3 only."""
    item, position = np.array([0, 0, 1, 1, 2]), np.array([1, 2, 2, 3, 3])
    clicks = np.array([20, 15, 3, 30, 8])
    found = position_graph(item, position, clicks, np.zeros(3, dtype=np.int64))
    # the anchor is position 3 with 38 clicks; its only link is item 1 with 3 clicks at position 2: too few
    assert found.joined == [3]
    assert found.lost == [1, 2]
    stronger = position_graph(item, position, np.array([20, 15, 12, 30, 8]), np.zeros(3, dtype=np.int64))
    assert stronger.joined == [1, 2, 3]
    assert stronger.evidence.tolist() == [min(20, 15), min(12, 30), 38]
    assert stronger.shared is not None
    assert stronger.shared.tolist() == [[1, 1, 0], [1, 2, 1], [0, 1, 2]]
    assert (stronger.moved, stronger.items) == (2, 3)


def test_ranges_in_words() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"


HOTEL = {
    "query_id": "srch_id",
    "click": "click_bool",
    "item_id": "prop_id",
    "policy": "random_bool",
    "timestamp": "date_time",
}


@pytest.fixture(scope="module")
def hotel(data_dir: Path) -> Inspection:
    log = urank.read(data_dir / "expedia" / "searches.csv.gz", columns=HOTEL)
    return urank.inspect(log, randomised=["policy=1"])


def test_hotel_log_tells_what_a_person_should_know(hotel: Inspection) -> None:
    facts, verdict = hotel.facts, hotel.verdict
    assert (facts.queries, facts.rows) == (1794, 44334)
    assert verdict.level == "partly learnable"
    assert {5, 11, 17, 23} <= set(facts.interventions.lost)
    told = " / ".join(verdict.warnings)
    assert "every list has a click" in told
    assert "positions 5, 11, 17, 23, 38–39 were shown rarely" in told
    assert "gross_bookings_usd: known only after a click" in told
    assert "price_usd: the largest value" in told
    assert facts.confounding_by_policy["0"].share > 5 * facts.confounding_by_policy["1"].share


def test_hotel_rates_against_a_plain_count(hotel: Inspection, data_dir: Path) -> None:
    frame = pl.read_csv(data_dir / "expedia" / "searches.csv.gz", infer_schema_length=None)
    rates = dict(frame.group_by("position").agg(pl.col("click_bool").mean()).iter_rows())
    assert dict(zip(hotel.facts.curve.position, hotel.facts.curve.rate, strict=True)) == pytest.approx(rates)
