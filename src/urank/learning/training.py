"""The one training loop, for every network: rounds over streamed lists, early stopping, checkpoints, progress.

A round is an epoch, or a part of one when the log is large: after each, the held-out loss is measured and a checkpoint
is written. All randomness of a round follows from the seed and the round's number, so a run that is killed and started
again goes on from its last round and ends with the same bits.

The loop is the same for a team of workers (`urank.distributed`), each of which runs it on its share of the lists.
Gradients are averaged by DistributedDataParallel, in proportion to the rows or lists that each worker's loss is the
mean over, so a step is that of one worker with the whole batch. Losses are summed over the team, so all workers judge a
round alike.
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

__all__ = ["History", "Loss", "TrainingConfig", "choose_device", "mean_loss", "seeded", "train"]

Loss = Callable[[nn.Module, Batch], Tensor]
State = dict[str, Tensor]


class TrainingConfig(BaseModel):
    """How a network is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(30, ge=1, description="passes over the data at most; training stops earlier when it can")
    patience: int = Field(2, ge=1, description="rounds without a better held-out loss before the step is made smaller")
    reductions: int = Field(2, ge=0, description="times the step is made smaller before training stops")
    batch_lists: int = Field(256, ge=1, description="lists in a batch")
    learning_rate: float = Field(3e-3, gt=0, description="size of AdamW's step")
    weight_decay: float = Field(1e-3, ge=0, description="AdamW's decay")
    clip: float = Field(5.0, gt=0, description="most that the norm of a gradient may be")
    round_rows: int = Field(4_000_000, ge=1, description="impressions after which the held-out loss is measured")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where networks are trained")


@dataclass
class History:
    """How training went: for each round the mean training loss, the held-out loss, the step, rows and seconds."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    best: float = float("inf")
    best_round: int = -1


@dataclass
class _Progress:
    """Where a run stands between two rounds."""

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
        network: what is trained.
        loss: the mean loss of a batch.
        stream: the train split.
        held_out: what early stopping watches, smaller is better.
        config: settings.
        seed: decides the order of the lists and the dropout.
        checkpoint: a file that holds the state after each round; if it is there, the run goes on from it.
        report: told how far it is, with the losses.
        name: of the step that is reported.
        weigh: what a batch counts in the mean over a team: what its loss is the mean over, rows or lists.
    """
    device = choose_device(config.device)
    network.to(device)
    step = _together(_LossOf(network, loss))
    optimiser = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    history, place = History(), _Progress()
    best = _copy(network.state_dict())
    if checkpoint is not None:
        saved = distributed.broadcast_bytes(lambda: checkpoint.read_bytes() if checkpoint.exists() else b"")
        if saved:
            history, place, best = _load(saved, checkpoint, network, optimiser)
    while not place.finished and place.epoch < config.epochs:
        groups = _next_groups(stream, config, seed, place)
        started = time.perf_counter()
        note = f"loss {history.rounds[-1]['valid']:.4f}" if history.rounds else ""
        with seeded(seed * 1_000_003 + place.round + 7_919 * distributed.rank()):
            done = place.epoch * stream.rows
            mean, rows = _run_round(
                step,
                network,
                optimiser,
                stream.batches(groups, shuffle=(seed, place.epoch)),
                config.clip,
                lambda rows, train: report(name, done + rows, config.epochs * stream.rows, f"{note} train {train:.4f}"),  # noqa: B023
                weigh,
            )
        value = held_out(network)
        history.rounds.append(
            {
                "round": place.round,
                "train": mean,
                "valid": value,
                "step": optimiser.param_groups[0]["lr"],
                "rows": rows,
                "seconds": time.perf_counter() - started,
            }
        )
        best = _judge(network, optimiser, history, place, best, config, value)
        _advance(stream, place, len(groups))
        if checkpoint is not None and distributed.rank() == 0:
            _save(checkpoint, network, optimiser, history, place, best)
    report(name, config.epochs * stream.rows, config.epochs * stream.rows, f"loss {history.best:.4f}")
    network.load_state_dict(best)
    network.eval()
    return history


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within this block torch draws from the seed; what it drew from before goes on after it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**63)
        yield


def mean_loss(network: nn.Module, loss: Loss, stream: Stream) -> float:
    """The mean loss over the rows of a split, as it is (no dropout, no gradients)."""
    device = next(network.parameters()).device
    total, rows = 0.0, 0
    training = network.training
    network.eval()
    with torch.inference_mode():
        for batch in stream.batches():
            total += float(loss(network, batch.to(device))) * len(batch)
            rows += len(batch)
    network.train(training)
    loss_sum, count = distributed.all_reduce_sum([total, rows])
    return loss_sum / max(count, 1)


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda is not there; use cpu or auto")
    return torch.device(name)


