"""Fit a click model: train its families on a prepared log, choose by held-out log loss, and calibrate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from urank import distributed
from urank.clicks.calibration import Calibration, fit_calibration
from urank.clicks.click_model import ClickModel, Member, NetworkClicks, log_mean_exp
from urank.clicks.click_settings import ClickConfig, ClickFamily
from urank.clicks.families import Head, click_loss
from urank.clicks.shrunk import (
    ALPHAS,
    Evidence,
    ShrunkClicks,
    ShrunkNetwork,
    alpha_losses,
    finish,
    joint_loss,
    start_curves,
)
from urank.clicks.trees import GbdtClicks, fit_gbdt
from urank.errors import TooFewError
from urank.learning.batches import Batch, Stream, train_and_valid
from urank.learning.features import Featurizer, Inputs, fit_featurizer
from urank.learning.training import History, Loss, mean_loss, seeded, train
from urank.log.dataset import Dataset
from urank.log.folds import folds
from urank.progress import Report, silent
from urank.storage import remove_folder

Predictions = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]
LEAST_HELD_OUT, FOLDS = 100, 5
"""Distinct validation lists below which the shrunk family chooses α by cross-validation, and the number of folds. Forty
lists cannot tell item-specific attention from noise; two hundred can (simulations with seeds 400 and 401)."""


MONOTONE_FAMILIES = ("monotone", "pbm", "gbdt")


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained click model and the record of its training.

    Attributes:
        model: the model that was kept.
        reference: a position-based model for comparison; None if not requested.
        tried: one member of each family alone, calibrated too.
        valid_loss, histories: held-out log loss of every member and training rounds of every network, by name.
        evidence: what the log supports of the shrunk family; None for others.
    """

    model: ClickModel
    reference: ClickModel | None
    tried: dict[str, ClickModel]
    valid_loss: dict[str, float]
    histories: dict[str, History]
    evidence: Evidence | None = None


def fit_clicks(
    dataset: Dataset,
    config: ClickConfig,
    *,
    featurizer: Featurizer | None = None,
    reference: bool = True,
    checkpoints: Path | None = None,
    report: Report = silent,
) -> Fit:
    """Train on the train split; stop early, select and calibrate on the valid split.

    Args:
        dataset, config: a prepared log, and settings.
        featurizer: the encoding of the items; fitted on the train split by default.
        reference: also train a position-based model for comparison.
        checkpoints, report: folder from which an interrupted run resumes, and progress callback.
    """
    if featurizer is None:
        featurizer = fit_featurizer(dataset, min_count=config.min_count, within_list=config.within_list)
    if checkpoints is not None:
        distributed.broadcast(lambda: _claim(checkpoints, dataset, config))
    trainer = _Trainer(dataset, featurizer, config, checkpoints, report)
    first = {family: trainer.member(family, config.seed) for family in config.families}
    pbm = trainer.calibrated([trainer.position_based(first)]) if reference else None
    kept = config.families if config.mix else trainer.best(first)
    more = [(family, config.seed + n) for family in kept for n in range(1, config.ensemble)]
    members = [*(first[family] for family in kept), *(trainer.member(family, seed) for family, seed in more)]
    tried: dict[str, ClickModel] = {family: trainer.calibrated([member]) for family, member in first.items()}
    return Fit(trainer.calibrated(members), pbm, tried, trainer.losses, trainer.histories, trainer.evidence)


def predictions(
    models: Mapping[str, ClickModel], dataset: Dataset, split: str, *, most_rows: int | None = None
) -> dict[str, Predictions]:
    """Predict a split by models with the same features.

    Returns for each model log P(click) at the logged position, that position, and the click of every row, in an order
    that is the same for all models. With `most_rows`, stop after about that many rows.
    """
    featurizer = next(iter(models.values())).featurizer
    cut: dict[str, Any] = {"most_rows": most_rows, "cut": most_rows is not None}
    stream = Stream(dataset, split, featurizer, cache_bytes=0, shown=True, values=False, collapse=True, **cut)
    return _at_logged_positions(stream, {name: model.log_ctr for name, model in models.items()})


