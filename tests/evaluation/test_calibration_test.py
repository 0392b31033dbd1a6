"""A right click model is left in peace, also where clicks are rare; a wrong one is found out."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from scipy.stats import norm

from urank.evaluation.estimators import LoggedBatch
from urank.evaluation.intervals import holm
from urank.evaluation.policy_evaluation import CALIBRATION_LEVELS, MISFIT_LEVEL, CalibrationTest, Specification

K = 4


def logs(seed: int, queries: int, *, sessions: int = 3, top: float = 0.5) -> tuple[LoggedBatch, np.ndarray]:
    """Lists of 4 items that fall with the position at a rate of their own, clicked as the table says; their queries."""
    rng = np.random.default_rng(seed)
    items = rng.uniform(0.05, 1, (queries, K, 1)) * top * np.arange(1, K + 1) ** -rng.uniform(0, 2, (queries, K, 1))
    table = np.repeat(items, sessions, axis=0)
    position = np.argsort(rng.random(table.shape[:2]), axis=1) + 1
    chance = np.take_along_axis(table, position[..., None] - 1, axis=2)[..., 0]
    click = (rng.random(chance.shape) < chance).astype(np.int8)
    query = np.repeat(np.arange(queries), sessions).astype(np.uint64)
    shape = np.ones(chance.shape)
    return LoggedBatch(table, position, click, shape, shape.astype(bool)), query


def judged(logged: LoggedBatch, query: np.ndarray, blocks: int = 1) -> Specification:
    calibration = CalibrationTest(K)
    for part in np.array_split(np.arange(len(query)), blocks):
        fields = ("table", "position", "click", "value", "where")
        calibration.add(LoggedBatch(**{name: getattr(logged, name)[part] for name in fields}), query[part])
    return calibration.result()


# Arithmetic


def test_a_cell_by_hand() -> None:
    """One item at position 1: query 7 shown twice, query 9 once. The least likely third is one row, and so on."""
    table = np.array([[[0.2]], [[0.4]], [[0.6]]])
    logged = LoggedBatch(table, np.ones((3, 1), int), np.array([[1], [0], [1]]), np.ones((3, 1)), np.ones((3, 1), bool))
    calibration = CalibrationTest(1)
    calibration.add(logged, np.array([7, 7, 9], dtype=np.uint64))
    cells = calibration.result().cells
    assert [(cell.position, cell.level, cell.rows) for cell in cells] == [(1, 1, 1), (1, 2, 1), (1, 3, 1)]
    assert [cell.predicted for cell in cells] == [0.2, 0.4, 0.6]
    assert [cell.observed for cell in cells] == [1.0, 0.0, 1.0]
    # Σ d² = 0.64, 0.16, 0.16 and Σ p (1 − p) = 0.16, 0.24, 0.24: together 0.96 / 0.64 = 1.5 times as much.
    z = [0.8 / sqrt(0.64), -0.4 / sqrt(1.5 * 0.24), 0.4 / sqrt(1.5 * 0.24)]
    np.testing.assert_allclose([cell.z for cell in cells], z)
    np.testing.assert_allclose([cell.p_value for cell in cells], holm(2 * norm.sf(np.abs(z))))


def test_errors_are_clustered_by_query() -> None:
    """Three queries with two equal lists each: a query is one observation, and its differences are added first."""
    table = np.full((6, 1, 1), 0.5)
    click = np.array([1, 1, 1, 1, 0, 0])[:, None]
    logged = LoggedBatch(table, np.ones((6, 1), int), click, np.ones((6, 1)), np.ones((6, 1), bool))
    calibration = CalibrationTest(1)
    # All rows are as likely as each other, so the thirds are by their order: one query each.
    calibration.add(logged, np.array([3, 3, 1, 1, 2, 2], dtype=np.uint64))
    cells = calibration.result().cells
    assert [cell.rows for cell in cells] == [2, 2, 2]
    np.testing.assert_allclose([cell.z for cell in cells], [1.0, 1.0, -1.0])  # ±1 / √(1²), not ±1 / √(2 · 0.5²)


def test_levels_are_thirds_of_each_position() -> None:
    logged, query = logs(0, 300)
    cells = judged(logged, query).cells
    assert [(cell.position, cell.level) for cell in cells] == [(k, n) for k in range(1, K + 1) for n in (1, 2, 3)]
    assert all(cell.rows == 300 for cell in cells)  # 900 lists
    for k in range(K):
        low, middle, high = (cell.predicted for cell in cells[CALIBRATION_LEVELS * k : CALIBRATION_LEVELS * (k + 1)])
        assert low < middle < high
    chance = np.take_along_axis(logged.table, logged.position[..., None] - 1, axis=2)[..., 0]
    for k in range(1, K + 1):
        rows = logged.position == k
        own = [cell for cell in cells if cell.position == k]
        assert sum(cell.predicted for cell in own) / 3 == pytest.approx(chance[rows].mean())
        assert sum(cell.observed for cell in own) / 3 == pytest.approx(logged.click[rows].mean())


def test_padding_does_not_count() -> None:
    logged, query = logs(1, 60)
    wide = LoggedBatch(
        table=np.pad(logged.table, ((0, 0), (0, 2), (0, 0)), constant_values=np.nan),
        position=np.pad(logged.position, ((0, 0), (0, 2)), constant_values=-3),
        click=np.pad(logged.click, ((0, 0), (0, 2)), constant_values=9),
        value=np.pad(logged.value, ((0, 0), (0, 2)), constant_values=np.inf),
        where=np.pad(logged.where, ((0, 0), (0, 2))),
    )
    assert judged(wide, query) == judged(logged, query)


def test_positions_that_were_never_shown_have_no_cells() -> None:
    calibration = CalibrationTest(3)
    assert calibration.result() == Specification([], [])
    table = np.full((30, 1, 3), 0.3)
    where = np.ones((30, 1), bool)
    calibration.add(
        LoggedBatch(table, np.full((30, 1), 2), np.zeros((30, 1)), np.ones((30, 1)), where),
        np.arange(30).astype(np.uint64),
    )
    assert {cell.position for cell in calibration.result().cells} == {2}


# What it finds


@pytest.mark.parametrize(("top", "blocks"), [(0.9, 1), (0.5, 4), (0.05, 1), (0.01, 1), (0.001, 1)])
def test_a_right_table_raises_no_alarm(top: float, blocks: int) -> None:
    """Also where a third of the rows has less than one click to expect. Each alarm has a chance of 1 % at most."""
    alarms = [bool(judged(*logs(seed, 150, top=top), blocks).warnings) for seed in range(100)]
    assert sum(alarms) <= 100 * MISFIT_LEVEL + 4 * sqrt(100 * MISFIT_LEVEL)


def test_clicks_that_hang_together_raise_no_alarm() -> None:
    """All lists of a query are clicked alike: ten times fewer observations than rows."""
    alarms = 0
    for seed in range(60):
        logged, _ = logs(seed, 100, sessions=1)
        often = np.repeat(np.arange(100), 10)
        fields = {name: getattr(logged, name)[often] for name in ("table", "position", "click", "value", "where")}
        alarms += bool(judged(LoggedBatch(**fields), often.astype(np.uint64)).warnings)
    assert alarms <= 4


def test_a_halved_table_is_found_out() -> None:
    logged, query = logs(0, 400)
    found = judged(replace(logged, table=logged.table / 2), query)
    assert len(found.warnings) == 1
    assert "the click model of this evaluation is off: at position " in found.warnings[0]
    assert f"of {len(found.cells)} groups of rows are off" in found.warnings[0]
    worst = min(found.cells, key=lambda cell: cell.p_value)
    assert worst.z > 4
    assert worst.observed > 1.5 * worst.predicted
    sentence = f"at position {worst.position} it expects {worst.predicted:.2%} where {worst.observed:.2%} were observed"
    assert sentence in found.warnings[0]


def test_a_wrong_curve_is_found_out() -> None:
    """Right in the mean over all rows, but flat where clicks fall."""
    logged, query = logs(0, 400)
    chance = np.take_along_axis(logged.table, logged.position[..., None] - 1, axis=2)
    flat = np.broadcast_to(logged.table.mean(axis=2, keepdims=True), logged.table.shape)
    flat = flat * chance.mean() / flat[..., :1].mean()
    found = judged(replace(logged, table=flat), query)
    assert found.warnings
    off = {np.sign(cell.z): cell.position for cell in found.cells if cell.p_value < MISFIT_LEVEL}
    assert off[1.0] == 1  # too few clicks expected at the top
    assert off[-1.0] > 1


def test_wrong_about_items_is_found_out() -> None:
    """Right at every position, but all items are the same to it."""
    logged, query = logs(0, 400)
    same = np.broadcast_to(logged.table.mean(axis=(0, 1)), logged.table.shape)
    tilted = same * np.linspace(0.5, 1.5, len(query))[:, None, None]  # and it believes in differences that are not
    assert judged(replace(logged, table=np.minimum(tilted, 0.99)), query).warnings


def test_what_was_not_shown_is_not_looked_at() -> None:
    logged, query = logs(3, 30)
    below = np.broadcast_to(np.arange(K + 1, K + 4), (len(query), 3))
    more = LoggedBatch(
        table=np.concatenate([logged.table, np.full((len(query), 3, K), 0.9)], axis=1),
        position=np.concatenate([logged.position, below], axis=1),
        click=np.concatenate([logged.click, np.zeros_like(below)], axis=1),
        value=np.ones((len(query), K + 3)),
        where=np.ones((len(query), K + 3), dtype=bool),
    )
    assert judged(more, query) == judged(logged, query)
