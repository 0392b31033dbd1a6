"""The commands as a person runs them: real processes, real files, exit codes, one clear sentence when refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest


def urank(*arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "urank", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False, env={**os.environ, **env}
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The sentence of a refusal; there must be one, and nothing else."""
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "sim"
    result = urank("simulate", "-o", folder, "--queries", 200, "--features", 5, "--seed", 3, "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["queries"] == 200
    assert summary["lists"] == 200 * 10
    assert result.stderr == ""
    return folder


def test_simulate_prepare_inspect(simulated: Path, tmp_path: Path) -> None:
    assert {path.name for path in simulated.iterdir()} == {"log.parquet", "simulation.toml", "truth"}
    result = urank("prepare", simulated / "log.parquet", "-o", tmp_path / "prepared")
    assert result.returncode == 0, result.stderr
    assert "10 positions, 5 numeric and 0 categorical features" in result.stdout
    page = tmp_path / "report.html"
    result = urank("inspect", simulated / "log.parquet", "--html", page)
    assert result.returncode == 0, result.stderr
    assert "learnable" in result.stdout
    assert page.read_text().startswith("<!doctype html>")
    from_prepared = json.loads(urank("inspect", tmp_path / "prepared", "--json").stdout)
    from_log = json.loads(urank("inspect", simulated / "log.parquet", "--json").stdout)
    assert from_prepared["curve"] == from_log["curve"]
    assert from_prepared["verdict"]["level"] == "learnable"


def test_one_logger_is_not_learnable_and_two_or_random_ones_are(tmp_path: Path) -> None:
    small = ("--queries", 600, "--features", 5)
    verdicts = {}
    for name, flags in {
        "one": ("--loggers", 1),
        "two": ("--loggers", 2),
        "random": ("--loggers", 1, "--randomise", "shuffle:0.3"),
    }.items():
        assert urank("simulate", "-o", tmp_path / name, *small, *flags, "--quiet").returncode == 0
        found = json.loads(urank("inspect", tmp_path / name / "log.parquet", "--json").stdout)
        verdicts[name] = found["verdict"]["sentence"]
    assert verdicts == {
        "one": "not learnable: every item was always shown at the same position",
        "two": "learnable",
        "random": "learnable",
    }


def test_quiet_prints_nothing(simulated: Path, tmp_path: Path) -> None:
    for arguments in (
        ("simulate", "-o", tmp_path / "sim", "--queries", 20, "--quiet"),
        ("prepare", simulated / "log.parquet", "-o", tmp_path / "p", "--quiet"),
        ("inspect", simulated / "log.parquet", "-q"),
    ):
        result = urank(*arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_help_and_version() -> None:
    assert urank("--version").stdout.startswith("urank 0.")
    assert "simulate" in urank("--help").stdout
    for command in ("simulate", "prepare", "inspect"):
        text = urank(command, "--help").stdout
        assert "Example:" in text
        assert "--json" in text


def test_configuration_file_and_flags(simulated: Path, tmp_path: Path) -> None:
    again = urank("simulate", "-o", tmp_path / "again", "--config", simulated / "simulation.toml", "--quiet")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "log.parquet").read_bytes() == (simulated / "log.parquet").read_bytes()
    flags = ("--config", simulated / "simulation.toml", "--seed", 4, "--quiet")
    assert urank("simulate", "-o", tmp_path / "other", *flags).returncode == 0
    assert (tmp_path / "other" / "log.parquet").read_bytes() != (simulated / "log.parquet").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--queries", 0), "queries in the simulation: input should be greater than or equal to 1; got 0"),
        (("--randomise", "swap"), "--randomise takes KIND:SHARE, as swap:0.1; got 'swap'"),
        (("--randomise", "tumble:0.1"), "randomise in the simulation: input should be 'none', 'swap'"),
        (("--values", "1-10"), "--values takes 2 numbers separated by colons; got '1-10'"),
        (("--traffic", "0.5:0.6"), "traffic must be shares above 0 that sum to 1"),
        (("--user", "robot"), "user in the simulation: input should be 'item'"),
        (("--values", "0:1e300"), "values must fit 32-bit numbers, so be below 3.4e38; got (0.0, 1e+300)"),
        (("--data", "x.txt", "--queries", 7), "--queries is for generated documents"),
        (("--data", "absent.txt"), "absent.txt cannot be read: No such file or directory"),
        (("--config", "absent.toml"), "absent.toml cannot be read: No such file or directory"),
    ],
)
def test_simulate_refuses(tmp_path: Path, arguments: tuple[object, ...], sentence: str) -> None:
    result = urank("simulate", "-o", "out", *arguments, cwd=tmp_path)
    assert sentence in refused(result)
    assert list(tmp_path.iterdir()) == []


