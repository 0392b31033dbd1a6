"""The public face: fit a model on a log, rank with it, and say what it would earn.

log = urank.read("log.parquet")
model = urank.URank().fit(log)
model.rank(candidates)
print(urank.evaluate([model], log))
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank import distributed
from urank.clicks.fitting import Fit, fit_clicks
from urank.config import validate
from urank.errors import ConfigError, TooFewError
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.evaluation.guard_sweep import GuardLevels, evaluate_guard
from urank.evaluation.policy_evaluation import Evaluation, evaluate_policies
from urank.learning.features import Featurizer
from urank.learning.training import History
from urank.log.dataset import Dataset, is_prepared
from urank.log.prepare import prepare
from urank.log.reader import Log, read
from urank.log.splits import SPLITS
from urank.memory import DEFAULT_MEMORY, Memory
from urank.model_io import load_model, save_model
from urank.progress import Report, silent
from urank.propensity.examination import Propensity
from urank.propensity.methods import PropensityMethod, fit_propensity, load_propensity
from urank.ranking.baselines import BASELINES, fit_baseline
from urank.ranking.guard import Guard, GuardKind
from urank.ranking.policies import ModelPolicy, Policy, Random
from urank.ranking.positions import Method
from urank.ranking.ranking_model import RankingModel, Scorer
from urank.ranking.urank_config import UrankConfig
from urank.ranking.urank_network import RankerConfig, fit_urank
from urank.ranking.urank_trees import TreesScorer, fit_trees
from urank.ranking.utility import FLOOR
from urank.storage import is_path, to_path

__all__ = [
    "ModelFit",
    "URank",
    "evaluate",
    "fit_model",
    "guard_levels",
    "named_policies",
    "policies_of",
    "policies_to_evaluate",
    "policy_to_guard",
    "prepared",
]


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A trained model and how it came about.

    Attributes:
        model: what was made.
        clicks: the fit of its click model.
        history: the rounds of the scorer; none without one.
        choice: the evaluation on the validation split by which `auto` chose the method; none if it had no choice.
        why: how the method was chosen, in words.
    """

    model: RankingModel
    clicks: Fit
    history: History | None
    choice: Evaluation | None
    why: str

    @property
    def rounds(self) -> dict[str, list[dict[str, float]]]:
        """The rounds of every training, by name, as `History` has them."""
        own = {} if self.history is None else {"scorer": self.history.rounds}
        return {name: history.rounds for name, history in self.clicks.histories.items()} | own


