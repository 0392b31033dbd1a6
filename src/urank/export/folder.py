"""What all exports have in common: what they tell about a model, and a folder that only an export replaces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from urank.clicks.tree_onnx import OUTPUT
from urank.errors import ConfigError
from urank.export.graph import CTR1, SCORE
from urank.files import new_folder
from urank.rankers.ranking import RankingModel

__all__ = ["FORMAT", "Export", "describe", "export_folder", "write_json"]

FORMAT = "urank export"
MARKER = "inputs.json"

# Graphs of every kind were run in ONNX Runtime 1.19 to 1.31. Up to 1.20 it has no TreeEnsemble; in 1.21 and 1.22 splits
# on sets of categories went astray.
LEAST_RUNTIME, LEAST_RUNTIME_FOR_TREES = "1.19", "1.23"


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        kind: `onnx` or `vespa`.
        target: the folder or the file.
        files: their names within the folder, or the name of the file.
        content: what `inputs.json` holds.
        difference: the largest difference from the model on random rows, as a share of the size.
    """

    kind: str
    target: Path
    files: tuple[str, ...]
    content: Mapping[str, Any]
    difference: float

    @property
    def renamed(self) -> dict[str, str]:
        """The features that could not keep their names, and what they are called instead."""
        told = (each for value in self.content["inputs"].values() for each in value.get("features", ()))
        named = {each["feature"]: each["name"] for each in told if isinstance(each, dict)}
        return {feature: name for feature, name in named.items() if feature != name}


def describe(
    kind: str, model: RankingModel, graph: onnx.ModelProto, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What every export tells: the model, the versions that a runtime must know, and the outputs."""
    K = model.clicks.positions
    outputs = {
        SCORE: {"shape": ["rows"], "meaning": "the score to rank by, highest first"},
        OUTPUT: {"shape": ["rows", K], "meaning": f"log P(click) at positions 1 to {K}"},
        CTR1: {"shape": ["rows"], "meaning": "value · P(click at position 1)"},
    }
    trees = any(node.op_type == "TreeEnsemble" for node in graph.graph.node)
    return {
        "format": FORMAT,
        "kind": kind,
        "urank": version("urank"),
        "model": {"name": model.name, "method": model.method, **(facts or {})},
        "positions": K,
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in graph.opset_import},
        "ir_version": graph.ir_version,
        "least_onnxruntime": LEAST_RUNTIME_FOR_TREES if trees else LEAST_RUNTIME,
        "outputs": {value.name: outputs[value.name] for value in graph.graph.output},
    }


@contextmanager
def export_folder(folder: str | Path, kind: str, *, overwrite: bool) -> Iterator[Path]:
    """A folder that appears complete or not at all, and replaces nothing but an export of the same kind."""
    marker = Path(folder) / MARKER
    if overwrite and marker.is_file() and not _is_export(marker, kind):
        raise ConfigError(f"{folder} holds something else (its {MARKER} is not of this kind), so it is not replaced")
    with new_folder(folder, marker=MARKER, overwrite=overwrite) as working:
        yield working


def _is_export(marker: Path, kind: str) -> bool:
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and (content.get("format"), content.get("kind")) == (FORMAT, kind)


def write_json(path: Path, value: Any) -> None:
    """Write a value for people and machines."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
