"""Run one function on all workers at once, as a process group of `torch.distributed`.

Ray Train starts the workers and, when one is lost, restarts all of them; they resume from the last checkpoint. The
function is written for one process; `urank.distributed` makes it work in many.
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

POLL_SECONDS = 0.5


class ProgressActor:
    """Actor that collects progress, the result or a refusal from the workers; the driver polls it."""

    def __init__(self) -> None:
        self._progress: dict[str, tuple[float, float | None, str]] = {}
        self._result: Any = None
        self._refusal: tuple[str, str] | None = None

    def report(self, step: str, done: float, total: float | None, note: str) -> None:
        """Record the progress of a step."""
        self._progress[step] = done, total, note

    def progress(self) -> dict[str, tuple[float, float | None, str]]:
        """Return the progress since the last call."""
        progress, self._progress = self._progress, {}
        return progress

    def hand_in(self, result: Any) -> None:
        """Store the result of the job."""
        self._result = result

    def refuse(self, kind: str, sentence: str) -> None:
        """Store a refusal: wrong data or settings, which a retry would not change."""
        self._refusal = kind, sentence

    def result(self) -> Any:
        """Return the result of the job; None while it runs."""
        return self._result

    def refusal(self) -> tuple[str, str] | None:
        """Return the kind and the sentence of a refusal; None if there is none."""
        return self._refusal


@contextmanager
def relay_progress(report: Report) -> Iterator[Any]:
    """Start an actor for a job and report its progress while the block runs."""
    import ray

    actor = ray.remote(num_cpus=0)(ProgressActor).remote()
    stopped = Event()

    def relay() -> None:
        for step, (done, total, note) in ray.get(actor.progress.remote()).items():
            report(step, done, total, note)

    def follow() -> None:
        while not stopped.wait(POLL_SECONDS):
            relay()

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield actor
        stopped.set()
        thread.join()
        relay()
    finally:
        stopped.set()
        thread.join()
        ray.kill(actor)


def raise_refusal(actor: Any) -> None:
    """Raise the refusal of the job, if there is one."""
    import ray

    refusal = ray.get(actor.refusal.remote())
    if refusal is not None:
        kinds = (ConfigError, DataError, TooFewError)
        raise next((kind for kind in kinds if kind.__name__ == refusal[0]), UrankError)(refusal[1])


Work = Callable[[Mapping[str, Any], Report], Any]
"""Function of the settings and a progress callback; the first worker's return value is the result. It may be called
again after the loss of a worker, and then resumes from its checkpoints."""

DAY_SECONDS = 24 * 3600
REPORT_SECONDS = 0.3


def run_on_workers(work: Work, settings: Mapping[str, Any], cluster: Cluster, *, report: Report = silent) -> Any:
    """Run a function on the workers of a cluster and return the result of the first.

    Args:
        work: The function, the same on every worker.
        settings: Its first argument.
        cluster: Where to run.
        report: Progress callback for the first worker.

    Raises:
        UrankError: If the function refuses, which is not retried, or if workers are lost or fail too often.
    """
    with (
        connected(cluster),
        tempfile.TemporaryDirectory(prefix="urank-ray-") as storage,
        relay_progress(report) as actor,
    ):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        import ray

        gpus = ray.cluster_resources().get("GPU", 0) >= cluster.workers
        trainer = TorchTrainer(
            _on_worker,
            train_loop_config={"work": work, "settings": dict(settings), "actor": actor, "gpus": gpus},
            scaling_config=ScalingConfig(num_workers=cluster.workers, use_gpu=gpus),
            run_config=RunConfig(
                name="urank",
                storage_path=str(Path(storage)),
                failure_config=FailureConfig(max_failures=cluster.failures),
            ),
            torch_config=TorchConfig(timeout_s=DAY_SECONDS),  # the others wait while the first works alone
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise_refusal(actor)
            reason = " ".join(str(error).split())[:300]
            raise UrankError(f"workers were lost or failed more than {cluster.failures} times: {reason}") from error
        raise_refusal(actor)
        return ray.get(actor.result.remote())


def _on_worker(config: dict[str, Any]) -> None:
    """Entry point of Ray Train on each worker."""
    torch.set_num_threads(1)
    if config["gpus"]:
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # do not share GPUs among workers
    actor = config["actor"]
    if _call(actor.refusal) is not None:  # Ray retries after any error; a refusal would only be repeated
        return
    try:
        result = config["work"](config["settings"], _sender(actor) if distributed.rank() == 0 else silent)
    except UrankError as error:
        _call(actor.refuse, type(error).__name__, str(error))
        raise  # stops the workers that wait for this one
    if distributed.rank() == 0:
        _call(actor.hand_in, result)


def _call(method: Any, *arguments: Any) -> Any:
    import ray

    return ray.get(method.remote(*arguments))


def _sender(actor: Any) -> Report:
    """Send progress to the actor, at most every `REPORT_SECONDS`."""
    last: dict[str, float] = {}

    def send(step: str, done: float, total: float | None, note: str = "", /) -> None:
        now = time.monotonic()
        if now - last.get(step, 0.0) > REPORT_SECONDS or (total is not None and done >= total):
            last[step] = now
            actor.report.remote(step, done, total, note)

    return send
