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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, Unpack, cast, get_args, runtime_checkable

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from urank import distributed
from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import ClickConfig
from urank.clicks.conversion import fit_conversions
from urank.clicks.fitting import Fit, fit_clicks, predictions
from urank.clicks.item_curves import click_curves_of
from urank.config import to_jsonable
from urank.errors import ConfigError, DataError, TooFewError, UrankError
from urank.evaluation.click_quality import Quality, Reliability, quality, reliability
from urank.evaluation.cross_fitting import CrossfitConfig, fit_judges
from urank.evaluation.guard_sweep import GuardLevels, evaluate_guard
from urank.evaluation.intervals import Comparison
from urank.evaluation.policy_evaluation import Evaluation, EvaluationOptions, check_marks, evaluate_policies
from urank.learning.features import Featurizer
from urank.learning.lightgbm_data import sample_sentence
from urank.learning.training import History
from urank.log.dataset import Dataset, conversions_as_clicks, is_prepared, sample_to_fit
from urank.log.inspection import FEW_LISTS, Inspection, inspect
from urank.log.prepare import PREPARE_STEPS, prepare
from urank.log.reader import Log, read
from urank.log.splits import SPLITS
from urank.memory import DEFAULT_MEMORY, Memory
from urank.model_io import load_model, save_model
from urank.progress import Report, silent
from urank.propensity.examination import Propensity
from urank.propensity.methods import PropensityMethod, fit_propensity, load_propensity
from urank.ranking.baselines import fit_baseline
from urank.ranking.guard import GuardKind
from urank.ranking.matching import Method
from urank.ranking.policies import ModelPolicy, Policy, Random
from urank.ranking.ranking_model import RankingModel, Scorer
from urank.ranking.ranking_settings import BASELINES, TREE_BASELINES, Baseline, Goal, UrankConfig
from urank.ranking.urank_network import fit_urank
from urank.ranking.urank_trees import TreesScorer, fit_trees
from urank.ranking.utility import FLOOR
from urank.report.click_report import FitReport
from urank.report.evaluation_report import ReferenceValues, after_a_gain, evaluation_headline
from urank.report.run_report import write_run
from urank.storage import check_target, is_path, new_folder, remove_folder, to_path

TRAIN_ROWS, HELD_OUT_ROWS = 100_000, 500_000
"""Rows of train, and of valid and test each, on which a click model is measured; more change no digit that is shown."""

TRAIN_STEPS: Mapping[str, float] = {
    "train": 8,
    "growing trees": 4,
    "growing trees again": 3,
    "train ranker": 4,
    "judge 1": 2,
    "judge 2": 2,
    "choosing the method, ranking": 1,
    "choosing the method, refitting": 2,
    "choosing the method, evaluating": 1,
    "writing the model": 2,
}
EVALUATE_STEPS: Mapping[str, float] = {"ranking the held-out lists": 1, "refitting the judges": 2, "evaluating": 1}
RUN_STEPS: Mapping[str, float] = {
    "inspecting": 2,
    **PREPARE_STEPS,
    **TRAIN_STEPS,
    **EVALUATE_STEPS,
    "writing the report": 8,
}
"""The steps that `train`, `evaluate` and `run` report, with their typical times, for an overall progress."""

LEAST_QUERIES, CHOICE_ROWS = 20, 20_000
"""Validation queries that a comparison of methods needs, and impressions it uses, at most."""

AnyLog: TypeAlias = Log | Dataset | str | Path | Any


@runtime_checkable
class Estimator(Protocol):
    """Anything with a fitted model, such as `urank.URank`."""

    def fitted_model(self) -> RankingModel: ...


AnyModel: TypeAlias = Estimator | RankingModel | Policy | str | Path

Check = Callable[[Dataset], None]
"""Refuses a prepared log before the training."""

Review = Callable[[FitReport, ClickModel, Dataset], FitReport]
"""Adds to the measured quality of a click model."""

