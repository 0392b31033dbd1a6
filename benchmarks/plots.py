"""Plots of results, from their JSON: what a benchmark has figures of, and otherwise its bars against their goals."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

IMAGES = Path(__file__).parents[1] / "docs" / "images"
OURS, THEIRS, MISSED, LINE = "#1f6feb", "#9a6700", "#d1242f", "#57606a"
OUTCOMES = {"win": "#aceebb", "tie": "#eaeef2", "loss": "#ffaba8"}
WIDEST = 2.0
"""Bars that use up more than this share of their goal are cut off."""


def image_name(name: str) -> str:
    """The file of a benchmark's plot."""
    return f"benchmark-{name}.png"


def draw(results: dict[str, Any], folder: Path) -> Path | None:
    """Draw the results into a folder; none when there is nothing to draw, neither a figure nor a goal."""
    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = _figures(results["figures"]) if results.get("figures") else _goals(results["bars"])
        if figure is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / image_name(results["name"])
        figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    return path


def _figures(figures: list[dict[str, Any]]) -> Figure:
    if figures[0]["kind"] == "map":
        return _map([row for figure in figures for row in figure["data"]["rows"]])
    draws = {"frontier": _frontier, "growth": _growth, "real": _real}
    columns = min(2, len(figures))
    rows = -(-len(figures) // columns)
    height = 4.4 if figures[0]["kind"] == "frontier" else 3.0
    drawn = Figure(figsize=(5.2 * columns, height * rows), layout="constrained")
    for number, figure in enumerate(figures):
        axes = drawn.add_subplot(rows, columns, number + 1)
        draws[figure["kind"]](axes, figure["data"])
        axes.set_title(figure["title"], fontsize=10, loc="left")
    return drawn


def _frontier(axes: Axes, data: dict[str, Any]) -> None:
    """Utility against training seconds; the frontier as steps, the points on it filled."""
    points = data["points"]
    best = sorted((point["seconds"], point["utility"]) for point in points if point["frontier"])
    longest = max(point["seconds"] for point in points)
    x, y = [each[0] for each in best] + [longest], [each[1] for each in best] + [best[-1][1]]
    axes.step(x, y, where="post", color=LINE, linewidth=1, zorder=1)
    axes.axhline(1.0, color=LINE, linewidth=0.6, linestyle=":", zorder=0)
    for point in points:
        colour = OURS if point["ours"] else THEIRS
        face = colour if point["frontier"] else "white"
        marker = "o" if point["ours"] else "s"
        axes.plot(point["seconds"], point["utility"], marker, color=colour, markerfacecolor=face, markersize=6)
    axes.set_xscale("log")
    axes.margins(x=0.3, y=0.1)
    _names(axes, points)
    axes.set_xlabel(f"training seconds, {data['threads']} threads, {data['train_rows']:,} impressions")
    axes.set_ylabel("true utility / that of the logged order")


def _names(axes: Axes, points: list[dict[str, Any]]) -> None:
    """The name of each point beside it, moved down as far as no other stands there (in points of 1/72 inch)."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    pixel = axes.figure.dpi / 72
    taken: list[tuple[float, float, float]] = []
    for point in sorted(points, key=lambda each: -each["utility"]):
        x, y = axes.transData.transform((point["seconds"], point["utility"])) / pixel
        x, width, down = x + 6, 3.6 * len(point["name"]), 3.0
        while any(abs(y + down - other) < 7 and x < right and left < x + width for left, right, other in taken):
            down -= 1
        taken.append((x, x + width, y + down))
        colour = OURS if point["ours"] else THEIRS
        place = (point["seconds"], point["utility"])
        axes.annotate(point["name"], place, xytext=(6, down), textcoords="offset points", fontsize=6.5, color=colour)


def _growth(axes: Axes, data: dict[str, Any]) -> None:
    """Seconds against size, both as logarithms, and the slope of the goal as a dashed line through the first point."""
    sizes = data["sizes"]
    for colour, (name, seconds) in zip((OURS, THEIRS, "#1a7f37"), data["seconds"].items(), strict=False):
        axes.plot(sizes, seconds, marker="o", markersize=4, color=colour, label=name)
        goal = [seconds[0] * (size / sizes[0]) ** data["goal"] for size in sizes]
        axes.plot(sizes, goal, color=colour, linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylabel("seconds (dashed: the goal)")
    axes.legend(frameon=False, fontsize="small")


def _real(axes: Axes, data: dict[str, Any]) -> None:
    """Clicks per search with two standard errors of the difference to LightGBM 150, the line."""
    rows = sorted(data["rows"], key=lambda row: row["clicks"])
    for place, row in enumerate(rows):
        colour = OURS if row["ours"] else THEIRS
        axes.errorbar(row["difference"], place, xerr=2 * row["error"], fmt="o", color=colour, markersize=4)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=6.5)
    axes.axvline(0.0, color=LINE, linewidth=1)
    axes.set_xlabel("clicks per search − those of LightGBM 150")


def _map(rows: list[dict[str, Any]]) -> Figure:
    """Users by kinds of logs, a panel for each rival: the default's difference in percent, by win, tie and loss."""
    users = list(dict.fromkeys(row["users"] for row in rows))
    kinds = list(dict.fromkeys(row["cell"].removeprefix(f"{row['users']}/") for row in rows))
    drawn = Figure(figsize=(10.4, 0.9 + 0.75 * len(users)), layout="constrained")
    for number, rival in enumerate(("ctr1", "LightGBM 150", "logged")):
        axes = drawn.add_subplot(3, 1, number + 1)
        for row in rows:
            found = row["differences"][f"default − {rival}"]
            x, y = kinds.index(row["cell"].removeprefix(f"{row['users']}/")), users.index(row["users"])
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=OUTCOMES[found["outcome"]], edgecolor="white"))
            axes.text(x, y, f"{100 * found['mean']:+.1f}", ha="center", va="center", fontsize=6.5)
        axes.set(xlim=(-0.5, len(kinds) - 0.5), ylim=(len(users) - 0.5, -0.5))
        axes.set_xticks(range(len(kinds)), kinds, fontsize=6.5)
        axes.set_yticks(range(len(users)), users, fontsize=6.5)
        axes.tick_params(length=0)
        axes.set_title(f"default − {rival}, % of the logged clicks", fontsize=9, loc="left")
    return drawn


