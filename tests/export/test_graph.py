"""Graphs: ONNX Runtime computes what Python does, from raw rows, for every part and for whole models."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from export.models import ALONE, CASES, FEATURIZERS, TREES, Case, K, build
from urank.clicks.calibration import Calibration, calibrate, fit_calibration
from urank.clicks.click_model import ClickModel, Member, NetworkClicks
from urank.clicks.click_settings import CalibrationKind, NetworkFamily
from urank.clicks.families import Head, VectorHead, build_network
from urank.clicks.trees import GbdtClicks
from urank.errors import DataError
from urank.export.graph import (
    DOUBLE,
    HEADS,
    IR_VERSION,
    OPSETS,
    ZERO,
    Categories,
    GraphBuilder,
    click_graph,
    ranking_graph,
    scorer_graph,
)
from urank.export.onnx import Export, graph_inputs, random_rows
from urank.learning.features import Categorical, Featurizer, Inputs, Numeric
from urank.learning.training import seeded
from urank.learning.training_settings import Backbone
from urank.ranking.ranking_model import RankingModel
from urank.ranking.urank_network import NetworkScorer, ScoreNetwork

Exported = Callable[[Case, str], Export]
CATEGORIES: dict[str, Categories] = {"onnx": "text", "vespa": "codes"}
FILES = {"onnx": "urank.onnx", "vespa": "models/urank.onnx"}
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_kind = pytest.mark.parametrize("kind", ["onnx", "vespa"])
BOTH = FEATURIZERS["both"]


# Click models


def click_model(featurizer: Featurizer, *members: Member, calibration: Calibration | None = None) -> ClickModel:
    return ClickModel(featurizer, K, members, calibration or Calibration(K))


def network(family: NetworkFamily, backbone: Backbone, featurizer: Featurizer) -> Head:
    """A network whose weights are so large that its probabilities come close to 0 and to 1."""
    with seeded(0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # DeepFM without numbers
        head = build_network(family, featurizer, K, backbone=backbone, hidden=(16, 8), dropout=0.5)
    with torch.no_grad():
        head.output.weight *= 30
    return head


def draw(featurizer: Featurizer, rows: int) -> Inputs:
    rng = np.random.default_rng(0)
    scales = np.array([1000.0, 5.0, 1e-3])[: len(featurizer.numeric)]  # log(1 + x) needs care for the small ones
    numeric = (rng.normal(size=(rows, len(scales))) * scales).astype(np.float32)
    numeric[rng.random(numeric.shape) < 0.3] = np.nan
    numeric[rng.random(numeric.shape) < 0.05] = np.inf
    cardinalities = np.array(featurizer.cardinalities, int)
    return Inputs(numeric, rng.integers(0, cardinalities, (rows, len(cardinalities))))


def as_text(featurizer: Featurizer, codes: NDArray[np.int64]) -> NDArray[Any]:
    """Strings that have these codes, unknown ones for 0."""
    text = np.empty(codes.shape, dtype=object)
    for place, feature in enumerate(featurizer.categorical):
        text[:, place] = np.array(["never seen", *feature.vocabulary], dtype=object)[codes[:, place]]
    return text if featurizer.categorical else codes


def open_bytes(graph: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])


def table_of(session: onnxruntime.InferenceSession, numeric: NDArray[Any], text: NDArray[Any]) -> NDArray[np.float32]:
    return session.run(["log_ctr"], {"numeric": numeric, "categorical": text})[0]


BACKBONES: list[tuple[NetworkFamily, Backbone]] = [
    *((family, "mlp") for family in get_args(NetworkFamily)),
    *((family, "deepfm") for family in get_args(NetworkFamily) if family != "deepfm"),  # always has that backbone
    ("vector", "pnn"),
    ("position", "pnn"),
    ("vector", "pin"),
    ("position", "pin"),
]


@pytest.mark.parametrize("features", FEATURIZERS)
@pytest.mark.parametrize(("family", "backbone"), BACKBONES)
def test_networks(family: NetworkFamily, backbone: Backbone, features: str, capfd: pytest.CaptureFixture[str]) -> None:
    featurizer = FEATURIZERS[features]
    model = click_model(featurizer, NetworkClicks(family, network(family, backbone, featurizer)))
    capfd.readouterr()
    session = open_bytes(click_graph(model))
    assert capfd.readouterr() == ("", "")
    assert [value.name for value in session.get_inputs()] == ["numeric", "categorical"]  # also of width 0
    for rows in (0, 1, 400):
        inputs = draw(featurizer, rows)
        table = table_of(session, inputs.numeric, as_text(featurizer, inputs.categorical))
        assert table.shape == (rows, K)
        assert np.isfinite(table).all()
        np.testing.assert_allclose(table, model.log_ctr(inputs), rtol=1e-6, atol=1e-5)
    if (family, backbone, features) == ("vector", "mlp", "both"):
        assert table.min() < -20  # where log(sigmoid(x)) would be −∞ in ONNX Runtime


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Draw all weights, also those that start as 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in module.parameters():
            weights.normal_(0, 0.2, generator=generator)


def extremes(featurizer: Featurizer, rows: int) -> Inputs:
    """Numbers from the smallest to the largest of float32, infinite, zero and missing ones."""
    rng = np.random.default_rng(1)
    inputs = draw(featurizer, rows)
    sizes = 10 ** rng.uniform(-45, 38.5, inputs.numeric.shape)
    numeric = (rng.choice([-1.0, 1.0], sizes.shape) * sizes).astype(np.float32)
    odd = rng.choice(np.array([0, -0.0, 1e-45, np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32), sizes.shape)
    return Inputs(np.where(rng.random(sizes.shape) < 0.3, odd, numeric), inputs.categorical)


EVERY_ROW = [draw, extremes]
CLOSE: Any = {"rtol": 1e-6, "atol": 2e-6}


@pytest.mark.parametrize("features", FEATURIZERS)
@pytest.mark.parametrize(("family", "backbone"), BACKBONES)
def test_random_weights(family: NetworkFamily, backbone: Backbone, features: str) -> None:
    featurizer = FEATURIZERS[features]
    shapes: list[tuple[int, tuple[int, ...]]] = [(5, (16, 8)), (1, (7,))]
    if family not in ("deepfm", "position") and backbone not in ("pnn", "pin"):  # these need a hidden layer
        shapes.append((3, ()))
    for seed, (positions, hidden) in enumerate(shapes):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # DeepFM without numbers, K = 1
            head = build_network(family, featurizer, positions, backbone=backbone, hidden=hidden, dropout=0.5)
        randomise(head, seed)
        model = ClickModel(featurizer, positions, (NetworkClicks(family, head),), Calibration(positions))
        session = open_bytes(click_graph(model))
        for inputs in (each(featurizer, 300) for each in EVERY_ROW):
            table = table_of(session, inputs.numeric, as_text(featurizer, inputs.categorical))
            np.testing.assert_allclose(table, model.log_ctr(inputs), **CLOSE)
            assert positions == 1 or np.ptp(table) > 0.01


@pytest.mark.parametrize("features", FEATURIZERS)
@pytest.mark.parametrize(
    ("backbone", "hidden"), [*((each, (16, 8)) for each in get_args(Backbone)), ("mlp", ()), ("deepfm", ())]
)
@pytest.mark.parametrize("value", [None, Numeric("value", 1.0, 0.7, missing=False)])
def test_score_networks(features: str, backbone: Backbone, hidden: tuple[int, ...], value: Numeric | None) -> None:
    featurizer = FEATURIZERS[features]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        scorer = NetworkScorer(ScoreNetwork(featurizer, value, backbone=backbone, hidden=hidden, dropout=0.5))
    randomise(scorer.network, 0)
    session = open_bytes(scorer_graph(scorer, featurizer))
    names = ["numeric", "categorical", *([] if value is None else ["value"])]
    assert [each.name for each in session.get_inputs()] == names
    for make, rows in ((draw, 0), (draw, 1), (draw, 300), (extremes, 300)):
        inputs = make(featurizer, rows)
        values = (10 ** np.random.default_rng(2).uniform(-30, 30, rows)).astype(np.float32)
        fed = (inputs.numeric, as_text(featurizer, inputs.categorical), values)
        (scores,) = session.run(["score"], dict(zip(names, fed, strict=False)))
        np.testing.assert_allclose(scores, scorer.score(inputs, values), **CLOSE)


class Tables(Head):
    """A head that does not learn: its table is the numbers minus something."""

    def __init__(self, by: float = 0.0) -> None:
        torch.nn.Module.__init__(self)
        self.by = torch.nn.Parameter(torch.tensor(by))

    def forward(self, numeric: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
        return numeric - self.by


@pytest.fixture
def table_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the translation of a new head."""

    def shifted(builder: GraphBuilder, head: Tables, numeric: str, codes: str) -> str:
        return builder.node("Sub", numeric, builder.constant(head.by))

    monkeypatch.setitem(HEADS, Tables, shifted)


