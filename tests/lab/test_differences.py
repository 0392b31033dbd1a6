"""What each difference to the paper is worth, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from lab.tiny import lists, results
from urank.lab.claims import differences
from urank.lab.letor_experiment import METHODS
from urank.lab.settings import read_experiment


def test_figures_by_arithmetic() -> None:
    before, after = ([0.5, 0.7, 0.6], [0.4, 0.8, 0.3]), ([0.6, 0.9, 0.6], [0.5, 0.9, 0.2])
    parts = [lists(key, clicks[seed], seed) for key, clicks in (("ctr2", before), ("ctr1", after)) for seed in (0, 1)]
    (found,) = differences(results(*parts), ["ctr1", "ctr2", "urank"])
    assert (found.before, found.after) == (METHODS["ctr2"].name, METHODS["ctr1"].name)
    assert found.clicks_before == pytest.approx(np.mean(before))
    assert found.clicks_after == pytest.approx(np.mean(after))
    assert found.p_value == pytest.approx(ttest_rel(np.mean(after, axis=0), np.mean(before, axis=0)).pvalue)


def test_every_method_of_the_experiment_is_compared() -> None:
    keys = read_experiment("differences").methods
    found = differences(results(*(lists(key, [0.5, 0.6]) for key in keys)), keys)
    compared = {each.before for each in found} | {each.after for each in found}
    assert compared == {METHODS[key].name for key in keys}
    assert all(each.p_value == 1 for each in found)  # nothing differs
