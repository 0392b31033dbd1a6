"""The folder of a store: complete or not there at all; and what its random traffic tells of attention."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import urank
from urank.clicks.fitting import ClickConfig
from urank.errors import ConfigError
from urank.lab import appstore
from urank.lab.appstore import (
    ServedVisits,
    by_chance,
    by_popularity,
    draw_requests,
    expected_downloads,
    production_ranker,
    random_traffic,
    ranked_by,
    serve,
    write_appstore,
)
from urank.lab.market import CATEGORIES, Market, MarketConfig, build_market
from urank.learning.training import TrainingConfig
from urank.log.dataset import Dataset
from urank.propensity.randomised import fit_by_category
from urank.ranking.ranking_model import RankingModel

FILES = ["appstore.toml", "log.parquet", "random.parquet", "truth/candidates.parquet"]
CONFIG = MarketConfig(
    users=200, apps=40, candidates=12, positions=6, random_days=5, random_visits=50, days=3, warmup_days=1, visits=1
)
QUICK = ClickConfig(families=("deepfm",), hidden=(8,), training=TrainingConfig(epochs=2, batch_lists=64))


def write(folder: Path, config: MarketConfig = CONFIG, **options: Any) -> dict[str, bytes]:
    write_appstore(config, folder, clicks=QUICK, **options)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("appstore") / "store"
    write(folder)
    return folder


@pytest.fixture(scope="module")
def log(store: Path) -> pl.DataFrame:
    return pl.read_parquet(store / "log.parquet")


@pytest.fixture(scope="module")
def market() -> Market:
    return build_market(CONFIG)


@pytest.fixture(scope="module")
def ranker(market: Market) -> RankingModel:
    torch.set_num_threads(1)
    return production_ranker(market, QUICK)


# What is written


def test_all_files_are_there_with_the_days_that_were_asked_for(store: Path, log: pl.DataFrame) -> None:
    assert sorted(contents(store)) == FILES
    assert sorted(set(log["timestamp"].dt.date())) == [date(2020, 5, day) for day in (6, 7, 8)]
    assert set(log["policy"]) == {"production"}
    file = pq.ParquetFile(store / "log.parquet")
    assert file.metadata.num_row_groups == 3
    for group in range(3):
        assert len(set(pl.from_arrow(file.read_row_group(group))["timestamp"].dt.date())) == 1  # type: ignore[arg-type, index]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_the_random_traffic_lies_before_all_that_was_ranked(store: Path, log: pl.DataFrame) -> None:
    random = pl.read_parquet(store / "random.parquet")
    assert random.columns == log.columns
    assert set(random["policy"]) == {"random"}
    days = random.group_by(pl.col("timestamp").dt.date()).agg(pl.col("query_id").n_unique()).sort("timestamp")
    assert days["query_id"].to_list() == [50] * 5
    assert days["timestamp"].max() == date(2020, 5, 4)  # the fifth is that of the warm-up
    assert not set(random["query_id"]) & set(log["query_id"])


def test_positions_are_one_to_the_last_of_every_visit(log: pl.DataFrame) -> None:
    visits = log.group_by("query_id", maintain_order=True).agg("position", pl.col("item_id").n_unique())
    assert all(positions == [1, 2, 3, 4, 5, 6] for positions in visits["position"].to_list())
    assert set(visits["item_id"]) == {6}


def test_the_truth_is_that_of_the_last_day(store: Path, log: pl.DataFrame, market: Market) -> None:
    truth = pl.read_parquet(store / "truth" / "candidates.parquet")
    last = log.filter(pl.col("timestamp").dt.date() == date(2020, 5, 8))
    hidden = ["position", "click", "timestamp", "policy"]
    assert truth.drop("table").equals(last.drop(hidden))
    user = truth["user_id"].str.slice(5).cast(pl.Int64).to_numpy()
    app = truth["item_id"].str.slice(4).cast(pl.Int64).to_numpy()
    assert_allclose(np.array(truth["table"].to_list()), market.table(user, app, 3), rtol=1e-6)


def test_the_counts_are_those_of_the_log(tmp_path: Path, log: pl.DataFrame) -> None:
    told: list[tuple[Any, ...]] = []
    counts = write_appstore(CONFIG, tmp_path / "store", clicks=QUICK, report=lambda *step: told.append(step))
    assert counts == {
        "impressions": log.height,
        "visits": log["query_id"].n_unique(),
        "downloads": log["click"].cast(pl.Int64).sum(),
    }
    assert [step for step in told if step[0] == "random traffic"] == [("random traffic", n, 5) for n in range(1, 6)]
    assert [step for step in told if step[0] == "production traffic"] == [
        ("production traffic", n, 3) for n in range(1, 4)
    ]


def test_the_config_makes_the_same_bytes_again_and_another_seed_others(store: Path, tmp_path: Path) -> None:
    config = MarketConfig(**tomllib.loads((store / "appstore.toml").read_text()))
    assert config == CONFIG
    first = contents(store)
    assert write(tmp_path / "again", config) == first
    other = write(tmp_path / "other", config.model_copy(update={"seed": 1}))
    assert all(other[name] != first[name] for name in FILES)


def test_a_taken_folder_is_refused_unless_overwritten(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    before = write(folder)  # an empty one is used
    with pytest.raises(ConfigError, match="store exists already"):
        write(folder)
    other = CONFIG.model_copy(update={"seed": 1})
    assert write(folder, other, overwrite=True) != before
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_nothing_but_a_store_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else"):
        write(tmp_path / "notes", overwrite=True)
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_no_leftovers_after_a_failure(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, overwrite: bool
) -> None:
    folder = tmp_path / "new" / "store"
    if overwrite:
        folder.mkdir(parents=True)
        for name, content in contents(store).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    before = contents(folder)

    def fail_on_the_second_day(market: Market) -> Iterable[ServedVisits]:
        yield serve(draw_requests(market, -1, kind="random", visits=3), by_chance, policy="random")
        raise error

    monkeypatch.setattr(appstore, "random_traffic", fail_on_the_second_day)
    with pytest.raises(ConfigError if isinstance(error, OSError) else type(error)) as failed:
        write(folder, overwrite=overwrite)
    if isinstance(error, OSError):
        assert str(failed.value) == f"{folder} cannot be written: No space left on device"
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == ([tmp_path / "new"] if overwrite else [])


# The production ranker


def test_what_a_ranker_learns_from(ranker: RankingModel) -> None:
    features = ranker.clicks.featurizer
    measured = {f"{name}_{d}" for name in ("taste", "genre") for d in range(1, 5)}
    assert {each.name for each in (*features.numeric, *features.categorical)} == {
        *("device", "region", "category", "app", "downloads", "thumbnail"),
        *measured,
    }
    assert (ranker.method, ranker.scorer) == ("ctr1", None)


def test_bids_do_not_change_the_order(market: Market, ranker: RankingModel) -> None:
    requests, rng = draw_requests(market, 1), np.random.default_rng(0)
    frame = requests.frame()
    dear = frame.with_columns(value=pl.col("value") * pl.Series(rng.uniform(0.01, 100, frame.height)))
    rank = ranked_by(ranker)
    assert_array_equal(rank(requests, frame, rng), rank(requests, dear, rng))


def test_it_earns_more_than_popularity_and_that_more_than_chance() -> None:
    torch.set_num_threads(1)
    market = build_market(CONFIG.model_copy(update={"users": 600}))
    training = TrainingConfig(epochs=15, batch_lists=64)
    learned = ranked_by(production_ranker(market, QUICK.model_copy(update={"hidden": (32,), "training": training})))
    requests = draw_requests(market, 1)
    earned = [expected_downloads(requests, each) for each in (learned, by_popularity(), by_chance)]
    assert earned[0] > 1.1 * earned[1] > 1.1 * 1.1 * earned[2]


# What the random traffic tells


def test_propensities_by_category_are_the_mean_curves_of_the_categories(tmp_path: Path) -> None:
    settings = {"users": 4000, "apps": 150, "positions": 6, "random_days": 6, "random_visits": 2500, "appeal": -1.0}
    market = build_market(MarketConfig(**settings))
    days = list(random_traffic(market))
    log, table = pl.concat([each.log for each in days]), np.concatenate([each.table for each in days])
    told = log.select("query_id", "item_id", "position", "click", "category")
    urank.prepare(urank.read(told), tmp_path / "prepared", valid=0, test=0)
    found = fit_by_category(Dataset(tmp_path / "prepared"), column="category")
    assert set(found.curves) == set(CATEGORIES)
    for category, curve in found.curves.items():
        of_it = table[(log["category"] == category).to_numpy()]
        errors = np.array(curve.errors)
        # Clicks weigh apps by their appeal, so they tell the mean curve of what appeals.
        assert (np.abs(curve.values - of_it.sum(axis=0) / of_it[:, 0].sum()) <= 4 * errors + 1e-9).all()
    exponent = {name: market.weights[number] for number, name in enumerate(CATEGORIES)}
    flattest, steepest = min(exponent, key=exponent.__getitem__), max(exponent, key=exponent.__getitem__)
    assert all(a > b for a, b in zip(found.curves[flattest].values[1:], found.curves[steepest].values[1:], strict=True))
