"""The one training loop of all networks: rounds over streamed lists, a fixed schedule, checkpoints, progress.

The learning rate rises linearly over the first tenth of the training and falls linearly to zero over the rest. It
depends only on the share of the lists processed, so it is the same for all workers and after a crash.

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

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adamw import adamw

from urank import distributed
from urank.errors import ConfigError, DataError, TooFewError
from urank.learning.batches import Batch, Stream
from urank.learning.training_settings import TrainingConfig
from urank.progress import Report, silent
from urank.storage import new_file

Loss = Callable[[nn.Module, Batch], Tensor]
Weights = dict[str, Tensor]

WARM_UP = 0.1
"""Share of the training in which the learning rate rises."""

FAST = 10.0
"""Learning rate of `fast_parameters` relative to the others."""


def rate_share(progress: float) -> float:
    """Return the learning rate as a share of the highest, by the share of the training that is done.

    >>> [round(rate_share(progress), 3) for progress in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return max(0.0, min(progress / WARM_UP, (1 - progress) / (1 - WARM_UP)))


@dataclass
class History:
    """The course of training: for each round its number, train and valid loss, last step size, rows and seconds."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    best: float = float("inf")
    best_round: int = -1


@dataclass
class _Schedule:
    """The state of a run between two rounds."""

    epoch: int = 0
    done_groups: int = 0
    done_lists: int = 0
    round: int = 0
    waited: int = 0


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

    A network may have a method `fast_parameters` that returns the names of parameters with ten times the learning rate
    and no weight decay, such as biases and position curves.

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
    epoch_lists = sum(group.lists for group in stream.groups)
    plan = config.plan(stream.distinct)
    run = _TrainingRun(network, plan.learning_rate, config.weight_decay)
    if checkpoint is not None:
        saved = distributed.broadcast_bytes(lambda: checkpoint.read_bytes() if checkpoint.exists() else b"")
        if saved:
            run.restore(saved, checkpoint)
    history, schedule, all_rows = run.history, run.schedule, plan.epochs * stream.rows
    report(name, schedule.epoch * stream.rows, all_rows)
    while schedule.waited < config.patience and schedule.epoch < plan.epochs:
        started, done = time.perf_counter(), schedule.epoch * stream.rows
        note = f"loss {history.rounds[-1]['valid']:.4f} " if history.rounds else ""

        def progress(rows: int, mean: float, done: int = done, note: str = note) -> None:
            report(name, done + rows, all_rows, f"{note}train {mean:.4f}")

        def set_rate(lists: float, before: int = schedule.epoch * epoch_lists + schedule.done_lists) -> None:
            run.set_rate((before + lists) / (plan.epochs * epoch_lists))

        groups = _next_groups(stream, config, seed, schedule)
        batches = stream.batches(groups, shuffle=(seed, schedule.epoch), batch_lists=plan.batch_lists)
        with seeded(seed * 1_000_003 + schedule.round + 7_919 * distributed.rank()):
            mean, rows = _run_round(step, run.optimiser, batches, config.clip, set_rate, progress, weigh)
        valid = held_out(network)
        losses = {"round": schedule.round, "train": mean, "valid": valid, "step": run.optimiser.rates[0]}
        history.rounds.append({**losses, "rows": rows, "seconds": time.perf_counter() - started})
        run.keep_best(valid)
        schedule.round += 1
        schedule.done_groups += len(groups)
        schedule.done_lists += sum(stream.groups[group].lists for group in groups)
        if schedule.done_groups >= len(stream.groups):
            schedule.epoch, schedule.done_groups, schedule.done_lists = schedule.epoch + 1, 0, 0
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


def mean_loss(network: nn.Module, loss: Loss, stream: Stream, *, weigh: Callable[[Batch], int] = len) -> float:
    """Compute the mean loss over the rows of a split, or what `weigh` counts, without dropout and gradients."""
    device = next(network.parameters()).device
    total, rows, training = 0.0, 0, network.training
    network.eval()
    with torch.inference_mode():
        for batch in stream.batches():
            total += float(loss(network, batch.to(device))) * weigh(batch)
            rows += weigh(batch)
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


def _weighted_batches(batches: Iterator[Batch], weigh: Callable[[Batch], int]) -> Iterator[tuple[Batch, float, float]]:
    """Iterate over a worker's batches, with their weights in the mean over workers and the lists of all workers.

    Workers may have a few batches more or less than others, but all must take part in each step: a worker without a
    batch left repeats its last one with weight 0.
    """
    workers = distributed.size()
    if workers == 1:
        yield from ((batch, 1.0, batch.lists) for batch in batches)
        return
    last: Batch | None = None
    while True:
        batch = next(batches, None)
        last = batch if batch is not None else last
        own, own_lists = (0, 0) if batch is None else (weigh(batch), batch.lists)
        weights, lists, lacking = distributed.all_reduce_sum([own, own_lists, last is None])
        if not weights:
            return
        if last is None or lacking:
            raise TooFewError(f"there are fewer training lists than the {workers} workers; use fewer workers")
        yield last, own * workers / weights, lists


def _run_round(
    step: nn.Module,
    optimiser: _AdamW,
    batches: Iterator[Batch],
    clip: float,
    set_rate: Callable[[float], None],
    progress: Callable[[int, float], None],
    weigh: Callable[[Batch], int],
) -> tuple[float, int]:
    """Take a step for each batch; return the mean loss and the rows of all workers."""
    step.train()
    parameters = list(step.parameters())
    total, weights, rows, lists, reported = 0.0, 0, 0, 0.0, time.perf_counter()
    for batch, weight, step_lists in _weighted_batches(batches, weigh):
        set_rate(lists + step_lists / 2)
        lists += step_lists
        step.zero_grad(set_to_none=True)
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


class _AdamW:
    """AdamW on torch's functional form: constructing `torch.optim.AdamW` imports the compiler, a second of CPU time.

    Attributes:
        rates: the learning rates of the slow and the fast parameters; the fast ones have no weight decay.
        state: the moments and the number of steps of each parameter, by name.
    """

    def __init__(self, network: nn.Module, rate: float, decay: float) -> None:
        find = getattr(network, "fast_parameters", None)
        fast = set(find()) if find is not None else set()
        named = dict(network.named_parameters())
        self.groups = [
            ({name: each for name, each in named.items() if (name in fast) == is_fast}, is_fast)
            for is_fast in (False, True)
        ]
        self.highest, self.decay = (rate, FAST * rate), decay
        self.rates = self.highest
        self.state: dict[str, dict[str, Tensor]] = {
            name: {"mean": torch.zeros_like(each), "square": torch.zeros_like(each), "steps": each.new_zeros(())}
            for name, each in named.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have gradients."""
        for (named, is_fast), rate in zip(self.groups, self.rates, strict=True):
            names = [name for name, each in named.items() if each.grad is not None]
            parameters: list[Tensor] = [named[name] for name in names]
            gradients = [each.grad for each in parameters if each.grad is not None]
            means, squares, steps = ([self.state[name][key] for name in names] for key in ("mean", "square", "steps"))
            adamw(
                parameters, gradients, means, squares, [], steps,
                fused=True, amsgrad=False, beta1=0.9, beta2=0.999, lr=rate,
                weight_decay=0.0 if is_fast else self.decay, eps=1e-8, maximize=False,
            )  # fmt: skip


class _TrainingRun:
    """A network in training, with everything that a checkpoint contains."""

    def __init__(self, network: nn.Module, rate: float, decay: float) -> None:
        self.network = network
        self.optimiser = _AdamW(network, rate, decay)
        self.history, self.schedule = History(), _Schedule()
        self.best = self._weights()

    def _weights(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}

    def set_rate(self, progress: float) -> None:
        """Set the learning rate of the next step."""
        slow, fast = self.optimiser.highest
        self.optimiser.rates = (slow * rate_share(progress), fast * rate_share(progress))

    def keep_best(self, valid: float) -> None:
        """Keep the weights if they are the best."""
        history, schedule = self.history, self.schedule
        if valid < history.best:
            history.best, history.best_round, schedule.waited = valid, schedule.round, 0
            self.best = self._weights()
        else:
            schedule.waited += 1

    def save(self, path: Path) -> None:
        tensors = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, moments in self.optimiser.state.items():
            tensors |= {f"optimiser.{key}.{name}": tensor for key, tensor in moments.items()}
        state = json.dumps({"history": asdict(self.history), "place": asdict(self.schedule)})
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
            for name, tensor in parts["optimiser"].items():
                key, _, parameter = name.partition(".")
                self.optimiser.state[parameter][key].copy_(tensor)
            self.history, self.schedule = History(**run["history"]), _Schedule(**run["place"])
            self.best = parts["best"]
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            reason = f"is not a checkpoint of this training; remove it to start afresh ({error})"
            raise DataError(f"{path} {reason}") from error
