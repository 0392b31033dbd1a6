"""The client against real servers: `urank serve`, and small ones that break off, refuse or answer nonsense."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.server import running, save_served
from urank.client import AsyncClient, Client, RankedItem, Ranking, Reloaded, ServerError
from urank.client.transport import FIRST_DELAY, MAX_DELAY, delay_after, rank_many, refusal_error, retry_delay
from urank.errors import ConfigError, DataError, UrankError

if TYPE_CHECKING:  # torch is slow to load
    from simulated import Small
    from urank.pipeline import ModelFit

KEY = "0123456789-the-key-of-the-server"
EVENT = {"ranking_id": "0192f3a4b5c6-3f9a1c-8d218391342a", "item_id": "a"}


@dataclass
class Place:
    """A server that runs, and lists for it."""

    url: str
    model: Path
    log: Path
    lists: pl.DataFrame

    @property
    def one(self) -> pl.DataFrame:
        """The candidates of the first list."""
        return self.lists.filter(pl.col("query_id") == self.lists["query_id"][0]).drop("query_id")

    def rows(self, frame: pl.DataFrame) -> list[dict[str, Any]]:
        """Candidates as in the API."""
        own = ("item_id", "value")
        return [
            {**{name: row[name] for name in own}, "features": {name: row[name] for name in row if name not in own}}
            for row in frame.to_dicts()
        ]


@pytest.fixture(scope="module")
def place(small: Small, fitted: ModelFit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("client")
    model = save_served(fitted, folder / "model")
    names = ["query_id", "item_id", "value", *small.dataset.numeric, *small.dataset.categorical]
    lists = small.simulation.candidates.select(names).head(400)
    lists = lists.filter(pl.col("query_id") != lists["query_id"][-1])  # it may be cut
    with running(model, "--log", folder / "feedback") as (url, _):
        yield Place(url, model, folder / "feedback", lists)


@pytest.fixture(scope="module")
def client(place: Place) -> Iterator[Client]:
    with Client(place.url) as client:
        yield client


# Rank


def test_dicts_and_every_kind_of_table_are_ranked_alike(place: Place, client: Client) -> None:
    one = place.one.with_columns(pl.when(pl.col("f2") > pl.col("f2").median()).then(pl.col("f2")).alias("f2"))
    assert 0 < one["f2"].null_count() < one.height  # what is missing goes over too
    nan = one.with_columns(pl.col("f2").fill_null(float("nan")))
    pandas = one.to_pandas().sample(frac=1, random_state=1)  # rows whose numbers are out of order
    expected = client.rank(place.rows(one), query_id="q")
    assert isinstance(expected, Ranking)
    for candidates in (one, one.lazy(), nan, one.to_arrow(), pandas):
        found = client.rank(candidates, query_id="q")
        assert found.ids == expected.ids
        assert [item.position for item in found.items] == list(range(1, len(found.items) + 1))
        for one_item, other in zip(found.items, expected.items, strict=True):
            assert one_item.score == pytest.approx(other.score, rel=1e-6)
            assert one_item.probability == pytest.approx(other.probability, rel=1e-6)
        assert (found.query_id, found.model, found.policy, found.arm) == ("q", expected.model, expected.model, None)


def test_a_ranking_says_what_the_server_says(place: Place, client: Client) -> None:
    ranking = client.rank(place.rows(place.one), query_id="q7", user_id="u7", positions=3, method="match")
    value = dict(place.one.select("item_id", "value").iter_rows())
    assert (ranking.query_id, ranking.method, len(ranking.items)) == ("q7", "match", 3)
    assert ranking.model == client.model().version
    assert ranking.ids == tuple(item.item_id for item in ranking.items)
    for item in ranking.items:
        assert isinstance(item, RankedItem)
        assert item.probability is not None
        assert item.utility == pytest.approx(item.probability * value[item.item_id], rel=1e-6)
    assert ranking.utility == pytest.approx(sum(item.utility for item in ranking.items), rel=1e-9)
    asked = client.rank(place.one, query_id="q7", positions=3, method="match")
    assert (asked.ids, asked.method) == (ranking.ids, "match")
    assert asked.utility == pytest.approx(ranking.utility, rel=1e-6)
    assert asked.ranking_id != ranking.ranking_id
    with pytest.raises(AttributeError):
        ranking.utility = 0.0  # type: ignore[misc]


def test_many_lists_at_once_are_ranked_as_one_by_one(place: Place, client: Client) -> None:
    lists = place.lists.partition_by("query_id", maintain_order=True)
    names = [part["query_id"][0] for part in lists]
    queries = [
        {"query_id": name, "candidates": place.rows(part.drop("query_id"))}
        for name, part in zip(names, lists, strict=True)
    ]
    rankings = client.rank_many(queries)
    frame = client.rank_table(place.lists)
    assert [ranking.query_id for ranking in rankings] == names
    assert frame["query_id"].unique(maintain_order=True).to_list() == names
    assert frame.columns[:7] == ["ranking_id", "query_id", "item_id", "position", "score", "probability", "utility"]
    for ranking, part in zip(rankings, lists, strict=True):
        shown = frame.filter(pl.col("query_id") == ranking.query_id)
        assert tuple(shown["item_id"]) == ranking.ids
        assert ranking.ids == client.rank(part.drop("query_id"), query_id=ranking.query_id).ids
    more = place.lists.with_columns(positions=pl.lit(2), method=pl.lit("ctr1"), user_id=pl.lit("u"))
    assert client.rank_table(more).height == 2 * len(names)


def test_numbers_of_numpy_pass_and_what_is_no_json_does_not(place: Place, client: Client) -> None:
    rows = place.rows(place.one)
    expected = client.rank(rows, query_id="q").ids
    rows[0]["features"]["f1"] = np.float32(rows[0]["features"]["f1"])
    assert client.rank(rows, query_id="q").ids == expected
    for bad, word in ((float("nan"), "JSON"), (object(), "builtins.object"), (np.zeros(2), "numpy.ndarray")):
        rows[0]["features"]["f1"] = bad
        with pytest.raises(DataError, match=rf"^candidates must be made of text, finite numbers.*{word}"):
            client.rank(rows, query_id="q")


def test_what_is_no_list_is_refused_before_it_is_sent(place: Place, client: Client) -> None:
    for bad in ("a.parquet", 3, None, place.rows(place.one)[0]):
        with pytest.raises(DataError, match=r"^candidates must be a list of dicts or a table of Polars, pandas or PyA"):
            client.rank(bad, query_id="q")
    with pytest.raises(DataError, match=r"^table must be a table of Polars, pandas or PyArrow; got builtins.list"):
        client.rank_table(place.rows(place.one))
    for name in ("query_id", "user_id", "positions", "method"):
        with pytest.raises(DataError, match=f"must not have a column '{name}', which is an argument; or use rank_tab"):
            client.rank(place.one.with_columns(pl.lit("q").alias(name)), query_id="q")
    twice = pa.table([[1], [2]], names=["item_id", "item_id"])
    with pytest.raises(DataError, match="two columns named 'item_id'"):
        client.rank(twice, query_id="q")


# Explain


def test_an_explanation_is_the_click_table_and_the_utility_of_orders(place: Place, client: Client) -> None:
    one = place.one
    ids = one["item_id"].to_list()
    found = client.explain(place.rows(one), query_id="q", orders={"backwards": ids[::-1], "short": ids[:2]})
    table = client.explain(one.to_pandas(), orders={"backwards": ids[::-1], "short": ids[:2]})
    assert table.orders == found.orders
    assert [item.item_id for item in table.items] == ids
    assert [order.name for order in found.orders] == ["score", "match", "ctr1", "backwards", "short"]
    assert found.order("score").items == client.rank(one, query_id="q", method="score").ids
    values, clicks = one["value"].to_list(), [item.clicks for item in found.items]
    assert found.positions == len(clicks[0])
    expected = clicks[0][0] * values[0] + clicks[1][1] * values[1]
    assert found.order("short").utility == pytest.approx(expected, rel=1e-6)
    assert sum(found.order("short").utilities) == pytest.approx(expected, rel=1e-6)
    assert client.explain(one, positions=2).positions == 2
    with pytest.raises(DataError, match=r"^name must be one of score, match, ctr1; got 'mine'$"):
        client.explain(one).order("mine")


# Feedback


@pytest.mark.slow
def test_feedback_arrives_in_the_log_once(place: Place, tmp_path: Path) -> None:
    from urank.serve.feedback_export import export_feedback

    folder = tmp_path / "feedback"
    with running(place.model, "--log", folder) as (url, _), Client(url) as client:
        first, second = (client.rank(place.one, query_id=name) for name in ("a", "b"))
        client.click(first, first.ids[1])
        client.click(first.ranking_id, first.ids[1], conversion=True, value=2.5)
        events = [{"ranking_id": second.ranking_id, "item_id": each} for each in second.ids[:2]]
        assert client.feedback(events) == 2
        assert client.feedback(events) == 2
        client.feedback([{"ranking_id": second.ranking_id, "item_id": second.ids[2], "click": False}])
    export_feedback(folder)
    log = pl.read_parquet(folder / "log" / "*.parquet").sort("query_id", "position")
    shown = len(first.ids)
    assert log["session_id"].to_list() == [first.ranking_id] * shown + [second.ranking_id] * shown
    assert log["item_id"].to_list() == [*first.ids, *second.ids]
    assert log["click"].to_list() == [int(place in (1, shown, shown + 1)) for place in range(2 * shown)]
    assert log["conversion"].to_list() == [int(place == 1) for place in range(2 * shown)]
    assert log["value"][1] == 2.5


def test_a_click_must_be_on_an_item_that_was_shown(place: Place, client: Client) -> None:
    ranking = client.rank(place.one, query_id="q", positions=2)
    absent = next(each for each in place.one["item_id"] if each not in ranking.ids)
    with pytest.raises(DataError, match=f"^item_id must be one of ranking {ranking.ranking_id}; got '{absent}'$"):
        client.click(ranking, absent)


# What is served


def test_the_facts_of_a_model_are_those_of_the_server(place: Place, client: Client, small: Small) -> None:
    facts, raw = client.model(), httpx.get(f"{place.url}/v1/model").json()
    assert (facts.numeric, facts.categorical) == (tuple(small.dataset.numeric), tuple(small.dataset.categorical))
    assert facts.loaded == datetime.fromisoformat(raw["loaded"])
    assert dict(facts.limits) == raw["limits"]
    assert list(facts.methods) == raw["methods"]
    for name in ("version", "name", "method", "positions", "takes_value", "explore", "shadow", "test", "items", "log"):
        assert getattr(facts, name) == raw[name], name


@pytest.mark.slow
def test_shadow_test_and_exploration_are_told(place: Place, tmp_path: Path) -> None:
    options = ("--shadow", place.model, "--arm-b", place.model, "--arm-b-share", 0.25, "--abtest-name", "spring")
    with (
        running(place.model, *options, "--log", tmp_path / "log", "--explore", "swap:1") as (url, _),
        Client(url) as client,
    ):
        facts = client.model()
        ranking = client.rank(place.one, query_id="q", user_id="u7")
        with pytest.raises(ServerError, match="an A/B test is running") as refusal:
            client.rank(place.one, query_id="q")
    assert facts.explore == "swap:1"
    assert (facts.shadow and facts.shadow.version) == (facts.test and facts.test.version) == facts.version
    assert (facts.test and (facts.test.name, facts.test.share)) == ("spring", 0.25)
    assert ranking.arm in ("A", "B")
    assert ranking.policy == f"{facts.version}+swap"
    assert refusal.value.errors == (("user_id", "is required"),)


@pytest.mark.slow
def test_ready_while_it_serves_and_not_after(place: Place) -> None:
    with running(place.model, environment={"URANK_API_KEY": KEY}) as (url, process), Client(url) as client:
        assert client.ready()  # needs no key
        process.terminate()
        process.wait()
        assert not client.ready()
    with scripted((404, b"{}")) as (url, _), Client(url) as client, pytest.raises(ServerError, match="with 404"):
        client.ready()
    with scripted((503, b"{}")) as (url, asked), Client(url) as client:
        assert not client.ready()
        assert len(asked) == 1


@pytest.mark.slow
def test_reload_tells_the_version_that_is_served_now(place: Place, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(place.model, model)
    with running(model, environment={"URANK_API_KEY": KEY}) as (url, _), Client(url, key=KEY) as client:
        version = client.model().version
        assert client.reload() == Reloaded(version=version, changed=False, status="unchanged")
        (model / "manifest.json").write_text("{}")
        with pytest.raises(ServerError, match="the old one stays") as refusal:
            client.reload()
        assert refusal.value.status == 409
        assert client.model().version == version


# Keys and errors


def test_the_key_is_shown_to_the_server_and_to_nobody_else(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(place.model, environment={"URANK_API_KEY": KEY}) as (url, _):
        with Client(url, key=f"{KEY}\n") as client:
            assert client.model().positions > 0
        with Client(url) as client, pytest.raises(ServerError, match="401: a key is required"):
            client.model()
        wrong = KEY[::-1]
        with Client(url, key=wrong) as client, pytest.raises(ServerError, match="401: the key is wrong") as refusal:
            client.model()
        assert refusal.value.status == 401
        monkeypatch.setenv("URANK_API_KEY", KEY)
        with Client(url) as client:
            assert client.model().positions > 0
    with Client(url, retries=0) as client, pytest.raises(ServerError) as failure:
        client.model()
    assert isinstance(failure.value.__cause__, httpx.RequestError)
    shown = [client, refusal.value, failure.value, vars(failure.value), failure.value.__cause__.request.headers]
    assert client._http.headers["authorization"] == f"Bearer {KEY}"
    text = "".join(f"{each!r} {each!s}" for each in [*shown, client._http.headers, AsyncClient(url)])
    assert KEY not in text
    assert wrong not in text
    assert f"Client('{url}')" in text


def test_a_key_is_not_shown_where_a_redirect_points() -> None:
    with scripted() as (other, asked), scripted((307, b"", {"location": f"{other}/v1/model"})) as (url, first):
        with Client(url, key=KEY) as client, pytest.raises(ServerError, match="with 307: Temporary Redirect"):
            client.model()
        assert first[0].headers["Authorization"] == f"Bearer {KEY}"
        assert asked == []


@pytest.mark.parametrize("key", ["", "two words", "tab\tinside", "line\nbreak", "schlüssel"])
def test_a_key_that_is_none_is_refused_without_showing_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^key must be printable ASCII characters without spaces; got somethi"
    ) as one:
        Client("http://127.0.0.1:8000", key=key)
    assert not key or key not in str(one.value)
    if key:
        monkeypatch.setenv("URANK_API_KEY", key)
        with pytest.raises(ConfigError, match=r"^URANK_API_KEY must be printable"):
            AsyncClient("http://127.0.0.1:8000")


@pytest.mark.parametrize("address", ["", "localhost:8000", "ftp://host", "http://", "http://h:x", "http://h/?a=1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^address must be the URL of a server, as http://127.0.0.1:8000; got '"):
        Client(address)


def test_arguments_out_of_range_are_refused() -> None:
    address = "http://127.0.0.1:8000"
    with pytest.raises(ConfigError, match="must not contain a user name or password") as refusal:
        Client("http://me:secret@127.0.0.1:8000")
    assert "secret" not in str(refusal.value)
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"^timeout must be a number of seconds above 0; got"):
            Client(address, timeout=wrong)
    with pytest.raises(ConfigError, match=r"^retries must be at least 0; got -1$"):
        Client(address, retries=-1)
    with pytest.raises(ConfigError, match=r"^connections must be at least 1; got 0$"):
        Client(address, connections=0)


def test_a_refusal_is_one_sentence_with_its_places(place: Place, client: Client) -> None:
    rows = place.rows(place.one)
    for row in rows[:5]:
        del row["features"]["f1"]
    with pytest.raises(ServerError) as refusal:
        client.rank(rows, query_id="q")
    error = refusal.value
    assert isinstance(error, UrankError)
    assert error.status == 422
    assert error.detail == "the features are not those of the model; see /v1/model"
    assert error.errors[0] == ("candidates.0.features.f1", "is required; send null if it is missing")
    assert len(error.errors) == 5
    assert str(error).startswith(
        f"{place.url} refused /v1/rank with 422: {error.detail} (candidates.0.features.f1 is re"
    )
    assert str(error).endswith("; and 2 more)")


@given(st.text(), st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_what_a_server_says_never_breaks_a_sentence(detail: str, places: list[tuple[str, str]]) -> None:
    problem = {"detail": detail, "errors": [{"at": at, "problem": text} for at, text in places]}
    error = refusal_error(httpx.Response(422, json=problem), "http://h", "/v1/rank")
    assert len(str(error).splitlines()) == 1
    assert len(error.errors) == len(places)


@pytest.mark.parametrize("body", [b"", b"<html>proxy\nerror</html>", b"[]", b'{"detail": 3}', b'{"errors": [{}]}'])
def test_an_error_that_is_no_problem_json_is_told_by_its_status(body: bytes) -> None:
    with scripted((500, body)) as (url, _), Client(url) as client, pytest.raises(ServerError) as refusal:
        client.model()
    assert str(refusal.value) == f"{url} refused /v1/model with 500: Internal Server Error"
    assert (refusal.value.status, refusal.value.errors) == (500, ())


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"items": 3}', b'{"rankings": [1]}'])
def test_a_server_of_another_kind_is_told_apart(place: Place, body: bytes) -> None:
    asks = (
        lambda client: client.model(),
        lambda client: client.rank(place.rows(place.one), query_id="q"),
        lambda client: client.rank(place.one, query_id="q"),
        lambda client: client.rank_many([]),
        lambda client: client.rank_table(place.one),
        lambda client: client.explain(place.one),
        lambda client: client.feedback([EVENT]),
        lambda client: client.reload(),
    )
    with scripted(*[(200, body)] * len(asks)) as (url, asked), Client(url) as client:
        for ask in asks:
            with pytest.raises(ServerError, match=rf"^{url} did not answer /v1/\w+ as urank serve does$") as refusal:
                ask(client)
            assert refusal.value.status == 200
        assert len(asked) == len(asks)


# Retries

OK = (200, b'{"accepted": 1}')
RANKED = {"ranking_id": "r", "query_id": "q", "model": "m", "method": "score", "policy": "m", "arm": None}
RANKING = (200, json.dumps({**RANKED, "utility": 0.0, "items": [], "new in a later version": 1}).encode())
BREAKS = None


@pytest.mark.parametrize("trouble", [(503, b"{}"), (502, b""), (504, b""), BREAKS])
def test_feedback_is_sent_again_until_it_arrives(trouble: Any) -> None:
    with scripted(trouble, trouble, OK) as (url, asked), Client(url) as client:
        assert client.feedback([EVENT]) == 1
    assert [json.loads(each.body) for each in asked] == [{"events": [EVENT]}] * 3
    with scripted(trouble, trouble, OK) as (url, asked), Client(url, retries=1) as client, pytest.raises(ServerError):
        client.feedback([EVENT])
    assert len(asked) == 2


@pytest.mark.parametrize("trouble", [(503, b"{}"), (502, b""), BREAKS])
def test_a_ranking_is_asked_for_once(trouble: Any) -> None:
    with scripted(trouble, RANKING) as (url, asked), Client(url) as client:
        with pytest.raises(ServerError) as refusal:
            client.rank([], query_id="q")
        assert len(asked) == 1
        assert refusal.value.status == (trouble[0] if trouble else None)
        assert client.rank([], query_id="q") == Ranking(**RANKED, utility=0.0, items=())


@pytest.mark.parametrize("asked", ["1", "2", "3600", "soon", ""])
def test_an_overloaded_server_is_asked_again_when_it_says(asked: str) -> None:
    """Even for a ranking, since it was refused before anything was done."""
    refusal = httpx.Response(503, headers={"retry-after": asked} if asked else {})
    assert rank_many([]).should_retry(refusal) == asked.isdigit()
    seconds = min(MAX_DELAY, float(asked)) if asked.isdigit() else 0.0
    for attempt in range(3):
        longest = max(1.5 * seconds, FIRST_DELAY * 2**attempt)
        assert seconds <= delay_after(refusal, attempt) <= longest


def test_what_is_refused_is_not_sent_again() -> None:
    with scripted((422, b"{}"), OK) as (url, asked), Client(url) as client:
        with pytest.raises(ServerError, match="with 422"):
            client.feedback([EVENT])
        assert len(asked) == 1


def test_a_server_that_comes_up_late_is_waited_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with (
            Client(url, retries=1) as client,
            pytest.raises(ServerError, match=r"cannot be reached: .*refused") as error,
        ):
            client.rank([], query_id="q")
        assert (error.value.status, error.value.errors) == (None, ())
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(RANKING[1]), RANKING[1])

        def come_up() -> None:
            time.sleep(0.3)
            taken.listen()
            connection, _ = taken.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        late = threading.Thread(target=come_up)
        late.start()
        with Client(url, retries=8) as client:
            assert client.rank([], query_id="q").ranking_id == "r"
        late.join()


def test_what_is_late_is_not_sent_again() -> None:
    with scripted(OK, delay=0.5) as (url, asked), Client(url, timeout=0.1) as client:
        with pytest.raises(ServerError, match=f"^{url} did not answer /v1/feedback in time$") as failure:
            client.feedback([EVENT])
        assert failure.value.status is None
    assert len(asked) == 1


@pytest.mark.slow
def test_too_many_at_once_are_told_so() -> None:
    async def two(url: str) -> list[Any]:
        async with AsyncClient(url, timeout=0.2, connections=1) as client:
            return await asyncio.gather(*(client.feedback([EVENT]) for _ in range(2)), return_exceptions=True)

    with scripted(OK, OK, delay=1.0) as (url, _):
        found = asyncio.run(two(url))
    assert any("all connections of this client are in use" in str(each) for each in found)


@given(st.integers(0, 100), st.floats(0, 1))
def test_a_pause_grows_up_to_a_bound_and_half_of_it_is_chance(attempt: int, chance: float) -> None:
    longest = min(MAX_DELAY, FIRST_DELAY * 2.0**attempt)
    assert longest / 2 <= retry_delay(attempt, chance) <= longest
    assert retry_delay(attempt, chance) <= retry_delay(attempt + 1, chance)


# Async, imports and the page


def test_both_clients_have_the_same_methods() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        other = getattr(AsyncClient, name)
        assert inspect.signature(other) == inspect.signature(method), name
        assert inspect.iscoroutinefunction(other) == (name != "__init__"), name


def test_the_asynchronous_client_answers_the_same(place: Place, client: Client) -> None:
    lists = {part["query_id"][0]: part.drop("query_id") for part in place.lists.partition_by("query_id")}

    async def ask() -> list[Ranking]:
        async with AsyncClient(place.url, connections=4) as other:
            assert await other.ready()
            assert await other.model() == client.model()
            rankings = await asyncio.gather(*(other.rank(each, query_id=name) for name, each in lists.items()))
            await other.click(rankings[0], rankings[0].ids[0])
            assert await other.feedback([{"ranking_id": rankings[1].ranking_id, "item_id": rankings[1].ids[0]}]) == 1
            assert await other.explain(place.one) == client.explain(place.one)
            assert (
                (await other.rank_table(place.lists))
                .drop("ranking_id")
                .equals(client.rank_table(place.lists).drop("ranking_id"))
            )
            queries = [{"query_id": "q", "candidates": place.rows(place.one)}]
            assert (await other.rank_many(queries))[0].ids == client.rank_many(queries)[0].ids
            with pytest.raises(ServerError, match="reloads on SIGHUP only"):
                await other.reload()
        return rankings

    for ranking in asyncio.run(ask()):
        assert ranking.ids == client.rank(lists[ranking.query_id], query_id=ranking.query_id).ids
    assert len({ranking.ranking_id for ranking in asyncio.run(ask())}) == len(lists)


def test_the_asynchronous_client_sends_again_where_it_is_safe() -> None:
    async def ask(url: str) -> int:
        async with AsyncClient(url) as client:
            with pytest.raises(ServerError, match="broke off the answer to /v1/rank"):
                await client.rank([], query_id="q")
            return await client.feedback([EVENT])

    with scripted(BREAKS, BREAKS, (503, b""), OK) as (url, asked):
        assert asyncio.run(ask(url)) == 1
    assert [each.path for each in asked] == ["/v1/rank", *["/v1/feedback"] * 3]


def test_a_client_loads_neither_torch_nor_pandas() -> None:
    code = "import sys, urank.client; print([each for each in ('torch', 'pandas', 'fastapi') if each in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# Servers that misbehave

Reply = tuple[int, bytes] | tuple[int, bytes, dict[str, str]] | None


@dataclass
class Asked:
    """A request that came."""

    path: str
    headers: Any = field(repr=False)
    body: bytes


@contextmanager
def scripted(*replies: Reply, delay: float = 0.0) -> Iterator[tuple[str, list[Asked]]]:
    """A server that gives these replies one after the other (none closes the connection), and what was asked of it."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            asked.append(Asked(self.path, self.headers, self.rfile.read(int(self.headers.get("content-length", "0")))))
            reply = replies[len(asked) - 1]
            time.sleep(delay)
            self.close_connection = reply is None
            if reply is None:
                return
            status, body, *more = reply
            self.send_response(status)
            for name, text in {"content-length": str(len(body)), **(more[0] if more else {})}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer  # noqa: N815 - the names that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign] - a client that went away
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()
