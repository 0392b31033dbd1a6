"""Trees as a ranker: the derivatives are those of the loss, they learn what earns, and only from train and valid."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray

import urank
from simulated import Small, make, true_utility
from urank.clicks.calibration import Calibration
from urank.clicks.click_model import ClickModel
from urank.errors import ConfigError, DataError
from urank.learning.batches import Stream
from urank.learning.features import Featurizer, Inputs
from urank.learning.lightgbm_data import sample_for_trees, sample_sentence
from urank.learning.training import History
from urank.log.dataset import Block, Dataset, RowGroup
from urank.log.ragged import pad, positions_by_score, where_items
from urank.memory import Memory
from urank.ranking.losses import swap_loss, swaps
from urank.ranking.policies import Random
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import RankerConfig, TreesConfig
from urank.ranking.urank_trees import Chunk, SplitGains, TreesScorer, fit_trees
from urank.ranking.utility import earned, item_gains

CONFIG = TreesConfig(trees=40, min_data_in_leaf=20, threads=1)
RANKER = RankerConfig(seed=3)
POSITIONS = 4


@dataclass(frozen=True, eq=False)
class Truth:
    """The true table as a member of a click model."""

    small: Small
    family: str = "truth"

    def log_ctr(self, inputs: Inputs) -> NDArray[np.float32]:
        return np.log(self.small.table(inputs))


def model_of(small: Small) -> ClickModel:
    K = small.dataset.positions
    return ClickModel(small.featurizer, K, (Truth(small),), Calibration(K))


@pytest.fixture(scope="module")
def clicks(small: Small) -> ClickModel:
    return model_of(small)


@pytest.fixture(scope="module")
def grown(small: Small, clicks: ClickModel) -> tuple[TreesScorer, History]:
    return fit_trees(small.dataset, clicks, RANKER, CONFIG, table=small.table)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A log without values and without categories."""
    return make(tmp_path_factory.mktemp("plain"), queries=200, sessions=4, features=5, seed=2)


def items(small: Small, split: str = "test") -> tuple[Inputs, NDArray[np.float32]]:
    block = next(small.dataset.blocks(split, [*small.dataset.features, "value"]))
    return small.featurizer.encode(block.items), block.column("value")


def read_gains(small: Small, split: str, config: RankerConfig) -> SplitGains:
    stream = Stream(small.dataset, split, small.featurizer, table=small.table)
    return SplitGains.read(stream, config.objective, config.seed)


def changed(config: TreesConfig, **settings: Any) -> TreesConfig:
    return TreesConfig.model_validate(config.model_dump() | settings)


# The objective


def ragged(lengths: list[int], seed: int = 0) -> SplitGains:
    """Lists of these lengths with random gains, K = 4; the rows of a list lie together but in a random order."""
    rng = np.random.default_rng(seed)
    chunks, first = [], 0
    for n in lengths:
        rows = rng.permuted(first + np.arange(2 * n).reshape(2, n), axis=1)
        chunks.append(Chunk(rows, rng.gamma(0.3, 0.1, (2, n, POSITIONS)).astype(np.float32)))
        first += 2 * n
    return SplitGains(tuple(chunks), first, 2 * len(lengths))


@pytest.mark.parametrize("sigma", [1.0, 2.5])
def test_derivatives_are_those_of_the_loss(sigma: float) -> None:
    """Against differences of the loss in float64, with the weights held fixed; lists of 1 item and of more than K."""
    gains = ragged([1, 2, POSITIONS, 9])
    rng = np.random.default_rng(1)
    scores = rng.normal(0, 2, gains.rows).astype(np.float32).astype(np.float64)
    scores[-5:] = scores[-6]  # ties
    gradient, hessian, _ = gains.derivatives(scores, sigma=sigma)
    weights = [swaps(scores[chunk.rows], chunk.gains) for chunk in gains.chunks]

    def loss(scores: NDArray[np.float64]) -> float:
        each = (
            swap_loss(torch.from_numpy(scores[chunk.rows]), found, sigma=sigma).sum().item()
            for chunk, found in zip(gains.chunks, weights, strict=True)
        )
        return sum(each)

    step = 1e-4
    for row in range(gains.rows):
        move = step * (np.arange(gains.rows) == row)
        low, middle, high = loss(scores - move), loss(scores), loss(scores + move)
        assert gradient[row] == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-6)
        assert hessian[row] == pytest.approx((high - 2 * middle + low) / step**2, rel=1e-3, abs=1e-6)
    assert (gradient[:2] == 0).all()  # alone in a list
    assert (hessian[:2] == 0).all()
    assert (hessian[2:] > 0).all()