class _LossOf(nn.Module):
    """A network and its loss as one module, whose forward pass DistributedDataParallel can watch."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(self.network, batch)


def _together(step: _LossOf) -> nn.Module:
    """The same, with gradients that are the mean over the team; the first worker's weights are where all begin."""
    return DistributedDataParallel(step, forward_sync_buffers=False) if distributed.size() > 1 else step


def _agreed(batches: Iterator[Batch], weigh: Callable[[Batch], int]) -> Iterator[tuple[Batch, float]]:
    """A worker's batches, and how much each counts in the mean over the team.

    Workers may have a few batches more or less than others, but all must take each step: who has none left takes part
    with one of its own that counts nothing.
    """
    if distributed.size() == 1:
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
            raise TooFewError(
                f"there are fewer lists to learn from than the {distributed.size()} workers; use fewer workers"
            )
        yield last, own * distributed.size() / weights


def _run_round(
    step: nn.Module,
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Iterator[Batch],
    clip: float,
    report: Callable[[int, float], None],
    weigh: Callable[[Batch], int],
) -> tuple[float, int]:
    device = next(network.parameters()).device
    network.train()
    total, weights, rows, told = 0.0, 0, 0, time.perf_counter()
    parameters = list(network.parameters())
    for batch, weight in _agreed(batches, weigh):
        optimiser.zero_grad(set_to_none=True)
        value = step(batch.to(device))
        (value if weight == 1 else value * weight).backward()
        nn.utils.clip_grad_norm_(parameters, clip)
        optimiser.step()
        if weight:
            total += float(value.detach()) * weigh(batch)
            weights += weigh(batch)
            rows += len(batch)
        if time.perf_counter() - told > 0.2:
            told = time.perf_counter()
            report(rows * distributed.size(), total / max(weights, 1))
    loss_sum, all_weights, all_rows = distributed.all_reduce_sum([total, weights, rows])
    return loss_sum / max(all_weights, 1), int(all_rows)


def _next_groups(stream: Stream, config: TrainingConfig, seed: int, place: _Progress) -> list[int]:
    """The row groups of the next round: to the end of the epoch, or until there are enough rows.

    Of a team each worker must have a list in every round, so too few are left neither in it nor after it.
    """
    left = stream.order(seed, place.epoch)[place.done_groups :]
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


def _advance(stream: Stream, place: _Progress, groups: int) -> None:
    place.round += 1
    place.done_groups += groups
    if place.done_groups >= len(stream.groups):
        place.epoch, place.done_groups = place.epoch + 1, 0


def _judge(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    history: History,
    place: _Progress,
    best: State,
    config: TrainingConfig,
    value: float,
) -> State:
    """Keep the best weights; after too many rounds without better ones go back to them with a smaller step, or stop."""
    if value < history.best:
        history.best, history.best_round, place.waited = value, place.round, 0
        return _copy(network.state_dict())
    place.waited += 1
    if place.waited >= config.patience:
        place.waited = 0
        place.reduced += 1
        place.finished = place.reduced > config.reductions
        network.load_state_dict(best)
        for group in optimiser.param_groups:
            group["lr"] *= 0.3
    return best


def _copy(state: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _save(
    path: Path, network: nn.Module, optimiser: torch.optim.Optimizer, history: History, place: _Progress, best: State
) -> None:
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    tensors |= {f"best.{name}": tensor for name, tensor in best.items()}
    for number, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{key}": torch.as_tensor(tensor) for key, tensor in state.items()}
    step = [group["lr"] for group in optimiser.param_groups]
    told = {"history": asdict(history), "place": asdict(place), "step": step}
    with new_file(path) as working:
        save_file({k: v.contiguous() for k, v in tensors.items()}, working, metadata={"state": json.dumps(told)})


def _load(
    saved: bytes, path: Path, network: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[History, _Progress, State]:
    """Take up the state that `_save` wrote into a file; of a team, only the first worker need have the file."""
    try:
        header = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])
        told = json.loads(header["__metadata__"]["state"])
        tensors = load(saved)
        parts: dict[str, State] = {"network": {}, "best": {}, "optimiser": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        network.load_state_dict(parts["network"])
        state = optimiser.state_dict()
        for name, tensor in parts["optimiser"].items():
            number, _, key = name.partition(".")
            state["state"].setdefault(int(number), {})[key] = tensor
        for group, step in zip(state["param_groups"], told["step"], strict=True):
            group["lr"] = step
        optimiser.load_state_dict(state)
        return History(**told["history"]), _Progress(**told["place"]), parts["best"]
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{path} is not a checkpoint of this training; remove it to start afresh ({error})") from error
