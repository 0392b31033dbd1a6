"""The steps of an experiment: what is needed comes first, what is there is not made again, whatever was killed."""

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
from hypothesis import given
from hypothesis import strategies as st

from lab.tiny import FEW, KNOWN, QUICK, TINY, config, half_written, is_method
from urank.errors import UrankError
from urank.lab import runner as running
from urank.lab.appstore_experiment import STORE_STEPS
from urank.lab.letor_experiment import STEPS
from urank.lab.runner import DATA, SeedRun, Step, needs, run_steps, seed_folder, steps_for
from urank.progress import Report

# --- which steps, and when -----------------------------------------------------------------------------------------


def test_what_is_needed_comes_along() -> None:
    assert {step.name for step in steps_for(["urank"], [0])} == {"data", "clicks", "urank"}
    assert {step.name for step in steps_for(["auc-vector"], [0])} == {"data", "clicks-vector", "auc-vector"}
    assert {step.name for step in steps_for(["svm-cpbm", "km"], [0])} == {"data", "cpbm", "svm-cpbm", "km"}
    assert {step.name for step in steps_for(["store-km"], [0])} == {"store-data", "store-km"}
    assert {step.name for step in steps_for(["store-urank"], [0])} == {"store-data", "store-clicks", "store-urank"}
    many = steps_for(["km", "urank", "km"], [0, 2])
    assert len(many) == len(set(many)) == 2 * len({"data", "clicks", "urank", "km"})
    assert {step.seed for step in many} == {0, 2}


@pytest.mark.parametrize("name", KNOWN)
def test_every_need_is_a_step(name: str) -> None:
    before, cost = needs(name)
    of_store = name.startswith("store-")
    assert set(before) <= set(STORE_STEPS if of_store else STEPS)
    assert cost > 0
    assert name in DATA or ("store-data" if of_store else "data") in before


BOTH = {"data": ("svm-none", "ctr1"), "store-data": ("store-logged", "store-deepfm")}
"""Of each kind of experiment, a method that needs nothing but the data and one that needs a click model."""


