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

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, compose, helper, numpy_helper, version_converter
from onnxscript import opset20 as op

from urank.clicks.click_model import ClickModel, Member, NetworkClicks
from urank.clicks.trees import GbdtClicks, to_onnx
from urank.errors import DataError
from urank.learning.features import Featurizer
from urank.ranking.ranking_model import RankingModel, Scorer
from urank.ranking.urank_network import NetworkScorer
from urank.ranking.urank_trees import TreesScorer

__all__ = [
    "CTR1",
    "INPUTS",
    "ML_DOMAIN",
    "OPSETS",
    "OUTPUT",
    "SCORE",
    "VALUE",
    "build_model",
    "calibration_to_onnx",
    "coded_graph",
    "combine",
    "export_module",
    "model_to_onnx",
    "network_to_onnx",
    "scorer_to_onnx",
    "tensor_info",
    "text_graph",
    "trees_to_onnx",
    "with_raw_categories",
]

INPUTS = ("numeric", "categorical")
OUTPUT = "log_ctr"
ML_DOMAIN = "ai.onnx.ml"
OPSETS = {"": 20, ML_DOMAIN: 5}
IR_VERSION = 10

LEQ, MEMBER = 0, 6  # codes of BRANCH_LEQ and BRANCH_MEMBER
ZERO = float(np.float32(1e-35))  # LightGBM takes numbers up to this, on both sides, for 0


