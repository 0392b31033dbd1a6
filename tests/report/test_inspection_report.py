"""The page stands alone and says what the inspection found."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from rich.console import Console

import urank
from pages import Page
from urank.log.inspection import Inspection
from urank.report.inspection_report import click_curves, print_inspection, write_inspection
from urank.report.style import svg
from urank.report.tables import Table, bar, terminal_table


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    rng = np.random.default_rng(0)
    lists, n = 300, 5
    position = rng.permuted(np.tile(np.arange(1, n + 1), (lists, 1)), axis=1).ravel()
    log = pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(lists), n),
            "item_id": rng.integers(0, 40, lists * n),
            "position": position,
            "click": (rng.random(lists * n) < 0.6 / position).astype(int),
            "value": rng.uniform(1, 10, lists * n),
            "category": rng.choice(["<script>alert(1)</script>", "[bold]games[/]"], lists * n),
            "policy": np.repeat(rng.choice(["one", "two"], lists), n),
            "price": np.where(rng.random(lists * n) < 0.3, np.nan, 1.0),
        }
    )
    return urank.inspect(urank.read(log))


def test_page_is_self_contained_and_escaped(inspection: Inspection, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_inspection(inspection, path)
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("figcaption") == 4
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert [address for address in page.fetched if not address.startswith("#")] == []
    assert not re.search(r"url\((?!#)", text)
    assert "&lt;script&gt;" in text
    assert "Learnable." in text
    write_inspection(inspection, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


def test_terminal_shows_rates_and_verdict(inspection: Inspection) -> None:
    out = StringIO()
    print_inspection(inspection, Console(file=out, width=200))
    text = out.getvalue()
    facts = inspection.facts
    for rate in facts.curve.rate:
        assert f"{rate:.2%}" in text
    assert "[bold]games[/]" in text
    assert re.search(r"verdict\s+learnable", text)
    assert text.index("verdict") > text.index("position")
    assert f"{facts.interventions.moved:,}" in text


@pytest.mark.parametrize(("share", "text"), [(0, ""), (1, "████"), (0.5, "██"), (1 / 32, "▏"), (7, "████"), (-1, "")])
def test_bars(share: float, text: str) -> None:
    assert bar(share, width=4) == text


def test_figures_are_the_same_every_time(inspection: Inspection) -> None:
    first, second = (svg(click_curves({"all": inspection.facts.curve})) for _ in range(2))
    assert first == second
    assert first.startswith("<svg")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrow_terminal_keeps_the_first_columns(inspection: Inspection, width: int) -> None:
    out = StringIO()
    print_inspection(inspection, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    for k, rate in zip(inspection.facts.curve.position, inspection.facts.curve.rate, strict=True):
        row = next(line for line in lines if line.split()[:1] == [str(k)])
        assert (f"{rate:.2%}" in row) or width < 60
    for name in ("one", "two"):
        assert any(line.split()[:1] == [name] for line in lines)


def test_many_wide_groups_fit_into_80_columns() -> None:
    names = ["a ranker with a rather long name", "another"]
    rates = [f"{rate:.2%}" for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)]
    table = Table(
        ("policy", "impressions", *(f"rate at {k}" for k in (1, 2, 3, 5, 10, 20))),
        [(name, "1,234,567", *rates) for name in names],
    )
    for width in (40, 80):
        out = StringIO()
        Console(file=out, width=width).print(terminal_table(table))
        text = out.getvalue()
        assert all(word in text for word in names[0].split())
        assert "1,234,567" in text
        assert "rate at 1" in text


def test_markup_and_mathematics_in_names_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["$10_$20", "[/b]", "_hidden", ":smile:", "\\frac"]
    rng = np.random.default_rng(0)
    log = pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(200), 5),
            "item_id": np.tile(np.arange(5), 200),
            "position": np.concatenate([rng.permutation(5) + 1 for _ in range(200)]),
            "click": rng.integers(0, 2, 1000),
            "category": rng.choice(names, 1000),
        }
    )
    found = urank.inspect(urank.read(log))
    write_inspection(found, tmp_path / "page.html")
    drawn = re.sub(r"<style.*?</style>", "", svg(click_curves(found.facts.by_category)), flags=re.DOTALL)
    out = StringIO()
    print_inspection(found, Console(file=out, width=120))
    for name in names:
        assert name in drawn
        assert name in out.getvalue()


def test_a_page_without_the_map_of_links(tmp_path: Path) -> None:
    positions = np.arange(1, 251)
    log = pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(20), 250),
            "item_id": np.tile(np.arange(250), 20),
            "position": np.concatenate([np.roll(positions, i) for i in range(20)]),
            "click": np.tile([1, 0], 2500),
        }
    )
    write_inspection(urank.inspect(urank.read(log)), tmp_path / "page.html")
    assert "seen at both" not in (tmp_path / "page.html").read_text()
