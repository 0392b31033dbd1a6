"""Look into a list: its click table, the orders that the model can make of it, and the utility of given ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.log.ragged import at_positions
from urank.ranking.positions import Method
from urank.ranking.utility import utility_of_items
from urank.serve.feedback_store import Columns, RankingRecord
from urank.serve.models import ARMS, MISSING, ActiveModels, Items, ServedModel
from urank.serve.request_arrays import RequestLists
from urank.serve.schemas import Problem

__all__ = [
    "Exploration",
    "ExplorationKind",
    "RankedList",
    "columns_of",
    "explain",
    "rank_lists",
    "record_of",
    "shadow_orders",
]

ExplorationKind = Literal["swap", "shuffle"]


@dataclass(frozen=True)
class Exploration:
    """How lists are randomised.

    Attributes:
        kind: `swap` or `shuffle`.
        share: of lists, above 0 and at most 1.

    >>> str(Exploration.parse("swap:0.05"))
    'swap:0.05'
    >>> Exploration.parse("swap:5")
    Traceback (most recent call last):
    urank.errors.ConfigError: the share of lists that are explored must be above 0 and at most 1; got 5
    """

    kind: ExplorationKind
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"the share of lists that are explored must be above 0 and at most 1; got {self.share:g}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` makes of it."""
        kind, _, share = text.partition(":")
        found = next((each for each in get_args(ExplorationKind) if each == kind), None)
        try:
            number = float(share)
        except ValueError:
            found, number = None, 0.0
        if found is None:
            raise ConfigError(f"exploration is swap:SHARE, as swap:0.05, or shuffle:SHARE; got '{text}'")
        return cls(found, number)

    def __str__(self) -> str:
        return f"{self.kind}:{np.format_float_positional(self.share, trim='-')}"

    def order(self, places: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], bool]:
        """The rank, from 1, of the item shown at each of the places, and whether chance was asked.

        >>> Exploration("swap", 1.0).order(4, np.random.default_rng(1))
        (array([4, 2, 3, 1]), True)
        """
        ranks = np.arange(1, places + 1)
        if rng.random() >= self.share:
            return ranks, False
        if self.kind == "shuffle":
            return rng.permutation(ranks), True
        other = int(rng.integers(places))
        ranks[0], ranks[other] = ranks[other], ranks[0]
        return ranks, True

    def propensities(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """P(item ranked r at place k) for the rank at each place; see above.

        >>> Exploration("swap", 0.2).propensities(np.array([2, 1, 3, 4])).tolist()  # 0.2 / 4 and 1 - 0.2 / 4
        [0.05, 0.05, 0.95, 0.95]
        """
        m = len(ranks)
        stays = ranks == np.arange(1, m + 1)
        by_chance = self.share / m
        if self.kind == "shuffle":
            return np.where(stays, 1 - self.share, 0.0) + by_chance
        kept = np.where(ranks == 1, 1 - self.share + by_chance, 1 - by_chance)
        return np.where(stays, kept, by_chance)


Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RankedList:
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

    def answer(self, lists: RequestLists, ranking_id: str) -> dict[str, Any]:
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
    served: ActiveModels, lists: RequestLists, *, exploration: Exploration | None, rng: np.random.Generator
) -> list[RankedList]:
    """Rank the lists of a request, each by the model of its arm.

    Raises:
        Problem: when a list asks for a method that its model does not have, or for no user while there is a test.
    """
    arms = _arms(served, lists)
    shown: list[RankedList] = []
    for model, arm, numbers in _by_model(served, arms, len(lists)):
        shown += _rank(served, model, arm, lists, numbers, exploration, rng)
    return sorted(shown, key=lambda each: each.number)


def shadow_orders(served: ActiveModels, lists: RequestLists, shown: Sequence[RankedList]) -> list[list[str]]:
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


def columns_of(served: ActiveModels, lists: RequestLists, exploration: Exploration | None) -> Columns:
    """The columns that the log has for the lists of a request."""
    valued = served.takes_value or any(lists.valued)
    return Columns(served.numeric, served.categorical, value=valued, explored=exploration is not None)


