"""Models in use: loading artifacts, running them, and selecting one for each list.

A request reads the `ActiveModels` once and uses them to its end. A reload creates other `ActiveModels` and replaces
them in one assignment, so that a request never sees half of a change and never waits for one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import onnxruntime as ort
import polars as pl
from numpy.typing import NDArray

from urank.abtest.exposures import assign_arms
from urank.errors import ConfigError, DataError, UrankError
from urank.learning.features import Featurizer, Inputs
from urank.model_manifest import read_manifest, read_regular
from urank.ranking.matching import METHODS, Method, expected_gain, positions_in_lists
from urank.serve.processes import SHARED_FOLDER
from urank.serve.request_arrays import MISSING, CandidateArrays

ARMS = ("A", "B")
_READ_ATTEMPTS = 5
_RETRY_SECONDS = 0.01

logger = logging.getLogger("urank.serve")

Floats = NDArray[np.float32]
Scorer = Callable[[CandidateArrays], Floats]
Columns = list[int] | slice


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that was loaded and passed its smoke test."""

    version: str  # first digits of a hash of its files
    manifest: Mapping[str, Any]  # as `urank train` wrote it
    featurizer: Featurizer
    clicks: ort.InferenceSession  # its click model
    scorer: Scorer | None  # None if only a click model was trained
    loaded: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def method(self) -> Method:
        """Its default method."""
        return self.check_method(self.manifest["method"])

    @property
    def methods(self) -> tuple[Method, ...]:
        return METHODS if self.scorer is not None else ("match", "ctr1")

    @cached_property
    def positions(self) -> int:
        """K, the number of positions whose click probabilities it knows."""
        return int(self.manifest["positions"])

    @cached_property
    def takes_value(self) -> bool:
        """Whether the scorer was trained on values."""
        return bool((self.manifest["scorer"] or {}).get("takes_value", False))

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of the log that it was trained on, by role."""
        columns: Mapping[str, str] = self.manifest.get("columns", {})
        return columns

    @cached_property
    def numeric(self) -> list[str]:
        return [feature.name for feature in self.featurizer.numeric]

    @cached_property
    def categorical(self) -> list[str]:
        return [feature.name for feature in self.featurizer.categorical]

    def check_method(self, method: str) -> Method:
        """Return the method if the model has it; raise a `ConfigError` otherwise."""
        for known in self.methods:
            if known == method:
                return known
        raise ConfigError(f"the model ranks by {', '.join(self.methods)}; got '{method}'")

    def with_within(self, items: CandidateArrays) -> CandidateArrays:
        """Add the within-list columns, if the model has any, to its raw features; the lists must be whole."""
        return replace(items, numeric=self.featurizer.add_within(items.numeric, items.offsets))

    def log_ctr(self, items: CandidateArrays) -> Floats:
        """Return log P(click | item, position) `[rows, K]`; items as `with_within` returns them."""
        return _run(self.clicks, items)

    def scores(self, items: CandidateArrays) -> Floats | None:
        """Return the score of each item `[rows]`; None without a scorer."""
        return None if self.scorer is None else self.scorer(items)

    def order(
        self, items: CandidateArrays, table: Floats | None, scores: Floats | None, *, method: Method, positions: int
    ) -> NDArray[np.int64]:
        """Return the 1-based position `[rows]` of each item in its list when this many positions are shown.

        The method `score` needs the scores, the others the click table.
        """
        if method == "score":
            assert scores is not None  # noqa: S101 - `check_method` was called before
            return positions_in_lists(scores, items.offsets)
        assert table is not None  # noqa: S101
        return positions_in_lists(expected_gain(table[:, :positions], items.value, method), items.offsets)


@dataclass(frozen=True)
class UserSplit:
    """Settings of an A/B test: a share of users, chosen by a stable hash, is served by another model."""

    folder: Path
    share: float = 0.5
    name: str = "serve"
    share_file: Path | None = None  # a file with the share, which may change while the server runs

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"the share of the test must be from 0 to 1; got {self.share:g}")
        if not self.name:
            raise ConfigError("the test needs a name, by which users are assigned; got an empty one")

    def current(self) -> UserSplit:
        """Return the test with the share that the file has now."""
        if self.share_file is None:
            return self
        try:
            share = float(self.share_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            message = f"--arm-b-share {self.share_file} must be a number, or a file with a number from 0 to 1"
            raise ConfigError(message) from error
        return replace(self, share=share)

    def arms(self, users: Sequence[str]) -> list[str]:
        """Return the arm of each user."""
        shares = {arm: share for arm, share in zip(ARMS, (1 - self.share, self.share), strict=True) if share > 0}
        return assign_arms(pl.Series(users, dtype=pl.String), shares, salt=self.name).to_list()


@dataclass(frozen=True)
class ModelSources:
    """Folders of the models, and how they rank."""

    main: Path
    method: Method | None = None
    shadow: Path | None = None
    test: UserSplit | None = None
    threads: int = 1  # of ONNX Runtime for each call

    @property
    def snapshot(self) -> Path | None:
        """Copy of the files last loaded, for workers that replace others; None without a supervisor."""
        folder = os.environ.get(SHARED_FOLDER)
        return Path(folder, f"{hashlib.sha256(repr(self).encode()).hexdigest()}.zip") if folder else None


@dataclass(frozen=True, eq=False)
class ActiveModels:
    """The models in use at one time."""

    main: ServedModel  # the model of arm A, or of all users
    shadow: ServedModel | None = None  # its rankings are only logged
    other: ServedModel | None = None  # the model of arm B, if there is a test
    test: UserSplit | None = None
    default_method: Method | None = None  # unless a request asks for another; each model's own if None

    def __post_init__(self) -> None:
        for name in sorted(set(self.numeric) & set(self.categorical)):
            raise DataError(f"the feature '{name}' is numeric in one model and categorical in another")
        if self.default_method is not None:
            for model in self.models:
                model.check_method(self.default_method)

    @property
    def models(self) -> list[ServedModel]:
        return [model for model in (self.main, self.shadow, self.other) if model is not None]

    @cached_property
    def numeric(self) -> tuple[str, ...]:
        """The numeric features of all models, those of the main model first."""
        return tuple(dict.fromkeys(name for model in self.models for name in model.numeric))

    @cached_property
    def categorical(self) -> tuple[str, ...]:
        """The categorical features of all models, those of the main model first."""
        return tuple(dict.fromkeys(name for model in self.models for name in model.categorical))

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the logs that the models were trained on, by role; those of the main model take precedence."""
        return {role: name for model in reversed(self.models) for role, name in model.columns.items()}

    @cached_property
    def takes_value(self) -> bool:
        """Whether any model was trained on values."""
        return any(model.takes_value for model in self.models)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that a request may ask for, whichever arm it belongs to."""
        return tuple(method for method in self.main.methods if self.other is None or method in self.other.methods)

    def method_of(self, model: ServedModel, requested: Method | None = None) -> Method:
        """Return the method of a model for a request."""
        return model.check_method(requested or self.default_method or model.method)

    def inputs_of(self, model: ServedModel, items: CandidateArrays) -> CandidateArrays:
        """Return the features of whole lists as this model takes them: in its order, with its within-list columns."""
        numeric, categorical = self._columns[id(model)]
        own = replace(items, numeric=items.numeric[:, numeric], categorical=items.categorical[:, categorical])
        return model.with_within(own)

    @cached_property
    def _columns(self) -> dict[int, tuple[Columns, Columns]]:
        return {
            id(model): (_columns(self.numeric, model.numeric), _columns(self.categorical, model.categorical))
            for model in self.models
        }


def _columns(all_names: Sequence[str], names: Sequence[str]) -> Columns:
    """Return the index of each name among all."""
    place = {name: number for number, name in enumerate(all_names)}
    return slice(None) if list(all_names) == list(names) else [place[name] for name in names]


Artifacts = dict[str, dict[str, bytes]]
"""Files of each model by its role: `main`, `shadow`, `other`."""


def load_models(sources: ModelSources) -> ActiveModels:
    """Load every model; raise a `DataError` if one is broken, a `ConfigError` if one lacks the server's method.

    The files are copied to the snapshot, if there is one, once all models have passed.
    """
    artifacts = {role: read_artifact(folder) for role, folder in _folders(sources).items()}
    active = _build(sources, artifacts)
    if sources.snapshot is not None:
        _write_snapshot(sources.snapshot, artifacts)
    return active


def resume_models(sources: ModelSources) -> tuple[ActiveModels, bool]:
    """Load the models of the snapshot, and return whether those in the folders differ from them or are broken.

    A worker that replaces another must serve what the others do, whatever is in the folders by now.
    """
    if sources.snapshot is None or not sources.snapshot.exists():
        return load_models(sources), False
    artifacts = _read_zip(sources.snapshot)
    try:
        current = {role: read_artifact(folder) for role, folder in _folders(sources).items()}
    except UrankError as error:
        logger.error("the models are served from a copy, since those in their folders are broken: %s", error)
        return _build(sources, artifacts), True
    if current != artifacts:
        logger.warning("the models are served from a copy: those in their folders differ, and were not reloaded")
    return _build(sources, artifacts), current != artifacts


def _folders(sources: ModelSources) -> dict[str, Path]:
    found = {"main": sources.main, "shadow": sources.shadow, "other": sources.test.folder if sources.test else None}
    return {role: folder for role, folder in found.items() if folder is not None}


def _build(sources: ModelSources, artifacts: Artifacts) -> ActiveModels:
    folders = _folders(sources)
    models = {role: _load(folders[role], files, sources.threads) for role, files in artifacts.items()}
    main, shadow, other = (models.get(role) for role in ("main", "shadow", "other"))
    assert main is not None  # noqa: S101 - it always has a folder
    return ActiveModels(main, shadow, other, sources.test and sources.test.current(), sources.method)


def _write_snapshot(path: Path, artifacts: Artifacts) -> None:
    """Write the files of all models as one, which is replaced atomically."""
    new = path.with_suffix(f".{os.getpid()}")
    try:
        with ZipFile(new, "w") as archive:
            for role, files in artifacts.items():
                for name, content in files.items():
                    archive.writestr(f"{role}/{name}", content)
        new.replace(path)
    except OSError as error:  # a worker that dies would be replaced by one with the models in their folders
        logger.warning("no copy of the models can be kept: %s", error)
        new.unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _read_zip(path: Path) -> Artifacts:
    artifacts: Artifacts = {}
    with ZipFile(path) as archive:
        for entry in archive.namelist():
            role, _, name = entry.partition("/")
            artifacts.setdefault(role, {})[name] = archive.read(entry)
    return artifacts


def load_served(folder: str | Path, *, threads: int = 1) -> ServedModel:
    """Load an artifact of `urank train`; raise a `DataError` if it is no model, is damaged, or fails a smoke test."""
    return _load(Path(folder), read_artifact(Path(folder)), threads)


def _load(folder: Path, files: Mapping[str, bytes], threads: int) -> ServedModel:
    try:
        manifest = json.loads(files["manifest.json"])
        featurizer = _featurizer(json.loads(files["features.json"]))
        clicks = _session(files["clicks.onnx"], featurizer, threads)
        scorer = _scorer(manifest["scorer"], files, featurizer, threads)
        model = ServedModel(artifact_version(files), manifest, featurizer, clicks, scorer)
        _smoke_test(model)
    except Exception as error:  # damaged graphs raise many kinds of errors
        text = " ".join(str(error).split())[:200]
        reason = f": {error}" if isinstance(error, UrankError) else f" ({type(error).__name__}: {text})"
        raise DataError(f"{folder} is damaged and cannot be served{reason}") from error
    return model


def read_artifact(folder: Path) -> dict[str, bytes]:
    """Read the files of one artifact, consistently even if another replaces it meanwhile."""
    for remaining in reversed(range(_READ_ATTEMPTS)):
        try:
            manifest = read_manifest(folder)
        except RecursionError as error:
            raise DataError(f"{folder} is not a urank model: its manifest.json cannot be read") from error
        except DataError:
            if folder.exists() or not remaining:
                raise
            time.sleep(_RETRY_SECONDS)  # between the removal of one folder and the rename of the next
            continue
        names, scorer = ["manifest.json", "features.json", "clicks.onnx"], manifest.get("scorer")
        if isinstance(scorer, dict) and scorer:
            names.append("scorer.txt" if scorer.get("family") == "trees" else "scorer.onnx")
        files = _read_snapshot(folder, names)
        with suppress(ValueError):
            if files is not None and json.loads(files["manifest.json"]) == manifest:
                return files
    raise DataError(f"{folder} changes while it is read")


def artifact_version(files: Mapping[str, bytes]) -> str:
    """Return the version of an artifact: a hash of its files, independent of its folder."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode())
        digest.update(files[name])
    return digest.hexdigest()[:12]


