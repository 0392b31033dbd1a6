"""Results of the paper's experiments, and the figures that the paper prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from math import nan
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from urank.config import read_toml, to_jsonable
from urank.errors import ConfigError

METRICS = ("MAP", "nDCG@10", "#Click", "CTR")
"""The metrics of Table 1."""

STORE_METRICS = tuple(f"{name}{at}" for name in ("#click", "Revenue") for at in ("", "@1", "@3", "@5"))
"""The metrics of Table 3: downloads and revenue, over all positions and over the first ones."""

MethodKind = Literal["baseline", "oracle", "ours"]
"""`oracle` rows use information that no log contains; they are in italics and are not compared, as in the paper."""


def store_metrics(name: str, positions: int) -> dict[str, int]:
    """Map each metric of one scenario to the number of positions that it counts.

    >>> store_metrics("#click", 10)
    {'#click': 10, '#click@1': 1, '#click@3': 3, '#click@5': 5}
    """
    return {name: positions} | {f"{name}@{cutoff}": min(cutoff, positions) for cutoff in (1, 3, 5)}


@dataclass(frozen=True)
class MethodRow:
    """A row of Table 1.

    Attributes:
        key, name: identifier such as `lambdarank-cpbm`, and label in the table.
        mean: metric -> mean over seeds of the mean over test queries.
        deviation: metric -> standard deviation over seeds; NaN with one seed.
        p_value: metric -> for rows of ours, the largest Holm-corrected p-value of the paired t-tests against all
            baselines, on queries averaged over seeds; 1 if a baseline is better. Empty for other rows.
        published: metric -> the paper's figure, if the data is the paper's.
        seconds: training time, averaged over seeds.
    """

    key: str
    name: str
    kind: MethodKind
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    p_value: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    seconds: float = nan

    def significant(self, metric: str) -> bool:
        """Return whether the row gets the star of Table 1."""
        return self.p_value.get(metric, 1.0) < 0.05


@dataclass(frozen=True)
class StoreRow(MethodRow):
    """A row of Table 3: metrics per visit, debiased as in the paper, and their true values.

    The p-values are of paired t-tests on visits, the published figures of another store, and `seconds` covers both
    scenarios.
    `true`, `true_deviation` and `true_p_value` are those of the true metrics.
    """

    true: Mapping[str, float] = field(default_factory=dict)
    true_deviation: Mapping[str, float] = field(default_factory=dict)
    true_p_value: Mapping[str, float] = field(default_factory=dict)

    def by_truth(self) -> MethodRow:
        """Return the row with the true metrics in place of the debiased ones."""
        return MethodRow(self.key, self.name, self.kind, self.true, self.true_deviation, self.true_p_value)


@dataclass(frozen=True)
class LiveRow:
    """One metric in one period of the live test of Section 6.2, averaged over seeds.

    The lift of U-rank over DeepFM with the ends of its 95 % interval, the largest lift of a single day in size (of any
    seed), and the true lift.
    """

    period: str
    metric: str
    lift: float
    low: float
    high: float
    largest_day: float
    true_lift: float


@dataclass(frozen=True)
class ArchitectureRow:
    """A row of Table 2: AUC of a click-model architecture by split, and #Click and CTR of U-rank on it.

    `deviation` and `by_seed` are the standard deviation over seeds, and the values, of `train`, `test`, `valid`,
    `#Click` and `CTR`.
    """

    name: str
    train: float
    test: float
    valid: float
    clicks: float
    ctr: float
    deviation: Mapping[str, float]
    published: Mapping[str, float] = field(default_factory=dict)
    by_seed: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SettingRows:
    """Table 1 with one setting of the simulation: its name, its rows, and the number of seeds."""

    name: str
    rows: Sequence[MethodRow]
    seeds: int = 1


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, whether it holds here (None if this run cannot decide it), and the evidence in words."""

    text: str
    holds: bool | None
    figures: str


