"""`urank prepare` on Ray Data: every file is read by one task, and every bucket of queries is sorted by another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from urank.files import new_folder
from urank.log.arrange import Assign, assignment, refuse_clicks_beyond, with_keys, write_bucket
from urank.log.prepare import checked, describe
from urank.log.read import Log
from urank.log.schema import QUERY
from urank.log.split import SPLITS
from urank.log.summary import Summary
from urank.log.write import SplitWriter
from urank.memory import DEFAULT_MEMORY, Memory
from urank.progress import Report, silent
from urank.scale.cluster import Cluster, connected
from urank.scale.data import GROUP, PACKED, by_group, refuse_lost_files

__all__ = ["prepare_on_ray"]

LEAST_BUCKETS = 8


def prepare_on_ray(
    log: Log,
    folder: str | Path,
    cluster: Cluster,
    *,
    split: Literal["hash", "time"] = "hash",
    valid: float = 0.1,
    test: float = 0.1,
    positions: int | None = None,
    overwrite: bool = False,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> dict[str, Any]:
    """Write the prepared dataset, as `urank.prepare` does, and return its `schema.json` as a dictionary.

    The lists are those that `urank.prepare` writes, in other files: one or more for each bucket of queries. What is
    given to Ray to be passed on between tasks is the log itself, so the object store, or the disk it spills to, must
    have room for it.

    Args:
        log: what `urank.read` opened; files that every worker can read.
        folder: where to write, which every worker can reach; at a URL it counts as written when `schema.json` is there.
        cluster: where.
        split, valid, test, positions, overwrite: as in `urank.prepare`.
        memory: what each task may take.
        report: told how far it is.
    """
    last = checked(log, folder, split, valid, test, positions)
    rows = max(1, memory.bucket_bytes // log.row_bytes)
    buckets = max(LEAST_BUCKETS, 4 * cluster.workers, int(PACKED * log.size / log.row_bytes / rows))
    with connected(cluster), new_folder(folder, marker="schema.json", overwrite=overwrite) as target:
        settings: dict[str, Any] = {"log": log, "last": last, "buckets": buckets, "target": target}
        numbers = range(log.files)
        times: list[pl.DataFrame] = []
        if split == "time":
            report("times of the queries", 0, None)
            found = by_group(_read, _times, numbers, buckets, cluster.workers, settings)
            schema = {QUERY: pl.UInt64, "timestamp": pl.Int64}
            times = [pl.DataFrame({QUERY: row["query"], "timestamp": row["latest"]}, schema=schema) for row in found]
            if not times:
                raise log.empty()
        assign, cuts = assignment(split, valid, test, times)
        summary = Summary(log.schema, last)
        report("writing", 0, buckets)
        settings |= {"assign": assign}
        files: list[str] = []
        for done, row in enumerate(by_group(_read, _write, numbers, buckets, cluster.workers, settings), start=1):
            summary.join(row["summary"])
            files += row["files"]
            report("writing", done, buckets)
        report("writing", buckets, buckets)
        if not files:
            raise log.empty()
        refuse_lost_files(target, files)
        return describe(target, log, summary, {"by": split, "valid": valid, "test": test, **cuts})


def _read(batch: Mapping[str, Any], log: Log, last: int | None, buckets: int, **_: Any) -> Iterator[pa.Table]:
    """The rows of some files, each with the bucket that its query belongs to."""
    for frame, _done in log.batches(only=[int(number) for number in batch["source"]]):
        if last is not None:
            refuse_clicks_beyond(log, frame, last)
        keyed = with_keys(frame)
        bucket = pl.Series(GROUP, (keyed[QUERY].to_numpy() % np.uint64(buckets)).astype(np.int32))
        yield keyed.with_columns(bucket).to_arrow()


def _times(table: pa.Table, **_: Any) -> pa.Table:
    """The latest time of each query of a bucket."""
    latest = pl.DataFrame(pl.from_arrow(table)).group_by(QUERY).agg(pl.col("timestamp").max())
    return latest.select(query=pl.col(QUERY).implode(), latest=pl.col("timestamp").implode()).to_arrow()


def _write(table: pa.Table, log: Log, last: int | None, target: Path, assign: Assign, **_: Any) -> pa.Table:
    """Sort a bucket into lists and write those of each split; a task that is run again writes the same files."""
    frame = pl.DataFrame(pl.from_arrow(table))
    prefix = f"part-{int(frame[GROUP][0]):05d}-"
    summary = Summary(log.schema, last)
    with ThreadPoolExecutor(max_workers=1) as background:
        writers = {name: SplitWriter(target / name, background, prefix) for name in SPLITS}
        write_bucket(log, frame.drop(GROUP), assign, writers, summary)
        for writer in writers.values():
            writer.close()
    files = [f"{name}/{file}" for name, writer in writers.items() for file in writer.files]
    return pa.table({"summary": [summary.to_json()], "files": [files]})
