"""Segments that nobody writes to any more, and what they hold about the rankings of others."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from urank.errors import DataError
from urank.serve.records import (
    SEGMENT,
    Columns,
    FeedbackRecord,
    Kind,
    RankingRecord,
    ShadowRecord,
    decode,
    encode,
    kind_of,
    segment_of,
)
from urank.serve.segments import SegmentReader, is_sealed

__all__ = ["JOINED", "About", "Sealed", "sealed_segments", "segment_files"]

JOINED = ".joined"
"""How the file of a segment ends whose rankings are parts."""

_SEGMENT = re.compile(SEGMENT)
_OWN = (Kind.columns, Kind.ranking)

About = FeedbackRecord | ShadowRecord


@dataclass
class Sealed:
    """A segment that nobody writes to.

    Attributes:
        due: whether its rankings become parts now.
        joined: whether they are parts.
        homes: segment -> how many records here are about rankings of that segment.
        checksum: of these records, in their order.
        torn: bytes at the end that are no record.
        damaged: bytes before that, of no record or of one that says nothing.
    """

    name: str
    path: Path
    due: bool
    joined: bool
    homes: Counter[str] = field(default_factory=Counter)
    checksum: int = 0
    torn: int = 0
    damaged: int = 0

    def about(self) -> Iterator[About]:
        """Feedback and the orders of a silent model."""
        for payload in SegmentReader(self.path):
            if kind_of(payload) not in _OWN:
                try:
                    record = decode(payload)
                except DataError:
                    continue
                if isinstance(record, FeedbackRecord | ShadowRecord):
                    yield record

    def own(self) -> Iterator[Columns | RankingRecord]:
        """Its rankings, each after its columns; what says nothing counts as damaged."""
        for payload in SegmentReader(self.path):
            if kind_of(payload) in _OWN:
                try:
                    record = decode(payload)
                except DataError:
                    self.damaged += len(payload)
                    continue
                if isinstance(record, Columns | RankingRecord):
                    yield record

    def rankings(self, known: Callable[[str], Columns | None]) -> tuple[list[RankingRecord], dict[str, Columns]]:
        """Its rankings, each once, and the columns of each set; what does not belong here counts as damaged.

        Args:
            known: the columns of a digest, if they are told elsewhere too.
        """
        rankings: dict[str, RankingRecord] = {}
        columns: dict[str, Columns] = {}
        for record in self.own():
            if isinstance(record, Columns):
                columns[record.digest] = record
                continue
            if record.columns not in columns and (told := known(record.columns)) is not None:
                columns[record.columns] = told  # what told them here is damaged
            fits = record.columns in columns and record.fits(columns[record.columns])
            if fits and segment_of(record.ranking_id) == self.name:
                rankings.setdefault(record.ranking_id, record)
            else:
                self.damaged += len(encode(record))
        return list(rankings.values()), columns

    def survey(self) -> None:
        """Read it once, to learn of whom it holds feedback and what of it cannot be read."""
        reader = SegmentReader(self.path)
        for payload in reader:
            if kind_of(payload) in _OWN:  # rankings take time, and are not needed before they are due
                continue
            try:
                record = decode(payload)
            except DataError:
                self.damaged += len(payload)
                continue
            if isinstance(record, FeedbackRecord | ShadowRecord):
                self.homes[segment_of(record.ranking_id)] += 1
                self.checksum = zlib.crc32(payload, self.checksum)
        self.torn = reader.torn
        self.damaged += reader.damaged


def segment_files(wal: Path) -> list[Path]:
    """The files of a folder that are segments, written to or not, oldest first."""
    paths = [path for path in wal.iterdir() if path.suffix in (".wal", JOINED)]
    return sorted(path for path in paths if _SEGMENT.fullmatch(path.stem))


def sealed_segments(wal: Path, window: float, now: float) -> Iterator[Sealed]:
    """The segments of a folder that nobody writes to, oldest first; due are those that were sealed a window ago."""
    for path in segment_files(wal):
        joined = path.suffix == JOINED
        if not (joined or is_sealed(path)):
            continue
        due = not joined and (window == 0 or now - path.stat().st_mtime >= window)
        segment = Sealed(path.stem, path, due, joined)
        segment.survey()
        yield segment
