"""Golden outputs: commands, servers and files give the recorded values.

After an intended change, `python tests/golden/record.py` records them anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.chain import FILES, run_chain
from golden.values import Json, differences

HERE = Path(__file__).resolve().parent
MOST_LINES = 20


@pytest.mark.slow
def test_values_are_those_that_were_recorded(tmp_path: Path) -> None:
    """A single test, so that the chain runs once however many test workers there are."""
    recorded: dict[str, dict[str, Json]] = {file: json.loads((HERE / f"{file}.json").read_text()) for file in FILES}
    found = run_chain(tmp_path)
    changed: list[str] = []
    for file in FILES:
        for name in dict.fromkeys((*recorded[file], *found[file])):
            lines = differences(recorded[file].get(name), found[file].get(name))
            if lines:
                more = [f"… and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
                changed += [f"{file}.json, {name}: {len(lines)} values changed", *lines[:MOST_LINES], *more]
    assert not changed, "\n".join(changed)
