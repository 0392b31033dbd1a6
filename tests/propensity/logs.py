"""Tiny logs with known counts, prepared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import urank
from urank.log.dataset import Dataset

__all__ = ["STEEPNESS", "prepared", "shuffled", "swapped"]

STEEPNESS = {"games": 1.0, "news": 1.5, "tools": 0.5}
"""Categories, and the power of 1/k by which each is examined."""


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


def shuffled(
    seed: int, lists: int, *, steepness: Mapping[str, float] = STEEPNESS, K: int = 5, queries: int | None = None
) -> pl.DataFrame:
    """Shuffled lists of three to K items, of which those of category c are examined with 1/k^γ_c.

    Categories differ in how often they are shown and in how relevant they are, and queries in how relevant all is.

    Args:
        seed: of the log.
        lists: how many.
        steepness: γ of each category, the most frequent first.
        K: positions.
        queries: how many of these the lists belong to, in turn; each list is of its own when left out.
    """
    rng, names = np.random.default_rng(seed), np.array(list(steepness))
    share = 1 / np.arange(1, len(names) + 1)
    length = rng.integers(3, K + 1, size=lists)
    number = np.repeat(np.arange(lists), length)
    position = np.arange(len(number)) - np.repeat(np.cumsum(length) - length, length) + 1
    category = rng.choice(len(names), p=share / share.sum(), size=len(number))
    query = number % (queries or lists)
    relevance = np.linspace(0.6, 0.3, len(names))[category] * rng.uniform(0.5, 1.5, size=queries or lists)[query]
    examined = position ** -np.array(list(steepness.values()))[category]
    return pl.DataFrame(
        {
            "query_id": query,
            "session_id": number,
            "position": position,
            "click": (rng.random(len(number)) < examined * relevance).astype(np.int8),
            "category": names[category],
            "f1": relevance,
        }
    )
