"""The configuration of the experiment of Section 5.2."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from urank.errors import ConfigError
from urank.log.schema import MAX_POSITION
from urank.log.split import check_shares
from urank.simulate.loggers import Randomisation
from urank.simulate.oracle import User
from urank.simulate.scaling import Scaling

__all__ = ["MOST_LABEL", "SimulationConfig"]

MOST_LABEL = 64


class SimulationConfig(BaseModel):
    """All that decides a simulation; the same config gives the same bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    data: str | None = Field(None, description="LETOR file or folder; documents are generated when left out")
    queries: int = Field(10_000, ge=1, le=10_000_000, description="number of generated queries")
    noise: float = Field(
        0.1, ge=0, le=100, description="chance in the relevance of generated documents, beside a deviation of about 1.5"
    )
    features: int = Field(30, ge=1, le=10_000, description="number of generated features")
    candidates: int = Field(
        10,
        ge=1,
        le=100_000,
        description="documents kept for each query, drawn at random when it has more; "
        "generated queries have from 0.8 to 2 times as many",
    )
    positions: int = Field(10, ge=1, le=MAX_POSITION, description="K: how many documents a list shows at most")
    sessions: int = Field(10, ge=1, le=10_000_000, description="times that each query is shown")
    loggers: int = Field(2, ge=1, le=1000, description="number of weak rankers that made the log")
    traffic: tuple[float, ...] | None = Field(
        None, description="share of the sessions of each logger; equal by default"
    )
    label_share: float = Field(
        0.01, gt=0, le=1, description="share of the queries whose labels a logger was trained on"
    )
    randomise: Randomisation = Field("none", description="how randomised sessions change a logger's order")
    randomise_share: float = Field(0.0, ge=0, le=1, description="share of the sessions that are randomised")
    user: User = Field("item", description="what decides the users' attention; `item` is the paper's")
    eta: float = Field(1.5, ge=0, le=1000, description="η: spread of the attention weights of the users item and query")
    epsilon: float = Field(0.1, ge=0, lt=1, description="ε: click probability of an irrelevant document looked at")
    gamma: float = Field(1.0, ge=0, le=1000, description="examination 1/k^gamma of the users pbm and trust")
    label_max: float | None = Field(
        None, gt=0, le=MOST_LABEL, description="highest grade; the highest in the data by default, 4 when generated"
    )
    denominator: float | None = Field(
        None, gt=0, description="of the relevance probability; 2^label_max − 1 by default, as in the paper's text"
    )
    scaling: Scaling = Field("log", description="how features are brought to [0, 1] for the attention of the users")
    values: tuple[float, float] | None = Field(
        None, description="lowest and highest value of a click, uniform for each document; every click is 1 by default"
    )
    truth: Literal["test", "all"] = Field("test", description="the queries whose true click table is kept")
    valid: float = Field(0.1, ge=0, le=1, description="share of the queries that `prepare` holds out for validation")
    test: float = Field(0.1, ge=0, le=1, description="share of the queries that `prepare` holds out for test")
    seed: int = Field(0, ge=0, description="of all random numbers")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.traffic is not None:
            if len(self.traffic) != self.loggers:
                raise ValueError(f"traffic must have one share for each of {self.loggers} loggers; got {self.traffic}")
            if min(self.traffic) <= 0 or not np.isclose(sum(self.traffic), 1, atol=1e-9):
                raise ValueError(f"traffic must hold shares above 0 that sum to 1; got {self.traffic}")
        if (self.randomise == "none") != (self.randomise_share == 0):
            raise ValueError(
                "randomise and randomise_share must be given together; "
                f"got randomise {self.randomise!r} of a share of {self.randomise_share:g}"
            )
        if self.values is not None and not 0 <= self.values[0] <= self.values[1]:
            raise ValueError(f"values must be a lowest value from 0 up and a highest; got {self.values}")
        if self.values is not None and self.values[1] > float(np.finfo(np.float32).max):
            raise ValueError(f"values must fit 32-bit numbers, so be below 3.4e38; got {self.values}")
        try:
            check_shares(self.valid, self.test)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def traffic_shares(self) -> tuple[float, ...]:
        """The share of the sessions of each logger."""
        return self.traffic or (1 / self.loggers,) * self.loggers
