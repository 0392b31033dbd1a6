"""`make house`: measure the state of the code: size, names, repetition, modules on each path, start-up time.

    python -m benchmarks.house [--json]

Prints what repeats or remains, and ends with a table of bars; exit code 1 when one falls short. Nothing is kept.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.harness import Bar, show
from benchmarks.house_trace import SOURCE, module_name
from urank.lab.provenance import commit

ROOT = SOURCE.parent
MODULES, LINES = 130, 30_000
ON_PATH = {"urank train": 35, "urank evaluate": 22, "urank rank": 16, "POST /v1/rank": 12}
COMMAND_SECONDS, IMPORT_SECONDS = 0.35, 0.2
SHARED_LINES = 6
DUPLICATES = 17  # before the redesign
STARTS = 5
QUERIES, EPOCHS, CANDIDATES = 300, 2, 10

OLD_NAMES = """
    plain team stream files paths model manifest api scaling trees prefetch
    evaluate/ rankers/ scale/ simulate/ paper/
    log.{arrange buckets write cells schema candidate_schema facts tally verdict inspect view shown sample
         interventions confounding lists partitions read summary letor folds split}
    clicks.{heads gbdt truth curves model fit}
    propensity.{pairs categories files model}
    abtest.{assign checks days estimate growth judge sequential sources moments}
    serve.{bodies heads items parsing runtime artifact record_types records segments wal sealed joined parts
           unmatched upkeep samples problems workers compact}
    client.{answers calls problems settings synchronous asynchronous}
    report.{numbers fit job store *_words *_tables *_figures *_terminal}
    cli.engine
"""
"""Modules and, with a slash, packages below `urank` that the redesign does away with; `*` matches any characters."""


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    path: Path
    text: str

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def stem(self) -> str:
        return self.path.stem

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]

    def classes(self) -> set[str]:
        """Return the names of the classes, without a leading underscore."""
        return {node.name.lstrip("_") for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    def code_lines(self) -> list[tuple[int, str]]:
        """Return numbers and text of the lines, without blank ones, comments, imports and lone punctuation."""
        imported = {line for node in self.imports for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        lines = ((number, " ".join(line.split())) for number, line in enumerate(self.text.splitlines(), 1))
        return [
            (number, line)
            for number, line in lines
            if number not in imported and not line.startswith("#") and re.search(r"\w", line)
        ]


@dataclass
class House:
    """Bars, and for some of them the names or places that were counted."""

    bars: list[Bar] = field(default_factory=list)
    lists: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, value: float | list[str], goal: float | None = None, unit: str = "") -> None:
        if isinstance(value, list):
            self.lists[name] = value
            value = len(value)
        self.bars.append(Bar(name, value, unit, at_most=goal))


def read_modules() -> list[Module]:
    """Read the source files that git tracks, and new ones that it does not ignore."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/*.py"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in sorted(set(done.stdout.splitlines()))]
    return [
        Module(module_name(path.relative_to(SOURCE)), path, path.read_text(encoding="utf-8"))
        for path in paths
        if path.exists()
    ]


def repeated_classes(modules: Sequence[Module]) -> list[str]:
    """Class names that more than one module defines, with these modules."""
    places = defaultdict(list)
    for module in modules:
        for name in module.classes():
            places[name].append(module.name)
    return _repeated(places)


def repeated_modules(modules: Sequence[Module]) -> list[str]:
    """File names that occur more than once. Commands may be named after what they call, so `urank.cli` is left out."""
    places = defaultdict(list)
    for module in modules:
        if not module.stem.startswith("__") and not module.name.startswith("urank.cli."):
            places[module.stem].append(module.name)
    return _repeated(places)


