"""Pages in a real browser: they fit a screen and a phone, and are legible on light and dark screens."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import urank
from report.analyses import analysis
from report.evaluations import comparison, evaluation, policy
from serve.browser import launch
from urank.clicks.item_curves import ItemCurve
from urank.evaluation.click_quality import quality
from urank.evaluation.guard_sweep import GuardLevel, GuardLevels
from urank.log.inspection import Inspection
from urank.ranking.guard import Guard, Moves
from urank.report.abtest_report import write_analysis
from urank.report.click_report import FitReport
from urank.report.evaluation_report import POLICIES, write_evaluation
from urank.report.guard_report import write_guard
from urank.report.inspection_report import write_inspection
from urank.report.run_report import write_run

MOVES = Moves(1000, 100, 500, 1, 4)
TEXTS = ".panel :is(p, li, td, th, dd, dt, figcaption, figure text)"
CONTRASTS = """texts => {
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    return texts.filter(text => text.getClientRects().length > 0).map(text => {
        const style = getComputedStyle(text);
        const ink = light(text instanceof SVGElement ? style.fill : style.color);
        const paper = light(getComputedStyle(text.closest(".panel")).backgroundColor);
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    });
}"""
HEIGHTS = """texts => texts.filter(text => text.getClientRects().length > 0)
    .map(text => [parseFloat(getComputedStyle(text).fontSize), text.getScreenCTM()])
    .map(([size, {b, d}]) => size * Math.hypot(b, d))"""
WIDTHS = """drawings => drawings.filter(svg => svg.getClientRects().length > 0)
    .map(svg => [svg.getBoundingClientRect().width, svg.closest("figure").getBoundingClientRect().width])"""
OVERFLOWS = "boxes => boxes.map(box => box.scrollWidth - box.clientWidth)"


@pytest.fixture(scope="module")
def log() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    lists, n = 300, 12
    position = rng.permuted(np.tile(np.arange(1, n + 1), (lists, 1)), axis=1).ravel()
    return pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(lists), n),
            "item_id": rng.integers(0, 40, lists * n),
            "position": position,
            "click": (rng.random(lists * n) < 0.6 / position).astype(int),
            "policy": np.repeat(rng.choice(["one", "two"], lists), n),
        }
    )


@pytest.fixture(scope="module")
def pages(log: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind that has charts of its own."""
    folder = tmp_path_factory.mktemp("pages")
    found: Inspection = urank.inspect(urank.read(log))
    gains = {"match": 0.05, "score": 0.04, "ctr1": 0.01, "random": -0.2}
    write_inspection(found, folder / "inspection.html")
    others = [policy(name, 0.8 + gain, comparison(gain)) for name, gain in gains.items()]
    write_evaluation(evaluation(*others), folder / "evaluation.html", "match")
    write_analysis(analysis(), folder / "analysis.html")
    values = [policy("match, shift 1", 0.82, comparison(0.02)), others[0]]
    levels = [GuardLevel(*each) for each in zip((Guard("shift", 1), None), values, [MOVES] * 2, strict=True)]
    write_guard(GuardLevels("shift", "match", levels, evaluation(*values)), folder / "guard.html")
    position, click = log["position"].to_numpy(), log["click"].to_numpy()
    fitted = {name: quality(np.log(0.6 / position), position, click, positions=12) for name in ("shrunk", "pbm")}
    write_run(
        folder / "run.html",
        inspection=found,
        fit=FitReport("shrunk", {"seed": "0"}, {"test": fitted}),
        evaluation=evaluation(*others),
        chosen="match",
        why="no other method earns significantly more on the validation split",
        curves=[ItemCurve("games", 1234, list(0.6 / np.arange(1, 13)), 1.0)],
    )
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


def opened(browser: Browser, path: Path, width: int, scheme: str = "light") -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(path.as_uri())
    return page


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["inspection", "evaluation", "analysis", "guard", "run"])
def test_pages_fit_and_are_legible(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    page = opened(browser, pages[name], width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    drawn = page.locator("figure svg").evaluate_all(WIDTHS)
    assert len(drawn) == page.locator("figure").count() > 0
    assert all(own == pytest.approx(given, abs=1) for own, given in drawn)
    assert min(page.locator("figure text").evaluate_all(HEIGHTS)) > 9
    assert min(page.locator(TEXTS).evaluate_all(CONTRASTS)) > 4.4
    beyond = page.locator(".scroll").evaluate_all(OVERFLOWS)
    assert width < 1000 or max(beyond) <= 0  # on a phone tables scroll
    page.close()


@pytest.mark.slow
def test_position_axes_have_whole_numbers_from_1(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["inspection"], 1280)
    chart = page.locator("figure", has_text="Click rate by position").first.locator(".wide text")
    numbers = [text for text in chart.all_text_contents() if text.isdigit()]
    assert numbers == ["1", "2", "4", "6", "8", "10", "12"]
    page.close()


def test_the_answer_the_next_step_and_the_meaning_of_names_are_on_the_page(pages: dict[str, Path]) -> None:
    text = unescape(pages["evaluation"].read_text(encoding="utf-8"))
    assert text.index("would earn about 6.2 % more clicks") < text.index("Next:") < text.index("<figure")
    assert "<code>urank guard MODEL LOG</code>" in text
    for name, meaning in POLICIES.items():
        assert f"<dt>{name}</dt><dd>{meaning}</dd>" in text


def test_the_footer_has_the_exact_command(log: pl.DataFrame, tmp_path: Path) -> None:
    log.write_parquet(tmp_path / "my log.parquet")
    arguments = ["inspect", "my log.parquet", "--html", "page.html", "--quiet"]
    subprocess.run([sys.executable, "-m", "urank", *arguments], cwd=tmp_path, check=True, timeout=120)
    text = unescape((tmp_path / "page.html").read_text(encoding="utf-8"))
    footer = text[text.index("<footer>") :]
    assert f"<code>{shlex.join(['urank', *arguments])}</code>" in footer
