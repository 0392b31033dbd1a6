"""The scorer: it finds orders that earn more, from any target and in any form, and its artifact says the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray

import urank
from contracts import SCORER_CHECKS, check_scorer_exported, check_scorer_saved_and_loaded
from simulated import Small, make, true_utility
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.errors import ConfigError, DataError
from urank.export.graph import scorer_graph
from urank.learning.batches import ListArrays
from urank.learning.features import Inputs
from urank.learning.training import History
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Block, Dataset
from urank.log.ragged import pad, positions_by_score, where_items
from urank.log.signed_log import signed_log
from urank.ranking import urank_network as module
from urank.ranking import urank_network as urank_module
from urank.ranking.losses import swap_loss, swaps
from urank.ranking.matching import match
from urank.ranking.objectives import by_length
from urank.ranking.policies import LoggedOrder, Random
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import RankerConfig, UrankConfig
from urank.ranking.urank_network import NetworkScorer, fit_urank, mean_swap_loss, value_feature
from urank.ranking.utility import item_gains

QUICK = TrainingConfig(epochs=3, batch_lists=16)


def config(**settings: Any) -> RankerConfig:
    return RankerConfig.model_validate({"training": QUICK, **settings})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Users whose attention differs between items as much as the relevance: then the best item is often not the first.

    All that decides a click is in the features, so a scorer can know it.
    """
    folder = tmp_path_factory.mktemp("world")
    settings = {"candidates": 5, "positions": 5, "features": 8, "eta": 4.0, "epsilon": 0.5, "noise": 0.0}
    return make(folder, queries=400, sessions=4, seed=5, **settings)


@pytest.fixture(scope="module")
def clicks(world: Small) -> ClickModel:
    settings = {"families": ["monotone"], "within_list": "off", "training": {"epochs": 4, "batch_lists": 64}}
    return fit_clicks(world.dataset, ClickConfig.model_validate(settings)).model


def by_scorer(world: Small, scorer: NetworkScorer) -> Callable[[Block], NDArray[np.int64]]:
    """The order of a scorer, as a policy gives it."""

    def positions(block: Block) -> NDArray[np.int64]:
        inputs = world.featurizer.encode(block.items)
        scores = scorer.score(inputs, np.ones(len(inputs), dtype=np.float32))
        where = where_items(block.offsets)
        return positions_by_score(pad(scores, block.offsets), where=where)[where]

    return positions


def by_truth(world: Small, rule: Callable[..., NDArray[np.int64]]) -> Callable[[Block], NDArray[np.int64]]:
    """The order that a rule makes of the true tables, padded."""

    def positions(block: Block) -> NDArray[np.int64]:
        where = where_items(block.offsets)
        table = pad(world.table(world.featurizer.encode(block.items)), block.offsets)
        return rule(table.astype(np.float64), where=where)[where]

    return positions


def by_first_column(table: NDArray[np.float64], *, where: NDArray[np.bool_]) -> NDArray[np.int64]:
    return positions_by_score(table[:, :, 0], where=where)


# What it learns


def test_on_the_true_table_it_beats_whoever_knows_the_first_column(world: Small, clicks: ClickModel) -> None:
    scorer, history = fit_urank(world.dataset, clicks, RankerConfig(), table=world.table)
    found = true_utility(world, by_scorer(world, scorer))
    for other in (LoggedOrder().positions, Random().positions, by_truth(world, by_first_column)):
        assert found > 1.02 * true_utility(world, other)
    assert found < true_utility(world, by_truth(world, match))
    assert -history.best == pytest.approx(true_utility(world, by_scorer(world, scorer), "valid"), rel=1e-6)


@pytest.mark.parametrize("form", ["stable", "paper"])
@pytest.mark.parametrize("target", ["model", "counterfactual", "blend"])
def test_every_target_and_form_beats_random(world: Small, clicks: ClickModel, target: str, form: str) -> None:
    scorer, history = fit_urank(world.dataset, clicks, config(target=target, form=form))
    assert true_utility(world, by_scorer(world, scorer)) > 1.02 * true_utility(world, Random().positions)
    assert len(history.rounds) == QUICK.epochs
    assert history.best == min(each["valid"] for each in history.rounds)


def test_deepfm(world: Small, clicks: ClickModel) -> None:
    scorer, _ = fit_urank(world.dataset, clicks, config(backbone="deepfm", hidden=(16, 8)))
    assert true_utility(world, by_scorer(world, scorer)) > 1.02 * true_utility(world, Random().positions)


