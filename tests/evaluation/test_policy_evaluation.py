"""Policies side by side: what the log says of itself, what a right table makes exact, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import StringIO
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from rich.console import Console

import urank
from known_judges import QUICK_JUDGES as QUICK
from known_judges import let_judges_know
from simulated import Small, make
from urank.clicks.click_settings import ClickConfig
from urank.errors import ConfigError, DataError
from urank.evaluation import policy_evaluation as module
from urank.evaluation.estimators import ESTIMATORS, Terms
from urank.evaluation.intervals import INFLATION, normal_interval, paired, refitted_interval
from urank.evaluation.policy_evaluation import Evaluation, evaluate_policies, query_bytes
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.lab.truth import true_utilities
from urank.log import prepare
from urank.log.dataset import Block, Dataset
from urank.log.ragged import positions_by_score, where_items
from urank.log.splits import SPLITS
from urank.memory import Memory
from urank.pipeline import ModelFit
from urank.ranking.policies import ModelPolicy, Random
from urank.report.evaluation_report import evaluation_sections, print_evaluation

K = 10
LONGER = ClickConfig(families=("monotone",), hidden=(16,))


@dataclass(frozen=True)
class Reversed:
    """The logged order upside down."""

    name: str = "reversed"
    columns: tuple[str, ...] = ("position",)

    def positions(self, block: Block) -> NDArray[np.int64]:
        lengths = np.repeat(np.diff(block.offsets), np.diff(block.offsets))
        return (lengths + 1 - block.column("position")).astype(np.int64)


@pytest.fixture
def oracle(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """All judges know the truth."""
    let_judges_know(small, monkeypatch)


@pytest.fixture(scope="module")
def evaluation(small: Small, fitted: ModelFit) -> Evaluation:
    """By real click models."""
    policies = [ModelPolicy("score", fitted.model, "score"), ModelPolicy("match", fitted.model, "match"), Random()]
    return evaluate_policies(policies, small.dataset, config=QUICK)


@pytest.fixture(scope="module")
def lists(small: Small) -> pl.DataFrame:
    """The held-out part of the log, a row for each impression."""
    queries = {
        name for block in small.dataset.blocks("test", ["position"]) for name in block.lists["query_id"].to_pylist()
    }
    return small.simulation.log.filter(pl.col("query_id").is_in(queries))


@pytest.fixture
def prepared(small: Small, tmp_path: Path) -> Iterator[Any]:
    """Another form of the same log."""

    def prepare(log: pl.DataFrame, **settings: Any) -> Dataset:
        urank.prepare(urank.read(log), tmp_path / "prepared", **{"valid": 0.2, "test": 0.2, **settings})
        return Dataset(tmp_path / "prepared")

    return prepare


# What is known without any model


def test_counts_and_names(small: Small, evaluation: Evaluation, lists: pl.DataFrame) -> None:
    assert [policy.name for policy in evaluation.policies] == ["logged", "score", "match", "random"]
    assert evaluation.queries == lists["query_id"].n_unique()
    assert evaluation.lists == lists.select("query_id", "session_id").n_unique()
    assert evaluation.rows == lists.height == small.dataset.rows("test")
    assert (evaluation.measure, evaluation.splits, evaluation.clicks) == ("value", ["test"], ["monotone"] * 4)
    assert evaluation.estimator == "refit"
    assert set(evaluation["score"].estimates) == {"refit", *ESTIMATORS}


def test_the_logged_order_earned_what_it_earned(evaluation: Evaluation, lists: pl.DataFrame) -> None:
    logged = evaluation["logged"]
    earned = lists["click"] * lists["value"]
    per_list = earned.sum() / evaluation.lists
    for estimator in ESTIMATORS:
        if estimator != "direct":  # which tells what the click model expects
            assert logged.estimates[estimator].mean == pytest.approx(per_list)
    assert list(logged.utility) == [1, 3, 5, K]
    for cutoff, found in logged.utility.items():
        assert found.mean == pytest.approx(earned.filter(lists["position"] <= cutoff).sum() / evaluation.lists)
    assert (logged.difference, logged.support.warnings) == (None, [])
    by_query = lists.group_by("query_id").agg((pl.col("click") * pl.col("value")).sum())["click"].to_numpy()
    expected = normal_interval(by_query / 6)  # every query was shown six times
    assert logged.utility[K].error == pytest.approx(expected.error)
    assert logged.utility[K].low == pytest.approx(expected.low)


def test_without_values_clicks_are_counted(small: Small, lists: pl.DataFrame, prepared: Any, oracle: None) -> None:
    found = evaluate_policies([], prepared(small.simulation.log.drop("value")), estimator="ratio")
    assert found.measure == "clicks"
    assert found["logged"].utility[K].mean == pytest.approx(lists["click"].sum() / found.lists)
    assert [policy.name for policy in found.policies] == ["logged"]


def test_estimates_and_values_hang_together(evaluation: Evaluation) -> None:
    for policy in evaluation.policies:
        assert policy.values.shape == (evaluation.queries,)
        assert policy.utility[K] == policy.estimates[evaluation.estimator]
        assert policy.utility[K].mean == pytest.approx(policy.values.mean())
        assert policy.bootstrap.mean == pytest.approx(policy.values.mean())
        if policy.difference is not None:
            baseline = evaluation["logged"].values
            assert policy.difference.mean == pytest.approx((policy.values - baseline).mean())
            assert policy.difference.error >= paired(policy.values, baseline).error
            assert policy.difference.low <= policy.difference.mean <= policy.difference.high
    apart = evaluation.compare("match", "random")
    by_model = evaluation["match"].by_model - evaluation["random"].by_model
    assert by_model.shape == (1, 2)
    assert apart == refitted_interval(evaluation["match"].values - evaluation["random"].values, by_model)
    assert apart.mean == pytest.approx(evaluation["match"].utility[K].mean - evaluation["random"].utility[K].mean)
    assert evaluation.compare("match", "match").p_value == 1
    with pytest.raises(KeyError, match="no policy is called 'oracle'; there are logged, score, match, random"):
        evaluation["oracle"]


def test_in_a_terminal(evaluation: Evaluation) -> None:
    first, *lines = str(evaluation).splitlines()
    assert first == f"value per list by refit, {evaluation.queries:,} queries"
    assert [line.split()[0] for line in lines[:4]] == ["logged", "score", "match", "random"]
    assert "to logged" not in lines[0]
    assert f"to logged {evaluation['score'].difference.mean:+.4f}" in lines[1]  # type: ignore[union-attr]
    assert lines[4:] == evaluation.warnings


def test_plain_json(evaluation: Evaluation) -> None:
    told = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert told == evaluation.to_dict()
    assert list(told["policies"][1]["utility"]) == ["1", "3", "5", "10"]
    assert not {"values", "by_model"} & set(told["policies"][0])
    assert told["policies"][0]["difference"] is None
    assert told["policies"][1]["difference"]["p_value"] == evaluation["score"].difference.p_value  # type: ignore[union-attr]
    assert len(told["specification"]["cells"]) == len(evaluation.specification.cells)
    assert (told["queries"], told["floor"], told["warnings"]) == (evaluation.queries, 0.01, evaluation.warnings)


# A right table


def test_with_a_right_table_direct_is_the_truth(small: Small, oracle: None) -> None:
    policies = [Reversed(), Random()]
    found = evaluate_policies(policies, small.dataset, estimator="direct")
    true = true_utilities(found, policies, small.dataset, small.folder)
    for policy in found.policies:
        for cutoff, utility in policy.utility.items():
            assert utility.mean == pytest.approx(true[policy.name].by_cutoff[cutoff], rel=1e-5)
        # All models agree, so the interval is that over queries.
        assert policy.utility[K] == normal_interval(policy.values)
    assert found.specification.warnings == []


@pytest.mark.parametrize("splits", [("test",), SPLITS])
def test_row_groups_and_splits_change_nothing(
    small: Small, oracle: None, prepared: Any, splits: tuple[str, ...]
) -> None:
    whole = evaluate_policies([Reversed()], small.dataset, splits=splits, cutoffs=(3,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ROW_GROUP_BYTES", 30_000)
        cut = prepared(small.simulation.log)
    assert len(cut.groups("test")) > 3
    found = evaluate_policies([Reversed()], cut, splits=splits, cutoffs=(3,))
    assert (found.queries, found.lists, found.rows) == (whole.queries, whole.lists, whole.rows)
    assert found.splits == list(splits)
    for a, b in zip(found.policies, whole.policies, strict=True):
        for cutoff, utility in a.utility.items():
            assert utility.mean == pytest.approx(b.utility[cutoff].mean)
            assert utility.error == pytest.approx(b.utility[cutoff].error)
        assert a.support.placements == b.support.placements


def test_blocks_are_judged_in_parts_without_a_difference(
    small: Small, oracle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate_policies([Reversed()], small.dataset)
    monkeypatch.setattr(module, "BLOCK_ENTRIES", 64 * 50)
    found = evaluate_policies([Reversed()], small.dataset)
    assert (found.queries, found.lists, found.rows) == (whole.queries, whole.lists, whole.rows)
    for a, b in zip(found.policies, whole.policies, strict=True):
        assert a.utility[K].mean == pytest.approx(b.utility[K].mean)
        assert a.utility[K].error == pytest.approx(b.utility[K].error)


def test_of_more_queries_than_memory_holds_a_sample_is_judged(small: Small, oracle: None) -> None:
    whole = evaluate_policies([Reversed()], small.dataset, splits=SPLITS, estimator="direct")
    by_query = query_bytes(2, 4, propensity=True)
    whole_rows = small.dataset.rows_of_query(SPLITS)
    room = 100 * (by_query + whole_rows * module.row_bytes(small.dataset))  # for 100 of the 400 queries
    dataset = Dataset(small.dataset.folder, memory=Memory(round(4 * room)))
    found = evaluate_policies([Reversed()], dataset, splits=SPLITS, estimator="direct")
    assert found.all_rows == whole.rows == whole.all_rows
    assert 90 <= found.queries <= 103  # whole queries, so a few more or less
    assert found.rows < whole.rows
    (warning,) = [each for each in found.warnings if "sample of the queries" in each]
    assert f"{found.rows:,} of {whole.rows:,} impressions" in warning
    assert not any("sample of the queries" in each for each in whole.warnings)
    for a, b in zip(found.policies, whole.policies, strict=True):
        assert abs(a.utility[K].mean - b.utility[K].mean) < 4 * a.utility[K].error


def test_the_bytes_of_a_query_are_those_of_its_sums(many: Terms) -> None:
    joined = many.to_array()[:, :1].nbytes  # beside what is joined, as much is taken by values made of it
    assert query_bytes(1, 1, propensity=True) == 2 * joined
    assert query_bytes(3, 4, propensity=False) == 2 * 12 * replace(many, ips=None).to_array()[:, :1].nbytes


def test_models_that_disagree_widen_intervals(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """One judge sees 0.8 of the clicks: θ and 0.8 θ, so (0.2 θ)² / 4 is added to the variance."""
    let_judges_know(small, monkeypatch, (1.0, 0.8))
    found = evaluate_policies([Reversed()], small.dataset, estimator="direct")
    true = true_utilities(found, [Reversed()], small.dataset, small.folder)
    logged, other = found.policies
    for policy in found.policies:
        theta = true[policy.name].by_cutoff[K]
        own = normal_interval(policy.values).error ** 2
        assert policy.utility[K].error == pytest.approx(sqrt(own + (0.2 * theta) ** 2 / 4), rel=1e-5)
    own = paired(other.values, logged.values).error ** 2
    apart = 0.2 * (true["reversed"].by_cutoff[K] - true["logged"].by_cutoff[K])
    assert other.difference is not None
    assert other.difference.error == pytest.approx(sqrt(own + apart**2 / 4), rel=1e-5)
    # What needs no model has no variance of models.
    for estimator in ("ips", "snips"):
        assert other.estimates[estimator] == normal_interval_of(found, small, estimator)


def normal_interval_of(found: Evaluation, small: Small, estimator: str) -> Any:
    again = evaluate_policies([Reversed()], small.dataset, estimator=estimator)
    return normal_interval(again["reversed"].values)


def test_ties_are_not_credited_with_the_work_of_the_logger(small: Small, oracle: None) -> None:
    """Lists are written in the order of their positions; a ranker that tells no items apart must not profit by it."""

    class Tied(Reversed):
        def positions(self, block: Block) -> NDArray[np.int64]:
            where = where_items(block.offsets)
            return positions_by_score(np.zeros(where.shape), where=where)[where]

    found = evaluate_policies([Tied("tied")], small.dataset, config=QUICK)
    assert found["tied"].support.as_logged == pytest.approx(0.1, abs=0.03)  # one in ten, by chance
    again = evaluate_policies([Tied("tied")], small.dataset, config=QUICK)
    assert again.to_dict() == found.to_dict()


def test_cutoffs(small: Small, oracle: None) -> None:
    found = evaluate_policies([], small.dataset, cutoffs=(99, 2, 10, 2))
    assert list(found["logged"].utility) == [2, 10]


def test_without_propensities(small: Small, oracle: None, prepared: Any) -> None:
    dataset = prepared(small.simulation.log.drop("propensity"))
    found = evaluate_policies([Reversed()], dataset)
    assert found.estimator == "refit"
    assert set(found["reversed"].estimates) == {"refit", "direct", "ratio", "self_normalised", "doubly_robust"}
    assert found["reversed"].support.coverage is None
    for estimator in ("ips", "snips"):
        with pytest.raises(ConfigError, match=f"estimator {estimator} needs the column propensity, which .* does not"):
            evaluate_policies([Reversed()], dataset, estimator=estimator)


def test_seeds(small: Small) -> None:
    first, again, other = (
        evaluate_policies([Reversed()], small.dataset, config=QUICK.model_copy(update={"seed": seed}))
        for seed in (0, 0, 1)
    )
    assert first.to_dict() == again.to_dict()
    assert first["reversed"].utility[K] != other["reversed"].utility[K]


# Refusals, before any model is fitted


@pytest.fixture
def nothing_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was fitted")

    monkeypatch.setattr(module, "fit_judges", fail)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"estimator": "magic"}, "estimator must be auto, refit or one of direct, ratio, .*, snips; got 'magic'"),
        ({"splits": ("tset",)}, "splits must be some of train, valid, test; got 'tset'"),
        ({"splits": ("test", "all")}, "splits must be some of train, valid, test; got 'test, all'"),
        ({"splits": ()}, "splits must be some of train, valid, test; got ''"),
    ],
)
def test_settings_that_are_refused(small: Small, nothing_fitted: None, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        evaluate_policies([Random()], small.dataset, **settings)


def test_names_must_differ(small: Small, nothing_fitted: None) -> None:
    for policies, name in (([Random(), Random(seed=1)], "random"), ([Reversed("logged")], "logged")):
        with pytest.raises(ConfigError, match=f"policies must have distinct names; '{name}' occurs twice"):
            evaluate_policies(policies, small.dataset)


def test_columns_that_a_policy_lacks(small: Small, fitted: ModelFit, nothing_fitted: None, prepared: Any) -> None:
    dataset = prepared(small.simulation.log.drop("f3", "value"))
    with pytest.raises(DataError, match="policy 'match' needs the column 'f3', which the log does not have"):
        evaluate_policies([ModelPolicy("match", fitted.model, "match")], dataset)


def test_values_that_a_scorer_lacks(small: Small, fitted: ModelFit, nothing_fitted: None, prepared: Any) -> None:
    dataset = prepared(small.simulation.log.drop("value"))
    with pytest.raises(DataError, match="policy 'score' needs the column 'value', which the log does not have"):
        evaluate_policies([ModelPolicy("score", fitted.model, "score")], dataset)


def test_positions_that_are_no_order(small: Small, oracle: None) -> None:
    class Stuck(Reversed):
        def positions(self, block: Block) -> NDArray[np.int64]:
            return np.ones(block.items.num_rows, dtype=np.int64)

    with pytest.raises(ValueError, match="positions must be distinct within a list"):
        evaluate_policies([Stuck("stuck")], small.dataset)


def test_too_few_queries(small: Small, prepared: Any) -> None:
    few = prepared(small.simulation.log.filter(pl.col("query_id").is_in(["q000001", "q000002"])), valid=0, test=1)
    with pytest.raises(DataError, match="has too few queries in test for 2 folds"):
        evaluate_policies([Random()], few, config=QUICK)


def test_comparisons_between_policies_count_the_models_too(evaluation: Evaluation) -> None:
    match, score = evaluation["match"], evaluation["score"]
    plain = paired(match.values, score.values)
    between = evaluation.compare("match", "score")
    apart = (match.by_model - score.by_model) @ [1, -1]
    assert between.mean == plain.mean
    assert between.error == pytest.approx(INFLATION * np.sqrt(plain.error**2 + np.mean(apart**2) / 4))


# Lists in random order, and clicks that depend on the items above


def test_random_lists_are_also_evaluated_on_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"candidates": 5, "positions": 5, "features": 4}
    shuffled = make(tmp_path, queries=300, sessions=6, randomise="shuffle", randomise_share=1.0, seed=3, **size)
    let_judges_know(shuffled, monkeypatch)
    mark = str(shuffled.simulation.log["policy"][0])
    found = evaluate_policies([Random()], shuffled.dataset, randomised=[f"policy={mark}"]).randomised
    assert found is not None
    assert found.check.random
    assert set(found.utility) == {"as shown", "random"}
    gain = found.difference["random"]
    assert abs(gain.mean) < 3 * gain.error  # one random order is as good as another
    for wrong, sentence in (
        ("policy=nobody", r"no list of the splits test has policy=nobody \(--randomised\); leave it out"),
        ("nowhere=1", "randomised must be COLUMN=VALUE with a column of the log; got 'nowhere=1'"),
        ("policy", "randomised must be COLUMN=VALUE"),
        ("f1=high", "randomised must name a number, since f1 has numbers; got 'f1=high'"),
    ):
        with pytest.raises((ConfigError, DataError), match=sentence):
            evaluate_policies([Reversed()], shuffled.dataset, randomised=[wrong])


def test_on_random_lists_only_the_items_shown_are_ranked(prepared: Any) -> None:
    """With candidates below the last position, a policy shares out the slots of the items that were shown."""
    size = {"candidates": 6, "positions": 6, "features": 4}
    log = simulate(SimulationConfig(queries=100, randomise="shuffle", randomise_share=1.0, seed=3, **size)).log
    shown = pl.col("position") <= 4
    log = log.with_columns(click=pl.col("click") * shown)
    found, alone = (
        evaluate_policies(
            [Reversed()],
            prepared(rows, positions=4, overwrite=True),
            config=QUICK,
            randomised=[f"policy={log['policy'][0]}"],
        ).randomised
        for rows in (log, log.filter(shown))
    )
    assert found is not None
    assert alone is not None
    assert found.lists == alone.lists > 0
    assert found.difference["reversed"].mean == pytest.approx(alone.difference["reversed"].mean)


def test_lists_marked_as_random_that_are_all_sorted_are_a_warning(small: Small, oracle: None, prepared: Any) -> None:
    dataset = prepared(small.simulation.log.with_columns(price=pl.col("position") * 10.0))
    found = evaluate_policies([Reversed()], dataset, randomised=["policy=logger-1"])
    assert found.randomised is not None
    assert (found.randomised.lists, found.randomised.utility, found.randomised.difference) == (0, {}, {})
    (warning,) = [each for each in found.warnings if "random order" in each]
    assert "100.0 % of the lists marked as random are ordered by price" in warning
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["randomised"]["lists"] == 0
    console = Console(file=StringIO(), width=100)
    print_evaluation(found, console)
    assert "ordered by price" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "random order" not in " ".join(section.title for section in evaluation_sections(found))


def test_clicks_that_depend_on_the_items_above_are_a_warning(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch, oracle: None
) -> None:
    sound = evaluate_policies([], small.dataset)
    assert sound.independence is not None
    assert sound.independence.independent
    monkeypatch.undo()
    stopping = make(tmp_path, queries=400, sessions=6, user="cascade", positions=5, features=4, seed=3)
    found = evaluate_policies([], stopping.dataset, config=QUICK.model_copy(update={"clicks": LONGER}))
    assert found.independence is not None
    assert not found.independence.independent
    assert found.independence.sentence in found.warnings
