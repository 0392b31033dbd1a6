"""Candidates in any order, ranked by workers, are ranked as by one process."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import urank
from simulated import Small
from urank.errors import ConfigError, DataError
from urank.ray.cluster import Cluster
from urank.ray.jobs import rank_on_ray


def test_lists_are_ranked_as_by_one_process(small: Small, saved: Path, cluster: Cluster, tmp_path: Path) -> None:
    candidates = small.simulation.candidates
    for number, part in enumerate(candidates.sample(fraction=1, shuffle=True, seed=2).iter_slices(700)):
        part.write_parquet(tmp_path / f"candidates-{number}.parquet")
    counts = rank_on_ray(
        str(saved), str(tmp_path / "candidates-*.parquet"), str(tmp_path / "ranked"), cluster, method="match", top=3
    )
    here = urank.load_model(saved).rank(candidates, method="match", top=3)
    assert counts == {"lists": here["query_id"].n_unique(), "candidates": candidates.height, "kept": here.height}
    there = pl.read_parquet(tmp_path / "ranked" / "*.parquet")
    keys = ["query_id", "position"]
    assert_frame_equal(there.sort(keys), here.sort(keys), check_exact=False, rel_tol=1e-5)
    assert json.loads((tmp_path / "ranked" / "ranked.json").read_text())["kept"] == here.height


def test_features_are_compared_within_whole_lists(small: Small, cluster: Cluster, tmp_path: Path) -> None:
    clicks = {"families": ["pbm"], "training": {"epochs": 1}, "within_list": "auto"}
    model = urank.URank(ranker="none", method="ctr1", clicks=clicks).fit(small.dataset.folder)
    model.save(tmp_path / "model", onnx=False)
    assert model.model_.clicks.featurizer.within
    candidates = small.simulation.candidates
    for number, part in enumerate(candidates.sample(fraction=1, shuffle=True, seed=2).iter_slices(700)):
        part.write_parquet(tmp_path / f"candidates-{number}.parquet")
    rank_on_ray(str(tmp_path / "model"), str(tmp_path / "candidates-*.parquet"), str(tmp_path / "ranked"), cluster)
    there, here = pl.read_parquet(tmp_path / "ranked" / "*.parquet"), model.rank(candidates)
    keys = ["query_id", "item_id"]
    assert_frame_equal(there.sort(keys), here.sort(keys), check_exact=False, rel_tol=1e-5)


def test_only_what_was_ranked_is_replaced(small: Small, saved: Path, cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "candidates"
    folder.mkdir()
    small.simulation.candidates.head(20).write_parquet(folder / "a.parquet")
    with pytest.raises(ConfigError, match="holds something else"):
        rank_on_ray(str(saved), str(folder), str(folder), cluster, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["a.parquet"]


def test_candidates_without_a_query_are_refused(saved: Path, cluster: Cluster, tmp_path: Path) -> None:
    pl.DataFrame({"search": [1], "f1": [0.5]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="candidates must have the column 'query_id'"):
        rank_on_ray(str(saved), str(tmp_path / "a.parquet"), str(tmp_path / "out"), cluster)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
