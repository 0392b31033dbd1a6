"""Pages from the results: `docs/benchmarks.md`, `docs/map.md`, and tables of the paper's experiments in other pages.

In the first two, figures come from the JSON, and what is said of them from `texts.toml`. In the other pages a
table from `benchmarks/results/reproduce.json` is between `<!-- figure: NAME -->` and `<!-- /figure -->`, with a name
of `BLOCKS`. Any other figure is certified by `<!-- measured: COMMAND | COMMIT | DATE -->` in its section.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import REPRODUCTION, RESULTS
from benchmarks.map import RIVALS
from benchmarks.plots import IMAGES, draw, image_name
from urank.evaluation.intervals import normal_interval
from urank.lab.experiment_results import METRICS, STORE_METRICS
from urank.lab.provenance import defect

TEXTS = Path(__file__).parent / "texts.toml"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MAP = PAGE.with_name("map.md")


def write_docs() -> None:
    """Draw all results again and write the pages."""
    for results in read_results().values():
        draw(results, IMAGES)
    PAGE.write_text(page(), encoding="utf-8")
    MAP.write_text(map_page(), encoding="utf-8")
    if REPRODUCTION.is_file():
        found = json.loads(REPRODUCTION.read_text(encoding="utf-8"))
        for path in PAGES:
            path.write_text(with_blocks(path.read_text(encoding="utf-8"), found), encoding="utf-8")


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """What was measured, by name."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != REPRODUCTION.name]
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def page(folder: Path = RESULTS) -> str:
    """The whole page; a benchmark that was never run has no section."""
    texts, results = tomllib.loads(TEXTS.read_text(encoding="utf-8")), read_results(folder)
    untold = sorted(set(results) - {section["name"] for section in texts["section"]})
    if untold:
        raise SystemExit(f"{TEXTS} must have a section for each benchmark; '{untold[0]}' has none")
    parts = ["# Benchmarks", texts["introduction"].strip()]
    for section in texts["section"]:
        if own := section.get("page"):
            parts += [f"## {section['title']}", f"`python -m benchmarks {section['name']}`: see [its page]({own})."]
        elif section["name"] in results:
            parts += _section(section, results[section["name"]])
    return "\n\n".join(parts) + "\n"


def _section(section: dict[str, Any], results: dict[str, Any]) -> Iterator[str]:
    yield f"## {section['title']}"
    yield section["text"].strip()
    yield measured_at(results)
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
    """The certificates of the bars, and the parts that each is of.

    >>> bar = {"commit": "abc1234", "command": "python -m benchmarks log", "date": "2026-11-18"}
    >>> measured_at({"bars": [bar | {"part": "a"}, {"commit": "def5678+", "part": "b"}]})[-53:]
    'log` (a); by an earlier version, commit def5678+ (b).'
    >>> measured_at({"bars": [bar]})
    'Measured at commit abc1234 on 2026-11-18 by `python -m benchmarks log`.'
    """
    parts: dict[str, dict[str, None]] = {}
    for bar in results["bars"]:
        parts.setdefault(certificate(bar), {})[bar.get("part", "")] = None
    named = (f"{made} ({', '.join(each)})" if len(parts) > 1 and any(each) else made for made, each in parts.items())
    return f"Measured {'; '.join(named)}."


def certificate(record: dict[str, Any]) -> str:
    """The commit, date and command of a figure in words."""
    if defect(record):
        return f"by an earlier version, commit {record['commit']}" if record.get("commit") else "by an earlier version"
    return f"at commit {record['commit']} on {record['date']} by `{record['command']}`"


