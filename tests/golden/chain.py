"""The chain of commands whose outputs are frozen, run as a user would: by command line, HTTP and files.

Nothing of the package is imported, so modules and classes may be moved and renamed at will. A renamed command or flag
is one edit in the table below; the names on its left stay, since they are the names of the recorded values.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from golden.server import visit
from golden.values import Json, cleaned, files_of, frame_of, graph_of, tensors_of, text_of

__all__ = ["FILES", "run_chain"]

# Commands run in another folder, where an installed package could take the place of this one.
SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Command:
    """What follows `urank`, the file its values are recorded in, and the keys of its answer that are left out."""

    line: str
    file: str
    drop: tuple[str, ...] = ()


# Commands in their order, by the names of their recorded values. Each is run with --json. All that is written goes
# below made/, by which paths in answers are known.
COMMANDS = {
    # The log of simulated searches: numbers only, with values and propensities.
    "simulate": Command(
        "simulate -o made/sim --queries 400 --features 5 --sessions 5 --test 0.2 --seed 1 --randomise swap:0.2"
        " --values 1:10",
        "log",
    ),
    "inspect": Command("inspect made/sim/log.parquet --drop relevance", "log"),
    "prepare": Command("prepare made/sim/log.parquet -o made/prepared --test 0.2 --drop relevance", "log"),
    "train": Command(
        "train made/prepared -o made/network --click-model monotone --ranker network --epochs 3 --no-onnx"
        " --truth made/sim",
        "train",
    ),
    "train trees": Command(
        "train made/prepared -o made/trees --click-model monotone --ranker trees --epochs 3 --no-onnx", "train"
    ),
    "evaluate": Command("evaluate made/network made/trees made/prepared --truth made/sim", "evaluate"),
    "guard": Command("guard made/network made/prepared --truth made/sim", "evaluate"),
    "rank score": Command("rank made/network made/sim/log.parquet --method score -o made/score.parquet", "rank"),
    "rank match": Command("rank made/network made/sim/log.parquet --method match -o made/match.parquet", "rank"),
    "curves": Command("curves made/network made/prepared", "rank"),
    "examination randomised": Command("examination randomised made/prepared", "examination"),
    "examination harvest": Command("examination harvest made/prepared", "examination"),
    "examination em": Command("examination em made/prepared", "examination"),
    "export onnx": Command("export made/network --onnx made/onnx", "export"),
    "run": Command(
        "run made/sim/log.parquet -o made/job --drop relevance --drop propensity --click-model monotone --test 0.2"
        " --truth made/sim",
        "run",
    ),
    # The log of a simulated app store: numbers, categories, users and timestamps.
    "appstore": Command(
        "appstore -o made/store --users 300 --apps 40 --log-days 3 --warmup-days 2 --random-days 3 --random-visits 300",
        "store",
    ),
    "inspect store": Command("inspect made/store/log.parquet", "store"),
    "examination category": Command(
        "examination randomised made/store/random.parquet --randomised policy=random --by category", "store"
    ),
    "train store": Command(
        "train made/store/log.parquet -o made/store-model --click-model monotone --within-list off --ranker network"
        " --epochs 2 --method score",
        "store",
        ("qualities", "reliability"),
    ),
    "export vespa": Command("export made/store-model --vespa made/vespa --schema app --query-feature device", "export"),
    # A/B tests; made/exposures.parquet is written below.
    "abtest plan": Command(
        "abtest plan --lift 0.05 --mean 0.4 --deviation 1.1 --users-per-day 5000 --metric revenue", "abtest"
    ),
    "abtest plan log": Command("abtest plan made/exposures.parquet --days 14", "abtest"),
    "abtest analyse": Command(
        "abtest analyse made/exposures.parquet --control A --treatment B --start 2024-03-04 --halves 100", "abtest"
    ),
}
# What serves, and what turns what it recorded into a log after it has ended.
SERVE = "serve made/store-model --port 0 --method score --log made/feedback --sample made/store/log.parquet"
FEEDBACK = Command("feedback made/feedback", "serve")
# Commands that are refused, of which the exit status is kept.
REFUSED = {
    "no such log": "inspect made/nothing.parquet",
    "output exists": "prepare made/sim/log.parquet -o made/prepared",
    "no such flag": "prepare made/sim/log.parquet --no-such-flag",
    "bad share": "prepare made/sim/log.parquet -o made/other --test 1.5",
}

# Sums are rounded by their order, which depends on threads and on the instructions of the processor. Training makes
# more of it: scores are learned up to a constant, and matches of equal utility are told apart by the last digit.
ARITHMETIC = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}

FILES = (*dict.fromkeys(command.file for command in (*COMMANDS.values(), FEEDBACK)), "artifact", "openapi")


def run_chain(folder: Path) -> dict[str, dict[str, Json]]:
    """Run everything in an empty folder: the values by file and name."""
    (folder / "made").mkdir()
    make_exposures(folder / "made" / "exposures.parquet")
    found: dict[str, dict[str, Json]] = {file: {} for file in FILES}
    for name, command in COMMANDS.items():
        found[command.file][name] = answer(folder, command)
    found["log"]["exit status"] = {name: ended(folder, line).returncode for name, line in REFUSED.items()}
    found["openapi"], found["serve"] = visit(folder, line_of(SERVE), environment())
    found["serve"]["feedback"] = answer(folder, FEEDBACK)
    for file, values in written(folder / "made").items():
        found[file] |= values
    return found


def answer(folder: Path, command: Command) -> Json:
    """What a command prints with --json."""
    done = ended(folder, f"{command.line} --json")
    if done.returncode:
        raise AssertionError(f"urank {command.line} ended with {done.returncode}:\n{done.stderr}")
    values = json.loads(done.stdout)
    if command.drop:
        values = {key: value for key, value in values.items() if key not in command.drop}
    return cleaned(values)


def ended(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended."""
    return subprocess.run(line_of(line), cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def line_of(line: str) -> list[str]:
    return [sys.executable, "-m", "urank", *shlex.split(line)]


def environment() -> dict[str, str]:
    """The variables of commands: this package, no key, and arithmetic that depends little on the machine."""
    kept = {key: text for key, text in os.environ.items() if not key.startswith("URANK_")}
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | ARITHMETIC | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}


