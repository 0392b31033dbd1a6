"""The pipeline: prepare, fit, evaluate, report and save.

The only place that runs these steps in sequence. The command line, `urank.URank` and the jobs on Ray call it:

- `fit_model` trains a click model and a scorer, and chooses how to rank;
- `fit_and_save` also measures the click model's quality and writes the artifact;
- `train` does that for any log, resuming an interrupted run;
- `run` adds inspection, evaluation and one report;
- `evaluate` and `guard_levels` estimate what models would earn.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast, get_args

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from urank import distributed
from urank.clicks.fitting import ClickConfig, Fit, fit_clicks, predictions
from urank.clicks.item_curves import click_curves_of
from urank.config import to_jsonable, validate
from urank.errors import ConfigError, TooFewError, UrankError
from urank.evaluation.click_quality import Quality, Reliability, quality, reliability
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.evaluation.guard_sweep import GuardLevels, evaluate_guard
from urank.evaluation.policy_evaluation import Evaluation, evaluate_policies
from urank.learning.features import Featurizer
from urank.learning.lightgbm_data import sample_sentence
from urank.learning.training import History
from urank.log.dataset import Dataset, is_prepared
from urank.log.inspection import Inspection, inspect
from urank.log.prepare import prepare
from urank.log.reader import Log, read
from urank.log.splits import SPLITS
from urank.memory import DEFAULT_MEMORY, Memory
from urank.model_io import load_model, save_model
from urank.progress import Report, silent
from urank.propensity.examination import Propensity
from urank.propensity.methods import PropensityMethod, fit_propensity, load_propensity
from urank.ranking.baselines import BASELINES, Baseline, fit_baseline
from urank.ranking.guard import Guard, GuardKind
from urank.ranking.matching import Method
from urank.ranking.policies import ModelPolicy, Policy, Random
from urank.ranking.ranking_model import RankingModel, Scorer, UrankConfig
from urank.ranking.urank_network import RankerConfig, fit_urank
from urank.ranking.urank_trees import TreesScorer, fit_trees
from urank.ranking.utility import FLOOR
from urank.report.click_report import FitReport
from urank.report.evaluation_report import ReferenceValues
from urank.report.run_report import write_run
from urank.storage import check_target, is_path, new_folder, remove_folder, to_path

TRAIN_ROWS, HELD_OUT_ROWS = 500_000, 2_000_000
"""Rows of train, and of valid and test each, on which a click model is measured; more change no digit that is shown."""

Review = Callable[[FitReport, "ModelFit", Dataset], FitReport]
"""Adds to the measured quality of a click model."""

Compare = Callable[[Evaluation, Sequence[Policy], Dataset, int], tuple[dict[str, Any], ReferenceValues]]
"""Sets known utilities beside an evaluation, given its policies, data and seed; returns the JSON document and the
values for the report."""


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A trained model with its training records.

    Attributes:
        model: The model.
        clicks: The fit of its click model.
        history: Rounds of the scorer's training; None without a scorer.
        choice: The evaluation on the validation split by which `auto` chose the method; None if there was no choice.
        why: How the method was chosen, in words.
    """

    model: RankingModel
    clicks: Fit
    history: History | None
    choice: Evaluation | None
    why: str

    @property
    def rounds(self) -> dict[str, list[dict[str, float]]]:
        """Rounds of every training, by name, as in `History`."""
        own = {} if self.history is None else {"scorer": self.history.rounds}
        return {name: history.rounds for name, history in self.clicks.histories.items()} | own


@dataclass(frozen=True, eq=False)
class Training:
    """Summary of a training: the model's name and method, and the quality of its click model.

    Attributes:
        quality: Quality of the click model on each split.
        name: Name of the model.
        method: How it ranks.
        why: How the method was chosen, in words.
        rounds: Rounds of every training, by name.
        warnings: What to keep in mind, such as trees that learned from a sample.
    """

    quality: FitReport
    name: str
    method: str
    why: str
    rounds: dict[str, list[dict[str, float]]]
    warnings: list[str]

    @property
    def sentence(self) -> str:
        """What ranks, and why."""
        return f"{self.name} ranks by {self.method}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        about = {"model": self.name, "method": self.method, "why": self.why, "rounds": to_jsonable(self.rounds)}
        return {**self.quality.to_dict(), **about, "warnings": self.warnings}


