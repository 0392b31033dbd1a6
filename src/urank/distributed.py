"""Workers that learn together, each from its share of the lists, and agree on every number that decides anything.

They are the ranks of `torch.distributed`, whoever started them; a process that is not part of a group is a team of
one, for which all of this does nothing. What workers tell each other travels as tensors or JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "all_reduce_sum",
    "broadcast",
    "broadcast_bytes",
    "gathered",
    "gathered_bytes",
    "rank",
    "share",
    "single_process",
    "size",
]

_ALONE: ContextVar[bool] = ContextVar("urank_alone", default=False)


def size() -> int:
    """The number of workers."""
    dist = sys.modules.get("torch.distributed")  # who has not loaded it is in no group
    return int(dist.get_world_size()) if dist is not None and dist.is_initialized() and not _ALONE.get() else 1


def rank() -> int:
    """The number of this worker, from 0."""
    return int(sys.modules["torch.distributed"].get_rank()) if size() > 1 else 0


@contextmanager
def single_process() -> Iterator[None]:
    """Within this block this worker is a team of one: for what each does by itself, or only one of them does."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def share(count: int) -> range:
    """This worker's part of so many things in a row; all parts are of the same size, or of two that differ by one.

    >>> share(5)
    range(0, 5)
    """
    first, last = (count * worker // size() for worker in (rank(), rank() + 1))
    return range(first, last)


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """The sums of numbers over the workers, the same in each.

    >>> total([1, 2.5])
    [1.0, 2.5]
    """
    if size() == 1:
        return [float(value) for value in values]
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64, device=_device())
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def broadcast(make: Callable[[], Any]) -> Any:
    """What the first worker makes of something that JSON can hold; the others wait for it.

    >>> from_first(lambda: {"a": 1.5})
    {'a': 1.5}
    """
    return make() if size() == 1 else json.loads(broadcast_bytes(lambda: json.dumps(make()).encode()))


def broadcast_bytes(make: Callable[[], bytes]) -> bytes:
    """Bytes that the first worker makes; the others wait for them.

    >>> bytes_from_first(lambda: b"x")
    b'x'
    """
    if size() == 1:
        return make()
    made, failure = b"", None
    if rank() == 0:
        try:
            with single_process():
                made = make()
        except Exception as error:  # the others must hear of it, or they wait for ever
            failure = error
    (failed,) = all_reduce_sum([failure is not None])
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("another worker failed and says why")
    import torch
    import torch.distributed as dist

    length = torch.tensor([len(made)], device=_device())
    dist.broadcast(length, 0)
    content = _bytes(made) if rank() == 0 else torch.empty(int(length), dtype=torch.uint8, device=_device())
    dist.broadcast(content, 0)
    return content.cpu().numpy().tobytes()


def gathered(value: Any) -> list[Any]:
    """What each worker says, in the order of the workers; values are what JSON can hold.

    >>> gathered("x")
    ['x']
    """
    if size() == 1:
        return [value]
    return [json.loads(data) for data in gathered_bytes(json.dumps(value).encode())]


def gathered_bytes(data: bytes) -> list[bytes]:
    """The bytes of each worker, in the order of the workers.

    >>> gathered_bytes(b"x")
    [b'x']
    """
    if size() == 1:
        return [data]
    import torch
    import torch.distributed as dist

    lengths = [0.0] * size()
    lengths[rank()] = float(len(data))
    known = [int(length) for length in all_reduce_sum(lengths)]
    longest = max(known)
    mine = torch.zeros(longest, dtype=torch.uint8, device=_device())
    mine[: len(data)] = _bytes(data)
    parts = [torch.empty_like(mine) for _ in range(size())]
    dist.all_gather(parts, mine)
    return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, known, strict=True)]


def _bytes(data: bytes) -> Tensor:
    import torch

    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(_device())


def _device() -> torch.device:
    """Where messages lie: NCCL knows only GPUs."""
    import torch
    import torch.distributed as dist

    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
