"""The trees of LightGBM as an ONNX graph that takes every branch as LightGBM does.

The operator is TreeEnsemble of ai.onnx.ml 5 in double precision, since LightGBM compares and sums in it. We do not use
onnxmltools, which rounds thresholds to float32 and reads missing values of all types alike.

The names and versions that all graphs share are here too, where torch is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from urank.errors import DataError

__all__ = ["INPUTS", "ML_DOMAIN", "OPSETS", "OUTPUT", "build_model", "tensor_info", "trees_to_onnx"]

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
