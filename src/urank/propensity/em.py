"""Regression EM (Wang et al. 2018): examination from a log that nobody randomised, with relevance told by features.

    P(click | i, k) = p(k) · r(xᵢ)

Whether an unclicked item was not examined or not relevant is hidden. The E step says how likely each is, the M step
takes p(k) as the mean of the one and fits r to the other: here by one tree of LightGBM for each step, with the gradient
r − P(relevant) of the regression's log loss. That is also the gradient of the clicks' own log loss, so the trees are
boosted towards the most likely r. What features do not tell of relevance, and rankers knew, is taken for examination.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import expit, logit

from urank.errors import DataError
from urank.learning.features import fit_featurizer
from urank.learning.lightgbm_data import MAX_LEAVES, Floats, GrowthConfig, lightgbm_dataset
from urank.log.dataset import Dataset, drop_unseen
from urank.log.identifiability import ranges
from urank.progress import Report, silent
from urank.propensity.examination import ExaminationCurve

__all__ = ["EmConfig", "Observed", "e_step", "examination_of", "fit_em"]

Doubles = NDArray[np.float64]

START = 0.9
"""Examination at position 1 in the beginning; from 1 it could not move, and no other position could rise above it."""


class EmConfig(GrowthConfig):
    """What decides how the trees grow."""

    learning_rate: float = Field(0.3, gt=0, le=1, description="weight of each tree")
    leaves: int = Field(15, ge=2, le=MAX_LEAVES, description="leaves of a tree at most")
    min_data_in_leaf: int = Field(200, ge=1, description="impressions that a leaf must hold")
    inner_steps: int = Field(5, ge=1, description="EM steps of the curve, which are cheap, before each tree")
    early_stopping: int = Field(
        20, ge=1, description="stop after so many trees without a better log loss on the valid split"
    )


def e_step(click: NDArray[Any], examined: NDArray[Any], relevant: NDArray[Any]) -> tuple[Doubles, Doubles]:
    """P(examined | click) and P(relevant | click) `[rows]` (Wang et al. 2018, Eq. 1).

        c = 1: both are 1;      c = 0:  p (1 − r) / (1 − p r)   and   r (1 − p) / (1 − p r)

    Args:
        click: `[rows]`, 0 or 1.
        examined: p `[rows]`, examination at the position of each row.
        relevant: r `[rows]`, relevance of each row.

    >>> e_step(np.array([1, 0]), np.array([0.5, 0.5]), np.array([0.2, 0.2]))  # 0.5 · 0.8 / 0.9 and 0.2 · 0.5 / 0.9
    (array([1.        , 0.444...]), array([1.        , 0.111...]))
    """
    p, r = np.asarray(examined, dtype=np.float64), np.asarray(relevant, dtype=np.float64)
    neither = np.maximum(1 - p * r, 1e-12)
    clicked = np.asarray(click) == 1
    return np.where(clicked, 1.0, p * (1 - r) / neither), np.where(clicked, 1.0, r * (1 - p) / neither)


@dataclass(frozen=True, eq=False)
class Observed:
    """The clicks of a split: `position` `[rows]` from 1, and `click` `[rows]`, 0 or 1."""

    position: NDArray[np.int64]
    click: NDArray[np.float64]

    def log_loss(self, examination: Doubles, relevant: Doubles) -> float:
        """The mean of −log P(what was observed) under p(k) · r."""
        rate = np.clip(examination[self.position - 1] * relevant, 1e-12, 1 - 1e-12)
        return -float(np.mean(np.where(self.click == 1, np.log(rate), np.log1p(-rate))))


def examination_of(observed: Observed, relevant: Doubles, examination: Doubles, steps: int) -> Doubles:
    """p(k) `[K]` after some EM steps in which relevance stays as it is: p(k) = mean P(examined | click) at k.

    >>> seen = Observed(np.array([1, 1, 2, 2]), np.array([1.0, 0.0, 1.0, 0.0]))
    >>> examination_of(seen, np.full(4, 1.0), np.array([0.9, 0.9]), 1)  # what is relevant is clicked when examined
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
    """One curve by regression EM; the features of the log must tell relevance, and not the position.

    Args:
        dataset: a prepared log; train teaches, valid stops, test is not looked at.
        config: how the trees grow.
        seed: the same seed gives the same curve.
        report: told of the rows read and of the trees grown.

    Raises:
        DataError: when there are no features, or a position was not shown.
    """
    config = config if config is not None else EmConfig()
    dataset = drop_unseen(dataset)
    featurizer = fit_featurizer(dataset)
    params = config.params(seed)
    observed = {split: _observed(dataset, split) for split in ("train", "valid")}
    shows = np.bincount(observed["train"].position - 1, minlength=dataset.positions)
    if (shows == 0).any():
        absent = [int(k) + 1 for k in np.flatnonzero(shows == 0)]
        raise DataError(f"every position must be shown in the train split of {dataset.folder}; {ranges(absent)} is not")
    data: dict[str, lightgbm.Dataset] = {}
    for split in ("train", "valid"):
        data[split] = lightgbm_dataset(
            dataset, split, featurizer, params, report, extra=None, reference=data.get("train")
        )
    curve = _grow(data, observed, dataset.positions, config, params, report)
    return ExaminationCurve("em", tuple((curve / curve[0]).tolist()))


def _observed(dataset: Dataset, split: str) -> Observed:
    parts = [(b.column("position"), b.column("click")) for b in dataset.blocks(split, ["position", "click"])]
    position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Observed(position.astype(np.int64), click.astype(np.float64))


@dataclass(eq=False)
class _Curves:
    """The curve before each tree; the first comes from 0.9/k."""

    positions: int
    before: list[Doubles] = field(default_factory=list)

    @property
    def last(self) -> Doubles:
        return self.before[-1] if self.before else START / np.arange(1.0, self.positions + 1)


def _grow(
    data: dict[str, lightgbm.Dataset],
    observed: dict[str, Observed],
    positions: int,
    config: EmConfig,
    params: dict[str, Any],
    report: Report,
) -> Doubles:
    """Grow trees until the held-out log loss no longer falls; the curve with which it was best."""
    train, curves = observed["train"], _Curves(positions)
    at_top = np.clip(train.click.mean() / curves.last[train.position - 1].mean(), 0.01, 0.9)
    first = float(logit(at_top))  # relevance before any tree

    def objective(scores: Doubles, _: lightgbm.Dataset) -> tuple[Floats, Floats]:
        relevant = expit(scores + first)
        curves.before.append(examination_of(train, relevant, curves.last, config.inner_steps))
        known = e_step(train.click, curves.last[train.position - 1], relevant)[1]
        return (relevant - known).astype(np.float32), (relevant * (1 - relevant)).astype(np.float32)

    def metric(scores: Doubles, _: lightgbm.Dataset) -> tuple[str, float, bool]:
        return "log loss", observed["valid"].log_loss(curves.last, expit(scores + first)), False

    def after_tree(env: lightgbm.callback.CallbackEnv) -> None:
        losses = [f"loss {result[2]:.4f}" for result in env.evaluation_result_list or ()]
        report("growing trees", env.iteration + 1, config.trees, *losses)

    callbacks: list[Callable[..., Any]] = [after_tree, lightgbm.early_stopping(config.early_stopping, verbose=False)]
    booster = lightgbm.train(
        params | {"objective": objective, "metric": "none"},
        data["train"],
        num_boost_round=config.trees,
        valid_sets=[data["valid"]],
        valid_names=["valid"],
        feval=metric,
        callbacks=callbacks,
    )
    return curves.before[booster.best_iteration - 1]
