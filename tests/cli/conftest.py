"""The command line within the process of the tests, which spares loading torch for every command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from urank.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def refusal(self) -> str:
        """The sentence of a refusal; there must be one, and nothing else."""
        assert self.code == 2, self
        assert self.stdout == ""
        (line,) = self.stderr.strip().splitlines()
        assert line.startswith("Error: ")
        return line.removeprefix("Error: ")


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`urank` with these arguments, as `main` runs it."""
    import torch

    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["urank", *map(str, arguments)])
        handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, handler)
        torch.set_num_threads(threads)
        code = ended.value.code
        assert isinstance(code, int), code
        return Ended(code, *capsys.readouterr())

    return run
