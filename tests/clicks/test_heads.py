"""Each family keeps its promise: log space, shape, monotone where it says so, right where it is well specified."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from urank.clicks.heads import Head, build_network, click_loss, log1m_exp
from urank.features import Categorical, Featurizer, Numeric
from urank.training import seeded

K = 7
FEATURIZER = Featurizer(
    numeric=(Numeric("a", 0.0, 1.0, True), Numeric("b", 1.0, 2.0, False)),
    categorical=(Categorical("c", ("x", "y")),),
)
FAMILIES = ("vector", "position", "factorised", "monotone", "pbm")


def network(family: str, backbone: str = "mlp", seed: int = 0) -> Head:
    with seeded(seed):
        return build_network(family, FEATURIZER, K, backbone=backbone).eval()  # type: ignore[arg-type]


def inputs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    numeric = (10 * rng.normal(size=(rows, 2))).astype(np.float32)
    numeric[rng.random((rows, 2)) < 0.2] = np.nan
    return torch.from_numpy(numeric), torch.from_numpy(rng.integers(0, 3, (rows, 1)))


@pytest.mark.parametrize(("family", "backbone"), list(product(FAMILIES, ("mlp", "deepfm"))))
def test_contract(family: str, backbone: str) -> None:
    model = network(family, backbone)
    numeric, categorical = inputs(50)
    with torch.inference_mode():
        table = model(numeric, categorical)
        assert table.shape == (50, K)
        assert torch.isfinite(table).all()
        assert (table < 0).all()
        position = torch.from_numpy(np.random.default_rng(1).integers(1, K + 1, 50))
        at = model.at(numeric, categorical, position)
        torch.testing.assert_close(at, table[torch.arange(50), position - 1])
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
