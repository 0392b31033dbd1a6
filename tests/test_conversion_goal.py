"""The goal conversions, from the log to the evaluation: what it earns, what is counted, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

import urank
from known_judges import QUICK_JUDGES as JUDGES
from simulated import SHARES
from urank.errors import ConfigError
from urank.evaluation.intervals import paired
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.lab.truth import true_table, true_utilities
from urank.log.dataset import Dataset, conversions_as_clicks, drop_unseen
from urank.log.ragged import list_ids, pad, where_items
from urank.pipeline import fit_model, goal_of, guard_levels, judges_for
from urank.ranking.policies import ModelPolicy, Random
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import UrankConfig
from urank.ranking.utility import utility

MATCH = UrankConfig(ranker="none", method="match")


@dataclass(frozen=True)
class World:
    """A prepared log with conversions, and the true P(conversion | item, k) of all candidates."""

    dataset: Dataset
    truth: pl.DataFrame

    def fit(self, goal: Any) -> RankingModel:
        return fit_model(self.dataset, MATCH.model_copy(update={"goal": goal, "judges": goal == "conversions"})).model

    def conversions(self, model: RankingModel) -> NDArray[np.float64]:
        """True conversions per list of each test query in the order of a model."""
        look_up = true_table(self.truth)
        (block,) = self.dataset.blocks("test", [*self.dataset.features, "item_id"])
        order = pad(model.order(block.items, block.offsets), block.offsets, fill=1)
        earned = utility(pad(look_up(block), block.offsets), order, where=where_items(block.offsets)).reshape(-1)
        _, query = np.unique(block.query_hash, return_inverse=True)
        return np.asarray(np.bincount(query, earned) / np.bincount(query))


def world(folder: Path, strength: float) -> World:
    """A simulation in which a click converts with σ(strength · z − 1), where z is the scaled feature f1."""
    simulation = simulate(SimulationConfig(**SHARES, truth_split="all", queries=500, sessions=4, features=6, seed=5))
    log, candidates = simulation.log.drop("relevance", "propensity", strict=False), simulation.candidates
    mean, std = candidates["f1"].mean(), candidates["f1"].std()
    rate = 1 / (1 + (1 - strength * (pl.col("f1") - mean) / std).exp())
    chance, table = candidates.select(rate).to_series(), np.array(candidates["table"].to_list())
    draw = pl.Series(np.random.default_rng(0).random(log.height))
    log = log.with_columns(conversion=((draw < log.select(rate).to_series()) & (log["click"] == 1)).cast(pl.Int8))
    urank.prepare(urank.read(log), folder, **SHARES)
    truth = candidates.with_columns(table=pl.Series((table * chance.to_numpy()[:, None]).tolist()))
    return World(Dataset(folder), truth)


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("differing") / "prepared", 1.5)


@pytest.fixture(scope="module")
def by_clicks(differing: World) -> RankingModel:
    return differing.fit("clicks")


@pytest.fixture(scope="module")
def by_conversions(differing: World) -> RankingModel:
    return differing.fit("conversions")


# What it earns


def test_the_goal_earns_more_conversions(
    differing: World, by_clicks: RankingModel, by_conversions: RankingModel
) -> None:
    assert (by_clicks.goal, by_conversions.goal) == ("clicks", "conversions")
    gain = paired(differing.conversions(by_conversions), differing.conversions(by_clicks))
    assert gain.mean > 0
    assert gain.p_value < 0.01


def test_without_a_difference_the_order_is_that_of_clicks(tmp_path: Path) -> None:
    alike = world(tmp_path / "prepared", 0.0)
    clicks, conversions = (alike.fit(goal) for goal in ("clicks", "conversions"))
    for block in alike.dataset.blocks("test", alike.dataset.features):
        orders = [model.order(block.items, block.offsets) for model in (clicks, conversions)]
        np.testing.assert_array_equal(*orders)


# What is counted


def test_evaluations_agree_with_the_truth(
    differing: World, by_clicks: RankingModel, by_conversions: RankingModel
) -> None:
    policies = [ModelPolicy("clicks", by_clicks, "match"), ModelPolicy("conversions", by_conversions, "match")]
    found = urank.evaluate(policies, differing.dataset, goal="conversions")
    assert found.measure == "conversions"
    true = true_utilities(found, [*policies, Random()], differing.dataset, differing.truth)
    for name, each in true.items():
        difference = found[name].difference
        if difference is not None and each.difference is not None:
            assert abs(difference.mean - each.difference.mean) < 3 * difference.error
    (block,) = differing.dataset.blocks("test", ["conversion"])
    observed = np.bincount(list_ids(block.offsets), block.column("conversion")).mean()
    assert list(found["logged"].utility.values())[-1].mean == pytest.approx(observed)


def test_a_model_remembers_its_goal(differing: World, by_conversions: RankingModel, by_clicks: RankingModel) -> None:
    assert urank.evaluate([by_conversions], differing.dataset).measure == "conversions"
    assert guard_levels(by_conversions, differing.dataset, levels=[1]).evaluation.measure == "conversions"
    assert urank.evaluate([by_conversions], differing.dataset, goal="clicks", config=JUDGES).measure == "clicks"
    with pytest.raises(ConfigError, match="different goals, clicks and conversions; choose what to count with --goal"):
        urank.evaluate([by_clicks, by_conversions], differing.dataset)
    with pytest.raises(ConfigError, match="goal must be clicks or conversions; got 'likes'"):
        urank.evaluate([by_clicks], differing.dataset, goal="likes")  # type: ignore[arg-type]
    assert goal_of([Random()]) == "clicks"


def test_judges_are_those_of_the_goal(differing: World, by_conversions: RankingModel) -> None:
    assert judges_for([by_conversions], differing.dataset, ("test",), "conversions") == by_conversions.judges
    assert judges_for([by_conversions], differing.dataset, ("test",), "clicks") == ()


LOG = pl.DataFrame(
    {
        "query_id": ["a", "a", "b", "b"],
        "position": [1, 2, 1, 3],
        "click": [1, 1, 0, 1],
        "conversion": [0, 1, 1, 1],
        "x": [0.5, 1.5, 2.5, 3.5],
    }
)


def test_conversions_in_place_of_clicks(tmp_path: Path) -> None:
    """A conversion without a click does not count: a table of clicks could not predict it."""
    urank.prepare(urank.read(LOG), tmp_path / "prepared", valid=0, test=0, positions=3)
    view = conversions_as_clicks(Dataset(tmp_path / "prepared"))
    assert view.outcome == "conversions"
    for each in (view, drop_unseen(view)):
        (block,) = each.blocks("train", ["x", "click"])
        found = dict(zip(block.column("x").tolist(), block.column("click").tolist(), strict=True))
        assert found == {0.5: 0, 1.5: 1, 2.5: 0, 3.5: 1}
        (block,) = each.blocks("train", ["x"])
        assert "conversion" not in block.items.column_names


# Every ranker learns it


@pytest.fixture(scope="module")
def opposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists of two items in random order: `a` has the clicks, `b` the conversions, whose value is 2."""
    folder, rng = tmp_path_factory.mktemp("opposed"), np.random.default_rng(0)
    lists = 600
    first = rng.permuted(np.tile(["a", "b"], (lists, 1)), axis=1).ravel()
    rows = {"query_id": np.repeat(np.arange(lists), 2), "position": np.tile([1, 2], lists), "kind": first}
    log = pl.DataFrame({**rows, "other": rng.normal(size=2 * lists), "value": np.full(2 * lists, 2.0)})
    click, convert = rng.random((2, 2 * lists))
    rate = pl.when(pl.col("kind") == "a").then
    log = log.with_columns(click=(pl.Series(click) < rate(0.6).otherwise(0.4)).cast(pl.Int8)).with_columns(
        booked=((pl.Series(convert) < rate(0.1).otherwise(0.9)) & (pl.col("click") == 1)).cast(pl.Int8)
    )
    log.write_parquet(folder / "log.parquet")
    urank.prepare(urank.read(log, columns={"conversion": "booked"}), folder / "prepared", valid=0.2, test=0.2)
    return folder