def _read_snapshot(folder: Path, names: Sequence[str]) -> dict[str, bytes] | None:
    """Read files as they are at one time; None if they are deleted or written to meanwhile.

    They are read through one handle of the folder, since between two files its path could lead to another folder and
    back again.
    """
    handle = -1
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        before = _file_states(handle, names)
        files: dict[str, bytes] = {}
        for name in names:
            files[name] = read_regular(name, dir_fd=handle)
        return files if _file_states(handle, names) == before else None
    except OSError as error:
        if handle != -1 and not _is_same_folder(folder, handle):
            return None
        missing = Path(str(error.filename)).name
        raise DataError(f"{folder} cannot be served: {missing} cannot be read ({error.strerror})") from error
    finally:
        if handle != -1:
            os.close(handle)


def _file_states(handle: int, names: Sequence[str]) -> list[tuple[int, int, int]]:
    states = [os.stat(name, dir_fd=handle) for name in names]
    return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]


def _is_same_folder(folder: Path, handle: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(folder.stat(), os.fstat(handle))
    return False


def _featurizer(values: Mapping[str, Any]) -> Featurizer:
    featurizer = Featurizer.from_dict(values)
    names = featurizer.names
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise DataError("features.json must give each feature a unique name")
    vocabularies = [entry["vocabulary"] for entry in values["categorical"]]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in vocabularies):
        raise DataError("features.json must have a list of texts for each vocabulary")
    return featurizer


