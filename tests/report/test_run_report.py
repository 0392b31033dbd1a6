"""The report of a whole run: one self-contained page that contains the others."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import urank
from pages import Page
from report.evaluations import comparison, evaluation, policy
from urank.clicks.item_curves import ItemCurve
from urank.evaluation.click_quality import quality
from urank.evaluation.policy_evaluation import Evaluation
from urank.log.inspection import Inspection
from urank.report.click_report import FitReport, fit_sections
from urank.report.evaluation_report import evaluation_sections, evaluation_summary
from urank.report.inspection_report import inspection_sections
from urank.report.run_report import write_run

WHY = "match earns 0.0123 more clicks a list than score on the validation split <p = 0.01>"


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    rng = np.random.default_rng(0)
    position = np.concatenate([rng.permutation(5) + 1 for _ in range(200)])
    log = pl.DataFrame(
        {
            "query_id": np.repeat(np.arange(200), 5),
            "item_id": rng.integers(0, 40, 1000),
            "position": position,
            "click": (rng.random(1000) < 0.6 / position).astype(int),
        }
    )
    return urank.inspect(urank.read(log))


@pytest.fixture(scope="module")
def fit() -> FitReport:
    position, click = np.tile([1, 2], 50), np.tile([1, 0, 0, 1], 25)
    found = quality(np.log(np.full(100, 0.5)), position, click, positions=2)
    return FitReport("monotone", {"seed": "0"}, {"test": {"monotone": found, "constant": found}})


@pytest.fixture(scope="module")
def found() -> Evaluation:
    return evaluation(policy("score", 0.904, comparison(0.104)), policy("match", 0.856, comparison(0.056)))


CURVES = [ItemCurve("<games>", 1234, [0.5, 0.3, 0.2], 0.8), ItemCurve("$tools_$", 123, [0.4, 0.38, 0.37], 0.1)]


def written(path: Path, **parts: object) -> str:
    write_run(path, **{"chosen": "match", "why": WHY, "curves": CURVES, "by": "category", **parts})  # type: ignore[arg-type]
    return path.read_text()


def test_page_holds_the_others(inspection: Inspection, fit: FitReport, found: Evaluation, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    progress = {"report": lambda *done: reports.append(done)}
    text = written(tmp_path / "run.html", inspection=inspection, fit=fit, evaluation=found, **progress)
    assert len(re.findall(r"<h2>(.*?)</h2>", text)) == 5
    inner = [*evaluation_sections(found), *fit_sections(fit), *inspection_sections(inspection)]
    assert re.findall(r"<h3>(.*?)</h3>", text) == [section.title for section in inner]
    page = Page()
    page.feed(text)
    charts = sum(len(section.charts) for section in inner) + 1
    assert page.tags.count("figcaption") == charts
    assert reports == [(number, charts) for number in range(1, charts + 1)]
    assert not {"script", "link", "img", "games"} & set(page.tags)
    assert page.fetched == []
    assert not re.search(r"url\((?!#)", text)
    assert escape(WHY) in text
    assert "The model ranks by match: " in text
    assert "&lt;games&gt;" in text
    assert ">1,234<" in text


def test_contents_lead_to_every_part(inspection: Inspection, fit: FitReport, found: Evaluation, tmp_path: Path) -> None:
    text = written(tmp_path / "run.html", inspection=inspection, fit=fit, evaluation=found)
    for anchor, title in re.findall(r'<a href="#(.*?)">(.*?)</a>', text):
        assert text.count(f'id="{anchor}"') == 1
        assert re.search(rf'<section id="{anchor}" class="panel">\s*<h2>{title}</h2>', text)
    assert len(re.findall(r"<nav", text)) == 1


def test_lead_tells_of_the_method_that_ranks(
    inspection: Inspection, fit: FitReport, found: Evaluation, tmp_path: Path
) -> None:
    parts = {"inspection": inspection, "fit": fit, "evaluation": found}
    text = written(tmp_path / "run.html", **parts)
    assert evaluation_summary(found, "match").answer in text  # though score did better here
    text = written(tmp_path / "other.html", **parts, chosen="ctr1", why="asked for")
    assert evaluation_summary(found).answer in text
    assert "Why ctr1: asked for." in text


@pytest.mark.parametrize("curves", [None, []])
def test_curves_may_be_left_out(
    curves: list[ItemCurve] | None, inspection: Inspection, fit: FitReport, found: Evaluation, tmp_path: Path
) -> None:
    text = written(tmp_path / "run.html", inspection=inspection, fit=fit, evaluation=found, curves=curves)
    assert "Click curves" not in text
