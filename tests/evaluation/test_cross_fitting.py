"""The judges of an evaluation never saw the queries that they judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from simulated import Small
from urank.clicks.fitting import ClickConfig
from urank.evaluation import cross_fitting as module
from urank.evaluation.cross_fitting import CrossfitConfig, CrossFittedModels, fit_cross_fitted, fold_of
from urank.log.dataset import Block, Dataset

QUICK = ClickConfig.model_validate({"families": ["pbm"], "training": {"epochs": 1}})


@dataclass(frozen=True, eq=False)
class Marked:
    """A click model that says its number, and what it was trained on."""

    number: int
    seen: set[str]
    seed: int
    positions: int

    def log_ctr(self, items: Any, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full((items.num_rows, self.positions), np.log(0.5) - self.number)


@dataclass
class Trainer:
    """Stands for `fit_clicks`."""

    made: list[Marked] = field(default_factory=list)

    def __call__(self, dataset: Dataset, config: ClickConfig, **_: Any) -> SimpleNamespace:
        blocks = [block for part in ("train", "valid") for block in dataset.blocks(part, ["position"])]
        seen = {name for block in blocks for name in block.lists["query_id"].to_pylist()}
        self.made.append(Marked(len(self.made), seen, config.seed, dataset.positions))
        return SimpleNamespace(model=self.made[-1])


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(module, "fit_clicks", trainer)
    return trainer


@pytest.mark.parametrize("splits", [["test"], ["valid", "test"]])
@pytest.mark.parametrize("seed", [0, 7])
def test_no_query_is_judged_by_what_it_taught(small: Small, trainer: Trainer, splits: list[str], seed: int) -> None:
    cuts = 3
    judges = fit_cross_fitted(small.dataset, splits, CrossfitConfig(cuts=cuts, seed=seed, clicks=QUICK))
    assert len(trainer.made) == 2 * cuts
    everything: set[str] = set()
    for split in splits:
        for block in small.dataset.blocks(split, [*small.dataset.features, "position"]):
            tables = judges.tables(block)
            assert tables.shape == (cuts, 2, block.items.num_rows, small.dataset.positions)
            own = judges.own(block, tables)
            for number, query in enumerate(block.lists["query_id"].to_pylist()):
                everything.add(query)
                fair = [model for model in trainer.made if query not in model.seen]
                assert len(fair) == cuts  # one in each cut
                rows = slice(int(block.offsets[number]), int(block.offsets[number + 1]))
                expected = np.mean([0.5 * np.exp(-model.number) for model in fair])
                np.testing.assert_allclose(own[rows], expected, rtol=1e-9)
    assert set.union(*(model.seen for model in trainer.made)) == everything  # and nothing but these splits taught


def test_two_models_of_a_cut_have_no_query_in_common(small: Small, trainer: Trainer) -> None:
    judges = fit_cross_fitted(small.dataset, ["test"], CrossfitConfig(cuts=2, clicks=QUICK))
    for cut in judges.models:
        assert cut[0].seen.isdisjoint(cut[1].seen)  # type: ignore[attr-defined]


def test_seeds(small: Small, trainer: Trainer) -> None:
    for seed in (0, 0, 1):
        fit_cross_fitted(small.dataset, ["test"], CrossfitConfig(cuts=2, seed=seed, clicks=QUICK))
    first, again, other = trainer.made[:4], trainer.made[4:8], trainer.made[8:]
    assert [model.seen for model in first] == [model.seen for model in again]
    assert [model.seed for model in first] == [model.seed for model in again] == [0, 1, 2, 3]
    assert [model.seed for model in other] == [1, 2, 3, 4]  # the seed is of all random numbers
    assert first[0].seen != other[0].seen


def test_own_by_hand() -> None:
    """Two cuts, three queries of which the second has two lists."""
    lists = pl.DataFrame({"query_id": ["a", "b", "b", "c"]}).to_arrow()
    offsets = np.array([0, 2, 3, 5, 6])
    items = pl.DataFrame({"position": [1, 2, 1, 1, 2, 1]}).to_arrow()
    block = Block(lists, items, offsets)
    tables = np.random.default_rng(0).random((2, 2, 6, 3))
    own = CrossFittedModels([], seed=4).own(block, tables)
    halves = np.array([fold_of(block, 2, seed) for seed in (4, 5)])
    for row, number in enumerate([0, 0, 1, 2, 2, 3]):
        expected = (tables[0, halves[0, number], row] + tables[1, halves[1, number], row]) / 2
        np.testing.assert_allclose(own[row], expected)


def test_real_models(small: Small) -> None:
    steps: list[str] = []
    config = CrossfitConfig(cuts=1, clicks=QUICK)
    judges = fit_cross_fitted(small.dataset, ["test"], config, report=lambda step, *_: steps.append(step))
    assert [[model.name for model in cut] for cut in judges.models] == [["pbm", "pbm"]]
    assert {step.split(":")[0] for step in steps} == {"judge 1 of 2", "judge 2 of 2"}
    (block,) = small.dataset.blocks("test", [*small.dataset.features, "position"])
    own = judges.own(block, judges.tables(block))
    assert ((own > 0) & (own < 1)).all()
    again = fit_cross_fitted(small.dataset, ["test"], config)
    np.testing.assert_array_equal(again.own(block, again.tables(block)), own)


def test_settings_that_are_refused() -> None:
    for settings in ({"cuts": 0}, {"seed": -1}, {"colour": 1}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            CrossfitConfig.model_validate(settings)
