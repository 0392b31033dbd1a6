"""From impressions to queries: one row per list, list columns ordered by position, split into train, valid and test.

Since a query is a row, no row group, shard, batch or fold can ever split one. The log may be larger than memory and
in any order: rows are first scattered by the hash of their query into buckets on disk, then each bucket is sorted on
its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import polars as pl

from urank.errors import ConfigError, DataError
from urank.files import new_folder
from urank.log.arrange import assignment, refuse_clicks_beyond, with_keys, write_bucket
from urank.log.buckets import Buckets
from urank.log.read import Log
from urank.log.schema import QUERY
from urank.log.split import SPLITS, check_shares
from urank.log.summary import Summary, positions_of
from urank.log.write import SplitWriter
from urank.paths import is_remote, is_within
from urank.prefetch import prefetch
from urank.progress import Report, silent

__all__ = ["BUCKET_BYTES", "checked", "describe", "prepare"]

BUCKET_BYTES = 128 * 2**20
FORMAT_VERSION = 1


def prepare(
    log: Log,
    folder: str | Path,
    *,
    split: Literal["hash", "time"] = "hash",
    valid: float = 0.1,
    test: float = 0.1,
    positions: int | None = None,
    overwrite: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    report: Report = silent,
) -> dict[str, Any]:
    """Write the prepared dataset and return its `schema.json` as a dictionary.

    Args:
        log: what `urank.read` opened.
        folder: where to write; it appears, complete, when all is done.
        split: "hash" of the query id (a query keeps its split when data is added), or "time" (the newest queries, by
            their latest showing, are held out).
        valid, test: shares of the queries to hold out.
        positions: K; items further down are candidates that nobody saw. A ranker learns to order them too, a click
            model does not learn from them. When left out all items were shown or, if the log is a folder that
            `prepare` wrote, those that were shown there.
        overwrite: replace the folder if it exists.
        bucket_bytes: about how much of the log is held in memory at once.
        report: told how far it is.
    """
    last = checked(log, folder, split, valid, test, positions)
    with new_folder(folder, marker="schema.json", overwrite=overwrite) as target:
        with _scratch(target) as scratch, Buckets(scratch, log.row_bytes, bucket_bytes, log.size) as buckets:
            times: list[pl.DataFrame] = []
            for frame, done in prefetch(log.batches()):
                if last is not None:
                    refuse_clicks_beyond(log, frame, last)
                keyed = with_keys(frame)
                if split == "time":
                    times.append(keyed.group_by(QUERY).agg(pl.col("timestamp").max()))
                buckets.add(keyed)
                report("reading", done, log.size)
            assign, cuts = assignment(split, valid, test, times)
            summary = Summary(log.schema, last)
            with ThreadPoolExecutor(max_workers=1) as background:
                writers = {name: SplitWriter(target / name, background) for name in SPLITS}
                for number, bucket in enumerate(prefetch(buckets)):
                    write_bucket(log, bucket, assign, writers, summary)
                    report("writing", number + 1, len(buckets))
                for writer in writers.values():
                    writer.close()
        return describe(target, log, summary, {"by": split, "valid": valid, "test": test, **cuts})


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder for buckets: within the target, which is where there is room, or here if that is elsewhere."""
    if not is_remote(target):
        yield target / "_buckets"
        return
    with tempfile.TemporaryDirectory(prefix="urank-") as name:
        yield Path(name) / "_buckets"


def checked(log: Log, folder: str | Path, split: str, valid: float, test: float, positions: int | None) -> int | None:
    """The last position that counts as shown, none when all do; refuses what cannot be asked of a log."""
    check_shares(valid, test)
    if is_within(log.name, folder):
        raise ConfigError(f"{folder} holds the log itself, which would be replaced before it is read; name another one")
    if positions is not None and positions < 1:
        raise ConfigError(f"positions must be a whole number from 1 up; got {positions}")
    last = positions if positions is not None else positions_of(log.name)
    if split not in ("hash", "time"):
        raise ConfigError(f"split must be 'hash' or 'time'; got {split!r}")
    if split == "time" and "timestamp" not in log.schema.roles:
        raise ConfigError(f"split 'time' needs a timestamp; {log.name} has none (name it with --column timestamp=NAME)")
    return last


def describe(target: Path, log: Log, summary: Summary, split: dict[str, Any]) -> dict[str, Any]:
    """Write the `schema.json` of a folder, which makes it a prepared log, and return what it says."""
    if not summary.positions:
        raise DataError(f"positions must be at least the lowest position of {log.name}; got {summary.last}")
    description = {
        "format": "urank prepared log",
        "version": FORMAT_VERSION,
        "source": log.name,
        "split": split,
        **summary.to_dict(),
    }
    text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False)
    (target / "schema.json").write_text(text + "\n", encoding="utf-8")
    return description
