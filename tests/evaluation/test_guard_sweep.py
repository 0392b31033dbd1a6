"""The levels of a guard: between the logged order and the policy, judged without propensities, recommended by rule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from known_judges import QUICK_JUDGES as QUICK
from known_judges import let_judges_know
from report.evaluations import comparison, evaluation, policy
from simulated import Small, make, true_utility
from urank.errors import ConfigError, DataError
from urank.evaluation.guard_sweep import GuardLevel, GuardLevels, evaluate_guard
from urank.evaluation.policy_evaluation import evaluate_policies
from urank.lab.truth import true_guard_utilities, true_utilities
from urank.log.dataset import Block
from urank.pipeline import ModelFit, guard_levels
from urank.ranking.guard import Guard, Moves
from urank.ranking.policies import Guarded, ModelPolicy, Policy, Random
from urank.ranking.ranking_model import RankingModel

K = 10


@pytest.fixture
def oracle(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """All judges know the truth."""
    let_judges_know(small, monkeypatch)


@dataclass(eq=False)
class Asked:
    """A policy that counts how often it is asked."""

    policy: Policy
    times: int = 0
    name: str = "mine"
    columns: list[str] = field(default_factory=list)

    def positions(self, block: Block) -> NDArray[np.int64]:
        self.times += 1
        return self.policy.positions(block)


# By the truth


@pytest.mark.parametrize("kind", ["shift", "blend"])
def test_levels_lie_between_the_logged_and_the_full_order(
    small: Small, fitted: ModelFit, oracle: None, kind: Any
) -> None:
    found = guard_levels(fitted.model, small.dataset, kind=kind)
    policy = ModelPolicy("score", fitted.model, "score")
    by_name = true_guard_utilities(found, policy, small.dataset, small.folder)
    true = [each.by_cutoff[K] for each in by_name.values()]
    full = true[-1] - true[0]
    assert full > 0, true
    assert all(after >= before - 0.05 * full for before, after in pairwise(true)), true
    assert true[1] > true[0] + 0.05 * full
    # The truth of a level is what its orders earn, and the estimate is near it, since the judges know the truth.
    for level in found.levels:
        guarded = policy if level.guard is None else Guarded(policy, level.guard)
        own = by_name[guarded.name].by_cutoff[K]
        assert own == pytest.approx(true_utility(small, guarded.positions), rel=1e-6)
        assert abs(level.utility.mean - own) < 4 * level.utility.error
    moved = [level.moves.mean for level in found.levels]
    assert moved == sorted(moved)
    if kind == "shift":
        assert [level.name for level in found.levels] == ["shift 1", "shift 2", "shift 3", "shift 5", "unbounded"]
        assert [level.moves.largest for level in found.levels[:-1]] == [1, 2, 3, 5]
    else:
        assert [level.name for level in found.levels] == ["blend 0.25", "blend 0.5", "blend 0.75", "blend 1"]


def test_propensities_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guarded order meets a shuffled one more often than one time in K, so inverse propensities count its clicks too
    often; Eq. 3 does not mind."""
    size = {"candidates": 5, "positions": 5, "features": 4}
    shuffled = make(tmp_path, queries=300, sessions=6, randomise="shuffle", randomise_share=1.0, seed=3, **size)
    assert shuffled.dataset.has("propensity")
    let_judges_know(shuffled, monkeypatch)
    guarded = Guarded(Random(), Guard("shift", 1))
    with_them = evaluate_policies([guarded], shuffled.dataset)
    true = true_utilities(with_them, [guarded], shuffled.dataset, shuffled.folder)[guarded.name].by_cutoff[5]
    ips, ratio, refit = (with_them[guarded.name].estimates[name] for name in ("ips", "ratio", "refit"))
    assert ips.low > 1.2 * true
    assert abs(ratio.mean - true) < 3 * ratio.error
    assert abs(refit.mean - true) < 3 * refit.error
    found = evaluate_guard(Random(), shuffled.dataset, levels=[1])
    assert found.evaluation.estimator == "refit"
    assert "ips" not in found.levels[0].value.estimates
    assert found.levels[0].value.support.coverage is None
    assert found.levels[0].utility.mean == pytest.approx(refit.mean)
    assert shuffled.dataset.has("propensity")


# What is judged


def test_one_policy_is_asked_once_for_all_levels(small: Small) -> None:
    asked = Asked(Random())
    found = evaluate_guard(asked, small.dataset, levels=[3, 1, 3.0, 1], config=QUICK)
    assert asked.times == len(list(small.dataset.blocks("test", ["position"])))
    assert [level.name for level in found.levels] == ["shift 1", "shift 3", "unbounded"]
    assert [level.value.name for level in found.levels] == ["mine, shift 1", "mine, shift 3", "mine"]
    assert (found.policy, found.kind) == ("mine", "shift")
    assert {level.moves.items for level in found.levels} == {small.dataset.rows("test")}
    assert {level.moves.lists for level in found.levels} == {found.evaluation.lists}
    assert list(found.levels[0].value.utility) == [K]


