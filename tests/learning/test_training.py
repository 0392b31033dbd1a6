"""The loop: the same seed gives the same bits, also after kill -9; it stops, keeps its best, streams whole lists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import urank
from urank.clicks.families import build_network, click_loss
from urank.errors import DataError
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.learning.batches import Batch, Stream
from urank.learning.features import Featurizer
from urank.learning.training import History, choose_device, mean_loss, seeded, train
from urank.learning.training_settings import Plan, TrainingConfig, plan_for
from urank.log import prepare
from urank.log.dataset import Dataset
from urank.storage import to_path

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A prepared log of several row groups."""
    folder = tmp_path_factory.mktemp("training")
    log = simulate(SimulationConfig(queries=200, sessions=4, features=4, seed=1)).log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ROW_GROUP_BYTES", 20_000)
        urank.prepare(urank.read(log.drop("relevance", "propensity")), folder / "prepared", valid=0.2, test=0.1)
    return Dataset(folder / "prepared")


@pytest.fixture(scope="module")
def featurizer(dataset: Dataset) -> Featurizer:
    blocks = dataset.blocks("train", dataset.features)
    return Featurizer.fit(blocks, dataset.numeric, dataset.categorical)


def loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return click_loss(network.at(batch.numeric, batch.categorical, batch.item, batch.position), batch.click)  # type: ignore[operator]


def run(
    dataset: Dataset,
    featurizer: Featurizer,
    checkpoint: Path | None = None,
    *,
    fail_after: int | None = None,
    **settings: object,
) -> tuple[torch.nn.Module, History]:
    """A trained network; one that fails does so after so many rounds."""
    measured = 0

    def held_out(network: torch.nn.Module) -> float:
        nonlocal measured
        measured += 1
        if fail_after is not None and measured > fail_after:
            raise CrashError
        return mean_loss(network, loss, valid)

    config = TrainingConfig(**{"epochs": 6, "batch_lists": 32, **settings})  # type: ignore[arg-type]
    with seeded(3):
        network = build_network("monotone", featurizer, dataset.positions)
    stream = Stream(dataset, "train", featurizer, collapse=True)
    valid = Stream(dataset, "valid", featurizer)
    history = train(network, loss, stream, held_out, config, seed=3, checkpoint=checkpoint)
    return network, history


class CrashError(Exception):
    """A crash."""


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_same_seed_same_bits_and_it_learns(dataset: Dataset, featurizer: Featurizer) -> None:
    before = torch.random.get_rng_state()
    first, history = run(dataset, featurizer)
    second, _ = run(dataset, featurizer)
    assert same(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)  # nothing seeds globally
    assert history.best < history.rounds[0]["valid"] or history.best_round == 0
    valid = Stream(dataset, "valid", featurizer)
    assert mean_loss(first, loss, valid) == pytest.approx(history.best, rel=1e-5)  # the best weights are kept
    assert min(r["valid"] for r in history.rounds) == history.best


def test_the_rate_rises_and_falls(dataset: Dataset, featurizer: Featurizer) -> None:
    _, history = run(dataset, featurizer, epochs=20, learning_rate=0.01, patience=20, batch_lists=10)
    steps = [r["step"] for r in history.rounds]
    assert np.argmax(steps) == 1  # a tenth of 20 epochs
    assert steps[1] == pytest.approx(0.01, rel=0.05)
    assert steps[1:] == sorted(steps[1:], reverse=True)
    assert 0 < steps[-1] < 0.01 * 0.01


def test_stops_early(dataset: Dataset, featurizer: Featurizer) -> None:
    _, history = run(dataset, featurizer, epochs=50, learning_rate=0.05, patience=2)
    assert len(history.rounds) == history.best_round + 3 < 50


def test_settings_win_over_the_plan() -> None:
    default = plan_for(5_000)
    assert TrainingConfig().plan(5_000) == default
    assert TrainingConfig(epochs=7, learning_rate=0.5).plan(5_000) == Plan(7, default.batch_lists, 0.5)


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_larger_logs_are_read_less_often_in_larger_batches(lists: int, more: int) -> None:
    small, large = plan_for(min(lists, more)), plan_for(max(lists, more))
    assert 1 <= large.epochs <= small.epochs
    assert small.batch_lists <= 2 * large.batch_lists  # with fewer epochs, smaller batches keep the number of steps