def test_far_scores_overflow_nothing() -> None:
    gains = ragged([5])
    scores = np.linspace(-1e4, 1e4, gains.rows)
    for each in gains.derivatives(scores, sigma=10.0)[:2]:
        assert np.isfinite(each).all()


def test_utility_is_what_the_lists_earn() -> None:
    gains = ragged([1, 3, 9])
    scores = np.random.default_rng(0).integers(0, 4, gains.rows)  # with ties
    expected = sum(earned(chunk.gains, positions_by_score(scores[chunk.rows])).sum() for chunk in gains.chunks)
    assert gains.utility(scores) == pytest.approx(expected / 6, rel=1e-6)
    assert gains.derivatives(scores)[2] == pytest.approx(expected / 6, rel=1e-6)


def test_chunks_and_threads_change_nothing(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> SplitGains:
        return read_gains(small, "train", RANKER)

    whole = read()
    monkeypatch.setattr("urank.ranking.urank_trees.CHUNK_PAIRS", 1)  # a list at a time
    single = read()
    assert len(single.chunks) == single.lists == whole.lists
    scores = np.random.default_rng(0).normal(size=whole.rows)
    with ThreadPoolExecutor(3) as pool:
        threaded = single.derivatives(scores, pool=pool)
    for one, two, three in zip(whole.derivatives(scores), single.derivatives(scores), threaded, strict=True):
        assert np.array_equal(two, three)
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["model", "counterfactual", "blend"])
def test_gains_are_those_of_the_target(target: Any, small: Small) -> None:
    config = RankerConfig(target=target, blend=0.3, floor=0.05)
    gains = read_gains(small, "valid", config)
    found = np.full((gains.rows, small.dataset.positions), np.nan)
    for chunk in gains.chunks:
        found[chunk.rows] = chunk.gains
    expected = []
    for block in small.dataset.blocks("valid", [*small.dataset.features, "position", "click", "value"]):
        columns = {"value": "value", "click": "click", "logged": "position"}
        padded = {name: pad(block.column(column), block.offsets) for name, column in columns.items()}
        where = where_items(block.offsets)
        table = pad(small.table(small.featurizer.encode(block.items)), block.offsets)
        expected.append(item_gains(table, where=where, blend=config.objective.blend, floor=0.05, **padded)[where])
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-6)


def test_ties_are_not_broken_by_the_logged_order(small: Small) -> None:
    gains = read_gains(small, "train", RANKER)
    rows = np.concatenate([chunk.rows[:, :2] for chunk in gains.chunks])
    assert np.mean(rows[:, 0] < rows[:, 1]) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(len(rows)))
    assert np.array_equal(np.sort(np.concatenate([chunk.rows.ravel() for chunk in gains.chunks])), range(gains.rows))


# The scorer


def test_learns_what_earns(small: Small, clicks: ClickModel, grown: tuple[TreesScorer, History]) -> None:
    model = RankingModel(clicks, grown[0], "score")

    def by(method: Any) -> float:
        return true_utility(
            small, lambda block: model.order(block.items, block.offsets, value=block.column("value"), method=method)
        )

    logged = true_utility(small, lambda block: block.column("position").astype(np.int64))
    assert by("score") > 1.05 * logged
    assert by("score") > 1.05 * true_utility(small, Random().positions)
    assert by("score") < by("match")


def test_scores_rise_with_the_value(small: Small, grown: tuple[TreesScorer, History]) -> None:
    scorer, _ = grown
    inputs, value = items(small)
    assert scorer.takes_value
    low, high = (scorer.score(inputs, np.full_like(value, each)) for each in (2, 9))
    assert low.mean() < high.mean()
    assert np.mean(low < high) > 0.9


def test_without_values_none_are_taken(plain: Small) -> None:
    scorer, _ = fit_trees(plain.dataset, model_of(plain), RANKER, CONFIG)
    inputs = plain.featurizer.encode(next(plain.dataset.blocks("test", plain.dataset.features)).items)
    ones = np.ones(len(inputs), dtype=np.float32)
    assert not scorer.takes_value
    assert scorer.booster.num_feature() == len(plain.featurizer.names)
    assert np.array_equal(scorer.score(inputs, ones), scorer.score(inputs, 7 * ones))
    assert len(np.unique(scorer.score(inputs, ones))) > 10


