"""Write lists as Parquet: row groups of about 64 MB, a new file every 1 GB, in the background."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from urank.paths import parquet_writer

__all__ = ["FILE_BYTES", "ROW_GROUP_BYTES", "SplitWriter"]

ROW_GROUP_BYTES = 64 * 2**20
FILE_BYTES = 2**30


class SplitWriter:
    """Takes the lists of one split, as tables of any size, and writes them while the caller goes on."""

    def __init__(self, folder: Path, background: ThreadPoolExecutor, prefix: str = "part-") -> None:
        self.folder = folder
        self.prefix = prefix
        self._background = background
        self._pending: Future[None] | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._writer: Any = None
        self._file_bytes = 0
        self.files: list[str] = []

    def write(self, table: pa.Table) -> None:
        """Take a table; it is written once a row group is full."""
        rows = max(1, table.num_rows * ROW_GROUP_BYTES // max(table.nbytes, 1))
        for start in range(0, table.num_rows, rows):
            part = table.slice(start, rows)
            self._waiting.append(part)
            self._waiting_bytes += part.nbytes
            if self._waiting_bytes >= ROW_GROUP_BYTES:
                self._flush()

    def close(self) -> None:
        """Write what is still waiting and close the file."""
        if self._waiting:
            self._flush()
        self._wait()
        self._close_file()

    def _flush(self) -> None:
        self._wait()
        table = pa.concat_tables(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self._pending = self._background.submit(self._write_group, table)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write_group(self, table: pa.Table) -> None:
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.prefix}{len(self.files):05d}.parquet"
            self.files.append(path.name)
            options = {"compression": "snappy", "use_dictionary": _text_paths(table)}
            self._writer = parquet_writer(path, table.schema, **options)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._file_bytes += table.nbytes
        if self._file_bytes >= FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._file_bytes = None, 0


def _text_paths(table: pa.Table) -> list[str]:
    """The Parquet paths of the columns of text, the only ones where a dictionary pays."""
    paths = []
    for field in table.schema:
        is_list = pa.types.is_list(field.type)
        inner = field.type.value_type if is_list else field.type
        if pa.types.is_string(inner) or pa.types.is_large_string(inner):
            paths.append(f"{field.name}.list.element" if is_list else field.name)
    return paths
