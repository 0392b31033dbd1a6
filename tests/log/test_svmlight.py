from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_svmlight_file

from urank.errors import ConfigError, DataError
from urank.log import svmlight
from urank.log.svmlight import Letor, is_letor, read_letor

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file into the test's folder and return its path."""

    def _write(content: str | bytes, name: str = "train.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return _write


def assert_same(one: Letor, other: Letor) -> None:
    for name in ("features", "label", "query", "offsets"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert (one.item is None) == (other.item is None)
    assert one.item is None or one.item.equals(other.item)


# What is read


def test_the_parts_of_a_line(write: Write) -> None:
    data = read_letor(write("2 qid:10 1:0.5 3:-1.5e2\n0 qid:10 2:7\n1 qid:4 1:1 2:2 3:3\n"))
    np.testing.assert_array_equal(data.features, [[0.5, 0, -150], [0, 7, 0], [1, 2, 3]])
    assert data.label.tolist() == [2, 0, 1]
    assert data.query.tolist() == [10, 10, 4]
    assert data.offsets.tolist() == [0, 2, 3]
    assert data.item is None
    assert (data.n_features, data.n_queries) == (3, 2)
    assert data.features.dtype == data.label.dtype == np.float32
    assert data.query.dtype == data.offsets.dtype == np.int64


PLAIN = "2 qid:1 1:0.5 2:3\n0 qid:1 1:1 2:4\n1 qid:2 1:2 2:5\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PLAIN.replace("\n", " \n"), id="trailing space"),
        pytest.param(PLAIN.replace("\n", "  \t \n"), id="trailing blanks"),
        pytest.param(PLAIN.replace(" ", "\t"), id="tabs"),
        pytest.param(PLAIN.replace(" ", "   "), id="repeated spaces"),
        pytest.param(PLAIN.replace(" q", " \t  q"), id="blanks before qid"),
        pytest.param(PLAIN.replace("\n", "\r\n"), id="CRLF"),
        pytest.param(PLAIN.replace("\n", " \r\n\r\n"), id="CRLF and blank lines"),
        pytest.param("\n \n" + PLAIN.replace("\n", "\n\n\n") + "\n  \n", id="blank lines"),
        pytest.param("  " + PLAIN.replace("\n", "\n\t ").rstrip("\t "), id="leading blanks"),
        pytest.param(PLAIN.rstrip("\n"), id="no final newline"),
        pytest.param(PLAIN.rstrip("\n") + " ", id="no final newline but a space"),
        pytest.param("# head 1:2\n" + PLAIN.replace("\n", "\n  #qid:3\n#\n"), id="comment lines"),
        pytest.param(PLAIN.replace("\n", "# a:b # c\n"), id="comments after data"),
        pytest.param("\ufeff" + PLAIN, id="byte order mark"),
        pytest.param("\ufeff# head\n" + PLAIN, id="byte order mark before a comment"),
        pytest.param(PLAIN.replace("1:2 2:5", "2:5 1:2"), id="indices in any order"),
        pytest.param(PLAIN.replace("0 qid", "+0e0 qid").replace("2 qid", "2.0 qid"), id="labels as floats"),
    ],
)
@pytest.mark.parametrize("block_bytes", [svmlight.BLOCK_BYTES, 1])
def test_layout_does_not_matter(text: str, block_bytes: int, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_letor(write(PLAIN, "plain.txt"))
    monkeypatch.setattr(svmlight, "BLOCK_BYTES", block_bytes)
    assert_same(read_letor(write(text)), expected)
    assert expected.features.tolist() == [[0.5, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("name", ["train.txt.gz", "train.txt"])
def test_gzip_is_read_whatever_the_name(name: str, write: Write) -> None:
    expected = read_letor(write(PLAIN, "plain.txt"))
    assert_same(read_letor(write(gzip.compress(PLAIN.encode()), name)), expected)


@pytest.mark.parametrize(
    ("comments", "items"),
    [
        (["#docid = GX008-86-4444840 inc = 1 prob = 0.08", "#docid = 17"], ["GX008-86-4444840", "17"]),
        (["#docid=a", "# docid =b"], ["a", "b"]),
        (["#\tdocid\t=\té\t", "#docid = a#b"], ["é", "a#b"]),
        (["#docid = a", "#docid = a"], ["a", "a"]),
        (["#docid = a", ""], None),
        (["#docid = a", "# nothing"], None),
        (["#docid = a", "#docid ="], None),
        (["# see #docid = a", "# see #docid = b"], None),
    ],
)
def test_item_ids_come_from_the_comments(comments: list[str], items: list[str] | None, write: Write) -> None:
    lines = [f"{i} qid:1 1:{i} {comment}" for i, comment in enumerate(comments)]
    data = read_letor(write("#docid = of no line\n" + "\n".join(lines)))
    assert data.label.tolist() == [0, 1]
    assert (None if data.item is None else data.item.to_list()) == items
    assert data.item is None or data.item.dtype == pl.String


def test_item_ids_need_every_block(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svmlight, "BLOCK_BYTES", 1)
    assert read_letor(write("1 qid:1 1:1 #docid=a\n1 qid:1 1:1 #docid=b\n")).item.to_list() == ["a", "b"]
    assert read_letor(write("1 qid:1 1:1 #docid=a\n1 qid:1 1:1\n")).item is None


def test_null_is_missing_and_absent_is_zero(write: Write) -> None:
    data = read_letor(write("1 qid:1 1:NULL 2:1\n0 qid:1 2:nan\n"))
    np.testing.assert_array_equal(data.features, [[np.nan, 1], [0, np.nan]])


def test_a_line_may_have_no_features(write: Write) -> None:
    data = read_letor(write("1 qid:1\n0 qid:1 2:3\n2 qid:1\n"))
    assert data.features.tolist() == [[0, 0], [0, 3], [0, 0]]
    assert read_letor(write("1 qid:1\n")).features.shape == (1, 0)


def test_scattered_queries_are_brought_together(write: Write) -> None:
    lines = [f"{label} qid:{query} 1:{label} #docid=d{label}" for label, query in enumerate([7, 3, 7, 9, 3, 7])]
    data = read_letor(write("\n".join(lines)))
    assert data.query.tolist() == [7, 7, 7, 3, 3, 9]
    assert data.label.tolist() == data.features[:, 0].tolist() == [0, 2, 5, 1, 4, 3]
    assert data.offsets.tolist() == [0, 3, 5, 6]
    assert data.item.to_list() == ["d0", "d2", "d5", "d1", "d4", "d3"]


def test_n_features_sets_the_width(write: Write) -> None:
    path = write(PLAIN)
    np.testing.assert_array_equal(
        read_letor(path, n_features=4).features, np.pad(read_letor(path).features, [(0, 0), (0, 2)])
    )


def test_later_blocks_may_be_wider(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svmlight, "BLOCK_BYTES", 1)
    data = read_letor(write("1 qid:1 1:1\n1 qid:1 3:3\n1 qid:1 2:2\n"))
    assert data.features.tolist() == [[1, 0, 0], [0, 0, 3], [0, 2, 0]]


# Several files


def test_files_are_read_one_after_another(write: Write, tmp_path: Path) -> None:
    write("1 qid:2 1:1\n", "b.txt")
    write("2 qid:1 2:1\n", "a.dat")
    expected = [[0, 1], [1, 0]]
    assert read_letor([tmp_path / "a.dat", str(tmp_path / "b.txt")]).features.tolist() == expected
    assert read_letor(tmp_path).features.tolist() == read_letor(str(tmp_path)).features.tolist() == expected


def test_a_query_in_two_files_is_refused(write: Write) -> None:
    one, two = write("1 qid:2 1:1\n1 qid:5 1:1\n", "one.txt"), write("1 qid:5 1:1\n", "two.txt")
    with pytest.raises(
        DataError, match=r"two\.txt: expected queries of its own; got qid 5, which is also in .*one\.txt"
    ):
        read_letor([one, two])


def test_an_empty_second_file_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match=r"two\.txt: .* got a file without data"):
        read_letor([write(PLAIN, "one.txt"), write("", "two.txt")])


def test_no_files_are_refused() -> None:
    with pytest.raises(DataError, match="at least one file; got none"):
        read_letor([])


def test_files_of_a_folder(write: Write, tmp_path: Path) -> None:
    for query, name in enumerate(("vali.txt", "train.txt.gz", "a.svm", "b.letor", "c.dat")):
        write(f"1 qid:{query} 1:1\n", name)
    write("no data", "readme.md")
    (tmp_path / "sub").mkdir()
    assert read_letor(tmp_path).query.tolist() == [2, 3, 4, 1, 0]  # by name
    with pytest.raises(DataError, match=r"sub: expected a folder with \.txt, .* files; got none"):
        read_letor(tmp_path / "sub")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (PLAIN, True),
        ("\n# head\n  2.5\tqid:7\n", True),
        ("\ufeff1 qid:7 1:1", True),
        pytest.param(gzip.compress(PLAIN.encode(), mtime=0), True, id="gzip"),
        ("1 1:0.5 2:3\n" + PLAIN, False),
        ("query_id,position,click\n", False),
        ("word qid:3 1:1\n", False),
        ("# 1 qid:3 1:1\n", False),
        ("", False),
        pytest.param(bytes(range(256)), False, id="bytes"),
    ],
)
def test_is_letor(content: str | bytes, expected: bool, write: Write) -> None:
    assert is_letor(write(content)) is expected


