"""Results in a notebook: the view of each is made of the sections of its report, and its frame has the numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import urank
from pages import Page
from report.analyses import analysis
from report.evaluations import comparison, evaluation, policy
from urank.abtest.planning import plan
from urank.clicks.item_curves import ItemCurve
from urank.evaluation.guard_sweep import GuardLevel, GuardLevels
from urank.evaluation.policy_evaluation import Evaluation
from urank.log.inspection import Inspection
from urank.ranking.guard import Guard, Moves


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    rng = np.random.default_rng(0)
    position = np.concatenate([rng.permutation(5) + 1 for _ in range(200)])
    rows = {"query_id": np.repeat(np.arange(200), 5), "item_id": rng.integers(0, 40, 1000), "position": position}
    return urank.inspect(urank.read(pl.DataFrame(rows | {"click": (rng.random(1000) < 0.6 / position).astype(int)})))


@pytest.fixture
def found() -> Evaluation:
    return evaluation(policy("score", 0.904, comparison(0.104)), policy("match", 0.856, comparison(0.056)))


@pytest.fixture
def levels() -> GuardLevels:
    values = [policy("score, shift 1", 0.84, comparison(0.04)), policy("score", 0.856, comparison(0.056))]
    moves, guards = [Moves(1000, 100, 500, 1, 4), Moves(1000, 100, 3400, 9, 75)], [Guard("shift", 1), None]
    made = [GuardLevel(*each) for each in zip(guards, values, moves, strict=True)]
    return GuardLevels("shift", "score", made, evaluation(*values))


def test_views_have_an_answer_charts_and_tables(inspection: Inspection, found: Evaluation, levels: GuardLevels) -> None:
    for result in (inspection, found, levels, analysis()):
        page = Page()
        page.feed(result._repr_html_())
        assert {"svg", "table", "style"} <= set(page.tags)
        assert not {"html", "body", "script", "link"} & set(page.tags)
        assert page.fetched == []
        assert len(repr(result)) < 2000


def test_the_view_is_about_the_policy_that_would_be_shipped(found: Evaluation) -> None:
    assert "about 13.0 % more" in found._repr_html_()  # 0.104 of 0.8, the best
    assert "about 7.0 % more" in replace(found, main="match")._repr_html_()


def test_frames_have_the_numbers(inspection: Inspection, found: Evaluation, levels: GuardLevels) -> None:
    curve = inspection.facts.curve
    assert inspection.to_frame().to_dict(as_series=False) == vars(curve)
    frame = found.to_frame()
    assert frame["policy"].to_list() == ["logged", "score", "match"]
    assert frame["utility"].to_list() == pytest.approx([0.8, 0.904, 0.856])
    assert frame["difference"].to_list() == [None, 0.104, 0.056]
    assert frame["difference_low"].to_list()[1:] == [0.104 - 0.008, 0.056 - 0.008]
    guarded = levels.to_frame()
    assert guarded["level"].to_list() == ["shift 1", "unbounded"]
    assert guarded["mean_move"].to_list() == [500 / 1000, 3400 / 1000]
    lifts = analysis().to_frame()
    assert lifts.select("metric", "lift").rows() == [("ctr", 0.1), ("cvr", 0.1)]
    assert ItemCurve("games", 10, [0.5, 0.3], 0.7).to_frame().rows() == [("games", 1, 0.5), ("games", 2, 0.3)]
    planned = plan(mean=0.1, variance=0.09, lift=0.1)
    assert planned.to_frame()["users"].to_list() == [planned.once.users, planned.daily.users]
