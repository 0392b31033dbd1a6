"""Files in the SVMlight form of the LETOR collections: `label qid:ID index:value index:value … # comment`.

MSLR-WEB10K, Yahoo, Istella, MQ2007, MQ2008 and OHSUMED ship like this. We have our own reader because scikit-learn's
`load_svmlight_file` is several times slower, drops the document ids, refuses `NULL` and does not name the wrong line.

Written as `label:ID`, the first two words of a line are a pair like all the others. So a text with one pair in a row
is a CSV of two columns, which Arrow parses on all cores; the rest is array arithmetic. A file is read block by block,
and each block is added to the result before the next one is read.
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
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.ragged import list_ids, offsets_of_runs

__all__ = ["Letor", "is_letor", "letor_files", "read_letor"]

BLOCK_BYTES = 4 << 20
MOST_BYTES = 8 << 30
MOST_FEATURES = 100_000  # without n_features: the result is dense, so a higher index is a mistake or too much memory
SUFFIXES = (".txt", ".dat", ".svm", ".letor", ".gz")

_FILLER = 1.79769313486231e308  # what Istella's files hold where a feature is not known; it means missing, as NULL does
_FORM = "expected 'label qid:ID index:value …'"
_FIRST_WORDS = re.compile(rb"\s*[-+.\deE]+\s+qid:")
_COMMENT = re.compile(rb"#(?:[ \t]*docid[ \t]*=[ \t]*([^ \t\r\n]+))?[^\n]*")
_COMMENT_LINE = re.compile(rb"\n[ \t\r]*#[^\n]*")
_SPACE, _NEWLINE = np.frombuffer(b" \n", dtype=np.uint8)
_QID = np.frombuffer(b"qid:", dtype=np.uint8)
_IS_BLANK = np.isin(np.arange(256), list(b" \t\r\n"))


@dataclass(frozen=True, eq=False)
class Letor:
    """Labelled documents, grouped by query; the queries stand in the order of their first lines.

    Attributes:
        features: `[rows, F]`; a feature that a line leaves out is 0, `NULL` is NaN.
        label: `[rows]` relevance, from 0 up.
        query: `[rows]` query ids.
        offsets: `[queries + 1]`; the rows of query `q` are `offsets[q]` up to, not including, `offsets[q + 1]`.
        item: the document ids of the comments, or None when not every line has one.
    """

    features: NDArray[np.float32]
    label: NDArray[np.float32]
    query: NDArray[np.int64]
    offsets: NDArray[np.int64]
    item: pl.Series | None

    @property
    def n_features(self) -> int:
        return int(self.features.shape[1])

    @property
    def n_queries(self) -> int:
        return len(self.offsets) - 1


class _Block(NamedTuple):
    """Some lines: label and query `[rows]`; row, feature (from 1) and value `[pairs]` of all their pairs."""

    label: NDArray[np.float32]
    query: NDArray[np.int64]
    item: pl.Series | None
    row: NDArray[np.int64]
    feature: NDArray[np.int64]
    value: NDArray[np.float32]
    ascending: bool


class _RefusedError(Exception):
    """A line is not of the LETOR form; the message says what was required."""


def read_letor(source: str | Path | Sequence[str | Path], *, n_features: int | None = None) -> Letor:
    """Read one file, all files of a folder, or several of these, one after another.

    Args:
        source: paths, each as `letor_files` takes it; gzip is recognised by its content.
        n_features: the width of the result; the highest index in the files when left out.

    Raises:
        DataError: when a line is not of the form (file and line are named); when a file cannot be read or has no data;
            when two files hold the same query, since reading overlapping folds together would duplicate documents.
    """
    if n_features is not None and n_features < 1:
        raise ConfigError(f"n_features must be a whole number from 1 up; got {n_features}")
    paths = [path for each in ([source] if isinstance(source, str | Path) else source) for path in letor_files(each)]
    if not paths:
        raise DataError("source must name at least one file; got none")
    features = np.zeros((0, n_features or 0), dtype=np.float32)
    labels, queries, items = [], [], []
    owner: dict[int, Path] = {}
    for path in paths:
        in_file = []
        for block in _blocks(path, n_features or MOST_FEATURES):
            _check_size(
                path, len(features) + len(block.label), max(features.shape[1], int(block.feature.max(initial=0)))
            )
            features = _append(features, block)
            labels.append(block.label)
            in_file.append(block.query)
            items.append(block.item)
        if not in_file:
            raise DataError(f"{path}: {_FORM} in at least one line; got a file without data")
        _claim_queries(path, np.concatenate(in_file), owner)
        queries += in_file
    known = [item for item in items if item is not None]
    item = pl.concat(known) if len(known) == len(items) else None
    return _grouped(features, np.concatenate(labels), np.concatenate(queries), item)


def letor_files(path: str | Path) -> list[Path]:
    """The files that a path stands for: itself, or the .txt, .dat, .svm, .letor and .gz files of a folder, by name."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file())
    if not files:
        raise DataError(f"{path}: expected a folder with {', '.join(SUFFIXES)} files; got none")
    return files