def trees_to_onnx(dump: Mapping[str, Any], positions: int, n_numeric: int, n_categorical: int) -> onnx.ModelProto:
    """The graph of what `Booster.dump_model` gave.

    Each item is repeated for the K positions by adding `[1, K, columns]`, zeros but for the positions in the last
    column; the raw scores go through log σ(x) = min(x, 0) − log(1 + exp(−|x|)).

    Args:
        dump: the trees, of the columns `[numeric, categorical, position]`.
        positions: K.
        n_numeric, n_categorical: the widths of the inputs.
    """
    columns = n_numeric + n_categorical + 1
    shift = np.zeros((1, positions, columns))
    shift[0, :, -1] = np.arange(1, positions + 1)
    constants = {
        "shift": shift,
        "one_column": np.array([0, 0, 0, 1]),
        "middle": np.array([1]),
        "as_rows": np.array([-1, columns]),
        "as_table": np.array([-1, positions]),
        "zero": np.array(0.0),
        "one": np.array(1.0),
    }
    ensemble = _Ensemble()
    for tree in dump["tree_info"]:
        ensemble.add_tree(tree["tree_structure"])
    node = helper.make_node
    nodes = [
        node("Cast", ["numeric"], ["numbers"], to=TensorProto.DOUBLE),
        node("Cast", ["categorical"], ["numerals"], to=TensorProto.DOUBLE),
        node("Concat", ["numbers", "numerals"], ["features"], axis=1),
        node("Pad", ["features", "one_column"], ["items"]),
        node("Unsqueeze", ["items", "middle"], ["item"]),
        node("Add", ["item", "shift"], ["placed"]),
        node("Reshape", ["placed", "as_rows"], ["rows"]),
        ensemble.to_node("rows", "scores"),
        node("Reshape", ["scores", "as_table"], ["raw"]),
        node("Abs", ["raw"], ["size"]),
        node("Neg", ["size"], ["minus_size"]),
        node("Exp", ["minus_size"], ["small"]),
        node("Add", ["small", "one"], ["above_one"]),
        node("Log", ["above_one"], ["rest"]),
        node("Min", ["raw", "zero"], ["bound"]),
        node("Sub", ["bound", "rest"], ["log_sigmoid"]),
        node("Cast", ["log_sigmoid"], [OUTPUT], to=TensorProto.FLOAT),
    ]
    inputs = [
        tensor_info(INPUTS[0], TensorProto.FLOAT, n_numeric),
        tensor_info(INPUTS[1], TensorProto.INT64, n_categorical),
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    return build_model(nodes, inputs, tensor_info(OUTPUT, TensorProto.FLOAT, positions), initializers)


@dataclass
class _Ensemble:
    """The attributes of TreeEnsemble, filled a node at a time."""

    roots: list[int] = field(default_factory=list)
    features: list[int] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    splits: list[float] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    members: list[float] = field(default_factory=list)
    branches: list[tuple[int, int, int, int]] = field(default_factory=list)
    leaves: list[float] = field(default_factory=list)

    def add_tree(self, structure: Mapping[str, Any]) -> None:
        place, is_leaf = self._add(structure)
        if is_leaf:  # a tree of one leaf: a node whose branches both lead to it
            leaf, place = place, self._add_node(0, LEQ, 0.0, False)
            self.branches[place] = (leaf, 1, leaf, 1)
        self.roots.append(place)

    def _add(self, structure: Mapping[str, Any]) -> tuple[int, int]:
        """The place of a node among the nodes, or of a leaf among the leaves; and which of the two it is."""
        if "split_feature" not in structure:
            self.leaves.append(float(structure["leaf_value"]))
            return len(self.leaves) - 1, 1
        feature = int(structure["split_feature"])
        if structure["decision_type"] == "==":
            place = self._add_node(feature, MEMBER, 0.0, False)
            self.members += [*map(float, str(structure["threshold"]).split("||")), np.nan]
        else:
            split, missing = _numeric_split(structure)
            place = self._add_node(feature, LEQ, split, missing)
        self.branches[place] = (*self._add(structure["left_child"]), *self._add(structure["right_child"]))
        return place, 0

    def _add_node(self, feature: int, mode: int, split: float, missing: bool) -> int:
        self.features.append(feature)
        self.modes.append(mode)
        self.splits.append(split)
        self.missing.append(int(missing))
        self.branches.append((0, 0, 0, 0))
        return len(self.features) - 1

    def to_node(self, rows: str, scores: str) -> onnx.NodeProto:
        """The operator: `[rows, columns]` to `[rows, 1]`, the sum over all trees."""
        true, true_leaf, false, false_leaf = (list(values) for values in zip(*self.branches, strict=True))
        members = {"membership_values": _doubles(self.members)} if self.members else {}
        return helper.make_node(
            "TreeEnsemble",
            [rows],
            [scores],
            domain=ML_DOMAIN,
            n_targets=1,
            aggregate_function=1,  # the sum
            tree_roots=self.roots,
            nodes_featureids=self.features,
            nodes_modes=numpy_helper.from_array(np.array(self.modes, dtype=np.uint8)),
            nodes_splits=_doubles(self.splits),
            nodes_missing_value_tracks_true=self.missing,
            nodes_truenodeids=true,
            nodes_trueleafs=true_leaf,
            nodes_falsenodeids=false,
            nodes_falseleafs=false_leaf,
            leaf_targetids=[0] * len(self.leaves),
            leaf_weights=_doubles(self.leaves),
            **members,
        )


def _numeric_split(structure: Mapping[str, Any]) -> tuple[float, bool]:
    """The threshold, x ≤ threshold goes left, and whether a missing value does.

    Where no value was missing in training, LightGBM reads a missing one as 0. Numbers no larger than `ZERO` are 0 to
    it as well, so that no threshold may part them: one among them moves to the end of their range.

    >>> _numeric_split({"threshold": 0.5, "missing_type": "None", "default_left": False})
    (0.5, True)
    >>> _numeric_split({"threshold": 0.5, "missing_type": "NaN", "default_left": False})
    (0.5, False)
    """
    threshold = float(structure["threshold"])
    if structure["missing_type"] == "Zero":
        raise DataError("a LightGBM model that takes 0 for missing (zero_as_missing) cannot be exported to ONNX")
    missing = structure["default_left"] if structure["missing_type"] == "NaN" else threshold >= 0
    if -ZERO <= threshold <= ZERO:
        threshold = ZERO if threshold >= 0 else float(np.nextafter(-ZERO, -1))
    return threshold, bool(missing)


def _doubles(values: list[float]) -> onnx.TensorProto:
    array: NDArray[np.float64] = np.array(values, dtype=np.float64)
    return numpy_helper.from_array(array)


def tensor_info(name: str, kind: int, width: int) -> onnx.ValueInfoProto:
    """An input or output `[rows, width]`."""
    return helper.make_tensor_value_info(name, kind, ["rows", width])


def build_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    output: onnx.ValueInfoProto,
    initializers: Sequence[onnx.TensorProto],
    opset: int = OPSETS[""],
) -> onnx.ModelProto:
    """A checked graph of these parts."""
    graph = helper.make_graph(nodes, "urank", inputs, [output], initializers)
    versions = {**OPSETS, "": opset}
    used = sorted({"", *(node.domain for node in nodes)})
    imports = [helper.make_opsetid(domain, versions[domain]) for domain in used]
    ir_version = max(IR_VERSION, helper.find_min_ir_version_for(imports))
    model = helper.make_model(graph, producer_name="urank", opset_imports=imports, ir_version=ir_version)
    onnx.checker.check_model(model)
    return model