def make_exposures(path: Path) -> None:
    """A log of two arms with a week before the test, in which arm B clicks and buys somewhat more often."""
    rng = np.random.default_rng(7)
    users, rows, start = 600, 9000, 7
    user = rng.integers(0, users, rows)
    day = rng.integers(0, 21, rows)
    treated = (user % 2 == 1) & (day >= start)
    taste = rng.beta(2, 6, users)[user]
    click = rng.random(rows) < taste * np.where(treated, 1.15, 1.0)
    conversion = click & (rng.random(rows) < np.where(treated, 0.33, 0.3))
    frame = pl.DataFrame(
        {
            "user_id": [f"u{number}" for number in user],
            "arm": np.where(user % 2 == 1, "B", "A"),
            "day": day,
            "click": click.astype(np.int8),
            "conversion": conversion.astype(np.int8),
            "value": np.where(conversion, np.round(rng.gamma(2.0, 5.0, rows), 2), 0.0),
        }
    )
    first = pl.date(2024, 2, 26)
    frame.with_columns(day=first + pl.duration(days=pl.col("day"))).sort("day", maintain_order=True).write_parquet(path)


def written(made: Path) -> dict[str, dict[str, Json]]:
    """What the commands left in files."""
    return {
        "log": {
            "simulated files": files_of(made / "sim"),
            "simulated log": frame_of(pl.read_parquet(made / "sim" / "log.parquet")),
            "simulated truth": frame_of(pl.read_parquet(made / "sim" / "truth" / "candidates.parquet")),
            "prepared files": files_of(made / "prepared"),
            "prepared schema": _read(made / "prepared" / "schema.json"),
            **{
                f"prepared {split}": frame_of(pl.read_parquet(made / "prepared" / split / "*.parquet"))
                for split in ("train", "valid", "test")
            },
        },
        "rank": {
            "ranked by score": frame_of(pl.read_parquet(made / "score.parquet")),
            "ranked by match": frame_of(pl.read_parquet(made / "match.parquet")),
        },
        "run": {"job files": files_of(made / "job")},
        "store": {
            "store files": files_of(made / "store"),
            "store log": frame_of(pl.read_parquet(made / "store" / "log.parquet")),
            "store random": frame_of(pl.read_parquet(made / "store" / "random.parquet")),
            "store truth": frame_of(pl.read_parquet(made / "store" / "truth" / "candidates.parquet")),
        },
        "export": exported(made),
        "artifact": {
            name: artifact(made / folder)
            for name, folder in {"network": "network", "trees": "trees", "categories": "store-model"}.items()
        },
        "serve": {"feedback log": logged(made / "feedback")},
    }


