"""The one training loop of all networks: rounds over streamed lists, early stopping, checkpoints, progress.

A round is an epoch, or a part of one if the log is large; after each, the held-out loss is measured and a checkpoint is
written. All randomness of a round follows from the seed and the number of the round, so a run that crashed resumes from
its last round and ends with the same bits.

In a process group (`urank.distributed`) each worker runs the loop on its share of the lists. Gradients are averaged by
DistributedDataParallel, in proportion to the rows or lists that each worker's loss is the mean over, so a step equals
that of one worker with the whole batch. Losses are summed over the workers, so all take the same decisions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from urank import distributed
from urank.errors import ConfigError, DataError, TooFewError
from urank.learning.batches import Batch, Stream
from urank.progress import Report, silent
from urank.storage import new_file

Loss = Callable[[nn.Module, Batch], Tensor]
Weights = dict[str, Tensor]


class TrainingConfig(BaseModel):
    """Settings of the training of a network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(30, ge=1, description="maximum passes over the training data; early stopping may need fewer")
    patience: int = Field(2, ge=1, description="rounds without improvement before the learning rate is reduced")
    reductions: int = Field(2, ge=0, description="learning rate reductions before training stops")
    batch_lists: int = Field(256, ge=1, description="lists per batch")
    learning_rate: float = Field(3e-3, gt=0, description="learning rate of AdamW")
    weight_decay: float = Field(1e-3, ge=0, description="weight decay of AdamW")
    clip: float = Field(5.0, gt=0, description="maximum gradient norm")
    round_rows: int = Field(4_000_000, ge=1, description="impressions between evaluations of the held-out loss")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device to train networks on")


@dataclass
class History:
    """The course of training: for each round its number, train and valid loss, step size, rows and seconds."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    best: float = float("inf")
    best_round: int = -1


@dataclass
class _Schedule:
    """The state of a run between two rounds."""

    epoch: int = 0
    done_groups: int = 0
    round: int = 0
    waited: int = 0
    reduced: int = 0
    finished: bool = False


def train(
    network: nn.Module,
    loss: Loss,
    stream: Stream,
    held_out: Callable[[nn.Module], float],
    config: TrainingConfig,
    *,
    seed: int,
    checkpoint: Path | None = None,
    report: Report = silent,
    name: str = "training",
    weigh: Callable[[Batch], int] = len,
) -> History:
    """Train a network in place; it ends with the weights of its best round.

    Args:
        network, loss: the network, and the mean loss of a batch.
        stream, held_out: the train split, and the loss for early stopping.
        config: settings.
        seed: determines the order of the lists and the dropout.
        checkpoint: file with the state after each round; if it exists, the run resumes from it.
        report, name: progress callback, and the name of the step in its reports.
        weigh: weight of a batch in the mean over workers: the number of rows or lists its loss is the mean over.
    """
    network.to(choose_device(config.device))
    step: nn.Module = _LossModule(network, loss)
    if distributed.size() > 1:
        step = DistributedDataParallel(step, forward_sync_buffers=False)
    run = _TrainingRun(network, config)
    if checkpoint is not None:
        saved = distributed.broadcast_bytes(lambda: checkpoint.read_bytes() if checkpoint.exists() else b"")
        if saved:
            run.restore(saved, checkpoint)
    history, schedule, all_rows = run.history, run.schedule, config.epochs * stream.rows
    while not schedule.finished and schedule.epoch < config.epochs:
        started, done = time.perf_counter(), schedule.epoch * stream.rows
        note = f"loss {history.rounds[-1]['valid']:.4f} " if history.rounds else ""

        def progress(rows: int, mean: float, done: int = done, note: str = note) -> None:
            report(name, done + rows, all_rows, f"{note}train {mean:.4f}")

        groups = _next_groups(stream, config, seed, schedule)
        batches = stream.batches(groups, shuffle=(seed, schedule.epoch))
        with seeded(seed * 1_000_003 + schedule.round + 7_919 * distributed.rank()):
            mean, rows = _run_round(step, run.optimiser, batches, config.clip, progress, weigh)
        valid = held_out(network)
        losses = {"round": schedule.round, "train": mean, "valid": valid, "step": run.optimiser.param_groups[0]["lr"]}
        history.rounds.append({**losses, "rows": rows, "seconds": time.perf_counter() - started})
        run.keep_best(valid)
        schedule.round += 1
        schedule.done_groups += len(groups)
        if schedule.done_groups >= len(stream.groups):
            schedule.epoch, schedule.done_groups = schedule.epoch + 1, 0
        if checkpoint is not None and distributed.rank() == 0:
            run.save(checkpoint)
    report(name, all_rows, all_rows, f"loss {history.best:.4f}")
    network.load_state_dict(run.best)
    network.eval()
    return history


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch within the block; its random state is restored afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**63)
        yield


def mean_loss(network: nn.Module, loss: Loss, stream: Stream) -> float:
    """Compute the mean loss over the rows of a split, without dropout and gradients."""
    device = next(network.parameters()).device
    total, rows, training = 0.0, 0, network.training
    network.eval()
    with torch.inference_mode():
        for batch in stream.batches():
            total += float(loss(network, batch.to(device))) * len(batch)
            rows += len(batch)
    network.train(training)
    loss_sum, count = distributed.all_reduce_sum([total, rows])
    return loss_sum / max(count, 1)


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda is not available; use cpu or auto")
    return torch.device(name)


class _LossModule(nn.Module):
    """A network and its loss as one module, as DistributedDataParallel needs it."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(self.network, batch)


