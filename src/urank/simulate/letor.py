"""The semi-synthetic experiment of Section 5.2: labelled documents, weak loggers, users who click on what they show.

    documents ──► candidates ──► loggers ──► sessions ──► showings ──► clicks
                      └──► oracle: the true click table ───────────────┘

All of it is array arithmetic over documents, sessions or showings; every part draws from a generator of its own, so
that more sessions, say, change neither the documents nor the users.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import tomli_w
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.files import new_folder
from urank.log.letor import Letor, read_letor
from urank.log.lists import list_ids
from urank.log.split import SPLITS, split_by_hash, stable_hash
from urank.progress import Report, silent
from urank.simulate.config import MOST_LABEL, SimulationConfig
from urank.simulate.generate import LABEL_SHARES, generate_letor
from urank.simulate.loggers import draw_placements, logger_positions, logging_probability
from urank.simulate.oracle import Oracle, attention_weights
from urank.simulate.scaling import Scaling, scale01, scaling_bounds

__all__ = ["Simulation", "SimulationConfig", "draw_candidates", "simulate", "write_simulation"]

ROW_GROUP_BYTES = 64 << 20

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """An impression log and the truth behind it.

    Attributes:
        config: what was asked for.
        oracle: the users.
        bounds: `[2, F]` of the scaling (`scaling_bounds`), or None when it is by rank.
        log: one row for each showing, sorted by query, session and position.
        candidates: the documents of the test queries (or of all) with `table`, the list of their K true click
            probabilities; of cascade users `relevance_probability` instead.
    """

    config: SimulationConfig
    oracle: Oracle
    bounds: NDArray[np.float64] | None
    log: pl.DataFrame
    candidates: pl.DataFrame


_STREAMS = ("data", "candidates", "oracle", "loggers", "values", "traffic", "randomise", "clicks")


def simulate(config: SimulationConfig, progress: Report | None = None) -> Simulation:
    """Run the experiment: documents, users, loggers, sessions, clicks.

    Raises:
        DataError: when `config.data` cannot be read.
        ConfigError: when the labels of the data and the parameters of the oracle do not fit together.
    """
    report = progress or silent
    rng = {
        name: np.random.default_rng(seed)
        for name, seed in zip(_STREAMS, np.random.SeedSequence(config.seed).spawn(len(_STREAMS)), strict=True)
    }
    report("simulate", 0, 4)
    data = _documents(config, rng["data"])
    keep = draw_candidates(data.offsets, config.candidates, rng["candidates"])
    offsets = np.concatenate([[0], np.cumsum(keep)])[data.offsets]
    items = _items(config, data, keep, rng["values"])
    report("simulate", 1, 4)

    oracle = _oracle(config, data, rng["oracle"])
    bounds, scaled = _scaled(config.scaling, data.features, keep)
    truth = oracle.truth(scaled, data.label[keep], offsets)
    candidates = _candidates(config, items, truth)
    report("simulate", 2, 4)

    ranks = logger_positions(
        data.features[keep],
        data.label[keep],
        offsets,
        loggers=config.loggers,
        label_share=config.label_share,
        rng=rng["loggers"],
    )
    report("simulate", 3, 4)
    log = _log(config, items, offsets, ranks, oracle, truth, rng)
    report("simulate", 4, 4)
    return Simulation(config, oracle, bounds, log, candidates)


def write_simulation(
    simulation: Simulation, folder: str | Path, *, overwrite: bool = False, progress: Report | None = None
) -> None:
    """Write the log that a learner may see, and beside it the truth that only an evaluation may.

        log.parquet                the impression log
        simulation.toml            the config; `simulate` makes the same bytes of it again
        truth/oracle.json          the users, and the bounds of the scaling
        truth/candidates.parquet   the candidates of the test queries (or of all) with their true click table

    Args:
        simulation: what `simulate` gave.
        folder: a new or empty folder; it appears when all of it is complete.
        overwrite: replace an earlier simulation. A folder that holds anything else is never replaced.
        progress: told of each file.

    Raises:
        ConfigError: when the folder is taken or cannot be written; it is then as it was before.
    """
    report = progress or silent
    try:
        with new_folder(folder, marker="simulation.toml", overwrite=overwrite) as target:
            report("write", 0, 2)
            settings = simulation.config.model_dump(mode="json", exclude_none=True)
            (target / "simulation.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
            (target / "truth").mkdir()
            truth = json.dumps(_truth(simulation), indent=2)
            (target / "truth" / "oracle.json").write_text(truth + "\n", encoding="utf-8")
            _write_parquet(simulation.candidates, target / "truth" / "candidates.parquet")
            report("write", 1, 2)
            _write_parquet(simulation.log, target / "log.parquet")
            report("write", 2, 2)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error


def _truth(simulation: Simulation) -> dict[str, Any]:
    low, high = (None, None) if simulation.bounds is None else simulation.bounds.tolist()
    return {
        "oracle": simulation.oracle.to_dict(),
        "scaling": {"method": simulation.config.scaling, "low": low, "high": high},
    }


def _write_parquet(frame: pl.DataFrame, path: Path) -> None:
    bytes_per_row = max(frame.estimated_size() / max(len(frame), 1), 1)
    frame.write_parquet(path, compression="zstd", row_group_size=max(1, int(ROW_GROUP_BYTES / bytes_per_row)))


def draw_candidates(offsets: Ints, most: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A mask `[rows]` that keeps at most so many rows of each query, every subset as likely as any other.

    >>> draw_candidates(np.array([0, 2, 7]), 3, np.random.default_rng(0)).sum()
    np.int64(5)
    """
    query = list_ids(offsets)
    order = np.lexsort((rng.random(len(query)), query))
    keep = np.empty(len(query), dtype=np.bool_)
    keep[order] = np.arange(len(query)) - offsets[query] < most
    return keep


