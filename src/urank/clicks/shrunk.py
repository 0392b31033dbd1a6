"""The shrunk click model: relevance from networks and trees, and attention as item-specific as the log supports.

    log P(click | i, k) = log σ(r_i + (s_i − 1)·ḡ) − s_i·g(k) − e(k),     s_i = softplus(c + u_i + α·(δ_i − u_i))

g and e are curves that start at 0, and ḡ is the mean of g over the logged positions; centred like this, relevance and
slope are nearly independent. On small logs g increases and e is 0. With many clicks at each position both are free, so
that attention can rise again, as at the start of a page, a row or a shelf: g is what differs by item, e what does not.
Without support by held-out clicks they are straightened.

δ is the slope a network sees in the item, u what the list alone explains of it. α between 0 and 1 shrinks the item's
deviation from its list, since on small logs most of it is noise, which an exact matching would amplify. With α = 0 all
items of a list have the same curve, and the matching is the order by r if the curve falls.

The relevance r = w₁·network + w₂·trees + b combines two small networks, without and with within-list features, and
LightGBM's lambdarank, on small logs likewise the mean of two: within-list features help on one log and harm on the
next, and few queries do not tell which. The networks learn from which items of a list were clicked (listwise) and how
often (pointwise); weights and α are chosen on the validation split, and α by cross-validation if that is too small.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import lightgbm
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, minimize
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from urank import distributed
from urank.learning.batches import Batch, ListArrays, Stream
from urank.learning.features import Featurizer, Inputs
from urank.learning.lightgbm_data import TreeModel, matrix
from urank.learning.networks import FeatureLayer, chunk_rows, embedding_width, hidden_layers
from urank.progress import Report

TREE_WEIGHT, PRIOR_QUERIES = 0.5, 40.0
"""Weight below which that of the trees is penalised, and the penalty in validation queries. Trees that know no position
predict clicks at the logged ones, so on a small log the networks explain held-out clicks better although they rank
worse."""

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
POINTWISE = 0.3
"""Weight of the pointwise loss beside the listwise one."""

ALPHA_EFFECT, STRONG_EFFECT = 0.08, 0.15
"""Mean gain in held-out loss for which a larger α is preferred, and one over α = 0 from which the best α is kept, in
standard deviations over queries. They are not in standard errors, because more queries make a useless gain significant:
networks learn relevance and slope together, so even where attention is the same for all items some slope improves the
likelihood, but not the order. Chosen on simulations with seeds 400 to 406."""

TREES_TOLERANCE = 2.0
"""Standard errors by which more trees must improve the held-out loss; a smaller gain is not worth their time."""

TREES = (75, 150, 300)
"""Numbers of trees. More are grown only if the last doubling, at first from half of the smallest, helped."""
TREE_PARAMETERS = {
    "objective": "lambdarank",
    "num_leaves": 8,
    "learning_rate": 0.08,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 5.0,
    "bin_construct_sample_cnt": 20_000,
    "deterministic": True,
    "force_row_wise": True,
    "verbosity": -1,
}
LEAST_IMPRESSIONS, LEAST_ITEMS_IN_LEAF = 100, 10
"""Impressions of a leaf, and distinct items, at least."""
MOST_CLICKS = 30  # largest label of LightGBM
TREE_ROWS = 200_000
"""Items the trees learn from, at most: with more, the networks are better and the trees take most of the time."""

SMALL_LOG = 5_000
"""Distinct training lists up to which there are also trees without within-list features, and all trees are fitted again
with the validation lists, once their weight is known."""

STACK_ROWS = 100_000
"""Held-out impressions that weights and α are chosen on, at most."""

LISTS_ROWS = 200_000
"""Items that the list's share of the slope is fitted on, at most."""

LEAST_CLICKS, CURVES_TOLERANCE = 200, 1.0
"""Training clicks by position from which free curves are tried, and the standard errors by which they must improve the
held-out loss to be kept. With 100 clicks by position they cost up to 1 % of the clicks of users whose attention falls
steadily (simulations with seeds 400 to 402)."""