def _session(graph: bytes, featurizer: Featurizer, threads: int) -> ort.InferenceSession:
    """Load a graph, and check that it takes these features and refers to no other files."""
    if b"location" in graph:  # the key of every reference, but perhaps also a word of the model
        _refuse_external_data(graph)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised; nothing else should be printed
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.load_model_format", "ONNX")
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    expected = {"numeric": len(featurizer.inputs), "categorical": len(featurizer.categorical)}
    actual = {entry.name: entry.shape[-1] for entry in session.get_inputs() if entry.name in expected}
    if actual != expected:
        raise DataError(f"the graphs must take the features of features.json, {expected}; one takes {actual}")
    return session


def _refuse_external_data(graph: bytes) -> None:
    """Refuse tensors in other files, which ONNX Runtime would read from below the working directory, or in memory."""
    import onnx  # slow to import, and rarely needed

    messages: list[Any] = [onnx.ModelProto.FromString(graph)]
    while messages:
        message = messages.pop()
        if isinstance(message, onnx.TensorProto) and (message.data_location or message.external_data):
            raise DataError("the graphs must contain their tensors; one refers to another file")
        for descriptor, value in message.ListFields():
            if descriptor.message_type is not None:
                messages += [value] if hasattr(value, "ListFields") else value


def _run(session: ort.InferenceSession, items: CandidateArrays) -> Floats:
    """Return the only output of a graph."""
    feed: dict[str, NDArray[Any]] = {entry.name: getattr(items, entry.name) for entry in session.get_inputs()}
    if not items.categorical.shape[1] and "categorical" in feed:  # graphs of such models take integers
        feed["categorical"] = np.zeros((len(items), 0), dtype=np.int64)
    result: Floats = session.run(None, feed)[0]
    return result


