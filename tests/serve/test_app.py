"""The routes: what they answer, what they count, and that a broken model or a broken disk takes nothing else along."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.cases import candidates, client, example, loaded, saved
from serve.server import running
from urank.client.wire_schemas import Accepted, Explanation, Ranking, RankingBatch, Reloaded
from urank.serve.feedback_records import new_home, new_ranking_id
from urank.serve.list_ranking import Exploration
from urank.serve.models import ModelSources, UserSplit
from urank.serve.request_schemas import PROBLEM_JSON
from urank.serve.server_settings import Limits

KEY = "a-key-of-the-tests-0123"
RIGHT = {"x-api-key": KEY}


def batch(kind: str, lengths: list[int], **settings: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "queries": [
            {"query_id": f"q{number}", "candidates": candidates(loaded(kind), rng, length), **settings}
            for number, length in enumerate(lengths)
        ]
    }


def counted(text: str) -> dict[tuple[str, ...], float]:
    """The samples of /metrics: name and the values of its labels -> number."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def refusal(answer: httpx.Response, status: int) -> str:
    """The sentence of a refusal."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM_JSON
    body = answer.json()
    assert (body["type"], body["status"]) == ("about:blank", status)
    return str(body["detail"])


def test_what_is_served_is_told() -> None:
    test = UserSplit(saved("numbers"), 0.25, "a test")
    with client("trees", shadow=saved("network"), test=test, method="match") as http:
        facts = http.get("/v1/model").json()
    trees = loaded("trees")
    assert facts["version"] == trees.version
    assert (facts["name"], facts["method"]) == (trees.name, "match")
    assert facts["methods"] == ["match", "ctr1"]  # the model of arm B has no scorer
    assert (facts["positions"], facts["takes_value"], facts["log"], facts["explore"]) == (5, True, False, None)
    assert facts["features"] == {"numeric": ["price", "emb[0]", "2nd rate"], "categorical": ["shop", "if"]}
    assert facts["shadow"] == {"version": loaded("network").version, "name": loaded("network").name}
    assert facts["test"] == {"name": "a test", "share": 0.25, "version": loaded("numbers").version}
    assert facts["limits"] == Limits().model_dump()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["loaded"])


def test_exploration_and_the_log_are_told(tmp_path: Path) -> None:
    with client("trees", log=tmp_path / "log", exploration=Exploration("swap", 0.05)) as http:
        facts = http.get("/v1/model").json()
    assert (facts["explore"], facts["log"], facts["shadow"], facts["test"]) == ("swap:0.05", True, None, None)


def test_ranking_and_explaining() -> None:
    with client("trees") as http:
        one = http.post("/v1/rank", json=example("trees")).json()
        msgspec.convert(one, Ranking)
        several = http.post("/v1/rank", json=batch("trees", [3, 1, 8])).json()
        msgspec.convert(several, RankingBatch)
        assert [len(each["items"]) for each in several["rankings"]] == [3, 1, 5]
        only = http.post("/v1/rank", json=batch("trees", [2])).json()
        assert list(only) == ["rankings"]
        query = {key: value for key, value in example("trees").items() if key != "query_id"}
        explained = http.post("/v1/explain", json=query).json()
        msgspec.convert(explained, Explanation)
        by_score = next(order for order in explained["orders"] if order["name"] == "score")
        assert by_score["items"] == [item["item_id"] for item in one["items"]]
        identities = [one["ranking_id"], *(each["ranking_id"] for each in several["rankings"])]
        assert len(set(identities)) == 4


def test_several_models_by_name(tmp_path: Path) -> None:
    """Each takes its own features; the first is also that of the paths without a name."""
    others = {"search": ModelSources(saved("numbers"))}
    with client("trees", name="home", others=others, log=tmp_path / "log") as http:
        versions = {"home": loaded("trees").version, "search": loaded("numbers").version}
        assert http.get("/v1/models").json() == {"models": versions}
        for name, kind in (("home", "trees"), ("search", "numbers")):
            ranking = http.post(f"/v1/models/{name}/rank", json=example(kind)).json()
            assert (ranking["model"], ranking["policy"]) == (versions[name], versions[name])
            assert http.get(f"/v1/models/{name}").json()["version"] == versions[name]
            candidates_ = {"candidates": example(kind)["candidates"]}
            assert http.post(f"/v1/models/{name}/explain", json=candidates_).json()["model"] == versions[name]
            event = {"ranking_id": ranking["ranking_id"], "item_id": ranking["items"][0]["item_id"]}
            assert http.post("/v1/feedback", json={"events": [event]}).status_code == 202
        assert http.post("/v1/rank", json=example("trees")).json()["model"] == versions["home"]
        refusal(http.post("/v1/models/search/rank", json=example("trees")), 422)
        for path in ("/v1/models/other/rank", "/v1/models/other/explain"):
            assert "there is no model of this name" in refusal(http.post(path, json=example("trees")), 404)
        assert "there is no model of this name" in refusal(http.get("/v1/models/other"), 404)
        found = counted(http.get("/metrics").text)
        assert {key[1:] for key in found if key[0] == "urank_model_info"} == {
            ("main", versions["home"]),
            ("search", versions["search"]),
        }
        assert found["urank_requests_total", "/v1/models/{name}/rank", "200"] == 2
        described = http.get("/openapi.json").json()["paths"]["/v1/models/{name}/rank"]["post"]["requestBody"]
        assert described["content"]["application/json"]["schema"] == {"type": "object"}


def test_a_batch_is_known_by_its_first_field() -> None:
    text = json.dumps(batch("trees", [2, 3]))
    json_type = {"content-type": "application/json"}
    with client("trees") as http:
        for body in (text, f"\n\t {text}", text.replace('{"queries":', '{ \r\n "queries"\n:', 1)):
            assert len(http.post("/v1/rank", content=body, headers=json_type).json()["rankings"]) == 2
        for body in ('{"query_id": "q", ' + text[1:], text[:-1] + ', "more": 1}', "[" + text + "]", "\x0b" + text):
            assert http.post("/v1/rank", content=body, headers=json_type).status_code in (400, 422)
        one = {**example("trees"), "query_id": "queries"}
        assert http.post("/v1/rank", json=one).json()["query_id"] == "queries"


def test_a_method_in_use_is_that_of_the_request_then_of_the_server_then_of_the_model() -> None:
    body = example("trees")
    with client("trees") as http:
        assert http.post("/v1/rank", json=body).json()["method"] == "score"
    with client("trees", method="ctr1") as http:
        assert http.post("/v1/rank", json=body).json()["method"] == "ctr1"
        assert http.post("/v1/rank", json={**body, "method": "match"}).json()["method"] == "match"
    with client("clicks") as http:
        answer = http.post("/v1/rank", json={**example("clicks"), "method": "score"})
        assert refusal(answer, 422) == "the model ranks by match, ctr1; got 'score'"
        assert answer.json()["errors"][0]["at"] == "method"


def test_times_are_told() -> None:
    number = r"\d+\.\d{3}"
    with client("trees") as http:
        timing = http.post("/v1/rank", json=example("trees")).headers["server-timing"]
        assert re.fullmatch(f"model;dur={number}, log;dur={number}, total;dur={number}", timing)
        model, log, total = (float(found) for found in re.findall(number, timing))
        assert 0 < model <= total
        assert log == 0
        for answer in (http.get("/healthz"), http.post("/v1/rank", content=b"")):
            assert re.fullmatch(f"total;dur={number}", answer.headers["server-timing"])


def test_paths_and_methods_that_are_not_there() -> None:
    with client("trees") as http:
        for path in (
            "/nothing",
            "/v1",
            "/v1/",
            "/v2/rank",
            "/v1/rank/extra",
            "/.git/config",
            "/%2e%2e/%2e%2e/etc/passwd",
        ):
            assert refusal(http.get(path), 404) == "there is nothing at this path"
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
            answer = http.request(method, "/v1/rank")
            assert refusal(answer, 405) == "this path does not support that method"
            assert answer.headers["allow"] == "POST"
        assert http.post("/v1/model").headers["allow"] == "GET"
        head = http.head("/nothing")
        assert (head.status_code, head.content) == (404, b"")
        assert http.head("/v1/rank").content == b""


def test_metrics_count() -> None:
    with client("trees", shadow=saved("network"), test=UserSplit(saved("numbers"), 0.5)) as http:
        lists = batch("trees", [4] * 20)
        for number, query in enumerate(lists["queries"]):
            query["user_id"] = f"u{number}"
        answers = http.post("/v1/rank", json=lists).json()["rankings"]
        http.post("/v1/rank", content=b"{", headers={"content-type": "application/json"})
        http.get("/nothing")
        http.get("/healthz")
        answer = http.get("/metrics")
        found = counted(answer.text)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    arms = [each["arm"] for each in answers]
    assert {arm: found["urank_lists_total", arm, "no"] for arm in "AB"} == {arm: arms.count(arm) for arm in "AB"}
    assert found["urank_candidates_total",] == 80
    for arm in "AB":
        earned = sum(each["utility"] for each in answers if each["arm"] == arm)
        assert found["urank_expected_utility_total", arm] == pytest.approx(earned)
    assert found["urank_requests_total", "/v1/rank", "200"] == 1
    assert found["urank_requests_total", "/v1/rank", "400"] == 1
    assert found["urank_requests_total", "/healthz", "200"] == 1
    assert found["urank_request_seconds_count", "/v1/rank"] == 2
    assert found["urank_model_seconds_count",] == 1
    assert not [key for key in found if "/nothing" in key]
    versions = {
        (role, loaded(kind).version) for role, kind in (("main", "trees"), ("shadow", "network"), ("test", "numbers"))
    }
    assert {key[1:] for key, value in found.items() if key[0] == "urank_model_info" and value == 1} == versions


def test_what_the_silent_model_did_is_counted() -> None:
    """It follows when it has time, so the numbers come later."""
    with client("trees", shadow=saved("trees", 1)) as http:
        http.post("/v1/rank", json=batch("trees", [6] * 10))
        for _ in range(1_000):
            found = counted(http.get("/metrics").text)
            same, other = (found.get(("urank_shadow_lists_total", f"{word} first"), 0) for word in ("same", "other"))
            if same + other == 10:
                break
        assert same + other == 10


def test_what_is_turned_away_is_counted() -> None:
    with client("trees", key=KEY, hosts=("127.0.0.1",)) as http:
        http.get("/v1/model")
        http.get("/nothing", headers={"host": "evil.org"})
        found = counted(http.get("/metrics", headers=RIGHT).text)
    refused = {key[-1]: value for key, value in found.items() if key[0] == "urank_requests_total"}
    assert refused == {"401": 1, "421": 1}


def test_feedback(tmp_path: Path) -> None:
    with client("trees") as http:
        event = {"ranking_id": new_ranking_id(new_home(1), 1), "item_id": "a"}
        assert "keeps no feedback log" in refusal(http.post("/v1/feedback", json={"events": [event]}), 409)
    with client("trees", log=tmp_path / "log") as http:
        ranking = http.post("/v1/rank", json=example("trees")).json()
        event = {"ranking_id": ranking["ranking_id"], "item_id": ranking["items"][0]["item_id"]}
        more = [event, {**event, "conversion": True, "value": 2.5}, {**event, "click": False}]
        answer = http.post("/v1/feedback", json={"events": more})
        assert answer.status_code == 202
        assert msgspec.convert(answer.json(), Accepted).accepted == 3
        found = counted(http.get("/metrics").text)
        assert found["urank_feedback_events_total", "click"] == 2
        assert found["urank_feedback_events_total", "conversion"] == 1
        assert found["urank_log_seconds_count",] >= 1
        for wrong in (
            {"ranking_id": "", "item_id": "a"},
            {"ranking_id": event["ranking_id"] + "\n", "item_id": "a"},
            {"ranking_id": "../../../../etc/passwd", "item_id": "a"},
            {"ranking_id": event["ranking_id"].upper(), "item_id": "a"},
            {**event, "item_id": ""},
            {**event, "click": 1},
            {**event, "value": -1},
            {**event, "value": 1e31},
            {**event, "more": 1},
        ):
            refusal(http.post("/v1/feedback", json={"events": [event, wrong]}), 422)
        refusal(http.post("/v1/feedback", json={"events": []}), 422)
        assert counted(http.get("/metrics").text)["urank_feedback_events_total", "click"] == 2


def test_a_reload_needs_a_key_always() -> None:
    with client("trees") as http:
        assert "reloads on SIGHUP only" in refusal(http.post("/v1/reload"), 403)
    with client("trees", key=KEY) as http:
        refusal(http.post("/v1/reload"), 401)
        refusal(http.get("/v1/reload", headers=RIGHT), 405)


def replaced(folder: Path, kind: str, seed: int = 0) -> None:
    shutil.rmtree(folder)
    shutil.copytree(saved(kind, seed), folder)


def test_another_model_is_served_after_a_reload(tmp_path: Path) -> None:
    """Also one with other features: what requests must bring, and what is described, changes with it."""
    folder = tmp_path / "model"
    shutil.copytree(saved("trees"), folder)
    with client(folder, key=KEY, headers=RIGHT) as http:
        same = http.post("/v1/reload").json()
        assert same == {"version": loaded("trees").version, "changed": False, "status": "unchanged"}
        replaced(folder, "trees", seed=1)
        changed = http.post("/v1/reload")
        msgspec.convert(changed.json(), Reloaded)
        assert changed.json() == {"version": loaded("trees", 1).version, "changed": True, "status": "reloaded"}
        assert http.post("/v1/rank", json=example("trees")).json()["model"] == loaded("trees", 1).version
        replaced(folder, "numbers")
        assert http.post("/v1/reload").status_code == 200
        refusal(http.post("/v1/rank", json=example("trees")), 422)
        assert http.post("/v1/rank", json=example("numbers")).json()["model"] == loaded("numbers").version
        features = http.get("/openapi.json").json()["components"]["schemas"]["Features"]
        assert list(features["properties"]) == ["price", "emb[0]", "2nd rate"]
        found = counted(http.get("/metrics").text)
        assert found["urank_reloads_total", "reloaded"] == 2
        assert found["urank_reloads_total", "unchanged"] == 1
        served = [key[1:] for key, value in found.items() if key[0] == "urank_model_info" and value == 1]
        assert served == [("main", loaded("numbers").version)]


@pytest.mark.parametrize("broken", ["manifest.json", "features.json", "clicks.onnx", "scorer.txt"])
def test_a_broken_model_is_refused_and_the_old_one_stays(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved("trees"), folder)
    with client(folder, key=KEY, headers=RIGHT) as http:
        before = http.post("/v1/rank", json=example("trees")).json()
        replaced(folder, "trees", seed=1)
        (folder / broken).write_bytes((folder / broken).read_bytes()[:-50])
        assert refusal(http.post("/v1/reload"), 409).startswith("the model is broken, so the old one stays")
        after = http.post("/v1/rank", json=example("trees")).json()
        assert {**after, "ranking_id": ""} == {**before, "ranking_id": ""}
        shutil.rmtree(folder)
        refusal(http.post("/v1/reload"), 409)
        assert http.post("/v1/rank", json=example("trees")).status_code == 200
        assert counted(http.get("/metrics").text)["urank_reloads_total", "refused"] == 2
        shutil.copytree(saved("trees", 1), folder)
        assert http.post("/v1/reload").json()["version"] == loaded("trees", 1).version


def test_a_model_that_lacks_the_method_of_the_server_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved("trees"), folder)
    with client(folder, key=KEY, headers=RIGHT, method="score") as http:
        replaced(folder, "clicks")
        refusal(http.post("/v1/reload"), 409)
        assert http.post("/v1/rank", json=example("trees")).status_code == 200


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A file where the folder of the databases was: nothing is acknowledged until it is a folder again."""
    log = tmp_path / "log"
    with client("trees", log=log) as http:
        assert http.get("/readyz").json() == {"status": "ready"}
        shutil.rmtree(log / "records")
        (log / "records").write_text("in the way")
        assert "nothing is acknowledged" in refusal(http.post("/v1/rank", json=example("trees")), 503)
        assert "cannot be written" in refusal(http.get("/readyz"), 503)
        event = {"ranking_id": new_ranking_id(new_home(1), 1), "item_id": "a"}
        refusal(http.post("/v1/feedback", json={"events": [event]}), 503)
        assert http.get("/healthz").status_code == 200
        assert http.post("/v1/explain", json={"candidates": example("trees")["candidates"]}).status_code == 200
        (log / "records").unlink()
        assert http.post("/v1/rank", json=example("trees")).status_code == 200
        assert http.get("/readyz").status_code == 200


