"""Inspect a log: counts, click rates by position, the position graph, and whether position effects are learnable."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.config import to_jsonable
from urank.errors import ConfigError
from urank.log.columns import ITEM, LIST, QUERY, ROW, SESSION, LogSchema, marked_policies
from urank.log.dataset import shown_positions
from urank.log.identifiability import (
    MAX_SHARED,
    MIN_CLICKS,
    ClickOutcomes,
    Confounding,
    PositionGraph,
    heavy_tails,
    id_like,
    position_confounding,
    position_graph,
    ranges,
    time_like,
)
from urank.log.ragged import offsets_of_runs
from urank.log.reader import Log, read
from urank.log.splits import stable_hash
from urank.progress import Report, prefetch, silent

SAMPLE_ROWS = 200_000
SAMPLE_BYTES = 256 * 2**20
PAIR_ROWS = 2_000_000
MIN_ITEMS = 1_000
MERGE_ROWS = 1_000_000
EXACT_POSITIONS = 64
MAX_GROUPS = 8
MAX_ALIKE = 0.01
"""If two items have equal features in more of the lists than this, features do not distinguish items."""
FEW_LISTS = 100
"""If a log has fewer lists, items that never move say little about the traffic, and models little about the items."""

_MOVE = "__urank_move"

Level = Literal["learnable", "partly learnable", "not learnable"]


@dataclass(frozen=True)
class PositionRates:
    """Click rate by position with its 95 % interval; one entry per position that was shown."""

    position: list[int]
    impressions: list[int]
    clicks: list[int]
    rate: list[float]
    low: list[float]
    high: list[float]

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each position."""
        return pl.DataFrame(vars(self))


@dataclass(frozen=True)
class Facts:
    """The facts found in a log; `rows` to `items` and `features` are counts, and a list is one showing of a query.

    Attributes:
        items: Distinct items, None without item ids.
        alike: Without item ids, the share of lists in which two items have equal features (1 without features).
        list_length, value: Mean and percentiles; of the value also the share of zeros.
        lists_without_click, lists_below_top, lists_with_gaps: Shares of lists without a click, with nothing at
            position 1, with gaps between the first and the last position.
        curve, by_policy, by_category: Click rate by position, overall and for the largest groups.
        missing: Feature -> share of rows in which it is missing, if that ever happens.
        outcomes: Features that are outcomes of the click.
        same_query_moves: How often an item was seen at two positions of one query.
    """

    name: str
    rows: int
    clicks: int
    queries: int
    lists: int
    items: int | None
    alike: float
    list_length: dict[str, float]
    lists_without_click: float
    lists_below_top: float
    lists_with_gaps: float
    features: int
    curve: PositionRates
    by_policy: dict[str, PositionRates]
    by_category: dict[str, PositionRates]
    value: dict[str, float] | None
    missing: dict[str, float]
    confounding: Confounding | None
    confounding_by_policy: dict[str, Confounding]
    outcomes: list[str]
    heavy_tails: dict[str, tuple[float, float]]
    id_like: list[str]
    time_like: list[str]
    losing_digits: list[str]
    interventions: PositionGraph
    same_query_moves: int

    @property
    def distinguishes_items(self) -> bool:
        """Whether items can be distinguished: by their ids, or by features that rarely agree within a list."""
        return self.items is not None or self.alike <= MAX_ALIKE


@dataclass(frozen=True)
class LogVerdict:
    """Whether position effects are learnable: level for machines, sentence for people, reasons, warnings, advice."""

    level: Level
    sentence: str
    reasons: list[str]
    warnings: list[str]
    advice: list[str]


