"""`python -m benchmarks NAME [--quick] [--json]`: run one benchmark and end with a table of its bars.

Exit code 1 when a bar falls short. Results, with versions, machine, and the commit, command and date of each figure, go
to `benchmarks/results/NAME.json`, and a plot of them to `docs/images/benchmark-NAME.png`. Not kept are those of a quick
run, which is there to see that a benchmark works, of a run with options that change what is measured, and of sources
that are not committed. `python -m benchmarks house` measures the state of the code instead, and keeps nothing.
`python -m benchmarks docs` writes `docs/benchmarks.md` and the tables of other pages from all results that are there,
and draws them again. `python -m benchmarks figures` measures all that this commit has not measured yet.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import RESULTS, Bar, Figure, environment, show, write_results
from urank.lab.provenance import defect, provenance

NAMES = (
    "log",
    "clicks",
    "utility",
    "frontier",
    "price",
    "growth",
    "scale",
    "lists",
    "rank",
    "letor",
    "abtest",
    "serve",
    "real",
    "map",
    "judge",
)

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "real": {
        "splits": {"type": int, "help": "number of splits; three judge every random search once"},
        "half": {"choices": ("choose", "judge"), "help": "the half of the searches to judge"},
        "log": {"type": Path, "help": "another log with randomised traffic, Parquet or CSV"},
        "columns": {"nargs": "+", "metavar": "ROLE=COLUMN", "help": "names of its columns"},
        "random": {"metavar": "COLUMN=VALUE", "help": "what marks its random lists"},
        "drop": {"nargs": "+", "metavar": "COLUMN", "help": "its columns to leave out, such as outcomes"},
    },
    "judge": {
        "logs": {"type": int, "help": "number of logs per scenario"},
        "seed": {"type": int, "help": "the first seed; 500 to 899 for choosing, 2,000 and up to report"},
        "resume": {"type": Path, "metavar": "PATH", "help": "JSON lines to resume from and append to"},
        "workers": {"type": int, "help": "number of processes"},
    },
    "map": {
        "queries": {"nargs": "+", "type": int, "help": "numbers of queries to learn from"},
        "seed": {"type": int, "help": "the first seed; 400 and up for choosing, 900 to report"},
        "resume": {"type": Path, "metavar": "PATH", "help": "JSON lines to resume from and append to"},
        "workers": {"type": int, "help": "number of processes"},
    },
}
"""Further options of benchmarks, passed to their `run`; all are None by default."""

UNIMPORTANT = {"resume", "workers"}
"""Options that change no result."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in (*NAMES, "house", "docs", "figures"):
        command = commands.add_parser(name)
        command.add_argument("--quick", action="store_true", help="small sizes, to see that it works; nothing is kept")
        command.add_argument("--json", action="store_true", help="print the results as JSON and nothing else")
        command.add_argument("--only", action="extend", nargs="+", default=[], metavar="PART", help="only these parts")
        for option, settings in OPTIONS.get(name, {}).items():
            command.add_argument(f"--{option}", **settings)
    arguments = parser.parse_args()
    if arguments.name == "docs":
        from benchmarks.docs import write_docs

        write_docs()
        return 0
    if arguments.name == "figures":
        from benchmarks.figures import measure_all

        return measure_all()
    if arguments.name == "house":
        from benchmarks.house import report

        return report(as_json=arguments.json)
    known = OPTIONS.get(arguments.name, {})
    options = {name: given for name in known if (given := getattr(arguments, name)) is not None}
    wrong = None if arguments.quick else defect(provenance("python -m benchmarks"))
    keeps = not options.keys() - UNIMPORTANT and wrong is None
    if wrong is not None:
        Console(stderr=True).print(f"Results will not be kept, since the {wrong}; commit the sources first.")
    bars, results = measured(arguments.name, quick=arguments.quick, only=arguments.only, **options)
    if keeps:
        _keep(results, arguments.only)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(bars)
    return 0 if all(bar.holds for bar in bars) else 1


def measured(name: str, *, quick: bool, only: list[str], **options: Any) -> tuple[list[Bar], dict[str, Any]]:
    """Run a benchmark: its bars, and all that is kept of it."""
    console = Console(stderr=True)
    bars: list[Bar] = []
    figures: list[Figure] = []
    chosen = {"only": only} if only else {}
    for found in importlib.import_module(f"benchmarks.{name}").run(quick=quick, **chosen, **options):
        if isinstance(found, Figure):
            figures.append(found)
            continue
        console.print(f"{found.name}: {found.value:.3g} {found.unit}", highlight=False)
        bars.append(found)
    given = {"only": only, **{option: value for option, value in options.items() if option not in UNIMPORTANT}}
    flags = [f"--{option} {' '.join(map(str, _several(value)))}" for option, value in given.items() if value]
    at = provenance(" ".join(["python -m benchmarks", name, *flags]))
    results = {"name": name, "quick": quick, **environment(), "bars": [bar.to_dict() | at for bar in bars]}
    return bars, results | ({"figures": [figure.to_dict() | at for figure in figures]} if figures else {})


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _keep(results: dict[str, Any], only: list[str]) -> None:
    """Write the results and draw them; of a quick run they are only drawn, and thrown away."""
    from benchmarks.plots import IMAGES, draw

    if results["quick"]:
        with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
            draw(results, Path(name))
    else:
        kept = write_results(results["name"], results, only)
        for folder in (IMAGES, RESULTS):
            draw(kept, folder)


if __name__ == "__main__":
    sys.exit(main())
