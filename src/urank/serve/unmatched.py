"""Feedback whose ranking is not where it was heard of: kept there, and read from elsewhere.

Where several servers answer, each with a folder of its own, a click may come to one that did not make the ranking. It
was acknowledged, so it is kept: in `unmatched/SEGMENT.wal`, by the name of the segment that it was written to, in the
same records. Whoever has both folders can join it to its ranking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from urank.serve.joined import KEYS, are_shown
from urank.serve.parts import Parts, durable_file, read_part
from urank.serve.records import FeedbackRecord, encode, segment_of
from urank.serve.sealed import About, Sealed, segment_files
from urank.serve.segments import WAL, durable_folder, framed

__all__ = ["UNMATCHED", "heard_elsewhere", "keep_unmatched"]

UNMATCHED = "unmatched"
"""The folder of feedback on rankings that are not in this log."""


class _Elsewhere(Sealed):
    """A file that is only read. Its owner may remove it at any time, and then has put what counts somewhere else."""

    def about(self) -> Iterator[About]:
        """Feedback; what a silent model would have shown is no concern of others."""
        with suppress(FileNotFoundError):
            for record in super().about():
                if isinstance(record, FeedbackRecord):
                    yield record


def heard_elsewhere(root: Path, also: Collection[Path]) -> dict[str, Sealed]:
    """What may hold feedback on rankings of a log beside its own write-ahead files: those of others, and unmatched.

    Without others there is nothing: what the log itself did not match is not read each time.

    Args:
        root: the folder of the log.
        also: those of others; it may be among them.

    Returns:
        the files by what parts remember them by: segment and checksum of the feedback, so that one which has grown, as
        the copy of a file that was still written to does, is looked at again.
    """
    if not also:
        return {}
    # Write-ahead files first: what moves from there to `unmatched` meanwhile is seen at least once.
    others = sorted({folder.resolve() for folder in also} - {root.resolve()})
    folders = [*(other / WAL for other in others), *(other / UNMATCHED for other in [*others, root])]
    found: dict[str, Sealed] = {}
    for path in chain.from_iterable(segment_files(folder) for folder in folders if folder.is_dir()):
        source = _Elsewhere(path.stem, path, due=False, joined=False)
        with suppress(FileNotFoundError):
            source.survey()
            if source.homes:
                found[f"{source.name}:{source.checksum:08x}"] = source
    return found


def keep_unmatched(root: Path, segment: Sealed, homes: Collection[str], parts: Parts, at_once: int) -> bool:
    """Write down the feedback of a segment that is on no impression of the log; whether there was any.

    Args:
        root: the folder of the log.
        segment: all of whose feedback that can be joined is joined.
        homes: the segments of the rankings that it may be on; on those of others, all is known to be joined.
        parts: of the log.
        at_once: how many events may be held in memory.
    """
    events = _unmatched(segment, homes, parts, at_once) if homes else iter(())
    first = next(events, None)
    if first is None:
        return False
    durable_folder(root / UNMATCHED)
    with durable_file(root / UNMATCHED / f"{segment.name}.wal") as working, working.open("wb") as file:
        file.writelines(framed(encode(event)) for event in chain([first], events))
    return True


def _unmatched(segment: Sealed, homes: Collection[str], parts: Parts, at_once: int) -> Iterator[FeedbackRecord]:
    paths = {home: parts.of(home) for home in homes}
    held: dict[str, list[FeedbackRecord]] = {home: [] for home in homes}
    count = 0
    for record in segment.about():
        home = segment_of(record.ranking_id)
        if home not in held or not isinstance(record, FeedbackRecord):
            continue
        if not paths[home]:
            yield record
            continue
        held[home].append(record)
        count += 1
        if count == at_once:
            yield from _not_shown(held, paths)
            held, count = {home: [] for home in homes}, 0
    yield from _not_shown(held, paths)


def _not_shown(
    events: Mapping[str, Sequence[FeedbackRecord]], paths: Mapping[str, Sequence[Path]]
) -> Iterator[FeedbackRecord]:
    """The events that are on no impression of the parts of their home."""
    for home in (home for home, some in events.items() if some):
        shown = np.any([are_shown(read_part(path, KEYS), events[home]) for path in paths[home]], axis=0)
        yield from (event for event, found in zip(events[home], shown, strict=True) if not found)
