"""The artifact: refused when newer, damaged or of another kind; never half-written; no code in it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from urank.clicks.calibration import fit_calibration
from urank.clicks.config import ClickConfig
from urank.clicks.heads import build_network
from urank.clicks.model import ClickModel, NetworkClicks
from urank.errors import ConfigError, DataError
from urank.features import Featurizer, Inputs, Numeric
from urank.model import load_model, read_manifest, save_model
from urank.training import seeded

FEATURIZER = Featurizer((Numeric("a", 0.0, 1.0, False),), ())
INPUTS = Inputs(np.linspace(-3, 3, 11, dtype=np.float32)[:, None], np.zeros((11, 0), dtype=np.int64))


def model() -> ClickModel:
    with seeded(0):
        network = build_network("monotone", FEATURIZER, 5)
    empty = np.zeros(0)
    calibration = fit_calibration("none", empty, empty.astype(int), empty, 5)
    return ClickModel(FEATURIZER, 5, (NetworkClicks("monotone", network),), calibration)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(model(), ClickConfig(), tmp_path / "model", onnx=False, facts={"note": "hello"})
    return tmp_path / "model"


def test_round_trip_and_same_bytes(saved: Path, tmp_path: Path) -> None:
    np.testing.assert_array_equal(load_model(saved).log_ctr(INPUTS), model().log_ctr(INPUTS))
    assert read_manifest(saved)["note"] == "hello"
    assert sorted(path.name for path in saved.iterdir()) == ["features.json", "manifest.json", "member-0.safetensors"]
    save_model(model(), ClickConfig(), tmp_path / "again", onnx=False, facts={"note": "hello"})
    for path in saved.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_newer_manifest_is_refused(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(DataError, match=r"written by a newer urank \(manifest version 99, this one reads 1\)"):
        load_model(saved)


def test_other_folders_are_refused(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(DataError, match=r"is not a urank model: its manifest\.json cannot be read"):
        load_model(tmp_path / "absent")
    (saved / "manifest.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"its manifest\.json is of another kind"):
        load_model(saved)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("member-0.safetensors", b"garbage"),
        ("member-0.safetensors", None),
        ("features.json", b"{}"),
        ("features.json", b"not json"),
    ],
)
def test_damage_is_told(saved: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (saved / name).unlink()
    else:
        (saved / name).write_bytes(content)
    with pytest.raises(DataError, match="is damaged and cannot be loaded"):
        load_model(saved)


def test_a_manifest_cannot_point_outside(saved: Path, tmp_path: Path) -> None:
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    (saved / "member-0.safetensors").rename(tmp_path / "stolen.safetensors")
    manifest["members"][0]["file"] = "../stolen.safetensors"
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="is damaged"):
        load_model(saved)


def test_a_failed_save_leaves_the_old_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("urank.model._write_member", fail)
    with pytest.raises(RuntimeError):
        save_model(model(), ClickConfig(), saved, overwrite=True, onnx=False)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    with pytest.raises(ConfigError, match="exists already"):
        save_model(model(), ClickConfig(), saved, onnx=False)
