"""Several files that are one log: the columns their folders name, and whether their columns agree."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import unquote

import polars as pl

from urank.errors import DataError
from urank.log.files import FileFormat
from urank.log.schema import is_index
from urank.paths import to_path

__all__ = ["add_partitions", "merged_dtypes"]

_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")
_MISSING = "__HIVE_DEFAULT_PARTITION__"
_TEXTS = (pl.String, pl.Categorical, pl.Enum)


def add_partitions(files: Sequence[FileFormat], source: str) -> None:
    """Give each file the columns that its folders name: `day=3/part.parquet` has the column `day`.

    Values are whole numbers when all of them are, otherwise text; what stands for a missing value is missing.
    """
    root = _fixed_part(source)
    found = [
        {unquote(key): unquote(value) for key, equals, value in (part.partition("=") for part in parts) if equals}
        for parts in (file.path.relative_to(root).parts[:-1] for file in files if file.path != root)
    ]
    for key in dict.fromkeys(key for partition in found for key in partition):
        texts = [partition.get(key) for partition in found]
        known = [text for text in texts if text != _MISSING]
        whole = all(text is not None and _WHOLE.fullmatch(text) for text in known)
        for file, text in zip(files, texts, strict=True):
            if text is None:
                raise DataError(f"{file.name} does not stand in a folder named {key}=…, as other files of {source} do")
            if key in file.dtypes:
                raise DataError(f"{file.name} has a column '{key}' and stands in a folder that names it too")
            value = None if text == _MISSING else text
            file.constants[key] = int(value) if whole and value is not None else value
            file.dtypes[key] = (pl.Int64() if whole else pl.String()) if known else pl.Null()


def _fixed_part(source: str) -> Path:
    """The folder under which partitions are told: the source itself, or what stands before a glob's first wildcard."""
    path = to_path(source)
    if path.exists():
        return path
    while any(wildcard in str(path) for wildcard in "*?["):
        path = path.parent
    return path


def merged_dtypes(files: Sequence[FileFormat], free: Collection[str] = ()) -> dict[str, pl.DataType]:
    """The type of each column over all files: a file in which it is empty says nothing of it.

    Args:
        files: the files.
        free: columns whose types need not agree, since they are taken as text or left out.

    Raises:
        DataError: when files do not agree on what they hold; whole and fractional numbers do agree.
    """
    first = files[0]
    merged = dict(first.dtypes)
    origin = dict.fromkeys(merged, first.name)
    for other in files[1:]:
        for column in [*merged, *other.dtypes]:
            has, lacks = (first, other) if column in merged else (other, first)
            if column not in lacks.dtypes and not is_index(column):
                raise DataError(f"column '{column}' is in {has.name} but not in {lacks.name}")
        for column, dtype in other.dtypes.items():
            known = merged.get(column, dtype)
            if not _agree(known, dtype) and column not in free:
                raise DataError(
                    f"column '{column}' is {known} in {origin[column]} but {dtype} in {other.name} "
                    f"(--categorical {column} takes it as text, --drop {column} leaves it out)"
                )
            if known == pl.Null or (known.is_numeric() and dtype.is_float()):
                merged[column], origin[column] = dtype, other.name
    return merged


def _agree(a: pl.DataType, b: pl.DataType) -> bool:
    return a == b or (a.is_numeric() and b.is_numeric()) or (a in _TEXTS and b in _TEXTS) or pl.Null in (a, b)
