"""Prepare, train, evaluate and rank on the workers of a Ray cluster.

Training and evaluation run on Ray Train: the workers fit the networks together and each evaluates its share of the
lists. Preparation and ranking run on Ray Data: rows are gathered by query and every group is processed by one task.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from urank import distributed
from urank.errors import ConfigError, DataError, UrankError
from urank.evaluation.policy_evaluation import Evaluation
from urank.log import prepare
from urank.log.columns import QUERY
from urank.log.dataset import Dataset
from urank.log.identifiability import ClickOutcomes
from urank.log.prepare import DatasetSummary, SplitRule, SplitWriter
from urank.log.reader import PARQUET, Log, find_files
from urank.log.splits import SPLITS, stable_hash
from urank.memory import DEFAULT_MEMORY, Memory
from urank.model_io import load_model
from urank.pipeline import Review, Training, evaluate, fit_and_save, named_policies
from urank.progress import Report, silent
from urank.ranking.guard import Guard
from urank.ranking.matching import Method
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import UrankConfig
from urank.ray.cluster import Cluster, connected
from urank.ray.workers import run_on_workers
from urank.storage import absolute, is_remote, new_folder, open_parquet, parquet_writer, to_path


def model_files(folder: str | Path) -> dict[str, bytes]:
    """Read the files of a model, by name."""
    load_model(folder)  # fail fast: before it is sent to every worker
    try:
        return {path.name: path.read_bytes() for path in sorted(to_path(folder).iterdir()) if path.is_file()}
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error


def model_from_files(files: Mapping[str, bytes]) -> RankingModel:
    """Load a model from its files."""
    with tempfile.TemporaryDirectory(prefix="urank-model-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        return load_model(name)


GROUP = "__group"
"""Column with the group of a row."""

FILES_READ = 8
"""Files of a log, evenly spaced, in which the outcomes of the click are looked for."""

PACKED = 4
"""Ratio of the size of rows in memory to that in Parquet files, roughly."""

_REFUSAL = re.compile(r"urank\.errors\.(ConfigError|DataError): (.+)")


def by_group(
    read: Callable[..., Iterator[pa.Table]],
    work: Callable[..., pa.Table],
    sources: Sequence[Any],
    groups: int,
    workers: int,
    settings: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Read each source in a task, gather the rows of each group, and process each group in a task.

    Args:
        read: Yields the tables of some sources, each row with its `GROUP`; called as `read({"source": …}, **settings)`.
        work: Processes the rows of one group, as `work(table, **settings)`. It may be called again after the loss of a
            worker, so the files it writes must have the same names each time.
        sources, groups: Arguments of `read`, one at a time, and the largest number of groups.
        workers: How many tasks of a kind run at once.

    Yields:
        The rows of the results of `work`, as dicts; raises the refusal of a task.
    """
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        items = ray.data.from_items([{"source": each} for each in sources], override_num_blocks=len(sources))
        readers, doers = (ray.data.TaskPoolStrategy(size=min(workers, tasks)) for tasks in (len(sources), groups))
        rows = items.map_batches(read, fn_kwargs=dict(settings), batch_size=1, compute=readers)
        gathered = rows.groupby(GROUP, num_partitions=groups)
        done = gathered.map_groups(work, fn_kwargs=dict(settings), batch_format="pyarrow", compute=doers)
        yield from done.iter_rows()
    except ray.exceptions.RayError as error:
        raise _refusal(error) from error


def refuse_lost_files(target: Path, names: Sequence[str]) -> None:
    """Refuse an output folder that is not shared by all machines, so that parts of it are missing here."""
    absent = next((name for name in names if not (target / name).is_file()), None)
    if absent is not None:
        shared = "must be a place that all machines of the cluster share"
        raise ConfigError(f"{target.parent} {shared}; a worker wrote {absent} elsewhere")


