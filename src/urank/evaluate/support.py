"""How far a log can tell the value of a policy: how much of it was ever shown, and how evenly clicks speak for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from typing import Any

import numpy as np

from urank.evaluate.offpolicy import Sums, Terms, Weighted, linearised
from urank.evaluate.stats import normal_interval

__all__ = ["Support", "support"]


@dataclass(frozen=True)
class Support:
    """How far a log can tell the value of a policy.

    Args:
        placements: how many items have a place under the policy.
        as_logged: the share of them at their logged position.
        floored: the share of them whose weight is floored.
        effective: the effective sample size of the ratio weights, (Σ w)² / Σ w².
        effective_ips: the same of the IPS weights; this and coverage are None when propensities are not known.
        largest_query: the largest share of |Σ c w b| that one query carries, by the ratio weights or the IPS weights.
        coverage: Σ w' / placements, near 1 if the logging could have produced all of them; of the rest, the log by
            itself says nothing.
        coverage_error: its standard error.
        warnings: a sentence for each reason to doubt the estimates.
        unseen: the share of them that the logged list did not show, candidates below the last position.
    """

    placements: int
    as_logged: float
    floored: float
    effective: float
    effective_ips: float | None
    largest_query: float
    coverage: float | None
    coverage_error: float | None
    warnings: list[str]
    unseen: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with null for what is not a finite number."""
        return {
            name: None if isinstance(figure, float) and not isfinite(figure) else figure
            for name, figure in asdict(self).items()
        }


def support(terms: Terms) -> Support:
    """Whether the log can support a claim about the policy. Shares of nothing are NaN.

    Args:
        terms: one entry for each query.
    """
    placements = terms.placed.sum()
    effective_ips = coverage = coverage_error = None
    largest_query = _largest_share(terms.ratio.clicked)
    if terms.ips is not None:
        effective_ips = _effective(terms.ips)
        coverage = _share(terms.ips.weight.sum(), placements)
        coverage_error = normal_interval(linearised([terms.ips.weight], [terms.placed])).error
        largest_query = float(np.fmax(largest_query, _largest_share(terms.ips.clicked)))
    found = Support(
        placements=int(placements),
        as_logged=_share(terms.as_logged.sum(), placements),
        floored=_share(terms.floored.sum(), placements),
        effective=_effective(terms.ratio),
        effective_ips=effective_ips,
        largest_query=largest_query,
        coverage=coverage,
        coverage_error=coverage_error,
        warnings=[],
        unseen=_share(terms.unseen.sum(), placements),
    )
    return replace(found, warnings=_warnings(found))


def _warnings(found: Support) -> list[str]:
    if found.placements == 0:
        return ["this policy gives no item a place"]
    warnings = []
    if found.coverage is None and found.as_logged < 0.2:
        warnings.append(
            f"only {_percent(found.as_logged)} of this policy's placements are the logged ones and propensities are "
            "not known; the estimates rest on the click model"
        )
    if found.coverage is not None and found.coverage_error is not None:
        # Twice the error, so that chance alone does not speak; one query has no error and gets no such leave.
        leave = 2 * found.coverage_error if isfinite(found.coverage_error) else 0.0
        if found.coverage + leave < 0.9:
            warnings.append(
                f"only {_percent(found.coverage)} of this policy's placements could have been logged; "
                "the rest rests on the click model, and is nothing to IPS"
            )
        if found.coverage - leave > 1.1:
            warnings.append(
                f"the IPS weights add up to {_percent(found.coverage)} of this policy's placements; "
                "the propensities are too low for how the log came about"
            )
    if found.floored > 0.05:
        warnings.append(
            f"{_percent(found.floored)} of this policy's placements have a logged click probability below the floor; "
            "the ratio estimate is too low"
        )
    if found.unseen > 0.05:
        warnings.append(
            f"{_percent(found.unseen)} of this policy's placements are items that the logged list did not show, of "
            "which only the click model tells; the ratio estimate counts nothing for them and is too low"
        )
    if found.effective < max(100, 0.05 * found.placements):
        warnings.append(_uneven("ratio", found.placements, found.effective))
    # A fixed order meets a random one in 1/K of its placements, by design; more uneven than that is a warning.
    as_logged = round(found.as_logged * found.placements)
    if found.effective_ips is not None and found.effective_ips < max(100, 0.05 * as_logged):
        warnings.append(_uneven("IPS", found.placements, found.effective_ips))
    if found.largest_query > 0.1:
        warnings.append(f"one query carries {_percent(found.largest_query)} of the estimate")
    return warnings


def _uneven(kind: str, placements: int, effective: float) -> str:
    return (
        f"by their {kind} weights, this policy's {placements:,} placements tell as much as {effective:,.0f} even ones"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def _effective(weighted: Weighted) -> float:
    squared = float(weighted.weight_squared.sum())
    return float(weighted.weight.sum()) ** 2 / squared if squared > 0 else 0.0


def _largest_share(sums: Sums) -> float:
    sizes = np.abs(sums)
    return _share(sizes.max(initial=0), sizes.sum())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else nan
