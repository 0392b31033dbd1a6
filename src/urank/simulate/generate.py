"""Data that looks like a learning-to-rank benchmark, made from nothing: for tests, tutorials, machines without files.

A handful of hidden factors of the query and of the document make both the features and the relevance. Features are
heavy-tailed, counts or bounded, as in MSLR-WEB (lengths, term frequencies, ratios); relevance is not linear in them and
partly chance, so a linear ranker does well and trees do better, but nothing is perfect.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.log.letor import Letor
from urank.log.lists import list_ids

__all__ = ["LABEL_SHARES", "generate_letor", "graded_labels", "latent_relevance"]

LABEL_SHARES = (0.52, 0.32, 0.13, 0.02, 0.01)
"""Shares of the grades 0–4, about those of MSLR-WEB."""

QUERY_FACTORS, ITEM_FACTORS = 3, 8
FEATURE_NOISE = 0.1
SATURATION = 4.0

Floats = NDArray[np.float64]


def generate_letor(
    queries: int,
    features: int = 30,
    *,
    min_items: int = 8,
    max_items: int = 20,
    noise: float = 0.1,
    rng: np.random.Generator,
) -> Letor:
    """Queries with documents, features and graded labels, in the same form as `read_letor` gives.

    Args:
        queries: how many queries; their ids are 0, 1, 2, …
        features: F, how many features. One in ten describes the query alone and is the same for all its documents.
        min_items: the shortest list.
        max_items: the longest list; lengths are uniform between the two.
        noise: deviation of the chance in the latent relevance, whose own deviation is about 1.5.
        rng: decides everything, the way features hang together too.

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
    # Queries attract documents of their own kind, so the factors of a query's documents hang together.
    of_item[:, :QUERY_FACTORS] = 0.9 * of_item[:, :QUERY_FACTORS] + 0.45 * of_query
    relevance = latent_relevance(of_query, of_item) + noise * rng.standard_normal(len(query))
    return Letor(
        features=_observed(of_query, of_item, features, offsets, rng),
        label=graded_labels(relevance),
        query=query,
        offsets=offsets,
        item=None,
    )


def latent_relevance(of_query: Floats, of_item: Floats) -> Floats:
    """How well each document answers its query `[rows]`, before noise, from factors u of the query, v of the document.

        v₁ + ½ v₂ + 0.4 v₄ v₅ + tanh(v₆) + 0.3 u₁ v₇ − 0.2 v₈² + ½ u₂

    A linear part, an interaction, a saturating term, a taste that differs by query, an optimum in the middle, and
    queries that are easier than others.
    """
    u, v = of_query.T, of_item.T
    linear = v[0] + 0.5 * v[1]
    curved = 0.4 * v[3] * v[4] + np.tanh(v[5]) - 0.2 * v[7] ** 2
    by_query = 0.3 * u[0] * v[6] + 0.5 * u[1]
    relevance: Floats = linear + curved + by_query
    return relevance


def graded_labels(relevance: Floats, shares: tuple[float, ...] = LABEL_SHARES) -> NDArray[np.float32]:
    """Grades 0, 1, 2, … by thresholds on the latent relevance, such that they have these shares.

    >>> graded_labels(np.arange(10.0), (0.5, 0.3, 0.2)).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    """
    thresholds = np.quantile(relevance, np.cumsum(shares)[:-1])
    return np.searchsorted(thresholds, relevance, side="right").astype(np.float32)


def _observed(
    of_query: Floats, of_item: Floats, features: int, offsets: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Features `[rows, F]`: each sees two factors through noise, and shows them on a scale of its own kind."""
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


def _heavy_tailed(signal: Floats, rng: np.random.Generator) -> Floats:
    """Log-normal, as document lengths and link counts are."""
    skewed: Floats = np.exp(rng.uniform(2, 6) + rng.uniform(1, 2) * signal)
    return skewed


def _count(signal: Floats, rng: np.random.Generator) -> Floats:
    """Whole numbers with many zeros, as term frequencies are."""
    counts: Floats = np.floor(np.exp(rng.uniform(1.2, 1.8) + 0.8 * signal))
    return counts


def _bounded(signal: Floats, rng: np.random.Generator) -> Floats:
    """From 0 to 1, as ratios and normalised scores are."""
    ratio: Floats = 1 / (1 + np.exp(rng.uniform(0.2, 0.6) - 1.5 * signal))
    return ratio


_KINDS = (_heavy_tailed, _count, _bounded)
