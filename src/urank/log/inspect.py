"""Is this log good enough to learn position effects from? Counts, curves, links between positions, and a verdict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.log.confounding import Confounding, heavy_tails, id_like, outcomes, predict_position
from urank.log.facts import Curve, Facts, wilson_interval
from urank.log.interventions import Interventions, find_interventions
from urank.log.lists import offsets_of_runs
from urank.log.read import Log
from urank.log.tally import Tally
from urank.log.verdict import Verdict, judge
from urank.prefetch import prefetch
from urank.progress import Report, silent

__all__ = ["Inspection", "inspect"]

MOST_GROUPS = 8


@dataclass(frozen=True)
class Inspection:
    """What a person should know of a log before training on it: the facts, and a verdict in plain words."""

    facts: Facts
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON has it: the facts and, among them, the verdict."""
        plain = {key: _plain(value) for key, value in asdict(self.facts).items()}
        return {"verdict": asdict(self.verdict), **plain}


def inspect(log: Log, *, randomised: Collection[str] = (), report: Report = silent) -> Inspection:
    """Look a log over, in one pass and in bounded memory.

    Args:
        log: what `urank.read` opened.
        randomised: values of `policy` whose lists were shown in random order.
        report: told how far it is.
    """
    if randomised and "policy" not in log.schema.roles:
        raise ConfigError(f"randomised lists are told by their policy; {log.name} has no column that plays that role")
    tally = Tally(log.schema)
    for frame, done in prefetch(log.batches()):
        tally.add(frame)
        report("inspecting", done, log.size)
    cells, lists, sample = tally.cells(), tally.lists(), tally.sample()
    if randomised:
        _check_policies(cells, randomised, log.name)
    interventions, same_query = _interventions(tally, cells, randomised)
    everything, by_policy = _confounding(sample, tally)
    curve = _curve(cells)
    spans = lists["bottom"] - lists["top"] + 1
    facts = Facts(
        name=log.name,
        rows=tally.rows,
        clicks=sum(curve.clicks),
        queries=lists["_query"].n_unique(),
        lists=lists.height,
        items=interventions.items if "item_id" in log.schema.roles else None,
        list_length=_quantiles(lists["n"].to_numpy(), (0, 10, 50, 90, 100)),
        lists_without_click=_share(lists["clicks"] == 0),
        lists_below_top=_share(lists["top"] > 1),
        lists_with_gaps=_share(spans > lists["n"]),
        curve=curve,
        by_policy=_curves(cells, "policy"),
        by_category=_curves(cells, "category"),
        value=_values(sample) if "value" in log.schema.roles else None,
        missing=tally.missing(),
        confounding=everything,
        confounding_by_policy=by_policy,
        outcomes=outcomes(sample, log.schema),
        heavy_tails=heavy_tails(sample, log.schema),
        id_like=id_like(sample, log.schema),
        interventions=interventions,
        same_query_moves=same_query,
    )
    return Inspection(facts, judge(facts, randomised=randomised))


def _curve(cells: pl.DataFrame) -> Curve:
    by_position = cells.group_by("position").agg(pl.col("n", "clicks").sum()).sort("position")
    n, clicks = by_position["n"].to_numpy().astype(np.int64), by_position["clicks"].to_numpy()
    low, high = wilson_interval(clicks, n)
    rate = (clicks / n).tolist()
    return Curve(by_position["position"].to_list(), n.tolist(), clicks.tolist(), rate, low.tolist(), high.tolist())


def _curves(cells: pl.DataFrame, group: str) -> dict[str, Curve]:
    """The curves of the largest groups."""
    if group not in cells.columns:
        return {}
    named = cells.with_columns(pl.col(group).fill_null("missing"))
    sizes = named.group_by(group).agg(pl.col("n").sum()).sort(["n", group], descending=[True, False])
    return {name: _curve(named.filter(pl.col(group) == name)) for name in sizes[group].head(MOST_GROUPS).to_list()}


def _check_policies(cells: pl.DataFrame, randomised: Collection[str], name: str) -> None:
    known = cells["policy"].drop_nulls().unique().sort().to_list()
    for policy in randomised:
        if policy not in known:
            raise ConfigError(f"no list of {name} has the policy '{policy}'; its policies are {', '.join(known[:10])}")


def _interventions(tally: Tally, cells: pl.DataFrame, randomised: Collection[str]) -> tuple[Interventions, int]:
    pairs, share = tally.pairs()
    K = int(cells["position"].max())  # type: ignore[arg-type]
    random_clicks = np.zeros(K, dtype=np.int64)
    if randomised:
        chosen = cells.filter(pl.col("policy").is_in(list(randomised)))
        np.add.at(random_clicks, chosen["position"].to_numpy() - 1, chosen["clicks"].to_numpy())
    same_query = pairs.group_by("_item", "_query").len().filter(pl.col("len") > 1).height
    seen = pairs.group_by("_item", "position", maintain_order=True).agg(pl.col("clicks").sum())
    number = seen["_item"].rle_id().to_numpy().astype(np.int64)
    found = find_interventions(
        number, seen["position"].to_numpy().astype(np.int64), seen["clicks"].to_numpy(), random_clicks
    )
    if share < 1:
        found = Interventions(
            shared=(found.shared / share).astype(np.int64),
            moved=int(found.moved / share),
            items=int(found.items / share),
            evidence=found.evidence / share,
            joined=found.joined,
            lost=found.lost,
        )
    return found, int(same_query / share)


def _confounding(sample: pl.DataFrame, tally: Tally) -> tuple[Confounding | None, dict[str, Confounding]]:
    def of(rows: pl.DataFrame) -> Confounding | None:
        return predict_position(rows, offsets_of_runs(rows["_list"].to_numpy()), tally.schema)

    sample = sample.with_columns(pl.struct("_query", "_session").rle_id().alias("_list"))
    by_policy = {}
    if "policy" in tally.schema.roles:
        for name in sample["policy"].drop_nulls().unique().sort().to_list()[:MOST_GROUPS]:
            found = of(sample.filter(pl.col("policy") == name))
            if found is not None:
                by_policy[name] = found
    return of(sample), by_policy


def _values(sample: pl.DataFrame) -> dict[str, float]:
    values = sample["value"].to_numpy()
    return _quantiles(values, (0, 1, 25, 50, 75, 99, 100)) | {"zero": float((values == 0).mean())}


def _quantiles(x: NDArray[Any], percents: tuple[int, ...]) -> dict[str, float]:
    found = {f"p{percent}": float(np.percentile(x, percent)) for percent in percents}
    return {"mean": float(x.mean(dtype=np.float64)), **found}


def _share(flags: pl.Series) -> float:
    return float(flags.to_numpy().mean())


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
