"""The saved artifact: a folder with a JSON manifest, safetensors or LightGBM text, and ONNX. No pickle.

    manifest.json             format, version, settings, and quality of the model
    features.json             names, scales and vocabularies of the features
    member-0.safetensors      weights of a click model, and member-0-0.txt … for its trees in LightGBM's text format
    conversion.safetensors    weights of the conversion rate, if the goal is conversions
    scorer.safetensors        weights of the scorer, or scorer.txt in LightGBM's text format
    judge-0.safetensors       weights of a network for evaluations
    clicks.onnx               the click model as one graph: raw numbers and text in, log_ctr[rows, K] out
    scorer.onnx               the same for the scorer, if it is a network: score[rows] out

Writes are atomic: the folder appears by rename when it is complete. Artifacts of newer or older versions are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from urank.clicks.calibration import Calibration
from urank.clicks.click_model import ClickModel, Member, NetworkClicks
from urank.clicks.click_settings import ClickConfig
from urank.clicks.conversion import ConversionRate
from urank.clicks.shrunk import ShrunkClicks, tree_model
from urank.clicks.trees import GbdtClicks
from urank.errors import DataError, UrankError
from urank.export.graph import click_graph, scorer_graph
from urank.learning.features import Featurizer, Numeric
from urank.model_manifest import FORMAT, MANIFEST_VERSION, read_manifest, read_regular
from urank.ranking.ranking_model import RankingModel, Scorer
from urank.ranking.ranking_settings import RankerConfig, UrankConfig
from urank.ranking.urank_network import NetworkScorer, ScoreNetwork
from urank.ranking.urank_trees import TreesScorer
from urank.storage import new_folder


def save_model(
    model: RankingModel,
    config: UrankConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    onnx: bool = True,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Save a model.

    Args:
        model, config: the model, and the settings it was trained with.
        folder, overwrite: where to write it, and whether to replace an existing model.
        onnx: also write the ONNX graphs.
        facts: further entries of the manifest, such as metrics on held-out queries.
    """
    clicks = model.clicks
    with new_folder(folder, marker="manifest.json", overwrite=overwrite) as target:
        members = [_write_member(member, target, number) for number, member in enumerate(clicks.members)]
        scorer = _write_scorer(model.scorer, target) if model.scorer is not None else None
        judges = [_write_judge(judge, target, number) for number, judge in enumerate(model.judges)]
        if clicks.conversion is not None:
            _save_weights(clicks.conversion, target / "conversion.safetensors")
        _write_json(target / "features.json", clicks.featurizer.to_dict())
        if onnx:
            (target / "clicks.onnx").write_bytes(click_graph(clicks).SerializeToString())
            if isinstance(model.scorer, NetworkScorer):
                graph = scorer_graph(model.scorer, clicks.featurizer)
                (target / "scorer.onnx").write_bytes(graph.SerializeToString())
        _write_json(
            target / "manifest.json",
            {
                "format": FORMAT,
                "version": MANIFEST_VERSION,
                "urank": version("urank"),
                "name": model.name,
                "method": model.method,
                "positions": clicks.positions,
                "features": clicks.featurizer.names,
                "columns": dict(model.columns),
                "members": members,
                "scorer": scorer,
                "judges": judges,
                "calibration": clicks.calibration.to_dict(),
                "config": config.model_dump(mode="json"),
                **(facts or {}),
            },
        )


