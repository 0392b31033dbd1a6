"""The figures that the paper prints, to stand beside ours where the data is the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from urank.config import read_toml, to_jsonable
from urank.errors import ConfigError

__all__ = [
    "DATASETS",
    "METRICS",
    "STORE_METRICS",
    "AucRow",
    "Claim",
    "Difference",
    "Kind",
    "ListExample",
    "PositionCurve",
    "Reproduction",
    "Row",
    "StoreRow",
    "dataset_name",
    "over_seeds",
    "published_architectures",
    "published_metrics",
    "published_store",
    "store_metrics",
]

METRICS = ("MAP", "nDCG@10", "#Click", "CTR")

STORE_METRICS = tuple(f"{name}{at}" for name in ("#click", "Revenue") for at in ("", "@1", "@3", "@5"))
"""The metrics of Table 3: downloads and what they are worth, of all positions and of the first ones."""

Kind = Literal["baseline", "oracle", "ours"]
"""`oracle` rows know what no log tells, and are set in italics and left out of comparisons, as in the paper."""


@dataclass(frozen=True)
class Row:
    """A row of Table 1.

    Attributes:
        key: what tells it from others, such as `lambdarank-cpbm`.
        name: as the table shows it.
        kind: baseline, oracle, or one of ours.
        mean: metric -> the mean over seeds of the mean over test queries.
        deviation: metric -> the standard deviation of the former over seeds; NaN with one seed.
        p_value: metric -> for rows of ours, the largest p-value of paired t-tests against all baselines, on queries,
            each the mean over its seeds, Holm-corrected; 1 when some baseline is better. Empty for other rows.
        published: metric -> the paper's figure, where the data is the paper's.
        seconds: that training took, on average over seeds.
    """

    key: str
    name: str
    kind: Kind
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    p_value: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    seconds: float = float("nan")

    def significant(self, metric: str) -> bool:
        """Whether it gets the star of Table 1."""
        return self.p_value.get(metric, 1.0) < 0.05


@dataclass(frozen=True)
class StoreRow:
    """A row of Table 3: what a visit brings, debiased as the paper does it, and by the truth that only we know.

    Attributes:
        key, name, kind: as in `Row`.
        mean, deviation: metric -> the debiased estimate, as in `Row`.
        true, true_deviation: metric -> the true one.
        p_value, true_p_value: metric -> for rows of ours, the largest p-value of paired t-tests against all baselines,
            on visits, Holm-corrected; 1 when some baseline is better. Empty for other rows.
        published: metric -> the paper's figure, which is of another store.
        seconds: that training took for both scenarios, on average over seeds.
    """

    key: str
    name: str
    kind: Kind
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    true: Mapping[str, float]
    true_deviation: Mapping[str, float]
    p_value: Mapping[str, float] = field(default_factory=dict)
    true_p_value: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    seconds: float = float("nan")


@dataclass(frozen=True)
class AucRow:
    """A row of Table 2: an architecture of the click model, its AUC, and what U-rank earns on it."""

    name: str
    train: float
    test: float
    valid: float
    clicks: float
    ctr: float
    deviation: Mapping[str, float]
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and whether it holds here.

    Attributes:
        text: what the paper says.
        holds: whether it does; none when this run cannot tell.
        figures: the numbers that decide it, in words.
    """

    text: str
    holds: bool | None
    figures: str


def over_seeds(told: Sequence[Claim], alone: Sequence[Sequence[Claim]]) -> list[Claim]:
    """The claims on the means over seeds, which also must hold on most seeds taken alone: seeds are other data and
    other users, and one in which all clicks are many would decide the mean.

    Args:
        told: the claims on all seeds.
        alone: the same claims on each seed; when there is one seed, nothing more is asked.
    """
    if len(alone) < 2:
        return list(told)
    counts = [sum(bool(claim.holds) for claim in same) for same in zip(*alone, strict=True)]
    return [
        Claim(
            claim.text,
            bool(claim.holds) and 2 * count > len(alone),
            f"{claim.figures}; holds on {count} of {len(alone)} seeds alone",
        )
        for claim, count in zip(told, counts, strict=True)
    ]


def store_metrics(name: str, positions: int) -> dict[str, int]:
    """The metrics of one scenario, each with the number of first positions that count.

    >>> store_metrics("#click", 10)
    {'#click': 10, '#click@1': 1, '#click@3': 3, '#click@5': 5}
    """
    return {name: positions} | {f"{name}@{cutoff}": min(cutoff, positions) for cutoff in (1, 3, 5)}


@dataclass(frozen=True)
class Difference:
    """What one change is worth: #Click of a method before and after it, and the p-value of the paired t-test."""

    text: str
    before: str
    after: str
    clicks_before: float
    clicks_after: float
    p_value: float


