"""Tables of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from urank.log.facts import Curve, Facts

__all__ = [
    "Table",
    "bar",
    "curve_table",
    "feature_tables",
    "group_table",
    "groups",
    "inspection_tables",
    "overview_table",
]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 12


@dataclass(frozen=True)
class Table:
    """Rows of text under a head.

    Attributes:
        head, rows: the cells.
        words: the heads of columns that hold words (set flush left and wrapped); the first column always does.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ("",)


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """A bar of eighths of a character.

    >>> bar(0.5, width=4)
    '██'
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def inspection_tables(facts: Facts) -> Iterator[Table]:
    """Everything there is to tell, in order."""
    yield overview_table(facts)
    yield curve_table(facts)
    for group, curves in groups(facts).items():
        yield group_table(group, curves)
    yield from feature_tables(facts)


def groups(facts: Facts) -> dict[str, dict[str, Curve]]:
    """The curves of policies and of categories, where there are several."""
    curves = {"policy": facts.by_policy, "category": facts.by_category}
    return {group: by_name for group, by_name in curves.items() if len(by_name) > 1}


def feature_tables(facts: Facts) -> Iterator[Table]:
    """How features tell the position, and which are missing."""
    if facts.confounding is not None:
        yield _confounding_table(facts)
    if facts.missing:
        worst = sorted(facts.missing.items(), key=lambda entry: -entry[1])[:10]
        yield Table(("feature", "missing", ""), [(name, f"{share:.1%}", bar(share)) for name, share in worst])


def overview_table(facts: Facts) -> Table:
    """Counts."""
    length = facts.list_length
    rows = [
        ("impressions", f"{facts.rows:,}"),
        ("clicks", f"{facts.clicks:,} ({facts.clicks / facts.rows:.2%})"),
        ("queries", f"{facts.queries:,}"),
        ("lists", f"{facts.lists:,}"),
        ("items", f"{facts.items:,}" if facts.items is not None else "not named"),
        ("items seen at two positions", f"{facts.interventions.moved:,}"),
        ("list length", f"{length['p0']:.0f} – {length['p100']:.0f}, median {length['p50']:.0f}"),
        ("lists without a click", f"{facts.lists_without_click:.1%}"),
        ("lists with nothing at position 1", f"{facts.lists_below_top:.1%}"),
        ("lists with gaps", f"{facts.lists_with_gaps:.1%}"),
    ]
    if facts.value is not None:
        v = facts.value
        rows.append(("value", f"{v['p0']:g} – {v['p100']:g}, median {v['p50']:g}, mean {v['mean']:.4g}"))
        rows.append(("value is 0", f"{v['zero']:.1%}"))
    return Table(("log", ""), rows)


def curve_table(facts: Facts) -> Table:
    """Click rate by position, and the clicks that link it to the others."""
    curve, evidence = facts.curve, facts.interventions.evidence
    top = max(curve.rate) or 1.0
    rows = [
        (str(k), f"{n:,}", f"{rate:.2%}", f"{low:.2%} – {high:.2%}", bar(rate / top), _linked(evidence[k - 1]))
        for k, n, rate, low, high in zip(
            curve.position, curve.impressions, curve.rate, curve.low, curve.high, strict=True
        )
    ]
    return Table(("position", "shown", "click rate", "95 % interval", "", "linking clicks"), rows)


def _linked(clicks: float) -> str:
    return f"{clicks:,.0f}" if clicks > 0 else "none"


def group_table(group: str, curves: dict[str, Curve]) -> Table:
    """Click rates of groups at a few positions."""
    shown = sorted({k for curve in curves.values() for k in curve.position})
    places = [k for k in shown if k in (1, 2, 3, 5, 10, 20)] or shown[:5]
    rows = []
    for name, curve in curves.items():
        rates = dict(zip(curve.position, curve.rate, strict=True))
        cells = [f"{rates[k]:.2%}" if k in rates else "–" for k in places]
        rows.append((name, f"{sum(curve.impressions):,}", *cells))
    return Table((group, "impressions", *(f"rate at {k}" for k in places)), rows)


def _confounding_table(facts: Facts) -> Table:
    head = ("features tell position", "R²", "", "strongest correlations")
    everything = {} if facts.confounding is None else {"all lists": facts.confounding}
    rows = [
        (
            name,
            f"{found.share:.1%}",
            bar(found.share),
            ", ".join(f"{f} {r:+.2f}" for f, r in list(found.strongest.items())[:3]),
        )
        for name, found in {**everything, **facts.confounding_by_policy}.items()
    ]
    return Table(head, rows, words=("", head[-1]))
