"""Scorers as ONNX graphs: raw numbers, raw text and, where a scorer was trained on them, values in; `score` out."""

from __future__ import annotations

import onnx
import torch

from urank.clicks.onnx import export_module, with_raw_categories
from urank.features import Featurizer
from urank.rankers.network import NetworkScorer

__all__ = ["scorer_to_onnx"]


def scorer_to_onnx(scorer: NetworkScorer, featurizer: Featurizer) -> onnx.ModelProto:
    """The graph of a scorer: `numeric[rows, F]`, `categorical[rows, C]` and `value[rows]` to `score[rows]`."""
    example = {
        "numeric": torch.zeros(2, len(featurizer.numeric)),
        "categorical": torch.zeros(2, len(featurizer.categorical), dtype=torch.int64),
    }
    if scorer.takes_value:
        example["value"] = torch.ones(2)
    return with_raw_categories(export_module(scorer.network, example, "score"), featurizer)
