"""What `pip install urank` brings: training and ranking work without the extras, and a missing one is one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "otel": ("opentelemetry",),
    "postgres": ("psycopg",),
    "ray": ("ray",),
    "remote": ("fsspec", "upath"),
    "report": ("matplotlib",),
    "serve": ("httptools", "httpx", "msgspec", "prometheus_client", "starlette", "uvicorn", "uvloop"),
}
NOT_CORE = ("fastapi", "sklearn", *(module for modules in EXTRAS.values() for module in modules))
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))\n"
"""Makes modules absent, for imports as well as for `importlib.util.find_spec`."""


def run(
    script: str, absent: tuple[str, ...], *arguments: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + script, " ".join(absent), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_the_core_brings_no_web_framework_no_ray_and_no_matplotlib() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {re.split(r"[>=\[; ]", requirement)[0].replace("-", "_") for requirement in project["dependencies"]}
    assert not core & {*NOT_CORE, "scikit_learn", "universal_pathlib"}
    assert {"all", *EXTRAS} <= set(project["optional-dependencies"])


def test_the_core_works_without_the_extras() -> None:
    script = """
from html import unescape

import polars as pl
import urank, urank.pipeline
from typer.testing import CliRunner
from urank.cli import app

rows = {"query_id": [1, 1, 2, 2], "item_id": [1, 2, 1, 2], "position": [1, 2, 2, 1], "click": [1, 0, 0, 1]}
view = urank.inspect(pl.DataFrame(rows))._repr_html_()
assert "<svg" not in view and "pip install 'urank[report]'" in unescape(view), view
print(urank.URank(), urank.evaluate, urank.inspect, urank.load_model, urank.read, urank.prepare)
for command in ("inspect", "prepare", "train", "run", "evaluate", "rank", "guard", "export", "abtest", "simulate"):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
"""
    done = run(script, NOT_CORE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("otel", ["serve", "model", "--trace"]),
        ("postgres", ["feedback", "postgresql://localhost/clicks", "-o", "log"]),
        ("remote", ["inspect", "s3://bucket/log.parquet"]),
        ("serve", ["serve", "model"]),
    ],
    ids=lambda each: each if isinstance(each, str) else each[0],
)
def test_a_missing_extra_is_one_sentence(extra: str, arguments: list[str], tmp_path: Path) -> None:
    done = run("from urank.cli import main\nmain()", EXTRAS[extra], *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (sentence,) = done.stderr.strip().splitlines()
    assert f"pip install 'urank[{extra}]'" in sentence
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_without_its_extra_is_one_sentence() -> None:
    done = run("from urank.ray.cluster import Cluster, connected\nwith connected(Cluster()): pass", EXTRAS["ray"])
    assert done.stderr.splitlines()[-1].endswith("run pip install 'urank[ray]'")


@pytest.mark.parametrize("name", ["Client", "AsyncClient"])
def test_a_client_without_its_extra_is_one_sentence(name: str) -> None:
    done = run(f"import urank\nurank.{name}", EXTRAS["serve"])
    assert done.stderr.splitlines()[-1] == f"ImportError: urank.{name} needs httpx: pip install 'urank[serve]'"


def test_a_missing_package_of_the_core_is_one_sentence() -> None:
    done = run("from urank.cli import main\nmain()", ("torch",), "train", "log.parquet", "-o", "model")
    assert done.returncode == 2
    assert done.stderr.strip() == "Error: this command needs torch, which is not installed; run pip install urank"