def record_of(
    shown: RankedList,
    lists: RequestLists,
    columns: Columns,
    *,
    ranking_id: str,
    exploration: Exploration | None,
    time_us: int,
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


def _arms(served: ActiveModels, lists: RequestLists) -> list[str] | None:
    if served.test is None:
        return None
    for number, user in enumerate(lists.user_ids):
        if user is None:
            place = f"queries.{number}.user_id" if lists.batch else "user_id"
            raise Problem(422, "a test is running, which needs to know the user", [(place, "is needed")])
    return served.test.arms([user for user in lists.user_ids if user is not None])


def _by_model(
    served: ActiveModels, arms: Sequence[str] | None, count: int
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
    served: ActiveModels,
    model: ServedModel,
    arm: str | None,
    lists: RequestLists,
    numbers: Sequence[int],
    exploration: Exploration | None,
    rng: np.random.Generator | None,
) -> list[RankedList]:
    """Some lists by one model: those that are ranked in the same way go through it together."""
    ways = {number: (_method(served, model, lists, number), lists.positions[number]) for number in numbers}
    items = served.of(model, lists.items)
    found: list[RankedList] = []
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
                RankedList(
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


def _method(served: ActiveModels, model: ServedModel, lists: RequestLists, number: int) -> Method:
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


def explain(served: ActiveModels, lists: RequestLists, orders: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What the main model thinks of the one list, as `bodies.ExplainAnswer` has it.

    Raises:
        Problem: when an order names an item that is not there, or twice, or has the name of a method.
    """
    model = served.main
    items = served.of(model, lists.items)
    table, scores = model.log_ctr(items), model.scores(items)
    places = min(lists.positions[0] or model.positions, model.positions)
    made: dict[str, NDArray[np.int64]] = {
        method: model.order(items, table, scores, method=method, positions=places) for method in model.methods
    }
    made |= {name: _positions(name, ids, lists.item_ids, taken=model.methods) for name, ids in orders.items()}
    clicks = np.minimum(np.exp(table[:, :places].astype(np.float64)), 1)  # a graph may round to just above
    given = [None] * len(items) if scores is None else scores.tolist()
    rows = zip(lists.item_ids, items.value.tolist(), given, clicks.tolist(), strict=True)
    return {
        "model": model.version,
        "method": served.method_of(model),
        "positions": places,
        "items": [{"item_id": each, "value": v, "score": s, "clicks": c} for each, v, s, c in rows],
        "orders": [_judged(name, positions, clicks, items.value, lists.item_ids) for name, positions in made.items()],
    }


def _positions(name: str, ids: Sequence[str], all_ids: Sequence[str], *, taken: Sequence[str]) -> NDArray[np.int64]:
    """The position `[rows]` of each item in an order; those that it does not name come after the last place."""
    place = {each: number for number, each in enumerate(all_ids)}
    if name in taken:
        raise Problem(422, f"'{name}' is a method; an order needs another name", [(f"orders.{name}", "is taken")])
    for number, each in enumerate(ids):
        if each not in place:
            raise Problem(422, "an order names candidates", [(f"orders.{name}.{number}", "is not a candidate")])
    if len(set(ids)) != len(ids):
        raise Problem(422, "an order names each candidate once", [(f"orders.{name}", "names one twice")])
    positions = np.arange(len(all_ids)) + len(all_ids) + _MORE_THAN_ANY_PLACE
    positions[[place[each] for each in ids]] = np.arange(1, len(ids) + 1)
    return positions


_MORE_THAN_ANY_PLACE = 1_000_000


def _judged(
    name: str,
    positions: NDArray[np.int64],
    clicks: NDArray[np.float64],
    value: NDArray[np.float32],
    ids: Sequence[str],
) -> dict[str, Any]:
    utilities = utility_of_items(clicks[None], positions[None], value=value[None].astype(np.float64))[0]
    places = clicks.shape[1]
    shown = [int(row) for row in np.argsort(positions) if positions[row] <= places]
    return {
        "name": name,
        "items": [ids[row] for row in shown],
        "utility": float(utilities.sum()),
        "utilities": [float(utilities[row]) for row in shown],
    }
