"""The tasks of an experiment: needs come first, what is done is not repeated, and interrupted runs resume."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import tomli_w
import torch

from lab.tiny import FEW, KNOWN, QUICK, TINY, config, half_written
from urank.errors import UrankError
from urank.lab.appstore_experiment import LIVE, STORE_METHODS, STORE_STEPS
from urank.lab.letor_experiment import METHODS, STEPS
from urank.lab.runner import DATA, EVERY_STEP, SeedRun, Task, missing_tasks, run_tasks, seed_folder, tasks_for
from urank.progress import Report

# --- The steps -------------------------------------------------------------------------------------------------------


def test_steps_of_the_experiments_do_not_collide(tmp_path: Path) -> None:
    assert len(KNOWN) == len(STEPS) + len(STORE_STEPS)
    assert not {name for name in STEPS if name.startswith("store-")}
    assert all(name.startswith("store-") for name in STORE_STEPS)
    assert len({method.name for method in METHODS.values()}) == len(METHODS)
    assert len({method.name for method in STORE_METHODS.values()}) == len(STORE_METHODS)
    seed = SeedRun(tmp_path, config(), 0)
    assert len({seed.trial(name).folder / EVERY_STEP[name].output for name in KNOWN}) == len(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_every_need_is_a_step_of_the_same_experiment(name: str) -> None:
    step, of_store = EVERY_STEP[name], name.startswith("store-")
    assert set(step.needs) <= set(STORE_STEPS if of_store else STEPS)
    assert step.cost > 0
    assert name in (*DATA, LIVE) or ("store-data" if of_store else "data") in step.needs


def test_sweep_keeps_checkpoints_and_clean_keeps_results(tmp_path: Path) -> None:
    folder = seed_folder(tmp_path, 0)
    for name in ("data", ".data.x1y2", ".clicks", "clicks", "results", "store/data", "store/.data.x1y2"):
        (folder / name).mkdir(parents=True)
    (folder / "store" / "results").mkdir()
    for name in ("store/test.parquet", "store/.test.parquet.x1y2", "store/results/.store-km.parquet.x1y2"):
        (folder / name).touch()
    trials = SeedRun(tmp_path, config(), 0).trials
    for trial in trials:
        trial.sweep()
    left = {"data", ".clicks", "clicks", "results", "store", "store/data", "store/results", "store/test.parquet"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == left
    for trial in trials:
        trial.clean()
    left -= {"data", ".clicks", "store/data"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == left


# --- Which tasks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "names"),
    [
        (["urank"], {"data", "clicks", "urank"}),
        (["auc-vector"], {"data", "clicks-vector", "auc-vector"}),
        (["svm-cpbm", "km"], {"data", "cpbm", "svm-cpbm", "km"}),
        (["store-urank"], {"store-data", "store-clicks", "store-urank"}),
    ],
)
def test_needs_come_along(methods: list[str], names: set[str]) -> None:
    tasks = tasks_for([*methods, *methods], [0, 2])
    assert sorted(tasks) == sorted(Task(seed, name) for seed in (0, 2) for name in names)


@pytest.mark.parametrize("data", DATA)
def test_data_is_made_again_only_for_a_task_that_needs_it(tmp_path: Path, data: str) -> None:
    tasks = tasks_for(["svm-none", "ctr1", "store-logged", "store-deepfm"], [0])
    seed = SeedRun(tmp_path, config(), 0)
    outputs = {task.name: seed.trial(task.name).folder / EVERY_STEP[task.name].output for task in tasks}
    for name, path in outputs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if name not in DATA:
            path.touch()

    def missing() -> set[str]:
        return {task.name for task in missing_tasks(tmp_path, config(), tasks)}

    assert missing() == set()
    for name in (name for name in outputs if data in EVERY_STEP[name].needs):
        outputs[name].unlink()
        assert missing() == {data, name}  # not the data of the other experiment
        outputs[data].mkdir()
        assert missing() == {name}
        outputs[data].rmdir()
        outputs[name].touch()
    other = tasks_for(["km", "store-km"], [1])
    assert set(missing_tasks(tmp_path, config(), [*tasks, *other])) == set(other)
    assert missing_tasks(tmp_path / "new", config(), [Task(0, name) for name in DATA]) == []


# --- Running ---------------------------------------------------------------------------------------------------------


def positions(folder: Path) -> dict[str, pl.DataFrame]:
    """The results of each method of the first seed, without the time."""
    found = sorted(seed_folder(folder, 0).rglob("results/*.parquet"))
    return {path.stem: pl.read_parquet(path).drop("seconds") for path in found}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that this process ran."""
    names: list[str] = []
    run = SeedRun.run

    def watched(seed: SeedRun, name: str, report: Report) -> None:
        names.append(name)
        run(seed, name, report)

    monkeypatch.setattr(SeedRun, "run", watched)
    return names


