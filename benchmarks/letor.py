"""The rankers of other papers on full labels: LETOR's MQ2008, five folds, against established tools in the same run.

    python -m benchmarks letor          SVMRank against scikit-learn's LinearSVC on pairs, LambdaRank (network, trees)
                                        against LightGBM's lambdarank; nDCG@10 of the test folds

The folds are LETOR's own: three parts teach, the fourth stops and chooses, the fifth judges. A query without a relevant
document counts 0, as in LETOR's evaluation tool. Data is looked for in ../shared/data or $URANK_DATA.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lightgbm
import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from rich.console import Console
from sklearn.svm import LinearSVC

import urank
from benchmarks.harness import REAL_DATA, Bar
from urank.evaluation.ranking_metrics import ndcg_metric
from urank.learning.features import Featurizer, Inputs, fit_featurizer
from urank.learning.networks import FeatureLayer
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids, pad, positions_by_score, where_items
from urank.log.svmlight import Letor, read_letor
from urank.ranking.baselines import fit_lambdarank_trees, fit_pairwise, fit_ranksvm
from urank.ranking.objectives import LabelGain
from urank.ranking.ranking_settings import RankerConfig, RankSvmConfig, TreesConfig

DATA = REAL_DATA / "mq2008"
FOLDS = 5
TREES, RATE, LEAVES, LEAST, PATIENCE = 300, 0.05, 15, 20, 50
console = Console(stderr=True)

Score = Callable[[Inputs], NDArray[np.float64]]


def run(*, quick: bool) -> Iterator[Bar]:
    if not DATA.is_dir():
        console.print(f"no real data at {DATA}: nothing is measured")
        return
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as folder:
        for fold in range(1 if quick else FOLDS):
            for name, value in fold_ndcg(Path(folder) / str(fold), fold, quick=quick).items():
                found.setdefault(name, []).append(value)
            console.print(f"fold {fold + 1}: " + ", ".join(f"{k} {v[-1]:.4f}" for k, v in found.items()))
    means = {name: float(np.mean(values)) for name, values in found.items()}
    for name, values in found.items():
        yield Bar(
            f"nDCG@10: {name} (sd over folds {np.std(values, ddof=min(1, len(values) - 1)):.3f})", means[name], ""
        )
    for ours, peer in (
        ("ranksvm", "LinearSVC on pairs"),
        ("lambdarank", "LightGBM lambdarank"),
        ("lambdarank-trees", "LightGBM lambdarank"),
    ):
        spread = float(np.std(found[peer], ddof=min(1, len(found[peer]) - 1)))
        yield Bar(
            f"nDCG@10: {ours} − {peer}, in deviations over folds",
            (means[ours] - means[peer]) / (spread or 1),
            "",
            at_least=-1.0,
        )
        yield Bar(f"nDCG@10: {ours} / {peer}", means[ours] / means[peer], "")


def fold_ndcg(folder: Path, fold: int, *, quick: bool) -> dict[str, float]:
    parts = [DATA / f"S{1 + (fold + n) % FOLDS}.txt" for n in range(FOLDS)]
    letor = [read_letor(parts[:3]), read_letor(parts[3]), read_letor(parts[4])]
    dataset = _dataset(folder, letor)
    featurizer = fit_featurizer(dataset)
    scores: dict[str, Score] = {}
    gain = LabelGain()
    small = TrainingConfig(epochs=5 if quick else 100, learning_rate=1e-3, batch_lists=32, patience=8)
    linear = TrainingConfig(
        epochs=5 if quick else 100, learning_rate=1e-2, batch_lists=32, patience=5, weight_decay=0.0
    )
    svm = min(
        (fit_ranksvm(dataset, featurizer, gain, RankSvmConfig(c=c, training=linear)) for c in (1e-4, 1e-3, 1e-2, 1e-1)),
        key=lambda fit: -_ndcg(letor[1], lambda inputs: fit[0].score(inputs, np.ones(len(inputs), np.float32))),
    )[0]
    network = fit_pairwise(
        "lambdarank", dataset, featurizer, gain, RankerConfig(hidden=(64, 32), dropout=0.3, training=small)
    )[0]
    config = TreesConfig(
        trees=TREES, learning_rate=RATE, leaves=LEAVES, min_data_in_leaf=LEAST, early_stopping=PATIENCE, threads=1
    )
    trees = fit_lambdarank_trees(dataset, featurizer, gain, RankerConfig(), config)[0]
    for name, scorer in (("ranksvm", svm), ("lambdarank", network), ("lambdarank-trees", trees)):
        scores[name] = lambda inputs, scorer=scorer: scorer.score(inputs, np.ones(len(inputs), np.float32))
    scores["LinearSVC on pairs"] = _linear_svc(letor, featurizer)
    scores["LightGBM lambdarank"] = _lightgbm(letor)
    return {name: _ndcg(letor[2], score) for name, score in scores.items()}


def _dataset(folder: Path, letor: list[Letor]) -> Dataset:
    """The three parts as a prepared log; time tells them apart, and nobody clicks."""
    frames = []
    for time, part in enumerate(letor):
        place = np.arange(len(part.label)) - part.offsets[list_ids(part.offsets)] + 1
        columns = {"query_id": part.query, "position": place, "relevance": part.label}
        features = {f"f{j + 1}": column for j, column in enumerate(part.features.T)}
        frames.append(pl.DataFrame(columns | features).with_columns(timestamp=pl.lit(time + 1), click=pl.lit(0)))
    counts = [part.n_queries for part in letor]
    log = urank.read(pl.concat(frames))
    valid, test = (count / sum(counts) for count in counts[1:])
    urank.prepare(log, folder, split_by="time", valid=valid, test=test)
    return Dataset(folder)


def _ndcg(part: Letor, score: Score) -> float:
    inputs = Inputs(part.features, np.zeros((len(part.label), 0), np.int64))
    where = where_items(part.offsets)
    positions = positions_by_score(pad(score(inputs), part.offsets), where=where)
    return float(ndcg_metric(positions, pad(part.label, part.offsets), where=where, empty="zero").mean())


def _linear_svc(letor: list[Letor], featurizer: Featurizer) -> Score:
    """scikit-learn's linear SVM on differences of pairs of a query with different labels; C chosen on valid."""
    layer = FeatureLayer(featurizer)

    def scaled(features: NDArray[np.float32]) -> NDArray[np.float64]:
        return layer(torch.from_numpy(features)).numpy().astype(np.float64)

    x, differences = scaled(letor[0].features), []
    for first, last in zip(letor[0].offsets[:-1], letor[0].offsets[1:], strict=True):
        label, own = letor[0].label[first:last], x[first:last]
        better, worse = np.nonzero(label[:, None] > label[None, :])
        differences.append(own[better] - own[worse])
    pairs = np.concatenate(differences)
    sign = np.where(np.arange(len(pairs)) % 2 == 0, 1, -1)
    best: tuple[float, Score] | None = None
    for c in (1e-5, 1e-4, 1e-3, 1e-2):
        model = LinearSVC(C=c, fit_intercept=False, dual=False).fit(pairs * sign[:, None], sign)

        def score(inputs: Inputs, weights: NDArray[np.float64] = model.coef_[0]) -> NDArray[np.float64]:
            return scaled(inputs.numeric) @ weights

        value = _ndcg(letor[1], score)
        if best is None or value > best[0]:
            best = value, score
    assert best is not None  # noqa: S101 - there is more than one C
    return best[1]


def _lightgbm(letor: list[Letor]) -> Score:
    data = lightgbm.Dataset(letor[0].features, letor[0].label, group=np.diff(letor[0].offsets), params={"verbose": -1})
    held_out = lightgbm.Dataset(letor[1].features, letor[1].label, group=np.diff(letor[1].offsets), reference=data)
    booster = lightgbm.train(
        {
            "objective": "lambdarank",
            "metric": "ndcg",
            "eval_at": [10],
            "learning_rate": RATE,
            "num_leaves": LEAVES,
            "min_data_in_leaf": LEAST,
            "num_threads": 1,
            "verbose": -1,
        },
        data,
        num_boost_round=TREES,
        valid_sets=[held_out],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )
    return lambda inputs: np.asarray(booster.predict(inputs.numeric))
