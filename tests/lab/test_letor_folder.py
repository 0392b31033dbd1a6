"""The folder of a simulation: complete or not there at all."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from urank.errors import ConfigError
from urank.lab import letor_simulation
from urank.lab.letor_simulation import Simulation, SimulationConfig, simulate, write_simulation
from urank.lab.oracle import Oracle

FILES = ["log.parquet", "simulation.toml", "truth/candidates.parquet", "truth/oracle.json"]


def run(**changes: Any) -> Simulation:
    return simulate(SimulationConfig(**{"queries": 40, "features": 5, "sessions": 3, "test": 0.3, **changes}))


def write(simulation: Simulation, folder: Path, **options: Any) -> dict[str, bytes]:
    write_simulation(simulation, folder, **options)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return run()


def test_all_files_are_there_and_hold_what_was_simulated(simulation: Simulation, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "sim"
    write_simulation(simulation, folder)
    assert sorted(contents(folder)) == FILES
    assert_frame_equal(pl.read_parquet(folder / "log.parquet"), simulation.log)
    assert_frame_equal(pl.read_parquet(folder / "truth" / "candidates.parquet"), simulation.candidates)
    assert pq.ParquetFile(folder / "log.parquet").metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize(
    "changes",
    [{}, {"values": (1, 3), "randomise": "shuffle", "randomise_share": 0.2}, {"user": "cascade"}, {"scaling": "rank"}],
)
def test_same_seed_same_bytes(changes: dict[str, Any], tmp_path: Path) -> None:
    first, again = (write(run(**changes), tmp_path / name) for name in ("a", "b"))
    assert first == again
    other = write(run(**changes, seed=1), tmp_path / "c")
    assert {name for name in FILES if other[name] != first[name]} >= {"log.parquet", "simulation.toml"}


def test_the_config_and_the_oracle_come_back(simulation: Simulation, tmp_path: Path) -> None:
    folder = tmp_path / "sim"
    write_simulation(simulation, folder)
    assert SimulationConfig(**tomllib.loads((folder / "simulation.toml").read_text())) == simulation.config
    truth = json.loads((folder / "truth" / "oracle.json").read_text())
    assert Oracle.from_dict(truth["oracle"]) == simulation.oracle
    assert truth["oracle"]["label_max"] == 4
    assert truth["oracle"]["denominator"] == 2**4 - 1
    assert truth["oracle"]["positions"] == 10
    assert simulation.bounds is not None
    assert [truth["scaling"]["low"], truth["scaling"]["high"]] == simulation.bounds.tolist()


def test_the_truth_on_disk_gives_the_utility_of_any_order(simulation: Simulation, tmp_path: Path) -> None:
    folder = tmp_path / "sim"
    write_simulation(simulation, folder)
    oracle = Oracle.from_dict(json.loads((folder / "truth" / "oracle.json").read_text())["oracle"])
    candidates = pl.read_parquet(folder / "truth" / "candidates.parquet")
    lengths = candidates.group_by("query_id", maintain_order=True).len()["len"].to_numpy()
    as_stored = np.concatenate([np.arange(1, n + 1) for n in lengths])
    table = np.array(candidates["table"].to_list())
    clicks = oracle.click_probabilities(table, as_stored, np.concatenate([[0], np.cumsum(lengths)]))
    assert clicks.sum() == pytest.approx(sum(row[k - 1] for row, k in zip(table, as_stored, strict=True)))


def test_row_groups_are_bounded(simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letor_simulation, "ROW_GROUP_BYTES", simulation.log.estimated_size() // 3)
    folder = tmp_path / "sim"
    write_simulation(simulation, folder)
    assert pq.ParquetFile(folder / "log.parquet").metadata.num_row_groups in (3, 4)
    assert_frame_equal(pl.read_parquet(folder / "log.parquet"), simulation.log)


def test_an_empty_folder_is_used(simulation: Simulation, tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    assert sorted(write(simulation, tmp_path / "sim")) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["sim"]


def test_a_taken_folder_is_refused_unless_overwritten(simulation: Simulation, tmp_path: Path) -> None:
    before = write(simulation, tmp_path / "sim")
    other = run(seed=1)
    with pytest.raises(ConfigError, match="sim exists already"):
        write_simulation(other, tmp_path / "sim")
    assert contents(tmp_path / "sim") == before
    after = write(other, tmp_path / "sim", overwrite=True)
    assert after["log.parquet"] != before["log.parquet"]
    assert [path.name for path in tmp_path.iterdir()] == ["sim"]


def test_nothing_but_a_simulation_is_overwritten(simulation: Simulation, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else"):
        write_simulation(simulation, tmp_path / "notes", overwrite=True)
    with pytest.raises(ConfigError, match=r"thesis\.tex holds something else"):
        write_simulation(simulation, tmp_path / "notes" / "thesis.tex", overwrite=True)
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_no_leftovers_after_a_failure(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, overwrite: bool
) -> None:
    before = write(simulation, tmp_path / "sim") if overwrite else {}
    written: list[str] = []
    real = letor_simulation._write_parquet

    def fail_at_the_log(frame: pl.DataFrame, path: Path) -> None:
        if path.name == "log.parquet":
            raise error
        real(frame, path)
        written.append(path.name)

    monkeypatch.setattr(letor_simulation, "_write_parquet", fail_at_the_log)
    expected = ConfigError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_simulation(simulation, tmp_path / "sim", overwrite=overwrite)
    assert written == ["candidates.parquet"]
    assert [path.name for path in tmp_path.iterdir()] == (["sim"] if overwrite else [])
    assert contents(tmp_path / "sim") == before


def test_the_old_simulation_comes_back_when_the_last_step_fails(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write(simulation, tmp_path / "sim")
    real = Path.rename

    def fail_for_new(self: Path, target: Path) -> Path:
        if target == tmp_path / "sim" and not self.name.endswith(".old"):
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(ConfigError, match="sim cannot be written: Permission denied"):
        write_simulation(simulation, tmp_path / "sim", overwrite=True)
    assert contents(tmp_path / "sim") == before
    assert [path.name for path in tmp_path.iterdir()] == ["sim"]


def test_progress_is_told(simulation: Simulation, tmp_path: Path) -> None:
    told: list[tuple[str, float, float | None]] = []
    write_simulation(simulation, tmp_path / "sim", report=lambda *step: told.append(step))
    assert told == [("write", 0, 2), ("write", 1, 2), ("write", 2, 2)]
