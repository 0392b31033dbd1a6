"""Export for any ONNX Runtime: one graph from raw rows to scores and click probabilities, and its description."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import polars as pl
from numpy.typing import NDArray
from onnx import helper

from urank.errors import ConfigError, DataError
from urank.export.graph import CATEGORICAL, CTR1, LOG_CTR, NUMERIC, SCORE, VALUE, Categories, ranking_graph
from urank.learning.features import Featurizer
from urank.log.signed_log import inverse_signed_log
from urank.ranking.matching import expected_gain
from urank.ranking.ranking_model import RankingModel
from urank.storage import new_file, new_folder

FORMAT = "urank export"
INPUTS_FILE = "inputs.json"

# Graphs of every kind were run in ONNX Runtime 1.19 to 1.31. TreeEnsemble came with 1.21, whose splits on sets of
# categories, like those of 1.22, were wrong.
LEAST_RUNTIME, LEAST_RUNTIME_FOR_TREES = "1.19", "1.23"

ROWS = 512
TOLERANCE = 1e-4
ODD_SHARE = 0.2
"""Share of missing values among random numbers, and of unknown or missing values among random categories."""


@dataclass(frozen=True)
class Export:
    """A written export."""

    kind: str  # kind, target, files: `onnx` or `vespa`, the folder or file, and the file names in it
    target: Path
    files: tuple[str, ...]
    content: Mapping[str, Any]  # the content of `inputs.json`
    difference: float  # the largest relative difference from the model on random rows

    @property
    def renamed(self) -> dict[str, str]:
        """New names of the features that could not keep theirs."""
        features = (each for value in self.content["inputs"].values() for each in value.get("features", ()))
        names = {each["feature"]: each["name"] for each in features if isinstance(each, dict)}
        return {feature: name for feature, name in names.items() if feature != name}


def describe(
    kind: str, model: RankingModel, graph: onnx.ModelProto, inputs: Mapping[str, Any], facts: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Describe the model, the versions a runtime must support, and the outputs and inputs of the graph."""
    K, outcome = model.clicks.positions, model.goal.removesuffix("s")
    outputs = {
        SCORE: {"shape": ["rows"], "meaning": "the score to rank by, highest first"},
        LOG_CTR: {"shape": ["rows", K], "meaning": f"log P({outcome}) at positions 1 to {K}"},
        CTR1: {"shape": ["rows"], "meaning": f"value · P({outcome} at position 1)"},
    }
    inputs = {**inputs, VALUE: {"type": "float32", "shape": ["rows"], "default": 1.0}}
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
        "inputs": {value.name: inputs[value.name] for value in graph.graph.input},
    }


def write_bundle(
    model: RankingModel,
    target: Path,
    graph: onnx.ModelProto,
    graph_file: str,
    categories: Categories,
    texts: Mapping[str, str],
    content: Mapping[str, Any],
    *,
    overwrite: bool,
) -> Export:
    """Write a folder of a graph and text files, atomically and after `check_graph`; it only replaces its own kind.

    Args:
        model, graph, categories: the model, its graph, and how the graph takes categories.
        target, graph_file: the folder, and the path of the graph within it.
        texts, content: the other files, by their paths within the folder, and the content of `inputs.json` among them.
        overwrite: replace an earlier export of the same kind.
    """
    kind, marker = content["kind"], target / INPUTS_FILE
    if overwrite and marker.is_file() and not _is_export(marker, kind):
        raise ConfigError(f"{target} is not replaced: its {INPUTS_FILE} is not that of an export for {kind}")
    with new_folder(target, marker=INPUTS_FILE, overwrite=overwrite) as working:
        for name in (graph_file, *texts):
            (working / name).parent.mkdir(parents=True, exist_ok=True)
        (working / graph_file).write_bytes(graph.SerializeToString())
        for name, text in texts.items():
            (working / name).write_text(text, encoding="utf-8")
        difference = check_graph(working / graph_file, model, categories)
    return Export(kind, target, (graph_file, *texts), content, difference)


