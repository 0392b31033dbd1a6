"""One function on all workers at once, as a team of `torch.distributed`.

Ray Train starts them and, when one is lost, starts all anew; they go on from the last checkpoint. The function is that
of one process; `urank.distributed` makes it that of many.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from urank import distributed
from urank.errors import ConfigError, DataError, TooFewError, UrankError
from urank.progress import Report, silent
from urank.ray.cluster import Cluster, connected

__all__ = ["ProgressActor", "Work", "raise_refusal", "relay_progress", "run_on_workers"]

SECONDS = 0.5


class ProgressActor:
    """Lives in a process of Ray; everybody writes to it, the starting process reads it now and then."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, float | None, str]] = {}
        self._result: Any = None
        self._refusal: tuple[str, str] | None = None

    def tell(self, step: str, done: float, total: float | None, note: str) -> None:
        """Note how far a step is."""
        self._told[step] = done, total, note

    def told(self) -> dict[str, tuple[float, float | None, str]]:
        """What was noted since the last time."""
        told, self._told = self._told, {}
        return told

    def hand_in(self, result: Any) -> None:
        """Leave what the job made."""
        self._result = result

    def refuse(self, kind: str, sentence: str) -> None:
        """Leave why the job cannot be done: wrong data or settings, which no other try would change."""
        self._refusal = kind, sentence

    def result(self) -> Any:
        """What the job made."""
        return self._result

    def refusal(self) -> tuple[str, str] | None:
        """Why it cannot be done."""
        return self._refusal


@contextmanager
def relay_progress(report: Report) -> Iterator[Any]:
    """A board of a job, whose progress is reported here as long as the block lasts."""
    import ray

    board = ray.remote(num_cpus=0)(ProgressActor).remote()
    stopped = Event()

    def pass_on() -> None:
        for step, (done, total, note) in ray.get(board.told.remote()).items():
            report(step, done, total, note)

    def follow() -> None:
        while not stopped.wait(SECONDS):
            pass_on()

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield board
        stopped.set()
        thread.join()
        pass_on()
    finally:
        stopped.set()
        thread.join()
        ray.kill(board)


def raise_refusal(board: Any) -> None:
    """Raise what the job refused, if it did."""
    import ray

    refusal = ray.get(board.refusal.remote())
    if refusal is not None:
        kinds = (ConfigError, DataError, TooFewError)
        raise next((kind for kind in kinds if kind.__name__ == refusal[0]), UrankError)(refusal[1])


Work = Callable[[Mapping[str, Any], Report], Any]
"""What a worker does with the settings; what the first worker returns is the result. It may be called again after the
loss of a worker, and then goes on from the checkpoints that it left."""

DAY_SECONDS = 24 * 3600
TELL_SECONDS = 0.3


def run_on_workers(work: Work, settings: Mapping[str, Any], cluster: Cluster, *, report: Report = silent) -> Any:
    """Run a function on the workers of a cluster and return what the first of them returned.

    Args:
        work: the function, the same on every worker.
        settings: what it is given.
        cluster: where.
        report: told how far the first worker is.

    Raises:
        UrankError: what the function refused, which is not tried again; or when workers were lost or failed too often.
    """
    with (
        connected(cluster),
        tempfile.TemporaryDirectory(prefix="urank-ray-") as storage,
        relay_progress(report) as board,
    ):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        import ray

        gpus = ray.cluster_resources().get("GPU", 0) >= cluster.workers
        trainer = TorchTrainer(
            _on_worker,
            train_loop_config={"work": work, "settings": dict(settings), "board": board, "gpus": gpus},
            scaling_config=ScalingConfig(num_workers=cluster.workers, use_gpu=gpus),
            run_config=RunConfig(
                name="urank",
                storage_path=str(Path(storage)),
                failure_config=FailureConfig(max_failures=cluster.failures),
            ),
            torch_config=TorchConfig(timeout_s=DAY_SECONDS),  # others wait while the first does what only one can
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise_refusal(board)
            reason = " ".join(str(error).split())[:300]
            raise UrankError(f"workers were lost or failed more than {cluster.failures} times: {reason}") from error
        raise_refusal(board)
        return ray.get(board.result.remote())


def _on_worker(config: dict[str, Any]) -> None:
    """What Ray Train calls on each worker."""
    torch.set_num_threads(1)
    if config["gpus"]:
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # workers without a GPU of their own do not share one
    board = config["board"]
    if _asked(board.refusal) is not None:  # Ray calls again after any error; a refusal would only be repeated
        return
    try:
        made = config["work"](config["settings"], _teller(board) if distributed.rank() == 0 else silent)
    except UrankError as error:
        _asked(board.refuse, type(error).__name__, str(error))
        raise  # so that workers which wait for this one are stopped
    if distributed.rank() == 0:
        _asked(board.hand_in, made)


def _asked(method: Any, *arguments: Any) -> Any:
    import ray

    return ray.get(method.remote(*arguments))


def _teller(board: Any) -> Report:
    """Passes progress on, not more often than anybody can see."""
    last: dict[str, float] = {}

    def tell(step: str, done: float, total: float | None, note: str = "", /) -> None:
        now = time.monotonic()
        if now - last.get(step, 0.0) > TELL_SECONDS or (total is not None and done >= total):
            last[step] = now
            board.tell.remote(step, done, total, note)

    return tell
