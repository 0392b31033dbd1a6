"""The report of a reproduction: tables by arithmetic, the summary, the terminal, the page and the plots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.console import Console

from pages import Page
from urank.lab.experiment_results import (
    METRICS,
    STORE_METRICS,
    ArchitectureRow,
    Claim,
    ListExample,
    MethodKind,
    MethodRow,
    PositionCurve,
    Reproduction,
    SettingRows,
    StoreRow,
)
from urank.lab.paper_report import (
    lists_plot,
    positions_plot,
    print_reproduction,
    reproduction_sections,
    write_reproduction,
)
from urank.report.page import Section
from urank.report.style import svg

ODD = ["<b>a & b</b>", "$10_$20", "_hidden", "[red]x[/]", ":smile:", "模型"]
CLAIMS = [
    Claim("U-rank earns the most clicks.", True, "0.903 against 0.836"),
    Claim("CPBM is the second best", False, "0.75 < 0.82"),
    Claim("Randomization does not do well", None, ""),
]
SHARES = dict(zip(STORE_METRICS, (1.0, 0.5, 0.75, 0.9, 2.0, 0.8, 1.5, 1.75), strict=True))
"""Each metric of Table 3 if #click is 1."""


def row(key: str, clicks: float, kind: MethodKind = "baseline", deviation: float = 0.004, **fields: Any) -> MethodRow:
    """A row whose metrics all follow from its clicks."""
    means = dict(zip(METRICS, (clicks - 0.3, clicks - 0.2, clicks, clicks / 10), strict=True))
    deviations = dict.fromkeys(METRICS, deviation)
    return MethodRow(**{"key": key, "name": key, "kind": kind, "mean": means, "deviation": deviations, **fields})


def store_row(key: str, clicks: float, true: float, kind: MethodKind = "baseline", **fields: Any) -> StoreRow:
    """A row of Table 3 whose metrics all follow from its downloads."""
    mean, truth = ({metric: one * share for metric, share in SHARES.items()} for one in (clicks, true))
    spread = {"deviation": dict.fromkeys(STORE_METRICS, 0.02), "true_deviation": dict.fromkeys(STORE_METRICS, 0.01)}
    return StoreRow(**{"key": key, "name": key, "kind": kind, "mean": mean, "true": truth, **spread, **fields})


URANK = row("urank", 0.903, "ours", name="U-rank", p_value={"MAP": 1.0, "nDCG@10": 0.3, "#Click": 1e-9, "CTR": 0.049})
ROWS = [row("svm", 0.834), row("lambda", 0.836, name="LambdaRank, CPBM"), URANK, row("km", 0.976, "oracle", name="KM")]
ARCHITECTURES = [
    ArchitectureRow("A1", 0.695, 0.684, 0.687, 0.903, 0.0915, {"train": 0.001, "CTR": 0.0004}),
    ArchitectureRow("A2", 0.701, nan, 0.692, 0.852, 0.0847, {"train": nan}),
]
DEEPFM = store_row("store-deepfm", 1.42, 1.4, name="DeepFM")
STORE_URANK = store_row(
    "store-urank",
    1.475,
    1.452,
    "ours",
    name="U-rank",
    p_value={"#click": 1e-9, "#click@3": 0.2, "Revenue": 0.04},
    true_p_value={"#click": 1e-20, "#click@1": 0.01},
)
STORE = [
    store_row("store-logged", 1.38, 1.39, name="as logged"),
    DEEPFM,
    STORE_URANK,
    store_row("store-km", 1.7, 1.7, "oracle", name="KM"),
]


def curve(name: str, deviation: float = 0.01) -> PositionCurve:
    return PositionCurve(name, np.array([0.5, 0.3, 0.2]), np.full(3, deviation))


