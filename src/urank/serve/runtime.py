"""A saved model as the server runs it: ONNX Runtime for networks and click models, LightGBM for tree scorers; no torch.

Everything is read into memory, checked and tried on a row before it takes the place of what is served, so that a broken
artifact is refused whole.
"""

from __future__ import annotations

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
from urank.rankers.order import METHODS, Method, positions_in_lists, worth
from urank.serve.artifact import read_artifact, version_of

__all__ = ["MISSING", "Items", "ServedModel", "load_served"]

MISSING = "\x00missing"
"""Stands for a missing category: ONNX has no missing text, and no vocabulary holds this."""


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
        table: NDArray[np.float32] | None,
        scores: NDArray[np.float32] | None,
        *,
        method: Method,
        positions: int,
    ) -> NDArray[np.int64]:
        """The 1-based position `[rows]` of each item in its list, of which this many positions are shown.

        Ranking by score needs the scores, other methods the table.
        """
        if method == "score":
            assert scores is not None  # noqa: S101 - `check_method` has seen to it
            return positions_in_lists(scores, items.offsets)
        assert table is not None  # noqa: S101 - it is needed
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
    files = read_artifact(folder)
    try:
        manifest = json.loads(files["manifest.json"])
        featurizer = _featurizer(json.loads(files["features.json"]))
        model = ServedModel(
            version=version_of(files),
            manifest=manifest,
            featurizer=featurizer,
            clicks=_session(files["clicks.onnx"], featurizer, threads),
            scorer=_scorer(manifest["scorer"], files, featurizer, threads),
        )
        _try(model)
    except UrankError as error:
        raise DataError(f"{folder} is damaged and cannot be served: {error}") from error
    except Exception as error:  # what a damaged graph raises is of many kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder} is damaged and cannot be served ({type(error).__name__}: {reason})") from error
    return model


def _featurizer(values: Mapping[str, Any]) -> Featurizer:
    """The features, if each has a name of its own and every category is text."""
    featurizer = Featurizer.from_dict(values)
    names = featurizer.names
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise DataError("each feature must have a name of its own; features.json has other names")
    vocabularies = [entry["vocabulary"] for entry in values["categorical"]]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in vocabularies):
        raise DataError("a vocabulary must be a list of texts; features.json has another")
    return featurizer


def _session(graph: bytes, featurizer: Featurizer, threads: int) -> ort.InferenceSession:
    """A graph that takes these features."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what is wrong with a graph is raised; nothing else is to be told
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    wanted = {"numeric": len(featurizer.numeric), "categorical": len(featurizer.categorical)}
    taken = {entry.name: entry.shape[-1] for entry in session.get_inputs() if entry.name in wanted}
    if taken != wanted:
        raise DataError(f"the graphs must take the features of features.json, {wanted}; one takes {taken}")
    return session


def _scorer(
    entry: Mapping[str, Any] | None, files: Mapping[str, bytes], featurizer: Featurizer, threads: int
) -> Scores | None:
    if entry is None:
        return None
    if entry["family"] == "trees":
        return _trees(files["scorer.txt"].decode("utf-8"), featurizer, takes_value=entry["takes_value"])
    session = _session(files["scorer.onnx"], featurizer, threads)
    return lambda items: _run(session, items)


def _trees(text: str, featurizer: Featurizer, *, takes_value: bool) -> Scores:
    """What gives the scores of LightGBM trees."""
    from urank.trees import TreeModel  # LightGBM is slow to load, and most models do without

    _check_whole(text)
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


def _check_whole(text: str) -> None:
    """Refuse trees that were cut off: LightGBM ends the whole process over some of these.

    The head tells the length of each tree, and after the last one the text says that it was.
    """
    head, _, trees = text.partition("\n\n")
    sizes = next((line.partition("=")[2] for line in head.splitlines() if line.startswith("tree_sizes=")), "")
    ends = np.cumsum([0, *map(int, sizes.split())]).tolist()
    rest = trees[ends[-1] :]
    whole = rest.lstrip("\n").startswith("end of trees\n") and "\nend of parameters\n" in rest
    if not whole or not all(trees.startswith("Tree=", start) for start in ends[:-1]):
        raise DataError("scorer.txt must be the whole text of a LightGBM model; it is cut off")


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
    name, positions = model.manifest["name"], model.manifest["positions"]
    if not isinstance(name, str) or type(positions) is not int:
        raise DataError(f"the name must be text, and the positions a number; got {name!r} and {positions!r}")
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
