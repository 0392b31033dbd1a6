"""The closed loop: simulated users click on what is served, the feedback log trains the next model, which earns more.

small log ──► first model ──► serve, with exploration ──► clicks drawn from the truth ──► feedback log ──► next model
                   └───────────────── true utility of lists that neither has seen ──────────────────────────┘
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy.stats import binomtest

import urank
from serve.server import running
from urank.client import Client
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.serve.feedback_export import ExportStats, export_feedback

pytestmark = pytest.mark.slow

SHARE = 0.2
ROUNDS = 4
QUERIES = 1_000
KNOWN, SERVED = 60, 600
"""The first 60 queries are those of the small log, the next 540 are served, the rest is held out."""
BATCH = 100
TOLD_TWICE, TOLD_LATE = 0.1, 0.1
"""Shares of the clicks; the others are told once and at once."""
WAIT_SECONDS = 60.0
UNLIKELY = 1e-6


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop that was gone through.

    Attributes:
        candidates: of all queries, with their true click table.
        shown: all that was served, in the order of time, with `click`, what the users did.
        version: of the first model.
        early, last: what came of the log while the server ran, and after it.
        log: the folder to learn from.
        first, next: the models.
    """

    candidates: pl.DataFrame
    shown: pl.DataFrame
    version: str
    early: ExportStats | None
    last: dict[str, Any]
    log: Path
    first: urank.URank
    next: urank.URank

    @property
    def logged(self) -> pl.DataFrame:
        """The log, in the order of time."""
        order = self.shown["ranking_id"].unique(maintain_order=True)
        place = pl.DataFrame({"session_id": order, "place": range(len(order))})
        return pl.read_parquet(self.log / "*.parquet").join(place, on="session_id").sort("place", "position")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("loop")
    log = folder / "feedback"
    settings = {"queries": QUERIES, "sessions": 1, "features": 8, "candidates": 8, "positions": 8, "seed": 11}
    simulation = simulate(SimulationConfig(truth_split="all", **settings))
    names = simulation.candidates["query_id"].unique(maintain_order=True)
    features = [name for name in simulation.candidates.columns if name.startswith("f")]
    known = simulation.log.filter(pl.col("query_id").is_in(names[:KNOWN].implode()))
    first = _fitted(known.drop("relevance", "propensity", "policy"), epochs=2)
    first.save(folder / "model")
    served = simulation.candidates.filter(pl.col("query_id").is_in(names[KNOWN:SERVED].implode()))
    options = ("--log", log, "--explore", f"swap:{SHARE}")
    with running(folder / "model", *options) as (url, process), Client(url) as client:
        users = Users(client, simulation.candidates, np.random.default_rng(12))
        for number in range(ROUNDS):
            users.visit(served.select("query_id", "item_id", *features))
            if number == 0:
                early = export_feedback(log)  # while the server writes
        users.tell_the_rest()
        version = client.model().version
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
    last = json.loads(_urank("feedback", log, "--json"))
    _urank("prepare", log / "log", "-o", folder / "prepared")
    following = _fitted(folder / "prepared", epochs=12)
    shown = pl.concat(users.shown)
    return Loop(simulation.candidates, shown, version, early, last, log / "log", first, following)


class Users:
    """Simulated users who see what a server ranks, click by the true table, and tell of it, sometimes twice or late."""

    def __init__(self, client: Client, truth: pl.DataFrame, rng: np.random.Generator) -> None:
        self.client = client
        self.truth = truth.select("query_id", "item_id", "table")
        self.rng = rng
        self.shown: list[pl.DataFrame] = []
        self.again: list[dict[str, object]] = []
        self.late: list[dict[str, object]] = []

    def visit(self, lists: pl.DataFrame) -> None:
        """Every list is ranked and looked at once."""
        parts = lists.partition_by("query_id", maintain_order=True)
        for start in range(0, len(parts), BATCH):
            ranked = self.client.rank_table(pl.concat(parts[start : start + BATCH]))
            chance = ranked.join(self.truth, on=["query_id", "item_id"], maintain_order="left").select(
                pl.col("table").list.get(pl.col("position") - 1)
            )
            clicks = self.rng.random(ranked.height) < chance.to_series().to_numpy()
            self.shown.append(ranked.with_columns(click=pl.Series(clicks.astype(np.int8))))
            self._tell(ranked.filter(clicks).select("ranking_id", "item_id").to_dicts())

    def tell_the_rest(self) -> None:
        """What is told a second time, and what is told late."""
        self._send(self.again)
        self._send(self.late)

    def _tell(self, clicks: Sequence[dict[str, object]]) -> None:
        draws = list(zip(clicks, self.rng.random(len(clicks)), strict=True))
        late = [click for click, draw in draws if draw < TOLD_LATE]
        self._send([click for click in clicks if click not in late])
        self.again += [click for click, draw in draws if draw > 1 - TOLD_TWICE]
        self.late += late

    def _send(self, events: Sequence[dict[str, object]]) -> None:
        assert self.client.feedback(events) == len(events)


