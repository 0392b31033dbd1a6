"""`evaluate` on the workers of a Ray cluster: they train its click models together, and each judges its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from urank import team
from urank.api import evaluate, named_policies
from urank.evaluate.compare import Evaluation
from urank.evaluate.crossfit import CrossfitConfig
from urank.log.dataset import Dataset
from urank.memory import DEFAULT_MEMORY, Memory
from urank.progress import Report, silent
from urank.scale.cluster import Cluster
from urank.scale.crew import run_together
from urank.scale.model_files import model_files, model_from_files
from urank.utility import FLOOR

__all__ = ["evaluate_on_ray"]


def evaluate_on_ray(
    models: Sequence[str],
    data: str | Path,
    cluster: Cluster,
    *,
    split: str = "test",
    estimator: str = "auto",
    floor: float = FLOOR,
    truth: str | None = None,
    config: CrossfitConfig | None = None,
    memory: Memory = DEFAULT_MEMORY,
    report: Report = silent,
) -> Evaluation:
    """What models would earn, as `urank.evaluate` says it.

    Args:
        models: folders of models.
        data: a prepared log that every worker can read: a folder on this machine or a shared disk, or a URL.
        cluster: where.
        split, estimator, floor, truth, config, report: as in `urank.evaluate`.
        memory: what each worker may take.
    """
    settings = {
        "models": [(name, model_files(name)) for name in models],
        "data": data,
        "memory": memory.total,
        "split": split,
        "estimator": estimator,
        "floor": floor,
        "truth": truth,
        "config": config.model_dump_json() if config is not None else None,
    }
    found: Evaluation = run_together(_judge, settings, cluster, report=report)
    return found


def _judge(settings: Mapping[str, Any], report: Report) -> Evaluation | None:
    """On each worker."""
    config = settings["config"]
    names = [name for name, _ in settings["models"]]
    models = [model_from_files(files) for _, files in settings["models"]]
    found = evaluate(
        named_policies(names, models),
        Dataset(settings["data"], memory=Memory(settings["memory"])),
        split=settings["split"],
        estimator=settings["estimator"],
        floor=settings["floor"],
        truth=settings["truth"],
        config=CrossfitConfig.model_validate_json(config) if config is not None else None,
        report=report,
    )
    return found if team.rank() == 0 else None