@pytest.mark.parametrize("monotone", [False, True])
@pytest.mark.parametrize("kind", get_args(CalibrationKind))
@pytest.mark.parametrize("positions", [1, 2, 5, 8, 13])
def test_calibrations(kind: CalibrationKind, monotone: bool, positions: int, table_heads: None) -> None:
    rng = np.random.default_rng(positions)
    position, log_p = rng.integers(1, positions + 1, 3000), np.log(rng.uniform(0.01, 0.9, 3000))
    click = rng.random(3000) < np.exp(log_p) ** 1.5
    calibration = fit_calibration(kind, log_p, position, click, positions, monotone=monotone)
    numbers = tuple(Numeric(f"log_ctr {k}", 0.0, 1.0, missing=False) for k in range(positions))
    model = ClickModel(Featurizer(numbers, ()), positions, (NetworkClicks("vector", Tables()),), calibration)
    session = open_bytes(click_graph(model))
    # log P from where P is 0 in single precision to where it is 1
    log_ctr = -(10 ** rng.uniform(-8, 2.3, (500, positions))).astype(np.float32)
    log_ctr[:2] = [[0.0], [-1e-7]]
    for rows in (0, 1, 500):
        inputs = Inputs(log_ctr[:rows], np.zeros((rows, 0), np.int64))
        table = table_of(session, inputs.numeric, inputs.categorical)
        assert table.shape == (rows, positions)
        expected = log_ctr[:rows].copy() if kind == "none" else calibrate(calibration, log_ctr[:rows])
        np.testing.assert_allclose(table, expected, **CLOSE)
        assert kind == "none" or not monotone or (np.diff(table, axis=1) <= 0).all()


