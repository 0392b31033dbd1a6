"""A saved model as the server runs it: ONNX Runtime for networks and click models, LightGBM for tree scorers; no torch.

Everything is read into memory, checked and tried on a row before it takes the place of what is served, so that a broken
artifact is refused whole. A folder that is replaced while it is read is read again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError, UrankError
from urank.features import Featurizer, Inputs
from urank.manifest import read_manifest
from urank.rankers.order import METHODS, Method, positions_in_lists, worth

__all__ = ["MISSING", "Items", "ServedModel", "load_served"]

MISSING = "\x00missing"
"""Stands for a missing category: ONNX has no missing text, and no vocabulary holds this."""

_TRIES = 5


@dataclass(frozen=True, eq=False)
class Items:
    """Candidates, a row for each, the lists of several queries one after the other.

    Attributes:
        numeric: `[rows, F]` raw numbers, NaN where missing; the columns are those of `names`.
        categorical: `[rows, C]` text, `MISSING` where missing.
        value: `[rows]`, what a click is worth.
        offsets: `[lists + 1]`, where the lists begin.
    """

    numeric: NDArray[np.float32]
    categorical: NDArray[np.object_]
    value: NDArray[np.float32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numeric)


Scores = Callable[[Items], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that is loaded and was tried.

    Attributes:
        version: the first digits of a hash over its files.
        manifest: what `urank train` wrote about it.
        featurizer: its features.
        clicks: the graph of its click model.
        scorer: gives the scores of items; none when only a click model was trained.
        loaded: when, in seconds since 1970.
    """

    version: str
    manifest: Mapping[str, Any]
    featurizer: Featurizer
    clicks: ort.InferenceSession
    scorer: Scores | None
    loaded: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def method(self) -> Method:
        """How it ranks unless told otherwise."""
        return self.check_method(self.manifest["method"])

    @property
    def methods(self) -> tuple[Method, ...]:
        return METHODS if self.scorer is not None else ("match", "ctr1")

    @cached_property
    def positions(self) -> int:
        """K, the positions that it knows the clicks of."""
        return int(self.manifest["positions"])

    @cached_property
    def takes_value(self) -> bool:
        """Whether the scorer was trained on values."""
        return bool((self.manifest["scorer"] or {}).get("takes_value", False))

    def check_method(self, method: str) -> Method:
        """The method, if the model has it."""
        found = next((each for each in self.methods if each == method), None)
        if found is None:
            raise ConfigError(f"the model ranks by {', '.join(self.methods)}; got '{method}'")
        return found

    def log_ctr(self, items: Items) -> NDArray[np.float32]:
        """log P(click | item, position) `[rows, K]`."""
        return _run(self.clicks, items)

    def scores(self, items: Items) -> NDArray[np.float32] | None:
        """The score of each item `[rows]`; none without a scorer."""
        return None if self.scorer is None else self.scorer(items)

    def order(
        self,
        items: Items,
        table: NDArray[np.float32],
        scores: NDArray[np.float32] | None,
        *,
        method: Method,
        positions: int,
    ) -> NDArray[np.int64]:
        """The 1-based position `[rows]` of each item in its list, of which this many positions are shown."""
        if method == "score":
            assert scores is not None  # noqa: S101 - `check_method` has seen to it
            return positions_in_lists(scores, items.offsets)
        return positions_in_lists(worth(table[:, :positions], items.value, method), items.offsets)


def load_served(folder: str | Path, *, threads: int = 1) -> ServedModel:
    """Read a model that `urank train` wrote and try it.

    Args:
        folder: where it is.
        threads: of ONNX Runtime for each call.

    Raises:
        DataError: when it is not a model, is damaged, or gives what no model gives.
    """
    folder = Path(folder)
    files = _read_files(folder)
    try:
        manifest = json.loads(files["manifest.json"])
        featurizer = Featurizer.from_dict(json.loads(files["features.json"]))
        model = ServedModel(
            version=_version(files),
            manifest=manifest,
            featurizer=featurizer,
            clicks=_session(files["clicks.onnx"], threads),
            scorer=_scorer(manifest["scorer"], files, featurizer, threads),
        )
        _try(model)
    except UrankError:
        raise
    except Exception as error:  # what a damaged graph raises is of many kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder} is damaged and cannot be served ({type(error).__name__}: {reason})") from error
    return model


