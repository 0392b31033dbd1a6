"""What a policy would earn when it is kept close to the logged order, level by level, and how much each level moves."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urank.config import to_jsonable
from urank.errors import ConfigError
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.evaluation.estimators import ESTIMATORS, needs_propensity
from urank.evaluation.intervals import Comparison, Interval
from urank.evaluation.policy_evaluation import Evaluation, PolicyValue, Truth, evaluate_policies
from urank.log.dataset import Block, Dataset
from urank.log.ragged import pad, where_items
from urank.progress import Report, silent
from urank.ranking.guard import Guard, GuardKind, Moves, moves
from urank.ranking.policies import Guarded, Policy
from urank.ranking.utility import FLOOR

__all__ = ["GuardLevel", "GuardLevels", "evaluate_guard"]

LEVELS: dict[GuardKind, tuple[float, ...]] = {"shift": (1, 2, 3, 5), "blend": (0.25, 0.5, 0.75)}
KEPT = 0.5
"""The share of the full gain that a level must keep to be recommended."""


@dataclass(frozen=True)
class GuardLevel:
    """A policy at one level of the guard.

    Attributes:
        guard: the level; none for the policy as it is.
        value: what is known of the policy at that level.
        moves: how far its orders are from the logged ones.
    """

    guard: Guard | None
    value: PolicyValue
    moves: Moves

    @property
    def name(self) -> str:
        """What tables call it."""
        return "unbounded" if self.guard is None else self.guard.name

    @property
    def utility(self) -> Interval:
        """The estimate over all positions."""
        return list(self.value.utility.values())[-1]

    @property
    def difference(self) -> Comparison:
        """To the logged order, paired by query."""
        assert self.value.difference is not None  # noqa: S101 - only the logged order has none
        return self.value.difference

    @property
    def true(self) -> float | None:
        """The true utility, where a simulation knows it."""
        return None if self.value.true is None else list(self.value.true.values())[-1]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        true = self.value.true_difference
        told = {
            "name": self.name,
            "guard": None if self.guard is None else str(self.guard),
            "utility": asdict(self.utility),
            "difference": asdict(self.difference),
            "true": self.true,
            "true_difference": None if true is None else asdict(true),
            "mean_move": self.moves.mean,
            "largest_move": self.moves.largest,
            "other_first": self.moves.other_first,
        }
        as_json: dict[str, Any] = to_jsonable(told)
        return as_json


@dataclass(frozen=True)
class GuardLevels:
    """The levels of a guard side by side.

    Attributes:
        kind: of the guard.
        policy: the name of what is kept close to the logged order.
        levels: from the closest to the logged order to the policy as it is, which is the last.
        evaluation: all of it, with the logged order first.
    """

    kind: GuardKind
    policy: str
    levels: list[GuardLevel]
    evaluation: Evaluation

    @property
    def recommended(self) -> GuardLevel | None:
        """The smallest level whose gain is clear of 0 and keeps half of the full gain's estimate; none if there is
        none."""
        least = KEPT * self.levels[-1].difference.mean
        fit = (each for each in self.levels if each.difference.low > 0 and each.difference.mean >= least)
        return next(fit, None)

    @property
    def recommendation(self) -> str:
        """What to launch first, in a sentence."""
        chosen = self.recommended
        if chosen is None:
            clear = [each for each in self.levels if each.difference.low > 0]
            if not clear:
                return "no level is recommended: none has a gain whose 95 % interval is clear of 0"
            told = f"{self.policy} with {clear[-1].name} {self._earns(clear[-1])}"
            return f"no level is recommended: {told}, but less than half of the full gain, which is not clear of 0"
        if chosen is self.levels[-1]:
            why = "no smaller level has a clear gain that is half as large"
            return f"launch {self.policy} as it is: it {self._earns(chosen)}, and {why}"
        full = self.levels[-1].difference.mean
        share = (
            f"{100 * chosen.difference.mean / full:.0f} % of the full gain" if full > 0 else "the full order no more"
        )
        return f"launch {self.policy} with {chosen.name} first: it {self._earns(chosen)}, {share}"

    def _earns(self, level: GuardLevel) -> str:
        gain, logged = level.difference, list(self.evaluation.policies[0].utility.values())[-1].mean
        mean, low, high = (
            f"{100 * each / logged:.1f} %" if logged > 0 else f"{each:.4f}" for each in (gain.mean, gain.low, gain.high)
        )
        return f"earns {mean} more {self.evaluation.measure} than the logged order (95 % interval {low} to {high})"

    def __str__(self) -> str:
        """A line for each level and the recommendation; `urank.report.guard_report` says more."""
        lines = [
            f"{each.name:<12} {each.difference.mean:+.4f} ({each.difference.low:+.4f} to {each.difference.high:+.4f}), "
            f"{each.moves.mean:.2f} places moved"
            for each in self.levels
        ]
        return "\n".join([*lines, self.recommendation])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        told = self.evaluation.to_dict()
        logged, *_ = told.pop("policies")
        chosen = self.recommended
        return {
            "kind": self.kind,
            "policy": self.policy,
            **told,
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
    estimator: str = "auto",
    floor: float = FLOOR,
    config: CrossfitConfig | None = None,
    truth: Truth | None = None,
    report: Report = silent,
) -> GuardLevels:
    """Estimate what a policy would earn at each level of a guard, by the same click models.

    A guarded order follows the list that was shown, and meets it more often than chance. Inverse propensities would
    take that for luck and count its clicks several times over, so the levels are judged as if propensities were not
    known: `auto` is Eq. 3, which asks of the list only that it was shown.

    Args:
        policy: what to keep close to the logged order.
        dataset: a prepared log; its queries must be new to the policy.
        kind: `shift` or `blend`.
        levels: those to judge besides the policy as it is; when left out, shift 1, 2, 3 and 5, as far as lists are long
            enough, or blend 0.25, 0.5 and 0.75.
        estimator: as in `evaluate_policies`, but not `ips` and `snips`.
        splits, floor, config, truth, report: as in `evaluate_policies`.
    """
    if estimator in ESTIMATORS and needs_propensity(estimator):
        raise ConfigError(
            f"estimator {estimator} cannot judge a guard, which follows the logged list and meets it more often than "
            "chance; take auto, ratio, self_normalised, doubly_robust or direct"
        )
    shared = CachedPolicy(policy)
    judged = [
        MoveCounter(shared if guard is None else Guarded(shared, guard), guard)
        for guard in _guards(kind, levels, dataset)
    ]
    evaluation = evaluate_policies(
        judged,
        _without_propensity(dataset),
        splits=splits,
        estimator=estimator,
        cutoffs=(),
        floor=floor,
        config=config,
        truth=truth,
        report=report,
    )
    found = [GuardLevel(each.guard, evaluation[each.name], each.moves) for each in judged]
    return GuardLevels(kind, policy.name, found, evaluation)


def _guards(kind: GuardKind, levels: Sequence[float] | None, dataset: Dataset) -> list[Guard | None]:
    """From the closest to the logged order to the policy as it is: blend 1, or no bound at all."""
    if kind not in LEVELS:
        raise ConfigError(f"kind must be {' or '.join(LEVELS)}; got '{kind}'")
    if levels is None:
        enough = dataset.positions - 1
        levels = [level for level in LEVELS[kind] if kind == "blend" or level < enough]
    rising = sorted({Guard(kind, level) for level in levels}, key=lambda guard: guard.level)
    if kind == "shift":
        return [*rising, None]
    return [*(guard for guard in rising if guard.level < 1), Guard("blend", 1)]


def _without_propensity(dataset: Dataset) -> Dataset:
    """The same log, as if its propensities were not known."""
    hidden = copy(dataset)
    roles = [role for role in dataset.description["roles"] if role != "propensity"]
    hidden.description = {**dataset.description, "roles": roles}
    return hidden


@dataclass(eq=False)
class CachedPolicy:
    """A policy that several others start from, asked once for each block."""

    policy: Policy
    _block: Block | None = None
    _found: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def columns(self) -> Sequence[str]:
        return self.policy.columns

    def positions(self, block: Block) -> NDArray[np.int64]:
        if block is not self._block:
            self._block, self._found = block, self.policy.positions(block)
        return self._found


@dataclass(eq=False)
class MoveCounter:
    """A policy that counts how far it moves the items of the blocks it is asked for."""

    policy: Policy
    guard: Guard | None
    moves: Moves = field(default_factory=Moves)

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def columns(self) -> Sequence[str]:
        return [*self.policy.columns, "position"]

    def positions(self, block: Block) -> NDArray[np.int64]:
        found = self.policy.positions(block)
        current = pad(block.column("position"), block.offsets)
        self.moves += moves(pad(found, block.offsets), current, where=where_items(block.offsets))
        return found
