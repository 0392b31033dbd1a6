"""A sample of the queries of a prepared log, for what cannot take all of them.

`urank prepare` writes queries in the order of their hashes, so that some row groups next to each other hold a random
sample of them. Taking these costs next to nothing: only the first and the last, where a query may go on in the row
group beside it, are looked into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.dataset import Dataset, Group
from urank.log.lists import offsets_of_runs
from urank.log.split import SPLITS
from urank.log.view import Part, View, some_lists
from urank.paths import open_parquet

__all__ = ["sampled", "that_fits"]


def sampled(dataset: Dataset, most_rows: Mapping[str, int], *, seed: int = 0) -> Dataset:
    """A prepared log with about so many impressions of each split that is named, in whole queries.

    Args:
        dataset: the prepared log.
        most_rows: split -> how many impressions; at least one query is taken, however long.
        seed: decides which queries.

    Returns:
        A view of the log, in which splits that are not named are whole; the log itself when all of it fits.
    """
    parts = {
        split: _sample(dataset, split, most, np.random.default_rng([seed, SPLITS.index(split)]))
        for split, most in most_rows.items()
        if dataset.rows(split) > max(most, 0)
    }
    return View(dataset, parts) if parts else dataset


def that_fits(dataset: Dataset, splits: Sequence[str], most_rows: float) -> Dataset:
    """The log, or a sample of the queries of these splits when they have more impressions than so many, each split in
    proportion to its size."""
    rows = {split: dataset.rows(split) for split in splits}
    share = most_rows / max(1, sum(rows.values()))
    return dataset if share >= 1 else sampled(dataset, {split: int(share * each) for split, each in rows.items()})


def _sample(dataset: Dataset, split: str, most_rows: int, rng: np.random.Generator) -> Part:
    """Row groups from a random one on, of those after which enough rows come."""
    groups = dataset.groups(split)
    rows = _rows_of(dataset, groups)
    enough = np.flatnonzero(np.cumsum(rows[::-1])[::-1] >= most_rows)
    first = int(rng.choice(enough))
    found = _from(dataset, groups, rows, first, most_rows)
    return found if found.rows else _from(dataset, groups, rows, 0, most_rows)


def _from(dataset: Dataset, groups: Sequence[Group], rows: NDArray[np.int64], first: int, most_rows: int) -> Part:
    """Whole queries from the row group `first` on, until there are enough; at least one, if one begins there."""
    part = Part()
    for number in range(first, len(groups)):
        group, left = groups[number], most_rows - part.rows
        if (part.rows or number == 0) and rows[number] <= left:
            part.groups.append(group)
            part.rows += int(rows[number])
            continue
        block = dataset.read(group, ["position"])
        query = block.query_hash
        ends = offsets_of_runs(query)  # the place of the first list of each query, and the end
        goes_on = number > 0 and query[0] == dataset.read(groups[number - 1], ["position"]).query_hash[-1]
        begin, least = (0, int(goes_on)) if part.rows else (int(goes_on), int(goes_on) + 1)
        if begin + 1 == len(ends):  # nothing but more of a query that began before
            continue
        rows_until = block.offsets[ends] - block.offsets[ends[begin]]
        end = max(least, int(np.searchsorted(rows_until, left, side="right")) - 1)
        if end > begin:
            part.groups.append(some_lists(group, np.arange(ends[begin], ends[end])))
            part.rows += int(rows_until[end])
        if end + 1 < len(ends):
            break
    return part


def _rows_of(dataset: Dataset, groups: Sequence[Group]) -> NDArray[np.int64]:
    """The number of impressions `[groups]`: by the footers of the files, where whole row groups are meant."""
    rows: list[int] = []
    for path, of_file in groupby(groups, lambda group: group.path):
        try:
            with open_parquet(path) as file:
                metadata = file.metadata
                rows += [
                    _values(metadata.row_group(group.number))
                    if group.keep is None
                    else int(dataset.read(group, ["position"]).offsets[-1])
                    for group in of_file
                ]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return np.array(rows, dtype=np.int64)


def _values(row_group: pq.RowGroupMetaData) -> int:
    """The number of positions in a row group; no list is empty, so there is one for each impression."""
    columns = (row_group.column(number) for number in range(row_group.num_columns))
    return int(next(column.num_values for column in columns if column.path_in_schema.split(".")[0] == "position"))
