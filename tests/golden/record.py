"""Record the golden values anew: `python tests/golden/record.py`.

Look at what changed with `git diff tests/golden` before committing it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the chain and write its values beside this file."""
    sys.path.insert(0, str(HERE.parent))
    from golden.chain import run_chain
    from golden.values import pretty

    with tempfile.TemporaryDirectory() as folder:
        found = run_chain(Path(folder))
    for file, values in found.items():
        (HERE / f"{file}.json").write_text(f"{pretty(values)}\n")


if __name__ == "__main__":
    main()
