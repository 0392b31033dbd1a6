"""A model for any ONNX Runtime: one graph from raw rows to scores and click probabilities, and what its inputs are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from urank.errors import ConfigError
from urank.export.bundle import Export, check_graph, describe, export_folder, missing_text, text_feed, write_json
from urank.export.graph import VALUE, text_graph
from urank.learning.features import Featurizer
from urank.ranking.ranking_model import RankingModel
from urank.storage import new_file

__all__ = ["export_onnx"]

GRAPH = "urank.onnx"


def export_onnx(
    model: RankingModel, target: str | Path, *, facts: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Export:
    """Write a model as one ONNX graph, which is checked against the model before it appears.

    Args:
        model: what to write.
        target: a folder, which gets the graph, `inputs.json` and a README; or a file, if it ends in .onnx. The content
            of `inputs.json` is also in the metadata of the graph, under `urank`.
        facts: what to tell about the model.
        overwrite: replace an earlier export.

    Raises:
        DataError: when the graph does not say what the model says; nothing is left behind.
    """
    target = Path(target)
    graph = text_graph(model)
    content = {
        **describe("onnx", model, graph, facts),
        "inputs": _inputs(graph, model.clicks.featurizer),
    }
    helper.set_model_props(graph, {"urank": json.dumps(content, ensure_ascii=False, allow_nan=False)})
    if target.suffix == ".onnx":
        if target.is_file() and not overwrite:
            raise ConfigError(f"{target} exists already; choose another name or pass --overwrite")
        with new_file(target) as working:
            working.write_bytes(graph.SerializeToString())
            difference = check_graph(working, model, text_feed)
        return Export("onnx", target, (target.name,), content, difference)
    with export_folder(target, "onnx", overwrite=overwrite) as working:
        (working / GRAPH).write_bytes(graph.SerializeToString())
        difference = check_graph(working / GRAPH, model, text_feed)
        write_json(working / "inputs.json", content)
        (working / "README.md").write_text(_readme(content), encoding="utf-8")
        return Export("onnx", target, (GRAPH, "inputs.json", "README.md"), content, difference)


def _inputs(graph: onnx.ModelProto, featurizer: Featurizer) -> dict[str, Any]:
    """What each input of the graph holds, in the order of the graph."""
    told: dict[str, dict[str, Any]] = {
        "numeric": {
            "type": "float32",
            "shape": ["rows", len(featurizer.numeric)],
            "features": [feature.name for feature in featurizer.numeric],
            "missing": "NaN",
        },
        "categorical": {
            "type": "string",
            "shape": ["rows", len(featurizer.categorical)],
            "features": [feature.name for feature in featurizer.categorical],
            "vocabulary_sizes": [len(feature.vocabulary) for feature in featurizer.categorical],
            "missing": missing_text(featurizer),
        },
        VALUE: {"type": "float32", "shape": ["rows"], "default": 1.0},
    }
    return {value.name: told[value.name] for value in graph.graph.input}


def _readme(content: Mapping[str, Any]) -> str:
    inputs, outputs = content["inputs"], list(content["outputs"])
    fed = {
        "numeric": "np.zeros({shape}, dtype=np.float32),  # NaN where missing",
        "categorical": "np.full({shape}, {missing!r}, dtype=object),  # {missing!r} is missing; others may be unknown",
        VALUE: "np.ones({shape}, dtype=np.float32),  # what a click is worth",
    }
    example = [
        f'    "{name}": {fed[name].format(shape=(1, *told["shape"][1:]), missing=told.get("missing"))}'
        for name, told in inputs.items()
    ]
    shapes = [f"| `{name}` | {_shape(told)} | {told['meaning']} |" for name, told in content["outputs"].items()]
    return _README.format(
        name=content["model"]["name"],
        urank=content["urank"],
        graph=GRAPH,
        runtime=content["least_onnxruntime"],
        inputs=", ".join(f"`{name}{_shape(told)}`" for name, told in inputs.items()),
        outputs="\n".join(shapes),
        example="\n".join(example),
        names=outputs,
    )


def _shape(told: Mapping[str, Any]) -> str:
    return f"[{', '.join(map(str, told['shape']))}]"


_README = """\
# {name}

Exported by urank {urank}. `{graph}` needs ONNX Runtime {runtime} or newer and takes raw rows: {inputs}.
`inputs.json` has the names of the features, in order.

| output | shape | what it is |
|---|---|---|
{outputs}

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{graph}")
inputs = {{
{example}
}}
for name, output in zip({names}, session.run({names}, inputs)):
    print(name, output)
```
"""
