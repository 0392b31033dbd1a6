"""What all exports have in common: what they tell about a model, and a folder that only an export replaces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.export.graph import CTR1, OUTPUT, SCORE, VALUE
from urank.learning.features import Featurizer
from urank.ranking.positions import expected_gain
from urank.ranking.ranking_model import RankingModel
from urank.storage import new_folder

__all__ = [
    "FORMAT",
    "ROWS",
    "TOLERANCE",
    "Export",
    "Feed",
    "check_graph",
    "describe",
    "export_folder",
    "missing_text",
    "numeric_feed",
    "random_rows",
    "raw_number",
    "text_feed",
    "write_json",
]

ROWS = 512
TOLERANCE = 1e-4
ODD_SHARE = 0.2
"""Of the numbers that are missing; likewise of the categories that are, and of those that no vocabulary has."""

Feed = Callable[[Featurizer, pl.DataFrame], dict[str, NDArray[Any]]]
"""What a graph takes for a table of raw rows."""


def check_graph(path: Path, model: RankingModel, feed: Feed, *, seed: int = 0) -> float:
    """Compare a written graph with its model, all rows at once and one alone.

    Args:
        path: the graph.
        model: what it was made of.
        feed: what it takes for raw rows.
        seed: of the rows.

    Returns:
        the largest difference, as a share of the size of what was expected.

    Raises:
        DataError: when an output differs by more than `TOLERANCE` of its size, or of the mean size where that is more.
    """
    rows = random_rows(model.clicks.featurizer, np.random.default_rng(seed))
    value = rows[VALUE].to_numpy()
    table = model.log_ctr(rows)
    expected: dict[str, NDArray[Any]] = {OUTPUT: table, CTR1: expected_gain(table, value, "ctr1")}
    if model.scorer is not None:
        expected[SCORE] = model.score(rows, value)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = feed(model.clicks.featurizer, rows)
    largest = 0.0
    for some in (slice(None), slice(1)):
        found = session.run(list(expected), {name: each[some] for name, each in inputs.items()})
        for (name, all_rows), got in zip(expected.items(), found, strict=True):
            size = np.maximum(np.abs(all_rows), np.abs(all_rows).mean())[some]
            largest = max(largest, _difference(name, got, all_rows[some], size))
    return largest


def _difference(name: str, got: NDArray[Any], expected: NDArray[Any], size: NDArray[Any]) -> float:
    """The largest difference as a share of the size."""
    if got.shape != expected.shape:
        raise DataError(f"the exported graph is not the model: {name} must be {expected.shape}; it is {got.shape}")
    apart = np.abs(got - expected)
    agrees = apart <= TOLERANCE * size  # so that what is not a number does not agree
    if not agrees.all():
        place = tuple(np.argwhere(~agrees)[0])
        raise DataError(
            f"the exported graph is not the model: {name} must be {expected[place]:.6g} at random row {place[0]}; "
            f"it is {got[place]:.6g}"
        )
    return float(np.divide(apart, size, out=np.zeros_like(apart), where=size > 0).max(initial=0))


def random_rows(featurizer: Featurizer, rng: np.random.Generator, rows: int = ROWS) -> pl.DataFrame:
    """Raw rows as a log has them: numbers around those of training and far off, missing ones, unknown categories."""
    columns: dict[str, pl.Series] = {}
    for number in featurizer.numeric:
        raw = raw_number(number.mean + 3 * number.std * rng.normal(size=rows)).astype(np.float32)
        columns[number.name] = pl.Series(raw).set(pl.Series(rng.random(rows) < ODD_SHARE), None)
    for category in featurizer.categorical:
        known = np.array([*category.vocabulary, _unseen(category.vocabulary, "never seen", "!")], dtype=object)
        text = pl.Series(known[rng.integers(0, len(known), rows)], dtype=pl.String)
        odd = pl.Series(rng.random(rows))
        text = text.set(odd < ODD_SHARE, known[-1]).set(odd < ODD_SHARE / 2, None)
        columns[category.name] = text
    return pl.DataFrame(columns).with_columns(pl.Series(VALUE, rng.lognormal(0, 1, rows).astype(np.float32)))


def raw_number(compressed: Any) -> NDArray[np.float64]:
    """The number that `signed_log` compresses to this one, cut where float32 ends.

    >>> raw_number([0.0, -np.log(3)]).round(6).tolist()
    [0.0, -2.0]
    """
    compressed = np.asarray(compressed, dtype=np.float64)
    return np.asarray(np.sign(compressed) * np.expm1(np.minimum(np.abs(compressed), 80)))


def text_feed(featurizer: Featurizer, rows: pl.DataFrame) -> dict[str, NDArray[Any]]:
    """What `text_graph` takes."""
    names = [feature.name for feature in featurizer.categorical]
    text = rows.select(pl.col(names).fill_null(missing_text(featurizer)))
    return numeric_feed(featurizer, rows) | ({"categorical": text.to_numpy().astype(object)} if names else {})


def numeric_feed(featurizer: Featurizer, rows: pl.DataFrame) -> dict[str, NDArray[Any]]:
    """What both graphs take alike: numbers and values."""
    names = [feature.name for feature in featurizer.numeric]
    numbers = rows.select(pl.col(names).cast(pl.Float32).fill_null(float("nan")))
    return ({"numeric": numbers.to_numpy()} if names else {}) | {VALUE: rows[VALUE].to_numpy()}


def missing_text(featurizer: Featurizer) -> str:
    """What stands for a missing category: the empty text, unless it is a category itself.

    >>> missing_text(Featurizer((), ()))
    ''
    """
    return _unseen((text for feature in featurizer.categorical for text in feature.vocabulary), "", "<missing>")


def _unseen(vocabulary: Iterable[str], text: str, more: str) -> str:
    """The text, with more of it as long as a vocabulary has it."""
    taken = set(vocabulary)
    while text in taken:
        text += more
    return text


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
