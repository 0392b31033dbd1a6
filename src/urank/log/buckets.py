"""Rows scattered by the hash of their query, in memory while they are few, on disk when they are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.log.schema import QUERY

__all__ = ["Buckets"]

LEAST, MOST = 64, 512  # a process may often have no more than a thousand files open


class Buckets:
    """All rows of a query land in one bucket, and a bucket is small enough to be sorted in memory.

    As long as all rows fit into one bucket they stay in memory and nothing touches the disk. After that they go to
    64 Arrow files, or more of a large source; neighbouring files are read together as long as they fit, and one that
    has become too large all the same is scattered again.
    """

    def __init__(self, folder: Path, row_bytes: int, bucket_bytes: int, source_bytes: int = 0) -> None:
        """Take no rows yet.

        Args:
            folder: where files go, if there must be any.
            row_bytes: what a row takes.
            bucket_bytes: what a bucket may take.
            source_bytes: the size of what will come, as far as it is known; it may be compressed.
        """
        self.folder = folder
        self._most_rows = max(1, bucket_bytes // row_bytes)
        self._count = min(MOST, max(LEAST, 2 * source_bytes // bucket_bytes))
        self._held: list[pl.DataFrame] = []
        self._held_rows = 0
        self._writers: list[pa.ipc.RecordBatchFileWriter] = []
        self._rows = np.zeros(self._count, dtype=np.int64)

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
        if not self._writers:
            return 1
        return sum(self._pieces(int(self._rows[group].sum())) for group in self._groups())

    def __iter__(self) -> Iterator[pl.DataFrame]:
        if not self._writers:
            yield pl.concat(self._held)
            return
        self._close()
        for group in self._groups():
            if len(group) == 1 and (pieces := self._pieces(int(self._rows[group[0]]))) > 1:
                yield from self._scattered_again(self._path(group[0]), pieces)
            else:
                yield _read([self._path(number) for number in group])

    def _scatter(self, frame: pl.DataFrame) -> None:
        if not self._writers:
            self.folder.mkdir(parents=True)
            schema = frame.to_arrow().schema
            self._writers = [pa.ipc.new_file(str(self._path(n)), schema) for n in range(self._count)]
        self._rows += _write(frame, frame[QUERY].to_numpy() % np.uint64(self._count), self._writers)

    def _scattered_again(self, path: Path, pieces: int) -> Iterator[pl.DataFrame]:
        """The rows of a file that is too large, some queries at a time; of a single query there is no part."""
        paths = [path.with_name(f"{path.stem}-{piece:04d}.arrow") for piece in range(pieces)]
        with pa.ipc.open_file(str(path)) as file:
            writers = [pa.ipc.new_file(str(each), file.schema) for each in paths]
            for number in range(file.num_record_batches):
                frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([file.get_batch(number)])))
                _write(frame, frame[QUERY].to_numpy() // np.uint64(self._count) % np.uint64(pieces), writers)
            for writer in writers:
                writer.close()
        path.unlink()
        for each in paths:
            yield _read([each])
            each.unlink()

    def _pieces(self, rows: int) -> int:
        """Into how many parts so many rows are cut; some are larger than others."""
        return 1 if rows <= self._most_rows else min(MOST, -(-2 * rows // self._most_rows))

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
        return self.folder / f"{number:04d}.arrow"

    def _close(self) -> None:
        for writer in self._writers:
            writer.close()


def _read(paths: Sequence[Path]) -> pl.DataFrame:
    tables = []
    for path in paths:
        with pa.ipc.open_file(str(path)) as file:
            tables.append(file.read_all())
    return pl.DataFrame(pl.from_arrow(pa.concat_tables(tables)))


def _write(
    frame: pl.DataFrame, numbers: NDArray[np.uint64], writers: Sequence[pa.ipc.RecordBatchFileWriter]
) -> NDArray[np.int64]:
    """Give each row to the writer of its number, and return how many each got."""
    bucket = numbers.astype(np.uint16)  # so that it is sorted by radix
    order = np.argsort(bucket, kind="stable")
    table = frame[order].to_arrow()
    counts = np.bincount(bucket, minlength=len(writers))
    start = 0
    for writer, count in zip(writers, counts.tolist(), strict=True):
        if count:
            writer.write_table(table.slice(start, count))
            start += count
    return counts