def test_finished_tasks_are_not_repeated(tmp_path: Path, ran: list[str]) -> None:
    tasks = tasks_for(["svm-none", "km"], [0])
    done: list[tuple[float, float | None]] = []

    def report(name: str, *progress: object) -> None:
        if name == "all steps":
            done.append(progress[:2])  # type: ignore[arg-type]

    run_tasks(tmp_path, config(), tasks, workers=1, report=report)
    total = sum(task.cost for task in tasks)
    assert (done[0], done[-1]) == ((0, total), (pytest.approx(total), total))
    assert done == sorted(done)
    assert (ran[0], sorted(ran)) == ("data", ["data", "km", "svm-none"])
    before = positions(tmp_path)
    ran.clear()
    run_tasks(tmp_path, config(), tasks, workers=1)
    assert ran == []
    (tmp_path / "seed-0" / "results" / "km.parquet").unlink()
    run_tasks(tmp_path, config(), tasks, workers=1)
    assert ran == ["data", "km"]
    assert positions(tmp_path)["km"].equals(before["km"])
    ran.clear()  # another experiment reuses the results
    run_tasks(tmp_path, config(), tasks_for(["svm-none", "lambdarank-none"], [0]), workers=1)
    assert ran == ["data", "lambdarank-none"]


@pytest.mark.slow
def test_finished_tasks_of_the_store_are_not_repeated(tmp_path: Path, ran: list[str]) -> None:
    tasks = tasks_for(["store-deepfm", "store-svm-truth", "store-km"], [0])
    run_tasks(tmp_path, config("table3"), tasks, workers=1)
    assert sorted(ran) == sorted(task.name for task in tasks)
    folder = tmp_path / "seed-0" / "store"
    assert {path.name for path in folder.iterdir()} == {"test.parquet", "propensity.json", "deepfm", "results"}
    before = positions(tmp_path)
    ran.clear()
    (folder / "results" / "store-svm-truth.parquet").unlink()
    run_tasks(tmp_path, config("table3"), tasks, workers=1)
    assert ran == ["store-data", "store-svm-truth"]
    assert all(frame.equals(before[name]) for name, frame in positions(tmp_path).items())
    ran.clear()  # the experiments in one folder do not need one another
    run_tasks(tmp_path, config(), tasks_for(["km", "store-km"], [0]), workers=1)
    assert ran == ["data", "km"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_failure_is_one_sentence(tmp_path: Path, workers: int) -> None:
    absent = config(simulation={**TINY["simulation"], "data": str(tmp_path / "absent.txt")})
    with pytest.raises(UrankError, match=r"absent\.txt") as failed:
        run_tasks(tmp_path / "run", absent, tasks_for(["km", "svm-none"], [0]), workers=workers)
    assert "\n" not in str(failed.value)
    assert multiprocessing.active_children() == []
    assert not list((tmp_path / "run").rglob("*"))


def test_outputs_before_a_failure_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    real = SeedRun.run

    def fails(seed: SeedRun, name: str, report: Report) -> None:
        if name == "km":
            raise UrankError("no more")
        real(seed, name, report)

    tasks = tasks_for(["km"], [0])
    with monkeypatch.context() as patch:
        patch.setattr(SeedRun, "run", fails)
        with pytest.raises(UrankError, match="no more"):
            run_tasks(tmp_path, config(), tasks, workers=1)
    ran.clear()
    run_tasks(tmp_path, config(), tasks, workers=1)
    assert ran == ["km"]


@pytest.mark.slow
def test_a_killed_worker_is_reported(tmp_path: Path) -> None:
    def kill(name: str, done: float, total: float | None, note: str = "", /) -> None:
        if note.endswith("data done"):
            for child in multiprocessing.active_children():
                child.kill()
                child.join()

    with pytest.raises(UrankError, match=r"seed 0, .* ended unexpectedly; it may have run out of memory"):
        run_tasks(tmp_path, config(), tasks_for(["svm-none", "km"], [0]), workers=2, report=kill)
    assert multiprocessing.active_children() == []
    assert (tmp_path / "seed-0" / "data").is_dir()


@pytest.mark.slow
def test_a_failure_ends_the_other_workers(tmp_path: Path) -> None:
    """Without waiting for the click model, which would take minutes."""
    training = {"epochs": 100_000, "batch_lists": 1, "patience": 100_000}
    long = config(clicks={"families": ["monotone"], "training": training})
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "results").touch()  # a file, so that no result can be written
    started = time.monotonic()
    with pytest.raises(UrankError, match="seed 0, km"):
        run_tasks(tmp_path, long, tasks_for(["km", "ctr1"], [0]), workers=2)
    assert time.monotonic() - started < 60
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Killed while it trains, its workers exit; run again, it equals an uninterrupted run in one process."""
    settings = {**TINY, "methods": list(FEW)}
    settings["clicks"] = {"families": ["monotone"], "training": {**QUICK, "epochs": 40}}
    file, output = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(settings))
    command = [sys.executable, "-m", "urank", "reproduce", "table1", "-o", output, "--config", file, "--seeds", 1]
    arguments = [*map(str, command), "--workers", "2", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A worker that is being started when its parent dies complains on its own account.
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: (output / "seed-0" / ".clicks" / "run.txt").exists() or process.poll() is not None)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert len(children) >= 2
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert not (output / "seed-0" / "clicks").exists()
    (output / "seed-0" / ".data.half").mkdir()  # as if it had been killed a little earlier

    again = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert half_written(output) == []
    assert (output / "report.html").is_file()
    assert not (output / "seed-0" / "data").exists()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_tasks(tmp_path / "whole", config(**settings), tasks_for(FEW, [0]), workers=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    one, other = positions(output), positions(tmp_path / "whole")
    assert sorted(one) == sorted(other) == sorted(FEW)
    assert all(one[name].equals(other[name]) for name in FEW)
    weights = [folder / "seed-0" / "clicks" / "member-0.safetensors" for folder in (output, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