def test_a_blend_of_nothing_and_of_everything(world: Small, clicks: ClickModel) -> None:
    """λ = 0 is the target of the model, λ = 1 that of the paper, to the bit."""
    model, counterfactual = (
        fit_urank(world.dataset, clicks, config(target=target))[0] for target in ("model", "counterfactual")
    )
    nothing, half, everything = (
        fit_urank(world.dataset, clicks, config(target="blend", blend=blend))[0] for blend in (0.0, 0.5, 1.0)
    )
    assert same(model, nothing)
    assert same(counterfactual, everything)
    assert not same(model, counterfactual)
    assert not same(half, model)
    assert not same(half, counterfactual)


def test_gains_by_hand() -> None:
    """Two lists, of two items and of one: u(i, k) = table · b · ((1 − λ) + λ c / max(table at the logged k, floor))."""
    table = np.array([[0.5, 0.4], [0.4, 0.2], [0.1, 0.02]], np.float32)
    batch = ListArrays.from_rows(
        Inputs(np.zeros((3, 1), np.float32), np.zeros((3, 0), np.int64)),
        position=np.array([1, 2, 2]),
        click=np.array([0.0, 1.0, 1.0], np.float32),
        value=np.array([3.0, 5.0, 7.0], np.float32),
        offsets=np.array([0, 2, 3]),
        table=table,
    ).batch(0, 2)
    for target, share in (("model", 0.0), ("counterfactual", 1.0), ("blend", 0.3)):
        ((_, lists),) = by_length(batch)
        gains = config(target=target, blend=0.3, floor=0.05).objective(lists)
        clicked = np.array([[0.0, 1 / 0.2], [1 / 0.05, 0.0]])  # 0.02 is below the floor
        worth = np.array([[3.0, 5.0], [7.0, 0.0]]) * ((1 - share) + share * clicked)
        padded = np.array([[[0.5, 0.4], [0.4, 0.2]], [[0.1, 0.02], [0.0, 0.0]]])
        np.testing.assert_allclose(gains, padded * worth[..., None], rtol=1e-6)


# Repeatable


def same(a: NetworkScorer, b: NetworkScorer) -> bool:
    pairs = zip(a.network.state_dict().values(), b.network.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_it_learns_from_the_model_in_a_third_of_the_passes_unless_told(world: Small, clicks: ClickModel) -> None:
    def passes(target: str, share: float | None) -> int:
        training = {"share": share, "batch_lists": 64, "patience": 99}
        return len(fit_urank(world.dataset, clicks, config(target=target, training=training))[1].rounds)

    found = [passes("model", None), passes("counterfactual", None), passes("model", 1.0), passes("model", 0.1)]
    assert found == [5, 15, 15, 2]


def test_same_seed_same_bits(world: Small, clicks: ClickModel) -> None:
    before = torch.random.get_rng_state()
    first, _ = fit_urank(world.dataset, clicks, config(dropout=0.2))
    again, _ = fit_urank(world.dataset, clicks, config(dropout=0.2))
    other, _ = fit_urank(world.dataset, clicks, config(dropout=0.2, seed=1))
    assert same(first, again)
    assert not same(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)  # nothing seeds globally


@pytest.mark.parametrize("stop", [1, 3])
def test_a_killed_run_goes_on_to_the_same_bits(world: Small, clicks: ClickModel, tmp_path: Path, stop: int) -> None:
    settings = config(dropout=0.2, training=TrainingConfig(epochs=4, batch_lists=64, patience=9))
    whole, _ = fit_urank(world.dataset, clicks, settings)
    path = tmp_path / "scorer.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        found = iter([urank_module.estimated_utility] * stop)  # fails after so many rounds
        patch.setattr(urank_module, "estimated_utility", lambda *arguments: next(found)(*arguments))
        with pytest.raises(StopIteration):
            fit_urank(world.dataset, clicks, settings, checkpoint=path)
    resumed, history = fit_urank(world.dataset, clicks, settings, checkpoint=path)
    assert same(whole, resumed)
    assert [each["round"] for each in history.rounds] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="is not a checkpoint of this training; remove it to start afresh"):
        fit_urank(world.dataset, clicks, config(hidden=(4,)), checkpoint=path)


def test_the_test_split_is_not_looked_at(world: Small, clicks: ClickModel, tmp_path: Path) -> None:
    expected, _ = fit_urank(world.dataset, clicks, config(target="blend"))
    shutil.copytree(world.dataset.folder, tmp_path / "prepared")
    for path in (tmp_path / "prepared" / "test").iterdir():
        path.write_bytes(b"secret")
    blind = Dataset(tmp_path / "prepared")
    with pytest.raises(DataError, match="is not a readable Parquet file"):
        blind.groups("test")
    found, _ = fit_urank(blind, clicks, config(target="blend"))
    assert same(expected, found)