def _scorer(
    entry: Mapping[str, Any] | None, files: Mapping[str, bytes], featurizer: Featurizer, threads: int
) -> Scorer | None:
    if entry is None:
        return None
    if entry["family"] != "trees":
        session = _session(files["scorer.onnx"], featurizer, threads)
        return lambda items: _run(session, items)
    from urank.learning.lightgbm_data import TreeModel  # LightGBM is slow to import, and most models do not need it

    text, extra = files["scorer.txt"].decode("utf-8"), "value" if entry["takes_value"] else None
    _refuse_truncated_trees(text)
    model = TreeModel(text, len(featurizer.inputs), len(featurizer.categorical), extra).checked()
    vocabularies = [{word: code for code, word in enumerate(each.vocabulary, 1)} for each in featurizer.categorical]

    def scores(items: CandidateArrays) -> Floats:
        codes = np.zeros(items.categorical.shape, dtype=np.int64)  # 0 is unknown or missing
        for place, vocabulary in enumerate(vocabularies):
            codes[:, place] = [vocabulary.get(word, 0) for word in items.categorical[:, place]]
        return model.predict(Inputs(items.numeric, codes), items.value)

    return scores


def _refuse_truncated_trees(text: str) -> None:
    """Refuse truncated trees, for some of which LightGBM aborts the whole process.

    The header contains the length of each tree, and an end marker follows the last one.
    """
    head, _, trees = text.partition("\n\n")
    sizes = next((line.partition("=")[2] for line in head.splitlines() if line.startswith("tree_sizes=")), "")
    ends = np.cumsum([0, *map(int, sizes.split())]).tolist()
    rest = trees[ends[-1] :]
    complete = rest.lstrip("\n").startswith("end of trees\n") and "\nend of parameters\n" in rest
    if not complete or not all(trees.startswith("Tree=", start) for start in ends[:-1]):
        raise DataError("scorer.txt must be the whole text of a LightGBM model; it is truncated")


