"""The models that a server has in use, and how others take their place while it runs.

A request reads `Served` once and works with it to its end; a reload makes another `Served` and puts it there in one
assignment. So a request never sees half of a change, and none waits for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import polars as pl
from numpy.typing import NDArray

from urank.abtest.exposures import assign_arms
from urank.errors import ConfigError, DataError, UrankError
from urank.learning.features import Featurizer, Inputs
from urank.model_io import read_manifest
from urank.ranking.positions import METHODS, Method, expected_gain, positions_in_lists

__all__ = [
    "ARMS",
    "MISSING",
    "ActiveModels",
    "Items",
    "ServedModel",
    "Sources",
    "SplitTest",
    "load",
    "load_served",
    "read_artifact",
    "version_of",
]

_TRIES = 5
_PAUSE_SECONDS = 0.01


def read_artifact(folder: Path) -> dict[str, bytes]:
    """The files of one artifact, also when another takes its name meanwhile."""
    for left in reversed(range(_TRIES)):
        try:
            manifest = read_manifest(folder)
        except RecursionError as error:
            raise DataError(f"{folder} is not a urank model: its manifest.json cannot be read") from error
        except DataError:
            if folder.exists() or not left:
                raise
            time.sleep(_PAUSE_SECONDS)  # one folder has gone, and the next is about to come
            continue
        files = _read_at_once(folder, _names(manifest))
        if files is not None and _is_json_of(files["manifest.json"], manifest):
            return files
    raise DataError(f"{folder} changes while it is read")


def _names(manifest: Mapping[str, Any]) -> list[str]:
    """The files that a model of this kind is served from."""
    names, scorer = ["manifest.json", "features.json", "clicks.onnx"], manifest.get("scorer")
    if isinstance(scorer, dict) and scorer:
        names.append("scorer.txt" if scorer.get("family") == "trees" else "scorer.onnx")
    return names


def _read_at_once(folder: Path, names: Sequence[str]) -> dict[str, bytes] | None:
    """Files of a folder as they are at one time; none when they are deleted or written to meanwhile.

    They are read through one handle of the folder: paths could lead to another folder of that name, and back again to
    the first, between one file and the next.
    """
    handle = -1
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        before = _identities(handle, names)
        files = {name: _read_in(handle, name) for name in names}
        return files if _identities(handle, names) == before else None
    except OSError as error:
        if handle != -1 and not _is_still(folder, handle):
            return None
        name = Path(str(error.filename)).name
        raise DataError(f"{folder} cannot be served: {name} cannot be read ({error.strerror})") from error
    finally:
        if handle != -1:
            os.close(handle)


def _read_in(handle: int, name: str) -> bytes:
    with open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=handle)) as file:
        return file.read()


def _identities(handle: int, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """What tells files from others of their names, and from what they were before."""
    found = [os.stat(name, dir_fd=handle) for name in names]
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


def _is_still(folder: Path, handle: int) -> bool:
    """Whether a folder is the one that was opened."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(handle))
    except OSError:
        return False


def _is_json_of(content: bytes, value: Any) -> bool:
    try:
        return bool(json.loads(content) == value)
    except ValueError:
        return False


