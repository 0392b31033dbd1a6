"""`python -m benchmarks figures` (`make figures`): measure every figure that this commit has not measured yet.

Unattended and resumable: what fails is reported at the end, and the same command measures what is missing. Benchmarks
write `benchmarks/results/NAME.json`, the paper's experiments `benchmarks/results/reproduce.json`; then all pages are
written again. Work in progress is in `build/figures`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.docs import write_docs
from benchmarks.harness import REPRODUCTION, RESULTS
from urank.lab.provenance import commit, defect, provenance

BUILD = Path("build/figures")
SEEDS = 5
RESUMABLE = ("judge", "map")
console = Console(stderr=True)


def measure_all() -> int:
    """Measure what is missing, and return the exit code: 1 if something failed."""
    from benchmarks.__main__ import NAMES

    if wrong := defect(provenance("make figures")):
        console.print(f"The {wrong}: figures are measured at a commit without changed sources; commit them first.")
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in ("reproduce", *NAMES):
        if is_measured(name):
            console.print(f"{name}: measured at this commit before", highlight=False)
        elif not (_reproduce() if name == "reproduce" else _benchmark(name)):
            failed.append(name)
    write_docs()
    console.print(f"Failed: {', '.join(failed)}." if failed else "All figures are of this commit.")
    return 1 if failed else 0


def is_measured(name: str, folder: Path | None = None) -> bool:
    """Return whether every figure of a result was made at this commit."""
    path = (folder or RESULTS) / f"{name}.json"
    if not path.is_file():
        return False
    return all(defect(each) is None and each["commit"] == commit() for each in certificates(path))


def certificates(path: Path) -> Iterable[dict[str, Any]]:
    """Return what carries a birth certificate in a result: each bar and figure, or the experiments as a whole."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return [found["provenance"]] if path.name == REPRODUCTION.name else [*found["bars"], *found.get("figures", [])]


def _benchmark(name: str) -> bool:
    resume = ["--resume", str(BUILD / f"{name}.jsonl")] if name in RESUMABLE else []
    subprocess.run([sys.executable, "-m", "benchmarks", name, *resume], check=False)
    return is_measured(name)  # a bar that falls short is a figure, too


def _reproduce() -> bool:
    """Run the paper's experiments; the folder is of one commit, so that no figure is of two."""
    folder = BUILD / f"reproduction-{commit()}"
    flags = ["--seeds", str(SEEDS), "-o", str(folder), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "urank", "reproduce", "all", *flags], stdout=subprocess.PIPE, check=False, text=True
    )
    if done.returncode == 0:
        REPRODUCTION.write_text(done.stdout, encoding="utf-8")
    return done.returncode == 0 and is_measured("reproduce")