def with_blocks(text: str, found: dict[str, Any]) -> str:
    """Write the tables of a page again from the paper's experiments."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise SystemExit(f"a figure must be one of {', '.join(BLOCKS)}; got '{name}'")
        settings = found["sweeps"].get(name)
        data = f"{settings[0]['seeds']} seeds of each" if settings else f"{found['seeds']} seeds; {found['data']}"
        made = f"*Measured {certificate(found['provenance'])}; {data}.*"
        return f"<!-- figure: {name} -->\n\n{BLOCKS[name](found)}\n\n{made}\n\n<!-- /figure -->"

    return FIGURE.sub(block, text)


def uncertified(text: str) -> list[str]:
    """Return the headings of the sections of a page with figures that were measured, but without a certificate.

    Code is left out, but not what a command printed (`text`).
    """
    found = []
    text = ADDRESS.sub("", text)
    text = FENCED.sub(lambda block: block[0].replace("\n#", "\n") if block[0].startswith("```text") else "", text)
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        made = [dict(zip(("command", "commit", "date"), each, strict=True)) for each in MEASURED.findall(section)]
        made += [{"commit": each[0], "date": each[1], "command": each[2]} for each in CERTIFIED.findall(section)]
        if FIGURES.search(section) and (not made or any(map(defect, made))):
            found.append(section.partition("\n")[0].lstrip("# "))
    return found


ADDRESS = re.compile(r"\(https?://[^)]*\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"<!-- measured: (.*?) \| (\S+) \| (\S+) -->")
CERTIFIED = re.compile(r"Measured at commit (\S+) on (\S+) by `(.*?)`")
FIGURES = re.compile(r"\d\.\d{3,}\b|[+−]\d[\d.]* ?%|\b\d[\d.,]* (?:min|s|ms|µs)\b")
"""What looks measured: three decimals, changes in percent, and times."""
FIGURE = re.compile(r"<!-- figure: (\S+) -->.*?<!-- /figure -->", re.DOTALL)
PAGES = [Path(__file__).parents[1] / name for name in ("docs/paper.md", "docs/appstore.md")]


def _rows_table(rows: list[dict[str, Any]], metrics: list[str], values: str = "mean", p_value: str = "p_value") -> str:
    lines = []
    for row in rows:
        italic = "*" if row["kind"] == "oracle" else ""
        cells = [f"{row[values][metric]:.{4 if metric == 'CTR' else 3}f}" for metric in metrics]
        stars = ["\\*" if row[p_value].get(metric, 1.0) < 0.05 else "" for metric in metrics]
        figures = [f"{italic}{cell}{italic}{star}" for cell, star in zip(cells, stars, strict=True)]
        lines.append([f"{italic}{row['name']}{italic}", *figures])
    return _table(["row", *metrics], lines)


def _table1(found: dict[str, Any]) -> str:
    return _rows_table(found["rows"], list(METRICS))


def _table2(found: dict[str, Any]) -> str:
    columns = {"AUC, train": "train", "AUC, test": "test", "AUC, valid": "valid", "#Click": "#Click", "CTR": "CTR"}
    rows = [
        [row["name"], *(f"{np.mean(row['by_seed'][key]):.4f}" for key in columns.values())]
        for row in found["architectures"]
    ]
    a1, a2 = found["architectures"]
    change = [normal_interval(np.subtract(a2["by_seed"][key], a1["by_seed"][key])) for key in columns.values()]
    rows.append(["A2 − A1, 95 % interval over seeds", *(f"{each.low:+.4f} to {each.high:+.4f}" for each in change)])
    return _table(["architecture", *columns], rows)


def _table3(found: dict[str, Any]) -> str:
    return _rows_table(found["store"], list(STORE_METRICS))


def _table3_true(found: dict[str, Any]) -> str:
    return _rows_table(found["store"], list(STORE_METRICS), "true", "true_p_value")


def _claims(found: dict[str, Any]) -> str:
    kinds = {
        "Section 5.4": "claims",
        "RQ1": "curve_claims",
        "RQ2": "architecture_claims",
        "Section 6.1": "store_claims",
        "Section 6.2": "live_claims",
    }
    holds = {True: "yes", False: "no", None: "undecided"}
    rows = [
        [source, claim["text"], holds[claim["holds"]], claim["figures"]]
        for source, kind in kinds.items()
        for claim in found[kind]
    ]
    return _table(["of", "claim", "holds", "figures"], rows)


def _differences(found: dict[str, Any]) -> str:
    rows = []
    for each in found["differences"]:
        before, after = each["clicks_before"], each["clicks_after"]
        gain = f"{100 * (after / before - 1):+.2f} %"
        rows.append([each["text"], f"{before:.3f}", f"{after:.3f}", gain, f"{each['p_value']:.0e}"])
    return _table(["change", "before", "after", "gain", "p"], rows)


def _gains(experiment: str, found: dict[str, Any]) -> str:
    """The gain of each row over the best baseline of its setting."""
    settings = found["sweeps"][experiment]
    names = {row["key"]: row["name"] for setting in settings for row in setting["rows"]}
    clicks = [{row["key"]: row["mean"]["#Click"] for row in setting["rows"]} for setting in settings]
    best = [
        max((row for row in setting["rows"] if row["kind"] == "baseline"), key=lambda row: row["mean"]["#Click"])
        for setting in settings
    ]
    rows = [["best baseline", *(f"{row['name']}: {row['mean']['#Click']:.3f}" for row in best)]]
    for key, name in names.items():
        gains = [
            f"{100 * (own[key] / row['mean']['#Click'] - 1):+.1f} %" if key in own else "–"
            for own, row in zip(clicks, best, strict=True)
        ]
        rows.append([name, *gains])
    return _table(["row", *(setting["name"] for setting in settings)], rows)


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "table1": _table1,
    "table2": _table2,
    "table3": _table3,
    "table3-true": _table3_true,
    "claims": _claims,
    "differences": _differences,
    "attention": partial(_gains, "attention"),
    "users": partial(_gains, "users"),
}


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
    tables = {"frontier": _frontier_table, "growth": _growth_table, "real": _real_table}
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


def map_page(folder: Path = RESULTS) -> str:
    """The page of the map: what was done, where U-rank wins, ties and loses, and all figures, once measured."""
    texts = tomllib.loads(TEXTS.read_text(encoding="utf-8"))
    section = next(each for each in texts["section"] if each["name"] == "map")
    parts = [f"# {section['title']}", section["text"].strip()]
    results = read_results(folder).get("map")
    if results is None:
        return "\n\n".join([*parts, "It was not measured yet."]) + "\n"
    rows = [row for figure in results["figures"] for row in figure["data"]["rows"]]
    parts += ["## The map", measured_at(results), *_verdict(rows), _map_grid(rows)]
    parts += [
        "True clicks of the default relative to the logged order. The squares compare the default with ctr1, LightGBM "
        "150 and the logged order, in this order: 🟩 it wins, ⬜ they tie, 🟥 it loses.",
        f"![{section['title']}](images/{image_name('map')})",
        "*The same differences in percent of the clicks of the logged order.*",
        _comparisons_table(rows),
        "True clicks relative to the logged order, with standard errors over seeds:",
        *(_map_table(figure["title"], figure["data"]["rows"]) for figure in results["figures"]),
    ]
    return "\n\n".join(parts) + "\n"


SQUARES = {"win": "🟩", "tie": "⬜", "loss": "🟥"}


def _verdict(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield in words where the default wins, ties and loses."""
    for rival in RIVALS[:3]:
        pair = f"default − {rival}"
        by_outcome: dict[str, list[dict[str, Any]]] = {"win": [], "tie": [], "loss": []}
        for row in rows:
            if pair in row["differences"]:
                by_outcome[row["differences"][pair]["outcome"]].append(row)
        wins, ties, losses = by_outcome.values()
        total = len(wins) + len(ties) + len(losses)
        name = "the logged order" if rival == "logged" else rival
        text = (
            f"**Against {name}** the default wins {len(wins)} of {total} cells, ties {len(ties)}, loses {len(losses)}"
        )
        text += f" (by chance alone about {total / 44:.0f} would be lost)." if total >= 44 else "."
        text += f" It wins with {_users(wins, rows)}." if wins else ""
        text += f" It never wins with {', '.join(never)}." if (never := _without(wins, rows)) else ""
        text += f" It loses with {'; '.join(_lost(row, pair) for row in losses)}." if losses else ""
        yield text