def _fitted(log: Any, *, epochs: int) -> urank.URank:
    training = {"epochs": epochs, "batch_lists": 64}
    clicks = {"families": ["monotone"], "hidden": [32], "training": training}
    return urank.URank(method="score", clicks=clicks, scorer={"hidden": [32], "training": training}).fit(log)


def _urank(*arguments: object) -> str:
    command = [sys.executable, "-m", "urank", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_log_has_all_that_was_shown_and_each_click_once(loop: Loop) -> None:
    logged, shown = loop.logged, loop.shown
    told = logged.select(pl.col("session_id").alias("ranking_id"), "query_id", "item_id", "position", "click", "policy")
    assert_frame_equal(told, shown.select(told.columns))
    assert logged["conversion"].sum() == 0
    features = [name for name in loop.candidates.columns if name.startswith("f")]
    sent = logged.select("query_id", "item_id").join(loop.candidates, on=["query_id", "item_id"], maintain_order="left")
    assert_frame_equal(logged.select(features), sent.select(pl.col(features).cast(pl.Float32)))


def test_what_was_told_late_or_twice_is_known_as_such(loop: Loop) -> None:
    clicks = loop.shown["click"].sum()
    assert loop.early is not None
    assert loop.early.rankings + loop.last["rankings"] == ROUNDS * (SERVED - KNOWN)
    assert loop.early.clicks + loop.last["clicks"] + loop.last["amended"] == clicks
    assert loop.last["amended"] > 0
    assert loop.last["unmatched"] == loop.last["waiting"] == 0
    assert loop.last["logs"] == [str(loop.log)]


def test_policy_propensity_and_rank_are_those_of_the_exploration(loop: Loop) -> None:
    logged = loop.logged
    explored = pl.col("policy") == f"{loop.version}+swap"
    assert set(logged["policy"]) == {loop.version, f"{loop.version}+swap"}
    kept = logged.filter(~explored)
    assert (kept["ranked_position"] == kept["position"]).all()
    rank, place = pl.col("ranked_position"), pl.col("position")
    chance = SHARE / pl.len().over("session_id")
    expected = (
        pl.when((rank == 1) & (place == 1))
        .then(1 - SHARE + chance)
        .when(rank == place)
        .then(1 - chance)
        .when((rank == 1) | (place == 1))
        .then(chance)
    )  # nothing else can happen: elsewhere this is null
    assert_frame_equal(logged.select("propensity"), logged.select(propensity=expected))
    lists = logged.group_by("session_id").agg(
        ranks=rank.sort(), places=place.sort(), moved=(rank != place).sum(), explored=explored.any()
    )
    assert (lists["ranks"] == lists["places"]).all()
    assert set(lists.filter("explored")["moved"]) == {0, 2}  # the first may change places with itself


def test_as_many_lists_are_explored_as_was_asked_for(loop: Loop) -> None:
    lists = loop.logged.group_by("session_id").agg(
        explored=(pl.col("policy") != loop.version).any(), m=pl.len(), place=(pl.col("ranked_position") == 1).arg_max()
    )
    assert lists.height == ROUNDS * (SERVED - KNOWN)
    assert binomtest(lists["explored"].sum(), lists.height, SHARE).pvalue > UNLIKELY
    for m in sorted(set(lists["m"])):
        places = lists.filter((pl.col("m") == m) & pl.col("explored"))["place"]
        for place in range(m):  # the first item comes to each place as often
            assert binomtest(int((places == place).sum()), len(places), 1 / m).pvalue > UNLIKELY / 100


def test_the_log_can_be_inspected(loop: Loop) -> None:
    found = json.loads(_urank("inspect", loop.log, "--json"))
    assert (found["rows"], found["clicks"]) == (loop.shown.height, loop.shown["click"].sum())
    assert found["lists"] == ROUNDS * (SERVED - KNOWN)
    assert found["interventions"]["moved"] > 0  # a query had the same order each time, but for exploration
    assert found["features"] == sum(name.startswith("f") for name in loop.candidates.columns)


def test_the_next_model_earns_more_than_the_first(loop: Loop) -> None:
    names = loop.candidates["query_id"].unique(maintain_order=True)
    held_out = loop.candidates.filter(pl.col("query_id").is_in(names[SERVED:].implode()))
    assert not set(held_out["query_id"]) & set(loop.shown["query_id"])
    more = _true_utility(loop.next, held_out) - _true_utility(loop.first, held_out)
    assert len(more) == QUERIES - SERVED
    error = more.std(ddof=1) / np.sqrt(len(more))
    assert more.mean() > 2 * error


def _true_utility(model: urank.URank, candidates: pl.DataFrame) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The true expected clicks of each list, as a model ranks it."""
    ranked = model.rank(candidates.drop("table", "relevance")).join(candidates, on=["query_id", "item_id"])
    chance = pl.col("table").list.get(pl.col("position") - 1)
    return ranked.group_by("query_id").agg(chance.sum()).sort("query_id")["table"].cast(pl.Float64).to_numpy()