def _refusal(error: BaseException) -> BaseException:
    """Find the refusal behind an error of Ray; return the error itself if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UrankError):
            return type(cause)(str(cause).splitlines()[0])
        cause = getattr(cause, "cause", None) or cause.__cause__
    found = _REFUSAL.search(str(error))
    if found is None:
        return error
    return (ConfigError if found[1] == "ConfigError" else DataError)(found[2].strip())


def prepare_on_ray(
    log: Log,
    folder: str | Path,
    cluster: Cluster,
    *,
    split_by: Literal["hash", "time"] = "hash",
    valid: float = 0.1,
    test: float = 0.1,
    positions: int | None = None,
    keep: Collection[str] = (),
    overwrite: bool = False,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> dict[str, Any]:
    """Write the prepared dataset, as `urank.prepare` does, and return its `schema.json` as a dictionary.

    The lists are those of `urank.prepare`, in other files: one or more for each bucket of queries. The log itself is
    passed between tasks, so the object store, or the disk it spills to, must have room for it. Outcomes of the click
    are detected on the first batches of some files.

    Args:
        log: A log opened by `urank.read`, in files that every worker can read.
        folder: Where to write, reachable by every worker; at a URL it is complete when `schema.json` exists.
        split_by, valid, test, positions, keep, overwrite: As in `urank.prepare`.
        memory: Memory budget of each task.
    """
    last = prepare.validate_arguments(log, folder, split_by, valid, test, positions, keep)
    left_out = _outcomes(log, keep)
    log = replace(log, schema=log.schema.without(left_out))
    rows = max(1, memory.bucket_bytes // log.row_bytes)
    buckets = max(8, 4 * cluster.workers, int(PACKED * log.size / log.row_bytes / rows))
    with connected(cluster), new_folder(folder, marker="schema.json", overwrite=overwrite) as target:
        settings: dict[str, Any] = {"log": log, "last": last, "buckets": buckets, "target": target}
        numbers = range(log.files)
        times: list[pl.DataFrame] = []
        if split_by == "time":
            report("times of the queries", 0, None)
            found = by_group(_read, _times, numbers, buckets, cluster.workers, settings)
            schema = {QUERY: pl.UInt64, "timestamp": pl.Int64}
            times = [pl.DataFrame({QUERY: row["query"], "timestamp": row["latest"]}, schema=schema) for row in found]
            if not times:
                raise log.empty_error()
        assign, cuts = prepare.split_rule(split_by, valid, test, times)
        summary = DatasetSummary(log.schema, last)
        report("writing", 0, buckets)
        settings |= {"assign": assign}
        files: list[str] = []
        for done, row in enumerate(by_group(_read, _write, numbers, buckets, cluster.workers, settings), start=1):
            summary.join(row["summary"])
            files += row["files"]
            report("writing", done, buckets)
        report("writing", buckets, buckets)
        if not files:
            raise log.empty_error()
        refuse_lost_files(target, files)
        shares = {"by": split_by, "valid": valid, "test": test, **cuts}
        return prepare.write_schema(target, log, summary, shares, left_out)


def _outcomes(log: Log, keep: Collection[str]) -> list[str]:
    """Detect outcomes of the click, except those to keep, on the first batch of up to `FILES_READ` files."""
    found = ClickOutcomes(log.schema.without(keep))
    for number in np.linspace(0, log.files - 1, min(log.files, FILES_READ)).astype(int).tolist():
        for frame, _done in islice(log.batches(only=[number]), 1):
            found.add(frame)
    return found.names()


def _read(batch: Mapping[str, Any], log: Log, last: int | None, buckets: int, **_: Any) -> Iterator[pa.Table]:
    """Yield the rows of some files, each with the bucket of its query."""
    for frame, _done in log.batches(only=[int(number) for number in batch["source"]]):
        if last is not None:
            prepare.refuse_unseen_clicks(log, frame, last)
        keyed = prepare.add_hashes(frame)
        bucket = pl.Series(GROUP, (keyed[QUERY].to_numpy() % np.uint64(buckets)).astype(np.int32))
        yield keyed.with_columns(bucket).to_arrow()


def _times(table: pa.Table, **_: Any) -> pa.Table:
    """Compute the latest time of each query of a bucket."""
    latest = pl.DataFrame(pl.from_arrow(table)).group_by(QUERY).agg(pl.col("timestamp").max())
    return latest.select(query=pl.col(QUERY).implode(), latest=pl.col("timestamp").implode()).to_arrow()


def _write(table: pa.Table, log: Log, last: int | None, target: Path, assign: SplitRule, **_: Any) -> pa.Table:
    """Sort a bucket into lists and write those of each split; a repeated task writes the same files."""
    frame = pl.DataFrame(pl.from_arrow(table))
    prefix = f"part-{int(frame[GROUP][0]):05d}-"
    summary = DatasetSummary(log.schema, last)
    with ThreadPoolExecutor(max_workers=1) as background:
        writers = {name: SplitWriter(target / name, background, prefix) for name in SPLITS}
        prepare.write_bucket(log, frame.drop(GROUP), assign, writers, summary)
        for writer in writers.values():
            writer.close()
    files = [f"{name}/{file}" for name, writer in writers.items() for file in writer.files]
    return pa.table({"summary": [summary.to_json()], "files": [files]})


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
        candidates: Parquet files that every worker can read: a file, a folder, a glob, or a URL.
        output: Folder to write; it appears when everything is done. At a URL it is complete when `ranked.json`, with
            the numbers of lists and candidates, exists.
        method, top, guard, columns: As in `RankingModel.rank`.
        memory: Memory budget of each task.

    Returns:
        The numbers of `lists`, `candidates` and `kept` candidates.
    """
    paths = find_files(candidates)
    if not all(path.name.endswith(PARQUET) for path in paths):
        raise ConfigError(f"the engine ray ranks Parquet files; {candidates} contains others")
    names = dict(columns or {})
    ids = [names.get(role, role) for role in ("query_id", "session_id")]
    size = sum(path.stat().st_size for path in paths)
    parts = max(2 * cluster.workers, int(PACKED * size // memory.bucket_bytes))
    rank = {"method": method, "top": top, "guard": guard, "columns": columns, "memory": memory}
    with connected(cluster), new_folder(output, marker="ranked.json", overwrite=overwrite) as target:
        import ray

        sources = [path if is_remote(path) else path.absolute() for path in paths]
        settings = {"model": ray.put(model_files(model)), "rank": rank, "ids": ids, "parts": parts, "target": target}
        settings["sources"] = sources
        written: list[str] = []
        counts = {"lists": 0, "candidates": 0, "kept": 0}
        report("ranking", 0, parts)
        rows = by_group(_read_candidates, _ranked, range(len(sources)), parts, cluster.workers, settings)
        for done, row in enumerate(rows, start=1):
            written.append(row["file"])
            counts = {name: count + int(row[name]) for name, count in counts.items()}
            report("ranking", done, parts)
        report("ranking", parts, parts)
        refuse_lost_files(target, written)
        text = json.dumps({"format": "urank ranked", **counts}) + "\n"
        (target / "ranked.json").write_text(text, encoding="utf-8")
    return counts


def _read_candidates(
    batch: Mapping[str, Any], sources: Sequence[Path], ids: list[str], parts: int, **_: Any
) -> Iterator[pa.Table]:
    """Yield the rows of some files, each with the part of its query."""
    for source in (sources[int(number)] for number in batch["source"]):
        with open_parquet(source) as file:
            if ids[0] not in file.schema_arrow.names:
                raise DataError(f"candidates must have the column '{ids[0]}' for the engine ray; {source} has none")
            for rows in file.iter_batches(batch_size=65_536):
                table = pa.Table.from_batches([rows])
                query = pl.Series(table[ids[0]].combine_chunks()).cast(pl.String).fill_null("")
                part = (stable_hash(query) % np.uint64(parts)).astype(np.int32)
                yield table.append_column(GROUP, pa.array(part))


def _ranked(table: pa.Table, model: Any, rank: Mapping[str, Any], ids: list[str], target: Path, **_: Any) -> pa.Table:
    """Rank the lists of a part and write them; a repeated task writes the same file."""
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
    """Load the model once per Ray process."""
    import ray

    return model_from_files(ray.get(files))


def train_on_ray(
    dataset: Dataset,
    config: UrankConfig,
    output: str | Path,
    *,
    cluster: Cluster,
    checkpoints: str | Path,
    onnx: bool = True,
    overwrite: bool = False,
    review: Review | None = None,
    report: Report = silent,
) -> tuple[None, Training]:
    """Train and save a model as `fit_and_save` does, on the workers of a cluster.

    Args:
        dataset: Prepared log that every worker can read: a folder on this machine or a shared disk, or a URL. Its
            memory budget is that of each worker.
        checkpoints: Folder for the state of every training, from which replacements of lost workers resume; only the
            first worker writes and reads it.
    """
    options = {"onnx": onnx, "review": review}
    data = absolute(dataset.folder), dataset.memory
    settings = {"data": data, "config": config.model_dump_json(), "checkpoints": checkpoints, "options": options}
    files, training = run_on_workers(_fit, settings, cluster, report=report)
    with new_folder(output, marker="manifest.json", overwrite=overwrite) as target:
        for name, content in files.items():
            (target / name).write_bytes(content)
    return None, training


def _fit(settings: Mapping[str, Any], report: Report) -> tuple[dict[str, bytes], Training]:
    """Fit on one worker; return the files of the model and the summary of its training."""
    folder, memory = settings["data"]
    config = UrankConfig.model_validate_json(settings["config"])
    with tempfile.TemporaryDirectory(prefix="urank-") as name:
        model = Path(name) / "model"
        options = {"checkpoints": to_path(settings["checkpoints"]), "report": report, **settings["options"]}
        _, training = fit_and_save(Dataset(folder, memory=memory), config, model, **options)
        files = {path.name: path.read_bytes() for path in sorted(model.iterdir())} if model.exists() else {}
    return files, training


def evaluate_on_ray(
    models: Sequence[str],
    data: str | Path,
    cluster: Cluster,
    *,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
    **options: Any,
) -> Evaluation:
    """Estimate what models would earn, as `urank.evaluate` does.

    Args:
        models: Folders of models.
        data: Prepared log that every worker can read: a folder on this machine or a shared disk, or a URL.
        memory: Memory budget of each worker.
        options: `split`, `estimator`, `floor` and `config` of `urank.evaluate`.
    """
    files = [(name, model_files(name)) for name in models]
    settings = {"models": files, "data": (data, memory), "options": options}
    found: Evaluation = run_on_workers(_judge, settings, cluster, report=report)
    return found


def _judge(settings: Mapping[str, Any], report: Report) -> Evaluation | None:
    """Evaluate on one worker."""
    folder, memory = settings["data"]
    models = [model_from_files(files) for _, files in settings["models"]]
    policies = named_policies([name for name, _ in settings["models"]], models)
    found = evaluate(policies, Dataset(folder, memory=memory), report=report, **settings["options"])
    return found if distributed.rank() == 0 else None
