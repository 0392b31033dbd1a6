"""`docs/benchmarks.md` from the results: figures come from the JSON, and what is said of them from `texts.toml`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.plots import IMAGES, draw, image_name

TEXTS = Path(__file__).parent / "texts.toml"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def write_docs() -> None:
    """Draw all results again and write the page."""
    for results in read_results().values():
        draw(results, IMAGES)
    PAGE.write_text(page(), encoding="utf-8")


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """What was measured, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def page(folder: Path = RESULTS) -> str:
    """The whole page; a benchmark that was never run has no section."""
    texts, results = tomllib.loads(TEXTS.read_text(encoding="utf-8")), read_results(folder)
    untold = sorted(set(results) - {section["name"] for section in texts["section"]})
    if untold:
        raise SystemExit(f"{TEXTS} must have a section for each benchmark; '{untold[0]}' has none")
    parts = ["# Benchmarks", texts["introduction"].strip()]
    for section in texts["section"]:
        if section["name"] in results:
            parts += _section(section, results[section["name"]])
    return "\n\n".join(parts) + "\n"


def _section(section: dict[str, Any], results: dict[str, Any]) -> Iterator[str]:
    yield f"## {section['title']}"
    yield section["text"].strip()
    if said := measured_at(results):
        yield said
    if any(bar["goal"] != "–" for bar in results["bars"]) or results.get("figures"):
        yield f"![{section['title']}](images/{image_name(section['name'])})"
    for figure in results.get("figures", []):
        yield _figure_table(figure)
    hidden = re.compile("|".join(section["leave_out"])) if section.get("leave_out") else None
    shown = [bar for bar in results["bars"] if hidden is None or not hidden.search(bar["name"])]
    yield _bars_table(shown, section.get("digits", 4))
    if left := len(results["bars"]) - len(shown):
        yield f"{left} more figures are in `benchmarks/results/{section['name']}.json`."


def measured_at(results: dict[str, Any]) -> str:
    """The commits that the bars were measured at, and the parts that each is of; nothing when none is known.

    >>> measured_at({"bars": [{"commit": "abc1234", "part": "a"}, {"commit": "def5678", "part": "b"}]})
    'Measured at commits abc1234 (a), def5678 (b).'
    """
    parts: dict[str, list[str]] = {}
    for bar in results["bars"]:
        if bar.get("commit"):
            known = parts.setdefault(bar["commit"], [])
            if bar.get("part") and bar["part"] not in known:
                known.append(bar["part"])
    if len(parts) < 2:
        return f"Measured at commit {next(iter(parts))}." if parts else ""
    named = (f"{commit} ({', '.join(each)})" if each else commit for commit, each in parts.items())
    return f"Measured at commits {', '.join(named)}."


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|" for line in lines)


def _bars_table(bars: list[dict[str, Any]], digits: int) -> str:
    rows = [
        [
            bar["name"].replace("|", "\\|"),
            f"{number(bar['value'], digits)} {bar['unit']}".strip(),
            bar["goal"] if bar["holds"] else f"{bar['goal']}, not reached",
        ]
        for bar in bars
    ]
    return _table(["what", "value", "goal"], rows)


def _figure_table(figure: dict[str, Any]) -> str:
    tables = {"frontier": _frontier_table, "growth": _growth_table, "real": _real_table, "matrix": _matrix_table}
    return tables[figure["kind"]](figure["title"], figure["data"])


def _frontier_table(title: str, data: dict[str, Any]) -> str:
    points = sorted(data["points"], key=lambda point: -point["utility"])
    rows = [
        [
            f"**{point['name']}**" if point["ours"] else f"{point['name']} {point['version']}".strip(),
            f"{point['utility']:.4f} ± {point['utility_sd']:.4f}",
            number(point["seconds"], 3),
            number(point["load_seconds"], 2) if point["load_seconds"] is not None else "in training",
            f"{point['rows_per_second']:,.0f}",
            "yes" if point["frontier"] else "",
        ]
        for point in points
    ]
    header = [
        f"{title} (ours bold)",
        "utility / logged",
        "training s",
        "loading s",
        "rows scored / s",
        "on the frontier",
    ]
    return _table(header, rows)


def _growth_table(title: str, data: dict[str, Any]) -> str:
    rows = [[what, *(f"{number(each, 3)} s" for each in seconds)] for what, seconds in data["seconds"].items()]
    return _table([title, *(f"{size:,}" for size in data["sizes"])], rows)


def _real_table(title: str, data: dict[str, Any]) -> str:
    rows = [
        [
            f"**{row['method']}**" if row["ours"] else row["method"],
            f"{row['clicks']:.3f}",
            f"{row['difference']:+.3f} ± {row['error']:.3f}",
            f"{row['z']:+.1f}",
            f"{row['ndcg']:.3f}",
        ]
        for row in sorted(data["rows"], key=lambda row: -row["clicks"])
    ]
    header = [f"{title}, {data['splits']} splits (ours bold)", "clicks per search", "− LightGBM 150", "z", "nDCG@10"]
    return _table(header, rows)


def _matrix_table(title: str, data: dict[str, Any]) -> str:
    names = [name for name in data["rows"][0]["ratios"] if name != "logged"]
    rows = [
        [
            row["cell"],
            *(f"{row['ratios'][name]:.4f}" if name in row["ratios"] else "–" for name in names),
            "; ".join(f"{pair} (z {row['differences'][pair]['z']:.1f})" for pair in row["flags"]),
        ]
        for row in data["rows"]
    ]
    return _table([title, *names, "significantly below"], rows)


def number(value: float, digits: int) -> str:
    """With so many digits, and thousands apart.

    >>> number(35854, 4), number(0.012345, 3), number(3.54e-28, 4), number(1272.57, 4)
    ('35,854', '0.0123', '3.54e-28', '1,273')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
