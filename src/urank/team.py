"""Workers that learn together, each from its share of the lists, and agree on every number that decides anything.

They are the ranks of `torch.distributed`, whoever started them; a process that is not part of a group is a team of
one, for which all of this does nothing. What workers tell each other travels as tensors or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["alone", "from_first", "gathered", "rank", "share", "size", "total"]

_ALONE: ContextVar[bool] = ContextVar("urank_alone", default=False)


def size() -> int:
    """The number of workers."""
    return dist.get_world_size() if dist.is_initialized() and not _ALONE.get() else 1


def rank() -> int:
    """The number of this worker, from 0."""
    return dist.get_rank() if size() > 1 else 0


@contextmanager
def alone() -> Iterator[None]:
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


def total(values: Sequence[float]) -> list[float]:
    """The sums of numbers over the workers, the same in each.

    >>> total([1, 2.5])
    [1.0, 2.5]
    """
    if size() == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64, device=_device())
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def from_first(make: Callable[[], Any]) -> Any:
    """What the first worker makes of something that JSON can hold; the others wait for it.

    >>> from_first(lambda: {"a": 1.5})
    {'a': 1.5}
    """
    if size() == 1:
        return make()
    made = b""
    failure: BaseException | None = None
    if rank() == 0:
        try:
            with alone():
                made = json.dumps(make()).encode()
        except BaseException as error:  # the others must hear of it, or they wait for ever
            failure = error
    told = json.loads(_broadcast(made if failure is None else b'{"failed": true}'))
    if failure is not None:
        raise failure
    if told == {"failed": True}:
        raise RuntimeError("the first worker failed")
    return told


def gathered(value: Any) -> list[Any]:
    """What each worker says, in the order of the workers; values are what JSON can hold.

    >>> gathered("x")
    ['x']
    """
    if size() == 1:
        return [value]
    data = json.dumps(value).encode()
    lengths = [0.0] * size()
    lengths[rank()] = float(len(data))
    longest = int(max(total(lengths)))
    mine = torch.zeros(longest, dtype=torch.uint8, device=_device())
    mine[: len(data)] = _bytes(data)
    parts = [torch.empty_like(mine) for _ in range(size())]
    dist.all_gather(parts, mine)
    known = total(lengths)
    return [json.loads(part[: int(length)].cpu().numpy().tobytes()) for part, length in zip(parts, known, strict=True)]


def _broadcast(data: bytes) -> bytes:
    length = torch.tensor([len(data)], device=_device())
    dist.broadcast(length, 0)
    content = _bytes(data) if rank() == 0 else torch.empty(int(length), dtype=torch.uint8, device=_device())
    dist.broadcast(content, 0)
    return content.cpu().numpy().tobytes()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device())


def _device() -> torch.device:
    """Where messages lie: NCCL knows only GPUs."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
