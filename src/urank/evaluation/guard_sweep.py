"""Guard sweep: evaluate a policy at several levels of closeness to the logged order."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Unpack

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.config import to_jsonable
from urank.errors import ConfigError
from urank.evaluation.estimators import ESTIMATORS, needs_propensity
from urank.evaluation.intervals import Comparison, Interval
from urank.evaluation.policy_evaluation import Evaluation, EvaluationOptions, PolicyValue, evaluate_policies
from urank.log.dataset import Block, Dataset
from urank.log.ragged import pad, where_items
from urank.ranking.guard import Guard, GuardKind, Moves, count_moves
from urank.ranking.policies import Guarded, Policy

DEFAULT_LEVELS: dict[GuardKind, tuple[float, ...]] = {"shift": (1, 2, 3, 5), "blend": (0.25, 0.5, 0.75)}
KEPT = 0.5
"""The share of the full gain that a level must keep to be recommended."""


@dataclass(frozen=True)
class GuardLevel:
    """A policy at one level of the guard, None for the unguarded policy: its estimates, and how far items move."""

    guard: Guard | None
    value: PolicyValue
    moves: Moves

    @property
    def name(self) -> str:
        """Name in tables."""
        return "unbounded" if self.guard is None else self.guard.name

    @property
    def utility(self) -> Interval:
        """The estimate over all positions."""
        return list(self.value.utility.values())[-1]

    @property
    def difference(self) -> Comparison:
        """The difference to the logged order, paired by query."""
        assert self.value.difference is not None  # noqa: S101 - only the logged order has none
        return self.value.difference

    @property
    def how_far(self) -> dict[str, float]:
        """Mean and largest number of places that an item moves, and the share of lists with another first item."""
        moves = self.moves
        return {"mean_move": moves.mean, "largest_move": moves.largest, "other_first": moves.other_first}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        estimates = {"utility": asdict(self.utility), "difference": asdict(self.difference)}
        guard = None if self.guard is None else str(self.guard)
        return {"name": self.name, "guard": guard, **to_jsonable(estimates), **to_jsonable(self.how_far)}


@dataclass(frozen=True, repr=False)
class GuardLevels:
    """The evaluated levels of a guard."""

    kind: GuardKind
    policy: str  # the name of the guarded policy
    levels: list[GuardLevel]  # from the closest to the logged order to the unguarded policy
    evaluation: Evaluation  # all estimates, the logged order first

    @property
    def recommended(self) -> GuardLevel | None:
        """The smallest level with a significant gain of at least half the full gain's estimate; None if absent."""
        least = KEPT * self.levels[-1].difference.mean
        fit = (each for each in self.levels if each.difference.low > 0 and each.difference.mean >= least)
        return next(fit, None)

    @property
    def recommendation(self) -> str:
        """What to launch first, in a sentence."""
        chosen, full = self.recommended, self.levels[-1].difference.mean
        if chosen is None:
            clear = [each for each in self.levels if each.difference.low > 0]
            if not clear:
                return "no level is recommended: none has a gain whose 95 % interval is above 0"
            best = f"{self.policy} with {clear[-1].name} {self._gain(clear[-1])}"
            return f"no level is recommended: {best}, but less than half of the full gain, whose interval contains 0"
        if chosen is self.levels[-1]:
            why = "no smaller level has a significant gain of at least half that size"
            return f"launch {self.policy} unguarded: it {self._gain(chosen)}, and {why}"
        part = f"{100 * chosen.difference.mean / full:.0f} % of the full gain" if full > 0 else "the full order no more"
        return f"launch {self.policy} with {chosen.name} first: it {self._gain(chosen)}, {part}"

    def _gain(self, level: GuardLevel) -> str:
        gain, logged = level.difference, list(self.evaluation.policies[0].utility.values())[-1].mean
        ends = (gain.mean, gain.low, gain.high)
        mean, low, high = (f"{100 * each / logged:.1f} %" if logged > 0 else f"{each:.4f}" for each in ends)
        return f"earns {mean} more {self.evaluation.measure} than the logged order (95 % interval {low} to {high})"

    def to_frame(self) -> pl.DataFrame:
        """Return the columns of `Evaluation.to_frame`, and how far items move, a row for each level."""
        return pl.DataFrame([{"level": each.name, **each.value.to_row(), **each.how_far} for each in self.levels])

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return str(import_module("urank.report.guard_report").guard_html(self))  # of a higher layer

    def __repr__(self) -> str:
        """Return a line for each level, and the recommendation; `urank.report.guard_report` has the full report."""
        lines = [
            f"{each.name:<12} {each.difference.mean:+.4f} ({each.difference.low:+.4f} to {each.difference.high:+.4f}), "
            f"{each.moves.mean:.2f} places moved"
            for each in self.levels
        ]
        return "\n".join([*lines, self.recommendation])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        document = self.evaluation.to_dict()
        logged, *_ = document.pop("policies")
        chosen = self.recommended
        return {
            "kind": self.kind,
            "policy": self.policy,
            **document,
            "logged": logged,
            "levels": [level.to_dict() for level in self.levels],
            "recommended": None if chosen is None else chosen.name,
            "recommendation": self.recommendation,
        }


