"""Configurations: frozen pydantic models and TOML; unknown keys are refused, each problem is told in one sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from urank.errors import ConfigError

__all__ = ["Settings", "deep_merge", "read_toml", "to_jsonable", "to_toml", "validate"]


def to_jsonable(value: Any) -> Any:
    """The same in lists and dictionaries: null for what is not finite, text for keys, lists for arrays.

    >>> plain({1: (0.5, float("nan")), "a": np.array([2.0, np.inf])})
    {'1': [0.5, None], 'a': [2.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [to_jsonable(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


M = TypeVar("M", bound=BaseModel)


class Settings(BaseModel):
    """A configuration whose tables may be given in part: what they leave out has the default of this place.

    Without it, a training of other length would also have another step, that of training in general.

    >>> class Step(BaseModel):
    ...     epochs: int = 30
    ...     rate: float = 0.5
    >>> class Slow(Settings):
    ...     step: Step = Step(rate=0.1)
    >>> Slow.model_validate({"step": {"epochs": 3}}).step
    Step(epochs=3, rate=0.1)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_what_is_left_out(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kept = dict(values)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, BaseModel) and isinstance(kept.get(name), Mapping):
                kept[name] = deep_merge(field.default.model_dump(exclude_unset=True), kept[name])
        return kept


def deep_merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both, those of `over` where both have one; table by table.

    >>> laid_over({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 9}})
    {'a': {'b': 1, 'c': 9}, 'd': 3}
    """
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = deep_merge(merged[key], value) if both else value
    return merged


def validate(model: type[M], values: Mapping[str, Any], source: str = "the configuration") -> M:
    """A checked configuration, or a `ConfigError` that names the first key that is wrong.

    >>> class Size(BaseModel, extra="forbid"):
    ...     width: int
    >>> build(Size, {"width": "broad"})
    Traceback (most recent call last):
        ...
    urank.errors.ConfigError: width in the configuration: input should be a valid integer, ...; got 'broad'
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            keys = ", ".join(_keys(model, first["loc"][:-1]))
            raise ConfigError(f"{place} is not a key of {source}; the keys are {keys}") from None
        if not place:
            raise ConfigError(reason) from None
        reason = reason[:1].lower() + reason[1:]
        raise ConfigError(f"{place} in {source}: {reason}; got {first['input']!r}") from None


def _keys(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at a place within a configuration."""
    for part in place:
        field = model.model_fields.get(str(part))
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return list(model.model_fields)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def to_toml(config: BaseModel) -> str:
    """The configuration as TOML; keys that are not set are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