LEAST_STEP = 1e-3
"""Least step of straightened curves, so that no two positions are equal."""

RIDGE = 1e-3
ONE = math.log(math.e - 1)  # softplus(ONE) = 1

Floats = NDArray[np.float32]
Done = Callable[[int, int], None]
"""Progress callback: trees grown, and trees to grow."""


class ShrunkNetwork(nn.Module):
    """The networks, the curve, and everything that was chosen afterwards. `forward` returns the table `[rows, K]`."""

    rising: Tensor
    shares: Tensor
    alpha: Tensor
    weights: Tensor
    list_weights: Tensor

    def __init__(self, featurizer: Featurizer, positions: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.positions = positions
        self.features = FeatureLayer(featurizer)
        self.embeddings = nn.ModuleList(nn.Embedding(n, embedding_width(n)) for n in featurizer.cardinalities)
        raw, within = len(featurizer.numeric), len(featurizer.within)
        self.raw, self.compared = raw, raw + 2 * within
        places = {feature.name: place for place, feature in enumerate(featurizer.numeric)}
        of_query = [place for name, place in places.items() if name not in featurizer.within] if within else []
        self.list_columns = [*of_query, *range(self.compared, len(featurizer.inputs))]
        others = self.features.width - len(featurizer.inputs) + sum(map(embedding_width, featurizer.cardinalities))
        widths = [raw + others] + ([self.compared + others] if within else [])
        self.networks = nn.ModuleList(_two_outputs(width, hidden, dropout) for width in widths)
        self.scaled = nn.Parameter(_inverse_softplus(torch.arange(1.0, positions + 1).log().diff()))
        self.common = nn.Parameter(torch.zeros(positions - 1), requires_grad=False)
        self.register_buffer("rising", torch.tensor(True))
        self.bias = nn.Parameter(torch.tensor(-2.0))
        self.register_buffer("shares", torch.full((positions,), 1 / positions))
        self.register_buffer("alpha", torch.tensor(1.0))
        self.register_buffer("weights", torch.tensor([1.0, 0.0, 0.0]))
        self.register_buffer("list_weights", torch.zeros(len(self.list_columns) + 1))

    def fast_parameters(self) -> list[str]:
        """Return the names of parameters that learn faster, without decay: the curve and the biases of the outputs."""
        heads = [f"networks.{n}.{len(network) - 1}.bias" for n, network in enumerate(self.networks)]  # type: ignore[arg-type]
        return ["scaled", "common", "bias", *heads]

    def free_curves(self) -> None:
        """Let e be any curve, and g any that is not negative; they start as before, so that e stays near 0 unless the
        log needs it."""
        self.rising.fill_(False)
        self.scaled.data.copy_(_inverse_softplus(torch.cumsum(softplus(self.scaled.data), dim=0)))
        self.common.requires_grad_(True)

    def straighten_curves(self) -> None:
        """Replace free curves by the nearest ones that never fall: clicks then fall with the position for all items."""
        common, scaled = (each.detach().double().cpu().numpy() for each in self.curves())
        clicks = self.shares.double().cpu().numpy() * np.exp(-common - scaled) + 1e-9
        common, scaled = (isotonic_regression(each, weights=clicks).x for each in (common, scaled))
        self.rising.fill_(True)
        self.scaled.data.copy_(_inverse_softplus(torch.from_numpy(np.diff(scaled).clip(min=LEAST_STEP))))
        self.common.data.copy_(torch.from_numpy(common[1:] - common[0]))

    def saved_curves(self) -> list[Any]:
        """Return the parameters of the curves, JSON-serialisable."""
        return [each.tolist() for each in (self.rising, self.scaled, self.common)]

    def restore_curves(self, saved: Sequence[Any]) -> None:
        """Restore the curves of `saved_curves`."""
        for each, values in zip((self.rising, self.scaled, self.common), saved, strict=True):
            each.data.copy_(torch.tensor(values))

    def curves(self) -> tuple[Tensor, Tensor]:
        """Compute e(k) and g(k), each `[K]`."""
        first, scaled = self.scaled.new_zeros(1), softplus(self.scaled)
        scaled = torch.cumsum(scaled, dim=0) if self.rising else scaled
        return torch.cat([first, self.common]), torch.cat([first, scaled])

    def parts(self, numeric: Tensor, categorical: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the networks' relevance, the slope δ and its list level u, each `[rows]`."""
        scaled = self.features(numeric)
        rest = [scaled[:, numeric.shape[1] :]]
        rest += [embedding(categorical[:, place]) for place, embedding in enumerate(self.embeddings)]
        ends = (self.raw, self.compared)
        found = [
            network(torch.cat([scaled[:, :end], *rest], dim=1))
            for end, network in zip(ends, self.networks, strict=False)
        ]
        relevance, slope = (torch.stack(found).mean(dim=0)).unbind(dim=1)
        level = scaled[:, self.list_columns] @ self.list_weights[:-1] + self.list_weights[-1]
        return relevance, slope, level

    def at(self, relevance: Tensor, slope: Tensor, item: Tensor, position: Tensor) -> Tensor:
        """Compute log P(click) `[rows]` of items at 1-based positions, from relevance and s `[items]`."""
        common, curve = self.curves()
        top = logsigmoid(relevance + (slope - 1) * (self.shares @ curve))
        return top[item] - slope[item] * curve[position - 1] - common[position - 1]

    def forward(self, numeric: Tensor, categorical: Tensor, trees: Tensor) -> Tensor:
        relevance, slope, level = self.parts(numeric, categorical)
        relevance = self.weights[0] * relevance + self.weights[1] * trees + self.weights[2] + self.bias
        slope = softplus(ONE + level + self.alpha * (slope - level))
        common, curve = self.curves()
        top = logsigmoid(relevance + (slope - 1) * (self.shares @ curve))
        return (top[:, None] - slope[:, None] * curve - common).clamp(max=0.0)  # where a free e is negative


def _inverse_softplus(x: Tensor) -> Tensor:
    return torch.log(torch.expm1(x))


def _two_outputs(width: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Build a network of relevance and slope, in which all slopes start as 1."""
    output = nn.Linear(hidden[-1], 2)
    nn.init.zeros_(output.bias)
    nn.init.zeros_(output.weight[1])
    return nn.Sequential(*hidden_layers(width, hidden, dropout), output)


@dataclass(frozen=True, eq=False)
class ShrunkClicks:
    """A fitted model as a member."""

    network: ShrunkNetwork
    trees: tuple[TreeModel, ...]

    @property
    def family(self) -> str:
        return "shrunk"

    @property
    def monotone(self) -> bool:
        """Whether P(click) falls with the position, for all items."""
        return bool(self.network.rising)

    def log_ctr(self, inputs: Inputs) -> Floats:
        """Predict log P(click | item, k) `[rows, K]`, in chunks of rows."""
        self.network.eval()
        device = next(self.network.parameters()).device
        table = np.empty((len(inputs), self.network.positions), dtype=np.float32)
        columns = _compared(inputs, self.network)
        trees = np.asarray(np.mean([each.predict(columns) for each in self.trees], axis=0), dtype=np.float32)
        step = chunk_rows(device)
        with torch.inference_mode():
            for start in range(0, len(inputs), step):
                rows = slice(start, start + step)
                parts = (inputs.numeric[rows], inputs.categorical[rows], trees[rows])
                table[rows] = self.network(*(torch.from_numpy(part).to(device) for part in parts)).cpu().numpy()
        return table

    def position_based(self) -> ShrunkClicks:
        """Return the position-based model with the same relevance: one slope for all items and lists."""
        network = copy.deepcopy(self.network)
        network.alpha.zero_()
        network.list_weights.zero_()
        return ShrunkClicks(network, self.trees)


@dataclass(frozen=True)
class Evidence:
    """What the validation split says about attention.

    Attributes:
        alpha: the share of an item's deviation that was kept.
        relevance, lists, items: standard scores of the held-out gain from relevance at all, from slopes that differ by
            list, and from slopes that differ by item.
        rises: likewise from curves that rise again; 0 if they only fall.
    """

    alpha: float
    relevance: float
    lists: float
    items: float
    rises: float = 0.0

    @property
    def sentence(self) -> str:
        """What the log supports, in words.

        >>> Evidence(0.25, 9.0, 3.0, 1.2).sentence
        'relevance differs by item: yes; attention differs by list: yes; by item: weakly (a quarter of it is kept)'
        """
        shares = {0.0: "none", 0.25: "a quarter", 0.5: "half", 0.75: "three quarters", 1.0: "all"}
        items = f"{in_words(self.items)} ({shares[self.alpha]} of it is kept)"
        lists = in_words(self.lists)
        relevance = in_words(self.relevance)
        again = f"; it rises again after some position: {in_words(self.rises)}" if self.rises else ""
        return f"relevance differs by item: {relevance}; attention differs by list: {lists}; by item: {items}{again}"


def in_words(score: float) -> str:
    """Return what a standard score is evidence of."""
    return "yes" if score > 2 else "weakly" if score > 0.5 else "no sign of it"


def joint_loss(network: nn.Module, batch: Batch) -> Tensor:
    """Compute the loss of the networks on a batch, the mean over its lists."""
    assert isinstance(network, ShrunkNetwork)  # noqa: S101 - for mypy
    relevance, slope, _ = network.parts(batch.numeric, batch.categorical)
    log_q = network.at(relevance + network.bias, softplus(ONE + slope), batch.item, batch.position)
    return list_losses(log_q, batch.click, torch.repeat_interleave(batch.offsets.diff()), batch.lists).mean()


def list_losses(log_q: Tensor, click: Tensor, owner: Tensor, lists: int) -> Tensor:
    """Compute the loss of each list: of log P(click) `[rows]`, clicks, and the list that each row belongs to.

        0.3 · Σ cross-entropy  +  Σ over clicks of −log softmax(logit P)

    >>> q, click = torch.tensor([0.2, 0.5]), torch.tensor([1.0, 0.0])
    >>> odds = q / (1 - q)
    >>> expected = -0.3 * torch.log(q[0] * (1 - q[1])) - torch.log(odds[0] / odds.sum())
    >>> bool(torch.isclose(list_losses(torch.log(q), click, torch.tensor([0, 0]), 1)[0], expected))
    True
    """
    log_q = log_q.clamp(max=-1e-6)
    log_rest = torch.log(-torch.expm1(log_q))
    logit = log_q - log_rest
    total = log_q.new_full((lists,), 1e-30).index_add(0, owner, torch.exp(logit))
    pointwise = -(click * logit + log_rest)
    rows = POINTWISE * pointwise + click * (torch.log(total)[owner] - logit)
    return log_q.new_zeros(lists).index_add(0, owner, rows)


def start_curves(network: ShrunkNetwork, train: Stream) -> None:
    """Set the shares of the logged positions; free the curves if there are clicks enough. By the first row group."""
    lists, K = train.lists(0), network.positions
    counts = np.bincount(lists.position, minlength=K + 1)[1 : K + 1]
    network.shares.copy_(torch.from_numpy(counts / max(1, counts.sum())))
    clicks = float(lists.click.sum()) * train.rows / max(1, len(lists.item))
    if K > 1 and clicks >= LEAST_CLICKS * K:
        network.free_curves()


def _choose_curves(network: ShrunkNetwork, held_out: _HeldOut) -> float:
    """Keep free curves only if held-out lists support them; return the standard score, or 0 if attention only falls."""
    if network.rising:
        return 0.0
    without_trees = np.zeros(len(held_out.relevance), dtype=np.float32)
    (weights, free), curves = held_out.stacked(1.0, without_trees), network.saved_curves()
    network.straighten_curves()
    score = standard_score(free, held_out.stacked(1.0, without_trees, weights)[1])
    if score <= CURVES_TOLERANCE:
        return 0.0
    network.restore_curves(curves)
    return score


def finish(
    network: ShrunkNetwork,
    train: Stream,
    valid: Stream,
    featurizer: Featurizer,
    *,
    seed: int,
    report: Report,
    losses: Mapping[float, NDArray[np.float64]] | None = None,
) -> tuple[ShrunkClicks, Evidence]:
    """Add trees, list levels, weights and α to trained networks, in the first process; the others receive them.

    `losses` of held-out queries for each α, from `alpha_losses`, decide on α in place of those of the validation split.
    """

    def chosen() -> dict[str, Any]:
        with distributed.single_process():
            return _finish(network, train, valid, seed=seed, report=report, losses=losses)

    found = distributed.broadcast(chosen)
    network.restore_curves(found["curves"])
    network.list_weights.copy_(torch.tensor(found["list_weights"]))
    network.weights.copy_(torch.tensor(found["weights"]))
    network.alpha.fill_(found["alpha"])
    trees = tuple(tree_model(text, featurizer) for text in found["trees"])
    evidence = Evidence(found["alpha"], **found["scores"])
    return ShrunkClicks(network, trees), evidence


def alpha_losses(
    network: ShrunkNetwork, train: Stream, held_out: Stream, *, seed: int
) -> dict[float, NDArray[np.float64]]:
    """Compute the loss of each held-out query for every α, with trees and weights as `finish` would add them."""

    def computed() -> list[list[float]]:
        with distributed.single_process():
            network.eval()
            network.list_weights.copy_(torch.from_numpy(_list_weights(network, train)))
            held = _HeldOut.read(network, held_out)
            _choose_curves(network, held)
            rows = _tree_rows(train, network)
            forest = _Forest(rows, network, seed, small=len(rows.lengths) <= SMALL_LOG)
            trees, weights, _ = forest.grown_for(held, lambda *_: None)
            return [held.stacked(alpha, trees, weights)[1].tolist() for alpha in ALPHAS]

    return dict(zip(ALPHAS, map(np.array, distributed.broadcast(computed)), strict=True))


def tree_model(text: str, featurizer: Featurizer) -> TreeModel:
    """Restore the trees from their text; a DataError if that is not a LightGBM model of these features."""
    columns = len(featurizer.numeric) + 2 * len(featurizer.within)
    return TreeModel(text, columns, len(featurizer.categorical), None).checked()


def _finish(
    network: ShrunkNetwork,
    train: Stream,
    valid: Stream,
    *,
    seed: int,
    report: Report,
    losses: Mapping[float, NDArray[np.float64]] | None,
) -> dict[str, Any]:
    network.eval()
    network.list_weights.copy_(torch.from_numpy(_list_weights(network, train)))
    held_out = _HeldOut.read(network, valid)
    rises = _choose_curves(network, held_out)
    rows = _tree_rows(train, network)
    small = len(rows.lengths) <= SMALL_LOG
    forest = _Forest(rows, network, seed, small=small)
    trees, weights, _ = forest.grown_for(held_out, partial(report, "growing trees"))
    stacks = {alpha: held_out.stacked(alpha, trees, weights) for alpha in ALPHAS}
    by_alpha = losses if losses is not None else {alpha: stack[1] for alpha, stack in stacks.items()}
    items = standard_score(by_alpha[ALPHAS[1]], by_alpha[0.0])
    alpha = choose_alpha(by_alpha)
    weights, by_list = stacks[alpha][0], stacks[0.0][1]
    shared = held_out.stacked(0.0, trees, weights, by_list=False)[1]
    flat = held_out.stacked(0.0, trees, weights, by_list=False, relevance=False)[1]
    lists = standard_score(by_list, shared)
    scores = {"relevance": standard_score(shared, flat), "lists": lists, "items": items, "rises": rises}
    if small:
        size, forest = forest.size, _Forest(_joined([rows, _tree_rows(valid, network)]), network, seed, small=True)
        forest.grow(size, partial(report, "growing trees again"))
    return {
        "curves": network.saved_curves(),
        "list_weights": network.list_weights.tolist(),
        "weights": [float(each) for each in weights],
        "alpha": alpha,
        "scores": scores,
        "trees": forest.texts(),
    }


def choose_alpha(losses: Mapping[float, NDArray[np.float64]]) -> float:
    """Choose α by the held-out losses of the queries `[queries]` for each α.

    0 if the smallest α above it is no better; the best if it is much better than 0 (`STRONG_EFFECT`); else the smallest
    whose loss is within `ALPHA_EFFECT` of the best.

    >>> choose_alpha({0.0: np.array([3.0, 3.0]), 0.25: np.array([2.5, 3.4]), 1.0: np.array([3.4, 2.45])})
    0.25
    >>> choose_alpha({0.0: np.array([3.0, 3.0]), 0.25: np.array([2.8, 2.7]), 1.0: np.array([2.0, 2.1])})
    1.0
    """
    first, *more = sorted(losses)
    if losses[more[0]].sum() >= losses[first].sum():
        return first
    best = min(more, key=lambda alpha: float(losses[alpha].sum()))
    effect = {alpha: standard_score(losses[best], loss) / math.sqrt(len(loss)) for alpha, loss in losses.items()}
    if effect[first] >= STRONG_EFFECT:
        return best
    return next(alpha for alpha in more if alpha == best or effect[alpha] <= ALPHA_EFFECT)


def _compared(inputs: Inputs, network: ShrunkNetwork) -> Inputs:
    """Return the columns that trees take: raw features, z-scores and ranks."""
    return Inputs(inputs.numeric[:, : network.compared], inputs.categorical)


def _list_weights(network: ShrunkNetwork, train: Stream) -> Floats:
    """Regress the slopes δ on what is the same for all items of a list, by ridge regression."""
    width, rows = len(network.list_columns) + 1, 0
    products, sums = np.zeros((width, width)), np.zeros(width)
    with torch.inference_mode():
        for lists in _first_groups(train, LISTS_ROWS):
            numeric, categorical = torch.from_numpy(lists.inputs.numeric), torch.from_numpy(lists.inputs.categorical)
            for start in range(0, len(numeric), chunk_rows(torch.device("cpu"))):
                part = slice(start, start + chunk_rows(torch.device("cpu")))
                slope = network.parts(numeric[part], categorical[part])[1].double().numpy()
                columns = network.features(numeric[part])[:, network.list_columns].double().numpy()
                columns = np.column_stack([columns, np.ones(len(columns))])
                products += columns.T @ columns
                sums += columns.T @ slope
            rows += len(numeric)
    return np.linalg.solve(products + RIDGE * max(rows, 1) * np.eye(width), sums).astype(np.float32)


def _first_groups(stream: Stream, most_rows: int) -> Iterator[ListArrays]:
    """Read row groups until they have this many items; the rest of the last one is left out."""
    for group in range(len(stream.groups)):
        lists = stream.lists(group)
        if len(lists.inputs) > most_rows:
            distinct = int(np.searchsorted(lists.item_offsets, most_rows, side="right")) - 1
            lists = lists.select(np.arange(lists.sessions[max(1, distinct)]))
        yield lists
        most_rows -= len(lists.inputs)
        if most_rows <= 0:
            return


class _TreeRows(NamedTuple):
    """What trees learn from: columns and clicks of the items over all sessions, lengths and sessions of the lists."""

    columns: Floats
    clicks: Floats
    lengths: NDArray[np.int64]
    sessions: NDArray[np.int64]


def _joined(parts: Sequence[_TreeRows]) -> _TreeRows:
    return _TreeRows(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _tree_rows(stream: Stream, network: ShrunkNetwork) -> _TreeRows:
    parts = []
    for lists in _first_groups(stream, TREE_ROWS):
        clicks = np.bincount(lists.item, lists.click, minlength=len(lists.inputs)).clip(max=MOST_CLICKS)
        columns = matrix(_compared(lists.inputs, network))
        parts.append(
            _TreeRows(columns, clicks.astype(np.float32), np.diff(lists.item_offsets), np.diff(lists.sessions))
        )
    return _joined(parts)


class _Forest:
    """LightGBM's lambdarank on all columns; on a small log also on those without within-list features."""

    def __init__(self, rows: _TreeRows, network: ShrunkNetwork, seed: int, *, small: bool) -> None:
        columns, clicks, lengths, sessions = rows
        categories = list(range(network.compared, columns.shape[1]))
        least = round(
            LEAST_IMPRESSIONS / sessions.mean()
        )  # a row stands for all impressions of an item in its sessions
        fixed = {"seed": seed, "label_gain": list(range(MOST_CLICKS + 1)), "num_threads": 1}
        params = {**TREE_PARAMETERS, **fixed, "min_data_in_leaf": max(least, LEAST_ITEMS_IN_LEAF)}
        weight = np.repeat(sessions, lengths)
        # Items are stored by position: ties, which LightGBM breaks by order, would favour the logged one.
        shuffled = np.random.default_rng(seed).random(len(columns))
        order = np.lexsort((shuffled, np.repeat(np.arange(len(lengths)), lengths)))
        data = lightgbm.Dataset(
            columns[order],
            clicks[order],
            weight=weight[order],
            group=lengths,
            categorical_feature=categories,
            params=params,
        )
        both = small and network.compared > network.raw and network.raw + len(categories) > 0
        raw = {"interaction_constraints": [[*range(network.raw), *categories]]}  # other columns are not split on
        self.boosters = [lightgbm.Booster({**params, **more}, data) for more in ([{}, raw] if both else [{}])]
        self.size = 0

    def grow(self, size: int, done: Done) -> None:
        """Grow more trees, up to this size."""
        while self.size < size:
            for booster in self.boosters:
                booster.update()
            self.size += 1
            done(self.size, size)

    def predict(self, columns: Floats, size: int) -> Floats:
        """Return the mean of the boosters' sums of so many trees `[rows]`."""
        sums = [np.asarray(each.predict(columns, raw_score=True, num_iteration=size)) for each in self.boosters]
        return np.asarray(np.mean(sums, axis=0), dtype=np.float32)

    def grown_for(self, held_out: _HeldOut, done: Done) -> tuple[Floats, NDArray[np.float64], NDArray[np.float64]]:
        """Grow as many trees as held-out lists support; return their sums, and weights and losses with α = 1."""

        def grown(size: int) -> tuple[Floats, NDArray[np.float64], NDArray[np.float64]]:
            self.grow(size, done)
            trees = self.predict(held_out.columns, size)
            return trees, *held_out.stacked(1.0, trees)

        kept, best = TREES[0], grown(TREES[0])
        if standard_score(best[2], grown(kept // 2)[2]) > TREES_TOLERANCE:
            for size in TREES[1:]:
                found = grown(size)
                if standard_score(found[2], best[2]) <= TREES_TOLERANCE:
                    break
                kept, best = size, found
        self.size = kept
        return best

    def texts(self) -> list[str]:
        """Return the boosters in LightGBM's text format."""
        return [booster.model_to_string(num_iteration=self.size) for booster in self.boosters]


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """Lists of the validation split, with the outputs of the networks."""

    network: ShrunkNetwork
    columns: Floats
    relevance: Tensor
    slope: Tensor
    level: Tensor
    item: Tensor
    position: Tensor
    click: Tensor
    owner: Tensor
    query: NDArray[np.int64]  # the distinct list of each list; standard errors are clustered by it

    @classmethod
    def read(cls, network: ShrunkNetwork, valid: Stream) -> _HeldOut:
        parts, items, lists, distinct, rows = [], 0, 0, 0, 0
        device = next(network.parameters()).device
        with torch.no_grad():
            for each in valid.batches():
                made = [part.cpu() for part in network.parts(each.numeric.to(device), each.categorical.to(device))]
                columns = torch.cat([each.numeric[:, : network.compared], each.categorical.to(torch.float32)], dim=1)
                owner = torch.repeat_interleave(each.offsets.diff())
                query = torch.repeat_interleave(each.sessions.diff())
                own = (each.item + items, each.position, each.click, owner + lists, query + distinct)
                parts.append((columns, *made, *own))
                items += len(each.numeric)
                lists += each.lists
                distinct += len(each.sessions) - 1
                rows += len(each)
                if rows >= STACK_ROWS:
                    break
        columns, relevance, slope, level, item, position, click, owner, query = (
            torch.cat(part) for part in zip(*parts, strict=True)
        )
        return cls(network, columns.numpy(), relevance, slope, level, item, position, click, owner, query.numpy())

    def stacked(
        self,
        alpha: float,
        trees: Floats,
        start: NDArray[np.float64] | None = None,
        *,
        by_list: bool = True,
        relevance: bool = True,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Fit the weights of networks, trees and intercept for an α; return them and the loss of each distinct list."""
        with torch.no_grad():
            common, curve = (each.cpu() for each in self.network.curves())
            level = self.level if by_list else torch.zeros_like(self.level)
            slope = softplus(ONE + level + alpha * (self.slope - self.level))
            offset = (slope - 1) * (self.network.shares.cpu() @ curve) + float(self.network.bias)
            decay = slope[self.item] * curve[self.position - 1] + common[self.position - 1]
        parts = torch.stack([self.relevance, torch.from_numpy(trees), torch.ones_like(self.relevance)], dim=1)
        lists = len(self.query)
        prior = torch.tensor([1.0, TREE_WEIGHT, 0.0]) if relevance else torch.zeros(3)
        strength = PRIOR_QUERIES / (2 * (int(self.query[-1]) + 1)) if relevance else 0.0

        def losses(weights: Tensor) -> Tensor:
            log_q = logsigmoid(parts @ weights + offset)[self.item] - decay
            return list_losses(log_q, self.click, self.owner, lists)

        def objective(given: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            weights = torch.tensor(given, dtype=torch.float32, requires_grad=True)
            loss = losses(weights).mean() + RIDGE * ((weights - prior) ** 2).sum()
            loss = loss + strength * torch.relu(TREE_WEIGHT - weights[1]) ** 2
            loss.backward()  # type: ignore[no-untyped-call]
            assert weights.grad is not None  # noqa: S101 - after backward
            return float(loss.detach()), weights.grad.double().numpy()

        bounds = [(0, None), (0, None), (None, None)] if relevance else [(0, 0), (0, 0), (None, None)]
        begin = prior.numpy() if start is None or not relevance else start
        found = minimize(objective, begin, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 50})
        with torch.no_grad():
            each = losses(torch.tensor(found.x, dtype=torch.float32)).double().numpy()
        return np.asarray(found.x), np.bincount(self.query, each).astype(np.float64)


def standard_score(loss: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return by how many standard errors a loss by query is lower than another."""
    gain = other - loss
    error = gain.std(ddof=1) * math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    return float(gain.sum() / error) if error > 0 else 0.0
