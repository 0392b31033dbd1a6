"""Every family, fitted on a small simulated log: the contract, the choice, the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import urank
from contracts import CHECKS, check_saved_loaded_and_exported
from urank.clicks.click_model import log_mean_exp
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import Fit, fit_clicks, predictions
from urank.clicks.item_curves import click_curves_of, decay
from urank.errors import ConfigError, DataError
from urank.evaluation.click_quality import quality
from urank.lab.truth import oracle_predictions, read_truth, review_fit
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.pipeline import click_model_quality

FAMILIES = ("shrunk", "monotone", "factorised", "vector", "position", "deepfm", "pbm", "pal", "gbdt")
QUICK = TrainingConfig(epochs=3, batch_lists=16)


def config(*families: str, **settings: object) -> ClickConfig:
    return ClickConfig.model_validate({"families": families, "training": QUICK, **settings})


@pytest.fixture(scope="module")
def fits(small) -> dict[str, Fit]:  # type: ignore[no-untyped-def]
    return {family: fit_clicks(small.dataset, config(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def rows(small) -> pl.DataFrame:  # type: ignore[no-untyped-def]
    return urank.read(small.dataset.folder).frame().head(300)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(fits: dict[str, Fit], rows: pl.DataFrame, family: str, check) -> None:  # type: ignore[no-untyped-def]
    check(fits[family].model, rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_artifact_and_onnx(fits: dict[str, Fit], rows: pl.DataFrame, family: str, tmp_path: Path) -> None:
    check_saved_loaded_and_exported(fits[family].model, rows, config(family), tmp_path)


def test_ensembles_are_one_artifact(small, rows: pl.DataFrame, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    settings = config("monotone", "gbdt", mix=True, ensemble=2, calibration="isotonic")
    fit = fit_clicks(small.dataset, settings)
    assert fit.model.name == "monotone ×2 + gbdt ×2"
    check_saved_loaded_and_exported(fit.model, rows, settings, tmp_path)
    inputs = fit.model.featurizer.encode(rows)
    tables = [np.exp(member.log_ctr(inputs)) for member in fit.model.members]
    mean = np.exp(log_mean_exp([member.log_ctr(inputs) for member in fit.model.members]))
    np.testing.assert_allclose(mean, np.mean(tables, axis=0), rtol=1e-5)


def test_seeded_twice_is_the_same(small, fits: dict[str, Fit], rows: pl.DataFrame) -> None:  # type: ignore[no-untyped-def]
    for family in ("monotone", "gbdt"):
        again = fit_clicks(small.dataset, config(family)).model
        np.testing.assert_array_equal(again.log_ctr(rows), fits[family].model.log_ctr(rows))
        other = fit_clicks(small.dataset, config(family, seed=1)).model
        assert not np.array_equal(other.log_ctr(rows), fits[family].model.log_ctr(rows))


@pytest.mark.parametrize(
    ("families", "kept"),
    [(("vector", "monotone"), "monotone"), (("monotone", "gbdt"), "monotone + gbdt")],  # one alone, the mean of both
)
def test_the_best_on_valid_is_kept(small, families: tuple[str, ...], kept: str) -> None:  # type: ignore[no-untyped-def]
    fit = fit_clicks(small.dataset, config(*families, calibration="none"))
    assert set(fit.valid_loss) == {"pbm-0", "mix", *(f"{family}-0" for family in families)}
    losses = {family: fit.valid_loss[f"{family}-0"] for family in families}
    losses[" + ".join(families)] = fit.valid_loss["mix"]
    assert fit.model.name == min(losses, key=lambda name: losses[name]) == kept
    log_p, _, click = predictions({"": fit.model}, small.dataset, "valid")[""]
    p = np.exp(log_p.astype(np.float64))
    assert losses[kept] == pytest.approx(-np.where(click == 1, np.log(p), np.log1p(-p)).mean(), rel=1e-5)


def test_one_family_and_no_reference(small) -> None:  # type: ignore[no-untyped-def]
    fit = fit_clicks(small.dataset, config("vector"), reference=False)
    assert (fit.model.name, fit.reference, set(fit.valid_loss)) == ("vector", None, {"vector-0"})


def test_predictions_and_report_against_the_truth(small, fits: dict[str, Fit]) -> None:  # type: ignore[no-untyped-def]
    fit = fits["monotone"]
    truth = read_truth(small.folder)
    log_p, position, click = oracle_predictions(truth, small.dataset, "test")
    ours, same_position, same_click = predictions({"": fit.model}, small.dataset, "test")[""]
    np.testing.assert_array_equal(np.bincount(position, click), np.bincount(same_position, same_click))
    p = np.exp(log_p.astype(np.float64))
    assert abs(click.sum() - p.sum()) < 4 * np.sqrt((p * (1 - p)).sum())
    oracle = quality(log_p, position, click, positions=small.dataset.positions)
    model = quality(ours, same_position, same_click, positions=small.dataset.positions)
    measured = click_model_quality(fit, small.dataset, config("monotone"))
    report = review_fit(small.folder)(measured, fit.model, small.dataset)
    assert report.qualities["test"]["oracle"].log_loss == pytest.approx(oracle.log_loss)
    assert report.qualities["test"]["monotone"].log_loss == pytest.approx(model.log_loss)
    assert report.truth is not None
    assert report.truth["oracle_share"] == pytest.approx(oracle.log_loss / model.log_loss)
    constant = report.qualities["test"]["constant"]
    assert oracle.log_loss < model.log_loss < constant.log_loss


def test_a_log_without_validation_is_refused(small, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    urank.prepare(urank.read(small.simulation.log.head(500)), tmp_path / "prepared", valid=0)
    with pytest.raises(DataError, match=r"has no valid queries; prepare it with other shares"):
        fit_clicks(Dataset(tmp_path / "prepared"), config("pbm"))


def test_curves_are_means_of_the_table(small, fits: dict[str, Fit]) -> None:  # type: ignore[no-untyped-def]
    model, log = fits["monotone"].model, urank.read(small.dataset.folder)
    frame = log.frame()
    curves = {curve.name: curve for curve in click_curves_of(model, log, by="shape")}
    assert set(curves) == {"round", "square"}
    own = frame.filter(pl.col("shape") == "round")
    inputs = model.featurizer.encode(frame)[(frame["shape"] == "round").to_numpy()]
    expected = np.exp(model.log_ctr(inputs).astype(np.float64)).mean(axis=0)
    np.testing.assert_allclose(curves["round"].rate, expected, rtol=1e-6)
    assert curves["round"].rows == own.height
    (one,) = click_curves_of(model, log, names=[frame["item_id"][0]])
    assert one.name == frame["item_id"][0]
    assert one.decay > 0
    with pytest.raises(ConfigError, match=r"no row of .* has the item_id 'nobody'"):
        click_curves_of(model, log, names=["nobody"])
    with pytest.raises(ConfigError, match=r"by must be one of item_id, query_id, policy, shape; got 'f1'"):
        click_curves_of(model, log, by="f1")


def test_decay_of_power_laws() -> None:
    k = np.arange(1, 11)
    curves = np.log(0.3 * k[None, :] ** -np.array([[0.0], [0.5], [2.0]]))
    np.testing.assert_allclose(decay(curves), [0.0, 0.5, 2.0], atol=1e-12)
    assert decay(np.zeros((3, 1))).tolist() == [0.0, 0.0, 0.0]
