"""`urank rank`: what the file holds is what `RankingModel.rank` gives, however the candidates are cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import typer
from numpy.typing import NDArray
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

from urank.cli import rank as module
from urank.cli.rank import rank_command
from urank.clicks.calibration import fit_calibration
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.clicks.families import build_network
from urank.errors import ConfigError, DataError, UrankError
from urank.learning.features import Categorical, Featurizer, Inputs, Numeric
from urank.learning.training import seeded
from urank.log import candidates as reading
from urank.ranking.guard import Guard
from urank.ranking.ranking_model import RankingModel

NUMERIC = ("price", "emb[0]", "emb[1]")
FEATURIZER = Featurizer(
    tuple(Numeric(name, 0.0, 1.0, False) for name in NUMERIC), (Categorical("shape", ("round", "square")),)
)
POSITIONS = 4


@dataclass(frozen=True)
class ByPrice:
    """A scorer: what the item earns if it is clicked, less its price."""

    takes_value: bool = False
    family: str = "network"

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
        return (value - inputs.numeric[:, 0]).astype(np.float32)


def click_model() -> ClickModel:
    with seeded(3):
        network = build_network("monotone", FEATURIZER, POSITIONS)
    empty = np.zeros(0)
    calibration = fit_calibration("none", empty, empty.astype(int), empty, POSITIONS)
    return ClickModel(FEATURIZER, POSITIONS, (NetworkClicks("monotone", network),), calibration)


def some_candidates(lists: int = 40, seed: int = 0) -> pl.DataFrame:
    """Lists of 1 to 9 candidates, some with more than there are positions, with columns that no model needs."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 10, lists)
    rows = int(lengths.sum())
    return pl.DataFrame(
        {
            "query_id": np.repeat(rng.permutation(lists) // 2, lengths),
            "session_id": np.repeat([f"s{i}" for i in range(lists)], lengths),
            "item_id": rng.integers(0, 1000, rows),
            "position": 1,
            "click": 0,
            "price": rng.normal(size=rows) * 3,
            "emb": pl.Series(rng.normal(size=(rows, 2)), dtype=pl.Array(pl.Float64, 2)),
            "shape": rng.choice(["round", "square", "odd"], rows),
            "value": rng.uniform(1, 5, rows),
            "note": [["not", "needed"]] * rows,
        }
    )


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> RankingModel:
    """What every folder holds in these tests."""
    made = RankingModel(click_model(), ByPrice(), "match")
    monkeypatch.setattr("urank.model_io.load_model", lambda folder: made)
    return made


@pytest.fixture
def urank() -> Callable[..., Any]:
    app = typer.Typer(rich_markup_mode="markdown")
    app.command("rank")(rank_command)

    @app.callback()
    def _options() -> None:
        pass

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["rank", *map(str, arguments)])

    return run


def refused(result: Any) -> str:
    """The sentence that `urank.cli.main` would print."""
    assert isinstance(result.exception, UrankError), result.output
    return str(result.exception)


