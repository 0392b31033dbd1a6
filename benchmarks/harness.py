"""What every benchmark needs: bars, figures, timing, the peak memory of a command, versions and machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from urank.lab.provenance import defect

RESULTS = Path(__file__).parent / "results"
REPRODUCTION = RESULTS / "reproduce.json"
"""The paper's experiments: the output of `urank reproduce all --json`."""
REAL_DATA = Path(os.environ.get("URANK_DATA", Path(__file__).parents[2] / "shared" / "data"))
PACKAGES = (
    "urank",
    "numpy",
    "polars",
    "pyarrow",
    "scikit-learn",
    "scipy",
    "torch",
    "lightgbm",
    "onnxruntime",
    "starlette",
    "uvicorn",
    "msgspec",
)


@dataclass(frozen=True)
class Bar:
    """A measured value and the goal it is held against: at least, at most, or none."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    part: str = ""

    @property
    def holds(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def goal(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_most is not None else "–"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "goal": self.goal, "holds": self.holds} | (
            {"part": self.part} if self.part else {}
        )


@dataclass(frozen=True)
class Figure:
    """What a plot and a table of a benchmark are made of, kept in its JSON beside the bars.

    Attributes:
        kind: `frontier`, `growth`, `real` or `map`; `plots` knows how to draw it, `docs` how to tabulate it.
        title: what it shows.
        data: numbers and names only.
        part: of the benchmark, as in `Bar`.
    """

    kind: str
    title: str
    data: dict[str, Any]
    part: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def median_seconds(*actions: Callable[[], object], repeats: int = 3) -> list[float]:
    """The median time of each action; they take turns, so that a slow moment of the machine hits them alike."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for action, measured in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in times]


def peak_memory(*arguments: object, output: Path | None = None) -> tuple[float, float]:
    """Run `python ARGUMENTS` and return its peak resident memory in MB and its seconds; what it prints goes to a file.

    The peak is read from the kernel's own high-water mark while it runs: what `wait4` reports would include this
    process, from which it is forked.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(output.open("wb")) if output is not None else None
        process = subprocess.Popen([sys.executable, *map(str, arguments)], stdout=file)
    peak = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii"))
        peak = max(peak, int(found[1]) if found else 0)
        time.sleep(0.01)
    if process.returncode:
        raise RuntimeError(f"{arguments} ended with exit code {process.returncode}")
    return peak / 1024, time.perf_counter() - start


def environment() -> dict[str, Any]:
    """Versions and machine, so that a result can be judged later."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def write_results(
    name: str, results: dict[str, Any], only: Sequence[str] = (), folder: Path = RESULTS
) -> dict[str, Any]:
    """Keep the results and give back what is kept; what was measured of other parts than `only` stays as it was.

    Raises:
        SystemExit: a figure has no birth certificate: the clean commit, the command and the date that made it.
    """
    for figure in [*results["bars"], *results.get("figures", [])]:
        if wrong := defect(figure):
            name = figure.get("name") or figure["title"]
            raise SystemExit(f"'{name}' is not kept, since its {wrong}: measure at a commit without changed sources")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    if only and path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        for kind in ("bars", "figures"):
            others = [each for each in known.get(kind, []) if each.get("part") not in only]
            results = {**results, kind: others + results.get(kind, [])}
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return results


def show(bars: list[Bar]) -> None:
    table = Table("name", "value", "unit", "goal", "holds", box=None, header_style="bold")
    for bar in bars:
        value = f"{bar.value:,.0f}" if abs(bar.value) >= 1_000 else f"{bar.value:.3g}"
        table.add_row(bar.name, value, bar.unit, bar.goal, "yes" if bar.holds else "NO")
    Console().print(table)