def is_letor(path: str | Path) -> bool:
    """Whether the first line of a file that holds more than a comment begins with a number and `qid:`."""
    with _opened(Path(path)) as file:
        while line := file.readline(1 << 16):
            if line.removeprefix(BOM_UTF8).partition(b"#")[0].strip():
                return _FIRST_WORDS.match(line.removeprefix(BOM_UTF8)) is not None
    return False


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if zipped else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _blocks(path: Path, limit: int) -> Iterator[_Block]:
    """The parsed blocks of one file, without those that hold no data."""
    line = 1
    with _opened(path) as file:
        while text := file.read(BLOCK_BYTES) + file.readline():
            text = text.removeprefix(BOM_UTF8) if line == 1 else text
            try:
                block = _parse(text, limit)
            except _RefusedError as error:
                raise _located(path, line, text, limit) from error
            if block is not None:
                yield block
            line += text.count(b"\n")


def _parse(text: bytes, limit: int) -> _Block | None:
    """Parse whole lines; None when they hold only blanks and comments.

    A text is refused if and only if one of its lines, taken alone, is refused: `_located` relies on it.
    """
    text, docids = _without_comments(text)
    rows, starts, n_rows = _as_csv(text)
    if n_rows == 0:
        return None
    left, right = _columns(rows)
    label, query = left[starts], right[starts]
    if not ((label >= 0) & (label <= np.finfo(np.float32).max)).all():
        raise _RefusedError("label must be a number from 0 up")
    if not ((query == np.floor(query)) & (np.abs(query) < 2**53)).all():
        raise _RefusedError("qid must be a whole number")
    is_pair = np.ones(n_rows, dtype=np.bool_)
    is_pair[starts] = False
    row = list_ids(np.append(starts, n_rows) - np.arange(len(starts) + 1))
    index, value, ascending = _checked_pairs(row, left[is_pair], right[is_pair], limit)
    item = pl.Series("item", docids, dtype=pl.String) if len(docids) == len(label) else None
    return _Block(label.astype(np.float32), query.astype(np.int64), item, row, index, value, ascending)


def _without_comments(text: bytes) -> tuple[bytes, list[str]]:
    """The text, ended by a newline, without comments; and the docids if every comment beside data has one."""
    text = b"\n" + text + b"\n"
    if b"#" not in text:
        return text, []
    text = _COMMENT_LINE.sub(b"", text)
    docids = _COMMENT.findall(text)
    known = b"\n".join(docids).decode(errors="backslashreplace").split("\n") if docids and b"" not in docids else []
    return _COMMENT.sub(b"", text), known


def _as_csv(text: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64], int]:
    """The text as rows `a:b` with empty rows between; which of the full rows begin a line; how many full rows.

    Each blank becomes the end of a row. Only those after a label become spaces, as does the word `qid`, so that
    `2 qid:7 1:0.5` turns into the rows `2    :7` and `1:0.5`.
    """
    letters = np.frombuffer(text, dtype=np.uint8)
    blanks = np.flatnonzero(letters <= _SPACE)
    kinds = letters[blanks]
    ends_word = np.diff(blanks, prepend=-1) > 1
    words_before = np.cumsum(ends_word)
    n_words = np.diff(words_before[kinds == _NEWLINE], prepend=0)
    n_words = n_words[n_words > 0]
    if not _IS_BLANK[kinds].all() or (n_words < 2).any():
        raise _RefusedError(_FORM)
    labels = np.cumsum(n_words) - n_words
    qid = blanks[np.flatnonzero(ends_word)[labels + 1] - 1, None] + np.arange(1, 5)
    if (letters[np.minimum(qid, len(letters) - 1)] != _QID).any():
        raise _RefusedError(_FORM)
    is_label = np.zeros(n_words.sum() + 1, dtype=np.bool_)  # one more, for the blanks before the first word
    is_label[labels] = True
    rows = letters.copy()
    rows[blanks] = np.where(is_label[words_before - 1], _SPACE, _NEWLINE)
    rows[qid[:, :3]] = _SPACE
    return rows, labels - np.arange(len(labels)), int((n_words - 1).sum())