def done(folder: Path, steps: list[Step]) -> SeedRun:
    """A seed whose steps all have left something, but for the data, which is removed then."""
    seed = SeedRun(seed_folder(folder, 0), config().seeded(0))
    for step in steps:
        path = path_of(seed, step.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if step.name not in DATA:
            path.touch()
    return seed


def path_of(seed: SeedRun, name: str) -> Path:
    return (seed.store if name.startswith("store-") else seed.trial).path(name)


def missing(folder: Path, steps: list[Step]) -> set[str]:
    return {step.name for step in running._missing(folder, config(), steps)}


@pytest.mark.parametrize("data", DATA)
def test_data_is_made_again_only_for_what_needs_it(tmp_path: Path, data: str) -> None:
    steps = steps_for([name for names in BOTH.values() for name in names], [0])
    seed = done(tmp_path, steps)
    assert missing(tmp_path, steps) == set()
    for name in (step.name for step in steps if step.name not in DATA and data in needs(step.name)[0]):
        path_of(seed, name).unlink()
        assert missing(tmp_path, steps) == {data, name}  # and not the data of the other kind
        path_of(seed, data).mkdir()
        assert missing(tmp_path, steps) == {name}
        path_of(seed, data).rmdir()
        path_of(seed, name).touch()
    assert missing(tmp_path, steps) == set()


def test_data_is_made_again_for_the_seed_that_lacks_something(tmp_path: Path) -> None:
    steps = steps_for(["km", "store-km"], [0])
    done(tmp_path, steps)
    both = steps_for(["km", "store-km"], [0, 1])
    assert {step for step in both if step.seed == 1} == set(running._missing(tmp_path, config(), both))
    # Data alone is made by nobody who needs it.
    assert missing(tmp_path / "new", [Step(0, name) for name in DATA]) == set()


class _Watched(running._Book):
    """A book over a folder that is not there."""

    def __init__(self, steps: list[Step]) -> None:
        total = sum(needs(step.name)[1] for step in steps)
        super().__init__(Path("/nowhere"), config(), list(steps), total, lambda *_: None)


@given(
    st.lists(st.sampled_from(KNOWN), min_size=1, unique=True),
    st.integers(1, 3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_nothing_starts_before_what_it_needs(names: list[str], seeds: int, workers: int, random: object) -> None:
    """Workers that take what the book gives and finish in any order."""
    steps = steps_for(names, range(seeds))
    book = _Watched(steps)
    done: set[Step] = set()
    started: list[Step] = []
    while book.left or book.running:
        while len(book.running) < workers and (step := book.next()) is not None:
            assert {Step(step.seed, need) for need in needs(step.name)[0]} <= done
            started.append(step)
        assert book.running, "all workers wait and nothing runs"
        finished = random.choice(sorted(book.running, key=str))  # type: ignore[attr-defined]
        book.finish(finished)
        done.add(finished)
    assert sorted(started, key=str) == sorted(steps, key=str)
    assert book.done == pytest.approx(book.total)


# --- real runs -----------------------------------------------------------------------------------------------------


def positions(folder: Path, seed: int = 0) -> dict[str, pl.DataFrame]:
    """What each method did, but for the time it took."""
    found = sorted(seed_folder(folder, seed).rglob("results/*.parquet"))
    return {path.stem: pl.read_parquet(path).drop("seconds") for path in found}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that this process did."""
    names: list[str] = []
    run = SeedRun.run

    def watched(seed: SeedRun, name: str, report: Report) -> None:
        names.append(name)
        run(seed, name, report)

    monkeypatch.setattr(SeedRun, "run", watched)
    return names


def test_what_is_there_is_not_made_again(tmp_path: Path, ran: list[str]) -> None:
    steps = steps_for(["svm-none", "km"], [0])
    run_steps(tmp_path, config(), steps, workers=1)
    assert sorted(ran) == ["data", "km", "svm-none"]
    before = positions(tmp_path)
    ran.clear()
    run_steps(tmp_path, config(), steps, workers=1)
    assert ran == []

    results = tmp_path / "seed-0" / "results"
    times = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    (results / "km.parquet").unlink()
    run_steps(tmp_path, config(), steps, workers=1)
    assert ran == ["data", "km"]
    assert (results / "svm-none.parquet").stat().st_mtime_ns == times["svm-none.parquet"]
    assert positions(tmp_path)["km"].equals(before["km"])

    # Another experiment uses what was trained.
    ran.clear()
    run_steps(tmp_path, config(), steps_for(["svm-none", "lambdarank-none"], [0]), workers=1)
    assert ran == ["data", "lambdarank-none"]


def test_what_is_there_of_the_store_is_not_made_again(tmp_path: Path, ran: list[str]) -> None:
    """Its data when a result is missing, for then a method may learn; the click models stay."""
    steps = steps_for(["store-deepfm", "store-svm-truth", "store-km"], [0])
    run_steps(tmp_path, config("table3"), steps, workers=1)
    assert sorted(ran) == sorted(step.name for step in steps)
    assert ran[0] == "store-data"
    folder = tmp_path / "seed-0" / "store"
    kept = {"test.parquet", "propensity.json", "deepfm", "results"}
    assert {path.name for path in folder.iterdir()} == kept  # neither the data nor states of training
    before = positions(tmp_path)
    assert set(before) == {step.name for step in steps if is_method(step.name)}
    ran.clear()
    run_steps(tmp_path, config("table3"), steps, workers=1)
    assert ran == []

    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    (folder / "results" / "store-svm-truth.parquet").unlink()
    run_steps(tmp_path, config("table3"), steps, workers=1)
    assert ran == ["store-data", "store-svm-truth"]
    again = {path.name for path in times if path.stat().st_mtime_ns != times[path]}
    assert again == {"test.parquet", "propensity.json", "store-svm-truth.parquet"}
    assert all(frame.equals(before[name]) for name, frame in positions(tmp_path).items())

    # Simulated clicks in the same folder need no store, nor does the store need them.
    ran.clear()
    run_steps(tmp_path, config(), steps_for(["km", "store-km"], [0]), workers=1)
    assert ran == ["data", "km"]


def test_progress_ends_with_all_of_it(tmp_path: Path) -> None:
    told: list[tuple[str, float, float | None]] = []
    run_steps(tmp_path, config(), steps_for(["km"], [0]), workers=1, report=lambda *each: told.append(each[:3]))  # type: ignore[arg-type]
    total = needs("data")[1] + needs("km")[1]
    mine = [(done, of) for name, done, of in told if name == "all steps"]
    assert mine[0] == (0, pytest.approx(total))
    assert mine[-1] == (pytest.approx(total), pytest.approx(total))
    assert [done for done, _ in mine] == sorted(done for done, _ in mine)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_that_fails_is_one_sentence(tmp_path: Path, workers: int) -> None:
    absent = config(simulation={**TINY["simulation"], "data": str(tmp_path / "absent.txt")})
    with pytest.raises(UrankError, match=r"absent\.txt") as failed:
        run_steps(tmp_path / "run", absent, steps_for(["km", "svm-none"], [0]), workers=workers)
    assert "\n" not in str(failed.value)
    assert not list((tmp_path / "run").rglob("*"))
    # The same folder does for the data that is there.
    run_steps(tmp_path / "run", config(), steps_for(["km"], [0]), workers=1)
    assert list(positions(tmp_path / "run")) == ["km"]


def test_what_was_done_before_a_failure_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    real = SeedRun.run

    def fails(seed: SeedRun, name: str, report: Report) -> None:
        if name == "km":
            raise UrankError("no more")
        real(seed, name, report)

    with monkeypatch.context() as patch:
        patch.setattr(SeedRun, "run", fails)
        with pytest.raises(UrankError, match="no more"):
            run_steps(tmp_path, config(), steps_for(["svm-none", "km"], [0]), workers=1)
    assert list(positions(tmp_path)) == ["svm-none"]
    ran.clear()
    run_steps(tmp_path, config(), steps_for(["svm-none", "km"], [0]), workers=1)
    assert ran == ["km"]  # the data was still there


def test_a_worker_that_dies_is_told_of(tmp_path: Path) -> None:
    """Killed from outside, as a system short of memory does."""

    def kill(name: str, done: float, total: float | None, note: str = "", /) -> None:
        if note.endswith("data done"):
            for child in multiprocessing.active_children():
                child.kill()
                child.join()

    with pytest.raises(UrankError, match=r"seed 0, .* ended without a word; it may have run out of memory"):
        run_steps(tmp_path, config(), steps_for(["svm-none", "km"], [0]), workers=2, report=kill)
    assert multiprocessing.active_children() == []
    assert (tmp_path / "seed-0" / "data").is_dir()


def test_killed_and_started_again(tmp_path: Path) -> None:
    """The command line, killed while it trains: its workers end by themselves and say nothing, the same command goes
    on, and ends as a run that nobody killed."""
    settings = {**TINY, "methods": list(FEW)}
    settings["clicks"] = {"families": ["monotone"], "training": {**QUICK, "epochs": 40}}
    file, output = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(settings))
    command = [sys.executable, "-m", "urank", "reproduce", "table1", "-o", output, "--config", file, "--seeds", 1]
    arguments = [*map(str, command), "--workers", "2", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "errors.txt").open("w") as errors:
        process = subprocess.Popen(arguments, env=environment, stderr=errors)
        wait_until(lambda: (output / "seed-0" / ".clicks" / "run.txt").exists() or process.poll() is not None)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
    assert len(children) >= 2
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert (tmp_path / "errors.txt").read_text() == ""
    assert not (output / "seed-0" / "clicks").exists()
    assert not (output / "report.html").exists()
    (output / "seed-0" / ".data.half").mkdir()  # as if it had been killed a little earlier

    again = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert half_written(output) == []
    assert (output / "report.html").is_file()
    assert not (output / "seed-0" / "data").exists()

    # In one process, and where torch would have more threads than a worker has: the same bits.
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_steps(tmp_path / "whole", config(**settings), steps_for(FEW, [0]), workers=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    one, other = positions(output), positions(tmp_path / "whole")
    assert sorted(one) == sorted(other) == sorted(FEW)
    for name in FEW:
        assert one[name].equals(other[name]), name
    weights = [folder / "seed-0" / "clicks" / "member-0.safetensors" for folder in (output, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
