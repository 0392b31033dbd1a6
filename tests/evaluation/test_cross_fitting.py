"""The judges of an evaluation are not trained on the queries that they judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from known_judges import QUICK_JUDGES
from simulated import Small
from urank.clicks.click_settings import ClickConfig
from urank.evaluation import cross_fitting as module
from urank.evaluation.cross_fitting import CrossfitConfig, fit_judges
from urank.log.dataset import Dataset
from urank.log.folds import fold_of


@dataclass
class Trainer:
    """Stands for `fit_clicks`, and records what each network was trained on."""

    made: list[SimpleNamespace] = field(default_factory=list)

    def __call__(self, dataset: Dataset, config: ClickConfig, *, featurizer: Any, **_: Any) -> SimpleNamespace:
        blocks = [block for part in ("train", "valid") for block in dataset.blocks(part, ["position"])]
        seen = {name for block in blocks for name in block.lists["query_id"].to_pylist()}
        self.made.append(SimpleNamespace(seen=seen, seed=config.seed, featurizer=featurizer or object()))
        return SimpleNamespace(model=self.made[-1])


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(module, "fit_clicks", trainer)
    return trainer


@pytest.mark.parametrize("splits", [["test"], ["valid", "test"]])
@pytest.mark.parametrize(("seed", "cut"), [(0, 0), (7, 1)])
def test_no_query_is_judged_by_what_it_taught(
    small: Small, trainer: Trainer, splits: list[str], seed: int, cut: int
) -> None:
    judges: list[Any] = fit_judges(small.dataset, splits, CrossfitConfig(seed=seed), cut=cut)
    everything: set[str] = set()
    for split in splits:
        for block in small.dataset.blocks(split, ["position"]):
            halves = fold_of(block, 2, seed + cut)
            for query, half in zip(block.lists["query_id"].to_pylist(), halves, strict=True):
                everything.add(query)
                assert query not in judges[half].seen
                assert query in judges[1 - half].seen
    assert judges[0].seen | judges[1].seen == everything  # and nothing but these splits was learned from
    assert judges[0].featurizer is judges[1].featurizer


def test_seeds(small: Small, trainer: Trainer) -> None:
    for seed, cut in ((0, 0), (0, 0), (0, 1), (1, 0)):
        fit_judges(small.dataset, ["test"], CrossfitConfig(seed=seed), cut=cut)
    first, again, cut, other = (trainer.made[n : n + 2] for n in range(0, 8, 2))
    assert [each.seen for each in first] == [each.seen for each in again]
    assert [each.seed for each in first] == [each.seed for each in again] == [0, 1]
    assert ([each.seed for each in cut], [each.seed for each in other]) == ([2, 3], [1, 2])
    assert first[0].seen != cut[0].seen


def test_progress(small: Small) -> None:
    steps: list[str] = []
    judges = fit_judges(small.dataset, ["test"], QUICK_JUDGES, report=lambda step, *_: steps.append(step))
    assert [judge.name for judge in judges] == ["monotone", "monotone"]
    assert {step.split(":")[0] for step in steps} == {"judge 1", "judge 2"}


def test_settings_that_are_refused() -> None:
    for settings in ({"seed": -1}, {"colour": 1}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            CrossfitConfig.model_validate(settings)
