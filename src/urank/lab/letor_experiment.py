"""The methods of Sections 5.3 and 5.4, each from a log to a policy, and the steps that several of them share."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.clicks.fitting import ClickConfig, fit_clicks, predictions
from urank.evaluation.click_quality import auc_metric
from urank.evaluation.ranking_metrics import average_precision_metric, clicks_metric, ctr_metric, ndcg_metric
from urank.lab.letor_simulation import SimulationConfig, simulate, write_simulation
from urank.lab.results import METRICS, Kind
from urank.lab.settings import ExperimentConfig
from urank.lab.truth import read_truth, true_table
from urank.learning.features import Featurizer, fit_featurizer
from urank.log.dataset import Block, Dataset
from urank.log.prepare import prepare
from urank.log.ragged import offsets_of_runs, pad, positions_by_score, where_items
from urank.log.reader import read
from urank.log.splits import SPLITS, split_by_hash, stable_hash
from urank.log.svmlight import read_letor
from urank.model_io import load_model, save_model
from urank.progress import Report
from urank.propensity.cpbm import fit_cpbm
from urank.propensity.examination import Known, Propensity
from urank.propensity.methods import load_propensity, save_propensity
from urank.propensity.randomised import fit_randomised
from urank.ranking.baselines import Baseline, fit_baseline
from urank.ranking.policies import ModelPolicy, Policy, ScorerPolicy, TableMatch
from urank.ranking.positions import Method as RankingMethod
from urank.ranking.ranking_model import RankingModel
from urank.ranking.urank_config import UrankConfig
from urank.ranking.urank_network import RankerConfig, fit_urank
from urank.ranking.urank_trees import fit_trees
from urank.storage import new_file, new_folder

__all__ = [
    "METHODS",
    "STEPS",
    "LetorMethod",
    "SeedFolder",
    "Trial",
    "judged",
    "keep_click_model",
    "needs_of",
    "run_step",
]


@dataclass(frozen=True, eq=False)
class SeedFolder:
    """What all experiments keep of a seed.

    Attributes:
        folder: of the seed, with `data/` and `results/` in it.
    """

    folder: Path

    def path(self, name: str) -> Path:
        """Where a step or a method leaves what it made."""
        return self.folder / "results" / f"{name}.parquet"

    def has(self, name: str) -> bool:
        """Whether a step or a method is done."""
        return self.path(name).exists()

    def sweep(self) -> None:
        """Remove what a killed run left half-written; the states from which training goes on stay."""
        for path in (*self.folder.glob(".*.*"), *self.folder.glob("results/.*.*")):
            _remove(path)

    def clean(self) -> None:
        """Remove what methods learned from and the states of their training; it can be made again."""
        for path in (self.folder / "data", *self.folder.glob(".*")):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


LISTS = 100_000
"""Lists that a log of given documents has, if the configuration does not say: as many as that of generated ones."""


@dataclass(frozen=True, eq=False)
class Trial(SeedFolder):
    """One seed.

    Attributes:
        config: of the experiment, with this seed.
    """

    config: ExperimentConfig

    @cached_property
    def dataset(self) -> Dataset:
        """The log that methods learn from."""
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
        """Those of the test queries, in an order that tells nothing."""
        return pl.read_parquet(self.folder / "candidates.parquet")

    @cached_property
    def featurizer(self) -> Featurizer:
        """What the baselines see of the features; that of click models is the same."""
        return fit_featurizer(self.dataset)

    @property
    def block(self) -> Block:
        """The candidates as policies take them."""
        frame = self.candidates.drop("table", "relevance")
        offsets = offsets_of_runs(frame["query_id"].rle_id().to_numpy())
        queries = pa.table({"query_id": frame["query_id"].gather(offsets[:-1]).to_arrow()})
        return Block(queries, frame.to_arrow(), offsets)

    def make_data(self, report: Report) -> None:
        """Simulate, write and prepare both logs."""
        simulation = self._simulation()
        with new_folder(self.folder / "data", marker="simulation") as folder:
            write_simulation(simulate(simulation, report), folder / "simulation", progress=report)
            swapped = simulation.model_copy(
                update={
                    "randomise": "swap",
                    "randomise_share": 1.0,
                    "sessions": self.config.swap_sessions,
                    "truth": "test",
                }
            )
            write_simulation(simulate(swapped, report), folder / "swapped", progress=report)
            valid, test = simulation.valid, simulation.test
            for source, target in (("simulation", "prepared"), ("swapped", "swaps")):
                # A learner sees neither labels nor the chance of a placement.
                log = read(folder / source / "log.parquet", drop=["relevance", "propensity"])
                prepare(log, folder / target, valid=valid, test=test, report=report)
                (folder / source / "log.parquet").unlink()
            truth = read_truth(folder / "simulation")
            split = split_by_hash(stable_hash(truth["query_id"]), valid=valid, test=test)
            rng = np.random.default_rng(simulation.seed)
            judging = truth.filter(pl.Series(split == SPLITS.index("test")))
            shuffled = judging.with_columns(__place=pl.Series(rng.random(judging.height))).sort(
                pl.col("query_id").rle_id(), "__place"
            )
            with new_file(self.folder / "candidates.parquet") as working:
                shuffled.drop("__place").write_parquet(working)

    def _simulation(self) -> SimulationConfig:
        given = self.config.simulation
        if given.data is None or "sessions" in given.model_fields_set:
            return given
        sessions = max(1, min(200, LISTS // read_letor(given.data).n_queries))
        return given.model_copy(update={"sessions": sessions})

    def path(self, name: str) -> Path:
        """Where a step or a method leaves what it made."""
        special = {
            "data": "data",
            "randomised": "randomised.json",
            "cpbm": "cpbm.safetensors",
            "cpbm-item": "cpbm-item.safetensors",
        }
        if name in special or name.startswith("clicks"):
            return self.folder / special.get(name, name)
        if name.startswith("auc"):
            return self.folder / f"{name}.json"
        return self.folder / "results" / f"{name}.parquet"

    def write_result(self, name: str, policy: Policy, seconds: float) -> None:
        """Judge a method by the truth and keep what it did."""
        frame = judged(self.candidates, policy.positions(self.block)).with_columns(seconds=pl.lit(seconds))
        with new_file(self.path(name)) as working:
            frame.write_parquet(working)


def judged(candidates: pl.DataFrame, position: NDArray[np.int64]) -> pl.DataFrame:
    """A row for each query: its items with their positions, and the metrics of Table 1 by the true table.

    Args:
        candidates: a row for each item with `query_id`, `item_id`, `relevance` and `table`, the items of a query
            together.
        position: `[rows]`, where a method puts each.
    """
    offsets = offsets_of_runs(candidates["query_id"].rle_id().to_numpy())
    where = where_items(offsets)
    table = pad(np.array(candidates["table"].to_list(), dtype=np.float64), offsets)
    label = pad(candidates["relevance"].to_numpy().astype(np.float64), offsets)
    positions = pad(position, offsets, fill=1)
    values: dict[str, Any] = {
        "MAP": average_precision_metric(positions, label, where=where),
        "nDCG@10": ndcg_metric(positions, label, where=where),
        "#Click": clicks_metric(positions, table, where=where),
        "CTR": ctr_metric(positions, table, where=where),
    }
    lists = candidates.select("query_id", "item_id").with_columns(position=position)
    lists = lists.group_by("query_id", maintain_order=True).agg("item_id", "position")
    return lists.with_columns(**{name: values[name] for name in METRICS})


def keep_click_model(dataset: Dataset, config: ClickConfig, path: Path, report: Report) -> None:
    """Train on a log and write to `path`; a training that was killed goes on from its last state beside it."""
    found = fit_clicks(dataset, config, reference=False, checkpoints=path.parent / f".{path.name}", report=report)
    save_model(RankingModel(found.model), UrankConfig(ranker="none", clicks=config), path, onnx=False)


@dataclass(frozen=True)
class LetorMethod:
    """A row of a table.

    Attributes:
        name: as the table shows it.
        kind: baseline, oracle or ours.
        make: trains it and gives its policy.
        needs: the steps before it, besides the data.
        cost: about how long it takes, in units of the shortest.
    """

    name: str
    kind: Kind
    make: Callable[[Trial, Report], Policy]
    needs: tuple[str, ...] = ()
    cost: float = 2.0


def _baseline(ranker: Baseline, variant: str) -> Callable[[Trial, Report], Policy]:
    def make(trial: Trial, report: Report) -> Policy:
        config = trial.config
        propensity: Propensity | None = None
        if variant == "truth":
            propensity = Known(true_table(trial.truth))
        elif variant != "none":
            propensity = load_propensity(trial.path(variant))
        scorer, _ = fit_baseline(
            ranker,
            trial.dataset,
            trial.featurizer,
            config=config.baseline,
            scorer=config.scorer,
            svm=config.svm,
            trees=config.trees,
            propensity=propensity,
            report=report,
        )
        return ScorerPolicy(ranker, trial.featurizer, scorer)

    return make


def _urank(clicks: str, settings: Callable[[Trial], RankerConfig]) -> Callable[[Trial, Report], Policy]:
    def make(trial: Trial, report: Report) -> Policy:
        model = load_model(trial.path(clicks)).clicks
        scorer, _ = fit_urank(trial.dataset, model, settings(trial), report=report)
        return ModelPolicy("U-rank", RankingModel(model, scorer, "score"), "score")

    return make


def _urank_trees(trial: Trial, report: Report) -> Policy:
    model = load_model(trial.path("clicks")).clicks
    scorer, _ = fit_trees(trial.dataset, model, trial.config.scorer, trial.config.trees, report=report)
    return ModelPolicy("U-rank trees", RankingModel(model, scorer, "score"), "score")


def _of_table(clicks: str, method: RankingMethod) -> Callable[[Trial, Report], Policy]:
    def make(trial: Trial, report: Report) -> Policy:
        return ModelPolicy(method, load_model(trial.path(clicks)), method)

    return make


@dataclass(frozen=True, eq=False)
class _SecondSlot:
    """CTR-1 with the off-by-one of the released code: by the click probability at position 2."""

    model: RankingModel
    name: str = "CTR-2"

    @property
    def columns(self) -> Sequence[str]:
        return self.model.clicks.featurizer.names

    def positions(self, block: Block) -> NDArray[np.int64]:
        where = where_items(block.offsets)
        scores = pad(self.model.log_ctr(block.items)[:, :2][:, -1], block.offsets)
        return positions_by_score(scores, where=where)[where]


def _second_slot(trial: Trial, report: Report) -> Policy:
    return _SecondSlot(load_model(trial.path("clicks")))


def _oracle_match(trial: Trial, report: Report) -> Policy:
    return TableMatch("KM", true_table(trial.candidates))


def _weighed(ranker: Baseline, key: str, shown: str, variants: tuple[str, ...], cost: float) -> dict[str, LetorMethod]:
    """A ranker with several estimates of examination."""
    names = {
        "none": "none",
        "randomised": "randomisation",
        "cpbm": "CPBM",
        "cpbm-item": "CPBM of items",
        "truth": "ground truth",
    }
    return {
        f"{key}-{variant}": LetorMethod(
            f"{shown}, {names[variant]}",
            "oracle" if variant == "truth" else "baseline",
            _baseline(ranker, variant),
            needs=(variant,) if variant not in ("none", "truth") else (),
            cost=cost,
        )
        for variant in variants
    }


_ALL = ("none", "randomised", "cpbm", "cpbm-item", "truth")

METHODS: dict[str, LetorMethod] = {
    **_weighed("ranksvm", "svm", "SVMRank", _ALL, 1.0),
    **_weighed("lambdarank", "lambdarank", "LambdaRank", _ALL, 2.0),
    **_weighed("lambdarank-trees", "lambdarank-trees", "LambdaRank trees", ("none", "truth"), 2.0),
    "dla": LetorMethod("DLA", "baseline", _baseline("dla", "none")),
    "deepfm": LetorMethod("DeepFM", "baseline", _of_table("clicks-deepfm", "ctr1"), ("clicks-deepfm",), 0.1),
    "ctr1": LetorMethod("CTR-1", "baseline", _of_table("clicks", "ctr1"), ("clicks",), 0.1),
    "urank-paper": LetorMethod(
        "U-rank as printed",
        "ours",
        _urank("clicks-vector", lambda trial: trial.config.faithful),
        ("clicks-vector",),
        4.0,
    ),
    "urank": LetorMethod("U-rank", "ours", _urank("clicks", lambda trial: trial.config.scorer), ("clicks",), 4.0),
    "urank-trees": LetorMethod("U-rank trees", "ours", _urank_trees, ("clicks",), 4.0),
    "urank-match": LetorMethod("U-rank matching", "ours", _of_table("clicks", "match"), ("clicks",), 0.1),
    "urank-a1": LetorMethod(
        "U-rank on A1", "ours", _urank("clicks-vector", lambda trial: trial.config.scorer), ("clicks-vector",), 4.0
    ),
    "urank-a2": LetorMethod(
        "U-rank on A2", "ours", _urank("clicks-position", lambda trial: trial.config.scorer), ("clicks-position",), 4.0
    ),
    "urank-counterfactual": LetorMethod(
        "U-rank on A1, Eq. 3, stable",
        "ours",
        _urank("clicks-vector", lambda trial: trial.config.faithful.model_copy(update={"form": "stable"})),
        ("clicks-vector",),
        4.0,
    ),
    "urank-printed-model": LetorMethod(
        "U-rank on A1, table, as printed",
        "ours",
        _urank("clicks-vector", lambda trial: trial.config.faithful.model_copy(update={"target": "model"})),
        ("clicks-vector",),
        4.0,
    ),
    "ctr2": LetorMethod("CTR-1 of the released code", "baseline", _second_slot, ("clicks",), 0.1),
    "km": LetorMethod("KM (oracle model)", "oracle", _oracle_match, cost=0.1),
}


def _randomised(trial: Trial, report: Report) -> None:
    save_propensity(fit_randomised(trial.swaps), trial.path("randomised"))


def _cpbm(trial: Trial, report: Report) -> None:
    save_propensity(fit_cpbm(trial.dataset, trial.config.cpbm, report=report), trial.path("cpbm"))


def _cpbm_of_items(trial: Trial, report: Report) -> None:
    """Not in the paper: CPBM that knows the item, as its users' attention here asks for."""
    config = trial.config.cpbm.model_copy(update={"context": "item"})
    save_propensity(fit_cpbm(trial.dataset, config, report=report), trial.path("cpbm-item"))