def example(items: int = 4, methods: tuple[str, ...] = ("U-rank", "KM")) -> ListExample:
    """Item i is clicked half as often at each further position; the methods put the items in opposite orders."""
    position = np.arange(1, items + 1)
    orders = [position, position[::-1]]
    return ListExample(
        query="q<1>",
        items=[f"document {i}" for i in range(items)],
        label=np.arange(items) % 5 / 1.0,
        table=0.9 * 0.5 ** np.arange(3) * np.linspace(1, 0.2, items)[:, None],
        positions={method: orders[number % 2] for number, method in enumerate(methods)},
        clicks=dict(zip(methods, (1.25, 1.5), strict=False)),
        ndcg=dict(zip(methods, (0.75, nan), strict=False)),
    )


def reproduction(**parts: Any) -> Reproduction:
    return Reproduction(**{"what": ["table1"], "data": "made documents", "seeds": 3, "queries": 6000, **parts})


WHOLE = reproduction(
    rows=ROWS,
    claims=CLAIMS,
    architectures=ARCHITECTURES,
    architecture_claims=CLAIMS[:1],
    curves=[curve("U-rank"), curve("KM")],
    curve_claims=CLAIMS[1:2],
    example=example(),
    store=STORE,
    store_claims=CLAIMS[:2],
    visits=80,
    settings='[log]\nname = "<i>x</i>"\n',
    versions={"torch": "2.6.0"},
    seconds=1234.4,
)


def section(found: Reproduction, title: str) -> Section:
    return next(each for each in reproduction_sections(found) if each.title.startswith(title))


def column(found: Reproduction, title: str, head: str, table: int = 0) -> dict[str, str]:
    """The cells of a column of a section's table, by those of the first column."""
    shown = section(found, title).tables[table]
    return {row[0]: str(row[list(shown.head).index(head)]) for row in shown.rows}


def printed(found: Reproduction, *, colour: bool = False) -> str:
    out = StringIO()
    print_reproduction(found, Console(file=out, width=80, force_terminal=colour))
    return out.getvalue()


def summary(**parts: Any) -> str:
    """The last line of the terminal."""
    out = StringIO()
    print_reproduction(reproduction(**parts), Console(file=out, width=1000))
    return out.getvalue().splitlines()[-1].strip()


# --- Tables ----------------------------------------------------------------------------------------------------------


def test_stars_bold_and_italics_only_where_due() -> None:
    found = reproduction(rows=ROWS)
    assert column(found, "Table 1", "#Click") == {
        "svm": "0.834 ± 0.004",
        "LambdaRank, CPBM": "0.836 ± 0.004",
        "U-rank": "<strong>0.903*</strong> ± 0.004",
        "<em>KM</em>": "<em>0.976 ± 0.004</em>",
    }
    assert column(found, "Table 1", "MAP")["U-rank"] == f"<strong>{0.903 - 0.3:.3f}</strong> ± 0.004"
    better = replace(ROWS[0], mean={**ROWS[0].mean, "MAP": 0.7})
    cells = column(reproduction(rows=[better, *ROWS[1:]]), "Table 1", "MAP")
    assert [name for name, cell in cells.items() if "<strong>" in cell] == ["svm"]


def test_published_figures_are_beside_ours() -> None:
    found = reproduction(rows=[replace(ROWS[0], published={"#Click": 0.831}), *ROWS[1:]])
    assert list(column(found, "Table 1", "#Click (paper)").values()) == ["0.831", "–", "–", "<em>–</em>"]
    assert "MAP (paper)" not in section(found, "Table 1").tables[0].head
    store = reproduction(store=[STORE[0], replace(DEEPFM, published={"#click": 1.79, "Revenue@5": 2.881})])
    assert section(store, "Table 3").tables[2].rows == [("DeepFM", "1.790", *["–"] * 6, "2.881")]


