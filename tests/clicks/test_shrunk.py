"""The shrunk click model: its formula, its loss, and what it makes of logs with and without item-specific attention."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import expit

from simulated import Small, make, true_utility
from urank.clicks import shrunk
from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import Fit, fit_clicks
from urank.clicks.shrunk import ALPHAS, Evidence, ShrunkClicks, choose_alpha, joint_loss, list_losses
from urank.errors import TooFewError
from urank.learning.batches import train_and_valid
from urank.learning.features import Inputs, fit_featurizer
from urank.log.dataset import Block
from urank.log.folds import folds
from urank.ranking.ranking_model import RankingModel

SETTINGS: dict[str, Any] = {"queries": 500, "candidates": 8, "positions": 8, "features": 6, "sessions": 6, "seed": 410}


@pytest.fixture(scope="module")
def item_users(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make(tmp_path_factory.mktemp("item"), user="item", eta=3.0, **SETTINGS)


@pytest.fixture(scope="module")
def fit(item_users: Small) -> Fit:
    return fit_clicks(item_users.dataset, ClickConfig())


@pytest.fixture(scope="module")
def block(item_users: Small) -> Block:
    return next(iter(item_users.dataset.blocks("test", [*item_users.dataset.features, "position"])))


def member_of(fit: Fit) -> ShrunkClicks:
    (member,) = fit.model.members
    assert isinstance(member, ShrunkClicks)
    return member


def encoded(fit: Fit, block: Block) -> Inputs:
    return fit.model.featurizer.encode(block.items, block.offsets)


def parts_of(member: ShrunkClicks, inputs: Inputs) -> tuple[NDArray[np.float64], ...]:
    with torch.no_grad():
        found = member.network.parts(torch.from_numpy(inputs.numeric), torch.from_numpy(inputs.categorical))
    return tuple(each.double().numpy() for each in found)


def with_alpha(fit: Fit, alpha: float) -> RankingModel:
    """The same model with another α."""
    member = member_of(fit)
    changed = ShrunkClicks(copy.deepcopy(member.network), member.trees)
    changed.network.alpha.fill_(alpha)
    return RankingModel(replace(fit.model, members=(changed,)))


# The formula


@pytest.mark.parametrize("free", [False, True])
def test_table_is_the_formula(fit: Fit, block: Block, *, free: bool) -> None:
    """log P = log σ(r + (s − 1)·ḡ) − s·g(k) − e(k), with s = softplus(c + u + α·(δ − u)), from the parts by NumPy."""
    member, inputs = member_of(fit), encoded(fit, block)
    if free:
        member = ShrunkClicks(copy.deepcopy(member.network), member.trees)
        member.network.free_curves()
        with torch.no_grad():
            member.network.common.copy_(torch.linspace(-1, 0.5, len(member.network.common)))
    network = member.network
    relevance, delta, level = parts_of(member, inputs)
    by_network, by_trees, intercept = network.weights.double().tolist()
    columns = inputs.numeric[:, : network.compared]
    trees = np.mean([each.booster.predict(columns, raw_score=True) for each in member.trees], axis=0)
    r = by_network * relevance + by_trees * trees + intercept + float(network.bias.detach())
    steps = np.log1p(np.exp(network.scaled.detach().double().numpy()))
    g, e = np.append(0, steps if free else np.cumsum(steps)), np.append(0, network.common.detach().double().numpy())
    assert member.monotone != free
    assert free or not e.any()
    mean = network.shares.double().numpy() @ g
    s = np.log1p(np.exp(np.log(np.e - 1) + level + float(network.alpha) * (delta - level)))
    expected = np.log(expit(r + (s - 1) * mean))[:, None] - s[:, None] * g - e
    np.testing.assert_allclose(member.log_ctr(inputs), np.minimum(expected, 0), atol=2e-5)


def test_free_curves_start_as_rising_ones(fit: Fit, block: Block) -> None:
    network = copy.deepcopy(member_of(fit).network)
    network.free_curves()
    for free, rising in zip(network.curves(), member_of(fit).network.curves(), strict=True):
        torch.testing.assert_close(free, rising)


@pytest.mark.slow
def test_curves_rise_again_where_attention_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shelves of five tiles: with clicks enough, position 6 is seen more than 5; with few, the curves cannot rise."""
    users = make(tmp_path, user="carousel", eta=1.0, **SETTINGS | {"queries": 1_000})
    block = next(iter(users.dataset.blocks("test", [*users.dataset.features, "position"])))

    def click_rates(*, falling: bool) -> NDArray[np.float64]:
        found = fit_clicks(users.dataset, ClickConfig())
        assert found.evidence is not None
        assert ("rises again" in found.evidence.sentence) != falling
        return np.exp(found.model.log_ctr(encoded(found, block))).mean(axis=0)

    truth = users.table(users.featurizer.encode(block.items)).mean(axis=0)
    rates, lists = click_rates(falling=False), users.dataset.rows("train") / 8
    error = np.sqrt(1 / (lists * truth[4]) + 1 / (lists * truth[5]))  # of the logarithm of a ratio of counts
    assert np.log(truth[5] / truth[4]) > 5 * error  # what is to be found
    assert abs(np.log(rates[5] / rates[4]) - np.log(truth[5] / truth[4])) < 3 * error
    monkeypatch.setattr(shrunk, "LEAST_CLICKS", 10**9)
    assert (np.diff(click_rates(falling=True)) <= 0).all()


