"""What decides how a server runs: keys, and addresses that only this machine can reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from urank.errors import ConfigError
from urank.serve.models import ModelSources
from urank.serve.server_settings import KEY_VARIABLE, MIN_KEY, Limits, ServeConfig, is_loopback, read_key

KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_a_key_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"  {KEY}\n")
    monkeypatch.setenv(KEY_VARIABLE, "another-key-that-is-not-asked-for")
    assert read_key(tmp_path / "key") == KEY


def test_a_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, " \n")
    assert read_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert read_key(None) == KEY


@pytest.mark.parametrize(
    "key",
    ["", "short", KEY[:-1], "kéy" * 10, f"{KEY} {KEY}", f"{KEY}\t{KEY}", f"{KEY}\n{KEY}", f"{KEY}\x00", f"{KEY}\x7f"],
)
def test_keys_that_will_not_do(tmp_path: Path, key: str) -> None:
    """The sentence names the file, and nothing of what is in it."""
    (tmp_path / "key").write_text(key)
    with pytest.raises(ConfigError) as error:
        read_key(tmp_path / "key")
    assert str(error.value).startswith(f"--key-file {tmp_path / 'key'} must be a key of at least {MIN_KEY} printable")
    assert not key or key not in str(error.value).removeprefix(f"--key-file {tmp_path / 'key'}")


def test_a_short_key_of_the_environment_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "hunter2")
    with pytest.raises(ConfigError, match=f"^{KEY_VARIABLE} must be a key of at least") as error:
        read_key(None)
    assert "hunter2" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff" * 20)
    for path in (tmp_path / "absent", tmp_path, tmp_path / "bytes"):
        with pytest.raises(ConfigError, match=r"cannot be read$"):
            read_key(path)


def test_a_configuration_does_not_show_its_key() -> None:
    assert KEY not in repr(ServeConfig(ModelSources(Path("model")), key=KEY))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "0:0:0:0:0:0:0:1", "localhost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


OTHERS = ["0.0.0.0", "::", "", "10.0.0.1", "192.168.1.1", "example.org", "localhost.example.org", "fe80::1"]  # noqa: S104


@pytest.mark.parametrize("host", OTHERS)
def test_others(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("name", ["body_bytes", "candidates", "queries", "rows", "json_bytes", "requests", "seconds"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ValidationError):
        Limits(**{name: 0})
    with pytest.raises(ValidationError):
        Limits(**{name: -1})