def test_architectures_by_arithmetic() -> None:
    found = reproduction(architectures=[replace(ARCHITECTURES[0], published={"valid": 0.687}), ARCHITECTURES[1]])
    assert column(found, "Table 2", "AUC, train") == {"A1": "0.695 ± 0.001", "A2": "0.701"}
    assert column(found, "Table 2", "AUC, test") == {"A1": "0.684", "A2": "–"}
    assert column(found, "Table 2", "AUC, validation (paper)") == {"A1": "0.687", "A2": "–"}
    assert column(found, "Table 2", "CTR") == {"A1": "0.0915 ± 0.0004", "A2": "0.0847"}


def test_architectures_have_an_interval_over_seeds() -> None:
    columns = ("train", "test", "valid", "#Click", "CTR")
    by_seed = [dict.fromkeys(columns, (0.70, 0.72, 0.74)), dict.fromkeys(columns, (0.71, 0.72, 0.76))]
    rows = [replace(each, by_seed=values) for each, values in zip(ARCHITECTURES, by_seed, strict=True)]
    cells = column(reproduction(architectures=rows, setting="these users"), "Table 2", "AUC, test", table=1)
    half = 4.302653 * np.std([0.01, 0.0, 0.02], ddof=1) / 3**0.5  # Student's t with 2 degrees of freedom
    assert cells == {"mean": "+0.0100", "95 % interval": f"{0.01 - half:+.4f} to {0.01 + half:+.4f}"}
    assert section(reproduction(architectures=rows, setting="these users"), "Table 2").notes[0] == (
        "Setting: these users."
    )


def test_gains_by_setting() -> None:
    """Relative to the best baseline of each column; a method that a setting does not have is unknown there."""
    weak = [row("svm", 0.8), row("lambda", 0.75), replace(URANK, mean={**URANK.mean, "#Click": 0.84}, p_value={})]
    found = reproduction(sweeps={"attention": [SettingRows("η 1.5", ROWS), SettingRows("η 0.3", weak)]})
    assert column(found, "Table 1 by attention", "η 1.5") == {
        "best baseline": "LambdaRank, CPBM: 0.836",
        "svm": f"{100 * (0.834 / 0.836 - 1):+.1f} %",
        "lambda": "+0.0 %",
        "U-rank": f"{100 * (0.903 / 0.836 - 1):+.1f} %*",
        "<em>KM</em>": f"<em>{100 * (0.976 / 0.836 - 1):+.1f} %</em>",
    }
    assert column(found, "Table 1 by attention", "η 0.3") == {
        "best baseline": "svm: 0.800",
        "svm": "+0.0 %",
        "lambda": f"{100 * (0.75 / 0.8 - 1):+.1f} %",
        "U-rank": f"{100 * (0.84 / 0.8 - 1):+.1f} %",
        "<em>KM</em>": "<em>–</em>",
    }
    many = [SettingRows(f"η {number}", ROWS) for number in range(5)]
    assert all(f"η {number}" in printed(reproduction(sweeps={"attention": many})) for number in range(5))
    assert summary(sweeps=found.sweeps) == "by attention, U-rank is significantly above every baseline with 1 of 2"
    lost = SettingRows("η 0", [ROWS[0], row("urank", 0.7, "ours")])
    assert summary(sweeps={"users": [lost]}).endswith("with 0 of 1, and below one with 1")


def test_table_1_names_its_setting() -> None:
    found = reproduction(rows=ROWS, setting="users of the kind 'item' (η 0.7, 10 features)")
    sentence = "Setting: users of the kind 'item' (η 0.7, 10 features)."
    assert sentence in section(found, "Table 1").notes
    assert sentence in " ".join(printed(found).split())


