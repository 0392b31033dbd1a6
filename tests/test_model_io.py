"""The artifact: refused when newer, older, damaged or of another kind; never half-written; no code in it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from urank.clicks.calibration import fit_calibration
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.families import build_network
from urank.errors import ConfigError, DataError
from urank.learning.features import Featurizer, Inputs, Numeric
from urank.learning.training import seeded
from urank.model_io import load_model, read_manifest, save_model
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import RankerConfig, UrankConfig
from urank.ranking.urank_network import NetworkScorer, build_scorer

FEATURIZER = Featurizer((Numeric("a", 0.0, 1.0, False),), ())
INPUTS = Inputs(np.linspace(-3, 3, 11, dtype=np.float32)[:, None], np.zeros((11, 0), dtype=np.int64))
VALUES = np.linspace(1, 9, 11, dtype=np.float32)
FILES = ["features.json", "manifest.json", "member-0.safetensors", "scorer.safetensors"]


def model(*, value: bool = True) -> RankingModel:
    """A click model and a scorer, which knows of values or does not, as they are before training."""
    with seeded(0):
        network = build_network("monotone", FEATURIZER, 5)
        scorer = build_scorer(FEATURIZER, Numeric("value", 1.5, 0.5, False) if value else None, RankerConfig())
    empty = np.zeros(0)
    calibration = fit_calibration("none", empty, empty.astype(int), empty, 5)
    clicks = ClickModel(FEATURIZER, 5, (NetworkClicks("monotone", network),), calibration)
    return RankingModel(clicks, NetworkScorer(scorer), "score")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(model(), UrankConfig(), tmp_path / "model", onnx=False, facts={"note": "hello"})
    return tmp_path / "model"


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("value", [True, False])
def test_round_trip_and_same_bytes(tmp_path: Path, value: bool) -> None:
    made = model(value=value)
    for name in ("model", "again"):
        save_model(model(value=value), UrankConfig(), tmp_path / name, onnx=False, facts={"note": "hello"})
    loaded = load_model(tmp_path / "model")
    np.testing.assert_array_equal(loaded.log_ctr(INPUTS), made.log_ctr(INPUTS))
    np.testing.assert_array_equal(loaded.score(INPUTS, VALUES), made.score(INPUTS, VALUES))
    assert (loaded.name, loaded.method) == ("network on monotone", "score")
    assert loaded.scorer is not None
    assert loaded.scorer.takes_value == value
    assert read_manifest(tmp_path / "model")["note"] == "hello"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == FILES
    for path in (tmp_path / "model").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_click_model_alone(tmp_path: Path) -> None:
    alone = RankingModel(model().clicks, method="ctr1")
    save_model(alone, UrankConfig(ranker="none"), tmp_path / "model", onnx=False)
    loaded = load_model(tmp_path / "model")
    assert (loaded.name, loaded.method, loaded.methods) == ("monotone", "ctr1", ("match", "ctr1"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == FILES[:3]


def test_a_stranger_is_not_written(tmp_path: Path) -> None:
    class Stranger:
        family, takes_value = "stranger", False

        def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
            return value

    with pytest.raises(TypeError, match="a scorer must be a network or trees; got Stranger"):
        save_model(RankingModel(model().clicks, Stranger()), UrankConfig(), tmp_path / "model", onnx=False)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_and_an_older_manifest_are_refused(folder: Path) -> None:
    change_manifest(folder, version=99)
    with pytest.raises(DataError, match=r"written by a newer urank \(manifest version 99, this one reads 2\); update"):
        load_model(folder)
    change_manifest(folder, version=1)
    with pytest.raises(DataError, match=r"by an older urank \(manifest version 1, this one reads 2\); train it again"):
        load_model(folder)
    for odd in ("2", None, [2]):
        change_manifest(folder, version=odd)
        with pytest.raises(DataError, match=r"is damaged: the version in its manifest\.json is"):
            load_model(folder)


def test_other_folders_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="is not a urank model: it does not exist"):
        load_model(tmp_path / "absent")
    (tmp_path / "job").mkdir()
    with pytest.raises(DataError, match=r"is not a urank model: its manifest\.json cannot be read; give a folder"):
        load_model(tmp_path / "job")
    shutil.copytree(folder, tmp_path / "job" / "model")
    with pytest.raises(DataError, match=r"; its model is .*job/model$"):
        load_model(tmp_path / "job")
    for content in ("[1, 2]", '{"format": "urank prepared log", "version": 2}'):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=r"its manifest\.json has another format"):
            load_model(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("member-0.safetensors", b"garbage"),
        ("member-0.safetensors", None),
        ("scorer.safetensors", b"garbage"),
        ("scorer.safetensors", None),
        ("features.json", b"{}"),
        ("features.json", b"not json"),
    ],
)
def test_damage_is_told(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match="is damaged and cannot be loaded"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "magic"},
        {"positions": "many"},
        {"members": None},
        {"scorer": {"family": "network"}},
        {"config": {"colour": "red"}},
        {"calibration": {"kind": "magic"}},
    ],
)
def test_a_manifest_that_makes_no_sense(folder: Path, changes: dict[str, Any]) -> None:
    change_manifest(folder, **changes)
    with pytest.raises(DataError, match="is damaged and cannot be loaded"):
        load_model(folder)


@pytest.mark.parametrize("name", ["member-0.safetensors", "scorer.safetensors"])
def test_a_manifest_cannot_point_outside(folder: Path, tmp_path: Path, name: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / name).rename(tmp_path / "stolen.safetensors")
    entry = manifest["scorer"] if name.startswith("scorer") else manifest["members"][0]
    entry["file"] = "../stolen.safetensors"
    change_manifest(folder, **manifest)
    with pytest.raises(DataError, match="is damaged"):
        load_model(folder)


@pytest.mark.parametrize("part", ["_write_member", "_write_scorer"])
def test_a_failed_save_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(f"urank.model_io.{part}", fail)
    with pytest.raises(RuntimeError):
        save_model(model(), UrankConfig(), folder, overwrite=True, onnx=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    with pytest.raises(ConfigError, match="exists already"):
        save_model(model(), UrankConfig(), folder, onnx=False)


def test_loading_draws_no_random_numbers(folder: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    load_model(folder)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", FILES)
def test_devices_and_pipes_are_refused(folder: Path, name: str) -> None:
    """A device would be read without end, a pipe waited for."""
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=str(folder)):
        load_model(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DataError, match=str(folder)):
        load_model(folder)
