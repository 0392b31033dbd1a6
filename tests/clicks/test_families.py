"""Each family keeps its promise: log space, shape, monotone where it says so, right where it is well specified."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from urank.clicks.click_settings import ClickFamily, NetworkFamily
from urank.clicks.families import Head, build_network, click_loss, log1m_exp
from urank.errors import ConfigError
from urank.learning.features import Categorical, Featurizer, Numeric
from urank.learning.networks import embedding_width
from urank.learning.training import seeded
from urank.learning.training_settings import Backbone

K = 7
FEATURIZER = Featurizer(
    numeric=(Numeric("a", 0.0, 1.0, True), Numeric("b", 1.0, 2.0, False)),
    categorical=(Categorical("c", ("x", "y")),),
)
NUMBERS, CATEGORIES = Featurizer(FEATURIZER.numeric, ()), Featurizer((), FEATURIZER.categorical)
FAMILIES: tuple[str, ...] = get_args(NetworkFamily)


def network(family: str, backbone: str = "mlp", seed: int = 0) -> Head:
    with seeded(seed):
        return build_network(family, FEATURIZER, K, backbone=backbone).eval()  # type: ignore[arg-type]


def inputs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    numeric = (10 * rng.normal(size=(rows, 2))).astype(np.float32)
    numeric[rng.random((rows, 2)) < 0.2] = np.nan
    return torch.from_numpy(numeric), torch.from_numpy(rng.integers(0, 3, (rows, 1)))


@pytest.mark.parametrize(("family", "backbone"), list(product(FAMILIES, get_args(Backbone))))
def test_contract(family: str, backbone: str) -> None:
    model = network(family, backbone)
    numeric, categorical = inputs(50)
    with torch.inference_mode():
        table = model(numeric, categorical)
        assert table.shape == (50, K)
        assert torch.isfinite(table).all()
        assert (table < 0).all()
        position = torch.from_numpy(np.random.default_rng(1).integers(1, K + 1, 50))
        item = torch.from_numpy(np.random.default_rng(2).integers(0, 50, 50))
        at = model.at(numeric, categorical, item, position)
        torch.testing.assert_close(at, table[item, position - 1])
        torch.testing.assert_close(model(numeric[3:4], categorical[3:4]), table[3:4])  # a batch is its rows
        assert torch.equal(network(family, backbone)(numeric, categorical), table)  # the same seed, the same network
        assert not torch.equal(network(family, backbone, seed=1)(numeric, categorical), table)


@pytest.mark.parametrize("family", ["monotone", "pbm"])
@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 30))
def test_never_rises_by_construction(family: str, seed: int, scale: float) -> None:
    model = network(family)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(scale * rng.normal(size=parameter.shape).astype(np.float32)))
    with torch.inference_mode():
        table = model(*inputs(20, seed))
    assert (table[:, 1:] <= table[:, :-1]).all()


def test_pbm_has_one_curve_and_monotone_has_many() -> None:
    with torch.inference_mode():
        for family, one in (("pbm", True), ("monotone", False)):
            table = network(family)(*inputs(30))
            falls = table - table[:, :1]
            assert torch.allclose(falls, falls[:1].expand_as(falls), atol=1e-6) == one


def test_curves_start_as_one_over_k() -> None:
    curve = network("pbm").curve()  # type: ignore[operator]
    torch.testing.assert_close(curve, torch.log(torch.arange(1.0, K + 1)), atol=1e-5, rtol=1e-5)


def test_factorised_is_relevance_times_examination() -> None:
    model = network("factorised")
    outputs = torch.randn(5, K, generator=torch.Generator().manual_seed(0))
    probabilities = torch.sigmoid(outputs)
    expected = torch.cat([probabilities[:, :1], probabilities[:, :1] * probabilities[:, 1:]], dim=1)
    torch.testing.assert_close(torch.exp(model.table(outputs)), expected)


def test_pal_is_seen_times_clicked_if_seen() -> None:
    model = network("pal")
    with torch.no_grad():
        model.seen.copy_(torch.linspace(-2, 2, K))  # type: ignore[union-attr, operator]
    outputs = torch.randn(5, 1, generator=torch.Generator().manual_seed(0))
    seen = 1 / (1 + torch.exp(-torch.linspace(-2, 2, K)))
    torch.testing.assert_close(torch.exp(model.table(outputs)), seen / (1 + torch.exp(-outputs)))
    assert "seen" in model.fast_parameters()


DEEP = 16  # as many of the numbers that the linear layer reads are the deep part; pairs follow, the wide sum is last


def deepfm(featurizer: Featurizer) -> Any:
    """A DeepFM in double precision with weights far from zero everywhere; the wide ones start at zero otherwise."""
    with seeded(0), torch.no_grad():
        model = build_network("deepfm", featurizer, K, hidden=(32, DEEP)).double().eval()
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        model.output.weight[:, -1] = 1
    return model


def some_of(featurizer: Featurizer, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    numeric, categorical = inputs(rows)
    return numeric[:, : len(featurizer.numeric)].double(), categorical[:, : len(featurizer.categorical)]


def logits(model: Any, numeric: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
    log_p = model(numeric, categorical)
    return log_p - log1m_exp(log_p)


def field_vectors(model: Any, numeric: torch.Tensor, numerals: list[int]) -> list[torch.Tensor]:
    """The embedding `[width]` of each field of one row: numbers, indicators, categories, and the position if given."""
    scaled, tables = model.backbone.features(numeric[None])[0], model.backbone.embeddings
    numbers = [value * direction for value, direction in zip(scaled, model.backbone.directions, strict=True)]
    return numbers + [tables[place].weight[number] for place, number in enumerate(numerals)]


@torch.no_grad()
@pytest.mark.parametrize("featurizer", [FEATURIZER, NUMBERS, CATEGORIES])
def test_deepfm_is_deep_and_pairs_and_wide(featurizer: Featurizer) -> None:
    model, (numeric, categorical) = deepfm(featurizer), some_of(featurizer, 4)
    table = logits(model, numeric, categorical)
    weights, bias = model.output.weight[0], model.output.bias[0]
    for row, position in product(range(4), range(1, K + 1)):
        numerals = [*categorical[row].tolist(), position]
        vectors = field_vectors(model, numeric[row], numerals)
        deep = model.backbone.layers(torch.cat(vectors))
        pairs = sum(vectors[i] * vectors[j] for i in range(len(vectors)) for j in range(i))
        wide = model.backbone.features(numeric[row, None])[0] @ model.backbone.wide[:, 0]
        wide += sum(model.backbone.wide_categories[place].weight[n, 0] for place, n in enumerate(numerals))
        expected = weights[:DEEP] @ deep + weights[DEEP:-1] @ pairs + wide + bias
        torch.testing.assert_close(table[row, position - 1], expected)


@torch.no_grad()
def test_deepfm_pairs_the_position_with_every_feature() -> None:
    model, (numeric, categorical) = deepfm(FEATURIZER), some_of(FEATURIZER, 12)
    model.output.weight[:, :DEEP] = 0
    table = logits(model, numeric, categorical)
    falls = table - table[:, :1]
    totals = [sum(field_vectors(model, numeric[row], categorical[row].tolist())) for row in range(12)]
    places = model.backbone.embeddings[-1].weight[1:]
    weights = torch.stack(totals) * model.output.weight[0, DEEP:-1]  # type: ignore[arg-type]
    torch.testing.assert_close(falls - falls[0], (weights - weights[0]) @ (places - places[0]).T)
    assert (falls - falls[0]).abs().max() > 0.1
    model.output.weight[:, DEEP:-1] = 0  # what is left, the wide part, has one curve for all
    table = logits(model, numeric, categorical)
    curve = model.backbone.wide_categories[-1].weight[1:, 0]
    torch.testing.assert_close(table - table[:, :1], (curve - curve[0]).expand(12, K))


def random_weights(model: Head) -> Any:
    """The network in double precision with weights far from zero everywhere."""
    with seeded(1), torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("featurizer", [FEATURIZER, NUMBERS])
def test_a2_reads_features_and_one_hot_position_at_the_input(featurizer: Featurizer) -> None:
    """RQ2: a plain network on the concatenation of both, written out; the position is no embedding."""
    model = random_weights(build_network("position", featurizer, K, hidden=(32, DEEP)))
    numeric, categorical = some_of(featurizer, 4)
    embedded = sum(map(embedding_width, featurizer.cardinalities))
    (first, second) = (layer for layer in model.backbone.layers if isinstance(layer, torch.nn.Linear))
    assert first.in_features == model.backbone.features.width + embedded + K
    table = logits(model, numeric, categorical)
    for row, position in product(range(4), range(1, K + 1)):
        item = [model.backbone.features(numeric[row, None])[0]]
        item += [model.backbone.embeddings[place].weight[code] for place, code in enumerate(categorical[row])]
        one_hot = torch.tensor([float(k == position) for k in range(1, K + 1)])
        hidden = torch.relu(first.weight @ torch.cat([*item, one_hot]) + first.bias)
        hidden = torch.relu(second.weight @ hidden + second.bias)
        torch.testing.assert_close(table[row, position - 1], model.output.weight[0] @ hidden + model.output.bias[0])


@torch.no_grad()
@pytest.mark.parametrize("featurizer", [FEATURIZER, NUMBERS, CATEGORIES])
def test_pnn_adds_the_products_of_all_pairs_to_the_first_layer(featurizer: Featurizer) -> None:
    """Qu et al. 2016: Σ_i Σ_j θ_i θ_j ⟨v_i, v_j⟩ of every unit, by the double sum, with the position as a field."""
    model = random_weights(build_network("position", featurizer, K, backbone="pnn", hidden=(6, DEEP)))
    numeric, categorical = some_of(featurizer, 3)
    (first, second) = (layer for layer in model.backbone.layers if isinstance(layer, torch.nn.Linear))
    table = logits(model, numeric, categorical)
    for row, position in product(range(3), range(1, K + 1)):
        vectors = field_vectors(model, numeric[row], [*categorical[row].tolist(), position])
        units = first.weight @ torch.cat(vectors) + first.bias
        for n, (i, v), (j, w) in product(range(6), enumerate(vectors), enumerate(vectors)):
            units[n] += model.backbone.theta[n, i] * model.backbone.theta[n, j] * (v @ w)
        hidden = torch.relu(second.weight @ torch.relu(units) + second.bias)
        torch.testing.assert_close(table[row, position - 1], model.output.weight[0] @ hidden + model.output.bias[0])


@torch.no_grad()
@pytest.mark.parametrize("featurizer", [FEATURIZER, NUMBERS, CATEGORIES])
def test_pin_has_a_network_for_each_pair_of_fields(featurizer: Featurizer) -> None:
    """Qu et al. 2018: ReLU(W (v_i, v_j, v_i ∘ v_j) + b) of each pair, one by one, with the position as a field."""
    model = random_weights(build_network("position", featurizer, K, backbone="pin", hidden=(6, DEEP)))
    numeric, categorical = some_of(featurizer, 3)
    (first, second) = (layer for layer in model.backbone.layers if isinstance(layer, torch.nn.Linear))
    table = logits(model, numeric, categorical)
    for row, position in product(range(3), range(1, K + 1)):
        vectors = field_vectors(model, numeric[row], [*categorical[row].tolist(), position])
        pairs = [(i, j) for j in range(len(vectors)) for i in range(j)]
        assert len(pairs) == len(model.backbone.weight)
        outputs = [
            torch.relu(torch.cat([vectors[i], vectors[j], vectors[i] * vectors[j]]) @ weight + bias)
            for (i, j), weight, bias in zip(pairs, model.backbone.weight, model.backbone.bias, strict=True)
        ]
        hidden = torch.relu(first.weight @ torch.cat(outputs) + first.bias)
        hidden = torch.relu(second.weight @ hidden + second.bias)
        torch.testing.assert_close(table[row, position - 1], model.output.weight[0] @ hidden + model.output.bias[0])


@pytest.mark.parametrize("backbone", ["pnn", "pin"])
def test_pnn_and_pin_need_a_hidden_layer(backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match=f"hidden must have at least one layer for the backbone {backbone}"):
        build_network("vector", FEATURIZER, K, backbone=backbone, hidden=())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_pin_needs_a_pair_of_fields() -> None:
    with pytest.raises(ConfigError, match="needs at least two features; got 1"):
        build_network("vector", CATEGORIES, K, backbone="pin")


def test_deepfm_is_one_on_any_backbone() -> None:
    numeric, categorical = inputs(5)
    with torch.inference_mode():
        tables = [network("deepfm", backbone)(numeric, categorical) for backbone in ("mlp", "deepfm")]
    assert torch.equal(*tables)


def test_every_network_is_a_family_of_click_models() -> None:
    assert set(get_args(ClickFamily)) == {*FAMILIES, "gbdt", "shrunk"}


@given(st.floats(-60, -1e-6))
def test_log1m_exp(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    assert float(log1m_exp(value)) == pytest.approx(float(np.log(-np.expm1(x))), rel=1e-9)


def test_click_loss_is_cross_entropy_with_its_gradient() -> None:
    p = torch.tensor([0.1, 0.5, 0.9, 0.3], dtype=torch.float64)
    click = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    expected = torch.nn.functional.binary_cross_entropy(p, click)
    torch.testing.assert_close(click_loss(torch.log(p), click), expected)
    log_p = torch.log(p).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: click_loss(x, click), (log_p,))


def test_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"family must be one of vector, position.*; got 'cascade'"):
        network("cascade")
