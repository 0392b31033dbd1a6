"""Real logs with randomised traffic: clicks per search of our default beside the peers, on held-out random searches.

    python -m benchmarks real                        both hotel logs, six splits each
    python -m benchmarks real --only B --splits 3    one log, and every random search judged once
    python -m benchmarks real --half choose          judge the searches by which settings may be chosen
    python -m benchmarks real --log clicks.parquet --columns query_id=search click=clicked \\
        --random bucket=explore --drop booked        another log with randomised traffic

A is `expedia/searches.csv.gz` (ranked and random searches), B is `hotel-random/lists.parquet` (random lists only), in
../shared/data or $URANK_DATA. The random searches are divided into thirds by a hash of their id. One third is held out
and judged, everything else is the training log; three splits judge every search once, and the next three divide anew.
Ours is `prepare(valid=0.2, test=0)` and `fit_model` with all defaults; peers are those of `benchmarks.peers`.

The measure is clicks per search had the lists been shown in the new order:

    Σ over clicks of e(new slot) / mean of e over the slots of the list

where e is the position curve: the click rate of the random lists at each position, over all random lists of the log,
made monotone by isotonic regression with the impressions as weights. It is unbiased for orders that do not depend on
the logged slots. The order as shown does, so it is judged by the clicks that it had, which is what a random order
earns; its nDCG is too high for the same reason. nDCG@10 of the clicks stands beside the measure. Items are shuffled
within each list before they are ranked, so ties are broken at random.

z compares with LightGBM 150, paired by search: the differences of a search are averaged over the splits in which it was
judged, and the standard error is that of the mean over searches. It has the variation between searches in it, not that
of the training log.

Searches are also divided into two halves, by another hash. Training uses both, but only one half is judged: look at
`choose` while choosing settings, and report `judge`, the default. Results are kept only of a run with default options.

Another log (`--log`, Parquet or CSV) needs `--random COLUMN=VALUE`, which marks lists in random order (a list is a
query_id, with session_id where there is one), and `--columns ROLE=COLUMN` where names differ from `query_id`,
`position` and `click`. Outcomes of the click, such as bookings, must be dropped (`--drop`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from rich.console import Console
from sklearn.isotonic import IsotonicRegression

import urank
from benchmarks.harness import REAL_DATA, Bar, Figure
from benchmarks.peer_runs import peers_installed, run_peer, write_arrays
from benchmarks.peers import Features, Rows, Score, lightgbm_150, lightgbm_tuned, rows_of, with_within, xgboost_150
from urank.evaluation.ranking_metrics import ndcg_metric
from urank.learning.features import fit_featurizer
from urank.learning.lightgbm_data import matrix
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids, offsets_of_runs, pad, positions_by_score, where_items
from urank.log.splits import stable_hash
from urank.pipeline import fit_model
from urank.ranking.ranking_settings import UrankConfig

REFERENCE = "LightGBM 150"
WITHIN = f"{REFERENCE}, within"
DEFAULT = "urank, default"
THIRDS = 3
HALVES = ("choose", "judge")
HALF_SEED = 1_000
"""Seeds of the hashes: 0 divides train from valid in `prepare`, 1 and up are those of the thirds."""

RANDOM_ORDERS = 20
QUICK_QUERIES = 240
EXPEDIA = {"query_id": "srch_id", "item_id": "prop_id", "click": "click_bool"}

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Order = Callable[[], Ints]
console = Console(stderr=True)


@dataclass(frozen=True, eq=False)
class RealLog:
    """A log whose columns bear the names of their roles, with a flag for each row of a list in random order."""

    name: str
    frame: pl.DataFrame
    random: NDArray[np.bool_]

    def curve(self) -> Floats:
        """Estimate the position curve e(k) of the random lists; see the module."""
        shown = self.frame.filter(self.random)
        return position_curve(shown["position"].to_numpy(), shown["click"].to_numpy())

    def divided(self, split: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the training log, and the random lists held out in a split, by query and session."""
        third = stable_hash(self.frame["query_id"], seed=1 + split // THIRDS) % np.uint64(THIRDS)
        held = (third == split % THIRDS) & self.random
        queries = self.frame.filter(held)["query_id"].unique().implode()
        shown = self.frame.filter(held).sort(*list_keys(self.frame), "position")
        return self.frame.filter(~pl.col("query_id").is_in(queries)), shown


def list_keys(frame: pl.DataFrame) -> list[str]:
    """Return the columns that identify a list."""
    return [name for name in ("query_id", "session_id") if name in frame.columns]


def position_curve(position: NDArray[Any], click: NDArray[Any]) -> Floats:
    """Estimate the click rate at positions 1 to K, falling or level: isotonic regression weighted by impressions.

    >>> position_curve(np.array([1, 1, 2, 2, 3]), np.array([1, 1, 0, 0, 1])).round(3).tolist()
    [1.0, 0.333, 0.333]
    """
    last = int(position.max())
    curve = IsotonicRegression(increasing=False).fit(position, click).predict(np.arange(1, last + 1))
    return np.asarray(curve, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Held:
    """Held-out random lists, with the items of each in random order."""

    frame: pl.DataFrame
    offsets: Ints
    curve: Floats

    @classmethod
    def of(cls, frame: pl.DataFrame, curve: Floats, seed: int) -> Held:
        offsets = offsets_of_runs(frame.select(pl.struct(list_keys(frame)).rle_id()).to_series().to_numpy())
        order = np.lexsort((np.random.default_rng(seed).random(frame.height), list_ids(offsets)))
        return cls(frame[order], offsets, curve)

    def judge_logged(self) -> pl.DataFrame:
        """Judge the order as shown by the clicks it had."""
        shown = self.judge(self.sorted(-self.frame["position"].to_numpy().astype(np.float64)))
        clicks = self.frame.group_by("query_id", maintain_order=True).agg(
            pl.col("click").sum() / pl.struct(list_keys(self.frame)).n_unique()
        )
        return shown.with_columns(clicks=clicks["click"].cast(pl.Float64))

    def judge_random(self, seed: int) -> pl.DataFrame:
        """Judge random orders, on average over `RANDOM_ORDERS` of them."""
        rng = np.random.default_rng(seed)
        draws = [self.judge(self.sorted(rng.random(self.frame.height))) for _ in range(RANDOM_ORDERS)]
        return pl.concat(draws).group_by("query_id", maintain_order=True).mean()

    def sorted(self, scores: NDArray[Any]) -> Ints:
        """Return the position of each item `[rows]` by falling score."""
        where = where_items(self.offsets)
        return positions_by_score(pad(scores, self.offsets), where=where)[where]

    def judge(self, positions: Ints) -> pl.DataFrame:
        """Compute clicks per search and nDCG@10 of new positions, a row for each query."""
        click = self.frame["click"].to_numpy().astype(np.float64)
        clicks = clicks_per_list(positions, click, self.frame["position"].to_numpy(), self.offsets, self.curve)
        where = where_items(self.offsets)
        padded = (pad(positions, self.offsets, fill=1), pad(click, self.offsets))
        ndcg = ndcg_metric(*padded, where=where, cutoff=10)
        first = self.frame["query_id"].gather(self.offsets[:-1])
        found = pl.DataFrame({"query_id": first, "clicks": clicks, "ndcg": pl.Series(ndcg, nan_to_null=True)})
        return found.group_by("query_id", maintain_order=True).mean()


def clicks_per_list(positions: Ints, click: Floats, slot: NDArray[Any], offsets: Ints, curve: Floats) -> Floats:
    """Compute Σ over clicks of e(new slot) / mean e of the list's slots, `[lists]`.

    The item at position r of the new order gets the r-th of the slots that the list had; slots can be empty.

    >>> e = np.array([0.4, 0.3, 0.2])
    >>> clicks_per_list(np.array([1, 2]), np.array([0.0, 1.0]), np.array([3, 1]), np.array([0, 2]), e).round(3).tolist()
    [0.667]
    """
    lists = list_ids(offsets)
    slots = slot[np.lexsort((slot, lists))]  # of each list, rising
    attention = curve[slots - 1]
    earned = click * attention[offsets[lists] + positions - 1]
    return np.asarray(np.bincount(lists, earned) / (np.bincount(lists, attention) / np.diff(offsets)))


def expedia(data: Path) -> RealLog:
    raw = pl.read_csv(data / "expedia" / "searches.csv.gz", infer_schema_length=None).filter(pl.col("position") <= 40)
    raw = raw.rename({column: role for role, column in EXPEDIA.items()}).rename({"random_bool": "policy"})
    frame = raw.drop("booking_bool", "gross_bookings_usd", "date_time")
    return RealLog("A", frame, (frame["policy"] == 1).to_numpy())


def hotel_random(data: Path) -> RealLog:
    frame = pl.read_parquet(data / "hotel-random" / "lists.parquet").drop("conversion")
    return RealLog("B", frame, np.ones(frame.height, dtype=np.bool_))


def other_log(path: Path, columns: Sequence[str], random: str, drop: Sequence[str]) -> RealLog:
    """Read a log of the user's own; see the module."""
    frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path, infer_schema_length=None)
    column, _, value = random.partition("=")
    if column not in frame.columns:
        raise SystemExit(f"--random must be COLUMN=VALUE with a column of {path}; got '{random}'")
    flag = (frame[column].cast(pl.String) == value).fill_null(False).to_numpy()
    if not flag.any():
        raise SystemExit(f"--random must mark some lists of {path}; no row has {random}")
    pairs = (pair.partition("=") for pair in columns)
    frame = frame.rename({name: role for role, _, name in pairs}).drop(column, *drop)
    return RealLog(path.stem, frame, flag)


@dataclass
class Judged:
    """What a method earned on every judged search, by split."""

    parts: list[pl.DataFrame] = field(default_factory=list)

    def by_search(self) -> pl.DataFrame:
        """Average over the splits in which a search was judged."""
        return pl.concat(self.parts).group_by("query_id").mean().sort("query_id")


def run(
    *,
    quick: bool,
    only: Sequence[str] = (),
    splits: int = 6,
    half: str = "judge",
    log: Path | None = None,
    columns: Sequence[str] = (),
    random: str = "",
    drop: Sequence[str] = (),
) -> Iterator[Bar | Figure]:
    torch.set_num_threads(1)
    if log is not None:
        sources = {log.stem: lambda: other_log(log, columns, random, drop)}
    else:
        sources = {"A": lambda: expedia(REAL_DATA), "B": lambda: hotel_random(REAL_DATA)}
        if not REAL_DATA.is_dir():
            raise SystemExit(f"no real data at {REAL_DATA}; set URANK_DATA, or give another log with --log")
    absent = [name for name in only if name not in sources]
    if absent:
        raise SystemExit(f"real has no part '{absent[0]}'; its parts are {', '.join(sources)}")
    for part in only or sources:
        source = sources[part]()
        found: dict[str, Judged] = {}
        for split in range(1 if quick else splits):
            judge_split(source, split, half, found, quick=quick)
        yield from summarised(part, found)


def judge_split(source: RealLog, split: int, half: str, found: dict[str, Judged], *, quick: bool) -> None:
    """Train everything on one split, and add what it earns on the held-out searches of a half."""
    learned, frame = source.divided(split)
    frame = frame.filter(of_half(frame["query_id"], half))
    if quick:
        queries = learned["query_id"].unique(maintain_order=True).head(QUICK_QUERIES).implode()
        learned = learned.filter(pl.col("query_id").is_in(queries))
    held = Held.of(frame, source.curve(), seed=split)
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        folder = Path(name)
        urank.prepare(urank.read(learned), folder / "prepared", valid=0.2, test=0)
        dataset = Dataset(folder / "prepared")
        orders = ours(dataset, held) | peer_orders(dataset, held, folder, split, quick=quick)
        found.setdefault("random order", Judged()).parts.append(held.judge_random(split))
        found.setdefault("as shown", Judged()).parts.append(held.judge_logged())
        for method, order in orders.items():
            start = time.perf_counter()
            judged = held.judge(order())
            found.setdefault(method, Judged()).parts.append(judged)
            clicks, ndcg = judged.select(pl.col("clicks", "ndcg").mean()).row(0)
            told = f"{clicks:.4f} clicks per search, nDCG@10 {ndcg:.4f} ({time.perf_counter() - start:.1f} s)"
            console.print(f"{source.name}, split {split}, {method}: {told}", highlight=False, soft_wrap=True)


def of_half(ids: pl.Series, half: str) -> NDArray[np.bool_]:
    """Return which queries are in the half to be judged."""
    return np.asarray(stable_hash(ids, seed=HALF_SEED) % np.uint64(2) == HALVES.index(half))


def ours(dataset: Dataset, held: Held) -> dict[str, Order]:
    """Every method of the default model, and the one it chose."""
    start = time.perf_counter()
    fit = fit_model(dataset, UrankConfig())
    chosen, seconds = fit.model.method, time.perf_counter() - start
    console.print(f"urank: {fit.model.name} by {chosen}, fitted in {seconds:.1f} s", highlight=False)

    def order(method: Any) -> Order:
        return lambda: fit.model.order(held.frame, held.offsets, method=method)

    return {DEFAULT: order(chosen)} | {f"urank, {method}": order(method) for method in fit.model.methods}


def peer_orders(dataset: Dataset, held: Held, folder: Path, seed: int, *, quick: bool) -> dict[str, Order]:
    """Every peer, to be trained when its order is asked for."""
    featurizer = fit_featurizer(dataset)
    train, valid = (rows_of(dataset, split, featurizer) for split in ("train", "valid"))
    both, features = train.joined(valid), matrix(featurizer.encode(held.frame))

    def order(fit: Callable[[], Score]) -> Order:
        return lambda: held.sorted(fit()(features, held.offsets))

    def tuned(**options: bool) -> Order:
        return order(lambda: lightgbm_tuned(train, valid, seed=seed, **options)[0])

    found = {
        REFERENCE: order(lambda: lightgbm_150(both, seed=seed)),
        WITHIN: order(lambda: lightgbm_150(both, within=True, seed=seed)),
        f"{REFERENCE}, position": order(lambda: lightgbm_150(both, position=True, seed=seed)),
        f"{REFERENCE}, within, position": order(lambda: lightgbm_150(both, within=True, position=True, seed=seed)),
    }
    if quick:
        return found
    found |= {
        "LightGBM, tuned": tuned(),
        "LightGBM, tuned, within": tuned(within=True),
        "LightGBM, tuned, position": tuned(position=True),
        "LightGBM, tuned, within, position": tuned(within=True, position=True),
    }
    if not peers_installed():
        console.print("no .venv-peers: XGBoost is left out; run `make .venv-peers/.installed`")
        return found
    return found | {
        "XGBoost 150": lambda: held.sorted(_xgboost(both, features, folder, seed)),
        "XGBoost 150, within": lambda: held.sorted(_xgboost_within(both, features, held.offsets, folder, seed)),
    }


def _xgboost(rows: Rows, features: Features, folder: Path, seed: int) -> Floats:
    nothing = Rows(rows.features[:0], rows.click[:0], rows.position[:0], rows.offsets[:1], rows.numeric)
    write_arrays(folder / "arrays", rows, nothing, features)
    return run_peer(xgboost_150(1, seed), folder / "arrays", threads=1).scores


def _xgboost_within(rows: Rows, features: Features, offsets: Ints, folder: Path, seed: int) -> Floats:
    rows, extend = with_within(rows)
    return _xgboost(rows, extend(features, offsets), folder, seed)


def summarised(part: str, found: Mapping[str, Judged]) -> Iterator[Bar | Figure]:
    """Compare every method with LightGBM 150, paired by search."""
    means = {method: judged.by_search() for method, judged in found.items()}
    reference = means[REFERENCE]
    rows = []
    for method, each in means.items():
        clicks = each["clicks"].to_numpy()
        gap = clicks - reference["clicks"].to_numpy()
        error, z = _error_and_z(gap)
        row: dict[str, Any] = {
            "method": method,
            "ours": method.startswith("urank"),
            "clicks": float(clicks.mean()),
            "difference": float(gap.mean()),
            "error": error,
            "z": z,
            "ndcg": float(each["ndcg"].drop_nulls().to_numpy().mean()),
        }
        rows.append(row)
        yield Bar(f"{part}: {method}, clicks per search", row["clicks"], "", part=part)
    default = next(row for row in rows if row["method"] == DEFAULT)
    ratio = default["clicks"] / float(reference["clicks"].to_numpy().mean())
    yield Bar(f"{part}: {DEFAULT} / {REFERENCE}", ratio, "", at_least=1.0, part=part)
    yield Bar(f"{part}: {DEFAULT} − {REFERENCE}, z", default["z"], "", part=part)
    _, z = _error_and_z(means[DEFAULT]["clicks"].to_numpy() - means[WITHIN]["clicks"].to_numpy())
    yield Bar(f"{part}: {DEFAULT} − {WITHIN}, z", z, "", at_least=-2.0, part=part)
    facts = {"searches": reference.height, "splits": len(found[REFERENCE].parts), "rows": rows}
    yield Figure("real", f"{part}, {reference.height} random searches", facts, part)


def _error_and_z(gap: Floats) -> tuple[float, float]:
    """Return the standard error of a mean difference, and the mean in standard errors; 0 if all are equal."""
    error = float(gap.std(ddof=1) / np.sqrt(len(gap)))
    return error, float(gap.mean()) / error if error else 0.0
