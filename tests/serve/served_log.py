"""Feedback logs as a server writes them, without one, and the rows that must come out of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from urank.serve.feedback_export import ExportStats, export_feedback
from urank.serve.feedback_records import FeedbackColumns, FeedbackRecord, RankingRecord, ShadowRecord
from urank.serve.feedback_sink import FeedbackSink
from urank.serve.sqlite_sink import SqliteSink

PLAIN = FeedbackColumns(("price", "age"), ("brand",), value=False, explored=False)
VALUED = FeedbackColumns(("price", "age"), ("brand",), value=True, explored=True)

Row = tuple[object, ...]


@asynccontextmanager
async def writing(folder: Path) -> AsyncIterator[SqliteSink]:
    """A worker's sink."""
    sink = SqliteSink(folder)
    try:
        yield sink
    finally:
        await sink.close()


async def show(
    sink: FeedbackSink,
    items: Sequence[str] = ("a", "b", "c"),
    *,
    columns: FeedbackColumns = PLAIN,
    query: str = "q",
    user: str | None = None,
    arm: str | None = None,
    time_us: int = 1_000,
    seed: int = 0,
) -> RankingRecord:
    """Log a ranking whose numbers come from the seed; the age of the first item is missing, and so is its brand."""
    rng = np.random.default_rng(seed)
    count = len(items)
    numeric = rng.normal(size=(count, len(columns.numeric))).astype(np.float32)
    numeric[0, -1] = np.nan
    record = RankingRecord(
        ranking_id=sink.new_ranking_id(),
        query_id=query,
        user_id=user,
        arm=arm,
        policy="m1",
        model="m1",
        columns=columns.digest,
        time_us=time_us,
        items=tuple(items),
        numeric=numeric,
        categorical=tuple((None if place == 0 else f"brand {place}",) for place in range(count)),
        value=rng.integers(1, 9, count).astype(np.float32) if columns.value else None,
        propensity=rng.uniform(0.1, 1, count) if columns.explored else None,
        ranked_position=tuple(range(count, 0, -1)) if columns.explored else None,
    )
    await sink.append(rankings=[record], columns=columns)
    return record


async def click(sink: FeedbackSink, of: RankingRecord | str, item: str, **fields: Any) -> FeedbackRecord:
    """Log feedback: a click unless the fields say otherwise."""
    ranking_id = of if isinstance(of, str) else of.ranking_id
    report = FeedbackRecord(**{"ranking_id": ranking_id, "item_id": item, "click": True, "conversion": False,
                               "value": None, **fields})  # fmt: skip
    await sink.append(feedback=[report])
    return report


async def shadow(sink: FeedbackSink, of: RankingRecord, items: Sequence[str], model: str = "m2") -> None:
    """Log an order of the shadow model."""
    await sink.append(shadows=[ShadowRecord(of.ranking_id, model, items)])


@dataclass
class Reference:
    """Everything that was written, joined in plain Python."""

    rankings: list[RankingRecord] = field(default_factory=list)
    reports: list[FeedbackRecord] = field(default_factory=list)  # in the order of their arrival

    def rows(self) -> list[Row]:
        """A row for each impression: ranking, item, position, click, conversion, value and price."""
        found: list[Row] = []
        for each in self.rankings:
            for place, item in enumerate(each.items):
                own = [one for one in self.reports if (one.ranking_id, one.item_id) == (each.ranking_id, item)]
                value = None if each.value is None else float(each.value[place])
                told = [one.value for one in own if one.value is not None]
                if told and value is not None:
                    value = float(np.float32(told[-1]))
                clicked, converted = any(one.click for one in own), any(one.conversion for one in own)
                price = float(each.numeric[place, 0])
                found.append((each.ranking_id, item, place + 1, int(clicked), int(converted), value, price))
        return sorted(found, key=lambda row: (str(row[0]), row[2]))


def exported(folder: Path | str, **options: Any) -> ExportStats:
    """Export a log that nobody else exports."""
    found = export_feedback(folder, **options)
    assert found is not None
    return found


def logged(*folders: Path) -> list[Row]:
    """The rows of the parts of logs, as `Reference.rows` has them; each row is there once."""
    found: list[Row] = []
    for path in sorted(path for folder in folders for path in folder.glob("log*/[!.]*.parquet")):
        frame = pl.read_parquet(path)
        if "value" not in frame.columns:
            frame = frame.with_columns(value=pl.lit(None, pl.Float32))
        found += frame.select("session_id", "item_id", "position", "click", "conversion", "value", "price").rows()
    assert len({row[:2] for row in found}) == len(found)
    return sorted(found, key=lambda row: (str(row[0]), row[2]))
