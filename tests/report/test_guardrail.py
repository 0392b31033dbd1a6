"""The report of a guardrail: every figure by arithmetic, the terminal and the page."""

from __future__ import annotations

import re
import subprocess
import sys
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
from urank.report.guard_report import guard_plot, guard_table, print_guard, write_guard
from urank.report.style import svg


@pytest.fixture
def found() -> GuardLevels:
    """Shift 2 keeps 0.04 of 0.056, and the truth is known."""
    values = [
        policy("score, shift 1", 0.804, comparison(0.004, p_value=0.41), true=0.81),
        policy("score, shift 2", 0.84, comparison(0.04), true=0.848, warnings=("hardly any placement was logged",)),
        policy("score", 0.856, comparison(0.056), true=0.864, warnings=("nothing was logged",)),
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
        evaluation(*values, logged=policy("logged", 0.8, true=0.8)),
    )


def shown(found: GuardLevels, width: int = 120) -> str:
    out = StringIO()
    print_guard(found, Console(file=out, width=width))
    return " ".join(out.getvalue().split())


def test_the_table_by_arithmetic(found: GuardLevels) -> None:
    table = guard_table(found)
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
            "true@10": "0.800",
            "true gain": "–",
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
            "true@10": "0.848",
            "true gain": f"+{100 * 0.048 / 0.8:.1f} %",
        },
    ]
    assert [row[0] for row in table.rows] == ["logged", "shift 1", "shift 2", "unbounded"]


def test_without_a_truth_there_are_no_true_columns(found: GuardLevels) -> None:
    assert not any("true" in head for head in guard_table(unknown(found)).head)
    assert "truth" not in drawn(unknown(found))
    assert "truth" in drawn(found)


def unknown(found: GuardLevels) -> GuardLevels:
    """The same, of a log that is not simulated."""
    levels = [replace(each, value=replace(each.value, true=None, true_difference=None)) for each in found.levels]
    logged = replace(found.evaluation.policies[0], true=None)
    policies = [logged, *(level.value for level in levels)]
    return replace(found, levels=levels, evaluation=replace(found.evaluation, policies=policies))


def drawn(found: GuardLevels) -> str:
    """What the figure says, without its styles."""
    return re.sub(r"<style.*?</style>", "", svg(guard_plot(found)), flags=re.DOTALL)


def test_the_terminal_ends_with_the_recommendation(found: GuardLevels) -> None:
    text = shown(found)
    assert text.endswith(found.recommendation)
    assert "beware shift 2: hardly any placement was logged" in text
    assert "nothing was logged" not in text  # of another level
    assert "other first" in shown(found, 80)


def test_the_page(found: GuardLevels, tmp_path: Path) -> None:
    write_guard(found, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    parsed = Page()
    parsed.feed(text)
    assert {"table", "svg"} <= set(parsed.tags)
    assert all(source.startswith("data:") for source in parsed.fetched)
    said = unescape(text)
    assert f"L{found.recommendation[1:]}." in said
    for words in ("No item moves more than so many places", "nothing was logged", "A diamond is the truth", "shift 1"):
        assert words in said
    write_guard(replace(found, kind="blend"), tmp_path / "page.html")
    assert "sorted by the mean of their logged rank" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("base", [0.0, nan])
def test_what_has_no_percents_or_no_interval(found: GuardLevels, tmp_path: Path, base: float) -> None:
    levels = [replace(each, value=without_intervals(each.value)) for each in found.levels]
    policies = [policy("logged", base), *(level.value for level in levels)]
    odd = unknown(replace(found, levels=levels, evaluation=replace(found.evaluation, policies=policies)))
    assert dict(zip(guard_table(odd).head, guard_table(odd).rows[2], strict=True))["vs logged"] == "+0.040"
    assert "nan" not in shown(odd) + drawn(odd)
    assert odd.recommended is None
    write_guard(odd, tmp_path / "page.html")


def test_tables_need_no_torch() -> None:
    script = "import sys, urank.report.guard_report; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