# What is refused

FORM = "expected 'label qid:ID index:value …'"
INDEX = "feature indices must be whole numbers from 1 to 100000"
VALUE = "feature values must be finite in float32"
LABEL = "label must be a number from 0 up"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 1:0.5 2:0.1", FORM),
        ("2:1 1:0.5", FORM),
        ("2", FORM),
        ("2 q", FORM),
        ("2 1:0.5 qid:3", FORM),
        ("2 QID:3 1:0.5", FORM),
        ("qid:3 1:0.5", FORM),
        ("2 qid:3 qid:4", FORM),
        ("2 qid:3 1 qid:4", FORM),
        ("2:1 qid:3 1:0.5", FORM),
        ("2 qid: 1:0.5", FORM),
        ("2 qid:3:4 1:0.5", FORM),
        ("2 qid:1 3:", FORM),
        ("2 qid:1 3: 4", FORM),
        ("2 qid:1 :4", FORM),
        ("2 qid:1 :", FORM),
        ("2 qid:1 3", FORM),
        ("2 qid:1 3:abc", FORM),
        ("2 qid:1 3:1:2", FORM),
        ("2 qid:1 a:1", FORM),
        ("2 qid:1 3:1,5", FORM),
        ("2 qid:1 3:'1'", FORM),
        ('2 qid:1 "3:1"', FORM),
        ("2 qid:1 3:1\x004:1", FORM),
        ("word qid:1 3:1", FORM),
        ("2 qid:word 3:1", FORM),
        ("2 qid:1 0:1", INDEX),
        ("2 qid:1 -1:1", INDEX),
        ("2 qid:1 1.5:1", INDEX),
        ("2 qid:1 NULL:1", INDEX),
        ("2 qid:1 nan:1", INDEX),
        ("2 qid:1 inf:1", INDEX),
        ("2 qid:1 100001:1", INDEX),
        ("2 qid:1 1:1 1:1", "a feature may occur only once in a line"),
        ("2 qid:1 1:1 2:0 1:2", "a feature may occur only once in a line"),
        ("2 qid:1 1:inf", VALUE),
        ("2 qid:1 1:-Infinity", VALUE),
        ("2 qid:1 1:1e39", VALUE),
        ("2 qid:1 1:1e999", VALUE),
        ("nan qid:1 1:1", LABEL),
        ("-1 qid:1 1:1", LABEL),
        ("inf qid:1 1:1", LABEL),
        ("1e39 qid:1 1:1", LABEL),
        ("2 qid:1.5 1:1", "qid must be a whole number"),
        ("2 qid:nan 1:1", "qid must be a whole number"),
        ("2 qid:NULL 1:1", "qid must be a whole number"),
        ("2 qid:1e300 1:1", "qid must be a whole number"),
    ],
)
@pytest.mark.parametrize("block_bytes", [svmlight.BLOCK_BYTES, 40])
def test_a_wrong_line_is_named(
    line: str, message: str, block_bytes: int, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svmlight, "BLOCK_BYTES", block_bytes)
    good = "1 qid:1 1:0.5 2:1\n"
    path = write(good * 5 + "\n# comment\n" + line + "\n" + good * 4 + "also wrong\n")
    with pytest.raises(DataError) as error:
        read_letor(path)
    assert str(error.value) == f"{path} line 8: {message}; got {line.replace(chr(0), '�')!r}"


