"""The truth of a simulation beside a click model: the true table, and the oracle's own predictions for a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import DataError
from urank.evaluation.click_quality import quality, table_error
from urank.log.dataset import Block, Dataset, drop_unseen
from urank.log.ragged import at_positions, list_ids

if TYPE_CHECKING:
    from urank.pipeline import ModelFit, Review
    from urank.report.click_report import FitReport

__all__ = ["oracle_predictions", "read_truth", "review_fit", "true_table"]


def read_truth(folder: str | Path) -> pl.DataFrame:
    """The candidates of a simulation with their true table.

    Args:
        folder: what `urank simulate` or `urank appstore` wrote, or its truth/.
    """
    folder = Path(folder)
    path = next(
        (p for p in (folder / "truth" / "candidates.parquet", folder / "candidates.parquet") if p.is_file()), None
    )
    if path is None:
        raise DataError(
            f"{folder} holds no truth: urank simulate and urank appstore write truth/candidates.parquet into theirs"
        )
    truth = pl.read_parquet(path)
    if "table" not in truth.columns:
        raise DataError(f"{path} has no click table: the clicks of cascade users depend on the items above")
    return truth


def true_table(truth: pl.DataFrame) -> Callable[[Block], NDArray[np.float64]]:
    """What gives the true P(click | item, k) `[rows, K]` of the items of a block.

    They are looked up by `item_id`; where the truth has an item more than once, as that of an app store does, whose
    users like different apps, by `query_id` and `item_id`.
    """
    table = np.array(truth["table"].to_list(), dtype=np.float64)
    by = ["item_id"] if truth["item_id"].is_unique().all() else ["query_id", "item_id"]
    known = truth.select(pl.col(by).cast(pl.String)).with_row_index("row")
    twice = known.filter(known.select(by).is_duplicated())
    if twice.height:
        raise DataError(f"the truth has more than one table of {_called(twice.row(0, named=True))}")

    def look_up(block: Block) -> NDArray[np.float64]:
        if "item_id" not in block.items.column_names:
            raise DataError("the log does not name its items (item_id), so the truth cannot be looked up")
        columns = {"item_id": pl.Series(block.items["item_id"].combine_chunks())}
        if "query_id" in by:
            columns["query_id"] = pl.Series(block.lists["query_id"].combine_chunks())[list_ids(block.offsets)]
        items = pl.DataFrame(columns).select(pl.col(by).cast(pl.String))
        found = items.join(known, on=by, how="left", maintain_order="left")["row"]
        if found.null_count():
            absent = items.filter(found.is_null()).row(0, named=True)
            only = "; urank appstore keeps the truth of the last day only" if len(by) > 1 else ""
            raise DataError(f"the truth does not know {_called(absent)} of the log{only}")
        return np.asarray(table[found.to_numpy()])

    return look_up


def _called(names: Mapping[str, Any]) -> str:
    """An item in words."""
    item = f"the item '{names['item_id']}'"
    return f"{item} of query '{names['query_id']}'" if "query_id" in names else item


def oracle_predictions(
    truth: pl.DataFrame, dataset: Dataset, split: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """log P(click) by the oracle at the logged position, the position, and the click, of every row of a split."""
    if not dataset.has("item_id"):
        raise DataError(f"{dataset.folder} does not name its items, so the truth cannot be looked up")
    look_up = true_table(truth)
    parts = []
    for block in drop_unseen(dataset).blocks(split, ["item_id", "position", "click"]):
        position = block.column("position").astype(np.int64)
        log_p = np.log(at_positions(look_up(block), position)).astype(np.float32)
        parts.append((log_p, position, block.column("click").astype(np.float32)))
    log_p, position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return log_p, position, click


def review_fit(folder: str | Path) -> Review:
    """Compare the click model of a training with the truth of a simulation.

    Args:
        folder: Output of `urank simulate` or `urank appstore`.
    """
    known = read_truth(folder)

    def review(measured: FitReport, fit: ModelFit, dataset: Dataset) -> FitReport:
        qualities = {split: dict(each) for split, each in measured.qualities.items()}
        table = np.array(known["table"].to_list(), dtype=np.float64)[:, : dataset.positions]
        figures = table_error(fit.model.clicks.log_ctr(known), table)
        if "test" in qualities:
            oracle = quality(*oracle_predictions(known, dataset, "test"), positions=dataset.positions)
            figures["oracle_share"] = oracle.log_loss / qualities["test"][measured.name].log_loss
            qualities["test"]["oracle"] = oracle
        return replace(measured, qualities=qualities, truth=figures)

    return review