@pytest.mark.parametrize("method", ["score", "match", "ctr1"])
@pytest.mark.parametrize("batch_bytes", [1, 3_000, 20_000, 2**25])
def test_the_file_is_what_rank_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: RankingModel,
    urank: Callable[..., Any],
    method: str,
    batch_bytes: int,
) -> None:
    candidates = some_candidates()
    expected = model.rank(candidates, method=method)  # type: ignore[arg-type]
    monkeypatch.setattr(reading, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", 2_000)
    candidates.write_parquet(tmp_path / "candidates.parquet", row_group_size=7)
    for number, part in enumerate(candidates.iter_slices(23)):
        (tmp_path / "parts").mkdir(exist_ok=True)
        part.write_parquet(tmp_path / "parts" / f"{number:02d}.parquet")
    for source in ("candidates.parquet", "parts"):
        flags = ("-o", tmp_path / "ranked.parquet", "--method", method, "--overwrite", "--json")
        result = urank("model", tmp_path / source, *flags)
        assert result.exit_code == 0, result.exception
        counts = json.loads(result.stdout)
        assert counts.pop("seconds") >= 0
        assert counts == {
            "lists": 40,
            "candidates": candidates.height,
            "kept": candidates.height,
            "method": method,
            "output": str(tmp_path / "ranked.parquet"),
        }
        assert_frame_equal(pl.read_parquet(tmp_path / "ranked.parquet"), expected, rel_tol=1e-5, abs_tol=1e-6)
    assert pq.ParquetFile(tmp_path / "ranked.parquet").num_row_groups > 1


def test_the_numbers_are_those_of_the_model(model: RankingModel) -> None:
    candidates = some_candidates()
    ranked = model.rank(candidates)
    assert ranked.schema == {
        "query_id": pl.Int64,
        "session_id": pl.String,
        "item_id": pl.Int64,
        "position": pl.Int32,
        "score": pl.Float32,
        "probability": pl.Float32,
        "utility": pl.Float32,
    }
    flat = candidates.with_columns(pl.col("emb").arr.get(i).alias(f"emb[{i}]") for i in (0, 1))
    offsets = reading.list_offsets(candidates)
    value = candidates["value"].to_numpy()
    table = np.exp(model.log_ctr(flat))
    for method in model.methods:
        position = model.order(flat, offsets, value=value, method=method)
        placed = position <= POSITIONS
        click = np.where(placed, table[np.arange(len(table)), np.minimum(position, POSITIONS) - 1], np.nan)
        expected = candidates.select(
            "query_id",
            "session_id",
            "item_id",
            position=pl.Series(position, dtype=pl.Int32),
            score=pl.Series(value - candidates["price"].to_numpy(), dtype=pl.Float32),
            probability=pl.Series(click, dtype=pl.Float32, nan_to_null=True),
            utility=pl.Series(np.where(placed, click * value, 0), dtype=pl.Float32),
        )
        lists = pl.Series(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)))
        expected = expected.with_columns(list=lists).sort("list", "position").drop("list")
        assert_frame_equal(model.rank(candidates, method=method), expected, rel_tol=1e-5)
    assert ranked["probability"].null_count() == ranked.filter(pl.col("position") > POSITIONS).height > 0
    assert ranked.equals(model.rank(candidates, method="match"))


def test_a_long_list_among_short_ones(model: RankingModel) -> None:
    long = some_candidates(60, seed=1).with_columns(query_id=pl.lit(-1, dtype=pl.Int64), session_id=pl.lit("long"))
    candidates = pl.concat([some_candidates(5), long, some_candidates(3).with_columns(pl.col("query_id") + 100)])
    alone = model.rank(long)
    assert alone.height == long.height > 250
    among = model.rank(candidates).filter(pl.col("query_id") == -1)
    assert_frame_equal(among, alone, rel_tol=1e-5, abs_tol=1e-6)


def test_values_decide(model: RankingModel) -> None:
    candidates = some_candidates().with_columns(value=1.0)
    dear = candidates.with_row_index().with_columns(value=pl.when(pl.col("index") % 5 == 0).then(1e6).otherwise(1.0))
    assert model.rank(candidates).equals(model.rank(candidates.drop("value")))
    first = model.rank(dear, top=1)
    rich = dear.filter(pl.col("value") > 1)["session_id"].unique()
    assert (first.filter(pl.col("session_id").is_in(rich.to_list()))["utility"] > 10).all()
    assert (first.filter(~pl.col("session_id").is_in(rich.to_list()))["utility"] <= 1).all()
    needs = RankingModel(model.clicks, ByPrice(takes_value=True))
    with pytest.raises(DataError, match="needs the column 'value', which is not there"):
        needs.rank(candidates.drop("value"))


def test_top_keeps_the_first(tmp_path: Path, model: RankingModel, urank: Callable[..., Any]) -> None:
    some_candidates().drop("note").write_parquet(tmp_path / "c.parquet")
    result = urank("model", tmp_path / "c.parquet", "-o", tmp_path / "top.parquet", "--top", 2)
    assert result.exit_code == 0, result.exception
    everything = model.rank(some_candidates())
    top = everything.filter(pl.col("position") <= 2)
    assert_frame_equal(pl.read_parquet(tmp_path / "top.parquet"), top)
    assert f"40 lists of {everything.height} candidates ({top.height} kept) ranked by match in" in result.stdout
    assert result.stdout.rstrip().endswith("top.parquet")
    with pytest.raises(ConfigError, match="top must be a whole number from 1 up; got 0"):
        model.rank(some_candidates(), top=0)


