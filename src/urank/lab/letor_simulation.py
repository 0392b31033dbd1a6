"""The semi-synthetic simulation of Section 5.2: labelled documents, weak loggers, simulated users.

    documents ──► candidates ──► loggers ──► sessions ──► impressions ──► clicks
                      └──► oracle: the true click table ──────────────────┘

Each stage has its own random generator, so that more sessions, for example, change neither the documents nor the users.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import polars as pl
import tomli_w
from numpy.typing import NDArray
from pydantic import Field, model_validator

from urank.config import Settings
from urank.errors import ConfigError
from urank.lab.logging_policies import Randomisation, draw_placements, logger_positions, logging_probability
from urank.lab.user_models import (
    UNWEIGHTED,
    Oracle,
    Scaling,
    User,
    attention_weights,
    scale01,
    scaling_bounds,
)
from urank.log.columns import MAX_POSITION
from urank.log.ragged import list_ids
from urank.log.splits import SPLITS, check_shares, split_by_hash, stable_hash
from urank.log.svmlight import Letor, read_letor
from urank.progress import Report, silent
from urank.storage import new_folder

LABEL_SHARES = (0.52, 0.32, 0.13, 0.02, 0.01)
"""Shares of the grades 0–4, about those of MSLR-WEB."""

QUERY_FACTORS, ITEM_FACTORS = 3, 8
FEATURE_NOISE = 0.1
SATURATION = 4.0

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def generate_letor(
    queries: int,
    features: int = 30,
    *,
    min_items: int = 8,
    max_items: int = 20,
    noise: float = 0.1,
    rng: np.random.Generator,
) -> Letor:
    """Generate queries with documents, features and graded labels, in the form that `read_letor` returns.

    Args:
        queries: number of queries; their ids are 0, 1, 2, …
        features: F, number of features. One in ten describes the query and is the same for all its documents.
        min_items: the shortest list.
        max_items: the longest list; lengths are uniform between the two.
        noise: standard deviation of the noise in the latent relevance, whose own deviation is about 1.5.
        rng: random generator.

    >>> data = generate_letor(100, features=12, rng=np.random.default_rng(0))
    >>> data.features.shape[1], len(data.offsets), sorted(set(data.label.tolist()))
    (12, 101, [0.0, 1.0, 2.0, 3.0, 4.0])
    """
    if queries < 1 or features < 1:
        raise ConfigError(f"queries and features must be at least 1; got {queries} and {features}")
    if not 1 <= min_items <= max_items:
        raise ConfigError(f"min_items must be from 1 to max_items; got {min_items} and {max_items}")
    lengths = rng.integers(min_items, max_items, size=queries, endpoint=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    query = list_ids(offsets)
    of_query = rng.standard_normal((queries, QUERY_FACTORS))[query]
    of_item = rng.standard_normal((len(query), ITEM_FACTORS))
    # The factors of a query's documents are correlated: queries retrieve similar documents.
    of_item[:, :QUERY_FACTORS] = 0.9 * of_item[:, :QUERY_FACTORS] + 0.45 * of_query
    relevance = latent_relevance(of_query, of_item) + noise * rng.standard_normal(len(query))
    observed = _observed(of_query, of_item, features, offsets, rng)
    return Letor(features=observed, label=graded_labels(relevance), query=query, offsets=offsets, item=None)


def latent_relevance(of_query: Floats, of_item: Floats) -> Floats:
    """Compute the latent relevance `[rows]`, before noise, from factors u of the query and v of the document.

        v₁ + ½ v₂ + 0.4 v₄ v₅ + tanh(v₆) + 0.3 u₁ v₇ − 0.2 v₈² + ½ u₂

    A linear part, an interaction, a saturating term, an effect that differs by query, an optimum in the middle, and
    a query-level offset.
    """
    u, v = of_query.T, of_item.T
    curved = 0.4 * v[3] * v[4] + np.tanh(v[5]) - 0.2 * v[7] ** 2
    return np.asarray(v[0] + 0.5 * v[1] + curved + (0.3 * u[0] * v[6] + 0.5 * u[1]))


def graded_labels(relevance: Floats, shares: tuple[float, ...] = LABEL_SHARES) -> NDArray[np.float32]:
    """Assign grades 0, 1, 2, … by thresholds on the latent relevance, such that they have these shares.

    >>> graded_labels(np.arange(10.0), (0.5, 0.3, 0.2)).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    """
    thresholds = np.quantile(relevance, np.cumsum(shares)[:-1])
    return np.searchsorted(thresholds, relevance, side="right").astype(np.float32)


def _observed(
    of_query: Floats, of_item: Floats, features: int, offsets: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Generate features `[rows, F]`: each is a transformed noisy combination of two factors."""
    factors = np.concatenate([of_query, of_item], axis=1)
    columns = np.empty((len(factors), features), dtype=np.float32)
    for j in range(features):
        loadings = np.zeros(factors.shape[1])
        first = QUERY_FACTORS + j % ITEM_FACTORS
        loadings[first] = 1.0
        loadings[rng.integers(factors.shape[1])] += rng.uniform(-0.7, 0.7)
        noise = FEATURE_NOISE * rng.standard_normal(len(factors))
        if j % 10 == 9:
            loadings[QUERY_FACTORS:] = 0.0
            loadings[j // 10 % QUERY_FACTORS] = 1.0
            noise = noise[offsets[:-1]][list_ids(offsets)]
        signal = factors @ loadings / np.linalg.norm(loadings) + noise
        columns[:, j] = _KINDS[j % len(_KINDS)](np.clip(signal, -SATURATION, SATURATION), rng)
    return columns


_KINDS: tuple[Callable[[Floats, np.random.Generator], Floats], ...] = (
    # Log-normal, like document lengths and link counts.
    lambda signal, rng: np.exp(rng.uniform(2, 6) + rng.uniform(1, 2) * signal),
    # Integers with many zeros, like term frequencies.
    lambda signal, rng: np.floor(np.exp(rng.uniform(1.2, 1.8) + 0.8 * signal)),
    # From 0 to 1, like ratios and normalised scores.
    lambda signal, rng: 1 / (1 + np.exp(rng.uniform(0.2, 0.6) - 1.5 * signal)),
)

MOST_LABEL = 64


class SimulationConfig(Settings):
    """Settings of a simulation; the same settings give the same bytes."""

    data: str | None = Field(None, description="LETOR file or folder; documents are generated if left out")
    queries: int = Field(10_000, ge=1, le=10_000_000, description="number of generated queries")
    noise: float = Field(
        0.1, ge=0, le=100, description="noise in the relevance of generated documents, whose deviation is about 1.5"
    )
    features: int = Field(30, ge=1, le=10_000, description="number of generated features")
    candidates: int = Field(
        10,
        ge=1,
        le=100_000,
        description="candidates per list: documents of the query, sampled at random if there are more; "
        "generated queries have from 0.8 to 2 times as many",
    )
    positions: int = Field(10, ge=1, le=MAX_POSITION, description="number of positions shown")
    sessions: int = Field(10, ge=1, le=10_000_000, description="sessions per query")
    loggers: int = Field(2, ge=1, le=1000, description="number of weak rankers that produced the log")
    traffic: tuple[float, ...] | None = Field(None, description="share of sessions of each logger; equal by default")
    label_share: float = Field(0.01, gt=0, le=1, description="share of the queries on which a logger is trained")
    randomise: Randomisation = Field("none", description="randomisation of a logger's order")
    randomise_share: float = Field(0.0, ge=0, le=1, description="share of the randomised sessions")
    user: User = Field(
        "item",
        description="user model: item (the paper's), query, pbm, trust and cascade; or users whose curves no click "
        "family has: grid, carousel, fold, neighbour and patience",
    )
    eta: float = Field(
        1.5, ge=0, le=1000, description="η: spread of the attention weights, of all users but pbm, cascade and trust"
    )
    attention_features: int | None = Field(
        None,
        ge=1,
        description="number of features that attention depends on, selected at random; all by default, 10 in the "
        "paper's released code",
    )
    epsilon: float = Field(0.1, ge=0, lt=1, description="ε: click probability of an irrelevant document, once examined")
    gamma: float = Field(1.0, ge=0, le=1000, description="examination 1/k^gamma of the users pbm and trust")
    label_max: float | None = Field(
        None, gt=0, le=MOST_LABEL, description="highest grade; the highest in the data by default, 4 when generated"
    )
    denominator: float | None = Field(
        None, gt=0, description="of the relevance probability; 2^label_max − 1 by default, as in the paper's text"
    )
    scaling: Scaling = Field("log", description="scaling of features to [0, 1] for the users' attention")
    values: tuple[float, float] | None = Field(
        None, description="lowest and highest value of a click, uniform over documents; every click is 1 by default"
    )
    truth_split: Literal["test", "all"] = Field("test", description="the queries whose true click table is stored")
    valid: float = Field(0.1, ge=0, le=1, description="share of the queries for validation")
    test: float = Field(0.1, ge=0, le=1, description="share of the queries for the test")
    seed: int = Field(0, ge=0, description="seed of all random numbers")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.traffic is not None:
            if len(self.traffic) != self.loggers:
                raise ValueError(f"traffic must have one share for each of {self.loggers} loggers; got {self.traffic}")
            if min(self.traffic) <= 0 or not np.isclose(sum(self.traffic), 1, atol=1e-9):
                raise ValueError(f"traffic must be shares above 0 that sum to 1; got {self.traffic}")
        if (self.randomise == "none") != (self.randomise_share == 0):
            raise ValueError(
                "randomise and randomise_share must be given together; "
                f"got randomise {self.randomise!r} of a share of {self.randomise_share:g}"
            )
        if self.values is not None and not 0 <= self.values[0] <= self.values[1]:
            raise ValueError(f"values must be a lowest value from 0 up and a highest; got {self.values}")
        if self.values is not None and self.values[1] > float(np.finfo(np.float32).max):
            raise ValueError(f"values must fit 32-bit numbers, so be below 3.4e38; got {self.values}")
        try:
            check_shares(self.valid, self.test)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


ROW_GROUP_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class Simulation:
    """An impression log and the truth behind it.

    The log has a row for each impression, sorted by query, session and position. The candidates are the documents of
    the test queries (or of all) with `table`, the list of their K true click probabilities; `relevance_probability` or
    `table_alone` instead for users whose clicks depend on the items above (see `Oracle.truth`).
    """

    config: SimulationConfig
    oracle: Oracle
    bounds: NDArray[np.float64] | None  # [2, F] of the scaling (`scaling_bounds`); None if it is by rank
    log: pl.DataFrame
    candidates: pl.DataFrame


_STREAMS = ("data", "candidates", "oracle", "loggers", "values", "traffic", "randomise", "clicks")


def simulate(config: SimulationConfig, report: Report = silent) -> Simulation:
    """Simulate documents, users, loggers, sessions and clicks.

    Raises:
        DataError, ConfigError: when `config.data` cannot be read, or its labels do not fit the oracle's parameters.
    """
    rng = dict(zip(_STREAMS, np.random.default_rng(config.seed).spawn(len(_STREAMS)), strict=True))
    report("simulate", 0, 4)
    if config.data is not None:
        data = read_letor(config.data)
    else:
        sizes = {"min_items": max(1, round(0.8 * config.candidates)), "max_items": 2 * config.candidates}
        data = generate_letor(config.queries, config.features, **sizes, noise=config.noise, rng=rng["data"])
    keep = draw_candidates(data.offsets, config.candidates, rng["candidates"])
    offsets = np.concatenate([[0], np.cumsum(keep)])[data.offsets]
    items = _items(config, data, keep, rng["values"])
    report("simulate", 1, 4)

    oracle = _oracle(config, data, rng["oracle"])
    # Bounds over all documents; ranks compare them with one another, so that all are scaled.
    bounds = scaling_bounds(data.features, config.scaling) if config.scaling != "rank" else None
    if bounds is None:
        scaled = scale01(data.features, "rank")[keep]
    else:
        scaled = scale01(data.features[keep], config.scaling, bounds=bounds)
    truth = oracle.truth(scaled, data.label[keep], offsets)
    candidates = _candidates(config, items, oracle.truth_name, truth)
    report("simulate", 2, 4)

    weak: dict[str, Any] = {"loggers": config.loggers, "label_share": config.label_share, "rng": rng["loggers"]}
    ranks = logger_positions(data.features[keep], data.label[keep], offsets, **weak)
    report("simulate", 3, 4)
    log = _log(config, items, offsets, ranks, oracle, truth, scaled, rng)
    report("simulate", 4, 4)
    return Simulation(config, oracle, bounds, log, candidates)


def write_simulation(
    simulation: Simulation, folder: str | Path, *, overwrite: bool = False, report: Report = silent
) -> None:
    """Write the log for learners and, in `truth/`, the truth for evaluations.

        log.parquet                the impression log
        simulation.toml            the settings
        truth/oracle.json          the users, and the bounds of the scaling
        truth/candidates.parquet   the candidates of the test queries (or of all) with their true click table

    Args:
        simulation: from `simulate`.
        folder: a new or empty folder, written atomically. If it cannot be written, it is unchanged.
        overwrite: replace an earlier simulation. A folder with anything else in it is never replaced.
        report: progress callback.
    """
    low, high = (None, None) if simulation.bounds is None else simulation.bounds.tolist()
    scaling = {"method": simulation.config.scaling, "low": low, "high": high}
    truth = json.dumps({"oracle": simulation.oracle.to_dict(), "scaling": scaling}, indent=2)
    with simulation_folder(folder, "simulation.toml", simulation.config, overwrite=overwrite) as target:
        report("write", 0, 2)
        (target / "truth").mkdir()
        (target / "truth" / "oracle.json").write_text(truth + "\n", encoding="utf-8")
        _write_parquet(simulation.candidates, target / "truth" / "candidates.parquet")
        report("write", 1, 2)
        _write_parquet(simulation.log, target / "log.parquet")
        report("write", 2, 2)


@contextmanager
def simulation_folder(folder: str | Path, marker: str, config: Settings, *, overwrite: bool) -> Iterator[Path]:
    """Open the new output folder of a simulation, with its settings in the file `marker`."""
    try:
        with new_folder(folder, marker=marker, overwrite=overwrite) as target:
            settings = config.model_dump(mode="json", exclude_none=True)
            (target / marker).write_text(tomli_w.dumps(settings), encoding="utf-8")
            yield target
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error


def _write_parquet(frame: pl.DataFrame, path: Path) -> None:
    bytes_per_row = max(frame.estimated_size() / max(len(frame), 1), 1)
    frame.write_parquet(path, compression="zstd", row_group_size=max(1, int(ROW_GROUP_BYTES / bytes_per_row)))


def draw_candidates(offsets: Ints, most: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw a mask `[rows]` of at most `most` rows of each query, uniformly.

    >>> draw_candidates(np.array([0, 2, 7]), 3, np.random.default_rng(0)).sum()
    np.int64(5)
    """
    query = list_ids(offsets)
    order = np.lexsort((rng.random(len(query)), query))
    keep = np.empty(len(query), dtype=np.bool_)
    keep[order] = np.arange(len(query)) - offsets[query] < most
    return keep


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
    weights: list[float] = []
    if config.user not in UNWEIGHTED:
        weights = attention_weights(data.n_features, config.eta, rng, selected=config.attention_features).tolist()
    users: dict[str, Any] = {"epsilon": config.epsilon, "denominator": config.denominator, "gamma": config.gamma}
    return Oracle(config.user, config.positions, label_max, tuple(weights), **users)


def _items(config: SimulationConfig, data: Letor, keep: NDArray[np.bool_], rng: np.random.Generator) -> pl.DataFrame:
    """Return a row for each candidate with the log's columns; an item is named by its place in the data."""
    query = pl.Series("query_id", data.query[keep]).cast(pl.String)
    query = query if config.data is not None else "q" + query.str.zfill(6)
    number = np.arange(len(keep)) - data.offsets[list_ids(data.offsets)] + 1
    item = query + "-" + pl.Series(number[keep]).cast(pl.String)
    columns: dict[str, Any] = {"query_id": query, "item_id": item, "relevance": data.label[keep]}
    if config.values is not None:
        columns["value"] = rng.uniform(*config.values, len(keep)).astype(np.float32)[keep]
    columns |= {f"f{j}": column for j, column in enumerate(np.ascontiguousarray(data.features[keep].T), start=1)}
    return pl.DataFrame(columns)


def _candidates(config: SimulationConfig, items: pl.DataFrame, name: str, truth: NDArray[np.float64]) -> pl.DataFrame:
    known = pl.Series(name, truth.astype(np.float32))
    known = known.arr.to_list() if truth.ndim == 2 else known
    if config.truth_split == "all":
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
    scaled: NDArray[np.float64],
    rng: dict[str, np.random.Generator],
) -> pl.DataFrame:
    K, kind, share = config.positions, config.randomise, config.randomise_share
    traffic = config.traffic or (1 / config.loggers,) * config.loggers
    query, shown = list_ids(offsets), np.minimum(np.diff(offsets), config.positions)
    session_query = np.repeat(np.arange(len(shown)), config.sessions)
    session_shown = shown[session_query]
    logger = rng["traffic"].choice(len(traffic), size=len(session_query), p=traffic)
    randomised = rng["randomise"].random(len(session_query)) < share
    placements = draw_placements(kind, np.where(randomised, session_shown, 1), K, rng["randomise"])

    where = np.arange(K) < session_shown[:, None]
    session, place = np.nonzero(where)
    base_rank = np.argsort(placements, axis=1)[where] + 1
    by_rank = np.full((len(ranks), len(shown), K), -1)  # the candidate at each position by logger and query
    of_logger, of_row = np.nonzero(ranks <= K)
    by_rank[of_logger, query[of_row], ranks[of_logger, of_row] - 1] = of_row
    row = by_rank[logger[session], session_query[session], base_rank - 1]
    position = place + 1
    session_offsets = np.concatenate([[0], np.cumsum(session_shown)])
    clicks = oracle.sample_clicks(truth, position, session_offsets, rng["clicks"], rows=row, x=scaled)
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
