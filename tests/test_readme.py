"""The README: short, and everything it shows runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def run(command: list[str], cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_it_is_short_and_its_links_exist() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (README.parent / target).exists(), target


@pytest.mark.slow
def test_its_python_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 8
    said = run([sys.executable, "-c", code], tmp_path)
    assert "learnable" in said
    assert (tmp_path / "model" / "manifest.json").is_file()


@pytest.mark.slow
def test_its_commands_run_after_the_demo(tmp_path: Path) -> None:
    """On a demo of fewer queries than that of `make demo`; the server is tested elsewhere."""
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    demo = re.findall(r"^\t\$\(BIN\)/urank (.*)$", makefile.partition("\ndemo:")[2].partition("\n\n")[0], re.MULTILINE)
    commands = [line.replace("$(DEMO)/", "").replace("--queries 3000", "--queries 400") for line in demo]
    assert len(commands) == 2
    for block in blocks("sh"):
        commands += [
            line.partition("  #")[0].removeprefix("urank ") for line in block.splitlines() if line.startswith("urank ")
        ]
    for command in commands:
        if not command.startswith("serve"):
            run([sys.executable, "-m", "urank", *shlex.split(command)], tmp_path)
