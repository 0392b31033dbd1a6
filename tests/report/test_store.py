"""The report of the app store: both scenarios with the truth beside them, the terminal, the page and its plots."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from rich.console import Console

from pages import Page
from urank.lab.appstore_report import (
    SCENARIOS,
    agreement_plot,
    compact_scenario_table,
    downloads_plot,
    published_table,
    scenario_table,
)
from urank.lab.paper_report import (
    KINDS,
    print_reproduction,
    reproduction_sections,
    reproduction_sentence,
    write_reproduction,
)
from urank.lab.results import METRICS, STORE_METRICS, Claim, Kind, Reproduction, Row, StoreRow
from urank.report.style import svg
from urank.report.tables import Table

ODD = ["<b>a & b</b>", "$10_$20", "_hidden", "[red]x[/]", ":smile:", "模型"]
CLAIMS = [
    Claim("U-rank is the best on #click", True, "1.475 against 1.420"),
    Claim("the debiased #click orders the methods as the truth does", False, "Kendall 0.45"),
]
SHARES = dict(zip(STORE_METRICS, (1.0, 0.5, 0.75, 0.9, 2.0, 0.8, 1.5, 1.75), strict=True))
"""Of each metric, what it is when #click is 1."""


def row(key: str, clicks: float, kind: Kind = "baseline", true: float | None = None, **fields: Any) -> StoreRow:
    """A row whose metrics all follow from its downloads."""

    def all_of(one: float) -> dict[str, float]:
        return {metric: one * share for metric, share in SHARES.items()}

    given = {"mean": all_of(clicks), "true": all_of(clicks if true is None else true)}
    spread = {"deviation": dict.fromkeys(STORE_METRICS, 0.02), "true_deviation": dict.fromkeys(STORE_METRICS, 0.01)}
    return StoreRow(**{"key": key, "name": key, "kind": kind, **given, **spread, **fields})


URANK = row(
    "store-urank",
    1.475,
    "ours",
    1.452,
    name="U-rank",
    p_value={"#click": 1e-9, "#click@3": 0.2, "Revenue": 0.04},
    true_p_value={"#click": 1e-20, "#click@1": 0.01},
)
DEEPFM = row("store-deepfm", 1.42, true=1.4, name="DeepFM")
ROWS = [
    row("store-logged", 1.38, true=1.39, name="as logged"),
    DEEPFM,
    URANK,
    row("store-ctr1-truth", 1.6, "oracle", name="by the true CTR at 1"),
    row("store-km", 1.7, "oracle", name="KM"),
]


def reproduction(**parts: Any) -> Reproduction:
    return Reproduction(**{"what": ["table3"], "data": "a made store", "seeds": 3, "visits": 6000, **parts})


@pytest.fixture
def whole() -> Reproduction:
    return reproduction(store=ROWS, store_claims=CLAIMS, settings="[store]\n", versions={"torch": "2.6.0"})


def column(table: Table, head: str) -> dict[str, str]:
    """The cells of a column by those of the first."""
    return {row[0]: str(row[list(table.head).index(head)]) for row in table.rows}


def shown(found: Reproduction, width: int = 80) -> str:
    out = StringIO()
    print_reproduction(found, Console(file=out, width=width))
    return out.getvalue()


def page(found: Reproduction, path: Path) -> str:
    write_reproduction(found, path)
    return path.read_text()


def titles(found: Reproduction) -> list[str]:
    return [section.title for section in reproduction_sections(found)]


# --- tables --------------------------------------------------------------------------------------------------------


def test_the_truth_stands_beside_the_estimate() -> None:
    table = scenario_table(ROWS, "#click")
    estimates, truths = ["#click", "#click@1", "#click@3", "#click@5"], ["true", "true@1", "true@3", "true@5"]
    assert list(table.head) == ["method", *(each for both in zip(estimates, truths, strict=True) for each in both)]
    assert column(table, "#click") == {
        "as logged": "1.380 ± 0.020",
        "DeepFM": "1.420 ± 0.020",
        "U-rank": "<strong>1.475*</strong> ± 0.020",
        "<em>by the true CTR at 1</em>": "<em>1.600 ± 0.020</em>",
        "<em>KM</em>": "<em>1.700 ± 0.020</em>",
    }
    assert column(table, "true") == {
        "as logged": "1.390",
        "DeepFM": "1.400",
        "U-rank": "<strong>1.452*</strong>",
        "<em>by the true CTR at 1</em>": "<em>1.600</em>",
        "<em>KM</em>": "<em>1.700</em>",
    }
    # A star of its own for each: the estimate has none at 1, the truth none at 3.
    assert column(table, "#click@1")["U-rank"] == f"<strong>{1.475 / 2:.3f}</strong> ± 0.020"
    assert column(table, "true@1")["U-rank"] == f"<strong>{1.452 / 2:.3f}*</strong>"
    assert column(table, "true@3")["U-rank"] == f"<strong>{1.452 * 0.75:.3f}</strong>"