def load_model(folder: str | Path) -> RankingModel:
    """Load a saved model; no code in it is ever executed."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        featurizer = Featurizer.from_dict(json.loads(read_regular(folder / "features.json")))
        config = UrankConfig.model_validate(manifest["config"])
        positions = int(manifest["positions"])
        members = [_read_member(each, folder, featurizer, positions, config.clicks) for each in manifest["members"]]
        calibration, conversion = Calibration.from_dict(manifest["calibration"]), None
        if config.goal == "conversions":
            conversion = ConversionRate(featurizer)
            conversion.load_state_dict(load(read_regular(folder / "conversion.safetensors")))
        clicks = ClickModel(featurizer, positions, tuple(members), calibration, conversion)
        entry = manifest["scorer"]
        scorer = _read_scorer(entry, folder, featurizer, config.scorer) if entry is not None else None
        judges = tuple(_read_judge(each, folder, featurizer, positions) for each in manifest["judges"])
        columns = {str(role): str(column) for role, column in manifest["columns"].items()}
        return RankingModel(clicks, scorer, manifest["method"], judges, columns)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        SafetensorError,
        UrankError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder} is damaged and cannot be loaded ({type(error).__name__}: {reason})") from error


def _write_member(member: Member, target: Path, number: int) -> dict[str, Any]:
    if isinstance(member, GbdtClicks):
        name = f"member-{number}.txt"
        (target / name).write_text(member.text, encoding="utf-8")
    elif isinstance(member, NetworkClicks):
        name = f"member-{number}.safetensors"
        _save_weights(member.network, target / name)
    elif isinstance(member, ShrunkClicks):
        name = f"member-{number}.safetensors"
        _save_weights(member.network, target / name)
        forests = {f"member-{number}-{place}.txt": each.text for place, each in enumerate(member.trees)}
        for file, text in forests.items():
            (target / file).write_text(text, encoding="utf-8")
        return {"family": member.family, "file": name, "trees": list(forests)}
    else:
        raise TypeError(f"a member must be a network or trees; got {type(member).__name__}")
    return {"family": member.family, "file": name}


def _read_member(
    entry: Mapping[str, Any], folder: Path, featurizer: Featurizer, positions: int, config: ClickConfig
) -> Member:
    path = folder / Path(entry["file"]).name
    if entry["family"] == "gbdt":
        return GbdtClicks.from_text(read_regular(path).decode("utf-8"), positions, featurizer)
    if entry["family"] == "shrunk":
        with torch.random.fork_rng():
            shrunk = config.shrunk(featurizer, positions)
        shrunk.load_state_dict(load(read_regular(path)))
        shrunk.eval()
        texts = [read_regular(folder / Path(file).name).decode("utf-8") for file in entry["trees"]]
        return ShrunkClicks(shrunk, tuple(tree_model(text, featurizer) for text in texts))
    with torch.random.fork_rng():
        network = config.network(entry["family"], featurizer, positions)
    network.load_state_dict(load(read_regular(path)))
    network.eval()
    return NetworkClicks(entry["family"], network)


def _write_judge(judge: ClickModel, target: Path, number: int) -> dict[str, Any]:
    (member,) = judge.members
    if not isinstance(member, NetworkClicks):
        raise TypeError(f"a judge must be a network; got {type(member).__name__}")
    name = f"judge-{number}.safetensors"
    _save_weights(member.network, target / name)
    hidden = [layer.out_features for layer in member.network.backbone.layers if isinstance(layer, torch.nn.Linear)]
    return {"family": member.family, "file": name, "hidden": hidden}


def _read_judge(entry: Mapping[str, Any], folder: Path, featurizer: Featurizer, positions: int) -> ClickModel:
    member = _read_member(entry, folder, featurizer, positions, ClickConfig(hidden=tuple(entry["hidden"])))
    return ClickModel(featurizer, positions, (member,), Calibration(positions, monotone=True))


def _save_weights(network: torch.nn.Module, path: Path) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}, path)


def _write_scorer(scorer: Scorer, target: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"family": scorer.family, "takes_value": scorer.takes_value}
    if isinstance(scorer, TreesScorer):
        (target / "scorer.txt").write_text(scorer.text, encoding="utf-8")
        return {**entry, "file": "scorer.txt"}
    if not isinstance(scorer, NetworkScorer):
        raise TypeError(f"a scorer must be a network or trees; got {type(scorer).__name__}")
    network = scorer.network
    _save_weights(network, target / "scorer.safetensors")
    scale = asdict(network.value) if network.value is not None else None
    entry |= {"file": "scorer.safetensors", "backbone": network.kind, "hidden": list(network.hidden), "value": scale}
    return entry


def _read_scorer(entry: Mapping[str, Any], folder: Path, featurizer: Featurizer, config: RankerConfig) -> Scorer:
    path = folder / Path(entry["file"]).name
    if entry["family"] == "trees":
        return TreesScorer.from_text(read_regular(path).decode("utf-8"), featurizer, takes_value=entry["takes_value"])
    with torch.random.fork_rng():
        value = Numeric(**entry["value"]) if entry["value"] is not None else None
        # Absent in older manifests.
        backbone, hidden = entry.get("backbone", config.backbone), entry.get("hidden", config.hidden)
        network = ScoreNetwork(featurizer, value, backbone=backbone, hidden=tuple(hidden))
    network.load_state_dict(load(read_regular(path)))
    network.eval()
    return NetworkScorer(network)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
