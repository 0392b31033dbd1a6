"""The real hotel log: learned on ranked searches, judged on randomised ones, whose propensities are known by design.

In a randomised search every hotel had the same chance at each of its n slots, so the propensity is 1/n. What is earned
is clicks, or bookings times the price of the night (cut at its 99th percentile, since some prices are absurd).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

import urank
from benchmarks.harness import Bar
from benchmarks.peers import Score, lightgbm_150, rows_of
from urank.clicks.click_model import ClickModel
from urank.clicks.click_settings import ClickConfig
from urank.evaluation.policy_evaluation import evaluate_policies
from urank.learning.lightgbm_data import matrix
from urank.log.dataset import Block, Dataset
from urank.log.ragged import pad, positions_by_score, where_items
from urank.pipeline import fit_model, policies_of
from urank.ranking.ranking_settings import UrankConfig

NAMES = {"query_id": "srch_id", "item_id": "prop_id", "policy": "random_bool"}
DROP = ["gross_bookings_usd", "date_time"]


@dataclass(frozen=True, eq=False)
class Scored:
    """The order of a peer's scores."""

    name: str
    clicks: ClickModel
    score: Score

    @property
    def columns(self) -> list[str]:
        return self.clicks.featurizer.names

    def positions(self, block: Block) -> NDArray[np.int64]:
        where = where_items(block.offsets)
        scores = self.score(matrix(self.clicks.featurizer.encode(block.items, block.offsets)), block.offsets)
        return positions_by_score(pad(scores, block.offsets), where=where)[where]


def hotel(folder: Path, data: Path, *, quick: bool) -> Iterator[Bar]:
    """For clicks and for booking value: what each order would earn on randomised searches, with its interval."""
    raw = pl.read_csv(data / "expedia" / "searches.csv.gz", infer_schema_length=None).filter(pl.col("position") <= 30)
    raw = raw.with_columns(price=pl.min_horizontal("price_usd", pl.col("price_usd").quantile(0.99)))
    for what, columns, drop in (
        ("clicks", {"click": "click_bool"}, ["booking_bool", "price"]),
        ("booking value", {"click": "booking_bool", "value": "price"}, ["click_bool"]),
    ):
        ranked, randomised = (raw.filter(pl.col("random_bool") == flag) for flag in (0, 1))
        randomised = randomised.with_columns(propensity=1 / pl.len().over("srch_id"))
        place = folder / f"hotel {what}"
        for name, rows, shares in (("ranked", ranked, (0.2, 0)), ("randomised", randomised, (0, 1))):
            log = urank.read(rows, columns=NAMES | columns, drop=[*DROP, *drop])
            urank.prepare(log, place / name, valid=shares[0], test=shares[1])
        dataset = Dataset(place / "ranked")
        model = fit_model(dataset, UrankConfig(clicks=ClickConfig(ensemble=1 if quick else 3), method="score")).model
        train, valid = (rows_of(dataset, split, model.clicks.featurizer) for split in ("train", "valid"))
        peer = Scored("LightGBM 150", model.clicks, lightgbm_150(train.joined(valid), threads=2))
        found = evaluate_policies([*policies_of(model), peer], Dataset(place / "randomised"))
        for policy in found.policies:
            for estimator in ("doubly_robust", "ips", "direct"):
                told = policy.estimates[estimator]
                interval = f"95 % interval {told.low:.4g} to {told.high:.4g}"
                yield Bar(f"hotel, {what} per search, {policy.name}, {estimator}: {interval}", told.mean, "")
            if policy.difference is not None:
                gap = policy.difference
                interval = f"95 % interval {gap.low:.4g} to {gap.high:.4g}, p = {gap.p_value:.2g}"
                yield Bar(f"hotel, {what} per search, {policy.name} − as shown: {interval}", gap.mean, "")
        for better, worse in (("score", peer.name), ("match", peer.name)):
            gap = found.compare(better, worse)
            interval = f"95 % interval {gap.low:.4g} to {gap.high:.4g}, p = {gap.p_value:.2g}"
            yield Bar(f"hotel, {what} per search, {better} − {worse}: {interval}", gap.mean, "")
