"""The truth of a simulation: the true click table, the oracle's predictions, and the true utility of policies.

The product does not know the truth. `true_utilities` computes it beside an evaluation, `true_reference` adds it to a
report, and `add_true_utilities` to a JSON document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.config import to_jsonable
from urank.errors import DataError
from urank.evaluation.click_quality import quality, table_error
from urank.evaluation.estimators import linearised
from urank.evaluation.guard_sweep import GuardLevels, level_policies
from urank.evaluation.intervals import Comparison, paired
from urank.evaluation.policy_evaluation import Evaluation, evaluation_blocks, evaluation_sample, query_bytes
from urank.log.dataset import Block, Dataset, drop_unseen
from urank.log.ragged import at_positions, list_ids, pad, where_items
from urank.ranking.policies import LoggedOrder, Policy
from urank.ranking.utility import utility
from urank.report.evaluation_report import ReferenceValues

if TYPE_CHECKING:
    from urank.clicks.click_model import ClickModel
    from urank.pipeline import Check, Compare, Review
    from urank.report.click_report import FitReport


_FILE = "candidates.parquet"
_OTHER_SPLIT = (
    "urank simulate keeps the truth of its own test queries: prepare the log with its --test share, by hash, or "
    "simulate with --truth-split all"
)
Truth = str | Path | pl.DataFrame
"""A folder written by `urank simulate` or `urank appstore`, or the result of `read_truth`."""


def read_truth(folder: str | Path) -> pl.DataFrame:
    """Read the candidates of a simulation with their true click table.

    Args:
        folder: the output of `urank simulate` or `urank appstore`, or its truth/.
    """
    folder = Path(folder)
    path = next((each for each in (folder / "truth" / _FILE, folder / _FILE) if each.is_file()), None)
    if path is None:
        raise DataError(
            f"{folder} holds no truth: it must be a folder written by urank simulate or urank appstore, with "
            "truth/candidates.parquet"
        )
    truth = pl.read_parquet(path)
    if "table" not in truth.columns:
        raise DataError(f"{path} has no click table: the clicks of these users depend on the items above")
    return truth


def true_table(truth: pl.DataFrame) -> Callable[[Block], NDArray[np.float64]]:
    """Return a function that looks up the true P(click | item, k) `[rows, K]` of the items of a block.

    The key is `item_id` or, where an item has several tables, as in an app store whose users have different tastes,
    `query_id` and `item_id`.
    """
    table = np.array(truth["table"].to_list(), dtype=np.float64)
    by = ["item_id"] if truth["item_id"].is_unique().all() else ["query_id", "item_id"]
    known = truth.select(pl.col(by).cast(pl.String)).with_row_index("row")
    twice = known.filter(known.select(by).is_duplicated())
    if twice.height:
        raise DataError(f"the truth has more than one table of {_item_name(twice.row(0, named=True))}")

    def look_up(block: Block) -> NDArray[np.float64]:
        if "item_id" not in block.items.column_names:
            raise DataError("the truth is looked up by item_id, which the log does not have")
        columns = {"item_id": pl.Series(block.items["item_id"].combine_chunks())}
        if "query_id" in by:
            columns["query_id"] = pl.Series(block.lists["query_id"].combine_chunks())[list_ids(block.offsets)]
        items = pl.DataFrame(columns).select(pl.col(by).cast(pl.String))
        found = items.join(known, on=by, how="left", maintain_order="left")["row"]
        if found.null_count():
            absent = items.filter(found.is_null()).row(0, named=True)
            remedy = "urank appstore keeps the truth of the last day only" if len(by) > 1 else _OTHER_SPLIT
            raise DataError(f"the truth does not contain {_item_name(absent)} of the log; {remedy}")
        return np.asarray(table[found.to_numpy()])

    return look_up


def _item_name(names: Mapping[str, Any]) -> str:
    item = f"the item '{names['item_id']}'"
    return f"{item} of query '{names['query_id']}'" if "query_id" in names else item


def oracle_predictions(
    truth: pl.DataFrame, dataset: Dataset, split: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Return log P(click) by the oracle at the logged position, the position and the click of all rows of a split."""
    if not dataset.has("item_id"):
        raise DataError(f"the truth is looked up by item_id, which {dataset.folder} does not have")
    look_up = true_table(truth)
    parts = []
    for block in drop_unseen(dataset).blocks(split, ["item_id", "position", "click"]):
        position = block.column("position").astype(np.int64)
        log_p = np.log(at_positions(look_up(block), position)).astype(np.float32)
        parts.append((log_p, position, block.column("click").astype(np.float32)))
    log_p, position, click = (np.concatenate(part) for part in zip(*parts, strict=True))
    return log_p, position, click


@dataclass(frozen=True)
class TrueUtility:
    """The true utility of a policy on the lists of an evaluation."""

    by_cutoff: dict[int, float]  # cutoff -> mean utility per list; the last cutoff is K
    difference: Comparison | None  # to the logged order at K, paired by query; None for the logged order itself


