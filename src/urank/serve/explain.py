"""Look into a list: its click table, the orders that the model can make of it, and the utility of given ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank.serve.items import Lists
from urank.serve.models import Served
from urank.serve.problems import Problem
from urank.utility import utility_of_items

__all__ = ["explain"]


def explain(served: Served, lists: Lists, orders: Mapping[str, Sequence[str]]) -> dict[str, Any]:
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