class URank:
    """Learns from a click log the order that earns the most.

    Args:
        ranker: `network`, `trees`, a ranker of another paper (see `UrankConfig`), or `none`: what gives scores.
        method: `auto`, `score`, `match` or `ctr1`: how it ranks.
        clicks, scorer, trees, baseline: any setting of `ClickConfig`, `RankerConfig`, `TreesConfig`, `BaselineConfig`.
        seed: of all random numbers.

    After `fit`, `model_` is what ranks, and `fit_` tells how it came about.
    """

    def __init__(
        self,
        *,
        ranker: str = "network",
        method: str = "auto",
        clicks: Mapping[str, Any] | None = None,
        scorer: Mapping[str, Any] | None = None,
        trees: Mapping[str, Any] | None = None,
        baseline: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.ranker = ranker
        self.method = method
        self.clicks = clicks
        self.scorer = scorer
        self.trees = trees
        self.baseline = baseline
        self.seed = seed

    def fit(
        self, log: Log | Dataset | str | Path | Any, *, memory: Memory = DEFAULT_MEMORY, report: Report = silent
    ) -> Self:
        """Learn from a log: what `urank.read` gave, a path, a prepared folder, or a table."""
        settings = {
            "ranker": self.ranker,
            "method": self.method,
            "clicks": {"seed": self.seed, **(self.clicks or {})},
            "scorer": {"seed": self.seed, **(self.scorer or {})},
            "trees": dict(self.trees or {}),
            "baseline": dict(self.baseline or {}),
            "svm": {"seed": self.seed},
        }
        self.config_ = validate(UrankConfig, settings, "URank")
        with prepared(log, memory=memory, report=report) as dataset:
            self.fit_ = fit_model(dataset, self.config_, report=report)
        self.model_ = self.fit_.model
        return self

    def rank(
        self,
        candidates: Any,
        *,
        method: Method | None = None,
        top: int | None = None,
        guard: Guard | str | None = None,
        memory: Memory = DEFAULT_MEMORY,
    ) -> pl.DataFrame:
        """Rank candidates; see `RankingModel.rank`."""
        return self._fitted().rank(candidates, method=method, top=top, guard=guard, memory=memory)

    def score(self, candidates: pl.DataFrame, value: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """The score of each candidate."""
        return self._fitted().score(candidates, value)

    def log_ctr(self, candidates: pl.DataFrame) -> NDArray[np.float32]:
        """log P(click | candidate, position) `[rows, K]`."""
        return self._fitted().log_ctr(candidates)

    def save(self, folder: str | Path, *, overwrite: bool = False, onnx: bool = True) -> None:
        """Write the model into a folder; `urank.load_model` reads it."""
        save_model(self._fitted(), self.config_, folder, overwrite=overwrite, onnx=onnx)

    def _fitted(self) -> RankingModel:
        if not hasattr(self, "model_"):
            raise ConfigError("this URank has not been fitted; call fit with a log first")
        return self.model_


def fit_model(
    dataset: Dataset, config: UrankConfig, *, checkpoints: Path | None = None, report: Report = silent
) -> ModelFit:
    """Train a click model, a scorer on its table, and choose how to rank.

    Args:
        dataset: a prepared log; train teaches, valid stops and chooses, test is not looked at.
        config: settings.
        checkpoints: a folder from which a run that was killed goes on.
        report: told how far it is.
    """
    saved = _saved_propensity(config)  # better refused now than after the training
    clicks = fit_clicks(dataset, config.clicks, checkpoints=checkpoints, report=report)
    scorer: Scorer | None = None
    history: History | None = None
    if config.ranker == "network":
        checkpoint = _checkpoint(checkpoints, config.scorer)
        scorer, history = fit_urank(dataset, clicks.model, config.scorer, checkpoint=checkpoint, report=report)
    elif config.ranker == "trees":
        scorer, history = _of_first(
            lambda: fit_trees(dataset, clicks.model, config.scorer, config.trees, report=report),
            dataset,
            clicks.model.featurizer,
        )
    elif config.ranker != "none":
        checkpoint = _checkpoint(checkpoints, config)
        scorer, history = _fit_baseline(dataset, clicks.model.featurizer, config, saved, checkpoint, report)
    if config.method != "auto":
        model = RankingModel(clicks.model, scorer, config.method)
        return ModelFit(model, clicks, history, None, "asked for")
    model = RankingModel(clicks.model, scorer, "match" if scorer is None else "score")
    if scorer is None:
        return ModelFit(model, clicks, history, None, "there is no scorer")
    if config.ranker in BASELINES:
        return ModelFit(model, clicks, history, None, f"{config.ranker} ranks by its scores")
    return _with_best_method(dataset, model, clicks, history, config, report)


def _with_best_method(
    dataset: Dataset, model: RankingModel, clicks: Fit, history: History | None, config: UrankConfig, report: Report
) -> ModelFit:
    """The model with the better of score and match, by a cross-fitted estimate on the validation split."""
    try:
        choice = evaluate_policies(
            policies_of(model, methods=("score", "match")),
            dataset,
            splits=("valid",),
            config=CrossfitConfig(seed=config.clicks.seed),
            report=lambda step, *rest: report(f"choosing the method, {step}", *rest),
        )
    except TooFewError:  # to cross-fit; the paper's way is then the default
        return ModelFit(model, clicks, history, None, "valid has too few queries to tell which method is better")
    difference = choice.compare("match", "score")
    best: Method = distributed.broadcast(lambda: "match" if difference.mean > 0 else "score")
    better, worse = (best, "score") if best == "match" else (best, "match")
    why = (
        f"{better} earns {abs(difference.mean):.4f} more {choice.measure} a list than {worse} on the validation split "
        f"by the cross-fitted estimate (p = {difference.p_value:.2g})"
    )
    return ModelFit(replace(model, method=best), clicks, history, choice, why)


def _of_first(
    grow: Callable[[], tuple[Any, History]], dataset: Dataset, featurizer: Featurizer
) -> tuple[TreesScorer, History]:
    """Trees, which one worker of a team grows for all."""

    def told() -> dict[str, Any]:
        trees, history = grow()
        return {"text": trees.to_text(), "history": asdict(history)}

    made = distributed.broadcast(told)
    return TreesScorer.from_text(made["text"], featurizer, dataset.has("value")), History(**made["history"])


def _saved_propensity(config: UrankConfig) -> Propensity | None:
    """That of the file which a configuration names; none when it names a method."""
    asked = config.baseline.propensity
    return None if asked in get_args(PropensityMethod) else load_propensity(asked)


def _fit_baseline(
    dataset: Dataset,
    featurizer: Featurizer,
    config: UrankConfig,
    propensity: Propensity | None,
    checkpoint: Path | None,
    report: Report,
) -> tuple[Scorer, History]:
    """A ranker of another paper, with a saved propensity or the one that it asks for."""
    method = next((each for each in get_args(PropensityMethod) if each == config.baseline.propensity), None)
    if method is not None:
        with distributed.single_process():  # every worker by itself, and all find the same
            propensity = fit_propensity(method, dataset, seed=config.scorer.seed, report=report)
    assert config.ranker in BASELINES  # noqa: S101 - the callers know
    fit = partial(
        fit_baseline,
        config.ranker,
        dataset,
        featurizer,
        config=config.baseline,
        scorer=config.scorer,
        svm=config.svm,
        trees=config.trees,
        propensity=propensity,
        checkpoint=checkpoint,
        report=report,
    )
    return _of_first(fit, dataset, featurizer) if config.ranker == "lambdarank-trees" else fit()


def _checkpoint(folder: Path | None, config: RankerConfig | UrankConfig) -> Path | None:
    """Of a scorer, another for other settings; that the folder is of this data and click model, `fit_clicks` checks."""
    if folder is None:
        return None
    return folder / f"scorer-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]}.safetensors"


def evaluate(
    models: Sequence[URank | RankingModel | Policy | str | Path],
    log: Log | Dataset | str | Path | Any,
    *,
    split: str = "test",
    estimator: str = "auto",
    floor: float = FLOOR,
    config: CrossfitConfig | None = None,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> Evaluation:
    """What models would earn, from a log, with intervals, beside the logged order and a random one.

    Args:
        models: fitted models, folders of models, or policies.
        log: what `urank.read` gave, a path, a prepared folder, or a table.
        split: the part to judge by: `test`, which no fit has looked at, or `all` for a log that is new to the models.
        estimator: see `urank.evaluation.estimators`; `auto` is doubly robust with known propensities, else Eq. 3.
        floor: least that a logged click probability counts as.
        config: the evaluation's own click model.
        memory: what it may take; of a log that needs more, a sample of the queries is judged, which is told.
        report: told how far it is.
    """
    splits = _splits(split)
    policies = policies_to_evaluate(models)
    with prepared(log, memory=memory, report=report) as dataset:
        return evaluate_policies(
            policies,
            dataset,
            splits=splits,
            estimator=estimator,
            floor=floor,
            config=config,
            report=report,
        )


def guard_levels(
    model: URank | RankingModel | Policy | str | Path,
    log: Log | Dataset | str | Path | Any,
    *,
    kind: GuardKind = "shift",
    levels: Sequence[float] | None = None,
    method: Method | None = None,
    split: str = "test",
    estimator: str = "auto",
    floor: float = FLOOR,
    config: CrossfitConfig | None = None,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> GuardLevels:
    """What a model would earn when it is kept close to the logged order, level by level.

    Args:
        model: a fitted model, the folder of one, or a policy.
        log: as in `evaluate`.
        kind: `shift`, no item moves more than so many places, or `blend`, ranks are averaged; see `Guard`.
        levels: those to judge besides the full order; shift 1, 2, 3, 5 or blend 0.25, 0.5, 0.75 when left out.
        method: score, match or ctr1; the model's own when left out.
        split, floor, config, memory, report: as in `evaluate`.
        estimator: as in `evaluate`, but for those by propensities, which cannot judge a guard.
    """
    splits = _splits(split)
    policy = policy_to_guard(model, method)
    with prepared(log, memory=memory, report=report) as dataset:
        return evaluate_guard(
            policy,
            dataset,
            kind=kind,
            levels=levels,
            splits=splits,
            estimator=estimator,
            floor=floor,
            config=config,
            report=report,
        )


def policies_to_evaluate(models: Sequence[URank | RankingModel | Policy | str | Path]) -> list[Policy]:
    """Return the policies that `evaluate` compares with the logged order: those of the models, and a random order."""
    return [*named_policies(models, [_ranking_model(model) for model in models]), Random()]


def policy_to_guard(model: URank | RankingModel | Policy | str | Path, method: Method | None = None) -> Policy:
    """Return the policy that `guard_levels` keeps close to the logged order."""
    found = _ranking_model(model)
    if isinstance(found, RankingModel):
        chosen = found if method is None else replace(found, method=method)
        return ModelPolicy(chosen.method, chosen, chosen.method)
    return found


def policies_of(model: RankingModel, *, methods: Sequence[Method] | None = None, prefix: str = "") -> list[Policy]:
    """A policy for each way in which a model can rank."""
    return [ModelPolicy(f"{prefix}{method}", model, method) for method in methods or model.methods]


def named_policies(sources: Sequence[Any], models: Sequence[RankingModel | Policy]) -> list[Policy]:
    """The policies of models, with names that tell where several came from."""
    policies: list[Policy] = []
    for name, model in zip(_names(sources), models, strict=True):
        if isinstance(model, RankingModel):
            policies += policies_of(model, prefix=f"{name} " if name else "")
        else:
            policies.append(model)
    return policies


@contextmanager
def prepared(
    log: Log | Dataset | str | Path | Any, *, memory: Memory = DEFAULT_MEMORY, report: Report = silent
) -> Iterator[Dataset]:
    """A log as prepared data, which is removed afterwards unless it was prepared before."""
    if isinstance(log, Dataset):
        yield log
    elif is_path(log) and is_prepared(log):
        yield Dataset(log, memory=memory)
    else:
        with tempfile.TemporaryDirectory(prefix="urank-") as name:
            folder, source = Path(name) / "prepared", log if isinstance(log, Log) else read(log)
            prepare(source, folder, bucket_bytes=memory.bucket_bytes, report=report)
            yield Dataset(folder, memory=memory)


def _splits(split: str) -> Sequence[str]:
    if split not in (*SPLITS, "all"):
        raise ConfigError(f"split must be {', '.join(SPLITS)} or all; got '{split}'")
    return SPLITS if split == "all" else (split,)


def _ranking_model(model: Any) -> RankingModel | Policy:
    if isinstance(model, URank):
        return model._fitted()
    return load_model(model) if is_path(model) else model


def _names(models: Sequence[Any]) -> list[str]:
    """What tells several models apart; one alone needs no name."""
    if len(models) == 1:
        return [""]
    folders = [to_path(model) if is_path(model) else None for model in models]
    short = [f"model {n}" if folder is None else folder.name for n, folder in enumerate(folders, 1)]
    whole = [f"model {n}" if folder is None else str(folder) for n, folder in enumerate(folders, 1)]
    return short if len(set(short)) == len(short) else whole
