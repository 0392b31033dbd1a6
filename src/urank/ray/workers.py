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
from threading import Event, Thread
from typing import Any

import torch

from urank import distributed
from urank.errors import UrankError
from urank.progress import Report, silent
from urank.ray.cluster import Cluster, connected

POLL_SECONDS = 0.5


class ProgressActor:
    """Actor that collects progress, the result or a refusal from the workers; the driver polls it."""

    def __init__(self) -> None:
        self._progress: dict[str, tuple[float, float | None, str]] = {}
        self._outcome: tuple[Any, UrankError | None] = None, None

    def report(self, step: str, done: float, total: float | None, note: str) -> None:
        self._progress[step] = done, total, note

    def progress(self) -> dict[str, tuple[float, float | None, str]]:
        """Return the progress since the last call."""
        progress, self._progress = self._progress, {}
        return progress

    def finish(self, result: Any, refusal: UrankError | None = None) -> None:
        """Store the result of the job, or its refusal: wrong data or settings, which a retry would not change."""
        self._outcome = result, refusal or self._outcome[1]

    def outcome(self) -> tuple[Any, UrankError | None]:
        """Return the result and the refusal; None while the job runs."""
        return self._outcome


@contextmanager
def relay_progress(report: Report) -> Iterator[Any]:
    """Start an actor for a job and report its progress while the block runs."""
    import ray

    actor = ray.remote(num_cpus=0)(ProgressActor).remote()
    stopped = Event()

    def follow() -> None:
        last = False
        while not last:
            last = stopped.wait(POLL_SECONDS)
            for step, (done, total, note) in ray.get(actor.progress.remote()).items():
                report(step, done, total, note)

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield actor
    finally:
        stopped.set()
        thread.join()
        ray.kill(actor)


Work = Callable[[Mapping[str, Any], Report], Any]
"""Function of the settings and a progress callback; the first worker's return value is the result. It may be called
again after the loss of a worker, and then resumes from its checkpoints."""

DAY_SECONDS = 24 * 3600
REPORT_SECONDS = 0.3
MAX_FAILURES = 3
"""How often lost workers are replaced before a job fails."""


def run_on_workers(work: Work, settings: Mapping[str, Any], cluster: Cluster, *, report: Report = silent) -> Any:
    """Run a function on the workers of a cluster and return the result of the first, whose progress is reported.

    Raises:
        UrankError: If the function refuses, which is not retried, or if workers are lost or fail too often.
    """
    folder = tempfile.TemporaryDirectory(prefix="urank-ray-")
    with connected(cluster), folder as storage, relay_progress(report) as actor:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        import ray

        gpus = ray.cluster_resources().get("GPU", 0) >= cluster.workers
        trainer = TorchTrainer(
            _on_worker,
            train_loop_config={"work": work, "settings": dict(settings), "actor": actor, "gpus": gpus},
            scaling_config=ScalingConfig(num_workers=cluster.workers, use_gpu=gpus),
            run_config=RunConfig(name="urank", storage_path=storage, failure_config=FailureConfig(MAX_FAILURES)),
            torch_config=TorchConfig(timeout_s=DAY_SECONDS),  # the others wait while the first works alone
        )
        failure: Exception | None = None
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            failure = error
        result, refusal = ray.get(actor.outcome.remote())
        if refusal is not None:
            raise refusal from failure
        if failure is not None:
            reason = " ".join(str(failure).split())[:300]
            raise UrankError(f"workers were lost or failed more than {MAX_FAILURES} times: {reason}") from failure
        return result


def _on_worker(config: dict[str, Any]) -> None:
    """Entry point of Ray Train on each worker."""
    torch.set_num_threads(1)
    if config["gpus"]:
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # do not share GPUs among workers
    import ray

    actor = config["actor"]
    if ray.get(actor.outcome.remote())[1] is not None:  # Ray retries after any error; a refusal would only be repeated
        return
    try:
        result = config["work"](config["settings"], _sender(actor) if distributed.rank() == 0 else silent)
    except UrankError as error:
        ray.get(actor.finish.remote(None, type(error)(str(error))))
        raise  # stops the workers that wait for this one
    if distributed.rank() == 0:
        ray.get(actor.finish.remote(result))


def _sender(actor: Any) -> Report:
    """Send progress to the actor, at most every `REPORT_SECONDS`."""
    last: dict[str, float] = {}

    def send(step: str, done: float, total: float | None, note: str = "", /) -> None:
        now = time.monotonic()
        if now - last.get(step, 0.0) > REPORT_SECONDS or (total is not None and done >= total):
            last[step] = now
            actor.report.remote(step, done, total, note)

    return send
