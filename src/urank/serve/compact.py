"""Turn write-ahead files into a log: each sealed segment into a part, with the feedback on it from all segments.

It keeps no state but the files, and may be killed at any instant: a file goes only when all that it holds is on the
disk elsewhere, and joining the same feedback again changes nothing. A segment goes through three states:

    wal/SEGMENT.wal       its rankings are nowhere else
    wal/SEGMENT.joined    its rankings are parts; kept for feedback on rankings of segments that are no parts yet
    gone                  all that it held is in parts, or in unmatched/SEGMENT.wal when its ranking is not here
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from urank.errors import ConfigError
from urank.progress import Report, silent
from urank.serve.joined import Joined, join_feedback, log_frame, shadow_clicks, shadow_frame
from urank.serve.parts import Notes, Parts, read_notes, read_part, write_part
from urank.serve.records import FeedbackRecord, ShadowRecord, segment_of
from urank.serve.sealed import JOINED, About, Sealed, sealed_segments, segment_files
from urank.serve.segments import WAL, alone, segment_path, sync_folder
from urank.serve.unmatched import UNMATCHED, heard_elsewhere, keep_unmatched

__all__ = ["Compaction", "compact"]

LOCK = "compact.lock"
EVENTS_AT_ONCE = 250_000


@dataclass(frozen=True)
class Compaction:
    """What a compaction found and did.

    Attributes:
        segments: that became parts.
        rankings, impressions, clicks, conversions: in these parts.
        late: events that told something new of rankings whose part was there before.
        repeated: events that told nothing new.
        unmatched: events of which there is no such ranking or item here, which are kept, and orders of a silent model
            that came too late, which are not. Counted where they were heard of.
        valueless: values that were told of rankings without values, and left out.
        torn: bytes of writes that were cut off.
        damaged: bytes within segments that were unreadable.
        parts: files written.
        waiting: segments that are left: still written to, within the window, or with feedback on such.
    """

    segments: int = 0
    rankings: int = 0
    impressions: int = 0
    clicks: int = 0
    conversions: int = 0
    late: int = 0
    repeated: int = 0
    unmatched: int = 0
    valueless: int = 0
    torn: int = 0
    damaged: int = 0
    parts: int = 0
    waiting: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def compact(
    folder: str | Path,
    *,
    also: Sequence[str | Path] = (),
    window_seconds: float = 600.0,
    now: float | None = None,
    report: Report = silent,
) -> Compaction | None:
    """Turn the sealed segments of a feedback log into Parquet, one row for each impression.

    A segment becomes parts when it has been sealed for as long as the window, so that most clicks on its rankings are
    there. Feedback that comes later is joined to the parts that are there. Rows are the same whenever this is called,
    and however often it is interrupted. It needs memory for one segment and its feedback. Feedback on rankings that are
    not here is kept in the folder `unmatched`, for that of the server which has them.

    Args:
        folder: that a server logs to.
        also: folders of other servers, which are only read: what they heard of rankings of this one is joined, and so
            is what this one kept as unmatched, if its ranking is here now.
        window_seconds: how long a sealed segment waits for clicks; 0 takes all that is sealed.
        now: seconds since 1970; the current time when left out.
        report: told after each step that lasts.

    Returns:
        what was found; none when another compaction of this folder is under way.

    Raises:
        ConfigError: when the folder, or one of the others, is no feedback log.
        DataError: when a part, or what tells its columns, cannot be read.
    """
    root = Path(folder)
    if not (root / WAL).is_dir():
        raise ConfigError(f"{folder} is not a feedback log, as `urank serve --log` keeps it: it has no folder {WAL}")
    others = [Path(each) for each in also]
    for other in others:
        if not ((other / WAL).is_dir() or (other / UNMATCHED).is_dir()):
            raise ConfigError(f"{other} is not a feedback log: it has neither a folder {WAL} nor {UNMATCHED}")
    if not window_seconds >= 0:
        raise ConfigError(f"the window must be seconds from 0 up; got {window_seconds}")
    with alone(root / LOCK) as nobody_else:
        if not nobody_else:
            return None
        sealed = sealed_segments(root / WAL, window_seconds, time.time() if now is None else now)
        return _Compacting(root, sealed, heard_elsewhere(root, others), report).run()


class _Compacting:
    """One compaction; its counts are those of `Compaction`.

    Args:
        root: the folder.
        sealed: its segments that nobody writes to.
        elsewhere: files of feedback that are only read, by the names that parts remember them by.
        report: told after each step.
    """

    def __init__(self, root: Path, sealed: Iterable[Sealed], elsewhere: Mapping[str, Sealed], report: Report) -> None:
        self._root = root
        self._parts = Parts(root)
        self._report = report
        self._counts: Counter[str] = Counter()
        self._done = self._total = 0
        self._segments = {segment.name: segment for segment in sealed}
        self._sources = {**self._segments, **elsewhere}  # what is heard elsewhere comes last
        self._settled: set[tuple[str, str]] = set()  # (source, home) of which no event is unmatched

    def run(self) -> Compaction:
        """Make parts, join late feedback, remove what is not needed any more."""
        tasks = self._tasks()
        self._total = len(tasks)
        for homes in _portions({home: self._events_of(home, sources) for home, sources in tasks.items()}):
            about = self._gathered({home: tasks[home] for home in homes})
            for home in homes:
                if self._is_due(home):
                    self._make(self._segments[home], about.pop(home), tasks[home])
                else:
                    self._amend(home, about.pop(home), tasks[home])
                self._step(1)
        self._remove()
        return Compaction(**self._counts, waiting=len(segment_files(self._root / WAL)))

    def _tasks(self) -> dict[str, list[str]]:
        """The segments whose parts are to be written, each with the segments that hold feedback on it; oldest first."""
        sources: dict[str, list[str]] = {name: [] for name in self._segments if self._is_due(name)}
        for name, source in self._sources.items():
            for home in filter(self._is_ready, source.homes):
                if home in sources or self._parts.of(home):
                    sources.setdefault(home, []).append(name)
        for home in [home for home in sources if not self._is_due(home)]:
            # What all parts of a home have joined before was counted then.
            notes = [read_notes(path).sources for path in self._parts.of(home)]
            sources[home] = [name for name in sources[home] if not all(name in each for each in notes)]
        return {home: sources[home] for home in sorted(sources) if sources[home] or self._is_due(home)}

    def _events_of(self, home: str, sources: Sequence[str]) -> int:
        return sum(self._sources[source].homes[home] for source in sources)

    def _is_due(self, home: str) -> bool:
        return home in self._segments and self._segments[home].due

    def _is_ready(self, home: str) -> bool:
        """Whether the rankings of a segment are parts, become parts now, or are nowhere."""
        if self._is_due(home):
            return True
        # The folder was listed before feedback was read, so a file that is not in that list may be there all the same.
        return not segment_path(self._root, home).exists()

    def _stays(self, segment: Sealed) -> bool:
        """Whether a segment is needed after this compaction."""
        return not (segment.due or segment.joined) or not all(map(self._is_ready, segment.homes))

    def _gathered(self, wanted: Mapping[str, Collection[str]]) -> dict[str, list[About]]:
        """The records about rankings of these segments, from the sources that are wanted for each."""
        found: dict[str, list[About]] = {home: [] for home in wanted}
        needed = {source for sources in wanted.values() for source in sources}
        for name, source in self._sources.items():
            if name not in needed:
                continue
            homes = {home for home, sources in wanted.items() if name in sources}
            for record in source.about():
                home = segment_of(record.ranking_id)
                if home in homes:
                    found[home].append(record)
        return found

    def _make(self, segment: Sealed, about: Sequence[About], sources: Collection[str]) -> None:
        """Turn a segment into its parts."""
        rankings, columns = segment.rankings(self._parts.columns)
        events, shadows = _by_kind(about)
        joined: list[Joined] = []
        for digest in dict.fromkeys(ranking.columns for ranking in rankings):
            some = [ranking for ranking in rankings if ranking.columns == digest]
            each = join_feedback(log_frame(some, columns[digest]), {}, events)
            path = self._parts.path(segment.name, columns[digest])
            self._write(path, each.frame, Notes(frozenset(sources), each.value_times))
            joined.append(each)
        ids = {ranking.ranking_id for ranking in rankings}
        placed = [shadow for shadow in shadows if shadow.ranking_id in ids]
        logs = [each.frame for each in joined]
        if placed:
            self._write(self._parts.shadow(segment.name), shadow_frame(logs, rankings, placed), Notes())
        self._count_events(segment.name, joined, sources, len(shadows))
        self._counts["unmatched"] += len(shadows) - len(placed) if joined else 0
        self._counts["segments"] += 1
        self._counts["rankings"] += len(rankings)
        self._counts["impressions"] += sum(log.height for log in logs)
        self._counts["clicks"] += sum(int(log["click"].sum()) for log in logs)
        self._counts["conversions"] += sum(int(log["conversion"].sum()) for log in logs)
        self._counts["torn"] += segment.torn
        self._counts["damaged"] += segment.damaged
        segment.path = segment.path.rename(segment.path.with_suffix(JOINED))

    def _amend(self, home: str, about: Sequence[About], sources: Collection[str]) -> None:
        """Join feedback to the parts that a segment has."""
        events, shadows = _by_kind(about)
        paths = self._parts.of(home)
        notes = [read_notes(path) for path in paths]
        joined = [
            join_feedback(read_part(path), note.value_times, events) for path, note in zip(paths, notes, strict=True)
        ]
        shadow = self._parts.shadow(home)
        if shadow.is_file() and any(each.new.any() for each in joined):
            # Before the others, for what these have joined is not looked at again.
            self._write(shadow, shadow_clicks(read_part(shadow), [each.frame for each in joined]), Notes())
        must_note = any(source not in self._segments or self._stays(self._segments[source]) for source in sources)
        for path, note, each in zip(paths, notes, joined, strict=True):
            if must_note or each.new.any() or each.value_times != note.value_times:
                self._write(path, each.frame, Notes(note.sources.union(sources), each.value_times))
        self._counts["late"] += self._count_events(home, joined, sources, len(shadows))
        self._counts["unmatched"] += len(shadows)

    def _count_events(self, home: str, joined: Sequence[Joined], sources: Collection[str], shadows: int) -> int:
        """Count the events of a home, each of which is found in one of its parts or in none; returns the new ones."""
        if not joined:  # without parts they are counted when their segment goes
            return 0
        found = np.any([each.found for each in joined], axis=0)
        told = np.any([each.new for each in joined], axis=0)
        self._counts["repeated"] += int((found & ~told).sum())
        self._counts["valueless"] += sum(each.valueless for each in joined)
        own = [source for source in sources if source in self._segments]
        lost = ~found[: self._events_of(home, own) - shadows]  # those of others come last, and were counted there
        self._counts["unmatched"] += int(lost.sum())
        if not lost.any():
            self._settled.update((source, home) for source in own)
        return int(told.sum())

    def _write(self, path: Path, frame: pl.DataFrame, notes: Notes) -> None:
        write_part(path, frame, notes)
        self._counts["parts"] += 1
        self._step(0)

    def _step(self, homes: int) -> None:
        self._done += homes
        self._report("joining", self._done, self._total)

    def _remove(self) -> None:
        """Remove the segments of which all is elsewhere, and keep what was not joined."""
        sync_folder(self._root / WAL)  # that it is joined must be known to last before what was joined goes
        gone = [segment for segment in self._segments.values() if not self._stays(segment)]
        for number, segment in enumerate(gone):
            nowhere = [count for home, count in segment.homes.items() if not self._parts.of(home)]
            self._counts["unmatched"] += sum(nowhere)
            open_homes = {home for home in segment.homes if (segment.name, home) not in self._settled}
            if keep_unmatched(self._root, segment, open_homes, self._parts, EVENTS_AT_ONCE):
                self._report("removing", number, len(gone))
            segment.path.unlink()
            self._report("removing", number + 1, len(gone))
        sync_folder(self._root / WAL)


def _by_kind(about: Sequence[About]) -> tuple[list[FeedbackRecord], list[ShadowRecord]]:
    feedback = [record for record in about if isinstance(record, FeedbackRecord)]
    return feedback, [record for record in about if isinstance(record, ShadowRecord)]


def _portions(events: Mapping[str, int]) -> Iterator[list[str]]:
    """Homes in portions, each with as many events as are held at once, or a single home."""
    portion: list[str] = []
    held = 0
    for home, count in events.items():
        if portion and held + count > EVENTS_AT_ONCE:
            yield portion
            portion, held = [], 0
        portion.append(home)
        held += count
    if portion:
        yield portion