def test_prepare_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    log = pl.DataFrame({"q": [1, 1, 2], "rank": [1, 2, 0], "click": [0, 1, 0]})
    log.write_csv(tmp_path / "log.csv")
    result = urank("prepare", "log.csv", "-o", "out", cwd=tmp_path)
    assert "log.csv has no column 'query_id'" in refused(result)
    result = urank("prepare", "log.csv", "-o", "out", "-c", "query_id=q", "-c", "position=rank", cwd=tmp_path)
    expected = "Error: position must be a whole number from 1 to 10000; got 0 at row 3 of log.csv"
    assert refused(result) == f"{expected}; if positions count from 0, say --first-position 0"
    result = urank("prepare", "log.csv", "-o", "out", "-c", "query_id", cwd=tmp_path)
    assert "--column takes ROLE=NAME, as position=rank; got 'query_id'" in refused(result)
    result = urank("prepare", "absent.parquet", "-o", "out", cwd=tmp_path)
    assert refused(result).startswith("Error: absent.parquet does not exist; give a Parquet or CSV file")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_wrong_flags_exit_with_2() -> None:
    result = urank("inspect", "log.parquet", "--colour", "red")
    assert result.returncode == 2
    assert "No such option" in result.stderr
    assert "Traceback" not in result.stderr


def test_inspect_writes_its_page_only_when_it_can(simulated: Path, tmp_path: Path) -> None:
    result = urank("inspect", simulated / "log.parquet", "--html", tmp_path)
    assert "is a folder; a file name is needed" in refused(result)


def test_markup_in_a_path_is_printed_as_it_is(simulated: Path, tmp_path: Path) -> None:
    for arguments in (
        ("simulate", "-o", "out[/b]", "--queries", 20),
        ("prepare", simulated / "log.parquet", "-o", "p[red]"),
        ("inspect", simulated / "log.parquet", "--html", "page[/b].html"),
    ):
        result = urank(*arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.rstrip().endswith(("out[/b]", "p[red]", "page[/b].html"))


def test_an_output_that_knows_only_ascii(simulated: Path, tmp_path: Path) -> None:
    result = urank("inspect", simulated / "log.parquet", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "####" in result.stdout
    assert "verdict" in result.stdout
    pl.DataFrame({"query_id": ["ä"], "position": [1], "click": [1], "policy": ["ü"]}).write_parquet(
        tmp_path / "l.parquet"
    )
    plain = json.loads(urank("inspect", tmp_path / "l.parquet", "--json", PYTHONIOENCODING="ascii").stdout)
    assert list(plain["by_policy"]) == ["ü"]
    refusal = urank("inspect", tmp_path / "ö.parquet", PYTHONIOENCODING="ascii")
    assert "?.parquet does not exist; give a" in refused(refusal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_takes_back_what_it_began(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "urank", "simulate", "-o", "a/b/sim", "--queries", "20"]
    script = f"import sys; sys.argv[1:] = {command[3:]!r}\n"
    script += (
        "import time, urank.lab.letor_simulation as letor\n"
        "letor._write_parquet = lambda frame, path: time.sleep(60)\n"
        "from urank.cli import main; main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE)
    for _ in range(600):
        if (tmp_path / "a" / "b").exists():
            break
        time.sleep(0.1)
    time.sleep(0.3)
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    assert list(tmp_path.iterdir()) == []
    assert process.returncode == 128 + number
    assert process.stderr is not None
    said = process.stderr.read().decode()
    assert "Traceback" not in said
    assert ("Interrupted; nothing half-written is left behind" in said) == (number == signal.SIGINT)
    process.stderr.close()


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_resume_and_does(simulated: Path, tmp_path: Path) -> None:
    flags = ["run", str(simulated / "log.parquet"), "-o", "my job", "--drop", "relevance", "--drop", "propensity"]
    command = [sys.executable, "-m", "urank", *flags, "--ensemble", "4", "--force"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    state = tmp_path / ".my job.training" / "checkpoints"
    for _ in range(1200):
        if list(state.glob("*.safetensors")):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    (line,) = [each for each in said.splitlines() if each.startswith("Interrupted")]
    assert shlex.split(line.partition(": ")[2]) == ["urank", *flags, "--ensemble", "4", "--force"]
    assert [path.name for path in tmp_path.iterdir()] == [".my job.training"]
    before = {path.name: path.stat().st_mtime_ns for path in state.glob("*.safetensors")}
    assert before
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["my job"]


def test_a_training_does_not_load_what_it_does_not_use() -> None:
    script = (
        "import sys\nfrom urank.cli.options import quick_imports\n"
        "with quick_imports():\n    import urank.pipeline\n"
        "assert 'lightgbm' in sys.modules\n"
        "assert not {'pandas', 'sklearn'} & {name.partition('.')[0] for name in sys.modules}\n"
        "import sklearn\n"  # which is there again
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
