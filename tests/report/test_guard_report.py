"""The report of a guardrail: every figure by arithmetic, the terminal and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from io import StringIO
from math import nan
from pathlib import Path

import pytest
from rich.console import Console

from pages import Page
from report.evaluations import comparison, evaluation, policy, without_intervals
from urank.evaluation.guard_sweep import GuardLevel, GuardLevels
from urank.ranking.guard import Guard, Moves
from urank.report.evaluation_report import ReferenceValues
from urank.report.guard_report import guard_plot, guard_table, print_guard, write_guard
from urank.report.style import svg


@pytest.fixture
def found() -> GuardLevels:
    """Shift 2 keeps 0.04 of 0.056."""
    values = [
        policy("score, shift 1", 0.804, comparison(0.004, p_value=0.41)),
        policy("score, shift 2", 0.84, comparison(0.04), warnings=("hardly any placement was logged",)),
        policy("score", 0.856, comparison(0.056), warnings=("nothing was logged",)),
    ]
    moved = [
        Moves(1000, 100, 500, 1, 4),
        Moves(1000, 100, 1200, 2, 40),
        Moves(1000, 100, 3400, 9, 75),
    ]
    guards = [Guard("shift", 1), Guard("shift", 2), None]
    return GuardLevels(
        "shift",
        "score",
        [GuardLevel(*each) for each in zip(guards, values, moved, strict=True)],
        evaluation(*values),
    )


@pytest.fixture
def known() -> ReferenceValues:
    """Known utilities of all levels."""
    utility = {"logged": 0.8, "score, shift 1": 0.81, "score, shift 2": 0.848, "score": 0.864}
    gains = {name: value - 0.8 for name, value in utility.items() if name != "logged"}
    return ReferenceValues("outcome", "measured", utility, gains, "The outcome was measured afterwards.")


def shown(found: GuardLevels, width: int = 120) -> str:
    out = StringIO()
    print_guard(found, Console(file=out, width=width))
    return " ".join(out.getvalue().split())


def test_the_table_by_arithmetic(found: GuardLevels, known: ReferenceValues) -> None:
    table = guard_table(found, known)
    assert [dict(zip(table.head, row, strict=True)) for row in (table.rows[0], table.rows[2])] == [
        {
            "level": "logged",
            "clicks@10": "0.800",
            "vs logged": "–",
            "95 % interval": "–",
            "mean move": "0.0",
            "largest": "0",
            "other first": "0.00 %",
            "p": "–",
            "measured@10": "0.800",
            "measured gain": "–",
        },
        {
            "level": "shift 2",
            "clicks@10": "0.840",
            "vs logged": f"+{100 * 0.04 / 0.8:.1f} %",
            "95 % interval": f"+{100 * 0.032 / 0.8:.1f} to +{100 * 0.048 / 0.8:.1f} %",
            "mean move": f"{1200 / 1000:.1f}",
            "largest": "2",
            "other first": "40.0 %",
            "p": "2e-16",
            "measured@10": "0.848",
            "measured gain": f"+{100 * 0.048 / 0.8:.1f} %",
        },
    ]
    assert [row[0] for row in table.rows] == ["logged", "shift 1", "shift 2", "unbounded"]


def test_reference_values_are_drawn_where_they_are_known(found: GuardLevels, known: ReferenceValues) -> None:
    assert "outcome" in drawn(found, known)
    assert "outcome" not in drawn(found)


def drawn(found: GuardLevels, reference: ReferenceValues | None = None) -> str:
    """The figure without its styles."""
    return re.sub(r"<style.*?</style>", "", svg(guard_plot(found, reference)), flags=re.DOTALL)


def test_the_terminal_ends_with_the_recommendation(found: GuardLevels) -> None:
    text = shown(found)
    assert text.endswith(found.recommendation)
    assert "beware shift 2: hardly any placement was logged" in text
    assert "nothing was logged" not in text  # of another level
    assert "other first" in shown(found, 80)


def test_the_page(found: GuardLevels, known: ReferenceValues, tmp_path: Path) -> None:
    write_guard(found, tmp_path / "page.html", known)
    text = (tmp_path / "page.html").read_text()
    parsed = Page()
    parsed.feed(text)
    assert {"table", "svg"} <= set(parsed.tags)
    assert all(source.startswith("data:") for source in parsed.fetched)
    said = unescape(text)
    assert f"L{found.recommendation[1:]}." in said
    for words in ("No item moves more than", "nothing was logged", "A diamond is the outcome", "shift 1"):
        assert words in said
    write_guard(replace(found, kind="blend"), tmp_path / "page.html")
    assert "sorted by the weighted mean of their logged rank" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("base", [0.0, nan])
def test_what_has_no_percents_or_no_interval(found: GuardLevels, tmp_path: Path, base: float) -> None:
    levels = [replace(each, value=without_intervals(each.value)) for each in found.levels]
    policies = [policy("logged", base), *(level.value for level in levels)]
    odd = replace(found, levels=levels, evaluation=replace(found.evaluation, policies=policies))
    assert dict(zip(guard_table(odd).head, guard_table(odd).rows[2], strict=True))["vs logged"] == "+0.040"
    assert "nan" not in shown(odd) + drawn(odd)
    assert odd.recommended is None
    write_guard(odd, tmp_path / "page.html")
