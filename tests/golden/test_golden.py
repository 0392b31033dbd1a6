"""What commands, servers and files say is what they said when it was recorded.

`python tests/golden/record.py` records it anew, where a change was meant.
"""

from __future__ import annotations

import json
from pathlib import Path

from golden.chain import FILES, run_chain
from golden.values import Json, differences

HERE = Path(__file__).resolve().parent
MOST_LINES = 20


def test_values_are_those_that_were_recorded(tmp_path: Path) -> None:
    """One test, since the chain takes more than a minute and is to run once, however many workers there are."""
    recorded: dict[str, dict[str, Json]] = {file: json.loads((HERE / f"{file}.json").read_text()) for file in FILES}
    found = run_chain(tmp_path)
    told: list[str] = []
    for file in FILES:
        for name in dict.fromkeys((*recorded[file], *found[file])):
            lines = differences(recorded[file].get(name), found[file].get(name))
            if lines:
                more = [f"… and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
                told += [f"{file}.json, {name}: {len(lines)} values changed", *lines[:MOST_LINES], *more]
    assert not told, "\n".join(told)
