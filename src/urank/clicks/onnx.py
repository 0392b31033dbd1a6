"""Click models as ONNX graphs: `numeric` and `categorical` in, `log_ctr` out, one graph for a whole ensemble.

Graphs are put together by giving every name in a part a prefix of its own and joining the parts with Identity nodes,
which a runtime takes out again.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, compose, helper, numpy_helper, version_converter
from onnxscript import opset20 as op

from urank.clicks.gbdt import GbdtClicks, to_onnx
from urank.clicks.model import ClickModel, Member, NetworkClicks
from urank.clicks.tree_onnx import ML_DOMAIN, OPSETS, OUTPUT, build_model, tensor_info
from urank.features import Featurizer

__all__ = ["calibration_to_onnx", "combine", "export_module", "model_to_onnx", "network_to_onnx", "with_raw_categories"]


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