@pytest.mark.slow
def test_a_full_disk_is_told_and_got_over(tmp_path: Path) -> None:
    """Of a real server, whose files may not grow for a while."""
    with running(saved("trees"), "--log", tmp_path / "log") as (url, process), httpx.Client(base_url=url) as http:
        body = {**example("trees", 50), "positions": 50}
        assert http.post("/v1/rank", json=body).status_code == 200
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (65_536, resource.RLIM_INFINITY))
        statuses = []
        while len(statuses) < 200 and 503 not in statuses:
            statuses.append(http.post("/v1/rank", json=body).status_code)
        assert set(statuses) == {200, 503}
        refusal(http.get("/readyz"), 503)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert http.post("/v1/rank", json=body).status_code == 200
        assert http.get("/readyz").status_code == 200


def test_what_fails_here_is_not_told_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with client("trees") as http:
        service = http.app.state.service  # type: ignore[attr-defined]

        async def fail(*_: object) -> None:
            raise RuntimeError("a secret of /srv/models")

        monkeypatch.setattr(service, "rank", fail)
        answer = http.post("/v1/rank", json=example("trees"))
        assert refusal(answer, 500) == "an internal error occurred; see the server's log"
        assert "secret" not in answer.text
        assert "a secret of /srv/models" in caplog.text
        assert http.get("/healthz").status_code == 200
        assert counted(http.get("/metrics").text)["urank_requests_total", "/v1/rank", "500"] == 1


