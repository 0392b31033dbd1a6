"""What commands, servers and files say is what they said when it was recorded.

`python tests/golden/record.py` records it anew, where a change was meant.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.chain import FILES, run_chain
from golden.values import Json, differences

HERE = Path(__file__).resolve().parent
RECORDED: dict[str, dict[str, Json]] = {file: json.loads((HERE / f"{file}.json").read_text()) for file in FILES}
NAMES = [(file, name) for file, values in RECORDED.items() for name in values]
MOST_LINES = 20

# The chain takes a minute, so that only one worker of pytest-xdist is to run it.
pytestmark = pytest.mark.xdist_group("golden")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Json]]:
    return run_chain(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(("file", "name"), NAMES, ids=[f"{file}-{name}" for file, name in NAMES])
def test_values_are_those_that_were_recorded(found: dict[str, dict[str, Json]], file: str, name: str) -> None:
    told = differences(RECORDED[file][name], found[file].get(name))
    shown = [*told[:MOST_LINES], *([f"… and {len(told) - MOST_LINES} more"] if len(told) > MOST_LINES else [])]
    assert not told, f"{len(told)} values of {name} changed:\n" + "\n".join(shown)


def test_everything_was_recorded(found: dict[str, dict[str, Json]]) -> None:
    assert {file: sorted(values) for file, values in found.items()} == {
        file: sorted(values) for file, values in RECORDED.items()
    }
