"""Workers of a team hear the same from each other, and learn together what one worker learns alone.

Two processes are started once. Each does everything in `worker` and writes down what it saw; the tests compare the two,
with each other and with this process, which is a team of one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import multiprocessing, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import urank
from urank import distributed
from urank.learning.batches import Batch, ListArrays, MemoryStream, Stream
from urank.learning.features import Featurizer, Inputs, fit_featurizer, own_blocks
from urank.learning.training import History, mean_loss, seeded, train
from urank.learning.training_settings import TrainingConfig
from urank.log import prepare
from urank.log.dataset import Dataset

WORKERS = 2
WAIT_SECONDS = 60
"""How long a worker waits for the other, and half of how long the tests wait for both."""


class Network(nn.Module):
    """Small, of double precision, so that what should be equal is equal to many digits."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 1)).double()

    def forward(self, numeric: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(numeric.double())[:, 0]
        return logits


def loss(network: nn.Module, batch: Batch) -> torch.Tensor:
    return binary_cross_entropy_with_logits(network(batch.numeric)[batch.item], batch.click.double())


def loss_by_lists(network: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the lists, as rankers have it; long ones count no more than short ones."""
    logits, click = network(batch.numeric)[batch.item], batch.click.double()
    bounds = zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)
    return torch.stack([binary_cross_entropy_with_logits(logits[a:b], click[a:b]) for a, b in bounds]).mean()


def made_lists(count: int) -> ListArrays:
    """Lists of 1, 2, … items, so that workers with as many lists do not have as many rows."""
    rng = np.random.default_rng(count)
    lengths = np.arange(1, count + 1)
    rows = int(lengths.sum())
    return ListArrays.from_rows(
        Inputs(rng.normal(size=(rows, 3)).astype(np.float32), np.zeros((rows, 0), np.int64)),
        position=np.concatenate([np.arange(1, n + 1) for n in lengths]),
        click=rng.integers(0, 2, rows).astype(np.float32),
        value=np.arange(rows, dtype=np.float32),
        offsets=np.append(0, np.cumsum(lengths)),
    )


def repeated_lists(count: int) -> ListArrays:
    """Made lists, each logged three times with other clicks and stored once."""
    lists, rng = made_lists(count), np.random.default_rng(count)
    rows = 3 * len(lists.item)
    thrice = ListArrays.from_rows(
        Inputs(np.tile(lists.inputs.numeric, (3, 1)), np.zeros((rows, 0), np.int64)),
        position=np.tile(lists.position, 3),
        click=rng.integers(0, 2, rows).astype(np.float32),
        value=np.ones(rows, dtype=np.float32),
        offsets=np.append(0, np.cumsum(np.tile(np.diff(lists.offsets), 3))),
    )
    return thrice.collapsed()


def learned(
    lists: int,
    batch_lists: int,
    checkpoint: Path | None = None,
    *,
    dropout: float = 0.0,
    by_lists: bool = False,
    repeated: bool = False,
    fail_after: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What a network learns from made lists, the gradients of its last step, and how it went but for the time it took.

    Each worker begins with weights of its own.
    """
    config = TrainingConfig(batch_lists=batch_lists, device="cpu", learning_rate=0.02, **{"epochs": 4, **settings})
    with seeded(10 + distributed.rank()):
        network = Network(dropout)
    stream, held_out = MemoryStream((repeated_lists if repeated else made_lists)(lists)), MemoryStream(made_lists(5))
    measured = 0

    def valid_loss(network: nn.Module) -> float:
        nonlocal measured
        measured += 1
        return mean_loss(network, loss, held_out) if fail_after is None or measured <= fail_after else failed()

    history: History = train(
        network,
        loss_by_lists if by_lists else loss,
        stream,
        valid_loss,
        config,
        seed=3,
        checkpoint=checkpoint,
        weigh=(lambda batch: batch.lists) if by_lists else len,
    )
    return {
        "weights": {name: tensor.tolist() for name, tensor in network.state_dict().items()},
        "gradients": [each.grad.tolist() for each in network.parameters() if each.grad is not None],
        "rounds": [{key: value for key, value in each.items() if key != "seconds"} for each in history.rounds],
        "best": history.best,
    }


LEARNED: dict[str, Callable[[], Any]] = {
    "one step": lambda: learned(7, batch_lists=64),
    "by lists": lambda: learned(7, batch_lists=64, by_lists=True),
    "repeated": lambda: learned(7, batch_lists=64, repeated=True),
    "repeated, by lists": lambda: learned(6, batch_lists=64, repeated=True, by_lists=True),
    "clipped": lambda: learned(7, batch_lists=64, clip=0.05),
    "one more batch": lambda: learned(3, batch_lists=2),
    "many batches": lambda: learned(9, batch_lists=2, dropout=0.3),
}
"""All but the last take the same steps in a team as alone: for a seed, the lists of each step are the same."""


def refusal(call: Callable[[], Any]) -> str:
    """The error that something ends with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def failed() -> Any:
    raise ValueError("no luck")


def messages() -> dict[str, Any]:
    """What a worker hears."""
    number = distributed.rank()
    told: dict[str, Any] = {
        "size": distributed.size(),
        "rank": number,
        "total": distributed.all_reduce_sum([number + 1, 0.5, -1e300]),
        "total of nothing": distributed.all_reduce_sum([]),
        "from first": distributed.broadcast(lambda: {"made by": number, "as one of": distributed.size(), "text": "ä"}),
        "bytes": distributed.broadcast_bytes(lambda: bytes([number, 0, 255])).hex(),
        "no bytes": distributed.broadcast_bytes(lambda: b"").hex(),
        "gathered": distributed.all_gather([number, None, "ä" * number]),
        "gathered bytes": [data.hex() for data in distributed.all_gather_bytes(b"\x01" * 3 * number)],
        "gathered no bytes": [data.hex() for data in distributed.all_gather_bytes(b"")],
        "failed bytes": refusal(lambda: distributed.broadcast_bytes(failed)),
        "failed": refusal(lambda: distributed.broadcast(failed)),
        "not JSON": refusal(lambda: distributed.broadcast(lambda: {1, 2})),
    }
    with distributed.single_process():
        told["single process"] = [
            distributed.size(),
            distributed.rank(),
            list(distributed.share(5)),
            *distributed.all_reduce_sum([number]),
            *distributed.all_gather(number),
        ]
    refusal(in_vain_alone)
    if number == 0:
        with distributed.single_process():  # the other need not take part
            told["by the first"] = distributed.broadcast(lambda: distributed.all_gather("x"))
    told["shares"] = [distributed.all_gather(list(distributed.share(count))) for count in range(8)]
    return told


def in_vain_alone() -> None:
    with distributed.single_process():
        failed()


def streamed(dataset: Dataset) -> dict[str, Any]:
    """The rows of this worker, named by the feature x."""
    featurizer = Featurizer.fit(own_blocks(dataset, "train", ["x"]), ["x"], [])
    stream = Stream(dataset, "train", featurizer, batch_lists=8)
    batches = list(stream.batches(stream.order(1, 2), shuffle=(1, 2)))
    return {
        "x": [batch.numeric[:, 0].tolist() for batch in batches],
        "lists": [len(batch.offsets) - 1 for batch in batches],
    }


def checkpoints(folder: Path) -> dict[str, Any]:
    """Training that goes on from a file which only the first worker has."""
    mine = folder / f"{distributed.rank()}.safetensors"
    begun = refusal(lambda: learned(7, 4, mine, dropout=0.3, patience=9, fail_after=2))
    kept = mine.exists()
    resumed = learned(7, 4, mine, dropout=0.3, patience=9)
    whole = learned(7, 4, dropout=0.3, patience=9)
    if distributed.rank() == 0:
        mine.write_bytes(b"not a checkpoint")
    damaged = refusal(lambda: learned(7, 4, mine))
    return {"begun": begun, "kept": kept, "resumed": resumed, "whole": whole, "damaged": damaged}


def worker(number: int, folder: Path) -> None:
    """All that one of the processes does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "meeting").as_uri(),
        rank=number,
        world_size=WORKERS,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
    many, few = Dataset(folder / "many"), Dataset(folder / "few")
    told = {
        "messages": messages(),
        "learned": {name: learn() for name, learn in LEARNED.items()},
        "checkpoints": checkpoints(folder),
        "streamed": streamed(many),
        "featurizers": [fit_featurizer(each, min_count=3).to_dict() for each in (many, few)],
        "within": [fit_featurizer(each, within_list="auto").to_dict() for each in (many, few)],
        "names only": Featurizer.fit(own_blocks(many, "train", ["brand"]), [], ["brand"], min_count=3).to_dict(),
        "too few": refusal(lambda: learned(1, 2)),  # the last, since the other worker may be left waiting
    }
    (folder / f"{number}.json").write_text(json.dumps(told))
    os._exit(0)  # without the destructors of gloo, whose threads may still wait for the other worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many row groups, and one of a single row group, so that a worker has none of it."""
    folder = tmp_path_factory.mktemp("team")
    rng = np.random.default_rng(2)
    rows = 3_000
    brand = [None if number < 0 else f"b{number}" for number in np.minimum(rng.geometric(0.05, rows), 90) - 2]
    log = pl.DataFrame(
        {
            "query_id": np.arange(rows) // 5,
            "position": np.arange(rows) % 5 + 1,
            "click": rng.integers(0, 2, rows),
            "x": rng.permutation(rows).astype(np.float32),
            "sometimes": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
            "brand": brand,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ROW_GROUP_BYTES", 8_000)
        urank.prepare(urank.read(log), folder / "many", valid=0.1, test=0)
    urank.prepare(urank.read(log[:500]), folder / "few", valid=0.1, test=0)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What the workers saw."""
    started = multiprocessing.start_processes(worker, (folder,), nprocs=WORKERS, join=False, start_method="spawn")
    try:
        deadline = time.monotonic() + 2 * WAIT_SECONDS
        while not started.join(timeout=1):
            assert time.monotonic() < deadline, "the workers hang"
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(WORKERS)]


def heard(told: list[dict[str, Any]], name: str) -> list[Any]:
    return [each["messages"][name] for each in told]


def close(one: Any, other: Any) -> bool:
    """Whether nested numbers are equal but for the order in which they were summed."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(close(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == pytest.approx(other, rel=1e-9, abs=1e-12))


@given(count=st.integers(0, 10**12), workers=st.integers(1, 64))
def test_shares_cover_all_once_and_are_even(count: int, workers: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "size", lambda: workers)
        shares = []
        for number in range(workers):
            patch.setattr(distributed, "rank", lambda number=number: number)
            shares.append(distributed.share(count))
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == count
    assert {len(share) for share in shares} <= {count // workers, count // workers + 1}


def test_a_process_by_itself_is_a_team_of_one() -> None:
    assert (distributed.size(), distributed.rank(), distributed.share(3)) == (1, 0, range(3))
    with pytest.raises(ValueError, match="no luck"):
        distributed.broadcast(failed)


@pytest.mark.slow
def test_workers_know_their_places(told: list[dict[str, Any]]) -> None:
    assert heard(told, "size") == [2, 2]
    assert heard(told, "rank") == [0, 1]
    for count, shares in enumerate(heard(told, "shares")[0]):
        assert [number for share in shares for number in share] == list(range(count))
    assert heard(told, "shares")[0] == heard(told, "shares")[1]


@pytest.mark.slow
def test_sums_are_those_of_all(told: list[dict[str, Any]]) -> None:
    assert heard(told, "total") == [[1.0 + 2.0, 0.5 + 0.5, -2e300]] * 2
    assert heard(told, "total of nothing") == [[], []]


@pytest.mark.slow
def test_the_first_tells_the_others(told: list[dict[str, Any]]) -> None:
    assert heard(told, "from first") == [{"made by": 0, "as one of": 1, "text": "ä"}] * 2
    assert heard(told, "bytes") == ["0000ff"] * 2
    assert heard(told, "no bytes") == [""] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("failed bytes", "ValueError: no luck"),
        ("failed", "ValueError: no luck"),
        ("not JSON", "TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_when_the_first_fails_all_fail(told: list[dict[str, Any]], name: str, reason: str) -> None:
    assert heard(told, name) == [reason, "RuntimeError: the first worker failed; its own error has the reason"]


@pytest.mark.slow
def test_all_hear_what_each_says(told: list[dict[str, Any]]) -> None:
    assert heard(told, "gathered") == [[[0, None, ""], [1, None, "ä"]]] * 2
    assert heard(told, "gathered bytes") == [["", "010101"]] * 2
    assert heard(told, "gathered no bytes") == [["", ""]] * 2


@pytest.mark.slow
def test_alone_is_a_team_of_one(told: list[dict[str, Any]]) -> None:
    assert heard(told, "single process") == [[1, 0, [0, 1, 2, 3, 4], number, number] for number in range(WORKERS)]
    assert told[0]["messages"]["by the first"] == ["x"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_workers_end_with_the_same_bits(told: list[dict[str, Any]], name: str) -> None:
    first, second = (each["learned"][name] for each in told)
    assert first["weights"] == second["weights"]
    assert first["gradients"] == second["gradients"]
    assert first["rounds"] == second["rounds"]
    assert first["best"] == second["best"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LEARNED)[:-1])
def test_a_step_of_a_team_is_that_of_one_worker(told: list[dict[str, Any]], name: str) -> None:
    alone = LEARNED[name]()
    assert len({each["train"] for each in alone["rounds"]}) == 4  # each step changed something
    assert close(told[1]["learned"][name], alone)


@pytest.mark.slow
def test_every_row_is_learned_from_once_in_each_epoch(told: list[dict[str, Any]]) -> None:
    rounds = told[0]["learned"]["many batches"]["rounds"]
    assert [each["rows"] for each in rounds] == [sum(range(1, 10))] * 4


@pytest.mark.slow
def test_training_goes_on_from_the_file_of_the_first(told: list[dict[str, Any]]) -> None:
    first, second = (each["checkpoints"] for each in told)
    assert (first["kept"], second["kept"]) == (True, False)
    assert first["begun"] == "ValueError: no luck"
    for each in (first, second):
        assert each["resumed"] == first["whole"]
        assert each["damaged"].startswith("DataError: ")
        assert "safetensors is not a checkpoint of this training; remove it to start afresh" in each["damaged"]


@pytest.mark.slow
def test_fewer_lists_than_workers_are_refused(told: list[dict[str, Any]]) -> None:
    reason = "TooFewError: there are fewer training lists than the 2 workers; use fewer workers"
    assert [each["too few"] for each in told] == [reason, reason]  # by all alike: none is left waiting


@pytest.mark.slow
def test_batches_of_the_workers_are_parts_of_one_whole(told: list[dict[str, Any]], folder: Path) -> None:
    dataset = Dataset(folder / "many")
    assert len(dataset.groups("train")) > 5
    parts = [each["streamed"] for each in told]
    rows = [[x for batch in part["x"] for x in batch] for part in parts]
    alone = [x for batch in streamed(dataset)["x"] for x in batch]
    assert rows[0] + rows[1] == alone
    assert len(alone) == dataset.rows("train")
    assert abs(sum(parts[0]["lists"]) - sum(parts[1]["lists"])) <= 1
    assert max(max(part["lists"]) for part in parts) == 8 // WORKERS


@pytest.mark.slow
def test_the_featurizer_of_a_team_is_that_of_one_worker(told: list[dict[str, Any]], folder: Path) -> None:
    assert len(Dataset(folder / "few").groups("train")) == 1
    assert told[0]["featurizers"] == told[1]["featurizers"]
    for name, found in zip(("many", "few"), told[1]["featurizers"], strict=True):
        alone = fit_featurizer(Dataset(folder / name), min_count=3)
        (brand,) = Featurizer.from_dict(found).categorical
        assert brand == alone.categorical[0]
        assert len(brand.vocabulary) > 10
        assert [each["missing"] for each in found["numeric"]] == [False, True]
        for ours, one in zip(Featurizer.from_dict(found).numeric, alone.numeric, strict=True):
            assert (ours.name, ours.missing) == (one.name, one.missing)
            assert (ours.mean, ours.std) == pytest.approx((one.mean, one.std), rel=1e-9)


@pytest.mark.slow
def test_within_list_features_of_a_team_are_those_of_one_worker(told: list[dict[str, Any]], folder: Path) -> None:
    assert told[0]["within"] == told[1]["within"]
    for name, found in zip(("many", "few"), told[1]["within"], strict=True):
        alone = fit_featurizer(Dataset(folder / name), within_list="auto")
        team = Featurizer.from_dict(found)
        assert team.within == alone.within == ("x", "sometimes")
        assert team.derived == alone.derived  # of the same sample


@pytest.mark.slow
def test_a_featurizer_of_names_alone(told: list[dict[str, Any]]) -> None:
    assert told[0]["names only"] == told[1]["names only"]
    assert told[0]["names only"]["numeric"] == []
    assert told[0]["names only"]["categorical"] == told[0]["featurizers"][0]["categorical"]