@dataclass(frozen=True)
class Difference:
    """The effect of one change: #Click of a method before and after it, and the p-value of the paired t-test."""

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
    """Figure 3: one query, its true table `[n, K]`, labels `[n]`, and each item's position `[n]` by method."""

    query: str
    items: Sequence[str]
    label: NDArray[np.float64]
    table: NDArray[np.float64]
    positions: Mapping[str, NDArray[np.int64]]
    clicks: Mapping[str, float]
    ndcg: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Reproduction:
    """Results of one run of `urank reproduce`; experiments that were not requested are empty.

    Test queries are those of Section 5, test visits those of Section 6.1, both of all seeds.
    """

    what: Sequence[str]  # the requested experiments
    data: str  # description of the documents
    setting: str = ""  # of the users of Section 5
    seeds: int = 1  # number of seeds
    queries: int = 0
    rows: Sequence[MethodRow] = ()  # Table 1
    claims: Sequence[Claim] = ()  # of Section 5.4
    architectures: Sequence[ArchitectureRow] = ()  # Table 2
    architecture_claims: Sequence[Claim] = ()
    curves: Sequence[PositionCurve] = ()  # Figure 4
    curve_claims: Sequence[Claim] = ()
    example: ListExample | None = None  # Figure 3
    differences: Sequence[Difference] = ()  # the effect of each deviation from the paper
    sweeps: Mapping[str, Sequence[SettingRows]] = field(default_factory=dict)  # Table 1 by setting, by experiment
    store: Sequence[StoreRow] = ()  # Table 3
    store_claims: Sequence[Claim] = ()  # of Section 6.1
    visits: int = 0
    live: Sequence[LiveRow] = ()  # the live test
    live_claims: Sequence[Claim] = ()  # of Section 6.2
    settings: str = ""  # as TOML
    provenance: Mapping[str, str] = field(default_factory=dict)  # commit, command and date
    versions: Mapping[str, str] = field(default_factory=dict)  # by library
    seconds: float = 0.0  # total training time

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict; unknown values are null."""
        found: dict[str, Any] = to_jsonable(asdict(self))
        del found["settings"]
        return found


PUBLISHED_LIFTS = {"CTR": 0.192, "CVR": 0.208}
"""The mean lifts of the paper's live test (Section 6.2)."""
PUBLISHED_FLUCTUATION = 0.08
"""What the paper's A/A tests stayed within, day by day."""

DATASETS = ("yahoo", "mslr-web10k", "istella-s")


def dataset_name(dataset: str) -> str:
    """Return the paper's name of a data set."""
    return str(_published(dataset)["name"])


def published_metrics(dataset: str) -> dict[str, dict[str, float]]:
    """Return method -> metric -> the figure of Table 1; empty if the data is not the paper's.

    >>> published_metrics("yahoo")["urank-paper"]["#Click"]
    0.618
    """
    found = _published(dataset) if dataset else {}
    return {key: dict(zip(METRICS, row, strict=True)) for key, row in found.items() if isinstance(row, list)}


def published_architectures(dataset: str) -> dict[str, dict[str, float]]:
    """Return method -> column -> the figure of Table 2, which the paper prints for MSLR-WEB10K only."""
    found = _published(dataset).get("architectures", {}) if dataset else {}
    columns = ("train", "test", "valid", "#Click", "CTR")
    return {key: dict(zip(columns, row, strict=True)) for key, row in found.items()}


def published_store() -> dict[str, dict[str, float]]:
    """Return method -> metric -> the figure of Table 3, of the paper's app store.

    >>> published_store()["store-urank"]["Revenue@1"]
    1.264
    """
    return {key: dict(zip(STORE_METRICS, row, strict=True)) for key, row in _published_tables()["store"].items()}


@cache
def _published_tables() -> dict[str, Any]:
    return read_toml(str(files("urank.lab").joinpath("published.toml")))


def _published(dataset: str) -> dict[str, Any]:
    if dataset not in DATASETS:
        raise ConfigError(f"the paper's data sets are {', '.join(DATASETS)}; got '{dataset}'")
    return dict(_published_tables()[dataset])