def version_of(files: Mapping[str, bytes]) -> str:
    """The same for the same files, wherever they lie."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode())
        digest.update(files[name])
    return digest.hexdigest()[:12]


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
        return positions_in_lists(expected_gain(table[:, :positions], items.value, method), items.offsets)


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
    from urank.learning.lightgbm_data import TreeModel  # LightGBM is slow to load, and most models do without

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


ARMS = ("A", "B")


@dataclass(frozen=True)
class SplitTest:
    """An A/B test: a share of users, told by a stable hash, is served by another model."""

    folder: Path
    share: float = 0.5
    name: str = "serve"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"the share of the test must be above 0 and below 1; got {self.share:g}")
        if not self.name:
            raise ConfigError("the test needs a name, by which users are assigned; got an empty one")

    def arms(self, users: Sequence[str]) -> list[str]:
        """The arm of each user."""
        shares = {ARMS[0]: 1 - self.share, ARMS[1]: self.share}
        return assign_arms(pl.Series(users, dtype=pl.String), shares, salt=self.name).to_list()


@dataclass(frozen=True)
class Sources:
    """Where the models come from, and how they rank."""

    main: Path
    method: Method | None = None
    shadow: Path | None = None
    test: SplitTest | None = None
    threads: int = 1


@dataclass(frozen=True, eq=False)
class ActiveModels:
    """What is served at one time.

    Attributes:
        main: the model.
        shadow: one that ranks silently, if any.
        other: the one of arm B, if there is a test.
        test: the test.
        asked: how lists are ranked unless a request says otherwise; each model's own way if None.
    """

    main: ServedModel
    shadow: ServedModel | None = None
    other: ServedModel | None = None
    test: SplitTest | None = None
    asked: Method | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, bool] = {}
        for model in self.models:
            for names, categorical in _features(model):
                for name in names:
                    if kinds.setdefault(name, categorical) != categorical:
                        raise DataError(f"the feature '{name}' is a number to one model and a category to another")
            if self.asked is not None:
                model.check_method(self.asked)

    @property
    def models(self) -> list[ServedModel]:
        return [model for model in (self.main, self.shadow, self.other) if model is not None]

    @cached_property
    def numeric(self) -> tuple[str, ...]:
        """The numeric features of all models, those of the main one first."""
        return _union(self.models, categorical=False)

    @cached_property
    def categorical(self) -> tuple[str, ...]:
        """The categorical features of all models."""
        return _union(self.models, categorical=True)

    @cached_property
    def takes_value(self) -> bool:
        """Whether some model was trained on values."""
        return any(model.takes_value for model in self.models)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that a request may ask for, whichever model it is ranked by."""
        return tuple(method for method in self.main.methods if self.other is None or method in self.other.methods)

    def method_of(self, model: ServedModel, asked: Method | None = None) -> Method:
        """How a model ranks when a request asks for this."""
        return model.check_method(asked or self.asked or model.method)

    def of(self, model: ServedModel, items: Items) -> Items:
        """The features of items as this model takes them."""
        numeric, categorical = self._places[id(model)]
        if numeric is None and categorical is None:
            return items
        return Items(
            items.numeric if numeric is None else items.numeric[:, numeric],
            items.categorical if categorical is None else items.categorical[:, categorical],
            items.value,
            items.offsets,
        )

    @cached_property
    def _places(self) -> dict[int, tuple[list[int] | None, list[int] | None]]:
        return {
            id(model): (
                _places(self.numeric, [feature.name for feature in model.featurizer.numeric]),
                _places(self.categorical, [feature.name for feature in model.featurizer.categorical]),
            )
            for model in self.models
        }


def load(sources: Sources) -> ActiveModels:
    """Load every model anew; one that is broken is a `DataError`, and nothing has changed."""
    return ActiveModels(
        main=load_served(sources.main, threads=sources.threads),
        shadow=None if sources.shadow is None else load_served(sources.shadow, threads=sources.threads),
        other=None if sources.test is None else load_served(sources.test.folder, threads=sources.threads),
        test=sources.test,
        asked=sources.method,
    )


def _features(model: ServedModel) -> list[tuple[list[str], bool]]:
    featurizer = model.featurizer
    return [
        ([feature.name for feature in featurizer.numeric], False),
        ([feature.name for feature in featurizer.categorical], True),
    ]


def _union(models: Sequence[ServedModel], *, categorical: bool) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            name for model in models for names, kind in _features(model) if kind == categorical for name in names
        )
    )


def _places(all_names: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Where the names stand among all; none when they are all, in this order."""
    if list(all_names) == list(names):
        return None
    place = {name: number for number, name in enumerate(all_names)}
    return [place[name] for name in names]
