"""Graphs: a network, an ensemble and a whole click model give in ONNX Runtime what they give in Python."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from scipy.special import logsumexp

from urank.clicks.calibration import fit_calibration
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.families import Family, Head, build_network
from urank.clicks.trees import GbdtClicks
from urank.export.graph import combine, model_to_onnx, network_to_onnx, with_raw_categories
from urank.learning.features import Categorical, Featurizer, Inputs, Numeric
from urank.learning.networks import Backbone

K = 5
FAMILIES: tuple[Family, ...] = get_args(Family)
BACKBONES: tuple[Backbone, ...] = get_args(Backbone)

NUMERIC = (
    Numeric("price", 3.0, 1.5, missing=True),
    Numeric("clicks", 0.0, 1.0, missing=False),
    Numeric("rate", 2e-3, 5e-4, missing=True),  # so small that log(1 + x) needs care
)
CATEGORICAL = (Categorical("shop", ("a", "b", "ä c")), Categorical("kind", tuple("defghij")))
BOTH, NUMBERS, CATEGORIES = Featurizer(NUMERIC, CATEGORICAL), Featurizer(NUMERIC, ()), Featurizer((), CATEGORICAL)
FEATURIZERS = {"both": BOTH, "numbers": NUMBERS, "categories": CATEGORIES}

# A head reads what the backbone gives and nothing else: all families with all backbones, and the backbones once more
# with features of one kind only; likewise the family deepfm, which has a DeepFM of its own.
COMBINATIONS = [
    *((family, backbone, "both") for family, backbone in itertools.product(FAMILIES, BACKBONES) if family != "deepfm"),
    ("deepfm", "mlp", "both"),
    *(
        ("monotone", backbone, features)
        for backbone, features in itertools.product(BACKBONES, ("numbers", "categories"))
    ),
    *(("deepfm", "mlp", features) for features in ("numbers", "categories")),
]
Exported = Callable[[Family, Backbone, str], tuple[Head, onnx.ModelProto]]


def network(family: Family, backbone: Backbone, featurizer: Featurizer, seed: int = 0) -> Head:
    """A network whose weights are so large that its probabilities come close to 0 and to 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # of DeepFM without numbers
            head = build_network(family, featurizer, K, backbone=backbone, hidden=(16, 8), dropout=0.5)
    with torch.no_grad():
        head.output.weight *= 30
    return head


@pytest.fixture(scope="module")
def exported() -> Exported:
    """Networks and their graphs, each exported once, since that takes seconds."""
    done: dict[tuple[str, str, str], tuple[Head, onnx.ModelProto]] = {}

    def get(family: Family, backbone: Backbone, features: str) -> tuple[Head, onnx.ModelProto]:
        if (family, backbone, features) not in done:
            featurizer = FEATURIZERS[features]
            head = network(family, backbone, featurizer)
            graph = network_to_onnx(head, len(featurizer.numeric), len(featurizer.categorical))
            done[family, backbone, features] = head, graph
        return done[family, backbone, features]

    return get


def draw(featurizer: Featurizer, rows: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    scales = np.array([1000.0, 5.0, 1e-3])[: len(featurizer.numeric)]
    numeric = (rng.normal(size=(rows, len(scales))) * scales).astype(np.float32)
    numeric[rng.random(numeric.shape) < 0.3] = np.nan
    numeric[rng.random(numeric.shape) < 0.05] = np.inf
    return Inputs(
        numeric, rng.integers(0, np.array(featurizer.cardinalities, int), (rows, len(featurizer.categorical)))
    )


def run(graph: onnx.ModelProto, numeric: NDArray[np.float32], categorical: NDArray[Any]) -> NDArray[np.float32]:
    onnx.checker.check_model(graph, full_check=True)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["log_ctr"], {"numeric": numeric, "categorical": categorical})[0]


def as_text(featurizer: Featurizer, numbers: NDArray[np.int64]) -> NDArray[np.object_]:
    """Raw text that has these numbers; a value that is not in the vocabulary for 0."""
    text = np.empty(numbers.shape, dtype=object)
    for place, feature in enumerate(featurizer.categorical):
        text[:, place] = np.array(["never seen", *feature.vocabulary], dtype=object)[numbers[:, place]]
    return text


