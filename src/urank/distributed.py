"""Collective operations over `torch.distributed`. Without a process group these are no-ops.

Each worker trains on its share of the lists, and all workers agree on every number that affects a decision. Messages
are tensors or JSON. Torch is imported only inside a process group.
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


_SINGLE: ContextVar[bool] = ContextVar("urank_single_process", default=False)


def size() -> int:
    """Return the number of workers."""
    dist = sys.modules.get("torch.distributed")  # a process that has not imported it is in no group
    return int(dist.get_world_size()) if dist is not None and dist.is_initialized() and not _SINGLE.get() else 1


def rank() -> int:
    """Return the number of this worker, from 0."""
    return int(sys.modules["torch.distributed"].get_rank()) if size() > 1 else 0


@contextmanager
def single_process() -> Iterator[None]:
    """Leave the process group within this block, for work that each worker, or only one of them, does alone."""
    token = _SINGLE.set(True)
    try:
        yield
    finally:
        _SINGLE.reset(token)


def share(count: int) -> range:
    """Return this worker's contiguous part of `range(count)`; the sizes of the parts differ by at most one.

    >>> share(5)
    range(0, 5)
    """
    return range(count * rank() // size(), count * (rank() + 1) // size())


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Sum each number over the workers; every worker gets the same bits.

    >>> all_reduce_sum([1, 2.5])
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
    """Send a JSON-serialisable value, computed by the first worker, to all workers.

    >>> broadcast(lambda: {"a": 1.5})
    {'a': 1.5}
    """
    return make() if size() == 1 else json.loads(broadcast_bytes(lambda: json.dumps(make()).encode()))


def broadcast_bytes(make: Callable[[], bytes]) -> bytes:
    """Send bytes, computed by the first worker, to all workers; if computing them fails, every worker raises.

    >>> broadcast_bytes(lambda: b"x")
    b'x'
    """
    if size() == 1:
        return make()
    made, failure = b"", None
    if rank() == 0:
        try:
            with single_process():
                made = make()
        except Exception as error:  # without being notified, the others would wait forever
            failure = error
    (failed,) = all_reduce_sum([failure is not None])
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("the first worker failed; its own error has the reason")
    import torch
    import torch.distributed as dist

    length = torch.tensor([len(made)], device=_device())
    dist.broadcast(length, 0)
    content = _to_tensor(made) if rank() == 0 else torch.empty(int(length), dtype=torch.uint8, device=_device())
    dist.broadcast(content, 0)
    return content.cpu().numpy().tobytes()


def all_gather(value: Any) -> list[Any]:
    """Collect a JSON-serialisable value from each worker, in the order of the workers.

    >>> all_gather("x")
    ['x']
    """
    if size() == 1:
        return [value]
    return [json.loads(data) for data in all_gather_bytes(json.dumps(value).encode())]


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Collect bytes from each worker, in the order of the workers.

    >>> all_gather_bytes(b"x")
    [b'x']
    """
    if size() == 1:
        return [data]
    import torch
    import torch.distributed as dist

    lengths = [0.0] * size()
    lengths[rank()] = float(len(data))
    counts = [int(length) for length in all_reduce_sum(lengths)]
    mine = torch.zeros(max(counts), dtype=torch.uint8, device=_device())
    mine[: len(data)] = _to_tensor(data)
    parts = [torch.empty_like(mine) for _ in range(size())]
    dist.all_gather(parts, mine)
    return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, counts, strict=True)]


def _to_tensor(data: bytes) -> Tensor:
    import torch

    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(_device())


def _device() -> torch.device:
    """Return the device of messages: NCCL supports only GPUs."""
    import torch
    import torch.distributed as dist

    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