def model_to_onnx(model: ClickModel) -> onnx.ModelProto:
    """The graph of a whole click model: raw numbers and raw text in, the calibrated mean of its members out."""
    featurizer = model.featurizer
    members = [_member_to_onnx(member, featurizer) for member in model.members]
    plain = model.calibration.kind == "none"
    last = None if plain else calibration_to_onnx(model.calibration, model.positions)
    return with_raw_categories(combine(members, last), featurizer)


def _member_to_onnx(member: Member, featurizer: Featurizer) -> onnx.ModelProto:
    if isinstance(member, GbdtClicks):
        return to_onnx(member)
    if isinstance(member, NetworkClicks):
        return network_to_onnx(member.network, len(featurizer.numeric), len(featurizer.categorical))
    raise TypeError(f"a member must be a network or trees; got {type(member).__name__}")


def network_to_onnx(module: torch.nn.Module, n_numeric: int, n_categorical: int) -> onnx.ModelProto:
    """The graph of a network, as it predicts; the network itself stays as it is.

    Args:
        module: its `forward(numeric, categorical)` gives `[rows, K]`.
        n_numeric, n_categorical: the widths of the inputs; one of them may be 0, the input is then there and empty.
    """
    example = {"numeric": torch.zeros(2, n_numeric), "categorical": torch.zeros(2, n_categorical, dtype=torch.int64)}
    return export_module(module, example, OUTPUT)


def calibration_to_onnx(calibration: torch.nn.Module, positions: int) -> onnx.ModelProto:
    """The graph of a calibration, `log_ctr[rows, K]` to `calibrated[rows, K]`: what `combine` takes as `last`."""
    return export_module(calibration, {OUTPUT: torch.full((2, positions), -1.0)}, "calibrated")