def test_other_forms_give_the_same(tmp_path: Path, model: RankingModel, urank: Callable[..., Any]) -> None:
    candidates = some_candidates().drop("note", "position", "click")
    expected = model.rank(candidates)
    grouped = candidates.group_by("query_id", "session_id", maintain_order=True).agg(pl.all())
    grouped.write_parquet(tmp_path / "grouped.parquet")
    renamed = candidates.rename({"query_id": "search", "value": "gain"})
    renamed.write_parquet(tmp_path / "renamed.parquet")
    flags: dict[str, tuple[object, ...]] = {"grouped": (), "renamed": ("-c", "query_id=search", "-c", "value=gain")}
    for name, more in flags.items():
        result = urank("model", tmp_path / f"{name}.parquet", "-o", tmp_path / "out" / f"{name}.pq", "-q", *more)
        assert (result.exit_code, result.output) == (0, ""), result.exception
        assert_frame_equal(pl.read_parquet(tmp_path / "out" / f"{name}.pq", glob=False), expected)
    places = [pl.col("emb").arr.get(i).alias(f"emb[{i}]") for i in (0, 1)]
    candidates.with_columns(places).drop("emb").write_csv(tmp_path / "c.csv")
    assert urank("model", tmp_path / "c.csv", "-o", tmp_path / "csv.parquet").exit_code == 0
    in_text = expected.with_columns(pl.col("query_id", "item_id").cast(pl.String))
    assert_frame_equal(pl.read_parquet(tmp_path / "csv.parquet"), in_text, rel_tol=1e-5, abs_tol=1e-6)
    assert_frame_equal(pl.DataFrame(model.rank(candidates.to_arrow())), expected)
    assert_frame_equal(model.rank(renamed, columns={"query_id": "search", "value": "gain"}), expected)


def test_one_list_without_a_query(model: RankingModel) -> None:
    candidates = some_candidates().select("item_id", "price", "emb", "shape")
    ranked = model.rank(candidates)
    assert ranked["position"].to_list() == list(range(1, candidates.height + 1))
    assert ranked.columns == ["item_id", "position", "score", "probability", "utility"]
    assert "score" not in RankingModel(model.clicks).rank(candidates).columns


