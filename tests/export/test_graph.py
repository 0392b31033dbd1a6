"""The contract of every exported graph: it says what the model says, from raw rows, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import polars as pl
import pytest
from numpy.typing import NDArray

from export.models import ALONE, CASES, FEATURIZERS, Case, K, build
from urank.export import graph as module
from urank.export.bundle import Export, random_rows, text_feed
from urank.export.graph import IR_VERSION, OPSETS, coded_graph, text_graph
from urank.export.vespa import coded_feed
from urank.learning.features import Inputs
from urank.ranking.ranking_model import RankingModel

Exported = Callable[[Case, str], Export]
FEEDS = {"onnx": text_feed, "vespa": coded_feed}
FILES = {"onnx": "urank.onnx", "vespa": "models/urank.onnx"}
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_kind = pytest.mark.parametrize("kind", ["onnx", "vespa"])


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
def test_says_what_the_model_says(case: Case, kind: str, exported: Exported) -> None:
    session = open_graph(exported(case, kind))
    rows = random_rows(FEATURIZERS[case.features], np.random.default_rng(7), 400)
    expected = expected_outputs(case, rows)
    inputs = FEEDS[kind](FEATURIZERS[case.features], rows)
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
    expected = {name: told for name, told in kinds.items() if 0 not in told[1]}
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
    inputs = text_feed(
        FEATURIZERS[case.features], random_rows(FEATURIZERS[case.features], np.random.default_rng(0), 50)
    )
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


@pytest.mark.parametrize("graph", [text_graph, coded_graph])
def test_same_model_same_bytes(graph: Callable[[RankingModel], onnx.ModelProto]) -> None:
    one, two = (graph(build(CASES[5])).SerializeToString() for _ in range(2))
    assert one == two
    assert b".py" not in one  # no traces of where it was made


def test_strangers_are_refused() -> None:
    class Stranger:
        family, takes_value = "stranger", False

        def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
            return value

        def log_ctr(self, inputs: Inputs) -> NDArray[np.float32]:
            return np.zeros((len(inputs), K), np.float32)

    model = build(ALONE)
    with pytest.raises(TypeError, match="a scorer must be a network or trees; got Stranger"):
        text_graph(RankingModel(model.clicks, Stranger()))
    with pytest.raises(TypeError, match="a member must be a network or trees; got Stranger"):
        module._member_graph(Stranger(), model.clicks.featurizer)
