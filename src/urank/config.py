"""Configurations: frozen pydantic models and TOML; unknown keys are refused, each problem is told in one sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from urank.errors import ConfigError

__all__ = ["build", "read_toml", "to_toml"]

M = TypeVar("M", bound=BaseModel)


def build(model: type[M], values: Mapping[str, Any], source: str = "the configuration") -> M:
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
