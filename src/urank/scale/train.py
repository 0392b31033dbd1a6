"""`fit_model` on the workers of a Ray cluster: each reads its share of the row groups, gradients are averaged."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from urank import team
from urank.api import fit_model
from urank.files import new_folder
from urank.log.dataset import Dataset
from urank.memory import DEFAULT_MEMORY, Memory
from urank.model import save_model
from urank.paths import to_path
from urank.progress import Report, silent
from urank.rankers.config import UrankConfig
from urank.report.clicks import FitReport
from urank.report.fit import fit_report
from urank.scale.cluster import Cluster
from urank.scale.crew import run_together

__all__ = ["Trained", "train_on_ray"]


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training on a cluster made.

    Attributes:
        files: the files of the model, by name.
        judged: how good its click model is.
        name, method, why: of the model, how it ranks, and how that was chosen.
        rounds: of every network, by name, as `History` has them.
    """

    files: dict[str, bytes]
    judged: FitReport
    name: str
    method: str
    why: str
    rounds: dict[str, list[dict[str, float]]]

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model into a folder; `urank.load_model` reads it."""
        with new_folder(folder, marker="manifest.json", overwrite=overwrite) as target:
            for name, content in self.files.items():
                (target / name).write_bytes(content)


def train_on_ray(
    data: str | Path,
    config: UrankConfig,
    cluster: Cluster,
    *,
    checkpoints: str | Path,
    memory: Memory = DEFAULT_MEMORY,
    truth: str | None = None,
    onnx: bool = True,
    report: Report = silent,
) -> Trained:
    """Train a model as `fit_model` does.

    Args:
        data: a prepared log that every worker can read: a folder on this machine or a shared disk, or a URL.
        config: settings.
        cluster: where.
        checkpoints: a folder for the state of every training, from which workers that replace lost ones go on; only
            the first worker writes and reads it.
        memory: what each worker may take.
        truth: what `urank simulate` wrote, to compare with.
        onnx: write the model as ONNX graphs too.
        report: told how far it is.
    """
    settings = {
        "data": data,
        "config": config.model_dump_json(),
        "checkpoints": checkpoints,
        "memory": memory.total,
        "truth": truth,
        "onnx": onnx,
    }
    trained: Trained = run_together(_fit, settings, cluster, report=report)
    return trained


def _fit(settings: Mapping[str, Any], report: Report) -> Trained | None:
    """On each worker."""
    dataset = Dataset(settings["data"], memory=Memory(settings["memory"]))
    config = UrankConfig.model_validate_json(settings["config"])
    fit = fit_model(dataset, config, checkpoints=to_path(settings["checkpoints"]), report=report)
    if team.rank():
        return None
    with team.alone(), tempfile.TemporaryDirectory(prefix="urank-") as name:
        judged = fit_report(fit.clicks, dataset, config.clicks, truth=settings["truth"])
        report("writing the model", 0, None)
        folder = Path(name) / "model"
        facts = {"quality": judged.to_dict(), "why": fit.why}
        save_model(fit.model, config, folder, onnx=settings["onnx"], facts=facts)
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return Trained(files, judged, fit.model.name, fit.model.method, fit.why, fit.rounds)
