"""Execute notebooks in place: `python examples/execute.py examples/demo.ipynb …` (`make examples` for all).

The hotel log is not part of the repository. Its folder is `$URANK_DATA`, or `../shared/data` beside the repository.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parent


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in an empty folder, and return it with its new outputs; an error in a cell is raised."""
    os.environ.setdefault("URANK_DATA", str(EXAMPLES.parents[1] / "shared" / "data"))
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        return NotebookClient(notebook, timeout=900, record_timing=False, resources=resources).execute()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(execute(Path(name)), name)