def test_nothing_to_rank(tmp_path: Path, model: RankingModel, urank: Callable[..., Any]) -> None:
    some_candidates()[:0].write_parquet(tmp_path / "none.parquet")
    result = urank("model", tmp_path / "none.parquet", "-o", tmp_path / "ranked.parquet", "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["candidates"] == 0
    assert pl.read_parquet(tmp_path / "ranked.parquet").schema == model.rank(some_candidates()).schema


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.drop("query_id"), "has no column 'query_id'; name the one that plays this role: -c query_id=NAME"),
        (lambda c: c.drop("price"), "the model needs the feature 'price', which is not there: "),
        (lambda c: c.drop("emb"), "the model needs the feature 'emb[0]', which is not there: "),
        (lambda c: pl.concat([c, c[:1]]), "the candidates of a list must lie together; query "),
        (lambda c: c.with_columns(value=-1), "value must be a finite number from 0 up; got -1 at row 1 of "),
        (lambda c: c.with_columns(price=1 / (c["price"] - c["price"][-1])), "'price' must be finite or missing; got "),
    ],
)
@pytest.mark.parametrize("batch_bytes", [1, 2**25])
def test_a_refusal_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: RankingModel,
    urank: Callable[..., Any],
    change: Callable[[pl.DataFrame], pl.DataFrame],
    sentence: str,
    batch_bytes: int,
) -> None:
    monkeypatch.setattr(reading, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", 100)
    change(some_candidates()).write_parquet(tmp_path / "c.parquet")
    result = urank("model", tmp_path / "c.parquet", "-o", tmp_path / "a" / "ranked.parquet")
    assert sentence in refused(result)
    assert [path.name for path in tmp_path.iterdir()] == ["c.parquet"]


def with_positions(candidates: pl.DataFrame, seed: int = 7) -> pl.DataFrame:
    """The same with a current order, which has gaps."""
    chance = candidates.with_columns(position=pl.Series(np.random.default_rng(seed).random(candidates.height)))
    return chance.with_columns(position=2 * pl.col("position").rank("ordinal").over("session_id").cast(pl.Int64))


@pytest.mark.parametrize("method", ["score", "match", "ctr1"])
@pytest.mark.parametrize("guard", ["shift:0", "shift:2", "shift:9", "blend:0", "blend:0.5", "blend:1"])
def test_a_guard(model: RankingModel, method: Any, guard: str) -> None:
    candidates = with_positions(some_candidates()).with_columns(item_id=pl.int_range(pl.len()))
    free = model.rank(candidates, method=method)
    held = model.rank(candidates, method=method, guard=guard)
    assert held.schema == free.schema
    assert_frame_equal(model.rank(candidates, method=method, guard=Guard.parse(guard)), held)
    ranks = candidates.select("item_id", now=pl.col("position") // 2)
    moved = held.join(ranks, on="item_id").select((pl.col("position") - pl.col("now")).abs().max()).item()
    if guard in ("shift:9", "blend:1"):
        assert_frame_equal(held, free)
    else:
        assert moved <= {"shift:0": 0, "shift:2": 2, "blend:0": 0, "blend:0.5": 8}[guard]
    # Clicks and utilities are those of the positions that came out.
    flat = candidates.with_columns(pl.col("emb").arr.get(i).alias(f"emb[{i}]") for i in (0, 1))
    table = np.exp(model.log_ctr(flat))[held["item_id"].to_numpy()]
    placed = (held["position"] <= POSITIONS).to_numpy()
    click = table[np.arange(len(table)), np.minimum(held["position"].to_numpy(), POSITIONS) - 1]
    value = candidates["value"].to_numpy()[held["item_id"].to_numpy()]
    np.testing.assert_allclose(held["probability"].to_numpy()[placed], click[placed], rtol=1e-5)
    np.testing.assert_allclose(held["utility"], np.where(placed, click * value, 0), rtol=1e-5)


@pytest.mark.parametrize("batch_bytes", [1, 2**25])
def test_a_guard_on_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: RankingModel,
    urank: Callable[..., Any],
    batch_bytes: int,
) -> None:
    candidates = with_positions(some_candidates())
    expected = model.rank(candidates, guard="shift:1", top=3)
    monkeypatch.setattr(reading, "BATCH_BYTES", batch_bytes)
    candidates.rename({"position": "place"}).write_parquet(tmp_path / "c.parquet")
    flags = ("-o", tmp_path / "r.parquet", "--guard", "shift:1", "-c", "position=place", "--top", 3)
    result = urank("model", tmp_path / "c.parquet", *flags)
    assert result.exit_code == 0, result.exception
    assert " kept) ranked by match, shift 1 in " in result.stdout
    assert_frame_equal(pl.read_parquet(tmp_path / "r.parquet"), expected, rel_tol=1e-5, abs_tol=1e-6)
    result = urank("model", tmp_path / "c.parquet", *flags, "--overwrite", "--json")
    assert json.loads(result.stdout)["guard"] == "shift:1"


def test_guards_that_are_refused(tmp_path: Path, model: RankingModel, urank: Callable[..., Any]) -> None:
    some_candidates().write_parquet(tmp_path / "same.parquet")  # all are at position 1
    some_candidates().drop("position").write_parquet(tmp_path / "none.parquet")
    output = ("-o", tmp_path / "r.parquet", "--guard")
    for name, guard, sentence in (
        ("same", "shift:1", "a current position must occur once in a list; 1 comes again at row "),
        ("none", "shift:1", "has no column 'position'; name the one that plays this role: -c position=NAME"),
        ("same", "shift:x", "a guard is shift:PLACES, as shift:2, or blend:SHARE, as blend:0.5; got 'shift:x'"),
        ("same", "blend:3", "the level of a blend must be from 0 to 1; got 3"),
    ):
        assert sentence in refused(urank("model", tmp_path / f"{name}.parquet", *output, guard))
        assert not (tmp_path / "r.parquet").exists()
    [lists] = model.candidates(some_candidates()).lists()
    with pytest.raises(DataError, match="a guard needs the column 'position', the current rank of each candidate"):
        model.rank_lists(lists, guard="shift:1")


def test_outputs_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: RankingModel, urank: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    some_candidates().write_parquet("c.parquet")
    for output in ("ranked.csv", "ranked"):
        sentence = f"--output must name a Parquet file, ending in .parquet or .pq; got {output}"
        assert refused(urank("model", "c.parquet", "-o", output)) == sentence
    Path("there.parquet").write_text("precious")
    sentence = "there.parquet exists already; choose another name or pass --overwrite"
    assert refused(urank("model", "c.parquet", "-o", "there.parquet")) == sentence
    assert refused(urank("model", "c.parquet", "-o", "c.parquet", "--overwrite")).startswith("c.parquet holds the cand")
    assert refused(urank("model", "absent.parquet", "-o", "a.parquet")).startswith(
        "absent.parquet does not exist; give a "
    )
    assert Path("there.parquet").read_text() == "precious"
    some_candidates().with_columns(price=float("inf")).write_parquet("bad.parquet")
    assert "got inf at row 1 of bad.parquet" in refused(
        urank("model", "bad.parquet", "-o", "there.parquet", "--overwrite")
    )
    assert Path("there.parquet").read_text() == "precious"
    assert urank("model", "c.parquet", "-o", "there.parquet", "--overwrite").exit_code == 0
    assert pl.read_parquet("there.parquet").height == some_candidates().height


def test_flags_that_are_refused(tmp_path: Path, model: RankingModel, urank: Callable[..., Any]) -> None:
    some_candidates().write_parquet(tmp_path / "c.parquet")
    arguments = ("model", tmp_path / "c.parquet", "-o", tmp_path / "r.parquet")
    assert refused(urank(*arguments, "-c", "value")) == "--column takes ROLE=NAME, as position=rank; got 'value'"
    assert "'click' is not a role that a column of candidates" in refused(urank(*arguments, "-c", "click=clicked"))
    assert "has no column 'sum' (asked for as value)" in refused(urank(*arguments, "-c", "value=sum"))
    for flags in (("--top", 0), ("--method", "magic")):
        result = urank(*arguments, *flags)
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)