def evaluate_guard(
    policy: Policy,
    dataset: Dataset,
    *,
    kind: GuardKind = "shift",
    levels: Sequence[float] | None = None,
    splits: Sequence[str] = ("test",),
    **options: Unpack[EvaluationOptions],
) -> GuardLevels:
    """Estimate the utility of a policy at each level of a guard, by the same click models.

    A guarded order follows the logged list and agrees with it more often than chance. Inverse propensities would count
    its clicks several times over, so propensities are ignored.

    Args:
        policy: the policy to keep close to the logged order.
        dataset: a prepared log; its queries must be new to the policy.
        kind: `shift` or `blend`.
        levels: those to evaluate besides the unguarded policy; by default shift 1, 2, 3 and 5, as far as lists are long
            enough, or blend 0.25, 0.5 and 0.75.
        splits, options: as in `evaluate_policies`; the estimators `ips` and `snips` are refused.
    """
    estimator = options.get("estimator", "auto")
    if estimator in ESTIMATORS and needs_propensity(estimator):
        raise ConfigError(
            f"estimator {estimator} cannot evaluate a guard, which follows the logged list and agrees with it more "
            "often than chance; use auto, refit, ratio, self_normalised, doubly_robust or direct"
        )
    guards = _guards(kind, levels, dataset)
    counters = [MoveCounter(each) for each in level_policies(policy, guards)]
    evaluation = evaluate_policies(counters, _without_propensity(dataset), splits=splits, cutoffs=(), **options)
    found = [GuardLevel(guard, evaluation[each.name], each.moves) for guard, each in zip(guards, counters, strict=True)]
    return GuardLevels(kind, policy.name, found, evaluation)


def level_policies(policy: Policy, guards: Sequence[Guard | None]) -> list[Policy]:
    """Return the policy under each guard, or itself for None; its order of a block is computed once for all."""
    cached = CachedPolicy(policy)
    return [cached if guard is None else Guarded(cached, guard) for guard in guards]


def _guards(kind: GuardKind, levels: Sequence[float] | None, dataset: Dataset) -> list[Guard | None]:
    """Return the guards from the closest to the logged order to the policy's own: blend 1, or no bound at all."""
    if kind not in DEFAULT_LEVELS:
        raise ConfigError(f"kind must be {' or '.join(DEFAULT_LEVELS)}; got '{kind}'")
    if levels is None:
        enough = dataset.positions - 1
        levels = [level for level in DEFAULT_LEVELS[kind] if kind == "blend" or level < enough]
    rising = sorted({Guard(kind, level) for level in levels}, key=lambda guard: guard.level)
    if kind == "shift":
        return [*rising, None]
    return [*(guard for guard in rising if guard.level < 1), Guard("blend", 1)]


def _without_propensity(dataset: Dataset) -> Dataset:
    """Return the same log without its propensities."""
    hidden = copy(dataset)
    roles = [role for role in dataset.description["roles"] if role != "propensity"]
    hidden.description = {**dataset.description, "roles": roles}
    return hidden


class CachedPolicy:
    """A policy that remembers its order of the last block."""

    def __init__(self, policy: Policy) -> None:
        self.name, self.columns = policy.name, policy.columns
        self.positions = lru_cache(maxsize=1)(policy.positions)


class MoveCounter:
    """A policy that counts how far it moves the items of the blocks that it orders."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.moves = policy, Moves()
        self.name, self.columns = policy.name, [*policy.columns, "position"]

    def positions(self, block: Block) -> NDArray[np.int64]:
        found = self.policy.positions(block)
        current = pad(block.column("position"), block.offsets)
        self.moves += count_moves(pad(found, block.offsets), current, where=where_items(block.offsets))
        return found
