"""`evaluate` on the workers of a Ray cluster: they train its click models together, and each judges its share."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from urank import distributed
from urank.errors import ConfigError, DataError, UrankError
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.evaluation.policy_evaluation import Evaluation
from urank.log.columns import QUERY
from urank.log.dataset import Dataset
from urank.log.prepare import (
    Assign,
    SplitWriter,
    Summary,
    assignment,
    describe,
    refuse_clicks_beyond,
    validate_arguments,
    with_keys,
    write_bucket,
)
from urank.log.reader import PARQUET, Log, find_files
from urank.log.splits import SPLITS, stable_hash
from urank.memory import DEFAULT_MEMORY, Memory
from urank.model_io import load_model, save_model
from urank.pipeline import evaluate, fit_model, named_policies
from urank.progress import Report, silent
from urank.ranking.guard import Guard
from urank.ranking.positions import Method
from urank.ranking.ranking_model import RankingModel
from urank.ranking.urank_config import UrankConfig
from urank.ranking.utility import FLOOR
from urank.ray.cluster import Cluster, connected
from urank.ray.workers import run_on_workers
from urank.report.click_report import FitReport
from urank.report.fit import fit_report
from urank.storage import is_remote, new_folder, open_parquet, parquet_writer, to_path

__all__ = [
    "GROUP",
    "PACKED",
    "Trained",
    "by_group",
    "evaluate_on_ray",
    "model_files",
    "model_from_files",
    "prepare_on_ray",
    "rank_on_ray",
    "refuse_lost_files",
    "train_on_ray",
]


def model_files(folder: str | Path) -> dict[str, bytes]:
    """The files of a model, by name."""
    load_model(folder)  # better refused here than by every worker
    try:
        return {path.name: path.read_bytes() for path in sorted(to_path(folder).iterdir()) if path.is_file()}
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error


def model_from_files(files: Mapping[str, bytes]) -> RankingModel:
    """The model again."""
    with tempfile.TemporaryDirectory(prefix="urank-model-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        return load_model(name)


GROUP = "__group"
"""The column that says which rows belong together."""

PACKED = 4
"""Rows in memory take about so many times what they take in Parquet files."""

_REFUSAL = re.compile(r"urank\.errors\.(ConfigError|DataError): (.+)")


def by_group(
    read: Callable[..., Iterator[pa.Table]],
    work: Callable[..., pa.Table],
    sources: Sequence[Any],
    groups: int,
    workers: int,
    settings: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Read sources in tasks of their own, gather the rows of each group, and work on each group in a task.

    Args:
        read: gives the tables of some sources, each row with its `GROUP`; called as `read({"source": …}, **settings)`.
        work: takes the rows of one group, as `work(table, **settings)`. It may be called again after the loss of a
            worker, so what it writes must have the same name each time.
        sources: what `read` is given, one at a time.
        groups: how many groups there are at most.
        workers: how many tasks of a kind run at once.
        settings: for both.

    Yields:
        the rows of what `work` gave, as dictionaries.

    Raises:
        UrankError: what a task refused.
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
    """Refuse an output of which workers wrote parts where this process cannot see them."""
    absent = next((name for name in names if not (target / name).is_file()), None)
    if absent is not None:
        raise ConfigError(
            f"{target.parent} must be a place that all machines of the cluster share; a worker wrote {absent} elsewhere"
        )


def _refusal(error: BaseException) -> BaseException:
    """The refusal that a task of Ray met with, if it was one; otherwise the error as it is."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UrankError):
            return type(cause)(str(cause).splitlines()[0])
        cause = getattr(cause, "cause", None) or cause.__cause__
    found = _REFUSAL.search(str(error))
    if found is None:
        return error
    return (ConfigError if found[1] == "ConfigError" else DataError)(found[2].strip())


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
    last = validate_arguments(log, folder, split, valid, test, positions)
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
        rows = by_group(
            _read_rank, _ranked, range(len(sources)), parts, cluster.workers, settings | {"sources": sources}
        )
        for done, row in enumerate(rows, start=1):
            written.append(row["file"])
            counts = {name: count + int(row[name]) for name, count in counts.items()}
            report("ranking", done, parts)
        report("ranking", parts, parts)
        refuse_lost_files(target, written)
        text = json.dumps({"format": "urank ranked", **counts}) + "\n"
        (target / "ranked.json").write_text(text, encoding="utf-8")
    return counts


