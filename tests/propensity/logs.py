"""Tiny logs with known counts, prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

import urank
from urank.log.dataset import Dataset

__all__ = ["prepared", "swapped"]


def prepared(folder: Path, frame: pl.DataFrame, *, valid: float = 0.0) -> Dataset:
    """A log as prepared data; by default all of it is train."""
    urank.prepare(urank.read(frame), folder / "prepared", valid=valid, test=0)
    return Dataset(folder / "prepared")


def swapped(clicks_at_one: int, clicks_at_two: int, *, lists: int = 20, **more: Any) -> pl.DataFrame:
    """Lists of two items; in half of them the one ranked first was moved down, and so many of these were clicked."""
    half = lists // 2
    rows = []
    for number in range(lists):
        moved = number >= half
        clicked = number < clicks_at_one or half <= number < half + clicks_at_two
        for rank in (1, 2):
            position = 3 - rank if moved else rank
            rows.append(
                {
                    "query_id": f"q{number % half}",
                    "session_id": str(number),
                    "item_id": f"{number % half}-{rank}",
                    "position": position,
                    "ranked_position": rank,
                    "click": int(clicked and rank == 1),
                    "f1": float(rank),
                    **more,
                }
            )
    return pl.DataFrame(rows)