def _read_files(folder: Path) -> dict[str, bytes]:
    """The files of one artifact, also when another takes its name meanwhile."""
    for _ in range(_TRIES):
        before = _identity(folder)
        manifest = read_manifest(folder)
        scorer = manifest.get("scorer") or {}
        names = ["manifest.json", "features.json", "clicks.onnx"]
        if scorer:
            names.append("scorer.txt" if scorer.get("family") == "trees" else "scorer.onnx")
        try:
            files = {name: (folder / name).read_bytes() for name in names}
        except OSError as error:
            if _identity(folder) == before:
                name = Path(str(error.filename)).name
                raise DataError(f"{folder} cannot be served: {name} cannot be read ({error.strerror})") from error
            continue
        if _identity(folder) == before:
            return files
    raise DataError(f"{folder} changes while it is read")


def _identity(folder: Path) -> tuple[int, int, int]:
    """What tells a folder from another of its name, and its manifest from another."""
    try:
        manifest = (folder / "manifest.json").stat()
        return folder.stat().st_ino, manifest.st_ino, manifest.st_mtime_ns
    except OSError:
        return 0, 0, 0


def _version(files: Mapping[str, bytes]) -> str:
    """The same for the same files, wherever they lie."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode())
        digest.update(files[name])
    return digest.hexdigest()[:12]


def _session(graph: bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what is wrong with a graph is raised; nothing else is to be told
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _scorer(
    entry: Mapping[str, Any] | None, files: Mapping[str, bytes], featurizer: Featurizer, threads: int
) -> Scores | None:
    if entry is None:
        return None
    if entry["family"] == "trees":
        return _trees(files["scorer.txt"].decode("utf-8"), featurizer, takes_value=entry["takes_value"])
    session = _session(files["scorer.onnx"], threads)
    return lambda items: _run(session, items)


def _trees(text: str, featurizer: Featurizer, *, takes_value: bool) -> Scores:
    """What gives the scores of LightGBM trees."""
    from urank.trees import TreeModel  # LightGBM is slow to load, and most models do without

    extra = "value" if takes_value else None
    model = TreeModel(text, len(featurizer.numeric), len(featurizer.categorical), extra).checked()
    vocabularies = [
        {word: place for place, word in enumerate(feature.vocabulary, 1)} for feature in featurizer.categorical
    ]

    def scores(items: Items) -> NDArray[np.float32]:
        numbers = np.zeros(items.categorical.shape, dtype=np.int64)  # 0 is unknown or missing
        for place, vocabulary in enumerate(vocabularies):
            numbers[:, place] = [vocabulary.get(word, 0) for word in items.categorical[:, place]]
        return model.predict(Inputs(items.numeric, numbers), items.value)

    return scores


def _run(session: ort.InferenceSession, items: Items) -> NDArray[np.float32]:
    """The one output of a graph."""
    feed: dict[str, NDArray[Any]] = {}
    for entry in session.get_inputs():
        if entry.name == "categorical" and entry.type != "tensor(string)":  # there are none
            feed[entry.name] = np.zeros((len(items), 0), dtype=np.int64)
        else:
            feed[entry.name] = getattr(items, entry.name)
    result: NDArray[np.float32] = session.run(None, feed)[0]
    return result


def _try(model: ServedModel) -> None:
    """Refuse a model that gives nothing of use for two candidates without any feature."""
    model.check_method(model.manifest["method"])
    featurizer = model.featurizer
    items = Items(
        np.full((2, len(featurizer.numeric)), np.nan, dtype=np.float32),
        np.full((2, len(featurizer.categorical)), MISSING, dtype=object),
        np.ones(2, dtype=np.float32),
        np.array([0, 2]),
    )
    table, scores = model.log_ctr(items), model.scores(items)
    if table.shape != (2, model.positions) or not (table <= 1e-4).all():
        raise DataError(f"the click model must give log probabilities of shape [2, {model.positions}]; it does not")
    if scores is not None and (scores.shape != (2,) or not np.isfinite(scores).all()):
        raise DataError("the scorer must give a finite number for each item; it does not")
