"""Rows scattered by the hash of their query, in memory while they are few, on disk when they are many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import polars as pl
import pyarrow as pa

from urank.log.schema import QUERY

__all__ = ["Buckets"]

_COUNT = 64


class Buckets:
    """All rows of a query land in one bucket, and a bucket is small enough to be sorted in memory.

    As long as all rows fit into one bucket they stay in memory and nothing touches the disk. After that they go to
    64 Arrow files; neighbouring files are read together as long as they fit.
    """

    def __init__(self, folder: Path, row_bytes: int, bucket_bytes: int) -> None:
        self.folder = folder
        self._most_rows = max(1, bucket_bytes // row_bytes)
        self._held: list[pl.DataFrame] = []
        self._held_rows = 0
        self._writers: list[pa.ipc.RecordBatchFileWriter] = []
        self._rows = np.zeros(_COUNT, dtype=np.int64)

    def __enter__(self) -> Buckets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        for path in self.folder.glob("*.arrow"):
            path.unlink()
        if self.folder.exists():
            self.folder.rmdir()

    def add(self, frame: pl.DataFrame) -> None:
        """Take rows that have the hash of their query in the column `QUERY`."""
        self._held.append(frame)
        self._held_rows += frame.height
        if self._held_rows > self._most_rows:
            for held in self._held:
                self._scatter(held)
            self._held, self._held_rows = [], self._most_rows  # from here on each batch goes straight to disk

    def __len__(self) -> int:
        return len(self._groups()) if self._writers else 1

    def __iter__(self) -> Iterator[pl.DataFrame]:
        if not self._writers:
            yield pl.concat(self._held)
            return
        self._close()
        for group in self._groups():
            tables = [pa.ipc.open_file(str(self._path(number))).read_all() for number in group]
            frame = pl.DataFrame(pl.from_arrow(pa.concat_tables(tables)))
            del tables
            yield frame

    def _scatter(self, frame: pl.DataFrame) -> None:
        bucket = (frame[QUERY].to_numpy() % np.uint64(_COUNT)).astype(np.uint8)
        order = np.argsort(bucket, kind="stable")
        table = frame[order].to_arrow()
        counts = np.bincount(bucket, minlength=_COUNT)
        if not self._writers:
            self.folder.mkdir(parents=True)
            self._writers = [pa.ipc.new_file(str(self._path(n)), table.schema) for n in range(_COUNT)]
        start = 0
        for writer, count in zip(self._writers, counts.tolist(), strict=True):
            if count:
                writer.write_table(table.slice(start, count))
                start += count
        self._rows += counts

    def _groups(self) -> list[list[int]]:
        """Neighbouring files that together fit into memory."""
        groups: list[list[int]] = []
        rows = 0
        for number, count in enumerate(self._rows.tolist()):
            if not groups or rows + count > self._most_rows:
                groups.append([])
                rows = 0
            groups[-1].append(number)
            rows += count
        return groups

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:02d}.arrow"

    def _close(self) -> None:
        for writer in self._writers:
            writer.close()