def _repeated(places: Mapping[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def single_importer(modules: Sequence[Module]) -> list[str]:
    """Modules that exactly one other module imports."""
    names = {module.name for module in modules}
    importers = Counter(name for module in modules for name in set(_imported(module, names)) - {module.name})
    return sorted(name for name, count in importers.items() if count == 1)


def _imported(module: Module, names: set[str]) -> Iterator[str]:
    for node in module.imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
            continue
        origin = node.module or ""
        if node.level:
            package = module.name.split(".")
            kept = len(package) - node.level + module.is_package
            origin = ".".join([*package[:kept], *filter(None, [node.module])])
        for alias in node.names:
            name = f"{origin}.{alias.name}"
            if name in names or origin in names:
                yield name if name in names else origin


def old_patterns(text: str = OLD_NAMES) -> list[str]:
    """Expand `a.{b c}` to `a.b` and `a.c`.

    >>> old_patterns("plain scale/ log.{read *_words}")
    ['plain', 'scale/', 'log.read', 'log.*_words']
    """
    found = re.findall(r"([\w.*/]+)(?:\{([^}]*)\})?", text)
    return [prefix + name for prefix, names in found for name in (names.split() if names else [""])]


def old_names(modules: Sequence[Module]) -> list[str]:
    """Modules and packages that still have an old name."""
    packages = {f"{module.name}/" for module in modules if module.is_package}
    names = sorted(packages | {module.name for module in modules})
    patterns = [f"urank.{pattern}" for pattern in old_patterns()]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def duplicates(modules: Sequence[Module], least: int = SHARED_LINES) -> list[str]:
    """Pairs of places that share at least so many lines, longest first; a place is as long as the two agree."""
    lines = {module.path: module.code_lines() for module in modules}
    starts: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, numbered in lines.items():
        for start in range(len(numbered) - least + 1):
            starts[tuple(line for _, line in numbered[start : start + least])].append((path, start))

    def line(path: Path, place: int) -> str | None:
        return lines[path][place][1] if 0 <= place < len(lines[path]) else None

    found = []
    for places in starts.values():
        for (path, start), (other, other_start) in combinations(places, 2):
            before = line(path, start - 1)
            if before is not None and before == line(other, other_start - 1):
                continue  # a pair that starts further up contains this one
            length = least
            while (after := line(path, start + length)) is not None and after == line(other, other_start + length):
                length += 1
            if path == other:
                length = min(length, other_start - start)  # a place does not overlap its own copy
            if length >= least:
                ends = (_place(lines, path, start, length), _place(lines, other, other_start, length))
                found.append((length, " ~ ".join(ends)))
    return [pair for _, pair in sorted(found, key=lambda each: (-each[0], each[1]))]


def _place(lines: Mapping[Path, list[tuple[int, str]]], path: Path, start: int, length: int) -> str:
    first, last = lines[path][start][0], lines[path][start + length - 1][0]
    return f"{path.relative_to(SOURCE)}:{first}-{last}"


def _run(*arguments: object) -> None:
    """Run `python ARGUMENTS` on the source of this work tree, on one thread.

    Raises:
        RuntimeError: if it fails, with the end of what it wrote to standard error.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "URANK_API_KEY": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, arguments))} failed: {done.stderr[-2_000:]}")


def cpu_seconds(*arguments: object) -> float:
    """Return the median CPU time of `python ARGUMENTS`, after a first run that compiles the modules."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    _run(*arguments)
    for _ in range(STARTS):
        before = used()
        _run(*arguments)
        times.append(used() - before)
    return statistics.median(times)


def trace_paths(folder: Path) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Trace the commands and a request on a small simulated log: the name of each, its modules and hops."""
    log, prepared, model, body = (folder / name for name in ("sim/log.parquet", "prepared", "model", "body.json"))
    unknown = ("--drop", "relevance", "--drop", "propensity")
    _run("-m", "urank", "simulate", "-o", log.parent, "--queries", QUERIES, "--seed", 1, "--quiet")
    _run("-m", "urank", "prepare", log, "-o", prepared, *unknown, "--quiet")

    def traced(*arguments: object) -> dict[str, list[str]]:
        output = folder / "trace.json"
        _run("-m", "benchmarks.house_trace", output, *arguments)
        found: dict[str, list[str]] = json.loads(output.read_text(encoding="utf-8"))
        return found

    method = ("--method", "match")  # what a small model chooses for itself is left to chance
    yield "urank train", traced("train", log, "-o", model, "--epochs", EPOCHS, *unknown)
    yield "urank evaluate", traced("evaluate", model, prepared)
    yield "urank rank", traced("rank", model, log, "-o", folder / "ranked.parquet", *method)
    body.write_text(json.dumps(_request(log)), encoding="utf-8")
    yield "POST /v1/rank", traced("--request", body, "serve", model, "--log", folder / "feedback", *method)


def _request(log: Path) -> dict[str, object]:
    rows = pq.read_table(log).slice(0, CANDIDATES).to_pylist()
    candidates = [
        {
            "item_id": f"item-{number}",
            "features": {name: value for name, value in row.items() if re.fullmatch(r"f\d+", name)},
        }
        for number, row in enumerate(rows)
    ]
    return {"query_id": "query", "candidates": candidates}


def measure() -> House:
    house = House()
    modules = read_modules()
    house.add("modules", len(modules), MODULES)
    house.add("lines", sum(module.text.count("\n") for module in modules), LINES)
    with tempfile.TemporaryDirectory(prefix="urank-house-") as name:
        for path, found in trace_paths(Path(name)):
            house.add(f"{path}: modules on its path", found["modules"], ON_PATH[path])
            house.add(f"{path}: hops between them", len(found["hops"]))
    house.add("class names in more than one module", repeated_classes(modules), 0)
    house.add("module names that occur more than once", repeated_modules(modules), 0)
    house.add("modules with one importer", single_importer(modules))
    house.add(f"pairs of places that share {SHARED_LINES} lines", duplicates(modules), DUPLICATES // 3)
    house.add("old names that remain", old_names(modules), 0)
    house.add("urank --help, CPU", cpu_seconds("-m", "urank", "--help"), COMMAND_SECONDS, "s")
    house.add("urank --version, CPU", cpu_seconds("-m", "urank", "--version"), COMMAND_SECONDS, "s")
    house.add("import urank, CPU", cpu_seconds("-c", "import urank"), IMPORT_SECONDS, "s")
    return house


def report(*, as_json: bool) -> int:
    """Measure, print, and return the exit code."""
    house = measure()
    if as_json:
        bars = [bar.to_dict() for bar in house.bars]
        print(json.dumps({"name": "house", "commit": commit(), "bars": bars, "lists": house.lists}, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for bar in house.bars:
            if not bar.holds and house.lists.get(bar.name):
                console.print(f"[bold]{bar.name}[/bold]")
                console.print(_text(house.lists[bar.name]), markup=False)
        show(house.bars)
    return 0 if all(bar.holds for bar in house.bars) else 1


def _text(found: list[str]) -> str:
    """Print names on one line, and anything longer on a line each."""
    return "  " + (", " if not any(" " in each for each in found) else "\n  ").join(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the bars, and all names and places, as JSON")
    return report(as_json=parser.parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
