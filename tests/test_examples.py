"""The notebooks of examples/: they run, and what is stored of them is small and has no rows of real data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def outputs(path: Path) -> list[dict[str, object]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_small_and_of_no_machine(path: Path) -> None:
    assert path.stat().st_size < 500_000
    found = outputs(path)
    assert any("text/html" in output.get("data", {}) for output in found)  # type: ignore[operator]
    assert not [output for output in found if output["output_type"] == "error"]
    assert not re.findall(r"/(?:tmp|home|root|work|Users)/", json.dumps(found))


def test_nothing_of_the_hotel_log_is_stored_row_by_row(data_dir: Path) -> None:
    stored = json.dumps(outputs(EXAMPLES / "hotel.ipynb"))
    log = pl.read_csv(data_dir / "expedia" / "searches.csv.gz", infer_schema_length=None)
    assert not [time for time in log["date_time"].unique().to_list() if time in stored]
    prices = {f"{price:.2f}" for price in log["price_usd"].unique().to_list() if price > 1000}
    assert not [price for price in prices if re.search(rf"(?<![\\d.]){re.escape(price)}(?![\\d%])", stored)]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URANK_DATA", str(data_dir))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from execute import execute

    stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell, before in zip(execute(path)["cells"], stored, strict=True):  # an error in a cell is raised
        assert len(cell.get("outputs", [])) == len(before.get("outputs", []))