def _users(some: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Name the users of some cells, and in how many of all their cells."""
    counts = {
        users: sum(row["users"] == users for row in some) for users in dict.fromkeys(row["users"] for row in some)
    }
    every = {users: sum(row["users"] == users for row in rows) for users in counts}
    return ", ".join(f"{users} ({count} of {every[users]})" for users, count in counts.items())


def _without(wins: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    won = {row["users"] for row in wins}
    return [users for users in dict.fromkeys(row["users"] for row in rows) if users not in won]


def _lost(row: dict[str, Any], pair: str) -> str:
    found = row["differences"][pair]
    return f"{row['cell']} ({100 * found['mean']:+.1f} %, z {found['z']:.1f})"


def _map_grid(rows: list[dict[str, Any]]) -> str:
    """The map itself: users by kinds of logs, the default's clicks and the squares."""
    kinds = dict.fromkeys(row["cell"].removeprefix(f"{row['users']}/") for row in rows)
    table = []
    for users in dict.fromkeys(row["users"] for row in rows):
        own = {row["cell"].removeprefix(f"{users}/"): row for row in rows if row["users"] == users}
        table.append([users, *(_map_cell(own[kind]) if kind in own else "" for kind in kinds)])
    return _table(["users / queries", *kinds], table)


def _map_cell(row: dict[str, Any]) -> str:
    squares = (SQUARES[row["differences"][f"default − {rival}"]["outcome"]] for rival in RIVALS[:3])
    return f"{row['ratios']['default']:.3f} {''.join(squares)}"


def _comparisons_table(rows: list[dict[str, Any]]) -> str:
    """How often each of our methods wins, ties and loses against each rival, and where it loses."""
    table = []
    for pair in dict.fromkeys(pair for row in rows for pair in row["differences"]):
        known = [row for row in rows if pair in row["differences"]]
        outcomes = [row["differences"][pair]["outcome"] for row in known]
        mean = 100 * float(np.mean([row["differences"][pair]["mean"] for row in known]))
        lost = [row for row, found in zip(known, outcomes, strict=True) if found == "loss"]
        counts = [str(outcomes.count(each)) for each in SQUARES]
        table.append([pair, *counts, f"{mean:+.1f} %", _users(lost, rows)])
    return _table(["comparison", "wins", "ties", "losses", "mean difference / logged", "loses with"], table)


def _map_table(title: str, rows: list[dict[str, Any]]) -> str:
    names = [name for name in rows[0]["ratios"] if name != "logged"]
    table = [[row["cell"], *(_with_error(row, name) for name in names)] for row in rows]
    return _table([title, *names], table)


def _with_error(row: dict[str, Any], name: str) -> str:
    if name not in row["ratios"]:
        return "–"
    error = row["errors"][name]
    return f"{row['ratios'][name]:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def number(value: float, digits: int) -> str:
    """With so many digits, and thousands apart.

    >>> number(35854, 4), number(0.012345, 3), number(3.54e-28, 4), number(1272.57, 4)
    ('35,854', '0.0123', '3.54e-28', '1,273')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