def _at_logged_positions(
    stream: Stream, tables: Mapping[str, Callable[[Inputs], NDArray[np.float32]]]
) -> dict[str, Predictions]:
    found: dict[str, list[NDArray[np.float32]]] = {name: [] for name in tables}
    places = [(np.zeros(0, np.int64), np.zeros(0, np.float32))]
    for group in range(len(stream.groups)):
        lists = stream.lists(group)
        for name, log_ctr in tables.items():
            found[name].append(log_ctr(lists.inputs)[lists.item, lists.position - 1])
        places.append((lists.position, lists.click))
    position, click = (np.concatenate(part) for part in zip(*places, strict=True))
    return {name: (np.concatenate([np.zeros(0, np.float32), *each]), position, click) for name, each in found.items()}


class _Trainer:
    """Train members one after another on the same streams."""

    def __init__(
        self, dataset: Dataset, featurizer: Featurizer, config: ClickConfig, checkpoints: Path | None, report: Report
    ) -> None:
        self.dataset, self.featurizer, self.config = dataset, featurizer, config
        self.checkpoints, self.report = checkpoints, report
        self.train_split, self.valid_split = train_and_valid(dataset, featurizer, shown=True, values=False)
        self.losses: dict[str, float] = {}
        self.histories: dict[str, History] = {}
        self.evidence: Evidence | None = None
        self._done: dict[str, Member] = {}

    def member(self, family: ClickFamily, seed: int) -> Member:
        """Return a trained member, cached by family and seed."""
        name = f"{family}-{seed}"
        if name not in self._done:
            by_family = {"gbdt": self._gbdt, "shrunk": self._shrunk}
            fit = by_family.get(family, partial(self._network, family=family))
            self._done[name] = fit(name=name, seed=seed)
        return self._done[name]

    def position_based(self, members: Mapping[ClickFamily, Member]) -> Member:
        """Return a position-based model: the shrunk one with one slope for all if there is one, else one of its own."""
        shrunk = members.get("shrunk")
        if isinstance(shrunk, ShrunkClicks):
            return shrunk.position_based()
        return self.member("pbm", self.config.seed)

    def _shrunk(self, name: str, seed: int) -> Member:
        network = self._shrunk_network(name, seed)
        losses = None
        if self.valid_split.distinct < LEAST_HELD_OUT:
            with suppress(TooFewError):  # then the validation split decides
                losses = self._cross_validated(name, seed)
        splits = (self.train_split, self.valid_split)
        member, evidence = finish(network, *splits, self.featurizer, seed=seed, report=self.report, losses=losses)
        self.evidence = self.evidence or evidence
        self.losses[name] = distributed.broadcast(lambda: self._log_loss([member]))
        return member

    def _shrunk_network(self, name: str, seed: int) -> ShrunkNetwork:
        with seeded(seed):
            network = self.config.shrunk(self.featurizer, self.dataset.positions, self.train_split.distinct)
        start_curves(network, self.train_split)
        self._train(network, joint_loss, name, seed, weigh=lambda batch: batch.lists)
        return network.cpu()

    def _cross_validated(self, name: str, seed: int) -> dict[float, NDArray[np.float64]]:
        """Compute the loss of every query of train and valid for each α, from networks trained on the other folds."""
        found = []
        for number, fold in enumerate(folds(self.dataset, ("train", "valid"), count=FOLDS, seed=seed, test=False)):
            trainer = _Trainer(fold, self.featurizer, self.config, None, self.report)
            network = trainer._shrunk_network(f"{name}, fold {number + 1} of {FOLDS}", seed)
            splits = (trainer.train_split, trainer.valid_split)
            found.append(alpha_losses(network, *splits, seed=seed))
        return {alpha: np.concatenate([losses[alpha] for losses in found]) for alpha in ALPHAS}

    def _gbdt(self, name: str, seed: int) -> Member:
        def grown() -> str:
            trees = self.config.trees
            return fit_gbdt(self.dataset, self.featurizer, seed=seed, config=trees, report=self.report).text

        member = GbdtClicks.from_text(distributed.broadcast(grown), self.dataset.positions, self.featurizer)
        self.losses[name] = distributed.broadcast(lambda: self._log_loss([member]))
        return member

    def _network(self, name: str, family: Any, seed: int) -> Member:
        with seeded(seed):
            network = self.config.network(family, self.featurizer, self.dataset.positions)
        self._train(network, _loss, name, seed)
        self.losses[name] = self.histories[name].best
        return NetworkClicks(family, network)

    def _train(
        self, network: nn.Module, loss: Loss, name: str, seed: int, *, weigh: Callable[[Batch], int] = len
    ) -> None:
        checkpoint = self.checkpoints / f"{name}.safetensors" if self.checkpoints is not None else None
        held_out = partial(mean_loss, loss=loss, stream=self.valid_split, weigh=weigh)
        options: dict[str, Any] = {"seed": seed, "checkpoint": checkpoint, "weigh": weigh}
        options |= {"report": self.report, "name": f"train {name}"}
        self.histories[name] = train(network, loss, self.train_split, held_out, self.config.training, **options)

    def best(self, first: dict[ClickFamily, Member]) -> tuple[ClickFamily, ...]:
        """Select families by held-out log loss: the best one, or all if the mean of their tables is better."""
        alone = min(first, key=lambda family: self.losses[f"{family}-{self.config.seed}"])
        if len(first) == 1:
            return (alone,)
        self.losses["mix"] = distributed.broadcast(lambda: self._log_loss(list(first.values())))
        return tuple(first) if self.losses["mix"] < self.losses[f"{alone}-{self.config.seed}"] else (alone,)

    def calibrated(self, members: list[Member]) -> ClickModel:
        """Calibrate the mean of members on the validation split."""
        monotone = all(_is_monotone(member) for member in members)
        shrunk = all(member.family == "shrunk" for member in members)
        kind = self.config.calibration or ("none" if shrunk else "temperature")

        K = self.dataset.positions

        def fitted() -> dict[str, Any]:
            log_p, position, click = self._at_logged(members)
            return fit_calibration(kind, log_p, position, click, K, monotone=monotone).to_dict()

        if kind == "none":
            calibration = Calibration(K, monotone=monotone)
        else:
            calibration = Calibration.from_dict(distributed.broadcast(fitted))
        return ClickModel(self.featurizer, K, tuple(members), calibration)

    def _log_loss(self, members: list[Member]) -> float:
        """Compute the log loss of the mean of members on the validation split."""
        log_p, _, click = self._at_logged(members)
        return float(click_loss(torch.from_numpy(log_p), torch.from_numpy(click)))

    def _at_logged(self, members: list[Member]) -> Predictions:
        def mean(inputs: Inputs) -> NDArray[np.float32]:
            return log_mean_exp([member.log_ctr(inputs) for member in members])

        return _at_logged_positions(self.valid_split, {"mean": mean})["mean"]


def _loss(network: nn.Module, batch: Batch) -> Tensor:
    """Compute the loss of Eq. 2 on a batch, at the logged positions."""
    assert isinstance(network, Head)  # noqa: S101 - for mypy
    return click_loss(network.at(batch.numeric, batch.categorical, batch.item, batch.position), batch.click)


def _is_monotone(member: Member) -> bool:
    return member.monotone if isinstance(member, ShrunkClicks) else member.family in MONOTONE_FAMILIES


def _claim(folder: Path, dataset: Dataset, config: ClickConfig) -> None:
    """Reserve a checkpoint folder for this data and these settings; checkpoints of any others are removed."""
    data = {key: value for key, value in dataset.description.items() if key != "source"}
    run = json.dumps({"data": data, "config": config.model_dump(mode="json")}, sort_keys=True)
    digest = hashlib.sha256(run.encode()).hexdigest()
    path = folder / "run.txt"
    if folder.exists() and not (path.is_file() and path.read_text(encoding="ascii") == digest):
        remove_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(digest, encoding="ascii")
