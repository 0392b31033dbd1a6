"""Read SVMlight files of the LETOR collections: `label qid:ID index:value index:value … # comment`.

MSLR-WEB10K, Yahoo, Istella, MQ2007, MQ2008 and OHSUMED are distributed in this format. This module has its own parser
because scikit-learn's `load_svmlight_file` is several times slower, drops the document ids, rejects `NULL` and does
not name the invalid line. Files are read in blocks, whose lines and pairs are split and converted by Polars.
"""

from __future__ import annotations

import gzip
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.ragged import offsets_of_runs

BLOCK_BYTES = 4 << 20
MAX_BYTES = 8 << 30
MAX_FEATURES = 100_000  # without n_features: the result is dense, so a higher index is a mistake or too much memory
SUFFIXES = (".txt", ".dat", ".svm", ".letor", ".gz")

_FILLER = 1.79769313486231e308  # the mark of a missing value in Istella's files, as NULL in others
_FORM = "expected 'label qid:ID index:value …'"
_FIRST_WORDS = re.compile(rb"\s*[-+.\deE]+\s+qid:")


@dataclass(frozen=True, eq=False)
class Letor:
    """Labelled documents, grouped by query; queries are in the order of their first lines."""

    features: NDArray[np.float32]  # `[rows, F]`; a feature missing from a line is 0, `NULL` is NaN
    label: NDArray[np.float32]  # label, query: `[rows]`, relevance from 0, and query ids
    query: NDArray[np.int64]
    offsets: NDArray[np.int64]  # `[queries + 1]`, the bounds of the queries
    item: pl.Series | None  # document ids from the comments, None unless every line has one

    @property
    def n_features(self) -> int:
        return int(self.features.shape[1])

    @property
    def n_queries(self) -> int:
        return len(self.offsets) - 1


class _ParsedLines(NamedTuple):
    """Parsed lines: label and query `[rows]`; row, feature (from 1) and value `[pairs]` of all their pairs."""

    label: NDArray[np.float32]
    query: NDArray[np.int64]
    item: pl.Series | None
    row: NDArray[np.int64]
    feature: NDArray[np.int64]
    value: NDArray[np.float32]
    ascending: bool


class _InvalidLineError(Exception):
    """A line breaks a rule, which is the message; `line` is its place in the block."""

    def __init__(self, rule: str, line: int) -> None:
        super().__init__(rule)
        self.line = line


def read_letor(source: str | Path | Sequence[str | Path], *, n_features: int | None = None) -> Letor:
    """Read one file, all files of a folder, or several of these.

    Args:
        source: Files, or folders of .txt, .dat, .svm, .letor and .gz files; gzip is recognised by its content.
        n_features: The width of the result; the highest index in the files if None.

    Two files with the same query are refused: reading overlapping folds together would duplicate documents.
    """
    if n_features is not None and n_features < 1:
        raise ConfigError(f"n_features must be a whole number from 1 up; got {n_features}")
    paths = [path for each in ([source] if isinstance(source, str | Path) else source) for path in _files(each)]
    if not paths:
        raise DataError("source must name at least one file; got none")
    features = np.zeros((0, n_features or 0), dtype=np.float32)
    labels, queries, items = [], [], []
    owner: dict[int, Path] = {}
    for path in paths:
        in_file = []
        for lines in _blocks(path, n_features or MAX_FEATURES):
            features = _append(features, lines, path)
            labels.append(lines.label)
            in_file.append(lines.query)
            items.append(lines.item)
        if not in_file:
            raise DataError(f"{path}: {_FORM} in at least one line; got a file without data")
        for query in np.unique(np.concatenate(in_file)).tolist():
            if (other := owner.setdefault(query, path)) is not path:
                raise DataError(f"{path}: expected queries of its own; got qid {query}, which is also in {other}")
        queries += in_file
    known = [item for item in items if item is not None]
    item = pl.concat(known) if len(known) == len(items) else None
    return _grouped(features, np.concatenate(labels), np.concatenate(queries), item)


def is_letor(path: str | Path) -> bool:
    """Return whether the first line that is not a comment begins with a number and `qid:`."""
    with _opened(Path(path)) as file:
        while line := file.readline(1 << 16):
            if line.removeprefix(BOM_UTF8).partition(b"#")[0].strip():
                return _FIRST_WORDS.match(line.removeprefix(BOM_UTF8)) is not None
    return False


def _files(path: str | Path) -> list[Path]:
    path = Path(path)
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file())
    if not files:
        raise DataError(f"{path}: expected a folder with {', '.join(SUFFIXES)} files; got none")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            yield cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if zipped else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _blocks(path: Path, limit: int) -> Iterator[_ParsedLines]:
    """Parse a file block by block, without blocks of only blanks and comments."""
    first_line = 1
    with _opened(path) as file:
        while text := file.read(BLOCK_BYTES) + file.readline():
            text = text.removeprefix(BOM_UTF8) if first_line == 1 else text
            lines = text.decode(errors="backslashreplace").split("\n")
            try:
                parsed = _parse(lines, limit)
            except _InvalidLineError as error:
                shown = "".join(c if c.isprintable() else "�" for c in lines[error.line][:300].strip())
                shown = shown if len(shown) <= 60 else shown[:59] + "…"
                raise DataError(f"{path} line {first_line + error.line}: {error}; got {shown!r}") from None
            if parsed is not None:
                yield parsed
            first_line += len(lines) - 1


