"""The rankers of other papers: each passes what every scorer must, learns what it promises, and is saved like ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.svm import LinearSVC

import urank
from benchmarks import letor
from contracts import SCORER_CHECKS, check_scorer_exported, check_scorer_saved_and_loaded
from simulated import Small, make, true_utility
from urank.config import validate
from urank.errors import ConfigError
from urank.evaluation.ranking_metrics import ndcg_metric
from urank.export.graph import scorer_graph
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.lab.truth import true_table
from urank.learning.features import fit_featurizer
from urank.learning.networks import FeatureLayer
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.log.ragged import pad, where_items
from urank.log.splits import SPLITS, split_by_hash, stable_hash
from urank.pipeline import ModelFit, fit_model
from urank.propensity.examination import Known, inverse_propensity
from urank.ranking.baselines import (
    PairBias,
    dual_weights,
    fit_baseline,
    fit_dla,
    fit_pairwise,
    fit_ranksvm,
    fit_regression_em,
    fit_unbiased_lambdamart,
)
from urank.ranking.losses import softmax_loss, swap_loss, swaps
from urank.ranking.objectives import ClickGain, DiscountedGain, LabelGain, LambdaLossGain, PaddedLists, RankNetGain
from urank.ranking.policies import Random, ScorerPolicy, TableMatch
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import (
    BASELINES,
    Baseline,
    BaselineConfig,
    RankerConfig,
    RankSvmConfig,
    TreesConfig,
    UrankConfig,
)
from urank.ranking.utility import utility

QUICK = {"epochs": 6, "batch_lists": 64}
SETTINGS: dict[str, Any] = {
    "config": BaselineConfig(),
    "scorer": RankerConfig(hidden=(32, 16), training=TrainingConfig(**QUICK)),
    "svm": RankSvmConfig(training=TrainingConfig(**QUICK, learning_rate=0.01, weight_decay=0.0)),
    "trees": TreesConfig(trees=30, min_data_in_leaf=20, threads=1),
}


@pytest.fixture(scope="module")
def rows(small: Small) -> pl.DataFrame:
    return small.simulation.candidates.drop("table").head(300)


@pytest.fixture(scope="module")
def scorers(small: Small) -> dict[Baseline, Any]:
    return {name: fit_baseline(name, small.dataset, small.featurizer, **SETTINGS)[0] for name in BASELINES}


@pytest.mark.parametrize("name", BASELINES)
def test_contract(name: Baseline, scorers: dict[Baseline, Any], fitted: ModelFit, rows: pl.DataFrame) -> None:
    model = RankingModel(fitted.model.clicks, scorers[name], "score")
    for check in SCORER_CHECKS:
        check(model, rows)


@pytest.mark.parametrize("name", BASELINES)
def test_saved_and_loaded(
    name: Baseline, scorers: dict[Baseline, Any], fitted: ModelFit, rows: pl.DataFrame, tmp_path: Path
) -> None:
    model = RankingModel(fitted.model.clicks, scorers[name], "score")
    settings = {"families": ["monotone"], "training": QUICK}
    config = validate(UrankConfig, {"ranker": name, "clicks": settings})
    check_scorer_saved_and_loaded(model, rows, config, tmp_path)


@pytest.mark.parametrize("name", ["lambdarank", "ranksvm", "dla"])
def test_exported(name: Baseline, scorers: dict[Baseline, Any], fitted: ModelFit, rows: pl.DataFrame) -> None:
    model = RankingModel(fitted.model.clicks, scorers[name], "score")
    check_scorer_exported(model, rows, scorer_graph(scorers[name], model.clicks.featurizer).SerializeToString())


@pytest.mark.parametrize("name", BASELINES)
def test_better_than_chance_and_the_same_again(name: Baseline, small: Small, scorers: dict[Baseline, Any]) -> None:
    policy = ScorerPolicy(name, small.featurizer, scorers[name])
    assert true_utility(small, policy.positions) > 1.05 * true_utility(small, Random().positions)
    again, _ = fit_baseline(name, small.dataset, small.featurizer, **SETTINGS)
    block = next(small.dataset.blocks("test", [*small.dataset.features, "value"]))
    np.testing.assert_array_equal(policy.positions(block), ScorerPolicy(name, small.featurizer, again).positions(block))


def test_the_oracle_is_the_most_that_there_is(small: Small, scorers: dict[Baseline, Any]) -> None:
    oracle = TableMatch("KM", true_table(small.simulation.candidates))
    (block,) = small.dataset.blocks("test", [*small.dataset.features, "position", "value", "item_id"])
    orders = {"oracle": oracle.positions(block)}
    orders |= {name: ScorerPolicy(name, small.featurizer, each).positions(block) for name, each in scorers.items()}
    table = pad(small.table(small.featurizer.encode(block.items)).astype(np.float64), block.offsets)
    value, where = pad(block.column("value"), block.offsets), where_items(block.offsets)
    earned = {
        name: utility(table, pad(order, block.offsets, fill=1), value=value, where=where)
        for name, order in orders.items()
    }
    for name in scorers:
        assert (earned["oracle"] >= earned[name] - 1e-6).all()


# What each is about


def test_a_linear_score_is_linear(small: Small, scorers: dict[Baseline, Any], rows: pl.DataFrame) -> None:
    """In the standardised features, the embeddings and the value: no hidden layer bends it."""
    network = scorers["ranksvm"].network
    assert scorers["ranksvm"].family == "linear"
    assert [name for name, _ in network.named_parameters() if "layers" in name] == []
    inputs = small.featurizer.encode(rows)
    made = network.backbone(torch.from_numpy(inputs.numeric), torch.from_numpy(inputs.categorical))
    value = network.scale(torch.from_numpy(rows["value"].to_numpy().copy())[:, None])
    weights, bias = network.output.weight[0], network.output.bias
    expected = torch.cat([made, value], dim=1) @ weights + bias
    found = scorers["ranksvm"].score(inputs, rows["value"].to_numpy())
    np.testing.assert_allclose(found, expected.numpy(force=True), rtol=1e-4, atol=1e-5)


def test_ranksvm_reaches_the_objective_of_linear_svc(tmp_path: Path) -> None:
    """½|w|² + C Σ weight · hinge over all pairs, on the train split, within 2 % of what scikit-learn finds."""
    small = make(tmp_path, queries=80, sessions=3, features=5, candidates=6, positions=6, seed=2)
    known = Known(true_table(small.simulation.candidates))
    gain, c = ClickGain(known, clip=20), 0.01
    training = TrainingConfig(epochs=150, learning_rate=0.02, weight_decay=0.0, batch_lists=48, patience=30)
    scorer, _ = fit_ranksvm(small.dataset, small.featurizer, gain, RankSvmConfig(c=c, training=training))
    columns = [*small.dataset.features, "position", "click", "item_id"]
    (block,) = small.dataset.blocks("train", columns)
    inputs = small.featurizer.encode(block.items)
    x = FeatureLayer(small.featurizer)(torch.from_numpy(inputs.numeric)).numpy().astype(np.float64)
    weight = block.column("click") * inverse_propensity(known, block, clip=20)
    pairs, weights = [], []
    for first, last in zip(block.offsets[:-1], block.offsets[1:], strict=True):
        for i in range(first, last):
            for j in range(first, last):
                if weight[i] > 0 and j != i:
                    pairs.append(x[i] - x[j])
                    weights.append(weight[i])
    differences, amounts = np.array(pairs), np.array(weights)

    def objective(w: np.ndarray) -> float:
        return float(w @ w / 2 + c * (amounts * np.maximum(0, 1 - differences @ w)).sum())

    sign = np.where(np.arange(len(amounts)) % 2 == 0, 1, -1)
    peer = LinearSVC(C=c, loss="hinge", fit_intercept=False, max_iter=200_000, tol=1e-5)
    peer.fit(differences * sign[:, None], sign, sample_weight=amounts)
    ours = scorer.network.output.weight.numpy(force=True)[0].astype(np.float64)
    assert objective(ours) < 1.02 * objective(peer.coef_[0]) < 0.95 * objective(np.zeros(x.shape[1]))


def test_dual_weights_are_clipped_and_know_the_top_of_a_list() -> None:
    """The second list has no item at position 1; its top is the item at 2."""
    scores = torch.tensor([[2.0, 0.0, 1.0], [1.0, -9.0, 7.0]])
    position, where = torch.tensor([[3, 1, 2], [2, 4, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    places = torch.tensor([[-2.0, 0.0, -1.0], [-1.0, -9.0, 0.0]])
    examined, relevant = dual_weights(scores, places, position, where=where, clip=50)
    e = np.exp
    np.testing.assert_allclose(examined[0], [e(2.0), 1.0, e(1.0)], rtol=1e-6)
    np.testing.assert_allclose(relevant[0], [e(-2.0), 1.0, e(-1.0)], rtol=1e-6)
    np.testing.assert_allclose(examined[1, :2], [1.0, 50.0], rtol=1e-6)
    np.testing.assert_allclose(relevant[1, :2], [1.0, 50.0], rtol=1e-6)


def test_pairwise_rankers_differ_in_their_weights_only() -> None:
    """Three items in the order of their scores, the last one clicked with weight 4; labels 2^y − 1 are 3, 0 and 1."""
    scores, blank = np.array([[3.0, 2.0, 1.0]]), np.ones((1, 3))

    def weights(kind: type[DiscountedGain], gain: list[float], *, labels: bool = False) -> dict[tuple[int, int], float]:
        lists = PaddedLists(blank, blank, blank, None, np.array([gain]), None)
        delta = kind(10, normalised=labels).swaps(scores, lists).delta[0]
        return {(i, j): float(delta[i, j]) for i in range(3) for j in range(3) if delta[i, j] != 0}

    d = [1.0, 1 / np.log2(3), 0.5]
    assert weights(RankNetGain, [0, 0, 4]) == {(2, 0): 4, (2, 1): 4}
    assert weights(RankNetGain, [3, 0, 1], labels=True) == {(1, 0): -1, (2, 0): -1, (2, 1): 1}
    assert weights(DiscountedGain, [0, 0, 4]) == pytest.approx({(2, 0): 4 * (d[0] - d[2]), (2, 1): 4 * (d[1] - d[2])})
    apart = {(2, 0): d[0] - d[2] + 10 * (d[1] - d[2]), (2, 1): d[1] - d[2] + 10 * (d[0] - d[1])}
    assert weights(LambdaLossGain, [0, 0, 4]) == pytest.approx({pair: 4 * weight for pair, weight in apart.items()})
    ideal = 3 + 1 / np.log2(3)
    found = weights(LambdaLossGain, [3, 0, 1], labels=True)
    assert found[2, 1] == pytest.approx(apart[2, 1] / ideal)


def test_pair_bias_is_that_of_unbiased_lambdamart() -> None:
    """Hu et al. 2019 by loops: the weights of pairs, and the next t⁺ and t⁻. One item was not shown."""
    rng = np.random.default_rng(0)
    B, n, K, sigma = 40, 5, 4, 1.5
    position = np.array([rng.permutation(n) + 1 for _ in range(B)])
    click = (rng.random((B, n)) < 0.4) & (position <= K)
    scores = rng.normal(size=(B, n)).astype(np.float32)
    plus, minus = np.array([1.0, 0.8, 0.5, 0.3]), np.array([1.0, 0.9, 0.7, 0.6])
    target = DiscountedGain(K)(PaddedLists(position, click, np.ones((B, n)), None, click.astype(float), None))
    found = swaps(scores, target)
    bias = PairBias(position.ravel(), plus, minus, sigma)
    rows = np.arange(B * n).reshape(B, n)
    halves = [slice(0, 17), slice(17, B)]  # chunks of lists add up
    weighed = [bias(rows[half], scores[half], swaps(scores[half], target[half])).delta for half in halves]
    losses = np.zeros((2, K))
    total = 0.0
    for b in range(B):
        rank = np.argsort(np.argsort(-scores[b])) + 1
        for i in np.flatnonzero(click[b]):
            for j in np.flatnonzero(~click[b] & (position[b] <= K)):
                gains = [1 / np.log2(1 + rank[item]) if rank[item] <= K else 0.0 for item in (i, j)]
                pair = abs(gains[0] - gains[1]) * np.log2(1 + np.exp(-sigma * (scores[b, i] - scores[b, j])))
                at, other = position[b, i] - 1, position[b, j] - 1
                losses[0, at] += pair / minus[other]
                losses[1, other] += pair / plus[at]
                total += pair / (plus[at] * minus[other])
    both = replace(found, delta=np.concatenate(weighed))
    assert swap_loss(torch.from_numpy(scores), both, sigma=sigma).sum().item() == pytest.approx(total, rel=1e-4)
    bias.update()
    np.testing.assert_allclose(bias.plus, np.sqrt(losses[0] / losses[0, 0]), rtol=1e-5)
    np.testing.assert_allclose(bias.minus, np.sqrt(losses[1] / losses[1, 0]), rtol=1e-5)
    bias.update()  # nothing was seen since
    np.testing.assert_array_equal(bias.plus, 1.0)


def test_unbiased_lambdamart_finds_that_attention_falls(tmp_path: Path) -> None:
    """Position-based users: clicks far down are rarer than relevance explains, so t⁺ falls and their weight grows."""
    small = make(tmp_path, queries=400, sessions=4, features=6, positions=6, candidates=6, user="pbm", seed=4)
    _, bias, _ = fit_unbiased_lambdamart(small.dataset, small.featurizer, SETTINGS["scorer"], SETTINGS["trees"])
    assert bias.plus[0] == bias.minus[0] == 1
    assert bias.plus[-1] < bias.plus[2] < 0.9


def test_regression_em_grows_its_first_tree_by_the_posterior(small: Small) -> None:
    """A Newton step from constant relevance r: leaves are Σ(P(relevant) − r) / Σ r (1 − r), after one step of p(k)."""
    settings = TreesConfig(trees=1, learning_rate=1.0, l2=0.0, feature_share=1.0, threads=1)
    scorer, history = fit_regression_em(small.dataset, small.featurizer, SETTINGS["scorer"], settings)
    assert (scorer.takes_value, history.best_round, len(history.rounds)) == (False, 0, 1)
    parts = list(small.dataset.blocks("train", [*small.dataset.features, "position", "click"]))
    leaf = np.concatenate(
        [scorer.score(small.featurizer.encode(part.items), np.ones(part.items.num_rows, np.float32)) for part in parts]
    )
    position, click = (np.concatenate([part.column(name) for part in parts]) for name in ("position", "click"))
    p = 0.9 / np.arange(1, small.dataset.positions + 1)
    r = click.mean() / p[position - 1].mean()
    for _ in range(5):  # as many EM steps of the curve precede a tree
        examined = np.where(click == 1, 1.0, p[position - 1] * (1 - r) / (1 - p[position - 1] * r))
        p = np.array([examined[position == k].mean() for k in range(1, len(p) + 1)])
    relevant = np.where(click == 1, 1.0, r * (1 - p[position - 1]) / (1 - p[position - 1] * r))
    assert len(np.unique(leaf)) > 5
    for value in np.unique(leaf):
        own = leaf == value
        assert value == pytest.approx((relevant[own] - r).sum() / (own.sum() * r * (1 - r)), rel=1e-3, abs=1e-4)


def test_labels_teach_more_than_clicks(small: Small) -> None:
    """Labels have no position bias and no noise; by them the order has the better nDCG on held-out queries."""
    found = {}
    for gain in (LabelGain(), ClickGain()):
        scorer, _ = fit_pairwise("lambdarank", small.dataset, small.featurizer, gain, SETTINGS["scorer"])
        (block,) = small.dataset.blocks("test", [*small.dataset.features, "value", "relevance"])
        positions = pad(ScorerPolicy("x", small.featurizer, scorer).positions(block), block.offsets, fill=1)
        label, where = pad(block.column("relevance"), block.offsets), where_items(block.offsets)
        found[type(gain)] = np.nanmean(ndcg_metric(positions, label, where=where))
    assert found[LabelGain] > found[ClickGain]


def test_the_training_goes_on_from_a_checkpoint(small: Small, tmp_path: Path) -> None:
    first, curve, _ = fit_dla(small.dataset, small.featurizer, SETTINGS["scorer"], checkpoint=tmp_path / "dla")
    again, same, history = fit_dla(small.dataset, small.featurizer, SETTINGS["scorer"], checkpoint=tmp_path / "dla")
    assert len(history.rounds) <= QUICK["epochs"]
    assert curve == same
    for one, other in zip(first.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_dla_stops_by_the_product_of_both_models(small: Small) -> None:
    """The held-out loss of the best round is the softmax loss of f + log g on valid, not that of f alone."""
    scorer, curve, history = fit_dla(small.dataset, small.featurizer, SETTINGS["scorer"])
    total = alone = 0.0
    lists = 0
    for block in small.dataset.blocks("valid", [*small.dataset.features, "value", "position", "click"]):
        scores = torch.from_numpy(scorer.score(small.featurizer.encode(block.items), block.column("value")))
        examined = torch.tensor(curve.values)[torch.from_numpy(block.column("position").astype(np.int64)) - 1]
        clicks = torch.from_numpy(block.column("click") * block.column("value"))
        for first, last in zip(block.offsets[:-1], block.offsets[1:], strict=True):
            rows, where = slice(first, last), torch.ones(1, last - first, dtype=torch.bool)
            total += softmax_loss((scores + examined.log())[None, rows], clicks[None, rows], where=where).item()
            alone += softmax_loss(scores[None, rows], clicks[None, rows], where=where).item()
            lists += 1
    assert history.best == pytest.approx(total / lists, rel=2e-3)  # batches are weighted by their rows
    assert abs(history.best - alone / lists) > 0.01 * history.best


def test_dla_stops_by_the_valid_split_and_the_items_that_were_shown(tmp_path: Path) -> None:
    """A click of a valid query is worth 3, not 1, so that no other split has its loss; items below 4 were not shown."""
    log = simulate(SimulationConfig(queries=150, sessions=3, features=4, candidates=6, positions=6, seed=3)).log
    in_valid = split_by_hash(stable_hash(log["query_id"]), valid=0.3, test=0.1) == SPLITS.index("valid")
    log = log.with_columns(
        pl.when(pl.col("position") > 4).then(0).otherwise("click").alias("click"),
        value=pl.when(pl.Series(in_valid)).then(3.0).otherwise(1.0),
    )
    urank.prepare(urank.read(log), tmp_path / "prepared", valid=0.3, test=0.1, positions=4)
    dataset = Dataset(tmp_path / "prepared")
    featurizer = fit_featurizer(dataset)
    scorer, curve, history = fit_dla(dataset, featurizer, SETTINGS["scorer"])
    losses: dict[str, list[float]] = {"shown": [], "all": []}
    for block in dataset.blocks("valid", [*dataset.features, "value", "position", "click"]):
        scores = torch.from_numpy(scorer.score(featurizer.encode(block.items, block.offsets), block.column("value")))
        position = torch.from_numpy(block.column("position").astype(np.int64))
        log_g = torch.tensor(curve.values)[position.clamp(max=4) - 1].log()
        clicks = torch.from_numpy(block.column("click") * block.column("value"))
        for first, last in zip(block.offsets[:-1], block.offsets[1:], strict=True):
            rows = slice(first, last)
            for name, where in (("shown", position[rows] <= 4), ("all", position[rows] > 0)):
                losses[name].append(
                    softmax_loss((scores + log_g)[None, rows], clicks[None, rows], where=where[None]).item()
                )
    assert history.best == pytest.approx(np.mean(losses["shown"]), rel=0.02)  # batches are weighted by their rows
    assert np.mean(losses["all"]) > 1.1 * history.best


# As part of a model


@pytest.mark.parametrize(("ranker", "examination"), [("ranksvm", "harvest"), ("dla", "none")])
def test_a_model_with_such_a_ranker(small: Small, ranker: str, examination: str) -> None:
    quick = {"epochs": 1, "batch_lists": 64}
    settings = {
        "ranker": ranker,
        "clicks": {"families": ["pbm"], "training": quick},
        "scorer": {"training": quick},
        "svm": {"training": quick},
        "baseline": {"examination": examination},
    }
    found = fit_model(small.dataset, validate(UrankConfig, settings))
    assert (found.model.method, found.why) == ("score", f"{ranker} ranks by its scores")
    assert found.model.name.endswith("on pbm")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"baseline": {"examination": "em"}},
            "examination is only for the rankers lambdarank, .*; got 'em' with 'network'",
        ),
        ({"ranker": "dla", "baseline": {"learn_from": "relevance"}}, "learn_from is only for the rankers lambdarank"),
        (
            {"ranker": "ranksvm", "baseline": {"learn_from": "relevance", "examination": "em"}},
            "examination weights clicks, which learn_from 'relevance' does not use",
        ),
        ({"ranker": "ranksvm", "baseline": {"clip": 0.5}}, r"baseline\.clip in the configuration"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate(UrankConfig, settings)


# On labels, as good as established tools; `benchmarks letor` has all folds

SPREAD = 0.041
"""The standard deviation of LightGBM's nDCG@10 over the five folds, as the benchmark prints it."""


@pytest.mark.slow
def test_one_fold_of_mq2008(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letor, "DATA", data_dir / "mq2008")
    found = letor.fold_ndcg(tmp_path / "fold", 0, quick=True)
    assert found["ranksvm"] > found["LinearSVC on pairs"] - SPREAD
    assert found["lambdarank"] > found["LightGBM lambdarank"] - SPREAD
    assert found["lambdarank-trees"] > found["LightGBM lambdarank"] - SPREAD
    assert min(found.values()) > 0.4  # a random order has 0.33
