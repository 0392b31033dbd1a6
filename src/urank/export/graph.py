"""ONNX graphs of click models, scorers and whole ranking models, made by one builder.

    numeric[rows, F]      raw numbers, NaN where missing
    categorical[rows, C]  strings, "" where missing; or category codes, for systems without string tensors
    value[rows]           value of a click
    score[rows]           score to rank by, if the model has a scorer
    log_ctr[rows, K]      log P(click) at each position
    ctr1[rows]            value · P(click at position 1)

`click_graph` and `scorer_graph` are the graphs of the saved artifact; `ranking_graph` is a whole model as one graph for
other systems.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
import torch
from numpy.typing import ArrayLike
from onnx import TensorProto, compose, helper, numpy_helper
from onnxscript import opset20 as op

from urank.clicks.click_model import ClickModel, Member, NetworkClicks
from urank.clicks.trees import GbdtClicks
from urank.errors import DataError
from urank.learning.features import Featurizer
from urank.ranking.ranking_model import RankingModel, Scorer
from urank.ranking.urank_network import NetworkScorer
from urank.ranking.urank_trees import TreesScorer

NUMERIC, CATEGORICAL, VALUE = "numeric", "categorical", "value"
SCORE, LOG_CTR, CTR1 = "score", "log_ctr", "ctr1"

ML_DOMAIN = "ai.onnx.ml"
OPSETS = {"": 20, ML_DOMAIN: 5}
IR_VERSION = 10

FLOAT, DOUBLE, INT64, STRING = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.STRING

Categories = Literal["text", "codes"]
"""How a graph takes categories: as strings, or as the codes of `Featurizer.encode` with any other number as unknown."""


def click_graph(clicks: ClickModel) -> onnx.ModelProto:
    """Build the graph of a click model: raw numbers and strings in, the calibrated `log_ctr` out.

    ONNX has no missing string: feed "", which is unknown unless the log itself had "" as a category.
    """
    builder = GraphBuilder()
    numeric, codes = _raw_features(builder, clicks.featurizer, "text")
    builder.output(LOG_CTR, _click_table(builder, clicks, numeric, codes), clicks.positions)
    return builder.build()


def scorer_graph(scorer: Scorer, featurizer: Featurizer) -> onnx.ModelProto:
    """Build the graph of a scorer: raw numbers and strings in, `score` out; `value` is an input only if it is used."""
    builder = GraphBuilder()
    numeric, codes = _raw_features(builder, featurizer, "text")
    value = builder.input(VALUE, FLOAT) if scorer.takes_value else None
    builder.output(SCORE, _scores(builder, scorer, featurizer, numeric, codes, value))
    return builder.build()


def ranking_graph(model: RankingModel, *, categories: Categories) -> onnx.ModelProto:
    """Build one graph of the scorer, if there is one, and the click model, with `ctr1` as a further output.

    Features the model does not have are no input of width 0, which many systems cannot feed, but are left out.
    """
    clicks = model.clicks
    builder = GraphBuilder()
    numeric, codes = _raw_features(builder, clicks.featurizer, categories, omit_empty=True)
    value = builder.input(VALUE, FLOAT)
    if model.scorer is not None:
        builder.output(SCORE, _scores(builder, model.scorer, clicks.featurizer, numeric, codes, value))
    table = _click_table(builder, clicks, numeric, codes)
    builder.output(LOG_CTR, table, clicks.positions)
    first = builder.node("Exp", builder.node("Gather", table, builder.constant(0), axis=1))
    builder.output(CTR1, builder.node("Mul", first, value))
    return builder.build()


def _raw_features(
    builder: GraphBuilder, featurizer: Featurizer, categories: Categories, *, omit_empty: bool = False
) -> tuple[str, str]:
    """Declare the inputs of the features; return the tensors `[rows, F]` of numbers and `[rows, C]` of codes."""
    F, C = len(featurizer.numeric), len(featurizer.categorical)
    numeric = builder.input(NUMERIC, FLOAT, F) if F or not omit_empty else None
    if C:
        kind = STRING if categories == "text" else INT64
        raw = builder.input(CATEGORICAL, kind, C)
        codes = _look_up(builder, featurizer, raw) if categories == "text" else _known_codes(builder, featurizer, raw)
    elif omit_empty:
        assert numeric is not None  # noqa: S101 - a model has features
        codes = builder.empty(numeric, INT64)
    else:
        codes = builder.input(CATEGORICAL, INT64, 0)
    return builder.empty(codes, FLOAT) if numeric is None else numeric, codes


def _look_up(builder: GraphBuilder, featurizer: Featurizer, text: str) -> str:
    """Encode strings by the vocabulary of their feature; unknown strings get 0, as in `Featurizer.encode`."""
    columns = []
    for place, feature in enumerate(featurizer.categorical):
        column = builder.node("Gather", text, builder.constant([place]), axis=1)
        keys = {"keys_strings": list(feature.vocabulary or ("",)), "default_int64": 0}
        codes = list(range(1, len(feature.vocabulary) + 1) or (0,))
        columns.append(builder.node("LabelEncoder", column, domain=ML_DOMAIN, values_int64s=codes, **keys))
    return builder.node("Concat", *columns, axis=1)


def _known_codes(builder: GraphBuilder, featurizer: Featurizer, codes: str) -> str:
    """Replace numbers outside the vocabularies by 0."""
    zero = builder.constant(0)
    below_end = builder.node("Less", codes, builder.constant(featurizer.cardinalities))
    known = builder.node("And", builder.node("GreaterOrEqual", codes, zero), below_end)
    return builder.node("Where", known, codes, zero)


def _click_table(builder: GraphBuilder, clicks: ClickModel, numeric: str, codes: str) -> str:
    """Compute `log_ctr[rows, K]`: the calibrated mean log((1/N) Σ exp(log_ctr)) of the members, within log space."""
    tables = [_member_table(builder, member, clicks.featurizer, numeric, codes) for member in clicks.members]
    table = tables[0]
    if len(tables) > 1:
        axis = builder.constant([0])
        layers = builder.node("Concat", *(builder.node("Unsqueeze", table, axis) for table in tables), axis=0)
        total = builder.node("ReduceLogSumExp", layers, axis, keepdims=0)
        table = builder.node("Sub", total, builder.constant(np.float32(math.log(len(tables)))))
    if clicks.calibration.kind == "none":
        return table
    return builder.module(clicks.calibration, {"table": (table, torch.full((2, clicks.positions), -1.0))})


def _member_table(builder: GraphBuilder, member: Member, featurizer: Featurizer, numeric: str, codes: str) -> str:
    if isinstance(member, GbdtClicks):
        return _tree_table(builder, member, numeric, codes)
    if isinstance(member, NetworkClicks):
        return builder.module(member.network, _features(featurizer, numeric, codes))
    raise TypeError(f"a member must be a network or trees; got {type(member).__name__}")


def _tree_table(builder: GraphBuilder, trees: GbdtClicks, numeric: str, codes: str) -> str:
    """Repeat each item for the K positions, by adding `[1, K, columns]` that is zero but for the last column."""
    K = trees.positions
    positions = np.zeros((1, K, trees.width))
    positions[0, :, -1] = np.arange(1, K + 1)
    features = builder.node("Concat", builder.cast(numeric, DOUBLE), builder.cast(codes, DOUBLE), axis=1)
    padded = builder.node("Pad", features, builder.constant([0, 0, 0, 1]))
    items = builder.node("Unsqueeze", padded, builder.constant([1]))
    placed = builder.node("Add", items, builder.constant(positions))
    rows = builder.node("Reshape", placed, builder.constant([-1, trees.width]))
    sums = builder.trees(trees.booster.dump_model(), rows)
    raw = builder.node("Reshape", sums, builder.constant([-1, K]))
    # log σ(x) = min(x, 0) − log(1 + exp(−|x|))
    small = builder.node("Exp", builder.node("Neg", builder.node("Abs", raw)))
    rest = builder.node("Log", builder.node("Add", small, builder.constant(1.0)))
    table = builder.node("Sub", builder.node("Min", raw, builder.constant(0.0)), rest)
    return builder.cast(table, FLOAT)


def _scores(
    builder: GraphBuilder, scorer: Scorer, featurizer: Featurizer, numeric: str, codes: str, value: str | None
) -> str:
    """Compute `score[rows]`; `value` is only read by scorers trained on values."""
    values = value if scorer.takes_value else None
    if isinstance(scorer, TreesScorer):
        axis = builder.constant([1])
        columns = [builder.cast(numeric, DOUBLE), builder.cast(codes, DOUBLE)]
        columns += [] if values is None else [builder.node("Unsqueeze", builder.cast(values, DOUBLE), axis)]
        sums = builder.trees(scorer.booster.dump_model(), builder.node("Concat", *columns, axis=1))
        return builder.cast(builder.node("Squeeze", sums, axis), FLOAT)
    if isinstance(scorer, NetworkScorer):
        inputs = _features(featurizer, numeric, codes) | ({} if values is None else {VALUE: (values, torch.ones(2))})
        return builder.module(scorer.network, inputs)
    raise TypeError(f"a scorer must be a network or trees; got {type(scorer).__name__}")


def _features(featurizer: Featurizer, numeric: str, codes: str) -> dict[str, tuple[str, torch.Tensor]]:
    """Name the inputs that every network takes, each with two example rows."""
    numbers = torch.zeros(2, len(featurizer.numeric))
    categories = torch.zeros(2, len(featurizer.categorical), dtype=torch.int64)
    return {NUMERIC: (numeric, numbers), CATEGORICAL: (codes, categories)}


class GraphBuilder:
    """Collect the nodes of a graph; every method returns the name of the tensor it adds."""

    def __init__(self) -> None:
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def input(self, name: str, kind: int, *width: int) -> str:
        """Declare an input `[rows]` or `[rows, width]`."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, ["rows", *width]))
        return name

    def output(self, name: str, tensor: str, *width: int) -> str:
        """Give a float tensor `[rows]` or `[rows, width]` a name outside the graph."""
        self._nodes.append(helper.make_node("Identity", [tensor], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, FLOAT, ["rows", *width]))
        return name

    def constant(self, value: ArrayLike) -> str:
        name = f"constant_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one output."""
        name = f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def cast(self, tensor: str, kind: int) -> str:
        return self.node("Cast", tensor, to=kind)

    def empty(self, like: str, kind: int) -> str:
        """Add a tensor `[rows, 0]` with the rows of another."""
        start, end, axis = (self.constant([number]) for number in (0, 0, 1))
        return self.cast(self.node("Slice", like, start, end, axis), kind)

    def module(self, module: torch.nn.Module, inputs: Mapping[str, tuple[str, torch.Tensor]]) -> str:
        """Add a torch module with one output, in evaluation mode; the module itself does not change.

        `inputs` has for each argument of `forward`, in order, the tensor to feed and two example rows.
        """
        graph = _exported(module, {name: example for name, (_, example) in inputs.items()})
        prefix = f"module_{len(self._nodes)}_"
        part = compose.add_prefix_graph(graph, prefix)
        for name, (source, _) in inputs.items():
            self._nodes.append(helper.make_node("Identity", [source], [prefix + name]))
        self._nodes += part.node
        self._initializers += part.initializer
        return str(part.output[0].name)

    def trees(self, dump: Mapping[str, Any], rows: str) -> str:
        """Sum LightGBM trees, double `[rows, 1]`, over rows, double `[rows, columns]`; from `Booster.dump_model`."""
        ensemble = _TreeEnsemble()
        for tree in dump["tree_info"]:
            ensemble.add_tree(tree["tree_structure"])
        return self.node("TreeEnsemble", rows, domain=ML_DOMAIN, **ensemble.attributes())

    def build(self) -> onnx.ModelProto:
        """Return the graph, checked."""
        graph = helper.make_graph(self._nodes, "urank", self._inputs, self._outputs, self._initializers)
        domains = sorted({"", *(node.domain for node in self._nodes)})
        imports = [helper.make_opsetid(domain, OPSETS[domain]) for domain in domains]
        model = helper.make_model(graph, producer_name="urank", opset_imports=imports, ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        return model


LEQ, MEMBER = 0, 6  # codes of BRANCH_LEQ and BRANCH_MEMBER
ZERO = float(np.float32(1e-35))  # LightGBM treats numbers up to this size as 0


@dataclass
class _TreeEnsemble:
    """Attributes of the operator TreeEnsemble, one list entry for each node or leaf."""

    roots: list[int] = field(default_factory=list)
    nodes: list[tuple[int, int, float, int]] = field(default_factory=list)  # feature, mode, split, missing goes left
    members: list[float] = field(default_factory=list)
    branches: list[tuple[int, int, int, int]] = field(default_factory=list)
    leaves: list[float] = field(default_factory=list)

    def add_tree(self, structure: Mapping[str, Any]) -> None:
        place, is_leaf = self._add(structure)
        if is_leaf:  # the operator needs a node: one whose branches both lead to the leaf
            leaf, place = place, self._add_node(0, LEQ, 0.0, False)
            self.branches[place] = (leaf, 1, leaf, 1)
        self.roots.append(place)

    def _add(self, structure: Mapping[str, Any]) -> tuple[int, int]:
        """Return the index of a node or leaf among its kind, and 1 for a leaf."""
        if "split_feature" not in structure:
            self.leaves.append(float(structure["leaf_value"]))
            return len(self.leaves) - 1, 1
        feature = int(structure["split_feature"])
        if structure["decision_type"] == "==":
            place = self._add_node(feature, MEMBER, 0.0, False)
            self.members += [*map(float, str(structure["threshold"]).split("||")), np.nan]
        else:
            place = self._add_node(feature, LEQ, *_numeric_split(structure))
        self.branches[place] = (*self._add(structure["left_child"]), *self._add(structure["right_child"]))
        return place, 0

    def _add_node(self, feature: int, mode: int, split: float, missing: bool) -> int:
        self.nodes.append((feature, mode, split, int(missing)))
        self.branches.append((0, 0, 0, 0))
        return len(self.nodes) - 1

    def attributes(self) -> dict[str, Any]:
        features, modes, splits, missing = zip(*self.nodes, strict=True)
        true, true_leaf, false, false_leaf = zip(*self.branches, strict=True)
        return {
            "n_targets": 1,
            "aggregate_function": 1,  # sum
            "tree_roots": self.roots,
            "nodes_featureids": features,
            "nodes_modes": numpy_helper.from_array(np.array(modes, dtype=np.uint8)),
            "nodes_splits": _doubles(splits),
            "nodes_missing_value_tracks_true": missing,
            "nodes_truenodeids": true,
            "nodes_trueleafs": true_leaf,
            "nodes_falsenodeids": false,
            "nodes_falseleafs": false_leaf,
            "leaf_targetids": [0] * len(self.leaves),
            "leaf_weights": _doubles(self.leaves),
            **({"membership_values": _doubles(self.members)} if self.members else {}),
        }


def _numeric_split(structure: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the threshold, x ≤ threshold goes left, and whether a missing value goes left.

    Where no value was missing in training, LightGBM reads a missing value as 0. It also treats numbers no larger than
    `ZERO` as 0, so no threshold may separate them: one in their range moves to its end.

    >>> _numeric_split({"threshold": 0.5, "missing_type": "None", "default_left": False})
    (0.5, True)
    >>> _numeric_split({"threshold": 0.5, "missing_type": "NaN", "default_left": False})
    (0.5, False)
    """
    threshold = float(structure["threshold"])
    if structure["missing_type"] == "Zero":
        raise DataError("LightGBM models that treat 0 as missing (zero_as_missing) cannot be exported to ONNX")
    missing = structure["default_left"] if structure["missing_type"] == "NaN" else threshold >= 0
    if -ZERO <= threshold <= ZERO:
        threshold = ZERO if threshold >= 0 else float(np.nextafter(-ZERO, -1))
    return threshold, bool(missing)


def _doubles(values: Sequence[float]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.float64))


def _exported(module: torch.nn.Module, example: Mapping[str, torch.Tensor]) -> onnx.GraphProto:
    """Export a module; the graph has the inputs of the example and one output, and no trace of source paths."""
    rows, aten = torch.export.Dim("rows"), torch.ops.aten
    with _quiet():
        program = torch.onnx.export(
            copy.deepcopy(module).cpu().eval(),
            tuple(example.values()),
            dynamo=True,
            verbose=False,
            opset_version=OPSETS[""],
            input_names=list(example),
            output_names=["output"],
            dynamic_shapes=tuple({0: rows} for _ in example),
            custom_translation_table={aten.log_sigmoid.default: _log_sigmoid, aten.log1p.default: _log1p},
        )
    assert program is not None  # noqa: S101 - None only without dynamo
    graph = program.model_proto.graph
    for part in (*graph.node, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return graph


def _log_sigmoid(x: Any) -> Any:
    """−softplus(−x). The exporter's own log(sigmoid(x)) is −∞ in ONNX Runtime from x = −19 on."""
    return op.Neg(op.Softplus(op.Neg(x)))


def _log1p(x: Any) -> Any:
    """log(1 + x) in double precision: in single precision, as the exporter has it, a small x is lost beside the 1."""
    wide: Any = op.Cast(x, to=DOUBLE)
    one: Any = op.Constant(value=numpy_helper.from_array(np.array(1.0)))
    return op.CastLike(op.Log(op.Add(wide, one)), x)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about its own internals and about optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