@dataclass(frozen=True, repr=False)
class Inspection:
    """The facts of a log and a verdict, to be read before training on it."""

    facts: Facts
    verdict: LogVerdict

    def __repr__(self) -> str:
        """Return the verdict with its reasons, warnings and advice, a line each."""
        verdict = self.verdict
        return "\n".join([verdict.sentence, *verdict.reasons, *verdict.warnings, *verdict.advice])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        payload = to_jsonable({"verdict": asdict(self.verdict), **asdict(self.facts)})
        if self.facts.interventions.shared is None:
            payload["interventions"]["note"] = f"shared is left out, since there are more than {MAX_SHARED} positions"
        return dict(payload)

    def to_frame(self) -> pl.DataFrame:
        """Return the click rate by position with its 95 % interval, a row for each position."""
        return self.facts.curve.to_frame()

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return str(import_module("urank.report.inspection_report").inspection_html(self))  # of a higher layer


def inspect(log: Log | Any, *, randomised: Collection[str] = (), report: Report = silent) -> Inspection:
    """Inspect a log, in one pass and in bounded memory.

    Of a folder that was prepared with `positions`, only the shown items are inspected.

    Args:
        log: The log, opened by `urank.read`, or what that reads: a path or a table.
        randomised: Marks `COLUMN=VALUE` of lists in random order; the column plays `policy`.
        report: Progress callback.
    """
    log = log if isinstance(log, Log) else read(log)
    policies = marked_policies(randomised, log.schema.roles, log.name)
    counters = _Counters(log.schema)
    losing: dict[str, None] = {}
    last = shown_positions(log.name)
    for frame, done in prefetch(log.batches(lambda raw: losing.update(dict.fromkeys(log.schema.losing_digits(raw))))):
        frame = frame if last is None else frame.filter(pl.col("position") <= last)
        if frame.height:
            counters.add(frame)
        report("inspecting", done, log.size)
    _refuse_duplicate_positions(log, counters)
    cells, lists, sample = counters.cells(), counters.lists(), counters.sample()
    for policy in policies:
        known = cells["policy"].drop_nulls().unique().sort().to_list()
        if policy not in known:
            others = ", ".join(known[:10])
            raise ConfigError(f"no list of {log.name} has the policy '{policy}'; its policies are {others}")
    alike = counters.alike()
    distinguishable = counters.has_item_ids or alike <= MAX_ALIKE
    graph = _position_graph(counters, cells, policies, distinguishable=distinguishable)
    after_click = counters.outcomes.names()
    largest = _largest(cells, "policy") if "policy" in cells.columns else []
    by_list = sample.with_columns(pl.struct(QUERY, SESSION).rle_id().alias(LIST))

    def confounding(rows: pl.DataFrame) -> Confounding | None:
        return position_confounding(rows, offsets_of_runs(rows[LIST].to_numpy()), log.schema, without=after_click)

    by_policy = {
        name: found
        for name in dict.fromkeys([*largest, *sorted(policies)])
        if (found := confounding(by_list.filter(pl.col("policy") == name))) is not None
    }
    value = None
    if "value" in log.schema.roles:
        values = sample["value"].to_numpy()
        value = _quantiles(values, (0, 1, 25, 50, 75, 99, 100)) | {"zero": float((values == 0).mean())}
    curve = _rates(cells)
    spans = lists["bottom"] - lists["top"] + 1
    facts = Facts(
        name=log.name,
        rows=counters.rows,
        clicks=sum(curve.clicks),
        queries=lists[QUERY].n_unique(),
        lists=lists.height,
        items=graph.items if "item_id" in log.schema.roles else None,
        alike=alike,
        list_length=_quantiles(lists["n"].to_numpy(), (0, 10, 50, 90, 100)),
        lists_without_click=float((lists["clicks"] == 0).to_numpy().mean()),
        lists_below_top=float((lists["top"] > 1).to_numpy().mean()),
        lists_with_gaps=float((spans > lists["n"]).to_numpy().mean()),
        features=len(log.schema.features),
        curve=curve,
        by_policy=_rates_by(cells, "policy"),
        by_category=_rates_by(cells, "category"),
        value=value,
        missing=counters.missing(),
        confounding=confounding(by_list),
        confounding_by_policy=by_policy,
        outcomes=after_click,
        heavy_tails=heavy_tails(sample, log.schema),
        id_like=id_like(sample, log.schema),
        time_like=time_like(sample, log.schema),
        losing_digits=list(losing),
        interventions=graph,
        same_query_moves=counters.same_query_moves() if distinguishable else 0,
    )
    return Inspection(facts, _assess(facts, policies))