def test_a_long_line_is_cut(write: Write) -> None:
    line = "2 " + " ".join(f"{i}:0.5" for i in range(1, 200))
    with pytest.raises(DataError) as error:
        read_letor(write(line))
    assert str(error.value).endswith(f"line 1: {FORM}; got '{line[:59]}…'")


def test_index_above_n_features(write: Write) -> None:
    path = write("1 qid:1 1:1 3:1\n1 qid:1 4:1\n")
    with pytest.raises(DataError, match="line 2: feature indices must be whole numbers from 1 to 3; got '1 qid:1 4:1'"):
        read_letor(path, n_features=3)


@pytest.mark.parametrize("n_features", [0, -1])
def test_n_features_must_be_positive(n_features: int, write: Write) -> None:
    with pytest.raises(ConfigError, match=f"n_features must be a whole number from 1 up; got {n_features}"):
        read_letor(write(PLAIN), n_features=n_features)


@pytest.mark.parametrize(
    "content",
    ["", "\n \r\n\t", "# one\n  # two", "\ufeff", pytest.param(gzip.compress(b"", mtime=0), id="gzip")],
)
def test_a_file_without_data(content: str | bytes, write: Write) -> None:
    path = write(content)
    with pytest.raises(DataError) as error:
        read_letor(path)
    assert str(error.value) == f"{path}: {FORM} in at least one line; got a file without data"


