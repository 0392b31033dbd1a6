"""`export_onnx`: a described folder or file, written atomically, that only replaces its own kind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from export.models import ALONE, CASES, FEATURIZERS, TREES, Case, K, build
from urank.errors import ConfigError, DataError
from urank.export import onnx as module
from urank.export.graph import ranking_graph
from urank.export.onnx import Export, export_onnx
from urank.export.vespa import export_vespa

Exported = Callable[[Case, str], Export]
FILES = ["README.md", "inputs.json", "urank.onnx"]


def test_what_the_folder_tells(exported: Exported) -> None:
    export = exported(TREES, "onnx")
    assert sorted(path.name for path in export.target.iterdir()) == FILES == sorted(export.files)
    content = json.loads((export.target / "inputs.json").read_text(encoding="utf-8"))
    assert content == export.content
    assert (content["format"], content["kind"], content["positions"]) == ("urank export", "onnx", K)
    assert content["model"] == {"name": "trees on gbdt", "method": "score"}
    assert content["opsets"] == {"ai.onnx": 20, "ai.onnx.ml": 5}
    assert content["least_onnxruntime"] == "1.23"
    assert content["inputs"] == {
        "numeric": {
            "type": "float32",
            "shape": ["rows", 3],
            "features": ["price", "emb[0]", "2nd rate"],
            "missing": "NaN",
        },
        "categorical": {
            "type": "string",
            "shape": ["rows", 2],
            "features": ["shop", "if"],
            "vocabulary_sizes": [3, 7],
            "missing": "",
        },
        "value": {"type": "float32", "shape": ["rows"], "default": 1.0},
    }
    assert [(name, each["shape"]) for name, each in content["outputs"].items()] == [
        ("score", ["rows"]),
        ("log_ctr", ["rows", K]),
        ("ctr1", ["rows"]),
    ]
    assert export.renamed == {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_graph_tells_the_same(case: Case, exported: Exported) -> None:
    export = exported(case, "onnx")
    proto = onnx.load(export.target / "urank.onnx")
    (entry,) = proto.metadata_props
    assert (entry.key, json.loads(entry.value)) == ("urank", export.content)
    trees = case.scorer == "trees" or "t" in case.clicks
    assert export.content["least_onnxruntime"] == ("1.23" if trees else "1.19")
    assert list(export.content["inputs"]) == [value.name for value in proto.graph.input]
    assert list(export.content["outputs"]) == [value.name for value in proto.graph.output]


@pytest.mark.parametrize("case", [TREES, ALONE], ids=str)
def test_the_example_of_the_readme_runs(case: Case, exported: Exported) -> None:
    export = exported(case, "onnx")
    (example,) = re.findall(r"```python\n(.*?)```", (export.target / "README.md").read_text(encoding="utf-8"), re.S)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=export.target, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(export.content["outputs"])


def test_a_file(tmp_path: Path, exported: Exported) -> None:
    export = export_onnx(build(ALONE), tmp_path / "new" / "ranker.onnx")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ranker.onnx"] == list(export.files)
    folder = exported(ALONE, "onnx")
    assert (tmp_path / "new" / "ranker.onnx").read_bytes() == (folder.target / "urank.onnx").read_bytes()
    with pytest.raises(ConfigError, match=r"ranker\.onnx exists already; choose another name or pass --overwrite"):
        export_onnx(build(ALONE), tmp_path / "new" / "ranker.onnx")
    before = (tmp_path / "new" / "ranker.onnx").read_bytes()
    export_onnx(build(ALONE, seed=1), tmp_path / "new" / "ranker.onnx", overwrite=True)
    assert (tmp_path / "new" / "ranker.onnx").read_bytes() != before


@pytest.mark.parametrize("name", ["deep/folder", "deep/file.onnx"])
def test_a_graph_that_is_not_the_model_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ranking_graph", lambda model, **how: ranking_graph(build(ALONE, seed=1), **how))
    with pytest.raises(DataError, match="the exported graph differs from the model"):
        export_onnx(build(ALONE), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_onnx(build(ALONE), tmp_path / "there")
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}

    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("urank.export.onnx.check_graph", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        export_onnx(build(ALONE, seed=1), tmp_path / "there", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_only_an_export_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    export_onnx(build(ALONE), tmp_path / "there")
    with pytest.raises(ConfigError, match="exists already; choose another name or pass --overwrite"):
        export_onnx(build(ALONE), tmp_path / "there")
    with pytest.raises(ConfigError, match=r"its inputs\.json is not that of an export for vespa"):
        export_vespa(build(ALONE), tmp_path / "there", overwrite=True)
    export_onnx(build(ALONE, seed=1), tmp_path / "there", overwrite=True)
    for content in ("[]", "not json", '{"format": "another"}'):
        (tmp_path / "there" / "inputs.json").write_text(content)
        with pytest.raises(ConfigError, match="is not that of an export for onnx"):
            export_onnx(build(ALONE), tmp_path / "there", overwrite=True)
    (tmp_path / "there" / "inputs.json").unlink()
    with pytest.raises(ConfigError, match=r"holds something else \(it has no inputs\.json\)"):
        export_onnx(build(ALONE), tmp_path / "there", overwrite=True)
    assert (tmp_path / "there" / "urank.onnx").is_file()


def test_facts_are_told(tmp_path: Path) -> None:
    export = export_onnx(build(ALONE), tmp_path / "there", facts={"trained_by": "urank 9"})
    assert export.content["model"] == {"name": "gbdt", "method": "match", "trained_by": "urank 9"}
    assert "categorical" not in export.content["inputs"]
    assert len(FEATURIZERS["numbers"].numeric) == export.content["inputs"]["numeric"]["shape"][1]
