"""Fit a click model: train its families on a prepared log, choose by held-out log loss, and calibrate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from urank import distributed
from urank.clicks.calibration import Calibration, CalibrationKind, fit_calibration
from urank.clicks.click_model import ClickModel, Member, NetworkClicks, log_mean_exp
from urank.clicks.families import Head, NetworkFamily, build_network, click_loss
from urank.clicks.trees import GbdtClicks, GbdtConfig, fit_gbdt
from urank.learning.batches import Batch, Stream, train_and_valid
from urank.learning.features import Featurizer, Inputs, fit_featurizer
from urank.learning.networks import Backbone
from urank.learning.training import History, TrainingConfig, mean_loss, seeded, train
from urank.log.dataset import Dataset
from urank.log.ragged import at_positions
from urank.progress import Report, silent
from urank.storage import remove_folder

ClickFamily = Literal["vector", "position", "deepfm", "factorised", "monotone", "pbm", "gbdt"]
Predictions = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]
AUTO: tuple[ClickFamily, ...] = ("monotone", "factorised", "vector")
"""The families of `auto`; the best one, or the mean of all, is kept by held-out log loss."""


class ClickConfig(BaseModel):
    """Settings of a click model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: tuple[ClickFamily, ...] = Field(
        AUTO,
        min_length=1,
        description="click model families: **monotone**, one falling curve, steeper or flatter by item; "
        "**factorised**, examination(item, k) · relevance(item); **vector**, K outputs (the paper's A1); **position**, "
        "position as an input (A2); **deepfm**, a DeepFM with the position as a field; **gbdt**, LightGBM; **pbm**, "
        "one curve for all items. The best by held-out log loss is kept, or the mean of all if it is better",
    )
    mix: bool = Field(False, description="always keep the mean of all families")
    ensemble: int = Field(1, ge=1, le=100, description="number of random seeds whose predictions are averaged")
    backbone: Backbone = Field("mlp", description="backbone of the networks: a multilayer perceptron, or a DeepFM")
    hidden: tuple[int, ...] = Field((128, 64), min_length=1, description="sizes of the hidden layers")
    dropout: float = Field(0.05, ge=0, lt=1, description="dropout rate of the hidden layers")
    calibration: CalibrationKind = Field(
        "temperature", description="calibration of P(click) by position, fitted on the validation split"
    )
    min_count: int = Field(5, ge=1, description="minimum number of occurrences of a category with its own embedding")
    training: TrainingConfig = TrainingConfig()
    trees: GbdtConfig = GbdtConfig()
    seed: int = Field(0, ge=0, description="random seed")

    def network(self, family: NetworkFamily, featurizer: Featurizer, positions: int) -> Head:
        """Build a network with fresh weights from torch's global generator."""
        hidden, dropout = self.hidden, self.dropout
        return build_network(family, featurizer, positions, backbone=self.backbone, hidden=hidden, dropout=dropout)