def _clicks(name: str, **settings: object) -> Callable[[Trial, Report], None]:
    def make(trial: Trial, report: Report) -> None:
        config = ClickConfig.model_validate(trial.config.clicks.model_dump() | settings)
        keep_click_model(trial.dataset, config, trial.path(name), report)

    return make


def _auc(family: str) -> Callable[[Trial, Report], None]:
    def make(trial: Trial, report: Report) -> None:
        model = load_model(trial.path(f"clicks-{family}")).clicks
        found = {}
        for split in SPLITS:
            log_p, _, click = predictions(model, trial.dataset, split)
            found[split] = auc_metric(log_p, click)
        with new_file(trial.path(f"auc-{family}")) as working:
            working.write_text(json.dumps(found), encoding="utf-8")

    return make


STEPS: dict[str, tuple[Callable[[Trial, Report], None], tuple[str, ...], float]] = {
    "data": (lambda trial, report: trial.make_data(report), (), 1.0),
    "clicks": (_clicks("clicks"), ("data",), 12.0),
    "clicks-vector": (_clicks("clicks-vector", families=("vector",)), ("data",), 4.0),
    "clicks-position": (_clicks("clicks-position", families=("position",)), ("data",), 6.0),
    "clicks-deepfm": (_clicks("clicks-deepfm", families=("deepfm",)), ("data",), 8.0),
    "auc-vector": (_auc("vector"), ("data", "clicks-vector"), 0.2),
    "auc-position": (_auc("position"), ("data", "clicks-position"), 0.2),
    "randomised": (_randomised, ("data",), 0.2),
    "cpbm": (_cpbm, ("data",), 1.0),
    "cpbm-item": (_cpbm_of_items, ("data",), 1.0),
}
"""What several methods share: how it is made, what it needs, and about how long it takes."""


def needs_of(name: str) -> tuple[tuple[str, ...], float]:
    """The steps before a step or a method, and its cost."""
    if name in STEPS:
        return STEPS[name][1], STEPS[name][2]
    return ("data", *METHODS[name].needs), METHODS[name].cost


def run_step(trial: Trial, name: str, report: Report) -> None:
    """Do one step, or train and judge one method."""
    if name in STEPS:
        STEPS[name][0](trial, report)
        return
    started = time.perf_counter()
    policy = METHODS[name].make(trial, report)
    trial.write_result(name, policy, time.perf_counter() - started)
