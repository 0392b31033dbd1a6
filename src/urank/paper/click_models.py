"""A click model as a step of an experiment: trained, and kept as the artifact that later steps load."""

from __future__ import annotations

from pathlib import Path

from urank.clicks.config import ClickConfig
from urank.clicks.fit import fit_clicks
from urank.log.dataset import Dataset
from urank.model import save_model
from urank.progress import Report
from urank.rankers.config import UrankConfig
from urank.rankers.ranking import RankingModel

__all__ = ["keep_click_model"]


def keep_click_model(dataset: Dataset, config: ClickConfig, path: Path, report: Report) -> None:
    """Train on a log and write to `path`; a training that was killed goes on from its last state beside it."""
    found = fit_clicks(dataset, config, reference=False, checkpoints=path.parent / f".{path.name}", report=report)
    save_model(RankingModel(found.model), UrankConfig(ranker="none", clicks=config), path, onnx=False)
