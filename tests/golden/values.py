"""Values that can be recorded and compared: from answers, tables, graphs and files."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl

__all__ = [
    "PATH",
    "TEXT",
    "Json",
    "cleaned",
    "differences",
    "files_of",
    "frame_of",
    "graph_of",
    "leaves",
    "pretty",
    "tensors_of",
    "text_of",
]

Json = Any

TEXT = "<text>"
PATH = "<path>"
# Times, versions of the software, and the rounding error of an exported graph.
IGNORED = frozenset({"seconds", "urank", "trained_by", "difference", "loaded"})
RELATIVE = 1e-6
ABSOLUTE = 1e-9
DIGITS = 9
WIDTH = 118


def cleaned(found: Json) -> Json:
    """An answer without its wording: sentences and paths become placeholders, times and versions are left out.

    >>> cleaned({"why": "it earns more", "rate": 0.5, "seconds": 3.1, "output": "made/model"})
    {'why': '<text>', 'rate': 0.5, 'output': '<path>'}
    """
    if isinstance(found, dict):
        return {key: cleaned(value) for key, value in found.items() if key not in IGNORED}
    if isinstance(found, list | tuple):
        return [cleaned(value) for value in found]
    if isinstance(found, str) and any(letter.isspace() for letter in found):
        return TEXT
    if isinstance(found, str) and found.startswith(("made/", "/")):
        return PATH
    return found


def leaves(found: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Paths and what is at them; an empty list or table is a leaf, too.

    >>> list(leaves({"a": [1, {"b": None}], "c": []}))
    [('/a/0', 1), ('/a/1/b', None), ('/c', [])]
    """
    if not found or not isinstance(found, dict | list):
        yield path, found
        return
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        yield from leaves(value, f"{path}/{key}")


def differences(recorded: Json, found: Json, relative: float = RELATIVE) -> list[str]:
    """A line for each path where two values differ by more than rounding.

    >>> differences({"a": 1.0, "b": "x"}, {"a": 1.0 + 1e-9, "b": "y", "c": 1})
    ["/b: recorded 'x', found 'y'", '/c: recorded nothing, found 1']
    """
    before, after = dict(leaves(recorded)), dict(leaves(found))
    told = []
    for path in dict.fromkeys((*before, *after)):
        if path not in after:
            told.append(f"{path}: recorded {before[path]!r}, found nothing")
        elif path not in before:
            told.append(f"{path}: recorded nothing, found {after[path]!r}")
        elif not _alike(before[path], after[path], relative):
            told.append(f"{path}: recorded {before[path]!r}, found {after[path]!r}")
    return told


def _alike(one: Json, other: Json, relative: float) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one == other or TEXT in (one, other)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    if isinstance(one, int | float) and isinstance(other, int | float):
        both_missing = math.isnan(one) and math.isnan(other)
        return both_missing or math.isclose(one, other, rel_tol=relative, abs_tol=ABSOLUTE)
    return type(one) is type(other) and bool(one == other)


def pretty(found: Json, depth: int = 0) -> str:
    """JSON with nine digits, in which what fits into a line takes one."""
    flat = json.dumps(_rounded(found), ensure_ascii=False)
    pad = " " * depth
    if len(flat) + depth <= WIDTH or not isinstance(found, dict | list):
        return flat
    if isinstance(found, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {pretty(value, depth + 1)}" for key, value in found.items()]
        return "{\n" + ",\n".join(f"{pad} {line}" for line in inner) + f"\n{pad}}}"
    return "[\n" + ",\n".join(f"{pad} {pretty(value, depth + 1)}" for value in found) + f"\n{pad}]"


def _rounded(found: Json) -> Json:
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.{DIGITS}g}") if isinstance(found, float) else found


def files_of(folder: Path) -> list[str]:
    """The files of a folder, by their paths in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def frame_of(frame: pl.DataFrame, rows: int = 3) -> Json:
    """A table: its columns and their types, its first rows, and sums that tell values and their order."""
    return {
        "rows": frame.height,
        "columns": {name: str(kind) for name, kind in frame.schema.items()},
        "first": [_row(row) for row in frame.head(rows).rows()],
        "sums": {name: _sums(frame[name]) for name in frame.columns},
    }


def _row(row: tuple[Any, ...]) -> list[Any]:
    return [value if isinstance(value, int | float | str | list | None) else str(value) for value in row]


def _sums(column: pl.Series) -> Json:
    """Of numbers with a fraction the sum, plain and weighed by the row; of others a hash."""
    if column.dtype == pl.List:
        lengths, inner = column.list.len(), column.explode(empty_as_null=False, keep_nulls=False)
        return {"lengths": _hash(lengths), "items": _sums(inner)}
    if not column.dtype.is_float():
        return _hash(column)
    numbers = column.cast(pl.Float64).to_numpy()
    known = np.where(np.isnan(numbers), 0.0, numbers)
    weights = 1 + np.arange(len(known)) % 101
    return [int(np.isnan(numbers).sum()), float(known.sum()), float((known * weights).sum() / weights.sum())]


def _hash(column: pl.Series) -> str:
    return _digest("\x1f".join(map(str, column.to_list())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_of(path: Path) -> list[str]:
    """The lines of a file without comments and empty ones."""
    lines = (line.rstrip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def tensors_of(path: Path) -> Json:
    """The names, types and shapes in a safetensors file, by its header."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return {name: [tensor["dtype"], *tensor["shape"]] for name, tensor in sorted(header.items())}


def graph_of(path: Path, **inputs: np.ndarray[Any, Any]) -> Json:
    """What an ONNX graph takes, gives, and says of some rows."""
    session = onnxruntime.InferenceSession(path)
    outputs = session.get_outputs()
    return {
        "inputs": [[node.name, node.type, *map(str, node.shape)] for node in session.get_inputs()],
        "outputs": {
            node.name: {"type": node.type, "shape": list(map(str, node.shape)), "values": values.tolist()}
            for node, values in zip(outputs, session.run(None, inputs), strict=True)
        },
    }
