"""On labels, the rankers of other papers are as good as established tools; `benchmarks letor` has all folds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import letor

SPREAD = 0.041
"""The deviation of LightGBM's nDCG@10 over the five folds, as the benchmark prints it."""


def test_one_fold_of_mq2008(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letor, "DATA", data_dir / "mq2008")
    found = letor.fold_ndcg(tmp_path / "fold", 0, quick=True)
    assert found["ranksvm"] > found["LinearSVC on pairs"] - SPREAD
    assert found["lambdarank"] > found["LightGBM lambdarank"] - SPREAD
    assert found["lambdarank-trees"] > found["LightGBM lambdarank"] - SPREAD
    assert min(found.values()) > 0.4  # a random order has 0.33