def _columns(rows: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both sides of the rows `a:b`; `NULL` is NaN."""
    types = {"left": pa.float64(), "right": pa.float64()}
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(rows),
            read_options=pa.csv.ReadOptions(column_names=list(types)),
            parse_options=pa.csv.ParseOptions(delimiter=":", quote_char=False),
            convert_options=pa.csv.ConvertOptions(column_types=types, null_values=["NULL"]),
        )
    except pa.ArrowInvalid as error:
        raise _RefusedError(_FORM) from error
    return table["left"].to_numpy(), table["right"].to_numpy()


def _checked_pairs(
    row: NDArray[np.int64], index: NDArray[np.float64], value: NDArray[np.float64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], bool]:
    """Indices and values in their final types, and whether the indices rise within each row."""
    if not ((index >= 1) & (index <= limit) & (index == np.floor(index))).all():
        raise _RefusedError(f"feature indices must be whole numbers from 1 to {limit}")
    value = np.where(np.abs(value) == _FILLER, np.nan, value)
    with np.errstate(over="ignore"):
        narrow = value.astype(np.float32)
    if np.isinf(narrow).any():
        raise _RefusedError("feature values must be finite in float32")
    whole = index.astype(np.int64)
    key = row * (limit + 1) + whole
    ascending = bool((key[1:] > key[:-1]).all())
    if not ascending and len(np.unique(key)) < len(key):
        raise _RefusedError("a feature may stand only once in a line")
    return whole, narrow, ascending


def _located(path: Path, first_line: int, text: bytes, limit: int) -> DataError:
    """The error for the first wrong line of a refused text, found by halving."""
    lines = text.split(b"\n")
    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _refusal(b"\n".join(lines[low:middle]), limit) else (middle, high)
    shown = "".join(c if c.isprintable() else "�" for c in lines[low][:300].decode(errors="replace").strip())
    shown = shown if len(shown) <= 60 else shown[:59] + "…"
    return DataError(f"{path} line {first_line + low}: {_refusal(lines[low], limit) or _FORM}; got {shown!r}")


def _refusal(text: bytes, limit: int) -> str | None:
    try:
        _parse(text, limit)
    except _RefusedError as error:
        return str(error)
    return None


def _check_size(path: Path, rows: int, width: int) -> None:
    """Refuse what would not fit into memory: a single high index makes every row as wide."""
    size = 4 * rows * width
    if size > MOST_BYTES:
        raise DataError(
            f"{path}: {rows:,} documents with features up to {width:,} take {size / 2**30:.0f} GB as a table, "
            f"more than the {MOST_BYTES >> 30} that are allowed; is an index wrong?"
        )


def _append(features: NDArray[np.float32], block: _Block) -> NDArray[np.float32]:
    """Grow the features by the rows of a block: in place, unless the block has a wider feature."""
    start, width = len(features), max(features.shape[1], int(block.feature.max(initial=0)))
    if width > features.shape[1]:
        narrow, features = features, np.zeros((start, width), dtype=np.float32)
        features[:, : narrow.shape[1]] = narrow
    features.resize((start + len(block.label), width), refcheck=False)
    if block.ascending and len(block.value) == len(block.label) * width:  # every line has every feature, in order
        features[start:] = block.value.reshape(len(block.label), width)
    else:
        features[start:][block.row, block.feature - 1] = block.value
    return features


def _claim_queries(path: Path, query: NDArray[np.int64], owner: dict[int, Path]) -> None:
    """Note the file of each query; refuse a query of an earlier file."""
    for each in np.unique(query).tolist():
        if (other := owner.setdefault(each, path)) is not path:
            raise DataError(f"{path}: expected queries of its own; got qid {each}, which {other} holds too")


def _grouped(
    features: NDArray[np.float32], label: NDArray[np.float32], query: NDArray[np.int64], item: pl.Series | None
) -> Letor:
    """Bring the rows of each query together; nothing is copied when they already are."""
    offsets = offsets_of_runs(query)
    runs = query[offsets[:-1]]
    _, first, number = np.unique(runs, return_index=True, return_inverse=True)
    if len(first) < len(runs):
        order = np.argsort(np.repeat(first[number], np.diff(offsets)), kind="stable")
        features, label, query = features[order], label[order], query[order]
        item = None if item is None else item[order]
        offsets = offsets_of_runs(query)
    return Letor(features, label, query, offsets, item)
