"""Judge a fitted click model on held-out queries, against the position-based model, a constant, and the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from urank.clicks.fitting import ClickConfig, Fit, predictions
from urank.evaluation.click_quality import Quality, quality, reliability, table_error
from urank.lab.truth import oracle_predictions, read_truth
from urank.log.dataset import Dataset
from urank.report.click_report import FitReport

__all__ = ["fit_report"]

TRAIN_ROWS, HELD_OUT_ROWS = 500_000, 2_000_000
"""Rows of train, and of valid and test each, that are looked at, up to the end of a row group; more tell no more. Where
the truth is known, all of valid and test are."""

Predictions = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]


def fit_report(fit: Fit, dataset: Dataset, config: ClickConfig, *, truth: str | Path | None = None) -> FitReport:
    """The report of a fit.

    Args:
        fit: what `fit_clicks` gave.
        dataset: the log it was trained on; its test split is looked at here for the first time.
        config: how it was trained.
        truth: what `urank simulate` wrote, when the log is simulated.
    """
    name = fit.model.name
    counts = dataset.description["counts"]["train"]
    rate = counts["clicks"] / counts.get("shown", counts["rows"])
    splits = [split for split in ("train", "valid", "test") if dataset.rows(split)]
    known = read_truth(truth) if truth is not None else None
    judged: dict[str, dict[str, Quality]] = {}
    reliable = {}
    for split in splits:
        most = TRAIN_ROWS if split == "train" else None if known is not None else HELD_OUT_ROWS
        contenders: dict[str, Predictions] = {name: predictions(fit.model, dataset, split, most_rows=most)}
        _, position, click = contenders[name]
        if name != "pbm" and fit.reference is not None:
            contenders["pbm"] = predictions(fit.reference, dataset, split, most_rows=most)
        contenders["constant"] = (np.full(len(click), np.log(rate), dtype=np.float32), position, click)
        if known is not None and split == "test":
            contenders["oracle"] = oracle_predictions(known, dataset, split)
        judged[split] = {who: quality(*found, positions=dataset.positions) for who, found in contenders.items()}
        reliable = {who: reliability(np.exp(contenders[who][0]), click) for who in contenders if who in (name, "pbm")}
    facts = None
    if known is not None:
        facts = table_error(fit.model.log_ctr(known), np.array(known["table"].to_list())[:, : dataset.positions])
        if "oracle" in judged.get("test", {}):
            facts["oracle_share"] = judged["test"]["oracle"].log_loss / judged["test"][name].log_loss
    kept = f"{fit.model.members[0].family}-{config.seed}"
    rounds = fit.histories[kept].rounds if kept in fit.histories else []
    return FitReport(
        name=name,
        settings={
            "tried": ", ".join(f"{who} {loss:.5f}" for who, loss in fit.valid_loss.items()),
            "backbone": config.backbone,
            "calibration": config.calibration,
            "seed": str(config.seed),
        },
        qualities=judged,
        history=[{"round": r["round"], "train_loss": r["train"], "valid_loss": r["valid"]} for r in rounds],
        reliability=reliable,
        truth=facts,
    )