TWO = pl.DataFrame({"kind": ["a", "b"], "other": [0.0, 0.0], "value": [2.0, 2.0]})
TRAINING = {"epochs": 3, "batch_lists": 32}
QUICK: dict[str, Any] = {
    "clicks": {"families": ["monotone"], "hidden": [8], "training": TRAINING},
    "scorer": {"hidden": [8], "training": TRAINING},
    "trees": {"trees": 20, "threads": 1},
    "judges": False,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"ranker": "network"},
        {"ranker": "network", "scorer": {**QUICK["scorer"], "target": "counterfactual"}},
        {"ranker": "trees"},
        {"ranker": "lambdarank-trees"},
    ],
    ids=lambda settings: "-".join([settings["ranker"], settings.get("scorer", {}).get("target", "model")]),
)
def test_every_ranker_learns_the_goal(opposed: Path, settings: dict[str, Any]) -> None:
    dataset = Dataset(opposed / "prepared")
    first = {}
    for goal in ("clicks", "conversions"):
        config = UrankConfig.model_validate({**QUICK, **settings, "goal": goal, "method": "score"})
        ranked = fit_model(dataset, config).model.rank(TWO.with_columns(item_id="kind"), method="score")
        first[goal] = ranked["item_id"][0]
    assert first == {"clicks": "a", "conversions": "b"}


def test_values_of_conversions(opposed: Path) -> None:
    """The utility is the value times P(conversion), and the conversions of the log are counted by value."""
    model = urank.URank(goal="conversions", ranker="none", method="ctr1", clicks=QUICK["clicks"])
    log = urank.read(opposed / "log.parquet", columns={"conversion": "booked"})
    ranked = model.fit(log).rank(TWO.with_columns(item_id="kind"))
    assert ranked["item_id"].to_list() == ["b", "a"]
    table = np.exp(model.log_ctr(TWO))
    np.testing.assert_allclose(ranked["utility"], [2 * table[1, 0], 2 * table[0, 1]], rtol=1e-5)
    found = urank.evaluate([model], log, config=JUDGES)
    assert found.measure == "value"
    with urank.pipeline.prepared(log) as dataset:
        (block,) = dataset.blocks("test", ["conversion"])
    earned = 2 * block.column("conversion").sum() / (len(block.offsets) - 1)
    assert list(found["logged"].utility.values())[-1].mean == pytest.approx(earned)