def test_a_method_that_the_model_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urank: Callable[..., Any]
) -> None:
    monkeypatch.setattr("urank.model_io.load_model", lambda folder: RankingModel(click_model()))
    some_candidates().write_parquet(tmp_path / "c.parquet")
    result = urank("model", tmp_path / "c.parquet", "-o", tmp_path / "r.parquet", "--method", "score")
    assert refused(result) == "this model ranks by match, ctr1; got 'score'"
    assert not (tmp_path / "r.parquet").exists()


def test_help(urank: Callable[..., Any]) -> None:
    text = urank("--help").stdout
    assert "Example:" in text
    assert "--json" in text
    assert "--top" in text


def test_a_saved_model(tmp_path: Path, urank: Callable[..., Any]) -> None:
    from urank.model_io import save_model
    from urank.ranking.ranking_settings import UrankConfig

    made = RankingModel(click_model())
    save_model(made, UrankConfig(), tmp_path / "model", onnx=False)
    some_candidates().write_parquet(tmp_path / "c.parquet")
    result = urank(tmp_path / "model", tmp_path / "c.parquet", "-o", tmp_path / "ranked.parquet")
    assert result.exit_code == 0, result.exception
    assert_frame_equal(pl.read_parquet(tmp_path / "ranked.parquet"), made.rank(some_candidates()))
    assert "is not a urank model" in refused(urank(tmp_path, tmp_path / "c.parquet", "-o", tmp_path / "r.parquet"))
