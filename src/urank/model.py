"""The saved artifact: a folder with a JSON manifest, safetensors or LightGBM text, and ONNX. No pickle.

    manifest.json             what it is, of which version, how it was trained, how good it was
    features.json             names, scales and vocabularies of the features
    member-0.safetensors      weights of a network, or member-0.txt, LightGBM's own text
    model.onnx                all of it as one graph: raw numbers and text in, log_ctr[rows, K] out

It appears by rename when it is complete. What a newer version wrote is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from urank.clicks.calibration import Calibration
from urank.clicks.config import ClickConfig
from urank.clicks.gbdt import GbdtClicks
from urank.clicks.heads import build_network
from urank.clicks.model import ClickModel, Member, NetworkClicks
from urank.errors import DataError
from urank.features import Featurizer
from urank.files import new_folder

__all__ = ["MANIFEST_VERSION", "load_model", "read_manifest", "save_model"]

MANIFEST_VERSION = 1
FORMAT = "urank model"


def save_model(
    model: ClickModel,
    config: ClickConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    onnx: bool = True,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a model.

    Args:
        model: what to write.
        config: how it was made.
        folder: where.
        overwrite: replace a model that is there.
        onnx: also write the graph.
        facts: what else the manifest should tell, such as how good the model was on held-out queries.
    """
    with new_folder(folder, marker="manifest.json", overwrite=overwrite) as target:
        members = [_write_member(member, target, number) for number, member in enumerate(model.members)]
        _write_json(target / "features.json", model.featurizer.to_dict())
        if onnx:
            from urank.clicks.onnx import model_to_onnx  # slow to load

            (target / "model.onnx").write_bytes(model_to_onnx(model).SerializeToString())
        _write_json(
            target / "manifest.json",
            {
                "format": FORMAT,
                "version": MANIFEST_VERSION,
                "urank": version("urank"),
                "kind": "clicks",
                "name": model.name,
                "positions": model.positions,
                "features": model.featurizer.names,
                "members": members,
                "calibration": model.calibration.to_dict(),
                "config": config.model_dump(mode="json"),
                **(facts or {}),
            },
        )


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a model, checked for its version."""
    path = Path(folder) / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a urank model: its manifest.json cannot be read") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{folder} is not a urank model: its manifest.json is of another kind")
    if manifest.get("version", 0) > MANIFEST_VERSION:
        raise DataError(
            f"{folder} was written by a newer urank (manifest version {manifest['version']}, this one reads "
            f"{MANIFEST_VERSION}); update urank"
        )
    return manifest


def load_model(folder: str | Path) -> ClickModel:
    """Read a model; nothing in it is ever run as code."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        features = json.loads((folder / "features.json").read_text(encoding="utf-8"))
        featurizer = Featurizer.from_dict(features)
        config = ClickConfig.model_validate(manifest["config"])
        positions = int(manifest["positions"])
        members = tuple(_read_member(entry, folder, featurizer, positions, config) for entry in manifest["members"])
        calibration = Calibration.from_dict(manifest["calibration"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder} is damaged and cannot be loaded ({type(error).__name__}: {reason})") from error
    return ClickModel(featurizer, positions, members, calibration)


def _write_member(member: Member, target: Path, number: int) -> dict[str, Any]:
    if isinstance(member, GbdtClicks):
        name = f"member-{number}.txt"
        (target / name).write_text(member.to_text(), encoding="utf-8")
    elif isinstance(member, NetworkClicks):
        name = f"member-{number}.safetensors"
        save_file({k: v.cpu().contiguous() for k, v in member.network.state_dict().items()}, target / name)
    else:
        raise TypeError(f"a member must be a network or trees; got {type(member).__name__}")
    return {"family": member.family, "file": name}


def _read_member(
    entry: Mapping[str, Any], folder: Path, featurizer: Featurizer, positions: int, config: ClickConfig
) -> Member:
    path = folder / Path(entry["file"]).name
    if entry["family"] == "gbdt":
        return GbdtClicks.from_text(path.read_text(encoding="utf-8"), positions, featurizer)
    with torch.random.fork_rng():
        network = build_network(
            entry["family"],
            featurizer,
            positions,
            backbone=config.backbone,
            hidden=config.hidden,
            dropout=config.dropout,
        )
    network.load_state_dict(load_file(path))
    network.eval()
    return NetworkClicks(entry["family"], network)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