def _parse(lines: list[str], limit: int) -> _ParsedLines | None:
    """Parse lines; None if they contain only blanks and comments."""
    data, comment = (pl.col("line").struct.field(f"field_{i}") for i in (0, 1))
    words = data.str.replace_all(r"[ \t\r]{2,}|[\t\r]", " ").str.strip_chars(" ").str.splitn(" ", 3)
    docid = comment.str.extract(r"^[ \t]*docid[ \t]*=[ \t]*([^ \t\r]+)")
    rows = (
        pl.DataFrame({"line": lines})
        .with_row_index("number")
        .with_columns(pl.col("line").str.splitn("#", 2))
        .select("number", words.struct.rename_fields(["label", "query", "pairs"]).alias("words"), docid.alias("item"))
        .unnest("words")
        .filter(pl.col("label") != "")
        .with_row_index("row")
    )
    if not rows.height:
        return None
    pairs = rows.select("row", pl.col("pairs").str.split(" ")).explode("pairs").drop_nulls()
    pairs = pairs.select("row", pl.col("pairs").str.splitn(":", 2)).unnest("pairs")
    qid = pl.when(pl.col("query").str.starts_with("qid:")).then(pl.col("query").str.slice(4))
    label, query = rows.select(label=_number(pl.col("label")), query=_number(qid))
    index, value = pairs.select(index=_number(pl.col("field_0")), value=_number(pl.col("field_1")))
    row, feature = pairs["row"].to_numpy().astype(np.int64), index.fill_null(0).fill_nan(0).to_numpy()
    grade, ids, x = label.to_numpy(), query.to_numpy(), value.to_numpy()  # with NaN for null
    with np.errstate(over="ignore"):
        narrow = np.where(np.abs(x) == _FILLER, np.nan, x).astype(np.float32)
    known = (feature >= 1) & (feature <= limit) & (feature == np.floor(feature))
    key = row * (limit + 1) + np.where(known, feature, 0).astype(np.int64)
    ascending = bool((key[1:] > key[:-1]).all())
    duplicate = np.zeros(len(key), dtype=np.bool_) if ascending else known & pl.Series(key).is_duplicated().to_numpy()
    in_rows = [
        (_FORM, (label.is_null() | query.is_null()).to_numpy()),
        ("label must be a number from 0 up", ~((grade >= 0) & (grade <= np.finfo(np.float32).max))),
        ("qid must be a whole number", ~((ids == np.floor(ids)) & (np.abs(ids) < 2**53))),
    ]
    in_pairs = [
        (_FORM, (index.is_null() | value.is_null()).to_numpy()),
        (f"feature indices must be whole numbers from 1 to {limit}", ~known),
        ("feature values must be finite in float32", np.isinf(narrow)),
        ("a feature may occur only once in a line", duplicate),
    ]
    broken = [(int(np.argmax(flags)), rule) for rule, flags in in_rows if flags.any()]
    broken += [(int(row[np.argmax(flags)]), rule) for rule, flags in in_pairs if flags.any()]
    if broken:
        first, rule = min(broken, key=lambda each: (each[0], each[1] != _FORM))
        raise _InvalidLineError(rule, int(rows["number"][first]))
    item = None if rows["item"].null_count() else rows["item"]
    pairs_of = row, feature.astype(np.int64), narrow
    return _ParsedLines(grade.astype(np.float32), ids.astype(np.int64), item, *pairs_of, ascending)


def _number(text: pl.Expr) -> pl.Expr:
    """Parse numbers; `NULL` is NaN, and anything that is not a number is null."""
    return pl.when(text == "NULL").then(float("nan")).otherwise(text.cast(pl.Float64, strict=False))


def _append(features: NDArray[np.float32], lines: _ParsedLines, path: Path) -> NDArray[np.float32]:
    """Grow the features by parsed lines: in place, unless they have a higher index.

    A single high index makes every row as wide, so a table that would not fit into memory is refused.
    """
    start, width = len(features), max(features.shape[1], int(lines.feature.max(initial=0)))
    rows = start + len(lines.label)
    if 4 * rows * width > MAX_BYTES:
        raise DataError(
            f"{path}: {rows:,} documents with features up to {width:,} take {4 * rows * width / 2**30:.0f} GB as a "
            f"table, more than the {MAX_BYTES >> 30} that are allowed; is an index wrong?"
        )
    if width > features.shape[1]:
        narrow, features = features, np.zeros((start, width), dtype=np.float32)
        features[:, : narrow.shape[1]] = narrow
    features.resize((rows, width), refcheck=False)
    if lines.ascending and len(lines.value) == len(lines.label) * width:  # every line has every feature, in order
        features[start:] = lines.value.reshape(len(lines.label), width)
    else:
        features[start:][lines.row, lines.feature - 1] = lines.value
    return features


def _grouped(
    features: NDArray[np.float32], label: NDArray[np.float32], query: NDArray[np.int64], item: pl.Series | None
) -> Letor:
    """Make the rows of each query adjacent; nothing is copied if they already are."""
    offsets = offsets_of_runs(query)
    runs = query[offsets[:-1]]
    _, first, number = np.unique(runs, return_index=True, return_inverse=True)
    if len(first) < len(runs):
        order = np.argsort(np.repeat(first[number], np.diff(offsets)), kind="stable")
        features, label, query = features[order], label[order], query[order]
        item = None if item is None else item[order]
        offsets = offsets_of_runs(query)
    return Letor(features, label, query, offsets, item)