def _read_rank(
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


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training on a cluster made.

    Attributes:
        files: the files of the model, by name.
        judged: how good its click model is.
        name, method, why: of the model, how it ranks, and how that was chosen.
        rounds: of every network, by name, as `History` has them.
    """

    files: dict[str, bytes]
    judged: FitReport
    name: str
    method: str
    why: str
    rounds: dict[str, list[dict[str, float]]]

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model into a folder; `urank.load_model` reads it."""
        with new_folder(folder, marker="manifest.json", overwrite=overwrite) as target:
            for name, content in self.files.items():
                (target / name).write_bytes(content)


def train_on_ray(
    data: str | Path,
    config: UrankConfig,
    cluster: Cluster,
    *,
    checkpoints: str | Path,
    memory: Memory = DEFAULT_MEMORY,
    truth: str | None = None,
    onnx: bool = True,
    report: Report = silent,
) -> Trained:
    """Train a model as `fit_model` does.

    Args:
        data: a prepared log that every worker can read: a folder on this machine or a shared disk, or a URL.
        config: settings.
        cluster: where.
        checkpoints: a folder for the state of every training, from which workers that replace lost ones go on; only
            the first worker writes and reads it.
        memory: what each worker may take.
        truth: what `urank simulate` wrote, to compare with.
        onnx: write the model as ONNX graphs too.
        report: told how far it is.
    """
    settings = {
        "data": data,
        "config": config.model_dump_json(),
        "checkpoints": checkpoints,
        "memory": memory.total,
        "truth": truth,
        "onnx": onnx,
    }
    trained: Trained = run_on_workers(_fit, settings, cluster, report=report)
    return trained


def _fit(settings: Mapping[str, Any], report: Report) -> Trained | None:
    """On each worker."""
    dataset = Dataset(settings["data"], memory=Memory(settings["memory"]))
    config = UrankConfig.model_validate_json(settings["config"])
    fit = fit_model(dataset, config, checkpoints=to_path(settings["checkpoints"]), report=report)
    if distributed.rank():
        return None
    with distributed.single_process(), tempfile.TemporaryDirectory(prefix="urank-") as name:
        judged = fit_report(fit.clicks, dataset, config.clicks, truth=settings["truth"])
        report("writing the model", 0, None)
        folder = Path(name) / "model"
        facts = {"quality": judged.to_dict(), "why": fit.why}
        save_model(fit.model, config, folder, onnx=settings["onnx"], facts=facts)
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return Trained(files, judged, fit.model.name, fit.model.method, fit.why, fit.rounds)


def evaluate_on_ray(
    models: Sequence[str],
    data: str | Path,
    cluster: Cluster,
    *,
    split: str = "test",
    estimator: str = "auto",
    floor: float = FLOOR,
    config: CrossfitConfig | None = None,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> Evaluation:
    """What models would earn, as `urank.evaluate` says it.

    Args:
        models: folders of models.
        data: a prepared log that every worker can read: a folder on this machine or a shared disk, or a URL.
        cluster: where.
        split, estimator, floor, config, report: as in `urank.evaluate`.
        memory: what each worker may take.
    """
    settings = {
        "models": [(name, model_files(name)) for name in models],
        "data": data,
        "memory": memory.total,
        "split": split,
        "estimator": estimator,
        "floor": floor,
        "config": config.model_dump_json() if config is not None else None,
    }
    found: Evaluation = run_on_workers(_judge, settings, cluster, report=report)
    return found


def _judge(settings: Mapping[str, Any], report: Report) -> Evaluation | None:
    """On each worker."""
    config = settings["config"]
    names = [name for name, _ in settings["models"]]
    models = [model_from_files(files) for _, files in settings["models"]]
    found = evaluate(
        named_policies(names, models),
        Dataset(settings["data"], memory=Memory(settings["memory"])),
        split=settings["split"],
        estimator=settings["estimator"],
        floor=settings["floor"],
        config=CrossfitConfig.model_validate_json(config) if config is not None else None,
        report=report,
    )
    return found if distributed.rank() == 0 else None
