"""The truth of a simulation beside a click model: the true table, and the oracle's own predictions for a log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.dataset import Dataset

__all__ = ["oracle_predictions", "read_truth"]


def read_truth(folder: str | Path) -> pl.DataFrame:
    """The candidates of a simulation with their true table; `folder` is what `urank simulate` wrote, or its truth/."""
    folder = Path(folder)
    path = next(
        (p for p in (folder / "truth" / "candidates.parquet", folder / "candidates.parquet") if p.is_file()), None
    )
    if path is None:
        raise DataError(f"{folder} holds no truth: urank simulate writes truth/candidates.parquet into its folder")
    truth = pl.read_parquet(path)
    if "table" not in truth.columns:
        raise DataError(f"{path} has no click table: the clicks of cascade users depend on the items above")
    return truth


def oracle_predictions(
    truth: pl.DataFrame, dataset: Dataset, split: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """log P(click) by the oracle at the logged position, the position, and the click, of every row of a split."""
    if not dataset.has("item_id"):
        raise DataError(f"{dataset.folder} does not name its items, so the truth cannot be looked up")
    table = np.log(np.array(truth["table"].to_list(), dtype=np.float64))
    number = pl.DataFrame({"item_id": truth["item_id"], "row": np.arange(truth.height)})
    parts = []
    for block in dataset.blocks(split, ["item_id", "position", "click"]):
        items = pl.DataFrame({"item_id": pl.Series(block.items["item_id"].combine_chunks()).cast(pl.String)})
        found = items.join(number, on="item_id", how="left", maintain_order="left")["row"]
        if found.null_count():
            absent = items["item_id"].filter(found.is_null())[0]
            raise DataError(f"the truth does not know the item '{absent}' of {dataset.folder}/{split}")
        position = block.column("position").astype(np.int64)
        log_p = table[found.to_numpy(), position - 1].astype(np.float32)
        parts.append((log_p, position, block.column("click").astype(np.float32)))
    log_p, position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return log_p, position, click