MONOTONE_FAMILIES = ("monotone", "pbm", "gbdt")


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained click model and the record of its training.

    Attributes:
        model: the model that was kept.
        reference: a position-based model for comparison; None if not requested.
        tried: one member of each family alone, calibrated too.
        valid_loss, histories: held-out log loss of every member and training rounds of every network, by name.
    """

    model: ClickModel
    reference: ClickModel | None
    tried: dict[str, ClickModel]
    valid_loss: dict[str, float]
    histories: dict[str, History]


def fit_clicks(
    dataset: Dataset,
    config: ClickConfig,
    *,
    reference: bool = True,
    checkpoints: Path | None = None,
    report: Report = silent,
) -> Fit:
    """Train on the train split; stop early, select and calibrate on the valid split.

    Args:
        dataset, config: a prepared log, and settings.
        reference: also train a position-based model for comparison.
        checkpoints, report: folder from which an interrupted run resumes, and progress callback.
    """
    featurizer = fit_featurizer(dataset, min_count=config.min_count)
    if checkpoints is not None:
        distributed.broadcast(lambda: _claim(checkpoints, dataset, config))
    trainer = _Trainer(dataset, featurizer, config, checkpoints, report)
    pbm = trainer.calibrated([trainer.member("pbm", config.seed)]) if reference else None
    first = {family: trainer.member(family, config.seed) for family in config.families}
    kept = config.families if config.mix else trainer.best(first)
    more = [(family, config.seed + n) for family in kept for n in range(1, config.ensemble)]
    members = [*(first[family] for family in kept), *(trainer.member(family, seed) for family, seed in more)]
    tried: dict[str, ClickModel] = {family: trainer.calibrated([member]) for family, member in first.items()}
    return Fit(trainer.calibrated(members), pbm, tried, trainer.losses, trainer.histories)


def predictions(model: ClickModel, dataset: Dataset, split: str, *, most_rows: int | None = None) -> Predictions:
    """Predict a split: log P(click) at the logged position, that position, and the click of every row, in order.

    With `most_rows`, stop after the row group that reaches this many rows.
    """
    stream = Stream(dataset, split, model.featurizer, cache_bytes=0, shown=True)
    return _at_logged_positions(stream, model.log_ctr, most_rows)


def _at_logged_positions(
    stream: Stream, log_ctr: Callable[[Inputs], NDArray[np.float32]], most_rows: int | None = None
) -> Predictions:
    parts = []
    for group in range(len(stream.groups)):
        lists = stream.lists(group)
        parts.append((at_positions(log_ctr(lists.inputs), lists.position), lists.position, lists.click))
        if most_rows is not None and sum(len(part[1]) for part in parts) >= most_rows:
            break
    if not parts:
        return np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32)
    log_p, position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return log_p, position, click


class _Trainer:
    """Train members one after another on the same streams."""

    def __init__(
        self, dataset: Dataset, featurizer: Featurizer, config: ClickConfig, checkpoints: Path | None, report: Report
    ) -> None:
        self.dataset, self.featurizer, self.config = dataset, featurizer, config
        self.checkpoints, self.report = checkpoints, report
        lists = config.training.batch_lists
        self.train_split, self.valid_split = train_and_valid(dataset, featurizer, lists, shown=True)
        self.losses: dict[str, float] = {}
        self.histories: dict[str, History] = {}
        self._done: dict[str, Member] = {}

    def member(self, family: ClickFamily, seed: int) -> Member:
        """Return a trained member, cached by family and seed."""
        name = f"{family}-{seed}"
        if name not in self._done:
            self._done[name] = self._gbdt(name, seed) if family == "gbdt" else self._network(name, family, seed)
        return self._done[name]

    def _gbdt(self, name: str, seed: int) -> Member:
        def grown() -> str:
            trees = self.config.trees
            return fit_gbdt(self.dataset, self.featurizer, seed=seed, config=trees, report=self.report).text

        member = GbdtClicks.from_text(distributed.broadcast(grown), self.dataset.positions, self.featurizer)
        self.losses[name] = distributed.broadcast(lambda: self._log_loss([member]))
        return member

    def _network(self, name: str, family: Any, seed: int) -> Member:
        config = self.config
        checkpoint = self.checkpoints / f"{name}.safetensors" if self.checkpoints is not None else None
        with seeded(seed):
            network = config.network(family, self.featurizer, self.dataset.positions)
        held_out = partial(mean_loss, loss=_loss, stream=self.valid_split)
        progress: dict[str, Any] = {"report": self.report, "name": f"train {name}"}
        self.histories[name] = train(
            network, _loss, self.train_split, held_out, config.training, seed=seed, checkpoint=checkpoint, **progress
        )
        self.losses[name] = self.histories[name].best
        return NetworkClicks(family, network)

    def best(self, first: dict[ClickFamily, Member]) -> tuple[ClickFamily, ...]:
        """Select families by held-out log loss: the best one, or all if the mean of their tables is better."""
        alone = min(first, key=lambda family: self.losses[f"{family}-{self.config.seed}"])
        if len(first) == 1:
            return (alone,)
        self.losses["mix"] = distributed.broadcast(lambda: self._log_loss(list(first.values())))
        return tuple(first) if self.losses["mix"] < self.losses[f"{alone}-{self.config.seed}"] else (alone,)

    def calibrated(self, members: list[Member]) -> ClickModel:
        """Calibrate the mean of members on the validation split."""
        monotone = all(member.family in MONOTONE_FAMILIES for member in members)

        def fitted() -> dict[str, Any]:
            log_p, position, click = self._at_logged(members)
            K = self.dataset.positions
            return fit_calibration(self.config.calibration, log_p, position, click, K, monotone=monotone).to_dict()

        calibration = Calibration.from_dict(distributed.broadcast(fitted))
        return ClickModel(self.featurizer, self.dataset.positions, tuple(members), calibration)

    def _log_loss(self, members: list[Member]) -> float:
        """Compute the log loss of the mean of members on the validation split."""
        log_p, _, click = self._at_logged(members)
        return float(click_loss(torch.from_numpy(log_p), torch.from_numpy(click)))

    def _at_logged(self, members: list[Member]) -> Predictions:
        def mean(inputs: Inputs) -> NDArray[np.float32]:
            return log_mean_exp([member.log_ctr(inputs) for member in members])

        return _at_logged_positions(self.valid_split, mean)


def _loss(network: nn.Module, batch: Batch) -> Tensor:
    """Compute the loss of Eq. 2 on a batch, at the logged positions."""
    assert isinstance(network, Head)  # noqa: S101 - for mypy
    return click_loss(network.at(batch.numeric, batch.categorical, batch.position), batch.click)


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