def _documents(config: SimulationConfig, rng: np.random.Generator) -> Letor:
    if config.data is not None:
        return read_letor(config.data)
    fewest, most = max(1, round(0.8 * config.candidates)), 2 * config.candidates
    return generate_letor(
        config.queries, config.features, min_items=fewest, max_items=most, noise=config.noise, rng=rng
    )


def _oracle(config: SimulationConfig, data: Letor, rng: np.random.Generator) -> Oracle:
    highest = float(data.label.max())
    label_max = config.label_max or (highest if config.data is not None else len(LABEL_SHARES) - 1.0)
    if highest == 0 and config.label_max is None:
        raise ConfigError(
            f"every label of {config.data} is 0, so nothing in it is relevant: label_max must be above 0; got 0"
        )
    if label_max > MOST_LABEL:
        raise ConfigError(f"labels are grades from 0 to {MOST_LABEL}; {config.data or 'the data'} has {highest:g}")
    if label_max < highest:
        raise ConfigError(f"label_max must be at least the highest label in the data, {highest:g}; got {label_max:g}")
    uses_features = config.user in ("item", "query")
    return Oracle(
        user=config.user,
        positions=config.positions,
        label_max=label_max,
        weights=tuple(attention_weights(data.n_features, config.eta, rng).tolist()) if uses_features else (),
        epsilon=config.epsilon,
        denominator=config.denominator,
        gamma=config.gamma,
    )


