"""Settings of a whole model: to TOML and back, and combinations that make no sense are refused before any training."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import tomli_w

from urank.config import validate
from urank.errors import ConfigError
from urank.ranking.ranking_settings import UrankConfig


def test_toml_and_back() -> None:
    settings = {
        "ranker": "trees",
        "method": "match",
        "clicks": {"families": ["pbm"], "training": {"epochs": 2}},
        "scorer": {"target": "blend", "blend": 0.25, "hidden": [8, 4]},
        "trees": {"trees": 7},
    }
    config = validate(UrankConfig, settings)
    assert (
        validate(UrankConfig, tomllib.loads(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))) == config
    )
    assert UrankConfig.model_validate(config.model_dump(mode="json")) == config
    assert (config.scorer.objective.blend, config.trees.trees, config.clicks.training.epochs) == (0.25, 7, 2)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ranker": "magic"}, "ranker in the configuration: input should be 'network', 'trees', 'lambdarank', "),
        ({"method": "magic"}, "method in the configuration: input should be 'auto', 'score', 'match' or 'ctr1'"),
        ({"ranker": "none", "method": "score"}, "method score needs a ranker with scores; got ranker 'none'"),
        ({"ranker": "trees", "scorer": {"form": "paper"}}, "ranker trees needs the stable form of the loss"),
        ({"scorer": {"epochs": 3}}, r"scorer\.epochs is not a key of the configuration"),
        ({"colour": 1}, "colour is not a key of the configuration; the keys are goal, ranker, method, judges, clicks"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate(UrankConfig, settings)
