"""A real browser on a page of a real server, and all that the page said and asked for meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Playwright, expect

__all__ = ["Visit", "launch", "visiting"]

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

SECONDS = 30.0  # for anything to appear: it takes much less, but machines may be busy
expect.set_options(timeout=1e3 * SECONDS)


def launch(playwright: Playwright) -> Browser:
    """The Chromium of this machine; the test skips where there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no browser: the playground is tested with the command chromium, for instance of Debian's package")
    return playwright.chromium.launch(executable_path=path, args=ARGUMENTS)


@dataclass
class Visit:
    """A page, and what it said and asked for."""

    page: Page
    address: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def explain(self, candidates: list[dict[str, Any]], **orders: list[str]) -> dict[str, Any]:
        """What the server itself says of a list."""
        answer = httpx.post(f"{self.address}/v1/explain", json={"candidates": candidates, "orders": orders})
        return dict(answer.raise_for_status().json())

    def sample(self, number: int) -> dict[str, Any]:
        """A list of the sample."""
        return dict(httpx.get(f"{self.address}/v1/samples/{number}").raise_for_status().json())

    def shown(self) -> None:
        """Wait until the page shows all that it asked for."""
        self.page.locator("#panels[aria-busy=false] #mine[aria-busy=false]").wait_for()

    def has_my_order(self, order: list[str]) -> None:
        """Wait until "your order" is this one and its utility is known."""
        told = json.dumps(order, separators=(",", ":"), ensure_ascii=False)
        expect(self.page.locator("#my-list")).to_have_attribute("data-order", told)
        self.shown()
        assert self.my_order() == order

    def my_order(self) -> list[str]:
        """The items of "your order", from the top."""
        rows = self.page.locator("#my-list > li")
        return [row.get_attribute("data-item") or "" for row in rows.all()]

    def my_utility(self) -> float:
        """The utility that "your order" is said to have."""
        return float(self.page.locator("#my-utility").get_attribute("data-utility") or "nan")


@contextmanager
def visiting(browser: Browser, address: str, **settings: Any) -> Iterator[Visit]:
    """A visit to a page, in a browser without a past; at its end the console is silent and no other host was asked."""
    with browser.new_context(**settings) as context:
        page = context.new_page()
        page.set_default_timeout(1e3 * SECONDS)
        visit = Visit(page, address)
        page.on("console", lambda message: visit.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: visit.said.append(f"page error: {error}"))
        context.on("request", lambda request: visit.asked.append(request.url))
        page.goto(f"{address}/")
        yield visit
        assert visit.said == []
        assert {url.startswith(f"{address}/") for url in visit.asked} == {True}, visit.asked
