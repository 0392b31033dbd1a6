"""The thread that reads ahead changes nothing but the time; progress is one share of all steps."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from urank.progress import Overall, bars, prefetch


@pytest.mark.parametrize("depth", [1, 3])
def test_same_items_same_order(depth: int) -> None:
    assert list(prefetch(iter(range(100)), depth)) == list(range(100))
    assert list(prefetch([], depth)) == []


def test_errors_come_through_after_what_was_before_them() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("second")

    got = []
    with pytest.raises(KeyError, match="second"):
        for item in prefetch(items()):
            got.append(item)  # noqa: PERF402 - what came before the error is what is asked
    assert got == [1]


def test_stopping_early_ends_the_thread() -> None:
    before = threading.active_count()
    reader = prefetch(iter(range(10**9)))
    assert next(reader) == 0
    reader.close()
    assert threading.active_count() == before


# Overall progress

PLAN = {"reading": 2.0, "train": 5.0, "train ranker": 2.0, "writing": 1.0}


def test_one_share_over_all_steps_that_never_decreases() -> None:
    overall = Overall(PLAN)
    reports: list[tuple[str, float, float | None]] = [
        ("reading", 1, 2),
        ("reading", 2, 2),
        ("train shrunk-0", 1, 2),
        ("train pbm-0", 0, 2),
        ("something else", 1, 9),
        ("train ranker", 0, None),
        ("train ranker", 1, 1),
        ("writing", 0, None),
    ]
    names, shares = [], []
    for step, done, total in reports:
        names.append(overall.update(step, done, total))
        shares.append(overall.share)
    assert shares == pytest.approx([0.1, 0.2, 0.45, 0.45, 0.45, 0.7, 0.9, 0.9])
    assert names[1] == "train"  # a step that is done gives way to the next
    assert names[4:] == ["something else", "train ranker", "writing", "writing"]


def test_without_a_plan_it_is_the_step() -> None:
    overall = Overall()
    assert (overall.update("inspecting", 3, 4), overall.share) == ("inspecting", 0.75)


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 1.0, 4.0, 5.0, 6.0, 30.0])
    monkeypatch.setattr("urank.progress.time.monotonic", lambda: next(clock))
    with bars(PLAN) as report:
        for done in (0, 1):
            report("reading", done, 2)
        for done in (0, 1, 2, 3):
            report("train", done, 5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [" 20% train, 0:04, 0:16 left", " 50% train, 0:30, 0:30 left"]


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urank.progress.SECONDS_BEFORE", 0.0)
    with bars(PLAN, quiet=True) as report:
        report("reading", 1, 2)
    assert capsys.readouterr().err == ""
    with bars(PLAN) as report:
        report("reading", 1, 2)
    assert "reading" in capsys.readouterr().err


def test_one_bar_in_a_terminal_of_80_columns() -> None:
    """In a pseudo-terminal: every frame is one line with the step, and nothing is wider than the terminal."""
    script = "from urank.progress import bars\n"
    script += "with bars({'a very long name of the first step that there is': 1, 'then': 1}) as report:\n"
    script += "    for n in range(5):\n"
    script += "        report('a very long name of the first step that there is', n, 4)\n"
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    done = subprocess.run([sys.executable, "-c", script], stderr=other, env=environment | {"TERM": "xterm"}, check=True)
    os.close(other)
    assert done.returncode == 0
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(main, 100_000).decode())
    os.close(main)
    frames = [line for line in re.split(r"[\r\n]+", drawn) if line.strip()]
    assert frames
    assert max(map(len, frames)) <= 80
    assert "then" in frames[-1]
    assert "50%" in frames[-1]