def test_lists_of_any_length(plain: Small, tmp_path: Path) -> None:
    most = plain.simulation.config.positions
    cut = plain.simulation.log.filter(pl.col("position") <= 1 + pl.col("session_id") % most)
    urank.prepare(urank.read(cut), tmp_path / "cut", valid=0.2, test=0.2)
    dataset = Dataset(tmp_path / "cut")
    offsets = [block.offsets for block in dataset.blocks("train", ["click"])]
    assert set(np.concatenate([np.diff(each) for each in offsets])) == set(range(1, most + 1))
    scorer, history = fit_trees(dataset, model_of(plain), RANKER, CONFIG)
    assert scorer.booster.num_trees() == history.best_round + 1
    assert history.best < history.rounds[0]["train"] * 1.02  # both are negative: above the random order


def test_the_table_is_that_of_the_click_model(
    small: Small, clicks: ClickModel, grown: tuple[TreesScorer, History]
) -> None:
    few = changed(CONFIG, trees=3)
    one, other = (fit_trees(small.dataset, clicks, RANKER, few, table=table)[0] for table in (None, small.table))
    inputs, value = items(small)
    np.testing.assert_allclose(one.score(inputs, value), other.score(inputs, value), atol=1e-3)
    wrong = fit_trees(small.dataset, clicks, RANKER, few, table=lambda inputs: 1 - small.table(inputs))[0]
    assert np.corrcoef(one.score(inputs, value), wrong.score(inputs, value))[0, 1] < 0.9


def test_same_seed_same_text(small: Small, clicks: ClickModel, grown: tuple[TreesScorer, History]) -> None:
    def again(seed: int, **settings: Any) -> TreesScorer:
        config = RankerConfig(seed=seed)
        return fit_trees(small.dataset, clicks, config, changed(CONFIG, **settings), table=small.table)[0]

    assert again(3) == grown[0]
    inputs, value = items(small)
    assert np.array_equal(again(3, threads=2).score(inputs, value), grown[0].score(inputs, value))
    assert again(4).text != grown[0].text


def test_the_unit_of_the_gains_does_not_matter(
    small: Small, clicks: ClickModel, grown: tuple[TreesScorer, History]
) -> None:
    smaller = fit_trees(small.dataset, clicks, RANKER, CONFIG, table=lambda inputs: small.table(inputs) / 1024)
    assert smaller[0] == grown[0]
    assert smaller[1].best == grown[1].best / 1024


def test_sigma_is_the_unit_of_the_scores(small: Small, clicks: ClickModel, grown: tuple[TreesScorer, History]) -> None:
    config = RANKER.model_copy(update={"sigma": 2.0})
    other, _ = fit_trees(small.dataset, clicks, config, CONFIG, table=small.table)
    inputs, value = items(small)
    np.testing.assert_allclose(other.score(inputs, value), grown[0].score(inputs, value) / 2, rtol=1e-5)


