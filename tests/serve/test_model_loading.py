"""A served model gives what the model gave when it was saved, and nothing that is broken is ever served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from serve.cases import KINDS, candidates, frame, lists_of, loaded, ranker, reader_of, saved
from urank.errors import ConfigError, DataError
from urank.serve.list_ranking import rank_lists
from urank.serve.models import ActiveModels, ServedModel, load_served
from urank.serve.request_arrays import MISSING, CandidateArrays

if TYPE_CHECKING:  # torch is slow to load
    from urank.pipeline import ModelFit
    from urank.ranking.ranking_model import RankingModel

seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(KINDS)


def agree(model: ServedModel, truth: RankingModel, rng: np.random.Generator) -> None:
    """Click table and scores of forty random candidates."""
    query = {"query_id": "q", "candidates": candidates(model, rng, 40)}
    items = model.with_within(lists_of(reader_of(model), [query]).items)
    table = frame([query])
    np.testing.assert_allclose(model.log_ctr(items), truth.log_ctr(table), atol=2e-5)
    scores = model.scores(items)
    if truth.scorer is None:
        assert scores is None
    else:
        np.testing.assert_allclose(np.asarray(scores), truth.score(table), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_scores_are_those_of_the_model_that_was_saved(kind: str) -> None:
    model = loaded(kind)
    for seed in range(5):
        agree(model, ranker(kind), np.random.default_rng(seed))
    assert model.methods == ranker(kind).methods
    assert (model.name, model.method, model.positions) == (ranker(kind).name, ranker(kind).method, 5)
    assert model.takes_value == (kind in ("network", "trees"))


def test_so_are_those_of_networks(fitted: ModelFit, served_model: Path) -> None:
    model = load_served(served_model)
    for seed in range(5):
        agree(model, fitted.model, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_numbers_give_finite_answers(kind: str) -> None:
    model = loaded(kind)
    largest = float(np.finfo(np.float32).max)
    numbers = [largest, -largest, 1e-45, -0.0, 0.0, np.nan]
    grid = (
        np.array(np.meshgrid(*[numbers] * len(model.featurizer.numeric))).reshape(len(model.featurizer.numeric), -1).T
    )
    n = len(grid)
    categories = np.full((n, len(model.featurizer.categorical)), MISSING, dtype=object)
    value = np.resize(np.array([0, 1e-45, 1, 1e30], dtype=np.float32), n)
    items = CandidateArrays(grid.astype(np.float32), categories, value, np.array([0, n]))
    table, scores = model.log_ctr(items), model.scores(items)
    assert np.isfinite(table).all()
    assert (table <= 0).all()
    assert scores is None or np.isfinite(scores).all()
    for method in model.methods:
        order = model.order(items, table, scores, method=method, positions=5)
        assert sorted(order.tolist()) == list(range(1, n + 1))


@given(kinds, seeds, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 14))
def test_orders_are_those_of_rank(kind: str, seed: int, lengths: list[int], asked: int) -> None:
    """For every method, with ties, with fewer positions than candidates and with more than the model knows.

    The two programs may differ in the last digits, which decide where candidates, or whole matchings, are as good as
    each other. So the orders are the same where the digits are, and where there is nothing to decide; and always as
    good. With fewer positions than the model knows, the server matches these alone, which `rank` does not.
    """
    model, truth, rng = loaded(kind), ranker(kind), np.random.default_rng(seed)
    queries = [
        {"query_id": f"q{number}", "candidates": candidates(model, rng, length)}
        for number, length in enumerate(lengths)
    ]
    table = frame(queries)
    for method in model.methods:
        lists = lists_of(reader_of(model), [{**query, "method": method, "positions": asked} for query in queries])
        shown = rank_lists(ActiveModels(model), lists, exploration=None, rng=rng)
        best = truth.rank(table, method=method, top=asked).partition_by("query_id", maintain_order=True)
        decided = _decided(model, truth, lists.items, table, method)
        for each, want, is_decided in zip(shown, best, decided, strict=True):
            answer = msgspec.to_builtins(each.answer(lists, "id"))
            ids = [item["item_id"] for item in answer["items"]]
            assert [item["position"] for item in answer["items"]] == want["position"].to_list()
            if method == "match" and asked < model.positions:
                continue
            if method == "match":
                assert answer["utility"] == pytest.approx(want["utility"].sum(), rel=1e-4, abs=1e-6)
            if is_decided:
                assert ids == want["item_id"].to_list()
                clicks = [item["probability"] for item in answer["items"]]
                assert clicks == pytest.approx(want["probability"].to_list(), abs=1e-5)


def _decided(
    model: ServedModel, truth: RankingModel, items: CandidateArrays, table: pl.DataFrame, method: str
) -> list[bool]:
    """Whether both programs see the same numbers of a list, or numbers without ties by which it is sorted."""
    if method == "score":
        ours, theirs = np.asarray(model.scores(items)), truth.score(table)
    else:
        ours, theirs = model.log_ctr(items), truth.log_ctr(table)
    keys = theirs if method == "score" else np.exp(theirs[:, 0]) * items.value
    parts = [slice(start, end) for start, end in pairwise(items.offsets.tolist())]
    return [
        np.array_equal(ours[part], theirs[part])
        or (method != "match" and bool((np.diff(np.sort(keys[part])) > 1e-4).all()))
        for part in parts
    ]


@given(seeds, st.integers(1, 4), st.integers(5, 10))
def test_matching_fewer_positions_is_the_best_for_these(seed: int, asked: int, count: int) -> None:
    """Against every way to fill the positions."""
    model, rng = loaded("numbers"), np.random.default_rng(seed)
    count = min(count, 7)
    query = {"query_id": "q", "positions": asked, "method": "match", "candidates": candidates(model, rng, count)}
    lists = lists_of(reader_of(model), [query])
    (shown,) = rank_lists(ActiveModels(model), lists, exploration=None, rng=rng)
    earns = np.exp(model.log_ctr(lists.items).astype(np.float64)) * lists.items.value[:, None]
    best = max(sum(earns[row, k] for k, row in enumerate(rows)) for rows in permutations(range(count), asked))
    assert shown.utility.sum() == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"the model ranks by match, ctr1; got 'score'"):
        loaded("clicks").check_method("score")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model to be broken."""
    shutil.copytree(saved("network"), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """One with trees."""
    shutil.copytree(saved("trees"), tmp_path / "trees")
    return tmp_path / "trees"


def refusal(folder: Path) -> str:
    """The sentence that refuses a folder; any other exception fails the test."""
    with pytest.raises(DataError) as error:
        load_served(folder)
    sentence = str(error.value)
    assert sentence.startswith(str(folder)), sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("name", ["manifest.json", "features.json", "clicks.onnx", "scorer.onnx"])
def test_cut_off_missing_and_foreign_files_are_refused(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for length in (0, 1, 10, len(whole) // 3, len(whole) // 2, len(whole) - 20, len(whole) - 3):
        (folder / name).write_bytes(whole[:length])
        refusal(folder)
    for content in (b"\x00" * 100, b"garbage", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 200_000):
        (folder / name).write_bytes(content)
        refusal(folder)
    (folder / name).unlink()
    assert name in refusal(folder)
    (folder / name).mkdir()
    refusal(folder)


@pytest.mark.slow
def test_trees_that_were_cut_off_are_refused_before_lightgbm_sees_them(trees: Path) -> None:
    """LightGBM ends the process over many of these, so they are read by another one."""
    whole = (trees / "scorer.txt").read_bytes()
    lengths = [*np.linspace(0, len(whole) - 60, 25).astype(int).tolist()]
    code = """if True:
        import sys
        from pathlib import Path
        from urank.errors import DataError
        from urank.serve.models import load_served
        folder = Path(sys.argv[1])
        whole = (folder / "scorer.txt").read_bytes()
        for length in map(int, sys.argv[2:]):
            (folder / "scorer.txt").write_bytes(whole[:length])
            try:
                load_served(folder)
            except DataError as error:
                print(error)
    """
    ended = subprocess.run(
        [sys.executable, "-c", code, str(trees), *map(str, lengths)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert len(lines) == len(lengths)
    assert all("damaged" in line for line in lines)


def test_files_of_other_models_are_refused(folder: Path, trees: Path) -> None:
    for source in ("numbers", "clicks"):
        shutil.copy(saved(source) / "clicks.onnx", folder / "clicks.onnx")
        if source == "numbers":
            assert "the graphs must take the features of features.json" in refusal(folder)
    shutil.copy(saved("network") / "clicks.onnx", folder / "clicks.onnx")
    load_served(folder)
    shutil.copy(saved("numbers") / "features.json", folder / "features.json")
    assert "the graphs must take the features of features.json" in refusal(folder)
    shutil.copy(saved("network") / "features.json", folder / "features.json")
    shutil.copy(saved("network") / "scorer.onnx", folder / "clicks.onnx")
    refusal(folder)
    text = (trees / "scorer.txt").read_text().replace("max_feature_idx=5", "max_feature_idx=4")
    (trees / "scorer.txt").write_text(text)
    refusal(trees)


def graph_of(folder: Path, name: str, change: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(folder / name)
    change(model.graph)
    (folder / name).write_bytes(model.SerializeToString())


def answers(rows: list[list[float]]) -> Callable[[onnx.GraphProto], None]:
    """Makes a graph give the same, whatever it is asked."""

    def change(graph: onnx.GraphProto) -> None:
        values = np.array(rows, dtype=np.float32)
        del graph.node[:], graph.initializer[:]
        constant = helper.make_tensor("c", TensorProto.FLOAT, values.shape, values.ravel())
        graph.node.append(helper.make_node("Constant", [], [graph.output[0].name], value=constant))
        shape = graph.output[0].type.tensor_type.shape
        del shape.dim[:]
        for length in values.shape:
            shape.dim.add().dim_value = length

    return change


def test_graphs_of_another_shape_are_refused(folder: Path) -> None:
    original = (folder / "clicks.onnx").read_bytes()
    for rows in (
        [[-1.0] * 4] * 2,
        [[-1.0] * 5] * 3,
        [[0.5] * 5] * 2,
        [[float("nan")] * 5] * 2,
        [[float("inf")] * 5] * 2,
    ):
        (folder / "clicks.onnx").write_bytes(original)
        graph_of(folder, "clicks.onnx", answers(rows))
        assert "must return log probabilities of shape [2, 5]" in refusal(folder)
    (folder / "clicks.onnx").write_bytes(original)
    for rows in ([[1.0, 2.0]], [[float("nan")], [1.0]]):
        shutil.copy(saved("network") / "scorer.onnx", folder / "scorer.onnx")
        graph_of(folder, "scorer.onnx", answers(rows))
        assert "the scorer must return a finite number for each item" in refusal(folder)


def external(name: str, location: str = "secret.bin") -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[5], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def as_initializer(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(external("x"))


def as_attribute(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["x"], value=external("")))


def in_subgraph(model: onnx.ModelProto) -> None:
    constant = helper.make_node("Constant", [], ["x"], value=external(""))
    output = helper.make_tensor_value_info("x", TensorProto.FLOAT, [5])
    branch = helper.make_graph([constant], "branch", [], [output])
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch))


def in_function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["x"], value=external(""))
    model.functions.append(helper.make_function("own", "F", [], ["x"], [node], [helper.make_opsetid("", 17)]))


def as_sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=external("x"), dims=[5]))


def as_sparse_attribute(model: onnx.ModelProto) -> None:
    sparse = onnx.SparseTensorProto(indices=external("x"), dims=[5])
    model.graph.node.append(onnx.NodeProto(op_type="Constant", output=["x"]))
    model.graph.node[-1].attribute.add(
        name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse
    )


@pytest.mark.parametrize(
    "change", [as_initializer, as_attribute, in_subgraph, in_function, as_sparse, as_sparse_attribute]
)
def test_graphs_with_tensors_in_other_files_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[onnx.ModelProto], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.bin").write_bytes(np.arange(5, dtype=np.float32).tobytes())
    for name in ("clicks.onnx", "scorer.onnx"):
        original = (folder / name).read_bytes()
        model = onnx.ModelProto.FromString(original)
        change(model)
        (folder / name).write_bytes(model.SerializeToString())
        assert "the graphs must contain their tensors" in refusal(folder)
        (folder / name).write_bytes(original)
    load_served(folder)


def test_a_file_is_not_read_back_through_scores(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would answer with the content of a file below the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.bin").write_bytes(np.full((2, 5), -1.5, dtype=np.float32).tobytes())

    def change(graph: onnx.GraphProto) -> None:
        answers([[-1.0] * 5] * 2)(graph)
        tensor = graph.node[0].attribute[0].t
        tensor.ClearField("float_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="secret.bin")

    graph_of(folder, "clicks.onnx", change)
    assert "the graphs must contain their tensors" in refusal(folder)


def test_the_word_location_is_allowed(folder: Path) -> None:
    """As a category of the model may be."""
    model = onnx.load(folder / "clicks.onnx")
    model.doc_string = "location"
    (folder / "clicks.onnx").write_bytes(model.SerializeToString())
    load_served(folder)


@pytest.mark.parametrize("name", ["manifest.json", "features.json", "clicks.onnx", "scorer.onnx"])
def test_devices_pipes_and_huge_files_are_refused(folder: Path, name: str) -> None:
    """A device would be read without end, a pipe waited for."""
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert name in refusal(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name in refusal(folder)
    (folder / name).unlink()
    with (folder / name).open("wb") as file:
        file.truncate(2**33)
    assert name in refusal(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(saved("network") / name)
    load_served(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 3}, "written by a newer urank"),
        ({"version": 1}, "written by an older urank"),
        ({"version": "2"}, "damaged"),
        ({"format": "else"}, "another format"),
        ({"scorer": "network"}, "damaged"),
        ({"scorer": ["network"]}, "damaged"),
        ({"scorer": True}, "damaged"),
        ({"scorer": {}}, "damaged"),
        ({"scorer": {"family": "trees", "takes_value": True}}, "scorer.txt cannot be read"),
        ({"scorer": None}, "ranks by match, ctr1; got 'score'"),
        ({"method": "magic"}, "got 'magic'"),
        ({"method": ["score"]}, "damaged"),
        ({"method": None}, "damaged"),
        ({"name": None}, "the name must be text"),
        ({"positions": 6}, "shape [2, 6]"),
        ({"positions": "5"}, "the positions an integer"),
        ({"positions": True}, "the positions an integer"),
        ({"positions": 0}, "damaged"),
        ({"positions": -5}, "damaged"),
        ({"columns": "position"}, "the columns must be names by role"),
        ({"columns": {"position": 1}}, "the columns must be names by role"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    assert words in refusal(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["numeric"][0].update(name=found["numeric"][1]["name"]),
        lambda found: found["numeric"][0].update(name=None),
        lambda found: found["numeric"][0].update(name=found["categorical"][0]["name"]),
        lambda found: found["numeric"].pop(),
        lambda found: found["categorical"].pop(),
        lambda found: found["categorical"].append({"name": "more", "vocabulary": ["x"]}),
        lambda found: found["categorical"][0].update(vocabulary="abc"),
        lambda found: found["categorical"][0].update(vocabulary=[1, 2]),
        lambda found: found["categorical"][0].pop("vocabulary"),
        lambda found: found.pop("numeric"),
    ],
)
def test_features_that_make_no_sense_are_refused(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    features = json.loads((folder / "features.json").read_text())
    change(features)
    (folder / "features.json").write_text(json.dumps(features))
    refusal(folder)


def test_folders_that_are_none(tmp_path: Path) -> None:
    refusal(tmp_path / "absent")
    refusal(tmp_path)
    (tmp_path / "file").write_text("no folder")
    refusal(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refusal(tmp_path / "loop")


def test_the_version_is_that_of_the_files(tmp_path: Path, folder: Path) -> None:
    version = load_served(folder).version
    assert len(version) == 12
    assert version == loaded("network").version  # the same files elsewhere
    shutil.copytree(folder, tmp_path / "a name of another length")
    assert load_served(tmp_path / "a name of another length").version == version
    (tmp_path / "link").symlink_to(folder)
    assert load_served(tmp_path / "link").version == version
    versions = {version}
    for name in ("manifest.json", "features.json"):
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(original + b"\n")
        versions.add(load_served(folder).version)
        (folder / name).write_bytes(original)
    for name in ("clicks.onnx", "scorer.onnx"):
        original = (folder / name).read_bytes()
        graph_of(folder, name, lambda graph: setattr(graph, "doc_string", graph.doc_string + "!"))
        versions.add(load_served(folder).version)
        (folder / name).write_bytes(original)
    assert len(versions) == 5
    assert load_served(folder).version == version


@pytest.mark.slow
def test_a_folder_that_is_replaced_again_and_again_is_never_mixed(tmp_path: Path) -> None:
    """Two models take turns under one name, by renames, and come back to it: what is loaded is the one or the other."""
    names = {}
    for seed in (0, 1):
        shutil.copytree(saved("trees", seed), tmp_path / f"model-{seed}")
        names[load_served(tmp_path / f"model-{seed}").version] = seed
    assert len(names) == 2
    current, done = tmp_path / "current", threading.Event()
    (tmp_path / "model-0").rename(current)

    def take_turns() -> None:
        turn = 0
        while not done.is_set():
            current.rename(tmp_path / f"model-{turn}")
            turn = 1 - turn
            (tmp_path / f"model-{turn}").rename(current)

    thread = threading.Thread(target=take_turns)
    thread.start()
    seen: list[str] = []
    refused = 0
    try:
        while len(seen) < 150 and refused < 2_000:
            try:
                seen.append(load_served(current).version)
            except DataError:
                refused += 1
    finally:
        done.set()
        thread.join()
    assert len(seen) == 150
    assert set(seen) <= set(names)


@pytest.mark.slow
def test_a_link_that_is_moved_again_and_again_is_never_mixed(tmp_path: Path) -> None:
    """As those do who keep releases side by side: the link is replaced by one rename, so there is always a model."""
    versions = {loaded("trees", seed).version for seed in (0, 1)}
    current, done = tmp_path / "current", threading.Event()
    current.symlink_to(saved("trees", 0))

    def move() -> None:
        turn = 0
        while not done.is_set():
            turn = 1 - turn
            (tmp_path / "next").symlink_to(saved("trees", turn))
            (tmp_path / "next").replace(current)

    thread = threading.Thread(target=move)
    thread.start()
    seen: list[str] = []
    try:
        for _ in range(500):
            try:
                seen.append(load_served(current).version)
            except DataError as error:
                assert "changes while it is read" in str(error)  # noqa: PT017 - refused is fine, mixed is not
            if len(seen) == 100:
                break
    finally:
        done.set()
        thread.join()
    assert set(seen) == versions
    assert len(seen) == 100