def _is_export(marker: Path, kind: str) -> bool:
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and (content.get("format"), content.get("kind")) == (FORMAT, kind)


def describe_matrix(dtype: str, features: Sequence[Any], **rest: Any) -> dict[str, Any]:
    """Describe an input `[rows, features]`."""
    return {"type": dtype, "shape": ["rows", len(features)], "features": list(features), **rest}


def to_json(value: Any) -> str:
    """Serialise a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def check_graph(path: Path, model: RankingModel, categories: Categories, *, seed: int = 0) -> float:
    """Compare a written graph with its model, on all random rows at once and on a single one.

    Returns:
        The largest relative difference.

    Raises:
        DataError: an output differs by more than `TOLERANCE` times its size, or the mean size if that is larger.
    """
    rows = random_rows(model.clicks.featurizer, np.random.default_rng(seed))
    value = rows[VALUE].to_numpy()
    table = model.log_ctr(rows)
    expected: dict[str, NDArray[Any]] = {LOG_CTR: table, CTR1: expected_gain(table, value, "ctr1")}
    if model.scorer is not None:
        expected[SCORE] = model.score(rows, value)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = graph_inputs(model.clicks.featurizer, rows, categories)
    largest = 0.0
    for some in (slice(None), slice(1)):
        found = session.run(list(expected), {name: each[some] for name, each in inputs.items()})
        for (name, all_rows), output in zip(expected.items(), found, strict=True):
            size = np.maximum(np.abs(all_rows), np.abs(all_rows).mean())[some]
            largest = max(largest, _difference(name, output, all_rows[some], size))
    return largest


def _difference(name: str, output: NDArray[Any], expected: NDArray[Any], size: NDArray[Any]) -> float:
    """Return the largest difference relative to the size."""
    if output.shape != expected.shape:
        raise DataError(f"the exported graph differs from the model: {name} has shape {output.shape}, {expected.shape}")
    difference = np.abs(output - expected)
    agrees = difference <= TOLERANCE * size  # NaN does not agree
    if not agrees.all():
        place = tuple(np.argwhere(~agrees)[0])
        found = f"{name} must be {expected[place]:.6g} at random row {place[0]}; got {output[place]:.6g}"
        raise DataError(f"the exported graph differs from the model: {found}")
    return float(np.divide(difference, size, out=np.zeros_like(difference), where=size > 0).max(initial=0))


def random_rows(featurizer: Featurizer, rng: np.random.Generator, rows: int = ROWS) -> pl.DataFrame:
    """Draw raw rows: numbers near those of training and far off, missing values, unknown categories, click values."""
    columns: dict[str, pl.Series] = {}
    for number in featurizer.numeric:
        raw = inverse_signed_log(number.mean + 3 * number.std * rng.normal(size=rows)).astype(np.float32)
        columns[number.name] = pl.Series(raw).set(pl.Series(rng.random(rows) < ODD_SHARE), None)
    for category in featurizer.categorical:
        known = np.array([*category.vocabulary, _unseen(category.vocabulary, "never seen", "!")], dtype=object)
        text = pl.Series(known[rng.integers(0, len(known), rows)], dtype=pl.String)
        odd = pl.Series(rng.random(rows))
        columns[category.name] = text.set(odd < ODD_SHARE, known[-1]).set(odd < ODD_SHARE / 2, None)
    return pl.DataFrame(columns).with_columns(pl.Series(VALUE, rng.lognormal(0, 1, rows).astype(np.float32)))


def graph_inputs(featurizer: Featurizer, rows: pl.DataFrame, categories: Categories) -> dict[str, NDArray[Any]]:
    """Convert raw rows to the inputs of `ranking_graph`.

    As codes, unknown and missing categories are 0 in one row and a number beyond the vocabulary in the next.
    """
    inputs: dict[str, NDArray[Any]] = {VALUE: rows[VALUE].to_numpy()}
    encoded = featurizer.encode(rows)
    if featurizer.numeric:
        inputs[NUMERIC] = encoded.numeric
    if featurizer.categorical and categories == "text":
        names = [feature.name for feature in featurizer.categorical]
        inputs[CATEGORICAL] = rows.select(pl.col(names).fill_null(missing_text(featurizer))).to_numpy().astype(object)
    elif featurizer.categorical:
        codes = encoded.categorical
        unknown = np.where(np.arange(len(codes))[:, None] % 2 == 0, 0, np.array(featurizer.cardinalities))
        inputs[CATEGORICAL] = np.where(codes == 0, unknown, codes)
    return inputs


def missing_text(featurizer: Featurizer) -> str:
    """Return the string that represents a missing category: the empty one, unless it is itself a category.

    >>> missing_text(Featurizer((), ()))
    ''
    """
    return _unseen((text for feature in featurizer.categorical for text in feature.vocabulary), "", "<missing>")


def _unseen(vocabulary: Iterable[str], text: str, suffix: str) -> str:
    """Append the suffix until the text is not in the vocabulary."""
    taken = set(vocabulary)
    while text in taken:
        text += suffix
    return text


GRAPH = "urank.onnx"


def export_onnx(
    model: RankingModel, target: str | Path, *, facts: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Export:
    """Write a model as one ONNX graph, after comparing the graph with the model.

    Args:
        model, facts: the model to export, and further facts about it, for the description.
        target: a folder, for the graph, `inputs.json` and a README; or a file, if it ends in .onnx. The graph's
            metadata contain the content of `inputs.json` too, under `urank`.
        overwrite: replace an earlier export.

    Raises:
        DataError: the graph differs from the model; nothing is written.
    """
    target = Path(target)
    graph = ranking_graph(model, categories="text")
    inputs = _describe_inputs(model.clicks.featurizer)
    content = describe("onnx", model, graph, inputs, facts)
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
    sizes = [len(feature.vocabulary) for feature in featurizer.categorical]
    rest = {"vocabulary_sizes": sizes, "missing": missing_text(featurizer)}
    within = {"within_list": list(featurizer.within)} if featurizer.within else {}
    return {
        NUMERIC: describe_matrix("float32", [feature.name for feature in featurizer.inputs], missing="NaN", **within),
        CATEGORICAL: describe_matrix("string", [feature.name for feature in featurizer.categorical], **rest),
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
        within=_WITHIN if "within_list" in inputs.get(NUMERIC, {}) else "",
        outputs="\n".join(f"| `{name}` | {_shape(each)} | {each['meaning']} |" for name, each in outputs.items()),
        example="\n".join(example),
        names=list(outputs),
    )


def _shape(tensor: Mapping[str, Any]) -> str:
    return f"[{', '.join(map(str, tensor['shape']))}]"


_WITHIN = """
The last columns of `numeric` compare the features under `within_list` in `inputs.json` with those of the other items
of the list. Compute them from the whole list before any item is dropped, with x' = sign(x) · log(1 + |x|) and the mean
and standard deviation of x' over the known values of the list:

| column | value |
|---|---|
| `… in list: z` | (x' − mean) / standard deviation, limited to ±4; 0 if the deviation is below 1e-6; NaN if x is |
| `… in list: rank` | (average rank from the smallest, from 1, − ½) / number of known values; NaN if x is |
| `… in list: mean` | sign(mean) · (exp(\\|mean\\|) − 1); NaN if all x are |
| `list size` | number of items |

In Python, `urank.learning.within_list.within_list` computes them.
"""

_README = """\
# {name}

Exported by urank {urank}. `{graph}` needs ONNX Runtime {runtime} or newer and takes raw rows: {inputs}.
`inputs.json` lists the names of the features in order.
{within}
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
