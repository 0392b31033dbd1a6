"""Every code block of the README and of docs/ runs, page by page and in order.

A page runs in a folder of its own with what `make demo` writes (from 400 queries, not 3000); in pages of docs/, that is
also `log.parquet`, `prepared` and `model`. Tutorials begin in an empty folder. Comments in a page control it:

    <!-- run first ... -->       commands that provide further files; `traffic N` sends N lists of log.parquet, as if by
                                 users who click the first item of every other one, to the running server
    <!-- not run: reason -->     before a block that cannot run here

Blocks of `>>>` run as doctests. `urank serve` runs in the background, at a port that replaces 8000, until the page ends
or starts another server.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FROM_SCRATCH = {"index.md", "tutorial-demo.md", "tutorial-hotel.md"}
SEARCHES = "searches.csv.gz"

BLOCK = re.compile(
    r"^(?:<!-- not run: *(?P<reason>.*?) *-->\n+)?^```(?P<kind>sh|python)\n(?P<code>.*?)^```$"
    r"|^<!-- run first\n(?P<first>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)

SHELL = """
urank() {
    if [ "$1" != serve ]; then command urank "$@"; return; fi
    stop_server
    command urank "$@" --port "$PORT" > server.log 2>&1 &
    echo $! > server.pid
    until command curl -sf "http://127.0.0.1:$PORT/readyz" > /dev/null; do
        kill -0 "$(cat server.pid)" || { cat server.log >&2; return 1; }
        sleep 0.1
    done
}
stop_server() {
    if [ ! -e server.pid ]; then return; fi
    kill "$(cat server.pid)"
    while kill -0 "$(cat server.pid)" 2> /dev/null; do sleep 0.1; done
    rm server.pid
}
pgrep() { cat server.pid; }
curl() { command curl --fail-with-body "$@"; }
traffic() { python "$TRAFFIC" "$1" "$PORT"; }
"""

TRAFFIC = """
import sys
import polars as pl
import urank

log = pl.read_parquet("log.parquet")
lists = log.partition_by([name for name in ("query_id", "session_id") if name in log.columns], maintain_order=True)
with urank.Client(f"http://127.0.0.1:{sys.argv[2]}") as client:
    features = [*client.model().numeric, *client.model().categorical]
    for number, shown in enumerate(lists[: int(sys.argv[1])]):
        candidates = shown.select("item_id", *features)
        ranking = client.rank(candidates, query_id=f"q{number}", user_id=f"u{number}")
        if number % 2:
            client.click(ranking, ranking.ids[0])
"""


@dataclass(frozen=True)
class Block:
    """A code block of a page; `reason` is why it is not run, None if it is."""

    page: Path
    line: int
    kind: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the commands and the Python code of a page, without doctests."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in BLOCK.finditer(text):
        first = match["first"] is not None
        kind, code = ("sh", match["first"]) if first else (match["kind"], match["code"])
        if not code.startswith(">>>"):
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, kind, code, match["reason"]))
    return found


RUN = [page for page in PAGES if any(block.reason is None for block in blocks(page))]


def test_no_block_is_overlooked() -> None:
    """Indented blocks, or ones of another name, would be neither run nor marked."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = len(re.findall(r"^ *```+ *(?:sh|bash|shell|zsh|py|python|python3|pycon)\b", text, re.MULTILINE))
        doctests = len(re.findall(r"^```python\n>>>", text, re.MULTILINE))
        first = len(re.findall(r"^ *<!-- run first", text, re.MULTILINE))
        assert named + first == len(blocks(page)) + doctests, page.name
        marked = len(re.findall(r"^ *<!-- not run", text, re.MULTILINE))
        assert marked == sum(block.reason is not None for block in blocks(page)), page.name


def test_blocks_are_valid_and_not_run_only_for_a_reason() -> None:
    for block in [block for page in PAGES for block in blocks(page)]:
        assert block.reason is None or len(block.reason.split()) >= 3, block
        if block.kind == "python":
            ast.parse(block.code, filename=str(block))
        else:
            checked = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)  # noqa: S607
            assert checked.returncode == 0, f"{block}: {checked.stderr}"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of commands, with `urank` on the path."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in {"urank": "-m urank", "python": "", "python3": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "traffic.py").write_text(TRAFFIC)
    paths = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", "TRAFFIC": str(folder / "traffic.py")}


@pytest.fixture(scope="session")
def demo(programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make demo` writes, on fewer queries."""
    folder = tmp_path_factory.mktemp("demo")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.findall(
        r"^\t\$\(BIN\)/(urank .*)$", makefile.partition("\ndemo:")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert len(recipe) == 2
    for command in recipe:
        shell(command.replace("$(DEMO)/", ""), folder, programs)
    return folder


def shell(code: str, folder: Path, environment: dict[str, str]) -> None:
    """Run commands; stop at the first that fails."""
    command = ["bash", "-euo", "pipefail", "-c", SHELL + code.replace("--queries 3000", "--queries 400")]
    with (folder / "output.txt").open("w+") as output:  # a file, since a server would keep a pipe open
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=600)
        output.seek(0)
        assert done.returncode == 0, output.read()


@pytest.fixture
def port() -> int:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for a page; its server ends with it."""
    yield tmp_path
    if (tmp_path / "server.pid").is_file():
        os.kill(int((tmp_path / "server.pid").read_text()), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(
    page: Path,
    place: Path,
    port: int,
    programs: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if page.name not in FROM_SCRATCH:
        shutil.copytree(request.getfixturevalue("demo"), place, dirs_exist_ok=True)
        if page.parent.name == "docs":
            shutil.copy(place / "simulation" / "log.parquet", place)
            shutil.copytree(place / "job", place, dirs_exist_ok=True)
    if any(SEARCHES in block.code for block in blocks(page)):
        (place / SEARCHES).symlink_to(request.getfixturevalue("data_dir") / "expedia" / SEARCHES)
    monkeypatch.chdir(place)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.reason is not None:
            continue
        code = block.code.replace(":8000", f":{port}")
        try:
            if block.kind == "python":
                exec(compile(code, str(block), "exec"), names)  # noqa: S102
            else:
                shell(code, place, {**programs, "PORT": str(port)})
        except BaseException as error:
            error.add_note(f"in the block at {block}")
            raise
