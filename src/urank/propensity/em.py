"""Regression EM (Wang et al. 2018): examination without randomisation, with relevance predicted from features.

    P(click | i, k) = p(k) · r(xᵢ)

Whether an unclicked item was not examined or not relevant is hidden. The E step computes the probability of each; the M
step sets p(k) to the mean of the first and fits r to the second: here by one LightGBM tree per step, with the gradient
r − P(relevant) of the regression's log loss. That is also the gradient of the log loss of the clicks, so boosting
maximises the likelihood of r. Relevance that rankers knew but features do not predict is attributed to examination.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import expit, logit

from urank.errors import DataError
from urank.learning.features import Featurizer, fit_featurizer
from urank.learning.lightgbm_data import Floats, lightgbm_dataset
from urank.learning.training_settings import MAX_LEAVES, GrowthConfig
from urank.log.dataset import Dataset, drop_unseen
from urank.log.identifiability import ranges
from urank.progress import Report, silent
from urank.propensity.examination import ExaminationCurve

Doubles = NDArray[np.float64]

START = 0.9
"""Initial examination at position 1; from 1 it could not move, and no other position could exceed it."""


class EmConfig(GrowthConfig):
    """Settings of the trees."""

    learning_rate: float = Field(0.3, gt=0, le=1, description="shrinkage of each tree")
    leaves: int = Field(15, ge=2, le=MAX_LEAVES, description="maximum number of leaves per tree")
    min_data_in_leaf: int = Field(200, ge=1, description="minimum number of impressions in a leaf")
    inner_steps: int = Field(5, ge=1, description="EM steps of the curve before each tree")


def e_step(click: NDArray[Any], examined: NDArray[Any], relevant: NDArray[Any]) -> tuple[Doubles, Doubles]:
    """Compute P(examined | click) and P(relevant | click) `[rows]` (Wang et al. 2018, Eq. 1).

        c = 1: both are 1;      c = 0:  p (1 − r) / (1 − p r)   and   r (1 − p) / (1 − p r)

    Args:
        click: `[rows]`, 0 or 1.
        examined, relevant: p and r `[rows]`, examination at the position of each row, and its relevance.

    >>> e_step(np.array([1, 0]), np.array([0.5, 0.5]), np.array([0.2, 0.2]))  # 0.5 · 0.8 / 0.9 and 0.2 · 0.5 / 0.9
    (array([1.        , 0.444...]), array([1.        , 0.111...]))
    """
    p, r = np.asarray(examined, dtype=np.float64), np.asarray(relevant, dtype=np.float64)
    neither = np.maximum(1 - p * r, 1e-12)
    clicked = np.asarray(click) == 1
    return np.where(clicked, 1.0, p * (1 - r) / neither), np.where(clicked, 1.0, r * (1 - p) / neither)


@dataclass(frozen=True, eq=False)
class ObservedClicks:
    """The clicks of a split: `position` `[rows]` from 1, and `click` `[rows]`, 0 or 1."""

    position: NDArray[np.int64]
    click: NDArray[np.float64]

    def log_loss(self, examination: Doubles, relevant: Doubles) -> float:
        """Compute the mean log loss under p(k) · r."""
        rate = np.clip(examination[self.position - 1] * relevant, 1e-12, 1 - 1e-12)
        return -float(np.mean(np.where(self.click == 1, np.log(rate), np.log1p(-rate))))


def update_examination(observed: ObservedClicks, relevant: Doubles, examination: Doubles, steps: int) -> Doubles:
    """Update p(k) `[K]` by EM steps with fixed relevance: p(k) = mean P(examined | click) at k.

    >>> observed = ObservedClicks(np.array([1, 1, 2, 2]), np.array([1.0, 0.0, 1.0, 0.0]))
    >>> update_examination(observed, np.full(4, 1.0), np.array([0.9, 0.9]), 1)  # relevant items are clicked if examined
    array([0.5, 0.5])
    """
    place = observed.position - 1
    shows = np.bincount(place, minlength=len(examination))
    for _ in range(steps):
        examined, _ = e_step(observed.click, examination[place], relevant)
        examination = np.bincount(place, weights=examined, minlength=len(examination)) / shows
    return examination


def fit_em(
    dataset: Dataset, config: EmConfig | None = None, *, seed: int = 0, report: Report = silent
) -> ExaminationCurve:
    """Estimate one curve by regression EM; the features of the log must predict relevance, and not the position.

    Args:
        dataset: a prepared log; train is fitted, valid is for early stopping, test is not used.
        config, report: settings of the trees, and progress callback.
        seed: equal seeds give equal curves.

    Raises:
        DataError: the log has no features, or a position was not shown.
    """
    featurizer = fit_featurizer(drop_unseen(dataset))
    return fit_relevance(dataset, featurizer, config or EmConfig(), seed=seed, report=report).curve


@dataclass(frozen=True)
class EmFit:
    """The result of regression EM: examination, LightGBM's text of the trees of relevance, held-out losses by tree."""

    curve: ExaminationCurve
    text: str
    losses: tuple[float, ...]