@dataclass(frozen=True, eq=False)
class Run:
    """Results of the whole job.

    Attributes:
        inspection: Inspection of the log.
        training: Summary of the training.
        evaluation: Estimates for every method of the model.
        document: The evaluation and the chosen method as a JSON-serialisable dict.
        reference: Known utilities; None without a comparison.
    """

    inspection: Inspection
    training: Training
    evaluation: Evaluation
    document: dict[str, Any]
    reference: ReferenceValues | None


class URank:
    """Learn from a click log the order that earns the most.

        log = urank.read("log.parquet")
        model = urank.URank().fit(log)
        model.rank(candidates)
        print(urank.evaluate([model], log))

    Args:
        ranker: What scores items: `network`, `trees`, a ranker of another paper (see `UrankConfig`), or `none`.
        method: How items are ranked: `auto`, `score`, `match` or `ctr1`.
        clicks, scorer, trees, baseline: Any setting of `ClickConfig`, `RankerConfig`, `TreesConfig`, `BaselineConfig`.
        seed: Seed of all random numbers.

    Attributes:
        model_: The fitted `RankingModel`.
        fit_: Its `ModelFit`, with the training records.
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
        """Learn from a log: a `Log` of `urank.read`, a path, a prepared folder, or a table."""
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
        """Score each candidate."""
        return self._fitted().score(candidates, value)

    def log_ctr(self, candidates: pl.DataFrame) -> NDArray[np.float32]:
        """Return log P(click | candidate, position), `[rows, K]`."""
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
    """Train a click model and a scorer on its table, and choose how to rank.

    Args:
        dataset: Prepared log. Train is learned from, valid stops and chooses, test is not used.
        config: Settings.
        checkpoints: Folder from which an interrupted run resumes.
        report: Progress callback.
    """
    saved = _saved_propensity(config)  # fail fast: before training
    clicks = fit_clicks(dataset, config.clicks, checkpoints=checkpoints, report=report)
    scorer: Scorer | None = None
    history: History | None = None
    if config.ranker == "network":
        checkpoint = _checkpoint(checkpoints, config.scorer)
        scorer, history = fit_urank(dataset, clicks.model, config.scorer, checkpoint=checkpoint, report=report)
    elif config.ranker == "trees":
        scorer, history = _grow_on_first(
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
    """Choose between score and match by a cross-fitted estimate on the validation split."""
    try:
        choice = evaluate_policies(
            policies_of(model, methods=("score", "match")),
            dataset,
            splits=("valid",),
            config=CrossfitConfig(seed=config.clicks.seed),
            report=lambda step, *rest: report(f"choosing the method, {step}", *rest),
        )
    except TooFewError:  # too few queries to cross-fit: keep the paper's method
        return ModelFit(model, clicks, history, None, "valid has too few queries to tell which method is better")
    difference = choice.compare("match", "score")
    best: Method = distributed.broadcast(lambda: "match" if difference.mean > 0 else "score")
    better, worse = (best, "score") if best == "match" else (best, "match")
    why = (
        f"{better} earns {abs(difference.mean):.4f} more {choice.measure} a list than {worse} on the validation split "
        f"by the cross-fitted estimate (p = {difference.p_value:.2g})"
    )
    return ModelFit(replace(model, method=best), clicks, history, choice, why)


def _grow_on_first(
    grow: Callable[[], tuple[Any, History]], dataset: Dataset, featurizer: Featurizer
) -> tuple[TreesScorer, History]:
    """Grow trees in the first process and broadcast them."""

    def grown() -> dict[str, Any]:
        trees, history = grow()
        return {"text": trees.to_text(), "history": asdict(history)}

    received = distributed.broadcast(grown)
    return TreesScorer.from_text(received["text"], featurizer, dataset.has("value")), History(**received["history"])


def _saved_propensity(config: UrankConfig) -> Propensity | None:
    """Load the propensity file that the configuration names; None if it names a method."""
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
    """Fit a ranker of another paper with a saved propensity, or with one estimated by the method it names."""
    method = next((each for each in get_args(PropensityMethod) if each == config.baseline.propensity), None)
    if method is not None:
        with distributed.single_process():  # every worker alone, with the same result
            propensity = fit_propensity(method, dataset, seed=config.scorer.seed, report=report)
    fit = partial(
        fit_baseline,
        cast("Baseline", config.ranker),
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
    return _grow_on_first(fit, dataset, featurizer) if config.ranker == "lambdarank-trees" else fit()


def _checkpoint(folder: Path | None, config: RankerConfig | UrankConfig) -> Path | None:
    """Name the scorer's checkpoint by its settings; `fit_clicks` checks that the folder fits the data."""
    if folder is None:
        return None
    return folder / f"scorer-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]}.safetensors"