def _goals(bars: list[dict[str, Any]]) -> Figure | None:
    """The share of its goal that each bar uses up: what ends left of the line is reached."""
    judged = [(bar, share) for bar in bars if (share := share_of_goal(bar["value"], bar["goal"])) is not None]
    if not judged:
        return None
    figure = Figure(figsize=(9, 0.6 + 0.19 * len(judged)), layout="constrained")
    axes = figure.add_subplot()
    shares = [min(share, WIDEST) for _, share in judged]
    colours = [OURS if bar["holds"] else MISSED for bar, _ in judged]
    axes.barh(range(len(judged)), shares, color=colours, height=0.65)
    axes.set_yticks(range(len(judged)), [_label(bar) for bar, _ in judged], fontsize=6.5)
    axes.axvline(1.0, color=LINE, linewidth=1)
    axes.set_ylim(len(judged) - 0.4, -0.6)
    axes.set_xlim(0, max(1.15, *shares))
    axes.set_xlabel("share of the goal used up; at most 1 is reached")
    return figure


def share_of_goal(value: float, goal: str) -> float | None:
    """How much of a goal a value uses up: at most 1 when it is reached; none when there is no goal.

    >>> share_of_goal(50.0, "≤ 200"), share_of_goal(4.0, "≥ 2"), share_of_goal(0.05, "0.04 to 0.06")
    (0.25, 0.5, 0.0)
    >>> share_of_goal(0.0, "≤ 0"), share_of_goal(3.0, "≤ 0"), share_of_goal(-0.25, "≥ -1"), share_of_goal(1.0, "–")
    (0.0, inf, 0.25, None)
    """
    between = re.fullmatch(r"(\S+) to (\S+)", goal)
    if between:
        low, high = float(between[1]), float(between[2])
        return round(abs(value - (low + high) / 2) / ((high - low) / 2), 9)
    sign, _, number = goal.partition(" ")
    if sign not in "≤≥" or not number:
        return None
    bound = float(number)
    if sign == "≤" and bound > 0:
        return max(value / bound, 0.0)
    if sign == "≥" and bound > 0:
        return bound / value if value > 0 else math.inf
    if bound == 0:
        return 0.0 if (value <= 0 if sign == "≤" else value >= 0) else math.inf
    used = value / bound if sign == "≥" else bound / value if value < 0 else math.inf
    return max(used, 0.0)


def _label(bar: dict[str, Any]) -> str:
    value = f"{bar['value']:,.4g}" if abs(bar["value"]) < 1000 else f"{bar['value']:,.0f}"
    return f"{bar['name']}: {value} {bar['unit']}".rstrip() + f" ({bar['goal']})"
