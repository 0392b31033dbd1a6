"""What jobs of Ray Data share: rows are brought together by a number, and each number has a task for its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from urank.errors import ConfigError, DataError, UrankError

__all__ = ["GROUP", "by_group", "source_error"]

GROUP = "__group"
"""The column that says which rows belong together."""

_REFUSAL = re.compile(r"urank\.errors\.(ConfigError|DataError): (.+)")


def by_group(
    read: Callable[..., Iterator[pa.Table]],
    work: Callable[..., pa.Table],
    sources: Sequence[Any],
    groups: int,
    settings: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Read sources in tasks of their own, gather the rows of each group, and work on each group in a task.

    Args:
        read: gives the tables of some sources, each row with its `GROUP`; called as `read({"source": …}, **settings)`.
        work: takes the rows of one group, as `work(table, **settings)`. It may be called again after the loss of a
            worker, so what it writes must have the same name each time.
        sources: what `read` is given, one at a time.
        groups: how many groups there are at most.
        settings: for both.

    Yields:
        the rows of what `work` gave, as dictionaries.

    Raises:
        UrankError: what a task refused.
    """
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        items = ray.data.from_items([{"source": source} for source in sources])
        rows = items.map_batches(read, fn_kwargs=dict(settings), batch_size=1)
        gathered = rows.groupby(GROUP, num_partitions=groups)
        yield from gathered.map_groups(work, fn_kwargs=dict(settings), batch_format="pyarrow").iter_rows()
    except ray.exceptions.RayError as error:
        raise source_error(error) from error


def source_error(error: BaseException) -> BaseException:
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