def click_model_quality(fit: Fit, dataset: Dataset, config: ClickConfig) -> FitReport:
    """Measure a click model on each split, beside the position-based model and the constant click rate.

    Args:
        fit: Result of `fit_clicks`.
        dataset: The log it was trained on; its test split is used here for the first time.
        config: Settings it was trained with.
    """
    name = fit.model.name
    counts = dataset.description["counts"]["train"]
    log_rate = np.log(counts["clicks"] / counts.get("shown", counts["rows"]))
    qualities: dict[str, dict[str, Quality]] = {}
    reliable: dict[str, Reliability] = {}
    for split in (split for split in SPLITS if dataset.rows(split)):
        most = TRAIN_ROWS if split == "train" else HELD_OUT_ROWS
        predicted = {name: predictions(fit.model, dataset, split, most_rows=most)}
        _, position, click = predicted[name]
        if name != "pbm" and fit.reference is not None:
            predicted["pbm"] = predictions(fit.reference, dataset, split, most_rows=most)
        reliable = {each: reliability(np.exp(found[0]), click) for each, found in predicted.items()}
        predicted["constant"] = (np.full(len(click), log_rate, dtype=np.float32), position, click)
        qualities[split] = {each: quality(*found, positions=dataset.positions) for each, found in predicted.items()}
    kept = f"{fit.model.members[0].family}-{config.seed}"
    rounds = fit.histories[kept].rounds if kept in fit.histories else []
    return FitReport(
        name=name,
        settings={
            "tried": ", ".join(f"{each} {loss:.5f}" for each, loss in fit.valid_loss.items()),
            "backbone": config.backbone,
            "calibration": config.calibration,
            "seed": str(config.seed),
        },
        qualities=qualities,
        history=[{"round": r["round"], "train_loss": r["train"], "valid_loss": r["valid"]} for r in rounds],
        reliability=reliable,
    )


def fit_and_save(
    dataset: Dataset,
    config: UrankConfig,
    output: Path,
    *,
    checkpoints: Path | None = None,
    onnx: bool = True,
    overwrite: bool = False,
    review: Review | None = None,
    report: Report = silent,
) -> tuple[ModelFit, Training]:
    """Fit a model, measure its click model, and write the artifact.

    Args:
        dataset: Prepared log.
        config: Settings.
        output: Folder of the model.
        checkpoints: Folder from which an interrupted run resumes.
        onnx: Also write ONNX graphs.
        overwrite: Replace an existing model.
        review: Adds to the measured quality, for example by a comparison with a simulation's truth.
        report: Progress callback.
    """
    fit = fit_model(dataset, config, checkpoints=checkpoints, report=report)
    first = distributed.rank() == 0
    with distributed.single_process():
        measured = click_model_quality(fit.clicks, dataset, config.clicks)
        if review is not None:
            measured = review(measured, fit, dataset)
        if first:
            report("writing the model", 0, None)
            facts = {"quality": measured.to_dict(), "why": fit.why}
            save_model(fit.model, config, output, overwrite=overwrite, onnx=onnx, facts=facts)
    warnings = _sampled_trees(dataset, config)
    return fit, Training(measured, fit.model.name, fit.model.method, fit.why, fit.rounds, warnings)


def _sampled_trees(dataset: Dataset, config: UrankConfig) -> list[str]:
    """Warn of trees that learned from a sample because of the memory budget."""
    features, row_bytes = len(dataset.features), []
    if "gbdt" in config.clicks.families:
        row_bytes.append(config.clicks.trees.row_bytes(features))
    if config.ranker in ("trees", "lambdarank-trees"):
        row_bytes.append(config.trees.row_bytes(features, dataset.positions))
    found = (sample_sentence(dataset, each) for each in row_bytes)
    return [f"{sentence} (allow more with --memory)" for sentence in found if sentence is not None]


