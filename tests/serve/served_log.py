"""Feedback logs as a server leaves them, written without one, and what must come out of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from urank.serve.feedback_export import CompactionStats, compact
from urank.serve.feedback_store import (
    FeedbackColumns,
    FeedbackRecord,
    RankingRecord,
    Record,
    ShadowRecord,
    decode,
    durable_folder,
    encode,
    framed,
    new_ranking_id,
    open_segment,
    read_segment,
    segment_path,
)

PLAIN = FeedbackColumns(("price", "age"), ("brand",), value=False, explored=False)
VALUED = FeedbackColumns(("price", "age"), ("brand",), value=True, explored=True)

Row = tuple[object, ...]


def segment_name(number: int) -> str:
    return f"{0x0192F3A4B5C6 + 1000 * number:012x}-{number:06x}"


def ranking(
    segment: str,
    items: Sequence[str] = ("a", "b", "c"),
    *,
    columns: FeedbackColumns = PLAIN,
    query: str = "q",
    user: str | None = None,
    arm: str | None = None,
    time_us: int = 1_000,
    seed: int = 0,
) -> RankingRecord:
    """A ranking whose numbers come from the seed; the age of the first item is missing, and so is its brand."""
    rng = np.random.default_rng(seed)
    count = len(items)
    numeric = rng.normal(size=(count, len(columns.numeric))).astype(np.float32)
    numeric[0, -1] = np.nan
    return RankingRecord(
        ranking_id=new_ranking_id(segment),
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


def event(
    of: RankingRecord | str,
    item: str,
    *,
    click: bool = True,
    conversion: bool = False,
    value: float | None = None,
    time_us: int = 2_000,
) -> FeedbackRecord:
    ranking_id = of if isinstance(of, str) else of.ranking_id
    return FeedbackRecord(ranking_id, item, click, conversion, value, time_us)


class OpenSegment:
    """A segment that is being written, by the file and lock alone."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder
        self.path = segment_path(folder, name)
        self._known: set[str] = set()
        durable_folder(self.path.parent)
        self._handle = open_segment(self.path)

    def write(self, *records: Record) -> None:
        for record in records:
            if isinstance(record, RankingRecord) and record.columns not in self._known:
                self._known.add(record.columns)
                columns = next(each for each in (PLAIN, VALUED) if each.digest == record.columns)
                self.write_bytes(framed(encode(columns)))
            self.write_bytes(framed(encode(record)))

    def write_bytes(self, data: bytes) -> None:
        assert os.write(self._handle, data) == len(data)

    def seal(self) -> None:
        os.close(self._handle)


def sealed(folder: Path, number: int, *records: Record) -> str:
    """A sealed segment that holds these records."""
    segment = OpenSegment(folder, segment_name(number))
    segment.write(*records)
    segment.seal()
    return segment.name


@dataclass
class Reference:
    """Everything that was written, joined in plain Python."""

    rankings: list[RankingRecord] = field(default_factory=list)
    events: list[FeedbackRecord] = field(default_factory=list)
    shadows: list[ShadowRecord] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """(ranking, item, position, click, conversion, value, price), by ranking and position."""
        found: list[Row] = []
        for each in {ranking.ranking_id: ranking for ranking in self.rankings}.values():
            for place, item in enumerate(each.items):
                said = [event for event in self.events if (event.ranking_id, event.item_id) == (each.ranking_id, item)]
                value = None if each.value is None else float(each.value[place])
                told = [(event.time_us, event.value) for event in said if event.value is not None]
                if told and value is not None:
                    value = float(np.float32(max(told)[1]))
                click, conversion = any(event.click for event in said), any(event.conversion for event in said)
                price = float(each.numeric[place, 0])
                found.append((each.ranking_id, item, place + 1, int(click), int(conversion), value, price))
        return sorted(found, key=lambda row: (str(row[0]), row[2]))


def taken(folder: Path, **options: Any) -> CompactionStats:
    """Compact all that is sealed; nobody else does."""
    found = compact(folder, **{"window_seconds": 0, **options})
    assert found is not None
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unmatched(folder: Path) -> dict[str, list[FeedbackRecord]]:
    """What a log keeps of rankings that it does not have, by segment; nothing else is there, and all of it is whole."""
    found: dict[str, list[FeedbackRecord]] = {}
    for path in sorted((folder / "unmatched").glob("*")):
        payloads, torn, damaged = read_segment(path)
        records = [decode(payload) for payload in payloads]
        assert (torn, damaged, path.suffix) == (0, 0, ".wal")
        found[path.stem] = [record for record in records if isinstance(record, FeedbackRecord)]
        assert len(found[path.stem]) == len(records) > 0
    return found


def logged(*folders: Path) -> list[Row]:
    """What the parts of logs hold, as `Reference.rows` has it; each row is there once."""
    found: list[Row] = []
    for path in sorted(path for folder in folders for path in folder.glob("log*/[!.]*.parquet")):
        frame = pl.read_parquet(path)
        if "value" not in frame.columns:
            frame = frame.with_columns(value=pl.lit(None, pl.Float32))
        found += frame.select("session_id", "item_id", "position", "click", "conversion", "value", "price").rows()
    assert len({row[:2] for row in found}) == len(found)
    return sorted(found, key=lambda row: (str(row[0]), row[2]))
