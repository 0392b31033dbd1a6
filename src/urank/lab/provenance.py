"""Provenance of measured figures: the commit, the command and the date that made them.

A commit is *clean* if no file that can change a figure differs from it: the sources, the benchmarks and the pinned
dependencies. Results and documentation, which measuring itself rewrites, do not count.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = ("src", "benchmarks", "pyproject.toml", "constraints.txt", ":!benchmarks/results", ":!benchmarks/texts.toml")
_FORMS = {"commit": r"[0-9a-f]{7,40}", "command": r"\S.*", "date": r"\d{4}-\d{2}-\d{2}"}


@cache
def commit() -> str:
    """Return the commit of the work tree, with a `+` if sources were changed since; empty if this is no work tree."""
    package = Path(__file__).parents[1]
    try:
        root = Path(_git(package, "rev-parse", "--show-toplevel"))
        if root / "src" / "urank" != package:  # installed inside another repository
            return ""
        changed = _git(root, "status", "--porcelain", "--", *SOURCES)
        return _git(root, "rev-parse", "--short=7", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def provenance(command: str) -> dict[str, str]:
    """Return the provenance of a figure that this command makes now."""
    return {"commit": commit(), "command": command, "date": datetime.now(UTC).date().isoformat()}


def defect(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the provenance of a figure in words; None if nothing is.

    >>> defect({"commit": "b204519", "command": "python -m benchmarks log", "date": "2026-11-18"})
    >>> defect({"commit": "b204519+", "command": "python -m benchmarks log", "date": "2026-11-18"})
    "commit is 'b204519+'"
    >>> defect({"commit": "b204519"})
    'command is missing'
    """
    for key, form in _FORMS.items():
        value = record.get(key)
        if not value:
            return f"{key} is missing"
        if not re.fullmatch(form, str(value)):
            return f"{key} is '{value}'"
    return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()