def train(
    log: Log | Dataset | str | Path,
    config: UrankConfig,
    output: Path,
    *,
    checkpoints: Path | None = None,
    onnx: bool = True,
    overwrite: bool = False,
    memory: Memory = DEFAULT_MEMORY,
    fit: Callable[..., tuple[Any, Training]] = fit_and_save,
    report: Report = silent,
    **arguments: Any,
) -> Training:
    """Train a model on any log. A run that was killed resumes when the same call is made again.

    Args:
        log: A raw log, which is prepared beside the output first, or a prepared one.
        config: Settings.
        output: Folder of the model.
        checkpoints: Where the state of the training is kept until it ends; beside the output by default.
        onnx: Also write ONNX graphs.
        overwrite: Replace an existing model.
        memory: Memory budget.
        fit: Does the work, in this process or elsewhere.
        report: Progress callback.
        arguments: Passed on to `fit`.
    """
    check_target(output, marker="manifest.json", overwrite=overwrite)
    limit_threads()
    working = output.absolute().with_name(f".{output.name}.training")
    # Within a folder of the caller's, use a subfolder: it is emptied at the start and removed at the end.
    state = working / "checkpoints" if checkpoints is None else checkpoints / f"{output.name}.training"
    try:
        if isinstance(log, Log):
            prepare(log, working / "prepared", overwrite=True, bucket_bytes=memory.bucket_bytes, report=report)
            log = working / "prepared"
        dataset = log if isinstance(log, Dataset) else Dataset(log, memory=memory)
        options = {"checkpoints": state, "onnx": onnx, "overwrite": overwrite, "report": report}
        _, training = fit(dataset, config, output, **options, **arguments)
    except UrankError:
        shutil.rmtree(working, ignore_errors=True)  # a refused run is not resumed; a killed one is
        raise
    remove_folder(state)
    shutil.rmtree(working, ignore_errors=True)
    return training


def run(
    log: Log,
    config: UrankConfig,
    output: Path,
    *,
    valid: float = 0.1,
    test: float = 0.1,
    overwrite: bool = False,
    memory: Memory = DEFAULT_MEMORY,
    review: Review | None = None,
    compare: Compare | None = None,
    report: Report = silent,
) -> Run:
    """Inspect, prepare, train, evaluate, save, and write one report.

    The output folder appears when everything is done, with `prepared/`, `model/`, `report.html` and `evaluation.json`.

    Args:
        log: A raw log.
        config: Settings; the seed of the click model also seeds the evaluation.
        output: Folder to write.
        valid, test: Shares of the queries.
        overwrite: Replace the folder if it exists.
        memory: Memory budget.
        review: As in `fit_and_save`.
        compare: Sets known utilities beside the estimates.
        report: Progress callback.
    """
    limit_threads()
    with new_folder(output, marker="report.html", overwrite=overwrite) as folder:
        inspection = inspect(log, report=report)
        prepare(log, folder / "prepared", valid=valid, test=test, bucket_bytes=memory.bucket_bytes, report=report)
        dataset = Dataset(folder / "prepared", memory=memory)
        fit, training = fit_and_save(dataset, config, folder / "model", review=review, report=report)
        seed = config.clicks.seed
        evaluation = evaluate([fit.model], dataset, config=CrossfitConfig(seed=seed), report=report)
        document, reference = evaluation.to_dict(), None
        if compare is not None:
            document, reference = compare(evaluation, policies_to_evaluate([fit.model]), dataset, seed)
        document = {"model": training.name, "method": training.method, "why": training.why, **document}
        report("writing the report", 0, None)
        by = "category" if "category" in log.schema.roles else "item_id"
        curves = click_curves_of(fit.clicks.model, log, by=by) if by in log.schema.roles else None
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / "evaluation.json").write_text(f"{text}\n", encoding="utf-8")
        write_run(
            folder / "report.html",
            inspection=inspection,
            fit=training.quality,
            evaluation=evaluation,
            reference=reference,
            chosen=training.method,
            why=training.why,
            curves=curves,
            by=by,
        )
    return Run(inspection, training, evaluation, document, reference)


def limit_threads() -> None:
    """Give torch half of the cores: the rest reads ahead, and small networks gain nothing from more."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))


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
            policies, dataset, splits=splits, estimator=estimator, floor=floor, config=config, report=report
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
