"""`urank rank` on Ray Data: candidates are brought together by query, and every part is ranked on its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from urank.errors import ConfigError, DataError
from urank.files import new_folder
from urank.log.files import PARQUET, find_files
from urank.log.split import stable_hash
from urank.memory import DEFAULT_MEMORY, Memory
from urank.paths import is_remote, open_parquet, parquet_writer
from urank.progress import Report, silent
from urank.rankers.guardrail import Guard
from urank.rankers.order import Method
from urank.rankers.ranking import RankingModel
from urank.scale.cluster import Cluster, connected
from urank.scale.data import GROUP, PACKED, by_group, refuse_lost_files
from urank.scale.model_files import model_files, model_from_files

__all__ = ["rank_on_ray"]

BATCH_ROWS = 65_536


def rank_on_ray(
    model: str,
    candidates: str,
    output: str,
    cluster: Cluster,
    *,
    method: Method | None = None,
    top: int | None = None,
    guard: Guard | str | None = None,
    columns: Mapping[str, str] | None = None,
    memory: Memory = DEFAULT_MEMORY,
    overwrite: bool = False,
    report: Report = silent,
) -> dict[str, int]:
    """Rank candidates, in Parquet files in any order, into a folder of Parquet files.

    Args:
        model: the folder of a model.
        candidates: Parquet files that every worker can read: a file, a folder, a glob, or a URL.
        output: the folder to write, which appears when all is done; at a URL it is there when its `ranked.json` is,
            which says how many lists and candidates there are.
        cluster: where.
        method, top, guard, columns: as in `RankingModel.rank`.
        memory: what each task may take.
        overwrite: replace the folder if it exists.
        report: told how far it is.

    Returns:
        the numbers of `lists`, of `candidates` and of those that were `kept`.
    """
    paths = find_files(candidates)
    if not all(path.name.endswith(PARQUET) for path in paths):
        raise ConfigError(f"the engine ray ranks Parquet files; {candidates} holds others")
    names = dict(columns or {})
    ids = [names.get(role, role) for role in ("query_id", "session_id")]
    size = sum(path.stat().st_size for path in paths)
    parts = max(2 * cluster.workers, int(PACKED * size // memory.bucket_bytes))
    rank = {"method": method, "top": top, "guard": guard, "columns": columns, "memory": memory}
    with connected(cluster), new_folder(output, marker="ranked.json", overwrite=overwrite) as target:
        import ray

        files = ray.put(model_files(model))
        settings = {"model": files, "rank": rank, "ids": ids, "parts": parts, "target": target}
        sources = [path if is_remote(path) else path.absolute() for path in paths]
        written: list[str] = []
        counts = {"lists": 0, "candidates": 0, "kept": 0}
        report("ranking", 0, parts)
        rows = by_group(_read, _ranked, range(len(sources)), parts, cluster.workers, settings | {"sources": sources})
        for done, row in enumerate(rows, start=1):
            written.append(row["file"])
            counts = {name: count + int(row[name]) for name, count in counts.items()}
            report("ranking", done, parts)
        report("ranking", parts, parts)
        refuse_lost_files(target, written)
        text = json.dumps({"format": "urank ranked", **counts}) + "\n"
        (target / "ranked.json").write_text(text, encoding="utf-8")
    return counts


def _read(
    batch: Mapping[str, Any], sources: Sequence[Path], ids: list[str], parts: int, **_: Any
) -> Iterator[pa.Table]:
    """The rows of some files, each with the part that its query belongs to."""
    for source in (sources[int(number)] for number in batch["source"]):
        with open_parquet(source) as file:
            if ids[0] not in file.schema_arrow.names:
                raise DataError(f"candidates must have the column '{ids[0]}' for the engine ray; {source} has none")
            for rows in file.iter_batches(batch_size=BATCH_ROWS):
                table = pa.Table.from_batches([rows])
                query = pl.Series(table[ids[0]].combine_chunks()).cast(pl.String).fill_null("")
                part = (stable_hash(query) % np.uint64(parts)).astype(np.int32)
                yield table.append_column(GROUP, pa.array(part))


def _ranked(table: pa.Table, model: Any, rank: Mapping[str, Any], ids: list[str], target: Path, **_: Any) -> pa.Table:
    """Rank the lists of a part and write them; a task that is run again writes the same file."""
    number = table[GROUP][0].as_py()
    present = [name for name in ids if name in table.column_names]
    frame = pl.DataFrame(pl.from_arrow(table.drop_columns([GROUP]))).sort(present, maintain_order=True)
    ranked = _model(model).rank(frame, **rank).to_arrow()
    path = target / f"part-{number:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with parquet_writer(path, ranked.schema) as writer:
        writer.write_table(ranked)
    lists = frame.select(pl.struct(present).rle_id().n_unique()).item()
    return pa.table({"file": [path.name], "lists": [lists], "candidates": [frame.height], "kept": [ranked.num_rows]})


@lru_cache(maxsize=1)
def _model(files: Any) -> RankingModel:
    """The model, once in every process of Ray."""
    import ray

    return model_from_files(ray.get(files))
