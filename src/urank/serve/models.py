"""The models that a server has in use, and how others take their place while it runs.

A request reads `Served` once and works with it to its end; a reload makes another `Served` and puts it there in one
assignment. So a request never sees half of a change, and none waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl

from urank.abtest.assign import assign_arms
from urank.errors import ConfigError, DataError
from urank.rankers.order import Method
from urank.serve.runtime import Items, ServedModel, load_served

__all__ = ["ARMS", "Served", "Sources", "SplitTest", "load"]

ARMS = ("A", "B")


@dataclass(frozen=True)
class SplitTest:
    """An A/B test: a share of users, told by a stable hash, is served by another model."""

    folder: Path
    share: float = 0.5
    name: str = "serve"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"the share of the test must be above 0 and below 1; got {self.share:g}")
        if not self.name:
            raise ConfigError("the test needs a name, by which users are assigned; got an empty one")

    def arms(self, users: Sequence[str]) -> list[str]:
        """The arm of each user."""
        shares = {ARMS[0]: 1 - self.share, ARMS[1]: self.share}
        return assign_arms(pl.Series(users, dtype=pl.String), shares, salt=self.name).to_list()


@dataclass(frozen=True)
class Sources:
    """Where the models come from, and how they rank."""

    main: Path
    method: Method | None = None
    shadow: Path | None = None
    test: SplitTest | None = None
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Served:
    """What is served at one time.

    Attributes:
        main: the model.
        shadow: one that ranks silently, if any.
        other: the one of arm B, if there is a test.
        test: the test.
        asked: how lists are ranked unless a request says otherwise; each model's own way if None.
    """

    main: ServedModel
    shadow: ServedModel | None = None
    other: ServedModel | None = None
    test: SplitTest | None = None
    asked: Method | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, bool] = {}
        for model in self.models:
            for names, categorical in _features(model):
                for name in names:
                    if kinds.setdefault(name, categorical) != categorical:
                        raise DataError(f"the feature '{name}' is a number to one model and a category to another")
            if self.asked is not None:
                model.check_method(self.asked)

    @property
    def models(self) -> list[ServedModel]:
        return [model for model in (self.main, self.shadow, self.other) if model is not None]

    @cached_property
    def numeric(self) -> tuple[str, ...]:
        """The numeric features of all models, those of the main one first."""
        return _union(self.models, categorical=False)

    @cached_property
    def categorical(self) -> tuple[str, ...]:
        """The categorical features of all models."""
        return _union(self.models, categorical=True)

    @cached_property
    def takes_value(self) -> bool:
        """Whether some model was trained on values."""
        return any(model.takes_value for model in self.models)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that a request may ask for, whichever model it is ranked by."""
        return tuple(method for method in self.main.methods if self.other is None or method in self.other.methods)

    def method_of(self, model: ServedModel, asked: Method | None = None) -> Method:
        """How a model ranks when a request asks for this."""
        return model.check_method(asked or self.asked or model.method)

    def of(self, model: ServedModel, items: Items) -> Items:
        """The features of items as this model takes them."""
        numeric, categorical = self._places[id(model)]
        if numeric is None and categorical is None:
            return items
        return Items(
            items.numeric if numeric is None else items.numeric[:, numeric],
            items.categorical if categorical is None else items.categorical[:, categorical],
            items.value,
            items.offsets,
        )

    @cached_property
    def _places(self) -> dict[int, tuple[list[int] | None, list[int] | None]]:
        return {
            id(model): (
                _places(self.numeric, [feature.name for feature in model.featurizer.numeric]),
                _places(self.categorical, [feature.name for feature in model.featurizer.categorical]),
            )
            for model in self.models
        }


def load(sources: Sources) -> Served:
    """Load every model anew; one that is broken is a `DataError`, and nothing has changed."""
    return Served(
        main=load_served(sources.main, threads=sources.threads),
        shadow=None if sources.shadow is None else load_served(sources.shadow, threads=sources.threads),
        other=None if sources.test is None else load_served(sources.test.folder, threads=sources.threads),
        test=sources.test,
        asked=sources.method,
    )


def _features(model: ServedModel) -> list[tuple[list[str], bool]]:
    featurizer = model.featurizer
    return [
        ([feature.name for feature in featurizer.numeric], False),
        ([feature.name for feature in featurizer.categorical], True),
    ]


def _union(models: Sequence[ServedModel], *, categorical: bool) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            name for model in models for names, kind in _features(model) if kind == categorical for name in names
        )
    )


def _places(all_names: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Where the names stand among all; none when they are all, in this order."""
    if list(all_names) == list(names):
        return None
    place = {name: number for number, name in enumerate(all_names)}
    return [place[name] for name in names]
