"""Train click models on a prepared log, choose among families by held-out log loss, and calibrate what is kept."""

from __future__ import annotations

import hashlib
import json
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
from urank.learning.features import Featurizer, fit_featurizer
from urank.learning.networks import Backbone
from urank.learning.training import History, TrainingConfig, mean_loss, seeded, train
from urank.log.dataset import Dataset
from urank.log.ragged import at_positions
from urank.progress import Report, silent
from urank.storage import remove_folder

__all__ = ["AUTO", "ClickConfig", "ClickFamily", "Fit", "fit_clicks", "predictions"]

ClickFamily = Literal["vector", "position", "deepfm", "factorised", "monotone", "pbm", "gbdt"]
AUTO: tuple[ClickFamily, ...] = ("monotone", "factorised", "vector")
"""The families of `auto`, the best of which, or the mean of all, is kept by held-out log loss."""


class ClickConfig(BaseModel):
    """All that decides a click model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: tuple[ClickFamily, ...] = Field(
        AUTO,
        min_length=1,
        description="families to train; kept is the one with the best held-out log loss, or all when the mean "
        "of their tables is better",
    )
    mix: bool = Field(False, description="keep the mean of all families in any case")
    ensemble: int = Field(1, ge=1, le=100, description="number of seeds whose tables are averaged")
    backbone: Backbone = Field(
        "mlp", description="what stands behind every network: mlp or deepfm; the family deepfm is always on a DeepFM"
    )
    hidden: tuple[int, ...] = Field((128, 64), min_length=1, description="sizes of the hidden layers")
    dropout: float = Field(0.05, ge=0, lt=1, description="share of hidden units left out at each step")
    calibration: Literal["none", "temperature", "isotonic"] = Field(
        "temperature", description="how the table is calibrated on the validation split, by position"
    )
    min_count: int = Field(5, ge=1, description="how often a category must be seen to have an embedding of its own")
    training: TrainingConfig = TrainingConfig()
    trees: GbdtConfig = GbdtConfig()
    seed: int = Field(0, ge=0, description="of all random numbers")


MONOTONE_FAMILIES = ("monotone", "pbm", "gbdt")


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained click model and how it came about.

    Attributes:
        model: what was kept.
        reference: the position-based model trained beside it, for comparison; none if it was not asked for.
        tried: one member of each family alone, calibrated too.
        valid_loss: held-out log loss of every member that was tried, by name.
        histories: the rounds of every network, by name.
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
    """Train, choose and calibrate.

    Args:
        dataset: a prepared log; train teaches, valid stops, chooses and calibrates, test is not looked at.
        config: what to train.
        reference: also train the position-based model, to compare with.
        checkpoints: a folder for the state of every training, from which a run that was killed goes on.
        report: told how far it is.
    """
    featurizer = fit_featurizer(dataset, min_count=config.min_count)
    if checkpoints is not None:
        distributed.broadcast(lambda: _claim(checkpoints, dataset, config))
    trainer = _Trainer(dataset, featurizer, config, checkpoints, report)
    known = trainer.calibrated([trainer.member("pbm", config.seed)]) if reference else None
    first = {family: trainer.member(family, config.seed) for family in config.families}
    kept = config.families if config.mix else trainer.best(first)
    more = [(family, config.seed + n) for family in kept for n in range(1, config.ensemble)]
    members = [*(first[family] for family in kept), *(trainer.member(family, seed) for family, seed in more)]
    return Fit(
        model=trainer.calibrated(members),
        reference=known,
        tried={family: trainer.calibrated([member]) for family, member in first.items()},
        valid_loss=trainer.losses,
        histories=trainer.histories,
    )


def predictions(
    model: ClickModel, dataset: Dataset, split: str, *, most_rows: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """log P(click) at the logged position, the position, and the click, of every row of a split, in its order.

    With `most_rows` it stops after the row group in which that many are reached.
    """
    stream = Stream(dataset, split, model.featurizer, cache_bytes=0, shown=True)
    parts = []
    for group in range(len(stream.groups)):
        lists = stream.lists(group)
        parts.append((model.log_ctr_at(lists.inputs, lists.position), lists.position, lists.click))
        if most_rows is not None and sum(len(part[1]) for part in parts) >= most_rows:
            break
    if not parts:
        return np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32)
    log_p, position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return log_p, position, click


class _Trainer:
    """Trains members one after another on the same streams."""

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
        """A trained member; one that was trained before is not trained again."""
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
        """The families to keep by held-out log loss: the best one, or all when the mean of their tables is better."""
        alone = min(first, key=lambda family: self.losses[f"{family}-{self.config.seed}"])
        if len(first) == 1:
            return (alone,)
        self.losses["mix"] = distributed.broadcast(lambda: self._log_loss(list(first.values())))
        return tuple(first) if self.losses["mix"] < self.losses[f"{alone}-{self.config.seed}"] else (alone,)

    def calibrated(self, members: list[Member]) -> ClickModel:
        """The mean of members, calibrated on the validation split."""
        falls = all(member.family in MONOTONE_FAMILIES for member in members)

        def fitted() -> dict[str, Any]:
            log_p, position, click = self._at_logged(members)
            K = self.dataset.positions
            return fit_calibration(self.config.calibration, log_p, position, click, K, monotone=falls).to_dict()

        calibration = Calibration.from_dict(distributed.broadcast(fitted))
        return ClickModel(self.featurizer, self.dataset.positions, tuple(members), calibration)

    def _log_loss(self, members: list[Member]) -> float:
        """Of the mean of members on the validation split."""
        log_p, _, click = self._at_logged(members)
        return float(click_loss(torch.from_numpy(log_p), torch.from_numpy(click)))

    def _at_logged(self, members: list[Member]) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        parts = []
        for group in range(len(self.valid_split.groups)):
            lists = self.valid_split.lists(group)
            table = log_mean_exp([member.log_ctr(lists.inputs) for member in members])
            parts.append((at_positions(table, lists.position), lists.position, lists.click))
        log_p, position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
        return log_p, position, click


def _loss(network: nn.Module, batch: Batch) -> Tensor:
    """Eq. 2 on a batch, at the logged positions."""
    assert isinstance(network, Head)  # noqa: S101 - this loop trains heads only
    return click_loss(network.at(batch.numeric, batch.categorical, batch.position), batch.click)


def _claim(folder: Path, dataset: Dataset, config: ClickConfig) -> None:
    """Make the folder of checkpoints that of this data and configuration; what belongs to another is removed."""
    told = {"data": dataset.description, "config": config.model_dump(mode="json")}
    told["data"] = {key: value for key, value in told["data"].items() if key != "source"}
    mark = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    path = folder / "run.txt"
    if folder.exists() and not (path.is_file() and path.read_text(encoding="ascii") == mark):
        remove_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(mark, encoding="ascii")