def exported(made: Path) -> dict[str, Json]:
    """The files of both exports, and what their graphs say of five rows."""
    searches = pl.read_parquet(made / "sim" / "log.parquet").head(5)
    visits = pl.read_parquet(made / "store" / "log.parquet").head(5)
    vespa = made / "vespa"
    vocabulary = json.loads((vespa / "vocabulary.json").read_text())
    inputs = json.loads((vespa / "inputs.json").read_text())["inputs"]
    names = {kind: [feature["feature"] for feature in inputs[kind]["features"]] for kind in ("numeric", "categorical")}
    codes = np.array(
        [[vocabulary[name].get(row[name], 0) for name in names["categorical"]] for row in visits.to_dicts()]
    )
    codes[4] = 0  # as for a category that was never seen
    return {
        "onnx files": files_of(made / "onnx"),
        "onnx graph": graph_of(
            made / "onnx" / "urank.onnx",
            numeric=_with_more_columns(
                _floats(searches.select(pl.selectors.matches(r"^f\d+$"))), made / "onnx" / "inputs.json"
            ),
            value=searches["value"].to_numpy(),
        ),
        "vespa files": files_of(vespa),
        "vespa texts": {
            str(path.relative_to(vespa)): text_of(path)
            for path in sorted(vespa.rglob("schemas/**/*.*"))
            if path.is_file()
        },
        "vespa feed": [json.loads(line) for line in (vespa / "feed.jsonl").read_text().splitlines()],
        "vespa inputs": _read(vespa / "inputs.json"),
        "vespa vocabulary": _read(vespa / "vocabulary.json"),
        "vespa graph": graph_of(
            vespa / "models" / "urank.onnx",
            numeric=_floats(visits.select(names["numeric"])),
            categorical=codes.astype(np.int64),
            value=visits["value"].to_numpy(),
        ),
    }


def artifact(folder: Path) -> Json:
    """The files of a model, its manifest and its tensors; of its report, which the command tells, only the keys."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    manifest["quality"] = sorted(manifest["quality"])
    return {
        "files": files_of(folder),
        "manifest": cleaned(manifest),
        "features": _read(folder / "features.json"),
        "tensors": {path.name: tensors_of(path) for path in sorted(folder.glob("*.safetensors"))},
    }


def logged(folder: Path) -> Json:
    """The log that a server's rankings and clicks became, without ids and times."""
    frame = pl.read_parquet(folder / "log" / "**" / "*.parquet")
    return {
        "folders": sorted(path.name for path in folder.iterdir() if path.is_dir()),
        "columns": {name: str(kind) for name, kind in frame.schema.items()},
        "rankings": frame["session_id"].n_unique(),
        "policies": frame["policy"].n_unique(),
        "rows": frame.drop("session_id", "policy", "timestamp").rows(named=True),
    }


def _floats(frame: pl.DataFrame) -> np.ndarray[Any, Any]:
    """Rows of numbers, of which one is missing."""
    numbers = frame.to_numpy().astype(np.float32)
    numbers[1, 0] = np.nan
    return numbers


def _with_more_columns(numeric: np.ndarray[Any, Any], inputs: Path) -> np.ndarray[Any, Any]:
    """Fill the within-list columns of a graph with any numbers."""
    width = len(json.loads(inputs.read_text())["inputs"]["numeric"]["features"])
    rest = np.random.default_rng(0).random((len(numeric), width - numeric.shape[1]), dtype=np.float32)
    return np.concatenate([numeric, rest], axis=1)


def _read(path: Path) -> Json:
    found: Mapping[str, Any] = json.loads(path.read_text())
    return cleaned(found)
