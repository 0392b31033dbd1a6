"""Configurations refuse what they do not know, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from urank.config import read_toml, validate
from urank.errors import ConfigError


class Example(BaseModel, frozen=True, extra="forbid"):
    width: int = Field(3, ge=1)
    name: str | None = None


class Outer(BaseModel, frozen=True, extra="forbid"):
    inner: Example = Example()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    path.write_text('width = 7\nname = "x"\n')
    assert validate(Example, read_toml(path)) == Example(width=7, name="x")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"widht": 3}, "widht is not a key of here; the keys are width, name"),
        ({"width": 0}, "width in here: input should be greater than or equal to 1; got 0"),
        ({"width": "broad"}, "width in here: input should be a valid integer.*; got 'broad'"),
    ],
)
def test_refusals(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate(Example, values, "here")


def test_keys_of_an_inner_table() -> None:
    with pytest.raises(ConfigError, match=r"inner\.widht is not a key of here; the keys are width, name"):
        validate(Outer, {"inner": {"widht": 3}}, "here")


def test_files_that_are_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        read_toml(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        read_toml(tmp_path / "bad.toml")
