"""Rank and explain the lists of a request: order, exploration, expected utility, and the record for the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Self, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from urank.client.wire_schemas import ExplainedItem, Explanation, Order, RankedItem, Ranking
from urank.errors import ConfigError
from urank.ranking.matching import Method, expected_gain, match_first
from urank.ranking.utility import utility_of_items
from urank.serve.feedback_records import FeedbackColumns, RankingRecord, feedback_columns
from urank.serve.models import ARMS, ActiveModels, ServedModel
from urank.serve.request_arrays import MISSING, CandidateArrays, RequestLists
from urank.serve.request_schemas import Problem

ExplorationKind = Literal["swap", "shuffle"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Exploration:
    """Randomisation of a share of the lists.

    `swap` exchanges the first item with one drawn uniformly from all, itself included; `shuffle` draws a uniform
    permutation. Propensities are those of the mixture with the lists that are left alone: with m items and a share s,
    an item keeps its position with probability 1 - s + s / m (`shuffle`, or the first item of `swap`) or 1 - s / m
    (the others of `swap`), and comes to another possible position with probability s / m.

    >>> str(Exploration.parse("swap:0.05"))
    'swap:0.05'
    >>> Exploration.parse("swap:5")
    Traceback (most recent call last):
    urank.errors.ConfigError: the share of explored lists must be above 0 and at most 1; got 5
    """

    kind: ExplorationKind
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"the share of explored lists must be above 0 and at most 1; got {self.share:g}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `swap:SHARE` or `shuffle:SHARE`."""
        name, _, share = text.partition(":")
        try:
            kind, number = next(each for each in get_args(ExplorationKind) if each == name), float(share)
        except (StopIteration, ValueError):
            message = f"exploration must be swap:SHARE, as swap:0.05, or shuffle:SHARE; got '{text}'"
            raise ConfigError(message) from None
        return cls(kind, number)

    def __str__(self) -> str:
        return f"{self.kind}:{np.format_float_positional(self.share, trim='-')}"

    def order(self, places: int, rng: np.random.Generator) -> tuple[Ints, bool]:
        """Draw the 1-based rank of the item shown at each place, and whether the list was randomised.

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

    def propensities(self, ranks: Ints) -> Doubles:
        """Return P(item at its place) for the item with this rank at each place.

        >>> Exploration("swap", 0.2).propensities(np.array([2, 1, 3, 4])).tolist()  # 0.2 / 4 and 1 - 0.2 / 4
        [0.05, 0.05, 0.95, 0.95]
        """
        m = len(ranks)
        stays = ranks == np.arange(1, m + 1)
        moved = self.share / m
        if self.kind == "shuffle":
            return np.where(stays, 1 - self.share, 0.0) + moved
        kept = np.where(ranks == 1, 1 - self.share + moved, 1 - moved)
        return np.where(stays, kept, moved)


@dataclass(frozen=True, eq=False)
class RankedList:
    """The m items of a list that are shown, best first."""

    number: int  # index of the list in the request
    model: ServedModel
    method: Method
    arm: str | None  # of the A/B test, if there is one
    rows: Ints  # [m], the row of each item in the request
    ranks: Ints  # [m], the rank of each before exploration
    policy: str  # logging policy: the model version, and the kind of exploration if it was applied
    score: Floats | None  # [m]; None unless they were ranked by score
    probability: Doubles  # [m], P(click), or that of the goal; NaN beyond the positions that the model knows
    utility: Doubles  # [m], expected utility

    def answer(self, lists: RequestLists, ranking_id: str) -> Ranking:
        """Return the answer for this list."""
        rows, utilities = self.rows.tolist(), self.utility.tolist()
        scores = [None] * len(rows) if self.score is None else self.score.tolist()
        probabilities = [None if p != p else p for p in self.probability.tolist()]
        ids = [lists.item_ids[row] for row in rows]
        return Ranking(
            ranking_id=ranking_id,
            query_id=lists.query_ids[self.number],
            model=self.model.version,
            method=self.method,
            policy=self.policy,
            arm=self.arm,
            utility=sum(utilities),
            items=tuple(map(RankedItem, ids, range(1, len(rows) + 1), scores, probabilities, utilities)),
        )


def write_arrow(rankings: Sequence[RankedList], lists: RequestLists, ranking_ids: Sequence[str]) -> bytes:
    """Write rankings as an Arrow IPC stream, a row for each item."""
    lengths = [len(each.rows) for each in rankings]

    def repeated(texts: Iterable[str | None]) -> pa.Array:
        return pa.array(np.repeat(np.array(list(texts), dtype=object), lengths), pa.string())

    scores = [np.full(len(each.rows), np.nan, np.float32) if each.score is None else each.score for each in rankings]
    score, probability = np.concatenate(scores), np.concatenate([each.probability for each in rankings])
    columns = {
        "ranking_id": repeated(ranking_ids),
        "query_id": repeated(lists.query_ids[each.number] for each in rankings),
        "item_id": pa.array([lists.item_ids[row] for each in rankings for row in each.rows.tolist()], pa.string()),
        "position": pa.array([k for length in lengths for k in range(1, length + 1)], pa.int32()),
        "score": pa.array(score, mask=np.isnan(score)),
        "probability": pa.array(probability, mask=np.isnan(probability)),
        "utility": pa.array(np.concatenate([each.utility for each in rankings])),
        "method": repeated(each.method for each in rankings),
        "policy": repeated(each.policy for each in rankings),
        "arm": repeated(each.arm for each in rankings),
        "model": repeated(each.model.version for each in rankings),
    }
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def rank_lists(
    active: ActiveModels, lists: RequestLists, *, exploration: Exploration | None, rng: np.random.Generator
) -> list[RankedList]:
    """Rank the lists of a request, each by the model of its arm.

    A list that asks for a method that its model lacks is refused, as is one without a user while a test is running.
    """
    if active.test is None or active.other is None:
        rankings = _rank_by_model(active, active.main, None, lists, range(len(lists)), exploration, rng)
        return sorted(rankings, key=lambda each: each.number)
    users = [user for user in lists.user_ids if user is not None]
    if len(users) < len(lists):
        first = lists.user_ids.index(None)
        raise lists.problem(first, "user_id", "an A/B test is running, which needs the user", "is required")
    arms, rankings = active.test.arms(users), []
    for arm, model in zip(ARMS, (active.main, active.other), strict=True):
        numbers = [number for number, each in enumerate(arms) if each == arm]
        rankings += _rank_by_model(active, model, arm, lists, numbers, exploration, rng)
    return sorted(rankings, key=lambda each: each.number)


def shadow_orders(active: ActiveModels, lists: RequestLists, rankings: Sequence[RankedList]) -> list[list[str]]:
    """Return the item ids of each list as the shadow model would rank them, as many as were shown."""
    model = active.shadow
    assert model is not None  # noqa: S101 - callers check it
    numbers = range(len(lists))
    methods = [method if method in model.methods else None for method in lists.methods]  # it may have fewer of them
    orders = _rank_by_model(active, model, None, replace(lists, methods=methods), numbers, None, None)
    pairs = zip(sorted(orders, key=lambda each: each.number), rankings, strict=True)
    return [[lists.item_ids[row] for row in each.rows[: len(shown.rows)].tolist()] for each, shown in pairs]


def _rank_by_model(
    active: ActiveModels,
    model: ServedModel,
    arm: str | None,
    lists: RequestLists,
    numbers: Sequence[int],
    exploration: Exploration | None,
    rng: np.random.Generator | None,
) -> list[RankedList]:
    """Rank some lists by one model, those with the same method and number of positions together."""
    groups: dict[tuple[Method, int], list[int]] = {}
    for number in numbers:
        requested = lists.methods[number]
        if requested is not None and requested not in model.methods:
            detail = f"the model ranks by {', '.join(model.methods)}; got '{requested}'"
            raise lists.problem(number, "method", detail, "is not available")
        key = active.method_of(model, requested), lists.positions[number] or model.positions
        groups.setdefault(key, []).append(number)
    items = active.inputs_of(model, lists.items)
    rankings: list[RankedList] = []
    for (method, positions), group in groups.items():
        rows, part = _select(items, group)
        score = model.scores(part) if method == "score" else None
        table = model.log_ctr(part) if method != "score" else None
        if table is not None and method == "match" and len(group) == 1 and positions <= model.positions:
            best = [match_first(expected_gain(table[:, :positions], part.value, method))]
        else:
            order = model.order(part, table, score, method=method, positions=positions)
            bounds = pairwise(part.offsets.tolist())
            best = [start + np.argsort(order[start:end])[:positions] for start, end in bounds]
        if exploration is None or rng is None:
            explored, shown = [(np.arange(1, len(each) + 1), False) for each in best], best
        else:
            explored = [exploration.order(len(each), rng) for each in best]
            shown = [each[ranks - 1] for each, (ranks, _) in zip(best, explored, strict=True)]
        tables = _tables_of_shown(model, part, shown) if table is None else [table[own] for own in shown]
        for number, own, (ranks, randomised), each in zip(group, shown, explored, tables, strict=True):
            policy = f"{model.version}+{exploration.kind}" if exploration and randomised else model.version
            click = np.exp(np.diagonal(each).astype(np.float64))
            utility: Doubles = click * part.value[own[: len(click)]]
            if unknown := len(own) - len(click):  # beyond the positions that the model knows
                click, utility = np.append(click, [np.nan] * unknown), np.append(utility, [0.0] * unknown)
            rankings.append(
                RankedList(
                    number=number,
                    model=model,
                    method=method,
                    arm=arm,
                    rows=own if rows is None else rows[own],
                    ranks=ranks,
                    policy=policy,
                    score=None if score is None else score[own],
                    probability=click,
                    utility=utility,
                )
            )
    return rankings


def _select(items: CandidateArrays, numbers: Sequence[int]) -> tuple[Ints | None, CandidateArrays]:
    """Return the rows of some lists, None for all, and these lists alone."""
    if len(numbers) == len(items.offsets) - 1:
        return None, items
    rows = np.concatenate([np.arange(items.offsets[n], items.offsets[n + 1]) for n in numbers])
    return rows, items.take(rows, np.append(0, np.cumsum(np.diff(items.offsets)[list(numbers)])))


def _tables_of_shown(model: ServedModel, items: CandidateArrays, shown: Sequence[Ints]) -> list[Floats]:
    """Return the click table of the items shown in each list, which are few: the click model takes the most time."""
    rows = np.concatenate(shown)
    table = model.log_ctr(items.take(rows, np.array([0, len(rows)])))
    return np.split(table, np.cumsum([len(each) for each in shown])[:-1])


def log_columns(active: ActiveModels, lists: RequestLists, exploration: Exploration | None) -> FeedbackColumns:
    """Return the columns of the feedback log for the lists of a request."""
    value = active.takes_value or any(lists.has_values)
    return feedback_columns(active.numeric, active.categorical, value=value, explored=exploration is not None)


def log_record(
    ranking: RankedList,
    lists: RequestLists,
    columns: FeedbackColumns,
    *,
    ranking_id: str,
    exploration: Exploration | None,
    time_us: int,
) -> RankingRecord:
    """Return the record of a ranking for the feedback log: the items shown, with their features."""
    items, rows = lists.items, ranking.rows
    texts = items.categorical[rows].tolist()
    return RankingRecord(
        ranking_id=ranking_id,
        query_id=lists.query_ids[ranking.number],
        user_id=lists.user_ids[ranking.number],
        arm=ranking.arm,
        policy=ranking.policy,
        model=ranking.model.version,
        columns=columns.digest,
        time_us=time_us,
        items=tuple(lists.item_ids[row] for row in rows.tolist()),
        numeric=items.numeric[rows],
        categorical=tuple(tuple(None if text == MISSING else text for text in row) for row in texts),
        value=items.value[rows] if columns.value else None,
        propensity=None if exploration is None else exploration.propensities(ranking.ranks),
        ranked_position=None if exploration is None else tuple(ranking.ranks.tolist()),
    )


def explain(active: ActiveModels, lists: RequestLists, orders: Mapping[str, Sequence[str]]) -> Explanation:
    """Explain the one list by the main model."""
    model = active.main
    items = active.inputs_of(model, lists.items)
    table, scores = model.log_ctr(items), model.scores(items)
    places = min(lists.positions[0] or model.positions, model.positions)
    ranked = {each: model.order(items, table, scores, method=each, positions=places) for each in model.methods}
    given = {name: _order_positions(name, ids, lists.item_ids, model.methods) for name, ids in orders.items()}
    clicks = np.minimum(np.exp(table[:, :places].astype(np.float64)), 1)  # a graph may round up to just above 1
    item_scores = [None] * len(items) if scores is None else scores.tolist()
    rows = zip(lists.item_ids, items.value.tolist(), item_scores, clicks.tolist(), strict=True)
    return Explanation(
        model=model.version,
        method=active.method_of(model),
        positions=places,
        items=tuple(ExplainedItem(each, value, score, tuple(click)) for each, value, score, click in rows),
        orders=tuple(
            _evaluate(name, order, clicks, items.value, lists.item_ids) for name, order in (ranked | given).items()
        ),
    )


def _order_positions(name: str, ids: Sequence[str], all_ids: Sequence[str], methods: Sequence[str]) -> Ints:
    """Return the position `[rows]` of each item in an order; items that it omits are not shown."""
    rows, place = {each: row for row, each in enumerate(all_ids)}, f"orders.{name}"
    if name in methods:
        raise Problem(422, f"'{name}' is a method; an order needs another name", [(place, "is taken")])
    for number, each in enumerate(ids):
        if each not in rows:
            raise Problem(422, "an order must consist of candidates", [(f"{place}.{number}", "is not a candidate")])
    if len(set(ids)) != len(ids):
        raise Problem(422, "an order must contain each candidate at most once", [(place, "contains one twice")])
    positions = np.arange(len(all_ids)) + len(all_ids) + 1_000_000  # beyond every place
    positions[[rows[each] for each in ids]] = np.arange(1, len(ids) + 1)
    return positions


def _evaluate(name: str, positions: Ints, clicks: Doubles, value: Floats, ids: Sequence[str]) -> Order:
    utilities = utility_of_items(clicks[None], positions[None], value=value[None].astype(np.float64))[0]
    shown = [int(row) for row in np.argsort(positions) if positions[row] <= clicks.shape[1]]
    return Order(
        name, tuple(ids[row] for row in shown), float(utilities.sum()), tuple(float(utilities[row]) for row in shown)
    )