def test_the_second_scenario_has_its_own_figures() -> None:
    table = scenario_table(ROWS, "Revenue")
    assert list(table.head)[:4] == ["method", "Revenue", "true", "Revenue@1"]
    assert column(table, "Revenue")["U-rank"] == f"<strong>{2 * 1.475:.3f}*</strong> ± 0.020"
    assert column(table, "true@5")["DeepFM"] == f"{1.75 * 1.4:.3f}"


def test_terminal_tables_have_short_heads() -> None:
    for scenario in SCENARIOS:
        table = compact_scenario_table(ROWS, scenario)
        assert list(table.head) == ["method", scenario, "@1", "@3", "@5", "true", "true@1", "true@3", "true@5"]
    table = compact_scenario_table(ROWS, "#click")
    assert column(table, "#click") == {
        "as logged": "1.380",
        "DeepFM": "1.420",
        "U-rank": "1.475*",
        "by the true CTR at 1 †": "1.600",
        "KM †": "1.700",
    }
    assert column(table, "true@1")["U-rank"] == f"{1.452 / 2:.3f}*"


def test_the_papers_figures_have_a_table_of_their_own(tmp_path: Path) -> None:
    assert published_table(ROWS) is None
    published = {"#click": 1.79, "Revenue@5": 2.881}
    rows = [ROWS[0], replace(DEEPFM, published=published), *ROWS[2:]]
    table = published_table(rows)
    assert table is not None
    assert list(table.head) == ["method", *(f"{metric} (paper)" for metric in STORE_METRICS)]
    assert [list(cells) for cells in table.rows] == [["DeepFM", "1.790", *["–"] * 6, "2.881"]]
    assert "which is of another store" in page(reproduction(store=rows), tmp_path / "with.html")
    assert "(paper)" not in page(reproduction(store=ROWS), tmp_path / "without.html")


def test_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    lost = row("lost", nan, p_value=dict.fromkeys(STORE_METRICS, 0.01))
    bare = replace(DEEPFM, name="bare", mean={}, deviation={}, true={}, true_deviation={})
    found = reproduction(store=[lost, bare, URANK])
    assert column(scenario_table(found.store, "#click"), "true")["bare"] == "–"
    assert set(column(compact_scenario_table(found.store, "Revenue"), "Revenue").values()) == {"–", "2.950*"}
    assert not re.search(r"\bnan\b", page(found, tmp_path / "page.html"))
    assert "nan" not in shown(found)
    assert reproduction_sentence(found) == "U-rank brings 1.475 downloads a visit"


# --- the sentence --------------------------------------------------------------------------------------------------


def test_the_lead_is_arithmetic_of_the_rows(whole: Reproduction) -> None:
    gain, true = 100 * (1.475 / 1.42 - 1), 100 * (1.452 / 1.4 - 1)
    assert reproduction_sentence(whole) == (
        f"U-rank brings 1.475 downloads a visit, {gain:.1f} % more than the best baseline (DeepFM: 1.420), p = 1e-09; "
        f"truly +{true:.1f} %; 1 of 2 claims of Section 6.1 holds on this data"
    )


def test_the_lead_in_all_its_turns() -> None:
    def lead(*rows: StoreRow) -> str:
        return reproduction_sentence(reproduction(store=rows))

    # The best baseline by the truth is another, and better.
    other = row("store-dla", 1.3, true=1.5, name="DLA")
    assert lead(DEEPFM, other, URANK).endswith(
        f"p = 1e-09; truly −{100 * (1 - 1.452 / 1.5):.1f} % against DLA, the best in truth"
    )
    chance = replace(URANK, p_value={"#click": 0.31})
    assert "which may be chance (p = 0.31); truly +" in lead(DEEPFM, chance)
    less = row("store-urank", 1.3, "ours", true=1.47, name="U-rank")
    told = "U-rank brings 1.300 downloads a visit, 8.5 % less than the best baseline (DeepFM: 1.420); truly +5.0 %"
    assert lead(DEEPFM, less) == told
    assert lead(URANK, *ROWS[3:]) == "U-rank brings 1.475 downloads a visit"
    assert lead(*ROWS[:2]) == "the best baseline, DeepFM, brings 1.420 downloads a visit"
    assert lead(*ROWS[3:]) == "by the true CTR at 1 brings 1.600 downloads a visit, KM 1.700"
    matched = [row("store-match", 1.5, "ours", true=1.41), row("store-match-cutoff", 1.49, "ours", true=1.6)]
    assert lead(DEEPFM, *matched).startswith("store-match brings 1.500")  # when there is no U-rank, the best of ours …
    assert lead(DEEPFM, *matched).endswith(f"; truly +{100 * (1.41 / 1.4 - 1):.2f} %")  # … also in truth


