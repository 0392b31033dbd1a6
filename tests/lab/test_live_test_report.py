"""The report of a simulated live test: its parts beside the truth, in the terminal and as a page."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from pages import Page
from report.analyses import DAYS, analysis, result
from urank.lab.experiment import AbTestConfig
from urank.lab.live_test import (
    CONTROL,
    TREATMENT,
    AbTestRun,
    JudgedTest,
    Learned,
    print_judged,
    write_judged,
)


@pytest.fixture
def judged(tmp_path: Path) -> JudgedTest:
    """A test with an A/A test before it, and none after."""
    found = analysis()
    alone = replace(found, start=DAYS[0], end=DAYS[0], results=[replace(result(0, 0.02, 0.05), cuped=None)])
    truth = pl.DataFrame({"day": [1, 2, 3, 4], "lift": [0.0, 0.1, 0.12, 0.14]})
    truth = truth.with_columns(pl.lit(1.0).alias(CONTROL), (1 + pl.col("lift")).alias(TREATMENT))
    learned = [Learned(2, "B", "network on monotone", 12_345, 6.78)]
    return JudgedTest(AbTestRun(tmp_path, AbTestConfig(), learned, truth), found, alone, None)


def test_parts_of_a_simulated_test(judged: JudgedTest, tmp_path: Path) -> None:
    out = StringIO()
    print_judged(replace(judged, ab=replace(judged.ab, warnings=["Users got lost."])), Console(file=out, width=140))
    said = " ".join(out.getvalue().split())
    mean = 100 * (0.1 + 0.12 + 0.14) / 3
    assert f"A/B CTR +10.0 % +6.0 to +14.0 % no +{mean:.1f} % yes 2020-05-07 – 2020-05-09" in said
    assert "A/A before CTR +2.0 % −2.0 to +6.0 % yes 0 % yes" in said
    assert "B 2 network on monotone 12,345 6.8" in said
    assert "The true lift was 12.0 %" in said
    assert "beware Users got lost." in said
    write_judged(judged, tmp_path / "page.html")
    said = (tmp_path / "page.html").read_text()
    parsed = Page()
    parsed.feed(said)
    assert parsed.tags.count("figcaption") == 3
    for words in ("A/A, A/B<", "19.2 %", "Diamonds", "network on monotone"):
        assert words in said
