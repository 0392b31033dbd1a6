"""`urank rank`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import polars as pl
import pyarrow.parquet as pq
import typer

from urank.cli.options import (
    Column,
    EngineOptions,
    MemoryOption,
    MethodOption,
    Overwrite,
    PrintOptions,
    command,
    role_columns,
)
from urank.errors import ConfigError
from urank.log.candidates import IDS
from urank.log.reader import PARQUET, find_files
from urank.memory import Memory
from urank.progress import Report
from urank.ranking.guard import Guard
from urank.storage import new_file, to_path

if TYPE_CHECKING:  # torch is slow to load
    from urank.log.candidates import Candidates
    from urank.ranking.matching import Method as RankMethod
    from urank.ranking.ranking_model import RankingModel


ROW_GROUP_BYTES = 32 * 2**20


@command()
def rank_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Output of `urank train`.")],
    candidates: Annotated[
        str,
        typer.Argument(
            metavar="CANDIDATES",
            help="Parquet or CSV (also gzipped): a file, a folder, a glob in quotes, or the URL of Parquet files.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="RANKED", help="The Parquet file to write; with the engine ray, a folder of them."
        ),
    ],
    method: MethodOption = None,
    top: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the first N of each list.", show_default="all")
    ] = None,
    guard: Annotated[
        str | None,
        typer.Option(
            metavar="shift:N|blend:SHARE",
            help="Stay close to the current order, given by the column position: no candidate moves more than N "
            "places, or the ranks of both orders are averaged. `urank guard` estimates what each level would earn.",
            show_default="none",
        ),
    ] = None,
    column: Column = None,
    memory: MemoryOption = "4GB",
    engine: EngineOptions = EngineOptions(),
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Rank lists of candidates, best first.

    The candidates have a row for each item: its query, the value of a click on it, and the features that the model was
    trained on. Other columns are ignored, so a log can be ranked as it is. The rows of a list must be adjacent, as they
    are when sorted by query; with the engine ray they may be in any order. They need not fit into memory.

    The result has the ids and, for each candidate, its `position`, its `score` (when the model has a scorer), the
    `probability` of a click there (or of a conversion, if that is the model's goal) and the expected `utility`. A
    candidate beyond the last position that the model knows has no probability, and utility 0. Candidates that break a
    rule are refused with the file and the row, and nothing is left behind.

    Example: `urank rank model candidates.parquet -o ranked.parquet --top 10`
    """
    from urank.model_io import load_model  # torch is slow to load

    columns = role_columns(column)
    bound = None if guard is None else Guard.parse(guard)
    limit, cluster = Memory.parse(memory), engine.cluster
    if cluster is None:
        _check_output(to_path(output), candidates, overwrite=overwrite)
    started = time.monotonic()
    loaded = load_model(model)
    chosen = loaded.method if method is None else method.value
    with printing.progress() as report:
        if cluster is None:
            required = ("query_id",) if bound is None else ("query_id", "position")
            source = loaded.candidates(candidates, columns=columns, required=required, memory=limit)
            counts = _rank_here(loaded, source, output, chosen, top, bound, report)
        else:
            from urank.ray.jobs import rank_on_ray

            asked: dict[str, Any] = {"method": chosen, "top": top, "guard": bound, "columns": columns}
            asked |= {"memory": limit, "overwrite": overwrite, "report": report}
            counts = rank_on_ray(str(model), candidates, output, cluster, **asked)
    seconds = time.monotonic() - started
    within = {} if bound is None else {"guard": str(bound)}
    document = {**counts, "method": chosen, **within, "seconds": round(seconds, 3), "output": str(output)}
    kept = "" if top is None else f" ({counts['kept']:,} kept)"
    how = chosen if bound is None else f"{chosen}, {bound.name}"
    sentence = (
        f"{counts['lists']:,} lists of {counts['candidates']:,} candidates{kept} ranked by {how} in {seconds:.1f} s, "
        f"written to {output}"
    )
    printing.show(document, lambda console: None, sentence)


def _rank_here(
    model: RankingModel,
    source: Candidates,
    output: str,
    method: RankMethod,
    top: int | None,
    guard: Guard | None,
    report: Report,
) -> dict[str, int]:
    """Rank into one file, in this process; return the numbers of lists, candidates and kept candidates."""
    counts = {"lists": 0, "candidates": 0, "kept": 0}
    with new_file(output) as working, _Writer(working) as writer:
        for some, ranked in model.ranked(source, method=method, top=top, guard=guard):
            writer.write(ranked)
            found = {"lists": len(some.offsets) - 1, "candidates": some.frame.height, "kept": ranked.height}
            counts = {name: count + found[name] for name, count in counts.items()}
            report("ranking", some.done, source.size)
    return counts


def _check_output(output: Path, candidates: str, *, overwrite: bool) -> None:
    if output.suffix not in PARQUET:
        raise ConfigError(f"--output must name a Parquet file, ending in {' or '.join(PARQUET)}; got {output}")
    if output.is_file() and not overwrite:
        raise ConfigError(f"{output} exists already; choose another name or pass --overwrite")
    if output in (paths := find_files(candidates)) or output.resolve() in {path.resolve() for path in paths}:
        raise ConfigError(f"{output} holds the candidates; choose another name")


class _Writer(AbstractContextManager["_Writer"]):
    """Write frames of any size into one Parquet file, in row groups of about `ROW_GROUP_BYTES`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[pl.DataFrame] = []
        self._bytes = 0
        self._file: Any = None

    def write(self, frame: pl.DataFrame) -> None:
        self._waiting.append(frame)
        self._bytes += int(frame.estimated_size())
        if self._bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = pl.concat(self._waiting).to_arrow()
        self._waiting, self._bytes = [], 0
        if self._file is None:
            # Scores hardly repeat, and a dictionary for them would double the time to write.
            repeated = [name for name in table.column_names if name in IDS or name == "position"]
            self._file = pq.ParquetWriter(self._path, table.schema, use_dictionary=repeated)
        self._file.write_table(table, row_group_size=max(1, table.num_rows))

    def __exit__(self, kind: object, *_: object) -> None:
        if self._waiting and kind is None:
            self._flush()
        if self._file is not None:
            self._file.close()