@dataclass(frozen=True, eq=False)
class PositionCurve:
    """A line of Figure 4: the mean true click probability `[K]` at each position, and its deviation over seeds."""

    name: str
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ListExample:
    """Figure 3: one query, its true table `[n, K]`, labels `[n]`, and where each method puts each item `[n]`."""

    query: str
    items: Sequence[str]
    label: NDArray[np.float64]
    table: NDArray[np.float64]
    positions: Mapping[str, NDArray[np.int64]]
    clicks: Mapping[str, float]
    ndcg: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Reproduction:
    """All that one run of `urank reproduce` tells; what was not asked for is empty.

    Attributes:
        what: the experiments that were asked for.
        data: what the documents are, in words.
        seeds: how many.
        queries: test queries of all seeds together, of Section 5.
        rows, claims: Table 1 and Section 5.4.
        architectures: Table 2.
        curves: Figure 4.
        example: Figure 3.
        differences: what U-rank here does otherwise than the paper, and what that is worth.
        store, store_claims: Table 3 and Section 6.1.
        visits: of the eighth day of the store, of all seeds together.
        settings: as TOML.
        versions: library -> version.
        seconds: that all training took, added up.
    """

    what: Sequence[str]
    data: str
    seeds: int
    queries: int = 0
    rows: Sequence[Row] = ()
    claims: Sequence[Claim] = ()
    architectures: Sequence[AucRow] = ()
    architecture_claims: Sequence[Claim] = ()
    curves: Sequence[PositionCurve] = ()
    curve_claims: Sequence[Claim] = ()
    example: ListExample | None = None
    differences: Sequence[Difference] = ()
    store: Sequence[StoreRow] = ()
    store_claims: Sequence[Claim] = ()
    visits: int = 0
    settings: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; null for what is not known."""
        return {
            "what": list(self.what),
            "data": self.data,
            "seeds": self.seeds,
            "queries": self.queries,
            "rows": [to_jsonable(vars(row)) for row in self.rows],
            "claims": [to_jsonable(vars(claim)) for claim in self.claims],
            "architectures": [to_jsonable(vars(row)) for row in self.architectures],
            "architecture_claims": [to_jsonable(vars(claim)) for claim in self.architecture_claims],
            "curves": [to_jsonable(vars(curve)) for curve in self.curves],
            "curve_claims": [to_jsonable(vars(claim)) for claim in self.curve_claims],
            "example": to_jsonable(vars(self.example)) if self.example is not None else None,
            "differences": [to_jsonable(vars(each)) for each in self.differences],
            "store": [to_jsonable(vars(row)) for row in self.store],
            "store_claims": [to_jsonable(vars(claim)) for claim in self.store_claims],
            "visits": self.visits,
            "versions": dict(self.versions),
            "seconds": self.seconds,
        }


DATASETS = ("yahoo", "mslr-web10k", "istella-s")


@cache
def _published() -> dict[str, Any]:
    return read_toml(str(files("urank.lab").joinpath("published.toml")))


def dataset_name(dataset: str) -> str:
    """What the paper calls a data set."""
    return str(_of(dataset)["name"])


def published_metrics(dataset: str) -> dict[str, dict[str, float]]:
    """Method -> metric -> the figure of Table 1; nothing when the data is not the paper's.

    >>> published_metrics("yahoo")["urank-paper"]["#Click"]
    0.618
    """
    if not dataset:
        return {}
    return {
        key: dict(zip(METRICS, figures, strict=True))
        for key, figures in _of(dataset).items()
        if isinstance(figures, list)
    }


def published_architectures(dataset: str) -> dict[str, dict[str, float]]:
    """Method -> column -> the figure of Table 2, which the paper has for MSLR-WEB10K alone."""
    if not dataset:
        return {}
    columns = ("train", "test", "valid", "#Click", "CTR")
    found = _of(dataset).get("architectures", {})
    return {key: dict(zip(columns, figures, strict=True)) for key, figures in found.items()}


def published_store() -> dict[str, dict[str, float]]:
    """Method -> metric -> the figure of Table 3, of the paper's own app store.

    >>> published_store()["store-urank"]["Revenue@1"]
    1.264
    """
    return {key: dict(zip(STORE_METRICS, figures, strict=True)) for key, figures in _published()["store"].items()}


def _of(dataset: str) -> dict[str, Any]:
    if dataset not in DATASETS:
        raise ConfigError(f"the paper's data sets are {', '.join(DATASETS)}; got '{dataset}'")
    found: dict[str, Any] = _published()[dataset]
    return found