def _scaled(
    method: Scaling, features: NDArray[np.float32], keep: NDArray[np.bool_]
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
    """The bounds over all documents, and the features of the candidates scaled by them; by rank there are no bounds."""
    if method == "rank":
        return None, scale01(features, method)[keep]
    bounds = scaling_bounds(features, method)
    return bounds, scale01(features[keep], method, bounds=bounds)


def _items(config: SimulationConfig, data: Letor, keep: NDArray[np.bool_], rng: np.random.Generator) -> pl.DataFrame:
    """One row for each candidate, under the names of the log; an item is called after its place in the data."""
    query = pl.Series("query_id", data.query[keep]).cast(pl.String)
    query = query if config.data is not None else "q" + query.str.zfill(6)
    number = np.arange(len(keep)) - data.offsets[list_ids(data.offsets)] + 1
    columns: dict[str, Any] = {
        "query_id": query,
        "item_id": query + "-" + pl.Series(number[keep]).cast(pl.String),
        "relevance": data.label[keep],
    }
    if config.values is not None:
        columns["value"] = rng.uniform(*config.values, len(keep)).astype(np.float32)[keep]
    columns |= {f"f{j}": column for j, column in enumerate(np.ascontiguousarray(data.features[keep].T), start=1)}
    return pl.DataFrame(columns)


def _candidates(config: SimulationConfig, items: pl.DataFrame, truth: NDArray[np.float64]) -> pl.DataFrame:
    name = "table" if truth.ndim == 2 else "relevance_probability"
    known = pl.Series(name, truth.astype(np.float32))
    known = known.arr.to_list() if truth.ndim == 2 else known
    if config.truth == "all":
        return items.with_columns(known)
    split = split_by_hash(stable_hash(items["query_id"]), valid=config.valid, test=config.test)
    return items.with_columns(known).filter(split == SPLITS.index("test"))


def _log(
    config: SimulationConfig,
    items: pl.DataFrame,
    offsets: Ints,
    ranks: Ints,
    oracle: Oracle,
    truth: NDArray[np.float64],
    rng: dict[str, np.random.Generator],
) -> pl.DataFrame:
    K, kind, share, traffic = config.positions, config.randomise, config.randomise_share, config.traffic_shares
    query, shown = list_ids(offsets), np.minimum(np.diff(offsets), config.positions)
    session_query = np.repeat(np.arange(len(shown)), config.sessions)
    session_shown = shown[session_query]
    logger = rng["traffic"].choice(len(traffic), size=len(session_query), p=traffic)
    randomised = rng["randomise"].random(len(session_query)) < share
    placements = draw_placements(kind, np.where(randomised, session_shown, 1), K, rng["randomise"])

    where = np.arange(K) < session_shown[:, None]
    session, place = np.nonzero(where)
    base_rank = np.argsort(placements, axis=1)[where] + 1
    row = _rows_by_rank(ranks, query, len(shown), K)[logger[session], session_query[session], base_rank - 1]
    position = place + 1
    clicks = oracle.sample_clicks(
        truth, position, np.concatenate([[0], np.cumsum(session_shown)]), rng["clicks"], rows=row
    )
    propensity = logging_probability(ranks, shown[query], traffic, kind=kind, share=share, K=K)[row, place]
    names = [f"logger-{n + 1}" for n in range(len(traffic))]
    policies = pl.Series([*names, *(f"{name}+{kind}" for name in names)])

    shown_items = items[row]
    ranked = {"ranked_position": base_rank.astype(np.int32)} if kind != "none" else {}
    return pl.DataFrame(
        {
            "query_id": shown_items["query_id"],
            "session_id": session,
            "item_id": shown_items["item_id"],
            "position": position.astype(np.int32),
            "click": clicks.astype(np.int8),
            **({"value": shown_items["value"]} if config.values is not None else {}),
            "policy": policies[(logger + len(names) * randomised)[session]],
            "propensity": propensity.astype(np.float32),
            **ranked,
            "relevance": shown_items["relevance"],
        }
    ).hstack(shown_items.select("^f[0-9]+$"))


def _rows_by_rank(ranks: Ints, query: Ints, queries: int, K: int) -> Ints:
    """The candidate `[loggers, Q, K]` that each logger puts at each position; −1 where a query has fewer."""
    rows = np.full((len(ranks), queries, K), -1)
    logger, row = np.nonzero(ranks <= K)
    rows[logger, query[row], ranks[logger, row] - 1] = row
    return rows
