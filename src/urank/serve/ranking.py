"""Rank the lists of a request: arrays in, the shown items of each list out, and what the log keeps of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank.log.lists import at_positions
from urank.rankers.order import Method
from urank.serve.explore import Exploration
from urank.serve.items import Lists
from urank.serve.models import ARMS, Served
from urank.serve.problems import Problem
from urank.serve.records import Columns, RankingRecord
from urank.serve.runtime import MISSING, Items, ServedModel

__all__ = ["Shown", "columns_of", "rank_lists", "record_of", "shadow_orders"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Shown:
    """The items of a list that are shown, from the top.

    Attributes:
        number: of the list in the request.
        model: what ranked it.
        method: how.
        arm: of the test, if there is one.
        rows: `[m]`, the row of each item among those of the request.
        ranks: `[m]`, the rank of each before chance was asked.
        policy: what the log calls the way in which the list was made: the model, and how chance had a hand in it.
        score: `[m]`; none without a scorer.
        click, utility: `[m]`; the click is NaN beyond the last position that the model knows.
    """

    number: int
    model: ServedModel
    method: Method
    arm: str | None
    rows: Ints
    ranks: Ints
    policy: str
    score: NDArray[np.float32] | None
    click: NDArray[np.float64]
    utility: NDArray[np.float64]

    def answer(self, lists: Lists, ranking_id: str) -> dict[str, Any]:
        """As `bodies.RankAnswer` has it."""
        ids = [lists.item_ids[row] for row in self.rows.tolist()]
        scores = [None] * len(ids) if self.score is None else self.score.tolist()
        clicks = [None if click != click else click for click in self.click.tolist()]
        places = zip(ids, scores, clicks, self.utility.tolist(), strict=True)
        return {
            "ranking_id": ranking_id,
            "query_id": lists.query_ids[self.number],
            "model": self.model.version,
            "method": self.method,
            "policy": self.policy,
            "arm": self.arm,
            "utility": float(self.utility.sum()),
            "items": [
                {"item_id": each, "position": k, "score": score, "click": click, "utility": utility}
                for k, (each, score, click, utility) in enumerate(places, 1)
            ],
        }


def rank_lists(
    served: Served, lists: Lists, *, exploration: Exploration | None, rng: np.random.Generator
) -> list[Shown]:
    """Rank the lists of a request, each by the model of its arm.

    Raises:
        Problem: when a list asks for a method that its model does not have, or for no user while there is a test.
    """
    arms = _arms(served, lists)
    shown: list[Shown] = []
    for model, arm, numbers in _by_model(served, arms, len(lists)):
        shown += _rank(served, model, arm, lists, numbers, exploration, rng)
    return sorted(shown, key=lambda each: each.number)


def shadow_orders(served: Served, lists: Lists, shown: Sequence[Shown]) -> list[list[str]]:
    """The item ids of each list, from the top, as the silent model would show them; as many as were shown."""
    model = served.shadow
    assert model is not None  # noqa: S101 - it is not asked otherwise
    numbers = [each.number for each in shown]
    own = [method if method in model.methods else None for method in lists.methods]  # it may have fewer of them
    silent = _rank(served, model, None, replace(lists, methods=own), numbers, None, None)
    return [
        [lists.item_ids[row] for row in each.rows[: len(other.rows)].tolist()]
        for each, other in zip(silent, shown, strict=True)
    ]


def columns_of(served: Served, lists: Lists, exploration: Exploration | None) -> Columns:
    """The columns that the log has for the lists of a request."""
    valued = served.takes_value or any(lists.valued)
    return Columns(served.numeric, served.categorical, value=valued, explored=exploration is not None)


def record_of(
    shown: Shown, lists: Lists, columns: Columns, *, ranking_id: str, exploration: Exploration | None, time_us: int
) -> RankingRecord:
    """What the log keeps of a ranking: the items shown, with their features."""
    items, rows = lists.items, shown.rows
    texts = items.categorical[rows].tolist()
    return RankingRecord(
        ranking_id=ranking_id,
        query_id=lists.query_ids[shown.number],
        user_id=lists.user_ids[shown.number],
        arm=shown.arm,
        policy=shown.policy,
        model=shown.model.version,
        columns=columns.digest,
        time_us=time_us,
        items=tuple(lists.item_ids[row] for row in rows.tolist()),
        numeric=items.numeric[rows],
        categorical=tuple(tuple(None if text == MISSING else text for text in row) for row in texts),
        value=items.value[rows] if columns.value else None,
        propensity=None if exploration is None else exploration.propensities(shown.ranks),
        ranked_position=None if exploration is None else tuple(shown.ranks.tolist()),
    )


def _arms(served: Served, lists: Lists) -> list[str] | None:
    if served.test is None:
        return None
    for number, user in enumerate(lists.user_ids):
        if user is None:
            place = f"queries.{number}.user_id" if lists.batch else "user_id"
            raise Problem(422, "a test is running, which needs to know the user", [(place, "is needed")])
    return served.test.arms([user for user in lists.user_ids if user is not None])


def _by_model(
    served: Served, arms: Sequence[str] | None, count: int
) -> Iterator[tuple[ServedModel, str | None, list[int]]]:
    """Each model in use, the arm it stands for, and the lists that it ranks."""
    if arms is None or served.other is None:
        yield served.main, None, list(range(count))
        return
    for arm, model in zip(ARMS, (served.main, served.other), strict=True):
        numbers = [number for number, each in enumerate(arms) if each == arm]
        if numbers:
            yield model, arm, numbers


def _rank(
    served: Served,
    model: ServedModel,
    arm: str | None,
    lists: Lists,
    numbers: Sequence[int],
    exploration: Exploration | None,
    rng: np.random.Generator | None,
) -> list[Shown]:
    """Some lists by one model: those that are ranked in the same way go through it together."""
    ways = {number: (_method(served, model, lists, number), lists.positions[number]) for number in numbers}
    items = served.of(model, lists.items)
    found: list[Shown] = []
    for method, asked in dict.fromkeys(ways.values()):
        same = [number for number, way in ways.items() if way == (method, asked)]
        rows, part = _select(items, same, len(lists))
        positions, score, table = _order(model, part, method, asked or model.positions)
        chosen = _best(positions, part.offsets, asked or model.positions)
        orders = [_explored(len(each), exploration, rng) for each in chosen]
        shown = [each[ranks - 1] for each, (ranks, _) in zip(chosen, orders, strict=True)]
        scores, clicks = _shown_figures(model, part, shown, score, table)
        for number, own, (ranks, by_chance), s, click in zip(same, shown, orders, scores, clicks, strict=True):
            found.append(
                Shown(
                    number=number,
                    model=model,
                    method=method,
                    arm=arm,
                    rows=rows[own],
                    ranks=ranks,
                    policy=f"{model.version}+{exploration.kind}" if exploration and by_chance else model.version,
                    score=s,
                    click=click,
                    utility=np.where(np.isnan(click), 0.0, click) * part.value[own],
                )
            )
    return found


def _order(
    model: ServedModel, items: Items, method: Method, positions: int
) -> tuple[Ints, Floats | None, Floats | None]:
    """The position `[rows]` of every item, and what was computed for it: the scores, or the click table."""
    score = model.scores(items) if method == "score" else None
    table = model.log_ctr(items) if method != "score" else None
    return model.order(items, table, score, method=method, positions=positions), score, table


def _best(positions: Ints, offsets: Ints, most: int) -> list[Ints]:
    """The rows of each list from the top, at most so many."""
    rows = np.empty_like(positions)
    rows[np.repeat(offsets[:-1], np.diff(offsets)) + positions - 1] = np.arange(len(positions))
    return [rows[start:end][:most] for start, end in pairwise(offsets.tolist())]


def _explored(places: int, exploration: Exploration | None, rng: np.random.Generator | None) -> tuple[Ints, bool]:
    if exploration is None or rng is None:
        return np.arange(1, places + 1), False
    return exploration.order(places, rng)


def _shown_figures(
    model: ServedModel, items: Items, shown: Sequence[Ints], score: Floats | None, table: Floats | None
) -> tuple[list[Floats | None], list[NDArray[np.float64]]]:
    """The scores and the click probabilities of the items shown in each list. What the order did not need is computed
    for these alone: they are few, and the click model takes longer than all but the parsing."""
    rows = np.concatenate(shown)
    ends = np.cumsum([len(each) for each in shown])[:-1]
    few = Items(items.numeric[rows], items.categorical[rows], items.value[rows], np.array([0, len(rows)]))
    scores = model.scores(few) if score is None else score[rows]
    tables = np.split(model.log_ctr(few) if table is None else table[rows], ends)
    return [None] * len(shown) if scores is None else list(np.split(scores, ends)), [_clicks(each) for each in tables]


def _method(served: Served, model: ServedModel, lists: Lists, number: int) -> Method:
    asked = lists.methods[number]
    if asked is not None and asked not in model.methods:
        place = f"queries.{number}.method" if lists.batch else "method"
        raise Problem(422, f"the model ranks by {', '.join(model.methods)}; got '{asked}'", [(place, "not there")])
    return served.method_of(model, asked)


def _clicks(table: NDArray[np.float32]) -> NDArray[np.float64]:
    """The click probability `[m]` of items `[m, K]` shown from the top; NaN where the model knows no position."""
    m, K = table.shape
    click = np.full(m, np.nan)
    known = min(m, K)
    click[:known] = np.exp(at_positions(table[:known], np.arange(1, known + 1)).astype(np.float64))
    return click


def _select(items: Items, numbers: Sequence[int], count: int) -> tuple[Ints, Items]:
    """The rows of some lists, and these lists alone."""
    if len(numbers) == count:
        return np.arange(len(items)), items
    lengths = np.diff(items.offsets)[list(numbers)]
    rows = np.concatenate([np.arange(items.offsets[n], items.offsets[n + 1]) for n in numbers])
    offsets = np.append(0, np.cumsum(lengths))
    return rows, Items(items.numeric[rows], items.categorical[rows], items.value[rows], offsets)