def test_the_lead_tells_of_both_tables() -> None:
    mean = dict.fromkeys(METRICS, 0.8)
    table = [Row("urank", "U-rank", "ours", mean, {}), Row("dla", "DLA", "baseline", dict.fromkeys(METRICS, 0.75), {})]
    found = reproduction(rows=table, claims=CLAIMS[:1], queries=500, store=ROWS, store_claims=CLAIMS)
    sentence = reproduction_sentence(found)
    assert sentence.startswith("U-rank earns 0.800 clicks a query, 6.7 % more than the best baseline (DLA: 0.750); ")
    assert "; U-rank brings 1.475 downloads a visit, " in sentence
    assert sentence.endswith("; 1 of 1 claim of Section 5.4 and 1 of 2 of Section 6.1 hold on this data")
    assert (
        reproduction_sections(found)[0]
        .paragraphs[0]
        .endswith("3 seeds, 500 test queries and 6,000 test visits in all.")
    )


# --- the terminal --------------------------------------------------------------------------------------------------


def test_terminal_shows_what_matters(whole: Reproduction) -> None:
    text = shown(whole)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    estimates = [f"{1.475 * SHARES[metric]:.3f}" for metric in STORE_METRICS[:4]]
    truths = [f"{1.452 * SHARES[metric]:.3f}" for metric in STORE_METRICS[:4]]
    cells = [f"{estimates[0]}*", *estimates[1:], f"{truths[0]}*", f"{truths[1]}*", *truths[2:]]
    assert re.search("U-rank +" + " +".join(map(re.escape, cells)), text)
    assert re.search(r"^method +Revenue +@1 +@3 +@5 +true +true@1 +true@3 +true@5$", text, flags=re.MULTILINE)
    assert "† knows the truth, not compared; true: what the order truly brings" in " ".join(text.split())
    assert re.search(r"^yes +U-rank is the best on #click: 1\.475 against 1\.420", text, flags=re.MULTILINE)
    assert re.search(r"^no +the debiased #click orders", text, flags=re.MULTILINE)
    assert " ".join(text.split()).endswith(reproduction_sentence(whole))


@pytest.mark.parametrize(
    ("ours", "rows", "colour"),
    [
        (URANK, (), "32"),
        (replace(URANK, p_value={}), (), "33"),
        (row("store-urank", 1.3, "ours"), (), "31"),
        (None, (), ""),
        (
            URANK,
            [Row("dla", "DLA", "baseline", {"#Click": 0.9}, {}), Row("urank", "U", "ours", {"#Click": 0.8}, {})],
            "31",
        ),
    ],
)
def test_terminal_colours_the_verdict(ours: StoreRow | None, rows: list[Row], colour: str) -> None:
    """As the worst of what it tells."""
    out = StringIO()
    found = reproduction(store=[DEEPFM, *([ours] if ours is not None else [])], rows=rows)
    print_reproduction(found, Console(file=out, width=300, force_terminal=True, color_system="standard"))
    last = out.getvalue().splitlines()[-1]
    assert last.startswith(f"\x1b[1;{colour}m" if colour else "\x1b[1m")


@pytest.mark.parametrize("width", [40, 200])
def test_names_in_the_terminal_are_shown_as_they_are(width: int) -> None:
    text = shown(reproduction(store=[row(name, 0.8) for name in ODD]), width)
    assert max(map(len, text.splitlines())) <= width
    for name in ODD:
        assert all(word in text for word in name.split())


# --- the page ------------------------------------------------------------------------------------------------------


def test_page_is_self_contained_and_escaped(whole: Reproduction, tmp_path: Path) -> None:
    odd = [row(name, 1.3, published={"#click": 1.5}) for name in ODD]
    hostile = replace(whole, store=[*ROWS, *odd, row("<u>oracle</u>", 1.9, "oracle")], data="<u>data</u>")
    text = page(hostile, tmp_path / "page.html")
    seen = Page()
    seen.feed(text)
    assert seen.tags.count("svg") == seen.tags.count("figcaption") == 2
    assert not {"script", "link", "b", "u", "i", "img"} & set(seen.tags)
    assert seen.fetched == []
    for name in ODD:
        assert text.count(f"<td>{escape(name)}</td>") == 3  # two scenarios and the paper's
    assert f"<td><em>{escape('<u>oracle</u>')}</em></td>" in text
    assert escape(reproduction_sentence(hostile)) in text
    assert page(hostile, tmp_path / "again.html") == text


