"""Rankings and what became of them, joined into one row for each impression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.serve.records import Columns, FeedbackRecord, RankingRecord, ShadowRecord

__all__ = ["KEYS", "Joined", "are_shown", "join_feedback", "log_frame", "shadow_clicks", "shadow_frame"]

KEYS = ["session_id", "item_id"]
"""The columns that tell an impression from the others."""

_SHADOW = ("query_id", *KEYS, "position", "shadow_position", "click", "model", "shadow_model", "timestamp")
_TIME = pl.Datetime("us", "UTC")

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def log_frame(rankings: Sequence[RankingRecord], columns: Columns) -> pl.DataFrame:
    """One row for each item shown, none of them clicked; all rankings must fit the columns."""
    counts = np.array([len(ranking.items) for ranking in rankings])
    of = np.repeat(np.arange(len(rankings)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)

    def each(values: Iterable[str | None]) -> pl.Series:
        return pl.Series(list(values), dtype=pl.String).gather(of)

    found = {
        "query_id": each(ranking.query_id for ranking in rankings),
        "session_id": each(ranking.ranking_id for ranking in rankings),
        "item_id": pl.Series(list(chain.from_iterable(ranking.items for ranking in rankings)), dtype=pl.String),
        "position": pl.Series((np.arange(len(of)) - firsts + 1).astype(np.int32)),
        "click": pl.Series(np.zeros(len(of), dtype=np.int8)),
        "conversion": pl.Series(np.zeros(len(of), dtype=np.int8)),
    }
    if columns.value:
        found["value"] = pl.Series(np.concatenate([ranking.value for ranking in rankings if ranking.value is not None]))
    found["policy"] = each(ranking.policy for ranking in rankings)
    if columns.explored:
        chances = [ranking.propensity for ranking in rankings if ranking.propensity is not None]
        found["propensity"] = pl.Series(np.concatenate(chances))
        ranked = chain.from_iterable(ranking.ranked_position or () for ranking in rankings)
        found["ranked_position"] = pl.Series(list(ranked), dtype=pl.Int32)
    found["user_id"] = each(ranking.user_id for ranking in rankings)
    found["arm"] = each(ranking.arm for ranking in rankings)
    times = np.array([ranking.time_us for ranking in rankings], dtype=np.int64)
    found["timestamp"] = pl.Series(times[of]).cast(_TIME)
    features = np.ascontiguousarray(np.concatenate([ranking.numeric for ranking in rankings]).T)
    for name, numbers in zip(columns.numeric, features, strict=True):
        found[name] = pl.Series(numbers).fill_nan(None)
    texts = zip(*chain.from_iterable(ranking.categorical for ranking in rankings), strict=True)
    for name, column in zip(columns.categorical, texts, strict=True):
        found[name] = pl.Series(column, dtype=pl.String)
    return pl.DataFrame(found)


@dataclass(frozen=True, eq=False)
class Joined:
    """Impressions with feedback joined to them.

    Attributes:
        frame: the impressions.
        value_times: row -> when its value was told by feedback, in microseconds; other rows have that of the ranking.
        found: `[events]`, whether there is an impression that the event is of.
        new: `[events]`, whether it said anything that was not known before.
        valueless: how many told a value where the log has none, which is left out.
    """

    frame: pl.DataFrame
    value_times: Mapping[int, int]
    found: Bools
    new: Bools
    valueless: int


def join_feedback(frame: pl.DataFrame, value_times: Mapping[int, int], events: Sequence[FeedbackRecord]) -> Joined:
    """Join feedback to impressions, which may have had some before.

    A click or a conversion that was told stays. Of the values told, the one of the latest time counts; of one time, the
    largest. So the result is the same in whatever order events come, and however often.

    Args:
        frame: impressions, as `log_frame` makes them.
        value_times: of feedback that was joined before.
        events: what became of them; also of others.
    """
    rows = _rows_of(frame, events)
    click, conversion = frame["click"].to_numpy().copy(), frame["conversion"].to_numpy().copy()
    value = frame["value"].to_numpy().copy() if "value" in frame.columns else None
    times = dict(value_times)
    new = np.zeros(len(events), dtype=np.bool_)
    matched: list[int] = np.flatnonzero(rows >= 0).tolist()
    for place in matched:
        event, row = events[place], int(rows[place])
        new[place] = (event.click and not click[row]) or (event.conversion and not conversion[row])
        click[row] |= event.click
        conversion[row] |= event.conversion
        if event.value is None or value is None:
            continue
        told = np.float32(event.value)
        if row not in times or (event.time_us, told) >= (times[row], value[row]):
            new[place] |= told != value[row]
            value[row], times[row] = told, event.time_us
    changed = [pl.Series("click", click), pl.Series("conversion", conversion)]
    valueless = 0
    if value is None:
        valueless = sum(events[place].value is not None for place in matched)
    else:
        changed.append(pl.Series("value", value))
    return Joined(frame.with_columns(changed), times, rows >= 0, new, valueless)


def are_shown(frame: pl.DataFrame, events: Sequence[FeedbackRecord]) -> Bools:
    """Whether there is an impression that each event is of; the frame needs no columns but `KEYS`."""
    return _rows_of(frame, events) >= 0


def _rows_of(frame: pl.DataFrame, events: Sequence[FeedbackRecord]) -> Ints:
    """The row of the impression that each event is of; −1 for none."""
    asked = pl.DataFrame(
        {"session_id": [event.ranking_id for event in events], "item_id": [event.item_id for event in events]},
        schema=dict.fromkeys(KEYS, pl.String),
    )
    known = frame.select(KEYS).with_row_index("row")
    found = asked.join(known, on=KEYS, how="left", maintain_order="left")["row"]
    return found.cast(pl.Int64).fill_null(-1).to_numpy()


def shadow_frame(
    logs: Sequence[pl.DataFrame], rankings: Sequence[RankingRecord], shadows: Sequence[ShadowRecord]
) -> pl.DataFrame:
    """What was shown beside what a silent model would have shown: a row for each item that either placed.

    Args:
        logs: the impressions.
        rankings: those that they are of.
        shadows: orders of the silent model; of two for one ranking the first counts, and those of others are left out.
    """
    models = {ranking.ranking_id: ranking for ranking in rankings}
    orders: dict[str, ShadowRecord] = {}
    for shadow in shadows:
        if shadow.ranking_id in models:
            orders.setdefault(shadow.ranking_id, shadow)
    heads = pl.DataFrame(
        {
            "session_id": list(orders),
            "query_id": [models[each].query_id for each in orders],
            "model": [models[each].model for each in orders],
            "shadow_model": [shadow.model for shadow in orders.values()],
            "timestamp": pl.Series([models[each].time_us for each in orders], dtype=pl.Int64).cast(_TIME),
        }
    ).with_row_index("order")
    counts = [len(shadow.items) for shadow in orders.values()]
    silent = pl.DataFrame(
        {
            "session_id": pl.Series(list(orders), dtype=pl.String).gather(np.repeat(np.arange(len(orders)), counts)),
            "item_id": list(chain.from_iterable(shadow.items for shadow in orders.values())),
            "shadow_position": pl.Series([k for count in counts for k in range(1, count + 1)], dtype=pl.Int32),
        }
    )
    shown = pl.concat(log.select(*KEYS, "position", "click") for log in logs)
    both = shown.join(heads, on="session_id", how="semi").join(silent, on=KEYS, how="full", coalesce=True)
    return (
        both.join(heads, on="session_id").sort("order", "position", "shadow_position", nulls_last=True).select(_SHADOW)
    )


def shadow_clicks(shadow: pl.DataFrame, logs: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The same with the clicks of the impressions as they are now; an item that was not shown has none."""
    clicks = pl.concat(log.select(*KEYS, "click") for log in logs)
    return shadow.drop("click").join(clicks, on=KEYS, how="left", maintain_order="left").select(_SHADOW)
