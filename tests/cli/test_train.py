"""`urank train` and `urank curves` as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def urank(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "urank", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    assert urank("simulate", "-o", folder / "sim", "--queries", 150, "--features", 4, "-q").returncode == 0
    flags = ("--click-model", "monotone", "--epochs", 2, "--truth", folder / "sim", "--html", folder / "fit.html")
    result = urank("train", folder / "sim" / "log.parquet", "-o", folder / "model", *flags)
    assert result.returncode == 0, result.stderr
    assert "below the constant" in " ".join(result.stdout.split())
    assert "oracle" in result.stdout
    return folder


def test_model_and_page(folder: Path) -> None:
    names = {path.name for path in (folder / "model").iterdir()}
    assert names == {"manifest.json", "features.json", "member-0.safetensors", "model.onnx"}
    manifest = json.loads((folder / "model" / "manifest.json").read_text())
    assert manifest["name"] == "monotone"
    assert manifest["quality"]["qualities"]["test"]["monotone"]["rows"] > 0
    assert (folder / "fit.html").read_text().startswith("<!doctype html>")
    assert {path.name for path in folder.iterdir()} == {"sim", "model", "fit.html"}


def test_curves(folder: Path) -> None:
    log = folder / "sim" / "log.parquet"
    result = urank("curves", folder / "model", log, "--by", "policy", "-o", folder / "model" / "curves.svg")
    assert result.returncode == 0, result.stderr
    assert "logger-1" in result.stdout
    assert (folder / "model" / "curves.svg").read_text().startswith("<svg")
    (folder / "model" / "curves.svg").unlink()
    curves = json.loads(urank("curves", folder / "model", log, "--json", "--most", 3).stdout)
    assert len(curves) == 3
    assert len(curves[0]["rate"]) == 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--click-model", "oracle"), "families.0 in the click model: input should be 'vector'"),
        (("--calibration", "magic"), "calibration in the click model: input should be 'none'"),
        (("--device", "abacus"), "training.device in the click model: input should be 'auto'"),
        (("--truth", "nowhere"), "nowhere holds no truth"),
    ],
)
def test_refusals(folder: Path, arguments: tuple[object, ...], sentence: str) -> None:
    out = folder / "refused"
    result = urank("train", folder / "sim" / "log.parquet", "-o", out, "--epochs", 1, *arguments)
    assert result.returncode == 2, result
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not out.exists()


def test_an_existing_model_is_kept(folder: Path) -> None:
    result = urank("train", folder / "sim" / "log.parquet", "-o", folder / "model")
    assert result.returncode == 2
    assert "exists already; choose another name or pass --overwrite" in result.stderr