def test_page_tells_everything_in_order(whole: Reproduction, tmp_path: Path) -> None:
    assert titles(whole) == [
        "What was run",
        "Table 3: an app store",
        "The claims of Section 6.1",
        "The debiased estimate and the truth",
        "Settings",
    ]
    text = page(whole, tmp_path / "page.html")
    for part in (
        "table3, on a made store: 3 seeds, 6,000 test visits in all.",
        "± is the standard deviation over the 3 seeds",
        "compares the visits of all seeds",
        "Holm&#39;s method",
        "Rows in italics are oracles",
        "#click@1 counts position 1 alone",
        "The oracles show it",
        "whiskers are one standard deviation over seeds",
        "The diamonds are the true downloads",
        "On the dotted line the two are equal",
        "are not the paper&#39;s own",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("parts", "sections"),
    [
        ({}, []),
        ({"store": ROWS}, ["Table 3: an app store", "The debiased estimate and the truth"]),
        ({"store": [row("lost", nan)]}, ["Table 3: an app store"]),
        ({"store_claims": CLAIMS}, ["The claims of Section 6.1"]),
    ],
)
def test_empty_parts_leave_no_section(parts: dict[str, Any], sections: list[str]) -> None:
    assert titles(reproduction(**parts)) == ["What was run", *sections]


def test_one_seed_and_no_oracles_are_told_so(tmp_path: Path) -> None:
    alone = [replace(each, deviation={}, true_deviation={}) for each in ROWS[:3]]
    text = page(reproduction(store=alone, seeds=1), tmp_path / "page.html")
    assert "±" not in text
    assert "one seed, hence no whiskers" in text
    assert "The oracles show it" not in text


def test_training_times_are_told(tmp_path: Path) -> None:
    timed = reproduction(store=[replace(DEEPFM, seconds=12.34)], versions={"torch": "2.6"})
    (settings,) = [section for section in reproduction_sections(timed) if section.title == "Settings"]
    assert [list(table.head) for table in settings.tables] == [
        ["library", "version"],
        ["method of Table 3", "training, s a seed"],
    ]
    assert column(settings.tables[1], "training, s a seed") == {"DeepFM": "12.3"}


# --- figures -------------------------------------------------------------------------------------------------------


def test_bars_are_debiased_and_diamonds_true() -> None:
    axes = downloads_plot(ROWS).axes[0]
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == [1.38, 1.42, 1.475, 1.6, 1.7]
    assert [text.get_text() for text in axes.texts] == ["1.380", "1.420", "1.475*", "1.600", "1.700"]
    diamonds = {line.get_ydata()[0]: line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "D"}
    assert diamonds == {0: 1.39, 1: 1.4, 2: 1.452, 3: 1.6, 4: 1.7}
    # What is written stands to the right of whisker and diamond.
    assert [text.xy[0] for text in axes.texts] == pytest.approx([1.38 + 0.02, 1.42 + 0.02, 1.475 + 0.02, 1.62, 1.72])
    far = downloads_plot([row("a", 1.0, true=1.5)]).axes[0]
    assert far.texts[0].xy[0] == 1.5
    assert far.get_xlim()[1] > 1.5
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["baseline", "oracle", "ours", "best baseline", "true"]


def test_points_are_estimates_over_truths() -> None:
    figure = agreement_plot(ROWS)
    assert [axes.get_title("left") for axes in figure.axes] == ["downloads a visit (#click)", "revenue of a visit"]
    for metric, axes in zip(SCENARIOS, figure.axes, strict=True):
        points = [tuple(points.get_offsets()[0]) for points in axes.collections]
        assert points == [(each.true[metric], each.mean[metric]) for each in ROWS]
        colours = [to_hex(points.get_facecolor()[0]) for points in axes.collections]
        assert colours == [KINDS[each.kind] for each in ROWS]
        assert axes.get_xlim() == axes.get_ylim()
        (equal,) = axes.get_lines()
        assert equal.get_slope() == 1
        assert equal.get_xy1() == (pytest.approx(min(map(min, points))),) * 2
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [each.name for each in ROWS]


def test_points_that_are_not_known_are_left_out() -> None:
    svg(agreement_plot([row("lost", nan), replace(DEEPFM, true={})]))
    svg(downloads_plot([row("lost", nan, true=1.2), replace(DEEPFM, true={})]))
    one = agreement_plot([DEEPFM]).axes[0]
    assert one.get_xlim()[0] < 1.4 < 1.42 < one.get_xlim()[1]


def test_names_in_figures_are_shown_as_they_are() -> None:
    rows = [row(name, 0.8) for name in ODD]
    for draw in (lambda: downloads_plot(rows), lambda: agreement_plot(rows)):
        text = re.sub(r"<style.*?</style>", "", svg(draw()), flags=re.DOTALL)
        for name in ODD:
            assert escape(name, quote=False) in text
        assert svg(draw()) == svg(draw())