def test_answers_are_json_whatever_the_values() -> None:
    """The smallest and the largest that are allowed."""
    body = example("trees")
    for candidate, value in zip(body["candidates"], (0, 1e-45, 1e30, 5e-324, 1.0, 3), strict=True):
        candidate["value"] = value
    with client("trees") as http:
        for method in ("score", "match", "ctr1"):
            text = http.post("/v1/rank", json={**body, "method": method, "positions": 9}).text
            assert "NaN" not in text
            assert "Infinity" not in text
            msgspec.json.decode(text, type=Ranking)
        msgspec.json.decode(http.post("/v1/explain", json={"candidates": body["candidates"]}).text, type=Explanation)


def test_ids_are_given_back_as_they_came() -> None:
    odd = [
        "\x00",
        "\u202e",
        "é",
        "e\u0301",
        "𝄞",
        "__proto__",
        " ",
        "'; DROP TABLE",
        "<script>",
        "\\",
        '"',
        "../../etc",
        "a" * 512,
    ]
    items = [
        {**each, "item_id": name} for each, name in zip(example("trees", len(odd))["candidates"], odd, strict=True)
    ]
    with client("trees") as http:
        answer = http.post(
            "/v1/rank", json={"query_id": odd[1], "user_id": odd[0], "positions": 99, "candidates": items}
        )
        assert sorted(item["item_id"] for item in answer.json()["items"]) == sorted(odd)
        assert answer.json()["query_id"] == odd[1]
        explained = http.post("/v1/explain", json={"candidates": items, "orders": {"__proto__": odd}})
        assert explained.json()["orders"][-1]["name"] == "__proto__"


def test_the_same_request_has_the_same_answer() -> None:
    with client("trees") as http:
        answers = [http.post("/v1/rank", json=example("trees")).json() for _ in range(3)]
        assert len({json.dumps({**answer, "ranking_id": ""}) for answer in answers}) == 1
        assert len({answer["ranking_id"] for answer in answers}) == 3


@pytest.mark.parametrize("name", ["user_id", "method"])
def test_places_in_a_batch_of_one(name: str) -> None:
    with client("clicks", test=UserSplit(saved("numbers"))) as http:
        body = batch("clicks", [2], **({"method": "score", "user_id": "u"} if name == "method" else {}))
        assert http.post("/v1/rank", json=body).json()["errors"][0]["at"] == f"queries.0.{name}"