def test_text_round_trip(small: Small, grown: tuple[TreesScorer, History], monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, _ = grown
    again = TreesScorer.from_text(scorer.text, small.featurizer, True)
    inputs, value = items(small)
    scores = scorer.score(inputs, value)
    assert (again, again.family) == (scorer, "trees")
    assert scores.dtype == np.float32
    assert scorer.score(inputs[:0], value[:0]).shape == (0,)
    monkeypatch.setattr("urank.learning.lightgbm_data.CHUNK_BYTES", 400)  # a few rows at a time
    assert np.array_equal(again.score(inputs, value), scores)


@pytest.mark.parametrize("text", ["", "nonsense", "tree\nversion=v4\n"])
def test_refuses_text_that_is_no_model(text: str, small: Small) -> None:
    with pytest.raises(DataError, match="LightGBM model"):
        TreesScorer.from_text(text, small.featurizer, True)


def test_refuses_a_model_of_other_columns(small: Small, grown: tuple[TreesScorer, History]) -> None:
    text = grown[0].text
    with pytest.raises(DataError, match=r"6 numeric features, 1 categorical features and nothing else; it takes 8"):
        TreesScorer.from_text(text, small.featurizer, False)
    with pytest.raises(DataError, match=r"6 numeric features, 0 categorical features and the value; it takes 8"):
        TreesScorer.from_text(text, Featurizer(small.featurizer.numeric, ()), True)


# Training


def test_stops_by_the_utility_of_valid(small: Small, clicks: ClickModel) -> None:
    told: list[tuple[Any, ...]] = []
    config = changed(CONFIG, trees=300, learning_rate=0.5, early_stopping=4)
    scorer, history = fit_trees(
        small.dataset, clicks, RANKER, config, table=small.table, report=lambda *step: told.append(step)
    )
    trees = scorer.booster.num_trees()
    assert trees == history.best_round + 1 == len(history.rounds) - 4 < 296
    assert history.best == min(each["valid"] for each in history.rounds)
    valid = read_gains(small, "valid", RANKER)
    assert valid.utility(scorer.score(*items(small, "valid"))) == pytest.approx(-history.best, rel=1e-6)
    train = read_gains(small, "train", RANKER)
    assert train.utility(np.zeros(train.rows)) == pytest.approx(-history.rounds[0]["train"], rel=1e-6)
    assert history.rounds[-1]["train"] < history.rounds[0]["train"]
    rows = small.dataset.rows("train")
    assert [step for step in told if step[0] == "utilities of train"][-1] == ("utilities of train", rows, rows)
    assert told[-1][:3] == ("growing trees", trees + 4, 300)
    assert told[-1][3].startswith("utility ")


def test_the_test_split_is_never_read(small: Small, clicks: ClickModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    read = Dataset.read

    def watched(self: Dataset, group: RowGroup, columns: list[str]) -> Block:
        seen.add(group.path.parent.name)
        return read(self, group, columns)

    monkeypatch.setattr(Dataset, "read", watched)
    fit_trees(small.dataset, clicks, RANKER, changed(CONFIG, trees=2), table=small.table)
    assert seen == {"train", "valid"}


def test_grows_all_trees_without_valid(plain: Small, tmp_path: Path) -> None:
    urank.prepare(urank.read(plain.simulation.log), tmp_path / "log", valid=0.0, test=0.2)
    scorer, history = fit_trees(Dataset(tmp_path / "log"), model_of(plain), RANKER, changed(CONFIG, trees=5))
    assert scorer.booster.num_trees() == len(history.rounds) == 5
    assert history.rounds[-1]["train"] < history.rounds[0]["train"]


def test_nothing_to_learn_gives_no_splits(small: Small, clicks: ClickModel, capfd: pytest.CaptureFixture[str]) -> None:
    def flat(inputs: Inputs) -> NDArray[np.float32]:
        return np.zeros((len(inputs), small.dataset.positions), dtype=np.float32)

    scorer, history = fit_trees(small.dataset, clicks, RANKER, CONFIG, table=flat)
    inputs, value = items(small)
    assert (scorer.score(inputs, value) == 0).all()
    assert history.best == 0
    assert capfd.readouterr() == ("", "")


def test_what_memory_does_not_hold_is_sampled(small: Small, clicks: ClickModel) -> None:
    row_bytes = CONFIG.row_bytes(len(small.dataset.features), small.dataset.positions)
    rows = small.dataset.rows("train") + small.dataset.rows("valid")
    half = Dataset(small.dataset.folder, memory=Memory(row_bytes * rows))  # half of it may be held, so half the rows
    _, history = fit_trees(half, clicks, RANKER, CONFIG, table=small.table)
    learned = int(history.rounds[0]["rows"])
    longest = 6 * small.dataset.positions  # of a query with all its sessions
    assert learned == pytest.approx(small.dataset.rows("train") / 2, abs=longest)
    assert sample_sentence(half, row_bytes) == (
        f"trees learned from a sample, {learned:,} of {small.dataset.rows('train'):,} impressions, "
        "as many as fit in memory"
    )
    assert sample_sentence(small.dataset, row_bytes) is None
    assert sample_for_trees(small.dataset, row_bytes) is small.dataset


def test_refuses_the_form_of_the_paper(small: Small, clicks: ClickModel) -> None:
    with pytest.raises(ConfigError, match="form must be 'stable' for trees"):
        fit_trees(small.dataset, clicks, RankerConfig(form="paper"), CONFIG)


def test_refuses_an_empty_train_split(plain: Small, tmp_path: Path) -> None:
    urank.prepare(urank.read(plain.simulation.log.head(30)), tmp_path / "log", valid=1.0, test=0.0)
    with pytest.raises(DataError, match=r"train split .* must have impressions"):
        fit_trees(Dataset(tmp_path / "log"), model_of(plain), RANKER, CONFIG)
