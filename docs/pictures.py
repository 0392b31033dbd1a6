"""Draw the pictures of the README and of docs/ from what `make demo` wrote (`make pictures`), or from a reproduction:

python docs/pictures.py reproduction docs/images
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from urank.paper.figures import list_example, position_curves
from urank.report.figures import COLOURS, svg
from urank.report.paper_figures import lists_plot, positions_plot


def item_curves(candidates: pl.DataFrame) -> Figure:
    """The true click curves of documents of one query: the most relevant, and those that fall fastest and slowest."""
    queries = candidates.group_by("query_id", maintain_order=True).agg(pl.col("table"), pl.col("relevance"))
    tables = [np.array(table) for table in queries["table"].to_list()]
    spread = [np.ptp(table[:, 2] / table[:, 0]) * np.ptp(table[:, 0]) for table in tables]
    table = tables[int(np.argmax(spread))]
    fall = table[:, 2] / table[:, 0]
    chosen = list(
        dict.fromkeys([int(table[:, 0].argmax()), int(fall.argmin()), int(fall.argmax()), int(np.argsort(fall)[5])])
    )
    figure = Figure(figsize=(6.4, 3.2))
    axes = figure.add_subplot()
    K = table.shape[1]
    for colour, item in zip(COLOURS, chosen, strict=False):
        axes.plot(range(1, K + 1), table[item], color=colour, marker="o", markersize=3, label=f"document {item + 1}")
    axes.set_xlabel("position")
    axes.set_ylabel("P(click | document, position)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.legend(frameon=False)
    return figure


def reproduction(folder: Path, images: Path) -> None:
    """Figures 3 and 4 of the paper, from a folder of `urank reproduce all`."""
    results = pl.read_parquet(folder / "results.parquet")
    folders = sorted(folder.glob("seed-*"))
    curves = position_curves(folders, results, ["lambdarank-truth", "urank", "urank-match", "km"])
    (images / "ctr-by-position.svg").write_text(svg(positions_plot(curves)) + "\n", encoding="utf-8")
    example = list_example(folders[0], results, ["lambdarank-truth", "urank", "km"])
    (images / "result-list.svg").write_text(svg(lists_plot(example)) + "\n", encoding="utf-8")


def main(demo: Path, images: Path) -> None:
    images.mkdir(parents=True, exist_ok=True)
    if (demo / "settings.toml").is_file():
        reproduction(demo, images)
        return
    candidates = pl.read_parquet(demo / "simulation" / "truth" / "candidates.parquet")
    (images / "item-curves.svg").write_text(svg(item_curves(candidates)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
