"""What all tables of a reproduction say in the same words: who earns how much more than whom, and what holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from urank.report.numbers import Units, p_text
from urank.report.paper_tables import best_baseline, figure_text, leading_row, mean_of
from urank.report.terminal import bullet

if TYPE_CHECKING:
    from urank.paper.results import Claim, Row

__all__ = ["ORACLES", "earnings", "earnings_of_each", "print_claims", "print_stars", "standing", "standing_style"]

ORACLES = (
    "Rows in italics are oracles, which know what no log tells: they are left out of the comparisons. In bold, the "
    "best figure of the others."
)
_STYLES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_HOLDS = {True: "yes", False: "no", None: "?"}


def earnings(rows: Sequence[Row], metric: str, verb: str, unit: str) -> Iterator[str]:
    """What U-rank earns against the best baseline; without either, what there is.

    Args:
        rows: of a table.
        metric: what is told of them.
        verb: such as `earns`.
        unit: such as `clicks a query`.
    """
    ours, baseline = leading_row(rows, metric), best_baseline(rows, metric)
    if ours is not None:
        told = f"{ours.name} {verb} {figure_text(metric, mean_of(ours, metric))} {unit}"
        yield told if baseline is None else f"{told}, {_against(ours, baseline, metric)}"
    elif baseline is not None:
        yield f"the best baseline, {baseline.name}, {verb} {figure_text(metric, mean_of(baseline, metric))} {unit}"
    elif known := {row.name: mean_of(row, metric) for row in rows if isfinite(mean_of(row, metric))}:
        yield earnings_of_each(known, metric, verb, unit)


def _against(ours: Row, baseline: Row, metric: str) -> str:
    mean, base = mean_of(ours, metric), mean_of(baseline, metric)
    rival = f"the best baseline ({baseline.name}: {figure_text(metric, base)})"
    if mean == base:
        return f"just as {rival} does"
    compared = f"{Units.of(base).size(mean - base)} {'more' if mean > base else 'less'} than {rival}"
    p_value = ours.p_value.get(metric)
    if mean < base or p_value is None or not isfinite(p_value):
        return compared
    shown = p_text(p_value)
    equals = f"p < {shown[1:]}" if shown.startswith("<") else f"p = {shown}"
    return f"{compared}, {equals}" if ours.significant(metric) else f"{compared}, which may be chance ({equals})"


def earnings_of_each(means: Mapping[str, float], metric: str, verb: str, unit: str) -> str:
    """What each of them earns, by name."""
    (first, earned), *others = means.items()
    told = [f"{first} {verb} {figure_text(metric, earned)} {unit}"]
    return ", ".join(told + [f"{name} {figure_text(metric, value)}" for name, value in others])


def standing(rows: Sequence[Row], metric: str) -> int | None:
    """1 when U-rank is better than every baseline beyond chance, −1 when one is better, 0 between; else none."""
    ours, baseline = leading_row(rows, metric), best_baseline(rows, metric)
    if ours is None or baseline is None:
        return None
    return 1 if ours.significant(metric) else -1 if mean_of(ours, metric) < mean_of(baseline, metric) else 0


def standing_style(*standings: int | None) -> str:
    """How a terminal shows the sentence that counts: as the worst of what it tells."""
    known = [each for each in standings if each is not None]
    return _STYLES[min(known)] if known else "bold"


def print_stars(rows: Sequence[Row], console: Console, *others: str) -> None:
    """Print what the signs of a table mean, and others that it has."""
    oracles = ["† knows the truth, not compared"] if any(row.kind == "oracle" for row in rows) else []
    console.print(Text("; ".join(["* better than every baseline, p < 0.05", *oracles, *others]), style="dim"))
    console.print()


def print_claims(claims: Sequence[Claim], console: Console) -> None:
    """Print each claim beside whether it holds."""
    for claim in claims:
        figures = f": {claim.figures}" if claim.figures else ""
        bullet(console, _HOLDS[claim.holds], Text(f"{claim.text.removesuffix('.')}{figures}"))
    if claims:
        console.print()
