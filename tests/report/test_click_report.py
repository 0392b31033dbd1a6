"""The report of a click model: the terminal, the self-contained page and its plots."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pages import Page
from urank.evaluation.click_quality import Quality, quality, reliability
from urank.report.click_report import (
    FitReport,
    fit_tables,
    loss_curves,
    print_fit,
    rates_by_position,
    reliability_plot,
    write_fit,
)
from urank.report.style import svg

K = 5


@pytest.fixture(scope="module")
def report() -> FitReport:
    """Clicks at positions 1 to 4, none shown at 5, and four contenders."""
    rng = np.random.default_rng(0)
    rows = 4000
    position = rng.integers(1, K, rows)
    truth = rng.uniform(0.1, 0.6, rows) / position
    click = rng.random(rows) < truth
    said = {
        "<b>monotone</b>": np.log(truth) * 1.05,
        "pbm": np.log(0.35 / position),
        "constant": np.full(rows, np.log(click.mean())),
        "oracle": np.log(truth),
    }
    qualities = {name: quality(log_p, position, click, positions=K) for name, log_p in said.items()}
    return FitReport(
        name="<b>monotone</b>",
        settings={"log": "[red]prepared[/]", "backbone": "mlp"},
        qualities={"valid": qualities, "test": qualities},
        history=[{"round": i, "train_loss": 0.5 / i, "valid_loss": 0.4 + 0.01 * abs(i - 3)} for i in range(1, 7)],
        reliability={name: reliability(np.exp(said[name]), click) for name in ("<b>monotone</b>", "pbm")},
        truth={"mean_absolute_error": 0.0123, "oracle_share": 0.987, "by_position": [0.01, 0.02, 0.03, 0.04, 0.05]},
    )


def shown(report: FitReport, width: int = 80) -> str:
    out = StringIO()
    print_fit(report, Console(file=out, width=width))
    return out.getvalue()


def test_terminal_shows_every_figure_whole_at_80_columns(report: FitReport) -> None:
    text = shown(report)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for each in report.qualities["test"].values():
        assert f"{each.log_loss:.4f}" in text
        assert f"{each.auc:.4f}" in text
    for each in report.quality.by_position[:4]:
        assert f"{each.observed:.2%}" in text
    assert "[red]prepared[/]" in text
    assert "best 3 (valid loss 0.4000)" in text
    assert "0.0123" in text


def test_terminal_holds_large_counts_and_bars(report: FitReport) -> None:
    large = replace(report.quality, by_position=tuple(replace(q, rows=98_765_432) for q in report.quality.by_position))
    text = shown(replace(report, qualities={"test": {report.name: large}}, truth=None))
    assert "…" not in text
    assert "98,765,432" in text
    assert "████" in text


def test_terminal_ends_with_the_figure_that_counts(report: FitReport) -> None:
    mine, others = report.quality.log_loss, report.qualities["test"]
    assert report.sentence == (
        f"<b>monotone</b>: log loss {mine:.4f} on the test split"
        f", {1 - mine / others['pbm'].log_loss:.2%} below pbm"
        f", {1 - mine / others['constant'].log_loss:.2%} below the constant"
        f", {mine / others['oracle'].log_loss - 1:.2%} above the oracle"
    )
    assert shown(report, width=200).strip().endswith(report.sentence)


def test_tables_are_complete(report: FitReport) -> None:
    tables = list(fit_tables(report))
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.head)}
    assert [row[0] for row in tables[-1].rows] == ["oracle", "<b>monotone</b>", "pbm", "constant"]
    assert list(tables[1].rows[4]) == ["5", "0", "–", "–", "–", "–", "–", "0.0500"]


def test_report_of_little_is_short(report: FitReport, tmp_path: Path) -> None:
    nan = float("nan")
    nothing = Quality(0, 0, nan, nan, nan, nan, nan, (Quality(0, 0, nan, nan, nan, nan, nan),))
    little = FitReport("pbm", {}, {"valid": {"pbm": nothing, "constant": nothing}})
    assert len(list(fit_tables(little))) == 3
    assert "not comparable with the constant" in shown(little)
    write_fit(little, tmp_path / "little.html")
    json.dumps(little.to_dict(), allow_nan=False)


def test_page_is_self_contained_and_escaped(report: FitReport, tmp_path: Path) -> None:
    path = tmp_path / "fit.html"
    write_fit(report, path)
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("figcaption") == 3
    assert not {"script", "link", "b", "img"} & set(page.tags)
    assert page.fetched == []
    assert not re.search(r"url\((?!#)", text)
    assert "&lt;b&gt;monotone&lt;/b&gt;" in text
    write_fit(report, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


def test_report_is_json(report: FitReport) -> None:
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["qualities"]["test"]["pbm"]["log_loss"] == report.qualities["test"]["pbm"].log_loss
    assert plain["qualities"]["test"]["pbm"]["by_position"][4]["auc"] is None
    assert plain["reliability"]["pbm"]["count"] == report.reliability["pbm"].count
    assert plain["history"][2] == {"round": 3, "train_loss": 0.5 / 3, "valid_loss": 0.4}


def test_figures_are_the_same_every_time(report: FitReport) -> None:
    for draw in (
        lambda: loss_curves(report.history),
        lambda: reliability_plot(report.reliability),
        lambda: rates_by_position(report.qualities["test"]),
    ):
        assert svg(draw()) == svg(draw())


def test_rounds_without_a_validation_loss_are_drawn(report: FitReport) -> None:
    figure = loss_curves([{"round": 1, "train_loss": 0.5}, {"round": 2, "train_loss": 0.4}])
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["train"]
    assert "rounds" not in dict(row[:2] for row in next(fit_tables(replace(report, history=()))).rows)


def test_report_without_its_own_model_is_refused(report: FitReport) -> None:
    with pytest.raises(ValueError, match="'deep' for every split; got none for 'valid'"):
        replace(report, name="deep")
    with pytest.raises(ValueError, match="at least one split; got none"):
        replace(report, qualities={})
