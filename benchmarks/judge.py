"""Are offline estimates right? Estimated against true utilities of policies, over many simulated logs.

    python -m benchmarks judge --resume judge.jsonl       every scenario, 30 logs each
    python -m benchmarks judge --only item1000 pbm        some scenarios
    python -m benchmarks judge --seed 600                 seeds for choosing settings: 500 to 899

For each log a model is trained with all defaults, and its methods and a random order are evaluated on the test queries
(a fifth) as `urank evaluate` does. The truth is the expected utility of the same orders of the same lists under the
simulated users. Users: `item3000` and `item1000` (item-specific attention, by number of queries), `pbm` (one curve for
all), `swaps` (item users, one logger with 5 % random swaps), `trust`, `query`, `bids` (item users, values from 1 to 10,
errors in units of the mean value) and `cascade`, whom the model cannot describe. Scenarios other than `item3000` have
1,000 queries.

- error: root mean square of estimated minus true differences to the logged order, in clicks per list;
- rank correlation: Spearman's ρ of estimated and true utilities of all orders, the mean over logs, and Kendall's τ;
- coverage: of 95 % intervals of differences to the logged order, of match − ctr1, and of utilities;
- sign: of match − score, where the true difference is at least 0.002; significantly wrong: |z| > 1.96 the other way;
- width: mean width of the intervals of differences, over that of Eq. 3 by the same networks.

`--resume` names a file to which the result of each log is appended, so that an interrupted run resumes; results of
another commit are ignored.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console
from scipy.stats import kendalltau, spearmanr

import urank
from benchmarks.harness import Bar, Figure
from urank.evaluation.policy_evaluation import Evaluation, evaluation_blocks
from urank.lab.letor_simulation import Simulation, SimulationConfig, simulate
from urank.lab.provenance import commit
from urank.log.dataset import Dataset
from urank.pipeline import evaluate, fit_model, policies_to_evaluate
from urank.ranking.policies import LoggedOrder, Policy
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import UrankConfig

SCENARIOS: dict[str, dict[str, Any]] = {
    "item3000": {"queries": 3_000},
    "item1000": {"queries": 1_000},
    "pbm": {"queries": 1_000, "user": "pbm"},
    "swaps": {"queries": 1_000, "loggers": 1, "randomise": "swap", "randomise_share": 0.05},
    "trust": {"queries": 1_000, "user": "trust"},
    "query": {"queries": 1_000, "user": "query"},
    "bids": {"queries": 1_000, "values": (1, 10)},
    "cascade": {"queries": 1_000, "user": "cascade", "positions": 5},
}
UNDESCRIBED = {"cascade"}
"""Users that no click table can describe; nothing is required of their coverage."""

LOGS, SEED = 30, 2_000
LEAST_DIFFERENCE = 0.002

console = Console(stderr=True)


def run(
    *,
    quick: bool,
    only: Sequence[str] = (),
    seed: int = SEED,
    logs: int = LOGS,
    resume: Path | None = None,
    workers: int = 2,
) -> Iterator[Bar | Figure]:
    absent = [name for name in only if name not in SCENARIOS]
    if absent:
        raise SystemExit(f"judge has no scenario '{absent[0]}'; it has {', '.join(SCENARIOS)}")
    names = list(only or SCENARIOS)
    if quick:
        names, logs = names[1:2] if not only else names, 1
    found = measured([(name, seed + n) for name in names for n in range(logs)], resume, workers, quick=quick)
    for name in names:
        yield from bars(name, [found[name, seed + n] for n in range(logs)], held=name not in UNDESCRIBED)
    described = [result for (name, _), result in found.items() if name not in UNDESCRIBED]
    if described:
        yield from bars("all described users", described, held=True, overall=True)


def measured(
    jobs: Sequence[tuple[str, int]], resume: Path | None, workers: int, *, quick: bool
) -> dict[tuple[str, int], dict[str, Any]]:
    """Evaluate all logs that were not evaluated before."""
    version = commit()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    if resume is not None and resume.exists():
        for line in resume.read_text(encoding="utf-8").splitlines():
            if line.endswith("}") and (row := json.loads(line))["commit"] == version:
                found[row["scenario"], row["seed"]] = row["result"]
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers, which inherit it
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(one_log, *job, quick=quick): job for job in jobs if job not in found}
        for future in as_completed(waiting):
            name, seed = waiting[future]
            found[name, seed] = result = future.result()
            pairs = (f"{each} {d['mean']:+.4f} (true {d['true']:+.4f})" for each, d in result["differences"].items())
            console.print(f"{name}, seed {seed}: {', '.join(pairs)}", highlight=False, soft_wrap=True)
            if resume is not None:
                with resume.open("a", encoding="utf-8") as file:
                    row = {"scenario": name, "seed": seed, "commit": version, "result": result}
                    file.write("\n" + json.dumps(row) + "\n")
    return {job: found[job] for job in jobs}


def one_log(name: str, seed: int, *, quick: bool = False) -> dict[str, Any]:
    """Train and evaluate on one simulated log; return estimates with intervals beside the truth."""
    torch.set_num_threads(1)
    settings = SCENARIOS[name] | ({"queries": 300} if quick else {})
    config = SimulationConfig(valid=0.1, test=0.2, seed=seed, **settings)
    simulation = simulate(config)
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as folder:
        log = urank.read(simulation.log, drop=["relevance", "propensity"])
        urank.prepare(log, Path(folder) / "prepared", valid=config.valid, test=config.test)
        dataset = Dataset(Path(folder) / "prepared")
        model = fit_model(dataset, UrankConfig()).model
        found = evaluate([model], dataset)
        truth = true_utilities(simulation, dataset, [LoggedOrder(), *policies_to_evaluate([model])])
    return compared(found, truth, model, scale=5.5 if "values" in settings else 1.0)


def true_utilities(simulation: Simulation, dataset: Dataset, policies: Sequence[Policy]) -> dict[str, float]:
    """Compute the mean true utility per list of each policy on the test split."""
    candidates = simulation.candidates.with_row_index("row")
    name = simulation.oracle.truth_name
    truth = np.array(candidates[name].to_list(), dtype=np.float64)
    row_of = candidates.select("item_id", "row")
    columns = dict.fromkeys([column for policy in policies for column in policy.columns] + ["item_id", "position"])
    if dataset.has("value"):
        columns["value"] = None
    earned, lists = dict.fromkeys([policy.name for policy in policies], 0.0), 0
    for block in evaluation_blocks(dataset, ("test",), list(columns), seed=0):
        ids = pl.DataFrame({"item_id": pl.Series(block.items["item_id"].combine_chunks())})
        rows = ids.join(row_of, on="item_id", how="left", maintain_order="left")["row"].to_numpy().astype(np.int64)
        value = block.column("value") if dataset.has("value") else np.ones(len(rows))
        lists += len(block.offsets) - 1
        for policy in policies:
            places = policy.positions(block)
            chance = simulation.oracle.click_probabilities(truth, places, block.offsets, rows=rows)
            earned[policy.name] += float((chance * value).sum())
    return {name: total / lists for name, total in earned.items()}


def compared(found: Evaluation, truth: Mapping[str, float], model: RankingModel, *, scale: float) -> dict[str, Any]:
    """Set estimates beside the truth, in clicks per list."""
    K = found.positions
    both = found.compare("match", "ctr1")
    against = found.compare("match", "score")
    differences = {
        policy.name: _entry(policy.difference, truth[policy.name] - truth["logged"], scale)
        for policy in found.policies
        if policy.difference is not None
    }
    widths = {
        name: np.mean([policy.estimates[name].high - policy.estimates[name].low for policy in found.policies[1:]])
        for name in ("refit", "ratio")
    }
    return {
        "method": model.method,
        "differences": differences,
        "utilities": {each.name: _entry(each.utility[K], truth[each.name], scale) for each in found.policies},
        "match − ctr1": _entry(both, truth["match"] - truth["ctr1"], scale),
        "match − score": _entry(against, truth["match"] - truth["score"], scale),
        "width": float(widths["refit"] / widths["ratio"]),
        "dependent": found.independence is not None and not found.independence.independent,
    }


def _entry(interval: Any, true: float, scale: float) -> dict[str, float]:
    ends = {name: getattr(interval, name) / scale for name in ("mean", "low", "high")}
    return ends | {"true": true / scale}


def bars(name: str, results: Sequence[dict[str, Any]], *, held: bool, overall: bool = False) -> Iterator[Bar | Figure]:
    """Summarise the logs of a scenario."""
    differences = [entry for result in results for entry in result["differences"].values()]
    error = float(np.sqrt(np.mean([(each["mean"] - each["true"]) ** 2 for each in differences])))
    correlations = {
        name: float(np.nanmean([_correlation(result["utilities"], of) for result in results]))
        for name, of in {"Spearman": spearmanr, "Kendall": kendalltau}.items()
    }
    covered = {
        "differences": _coverage(differences),
        "match − ctr1": _coverage([result["match − ctr1"] for result in results]),
        "utilities": _coverage([entry for result in results for entry in result["utilities"].values()]),
    }
    least = {"differences": 0.92 if overall else 0.88, "match − ctr1": 0.88, "utilities": 0.95 if overall else None}
    some = {"part": name}
    yield Bar(
        f"{name}: error of differences",
        error,
        "clicks",
        at_most=(0.020 if overall else 0.025) if held else None,
        **some,
    )
    for kind, correlation in correlations.items():
        least_correlation = 0.9 if overall and kind == "Spearman" else None
        yield Bar(f"{name}: rank correlation ({kind})", correlation, "", at_least=least_correlation, **some)
    for what, share in covered.items():
        yield Bar(f"{name}: coverage, {what}", share, "", at_least=least[what] if held else None, **some)
    clear = [r["match − score"] for r in results if abs(r["match − score"]["true"]) >= LEAST_DIFFERENCE]
    if clear:
        right = float(np.mean([each["mean"] * each["true"] > 0 for each in clear]))
        yield Bar(
            f"{name}: sign of match − score right ({len(clear)} logs)",
            right,
            "",
            at_least=0.8 if overall else None,
            **some,
        )
    wrong = [(each["low"] > 0 > each["true"]) or (each["high"] < 0 < each["true"]) for each in differences]
    yield Bar(
        f"{name}: differences significantly wrong", float(np.mean(wrong)), "", at_most=0.02 if overall else None, **some
    )
    shipped = [result["differences"][result["method"]]["true"] for result in results]
    yield Bar(f"{name}: shipped method − logged, smallest true difference", float(np.min(shipped)), "clicks", **some)
    yield Bar(f"{name}: width / Eq. 3", float(np.mean([result["width"] for result in results])), "", **some)
    if not held:
        warned = float(np.mean([result["dependent"] for result in results]))
        yield Bar(
            f"{name}: logs with a warning that clicks depend on the items above", warned, "", at_least=0.8, **some
        )
    elif overall:
        warned = float(np.mean([result["dependent"] for result in results]))
        yield Bar(f"{name}: logs with such a warning, by mistake", warned, "", **some)


def _correlation(utilities: Mapping[str, Mapping[str, float]], of: Callable[..., Any]) -> float:
    """Return the rank correlation of estimates and truth; NaN if all orders earn the same."""
    estimated, true = ([each[key] for each in utilities.values()] for key in ("mean", "true"))
    return float(of(estimated, true).statistic) if np.ptp(true) > 1e-9 else float("nan")


def _coverage(entries: Sequence[dict[str, float]]) -> float:
    return float(np.mean([each["low"] <= each["true"] <= each["high"] for each in entries]))