def test_levels_of_a_blend_end_with_the_full_order(small: Small) -> None:
    found = evaluate_guard(Random(), small.dataset, kind="blend", levels=[1, 0.5, 0], config=QUICK)
    assert [level.name for level in found.levels] == ["blend 0", "blend 0.5", "blend 1"]
    assert found.levels[0].moves == replace(found.levels[2].moves, places=0, largest=0, firsts=0)
    assert found.levels[0].difference.mean == pytest.approx(0, abs=1e-6)
    assert found.levels[0].difference.error == pytest.approx(0, abs=1e-6)


def test_methods_and_splits(small: Small, fitted: ModelFit) -> None:
    settings: dict[str, Any] = {"levels": [1], "config": QUICK}
    found = guard_levels(fitted.model, small.dataset, method="ctr1", split="valid", **settings)
    assert (found.policy, found.evaluation.splits) == ("ctr1", ["valid"])
    assert guard_levels(fitted.model, small.dataset, **settings).policy == fitted.model.method == "score"
    again = guard_levels(fitted.model, small.dataset, **settings)
    assert again.to_dict() == guard_levels(fitted.model, small.dataset, **settings).to_dict()


# What is recommended


def levels(*gains: tuple[float, float], logged: float = 0.8) -> GuardLevels:
    """Levels with these gains, each with so much to either side."""
    found = [
        policy(f"score, shift {number}", logged + mean, comparison(mean, half))
        for number, (mean, half) in enumerate(gains, 1)
    ]
    guards = [*(Guard("shift", number) for number in range(1, len(gains))), None]
    moved = Moves(items=10, lists=2, places=6, largest=2, firsts=1)
    return GuardLevels(
        "shift",
        "score",
        [GuardLevel(guard, value, moved) for guard, value in zip(guards, found, strict=True)],
        evaluation(*found, logged=policy("logged", logged)),
    )


@pytest.mark.parametrize(
    ("gains", "name", "sentence"),
    [
        (
            [(0.008, 0.004), (0.048, 0.008), (0.08, 0.008)],
            "shift 2",
            "launch score with shift 2 first: it earns 6.0 % more clicks than the logged order (95 % interval 5.0 % to "
            "7.0 %), 60 % of the full gain",
        ),
        (
            [(0.008, 0.004), (0.016, 0.004), (0.08, 0.008)],
            "unbounded",
            "launch score unguarded: it earns 10.0 % more clicks than the logged order (95 % interval 9.0 % to 11.0 %)"
            ", and no smaller level has a significant gain of at least half that size",
        ),
        (
            [(0.008, 0.004), (0.04, 0.05), (0.08, 0.09)],
            None,
            "no level is recommended: score with shift 1 earns 1.0 % more clicks than the logged order (95 % interval "
            "0.5 % to 1.5 %), but less than half of the full gain, whose interval contains 0",
        ),
        (
            [(0.008, 0.004), (-0.04, 0.008)],
            "shift 1",
            "launch score with shift 1 first: it earns 1.0 % more clicks than the logged order (95 % interval 0.5 % to "
            "1.5 %), the full order no more",
        ),
        (
            [(0.008, 0.01), (-0.04, 0.008)],
            None,
            "no level is recommended: none has a gain whose 95 % interval is above 0",
        ),
        ([(nan, nan)], None, "no level is recommended: none has a gain whose 95 % interval is above 0"),
    ],
)
def test_the_recommendation(gains: list[tuple[float, float]], name: str | None, sentence: str) -> None:
    found = levels(*gains)
    chosen = found.recommended
    assert (None if chosen is None else chosen.name) == name
    assert found.recommendation == sentence
    assert str(found).endswith(f"\n{sentence}")
    told = found.to_dict()
    assert (told["recommended"], told["recommendation"]) == (name, sentence)
    assert "policies" not in told
    assert told["levels"][0]["guard"] == (None if len(gains) == 1 else "shift:1")
    assert (told["levels"][0]["mean_move"], told["levels"][0]["other_first"]) == (0.6, 0.5)


def test_gains_on_nothing_have_no_percents() -> None:
    assert "it earns 0.0480 more clicks than" in levels((0.048, 0.008), (0.08, 0.008), logged=0.0).recommendation


# Refusals


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "jump"}, "kind must be shift or blend; got 'jump'"),
        ({"levels": [1.5]}, r"the level of a shift must be a whole number from 0 up; got 1\.5"),
        ({"kind": "blend", "levels": [3]}, "the level of a blend must be from 0 to 1; got 3"),
        ({"estimator": "ips"}, "estimator ips cannot evaluate a guard, which follows the logged list"),
        ({"estimator": "magic"}, "estimator must be auto, refit or one of direct"),
        ({"split": "tset"}, "split must be train, valid, test or all; got 'tset'"),
        ({"method": "magic"}, "this model ranks by score, match, ctr1; got 'magic'"),
    ],
)
def test_refusals(small: Small, fitted: ModelFit, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        guard_levels(fitted.model, small.dataset, **settings)


def test_a_model_without_a_scorer(small: Small, fitted: ModelFit, tmp_path: Path) -> None:
    alone = RankingModel(fitted.model.clicks)
    with pytest.raises(ConfigError, match="this model ranks by match, ctr1; got 'score'"):
        guard_levels(alone, small.dataset, method="score")
    with pytest.raises(DataError, match="is not a urank model"):
        guard_levels(tmp_path, small.dataset)