def test_the_truth_is_beside_the_estimate() -> None:
    """With its own stars: the estimate has none at 1, the truth none at 3."""
    found = reproduction(store=STORE)
    cells = {head: column(found, "Table 3", head)["U-rank"] for head in section(found, "Table 3").tables[0].head}
    assert list(cells)[1:5] == ["#click", "true", "#click@1", "true@1"]
    assert (cells["#click"], cells["true"]) == ("<strong>1.475*</strong> ± 0.020", "<strong>1.452*</strong>")
    assert cells["#click@1"] == f"<strong>{1.475 / 2:.3f}</strong> ± 0.020"
    assert cells["true@1"] == f"<strong>{1.452 / 2:.3f}*</strong>"
    assert cells["true@3"] == f"<strong>{1.452 * 0.75:.3f}</strong>"
    assert column(found, "Table 3", "Revenue", 1)["U-rank"] == f"<strong>{2 * 1.475:.3f}*</strong> ± 0.020"


def test_unknown_figures_are_dashes(tmp_path: Path) -> None:
    lost = row("lost", nan, deviation=nan, p_value=dict.fromkeys(METRICS, 0.01))
    bare = replace(ROWS[0], name="bare", mean={}, deviation={})
    store_bare = replace(DEEPFM, name="bare", mean={}, deviation={}, true={}, true_deviation={})
    found = reproduction(rows=[lost, bare, URANK], store=[store_bare, STORE_URANK], curves=[curve("KM", nan)])
    assert set(column(found, "Table 1", "#Click").values()) == {"–", "<strong>0.903*</strong> ± 0.004"}
    assert column(found, "Table 3", "true")["bare"] == "–"
    write_reproduction(found, tmp_path / "page.html")
    assert not re.search(r"\bnan\b", (tmp_path / "page.html").read_text())
    assert "nan" not in printed(found)


# --- The summary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clicks", "p_value", "words"),
    [
        (0.903, 1e-20, "8.0 % more than the best baseline (LambdaRank, CPBM: 0.836), p < 1e-16"),
        (0.840, 0.31, "0.48 % more than the best baseline (LambdaRank, CPBM: 0.836), which may be chance (p = 0.31)"),
        (0.840, nan, "0.48 % more than the best baseline (LambdaRank, CPBM: 0.836)"),
        (0.800, 1.0, "4.3 % less than the best baseline (LambdaRank, CPBM: 0.836)"),
        (0.836, 1.0, "the same as the best baseline (LambdaRank, CPBM: 0.836)"),
    ],
)
def test_the_summary_compares_with_the_best_baseline(clicks: float, p_value: float, words: str) -> None:
    ours = row("urank", clicks, "ours", name="U-rank", p_value={"#Click": p_value})
    assert summary(rows=[*ROWS[:2], ours]) == f"U-rank earns {clicks:.3f} clicks a query, {words}"


def test_the_summary_of_partial_results() -> None:
    others = [row("a", 0.81, "ours"), row("b", 0.82, "ours")]
    assert summary(rows=others) == "b earns 0.820 clicks a query"
    assert summary(rows=[*others, row("urank", 0.7, "ours")]) == "urank earns 0.700 clicks a query"
    assert summary(rows=ROWS[:2]) == "the best baseline, LambdaRank, CPBM, earns 0.836 clicks a query"
    assert summary(rows=ROWS[3:]) == "KM earns 0.976 clicks a query"
    assert summary(architectures=ARCHITECTURES) == "U-rank on A1 earns 0.903 clicks a query, U-rank on A2 0.852"
    assert summary(curves=[curve("KM")]) == f"KM earns {0.5 + 0.3 + 0.2:.3f} clicks a query"
    assert summary(example=example()) == "U-rank earns 1.250 clicks on query q<1>, KM 1.500"
    assert summary() == "there are no figures"


def test_the_summary_of_the_store() -> None:
    assert summary(store=STORE).endswith(f"p = 1e-09; truly +{100 * (1.452 / 1.4 - 1):.1f} %")
    other = store_row("store-dla", 1.3, 1.5, name="DLA")
    assert summary(store=[DEEPFM, other, STORE_URANK]).endswith(
        f"truly −{100 * (1 - 1.452 / 1.5):.1f} % against DLA, the best in truth"
    )
    assert summary(store=[STORE_URANK, STORE[3]]) == "U-rank brings 1.475 downloads a visit"
    matched = store_row("store-match", 1.5, 1.41, "ours")
    assert summary(store=[DEEPFM, matched]).startswith("store-match brings 1.500")