Compare = Callable[[Evaluation, Sequence[Policy], Dataset, int], tuple[dict[str, Any], ReferenceValues]]
"""Sets known utilities beside an evaluation, given its policies, data and seed; returns the JSON document and the
values for the report."""


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A trained model with its training records."""

    model: RankingModel
    clicks: Fit
    history: History | None  # rounds of the scorer's training; None without a scorer
    choice: Evaluation | None  # on the validation split, by which `auto` chose the method; None without a choice
    why: str  # how the method was chosen, in words

    @property
    def rounds(self) -> dict[str, list[dict[str, float]]]:
        """Rounds of every training, by name, as in `History`."""
        own = {} if self.history is None else {"scorer": self.history.rounds}
        return {name: history.rounds for name, history in self.clicks.histories.items()} | own


@dataclass(frozen=True, eq=False)
class Training:
    """Summary of a training: the quality of the click model, the model's name and method, and how it was chosen.

    Attributes:
        left_out: Columns that are not features because they are outcomes of the click.
        headline: What the ranking would change, estimated on the validation split; None if it was not.
    """

    quality: FitReport
    name: str
    method: str
    why: str
    rounds: dict[str, list[dict[str, float]]]
    warnings: list[str]
    left_out: list[str]
    headline: str | None = None

    @property
    def sentence(self) -> str:
        """The ranking method and the reason for it."""
        return f"{self.name} ranks by {self.method}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        about: dict[str, Any] = {"model": self.name, "method": self.method, "why": self.why, "headline": self.headline}
        about["rounds"] = to_jsonable(self.rounds)
        left_out = {"left_out": self.left_out} if self.left_out else {}
        return {**self.quality.to_dict(), **about, "warnings": self.warnings, **left_out}


@dataclass(frozen=True, eq=False)
class Run:
    """Results of the whole job."""

    inspection: Inspection
    training: Training
    evaluation: Evaluation  # of every method of the model
    document: dict[str, Any]  # the evaluation and the chosen method, JSON-serialisable
    reference: ReferenceValues | None  # known utilities; None without a comparison
    next_step: str  # what to do about a clear gain


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
    asked = config.baseline.examination
    saved = None if asked in get_args(PropensityMethod) else load_propensity(asked)  # fail fast: before training
    outcomes = with_goal(dataset, config.goal)
    clicks = fit_clicks(dataset, config.clicks, checkpoints=checkpoints, report=report)
    table, conversion = clicks.model, None
    if config.goal == "conversions":
        rate, conversion = fit_conversions(dataset, table.featurizer)
        table = replace(table, conversion=rate)
    scorer: Scorer | None = None
    history: History | None = None
    checkpoint = _checkpoint(checkpoints, config)
    if config.ranker == "network":
        scorer, history = fit_urank(outcomes, table, config.scorer, checkpoint=checkpoint, report=report)
    elif config.ranker == "trees":
        grow = partial(fit_trees, outcomes, table, config.scorer, config.trees, report=report)
        scorer, history = _grow_on_first(grow, table.featurizer)
    elif config.ranker != "none":
        scorer, history = _fit_baseline(dataset, outcomes, table.featurizer, config, saved, checkpoint, report)
    judges: tuple[ClickModel, ...] = ()
    if config.judges:
        judging = CrossfitConfig(seed=config.clicks.seed)
        with suppress(TooFewError):  # then evaluations train their own
            judges = tuple(fit_judges(outcomes, ("train",), judging, featurizer=table.featurizer, report=report))
    baseline = config.ranker in BASELINES
    method: Method = config.method if config.method != "auto" else "score" if baseline else "match"
    fit = ModelFit(RankingModel(table, scorer, method, judges, dataset.columns), clicks, history, None, "asked for")
    if config.method == "auto" and baseline:
        fit = replace(fit, why=f"{config.ranker} ranks by its scores")
    elif config.method == "auto":
        fit = _with_best_method(fit, outcomes, config, report)
    return fit if conversion is None else replace(fit, why=f"{fit.why}; {conversion.sentence}")


def with_goal(dataset: Dataset, goal: Goal) -> Dataset:
    """Return a log whose clicks are what a goal counts; a ConfigError if it has no conversions."""
    if goal not in get_args(Goal):
        raise ConfigError(f"goal must be {' or '.join(get_args(Goal))}; got '{goal}'")
    _check_goal(dataset.description["roles"], goal, dataset.description["source"])
    return conversions_as_clicks(dataset) if goal == "conversions" else dataset


def _check_goal(roles: Collection[str], goal: Goal, name: str) -> None:
    """Refuse a log without the role that a goal needs."""
    if goal == "conversions" and "conversion" not in roles:
        raise ConfigError(
            f"--goal conversions needs the role conversion, which {name} does not have; name its column: "
            "-c conversion=COLUMN"
        )


def best_method(choice: Evaluation, methods: Sequence[Method]) -> Method:
    """Choose a method by an evaluation: match, or the best of those that earn significantly more.

    Methods that earn significantly less than the logged order are only considered if all do.
    """

    def gain(method: Method) -> Comparison:
        difference = choice[method].difference
        assert difference is not None  # noqa: S101 - only the logged order has none
        return difference

    sound = [method for method in methods if gain(method).high >= 0] or list(methods)
    better = [method for method in sound if method != "match" and choice.compare(method, "match").low > 0]
    if "match" in sound and not better:
        return "match"
    return max(better or sound, key=lambda method: gain(method).mean)


def _with_best_method(fit: ModelFit, dataset: Dataset, config: UrankConfig, report: Report) -> ModelFit:
    """Keep the matching unless another method earns significantly more on the validation split.

    The judges have not seen its queries. The matching is the default because the click model is shrunk to what the log
    supports: without item-specific attention it is the order by relevance.
    """
    supported = f"the validation split supports that {fit.clicks.evidence.sentence}" if fit.clicks.evidence else ""
    few = replace(fit, why=supported or "there are too few queries to compare methods")
    if not fit.model.judges:
        return few
    choice = evaluate_policies(
        policies_of(fit.model),
        sample_to_fit(dataset, ("valid",), CHOICE_ROWS),
        splits=("valid",),
        config=CrossfitConfig(seed=config.clicks.seed),
        judges=fit.model.judges,
        report=lambda step, *rest: report(f"choosing the method, {step}", *rest),
    )
    if choice.queries < LEAST_QUERIES:
        return few
    best: Method = distributed.broadcast(lambda: best_method(choice, fit.model.methods))
    gain = choice[best].difference
    assert gain is not None  # noqa: S101 - only the logged order has none
    if best == "match":
        reason = "no other method earns significantly more on the validation split"
    else:
        more = choice.compare(best, "match").mean
        reason = f"it earns {more:.4f} more {choice.measure} a list than match on the validation split"
    if gain.high < 0:
        reason += "; it earns significantly less than the logged order, which should be kept"
    elif gain.low <= 0:
        reason += "; its gain over the logged order cannot be told from chance"
    why = f"{reason}; {supported}" if supported else reason
    return replace(fit, model=replace(fit.model, method=best), choice=choice, why=why)


def _grow_on_first(grow: Callable[[], tuple[Any, History]], featurizer: Featurizer) -> tuple[TreesScorer, History]:
    """Grow trees in the first process and broadcast them."""

    def grown() -> dict[str, Any]:
        trees, history = grow()
        return {"text": trees.text, "takes_value": trees.takes_value, "history": asdict(history)}

    received = distributed.broadcast(grown)
    return TreesScorer.from_text(received["text"], featurizer, received["takes_value"]), History(**received["history"])


def _fit_baseline(
    dataset: Dataset,
    outcomes: Dataset,
    featurizer: Featurizer,
    config: UrankConfig,
    propensity: Propensity | None,
    checkpoint: Path | None,
    report: Report,
) -> tuple[Scorer, History]:
    """Fit a ranker of another paper with a saved propensity, or with one estimated by the configured method.

    Examination is estimated from clicks, whatever the outcomes that the ranker learns from.
    """
    if (method := {each: each for each in get_args(PropensityMethod)}.get(config.baseline.examination)) is not None:
        with distributed.single_process():  # every worker alone, with the same result
            propensity = fit_propensity(method, dataset, seed=config.scorer.seed, report=report)
    fit = partial(
        fit_baseline,
        cast("Baseline", config.ranker),
        outcomes,
        featurizer,
        config=config.baseline,
        scorer=config.scorer,
        svm=config.svm,
        trees=config.trees,
        propensity=propensity,
        checkpoint=checkpoint,
        report=report,
    )
    return _grow_on_first(fit, featurizer) if config.ranker in TREE_BASELINES else fit()


def _checkpoint(folder: Path | None, config: UrankConfig) -> Path | None:
    """Name the scorer's checkpoint by the settings; `fit_clicks` checks that the folder fits the data."""
    if folder is None:
        return None
    return folder / f"scorer-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]}.safetensors"