def _rates(cells: pl.DataFrame) -> PositionRates:
    by_position = cells.group_by("position").agg(pl.col("n", "clicks").sum()).sort("position")
    n, clicks = by_position["n"].to_numpy().astype(np.int64), by_position["clicks"].to_numpy()
    low, high = wilson_interval(clicks, n)
    columns = (by_position["position"].to_numpy(), n, clicks, clicks / n, low, high)
    return PositionRates(*(column.tolist() for column in columns))


def _rates_by(cells: pl.DataFrame, group: str) -> dict[str, PositionRates]:
    """Return the click rates by position of the largest groups."""
    if group not in cells.columns:
        return {}
    named = cells.with_columns(pl.col(group).fill_null("missing"))
    return {name: _rates(named.filter(pl.col(group) == name)) for name in _largest(named, group)}


def _largest(cells: pl.DataFrame, group: str) -> list[str]:
    sizes = cells.drop_nulls(group).group_by(group).agg(pl.col("n").sum())
    return list(sizes.sort(["n", group], descending=[True, False])[group].head(MAX_GROUPS))


def _refuse_duplicate_positions(log: Log, counters: _Counters) -> None:
    """Refuse a log in which a list has a position twice; its rows are found in a second pass."""
    found = counters.duplicate_position()
    if found is None:
        return
    query, session = found
    parts = []
    for frame, _ in log.batches():
        chosen = stable_hash(frame["query_id"]) == np.uint64(query)
        if "session_id" in frame.columns:
            chosen &= stable_hash(frame["session_id"]) == np.uint64(session)
        parts.append(frame.filter(pl.Series(chosen)))
    raise log.duplicate_position_error(
        pl.concat(parts).filter(pl.col("position").is_duplicated()).sort("position", ROW).head(2)
    )


def _position_graph(
    counters: _Counters, cells: pl.DataFrame, randomised: Collection[str], *, distinguishable: bool
) -> PositionGraph:
    K = int(cells["position"].max())  # type: ignore[arg-type]
    random_clicks, shown = np.zeros(K, dtype=np.int64), np.zeros(K, dtype=np.bool_)
    shown[cells["position"].to_numpy() - 1] = True
    if randomised:
        chosen = cells.filter(pl.col("policy").is_in(list(randomised)))
        np.add.at(random_clicks, chosen["position"].to_numpy() - 1, chosen["clicks"].to_numpy())
    if not distinguishable:
        nothing = np.zeros(0, dtype=np.int64)
        return position_graph(nothing, nothing, nothing, random_clicks, shown=shown)
    pairs, share = counters.pairs()
    number = pairs[ITEM].rle_id().to_numpy().astype(np.int64)
    position, clicks = pairs["position"].to_numpy().astype(np.int64), pairs["clicks"].to_numpy()
    return position_graph(number, position, clicks, random_clicks, shown=shown, share=share)


def _quantiles(x: NDArray[Any], percents: tuple[int, ...]) -> dict[str, float]:
    found = {f"p{percent}": float(np.percentile(x, percent)) for percent in percents}
    return {"mean": float(x.mean(dtype=np.float64)), **found}


