"""Settings: frozen pydantic models read from TOML.

Unknown keys are refused, and every validation problem becomes one sentence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from urank.errors import ConfigError


def to_jsonable(value: Any) -> Any:
    """Convert nested values for JSON: keys to text, arrays and tuples to lists, NaN and infinity to None.

    >>> to_jsonable({1: (0.5, float("nan")), "a": np.array([2.0, np.inf])})
    {'1': [0.5, None], 'a': [2.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [to_jsonable(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


Model = TypeVar("Model", bound=BaseModel)


class Settings(BaseModel):
    """Base class of settings whose nested tables may be given in part.

    A key missing from a nested table takes the default of the outer model's field, not that of the nested model. So
    changing the number of epochs alone does not also reset the learning rate.

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
    def _fill_nested_defaults(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        filled = dict(values)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, BaseModel) and isinstance(filled.get(name), Mapping):
                filled[name] = deep_merge(field.default.model_dump(exclude_unset=True), filled[name])
        return filled


def deep_merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; where both have a value, take that of `override`.

    >>> deep_merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 9}})
    {'a': {'b': 1, 'c': 9}, 'd': 3}
    """
    merged = dict(base)
    for key, value in override.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = deep_merge(merged[key], value) if nested else value
    return merged


def validate(model: type[Model], values: Mapping[str, Any], source: str = "the configuration") -> Model:
    """Validate values against a pydantic model; raise a `ConfigError` that names the first invalid key.

    >>> class Size(BaseModel, extra="forbid"):
    ...     width: int
    >>> validate(Size, {"width": "broad"})
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


def _keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the nested table at a location of a pydantic error."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return list(model.model_fields)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
