"""Connections to Ray: to a running cluster, or to one started on this machine while it is needed."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from urank.errors import ConfigError

_QUIET = {
    "OMP_NUM_THREADS": "1",  # one core per worker; more threads would only wait for each other
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster.

    Attributes:
        workers: Number of processes that train together, or of tasks that run at once.
        address: Address of a running cluster, as `auto` or `head:6379`; None to start one on this machine.
    """

    workers: int = 2
    address: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers must be a whole number from 1 up; got {self.workers}")


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Connect to Ray for a block; a cluster that was started for it is stopped at the end."""
    for module in ("ray", "upath"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError("the engine ray needs packages that are not installed; run pip install 'urank[ray]'")
    import ray.data
    import ray.train  # imported here because importing them resets log levels

    import ray  # slow to load, and optional

    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)  # urank reports progress itself
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if cluster.address is None:
        options |= {"num_cpus": max(cluster.workers, os.cpu_count() or 1), "include_dashboard": False}
    try:
        # "local" is not one that happens to run here
        ray.init(cluster.address or "local", runtime_env={"env_vars": _QUIET}, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "on this machine" if cluster.address is None else f"at {cluster.address}"
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"there is no Ray cluster {where} that can be used: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()
