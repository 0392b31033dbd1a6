"""What `pip install urank` brings: training and ranking work without the extras, and a missing one is one sentence."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("httptools", "httpx", "msgspec", "prometheus_client", "psycopg", "ray", "starlette", "uvicorn", "uvloop")

SCRIPT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import urank
from typer.testing import CliRunner
from urank.cli import app

print(urank.URank(), urank.evaluate, urank.inspect, urank.load_model, urank.read, urank.prepare)
for command in ("inspect", "prepare", "train", "run", "evaluate", "rank", "guard", "export", "abtest", "simulate"):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
for name in ("Client", "AsyncClient"):
    try:
        getattr(urank, name)
    except ImportError as error:
        print(error)
"""


def test_the_core_brings_no_web_framework_and_no_ray() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {requirement.split(">=")[0].replace("-", "_") for requirement in project["dependencies"]}
    assert not core & set(EXTRAS)
    assert {"all", "otel", "postgres", "ray", "serve"} <= set(project["optional-dependencies"])


def test_the_core_works_without_the_extras() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        f"urank.{name} needs httpx: pip install 'urank[serve]'" for name in ("Client", "AsyncClient")
    ]
