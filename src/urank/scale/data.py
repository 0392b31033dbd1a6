"""What jobs of Ray Data share: rows are brought together by a number, and each number has a task for its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from urank.errors import ConfigError, DataError, UrankError

__all__ = ["GROUP", "PACKED", "by_group", "refuse_lost_files"]

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
