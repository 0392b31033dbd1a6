"""Folds: every query is held out once, whole, and what learns from a log learns from a fold of it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import urank
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks, predictions
from urank.errors import ConfigError, DataError
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.learning.training_settings import TrainingConfig
from urank.log import prepare
from urank.log.dataset import Dataset
from urank.log.folds import VALID_SHARE, fold_of, folds
from urank.log.splits import SPLITS

SESSIONS = 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A prepared log of several row groups in each of its parts."""
    folder = tmp_path_factory.mktemp("folds")
    log = simulate(SimulationConfig(queries=300, sessions=SESSIONS, features=3, candidates=5, positions=5, seed=1)).log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ROW_GROUP_BYTES", 5_000)
        urank.prepare(urank.read(log), folder / "prepared", valid=0.3, test=0.3)
    dataset = Dataset(folder / "prepared")
    assert all(len(dataset.groups(split)) > 3 for split in SPLITS)
    return dataset


def sessions(dataset: Dataset, split: str) -> pl.DataFrame:
    """The query and the session of every list of a split, and how many items it has."""
    frames = [
        pl.DataFrame(block.lists).with_columns(items=pl.Series(np.diff(block.offsets)))
        for block in dataset.blocks(split, ["position"])
    ]
    return pl.concat(frames)


def queries(dataset: Dataset, split: str) -> set[str]:
    return set(sessions(dataset, split)["query_id"])


@pytest.mark.parametrize("splits", [["test"], ["train", "valid", "test"]])
@pytest.mark.parametrize("count", [2, 3])
def test_every_query_is_held_out_once(dataset: Dataset, splits: list[str], count: int) -> None:
    everything = pl.concat([sessions(dataset, split) for split in splits])
    found = folds(dataset, splits, count=count)
    assert len(found) == count
    held_out = [queries(fold, "test") for fold in found]
    assert set.union(*held_out) == set(everything["query_id"])
    assert all(a.isdisjoint(b) for a, b in combinations(held_out, 2))
    for fold in found:
        parts = {name: sessions(fold, name) for name in SPLITS}
        named = [set(part["query_id"]) for part in parts.values()]
        assert all(a.isdisjoint(b) for a, b in combinations(named, 2))  # no query in two parts
        together = pl.concat(parts.values()).sort("query_id", "session_id")
        assert together.equals(everything.sort("query_id", "session_id"))  # all of its sessions, once, whole
        assert together.group_by("query_id").len()["len"].unique().to_list() == [SESSIONS]
        for name, part in parts.items():
            assert fold.rows(name) == part["items"].sum()
            assert sum(group.lists for group in fold.groups(name)) == part.height
        assert len(named[1]) / (len(named[0]) + len(named[1])) == pytest.approx(VALID_SHARE, abs=0.15)


def test_the_columns_of_a_list_stay_together(dataset: Dataset) -> None:
    columns = ["position", "click", "item_id", "f1"]

    def lists(dataset: Dataset, split: str) -> dict[tuple[str, str], list[list[object]]]:
        found = {}
        for block in dataset.blocks(split, columns):
            names = zip(block.lists["query_id"].to_pylist(), block.lists["session_id"].to_pylist(), strict=True)
            for number, name in enumerate(names):
                rows = slice(int(block.offsets[number]), int(block.offsets[number + 1]))
                found[name] = [block.items[column].to_pylist()[rows] for column in columns]
        return found

    whole = lists(dataset, "test")
    for fold in folds(dataset, ["test"]):
        for name in SPLITS:
            assert all(whole[key] == found for key, found in lists(fold, name).items())


def test_a_fold_is_where_fold_of_says(dataset: Dataset) -> None:
    for seed in (0, 5):
        for number, fold in enumerate(folds(dataset, ["test"], count=3, seed=seed)):
            for block in fold.blocks("test", ["position"]):
                assert set(fold_of(block, 3, seed)) == {number}
            for block in fold.blocks("train", ["position"]):
                assert number not in fold_of(block, 3, seed)


def test_seeds_cut_anew_and_repeat(dataset: Dataset) -> None:
    cuts = [queries(folds(dataset, ["test"], seed=seed)[0], "test") for seed in (0, 0, 1, 2)]
    assert cuts[0] == cuts[1]
    everything = queries(dataset, "test")
    for a, b in combinations(cuts[1:], 2):  # two cuts are independent: half of a half is in both
        assert len(a & b) / len(everything) == pytest.approx(0.25, abs=0.15)


def test_the_cut_does_not_follow_the_split(dataset: Dataset) -> None:
    """Train, valid and test are a hash of the query too; a fold has its share of each."""
    fold = folds(dataset, SPLITS)[0]
    for split in SPLITS:
        own = queries(dataset, split)
        assert len(own & queries(fold, "test")) / len(own) == pytest.approx(0.5, abs=4 * 0.5 / len(own) ** 0.5)


def test_folds_of_a_fold(dataset: Dataset) -> None:
    outer = folds(dataset, ["test"])[0]
    inner = folds(outer, ["test"], seed=1)
    held_out = [queries(fold, "test") for fold in inner]
    assert held_out[0] | held_out[1] == queries(outer, "test")
    assert held_out[0].isdisjoint(held_out[1])
    assert all(held_out)


def test_a_fold_trains_a_click_model_and_the_split_it_is_from_stays(dataset: Dataset) -> None:
    fold = folds(dataset, ["test"])[0]
    fit = fit_clicks(fold, ClickConfig(families=("pbm",), training=TrainingConfig(epochs=2)))
    log_p, position, click = predictions({"": fit.model}, fold, "test")[""]
    assert len(log_p) == len(position) == len(click) == fold.rows("test")
    assert np.isfinite(log_p).all()
    assert (fold.positions, fold.features, fold.has("propensity")) == (dataset.positions, dataset.features, True)
    assert dataset.rows("test") == sum(fold.rows(name) for name in SPLITS)


def test_too_few_queries_are_refused(tmp_path: Path) -> None:
    log = simulate(SimulationConfig(queries=2, features=1, loggers=1)).log
    urank.prepare(urank.read(log), tmp_path / "prepared", valid=0, test=1)
    dataset = Dataset(tmp_path / "prepared")
    with pytest.raises(DataError, match=r"has too few queries in test for 2 folds: the \w+ part of fold \d is empty"):
        folds(dataset, ["test"])
    with pytest.raises(DataError, match=r"has too few queries in train, valid for 2 folds: the train part of fold 1"):
        folds(dataset, ["train", "valid"])
    with pytest.raises(ConfigError, match="there must be at least 2 folds; got 1"):
        folds(dataset, ["test"], count=1)


def test_without_test_the_fold_is_for_validation(dataset: Dataset) -> None:
    everything = queries(dataset, "train") | queries(dataset, "valid")
    held_out = []
    for fold in folds(dataset, ["train", "valid"], count=5, test=False):
        assert queries(fold, "train") == everything - queries(fold, "valid")
        held_out.append(queries(fold, "valid"))
    assert set.union(*held_out) == everything
    assert all(a.isdisjoint(b) for a, b in combinations(held_out, 2))