def fit_relevance(
    dataset: Dataset, featurizer: Featurizer, config: EmConfig, *, seed: int = 0, report: Report = silent
) -> EmFit:
    """Fit examination and relevance; arguments as of `fit_em`. The trees sum up to the log odds of relevance."""
    dataset = drop_unseen(dataset)
    params = config.params(seed)
    observed = {split: _read_clicks(dataset, split) for split in ("train", "valid")}
    shows = np.bincount(observed["train"].position - 1, minlength=dataset.positions)
    if (shows == 0).any():
        absent = [int(k) + 1 for k in np.flatnonzero(shows == 0)]
        raise DataError(f"every position must be shown in the train split of {dataset.folder}; {ranges(absent)} is not")
    data: dict[str, lightgbm.Dataset] = {}
    for split in ("train", "valid"):
        bins = data.get("train")
        data[split] = lightgbm_dataset(dataset, split, featurizer, params, report, extra=None, reference=bins)
    return _grow(data, observed, dataset.positions, config, params, report)


def _read_clicks(dataset: Dataset, split: str) -> ObservedClicks:
    parts = [(b.column("position"), b.column("click")) for b in dataset.blocks(split, ["position", "click"])]
    position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return ObservedClicks(position.astype(np.int64), click.astype(np.float64))


def _grow(
    data: dict[str, lightgbm.Dataset],
    observed: dict[str, ObservedClicks],
    positions: int,
    config: EmConfig,
    params: dict[str, Any],
    report: Report,
) -> EmFit:
    """Grow trees with early stopping on the held-out log loss; keep the curve of the best tree."""
    held_out: list[float] = []
    train = observed["train"]
    curves = [START / np.arange(1.0, positions + 1)]  # the initial one, and that before each tree
    at_top = np.clip(train.click.mean() / curves[0][train.position - 1].mean(), 0.01, 0.9)
    first = float(logit(at_top))  # relevance before any tree

    def objective(scores: Doubles, _: lightgbm.Dataset) -> tuple[Floats, Floats]:
        relevant = expit(scores + first)
        curves.append(update_examination(train, relevant, curves[-1], config.inner_steps))
        posterior = e_step(train.click, curves[-1][train.position - 1], relevant)[1]
        return (relevant - posterior).astype(np.float32), (relevant * (1 - relevant)).astype(np.float32)

    def metric(scores: Doubles, _: lightgbm.Dataset) -> tuple[str, float, bool]:
        return "log loss", observed["valid"].log_loss(curves[-1], expit(scores + first)), False

    def after_tree(env: lightgbm.callback.CallbackEnv) -> None:
        held_out.append(float((env.evaluation_result_list or [])[0][2]))
        report("growing trees", env.iteration + 1, config.trees, f"loss {held_out[-1]:.4f}")

    callbacks: list[Callable[..., Any]] = [after_tree, lightgbm.early_stopping(config.early_stopping, verbose=False)]
    params = params | {"objective": objective, "metric": "none"}
    valid: dict[str, Any] = {"valid_sets": [data["valid"]], "valid_names": ["valid"], "feval": metric}
    booster = lightgbm.train(params, data["train"], num_boost_round=config.trees, callbacks=callbacks, **valid)
    best = curves[booster.best_iteration]
    curve = ExaminationCurve("em", tuple((best / best[0]).tolist()))
    return EmFit(curve, booster.model_to_string(), tuple(held_out))
