"""The check of exports: random rows cover odd values, and no graph that differs from its model passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export.models import ALONE, CASES, FEATURIZERS, TREES, Case, K, build
from urank.clicks.calibration import Calibration
from urank.errors import DataError
from urank.export.graph import ranking_graph
from urank.export.onnx import ROWS, Export, check_graph, graph_inputs, missing_text, random_rows
from urank.learning.features import Categorical, Featurizer, Numeric
from urank.log.signed_log import inverse_signed_log, signed_log
from urank.ranking.ranking_model import RankingModel

Exported = Callable[[Case, str], Export]


def test_rows_hold_everything_odd() -> None:
    featurizer = FEATURIZERS["both"]
    rows = random_rows(featurizer, np.random.default_rng(0))
    assert rows.height == ROWS
    assert rows.columns == [*featurizer.names, "value"]
    for feature in featurizer.numeric:
        column = rows[feature.name]
        assert 0.1 < column.null_count() / ROWS < 0.3
        z = (signed_log(column.drop_nulls().to_numpy()) - feature.mean) / feature.std
        assert z.min() < -4  # far off
        assert z.max() > 4
        assert np.mean(np.abs(z) < 1) > 0.1  # and near
    for category in featurizer.categorical:
        column = rows[category.name]
        assert column.null_count() > 10
        seen = set(column.drop_nulls())
        assert set(category.vocabulary) < seen  # all of them, and another
    assert rows.equals(random_rows(featurizer, np.random.default_rng(0)))


def test_rows_of_any_scale_are_finite() -> None:
    featurizer = Featurizer((Numeric("far", 60.0, 40.0, False),), ())
    column = random_rows(featurizer, np.random.default_rng(0))["far"].drop_nulls().to_numpy()
    assert np.isfinite(column).all()
    assert signed_log(inverse_signed_log(-4.5)) == pytest.approx(-4.5)


def test_what_stands_for_a_missing_category() -> None:
    assert missing_text(FEATURIZERS["both"]) == ""
    taken = Featurizer((), (Categorical("a", ("x", "")), Categorical("b", ("y",))))
    text = missing_text(taken)
    assert text not in ("x", "", "y")
    rows = random_rows(taken, np.random.default_rng(0))
    codes = taken.encode(rows).categorical
    fed = graph_inputs(taken, rows, "text")["categorical"]
    assert (fed == text).sum() == sum(rows[name].null_count() for name in ("a", "b")) > 0
    assert (codes[fed == text] == 0).all()
    assert (codes[:, 0][fed[:, 0] == ""] == 2).all()


def test_a_graph_that_agrees(exported: Exported) -> None:
    export = exported(TREES, "onnx")
    assert 0 <= export.difference < 1e-5
    assert check_graph(export.target / "urank.onnx", build(TREES), "text") == export.difference
    assert check_graph(export.target / "urank.onnx", build(TREES), "text", seed=1) < 1e-5


@pytest.mark.parametrize("case", [TREES, ALONE], ids=str)
def test_the_graph_of_another_model(case: Case, exported: Exported) -> None:
    with pytest.raises(DataError, match=r"differs from the model: \w+ must be -?[\d.e-]+ at random row \d+; got"):
        check_graph(exported(case, "onnx").target / "urank.onnx", build(case, seed=1), "text")


@pytest.mark.parametrize("change", [1.001, np.nan])
def test_a_graph_that_was_changed_a_little(change: float, exported: Exported, tmp_path: Path) -> None:
    """One leaf of all; or what is not a number."""
    proto = onnx.load(exported(TREES, "onnx").target / "urank.onnx")
    trees = next(node for node in proto.graph.node if node.op_type == "TreeEnsemble")
    leaves = next(each for each in trees.attribute if each.name == "leaf_weights")
    weights = numpy_helper.to_array(leaves.t).copy()
    weights[np.abs(weights).argmax()] *= change
    leaves.t.CopyFrom(numpy_helper.from_array(weights))
    onnx.save(proto, tmp_path / "changed.onnx")
    with pytest.raises(DataError, match="the exported graph differs from the model: score must be"):
        check_graph(tmp_path / "changed.onnx", build(TREES), "text")


def test_a_graph_of_other_positions(tmp_path: Path) -> None:
    fewer = replace(build(ALONE).clicks, positions=K - 1)
    trees = replace(fewer.members[0], positions=K - 1)  # type: ignore[type-var]
    fewer = replace(fewer, members=(trees,), calibration=Calibration(K - 1))
    onnx.save(ranking_graph(RankingModel(fewer), categories="text"), tmp_path / "fewer.onnx")
    with pytest.raises(DataError, match="differs from the model: log_ctr has shape"):
        check_graph(tmp_path / "fewer.onnx", build(ALONE), "text")


def test_a_network_agrees_closely(exported: Exported) -> None:
    assert exported(CASES[0], "vespa").difference < 1e-5
