"""An evaluation in words: the sentence that counts, how the numbers are made, and what they cannot know."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from typing import TYPE_CHECKING

from urank.log.split import SPLITS
from urank.report.evaluation_tables import all_positions, calibration_sentence, ranked, units_of
from urank.report.numbers import counted, p_text

if TYPE_CHECKING:  # torch is slow to load
    from urank.evaluate.compare import Evaluation, PolicyValue
    from urank.evaluate.stats import Comparison
    from urank.report.numbers import Units

__all__ = [
    "best_policy",
    "evaluation_sentence",
    "how_it_is_made",
    "how_it_is_supported",
    "how_it_is_tested",
    "told_apart",
]

DOUBT = 0.05
"""The p-value from which on a policy is not told apart from the logged order; its 95 % interval then holds 0."""

_IN_WORDS = {
    "direct": "the click model alone",
    "ratio": "Eq. 3",
    "self_normalised": "Eq. 3 (self-normalised)",
    "doubly_robust": "the doubly robust estimator",
    "ips": "inverse propensities",
    "snips": "inverse propensities (self-normalised)",
}
_METHOD = {
    "direct": "each item earns what the click model expects of it at its new position",
    "ratio": "each logged click is carried to the item's new position: it counts by how much more, or less, likely a "
    "click is there than where the item was shown (Eq. 3 of the paper)",
    "self_normalised": "each logged click is carried to the item's new position (Eq. 3 of the paper), and the sum is "
    "divided by what it would be if all clicks came as modelled",
    "doubly_robust": "each item earns what the click model expects of it at its new position, corrected by the clicks "
    "of the log that the model did not expect",
    "ips": "clicks on items that keep their logged position count, each divided by how likely the logging was to put "
    "the item there",
    "snips": "clicks on items that keep their logged position count, each divided by how likely the logging was to put "
    "the item there, and the sum is divided by that of these weights",
}
_INTERVALS = (
    "A query counts as one observation, however many lists it has. Differences are taken query by query, so two "
    "policies may be told apart although their own intervals overlap. Percents are of what the logged order earns. "
    "Each interval holds for its own number: the best of many policies looks better than it is."
)
_LIMITS = (
    "What the numbers cannot know: whether a click also depends on the items around it (they assume that it depends on "
    "the item and its position alone); whether the click model is wrong in a way that its test on the log does not "
    "show; what items would earn that these lists did not hold; and whether people click tomorrow as they did in this "
    "log. Only an experiment tells that."
)
_TRUTH = (
    "The log is simulated, so the truth is known: what the true click probabilities say that each order earns on the "
    "same lists."
)
_SUPPORT = (
    "As logged: the share of a policy's placements that the log has seen. Effective: so many evenly weighted ones tell "
    "as much. Floored: the share with a logged click probability below the floor of {floor:g}, which count for less "
    "than they should."
)
_COVERAGE = " Coverage: the share of the placements that the logging could have produced, 100 % up to chance."


def best_policy(evaluation: Evaluation) -> PolicyValue | None:
    """The policy with the largest estimate, the logged and a random order apart; none when there is no other."""
    others = [policy for policy in ranked(evaluation)[1:] if policy.name != "random"]
    return others[0] if others else None


def told_apart(policy: PolicyValue) -> int:
    """1 when it earns more than the logged order, −1 when less, 0 when that cannot be told."""
    found = policy.difference
    if found is None or not found.p_value < DOUBT:
        return 0
    return 1 if found.mean > 0 else -1


def evaluation_sentence(evaluation: Evaluation, policy: str | None = None) -> str:
    """The one line that counts: what a policy would earn, against the logged order.

    Args:
        evaluation: what was found.
        policy: the name of the one to tell of; the best when left out.
    """
    units, K = units_of(evaluation), all_positions(evaluation)
    told = best_policy(evaluation) if policy is None else evaluation[policy]
    how = f"estimated by {_IN_WORDS[evaluation.estimator]} on {_judged_by(evaluation)}"
    if told is None or told.difference is None:
        logged = evaluation.policies[0].utility[K]
        earned = f"the logged order earns {_amount(evaluation, logged.mean)}"
        return f"{earned} (95 % interval {units.within(logged.low, logged.high)}), {how}"
    if isnan(told.utility[K].mean):
        return f"what {told.name} would earn cannot be {how}"
    earned = f"{told.name} would earn {_amount(evaluation, told.utility[K].mean)}"
    sentence = f"{earned}{_against(told.difference, units)}, {how}"
    return sentence if told.true is None else f"{sentence}; the truth is {units.amount(told.true[K])}"


def _against(found: Comparison, units: Units) -> str:
    """How that stands to the logged order."""
    if found.n > 1 and found.mean == 0 and found.error == 0:
        return ", just as the logged order does"
    size = f"{units.size(found.mean)} {'less' if found.mean < 0 else 'more'}"
    if isnan(found.p_value):
        return f" and cannot be told apart from the logged order ({size}, but one query has no interval)"
    p_value = p_text(found.p_value)
    equals = f"p < {p_value[1:]}" if p_value.startswith("<") else f"p = {p_value}"
    evidence = f"95 % interval {units.sizes(found.low, found.high)}, {equals}"
    if found.p_value < DOUBT:
        return f", {size} than the logged order ({evidence})"
    return f" and cannot be told apart from the logged order ({size}, {evidence})"


def _amount(evaluation: Evaluation, utility: float) -> str:
    shown = units_of(evaluation).amount(utility)
    return f"{shown} clicks a list" if evaluation.measure == "clicks" else f"a {evaluation.measure} of {shown} a list"


def _judged_by(evaluation: Evaluation) -> str:
    queries = counted(evaluation.queries, "query", "queries")
    if evaluation.splits == ["test"]:
        return queries.replace(" ", " held-out ")
    if set(evaluation.splits) == set(SPLITS):
        return queries
    return f"{queries} of the {' and '.join(evaluation.splits)} split{'s' if len(evaluation.splits) > 1 else ''}"


def how_it_is_supported(evaluation: Evaluation) -> str:
    """What the columns of the support table mean."""
    known = any(policy.support.coverage is not None for policy in evaluation.policies)
    return _SUPPORT.format(floor=evaluation.floor) + (_COVERAGE if known else "")


def how_it_is_tested(evaluation: Evaluation) -> str:
    """How the click model of the evaluation is tested, and what came out."""
    found = calibration_sentence(evaluation.specification)
    return (
        "The rows of each position are cut into thirds by how likely the evaluation's click model thinks a click is, "
        "and predicted click rates are compared with observed ones, on queries that the model did not see: "
        f"{found}."
    )


def how_it_is_made(evaluation: Evaluation) -> Iterator[str]:
    """What the numbers mean, in paragraphs."""
    cuts = len(evaluation.clicks) // 2
    again = "" if cuts == 1 else f", {cuts} times in different ways"
    names = ", ".join(dict.fromkeys(evaluation.clicks))
    yield (
        f"What would people have clicked in another order? By the estimator {evaluation.estimator}, "
        f"{_METHOD[evaluation.estimator]}."
    )
    yield (
        f"The click probabilities are cross-fitted: the {evaluation.queries:,} queries ({evaluation.lists:,} lists, "
        f"{evaluation.rows:,} rows) are cut in halves{again}, and each half is judged by a click model ({names}) that "
        "was trained on the other. It is none of the models under test, so none of them gains by its own errors."
    )
    yield _INTERVALS
    yield _LIMITS
    if any(policy.true is not None for policy in evaluation.policies):
        yield _TRUTH
