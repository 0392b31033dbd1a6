"""The verdict on a log, in plain words: can position effects be learned from it, why, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from urank.log.facts import Facts
from urank.log.interventions import MIN_CLICKS, Interventions, ranges

__all__ = ["Verdict", "judge"]

Level = Literal["learnable", "partly learnable", "not learnable"]


@dataclass(frozen=True)
class Verdict:
    """Attributes: the level for machines, the sentence for people, reasons, warnings, and what to do."""

    level: Level
    sentence: str
    reasons: list[str]
    warnings: list[str]
    advice: list[str]


def judge(facts: Facts, *, randomised: Collection[str]) -> Verdict:
    """Judge a log by the facts that `inspect` gathered."""
    level, sentence, reasons, advice = _learnable(facts, randomised)
    warnings, more_advice = _warnings(facts, randomised)
    return Verdict(level, sentence, reasons, warnings, advice + more_advice)


def _learnable(facts: Facts, randomised: Collection[str]) -> tuple[Level, str, list[str], list[str]]:
    graph = facts.interventions
    curve = facts.curve
    if facts.clicks == 0:
        advice = ["check the column that plays 'click' (--column click=NAME)"]
        return "not learnable", "not learnable: nothing was ever clicked", [], advice
    if len(curve.position) == 1:
        return (
            "not learnable",
            f"not learnable: everything was shown at position {curve.position[0]}",
            [],
            ["check the column that plays 'position' (--column position=NAME)"],
        )
    reasons = [_reason(facts, graph)]
    if randomised:
        reasons.append(f"the order of policy {', '.join(sorted(randomised))} was random, so its positions compare")
    elsewhere = ["add the log of a second ranker that orders differently"]
    if randomised:
        elsewhere.insert(0, "show more of the traffic in random order, down to the last position")
    else:
        elsewhere.insert(
            0,
            "show a small share of the traffic in randomised order (swaps with position 1 suffice) and log its policy",
        )
    if facts.items is None:
        elsewhere.insert(0, "add the item's id (--column item_id=NAME): without it only equal features tell an item")
    if not facts.tells_items and not randomised:
        return "not learnable", "not learnable: items cannot be told apart", reasons, elsewhere
    if graph.moved == 0 and not randomised:
        sentence = "not learnable: every item was always shown at the same position"
        return "not learnable", sentence, reasons, elsewhere
    if len(graph.joined) < 2:
        sentence = f"not learnable: no two positions share items with {MIN_CLICKS} clicks or more on each side"
        return "not learnable", sentence, reasons, ["collect more clicks", *elsewhere]
    if not graph.lost:
        return "learnable", "learnable", reasons, []
    impressions = dict(zip(curve.position, curve.impressions, strict=True))
    covered = sum(impressions[k] for k in graph.joined) / facts.rows
    lost = _positions(graph.lost)
    has, rest = ("has", "rests") if len(graph.lost) == 1 else ("have", "rest")
    reasons.append(f"{lost} {has} too few clicks on items (or random lists) that were also shown elsewhere")
    if covered < 0.5:
        sentence = f"not learnable: only {_positions(graph.joined)} can be compared, {covered:.0%} of the impressions"
        return "not learnable", sentence, reasons, elsewhere
    return "partly learnable", f"learnable, but {lost} {rest} on extrapolation", reasons, elsewhere


def _positions(numbers: list[int]) -> str:
    return f"position{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _reason(facts: Facts, graph: Interventions) -> str:
    if not facts.tells_items:
        why = (
            "it has neither item ids nor features"
            if facts.features == 0
            else f"in {facts.alike:.0%} of the lists two items have the same features"
        )
        return f"the log does not tell items apart: {why}"
    what = "items" if facts.items is not None else "items (told apart by their features, as there is no item_id)"
    if graph.moved == 0:
        return f"none of the {graph.items:,} {what} was seen at two positions"
    here = facts.same_query_moves
    context = (
        "none of them within one query, so context and position must be told apart by the features"
        if here == 0
        else f"{here:,} times within one query"
    )
    return f"{graph.moved:,} of {graph.items:,} {what} were seen at two positions or more, {context}"


def _warnings(facts: Facts, randomised: Collection[str]) -> tuple[list[str], list[str]]:
    """What to beware of, and for some of it what to do."""
    found = [*_odd_lists(facts), *_odd_features(facts), *_told_by_features(facts, randomised)]
    return [warning for warning, _ in found], [advice for _, advice in found if advice]


def _odd_lists(facts: Facts) -> Iterator[tuple[str, str | None]]:
    if facts.lists_without_click == 0 and facts.lists >= 100:
        yield (
            "every list has a click: lists without one seem to be left out, so click rates are too high, and the "
            "clicks of a list depend on each other",
            None,
        )
    most = max(facts.curve.impressions)
    rare = [k for k, n in zip(facts.curve.position, facts.curve.impressions, strict=True) if n < 0.1 * most]
    if rare:
        yield f"{_positions(rare)} were shown rarely (slots that are mostly empty, or the tail)", None


def _odd_features(facts: Facts) -> Iterator[tuple[str, str | None]]:
    if facts.outcomes:
        yield (
            f"{', '.join(facts.outcomes)}: known only after a click, so results of it; a model must not see them",
            " ".join(f"--drop {name}" for name in facts.outcomes),
        )
    if facts.id_like:
        yield (
            f"{', '.join(facts.id_like)}: numbers that look like ids, taken as quantities",
            " ".join(f"--categorical {name}" for name in facts.id_like) + " (or --drop)",
        )
    if facts.losing_digits:
        yield (
            f"{', '.join(facts.losing_digits)}: whole numbers that lose digits as 32-bit numbers",
            f"--categorical {facts.losing_digits[0]} if they are names, or --drop, or subtract an offset from them",
        )
    for name, (high, largest) in facts.heavy_tails.items():
        yield f"{name}: the largest value, {largest:,.4g}, is {largest / high:,.0f} times the 99th percentile", None
    mostly = sorted((name for name, share in facts.missing.items() if share > 0.5), key=lambda n: -facts.missing[n])
    if mostly:
        more = f" and {len(mostly) - 5} more" if len(mostly) > 5 else ""
        yield f"mostly missing: {', '.join(f'{n} ({facts.missing[n]:.0%})' for n in mostly[:5])}{more}", None


def _told_by_features(facts: Facts, randomised: Collection[str]) -> Iterator[tuple[str, str | None]]:
    if facts.confounding is not None and facts.confounding.share > 0.3:
        yield (
            f"features explain {facts.confounding.share:.0%} of the position within lists: the old ranker's choice "
            "and the effect of position are hard to tell apart",
            None,
        )
    for policy, found in facts.confounding_by_policy.items():
        if found.looks_random and policy not in randomised:
            yield (
                f"policy {policy} looks randomised: its features say nothing of the position (p = {found.p_value:.2f})",
                f"if policy {policy} was random by design, say so: --randomised {policy}",
            )
        elif not found.looks_random and policy in randomised and found.rows >= 1_000:
            yield (
                f"policy {policy} is said to be random, but features explain {found.share:.1%} of the position "
                f"(p = {found.p_value:.1g})",
                None,
            )