def test_the_summary_counts_claims() -> None:
    parts = {"claims": CLAIMS, "architecture_claims": CLAIMS[:1], "store_claims": CLAIMS[:2]}
    assert summary(**parts) == (
        "1 of 3 claims of Section 5.4, 1 of 1 of Table 2 and 1 of 2 of Section 6.1 hold on this data (1 undecided)"
    )
    assert summary(curve_claims=CLAIMS[1:2]) == "0 of 1 claim of Figure 4 holds on this data"


# --- The terminal ----------------------------------------------------------------------------------------------------


def test_the_terminal_shows_both_tables_and_the_claims() -> None:
    text = printed(WHOLE)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"U-rank +0\.603 +0\.703 +0\.903\* +0\.0903\*", text)
    assert re.search(r"KM † +0\.676", text)
    assert re.search(r"U-rank +1\.475\* +0\.7\d\d +1\.106", text)
    assert re.search(r"^no +CPBM is the second best: 0\.75 < 0\.82", text, flags=re.MULTILINE)
    assert all(name in printed(reproduction(rows=[row(name, 0.8) for name in ODD])) for name in ODD)


@pytest.mark.parametrize(
    ("parts", "colour"),
    [
        ({"rows": ROWS}, "32"),
        ({"rows": [*ROWS[:2], replace(URANK, p_value={})]}, "33"),
        ({"rows": [*ROWS[:2], row("urank", 0.7, "ours")]}, "31"),
        ({"rows": [*ROWS[:2], row("urank", 0.7, "ours")], "store": STORE}, "31"),
        ({"store": STORE}, "32"),
    ],
)
def test_the_summary_is_coloured_by_the_worse_table(parts: dict[str, Any], colour: str) -> None:
    assert f"\x1b[1;{colour}m" in printed(reproduction(**parts), colour=True)