class TwoRates(torch.nn.Module):
    """A network whose second weight learns faster."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))

    def fast_parameters(self) -> list[str]:
        return ["fast"]


def test_fast_parameters_have_ten_times_the_rate_and_no_decay(dataset: Dataset, featurizer: Featurizer) -> None:
    network = TwoRates()
    stream = Stream(dataset, "train", featurizer, collapse=True)
    config = TrainingConfig(epochs=1, learning_rate=1e-4, weight_decay=0.0)
    moved = []
    for decay in (0.0, 1000.0):
        network = TwoRates()
        settings = config.model_copy(update={"weight_decay": decay})
        train(network, lambda net, _: net.slow.sum() + net.fast.sum(), stream, lambda _: 0.0, settings, seed=0)  # type: ignore[operator,union-attr]
        moved.append((1 - network.slow.item(), 1 - network.fast.item()))
    (slow, fast), (decayed, not_decayed) = moved
    assert fast == pytest.approx(10 * slow, rel=1e-2)
    assert not_decayed == fast
    assert decayed > 10 * slow


def test_rounds_within_an_epoch_cover_it_once(dataset: Dataset, featurizer: Featurizer) -> None:
    _, history = run(dataset, featurizer, epochs=1, round_rows=dataset.rows("train") // 3)
    assert len(history.rounds) > 2
    assert sum(r["rows"] for r in history.rounds) == dataset.rows("train")


def test_resumes_to_the_same_bits_from_any_round(dataset: Dataset, featurizer: Featurizer, tmp_path: Path) -> None:
    whole, _ = run(dataset, featurizer, epochs=4, patience=9)
    for stop in (1, 3):
        path = tmp_path / f"{stop}.safetensors"
        with pytest.raises(CrashError):
            run(dataset, featurizer, path, epochs=4, patience=9, fail_after=stop)
        resumed, history = run(dataset, featurizer, path, epochs=4, patience=9)
        assert same(whole, resumed)
        assert [r["round"] for r in history.rounds] == [0, 1, 2, 3]


def test_a_checkpoint_may_be_elsewhere(dataset: Dataset, featurizer: Featurizer) -> None:
    path = to_path("memory://training/checkpoints/a.safetensors")
    try:
        with pytest.raises(CrashError):
            run(dataset, featurizer, path, epochs=2, patience=9, fail_after=1)
        assert path.is_file()
        resumed, history = run(dataset, featurizer, path, epochs=2, patience=9)
    finally:
        path.fs.rm("/training", recursive=True)  # type: ignore[attr-defined]
    whole, _ = run(dataset, featurizer, epochs=2, patience=9)
    assert same(whole, resumed)
    assert [r["round"] for r in history.rounds] == [0, 1]


def test_a_file_that_is_no_checkpoint_is_refused(dataset: Dataset, featurizer: Featurizer, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(DataError, match=r"bad\.safetensors is not a checkpoint of this training"):
        run(dataset, featurizer, path)


@pytest.mark.slow
def test_resumes_after_kill_9(dataset: Dataset, tmp_path: Path) -> None:
    """The command is killed while it trains the click model, and again while it trains the scorer; given once more, it
    ends with the bytes of an undisturbed run."""
    base = [sys.executable, "-m", "urank", "train", str(dataset.folder), "--click-model", "monotone", "--no-onnx"]
    base += ["--epochs", "12", "--quiet", "--calibration", "none"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*base, "-o", str(tmp_path / "whole")], check=True, env=environment, timeout=300)
    checkpoints = tmp_path / ".model.training" / "checkpoints"
    for training in ("monotone-0", "scorer-*"):
        process = subprocess.Popen([*base, "-o", str(tmp_path / "model")], env=environment)
        deadline = time.time() + 120
        while not any(checkpoints.glob(f"{training}.safetensors")) and process.poll() is None:
            assert time.time() < deadline
            time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "model").exists()
    subprocess.run([*base, "-o", str(tmp_path / "model")], check=True, env=environment, timeout=300)
    for file in ("member-0.safetensors", "scorer.safetensors"):
        whole, model = (load_file(tmp_path / name / file) for name in ("whole", "model"))
        assert all(torch.equal(whole[name], model[name]) for name in whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "whole"]


@pytest.mark.parametrize("cache", [0, 2**30])
def test_stream_gives_whole_lists_once(dataset: Dataset, featurizer: Featurizer, cache: int) -> None:
    stream = Stream(dataset, "train", featurizer, batch_lists=7, cache_bytes=cache)
    assert len(stream.groups) > 3
    raw = pl.concat(pl.read_parquet(p) for p in sorted((dataset.folder / "train").glob("*.parquet")))
    expected = sorted(map(tuple, raw["click"].to_list()))
    for epoch in range(2):
        lists, rows = [], 0
        order = stream.order(1, epoch)
        for batch in stream.batches(order, shuffle=(1, epoch)):
            assert batch.position[batch.offsets[:-1]].eq(1).all()
            bounds = batch.offsets.tolist()
            lists += [tuple(batch.click[a:b].int().tolist()) for a, b in pairwise(bounds)]
            rows += len(batch)
        assert rows == dataset.rows("train")
        assert sorted(lists) == expected
    first, second = (next(stream.batches(stream.order(1, e), shuffle=(1, e))).numeric for e in (0, 1))
    assert first.shape != second.shape or not torch.equal(first, second)


def test_stream_agrees_with_a_plain_read(dataset: Dataset, featurizer: Featurizer) -> None:
    stream = Stream(dataset, "valid", featurizer, batch_lists=10**6)
    got = torch.cat([batch.numeric for batch in stream.batches()]).numpy()
    raw = pl.concat(pl.read_parquet(p) for p in sorted((dataset.folder / "valid").glob("*.parquet")))
    expected = raw.select(dataset.numeric).explode(dataset.numeric).to_numpy()
    np.testing.assert_array_equal(got, expected)


def test_device() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_network_keeps_its_mode_while_its_loss_is_measured(
    dataset: Dataset, featurizer: Featurizer, dropout: float
) -> None:
    network = build_network("monotone", featurizer, dataset.positions, dropout=dropout).train()
    valid = Stream(dataset, "valid", featurizer)
    first, second = (mean_loss(network, loss, valid) for _ in range(2))
    assert network.training
    assert first == second  # no dropout, whatever the mode
