"""The report of a reproduction: figures by arithmetic, stars and bold where they are due, the terminal and the page."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html import escape
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from rich.console import Console

from pages import Page
from urank.lab.paper_report import (
    architecture_table,
    claim_table,
    clicks_plot,
    compact_table,
    lists_plot,
    performance_table,
    positions_plot,
    print_reproduction,
    reproduction_sections,
    reproduction_sentence,
    write_reproduction,
)
from urank.lab.results import METRICS, AucRow, Claim, Kind, ListExample, PositionCurve, Reproduction, Row
from urank.report.style import svg
from urank.report.tables import Table

ODD = ["<b>a & b</b>", "$10_$20", "_hidden", "[red]x[/]", ":smile:", "模型"]
CLAIMS = [
    Claim("U-rank earns the most clicks.", True, "0.903 against 0.836"),
    Claim("CPBM is the second best", False, "0.75 < 0.82"),
    Claim("Randomization does not do well", None, ""),
]


def row(key: str, clicks: float, kind: Kind = "baseline", deviation: float = 0.004, **fields: Any) -> Row:
    """A row whose metrics all follow from its clicks."""
    means = dict(zip(METRICS, (clicks - 0.3, clicks - 0.2, clicks, clicks / 10), strict=True))
    deviations = dict.fromkeys(METRICS, deviation)
    return Row(**{"key": key, "name": key, "kind": kind, "mean": means, "deviation": deviations, **fields})


URANK = row("urank", 0.903, "ours", name="U-rank", p_value={"MAP": 1.0, "nDCG@10": 0.3, "#Click": 1e-9, "CTR": 0.049})
ROWS = [row("svm", 0.834), row("lambda", 0.836, name="LambdaRank, CPBM"), URANK, row("km", 0.976, "oracle", name="KM")]
ARCHITECTURES = [
    AucRow("A1", 0.695, 0.684, 0.687, 0.903, 0.0915, {"train": 0.001, "CTR": 0.0004}),
    AucRow("A2", 0.701, nan, 0.692, 0.852, 0.0847, {"train": nan}),
]


def curve(name: str, deviation: float = 0.01) -> PositionCurve:
    return PositionCurve(name, np.array([0.5, 0.3, 0.2]), np.full(3, deviation))


def example(items: int = 4, methods: tuple[str, ...] = ("U-rank", "KM")) -> ListExample:
    """Item i is clicked half as often at each further position; the methods put the items in opposite orders."""
    table = 0.9 * 0.5 ** np.arange(3) * np.linspace(1, 0.2, items)[:, None]
    position = np.arange(1, items + 1)
    orders = [position, position[::-1]]
    return ListExample(
        query="q<1>",
        items=[f"document {i}" for i in range(items)],
        label=np.arange(items) % 5 / 1.0,
        table=table,
        positions={method: orders[number % 2] for number, method in enumerate(methods)},
        clicks=dict(zip(methods, (1.25, 1.5), strict=False)),
        ndcg=dict(zip(methods, (0.75, nan), strict=False)),
    )


def reproduction(**parts: Any) -> Reproduction:
    return Reproduction(**{"what": ["table1"], "data": "made documents", "seeds": 3, "queries": 6000, **parts})


@pytest.fixture
def whole() -> Reproduction:
    """Everything that can be asked for."""
    return reproduction(
        rows=ROWS,
        claims=CLAIMS,
        architectures=ARCHITECTURES,
        architecture_claims=CLAIMS[:1],
        curves=[curve("U-rank"), curve("KM")],
        curve_claims=CLAIMS[1:2],
        example=example(),
        settings='[log]\nname = "<i>x</i>"\n',
        versions={"torch": "2.6.0"},
        seconds=1234.4,
    )


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


def drawn(text: str) -> str:
    """What a figure says, without its styles."""
    return re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)


def test_stars_bold_and_italics_only_where_due() -> None:
    table = performance_table(ROWS)
    assert list(table.head) == ["method", *METRICS]
    assert column(table, "#Click") == {
        "svm": "0.834 ± 0.004",
        "LambdaRank, CPBM": "0.836 ± 0.004",
        "U-rank": "<strong>0.903*</strong> ± 0.004",
        "<em>KM</em>": "<em>0.976 ± 0.004</em>",
    }
    assert column(table, "MAP")["U-rank"] == f"<strong>{0.903 - 0.3:.3f}</strong> ± 0.004"
    assert column(table, "CTR")["U-rank"] == f"<strong>{0.903 / 10:.4f}*</strong> ± 0.0040"


def test_the_best_of_each_metric_may_be_a_baseline() -> None:
    better = replace(ROWS[0], mean={**ROWS[0].mean, "MAP": 0.7})
    found = column(performance_table([better, *ROWS[1:]]), "MAP")
    assert [name for name, cell in found.items() if "<strong>" in cell] == ["svm"]


def test_rows_that_share_the_best_figure_share_the_bold() -> None:
    found = column(performance_table([row("a", 0.8), row("b", 0.8), row("c", 0.7)]), "#Click")
    assert [name for name, cell in found.items() if "<strong>" in cell] == ["a", "b"]


def test_an_oracle_alone_is_never_bold() -> None:
    assert "<strong>" not in "".join(map(str, performance_table([ROWS[-1]]).rows[0]))


def test_no_deviation_with_one_seed(tmp_path: Path) -> None:
    rows = [row("svm", 0.834, deviation=nan), row("urank", 0.903, "ours", deviation=nan)]
    assert column(performance_table(rows), "#Click") == {"svm": "0.834", "urank": "<strong>0.903</strong>"}
    curves = [curve("U-rank", deviation=nan)]
    text = page(reproduction(rows=rows, seeds=1, curves=curves), tmp_path / "page.html")
    assert "±" not in text
    assert "standard deviation" not in text
    assert "1 seed, 6,000 test queries in all" in text


def test_published_figures_stand_beside_ours(tmp_path: Path) -> None:
    rows = [replace(ROWS[0], published={"#Click": 0.831, "CTR": 0.0827}), *ROWS[1:]]
    table = performance_table(rows)
    assert list(table.head) == ["method", "MAP", "nDCG@10", "#Click", "#Click (paper)", "CTR", "CTR (paper)"]
    assert list(column(table, "#Click (paper)").values()) == ["0.831", "–", "–", "<em>–</em>"]
    assert column(table, "CTR (paper)")["svm"] == "0.0827"
    assert "what the paper&#39;s table says" in page(reproduction(rows=rows), tmp_path / "with.html")
    assert "(paper)" not in page(reproduction(rows=ROWS), tmp_path / "without.html")


def test_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    lost = row("lost", nan, p_value=dict.fromkeys(METRICS, 0.01))
    bare = replace(ROWS[0], name="bare", mean={}, deviation={})
    rows = [lost, bare, URANK]
    assert set(column(performance_table(rows), "#Click").values()) == {"–", "<strong>0.903*</strong> ± 0.004"}
    assert column(compact_table(rows), "CTR") == {"lost": "–", "bare": "–", "U-rank": "0.0903*"}
    text = page(reproduction(rows=rows), tmp_path / "page.html")
    assert not re.search(r"\bnan\b", text)
    assert "nan" not in shown(reproduction(rows=rows))
    assert reproduction_sentence(reproduction(rows=rows)) == "U-rank earns 0.903 clicks a query"


def test_architectures_by_arithmetic() -> None:
    table = architecture_table(ARCHITECTURES)
    assert list(table.head) == ["architecture", "AUC, train", "AUC, test", "AUC, validation", "#Click", "CTR"]
    assert column(table, "AUC, train") == {"A1": "0.695 ± 0.001", "A2": "0.701"}
    assert column(table, "AUC, test") == {"A1": "0.684", "A2": "–"}
    assert column(table, "CTR") == {"A1": "0.0915 ± 0.0004", "A2": "0.0847"}
    published = architecture_table(
        [replace(ARCHITECTURES[0], published={"valid": 0.687, "#Click": 0.903}), ARCHITECTURES[1]]
    )
    assert column(published, "AUC, validation (paper)") == {"A1": "0.687", "A2": "–"}
    assert column(published, "#Click (paper)") == {"A1": "0.903", "A2": "–"}
    assert len(published.head) == len(table.head) + 2


def test_claims_hold_or_not() -> None:
    assert list(column(claim_table(CLAIMS), "holds").values()) == ["yes", "no", "cannot be told"]
    assert list(column(claim_table(CLAIMS), "figures").values()) == ["0.903 against 0.836", "0.75 < 0.82", "–"]


def test_the_lead_is_arithmetic_of_the_rows() -> None:
    gain = 100 * (0.903 - 0.836) / 0.836
    assert reproduction_sentence(reproduction(rows=ROWS, claims=CLAIMS)) == (
        f"U-rank earns 0.903 clicks a query, {gain:.1f} % more than the best baseline (LambdaRank, CPBM: 0.836), "
        "p = 1e-09; 1 of 3 claims of Section 5.4 holds on this data (1 cannot be told)"
    )


@pytest.mark.parametrize(
    ("clicks", "p_value", "told"),
    [
        (0.903, 1e-20, "8.0 % more than the best baseline (LambdaRank, CPBM: 0.836), p < 1e-16"),
        (0.840, 0.31, "0.48 % more than the best baseline (LambdaRank, CPBM: 0.836), which may be chance (p = 0.31)"),
        (0.840, None, "0.48 % more than the best baseline (LambdaRank, CPBM: 0.836)"),
        (0.840, nan, "0.48 % more than the best baseline (LambdaRank, CPBM: 0.836)"),
        (0.800, 1.0, "4.3 % less than the best baseline (LambdaRank, CPBM: 0.836)"),
        (0.836, 1.0, "just as the best baseline (LambdaRank, CPBM: 0.836) does"),
    ],
)
def test_the_lead_in_all_its_turns(clicks: float, p_value: float | None, told: str) -> None:
    ours = row("urank", clicks, "ours", name="U-rank", p_value={} if p_value is None else {"#Click": p_value})
    sentence = reproduction_sentence(reproduction(rows=[*ROWS[:2], ours]))
    assert sentence == f"U-rank earns {clicks:.3f} clicks a query, {told}"


def test_the_lead_tells_of_what_there_is() -> None:
    def lead(**parts: Any) -> str:
        return reproduction_sentence(reproduction(**parts))

    other = [row("a", 0.81, "ours"), row("b", 0.82, "ours")]
    assert lead(rows=other) == "b earns 0.820 clicks a query"
    assert lead(rows=[*other, row("urank", 0.7, "ours")]) == "urank earns 0.700 clicks a query"
    assert lead(rows=ROWS[:2]) == "the best baseline, LambdaRank, CPBM, earns 0.836 clicks a query"
    assert lead(rows=ROWS[3:]) == "KM earns 0.976 clicks a query"
    assert lead(architectures=ARCHITECTURES) == "U-rank on A1 earns 0.903 clicks a query, U-rank on A2 0.852"
    assert lead(curves=[curve("KM")]) == f"KM earns {0.5 + 0.3 + 0.2:.3f} clicks a query"
    assert lead(example=example()) == "U-rank earns 1.250 clicks on query q<1>, KM 1.500"
    assert lead(claims=CLAIMS[:2]) == "1 of 2 claims of Section 5.4 holds on this data"
    assert lead(curve_claims=CLAIMS[1:2]) == "0 of 1 claim of Figure 4 holds on this data"
    assert lead() == "there are no figures to tell of"


def test_the_lead_counts_the_claims_of_every_part(whole: Reproduction) -> None:
    assert reproduction_sentence(whole).endswith(
        "; 1 of 3 claims of Section 5.4, 1 of 1 of Table 2 and 0 of 1 of Figure 4 hold on this data (1 cannot be told)"
    )


def test_terminal_shows_what_matters(whole: Reproduction) -> None:
    text = shown(whole)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for head in ("method", *METRICS, "architecture", "AUC, validation"):
        assert head in text
    assert re.search(r"U-rank +0\.603 +0\.703 +0\.903\* +0\.0903\*", text)
    assert re.search(r"KM † +0\.676", text)
    assert re.search(r"^yes +U-rank earns the most clicks: 0\.903 against 0\.836", text, flags=re.MULTILINE)
    assert re.search(r"^no +CPBM is the second best: 0\.75 < 0\.82", text, flags=re.MULTILINE)
    assert re.search(r"^\? +Randomization does not do well *$", text, flags=re.MULTILINE)
    assert " ".join(text.split()).endswith(reproduction_sentence(whole))


@pytest.mark.parametrize(
    ("ours", "colour"),
    [(URANK, "32"), (replace(URANK, p_value={}), "33"), (row("urank", 0.8, "ours"), "31"), (None, "")],
)
def test_terminal_colours_the_verdict(ours: Row | None, colour: str) -> None:
    out = StringIO()
    found = reproduction(rows=[*ROWS[:2], *([ours] if ours is not None else [])])
    print_reproduction(found, Console(file=out, width=200, force_terminal=True, color_system="standard"))
    last = out.getvalue().splitlines()[-1]
    assert last.startswith(f"\x1b[1;{colour}m" if colour else "\x1b[1m")


@pytest.mark.parametrize("width", [40, 200])
def test_names_in_the_terminal_are_shown_as_they_are(width: int) -> None:
    text = shown(reproduction(rows=[row(name, 0.8) for name in ODD], claims=[Claim(ODD[3], True, ODD[4])]), width)
    assert max(map(len, text.splitlines())) <= width
    for name in ODD:
        assert all(word in text for word in name.split())


def test_terminal_of_nothing_is_one_line() -> None:
    assert shown(reproduction()) == "there are no figures to tell of\n"


def test_page_is_self_contained_and_escaped(whole: Reproduction, tmp_path: Path) -> None:
    odd = [row(name, 0.81) for name in ODD]
    hostile = replace(
        whole,
        rows=[*whole.rows, *odd, row("oracle", 0.99, "oracle", name="<u>oracle</u>")],
        claims=[*CLAIMS, Claim("<u>x</u>", True, "<u>y</u>")],
        architectures=[replace(ARCHITECTURES[0], name="<u>A1</u>")],
        curves=[curve(name) for name in ODD],
        example=example(methods=("<u>m</u>", "$a$")),
        data="<u>data</u>.",
        versions={"<u>torch</u>": "<u>2</u>"},
    )
    text = page(hostile, tmp_path / "page.html")
    seen = Page()
    seen.feed(text)
    assert text.startswith("<!doctype html>")
    assert seen.tags.count("svg") == seen.tags.count("figcaption") == 3
    assert not {"script", "link", "b", "u", "i", "img", "nav"} & set(seen.tags)
    assert seen.fetched == []
    assert not re.search(r"url\((?!#)", text)
    assert not re.search(r"(src|href)=\"https?://", text)
    for name in ODD:
        assert f"<td>{escape(name)}</td>" in text
    assert f"<td><em>{escape('<u>oracle</u>')}</em></td>" in text
    assert f"<pre>{escape(whole.settings)}</pre>" in text.replace("&#34;", "&quot;")
    assert escape(reproduction_sentence(hostile)) in text
    assert page(hostile, tmp_path / "again.html") == text


def test_page_tells_everything_in_order(whole: Reproduction, tmp_path: Path) -> None:
    assert titles(whole) == [
        "What was run",
        "Table 1: overall performance",
        "The claims of Section 5.4",
        "Clicks by method",
        "Table 2: architectures of the click model",
        "Figure 4: clicks by position",
        "Figure 3: the lists of one query",
        "Settings",
    ]
    text = page(whole, tmp_path / "page.html")
    for part in (
        "± is the standard deviation over the 3 seeds",
        "Holm&#39;s method",
        "leave out queries without a relevant document",
        "its label is 1 or more",
        "whiskers are one standard deviation over seeds",
        "a band of one standard deviation over seeds",
        "an orange outline and a bold number",
        "All training together took 1,234 seconds",
        '<th scope="col" class="words">figures</th>',
    ):
        assert part in text


@pytest.mark.parametrize(
    ("parts", "sections"),
    [
        ({}, []),
        ({"rows": ROWS}, ["Table 1: overall performance", "Clicks by method"]),
        ({"rows": [row("lost", nan)]}, ["Table 1: overall performance"]),
        ({"claims": CLAIMS}, ["The claims of Section 5.4"]),
        ({"architectures": ARCHITECTURES}, ["Table 2: architectures of the click model"]),
        ({"curves": [curve("KM")]}, ["Figure 4: clicks by position"]),
        ({"example": example()}, ["Figure 3: the lists of one query"]),
        ({"example": example(methods=())}, []),
        ({"versions": {"torch": "2.6"}}, ["Settings"]),
    ],
)
def test_empty_parts_leave_no_section(parts: dict[str, Any], sections: list[str], tmp_path: Path) -> None:
    assert titles(reproduction(**parts)) == ["What was run", *sections]
    text = page(reproduction(**parts), tmp_path / "page.html")
    assert "<pre>" not in text
    assert ('class="note"' in text) == ("rows" in parts)


def test_bars_are_the_clicks_with_their_deviations() -> None:
    axes = clicks_plot(ROWS).axes[0]
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == [0.834, 0.836, 0.903, 0.976]
    assert [text.get_text() for text in axes.texts] == ["0.834", "0.836", "0.903*", "0.976"]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 3
    assert axes.patches[-1].get_hatch() is not None
    whisker = axes.collections[0].get_segments()[0][:, 0]
    assert whisker.tolist() == pytest.approx([0.834 - 0.004, 0.834 + 0.004])
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["baseline", "oracle", "ours", "best baseline"]


def test_curves_give_their_sums() -> None:
    axes = positions_plot([curve("U-rank"), curve("KM", deviation=nan)]).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == [f"U-rank: {0.5 + 0.3 + 0.2:.3f}", "KM: 1.000"]
    assert list(lines["KM: 1.000"].get_xdata()) == [1, 2, 3]
    assert len(axes.collections) == 1  # the band of the one that has a deviation


def test_lists_outline_where_items_are_put() -> None:
    figure = lists_plot(example())
    assert [axes.get_title("left") for axes in figure.axes[:2]] == [
        "U-rank: 1.250 clicks, nDCG 0.750",
        "KM: 1.500 clicks, nDCG –",
    ]
    for axes, places in zip(figure.axes[:2], ({0: 1, 1: 2, 2: 3}, {3: 1, 2: 2, 1: 3}), strict=True):
        outlined = {round(box.get_y() + 0.5): round(box.get_x() + 0.5) for box in axes.patches}
        assert outlined == places  # the fourth item has no place among three
        numbers = {(text.get_position()[1], text.get_position()[0]): text for text in axes.texts}
        assert len(numbers) == 4 * 3
        assert numbers[0, 1].get_text() == "0.90"
        assert {place for place, text in numbers.items() if text.get_weight() == "bold"} == set(places.items())
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [f"document {i} (label {i})" for i in range(4)]


def test_long_lists_have_dots_and_no_numbers(tmp_path: Path) -> None:
    axes = lists_plot(example(items=13)).axes[0]
    assert not axes.texts
    assert len(axes.get_lines()) == 3
    assert len(axes.get_yticklabels()) == 13
    assert len(lists_plot(example(items=100)).axes[0].get_yticklabels()) <= 40
    assert "orange outline and a dot" in page(reproduction(example=example(items=13)), tmp_path / "page.html")


def test_a_table_with_holes_can_be_drawn() -> None:
    known = example()
    known.table[0, 0] = nan
    assert next(iter(lists_plot(known).axes[0].texts)).get_text() == "–"
    svg(lists_plot(replace(known, table=np.full((4, 3), nan))))


def test_names_in_figures_are_shown_as_they_are() -> None:
    rows, curves = [row(name, 0.8) for name in ODD], [curve(name) for name in ODD]
    orders = {name: np.array([2, 1, 3, 4]) for name in ODD}
    lists = replace(example(), positions=orders)
    items = replace(example(), items=ODD[:4])
    for draw, names in (
        (lambda: clicks_plot(rows), ODD),
        (lambda: positions_plot(curves), ODD),
        (lambda: lists_plot(lists), ODD),
        (lambda: lists_plot(items), ODD[:4]),
    ):
        text = drawn(svg(draw()))
        for name in names:
            assert escape(name, quote=False) in text
        assert svg(draw()) == svg(draw())


def test_torch_and_matplotlib_wait() -> None:
    code = "import sys, urank.lab.paper_report; sys.exit(bool({'matplotlib', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