@pytest.mark.parametrize("read", [read_letor, is_letor])
def test_a_missing_file(read: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "missing.txt"
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value) == f"{path} cannot be read: No such file or directory"


@pytest.mark.parametrize("seed", range(5))
def test_binary_garbage(seed: int, write: Write) -> None:
    content = np.random.default_rng(seed).integers(0, 256, size=10_000, dtype=np.uint8).tobytes()
    with pytest.raises(DataError, match=r"train\.txt line 1: expected 'label qid") as error:
        read_letor(write(b"\x00" + content))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("end", [-1, -9, 100, 12, 5])
def test_truncated_gzip(end: int, write: Write) -> None:
    text = "".join(f"1 qid:1 1:{value}\n" for value in np.random.default_rng(0).random(100))
    path = write(gzip.compress(text.encode())[:end], "train.txt.gz")
    with pytest.raises(DataError, match=r"train\.txt\.gz cannot be read: Compressed file ended before"):
        read_letor(path)


def test_damaged_gzip(write: Write) -> None:
    content = bytearray(gzip.compress(PLAIN.encode() * 100))
    content[10:40] = bytes(30)
    with pytest.raises(DataError, match=r"train\.txt\.gz cannot be read: "):
        read_letor(write(bytes(content), "train.txt.gz"))


# Against other readings of the same text

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LINES = st.lists(
    st.tuples(
        st.floats(0, 2.0**100, width=32),
        st.integers(-(2**53) + 1, 2**53 - 1) | st.integers(0, 3),
        st.dictionaries(st.integers(1, 9), FINITE | st.just(np.nan), max_size=9),
    ),
    min_size=1,
    max_size=30,
)


