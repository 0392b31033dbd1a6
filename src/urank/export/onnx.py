"""Export for any ONNX Runtime: one graph from raw rows to scores and click probabilities, and its description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx import helper

from urank.errors import ConfigError
from urank.export.bundle import INPUTS_FILE, Export, check_graph, describe, missing_text, to_json, write_bundle
from urank.export.graph import CATEGORICAL, NUMERIC, VALUE, ranking_graph
from urank.learning.features import Featurizer
from urank.ranking.ranking_model import RankingModel
from urank.storage import new_file

GRAPH = "urank.onnx"


def export_onnx(
    model: RankingModel, target: str | Path, *, facts: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Export:
    """Write a model as one ONNX graph, after comparing the graph with the model.

    Args:
        model: the model to export.
        target: a folder, for the graph, `inputs.json` and a README; or a file, if it ends in .onnx. The graph's
            metadata contain the content of `inputs.json` too, under `urank`.
        facts: further facts about the model, for the description.
        overwrite: replace an earlier export.

    Raises:
        DataError: the graph differs from the model; nothing is written.
    """
    target = Path(target)
    graph = ranking_graph(model, categories="text")
    inputs = _describe_inputs(model.clicks.featurizer)
    content = {
        **describe("onnx", model, graph, facts),
        "inputs": {value.name: inputs[value.name] for value in graph.graph.input},
    }
    helper.set_model_props(graph, {"urank": json.dumps(content, ensure_ascii=False, allow_nan=False)})
    if target.suffix != ".onnx":
        texts = {INPUTS_FILE: to_json(content), "README.md": _readme(content)}
        return write_bundle(model, target, graph, GRAPH, "text", texts, content, overwrite=overwrite)
    if target.is_file() and not overwrite:
        raise ConfigError(f"{target} exists already; choose another name or pass --overwrite")
    with new_file(target) as working:
        working.write_bytes(graph.SerializeToString())
        difference = check_graph(working, model, "text")
    return Export("onnx", target, (target.name,), content, difference)


def _describe_inputs(featurizer: Featurizer) -> dict[str, dict[str, Any]]:
    return {
        NUMERIC: {
            "type": "float32",
            "shape": ["rows", len(featurizer.numeric)],
            "features": [feature.name for feature in featurizer.numeric],
            "missing": "NaN",
        },
        CATEGORICAL: {
            "type": "string",
            "shape": ["rows", len(featurizer.categorical)],
            "features": [feature.name for feature in featurizer.categorical],
            "vocabulary_sizes": [len(feature.vocabulary) for feature in featurizer.categorical],
            "missing": missing_text(featurizer),
        },
        VALUE: {"type": "float32", "shape": ["rows"], "default": 1.0},
    }


def _readme(content: Mapping[str, Any]) -> str:
    inputs, outputs = content["inputs"], content["outputs"]
    examples = {
        NUMERIC: "np.zeros({shape}, dtype=np.float32),  # NaN where missing",
        CATEGORICAL: "np.full({shape}, {missing!r}, dtype=object),  # {missing!r} is missing; others may be unknown",
        VALUE: "np.ones({shape}, dtype=np.float32),  # value of a click",
    }
    example = [
        f'    "{name}": {examples[name].format(shape=(1, *each["shape"][1:]), missing=each.get("missing"))}'
        for name, each in inputs.items()
    ]
    return _README.format(
        name=content["model"]["name"],
        urank=content["urank"],
        graph=GRAPH,
        runtime=content["least_onnxruntime"],
        inputs=", ".join(f"`{name}{_shape(each)}`" for name, each in inputs.items()),
        outputs="\n".join(f"| `{name}` | {_shape(each)} | {each['meaning']} |" for name, each in outputs.items()),
        example="\n".join(example),
        names=list(outputs),
    )


def _shape(tensor: Mapping[str, Any]) -> str:
    return f"[{', '.join(map(str, tensor['shape']))}]"


_README = """\
# {name}

Exported by urank {urank}. `{graph}` needs ONNX Runtime {runtime} or newer and takes raw rows: {inputs}.
`inputs.json` lists the names of the features in order.

| output | shape | meaning |
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
