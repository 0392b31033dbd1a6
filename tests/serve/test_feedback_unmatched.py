"""Feedback that came to a server without its ranking: kept, and joined when the folders are brought together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from serve.served_log import (
    OpenSegment,
    Reference,
    event,
    files,
    logged,
    ranking,
    sealed,
    segment_name,
    taken,
    unmatched,
)
from urank.errors import ConfigError
from urank.serve.feedback_export import CompactionStats, compact, read_part_metadata, remote_feedback
from urank.serve.feedback_store import ShadowRecord, encode, framed

ONE, TWO, THREE = map(segment_name, (1, 2, 3))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "a"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "b"


def clicks(folder: Path) -> str:
    """The items clicked, in the order of rankings and positions."""
    return "".join(str(row[1]) for row in logged(folder) if row[3])


def test_what_others_kept_is_joined_and_they_are_not_changed(here: Path, there: Path) -> None:
    shown, theirs = ranking(ONE), ranking(TWO)
    heard = [event(shown, "b"), event(shown, "b", time_us=9), event(shown, "x"), event(ranking(THREE), "a")]
    sealed(here, 1, shown)
    sealed(there, 2, theirs, *heard, event(theirs, "a"))
    assert taken(here).clicks == 0
    assert taken(there).unmatched == len(heard)
    assert unmatched(there) == {TWO: heard}
    before = files(there)
    assert taken(here, also=[there]) == CompactionStats(late=1, repeated=1, parts=1)
    assert logged(here) == Reference([shown], heard).rows()
    settled = files(here)
    for also in ([there], [there, here], [there, there, here.parent / "b" / ".." / "b"]):
        assert taken(here, also=also) == CompactionStats()
    assert files(here) == settled
    assert files(there) == before


def test_a_ranking_and_what_others_heard_of_it_come_together(here: Path, there: Path) -> None:
    """Into a part that is new, clicks are not late."""
    shown = ranking(ONE)
    sealed(there, 2, event(shown, "c"))
    taken(there)
    active = OpenSegment(here, ONE)
    active.write(shown)
    assert taken(here, also=[there]) == CompactionStats(waiting=1)
    active.seal()
    found = taken(here, also=[there])
    assert found == CompactionStats(segments=1, rankings=1, impressions=3, clicks=1, parts=1)
    assert clicks(here) == "c"
    assert taken(here, also=[there]) == CompactionStats()


def test_what_others_still_write_is_joined_as_far_as_it_is_there(here: Path, there: Path) -> None:
    shown, theirs = ranking(ONE), ranking(TWO)
    sealed(here, 1, shown)
    active = OpenSegment(there, TWO)
    active.write(theirs, event(shown, "a"), event(theirs, "c"), ShadowRecord(shown.ranking_id, "m2", 5, ("a",)))
    cut = framed(encode(event(shown, "c")))
    active.write_bytes(cut[:-1])
    before = files(there)
    assert taken(here, also=[there]).clicks == 1
    assert clicks(here) == "a"
    assert taken(here, also=[there]) == CompactionStats()
    assert files(there) == before
    active.write_bytes(cut[-1:])
    active.write(ranking(TWO, seed=1))  # not the concern of others
    grown = taken(here, also=[there])
    assert (grown.late, grown.repeated, grown.parts) == (1, 1, 1)
    assert clicks(here) == "ac"
    active.seal()
    taken(there)
    assert unmatched(there) == {TWO: [event(shown, "a"), event(shown, "c")]}
    assert taken(here, also=[there]) == CompactionStats(repeated=2, parts=1)
    assert taken(here, also=[there]) == CompactionStats()


def test_a_file_that_has_grown_since_is_read_again(here: Path, there: Path) -> None:
    """The folder of the other is a copy, first of a segment that was still written to, then of the whole."""
    shown = ranking(ONE)
    sealed(here, 1, shown)
    sealed(there, 2, event(shown, "a"))
    taken(there)
    assert taken(here, also=[there]).clicks == 1
    (there / "unmatched" / f"{TWO}.wal").unlink()
    sealed(there, 2, event(shown, "a"), event(shown, "b"))
    taken(there)
    assert taken(here, also=[there]).late == 1
    assert clicks(here) == "ab"
    assert len(read_part_metadata(here / "log" / f"{ONE}.parquet").sources) == 2


def test_a_part_that_comes_back(here: Path) -> None:
    shown = ranking(ONE)
    sealed(here, 1, shown)
    taken(here)
    part = here / "log" / f"{ONE}.parquet"
    away = part.rename(here / "away")
    sealed(here, 2, event(shown, "b"))
    assert taken(here) == CompactionStats(segments=1, unmatched=1)
    away.rename(part)
    assert taken(here) == CompactionStats()
    assert taken(here, also=[here]) == CompactionStats(late=1, parts=1)
    assert clicks(here) == "b"
    assert taken(here, also=[here]) == CompactionStats()


def test_a_segment_whose_unmatched_feedback_is_kept_when_the_power_fails(here: Path, there: Path) -> None:
    """The file is written and its segment is still there, joined or not, with a file that was begun once more."""
    shown, elsewhere = ranking(ONE), ranking(THREE)
    sealed(there, 3, elsewhere)
    segment = OpenSegment(here, ONE)
    segment.write(shown, event(shown, "a"), event(elsewhere, "b"))
    segment.seal()
    whole = segment.path.read_bytes()
    taken(here)
    kept = files(here)
    for suffix in (".joined", ".wal"):
        segment.path.with_suffix(suffix).write_bytes(whole)
        (here / "unmatched" / f".{ONE}.wal").write_bytes(b"urk1 and no more")
        assert taken(here, also=[here, there]).unmatched == 1
        assert files(here) == kept
    assert taken(there, also=[here]).clicks == 1


def test_a_file_that_goes_while_it_is_read(here: Path, there: Path) -> None:
    shown = ranking(ONE)
    sealed(here, 1, shown)
    sealed(there, 2, event(shown, "a"))
    (found,) = remote_feedback(here, [there]).values()
    assert list(found.feedback()) == [event(shown, "a")]
    found.path.unlink()
    assert list(found.feedback()) == []


def test_a_copy_that_takes_the_write_ahead_files_first_misses_nothing(here: Path, tmp_path: Path) -> None:
    """Whatever becomes of them before the rest is copied, and they once more with it."""
    lists = [ranking(segment_name(number)) for number in range(1, 5)]
    lost = event(ranking(segment_name(9)), "a")
    events = [event(shown, item) for shown, item in zip(lists, "abca", strict=True)]
    sealed(here, 1, lists[0])
    taken(here)
    sealed(here, 2, lists[1], events[0], lost)
    sealed(here, 3, lists[2], *events[1:], lost)
    active = OpenSegment(here, segment_name(4))
    active.write(lists[3])
    copy = tmp_path / "copy"
    shutil.copytree(here / "wal", copy / "wal")
    taken(here)
    shutil.copytree(here, copy, dirs_exist_ok=True)
    names = [f"{TWO}.wal", f"{THREE}.joined", f"{THREE}.wal", f"{segment_name(4)}.wal"]
    assert sorted(path.name for path in (copy / "wal").iterdir()) == names
    taken(copy)
    active.seal()
    taken(here)
    assert logged(copy) == logged(here) == Reference(lists, events).rows()
    assert unmatched(copy) == unmatched(here) == {TWO: [lost], THREE: [lost]}
    assert list((copy / "wal").iterdir()) == []


def test_others_that_are_no_feedback_log(here: Path, there: Path, tmp_path: Path) -> None:
    sealed(here, 1, ranking(ONE))
    before = files(here)
    for other in (there, tmp_path):
        with pytest.raises(ConfigError, match=rf"{other} is not a feedback log: it has neither a folder wal nor unm"):
            compact(here, also=[here, other], window_seconds=0)
    assert files(here) == before
    (there / "unmatched").mkdir(parents=True)  # of an empty folder, some ways to copy leave nothing
    (there / "unmatched" / "notes.txt").write_text("not a segment")
    assert taken(here, also=[str(there)]).rankings == 1