def true_utilities(
    evaluation: Evaluation, policies: Sequence[Policy], dataset: Dataset, truth: Truth, *, seed: int = 0
) -> dict[str, TrueUtility]:
    """Compute the true utilities of evaluated policies on the same lists, with ties broken alike.

    Args:
        evaluation: the evaluation to compare with, by `evaluate_policies` or as part of `evaluate_guard`.
        policies: the policies that were evaluated, without the logged order.
        dataset: the prepared log that they were evaluated on.
        seed: of the evaluation's `CrossfitConfig`.

    Returns:
        name -> true utility; the logged order comes first.
    """
    look_up = true_table(truth if isinstance(truth, pl.DataFrame) else read_truth(truth))
    cutoffs = list(evaluation.policies[0].utility)
    by_query = query_bytes(len(evaluation.policies), len(cutoffs), propensity="ips" in evaluation.policies[0].estimates)
    sample = evaluation_sample(dataset, evaluation.splits, by_query)
    known: list[Policy] = [LoggedOrder(), *policies]
    roles = [name for name in ("value", "item_id") if sample.has(name)]
    columns = dict.fromkeys([*(name for policy in known for name in policy.columns), *roles])
    queries: list[NDArray[np.uint64]] = []
    earned: list[NDArray[np.float64]] = []
    for block in evaluation_blocks(sample, evaluation.splits, list(columns), seed=seed):
        table, where = pad(look_up(block), block.offsets), where_items(block.offsets)
        value = pad(block.column("value"), block.offsets) if sample.has("value") else None
        orders = [pad(policy.positions(block), block.offsets, fill=1) for policy in known]
        queries.append(block.query_hash)
        earned.append(
            np.array([[utility(table, p, value=value, where=where, cutoff=k) for k in cutoffs] for p in orders])
        )
    _, home = np.unique(np.concatenate(queries), return_inverse=True)
    lists = np.bincount(home).astype(np.float64)
    values = [
        [linearised([np.bincount(home, each).astype(np.float64)], [lists]) for each in of_policy]
        for of_policy in np.concatenate(earned, axis=2)
    ]
    return {
        policy.name: TrueUtility(
            {cutoff: float(each.mean()) for cutoff, each in zip(cutoffs, own, strict=True)},
            paired(own[-1], values[0][-1]) if number else None,
        )
        for number, (policy, own) in enumerate(zip(known, values, strict=True))
    }


def true_guard_utilities(
    levels: GuardLevels, policy: Policy, dataset: Dataset, truth: Truth, *, seed: int = 0
) -> dict[str, TrueUtility]:
    """Compute the true utilities of the levels of a guard on `policy`; see `true_utilities`."""
    policies = level_policies(policy, [level.guard for level in levels.levels])
    return true_utilities(levels.evaluation, policies, dataset, truth, seed=seed)


def true_reference(true: Mapping[str, TrueUtility]) -> ReferenceValues:
    """Return true utilities as the reference values of a report."""
    return ReferenceValues(
        noun="truth",
        adjective="true",
        utility={name: list(each.by_cutoff.values())[-1] for name, each in true.items()},
        difference={name: each.difference.mean for name, each in true.items() if each.difference is not None},
        explanation="The log is simulated, so the truth is known: the utility of each order on the same lists by the "
        "true click probabilities.",
    )


def add_true_utilities(document: dict[str, Any], true: Mapping[str, TrueUtility]) -> dict[str, Any]:
    """Add `true` and `true_difference` to the policies of `Evaluation.to_dict`, or levels of `GuardLevels.to_dict`."""
    entries = document["policies"] if "policies" in document else [document["logged"], *document["levels"]]
    merged = []
    for entry, each in zip(entries, true.values(), strict=True):
        whole = "estimates" in entry  # a level of a guard has its utility at K only
        by_cutoff = each.by_cutoff if whole else list(each.by_cutoff.values())[-1]
        difference = None if each.difference is None else asdict(each.difference)
        merged.append({**entry, **to_jsonable({"true": by_cutoff, "true_difference": difference})})
    if "policies" in document:
        return {**document, "policies": merged}
    return {**document, "logged": merged[0], "levels": merged[1:]}


def check_items(folder: str | Path) -> Check:
    """Return a hook of the pipeline that fails fast if test items have no truth; `folder` as in `read_truth`."""
    known = read_truth(folder)

    def check(dataset: Dataset) -> None:
        if not dataset.has("item_id"):
            raise DataError(f"the truth is looked up by item_id, which {dataset.folder} does not have")
        look_up = true_table(known)
        for block in dataset.blocks("test", ["item_id"]):
            look_up(block)

    return check


def compare_evaluation(folder: str | Path) -> Compare:
    """Return a hook of the pipeline that adds true utilities to an evaluation; `folder` as in `read_truth`."""
    known = read_truth(folder)

    def compare(
        evaluation: Evaluation, policies: Sequence[Policy], dataset: Dataset, seed: int
    ) -> tuple[dict[str, Any], ReferenceValues]:
        true = true_utilities(evaluation, policies, dataset, known, seed=seed)
        return add_true_utilities(evaluation.to_dict(), true), true_reference(true)

    return compare


def review_fit(folder: str | Path) -> Review:
    """Return a hook of the pipeline that compares a click model with the true table; `folder` as in `read_truth`."""
    known = read_truth(folder)

    def review(measured: FitReport, model: ClickModel, dataset: Dataset) -> FitReport:
        qualities = {split: dict(each) for split, each in measured.qualities.items()}
        table = np.array(known["table"].to_list(), dtype=np.float64)[:, : dataset.positions]
        figures = table_error(model.log_ctr(known), table)
        if "test" in qualities:
            oracle = quality(*oracle_predictions(known, dataset, "test"), positions=dataset.positions)
            figures["oracle_share"] = oracle.log_loss / qualities["test"][measured.name].log_loss
            qualities["test"]["oracle"] = oracle
        return replace(measured, qualities=qualities, truth=figures)

    return review
