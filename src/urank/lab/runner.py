"""Run the steps of an experiment in parallel, and resume after a crash.

A task is a step of one seed. It starts when the tasks that it needs are done, and its output appears by rename when it
is complete; a task whose output exists is skipped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from graphlib import TopologicalSorter
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch

from urank.errors import UrankError
from urank.lab.appstore_experiment import STORE_STEPS, StoreTrial
from urank.lab.experiment import ExperimentConfig, ExperimentStep, Trial
from urank.lab.letor_experiment import STEPS, LetorTrial
from urank.progress import Report, silent

DATA = ("data", "store-data")
"""The steps whose output is removed when every task is done."""

EVERY_STEP: Mapping[str, ExperimentStep[Any]] = {**STEPS, **STORE_STEPS}
_REPORT_INTERVAL = 0.2


class Task(NamedTuple):
    """A step of one seed."""

    seed: int
    name: str

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.name}"

    @property
    def needs(self) -> set[Task]:
        """The tasks that come before."""
        return {Task(self.seed, name) for name in EVERY_STEP[self.name].needs}

    @property
    def cost(self) -> float:
        """Approximate duration, relative to other tasks."""
        return EVERY_STEP[self.name].cost


def seed_folder(folder: Path, seed: int) -> Path:
    """Return the folder of a seed."""
    return folder / f"seed-{seed}"


class SeedRun:
    """The trials of one seed of an experiment; `config` is of all seeds."""

    def __init__(self, folder: Path, config: ExperimentConfig, seed: int) -> None:
        own, config = seed_folder(folder, seed), config.seeded(seed)
        self.trials: tuple[Trial[Any], Trial[Any]] = LetorTrial(own, config), StoreTrial(own / "store", config.store)

    def trial(self, name: str) -> Trial[Any]:
        """Return the trial that a step belongs to."""
        return self.trials[name in STORE_STEPS]

    def has(self, name: str) -> bool:
        """Return whether a step is done."""
        return (self.trial(name).folder / EVERY_STEP[name].output).exists()

    def run(self, name: str, report: Report) -> None:
        """Run one step."""
        EVERY_STEP[name].run(self.trial(name), report)


def tasks_for(names: Iterable[str], seeds: Iterable[int]) -> list[Task]:
    """Return the tasks that lead to these methods, by seed; the longest first, so that no worker ends alone with it."""
    wanted: dict[str, None] = {}

    def add(name: str) -> None:
        for before in EVERY_STEP[name].needs:
            add(before)
        wanted.setdefault(name)

    for name in names:
        add(name)
    by_cost = sorted(wanted, key=lambda name: -EVERY_STEP[name].cost)
    return [Task(seed, name) for seed in seeds for name in by_cost]


def missing_tasks(folder: Path, config: ExperimentConfig, tasks: list[Task]) -> list[Task]:
    """Return the tasks without an output. Data counts as missing only if a missing task of its seed needs it."""
    runs = {seed: SeedRun(folder, config, seed) for seed in {task.seed for task in tasks}}
    absent = [task for task in tasks if not runs[task.seed].has(task.name)]
    needed = set[Task]().union(*(task.needs for task in absent))
    return [task for task in absent if task.name not in DATA or task in needed]


def run_tasks(
    folder: Path, config: ExperimentConfig, tasks: list[Task], *, workers: int | None = None, report: Report = silent
) -> None:
    """Run all tasks that are not done yet.

    Args:
        folder, config: of the experiment, for all seeds.
        tasks: as `tasks_for` returns them; of those that can start, the first one starts.
        workers: number of processes; one per core by default. One worker runs in this process.
        report: progress callback; of the work done, in units of cost, and of each worker.

    Raises:
        UrankError: as soon as a task fails; completed outputs stay.
    """
    trials = [trial for seed in {task.seed for task in tasks} for trial in SeedRun(folder, config, seed).trials]
    for trial in trials:
        trial.sweep()
    missing = missing_tasks(folder, config, tasks)
    total = sum(task.cost for task in tasks)
    done = total - sum(task.cost for task in missing)
    report("all steps", done, total)
    workers = min(workers or os.cpu_count() or 1, len(missing))
    with closing(_completed(missing, folder, config, workers, report)) as completed:
        for task in completed:
            done += task.cost
            report("all steps", done, total, f"{task} done")
    for trial in trials:
        trial.clean()


def _completed(
    tasks: list[Task], folder: Path, config: ExperimentConfig, workers: int, report: Report
) -> Generator[Task, None, None]:
    """Run the tasks in the order of their needs, and yield each when it is done."""
    graph = TopologicalSorter({task: task.needs.intersection(tasks) for task in tasks})
    if workers <= 1:
        with _one_thread():
            for task in graph.static_order():
                SeedRun(folder, config, task.seed).run(task.name, _relay(report, 0, task))
                yield task
        return
    graph.prepare()
    ready: list[Task] = []
    running: dict[Future[None], tuple[Task, int]] = {}
    slots = list(range(workers))
    with _pool(workers) as (pool, messages):
        while graph.is_active():
            ready = sorted([*ready, *graph.get_ready()], key=tasks.index)
            try:
                while ready and slots:
                    task, slot = ready.pop(0), slots.pop(0)
                    running[pool.submit(_work, folder, config, task, slot)] = task, slot
                finished, _ = wait(running, timeout=_REPORT_INTERVAL, return_when=FIRST_COMPLETED)
                while not messages.empty():
                    slot, task, *progress = messages.get()
                    _relay(report, slot, task)(*progress)
                for future in finished:
                    task, slot = running.pop(future)
                    slots.append(slot)
                    future.result()
                    graph.done(task)
                    yield task
            except BrokenProcessPool:
                raise UrankError(f"{task} ended unexpectedly; it may have run out of memory") from None
            except UrankError as error:
                raise UrankError(f"{task}: {error}") from error
            except OSError as error:
                raise UrankError(f"{task}: {error.filename or 'a file'}: {error.strerror or error}") from error


def _relay(report: Report, slot: int, task: Task) -> Report:
    """Return a progress callback that shows a task on the bar of its worker."""

    def relay(name: str, done: float, total: float | None, note: str = "", /) -> None:
        report(f"worker {slot + 1}", done, total, f"{task}: {name} {note}")

    return relay


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread, as in a worker: sums in another order could have other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _pool(workers: int) -> Iterator[tuple[ProcessPoolExecutor, SimpleQueue[Any]]]:
    """Start worker processes and a queue of their progress messages; on exit the workers end, whatever they do.

    Only this process holds `alive`. It closes here, or when this process is killed, and the workers exit.
    """
    context = get_context("spawn")
    ending, alive = context.Pipe(duplex=False)
    messages: SimpleQueue[Any] = context.SimpleQueue()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (ending, messages))
    try:
        yield pool, messages
    finally:
        alive.close()
        pool.shutdown(cancel_futures=True)
        ending.close()
        messages.close()


_messages: SimpleQueue[Any]


def _start_worker(ending: Connection, messages: SimpleQueue[Any]) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends the workers

    def exit_with_parent() -> None:
        ending.poll(None)  # nothing is ever sent: it returns when the other end closes
        os._exit(1)

    Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _work(folder: Path, config: ExperimentConfig, task: Task, slot: int) -> None:
    last = 0.0

    def report(*progress: Any) -> None:
        nonlocal last
        if time.monotonic() - last > _REPORT_INTERVAL:
            last = time.monotonic()
            _messages.put((slot, task, *progress))

    SeedRun(folder, config, task.seed).run(task.name, report)
