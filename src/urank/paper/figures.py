"""What Figures 3 and 4 are drawn from: click probabilities by position, and the list of one query (RQ1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.paper.methods import METHODS
from urank.paper.results import Claim, ListExample, PositionCurve

__all__ = ["curve_claims", "list_example", "position_curves"]


def position_curves(folders: Sequence[Path], results: pl.DataFrame, keys: Sequence[str]) -> list[PositionCurve]:
    """Figure 4: for each method the mean true click probability at each position, over queries and seeds."""
    tables = [_true_tables(folder) for folder in folders]
    found = []
    for key in keys:
        means = np.array(
            [
                _by_position(table, results.filter((pl.col("seed") == seed) & (pl.col("method") == key)))
                for seed, table in enumerate(tables)
            ]
        )
        deviation = means.std(axis=0, ddof=1) if len(means) > 1 else np.full(means.shape[1], np.nan)
        found.append(PositionCurve(METHODS[key].name, means.mean(axis=0), deviation))
    return found


def _true_tables(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "candidates.parquet", columns=["item_id", "table"])


def _by_position(tables: pl.DataFrame, lists: pl.DataFrame) -> NDArray[np.float64]:
    """The mean `[K]` over lists of the true click probability at each position; a list without an item there has 0."""
    shown = lists.select("item_id", "position").explode("item_id", "position")
    K = len(tables["table"][0])
    at = pl.col("table").list.get(pl.col("position") - 1).alias("click")
    placed = shown.filter(pl.col("position") <= K).join(tables, on="item_id", how="left").select("position", at)
    sums = np.zeros(K)
    np.add.at(sums, placed["position"].to_numpy() - 1, placed["click"].to_numpy())
    return sums / lists.height


def curve_claims(found: Sequence[PositionCurve], lambdarank: str, ours: str, oracle: str) -> list[Claim]:
    """What RQ1 says of Figure 4, which holds for either data set of the paper."""
    by_name = {curve.name: curve for curve in found}
    if not {lambdarank, ours, oracle} <= set(by_name):
        return []
    total = {name: float(by_name[name].mean.sum()) for name in (lambdarank, ours, oracle)}
    last = np.flatnonzero(by_name[oracle].mean)[-1]  # lists may be shorter than there are positions
    steep = {name: float(by_name[name].mean[0] / by_name[name].mean[last]) for name in (lambdarank, ours, oracle)}
    nearer = abs(np.log(steep[ours] / steep[oracle])) < abs(np.log(steep[lambdarank] / steep[oracle]))
    return [
        Claim(
            f"{ours} has a larger sum of click probabilities over all positions than {lambdarank}",
            total[ours] > total[lambdarank],
            f"{total[ours]:.4f} against {total[lambdarank]:.4f} (oracle {total[oracle]:.4f})",
        ),
        Claim(
            "U-rank adapts to the severity of position bias: it falls from the first to the last position more as the "
            f"oracle does than {lambdarank} does",
            bool(nearer),
            ", ".join(f"{name} by a factor of {each:.1f}" for name, each in steep.items()),
        ),
    ]


def list_example(folder: Path, results: pl.DataFrame, keys: Sequence[str]) -> ListExample:
    """Figure 3: the first test query of the first seed, as the paper takes the first of its data."""
    own = results.filter((pl.col("seed") == 0) & pl.col("method").is_in(list(keys)))
    candidates = pl.read_parquet(folder / "candidates.parquet")
    query = candidates["query_id"].cast(pl.String).sort()[0]
    items = candidates.filter(pl.col("query_id").cast(pl.String) == query).sort("relevance", descending=True)
    names = items["item_id"].to_list()
    positions, clicks, ndcg = {}, {}, {}
    for key in keys:
        row = own.filter((pl.col("method") == key) & (pl.col("query_id").cast(pl.String) == query))
        place = dict(zip(row["item_id"][0].to_list(), row["position"][0].to_list(), strict=True))
        name = METHODS[key].name
        positions[name] = np.array([place[item] for item in names], dtype=np.int64)
        clicks[name], ndcg[name] = float(row["#Click"][0]), float(row["nDCG@10"][0])
    return ListExample(
        query=query,
        items=names,
        label=items["relevance"].to_numpy().astype(np.float64),
        table=np.array(items["table"].to_list(), dtype=np.float64),
        positions=positions,
        clicks=clicks,
        ndcg=ndcg,
    )
