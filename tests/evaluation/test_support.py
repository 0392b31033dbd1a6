"""What a log can say about a policy, and the warnings where it cannot."""

from __future__ import annotations

import re
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from logged_lists import batch, policy
from urank.evaluation.estimators import LoggedBatch, Terms, Weighted, list_terms
from urank.evaluation.policy_evaluation import support


def weighted(weight: float, weight_squared: float, clicked: NDArray[np.float64] | None = None) -> Weighted:
    """Sums of 1000 queries that are all alike, but for the clicks if given."""
    ones = np.ones(1000)
    return Weighted(
        clicked=ones if clicked is None else clicked,
        modelled=ones,
        weight=weight * ones,
        weight_squared=weight_squared * ones,
    )


def sound(*, known: bool) -> Terms:
    """Terms without any warning: 1000 queries with 10 placements each, 3 of them as logged."""
    ones = np.ones(1000)
    return Terms(
        lists=ones,
        logged_value=ones,
        placed=10 * ones,
        as_logged=3 * ones,
        floored=0.2 * ones,
        unseen=0.5 * ones,
        direct=ones,
        ratio=weighted(10, 20),
        ips=weighted(10, 10**2 / 3) if known else None,
    )


UNEVEN = np.concatenate([[250.0], np.ones(750), np.zeros(249)])


@pytest.mark.parametrize(
    ("terms", "warning"),
    [
        (sound(known=False), None),
        (sound(known=True), None),
        (replace(sound(known=False), as_logged=np.full(1000, 1.0)), "only 10 % of .* are the logged ones"),
        (replace(sound(known=True), as_logged=np.full(1000, 1.0)), None),
        (replace(sound(known=True), unseen=np.full(1000, 2.0)), "20 % of .* the logged list did not show"),
        (replace(sound(known=True), ips=weighted(4.3, 4.3**2 / 3)), "only 43 % of .* could have been logged"),
        (replace(sound(known=True), ips=weighted(13, 13**2 / 3)), "IPS weights add up to 130 %"),
        (replace(sound(known=False), floored=np.full(1000, 0.7)), "7 % of .* below the floor"),
        (replace(sound(known=False), ratio=weighted(10, 1000 * 10**2 / 499)), "ratio weights .* size of only 499$"),
        (replace(sound(known=True), ips=weighted(10, 1000 * 10**2 / 149)), "IPS weights .* size of only 149$"),
        (replace(sound(known=False), ratio=weighted(10, 20, clicked=UNEVEN)), "one query carries 25 %"),
        (replace(sound(known=True), ips=weighted(10, 10**2 / 3, clicked=UNEVEN)), "one query carries 25 %"),
    ],
)
def test_warnings(terms: Terms, warning: str | None) -> None:
    found = support(terms).warnings
    assert len(found) == (warning is not None)
    assert warning is None or re.search(warning, found[0])


@pytest.mark.parametrize("known", [False, True])
def test_few_placements_are_few_even_when_even(known: bool) -> None:
    one_place = np.ones((20, 1), dtype=int)
    logged = LoggedBatch(
        table=np.full((20, 1, 1), 0.5),
        position=one_place,
        click=one_place,
        value=np.ones((20, 1)),
        where=np.ones((20, 1), dtype=bool),
        propensity=np.ones((20, 1)) if known else None,
    )
    warnings = support(list_terms(logged, one_place)).warnings
    assert [warning.split()[1] for warning in warnings] == (["ratio", "IPS"] if known else ["ratio"])
    assert all(warning.endswith("an effective sample size of only 20") for warning in warnings)


def test_chance_is_no_lack_of_coverage() -> None:
    """The same coverage of 0.85, once from queries that vary so much that it may well be 1."""
    at_random = np.zeros(1000)
    at_random[:17] = 500.0
    terms = sound(known=True)
    assert terms.ips is not None
    steady = support(replace(terms, ips=replace(terms.ips, weight=np.full(1000, 8.5))))
    noisy = support(replace(terms, ips=replace(terms.ips, weight=at_random)))
    assert steady.coverage == noisy.coverage == 0.85
    assert steady.coverage_error == 0
    assert noisy.coverage_error is not None
    np.testing.assert_allclose(noisy.coverage_error, at_random.std(ddof=1) / 10 / sqrt(1000))
    assert len(steady.warnings) == 1
    assert noisy.warnings == []


def test_support_of_a_random_log_by_hand(many: Terms) -> None:
    found = support(many)
    assert many.ips is not None
    assert found.effective_ips is not None
    assert found.coverage is not None
    assert found.coverage_error is not None
    assert found.placements == 3 * many.lists.sum()
    # A third of the placements is as logged, with a weight of 3 each.
    matches = many.as_logged.sum()
    np.testing.assert_allclose(found.as_logged, matches / found.placements)
    np.testing.assert_allclose(found.coverage, 3 * matches / found.placements)
    np.testing.assert_allclose(found.effective_ips, matches)
    assert abs(found.coverage - 1) < 3 * found.coverage_error
    np.testing.assert_allclose(found.effective, many.ratio.weight.sum() ** 2 / many.ratio.weight_squared.sum())
    np.testing.assert_allclose(found.floored, many.floored.sum() / found.placements)
    carried = [clicked.max() / clicked.sum() for clicked in (many.ratio.clicked, many.ips.clicked)]
    np.testing.assert_allclose(found.largest_query, max(carried))


def test_a_policy_that_places_nothing_has_no_support() -> None:
    logged = batch(2, 6, known=True)
    terms = list_terms(logged, policy(2, logged) + 100)
    assert support(terms).warnings == ["this policy gives no item a place"]
