"""`urank examination`: a table for people, JSON for machines, a file for `urank train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest

from propensity.logs import STEEPNESS, shuffled
from urank.propensity.cpbm import Contextual
from urank.propensity.examination import ExaminationCurve
from urank.propensity.methods import load_propensity
from urank.propensity.randomised import ByCategory

if TYPE_CHECKING:
    from cli.conftest import Command
    from simulated import Small


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Swaps in all lists."""
    from simulated import make

    folder = tmp_path_factory.mktemp("propensity")
    settings = {"queries": 150, "sessions": 6, "features": 4, "positions": 4, "candidates": 4, "epsilon": 0.5}
    return make(folder, user="pbm", randomise="swap", randomise_share=0.9, **settings)


def test_table_and_file(command: Command, log: Small, tmp_path: Path) -> None:
    ended = command("examination", "randomised", log.dataset.folder, "-o", tmp_path / "curve.json")
    assert ended.code == 0, ended
    head, first, *rest = ended.stdout.splitlines()
    assert head.split() == ["position", "examination", "standard", "error"]
    assert first.split() == ["1", "1.000", "0.000", "█" * 12]
    assert [line.split()[0] for line in rest[:3]] == ["2", "3", "4"]
    assert rest[-1] == f"The examination is in {tmp_path / 'curve.json'}"
    curve = load_propensity(tmp_path / "curve.json")
    assert isinstance(curve, ExaminationCurve)
    assert curve.name == "randomised"


def test_policies(command: Command, log: Small) -> None:
    chosen = ("examination", "randomised", log.dataset.folder, "--json", "--randomised")
    all_lists = json.loads(command(*chosen[:-1]).stdout)
    one = json.loads(command(*chosen, "policy=logger-1+swap").stdout)
    both = json.loads(command(*chosen, "policy=logger-1+swap", "--randomised", "policy=logger-2+swap").stdout)
    assert both == all_lists
    assert one["examination"] != both["examination"]
    assert one["error"][1] > both["error"][1]


def test_raw_logs_are_prepared_first(command: Command, log: Small) -> None:
    ended = command("examination", "harvest", log.folder / "log.parquet", "--drop", "f1", "--json")
    told = json.loads(ended.stdout)
    assert told["method"] == "harvest"
    assert len(told["examination"]) == 4
    assert told["error"] is None


def test_context(command: Command, log: Small, tmp_path: Path) -> None:
    ended = command("examination", "cpbm", log.dataset.folder, "--seed", 1, "-o", tmp_path / "model")
    assert ended.code == 0, ended
    assert ended.stdout.splitlines()[0].split() == ["position", "examination", "10", "%", "90", "%"]
    model = load_propensity(tmp_path / "model")
    assert isinstance(model, Contextual)
    assert model.config.seed == 1


@pytest.fixture(scope="module")
def shuffles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shuffled lists of items of three categories."""
    path = tmp_path_factory.mktemp("categories") / "log.parquet"
    shuffled(1, 3000).write_parquet(path)
    return path


def test_categories(command: Command, shuffles: Path, tmp_path: Path) -> None:
    asked = ("examination", "randomised", shuffles, "--by", "category")
    ended = command(*asked, "-o", tmp_path / "curves.json")
    assert ended.code == 0, ended
    head, first, *rest = ended.stdout.splitlines()
    assert head.split() == ["position", "overall", *sorted(STEEPNESS)]
    assert first.split() == ["1", "1.000", "1.000", "1.000", "1.000"]
    assert rest[-1] == f"The examination is in {tmp_path / 'curves.json'}"
    saved = load_propensity(tmp_path / "curves.json")
    assert isinstance(saved, ByCategory)
    assert rest[0].split() == ["2", *(f"{c.values[1]:.3f}" for c in (saved.overall, *saved.curves.values()))]
    told = json.loads(command(*asked, "--json").stdout)
    assert (told["method"], told["column"]) == ("randomised by category", "category")
    assert {name: tuple(each["examination"]) for name, each in told["categories"].items()} == {
        name: curve.values for name, curve in saved.curves.items()
    }
    assert tuple(told["overall"]["error"]) == saved.overall.errors


def test_many_categories_are_summed_up(command: Command, tmp_path: Path) -> None:
    shuffled(1, 6000, steepness={f"c{c:02}": 1.0 for c in range(13)}).write_parquet(tmp_path / "log.parquet")
    asked = ("examination", "randomised", tmp_path / "log.parquet", "--by", "category")
    assert command(*asked).stdout.splitlines()[0].split() == ["position", "examination", "10", "%", "90", "%"]
    told = json.loads(command(*asked, "--json").stdout)
    assert len(told["categories"]) == 13
    assert all(low <= high for low, high in zip(told["p10"], told["p90"], strict=True))


def test_a_ranker_learns_from_clicks_weighed_by_category(command: Command, shuffles: Path, tmp_path: Path) -> None:
    assert command("examination", "randomised", shuffles, "--by", "category", "-o", tmp_path / "c").code == 0
    (tmp_path / "quick.toml").write_text(
        "[clicks]\nfamilies = ['pbm']\n[clicks.training]\nepochs = 1\n[scorer.training]\nepochs = 1\n"
    )
    train = ("train", "--ranker", "lambdarank", "--examination", tmp_path / "c", "--config", tmp_path / "quick.toml")
    ended = command(*train, shuffles, "-o", tmp_path / "model", "--no-onnx", "--quiet")
    assert ended.code == 0, ended
    pl.read_parquet(shuffles).drop("category").write_parquet(tmp_path / "bare.parquet")
    assert "has no column 'category'" in command(*train, tmp_path / "bare.parquet", "-o", tmp_path / "no").refusal


def test_quiet(command: Command, log: Small) -> None:
    ended = command("examination", "em", log.dataset.folder, "--quiet")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")


def test_refusals(command: Command, log: Small, tmp_path: Path) -> None:
    folder = log.dataset.folder
    assert command("examination", "magic", folder).refusal == (
        "the method must be one of randomised, harvest, cpbm, em; got 'magic'"
    )
    assert "is prepared already" in command("examination", "em", folder, "--drop", "f1").refusal
    assert "--randomised can only be used" in command("examination", "em", folder, "--randomised", "policy=a").refusal
    assert "got 'a'" in command("examination", "randomised", folder, "--randomised", "policy=a").refusal
    assert "got 'a'" in command("examination", "randomised", folder, "--by", "a").refusal
    assert "--by can only be used" in command("examination", "em", folder, "--by", "a").refusal
    assert "nowhere" in command("examination", "em", tmp_path / "nowhere").refusal
    refused = command("examination", "harvest", folder, "-o", tmp_path).refusal
    assert refused == f"{tmp_path} is a folder; a file name is needed"
