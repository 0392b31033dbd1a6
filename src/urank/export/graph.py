"""A model that ranks as one ONNX graph: the scorer and the click model side by side, fed from the same inputs.

    numeric[rows, F]      raw numbers, NaN where missing
    categorical[rows, C]  text, "" where missing; or numbers of the vocabularies, for systems without text
    value[rows]           what a click is worth
    score[rows]           of the scorer, when there is one
    log_ctr[rows, K]      log P(click) at each position
    ctr1[rows]            value · P(click at position 1)

An input that a model has no features for is not there: many systems cannot feed a tensor of width 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, compose, helper, numpy_helper

from urank.clicks.gbdt import GbdtClicks, to_onnx
from urank.clicks.model import ClickModel, Member, NetworkClicks
from urank.clicks.onnx import calibration_to_onnx, combine, export_module, network_to_onnx, with_raw_categories
from urank.clicks.tree_onnx import INPUTS, OUTPUT, build_model, tensor_info, trees_to_onnx
from urank.features import Featurizer
from urank.rankers.gbdt import TreesScorer
from urank.rankers.network import NetworkScorer
from urank.rankers.ranking import RankingModel, Scorer

__all__ = ["CTR1", "SCORE", "VALUE", "coded_graph", "text_graph"]

NUMERIC, CATEGORICAL = INPUTS
VALUE, SCORE, CTR1 = "value", "score", "ctr1"


def text_graph(model: RankingModel) -> onnx.ModelProto:
    """The graph whose categories are text: what is not in a vocabulary is unknown, as in `Featurizer.encode`."""
    featurizer = model.clicks.featurizer
    width = len(featurizer.categorical)
    if not width:
        return _graph(model, None)
    same = helper.make_node("Identity", [CATEGORICAL], ["codes"])
    inputs, output = [tensor_info(name, TensorProto.INT64, width) for name in (CATEGORICAL, "codes")]
    return _graph(model, with_raw_categories(build_model([same], [inputs], output, []), featurizer))


def coded_graph(model: RankingModel) -> onnx.ModelProto:
    """The graph whose categories are numbers: 1 for the first of a vocabulary; any number beyond it is unknown."""
    cardinalities = model.clicks.featurizer.cardinalities
    if not cardinalities:
        return _graph(model, None)
    node = helper.make_node
    nodes = [
        node("GreaterOrEqual", [CATEGORICAL, "none"], ["from_none"]),
        node("Less", [CATEGORICAL, "ends"], ["to_end"]),
        node("And", ["from_none", "to_end"], ["known"]),
        node("Where", ["known", CATEGORICAL, "none"], ["codes"]),
    ]
    constants = {"none": np.array(0), "ends": np.array(cardinalities)}
    inputs, output = [tensor_info(name, TensorProto.INT64, len(cardinalities)) for name in (CATEGORICAL, "codes")]
    return _graph(model, build_model(nodes, [inputs], output, _initializers(constants)))


def _graph(model: RankingModel, look_up: onnx.ModelProto | None) -> onnx.ModelProto:
    """All parts in one graph.

    Args:
        model: what ranks.
        look_up: `categorical` as it comes to the numbers that the parts take; none without categories.
    """
    featurizer = model.clicks.featurizer
    whole = _Whole()
    sources = {NUMERIC: NUMERIC, VALUE: VALUE, CATEGORICAL: "codes"}
    inputs = []
    if featurizer.numeric:
        inputs.append(tensor_info(NUMERIC, TensorProto.FLOAT, len(featurizer.numeric)))
    if look_up is not None:
        inputs.append(look_up.graph.input[0])
        whole.add(look_up, "look_up_", {CATEGORICAL: CATEGORICAL}, "codes")
    else:
        whole.empty(NUMERIC, "codes", TensorProto.INT64)
    if not featurizer.numeric:
        sources[NUMERIC] = whole.empty("codes", "no_numbers", TensorProto.FLOAT)
    inputs.append(_column(VALUE))
    outputs = []
    if model.scorer is not None:
        outputs.append(_column(SCORE))
        whole.add(_scorer_graph(model.scorer, featurizer), "scorer_", sources, SCORE)
    whole.add(_click_graph(model.clicks), "clicks_", sources, OUTPUT)
    whole.first_earned()
    outputs += [tensor_info(OUTPUT, TensorProto.FLOAT, model.clicks.positions), _column(CTR1)]
    return whole.build(inputs, outputs)


class _Whole:
    """A graph in the making."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def add(self, part: onnx.ModelProto, prefix: str, sources: Mapping[str, str], output: str) -> None:
        """All of a graph under names of its own, fed from these names outside of it, giving its output this name."""
        inside = compose.add_prefix(part, prefix).graph
        for value in inside.input:
            self._node("Identity", [sources[value.name.removeprefix(prefix)]], value.name)
        self.nodes += inside.node
        self.initializers += inside.initializer
        self._node("Identity", [inside.output[0].name], output)

    def empty(self, like: str, name: str, kind: int) -> str:
        """A table `[rows, 0]` with the rows of another."""
        constants = {f"{name}_{place}": np.array([at]) for place, at in (("start", 0), ("end", 0), ("axis", 1))}
        self.initializers += _initializers(constants)
        self._node("Slice", [like, *constants], f"{name}_slice")
        return self._node("Cast", [f"{name}_slice"], name, to=kind)

    def first_earned(self) -> None:
        """value · exp(log_ctr) at position 1."""
        self.initializers += _initializers({"first": np.array(0)})
        self._node("Gather", [OUTPUT, "first"], "log_first", axis=1)
        self._node("Exp", ["log_first"], "first_chance")
        self._node("Mul", ["first_chance", VALUE], CTR1)

    def build(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> onnx.ModelProto:
        model = build_model(self.nodes, inputs, outputs[0], self.initializers)
        model.graph.output.extend(outputs[1:])
        onnx.checker.check_model(model, full_check=True)
        return model

    def _node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output


def _click_graph(clicks: ClickModel) -> onnx.ModelProto:
    """`numeric` and numbers of categories to `log_ctr`, the calibrated mean of the members."""
    members = [_member_graph(member, clicks.featurizer) for member in clicks.members]
    plain = clicks.calibration.kind == "none"
    return combine(members, None if plain else calibration_to_onnx(clicks.calibration, clicks.positions))


def _member_graph(member: Member, featurizer: Featurizer) -> onnx.ModelProto:
    if isinstance(member, GbdtClicks):
        return to_onnx(member)
    if isinstance(member, NetworkClicks):
        return network_to_onnx(member.network, len(featurizer.numeric), len(featurizer.categorical))
    raise TypeError(f"a member must be a network or trees; got {type(member).__name__}")


def _scorer_graph(scorer: Scorer, featurizer: Featurizer) -> onnx.ModelProto:
    """`numeric`, numbers of categories and, where it was trained on them, values to `score`."""
    if isinstance(scorer, TreesScorer):
        return _trees_graph(scorer)
    if not isinstance(scorer, NetworkScorer):
        raise TypeError(f"a scorer must be a network or trees; got {type(scorer).__name__}")
    example = {
        NUMERIC: torch.zeros(2, len(featurizer.numeric)),
        CATEGORICAL: torch.zeros(2, len(featurizer.categorical), dtype=torch.int64),
        **({VALUE: torch.ones(2)} if scorer.takes_value else {}),
    }
    return export_module(scorer.network, example, SCORE)


def _trees_graph(scorer: TreesScorer) -> onnx.ModelProto:
    """The raw sum of the trees.

    The operator is the one that trees have as a click model; only what stands around it differs, so it is taken out of
    that graph. It counts columns and knows nothing of what they hold.
    """
    around = trees_to_onnx(scorer.booster.dump_model(), 1, scorer.n_numeric, scorer.n_categorical)
    (trees,) = (node for node in around.graph.node if node.op_type == "TreeEnsemble")
    node = helper.make_node
    columns = ["numbers", "numerals"]
    nodes = [
        node("Cast", [NUMERIC], ["numbers"], to=TensorProto.DOUBLE),
        node("Cast", [CATEGORICAL], ["numerals"], to=TensorProto.DOUBLE),
    ]
    inputs = [
        tensor_info(NUMERIC, TensorProto.FLOAT, scorer.n_numeric),
        tensor_info(CATEGORICAL, TensorProto.INT64, scorer.n_categorical),
    ]
    if scorer.takes_value:
        nodes += [
            node("Cast", [VALUE], ["wide_value"], to=TensorProto.DOUBLE),
            node("Unsqueeze", ["wide_value", "last_axis"], ["values"]),
        ]
        columns.append("values")
        inputs.append(_column(VALUE))
    nodes += [
        node("Concat", columns, list(trees.input), axis=1),
        trees,
        node("Squeeze", [trees.output[0], "last_axis"], ["sum"]),
        node("Cast", ["sum"], [SCORE], to=TensorProto.FLOAT),
    ]
    return build_model(nodes, inputs, _column(SCORE), _initializers({"last_axis": np.array([1])}))


def _column(name: str) -> onnx.ValueInfoProto:
    """An input or output `[rows]`."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows"])


def _initializers(constants: Mapping[str, np.ndarray[Any, Any]]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(value, name) for name, value in constants.items()]
