"""Table 2 and RQ2: which architecture of the position-aware click model to use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from urank.paper.published import published_architectures
from urank.paper.results import AucRow, Claim, Row

__all__ = ["architecture_claims", "architectures"]

_FAMILIES = {"urank-a1": "vector", "urank-a2": "position"}


def architectures(folders: Sequence[Path], found: Sequence[Row], dataset: str = "") -> list[AucRow]:
    """The rows of Table 2: AUC by split, and what U-rank earns on each architecture.

    Args:
        folders: of the seeds.
        found: the rows `urank-a1` and `urank-a2`, as `table1.rows` gives them.
        dataset: the paper's name of the data, if it is the paper's.
    """
    of_paper = published_architectures(dataset)
    told = []
    for row in found:
        paths = [folder / f"auc-{_FAMILIES[row.key]}.json" for folder in folders]
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        auc = {split: np.array([part[split] for part in parts]) for split in ("train", "test", "valid")}
        deviation = {split: float(each.std(ddof=1)) if len(each) > 1 else float("nan") for split, each in auc.items()}
        told.append(
            AucRow(
                name=f"{row.key[-2:].upper()} ({_FAMILIES[row.key]})",
                train=float(auc["train"].mean()),
                test=float(auc["test"].mean()),
                valid=float(auc["valid"].mean()),
                clicks=row.mean["#Click"],
                ctr=row.mean["CTR"],
                deviation={**deviation, "#Click": row.deviation["#Click"], "CTR": row.deviation["CTR"]},
                published=of_paper.get(row.key, {}),
            )
        )
    return told


def architecture_claims(found: Sequence[AucRow]) -> list[Claim]:
    """What RQ2 says."""
    if len(found) < 2:
        return []
    a1, a2 = found
    return [
        Claim("A2 achieves the better AUC", a2.test > a1.test, f"test AUC {a2.test:.4f} against {a1.test:.4f} of A1"),
        Claim(
            "A1 leads to the higher utility", a1.clicks > a2.clicks, f"#Click {a1.clicks:.4f} against {a2.clicks:.4f}"
        ),
    ]
