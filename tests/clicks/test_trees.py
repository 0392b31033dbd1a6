"""Trees learn clicks, never rise with the position, and survive their text format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

import urank
from urank.clicks.click_settings import GbdtConfig
from urank.clicks.trees import GbdtClicks, fit_gbdt
from urank.errors import DataError
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.learning.features import Featurizer, Inputs
from urank.log.dataset import Dataset
from urank.memory import Memory

CONFIG = GbdtConfig(trees=40, threads=1)
CITIES = 70  # more than a machine word has bits


def with_categories(log: pl.DataFrame) -> pl.DataFrame:
    """A log with two categorical features that clicks depend on, and missing values in f1; f2 is never missing."""
    rng = np.random.default_rng(0)
    city, shelf = rng.integers(0, CITIES, len(log)), rng.integers(0, 3, len(log))
    position = log["position"].to_numpy()
    rate = 0.02 + 0.5 * (city % 3 == 0) / position + 0.2 * (shelf == 1) + 0.2 * log["click"].to_numpy()
    return log.with_columns(
        pl.Series("click", (rng.random(len(log)) < rate).astype(np.int8)),
        pl.Series("city", city).cast(pl.String),
        pl.Series("shelf", np.array(["low", "middle", "high"])[shelf]),
        pl.when(pl.Series(rng.random(len(log)) < 0.2)).then(None).otherwise(pl.col("f1")).alias("f1"),
    )


def prepared(log: pl.DataFrame, folder: Path, **shares: float) -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urank.log.prepare.ROW_GROUP_BYTES", 2**18)  # several row groups
        urank.prepare(urank.read(log), folder, **shares)
    return Dataset(folder)


def fitted_featurizer(dataset: Dataset) -> Featurizer:
    return Featurizer.fit(dataset.blocks("train", dataset.features), dataset.numeric, dataset.categorical)


@pytest.fixture(scope="module")
def plain_log() -> pl.DataFrame:
    return simulate(SimulationConfig(queries=300, features=8, positions=6, seed=1)).log


@pytest.fixture(scope="module")
def dataset(plain_log: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(with_categories(plain_log), tmp_path_factory.mktemp("gbdt") / "log")


@pytest.fixture(scope="module")
def featurizer(dataset: Dataset) -> Featurizer:
    return fitted_featurizer(dataset)


@pytest.fixture(scope="module")
def model(dataset: Dataset, featurizer: Featurizer) -> GbdtClicks:
    return fit_gbdt(dataset, featurizer, seed=7, config=CONFIG)


def splits(model: GbdtClicks) -> list[dict[str, Any]]:
    """All nodes of all trees that split."""
    found, left = [], [tree["tree_structure"] for tree in model.booster.dump_model()["tree_info"]]
    while left:
        node = left.pop()
        if "split_feature" in node:
            found.append(node)
            left += [node["left_child"], node["right_child"]]
    return found


def hard_inputs(model: GbdtClicks, rows: int, seed: int = 0) -> Inputs:
    """Rows made of thresholds, their neighbours, 0, the least numbers, infinities and NaN; unseen categories."""
    rng = np.random.default_rng(seed)
    numeric = np.empty((rows, model.n_numeric), dtype=np.float32)
    special = [0, -0.0, 1e-36, -1e-36, np.inf, -np.inf, np.nan, 3e38, -3e38]
    for column in range(model.n_numeric):
        cuts = [node["threshold"] for node in splits(model) if node["split_feature"] == column] or [0.0]
        near = np.array(cuts, dtype=np.float32)
        pool = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        drawn = rng.choice(np.concatenate([*pool, np.array(special, dtype=np.float32)]), rows)
        numeric[:, column] = np.where(rng.random(rows) < 0.7, drawn, rng.normal(0, 100, rows))
    return Inputs(numeric, rng.integers(0, CITIES + 10, (rows, model.n_categorical)))


def at_logged(model: GbdtClicks, featurizer: Featurizer, dataset: Dataset) -> tuple[NDArray[Any], NDArray[Any]]:
    """P(click) of the valid rows where they were shown, and their clicks."""
    blocks = list(dataset.blocks("valid", [*dataset.features, "position", "click"]))
    tables = [model.log_ctr(featurizer.encode(block.items)) for block in blocks]
    position = np.concatenate([block.column("position") for block in blocks])
    p = np.exp(np.take_along_axis(np.concatenate(tables), position[:, None] - 1, axis=1)[:, 0])
    return p, np.concatenate([block.column("click") for block in blocks])


def log_loss(p: NDArray[Any], click: NDArray[Any]) -> float:
    return float(-np.mean(click * np.log(p) + (1 - click) * np.log1p(-p)))


def test_learns_clicks(model: GbdtClicks, featurizer: Featurizer, dataset: Dataset) -> None:
    assert len(dataset.groups("train")) > 1
    p, click = at_logged(model, featurizer, dataset)
    assert log_loss(p, click) < 0.95 * log_loss(np.full(len(click), click.mean()), click)
    kinds = {(node["decision_type"], node["missing_type"]) for node in splits(model)}
    assert kinds == {("==", "None"), ("<=", "None"), ("<=", "NaN")}


def test_a_log_read_in_parts_gives_the_same_trees(
    model: GbdtClicks, featurizer: Featurizer, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urank.learning.lightgbm_data.IN_MEMORY_BYTES", 0)
    assert fit_gbdt(dataset, featurizer, seed=7, config=CONFIG).text == model.text


def test_what_memory_does_not_hold_is_sampled(dataset: Dataset, featurizer: Featurizer) -> None:
    row_bytes = CONFIG.row_bytes(len(dataset.features))
    rows = dataset.rows("train") + dataset.rows("valid")
    half = Dataset(dataset.folder, memory=Memory(row_bytes * rows))
    counted: list[float] = []

    def report(step: str, done: float, total: float | None, note: str = "", /) -> None:
        if step == "reading train":
            counted.append(done)

    fit_gbdt(half, featurizer, seed=7, config=CONFIG, report=report)
    assert max(counted) == pytest.approx(dataset.rows("train") / 2, rel=0.1)


def test_items_that_nobody_saw_teach_nothing(plain_log: pl.DataFrame, tmp_path: Path) -> None:
    shown = plain_log.filter(pl.col("position") <= 3)
    unseen = plain_log.with_columns(click=pl.when(pl.col("position") <= 3).then("click").otherwise(0))
    logs = [prepared(shown, tmp_path / "shown")]
    urank.prepare(urank.read(unseen), tmp_path / "unseen", positions=3)
    logs.append(Dataset(tmp_path / "unseen"))
    featurizer = fitted_featurizer(logs[0])
    texts = [fit_gbdt(each, featurizer, seed=0, config=CONFIG).text for each in logs]
    assert texts[0] == texts[1]


def test_learns_without_categories_and_without_valid(plain_log: pl.DataFrame, tmp_path: Path) -> None:
    dataset = prepared(plain_log, tmp_path / "log", valid=0.0, test=0.0)
    featurizer = fitted_featurizer(dataset)
    model = fit_gbdt(dataset, featurizer, seed=0, config=CONFIG)
    assert model.booster.num_trees() == CONFIG.trees


def test_stops_early(dataset: Dataset, featurizer: Featurizer) -> None:
    config = GbdtConfig(trees=400, learning_rate=0.5, early_stopping=5, threads=1)
    steps: list[tuple[str, float, float | None]] = []
    model = fit_gbdt(dataset, featurizer, seed=0, config=config, report=lambda *step: steps.append(step))
    assert model.booster.num_trees() < 400
    assert steps[-1] == ("growing trees", model.booster.num_trees() + 5, 400)
    assert ("reading train", dataset.rows("train"), dataset.rows("train")) in steps
    assert ("reading valid", dataset.rows("valid"), dataset.rows("valid")) in steps


def test_same_seed_same_text(model: GbdtClicks, dataset: Dataset, featurizer: Featurizer) -> None:
    assert fit_gbdt(dataset, featurizer, seed=7, config=CONFIG) == model
    assert fit_gbdt(dataset, featurizer, seed=8, config=CONFIG).text != model.text


def test_nothing_is_printed(dataset: Dataset, featurizer: Featurizer, capfd: pytest.CaptureFixture[str]) -> None:
    fit_gbdt(dataset, featurizer, seed=0, config=GbdtConfig(trees=2, threads=1))
    assert capfd.readouterr() == ("", "")


def test_text_round_trip(model: GbdtClicks, featurizer: Featurizer) -> None:
    again = GbdtClicks.from_text(model.text, model.positions, featurizer)
    inputs = hard_inputs(model, 500)
    assert again == model
    assert np.array_equal(again.log_ctr(inputs), model.log_ctr(inputs))


@pytest.mark.parametrize("text", ["", "nonsense", "tree\nversion=v4\n"])
def test_refuses_text_that_is_no_model(text: str, featurizer: Featurizer) -> None:
    with pytest.raises(DataError, match="LightGBM model"):
        GbdtClicks.from_text(text, 6, featurizer)


def test_refuses_a_model_of_other_features(model: GbdtClicks, featurizer: Featurizer) -> None:
    with pytest.raises(DataError, match=r"8 numeric features, 0 categorical features .* takes 11 columns"):
        GbdtClicks.from_text(model.text, 6, Featurizer(featurizer.numeric, ()))


def test_refuses_an_empty_train_split(plain_log: pl.DataFrame, tmp_path: Path) -> None:
    dataset = prepared(plain_log.head(30), tmp_path / "log", valid=1.0, test=0.0)
    with pytest.raises(DataError, match=r"train split .* must have impressions"):
        fit_gbdt(dataset, Featurizer((), ()), seed=0, config=CONFIG)


@pytest.mark.parametrize("seed", range(3))
def test_never_rises_with_the_position(seed: int, dataset: Dataset, featurizer: Featurizer) -> None:
    config = CONFIG.model_copy(update={"min_data_in_leaf": 5, "learning_rate": 0.5})  # as wild as can be
    model = fit_gbdt(dataset, featurizer, seed=seed, config=config)
    table = model.log_ctr(hard_inputs(model, 2000))
    assert np.all(np.diff(table, axis=1) <= 0)
    assert np.any(np.diff(table, axis=1) < 0)


def test_table_is_the_log_of_lightgbms_own_probability(
    model: GbdtClicks, featurizer: Featurizer, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = featurizer.encode(dataset.read(dataset.groups("train")[0], dataset.features).items)[:100]
    columns = np.concatenate([inputs.numeric, inputs.categorical], axis=1)
    expected = [
        np.log(model.booster.predict(np.insert(columns, columns.shape[1], k, axis=1)))
        for k in range(1, model.positions + 1)
    ]
    np.testing.assert_allclose(model.log_ctr(inputs), np.stack(expected, axis=1), rtol=1e-6)
    monkeypatch.setattr("urank.clicks.trees.CHUNK_BYTES", 1)  # a row at a time
    np.testing.assert_allclose(model.log_ctr(inputs), np.stack(expected, axis=1), rtol=1e-6)
    assert model.log_ctr(inputs[:0]).shape == (0, model.positions)
