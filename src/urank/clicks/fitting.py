"""Fit a click model: train its families on a prepared log, choose by held-out log loss, and calibrate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from urank import distributed
from urank.clicks.calibration import Calibration, fit_calibration
from urank.clicks.click_model import ClickModel, Member, NetworkClicks, log_mean_exp
from urank.clicks.families import Head, build_network, click_loss
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
AUTO: tuple[ClickFamily, ...] = ("monotone", "factorised", "vector")
"""The families of `auto`; the best one, or the mean of all, is kept by held-out log loss."""


class ClickConfig(BaseModel):
    """Settings of a click model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: tuple[ClickFamily, ...] = Field(
        AUTO,
        min_length=1,
        description="families to train; the one with the best held-out log loss is kept, or all if the mean "
        "of their tables is better",
    )
    mix: bool = Field(False, description="always keep the mean of all families")
    ensemble: int = Field(1, ge=1, le=100, description="number of seeds whose tables are averaged")
    backbone: Backbone = Field(
        "mlp", description="backbone of every network: mlp or deepfm; the family deepfm always has a DeepFM"
    )
    hidden: tuple[int, ...] = Field((128, 64), min_length=1, description="sizes of the hidden layers")
    dropout: float = Field(0.05, ge=0, lt=1, description="share of hidden units dropped at each step")
    calibration: Literal["none", "temperature", "isotonic"] = Field(
        "temperature", description="calibration of the table by position, on the validation split"
    )
    min_count: int = Field(5, ge=1, description="occurrences a category needs to have its own embedding")
    training: TrainingConfig = TrainingConfig()
    trees: GbdtConfig = GbdtConfig()
    seed: int = Field(0, ge=0, description="seed of all random numbers")


MONOTONE_FAMILIES = ("monotone", "pbm", "gbdt")


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained click model and the record of its training.

    Attributes:
        model: the model that was kept.
        reference: a position-based model for comparison; None if not requested.
        tried: one member of each family alone, calibrated too.
        valid_loss: held-out log loss of every member, by name.
        histories: training rounds of every network, by name.
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
    """Train, select and calibrate a click model.

    Args:
        dataset: a prepared log; train is fitted, valid is for early stopping, selection and calibration, test is not
            used.
        config: settings.
        reference: also train a position-based model for comparison.
        checkpoints: folder of training checkpoints, from which an interrupted run resumes.
        report: progress callback.
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
    return Fit(
        model=trainer.calibrated(members),
        reference=pbm,
        tried={family: trainer.calibrated([member]) for family, member in first.items()},
        valid_loss=trainer.losses,
        histories=trainer.histories,
    )


def predictions(
    model: ClickModel, dataset: Dataset, split: str, *, most_rows: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Predict a split: log P(click) at the logged position, that position, and the click of every row, in order.

    Args:
        model: the click model.
        dataset: the prepared log.
        split: the name of the split.
        most_rows: stop after the row group that reaches this many rows.
    """
    stream = Stream(dataset, split, model.featurizer, cache_bytes=0, shown=True)
    return _at_logged_positions(stream, model.log_ctr, most_rows)


def _at_logged_positions(
    stream: Stream, log_ctr: Callable[[Inputs], NDArray[np.float32]], most_rows: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
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
        self.dataset = dataset
        self.featurizer = featurizer
        self.config = config
        self.checkpoints = checkpoints
        self.report = report
        self.train_split, self.valid_split = train_and_valid(
            dataset, featurizer, config.training.batch_lists, shown=True
        )
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
            found = fit_gbdt(self.dataset, self.featurizer, seed=seed, config=self.config.trees, report=self.report)
            return found.to_text()

        member = GbdtClicks.from_text(distributed.broadcast(grown), self.dataset.positions, self.featurizer)
        self.losses[name] = distributed.broadcast(lambda: self._log_loss([member]))
        return member

    def _network(self, name: str, family: Any, seed: int) -> Member:
        config = self.config
        with seeded(seed):
            network = build_network(
                family,
                self.featurizer,
                self.dataset.positions,
                backbone=config.backbone,
                hidden=config.hidden,
                dropout=config.dropout,
            )
        self.histories[name] = train(
            network,
            _loss,
            self.train_split,
            lambda network: mean_loss(network, _loss, self.valid_split),
            config.training,
            seed=seed,
            checkpoint=self.checkpoints / f"{name}.safetensors" if self.checkpoints is not None else None,
            report=self.report,
            name=f"train {name}",
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

    def _at_logged(self, members: list[Member]) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        return _at_logged_positions(
            self.valid_split, lambda inputs: log_mean_exp([member.log_ctr(inputs) for member in members])
        )


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
