"""The README: short, with an example of eight lines. That all it shows runs is tested with the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_it_is_short_and_so_is_its_example() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 8
