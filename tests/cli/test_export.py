"""`urank export`: one of two kinds, told in a few lines or as JSON; what is refused leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from export.models import ALONE, TREES, build
from urank.cli.model import export_command
from urank.errors import UrankError
from urank.model_io import save_model
from urank.ranking.ranking_settings import UrankConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trees that score and trees that know of clicks."""
    folder = tmp_path_factory.mktemp("export") / "model"
    save_model(build(TREES), UrankConfig(method="score"), folder, onnx=False)
    return folder


@pytest.fixture
def urank() -> Callable[..., Any]:
    app = typer.Typer(rich_markup_mode="markdown")
    app.command("export")(export_command)

    @app.callback()
    def _options() -> None:
        pass

    return lambda *arguments: CliRunner().invoke(app, ["export", *map(str, arguments)])


def refused(result: Any) -> str:
    """The sentence that `urank.cli.main` would print."""
    assert isinstance(result.exception, UrankError), result.output
    return str(result.exception)


def test_onnx(saved: Path, tmp_path: Path, urank: Callable[..., Any]) -> None:
    result = urank(saved, "--onnx", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    written, gives = result.stdout.splitlines()
    assert written == f"trees on gbdt written to {tmp_path / 'out'}: urank.onnx, inputs.json, README.md"
    assert gives.startswith("The graph outputs score, log_ctr, ctr1; it differs from the model by ")
    content = json.loads((tmp_path / "out" / "inputs.json").read_text())
    assert content["model"]["trained_by"] == f"urank {content['urank']}"
    result = urank(saved, "--onnx", tmp_path / "one.onnx", "--json")
    told = json.loads(result.stdout)
    assert (told["output"], told["files"]) == (str(tmp_path / "one.onnx"), ["one.onnx"])
    assert told["difference"] < 1e-5
    assert told["inputs"] == content["inputs"]


def test_vespa(saved: Path, tmp_path: Path, urank: Callable[..., Any]) -> None:
    flags = ("--vespa", tmp_path / "app", "--schema", "product", "--query-feature", "price")
    result = urank(saved, *flags)
    assert result.exit_code == 0, result.exception
    assert "emb[0] is called emb_0 there" in result.stdout.splitlines()
    assert "query(price) double" in (tmp_path / "app" / "schemas" / "product" / "urank.profile").read_text()
    assert refused(urank(saved, *flags)).endswith("exists already; choose another name or pass --overwrite")
    result = urank(saved, *flags, "--overwrite", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    told = json.loads(urank(saved, "--vespa", tmp_path / "other", "--json").stdout)
    assert (told["kind"], told["schema"], told["ranked_by"]) == ("vespa", "item", "score")


def test_a_model_that_ranks_by_match(tmp_path: Path, urank: Callable[..., Any]) -> None:
    save_model(build(ALONE), UrankConfig(ranker="none"), tmp_path / "model", onnx=False)
    result = urank(tmp_path / "model", "--onnx", tmp_path / "out")
    assert "The model itself ranks by match, which needs whole lists" in result.stdout
    assert "The graph outputs log_ctr, ctr1" in result.stdout


def test_what_is_refused(saved: Path, tmp_path: Path, urank: Callable[..., Any]) -> None:
    out = tmp_path / "out"
    assert refused(urank(saved)) == "give one of --onnx and --vespa; got neither"
    assert refused(urank(saved, "--onnx", out, "--vespa", out)) == "give one of --onnx and --vespa; got both"
    for flags in (("--schema", "a"), ("--query-feature", "price")):
        assert refused(urank(saved, "--onnx", out, *flags)) == "--schema and --query-feature belong to --vespa"
    for model, sentence in ((tmp_path / "absent", "is not a urank model"), (tmp_path, "is not a urank model")):
        for kind in ("--onnx", "--vespa"):
            assert sentence in refused(urank(model, kind, out))
    assert "'size' is not" in refused(urank(saved, "--vespa", out, "--query-feature", "size"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("kept")
    assert "holds something else" in refused(urank(saved, "--onnx", tmp_path / "full", "--overwrite"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "precious"]


def test_a_damaged_model(tmp_path: Path, urank: Callable[..., Any]) -> None:
    save_model(build(TREES), UrankConfig(method="score"), tmp_path / "model", onnx=False)
    (tmp_path / "model" / "scorer.txt").write_text("garbage")
    assert "is damaged and cannot be loaded" in refused(urank(tmp_path / "model", "--onnx", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_help(urank: Callable[..., Any]) -> None:
    text = urank("--help").stdout
    assert "Example:" in text
    assert "--vespa" in text