def _smoke_test(model: ServedModel) -> None:
    """Refuse a model with an invalid result for two candidates without any feature."""
    name, positions = model.manifest["name"], model.manifest["positions"]
    if not isinstance(name, str) or type(positions) is not int:
        raise DataError(f"the name must be text, and the positions an integer; got {name!r} and {positions!r}")
    columns = model.columns
    if not isinstance(columns, Mapping) or not all(isinstance(column, str) for column in columns.values()):
        raise DataError(f"the columns must be names by role; got {columns!r}")
    method = model.check_method(model.manifest["method"])
    numeric = np.full((2, len(model.numeric)), np.nan, dtype=np.float32)
    categorical = np.full((2, len(model.categorical)), MISSING, dtype=object)
    raw = CandidateArrays(numeric, categorical, np.ones(2, dtype=np.float32), np.array([0, 2]))
    items = model.with_within(raw)
    table, scores = model.log_ctr(items), model.scores(items)
    if table.shape != (2, model.positions) or not (table <= 1e-4).all():
        raise DataError(f"the click model must return log probabilities of shape [2, {model.positions}]; it does not")
    if scores is not None and (scores.shape != (2,) or not np.isfinite(scores).all()):
        raise DataError("the scorer must return a finite number for each item; it does not")
    model.order(items, table, scores, method=method, positions=model.positions)  # imports what the method needs