def _weighted_batches(batches: Iterator[Batch], weigh: Callable[[Batch], int]) -> Iterator[tuple[Batch, float]]:
    """Pair a worker's batches with their weights in the mean over workers.

    Workers may have a few batches more or less than others, but all must take part in each step: a worker without a
    batch left repeats its last one with weight 0.
    """
    workers = distributed.size()
    if workers == 1:
        yield from ((batch, 1.0) for batch in batches)
        return
    last: Batch | None = None
    while True:
        batch = next(batches, None)
        last = batch if batch is not None else last
        own = 0 if batch is None else weigh(batch)
        weights, lacking = distributed.all_reduce_sum([own, last is None])
        if not weights:
            return
        if last is None or lacking:
            raise TooFewError(f"there are fewer training lists than the {workers} workers; use fewer workers")
        yield last, own * workers / weights


def _run_round(
    step: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Iterator[Batch],
    clip: float,
    progress: Callable[[int, float], None],
    weigh: Callable[[Batch], int],
) -> tuple[float, int]:
    """Take a step for each batch; return the mean loss and the rows of all workers."""
    step.train()
    parameters = list(step.parameters())
    total, weights, rows, reported = 0.0, 0, 0, time.perf_counter()
    for batch, weight in _weighted_batches(batches, weigh):
        optimiser.zero_grad(set_to_none=True)
        value = step(batch.to(parameters[0].device))
        (value if weight == 1 else value * weight).backward()
        nn.utils.clip_grad_norm_(parameters, clip)
        optimiser.step()
        if weight:
            total += float(value.detach()) * weigh(batch)
            weights += weigh(batch)
            rows += len(batch)
        if time.perf_counter() - reported > 0.2:
            reported = time.perf_counter()
            progress(rows * distributed.size(), total / max(weights, 1))
    loss_sum, all_weights, all_rows = distributed.all_reduce_sum([total, weights, rows])
    return loss_sum / max(all_weights, 1), int(all_rows)


def _next_groups(stream: Stream, config: TrainingConfig, seed: int, schedule: _Schedule) -> list[int]:
    """Choose the row groups of the next round: `round_rows` rows, or the rest of the epoch.

    Every worker needs a list in every round, so that neither the round nor the rest may have too few.
    """
    left = stream.order(seed, schedule.epoch)[schedule.done_groups :]
    all_lists = sum(group.lists for group in stream.groups)
    chosen: list[int] = []
    lists, lists_left = 0, sum(stream.groups[group].lists for group in left)
    for group in left:
        chosen.append(group)
        lists += stream.groups[group].lists
        enough = lists * stream.rows / all_lists >= config.round_rows
        if enough and lists >= distributed.size() and lists_left - lists >= distributed.size():
            break
    return chosen


class _TrainingRun:
    """A network in training, with everything that a checkpoint contains."""

    def __init__(self, network: nn.Module, config: TrainingConfig) -> None:
        self.network, self.config = network, config
        rate, decay = config.learning_rate, config.weight_decay
        self.optimiser = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=decay)
        self.history, self.schedule = History(), _Schedule()
        self.best = self._weights()

    def _weights(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}

    def keep_best(self, valid: float) -> None:
        """Keep the weights if they are the best; when patience ends, go back with a smaller step size, or stop."""
        history, schedule = self.history, self.schedule
        if valid < history.best:
            history.best, history.best_round, schedule.waited = valid, schedule.round, 0
            self.best = self._weights()
            return
        schedule.waited += 1
        if schedule.waited >= self.config.patience:
            schedule.waited = 0
            schedule.reduced += 1
            schedule.finished = schedule.reduced > self.config.reductions
            self.network.load_state_dict(self.best)
            for group in self.optimiser.param_groups:
                group["lr"] *= 0.3

    def save(self, path: Path) -> None:
        tensors = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for number, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{key}": torch.as_tensor(tensor) for key, tensor in state.items()}
        steps = [group["lr"] for group in self.optimiser.param_groups]
        state = json.dumps({"history": asdict(self.history), "place": asdict(self.schedule), "step": steps})
        with new_file(path) as working:
            save_file({k: v.contiguous() for k, v in tensors.items()}, working, metadata={"state": state})

    def restore(self, saved: bytes, path: Path) -> None:
        """Restore what `save` wrote from the bytes of its file, which only the first worker needs to have."""
        try:
            header = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])
            run = json.loads(header["__metadata__"]["state"])
            parts: dict[str, Weights] = {"network": {}, "best": {}, "optimiser": {}}
            for name, tensor in load(saved).items():
                part, _, rest = name.partition(".")
                parts[part][rest] = tensor
            self.network.load_state_dict(parts["network"])
            state = self.optimiser.state_dict()
            for name, tensor in parts["optimiser"].items():
                number, _, key = name.partition(".")
                state["state"].setdefault(int(number), {})[key] = tensor
            for group, step in zip(state["param_groups"], run["step"], strict=True):
                group["lr"] = step
            self.optimiser.load_state_dict(state)
            self.history, self.schedule = History(**run["history"]), _Schedule(**run["place"])
            self.best = parts["best"]
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            reason = f"is not a checkpoint of this training; remove it to start afresh ({error})"
            raise DataError(f"{path} {reason}") from error
