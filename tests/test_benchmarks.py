"""Benchmarks: their page is made of their results, peers are judged fairly, and that of large logs runs, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import docs
from benchmarks.__main__ import NAMES
from benchmarks.docs import PAGE, measured_at, page, read_results
from benchmarks.frontier import judged
from benchmarks.growth import slope
from benchmarks.harness import Bar, Figure, write_results
from benchmarks.plots import draw, image_name, share_of_goal
from benchmarks.scale import at_two_sizes


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


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
        bars = [Bar("speed", value, "rows/s", at_least=1, part=part).to_dict() for part in parts]
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
    assert measured_at({"bars": [{"commit": "abc1234"}]}) == "Measured at commit abc1234."
    assert docs.number(12345.6, 3) == "12,346"
    assert slope([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)


def point(name: str, ours: bool, utility: float, seconds: float) -> dict[str, Any]:
    return {"name": name, "ours": ours, "utility": utility, "seconds": seconds}


@pytest.mark.parametrize(("best_is_ours", "holds"), [(True, True), (False, False)])
def test_the_frontier_is_what_nothing_dominates(best_is_ours: bool, holds: bool) -> None:
    points = [
        point("slow and best", best_is_ours, 1.2, 9.0),
        point("slow", True, 1.1, 8.0),
        point("quick", False, 1.1, 2.0),
        point("quick and worse", True, 1.0, 2.0),
    ]
    found = list(judged("part", "title", points, {}))
    (figure,) = [each for each in found if isinstance(each, Figure)]
    assert [each["frontier"] for each in figure.data["points"]] == [True, False, True, False]
    assert all(each.holds for each in found if isinstance(each, Bar)) is holds


@pytest.mark.slow
def test_a_small_log_goes_the_way_of_a_large_one(tmp_path: Path) -> None:
    """Prepare, train, evaluate and rank as processes of their own; at its real size this is `benchmarks scale`."""
    bars = {bar.name: bar for bar in at_two_sizes(tmp_path, (10_000, 40_000))}
    memory = [bar for name, bar in bars.items() if name.endswith("peak memory")]
    assert len(memory) == 8  # four commands, two sizes
    assert all(bar.at_most is not None and 100 < bar.value < bar.at_most for bar in memory)
    assert bars["cost of a row, 40,000 / 10,000: all"].value > 0
