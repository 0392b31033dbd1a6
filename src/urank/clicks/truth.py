"""The truth of a simulation beside a click model: the true table, and the oracle's own predictions for a log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.clicks.model import at_positions
from urank.errors import DataError
from urank.log.dataset import Block, Dataset

__all__ = ["oracle_predictions", "read_truth", "true_table"]


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


def true_table(truth: pl.DataFrame) -> Callable[[Block], NDArray[np.float64]]:
    """What gives the true P(click | item, k) `[rows, K]` of the items of a block, looked up by `item_id`."""
    table = np.array(truth["table"].to_list(), dtype=np.float64)
    number = pl.DataFrame({"item_id": truth["item_id"], "row": np.arange(truth.height)})

    def look_up(block: Block) -> NDArray[np.float64]:
        if "item_id" not in block.items.column_names:
            raise DataError("the log does not name its items (item_id), so the truth cannot be looked up")
        items = pl.DataFrame({"item_id": pl.Series(block.items["item_id"].combine_chunks()).cast(pl.String)})
        found = items.join(number, on="item_id", how="left", maintain_order="left")["row"]
        if found.null_count():
            absent = items["item_id"].filter(found.is_null())[0]
            raise DataError(f"the truth does not know the item '{absent}' of the log")
        return np.asarray(table[found.to_numpy()])

    return look_up


def oracle_predictions(
    truth: pl.DataFrame, dataset: Dataset, split: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """log P(click) by the oracle at the logged position, the position, and the click, of every row of a split."""
    if not dataset.has("item_id"):
        raise DataError(f"{dataset.folder} does not name its items, so the truth cannot be looked up")
    look_up = true_table(truth)
    parts = []
    for block in dataset.blocks(split, ["item_id", "position", "click"]):
        position = block.column("position").astype(np.int64)
        log_p = np.log(at_positions(look_up(block), position)).astype(np.float32)
        parts.append((log_p, position, block.column("click").astype(np.float32)))
    log_p, position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return log_p, position, click