def combine(members: Sequence[onnx.ModelProto], last: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """One graph for the mean of the tables of the members, log((1/N) Σ exp(log_ctr)), computed without leaving the log.

    Args:
        members: graphs with the same inputs and as many positions.
        last: a graph with one input and one output `[rows, K]`, a calibration, that the mean goes through.
    """
    if not members:
        raise ValueError("members must hold at least one graph; got none")
    opset = _common_opset([*members, *([last] if last else [])])
    assembly = _Assembly(opset)
    tables = []
    for number, member in enumerate(members):
        inputs = [value.name for value in member.graph.input]
        tables.append(assembly.add(member, f"member{number}_", dict(zip(inputs, inputs, strict=True))))
    mean = tables[0] if len(tables) == 1 else assembly.mean(tables)
    if last is not None:
        mean = assembly.add(last, "last_", {last.graph.input[0].name: mean})
    return assembly.finish(mean, members[0].graph.input, members[0].graph.output[0])


def with_raw_categories(model: onnx.ModelProto, featurizer: Featurizer) -> onnx.ModelProto:
    """The graph with text instead of numbers as its input `categorical`: each feature is looked up in its vocabulary.

    Text that is not in the vocabulary gives 0, as in `Featurizer.encode`. ONNX has no missing text: feed "" for it,
    which is 0 too, unless the log itself had "" as a category.
    """
    if not featurizer.categorical:
        return model
    assembly = _Assembly(_common_opset([model]))
    columns = []
    for place, feature in enumerate(featurizer.categorical):
        keys, values = feature.vocabulary or ("",), range(1, len(feature.vocabulary) + 1) or (0,)
        assembly.constant(f"place{place}", np.array([place]))
        assembly.node("Gather", ["categorical", f"place{place}"], f"text{place}", axis=1)
        columns.append(
            assembly.node(
                "LabelEncoder",
                [f"text{place}"],
                f"number{place}",
                domain=ML_DOMAIN,
                keys_strings=list(keys),
                values_int64s=list(values),
                default_int64=0,
            )
        )
    numbers = assembly.node("Concat", columns, "numbers", axis=1)
    sources = {value.name: value.name for value in model.graph.input} | {"categorical": numbers}
    table = assembly.add(model, "model_", sources)
    text = tensor_info("categorical", TensorProto.STRING, len(featurizer.categorical))
    inputs = [text if value.name == "categorical" else value for value in model.graph.input]
    return assembly.finish(table, inputs, model.graph.output[0])


class _Assembly:
    """A graph in the making."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """One more node; gives back the name of its output."""
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def add(self, model: onnx.ModelProto, prefix: str, sources: Mapping[str, str]) -> str:
        """All of another graph, its inputs fed from these names; gives back the name of its output."""
        if _opset(model) != self.opset:
            model = version_converter.convert_version(model, self.opset)
        part = compose.add_prefix(model, prefix).graph
        for name, source in sources.items():
            self.node("Identity", [source], prefix + name)
        self.nodes += part.node
        self.initializers += part.initializer
        return str(part.output[0].name)

    def mean(self, tables: Sequence[str]) -> str:
        """The log of the mean of tables in log space."""
        self.constant("first_axis", np.array([0]))
        self.constant("log_members", np.array(math.log(len(tables)), dtype=np.float32))
        layers = [self.node("Unsqueeze", [table, "first_axis"], f"layer_{table}") for table in tables]
        self.node("Concat", layers, "layers", axis=0)
        self.node("ReduceLogSumExp", ["layers", "first_axis"], "log_sum", keepdims=0)
        return self.node("Sub", ["log_sum", "log_members"], "log_mean")

    def finish(self, table: str, inputs: Sequence[onnx.ValueInfoProto], output: onnx.ValueInfoProto) -> onnx.ModelProto:
        """The graph whose output is this table."""
        self.node("Identity", [table], output.name)
        return build_model(self.nodes, inputs, output, self.initializers, self.opset)


def _opset(model: onnx.ModelProto) -> int:
    return int(max(entry.version for entry in model.opset_import if entry.domain == ""))


def _common_opset(models: Sequence[onnx.ModelProto]) -> int:
    """The newest of their versions, and of ours; the older ones are converted."""
    return max(OPSETS[""], *map(_opset, models))


def export_module(module: torch.nn.Module, example: Mapping[str, torch.Tensor], output: str) -> onnx.ModelProto:
    """The graph of a module that takes these tensors of two rows; input and output cannot have the same name."""
    rows = torch.export.Dim("rows")
    with _quiet():
        program = torch.onnx.export(
            copy.deepcopy(module).cpu().eval(),
            tuple(example.values()),
            dynamo=True,
            verbose=False,
            opset_version=OPSETS[""],
            input_names=list(example),
            output_names=[output],
            dynamic_shapes=tuple({0: rows} for _ in example),
            custom_translation_table={
                torch.ops.aten.log_sigmoid.default: _log_sigmoid,
                torch.ops.aten.log1p.default: _log1p,
            },
        )
    assert program is not None  # noqa: S101 - it is None without dynamo only
    graph = program.model_proto.graph
    # Built anew, without the paths and lines of source that the exporter notes at every node.
    for part in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return build_model(graph.node, graph.input, graph.output[0], graph.initializer)


def _log_sigmoid(x: Any) -> Any:
    """−softplus(−x). The exporter's own is log(sigmoid(x)), which ONNX Runtime gives as −∞ from x = −19 on."""
    return op.Neg(op.Softplus(op.Neg(x)))


def _log1p(x: Any) -> Any:
    """log(1 + x) in double precision. In single, as the exporter has it, a small x is lost beside the 1."""
    wide: Any = op.Cast(x, to=TensorProto.DOUBLE)
    one: Any = op.Constant(value=numpy_helper.from_array(np.array(1.0)))
    return op.CastLike(op.Log(op.Add(wide, one)), x)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the exporter, which speak of its own inside, and of packages that we do not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def scorer_to_onnx(scorer: NetworkScorer, featurizer: Featurizer) -> onnx.ModelProto:
    """The graph of a scorer: `numeric[rows, F]`, `categorical[rows, C]` and `value[rows]` to `score[rows]`."""
    example = {
        "numeric": torch.zeros(2, len(featurizer.numeric)),
        "categorical": torch.zeros(2, len(featurizer.categorical), dtype=torch.int64),
    }
    if scorer.takes_value:
        example["value"] = torch.ones(2)
    return with_raw_categories(export_module(scorer.network, example, "score"), featurizer)


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
