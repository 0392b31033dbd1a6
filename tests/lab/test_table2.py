"""Table 2 by hand."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path

import numpy as np
import pytest

from lab.tiny import lists, results, row
from urank.lab.claims import architecture_claims, architectures, rows
from urank.lab.letor_experiment import METHODS, Trial
from urank.lab.results import AucRow

AUC = {"vector": ((0.70, 0.65, 0.66), (0.72, 0.61, 0.68)), "position": ((0.75, 0.7, 0.71), (0.77, 0.72, 0.73))}


def seeds(folder: Path) -> list[Path]:
    for family, parts in AUC.items():
        for seed, (train, test, valid) in enumerate(parts):
            path = Trial(folder / f"seed-{seed}", None).path(f"auc-{family}")  # type: ignore[arg-type]
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"train": train, "valid": valid, "test": test}))
    return [folder / f"seed-{seed}" for seed in (0, 1)]


def test_figures_by_arithmetic(tmp_path: Path) -> None:
    clicks = {"urank-a1": ([0.9, 0.7], [0.6, 0.8]), "urank-a2": ([0.5, 0.7], [0.4, 0.6])}
    found = results(*(lists(key, part, seed) for key, parts in clicks.items() for seed, part in enumerate(parts)))
    a1, a2 = architectures(seeds(tmp_path), rows(found, list(clicks)), "mslr-web10k")
    assert [a1.name, a2.name] == ["A1 (vector)", "A2 (position)"]
    assert (a1.train, a1.test, a1.valid) == pytest.approx((0.71, 0.63, 0.67))
    assert (a2.train, a2.test, a2.valid) == pytest.approx((0.76, 0.71, 0.72))
    assert a1.clicks == a1.ctr == pytest.approx((0.9 + 0.7 + 0.6 + 0.8) / 4)
    assert a2.clicks == pytest.approx((0.5 + 0.7 + 0.4 + 0.6) / 4)
    assert a1.deviation["train"] == pytest.approx((0.72 - 0.70) / 2**0.5)
    assert a1.deviation["test"] == pytest.approx((0.65 - 0.61) / 2**0.5)
    assert a1.deviation["#Click"] == pytest.approx(np.std([0.8, 0.7], ddof=1))
    assert a1.published["#Click"] == 0.903
    assert a2.published["train"] == 0.701


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    found = [row("urank-a1", 0.5, "ours")]
    (a1,) = architectures(seeds(tmp_path)[:1], found)
    assert isnan(a1.deviation["train"])
    assert a1.published == {}
    assert architecture_claims([a1]) == []


def test_claims_both_ways() -> None:
    def row_of(name: str, test: float, clicks: float) -> AucRow:
        return AucRow(name, 0.9, test, 0.9, clicks, clicks / 10, {})

    def holds(a1: AucRow, a2: AucRow) -> list[bool | None]:
        return [claim.holds for claim in architecture_claims([a1, a2])]

    assert holds(row_of("A1", 0.684, 0.903), row_of("A2", 0.693, 0.852)) == [True, True]  # the paper's
    assert holds(row_of("A1", 0.7, 0.903), row_of("A2", 0.693, 0.852)) == [False, True]
    assert holds(row_of("A1", 0.684, 0.8), row_of("A2", 0.693, 0.852)) == [True, False]
    assert holds(row_of("A1", 0.7, 0.8), row_of("A2", 0.7, 0.8)) == [False, False]


def test_each_architecture_has_its_ranker() -> None:
    assert METHODS["urank-a1"].needs == ("clicks-vector",)
    assert METHODS["urank-a2"].needs == ("clicks-position",)
