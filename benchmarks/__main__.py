"""`python -m benchmarks NAME [--quick] [--json]`: run one benchmark and end with a table of its bars.

Exit code 1 when a bar falls short. Results, with versions and machine, go to `benchmarks/results/NAME.json`; those of
a quick run, which is there to see that a benchmark works, are not kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from rich.console import Console

from benchmarks.harness import Bar, environment, show, write_results

NAMES = ("log", "clicks", "utility", "letor", "abtest", "serve")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works; results are not kept")
    parser.add_argument("--json", action="store_true", help="print the results as JSON and nothing else")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="only this part (of utility)")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    bars: list[Bar] = []
    chosen = {"only": arguments.only} if arguments.only else {}
    for bar in importlib.import_module(f"benchmarks.{arguments.name}").run(quick=arguments.quick, **chosen):
        console.print(f"{bar.name}: {bar.value:.3g} {bar.unit}", highlight=False)
        bars.append(bar)
    results = {
        "name": arguments.name,
        "quick": arguments.quick,
        **environment(),
        "bars": [bar.to_dict() for bar in bars],
    }
    if not arguments.quick:
        write_results(arguments.name, results, arguments.only)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(bars)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
