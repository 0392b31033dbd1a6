"""Every step by its name: that the two kinds of experiment do not get into each other's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tiny import KNOWN, config, is_method
from urank.lab.appstore_experiment import STORE_METHODS, STORE_STEPS
from urank.lab.letor_experiment import METHODS, STEPS
from urank.lab.runner import DATA, SeedRun


@pytest.fixture
def seed(tmp_path: Path) -> SeedRun:
    return SeedRun(tmp_path / "seed-0", config())


def test_names_mean_one_thing() -> None:
    assert len(set(KNOWN)) == len(KNOWN)
    assert {name for name in KNOWN if is_method(name)} == {*METHODS, *STORE_METHODS}
    assert all(name in KNOWN and not is_method(name) for name in DATA)
    assert not {name for name in (*METHODS, *STEPS) if name.startswith("store-")}
    assert all(name.startswith("store-") for name in (*STORE_METHODS, *STORE_STEPS))


def test_names_of_rows_are_different() -> None:
    for methods in (METHODS, STORE_METHODS):
        assert len({method.name for method in methods.values()}) == len(methods)


def test_no_two_steps_leave_the_same_file(seed: SeedRun) -> None:
    paths = [(seed.store if name.startswith("store-") else seed.trial).path(name) for name in KNOWN]
    assert len(set(paths)) == len(KNOWN)
    store = seed.trial.folder / "store"
    assert [store in path.parents for path in paths] == [name.startswith("store-") for name in KNOWN]


def test_a_step_is_done_when_its_own_result_is_there(seed: SeedRun) -> None:
    assert not any(seed.has(name) for name in KNOWN)
    for path in ("results/km.parquet", "store/results/store-dla.parquet", "store/clicks"):
        (seed.trial.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (seed.trial.folder / path).touch()
    assert [name for name in KNOWN if seed.has(name)] == ["km", "store-dla", "store-clicks"]


def test_sweep_and_clean_are_of_both(seed: SeedRun) -> None:
    folder = seed.trial.folder
    for name in ("data", ".data.x1y2", ".clicks", "results", "store/data", "store/.data.x1y2", "store/.deepfm"):
        (folder / name).mkdir(parents=True)
    (folder / "store" / "results").mkdir()
    for name in ("store/test.parquet", "store/.test.parquet.x1y2", "store/results/.store-km.parquet.x1y2"):
        (folder / name).touch()
    seed.sweep()
    left = {"data", ".clicks", "results", "store", "store/data", "store/.deepfm", "store/results", "store/test.parquet"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == left
    seed.clean()
    left -= {"data", ".clicks", "store/data", "store/.deepfm"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == left