def test_clicks_never_rise_with_the_position(fit: Fit, block: Block) -> None:
    table = fit.model.log_ctr(encoded(fit, block))
    assert (np.diff(table, axis=1) <= 0).all()
    assert (table < 0).all()


def test_without_item_slopes_the_matching_is_the_order_by_relevance(fit: Fit, block: Block) -> None:
    """With α = 0 all items of a list fall alike, so no item gains more than another from a better position."""
    model = with_alpha(fit, 0.0)
    match, first = (model.order(block.items, block.offsets, method=method) for method in ("match", "ctr1"))
    np.testing.assert_array_equal(match, first)
    assert (with_alpha(fit, 1.0).order(block.items, block.offsets, method="match") != first).any()


def test_the_list_level_is_the_same_for_all_items_of_a_list(fit: Fit, block: Block) -> None:
    _, delta, level = parts_of(member_of(fit), encoded(fit, block))
    lists = np.split(np.arange(len(level)), block.offsets[1:-1])
    spread = [np.ptp(level[rows]) for rows in lists]
    assert max(spread) < 1e-5
    assert np.mean([np.ptp(delta[rows]) for rows in lists]) > 0.1


def test_position_based_reference_has_one_curve(fit: Fit, block: Block) -> None:
    assert fit.reference is not None
    table = fit.reference.log_ctr(encoded(fit, block))
    curves = table - table[:, :1]
    np.testing.assert_allclose(curves, np.broadcast_to(curves[:1], curves.shape), atol=1e-5)


# The loss


def by_hand(q: NDArray[np.float64], click: NDArray[np.float64], lists: list[list[int]]) -> list[float]:
    losses = []
    for rows in lists:
        p, c = q[rows], click[rows]
        entropy = -(c * np.log(p) + (1 - c) * np.log(1 - p)).sum()
        odds = p / (1 - p)
        losses.append(0.3 * entropy - (c * np.log(odds / odds.sum())).sum())
    return losses


def test_loss_is_pointwise_and_listwise() -> None:
    q, click = np.array([0.2, 0.5, 0.1, 0.7, 0.4]), np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    owner = torch.tensor([0, 0, 1, 1, 1])
    found = list_losses(torch.from_numpy(np.log(q)), torch.from_numpy(click), owner, 2)
    np.testing.assert_allclose(found.numpy(), by_hand(q, click, [[0, 1], [2, 3, 4]]), rtol=1e-9)


