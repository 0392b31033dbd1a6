"""Draw the pictures of the README and of docs/ from what `make demo` wrote (`make pictures`), from a reproduction, from
a store that `urank appstore` wrote, or from a test that `urank abtest simulate` did:

python docs/pictures.py reproduction docs/images
python docs/pictures.py store docs/images
python docs/pictures.py test docs/images
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from urank.config import read_toml, validate
from urank.lab.claims import list_example, position_curves
from urank.lab.experiment import AbTestConfig
from urank.lab.live_test import LIVE_PERIODS, TREATMENT, AbTestRun, judge_abtest
from urank.lab.market import CATEGORIES, DEVICES, Market, MarketConfig, build_market
from urank.lab.paper_report import lists_plot, positions_plot
from urank.report.abtest_report import days_plot
from urank.report.style import COLOURS, position_ticks, svg


def item_curves(candidates: pl.DataFrame) -> Figure:
    """The true click curves of a query: its two most relevant documents, and those that fall slowest and fastest."""
    queries = candidates.group_by("query_id", maintain_order=True).agg(pl.col("table"), pl.col("relevance"))
    tables = [np.array(table) for table in queries["table"].to_list()]
    spread = [np.ptp(table[:, 2] / table[:, 0]) * np.ptp(table[:, 0]) for table in tables]
    table = tables[int(np.argmax(spread))]
    fall = table[:, 2] / table[:, 0]
    first, second = np.argsort(-table[:, 0], kind="stable")[:2]
    chosen = list(dict.fromkeys(int(item) for item in (first, second, fall.argmax(), fall.argmin())))
    figure = Figure(figsize=(6.4, 3.2))
    axes = figure.add_subplot()
    K = table.shape[1]
    for colour, item in zip(COLOURS, chosen, strict=False):
        axes.plot(range(1, K + 1), table[item], color=colour, marker="o", markersize=3, label=f"document {item + 1}")
    axes.set_xticks(position_ticks(K))
    axes.set_xlabel("position")
    axes.set_ylabel("P(click | document, position)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.legend(frameon=False)
    return figure


def two_orders() -> Figure:
    """Two items whose order by relevance earns fewer clicks than the other one (docs/concepts.md)."""
    table = {"A, clicked anywhere": [0.30, 0.27], "B, clicked only on top": [0.28, 0.08]}
    figure = Figure(figsize=(8.0, 2.8))
    curves, orders = figure.subplots(1, 2)
    for colour, (name, clicks) in zip(COLOURS, table.items(), strict=False):
        curves.plot([1, 2], clicks, color=colour, marker="o", label=name)
    curves.set_xticks([1, 2])
    curves.set_xlim(0.8, 2.2)
    curves.set_ylim(0, 0.35)
    curves.set_xlabel("position")
    curves.set_ylabel("P(click | item, position)")
    curves.legend(frameon=False)
    a, b = table.values()
    for row, (first, second, colours) in enumerate(((b[0], a[1], COLOURS[1::-1]), (a[0], b[1], COLOURS[:2]))):
        orders.barh(row, first, color=colours[0])
        orders.barh(row, second, left=first, color=colours[1])
        orders.text(first + second + 0.01, row, f"{first:.2f} + {second:.2f} = {first + second:.2f}", va="center")
    orders.set_yticks([0, 1], ["B above A", "A above B,\nby relevance"])
    orders.set_xlim(0, 0.95)
    orders.set_xlabel("expected clicks of the list")
    for axes in (curves, orders):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def attention_curves(market: Market) -> Figure:
    """How attention falls with position in an app store, on average by device and by category (Figure 1)."""
    rng = np.random.default_rng(0)
    user, app = (rng.integers(number, size=20_000) for number in (market.config.users, market.config.apps))
    curves = market.examination(user, app)
    figure = Figure(figsize=(8.0, 3.2))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, names, group in zip(
        panels, (DEVICES, CATEGORIES), (market.device[user], market.category[app]), strict=True
    ):
        means = {name: curves[group == number].mean(axis=0) for number, name in enumerate(names)}
        for colour, (name, mean) in zip(COLOURS, sorted(means.items(), key=lambda each: -each[1][-1]), strict=False):
            axes.plot(range(1, len(mean) + 1), mean, color=colour, marker="o", markersize=3, label=name)
        axes.set_xticks(position_ticks(curves.shape[1]))
        axes.set_xlabel("position")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
        axes.legend(frameon=False, fontsize="small")
    panels[0].set_ylabel("P(looked at | position)")
    return figure


def reproduction(folder: Path, images: Path) -> None:
    """Figures 3 and 4 of the paper, from a folder of `urank reproduce all`."""
    results = pl.read_parquet(folder / "results.parquet")
    folders = sorted(folder.glob("seed-*"))
    curves = position_curves(folders, results, ["lambdarank-truth", "urank", "urank-match", "km"])
    (images / "ctr-by-position.svg").write_text(svg(positions_plot(curves)) + "\n", encoding="utf-8")
    example = list_example(folders[0], results, ["lambdarank-truth", "urank", "km"])
    (images / "result-list.svg").write_text(svg(lists_plot(example)) + "\n", encoding="utf-8")


def live_test(folder: Path) -> Figure:
    """Figures 5 and 6 of the paper, from what `urank abtest simulate` wrote."""
    config = validate(AbTestConfig, read_toml(folder / "abtest.toml"))
    judged = judge_abtest(AbTestRun(folder, config, [], pl.read_parquet(folder / "truth.parquet")), splits=0)
    shown = replace(judged.ab, results=[each for each in judged.ab.results if each.metric.name != "revenue"])
    return days_plot(shown, TREATMENT, truth=judged.true_lifts, periods=LIVE_PERIODS)


def main(demo: Path, images: Path) -> None:
    images.mkdir(parents=True, exist_ok=True)
    if (demo / "settings.toml").is_file():
        reproduction(demo, images)
        return
    if (demo / "appstore.toml").is_file():
        market = build_market(validate(MarketConfig, read_toml(demo / "appstore.toml")))
        (images / "attention-curves.svg").write_text(svg(attention_curves(market)) + "\n", encoding="utf-8")
        return
    if (demo / "abtest.toml").is_file():
        (images / "live-test.svg").write_text(svg(live_test(demo)) + "\n", encoding="utf-8")
        return
    candidates = pl.read_parquet(demo / "simulation" / "truth" / "candidates.parquet")
    (images / "item-curves.svg").write_text(svg(item_curves(candidates)) + "\n", encoding="utf-8")
    (images / "two-orders.svg").write_text(svg(two_orders()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
