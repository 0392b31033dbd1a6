"""An A/B test in words: what each section shows, and how the numbers are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from urank.report.abtest_tables import level
from urank.report.numbers import percent

if TYPE_CHECKING:
    from urank.abtest.results import Analysis, Result

__all__ = ["how_it_is_made", "outcome", "when_it_was_safe"]

_USERS = (
    "Users are the sample. What one user does hangs together, so errors that take impressions for independent are too "
    "small; a user counts as one observation, however often it came back. The rate of an arm is the sum over its users "
    "of what is counted, divided by the sum of impressions or by the number of users; the lift is the ratio of two "
    "rates, less 1."
)
_DELTA = (
    "Intervals and p-values of the lift come from the delta method: the log of the ratio is close to a weighted sum of "
    "means over users, whose variance is known. On the log scale an interval is symmetric; turned back, it never falls "
    "below −100 %."
)
_BOOTSTRAP = (
    "The interval of the lift comes from the Poisson bootstrap: each of many resamples counts each user a random "
    "number of times, and the interval holds the middle of their lifts. Errors, p-values and all other intervals come "
    "from the delta method on the log of the ratio."
)
_CUPED = (
    "CUPED takes out what users did before the test. It cannot be due to the test, and it tells in part what they do "
    "in it, so without it chance is smaller: by {reduced} of the variance. {seen} of the users were seen before."
)
_ALWAYS = (
    "An interval of {level} misses the truth in {alpha} of all tests when one looks once, at the end that was planned. "
    "Who looks every day and stops when 0 is left out is wrong far more often. The always-valid interval is wider, "
    "such that all looks together miss it in at most {alpha}. It is tightest near the lift that the test was planned "
    "for, {expected}."
)
_CHECKS = (
    "A/A splits cut the same users at random in halves and count how often the test finds a difference that cannot be "
    "there; that should be in {alpha}. It cannot tell whether users are the right sample."
)
_HOLM = "There are several treatments, so p-values are corrected by Holm's method; intervals are not."
_LIMITS = (
    "What the numbers cannot know: whether what one arm saw changed what the other did, and whether users go on as "
    "they did in these days."
)


def outcome(result: Result) -> int:
    """1 when the treatment earned more, −1 when less, 0 when that cannot be told."""
    if not result.differs:
        return 0
    return 1 if result.effect.lift.value > 0 else -1


def when_it_was_safe(result: Result) -> str:
    """From which day on one who looks daily knew the sign of the lift."""
    title = result.metric.title
    if result.decided is None:
        return f"{title}: the always-valid interval never left out 0, so there was no day to stop on."
    day = result.decided
    return f"{title}: from the end of {day} on it was safe to decide, as the always-valid interval then left out 0."


def how_it_is_made(analysis: Analysis) -> Iterator[str]:
    """What the numbers mean, in paragraphs."""
    share = percent(analysis.alpha, decimals=0 if analysis.alpha >= 0.01 else None)
    yield _USERS
    yield _DELTA if analysis.interval == "delta" else _BOOTSTRAP
    adjusted = [result.cuped for result in analysis.results if result.cuped is not None]
    if adjusted:
        least, most = (percent(max(0.0, of(each.variance_reduction for each in adjusted))) for of in (min, max))
        reduced = least if least == most else f"{least} to {most}"
        yield _CUPED.format(reduced=reduced, seen=percent(adjusted[0].seen_before))
    if any(result.looks for result in analysis.results):
        yield _ALWAYS.format(level=level(analysis.alpha), alpha=share, expected=percent(analysis.expected_lift))
    if analysis.splits:
        yield _CHECKS.format(alpha=share)
    if len(analysis.treatments) > 1:
        yield _HOLM
    yield _LIMITS
