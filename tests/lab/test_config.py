"""The configuration refuses what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from urank.lab.letor_simulation import SimulationConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sesions": 3}, "Extra inputs are not permitted"),
        ({"queries": 0}, "greater than or equal to 1"),
        ({"positions": 0}, "greater than or equal to 1"),
        ({"user": "robot"}, "Input should be 'item', 'query', 'pbm', 'cascade' or 'trust'"),
        ({"scaling": "zscore"}, "Input should be 'minmax', 'log' or 'rank'"),
        ({"eta": -1}, "greater than or equal to 0"),
        ({"eta": float("nan")}, "finite number"),
        ({"epsilon": 1.0}, "less than 1"),
        ({"label_share": 0}, "greater than 0"),
        ({"traffic": (1.0,)}, "traffic must have one share for each of 2 loggers"),
        ({"traffic": (0.5, 0.6)}, "traffic must hold shares above 0 that sum to 1"),
        ({"traffic": (1.0, 0.0)}, "traffic must hold shares above 0 that sum to 1"),
        ({"randomise": "swap"}, "randomise and randomise_share must be given together"),
        ({"randomise_share": 0.1}, "randomise and randomise_share must be given together"),
        ({"values": (2.0, 1.0)}, "values must be a lowest value from 0 up and a highest"),
        ({"values": (-1.0, 1.0)}, "values must be a lowest value from 0 up and a highest"),
        ({"valid": 0.6, "test": 0.6}, "sum to at most 1"),
        ({"seed": -1}, "greater than or equal to 0"),
    ],
)
def test_config_refuses_what_it_does_not_know(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SimulationConfig(**changes)


def test_config_is_frozen_and_every_field_is_documented() -> None:
    config = SimulationConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    assert all(field.description for field in SimulationConfig.model_fields.values())
    assert config.traffic_shares == (0.5, 0.5)