def test_gradient_of_the_loss() -> None:
    click, owner = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1])
    log_q = torch.log(torch.tensor([0.2, 0.5, 0.1, 0.7, 0.4], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda each: list_losses(each, click, owner, 2).sum(), (log_q,))


def test_repeated_lists_have_the_loss_of_their_rows(item_users: Small, fit: Fit) -> None:
    network = member_of(fit).network
    train, _ = train_and_valid(item_users.dataset, fit.model.featurizer, shown=True, values=False)
    batch = next(train.batches())
    assert batch.lists > len(batch.item_offsets) - 1  # sessions of the same query share their items
    rows = batch.item
    relevance, slope, _ = network.parts(batch.numeric[rows], batch.categorical[rows])
    log_q = network.at(
        relevance + network.bias,
        torch.nn.functional.softplus(np.log(np.e - 1) + slope),
        torch.arange(len(rows)),
        batch.position,
    )
    owner = torch.repeat_interleave(batch.offsets.diff())
    expected = list_losses(log_q, batch.click, owner, batch.lists).mean()
    torch.testing.assert_close(joint_loss(network, batch), expected)


# What the log supports


def test_item_specific_attention_is_found(fit: Fit) -> None:
    evidence = fit.evidence
    assert evidence is not None
    assert evidence.alpha >= 0.5
    assert evidence.items > 2
    assert evidence.relevance > 2
    assert "by item: yes" in evidence.sentence


def test_matching_beats_the_order_by_relevance_where_attention_differs(item_users: Small, fit: Fit) -> None:
    kept = RankingModel(fit.model, None, "match")
    shared = with_alpha(fit, 0.0)
    earned = [
        true_utility(item_users, lambda block, model=model: model.order(block.items, block.offsets, method="match"))
        for model in (kept, shared)
    ]
    assert earned[0] > 1.02 * earned[1]


@pytest.mark.slow
def test_without_it_items_are_seldom_told_apart(tmp_path: Path) -> None:
    """Position-based users: about half of such logs give an item no slope of its own."""
    found = []
    for seed in range(420, 426):
        small = make(tmp_path / str(seed), user="pbm", **{**SETTINGS, "seed": seed})
        evidence = fit_clicks(small.dataset, ClickConfig(), reference=False).evidence
        assert evidence is not None
        found.append(evidence.alpha)
    assert sum(alpha == 0 for alpha in found) >= 3


@pytest.mark.parametrize(
    ("over_quarter", "over_none", "alpha"),
    [(0.07, 0.1, 0.25), (0.09, 0.1, 1.0), (0.07, 0.2, 1.0), (0.07, 0.05, 0.0)],
    ids=["a quarter is as good", "all is better", "strong evidence", "a quarter is worse than none"],
)
@pytest.mark.parametrize("times", [1, 100])
def test_alpha_depends_on_the_size_of_the_gain(over_quarter: float, over_none: float, alpha: float, times: int) -> None:
    """Gains of α = 1 in standard deviations over queries; more queries turn no small gain into a larger α."""
    noise = np.random.default_rng(0).normal(size=400)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    losses = {0.0: noise + over_none, 0.25: noise + over_quarter, 1.0: np.zeros(400)}
    assert choose_alpha({each: np.tile(loss, times) for each, loss in losses.items()}) == alpha


def test_weights_are_not_negative_and_seeds_repeat(item_users: Small, fit: Fit, block: Block) -> None:
    network = member_of(fit).network
    assert (network.weights[:2] >= 0).all()
    assert float(network.alpha) in ALPHAS
    again = fit_clicks(item_users.dataset, ClickConfig(), reference=False)
    inputs = encoded(fit, block)
    np.testing.assert_array_equal(again.model.log_ctr(inputs), fit.model.log_ctr(inputs))


def test_weak_evidence_is_put_in_words() -> None:
    assert "by item: no sign of it (none of it is kept)" in Evidence(0.0, 9.0, 0.7, -1.0).sentence
    assert "by list: weakly" in Evidence(0.0, 9.0, 0.7, -1.0).sentence


# Small logs


def test_a_small_log_also_has_trees_without_within_list_features(fit: Fit) -> None:
    member = member_of(fit)
    network = member.network
    compared, raw = (each.booster.feature_importance() for each in member.trees)
    within = slice(network.raw, network.compared)
    assert compared[within].sum() > 0
    assert raw[within].sum() == 0
    assert raw[: network.raw].sum() > 0


def test_trees_fitted_again_are_of_the_same_kinds(item_users: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only train and valid together exceed the limit: the weights were fitted for the mean of both kinds."""
    monkeypatch.setattr(shrunk, "SMALL_LOG", train_and_valid_lists(item_users)[0])
    assert len(member_of(fit_clicks(item_users.dataset, ClickConfig())).trees) == 2


def train_and_valid_lists(log: Small) -> tuple[int, int]:
    """Distinct lists of train and valid."""
    splits = train_and_valid(log.dataset, fit_featurizer(log.dataset), shown=True, values=False)
    train, valid = (sum(split.lists(group).distinct for group in range(len(split.groups))) for split in splits)
    assert valid > 0
    return train, valid


def test_few_queries_choose_alpha_by_cross_validation(tmp_path: Path) -> None:
    """Some twenty held-out queries cannot tell that attention differs by item; all two hundred can."""
    settings = {**SETTINGS, "queries": 200, "eta": 3.0}
    few = make(tmp_path, user="item", **settings)
    evidence = fit_clicks(few.dataset, ClickConfig()).evidence
    assert evidence is not None
    assert evidence.items > 3
    assert evidence.alpha >= 0.75


def test_too_few_queries_for_folds_choose_alpha_on_valid(tmp_path: Path) -> None:
    tiny = make(tmp_path, user="item", **{**SETTINGS, "queries": 12})
    with pytest.raises(TooFewError):
        folds(tiny.dataset, ("train", "valid"), count=5)
    assert fit_clicks(tiny.dataset, ClickConfig()).evidence is not None
