"""The experiment of Sections 5.2 to 5.4: rankers trained on simulated clicks, and judged by the true click table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import predictions
from urank.evaluation.click_quality import auc_metric
from urank.evaluation.ranking_metrics import average_precision_metric, clicks_metric, ctr_metric, ndcg_metric
from urank.lab import experiment
from urank.lab.experiment import ComparedMethod, ExperimentConfig, ExperimentStep, Trial
from urank.lab.experiment_results import MethodKind
from urank.lab.letor_simulation import SimulationConfig, simulate, write_simulation
from urank.lab.truth import read_truth, true_table
from urank.lab.user_models import Oracle
from urank.learning.features import Featurizer, fit_featurizer
from urank.log.dataset import Block, Dataset
from urank.log.prepare import prepare
from urank.log.ragged import pad, positions_by_score, where_items
from urank.log.reader import read
from urank.log.splits import SPLITS, split_by_hash, stable_hash
from urank.log.svmlight import read_letor
from urank.model_io import load_model
from urank.progress import Report
from urank.propensity.cpbm import fit_cpbm
from urank.propensity.examination import Known, Propensity
from urank.propensity.methods import load_propensity, save_propensity
from urank.propensity.randomised import fit_randomised
from urank.ranking.matching import Method as RankingMethod
from urank.ranking.policies import ModelPolicy, Policy, TableMatch
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import Baseline, RankerConfig
from urank.ranking.urank_network import fit_urank
from urank.ranking.urank_trees import fit_trees
from urank.storage import new_file, new_folder

LISTS = 100_000
"""Lists in the log of given documents, unless configured: as many as in that of generated documents."""


@dataclass(frozen=True, eq=False)
class LetorTrial(Trial[Policy]):
    """One seed. `config` is the experiment's, with this seed."""

    config: ExperimentConfig

    @cached_property
    def dataset(self) -> Dataset:
        """The training log."""
        return Dataset(self.folder / "data" / "prepared")

    @cached_property
    def swaps(self) -> Dataset:
        """The log of the experiment with random swaps."""
        return Dataset(self.folder / "data" / "swaps")

    @cached_property
    def truth(self) -> pl.DataFrame:
        """All candidates of the simulation with their true table."""
        return read_truth(self.folder / "data" / "simulation")

    @cached_property
    def candidates(self) -> pl.DataFrame:
        """The candidates of the test queries with their true table, in random order."""
        return pl.read_parquet(self.folder / "candidates.parquet")

    @cached_property
    def featurizer(self) -> Featurizer:
        """The features of the baselines, equal to those of the click models."""
        return fit_featurizer(self.dataset)

    @cached_property
    def oracle(self) -> Oracle:
        """The users."""
        path = self.folder / "data" / "simulation" / "truth" / "oracle.json"
        return Oracle.from_dict(json.loads(path.read_text(encoding="utf-8"))["oracle"])

    @property
    def block(self) -> Block:
        """The candidates without labels and truth."""
        return experiment.as_block(self.candidates.drop(self.oracle.truth_name, "relevance"))

    def judge(self, trained: Policy) -> pl.DataFrame:
        """Compute the metrics of Table 1 by the true click probabilities of the lists."""
        position = trained.positions(self.block)
        return list_metrics(with_table(self.candidates, position, self.oracle), position)

    def make_data(self, report: Report) -> None:
        """Simulate, write and prepare both logs."""
        simulation = self._simulation()
        swaps = {
            "randomise": "swap",
            "randomise_share": 1.0,
            "sessions": self.config.swap_sessions,
            "truth_split": "test",
        }
        valid, test = simulation.valid, simulation.test
        with new_folder(self.folder / "data", marker="simulation") as folder:
            for config, source, target in (
                (simulation, "simulation", "prepared"),
                (simulation.model_copy(update=swaps), "swapped", "swaps"),
            ):
                write_simulation(simulate(config, report), folder / source, report=report)
                # A learner sees neither labels nor placement probabilities.
                log = read(folder / source / "log.parquet", drop=["relevance", "propensity"])
                prepare(log, folder / target, valid=valid, test=test, report=report)
                (folder / source / "log.parquet").unlink()
            truth = pl.read_parquet(folder / "simulation" / "truth" / "candidates.parquet")
            split = split_by_hash(stable_hash(truth["query_id"]), valid=valid, test=test)
            judging = truth.filter(pl.Series(split == SPLITS.index("test")))
            rng = np.random.default_rng(simulation.seed)
            with new_file(self.folder / "candidates.parquet") as working:
                experiment.shuffled_lists(judging, rng).write_parquet(working)

    def _simulation(self) -> SimulationConfig:
        given = self.config.simulation
        if given.data is None or "sessions" in given.model_fields_set:
            return given
        sessions = max(1, min(200, LISTS // read_letor(given.data).n_queries))
        return given.model_copy(update={"sessions": sessions})


def with_table(candidates: pl.DataFrame, position: NDArray[np.int64], oracle: Oracle) -> pl.DataFrame:
    """Return candidates with a `table` that is true at these positions `[rows]`, also of users who have no table."""
    if oracle.truth_name == "table":
        return candidates
    truth = np.array(candidates[oracle.truth_name].to_list(), dtype=np.float64)
    chance = oracle.click_probabilities(truth, position, experiment.query_offsets(candidates))
    table = pl.Series("table", np.repeat(chance[:, None], oracle.positions, axis=1)).arr.to_list()
    return candidates.with_columns(table)


def list_metrics(candidates: pl.DataFrame, position: NDArray[np.int64]) -> pl.DataFrame:
    """Return a row for each query: its items with their positions, and the metrics of Table 1 by the true table.

    Args:
        candidates: a row for each item with `query_id`, `item_id`, `relevance` and `table`, grouped by query.
        position: `[rows]` the position of each item.
    """
    offsets = experiment.query_offsets(candidates)
    where = where_items(offsets)
    table = pad(experiment.table_array(candidates), offsets)
    label = pad(candidates["relevance"].to_numpy().astype(np.float64), offsets)
    positions = pad(position, offsets, fill=1)
    values = {
        "MAP": average_precision_metric(positions, label, where=where),
        "nDCG@10": ndcg_metric(positions, label, where=where),
        "#Click": clicks_metric(positions, table, where=where),
        "CTR": ctr_metric(positions, table, where=where),
    }
    lists = candidates.select("query_id", "item_id").with_columns(position=position)
    lists = lists.group_by("query_id", maintain_order=True).agg("item_id", "position")
    return lists.with_columns(**{name: pl.Series(value) for name, value in values.items()})


LetorMethod = ComparedMethod[LetorTrial, Policy]
LetorStep = ExperimentStep[LetorTrial]


def _baseline(ranker: Baseline, variant: str, trial: LetorTrial, report: Report) -> Policy:
    propensity: Propensity | None = None
    if variant == "truth":
        propensity = Known(true_table(trial.truth))
    elif variant != "none":
        propensity = load_propensity(trial.folder / STEPS[variant].output)
    options = {"trees": trial.config.trees, "propensity": propensity, "report": report}
    return experiment.baseline_policy(ranker, trial.dataset, trial.featurizer, trial.config, **options)


def _urank(
    clicks: str, settings: Callable[[ExperimentConfig], RankerConfig], trial: LetorTrial, report: Report
) -> Policy:
    model = load_model(trial.folder / clicks).clicks
    scorer, _ = fit_urank(trial.dataset, model, settings(trial.config), report=report)
    return ModelPolicy("U-rank", RankingModel(model, scorer, "score"), "score")


def _urank_trees(trial: LetorTrial, report: Report) -> Policy:
    model = load_model(trial.folder / "clicks").clicks
    scorer, _ = fit_trees(trial.dataset, model, trial.config.scorer, trial.config.trees, report=report)
    return ModelPolicy("U-rank trees", RankingModel(model, scorer, "score"), "score")


def _by_click_model(clicks: str, method: RankingMethod) -> Callable[[LetorTrial, Report], Policy]:
    return lambda trial, report: ModelPolicy(method, load_model(trial.folder / clicks), method)


@dataclass(frozen=True, eq=False)
class _SecondSlot:
    """CTR-1 with the off-by-one of the released code: order by the click probability at position 2."""

    model: RankingModel
    name: str = "CTR-2"

    @property
    def columns(self) -> Sequence[str]:
        return self.model.clicks.featurizer.names

    def positions(self, block: Block) -> NDArray[np.int64]:
        where = where_items(block.offsets)
        scores = pad(self.model.log_ctr(block.items, block.offsets)[:, :2][:, -1], block.offsets)
        return positions_by_score(scores, where=where)[where]


_VARIANTS = {
    "none": "none",
    "randomised": "randomisation",
    "cpbm": "CPBM",
    "cpbm-item": "CPBM of items",
    "truth": "ground truth",
}
"""Estimates of examination, with their labels."""


def _weighted(
    ranker: Baseline, key: str, name: str, cost: float, variants: Sequence[str] = tuple(_VARIANTS)
) -> dict[str, LetorMethod]:
    """Return a ranker with several estimates of examination."""
    found = {}
    for variant in variants:
        kind: MethodKind = "oracle" if variant == "truth" else "baseline"
        needs = (variant,) if variant not in ("none", "truth") else ()
        label = f"{name}, {_VARIANTS[variant]}"
        found[f"{key}-{variant}"] = LetorMethod(label, kind, partial(_baseline, ranker, variant), needs, cost)
    return found


def _alone(name: str, ranker: Baseline) -> LetorMethod:
    """Return a ranker that learns examination itself."""
    return LetorMethod(name, "baseline", partial(_baseline, ranker, "none"))


def _first_column(name: str, clicks: str) -> LetorMethod:
    """Return the order by the click probability at position 1."""
    return LetorMethod(name, "baseline", _by_click_model(clicks, "ctr1"), (clicks,), 0.1)


def _ours(name: str, clicks: str, settings: Callable[[ExperimentConfig], RankerConfig]) -> LetorMethod:
    return LetorMethod(name, "ours", partial(_urank, clicks, settings), (clicks,), 4.0)


def _faithful_but(**settings: str) -> Callable[[ExperimentConfig], RankerConfig]:
    return lambda config: config.faithful.model_copy(update=settings)


def _ctr2(trial: LetorTrial, report: Report) -> Policy:
    return _SecondSlot(load_model(trial.folder / "clicks"))


def _true_match(trial: LetorTrial, report: Report) -> Policy:
    return TableMatch("KM", true_table(trial.candidates))


METHODS: dict[str, LetorMethod] = {
    **_weighted("ranksvm", "svm", "SVMRank", 1.0),
    **_weighted("lambdarank", "lambdarank", "LambdaRank", 2.0),
    **_weighted("lambdarank-trees", "lambdarank-trees", "LambdaRank trees", 2.0, ("none", "truth")),
    **_weighted("ranknet", "ranknet", "RankNet", 2.0, ("none",)),
    **_weighted("lambdaloss", "lambdaloss", "LambdaLoss", 2.0, ("none",)),
    "dla": _alone("DLA", "dla"),
    "unbiased-lambdamart": _alone("Unbiased LambdaMART", "unbiased-lambdamart"),
    "regression-em": _alone("regression EM", "regression-em"),
    "pal": _first_column("PAL", "clicks-pal"),
    "deepfm": _first_column("DeepFM", "clicks-deepfm"),
    "pnn": _first_column("PNN", "clicks-pnn"),
    "pin": _first_column("PIN", "clicks-pin"),
    "ctr1-a1": _first_column("CTR-1 on A1", "clicks-vector"),
    "ctr1": _first_column("CTR-1", "clicks"),
    "urank-paper": _ours("U-rank as printed", "clicks-vector", lambda config: config.faithful),
    "urank": _ours("U-rank", "clicks", lambda config: config.scorer),
    "urank-trees": LetorMethod("U-rank trees", "ours", _urank_trees, ("clicks",), 4.0),
    "urank-match": LetorMethod("U-rank matching", "ours", _by_click_model("clicks", "match"), ("clicks",), 0.1),
    "urank-a1": _ours("U-rank on A1", "clicks-vector", lambda config: config.scorer),
    "match-a1": LetorMethod(
        "U-rank matching on A1", "ours", _by_click_model("clicks-vector", "match"), ("clicks-vector",), 0.1
    ),
    "urank-a2": _ours("U-rank on A2", "clicks-position", lambda config: config.scorer),
    "urank-counterfactual": _ours("U-rank on A1, Eq. 3, stable", "clicks-vector", _faithful_but(form="stable")),
    "urank-printed-model": _ours("U-rank on A1, table, as printed", "clicks-vector", _faithful_but(target="model")),
    "ctr2": LetorMethod("CTR-1 of the released code", "baseline", _ctr2, ("clicks",), 0.1),
    "km": LetorMethod("KM (oracle model)", "oracle", _true_match, cost=0.1),
}


def _randomised(trial: LetorTrial, report: Report) -> None:
    save_propensity(fit_randomised(trial.swaps), trial.folder / STEPS["randomised"].output)


def _cpbm(name: str, **settings: object) -> LetorStep:
    output = f"{name}.safetensors"

    def run(trial: LetorTrial, report: Report) -> None:
        config = trial.config.cpbm.model_copy(update=settings)
        save_propensity(fit_cpbm(trial.dataset, config, report=report), trial.folder / output)

    return LetorStep(run, output, ("data",), 1.0)


def _clicks(name: str, cost: float, **settings: object) -> LetorStep:
    def run(trial: LetorTrial, report: Report) -> None:
        config = ClickConfig.model_validate(trial.config.clicks.model_dump() | settings)
        experiment.keep_click_model(trial.dataset, config, trial.folder / name, report)

    return LetorStep(run, name, ("data",), cost)


def _auc(family: str) -> LetorStep:
    output = f"auc-{family}.json"

    def run(trial: LetorTrial, report: Report) -> None:
        model = load_model(trial.folder / f"clicks-{family}").clicks
        found = {}
        for split in SPLITS:
            log_p, _, click = predictions({"": model}, trial.dataset, split)[""]
            found[split] = auc_metric(log_p, click)
        with new_file(trial.folder / output) as working:
            working.write_text(json.dumps(found), encoding="utf-8")

    return LetorStep(run, output, ("data", f"clicks-{family}"), 0.2)


STEPS: dict[str, LetorStep] = {
    "data": LetorStep(LetorTrial.make_data, "data"),
    "clicks": _clicks("clicks", 12.0),
    "clicks-vector": _clicks("clicks-vector", 4.0, families=("vector",)),
    "clicks-position": _clicks("clicks-position", 6.0, families=("position",)),
    "clicks-deepfm": _clicks("clicks-deepfm", 8.0, families=("deepfm",)),
    "clicks-pnn": _clicks("clicks-pnn", 8.0, families=("position",), backbone="pnn"),
    "clicks-pin": _clicks("clicks-pin", 16.0, families=("position",), backbone="pin"),
    "clicks-pal": _clicks("clicks-pal", 4.0, families=("pal",)),
    "auc-vector": _auc("vector"),
    "auc-position": _auc("position"),
    "randomised": LetorStep(_randomised, "randomised.json", ("data",), 0.2),
    "cpbm": _cpbm("cpbm"),
    "cpbm-item": _cpbm("cpbm-item", context="item"),  # not in the paper: CPBM that sees the item's features
    **experiment.method_steps(METHODS, data="data"),
}
