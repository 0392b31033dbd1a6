"""Benchmarks: their page is made of their results, peers are judged fairly, and that of large logs runs, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks import docs, real
from benchmarks import map as click_map
from benchmarks.__main__ import NAMES
from benchmarks.docs import MAP, PAGE, map_page, page, read_results
from benchmarks.frontier import judged
from benchmarks.growth import slope
from benchmarks.harness import Bar, Figure, write_results
from benchmarks.map import SEEDS, USERS, Cell, cells_of, pooled
from benchmarks.peers import GRID, Rows, lightgbm_tuned, within_columns, within_list
from benchmarks.plots import draw, image_name, share_of_goal
from benchmarks.real import DEFAULT, HALVES, REFERENCE, WITHIN, Held, Judged, RealLog, of_half, summarised
from benchmarks.scale import at_two_sizes


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    assert MAP.read_text(encoding="utf-8") == map_page()


def test_every_result_is_of_a_benchmark_and_has_its_plot() -> None:
    results = read_results()
    assert set(results) <= set(NAMES)
    for name, found in results.items():
        assert found["name"] == name
        assert not found["quick"]
        assert (PAGE.parent / "images" / image_name(name)).is_file()


def test_a_result_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "colour.json").write_text(json.dumps({"name": "colour", "bars": []}))
    with pytest.raises(SystemExit, match="'colour' has none"):
        page(tmp_path)


def test_only_the_parts_that_were_measured_are_replaced(tmp_path: Path) -> None:
    def results(value: float, *parts: str) -> dict[str, Any]:
        made = {"commit": "abc1234", "command": "python -m benchmarks log", "date": "2026-11-18"}
        bars = [Bar("speed", value, "rows/s", at_least=1, part=part).to_dict() | made for part in parts]
        return {"name": "log", "quick": False, "bars": bars}

    write_results("log", results(1.0, "a", "b"), folder=tmp_path)
    kept = write_results("log", results(2.0, "b"), only=["b"], folder=tmp_path)
    assert {bar["part"]: bar["value"] for bar in kept["bars"]} == {"a": 1.0, "b": 2.0}
    assert json.loads((tmp_path / "log.json").read_text()) == kept
    assert draw(kept, tmp_path) == tmp_path / "benchmark-log.png"
    assert (tmp_path / "benchmark-log.png").stat().st_size > 1000


def test_bars_know_whether_they_hold() -> None:
    assert Bar("a", 0.7, "", at_least=0.7).holds
    assert not Bar("a", 0.69, "", at_least=0.7).holds
    assert not Bar("a", 1.2, "", at_most=1.15).holds
    assert share_of_goal(1.2, Bar("a", 1.2, "", at_most=1.15).goal) == pytest.approx(1.2 / 1.15)
    assert docs.number(12345.6, 3) == "12,346"
    assert slope([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)


def point(name: str, ours: bool, utility: float, seconds: float) -> dict[str, Any]:
    return {"name": name, "ours": ours, "utility": utility, "seconds": seconds}


@pytest.mark.parametrize(("best_is_ours", "holds"), [(True, True), (False, False)])
def test_the_frontier_is_what_nothing_dominates(best_is_ours: bool, holds: bool) -> None:
    points = [
        point("slow and best", best_is_ours, 1.2, 9.0),
        point("slow", True, 1.1, 8.0),
        point("quick", False, 1.1, 1.5),
        point("quick and better", True, 1.15, 1.9),
    ]
    found = list(judged("part", "title", points, {}))
    (figure,) = [each for each in found if isinstance(each, Figure)]
    assert [each["frontier"] for each in figure.data["points"]] == [True, False, True, True]
    assert all(each.holds for each in found if isinstance(each, Bar)) is holds


@pytest.mark.slow
def test_a_small_log_goes_the_way_of_a_large_one(tmp_path: Path) -> None:
    """Prepare, train, evaluate and rank as processes of their own; at its real size this is `benchmarks scale`."""
    bars = {bar.name: bar for bar in at_two_sizes(tmp_path, (10_000, 40_000))}
    memory = [bar for name, bar in bars.items() if name.endswith("peak memory")]
    assert len(memory) == 8  # four commands, two sizes
    assert all(bar.at_most is not None and 100 < bar.value < bar.at_most for bar in memory)
    assert bars["cost of a row, 40,000 / 10,000: all"].value > 0


def test_within_list_features_compare_items_of_one_list() -> None:
    features = np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0], [8.0, 6.0]], np.float32)
    offsets = np.array([0, 3, 4])
    z = np.log1p([1.0, 3.0])
    z = (z - z.mean()) / z.std()
    found = within_list(features, offsets)
    np.testing.assert_allclose(found[:2, 0], z, rtol=1e-5)
    assert found[:2, 2].tolist() == [0.5 / 2, 1.5 / 2]
    assert np.isnan(found[2, [0, 2]]).all()
    assert found[3].tolist() == [0, 0, 0.5, 0.5]
    rows = Rows(features, np.zeros(4, np.float32), np.array([1, 2, 3, 1]), offsets, numeric=2)
    assert within_columns(rows).tolist() == [0]


def test_the_tuned_peer_takes_the_smallest_of_equals() -> None:
    rng = np.random.default_rng(0)
    nothing = Rows(
        np.zeros((600, 2), np.float32),
        (rng.random(600) < 0.2).astype(np.float32),
        np.tile(np.arange(1, 11), 60),
        np.arange(0, 601, 10),
        numeric=2,
    )
    score, size = lightgbm_tuned(nothing, nothing)
    assert size == GRID[0] == (8, 100, 0.04)
    assert len(set(score(nothing.features, nothing.offsets))) == 1


def random_log(queries: int = 90) -> pl.DataFrame:
    """Lists of six items in random order, where the item with the highest x is clicked, if it is among the first three;
    slot 2 is empty."""
    rng = np.random.default_rng(0)
    x = rng.random((queries, 6))
    slots = np.array([1, 3, 4, 5, 6, 7])
    click = (x == x.max(axis=1, keepdims=True)) & (slots <= 4)
    return pl.DataFrame(
        {
            "search": np.repeat(np.arange(queries), 6),
            "position": np.tile(slots, queries),
            "click": click.ravel().astype(np.int8),
            "x": x.ravel(),
            "bucket": ["explore"] * (queries * 6),
        }
    )


def test_real_logs_are_judged_by_the_position_curve() -> None:
    log = RealLog("toy", random_log().rename({"search": "query_id"}).drop("bucket"), np.ones(540, np.bool_))
    curve = log.curve()
    assert (np.diff(curve) <= 0).all()
    assert curve[4:].max() == 0
    thirds = [log.divided(split) for split in range(3)]
    assert sum(held["query_id"].n_unique() for _, held in thirds) == 90
    assert all(set(learned["query_id"]).isdisjoint(held["query_id"]) for learned, held in thirds)
    held = Held.of(thirds[0][1], curve, seed=0)
    best = held.judge(held.sorted(held.frame["x"].to_numpy()))
    clicks = held.judge_logged()["clicks"]
    e = curve[[0, 2, 3, 4, 5, 6]]  # slot 2 is empty
    np.testing.assert_allclose(best["clicks"], clicks * e[0] / e.mean())
    assert best["ndcg"].drop_nulls().unique().to_list() == [1.0]
    halves = [of_half(log.frame["query_id"], half) for half in HALVES]
    assert (halves[0] ^ halves[1]).all()


def test_a_search_that_is_judged_twice_counts_once() -> None:
    def judged(*splits: list[float]) -> Judged:
        return Judged([pl.DataFrame({"query_id": [1, 2], "clicks": each, "ndcg": [1.0, 1.0]}) for each in splits])

    found = {DEFAULT: judged([1.0, 2.0], [3.0, 4.0]), REFERENCE: judged([1.0, 1.0], [2.0, 1.0])}
    found[WITHIN] = judged([2.0, 0.0], [2.0, 0.0])
    *bars, figure = summarised("A", found)
    assert isinstance(figure, Figure)
    (within,) = [bar for bar in bars if isinstance(bar, Bar) and bar.name.endswith(f"− {WITHIN}, z")]
    assert within.value == pytest.approx(1.5 / (np.array([0.0, 3.0]).std(ddof=1) / np.sqrt(2)))
    row = figure.data["rows"][0]
    gaps = np.array([(0 + 1) / 2, (1 + 3) / 2])
    assert row["difference"] == gaps.mean()
    assert row["z"] == pytest.approx(gaps.mean() / (gaps.std(ddof=1) / np.sqrt(2)))


@pytest.mark.slow
def test_real_runs_on_any_log_with_random_lists(tmp_path: Path) -> None:
    random_log(300).write_parquet(tmp_path / "own.parquet")
    found = list(
        real.run(quick=True, log=tmp_path / "own.parquet", columns=["query_id=search"], random="bucket=explore")
    )
    (figure,) = [each for each in found if isinstance(each, Figure)]
    clicks = {row["method"]: row["clicks"] for row in figure.data["rows"]}
    assert clicks["LightGBM 150"] > 1.5 * clicks["random order"]
    assert clicks["random order"] == pytest.approx(clicks["as shown"], rel=0.2)
    assert draw({"name": "real", "figures": [figure.to_dict()]}, tmp_path)
    assert "LightGBM 150, within" in docs._figure_table(figure.to_dict())
    with pytest.raises(SystemExit, match="no row has bucket=none"):
        list(real.run(quick=True, log=tmp_path / "own.parquet", random="bucket=none"))


def result(difference: float, error: float, default: float = 1.1) -> dict[str, Any]:
    """One seed of a cell, with the same difference to every rival."""
    means = {"default": default, "ctr1": 1.2, "LightGBM 150": 1.0, "logged": 1.0}
    pairs = [f"default − {rival}" for rival in ("ctr1", "LightGBM 150", "logged")]
    return {"means": means, "differences": dict.fromkeys(pairs, (difference, error))}


def test_a_cell_is_lost_when_the_default_is_significantly_below() -> None:
    row = pooled(Cell("pbm", 200), [result(-0.1, 0.06), result(-0.2, 0.08, 1.3)])
    assert row["differences"]["default − ctr1"]["z"] == pytest.approx(-0.15 / (np.hypot(0.06, 0.08) / 2))
    assert row["differences"]["default − ctr1"]["mean"] == pytest.approx(-0.15)
    assert row["lost"] == ["default − ctr1", "default − LightGBM 150", "default − logged"]
    assert row["ratios"]["default"] == pytest.approx(1.2)
    assert row["errors"]["default"] == pytest.approx(0.1)  # (1.3 − 1.1) / 2: of two seeds
    alone = pooled(Cell("pbm", 200), [result(-0.1, 0.06)])
    assert (alone["lost"], alone["errors"]["default"]) == ([], None)


def test_the_map_varies_loggers_and_noise_of_small_logs_one_at_a_time() -> None:
    cells = cells_of(tuple(USERS), tuple(SEEDS))
    assert len({cell.name for cell in cells}) == len(cells)
    assert {(cell.users, cell.queries) for cell in cells} == {(users, size) for users in USERS for size in SEEDS}
    varied = [cell for cell in cells if (cell.loggers, cell.noise) != (2, 0.1)]
    assert all((cell.loggers == 2) != (cell.noise == 0.1) and cell.queries <= 1_000 for cell in varied)
    assert Cell("pbm", 200, loggers=1).name == "pbm/200/1 logger"
    assert Cell("pbm", 200, noise=0.3).config(1, 100).epsilon == 0.3


def test_the_page_of_the_map_says_where_the_default_wins_and_loses(tmp_path: Path) -> None:
    assert "not measured yet" in map_page(tmp_path)
    made = {"commit": "abc1234", "command": "python -m benchmarks map", "date": "2026-11-18"}
    rows = [pooled(Cell("pbm", 200), [result(0.1, 0.01)]), pooled(Cell("pbm", 1_000), [result(-0.1, 0.01)])]
    found = [each for users in ("pbm", "item1.5") for each in click_map.summarised(users, rows)]
    bars, figures = ([each.to_dict() | made for each in found if isinstance(each, kind)] for kind in (Bar, Figure))
    write_results("map", {"name": "map", "bars": bars, "figures": figures[:1]}, folder=tmp_path)
    text = map_page(tmp_path)
    assert "**Against ctr1** the default wins 1 of 2 cells, ties 0, loses 1." in text
    assert "It loses with pbm/1000 (-10.0 %, z -10.0)." in text
    assert "| pbm | 1.100 🟩🟩🟩 | 1.100 🟥🟥🟥 |" in text
    assert docs.uncertified(text) == []
    assert draw({"name": "map", "figures": figures[:1]}, tmp_path)


@pytest.mark.slow
def test_the_map_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    found = list(click_map.run(quick=True, only=["cascade"], resume=path, workers=1))
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    assert {json.loads(line)["cell"] for line in lines} == {"cascade/200", "cascade/200/1 logger"}
    assert {"default", "score", "match", "ctr1", "LightGBM 150", "DeepFM", "LambdaRank", "logged"} == {
        *json.loads(lines[0])["means"]
    }
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + lines[0][:20])  # killed while it was written
    monkeypatch.setattr(click_map, "one_simulation", None)  # would fail
    assert list(click_map.run(quick=True, only=["cascade"], resume=path, workers=1)) == found
