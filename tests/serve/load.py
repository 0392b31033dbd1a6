"""Clients that rank and click without pause, and remember what they were promised."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import polars as pl

__all__ = ["Promises", "load", "wait_for"]


@dataclass
class Promises:
    """What a server acknowledged.

    Attributes:
        rankings: id -> the items from the top.
        clicks: (ranking id, item id).
        versions: of the models that answered.
        failures: what else came: statuses and broken connections.
    """

    rankings: dict[str, list[str]] = field(default_factory=dict)
    clicks: set[tuple[str, str]] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def check(self, folder: Path) -> None:
        """Assert that the Parquet files of a log have all of it, as it was shown."""
        log = pl.concat([pl.read_parquet(path, columns=["session_id", "item_id", "position", "click"])
                         for path in folder.glob("log*/[!.]*.parquet")]).sort("session_id", "position")  # fmt: skip
        shown = {key[0]: group for key, group in log.partition_by("session_id", as_dict=True).items()}
        assert set(self.rankings) <= set(shown)
        for ranking, items in self.rankings.items():
            assert shown[ranking]["item_id"].to_list() == items
            assert shown[ranking]["position"].to_list() == list(range(1, len(items) + 1))
        assert self.clicks <= set(log.filter(pl.col("click") == 1).select("session_id", "item_id").iter_rows())


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something has happened."""
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def load(url: str, query: dict[str, Any], promises: Promises, *, clients: int = 4) -> Iterator[threading.Event]:
    """Rank this query and click on its first item, again and again, until the block ends; the event ends it sooner."""
    ended = threading.Event()
    threads = [threading.Thread(target=_client, args=(url, query, promises, ended)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)


def _client(url: str, query: dict[str, Any], promises: Promises, ended: threading.Event) -> None:
    body = json.dumps(query).encode()
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
        while not ended.is_set():
            try:
                answer = client.post("/v1/rank", content=body)
                if answer.status_code != 200:
                    promises.failures.append(f"rank {answer.status_code}")
                    continue
                ranking = answer.json()
                identity, items = ranking["ranking_id"], [item["item_id"] for item in ranking["items"]]
                promises.rankings[identity] = items
                promises.versions.add(ranking["model"])
                event = {"ranking_id": identity, "item_id": items[0]}
                answer = client.post("/v1/feedback", json={"events": [event, event]})
                if answer.status_code != 202:
                    promises.failures.append(f"feedback {answer.status_code}")
                    continue
                promises.clicks.add((identity, items[0]))
            except httpx.TransportError as error:
                promises.failures.append(type(error).__name__)
                if not ended.is_set():
                    ended.wait(0.01)
