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
from urank.log.facts import MOST_ALIKE, Curve, Facts, wilson_interval
from urank.log.interventions import MOST_SHARED, Interventions, find_interventions
from urank.log.lists import offsets_of_runs
from urank.log.read import Log
from urank.log.schema import ITEM, LIST, QUERY, ROW, SESSION, LogSchema
from urank.log.split import stable_hash
from urank.log.summary import positions_of
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
        if self.facts.interventions.shared is None:
            plain["interventions"]["note"] = f"shared is left out, since there are more than {MOST_SHARED} positions"
        return {"verdict": asdict(self.verdict), **plain}


def inspect(log: Log, *, randomised: Collection[str] = (), report: Report = silent) -> Inspection:
    """Look a log over, in one pass and in bounded memory.

    Of a folder that was prepared with `positions`, only what was shown is looked at.

    Args:
        log: what `urank.read` opened.
        randomised: values of `policy` whose lists were shown in random order.
        report: told how far it is.
    """
    if randomised and "policy" not in log.schema.roles:
        raise ConfigError(f"randomised lists are told by their policy; {log.name} has no column that plays that role")
    tally = Tally(log.schema)
    losing: dict[str, None] = {}
    last = positions_of(log.name)
    for frame, done in prefetch(log.batches(lambda raw: losing.update(dict.fromkeys(log.schema.losing_digits(raw))))):
        frame = frame if last is None else frame.filter(pl.col("position") <= last)
        if frame.height:
            tally.add(frame)
        report("inspecting", done, log.size)
    _refuse_twice(log, tally)
    cells, lists, sample = tally.cells(), tally.lists(), tally.sample()
    if randomised:
        _check_policies(cells, randomised, log.name)
    alike = tally.alike()
    told_apart = tally.names_items or alike <= MOST_ALIKE
    interventions = _interventions(tally, cells, randomised, told_apart=told_apart)
    after_click = outcomes(sample, log.schema)
    everything, by_policy = _confounding(sample, log.schema, _policies(cells, randomised), after_click)
    curve = _curve(cells)
    spans = lists["bottom"] - lists["top"] + 1
    facts = Facts(
        name=log.name,
        rows=tally.rows,
        clicks=sum(curve.clicks),
        queries=lists[QUERY].n_unique(),
        lists=lists.height,
        items=interventions.items if "item_id" in log.schema.roles else None,
        alike=alike,
        list_length=_quantiles(lists["n"].to_numpy(), (0, 10, 50, 90, 100)),
        lists_without_click=_share(lists["clicks"] == 0),
        lists_below_top=_share(lists["top"] > 1),
        lists_with_gaps=_share(spans > lists["n"]),
        features=len(log.schema.features),
        curve=curve,
        by_policy=_curves(cells, "policy"),
        by_category=_curves(cells, "category"),
        value=_values(sample) if "value" in log.schema.roles else None,
        missing=tally.missing(),
        confounding=everything,
        confounding_by_policy=by_policy,
        outcomes=after_click,
        heavy_tails=heavy_tails(sample, log.schema),
        id_like=id_like(sample, log.schema),
        losing_digits=list(losing),
        interventions=interventions,
        same_query_moves=tally.same_query_moves() if told_apart else 0,
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


def _policies(cells: pl.DataFrame, randomised: Collection[str]) -> list[str]:
    """Those that are said to be random, and the largest of the others."""
    if "policy" not in cells.columns:
        return []
    sizes = cells.drop_nulls("policy").group_by("policy").agg(pl.col("n").sum())
    largest = sizes.sort(["n", "policy"], descending=[True, False])["policy"].head(MOST_GROUPS).to_list()
    return list(dict.fromkeys([*largest, *sorted(randomised)]))


def _refuse_twice(log: Log, tally: Tally) -> None:
    """Refuse a log in which a list has a position twice; the rows are looked up in a second pass."""
    found = tally.position_twice()
    if found is None:
        return
    query, session = found
    parts = []
    for frame, _ in log.batches():
        chosen = stable_hash(frame["query_id"]) == np.uint64(query)
        if "session_id" in frame.columns:
            chosen &= stable_hash(frame["session_id"]) == np.uint64(session)
        parts.append(frame.filter(pl.Series(chosen)))
    rows = pl.concat(parts)
    rows = rows.filter(pl.col("position").is_duplicated()).sort("position", ROW)
    ids = rows["session_id"].to_list() if "session_id" in rows.columns else [None] * rows.height
    raise log.position_twice(rows["query_id"][0], ids[0], rows["position"][0], rows[ROW].head(2).to_list())


def _interventions(
    tally: Tally, cells: pl.DataFrame, randomised: Collection[str], *, told_apart: bool
) -> Interventions:
    K = int(cells["position"].max())  # type: ignore[arg-type]
    random_clicks, shown = np.zeros(K, dtype=np.int64), np.zeros(K, dtype=np.bool_)
    shown[cells["position"].to_numpy() - 1] = True
    if randomised:
        chosen = cells.filter(pl.col("policy").is_in(list(randomised)))
        np.add.at(random_clicks, chosen["position"].to_numpy() - 1, chosen["clicks"].to_numpy())
    if not told_apart:
        nothing = np.zeros(0, dtype=np.int64)
        return find_interventions(nothing, nothing, nothing, random_clicks, shown=shown)
    pairs, share = tally.pairs()
    number = pairs[ITEM].rle_id().to_numpy().astype(np.int64)
    position, clicks = pairs["position"].to_numpy().astype(np.int64), pairs["clicks"].to_numpy()
    return find_interventions(number, position, clicks, random_clicks, shown=shown, share=share)


def _confounding(
    sample: pl.DataFrame, schema: LogSchema, policies: Collection[str], without: Collection[str]
) -> tuple[Confounding | None, dict[str, Confounding]]:
    def of(rows: pl.DataFrame) -> Confounding | None:
        return predict_position(rows, offsets_of_runs(rows[LIST].to_numpy()), schema, without=without)

    sample = sample.with_columns(pl.struct(QUERY, SESSION).rle_id().alias(LIST))
    by_policy = {name: of(sample.filter(pl.col("policy") == name)) for name in policies}
    return of(sample), {name: found for name, found in by_policy.items() if found is not None}


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