@given(lines=LINES, gap=st.sampled_from([" ", "\t", "  "]), block_bytes=st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_round_trip(
    lines: list[tuple[float, int, dict[int, float]]],
    gap: str,
    block_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("letor") / "lists.txt"
    path.write_text(
        "".join(
            gap.join([repr(label), f"qid:{query}", *(f"{i}:{'NULL' if v != v else repr(v)}" for i, v in pairs.items())])
            + "\n"
            for label, query, pairs in lines
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svmlight, "BLOCK_BYTES", block_bytes)
        data = read_letor(path, n_features=9)
    first = {query: n for n, query in reversed(list(enumerate(query for _, query, _ in lines)))}
    expected = sorted(lines, key=lambda line: first[line[1]])
    assert data.query.tolist() == [query for _, query, _ in expected]
    assert data.label.tolist() == [label for label, _, _ in expected]
    np.testing.assert_array_equal(data.features, [[pairs.get(i, 0) for i in range(1, 10)] for _, _, pairs in expected])
    assert data.offsets[0] == 0
    assert np.diff(data.offsets).tolist() == [data.query.tolist().count(query) for query in first_seen(data.query)]


def first_seen(query: np.ndarray) -> list[int]:
    return list(dict.fromkeys(query.tolist()))


def assert_as_scikit_learn_reads(path: Path) -> None:
    data = read_letor(path)
    features, label, query = load_svmlight_file(str(path), query_id=True, zero_based=False, dtype=np.float64)
    np.testing.assert_array_equal(data.features, features.toarray().astype(np.float32))
    np.testing.assert_array_equal(data.label, label.astype(np.float32))
    np.testing.assert_array_equal(data.query, query)


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_random_file_as_scikit_learn_reads_it(density: float, write: Write) -> None:
    rng = np.random.default_rng(17)
    lines = []
    for row in range(500):
        pairs = " ".join(f"{i}:{rng.lognormal(sigma=5):.6g}" for i in range(1, 41) if rng.random() < density)
        lines.append(f"{rng.integers(5)} qid:{row // 7} {pairs}")
    assert_as_scikit_learn_reads(write("\n".join(lines) + "\n"))


# Real data


@pytest.mark.parametrize("name", ["mq2008/S1.txt", "mslr/web30k-excerpt.txt"])
def test_real_files_as_scikit_learn_reads_them(name: str, data_dir: Path) -> None:
    assert is_letor(data_dir / name)
    assert_as_scikit_learn_reads(data_dir / name)


def test_mq2008(data_dir: Path) -> None:
    data = read_letor(data_dir / "mq2008")
    assert (data.n_queries, len(data.label), data.n_features) == (784, 15_211, 46)
    assert np.unique(data.label).tolist() == [0, 1, 2]
    assert data.item.len() == 15_211
    assert data.item.str.contains(r"^GX\d{3}-\d{2}-\d+$").all()
    assert len(np.unique(data.query)) == data.n_queries


def test_mslr(data_dir: Path) -> None:
    data = read_letor(data_dir / "mslr")
    assert (data.n_queries, data.n_features) == (89, 136)
    assert np.unique(data.label).tolist() == [0, 1, 2, 3, 4]
    assert data.item is None
    assert data.features.flags.c_contiguous


def test_the_filler_of_istella_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "istella.txt"
    path.write_text("1 qid:1 1:1.79769313486231E308 2:0.5\n")
    features = read_letor(path).features
    assert np.isnan(features[0, 0])
    assert features[0, 1] == np.float32(0.5)


def test_an_index_that_would_take_all_memory(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svmlight, "MAX_BYTES", 1 << 20)
    path = write("1 qid:1 1:1\n" * 9 + "1 qid:1 90000:1\n")
    with pytest.raises(
        DataError, match=r"10 documents with features up to 90,000 take .* GB as a table, .* an index wrong"
    ):
        read_letor(path)