@pytest.mark.parametrize(("family", "backbone", "features"), COMBINATIONS)
def test_graph_equals_network(family: Family, backbone: Backbone, features: str, exported: Exported) -> None:
    head, graph = exported(family, backbone, features)
    assert head.training  # as it was before the export
    assert [value.name for value in graph.graph.input] == ["numeric", "categorical"]
    for rows in (0, 1, 400):
        inputs = draw(FEATURIZERS[features], rows)
        expected = NetworkClicks(family, head.eval()).log_ctr(inputs)
        table = run(graph, inputs.numeric, inputs.categorical)
        assert table.shape == (rows, K)
        np.testing.assert_allclose(table, expected, rtol=1e-6, atol=1e-5)
    head.train()


def test_far_ends_are_finite(exported: Exported) -> None:
    _, graph = exported("vector", "mlp", "both")
    inputs = draw(BOTH, 400)
    table = run(graph, inputs.numeric, inputs.categorical)
    assert table.min() < -20  # where log(sigmoid(x)) would be −∞ in ONNX Runtime
    assert np.isfinite(table).all()


def test_export_is_quiet_and_repeatable(exported: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    head, graph = exported("vector", "mlp", "both")
    capfd.readouterr()
    again = network_to_onnx(head, len(NUMERIC), len(CATEGORICAL))
    assert capfd.readouterr() == ("", "")
    assert again.SerializeToString() == graph.SerializeToString()
    assert b".py" not in graph.SerializeToString()  # no traces of where it was made


@pytest.mark.parametrize("members", [1, 2, 3])
def test_combined_is_the_log_of_the_mean(members: int, exported: Exported) -> None:
    parts = [exported(family, "mlp", "both") for family in FAMILIES[:members]]
    graph = combine([graph for _, graph in parts])
    inputs = draw(BOTH, 50)
    tables = [run(graph, inputs.numeric, inputs.categorical) for _, graph in parts]
    expected = logsumexp(tables, axis=0) - np.log(members)
    np.testing.assert_allclose(run(graph, inputs.numeric, inputs.categorical), expected, rtol=1e-6, atol=1e-6)
    assert run(graph, inputs.numeric[:0], inputs.categorical[:0]).shape == (0, K)


def shifted(by: float) -> onnx.ModelProto:
    """The input `numeric` and a number, as a graph in the form of a member."""
    return small_graph("numeric", "log_ctr", by, 20)


def small_graph(source: str, output: str, by: float, opset: int) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(source, TensorProto.FLOAT, ["rows", 2])]
    if source == "numeric":
        inputs.append(helper.make_tensor_value_info("categorical", TensorProto.INT64, ["rows", 0]))
    graph = helper.make_graph(
        [helper.make_node("Add", [source, "by"], [output])],
        "small",
        inputs,
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["rows", 2])],
        [numpy_helper.from_array(np.float32(by), "by")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def test_mean_is_stable() -> None:
    numeric = np.array([[-1000.0, -1e-8], [-200.0, -30.0]], dtype=np.float32)
    table = run(combine([shifted(0), shifted(-1)]), numeric, np.zeros((2, 0), np.int64))
    np.testing.assert_allclose(table, numeric + np.log((1 + np.exp(-1)) / 2), rtol=1e-6)


@pytest.mark.parametrize("opset", [13, 20, 21])
def test_last_goes_over_the_mean_whatever_its_opset(opset: int) -> None:
    last = small_graph("log_ctr", "calibrated", -3, opset)
    graph = combine([shifted(-1), shifted(-2)], last)
    assert [entry.version for entry in graph.opset_import] == [max(20, opset)]
    table = run(graph, np.zeros((1, 2), np.float32), np.zeros((1, 0), np.int64))
    np.testing.assert_allclose(table, np.log((np.exp(-1) + np.exp(-2)) / 2) - 3 + np.zeros((1, 2)), rtol=1e-6)


def test_refuses_to_combine_nothing() -> None:
    with pytest.raises(ValueError, match="at least one graph"):
        combine([])


def test_raw_text_equals_numbers(exported: Exported) -> None:
    _, graph = exported("vector", "mlp", "both")
    raw = with_raw_categories(graph, BOTH)
    for rows in (0, 1, 60):
        inputs = draw(BOTH, rows)
        expected = run(graph, inputs.numeric, inputs.categorical)
        assert np.array_equal(run(raw, inputs.numeric, as_text(BOTH, inputs.categorical)), expected)


def test_unknown_text_and_empty_text_are_0(exported: Exported) -> None:
    _, graph = exported("vector", "mlp", "both")
    numeric = np.zeros((3, len(NUMERIC)), np.float32)
    text = np.array([["", ""], ["A", "a"], ["never seen", "\N{SNOWMAN}"]], dtype=object)
    expected = run(graph, numeric, np.zeros((3, 2), np.int64))
    assert np.array_equal(run(with_raw_categories(graph, BOTH), numeric, text), expected)


def test_empty_vocabulary_and_empty_category(exported: Exported) -> None:
    _, graph = exported("vector", "mlp", "both")
    featurizer = Featurizer(NUMERIC, (Categorical("shop", ()), Categorical("kind", ("x", ""))))
    text = np.array([["a", "x"], ["", ""]], dtype=object)
    numbers = np.array([[0, 1], [0, 2]])
    numeric = np.zeros((2, len(NUMERIC)), np.float32)
    columns = dict(zip(featurizer.names, [*numeric.T, *text.T], strict=True))
    assert np.array_equal(featurizer.encode(pl.DataFrame(columns)).categorical, numbers)
    assert np.array_equal(run(with_raw_categories(graph, featurizer), numeric, text), run(graph, numeric, numbers))


def test_without_categories_there_is_nothing_to_look_up(exported: Exported) -> None:
    _, graph = exported("monotone", "mlp", "numbers")
    assert with_raw_categories(graph, NUMBERS) is graph


def stump() -> GbdtClicks:
    """One split on the shop, as `test_gbdt` fits real ones."""
    import lightgbm

    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(size=(500, 3)), rng.integers(0, 4, 500), rng.integers(0, 8, 500)])
    rows = np.column_stack([rows, rng.integers(1, K + 1, 500)])
    data = lightgbm.Dataset(rows, rng.random(500) < 0.1 + 0.5 * (rows[:, 3] == 2), categorical_feature=[3, 4])
    params = {"objective": "binary", "verbosity": -1, "num_threads": 1, "min_data_per_group": 10}
    text = lightgbm.train(params, data, num_boost_round=5).model_to_string()
    return GbdtClicks.from_text(text, K, BOTH)