def test_heads_without_a_translation_are_refused() -> None:
    class Twice(VectorHead):
        """Would be wrong if it were exported as its parent."""

        def table(self, outputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().table(outputs)

    head = Twice(BOTH, K, "mlp", (4,), 0.0)
    with pytest.raises(TypeError, match="VectorHead; got Twice"):
        click_graph(click_model(BOTH, NetworkClicks("vector", head)))


def test_other_layers_are_refused() -> None:
    with pytest.raises(TypeError, match="got Tanh"):
        GraphBuilder().sequential("x", [torch.nn.Tanh()])


def test_graphs_need_no_compiler() -> None:
    """`torch.onnx` and what it loads takes seconds."""
    code = """
import sys
import urank.export.onnx, urank.export.vespa, urank.model_io
from urank.clicks.calibration import Calibration
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.families import build_network
from urank.export.graph import click_graph
from urank.learning.features import Featurizer, Numeric
featurizer = Featurizer((Numeric("x", 0.0, 1.0, False),), ())
member = NetworkClicks("vector", build_network("vector", featurizer, 3))
click_graph(ClickModel(featurizer, 3, (member,), Calibration(3)))
print({"torch.onnx", "torch._dynamo", "sympy", "onnxscript"} & set(sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "set()\n"


def test_the_network_itself_does_not_change() -> None:
    head = network("monotone", "mlp", BOTH).train()
    click_graph(click_model(BOTH, NetworkClicks("monotone", head)))
    assert head.training


@pytest.mark.parametrize(("kind", "members"), [("none", "tt"), ("temperature", "nt"), ("isotonic", "t")])
def test_ensembles_and_calibrations(kind: Any, members: str) -> None:
    rng = np.random.default_rng(1)
    position, log_p = rng.integers(1, K + 1, 3000), np.log(rng.uniform(0.01, 0.9, 3000))
    calibration = fit_calibration(kind, log_p, position, rng.random(3000) < np.exp(log_p) ** 1.5, K, monotone=True)
    trees = [build(TREES, seed).clicks.members[0] for seed in (0, 1)]
    net = NetworkClicks("monotone", network("monotone", "mlp", BOTH))
    chosen = [trees[place] if letter == "t" else net for place, letter in enumerate(members)]
    model, inputs = click_model(BOTH, *chosen, calibration=calibration), draw(BOTH, 200)
    table = table_of(open_bytes(click_graph(model)), inputs.numeric, as_text(BOTH, inputs.categorical))
    np.testing.assert_allclose(table, model.log_ctr(inputs), rtol=1e-6, atol=1e-5)


def test_the_mean_of_members_stays_in_log_space(table_heads: None) -> None:
    featurizer = Featurizer(FEATURIZERS["numbers"].numeric[:2], ())
    model = ClickModel(featurizer, 2, tuple(NetworkClicks("vector", Tables(by)) for by in (0.0, 1.0)), Calibration(2))
    numeric = np.array([[-1000.0, -1e-8], [-200.0, -30.0]], dtype=np.float32)
    table = table_of(open_bytes(click_graph(model)), numeric, np.zeros((2, 0), np.int64))
    np.testing.assert_allclose(table, numeric + np.log((1 + np.exp(-1)) / 2), rtol=1e-6)


def test_text_is_encoded_as_the_featurizer_does() -> None:
    featurizer = Featurizer((), (Categorical("shop", ()), Categorical("kind", ("x", ""))))
    model = click_model(featurizer, NetworkClicks("vector", network("vector", "mlp", featurizer)))
    text = np.array([["a", "x"], ["", ""], ["x", "X"], ["x", "\N{SNOWMAN}"]], dtype=object)
    codes = np.array([[0, 1], [0, 2], [0, 0], [0, 0]])
    frame = pl.DataFrame(dict(zip(featurizer.names, text.T, strict=True)))
    np.testing.assert_array_equal(featurizer.encode(frame).categorical, codes)
    nothing = np.zeros((4, 0), np.float32)
    table = table_of(open_bytes(click_graph(model)), nothing, text)
    np.testing.assert_allclose(table, model.log_ctr(Inputs(nothing, codes)), rtol=1e-6)


# Trees


@pytest.fixture(scope="module")
def trees() -> GbdtClicks:
    (member,) = build(TREES).clicks.members
    assert isinstance(member, GbdtClicks)
    return member


@pytest.fixture(scope="module")
def trees_session(trees: GbdtClicks) -> onnxruntime.InferenceSession:
    """Takes codes, so that any number can be tried."""
    return open_bytes(ranking_graph(RankingModel(click_model(BOTH, trees)), categories="codes"))


def run_trees(session: onnxruntime.InferenceSession, inputs: Inputs) -> NDArray[np.float32]:
    value = np.ones(len(inputs), np.float32)
    return session.run(["log_ctr"], {"numeric": inputs.numeric, "categorical": inputs.categorical, "value": value})[0]


def thresholds(trees: GbdtClicks, column: int) -> list[float]:
    """Where the trees split a numeric column."""
    found, left = [0.0], [tree["tree_structure"] for tree in trees.booster.dump_model()["tree_info"]]
    while left:
        node = left.pop()
        if "split_feature" in node:
            found += [node["threshold"]] if node["split_feature"] == column else []
            left += [node["left_child"], node["right_child"]]
    return found


@pytest.mark.parametrize("rows", [0, 1, 2, 3000])
def test_every_branch_is_that_of_lightgbm(
    rows: int, trees: GbdtClicks, trees_session: onnxruntime.InferenceSession
) -> None:
    """Rows of thresholds, their neighbours, 0, the smallest numbers, infinities and NaN."""
    rng = np.random.default_rng(0)
    special = [0, -0.0, 1e-36, -1e-36, ZERO, -ZERO, 2 * ZERO, -2 * ZERO, np.inf, -np.inf, np.nan, 3e38, -3e38]
    numeric = np.empty((rows, trees.n_numeric), dtype=np.float32)
    for column in range(trees.n_numeric):
        near = np.array(thresholds(trees, column), dtype=np.float32)
        pool = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        numeric[:, column] = rng.choice(np.concatenate([*pool, np.array(special, dtype=np.float32)]), rows)
    inputs = Inputs(numeric, rng.integers(0, BOTH.cardinalities, (rows, trees.n_categorical)))
    table = run_trees(trees_session, inputs)
    assert table.shape == (rows, K)
    np.testing.assert_allclose(table, trees.log_ctr(inputs), rtol=0, atol=1e-6)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_trees_agree_on_any_numbers(
    data: st.DataObject, trees: GbdtClicks, trees_session: onnxruntime.InferenceSession
) -> None:
    rows = data.draw(st.integers(1, 5))
    numeric = data.draw(hnp.arrays(np.float32, (rows, trees.n_numeric), elements=st.floats(width=32)))
    inputs = Inputs(numeric, np.zeros((rows, trees.n_categorical), np.int64))
    np.testing.assert_allclose(run_trees(trees_session, inputs), trees.log_ctr(inputs), rtol=0, atol=1e-6)


LEAVES = {"left_child": {"leaf_value": 1.0}, "right_child": {"leaf_value": -1.0}}


def sums(structure: dict[str, Any], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The output of one tree."""
    builder = GraphBuilder()
    source = builder.input("rows", DOUBLE, rows.shape[1])
    found = builder.trees([{"tree_info": [{"tree_structure": structure}]}], source)
    builder.output("sum", builder.cast(found, onnx.TensorProto.FLOAT), 1)
    return open_bytes(builder.build()).run(None, {"rows": rows})[0][:, 0]


@pytest.mark.parametrize("members", [[0], [3], [30], [31], [0, 1], [63, 64], [5, 200_000], list(range(40))])
def test_splits_on_sets_of_categories(members: list[int]) -> None:
    split = {"split_feature": 1, "decision_type": "==", "threshold": "||".join(map(str, members)), **LEAVES}
    codes = np.array(sorted({0, 1, 2, 29, 30, 31, 32, 62, 63, 64, 65, 200_000, *members}), dtype=float)
    expected = np.where(np.isin(codes, members), 1.0, -1.0)
    np.testing.assert_array_equal(sums(split, np.stack([np.zeros_like(codes), codes], axis=1)), expected)


def test_a_tree_of_one_leaf() -> None:
    assert sums({"leaf_value": 0.25}, np.zeros((3, 1))).tolist() == [0.25] * 3


def test_zero_as_missing_is_refused() -> None:
    split = {"split_feature": 0, "decision_type": "<=", "threshold": 1.0, "missing_type": "Zero", "default_left": True}
    with pytest.raises(DataError, match="zero_as_missing"):
        sums(split | LEAVES, np.zeros((1, 1)))


# Whole models


def open_graph(export: Export) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(export.target / FILES[export.kind]), providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, inputs: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def expected_outputs(case: Case, rows: pl.DataFrame) -> dict[str, NDArray[Any]]:
    model = build(case)
    table = model.log_ctr(rows)
    score = {} if case.scorer is None else {"score": model.score(rows)}
    return {**score, "log_ctr": table, "ctr1": rows["value"].to_numpy() * np.exp(table[:, 0])}


@each_kind
@each_case
def test_outputs_are_those_of_the_model(case: Case, kind: str, exported: Exported) -> None:
    session = open_graph(exported(case, kind))
    rows = random_rows(FEATURIZERS[case.features], np.random.default_rng(7), 400)
    expected = expected_outputs(case, rows)
    inputs = graph_inputs(FEATURIZERS[case.features], rows, CATEGORIES[kind])
    for some in (slice(None), slice(3, 4), slice(0)):
        found = run(session, {name: each[some] for name, each in inputs.items()})
        assert list(found) == list(expected)
        for name, output in found.items():
            assert output.dtype == np.float32
            np.testing.assert_allclose(output, expected[name][some], rtol=1e-5, atol=1e-5, err_msg=name)
    assert all(len(np.unique(np.round(each, 3))) > 3 for each in expected.values())  # there was something to compare


@each_kind
@each_case
def test_inputs_and_outputs(case: Case, kind: str, exported: Exported) -> None:
    session = open_graph(exported(case, kind))
    featurizer = FEATURIZERS[case.features]
    kinds = {
        "numeric": ("tensor(float)", ["rows", len(featurizer.numeric)]),
        "categorical": ("tensor(string)" if kind == "onnx" else "tensor(int64)", ["rows", len(featurizer.categorical)]),
        "value": ("tensor(float)", ["rows"]),
    }
    expected = {name: each for name, each in kinds.items() if 0 not in each[1]}
    assert {value.name: (value.type, value.shape) for value in session.get_inputs()} == expected
    shapes = {"score": ["rows"], "log_ctr": ["rows", K], "ctr1": ["rows"]}
    if case.scorer is None:
        del shapes["score"]
    assert {value.name: value.shape for value in session.get_outputs()} == shapes
    proto = onnx.load(exported(case, kind).target / FILES[kind])
    assert all(entry.version == OPSETS[entry.domain] for entry in proto.opset_import)
    assert proto.ir_version == IR_VERSION


@each_case
def test_the_value_counts_only_where_it_was_learned_from(case: Case, exported: Exported) -> None:
    session = open_graph(exported(case, "onnx"))
    featurizer = FEATURIZERS[case.features]
    inputs = graph_inputs(featurizer, random_rows(featurizer, np.random.default_rng(0), 50), "text")
    once, twice = (run(session, inputs | {"value": inputs["value"] * factor}) for factor in (1, 2))
    np.testing.assert_allclose(twice["ctr1"], 2 * once["ctr1"], rtol=1e-6)
    np.testing.assert_array_equal(twice["log_ctr"], once["log_ctr"])
    if case.scorer is not None:
        assert np.array_equal(twice["score"], once["score"]) != case.value


def test_any_number_beyond_a_vocabulary_is_unknown(exported: Exported) -> None:
    case = CASES[0]
    session = open_graph(exported(case, "vespa"))
    n = len(FEATURIZERS["both"].numeric)
    odd = np.array([[0, 0], [-1, -7], [4, 8], [10**9, 10**12]])
    found = run(session, {"numeric": np.zeros((4, n), np.float32), "categorical": odd, "value": np.ones(4, np.float32)})
    for output in found.values():
        np.testing.assert_allclose(output, np.broadcast_to(output[:1], output.shape), rtol=1e-6)
    known = {
        "numeric": np.zeros((1, n), np.float32),
        "categorical": np.array([[3, 7]]),
        "value": np.ones(1, np.float32),
    }
    assert abs(run(session, known)["score"][0] - found["score"][0]) > 1e-4


def test_infinite_and_huge_numbers(exported: Exported) -> None:
    case = CASES[0]
    numbers = np.array([[np.inf, -np.inf, 3e38], [np.nan, 1e-40, -3e38]], np.float32)
    inputs = {"numeric": numbers, "categorical": np.zeros((2, 2), np.int64), "value": np.ones(2, np.float32)}
    found = run(open_graph(exported(case, "vespa")), inputs)
    expected = Inputs(numbers, inputs["categorical"])
    np.testing.assert_allclose(found["log_ctr"], build(case).log_ctr(expected), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["score"], build(case).score(expected, inputs["value"]), rtol=1e-5, atol=1e-5)


def test_same_model_same_bytes(exported: Exported) -> None:
    written = (exported(CASES[5], "vespa").target / FILES["vespa"]).read_bytes()
    assert ranking_graph(build(CASES[5]), categories="codes").SerializeToString() == written
    assert b".py" not in written  # no source paths


def test_other_kinds_of_models_are_refused() -> None:
    class Other:
        family, takes_value = "other", False

        def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
            return value

        def log_ctr(self, inputs: Inputs) -> NDArray[np.float32]:
            return np.zeros((len(inputs), K), np.float32)

    with pytest.raises(TypeError, match="a scorer must be a network or trees; got Other"):
        ranking_graph(RankingModel(build(ALONE).clicks, Other()), categories="text")
    with pytest.raises(TypeError, match="a member must be a network or trees; got Other"):
        click_graph(click_model(BOTH, Other()))
