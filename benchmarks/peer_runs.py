"""Run a peer in a venv of its own: arrays out, a script of `peer_scripts` as a process, scores and seconds back."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import Peer, Rows

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peer_scripts"
MOST_SECONDS = 3600


@dataclass(frozen=True, eq=False)
class PeerRun:
    """What a peer gave: its scores of the test rows, and what it took in its own process.

    Attributes:
        scores: `[rows]`.
        seconds: from arrays in memory to a model, binning and early stopping included.
        load_seconds: to read the arrays; not in `seconds`.
        rows_per_second: that it scores, from raw features in memory.
        version: of the library.
    """

    scores: NDArray[np.float64]
    seconds: float
    load_seconds: float
    rows_per_second: float
    version: str


def peers_installed() -> bool:
    """Return whether the venv of the peers exists."""
    return (_venv() / "bin" / "python").exists()


def _venv() -> Path:
    return Path(os.environ.get("URANK_PEERS", REPOSITORY / ".venv-peers"))


def peers_python() -> Path:
    """The Python of the peers.

    Raises:
        SystemExit: with what to run, when it is not there.
    """
    venv = _venv()
    python = venv / "bin" / "python"
    if not peers_installed():
        raise SystemExit(f"the peers must be installed in {venv} ($URANK_PEERS); run `make .venv-peers/.installed`")
    return python


def write_arrays(folder: Path, train: Rows, valid: Rows, test_features: NDArray[np.float32]) -> None:
    """What every peer learns from and is asked about."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("valid", valid)):
        np.save(folder / f"{split}_features.npy", rows.features)
        np.save(folder / f"{split}_click.npy", rows.click)
        np.save(folder / f"{split}_position.npy", rows.position)
        np.save(folder / f"{split}_lengths.npy", np.diff(rows.offsets))
    np.save(folder / "test_features.npy", test_features)


def run_peer(peer: Peer, arrays: Path, *, threads: int) -> PeerRun:
    """Train a peer on the arrays of a folder, and score the test rows.

    Raises:
        RuntimeError: when its process fails, with the end of what it said.
    """
    settings = arrays / "settings.json"
    settings.write_text(json.dumps(peer.settings), encoding="utf-8")
    command = [peers_python(), SCRIPTS / peer.script, arrays, settings, arrays]
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{peer.name} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    result = json.loads((arrays / "result.json").read_text(encoding="utf-8"))
    return PeerRun(
        scores=np.load(arrays / "scores.npy"),
        seconds=result["train_seconds"],
        load_seconds=result["load_seconds"],
        rows_per_second=result["score_rows"] / result["score_seconds"],
        version=result["version"],
    )
