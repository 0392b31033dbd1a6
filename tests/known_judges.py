"""Evaluations whose judges know the truth: refitting is replaced by the true click table."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simulated import Small
from urank.clicks.click_settings import ClickConfig
from urank.evaluation import policy_evaluation as module
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.evaluation.refit import HeldOut, Refitted

__all__ = ["QUICK_JUDGES", "let_judges_know"]

QUICK_JUDGES = CrossfitConfig(
    clicks=ClickConfig.model_validate({"families": ["monotone"], "hidden": [8], "training": {"epochs": 1}})
)


def let_judges_know(small: Small, monkeypatch: pytest.MonkeyPatch, shares: Sequence[float] = (1.0, 1.0)) -> None:
    """Replace the judges by the truth, or by a share of it for each of both."""
    judge: Any = SimpleNamespace(featurizer=small.featurizer, positions=small.dataset.positions, name="oracle")

    def known(cuts: Any, held_out: HeldOut, places: Sequence[int], report: Any) -> Refitted:
        tables = [(share * small.table(held_out.inputs)).astype(np.float32) for share in shares]
        queries, home = np.unique(held_out.query, return_inverse=True)
        lists = np.unique(held_out.list_query, return_counts=True)[1]
        rows, shape = np.arange(len(home)), (len(held_out.orders), len(places))
        gains, influence = np.zeros((*shape, 2)), np.zeros((*shape, len(queries)))
        for cut, table in enumerate(tables):
            for policy, order in enumerate(held_out.orders):
                for number, place in enumerate(places):
                    after, before = (
                        np.where(each <= place, table[rows, np.minimum(each, place) - 1], 0)
                        for each in (order, held_out.position)
                    )
                    gained = np.bincount(home, held_out.value * (after - before))
                    gain = gained.sum() / lists.sum()
                    gains[policy, number, cut] = gain
                    influence[policy, number] += (gained - gain * lists) / lists.sum() / 2
        return Refitted(tables, gains, influence, 0.0)

    monkeypatch.setattr(module, "_judges", lambda *_: [[judge], [judge]])
    monkeypatch.setattr(module, "refit", known)
