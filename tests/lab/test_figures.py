"""Figures 3 and 4: what is drawn, by arithmetic."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from urank.lab.claims import curve_claims, list_example, position_curves, read_results
from urank.lab.letor_experiment import METHODS, judged
from urank.lab.results import PositionCurve, Reproduction

TABLE = [[0.5, 0.25, 0.1], [0.4, 0.3, 0.2], [0.9, 0.6, 0.3], [0.2, 0.1, 0.05], [0.8, 0.7, 0.65], [0.3, 0.2, 0.1]]
CANDIDATES = pl.DataFrame(
    {
        "query_id": ["b", "b", "a", "a", "a", "a"],
        "item_id": ["b1", "b2", "a1", "a2", "a3", "a4"],
        "relevance": [1, 2, 3, 0, 4, 1],
        "table": TABLE,
    }
)
ORDERS = {  # of b1, b2 and of a1 … a4, of which one gets no place
    "urank": ([1, 2, 2, 4, 1, 3], [2, 1, 1, 3, 2, 4]),
    "km": ([2, 1, 1, 4, 2, 3], [2, 1, 1, 4, 2, 3]),
}


@pytest.fixture
def made(tmp_path: Path) -> tuple[list[Path], pl.DataFrame]:
    """Two seeds with the same two queries."""
    folders = [tmp_path / "seed-0", tmp_path / "seed-1"]
    for seed, folder in enumerate(folders):
        (folder / "results").mkdir(parents=True)
        CANDIDATES.write_parquet(folder / "candidates.parquet")
        for key, orders in ORDERS.items():
            frame = judged(CANDIDATES, np.array(orders[seed])).with_columns(seconds=0.0)
            frame.write_parquet(folder / "results" / f"{key}.parquet")
    return folders, read_results(folders, list(ORDERS))


def test_curves_by_arithmetic(made: tuple[list[Path], pl.DataFrame]) -> None:
    ours, best = position_curves(*made, ["urank", "km"])
    assert (ours.name, best.name) == (METHODS["urank"].name, METHODS["km"].name)
    # Seed 0 shows b1 b2 and a3 a1 a4; seed 1 b2 b1 and a1 a3 a2. Each seed has two lists; b has no third item.
    first = np.array([0.5 + 0.8, 0.3 + 0.6, 0.1]) / 2
    second = np.array([0.4 + 0.9, 0.25 + 0.7, 0.05]) / 2
    assert ours.mean == pytest.approx((first + second) / 2)
    assert ours.deviation == pytest.approx(abs(first - second) / 2**0.5)
    assert best.deviation == pytest.approx(np.zeros(3))


def test_one_seed_has_no_deviation(made: tuple[list[Path], pl.DataFrame]) -> None:
    folders, results = made
    (curve,) = position_curves(folders[:1], results.filter(pl.col("seed") == 0), ["km"])
    assert all(isnan(each) for each in curve.deviation)


def test_a_curve_adds_up_to_the_clicks(everything: tuple[Reproduction, Path]) -> None:
    found, _ = everything
    clicks = {row.name: row.mean["#Click"] for row in found.rows}
    assert len(found.curves) == 4
    for curve in found.curves:
        assert curve.mean.shape == (10,)
        assert curve.mean.sum() == pytest.approx(clicks[curve.name], rel=1e-6)


def test_claims_of_the_curves_both_ways() -> None:
    def holds(lambdarank: list[float], ours: list[float], oracle: list[float]) -> list[bool | None]:
        curves = [
            PositionCurve(name, np.array(mean), np.zeros(len(mean)))
            for name, mean in (("L", lambdarank), ("U", ours), ("O", oracle))
        ]
        return [claim.holds for claim in curve_claims(curves, "L", "U", "O")]

    # From the first to the last: L by 8, U by 4, O by 2.
    assert holds([0.8, 0.1], [0.8, 0.2], [0.8, 0.4]) == [True, True]
    assert holds([0.8, 0.2], [0.8, 0.1], [0.8, 0.4]) == [False, False]
    # U falls by 2 and O by 4: as far from L's 16 as a factor of 4, and from U as one of 2.
    assert holds([0.8, 0.05], [0.4, 0.2], [0.8, 0.2]) == [False, True]
    # No list is so long that it has a third item.
    assert holds([0.8, 0.1, 0], [0.8, 0.2, 0], [0.8, 0.4, 0]) == [True, True]


def test_no_claim_of_a_curve_that_is_not_there() -> None:
    curve = PositionCurve("U", np.array([0.5, 0.4]), np.zeros(2))
    assert curve_claims([curve], "L", "U", "O") == []


def test_the_example_is_one_query_for_all(made: tuple[list[Path], pl.DataFrame]) -> None:
    folders, results = made
    found = list_example(folders[0], results, ["urank", "km"])
    assert found.query == "a"  # the first by name, though b stands first
    assert found.items == ["a3", "a1", "a4", "a2"]  # by falling label
    assert found.label.tolist() == [4, 3, 1, 0]
    assert found.table.tolist() == [TABLE[4], TABLE[2], TABLE[5], TABLE[3]]
    assert found.positions["U-rank"].tolist() == [1, 2, 3, 4]
    assert found.positions["KM (oracle model)"].tolist() == [2, 1, 3, 4]
    assert found.clicks["U-rank"] == pytest.approx(0.8 + 0.6 + 0.1)
    assert found.clicks["KM (oracle model)"] == pytest.approx(0.7 + 0.9 + 0.1)
    assert found.ndcg["U-rank"] == pytest.approx(1.0)
    gains, discounts = np.array([15.0, 7.0, 1.0, 0.0]), 1 / np.log2([2, 3, 4, 5])
    assert found.ndcg["KM (oracle model)"] == pytest.approx((gains[[1, 0, 2, 3]] @ discounts) / (gains @ discounts))


def test_the_example_of_a_run(everything: tuple[Reproduction, Path]) -> None:
    found, folder = everything
    example = found.example
    assert example is not None
    assert list(example.positions) == [METHODS[key].name for key in ("lambdarank-truth", "urank", "km")]
    candidates = pl.read_parquet(folder / "seed-0" / "candidates.parquet")
    assert example.query == candidates["query_id"].min()
    assert sorted(example.items) == sorted(candidates.filter(pl.col("query_id") == example.query)["item_id"])
    items = np.arange(len(example.items))
    for name, position in example.positions.items():
        assert sorted(position) == (items + 1).tolist()
        assert example.clicks[name] == pytest.approx(example.table[items, position - 1].sum(), rel=1e-6)
    assert max(example.clicks, key=lambda name: example.clicks[name]) == "KM (oracle model)"