def wilson_interval(
    clicks: NDArray[np.int64], impressions: NDArray[np.int64], z: float = 1.959964
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the 95 % interval of a rate (Wilson 1927), which unlike the normal one is valid for few or no clicks.

    >>> low, high = wilson_interval(np.array([0]), np.array([10]))
    >>> round(float(low[0]), 3), round(float(high[0]), 3)
    (0.0, 0.278)
    """
    rate = clicks / impressions
    centre = rate + z**2 / (2 * impressions)
    half = z * np.sqrt(rate * (1 - rate) / impressions + z**2 / (4 * impressions**2))
    scale = 1 + z**2 / impressions
    return np.maximum((centre - half) / scale, 0.0), np.minimum((centre + half) / scale, 1.0)


class _KeySample:
    """All rows of some keys: of all keys while rows are few, then of those with the lowest hashes.

    At least `fewest` keys are kept, however many rows they have, so the sample is never empty.
    """

    def __init__(self, key: str, most: int, fewest: int = 1) -> None:
        self.key, self.most, self.fewest = key, most, fewest
        self.limit = 2**64 - 1
        self._parts: list[pl.DataFrame] = []
        self._rows = 0

    def add(self, frame: pl.DataFrame) -> None:
        self._parts.append(self._kept(frame))
        self._rows += self._parts[-1].height
        if self._rows > self._enough:
            self.cut()

    @property
    def _enough(self) -> int:
        """Rows above which parts are joined."""
        return self.most

    def cut(self) -> pl.DataFrame:
        """Return all rows in one frame, halving the keys as long as there are too many rows."""
        frame = self._together()
        while frame.height > self.most:
            keys = frame[self.key].unique().sort()
            kept = max(len(keys) // 2, self.fewest)
            if kept >= len(keys):
                break
            self.limit = int(keys[kept - 1])
            frame = self._kept(frame)
        self._parts, self._rows = [frame], frame.height
        return frame

    def _together(self) -> pl.DataFrame:
        return pl.concat(self._parts)

    def _kept(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame if self.limit == 2**64 - 1 else frame.filter(pl.col(self.key) <= self.limit)

    @property
    def share(self) -> float:
        return float((self.limit + 1) / 2**64)


class _GroupedSums(_KeySample):
    """Sums, minima and maxima by group, merged whenever too many parts have accumulated."""

    def __init__(self, keys: list[str], most: int = 2**62, fewest: int = 1, **how: str) -> None:
        super().__init__(keys[0], most, fewest)
        self.keys, self.how, self._merged = keys, how, 0

    @property
    def _enough(self) -> int:
        return self._merged + MERGE_ROWS

    def cut(self) -> pl.DataFrame:
        frame = super().cut()
        self._merged = frame.height
        return frame

    def _together(self) -> pl.DataFrame:
        if len(self._parts) == 1 and self._parts[0].height == self._merged:
            return self._parts[0]
        columns = [getattr(pl.col(name), how)() for name, how in self.how.items()]
        return super()._together().group_by(self.keys).agg(columns)


class _Counters:
    """The counters of `inspect`, filled a batch at a time."""

    def __init__(self, schema: LogSchema) -> None:
        self.schema, self.rows = schema, 0
        self.groups = [name for name in ("policy", "category") if name in schema.roles]
        self.has_item_ids = "item_id" in schema.roles
        self._has_items = self.has_item_ids or bool(schema.features)
        self._cells = _GroupedSums(["position", *self.groups], n="sum", clicks="sum")
        self._lists = _GroupedSums([QUERY, SESSION], n="sum", clicks="sum", top="min", bottom="max", bits="sum")
        self._missing: list[pl.DataFrame] = []
        in_memory = SAMPLE_BYTES // (4 * len(schema.features) + 200)
        self._sample = _KeySample(LIST, min(SAMPLE_ROWS, in_memory))
        self._pairs = _GroupedSums([ITEM, "position"], PAIR_ROWS, MIN_ITEMS, clicks="sum")
        self._moves = _GroupedSums([_MOVE], PAIR_ROWS, top="min", bottom="max")
        self.outcomes = ClickOutcomes(schema)

    def add(self, frame: pl.DataFrame) -> None:
        """Add a batch in canonical form."""
        self.rows += frame.height
        queries = stable_hash(frame["query_id"])
        sessions = np.zeros(frame.height, np.uint64)
        lists = queries
        if "session_id" in frame.columns:
            sessions = stable_hash(frame["session_id"])
            lists = _paired(queries, sessions)
        frame = frame.with_columns(pl.Series(QUERY, queries), pl.Series(SESSION, sessions), pl.Series(LIST, lists))
        if self.has_item_ids:
            frame = frame.with_columns(pl.Series(ITEM, stable_hash(frame["item_id"])))
        elif self._has_items:
            names = [feature.name for feature in self.schema.features]
            frame = frame.with_columns(pl.struct(names).hash(seed=0).alias(ITEM))
        n, clicks = pl.len().alias("n"), pl.col("click").cast(pl.Int64).sum().alias("clicks")
        top, bottom = pl.col("position").min().alias("top"), pl.col("position").max().alias("bottom")
        self._cells.add(frame.group_by("position", *self.groups).agg(n, clicks))
        bit = pl.lit(2, pl.UInt64).pow((pl.col("position") - 1).clip(0, EXACT_POSITIONS - 1).cast(pl.UInt32))
        narrow = clicks.cast(pl.UInt32)
        self._lists.add(frame.group_by(QUERY, SESSION).agg(n, narrow, top, bottom, bit.sum().alias("bits")))
        missing = [pl.col(name).is_nan().sum() for name in self.schema.named("numeric")]
        missing += [pl.col(name).null_count() for name in self.schema.named("categorical")]
        self._missing.append(frame.select(missing))
        self._sample.add(frame)
        self.outcomes.add(frame)
        if self._has_items:
            self._pairs.add(frame.group_by(ITEM, "position").agg(clicks))
            move = pl.Series(_MOVE, _paired(frame[ITEM].to_numpy(), queries))
            self._moves.add(frame.select(move, "position").group_by(_MOVE).agg(top, bottom))

    def cells(self) -> pl.DataFrame:
        """Return impressions `n` and `clicks` by position, policy and category."""
        return self._cells.cut().sort("position", *self.groups)

    def lists(self) -> pl.DataFrame:
        """Return items `n`, `clicks`, `top` and `bottom` position of each list; `bits` is Σ 2^(position − 1)."""
        return self._lists.cut()

    def duplicate_position(self) -> tuple[int, int] | None:
        """Return the hashes (query, session) of a list in which a position occurs twice, None if there is none.

        n powers of two sum to a number with n bits if and only if all are different: exact for lists that end at
        position 64 or above. A deeper list is detected if it has more items than positions, or is in the sample.
        """
        lists = self.lists()
        shallow, bits = pl.col("bottom") <= EXACT_POSITIONS, pl.col("bits").bitwise_count_ones()
        deep = pl.col("n") > pl.col("bottom") - pl.col("top") + 1
        found = lists.filter(deep | (shallow & (bits != pl.col("n")))).sort(QUERY, SESSION).head(1)
        if not found.height:
            found = self.sample().filter(pl.struct(QUERY, SESSION, "position").is_duplicated()).head(1)
        return (int(found[QUERY][0]), int(found[SESSION][0])) if found.height else None

    def missing(self) -> dict[str, float]:
        """Return the share of missing values of each feature that has any."""
        if not self.schema.features:
            return {}
        counts = pl.concat(self._missing).sum().row(0, named=True)
        return {name: count / self.rows for name, count in counts.items() if count}

    def sample(self) -> pl.DataFrame:
        """Return all rows of some of the lists, sorted into lists."""
        return self._sample.cut().sort(QUERY, SESSION, "position")

    def alike(self) -> float:
        """Return the share of lists in which two items cannot be distinguished, as there are only features."""
        if self.has_item_ids or not self._has_items:
            return 0.0 if self.has_item_ids else 1.0
        rows = self.sample().select(QUERY, SESSION, ITEM)
        counts = rows.group_by(QUERY, SESSION).agg(pl.len().alias("n"), pl.col(ITEM).n_unique().alias("unique"))
        return float((counts["unique"] < counts["n"]).to_numpy().mean())

    def pairs(self) -> tuple[pl.DataFrame, float]:
        """Return clicks by item and position for some of the items, and the share of items included."""
        return self._pairs.cut().sort(ITEM, "position"), self._pairs.share

    def same_query_moves(self) -> int:
        """Return how often an item was seen at two positions of one query."""
        moves = self._moves.cut()
        return round(int((moves["top"] < moves["bottom"]).to_numpy().sum()) / self._moves.share)


def _paired(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Combine two hashes."""
    with np.errstate(over="ignore"):
        mixed = (first ^ (second >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + second
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        paired: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(27))
    return paired


def _assess(facts: Facts, randomised: Collection[str]) -> LogVerdict:
    """Derive the verdict from the facts."""
    level, qualifier, reasons, advice = _learnable(facts, randomised)
    sentence = {"partly learnable": f"learnable, but {qualifier}", "not learnable": f"{level}: {qualifier}"}.get(
        level, level
    )
    found = [*_list_warnings(facts), *_feature_warnings(facts), *_confounding_warnings(facts, randomised)]
    warnings = [warning for warning, _ in found]
    return LogVerdict(level, sentence, reasons, warnings, advice + [more for _, more in found if more])


def _learnable(facts: Facts, randomised: Collection[str]) -> tuple[Level, str, list[str], list[str]]:
    """Return the level of the verdict, what qualifies it, its reasons, and advice."""
    graph, curve = facts.interventions, facts.curve
    if facts.clicks == 0:
        advice = ["check the column that plays 'click' (--column click=NAME)"]
        return "not learnable", "nothing was ever clicked", [f"none of the {facts.rows:,} rows has a click"], advice
    if facts.clicks == facts.rows:
        reason = f"all {facts.rows:,} rows have a click, so there is nothing to compare them with"
        advice = ["also log the items that were shown and not clicked, with click = 0"]
        return "not learnable", "everything was clicked", [reason], advice
    if len(curve.position) == 1:
        advice = ["check the column that plays 'position' (--column position=NAME)"]
        return "not learnable", f"everything was shown at position {curve.position[0]}", [], advice
    reasons = [_reason(facts, graph)]
    show = "show a small share of the traffic in randomised order (swaps with position 1 suffice) and log its policy"
    if randomised:
        reasons.append(f"the order of policy {', '.join(sorted(randomised))} was random, so its positions compare")
        show = "show more of the traffic in random order, down to the last position"
    advice = [show, "add the log of a second ranker that orders differently"]
    if facts.items is None:
        advice.insert(0, "add the item's id (--column item_id=NAME): without it only its features identify an item")
    if not facts.distinguishes_items and not randomised:
        return "not learnable", "items cannot be distinguished", reasons, advice
    if graph.moved == 0 and not randomised and facts.lists < FEW_LISTS:
        enough = "collect more lists, hundreds at least, better thousands"
        few = "1 list" if facts.lists == 1 else f"{facts.lists} lists"
        return "not learnable", f"it has only {few}, and no item at two positions", reasons, [enough, *advice]
    if graph.moved == 0 and not randomised:
        return "not learnable", "every item was always shown at the same position", reasons, advice
    if len(graph.joined) < 2:
        why = f"no two positions share items with {MIN_CLICKS} clicks or more on each side"
        return "not learnable", why, reasons, ["collect more clicks", *advice]
    if not graph.lost:
        return "learnable", "", reasons, []
    impressions = dict(zip(curve.position, curve.impressions, strict=True))
    covered = sum(impressions[k] for k in graph.joined) / facts.rows
    lost = _positions(graph.lost)
    has, rest = ("has", "rests") if len(graph.lost) == 1 else ("have", "rest")
    reasons.append(f"{lost} {has} too few clicks on items (or random lists) that were also shown elsewhere")
    if covered < 0.5:
        why = f"only {_positions(graph.joined)} can be compared, {covered:.0%} of the impressions"
        return "not learnable", why, reasons, advice
    return "partly learnable", f"{lost} {rest} on extrapolation", reasons, advice


def _positions(numbers: list[int]) -> str:
    return f"position{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _reason(facts: Facts, graph: PositionGraph) -> str:
    if not facts.distinguishes_items:
        same = f"in {facts.alike:.0%} of the lists two items have the same features"
        return (
            f"the log does not distinguish items: {same if facts.features else 'it has neither item ids nor features'}"
        )
    what = "items" if facts.items is not None else "items (distinguished by their features, as there is no item_id)"
    if graph.moved == 0:
        return f"none of the {graph.items:,} {what} was seen at two positions"
    context = "none of them within one query, so context and position must be told apart by the features"
    if facts.same_query_moves:
        context = f"{facts.same_query_moves:,} times within one query"
    return f"{graph.moved:,} of {graph.items:,} {what} were seen at two positions or more, {context}"


def _list_warnings(facts: Facts) -> Iterator[tuple[str, str | None]]:
    if facts.lists_without_click == 0 and facts.lists >= 100:
        yield (
            "every list has a click: lists without one seem to be left out, so click rates are too high, and the "
            "clicks of a list depend on each other",
            None,
        )
    most = max(facts.curve.impressions)
    rare = [k for k, n in zip(facts.curve.position, facts.curve.impressions, strict=True) if n < 0.1 * most]
    if rare:
        yield f"{_positions(rare)} were shown rarely (slots that are mostly empty, or the tail)", None


def _feature_warnings(facts: Facts) -> Iterator[tuple[str, str | None]]:
    if facts.outcomes:
        yield (
            f"{', '.join(facts.outcomes)}: known only after a click, so left out of the features unless kept by "
            "--keep NAME",
            None,
        )
    if facts.id_like:
        yield (
            f"{', '.join(facts.id_like)}: numbers that look like ids, taken as quantities",
            " ".join(f"--categorical {name}" for name in facts.id_like) + " (or --drop)",
        )
    if facts.time_like:
        yield (
            f"{', '.join(facts.time_like)}: dates or times, taken as categories that no later list will have",
            f"-c timestamp={facts.time_like[0]} if it is the time of the list, or --drop",
        )
    if facts.losing_digits:
        yield (
            f"{', '.join(facts.losing_digits)}: whole numbers that lose digits as 32-bit floats",
            f"--categorical {facts.losing_digits[0]} if they are ids, or --drop, or subtract an offset from them",
        )
    for name, (high, largest) in facts.heavy_tails.items():
        yield f"{name}: the largest value, {largest:,.4g}, is {largest / high:,.0f} times the 99th percentile", None
    mostly = sorted((name for name, share in facts.missing.items() if share > 0.5), key=lambda n: -facts.missing[n])
    if mostly:
        more = f" and {len(mostly) - 5} more" if len(mostly) > 5 else ""
        yield f"mostly missing: {', '.join(f'{n} ({facts.missing[n]:.0%})' for n in mostly[:5])}{more}", None


def _confounding_warnings(facts: Facts, randomised: Collection[str]) -> Iterator[tuple[str, str | None]]:
    if facts.confounding is not None and facts.confounding.share > 0.3:
        yield (
            f"features explain {facts.confounding.share:.0%} of the position within lists: the old ranker's choice "
            "and the effect of position are hard to separate",
            None,
        )
    for policy, found in facts.confounding_by_policy.items():
        if found.looks_random and policy not in randomised:
            yield (
                f"policy {policy} looks randomised: features do not explain its positions (p = {found.p_value:.2f})",
                f"if policy {policy} was random by design, pass --randomised policy={policy}",
            )
        elif not found.looks_random and policy in randomised and found.rows >= 1_000:
            yield (
                f"policy {policy} is declared random, but features explain {found.share:.1%} of the position "
                f"(p = {found.p_value:.1g})",
                None,
            )