# Warm start


def untrained(monkeypatch: pytest.MonkeyPatch, world: Small, clicks: ClickModel, **settings: Any) -> NetworkScorer:
    """The scorer as it is before the first step."""
    monkeypatch.setattr(urank_module, "train_by_lists", lambda *_, **__: History())
    return fit_urank(world.dataset, clicks, config(**settings))[0]


def test_warm_start_copies_the_backbone(world: Small, clicks: ClickModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (member,) = clicks.members
    assert isinstance(member, NetworkClicks)
    theirs = member.network.backbone.state_dict()
    before = {name: tensor.clone() for name, tensor in theirs.items()}
    fit_urank(world.dataset, clicks, config(warm_start=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in theirs.items())  # which stays as it was
    warm = untrained(monkeypatch, world, clicks, warm_start=True).network.backbone.state_dict()
    assert warm.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in warm.items())
    cold = untrained(monkeypatch, world, clicks).network.backbone.state_dict()
    assert not all(torch.equal(tensor, theirs[name]) for name, tensor in cold.items())


@pytest.mark.parametrize("settings", [{"hidden": (64, 64)}, {"hidden": (128,)}, {"backbone": "deepfm"}])
def test_warm_start_refuses_another_shape(world: Small, clicks: ClickModel, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs the same backbone and hidden layers"):
        fit_urank(world.dataset, clicks, config(warm_start=True, **settings))


def test_warm_start_refuses_trees(world: Small) -> None:
    settings = {"families": ["gbdt"], "trees": {"trees": 3, "threads": 1}}
    trees = fit_clicks(world.dataset, ClickConfig.model_validate(settings), reference=False).model
    with pytest.raises(ConfigError, match="warm_start needs a click model that is a network; got gbdt"):
        fit_urank(world.dataset, trees, config(warm_start=True))


# Values, and the contract


@pytest.fixture(scope="module")
def rows(small: Small) -> pl.DataFrame:
    return urank.read(small.dataset.folder).frame().head(300)


@pytest.fixture(scope="module")
def models(small: Small, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankingModel]:
    """Scorers on a log with values, missing numbers and text, and one on the same log without its values."""
    fit = fit_clicks(small.dataset, ClickConfig(families=("pbm",), training=QUICK)).model
    folder = tmp_path_factory.mktemp("plain")
    urank.prepare(urank.read(small.simulation.log.drop("value")), folder / "prepared", valid=0.2, test=0.2)
    plain = Dataset(folder / "prepared")
    return {
        "values": RankingModel(fit, fit_urank(small.dataset, fit, config())[0], "score"),
        "deepfm": RankingModel(fit, fit_urank(small.dataset, fit, SETTINGS["deepfm"])[0], "score"),
        "plain": RankingModel(fit, fit_urank(plain, fit, config())[0], "score"),
    }


SETTINGS = {"values": config(), "deepfm": config(backbone="deepfm", hidden=(16, 8)), "plain": config()}


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("check", SCORER_CHECKS)
def test_contract(models: dict[str, RankingModel], rows: pl.DataFrame, name: str, check: Callable[..., None]) -> None:
    check(models[name], rows)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_artifact_and_onnx(models: dict[str, RankingModel], rows: pl.DataFrame, name: str, tmp_path: Path) -> None:
    settings = UrankConfig(scorer=SETTINGS[name], clicks=ClickConfig(families=("pbm",)))
    model, whole = models[name], name == "values"  # the graph of the click model takes seconds, and is the same
    check_scorer_saved_and_loaded(model, rows, settings, tmp_path, onnx=whole)
    assert isinstance(model.scorer, NetworkScorer)
    graph = tmp_path / "model" / "scorer.onnx"
    made = graph if whole else scorer_graph(model.scorer, model.clicks.featurizer).SerializeToString()
    check_scorer_exported(model, rows, made)
    assert graph.exists() == whole


def test_values_are_an_input(small: Small, models: dict[str, RankingModel], rows: pl.DataFrame) -> None:
    assert models["values"].scorer is not None
    assert models["values"].scorer.takes_value
    assert models["plain"].scorer is not None
    assert not models["plain"].scorer.takes_value
    low, high = (models["values"].score(rows, np.full(rows.height, value)) for value in (1.0, 10.0))
    assert (high > low).mean() > 0.9  # the same item is worth more
    with pytest.raises(DataError, match="needs the column 'value', which is not there"):
        models["values"].rank(rows.drop("value"))
    assert models["plain"].rank(rows.drop("value")).height == rows.height


def test_the_scale_of_values_is_that_of_train(small: Small) -> None:
    values = np.concatenate([block.column("value") for block in small.dataset.blocks("train", ["value"])])
    scale = value_feature(small.dataset)
    assert scale is not None
    assert scale.mean == pytest.approx(signed_log(values.astype(np.float64)).mean(), rel=1e-5)
    assert scale.std == pytest.approx(signed_log(values.astype(np.float64)).std(), rel=1e-4)


def test_a_log_without_values_has_no_scale(world: Small) -> None:
    assert value_feature(world.dataset) is None


def test_values_that_cannot_be_written_to(models: dict[str, RankingModel], rows: pl.DataFrame) -> None:
    """As Arrow and Polars give them; torch would warn, and warnings are errors here."""
    model = models["values"]
    assert model.scorer is not None
    value = rows["value"].to_numpy().astype(np.float32)
    expected = model.scorer.score(model.clicks.featurizer.encode(rows), value)
    value.flags.writeable = False
    np.testing.assert_array_equal(model.scorer.score(model.clicks.featurizer.encode(rows), value), expected)


def test_chunks_of_rows_change_nothing(
    models: dict[str, RankingModel], rows: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["values"]
    expected = model.score(rows, rows["value"].to_numpy())
    monkeypatch.setattr(module, "chunk_rows", lambda _: 7)
    np.testing.assert_allclose(model.score(rows, rows["value"].to_numpy()), expected, rtol=1e-5, atol=1e-5)
    nothing = Inputs(np.zeros((0, 6), np.float32), np.zeros((0, 1), np.int64))
    assert model.score(nothing, np.zeros(0)).shape == (0,)


# Settings


def test_share() -> None:
    shares = [config(target=target, blend=0.3).objective.blend for target in ("model", "counterfactual", "blend")]
    assert shares == [0.0, 1.0, 0.3]


@pytest.mark.parametrize("settings", [{"colour": "red"}, {"blend": 1.5}, {"sigma": 0}, {"floor": 0}])
def test_settings_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        config(**settings)


# Chunks


@pytest.mark.parametrize("form", ["stable", "paper"])
@pytest.mark.parametrize("target", ["model", "blend"])
@pytest.mark.parametrize("lengths", [[7, 1, 30, 4, 30, 12], [6] * 5])
def test_the_loss_in_chunks_is_that_of_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch, form: str, target: str, lengths: list[int]
) -> None:
    """Value and gradient, against lists that are padded to the longest."""
    rng = np.random.default_rng(2)
    offsets = np.append(0, np.cumsum(lengths))
    rows, K = int(offsets[-1]), 5
    batch = ListArrays.from_rows(
        Inputs(np.zeros((rows, 1), np.float32), np.zeros((rows, 0), np.int64)),
        position=np.concatenate([rng.permutation(n) + 1 for n in lengths]),
        click=rng.integers(0, 2, rows).astype(np.float32),
        value=rng.uniform(1, 9, rows).astype(np.float32),
        offsets=offsets,
        table=rng.uniform(0.1, 0.9, (rows, K)).astype(np.float32),
    ).batch(0, len(lengths))
    settings = config(form=form, target=target, sigma=1.5, clip=2.0)
    where = where_items(offsets)
    assert batch.table is not None
    gains = item_gains(
        pad(batch.table.numpy(), offsets),
        value=pad(batch.value.numpy(), offsets),
        click=pad(batch.click.numpy(), offsets),
        logged=pad(batch.position.numpy(), offsets, fill=1),
        where=where,
        blend=0.5 if target == "blend" else 0.0,
    )
    scores = torch.from_numpy(rng.normal(0, 2, rows)).requires_grad_()
    padded = torch.zeros(where.shape, dtype=scores.dtype).masked_scatter(torch.from_numpy(where), scores)
    found = swaps(padded.detach().numpy(), gains, where=where)
    clip = 2.0 if form == "paper" else None
    whole = swap_loss(padded, found, form=settings.form, sigma=1.5, clip=clip).mean()
    (expected,) = torch.autograd.grad(whole, scores)
    for most_rows, most_padding in ((1, 0), (40, 3), (10**6, 10**6)):
        chunks = partial(by_length, most_rows=most_rows, most_padding=most_padding)
        monkeypatch.setattr(urank_module, "by_length", chunks)
        loss = mean_swap_loss(scores, batch, settings.objective, settings)
        (gradient,) = torch.autograd.grad(loss, scores)
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