@pytest.mark.parametrize(("kind", "families"), [("none", "tt"), ("temperature", "nt"), ("isotonic", "t")])
def test_whole_click_model(kind: Any, families: str, exported: Exported) -> None:
    head, _ = exported("monotone", "mlp", "both")
    members = {"n": NetworkClicks("monotone", head), "t": stump()}
    rng = np.random.default_rng(1)
    position, log_p = rng.integers(1, K + 1, 3000), np.log(rng.uniform(0.01, 0.9, 3000))
    click = rng.random(3000) < np.exp(log_p) ** 1.5
    calibration = fit_calibration(kind, log_p, position, click, K, monotone=True)
    model = ClickModel(BOTH, K, tuple(members[letter] for letter in families), calibration)
    inputs = draw(BOTH, 200)
    table = run(model_to_onnx(model), inputs.numeric, as_text(BOTH, inputs.categorical))
    np.testing.assert_allclose(table, model.log_ctr(inputs), rtol=1e-6, atol=1e-5)
    head.train()


def test_a_stranger_is_not_a_member() -> None:
    class Stranger:
        family = "stranger"

        def log_ctr(self, inputs: Inputs) -> NDArray[np.float32]:
            return np.zeros((len(inputs), K), np.float32)

    calibration = fit_calibration("none", np.zeros(0), np.zeros(0, int), np.zeros(0), K)
    with pytest.raises(TypeError, match="got Stranger"):
        model_to_onnx(ClickModel(BOTH, K, (Stranger(),), calibration))
