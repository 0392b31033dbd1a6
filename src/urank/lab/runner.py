"""Run the steps of an experiment, as many at a time as there are workers; what is done already is not done again.

A step is a name and a seed. It starts when what it needs is on disk, runs in a process of its own, and leaves a file or
a folder that appears when it is complete. So a run that was killed goes on where it was, with the same command.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Thread

from urank.errors import UrankError
from urank.lab.appstore_experiment import STORE_METHODS, STORE_STEPS, StoreTrial, run_store_step, store_needs
from urank.lab.letor_experiment import Trial, needs_of, run_step
from urank.lab.settings import ExperimentConfig
from urank.progress import Report, silent

__all__ = ["DATA", "SeedRun", "Step", "needs", "run_steps", "seed_folder", "steps_for"]

DATA = ("data", "store-data")
"""The steps whose results are removed when all that learn from them are done."""


def needs(name: str) -> tuple[tuple[str, ...], float]:
    """The steps before a step or a method, and its cost."""
    return store_needs(name) if _of_store(name) else needs_of(name)


def _of_store(name: str) -> bool:
    return name in STORE_METHODS or name in STORE_STEPS


class SeedRun:
    """All that is done for one seed.

    Args:
        folder: of the seed.
        config: of the experiment, with this seed.
    """

    def __init__(self, folder: Path, config: ExperimentConfig) -> None:
        self.trial = Trial(folder, config)
        self.store = StoreTrial(folder / "store", config.store)

    def has(self, name: str) -> bool:
        """Whether a step or a method is done."""
        return self.store.has(name) if _of_store(name) else self.trial.has(name)

    def run(self, name: str, report: Report) -> None:
        """Do one step, or train and judge one method."""
        if _of_store(name):
            run_store_step(self.store, name, report)
        else:
            run_step(self.trial, name, report)

    def sweep(self) -> None:
        """Remove what a killed run left half-written."""
        self.trial.sweep()
        self.store.sweep()

    def clean(self) -> None:
        """Remove what can be made again."""
        self.trial.clean()
        self.store.clean()


@dataclass(frozen=True)
class Step:
    """One thing to do for one seed."""

    seed: int
    name: str

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.name}"


def seed_folder(folder: Path, seed: int) -> Path:
    """Where all of a seed is kept."""
    return folder / f"seed-{seed}"


def steps_for(names: Iterable[str], seeds: Iterable[int]) -> list[Step]:
    """The steps that lead to these methods, what is needed before what needs it."""
    ordered: dict[str, None] = {}

    def add(name: str) -> None:
        for before in needs(name)[0]:
            add(before)
        ordered.setdefault(name)

    for name in names:
        add(name)
    # What takes longest goes first where nothing else decides, so that no worker ends alone with it.
    by_cost = sorted(ordered, key=lambda name: -needs(name)[1])
    return [Step(seed, name) for seed in seeds for name in by_cost]


def run_steps(
    folder: Path,
    config: ExperimentConfig,
    steps: Iterable[Step],
    *,
    workers: int | None = None,
    report: Report = silent,
) -> None:
    """Do all steps.

    Args:
        folder: of the experiment.
        config: of all seeds.
        steps: what to do, as `steps_for` gives it.
        workers: processes; one for each core by default. With one, all is done in this process.
        report: told of the work done, in units of cost, and of what each worker does.

    Raises:
        UrankError: as soon as a step fails; what was done stays.
    """
    steps = list(steps)
    for seed in {step.seed for step in steps}:
        SeedRun(seed_folder(folder, seed), config.seeded(seed)).sweep()
    left = _missing(folder, config, steps)
    workers = min(workers or os.cpu_count() or 1, max(len(left), 1))
    total = sum(needs(step.name)[1] for step in steps)
    book = StepQueue(folder, config, left, total, report)
    if workers == 1:
        _in_this_process(book)
    else:
        _in_processes(book, workers)
    for seed in {step.seed for step in steps}:
        SeedRun(seed_folder(folder, seed), config.seeded(seed)).clean()


def _missing(folder: Path, config: ExperimentConfig, steps: list[Step]) -> list[Step]:
    """The steps whose results are not there, with the data of their seeds where that was removed."""
    seeds = {step.seed: SeedRun(seed_folder(folder, step.seed), config.seeded(step.seed)) for step in steps}
    absent = [step for step in steps if not seeds[step.seed].has(step.name)]
    needed = {Step(step.seed, name) for step in absent if step.name not in DATA for name in needs(step.name)[0]}
    return [step for step in absent if step.name not in DATA or step in needed]


class StepQueue:
    """Which steps are left, running and done."""

    def __init__(
        self,
        folder: Path,
        config: ExperimentConfig,
        left: list[Step],
        total: float,
        report: Report,
    ) -> None:
        self.folder, self.config, self.left, self.total, self.report = folder, config, left, total, report
        self.running: set[Step] = set()
        self.done = total - sum(needs(step.name)[1] for step in left)
        self.report("all steps", self.done, self.total)

    def seed(self, step: Step) -> SeedRun:
        return SeedRun(seed_folder(self.folder, step.seed), self.config.seeded(step.seed))

    def next(self) -> Step | None:
        """A step that can start now."""
        for step in self.left:
            waits = {Step(step.seed, name) for name in needs(step.name)[0]}
            if not waits & ({*self.left} | self.running):
                self.left.remove(step)
                self.running.add(step)
                return step
        return None

    def finish(self, step: Step) -> None:
        self.running.discard(step)
        self.done += needs(step.name)[1]
        self.report("all steps", self.done, self.total, f"{step} done")

    def told(self, worker: int, step: Step) -> Report:
        """What a step reports to: one bar for each worker."""

        def tell(name: str, done: float, total: float | None, note: str = "", /) -> None:
            self.report(f"worker {worker + 1}", done, total, f"{step}: {name} {note}")

        return tell


def _in_this_process(book: StepQueue) -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: sums in another order could end with other bits
    try:
        while book.left:
            step = book.next()
            assert step is not None  # noqa: S101 - nothing is running, so something can
            book.seed(step).run(step.name, book.told(0, step))
            book.finish(step)
    finally:
        torch.set_num_threads(threads)


def _in_processes(book: StepQueue, workers: int) -> None:
    context = get_context("spawn")
    pool: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, Step] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, book.folder, book.config), daemon=True)
            process.start()
            theirs.close()
            pool[ours] = process
        numbers = {connection: number for number, connection in enumerate(pool)}
        while book.left or busy:
            for connection in pool:
                if connection not in busy and (step := book.next()) is not None:
                    busy[connection] = step
                    with suppress(ConnectionError):  # whether it still lives is seen below
                        connection.send(step)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)  # noqa: S101 - nothing else is waited for
                step = busy[ready]
                try:
                    kind, *content = ready.recv()
                except (EOFError, ConnectionError):
                    raise UrankError(f"{step} ended without a word; it may have run out of memory") from None
                if kind == "report":
                    book.told(numbers[ready], step)(*content)
                    continue
                if kind == "failed":
                    raise UrankError(f"{step}: {content[0]}")
                del busy[ready]
                book.finish(step)
    finally:
        for connection, process in pool.items():
            process.terminate()
            process.join()
            connection.close()


def _end_with_parent() -> None:
    """Do not go on for nobody: another run may have begun in the same folder."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(connection: Connection, folder: Path, config: ExperimentConfig) -> None:
    """What a worker does: steps, one after another, as they are sent."""
    import torch  # in the worker, which has a core to itself

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the one who sends, who ends this process
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    last = 0.0

    def report(name: str, done: float, total: float | None, note: str = "", /) -> None:
        nonlocal last
        if time.monotonic() - last > 0.2:
            last = time.monotonic()
            connection.send(("report", name, done, total, note))

    with suppress(EOFError, ConnectionError):  # the one who sends is gone
        while True:
            step = connection.recv()
            try:
                SeedRun(seed_folder(folder, step.seed), config.seeded(step.seed)).run(step.name, report)
            except ConnectionError:
                raise
            except UrankError as error:
                connection.send(("failed", str(error)))
            except OSError as error:
                connection.send(("failed", f"{error.filename or 'a file'}: {error.strerror or error}"))
            else:
                connection.send(("done",))