# --- The page --------------------------------------------------------------------------------------------------------


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    hostile = replace(
        WHOLE,
        rows=[*ROWS, *(row(name, 0.81) for name in ODD), row("o", 0.99, "oracle", name="<u>oracle</u>")],
        claims=[*CLAIMS, Claim("<u>x</u>", True, "<u>y</u>")],
        store=[*STORE, *(store_row(name, 1.1, 1.2) for name in ODD)],
        curves=[curve(name) for name in ODD],
        example=example(methods=("<u>m</u>", "$a$")),
        data="<u>data</u>.",
    )
    write_reproduction(hostile, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    seen = Page()
    seen.feed(text)
    assert seen.tags.count("svg") == 2 * seen.tags.count("figcaption") == 10
    assert not {"script", "link", "b", "u", "i", "img"} & set(seen.tags)
    assert seen.fetched == []
    assert not re.search(r"url\((?!#)", text)
    assert all(f"<td>{escape(name)}</td>" in text for name in ODD)
    assert f"<td><em>{escape('<u>oracle</u>')}</em></td>" in text
    write_reproduction(hostile, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


@pytest.mark.parametrize(
    ("parts", "sections"),
    [
        ({}, []),
        ({"rows": ROWS}, ["Table 1", "Clicks by method"]),
        ({"rows": [row("lost", nan)]}, ["Table 1"]),
        ({"claims": CLAIMS}, ["The claims of Section 5.4"]),
        ({"architectures": ARCHITECTURES}, ["Table 2"]),
        ({"curves": [curve("KM")]}, ["Figure 4"]),
        ({"example": example()}, ["Figure 3"]),
        ({"example": example(methods=())}, []),
        ({"store": STORE}, ["Table 3", "The debiased estimate and the truth"]),
        ({"store_claims": CLAIMS}, ["The claims of Section 6.1"]),
        ({"versions": {"torch": "2.6"}}, ["Settings"]),
    ],
)
def test_empty_parts_leave_no_section(parts: dict[str, Any], sections: list[str]) -> None:
    titles = [each.title.partition(":")[0] for each in reproduction_sections(reproduction(**parts))]
    assert titles == ["What was run", *sections]


# --- Plots -----------------------------------------------------------------------------------------------------------


def bars(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


def points(axes: Axes) -> Iterator[tuple[float, float]]:
    return (tuple(each.get_offsets()[0]) for each in axes.collections)  # type: ignore[arg-type,misc]


def test_bars_are_the_clicks_with_their_deviations() -> None:
    (axes,) = section(reproduction(rows=ROWS), "Clicks by method").charts[0].draw().axes
    assert bars(axes) == [0.834, 0.836, 0.903, 0.976]
    assert [text.get_text() for text in axes.texts] == ["0.834", "0.836", "0.903*", "0.976"]
    whisker = axes.collections[0].get_segments()[0][:, 0]  # type: ignore[attr-defined]
    assert whisker.tolist() == pytest.approx([0.834 - 0.004, 0.834 + 0.004])


def test_bars_of_the_store_are_debiased_and_diamonds_true() -> None:
    charts = section(reproduction(store=STORE), "The debiased estimate").charts
    (axes,) = charts[0].draw().axes
    assert bars(axes) == [1.38, 1.42, 1.475, 1.7]
    diamonds = {line.get_ydata()[0]: line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "D"}  # type: ignore[index]
    assert diamonds == {0: 1.39, 1: 1.4, 2: 1.452, 3: 1.7}
    for metric, panel in zip(("#click", "Revenue"), charts[1].draw().axes, strict=True):
        assert list(points(panel)) == [(each.true[metric], each.mean[metric]) for each in STORE]


def test_curves_give_their_sums() -> None:
    axes = positions_plot([curve("U-rank"), curve("KM", deviation=nan)]).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == [f"U-rank: {0.5 + 0.3 + 0.2:.3f}", "KM: 1.000"]
    assert list(lines["KM: 1.000"].get_xdata()) == [1, 2, 3]  # type: ignore[arg-type]
    assert len(axes.collections) == 1  # the band of the one that has a deviation


def test_lists_outline_the_positions_of_items() -> None:
    figure = lists_plot(example())
    assert figure.axes[1].get_title("left") == "KM: 1.500 clicks, nDCG –"
    for axes, places in zip(figure.axes[:2], ({0: 1, 1: 2, 2: 3}, {3: 1, 2: 2, 1: 3}), strict=True):
        outlined = {round(box.get_y() + 0.5): round(box.get_x() + 0.5) for box in axes.patches}  # type: ignore[attr-defined]
        assert outlined == places  # the fourth item has no place among three
        numbers = {(text.get_position()[1], text.get_position()[0]): text for text in axes.texts}
        assert numbers[0, 1].get_text() == "0.90"
        assert {place for place, text in numbers.items() if text.get_weight() == "bold"} == set(places.items())


def test_long_lists_have_dots_and_no_numbers() -> None:
    axes = lists_plot(example(items=13)).axes[0]
    assert not axes.texts
    assert len(axes.get_lines()) == 3
    assert len(lists_plot(example(items=100)).axes[0].get_yticklabels()) <= 40
    svg(lists_plot(replace(example(), table=np.full((4, 3), nan))))


def test_names_in_plots_are_shown_verbatim() -> None:
    lists = replace(example(), positions={name: np.array([2, 1, 3, 4]) for name in ODD})
    for figure in (positions_plot([curve(name) for name in ODD]), lists_plot(lists)):
        text = re.sub(r"<style.*?</style>", "", svg(figure), flags=re.DOTALL)
        assert all(escape(name, quote=False) in text for name in ODD)
