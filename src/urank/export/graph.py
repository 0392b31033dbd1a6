"""ONNX graphs of click models, scorers and whole ranking models, made by one builder.

    numeric[rows, F]      raw numbers, NaN where missing, then the within-list columns of the featurizer
    categorical[rows, C]  strings, "" where missing; or category codes, for systems without string tensors
    value[rows]           value of a click
    score[rows]           score to rank by, if the model has a scorer
    log_ctr[rows, K]      log P(click) at each position, or of conversions if they are the model's goal
    ctr1[rows]            value · that probability at position 1

`click_graph` and `scorer_graph` are the graphs of the saved artifact; `ranking_graph` is a whole model as one graph for
other systems.

Networks are translated by hand, one function for each module, in evaluation mode: dropout is the identity. A new family
needs an entry in `HEADS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn, ones
from torch.nn.functional import linear

from urank.clicks.calibration import FLOOR, HIGHEST, Calibration, Isotonic, Temperature, log_sigmoid
from urank.clicks.click_model import ClickModel, Member, NetworkClicks
from urank.clicks.conversion import ConversionRate
from urank.clicks.families import (
    DeepFMHead,
    FactorisedHead,
    Head,
    MonotoneHead,
    PALHead,
    PBMHead,
    PositionHead,
    VectorHead,
)
from urank.clicks.shrunk import ONE, ShrunkClicks
from urank.clicks.trees import GbdtClicks
from urank.errors import DataError
from urank.learning.features import Featurizer
from urank.learning.networks import (
    BackboneNetwork,
    DeepFM,
    FeatureLayer,
    FieldNetwork,
    Perceptron,
    ProductNetwork,
    ProductNetworkInNetwork,
)
from urank.ranking.ranking_model import RankingModel, Scorer
from urank.ranking.urank_network import NetworkScorer, ScoreNetwork
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
    builder.output(SCORE, _scores(builder, scorer, numeric, codes, value))
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
        builder.output(SCORE, _scores(builder, model.scorer, numeric, codes, value))
    table = _click_table(builder, clicks, numeric, codes)
    builder.output(LOG_CTR, table, clicks.positions)
    first = builder.node("Exp", builder.node("Gather", table, builder.constant(0), axis=1))
    builder.output(CTR1, builder.node("Mul", first, value))
    return builder.build()


def _raw_features(
    builder: GraphBuilder, featurizer: Featurizer, categories: Categories, *, omit_empty: bool = False
) -> tuple[str, str]:
    """Declare the inputs of the features; return the tensors `[rows, F]` of numbers and `[rows, C]` of codes."""
    F, C = len(featurizer.inputs), len(featurizer.categorical)
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
    tables = [_member_table(builder, member, numeric, codes) for member in clicks.members]
    table = tables[0]
    if len(tables) > 1:
        axis = builder.constant([0])
        layers = builder.node("Concat", *(builder.node("Unsqueeze", table, axis) for table in tables), axis=0)
        total = builder.node("ReduceLogSumExp", layers, axis, keepdims=0)
        table = builder.node("Sub", total, builder.scalar(math.log(len(tables))))
    table = _calibrated(builder, clicks.calibration, table)
    if clicks.conversion is None:
        return table
    return builder.node("Add", table, _log_conversion_rate(builder, clicks.conversion, numeric, codes))


def _log_conversion_rate(builder: GraphBuilder, rate: ConversionRate, numeric: str, codes: str) -> str:
    logits = builder.affine(_feature_layer(builder, rate.features, numeric), rate.weight, rate.bias)
    for place, weights in enumerate(rate.categories):
        logits = builder.node("Add", logits, builder.embedding(codes, place, weights))
    return builder.log_sigmoid(logits)


def _member_table(builder: GraphBuilder, member: Member, numeric: str, codes: str) -> str:
    if isinstance(member, GbdtClicks):
        return _tree_table(builder, member, numeric, codes)
    if isinstance(member, NetworkClicks):
        return _translation(HEADS, member.network)(builder, member.network, numeric, codes)
    if isinstance(member, ShrunkClicks):
        return _shrunk_table(builder, member, numeric, codes)
    raise TypeError(f"a member must be a network or trees; got {type(member).__name__}")


def _shrunk_table(builder: GraphBuilder, member: ShrunkClicks, numeric: str, codes: str) -> str:
    network = member.network
    scaled = _feature_layer(builder, network.features, numeric)
    width, columns = network.features.width, len(network.features.mean)
    rest = [builder.columns(scaled, columns, width)] if width > columns else []
    rest += [builder.embedding(codes, place, table) for place, table in enumerate(network.embeddings.parameters())]
    outputs = []
    for end, module in zip((network.raw, network.compared), network.networks, strict=False):
        parts = ([builder.columns(scaled, 0, end)] if end else []) + rest
        outputs.append(builder.sequential(builder.concat(*parts), module.children()))
    both = outputs[0] if len(outputs) == 1 else builder.node("Mean", *outputs)
    relevance, slope = builder.columns(both, 0, 1), builder.columns(both, 1, 2)
    of_list = builder.node("Gather", scaled, builder.constant(np.array(network.list_columns, dtype=np.int64)), axis=1)
    level = builder.affine(of_list, network.list_weights[None, :-1], network.list_weights[-1:])
    raw = [builder.columns(numeric, 0, network.compared)] if network.compared else []
    rows = builder.node("Concat", *(builder.cast(each, DOUBLE) for each in (*raw, codes)), axis=1)
    trees = builder.cast(builder.trees([each.booster.dump_model() for each in member.trees], rows), FLOAT)
    by_network, by_trees, intercept = network.weights.tolist()
    stacked = builder.node("Mul", relevance, builder.scalar(by_network))
    stacked = builder.node("Add", stacked, builder.node("Mul", trees, builder.scalar(by_trees / len(member.trees))))
    stacked = builder.node("Add", stacked, builder.scalar(intercept + float(network.bias.detach())))
    deviation = builder.node("Mul", builder.node("Sub", slope, level), builder.scalar(float(network.alpha)))
    shrunk = builder.node("Add", builder.node("Add", level, deviation), builder.scalar(ONE))
    slope = builder.node("Softplus", shrunk)
    common, curve = (each.detach() for each in network.curves())
    centre = builder.scalar(float(network.shares @ curve))
    shifted = builder.node("Mul", builder.node("Sub", slope, builder.scalar(1.0)), centre)
    top = builder.log_sigmoid(builder.node("Add", stacked, shifted))
    table = builder.node("Sub", top, builder.node("Mul", slope, builder.constant(curve[None])))
    if network.rising:
        return table
    return builder.node("Min", builder.node("Sub", table, builder.constant(common[None])), builder.scalar(0.0))


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
    sums = builder.trees([trees.booster.dump_model()], rows)
    raw = builder.node("Reshape", sums, builder.constant([-1, K]))
    # log σ(x) = min(x, 0) − log(1 + exp(−|x|))
    small = builder.node("Exp", builder.node("Neg", builder.node("Abs", raw)))
    rest = builder.node("Log", builder.node("Add", small, builder.constant(1.0)))
    table = builder.node("Sub", builder.node("Min", raw, builder.constant(0.0)), rest)
    return builder.cast(table, FLOAT)


def _scores(builder: GraphBuilder, scorer: Scorer, numeric: str, codes: str, value: str | None) -> str:
    """Compute `score[rows]`; `value` is only read by scorers trained on values."""
    values = value if scorer.takes_value else None
    if isinstance(scorer, TreesScorer):
        axis = builder.constant([1])
        columns = [builder.cast(numeric, DOUBLE), builder.cast(codes, DOUBLE)]
        columns += [] if values is None else [builder.node("Unsqueeze", builder.cast(values, DOUBLE), axis)]
        sums = builder.trees([scorer.booster.dump_model()], builder.node("Concat", *columns, axis=1))
        return builder.cast(builder.node("Squeeze", sums, axis), FLOAT)
    if isinstance(scorer, NetworkScorer):
        return _score_network(builder, scorer.network, numeric, codes, values)
    raise TypeError(f"a scorer must be a network or trees; got {type(scorer).__name__}")


def _score_network(builder: GraphBuilder, network: ScoreNetwork, numeric: str, codes: str, value: str | None) -> str:
    made = _backbone(builder, network.backbone, numeric, codes)
    if network.scale is not None:
        assert value is not None  # noqa: S101 - required if the scorer takes values
        column = builder.node("Unsqueeze", value, builder.constant([1]))
        made = builder.concat(made, _feature_layer(builder, network.scale, column))
    if network.mix is not None:
        made = builder.node("Relu", builder.linear(made, network.mix))
    return builder.node("Squeeze", builder.linear(made, network.output), builder.constant([1]))


# Networks: each function takes the module whose `forward` it translates.


def _feature_layer(builder: GraphBuilder, layer: FeatureLayer, numeric: str) -> str:
    """Standardise numbers. log(1 + |x|) is computed in double: in single precision a small x is lost beside the 1."""
    missing = builder.node("IsNaN", numeric)
    shifted = builder.node("Add", builder.cast(builder.node("Abs", numeric), DOUBLE), builder.constant(1.0))
    size = builder.cast(builder.node("Log", shifted), FLOAT)
    compressed = builder.node("Mul", builder.node("Sign", numeric), size)
    centred = builder.node("Sub", compressed, builder.constant(layer.mean))
    scaled = builder.clip(builder.node("Div", centred, builder.constant(layer.std)), -8.0, 8.0)
    known = builder.node("Where", missing, builder.scalar(0.0), scaled)
    if len(layer.indicated) == 0:
        return known
    indicators = builder.node("Gather", missing, builder.constant(layer.indicated), axis=1)
    return builder.concat(known, builder.cast(indicators, FLOAT))


def _backbone(builder: GraphBuilder, module: BackboneNetwork, numeric: str, codes: str) -> str:
    """Compute the features `[rows, width]` behind the last hidden layer."""
    return _translation(BACKBONES, module)(builder, module, numeric, codes)


def _perceptron(builder: GraphBuilder, module: Perceptron, numeric: str, codes: str) -> str:
    return builder.sequential(_concatenated(builder, module, numeric, codes), module.layers)


def _concatenated(builder: GraphBuilder, module: Perceptron, numeric: str, codes: str) -> str:
    parts = [_feature_layer(builder, module.features, numeric)]
    parts += [builder.embedding(codes, place, table) for place, table in enumerate(module.embeddings.parameters())]
    return builder.concat(*parts)


def _deepfm(builder: GraphBuilder, module: DeepFM, numeric: str, codes: str) -> str:
    fields, wide = _fields(builder, module, numeric, codes), _wide(builder, module, numeric, codes)
    deep = builder.sequential(builder.node("Flatten", fields), module.layers)
    return builder.concat(deep, _pairwise(builder, fields), wide)


def _product_network(builder: GraphBuilder, module: ProductNetwork, numeric: str, codes: str) -> str:
    fields = _fields(builder, module, numeric, codes)
    summed = _weighted_sums(builder, fields, module.theta)
    first = builder.affine(builder.node("Flatten", fields), *module.layers[0].parameters())
    first = builder.node("Add", first, _sum_of_squares(builder, summed))
    return builder.sequential(first, list(module.layers)[1:])


def _network_in_network(builder: GraphBuilder, module: ProductNetworkInNetwork, numeric: str, codes: str) -> str:
    fields = _fields(builder, module, numeric, codes)
    return builder.sequential(_subnetworks(builder, module, numeric, fields, module.n_fields), module.layers)


def _subnetworks(
    builder: GraphBuilder, module: ProductNetworkInNetwork, numeric: str, fields: str, n_fields: int
) -> str:
    """Compute the outputs of all sub-networks of the first fields, `[rows, pairs · width]`."""
    parts, start = [], len(module.left)
    if start:
        scaled = builder.node("Unsqueeze", _feature_layer(builder, module.features, numeric), builder.constant([2]))
        x, y = (builder.node("Gather", scaled, builder.constant(each), axis=1) for each in (module.left, module.right))
        a, b, c = map(builder.constant, module.number_pairs())
        by_x = builder.node("Mul", x, builder.node("Add", a, builder.node("Mul", y, c)))
        by_y = builder.node("Add", builder.node("Mul", y, b), builder.constant(module.bias[:start]))
        parts.append(builder.node("Add", by_x, by_y))
    for place in range(module.features.width, n_fields):
        if place == 0:
            continue
        others = builder.columns(fields, 0, place)
        own = builder.node("Mul", builder.columns(fields, place, place + 1), builder.constant(ones(place, 1)))
        inputs = builder.concat(others, own, builder.node("Mul", others, own), axis=2)
        pairs = slice(start, start + place)
        units = builder.node("Einsum", inputs, builder.constant(module.weight[pairs]), equation="rpi,pis->rps")
        parts.append(builder.node("Add", units, builder.constant(module.bias[pairs])))
        start += place
    return builder.node("Flatten", builder.node("Relu", builder.concat(*parts)))


# With each category of the last field in turn, `[rows, N, width]`: `for_each_last` of each backbone.


def _each(builder: GraphBuilder, tensor: str, operator: str, by_category: Tensor) -> str:
    """Combine a tensor `[rows, …]` with one of each category `[N, …]` to `[rows, N, …]`."""
    row = builder.node("Unsqueeze", tensor, builder.constant([1]))
    return builder.node(operator, row, builder.constant(by_category))


def _perceptron_for_each_last(builder: GraphBuilder, module: Perceptron, numeric: str, codes: str) -> str:
    weight, bias = module.layers[0].parameters()
    before = weight.shape[1] - module.one_hot
    shared = builder.affine(_concatenated(builder, module, numeric, codes), weight[:, :before], bias)
    return builder.sequential(_each(builder, shared, "Add", weight[:, before:].T), list(module.layers)[1:])


def _deepfm_for_each_last(builder: GraphBuilder, module: DeepFM, numeric: str, codes: str) -> str:
    fields = _fields(builder, module, numeric, codes, but_last=True)
    wide = _wide(builder, module, numeric, codes, but_last=True)
    (last,), (last_wide,) = module.embeddings[-1].parameters(), module.wide_categories[-1].parameters()
    weight, bias = module.layers[0].parameters()
    known, before = last[1:], weight.shape[1] - last.shape[1]
    axis = builder.constant([1])
    shared = builder.affine(builder.node("Flatten", fields), weight[:, :before], bias)
    first = _each(builder, shared, "Add", linear(known, weight[:, before:]))
    total = builder.node("ReduceSum", fields, axis, keepdims=0)
    pairs = builder.node("Unsqueeze", _pairwise(builder, fields), axis)
    pairs = builder.node("Add", pairs, _each(builder, total, "Mul", known))
    deep = builder.sequential(first, list(module.layers)[1:])
    return builder.concat(deep, pairs, _each(builder, wide, "Add", last_wide[1:]), axis=2)


def _product_network_for_each_last(builder: GraphBuilder, module: ProductNetwork, numeric: str, codes: str) -> str:
    fields = _fields(builder, module, numeric, codes, but_last=True)
    (last,), (weight, bias) = module.embeddings[-1].parameters(), module.layers[0].parameters()
    known, before, theta = last[1:], weight.shape[1] - last.shape[1], module.theta
    summed = _weighted_sums(builder, fields, theta[:, :-1])
    crossed = builder.node("Einsum", summed, builder.constant(2 * known), equation="rnw,kw->rkn")
    crossed = builder.node("Mul", crossed, builder.constant(theta[:, -1]))
    own = (known**2).sum(dim=1, keepdim=True) * theta[:, -1] ** 2 + linear(known, weight[:, before:])
    shared = builder.affine(builder.node("Flatten", fields), weight[:, :before], bias)
    shared = builder.node("Add", shared, _sum_of_squares(builder, summed))
    first = builder.node("Add", _each(builder, shared, "Add", own), crossed)
    return builder.sequential(first, list(module.layers)[1:])


def _network_in_network_for_each_last(
    builder: GraphBuilder, module: ProductNetworkInNetwork, numeric: str, codes: str
) -> str:
    fields, others = _fields(builder, module, numeric, codes, but_last=True), module.n_fields - 1
    of_field, by_category, of_products = module.last_pairs()
    alone = builder.node("Einsum", fields, builder.constant(of_field), equation="rfw,fws->rfs")
    crossed = builder.node("Einsum", fields, builder.constant(of_products), equation="rfw,kfws->rkfs")
    units = builder.node("Relu", builder.node("Add", _each(builder, alone, "Add", by_category), crossed))
    K, _, width = by_category.shape
    pairs = builder.node("Reshape", units, builder.constant([-1, K, others * width]))
    weight, bias = module.layers[0].parameters()
    before = weight.shape[1] - others * width
    first = builder.affine(pairs, weight[:, before:], bias)
    if before:  # not every runtime multiplies matrices of width 0
        shared = _subnetworks(builder, module, numeric, fields, others)
        shared = builder.node("MatMul", shared, builder.constant(weight[:, :before].T))
        first = builder.node("Add", first, builder.node("Unsqueeze", shared, builder.constant([1])))
    return builder.sequential(first, list(module.layers)[1:])


def _fields(builder: GraphBuilder, module: FieldNetwork, numeric: str, codes: str, *, but_last: bool = False) -> str:
    """Compute the embeddings `[rows, fields, width]` of numbers and categories."""
    fields = []
    if module.features.width:
        column = builder.node("Unsqueeze", _feature_layer(builder, module.features, numeric), builder.constant([2]))
        fields.append(builder.node("Mul", column, builder.constant(module.directions)))
    tables = list(module.embeddings.parameters())
    for place, table in enumerate(tables[:-1] if but_last else tables):
        fields.append(builder.node("Unsqueeze", builder.embedding(codes, place, table), builder.constant([1])))
    return builder.concat(*fields)


def _wide(builder: GraphBuilder, module: DeepFM, numeric: str, codes: str, *, but_last: bool = False) -> str:
    """Compute the wide sum `[rows, 1]`."""
    terms = []
    if module.features.width:  # not every runtime multiplies matrices of width 0
        scaled = _feature_layer(builder, module.features, numeric)
        terms.append(builder.node("MatMul", scaled, builder.constant(module.wide)))
    weights = list(module.wide_categories.parameters())
    for place, table in enumerate(weights[:-1] if but_last else weights):
        terms.append(builder.embedding(codes, place, table))
    return builder.node("Sum", *terms)


def _weighted_sums(builder: GraphBuilder, fields: str, weights: Tensor) -> str:
    """Sum fields `[rows, fields, width]` with weights `[n, fields]`, `[rows, n, width]`."""
    return builder.node("Einsum", fields, builder.constant(weights), equation="rfw,nf->rnw")


def _sum_of_squares(builder: GraphBuilder, tensor: str) -> str:
    """Sum the squares `[rows, n]` of `[rows, n, width]`."""
    return builder.node("ReduceSum", builder.node("Mul", tensor, tensor), builder.constant([2]), keepdims=0)


def _pairwise(builder: GraphBuilder, fields: str) -> str:
    """Compute ½((Σv)² − Σv²), `[rows, width]`, of fields `[rows, fields, width]`."""
    axis = builder.constant([1])
    total = builder.node("ReduceSum", fields, axis, keepdims=0)
    squares = builder.node("ReduceSum", builder.node("Mul", fields, fields), axis, keepdims=0)
    return builder.node("Mul", builder.node("Sub", builder.node("Mul", total, total), squares), builder.scalar(0.5))


BACKBONES: dict[type[nn.Module], Callable[[GraphBuilder, Any, str, str], str]] = {
    Perceptron: _perceptron,
    DeepFM: _deepfm,
    ProductNetwork: _product_network,
    ProductNetworkInNetwork: _network_in_network,
}
"""Functions of the builder, the module, and the tensors of numbers and codes; they return `[rows, width]`."""

EACH_LAST: dict[type[nn.Module], Callable[[GraphBuilder, Any, str, str], str]] = {
    Perceptron: _perceptron_for_each_last,
    DeepFM: _deepfm_for_each_last,
    ProductNetwork: _product_network_for_each_last,
    ProductNetworkInNetwork: _network_in_network_for_each_last,
}
"""The same for their `for_each_last`, which returns `[rows, N, width]`."""


def _outputs(builder: GraphBuilder, head: Head, numeric: str, codes: str) -> str:
    """Compute the outputs of the linear layer behind the backbone."""
    return builder.linear(_backbone(builder, head.backbone, numeric, codes), head.output)


def _vector(builder: GraphBuilder, head: VectorHead, numeric: str, codes: str) -> str:
    return builder.log_sigmoid(_outputs(builder, head, numeric, codes))


def _factorised(builder: GraphBuilder, head: FactorisedHead, numeric: str, codes: str) -> str:
    both = builder.log_sigmoid(_outputs(builder, head, numeric, codes))
    relevance, examination = builder.columns(both, 0, 1), builder.columns(both, 1, head.positions)
    return builder.concat(relevance, builder.node("Add", relevance, examination))


def _monotone(builder: GraphBuilder, head: MonotoneHead, numeric: str, codes: str) -> str:
    outputs = _outputs(builder, head, numeric, codes)
    relevance = builder.log_sigmoid(builder.columns(outputs, 0, 1))
    slope = builder.node("Softplus", builder.columns(outputs, 1, 2))
    return builder.node("Sub", relevance, builder.node("Mul", slope, builder.constant(head.curve())))


def _pbm(builder: GraphBuilder, head: PBMHead, numeric: str, codes: str) -> str:
    relevance = builder.log_sigmoid(builder.columns(_outputs(builder, head, numeric, codes), 0, 1))
    return builder.node("Sub", relevance, builder.constant(head.curve()))


def _pal(builder: GraphBuilder, head: PALHead, numeric: str, codes: str) -> str:
    relevance = builder.log_sigmoid(_outputs(builder, head, numeric, codes))
    return builder.node("Add", relevance, builder.constant(log_sigmoid(head.seen)))


def _position(builder: GraphBuilder, head: PositionHead, numeric: str, codes: str) -> str:
    made = _translation(EACH_LAST, head.backbone)(builder, head.backbone, numeric, codes)
    return builder.log_sigmoid(builder.node("Squeeze", builder.linear(made, head.output), builder.constant([2])))


HEADS: dict[type[nn.Module], Callable[[GraphBuilder, Any, str, str], str]] = {
    VectorHead: _vector,
    FactorisedHead: _factorised,
    MonotoneHead: _monotone,
    PBMHead: _pbm,
    PALHead: _pal,
    PositionHead: _position,
    DeepFMHead: _position,
}
"""Functions of the builder, the head, and the tensors of numbers and codes; they return `log_ctr[rows, K]`."""


def _calibrated(builder: GraphBuilder, calibration: Calibration, table: str) -> str:
    if calibration.kind == "none":
        return table
    curve = _translation(CURVES, calibration)(builder, calibration, table)
    return _running_minimum(builder, curve, calibration.positions) if calibration.monotone else curve


def _temperature(builder: GraphBuilder, calibration: Temperature, table: str) -> str:
    log_p = builder.node("Min", table, builder.scalar(HIGHEST))
    half = builder.node("Tanh", builder.node("Div", log_p, builder.scalar(-2.0)))
    odds = builder.node("Sub", builder.node("Sub", log_p, builder.node("Log", half)), builder.node("Softplus", log_p))
    scaled = builder.node("Mul", builder.constant(calibration.slope), odds)
    return builder.log_sigmoid(builder.node("Add", scaled, builder.constant(calibration.intercept)))


def _isotonic(builder: GraphBuilder, calibration: Isotonic, table: str) -> str:
    axis = builder.constant([2])
    p = builder.node("Unsqueeze", builder.node("Exp", table), axis)
    past = builder.node("Sub", p, builder.constant(calibration.start))
    ramps = builder.clip(builder.node("Div", past, builder.constant(calibration.width)), 0.0, 1.0)
    rises = builder.node("Mul", builder.constant(calibration.rise), ramps)
    return builder.node("Log", builder.clip(builder.node("ReduceSum", rises, axis, keepdims=0), FLOOR, 1 - FLOOR))


CURVES: dict[type[nn.Module], Callable[[GraphBuilder, Any, str], str]] = {
    Temperature: _temperature,
    Isotonic: _isotonic,
}
"""Functions of the builder, the calibration and the table `[rows, K]`; they return the table before monotonicity."""


def _running_minimum(builder: GraphBuilder, table: str, positions: int) -> str:
    """Compute the running minimum of each row by doubling: after each step, an entry covers twice as many positions."""
    covered = 1
    while covered < positions:
        earlier, later = builder.columns(table, 0, positions - covered), builder.columns(table, covered, positions)
        table = builder.concat(builder.columns(table, 0, covered), builder.node("Min", earlier, later))
        covered *= 2
    return table


Translation = TypeVar("Translation")


def _translation(known: Mapping[type[nn.Module], Translation], module: nn.Module) -> Translation:
    """Look up a module by its exact type: a subclass may compute something else."""
    if type(module) not in known:
        names = ", ".join(sorted(each.__name__ for each in known))
        raise TypeError(f"a network for ONNX must be one of {names}; got {type(module).__name__}")
    return known[type(module)]


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

    def constant(self, value: ArrayLike | Tensor) -> str:
        """Add an array as it is: Python numbers are double or int64, weights of networks keep their dtype."""
        array = value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
        name = f"constant_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(array, name))
        return name

    def scalar(self, value: float) -> str:
        """Add a number in single precision."""
        return self.constant(np.float32(value))

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

    def concat(self, *tensors: str, axis: int = 1) -> str:
        return self.node("Concat", *tensors, axis=axis)

    def columns(self, tensor: str, start: int, end: int) -> str:
        """Slice the columns from `start` to before `end`."""
        return self.node("Slice", tensor, *(self.constant([number]) for number in (start, end, 1)))

    def clip(self, tensor: str, low: float, high: float) -> str:
        return self.node("Clip", tensor, self.scalar(low), self.scalar(high))

    def log_sigmoid(self, tensor: str) -> str:
        """Compute −softplus(−x): log(sigmoid(x)) is −∞ in ONNX Runtime from x = −19 on."""
        return self.node("Neg", self.node("Softplus", self.node("Neg", tensor)))

    def embedding(self, codes: str, place: int, table: Tensor) -> str:
        """Look up the rows `[rows, width]` of an embedding table by one column of the codes `[rows, C]`."""
        return self.node("Gather", self.constant(table), self.node("Gather", codes, self.constant(place), axis=1))

    def affine(self, tensor: str, weight: Tensor, bias: Tensor) -> str:
        """Compute x Wᵀ + b over the last axis, whatever the number of axes."""
        return self.node("Add", self.node("MatMul", tensor, self.constant(weight.T)), self.constant(bias))

    def linear(self, tensor: str, layer: nn.Linear) -> str:
        return self.affine(tensor, layer.weight, layer.bias)

    def sequential(self, tensor: str, layers: Iterable[nn.Module]) -> str:
        """Apply linear layers, ReLU and dropout in turn, as in `networks.hidden_layers`."""
        for layer in layers:
            if isinstance(layer, nn.Linear):
                tensor = self.linear(tensor, layer)
            elif isinstance(layer, nn.ReLU):
                tensor = self.node("Relu", tensor)
            elif not isinstance(layer, nn.Dropout):
                raise TypeError(f"a layer must be linear, ReLU or dropout; got {type(layer).__name__}")
        return tensor

    def trees(self, dumps: Iterable[Mapping[str, Any]], rows: str) -> str:
        """Sum the trees of all `Booster.dump_model`, double `[rows, 1]`, over rows, double `[rows, columns]`."""
        ensemble = _TreeEnsemble()
        for tree in (tree for dump in dumps for tree in dump["tree_info"]):
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