def click_model_quality(fit: Fit, dataset: Dataset, config: ClickConfig) -> FitReport:
    """Measure a click model on each split, beside the position-based model and the constant click rate.

    The test split of the log it was trained on is used here for the first time.
    """
    name = fit.model.name
    counts = dataset.description["counts"]["train"]
    log_rate = np.log(counts["clicks"] / counts.get("shown", counts["rows"]))
    qualities: dict[str, dict[str, Quality]] = {}
    reliable: dict[str, Reliability] = {}
    for split in (split for split in SPLITS if dataset.rows(split)):
        most = TRAIN_ROWS if split == "train" else HELD_OUT_ROWS
        models = {name: fit.model} | ({"pbm": fit.reference} if name != "pbm" and fit.reference is not None else {})
        predicted = predictions(models, dataset, split, most_rows=most)
        _, position, click = predicted[name]
        reliable = {each: reliability(np.exp(found[0]), click) for each, found in predicted.items()}
        predicted["constant"] = (np.full(len(click), log_rate, dtype=np.float32), position, click)
        qualities[split] = {each: quality(*found, positions=dataset.positions) for each, found in predicted.items()}
    kept = f"{fit.model.members[0].family}-{config.seed}"
    rounds = fit.histories[kept].rounds if kept in fit.histories else []
    history = [{"round": r["round"], "train_loss": r["train"], "valid_loss": r["valid"]} for r in rounds]
    tried = ", ".join(f"{each} {loss:.5f}" for each, loss in fit.valid_loss.items())
    settings = {
        "tried": tried,
        "backbone": config.backbone,
        "calibration": fit.model.calibration.kind,
        "seed": str(config.seed),
    }
    return FitReport(name, settings, qualities, history, reliable)


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
        output: Folder of the model.
        onnx: Also write ONNX graphs.
        overwrite: Replace an existing model.
        review: Adds to the measured quality, for example by a comparison with a simulation's truth.
        dataset, config, checkpoints, report: As in `fit_model`.
    """
    fit = fit_model(dataset, config, checkpoints=checkpoints, report=report)
    first = distributed.rank() == 0
    with distributed.single_process():
        measured = click_model_quality(fit.clicks, dataset, config.clicks)
        if review is not None:
            measured = review(measured, fit.clicks.model, dataset)
        if first:
            report("writing the model", 0, None)
            facts = {"quality": measured.to_dict(), "why": fit.why}
            save_model(fit.model, config, output, overwrite=overwrite, onnx=onnx, facts=facts)
    warnings = [*_few_lists(dataset), *_sampled_trees(dataset, config, fit.model.clicks.featurizer.width)]
    names = fit.model.name, fit.model.method, fit.why
    headline = None if fit.choice is None else evaluation_headline(fit.choice, fit.model.method)
    return fit, Training(measured, *names, fit.rounds, warnings, dataset.left_out, headline)


def _few_lists(dataset: Dataset) -> list[str]:
    """Warn of a log that is too small to learn from."""
    lists = sum(group.lists for group in dataset.groups("train"))
    if lists >= FEW_LISTS:
        return []
    named = "1 training list" if lists == 1 else f"{lists} training lists"
    return [
        f"The model learned from only {named}, so that its order may be no better than chance; collect hundreds of "
        "lists at least, better thousands"
    ]


def _sampled_trees(dataset: Dataset, config: UrankConfig, features: int) -> list[str]:
    """Warn of trees, of this many features, that learned from a sample because of the memory budget."""
    row_bytes = []
    if "gbdt" in config.clicks.families:
        row_bytes.append(config.clicks.trees.row_bytes(features))
    if config.ranker in ("trees", *TREE_BASELINES):
        row_bytes.append(config.trees.row_bytes(features, dataset.positions))
    found = (sample_sentence(dataset, each) for each in row_bytes)
    return [f"{sentence} (allow more with --memory)" for sentence in found if sentence is not None]


def train(
    log: Log | Dataset | str | Path,
    config: UrankConfig,
    output: Path,
    *,
    keep: Collection[str] = (),
    checkpoints: Path | None = None,
    onnx: bool = True,
    overwrite: bool = False,
    memory: Memory = DEFAULT_MEMORY,
    fit: Callable[..., tuple[Any, Training]] = fit_and_save,
    check: Check | None = None,
    report: Report = silent,
    **arguments: Any,
) -> Training:
    """Train a model on any log. A run that was killed resumes when the same call is made again.

    Args:
        log: A raw log, which is prepared beside the output first, or a prepared one.
        keep: Of a raw log, features to keep even if they look like outcomes of the click.
        checkpoints: Where the state of the training is kept until it ends; beside the output by default.
        fit: Does the work, in this process or elsewhere.
        check: Refuses the prepared log before the training.
        memory: Memory budget.
        config, output, onnx, overwrite, report: As in `fit_and_save`.
        arguments: Passed on to `fit`.
    """
    check_target(output, marker="manifest.json", overwrite=overwrite)
    with limited_threads(), _working_folder(output) as working:
        # Within a folder of the caller's, use a subfolder: it is emptied at the start and removed at the end.
        state = working / "checkpoints" if checkpoints is None else checkpoints / f"{output.name}.training"
        if isinstance(log, Log):
            _check_goal(log.schema.roles, config.goal, log.name)
            options: dict[str, Any] = {"keep": keep, "bucket_bytes": memory.bucket_bytes, "report": report}
            prepare(log, working / "prepared", overwrite=True, **options)
            log = working / "prepared"
        dataset = log if isinstance(log, Dataset) else Dataset(log, memory=memory)
        if check is not None:
            check(dataset)
        options = {"checkpoints": state, "onnx": onnx, "overwrite": overwrite, "report": report}
        _, training = fit(dataset, config, output, **options, **arguments)
        remove_folder(state)
    return training


@contextmanager
def limited_threads() -> Iterator[None]:
    """Limit torch and BLAS to half of the cores: the rest reads ahead, and small matrices gain nothing from more.

    On a busy machine a thread for each core can take many times as long, because the threads wait for each other. On
    exit the caller has its threads back.
    """
    before = torch.get_num_threads()
    threads = min(before, max(1, (os.cpu_count() or 1) // 2))
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _working_folder(output: Path) -> Iterator[Path]:
    """Name a folder beside the output, from which an interrupted run resumes; removed when a run ends or is refused."""
    working = output.absolute().with_name(f".{output.name}.training")
    try:
        yield working
    except UrankError:
        shutil.rmtree(working, ignore_errors=True)
        raise
    shutil.rmtree(working, ignore_errors=True)


def run(
    log: Log,
    config: UrankConfig,
    output: Path,
    *,
    preparation: Mapping[str, Any] | None = None,
    randomised: Collection[str] = (),
    force: bool = False,
    overwrite: bool = False,
    memory: Memory = DEFAULT_MEMORY,
    check: Check | None = None,
    review: Review | None = None,
    compare: Compare | None = None,
    report: Report = silent,
) -> Run:
    """Inspect, prepare, train, evaluate, save, and write one report.

    The output folder appears when everything is done, with `prepared/`, `model/`, `report.html` and `evaluation.json`.
    The training of a run that was killed resumes when the same call is made again.

    Args:
        log: A raw log.
        config: Settings; the seed of the click model also seeds the evaluation.
        output: Folder to write.
        preparation: Arguments of `prepare`: `split_by`, `valid`, `test`, `positions` and `keep`.
        randomised: As in `inspect` and `evaluate`.
        force: Go on even if the log is not learnable.
        overwrite: Replace the folder if it exists.
        compare: Sets known utilities beside the estimates.
        memory, check, review, report: As in `train` and `fit_and_save`.
    """
    _check_goal(log.schema.roles, config.goal, log.name)
    made = new_folder(output, marker="report.html", overwrite=overwrite)
    with limited_threads(), made as folder, _working_folder(output) as working:
        inspection = inspect(log, randomised=randomised, report=report)
        verdict = inspection.verdict
        if verdict.level == "not learnable" and not force:
            raise DataError(f"{log.name} is {verdict.sentence}; {verdict.advice[0]}, or go on with --force")
        prepare(log, folder / "prepared", **preparation or {}, bucket_bytes=memory.bucket_bytes, report=report)
        dataset = Dataset(folder / "prepared", memory=memory)
        check_marks(randomised, dataset, ("test",))
        if check is not None:
            check(dataset)
        fit, training = fit_and_save(
            dataset, config, folder / "model", checkpoints=working / "checkpoints", review=review, report=report
        )
        seed = config.clicks.seed
        options: dict[str, Any] = {"config": CrossfitConfig(seed=seed), "randomised": randomised, "report": report}
        evaluation = evaluate([fit.model], dataset, **options)
        document, reference = evaluation.to_dict(), None
        if compare is not None:
            document, reference = compare(evaluation, policies_to_evaluate([fit.model]), dataset, seed)
        document = {"model": training.name, "method": training.method, "why": training.why, **document}
        document |= {"left_out": training.left_out} if training.left_out else {}
        report("writing the report", 0, None)
        next_step = after_a_gain(output / "model", output / "prepared")
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
            next_step=next_step,
            report=partial(report, "writing the report"),
        )
    return Run(inspection, training, evaluation, document, reference, next_step)


def evaluate(
    models: AnyModel | Sequence[AnyModel],
    log: AnyLog,
    *,
    split: str = "test",
    estimator: str = "auto",
    floor: float = FLOOR,
    config: CrossfitConfig | None = None,
    randomised: Collection[str] = (),
    goal: Goal | None = None,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> Evaluation:
    """Estimate the utility of models from a log, with intervals, beside the logged order and a random one.

    Args:
        models: A fitted model, the folder of one, or a policy; or several of these.
        log: A `Log` of `urank.read`, a path, a prepared folder, or a table.
        split: Split to evaluate on: `test`, which no training has used, or `all` for a log that is new to the models.
        estimator: `auto` is `refit`; see `urank.evaluation.refit` and `urank.evaluation.estimators`.
        floor: Lower bound of a logged click probability.
        config: Seed of the evaluation, and settings of its judges for a model without any.
        randomised: Marks `"COLUMN=VALUE"` of lists in random order, which are also evaluated on their own.
        goal: What is counted, `clicks` or `conversions`; by default the goal of the models.
        memory: Memory budget. If the log needs more, a sample of its queries is evaluated, with a warning.
        report: Progress callback.
    """
    models = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    splits, found = _splits(split), [_ranking_model(model) for model in models]
    policies = [*named_policies(models, found), Random()]
    options: EvaluationOptions = {"estimator": estimator, "floor": floor, "config": config, "report": report}
    options["randomised"] = randomised
    goal = goal_of(found) if goal is None else goal
    with limited_threads(), prepared(log, policies=policies, memory=memory, report=report) as dataset:
        options["judges"] = judges_for(found, dataset, splits, goal)
        evaluation = evaluate_policies(policies, with_goal(dataset, goal), splits=splits, **options)
    alone = found[0] if len(found) == 1 else None
    return replace(evaluation, main=alone.method if isinstance(alone, RankingModel) else None)


def goal_of(models: Sequence[RankingModel | Policy]) -> Goal:
    """Return the goal of models, or policies of models; clicks if none has one."""
    known = [model.model if isinstance(model, ModelPolicy) else model for model in models]
    goals: set[Goal] = {model.goal for model in known if isinstance(model, RankingModel)}
    if len(goals) > 1:
        raise ConfigError("the models have different goals, clicks and conversions; choose what to count with --goal")
    return goals.pop() if goals else "clicks"


def judges_for(
    models: Sequence[RankingModel | Policy], dataset: Dataset, splits: Sequence[str], goal: Goal = "clicks"
) -> tuple[ClickModel, ...]:
    """Return the judges of the first model whose judges know the goal, and all features and positions of a log.

    None if they may have been trained on the evaluated queries: those of the train split.
    """
    known = [model.model if isinstance(model, ModelPolicy) else model for model in models]
    for model in known if "train" not in splits else []:
        if isinstance(model, RankingModel) and model.judges and model.goal == goal:
            names = model.clicks.featurizer.names
            if model.clicks.positions == dataset.positions and set(names) <= set(dataset.features):
                return model.judges
    return ()


def guard_levels(
    model: AnyModel,
    log: AnyLog,
    *,
    kind: GuardKind = "shift",
    levels: Sequence[float] | None = None,
    method: Method | None = None,
    split: str = "test",
    goal: Goal | None = None,
    memory: Memory = DEFAULT_MEMORY,
    **options: Unpack[EvaluationOptions],
) -> GuardLevels:
    """Estimate the utility of a model that is kept close to the logged order, level by level.

    Args:
        model: A fitted model, the folder of one, or a policy.
        kind: `shift` limits how many places an item moves, `blend` averages ranks; see `Guard`.
        levels: Levels to evaluate besides the full order; by default shift 1, 2, 3, 5 or blend 0.25, 0.5, 0.75.
        method: score, match or ctr1; by default the model's own.
        log, split, goal, memory: As in `evaluate`.
        options: `floor`, `config` and `report` as in `evaluate`; `estimator` too, except those by propensities, which
            cannot evaluate a guard.
    """
    splits, policy, found = _splits(split), policy_to_guard(model, method), _ranking_model(model)
    goal = goal_of([found]) if goal is None else goal
    report = options.get("report", silent)
    with limited_threads(), prepared(log, policies=[policy], memory=memory, report=report) as dataset:
        options["judges"] = judges_for([found], dataset, splits, goal)
        return evaluate_guard(policy, with_goal(dataset, goal), kind=kind, levels=levels, splits=splits, **options)


def policies_to_evaluate(models: Sequence[AnyModel]) -> list[Policy]:
    """Return the policies that `evaluate` compares with the logged order: those of the models, and a random order."""
    return [*named_policies(models, [_ranking_model(model) for model in models]), Random()]


def policy_to_guard(model: AnyModel, method: Method | None = None) -> Policy:
    """Return the policy that `guard_levels` keeps close to the logged order."""
    found = _ranking_model(model)
    if isinstance(found, RankingModel):
        chosen = found if method is None else replace(found, method=method)
        return ModelPolicy(chosen.method, chosen, chosen.method)
    return found


def policies_of(model: RankingModel, *, methods: Sequence[Method] | None = None, prefix: str = "") -> list[Policy]:
    """Return a policy for each ranking method of a model."""
    return [ModelPolicy(f"{prefix}{method}", model, method) for method in methods or model.methods]


def named_policies(sources: Sequence[Any], models: Sequence[RankingModel | Policy]) -> list[Policy]:
    """Return the policies of models; those of several models are prefixed by their source."""
    policies: list[Policy] = []
    for name, model in zip(_names(sources), models, strict=True):
        if isinstance(model, RankingModel):
            policies += policies_of(model, prefix=f"{name} " if name else "")
        else:
            policies.append(model)
    return policies


@contextmanager
def prepared(
    log: AnyLog,
    *,
    keep: Collection[str] = (),
    policies: Sequence[Policy] = (),
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> Iterator[Dataset]:
    """Open a log as a prepared dataset, which is removed afterwards unless it was prepared before.

    Args:
        keep: As in `prepare`.
        policies: Policies to evaluate on it; the features that they read are also kept.
        memory, report: As in `evaluate`.
    """
    if isinstance(log, Dataset):
        yield log
    elif is_path(log) and is_prepared(log):
        yield Dataset(log, memory=memory)
    else:
        with tempfile.TemporaryDirectory(prefix="urank-") as name:
            folder = Path(name) / "prepared"
            models = [each.model for each in policies if isinstance(each, ModelPolicy)]
            known = {role: column for model in models for role, column in model.columns.items()}
            source = log if isinstance(log, Log) else read(log, known=known)
            used = {column for policy in policies for column in policy.columns}
            kept = [*keep, *(feature.name for feature in source.schema.features if feature.name in used)]
            prepare(source, folder, keep=kept, bucket_bytes=memory.bucket_bytes, report=report)
            yield Dataset(folder, memory=memory)


def _splits(split: str) -> Sequence[str]:
    if split not in (*SPLITS, "all"):
        raise ConfigError(f"split must be {', '.join(SPLITS)} or all; got '{split}'")
    return SPLITS if split == "all" else (split,)


def _ranking_model(model: Any) -> RankingModel | Policy:
    if isinstance(model, Estimator):
        return model.fitted_model()
    return load_model(model) if is_path(model) else model


def _names(models: Sequence[Any]) -> list[str]:
    """Return distinct names of several models; a single one needs none."""
    if len(models) == 1:
        return [""]
    folders = [to_path(model if is_path(model) else f"model {n}") for n, model in enumerate(models, 1)]
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]
