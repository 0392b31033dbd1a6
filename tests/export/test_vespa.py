"""`export_vespa`: profile, schema, vocabulary and graph name the same things, and a document gets the model's score."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.application import IDENTIFIER, Block, parse, tensor
from export.models import ALONE, CASES, FEATURIZERS, TREES, Case, K, build
from urank.errors import ConfigError, DataError
from urank.export import vespa as module
from urank.export.graph import ranking_graph
from urank.export.onnx import Export, random_rows
from urank.export.vespa import export_vespa, identifiers
from urank.ranking.ranking_model import RankingModel

Exported = Callable[[Case, str], Export]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
NAMES = {"price": "price", "emb[0]": "emb_0", "2nd rate": "f_2nd_rate", "shop": "shop", "if": "f_if"}


class Application:
    """An exported folder, read as Vespa would."""

    def __init__(self, folder: Path, schema: str = "item") -> None:
        self.schema = parse((folder / "schemas" / f"{schema}.sd").read_text(encoding="utf-8"))
        self.profile = parse((folder / "schemas" / schema / "urank.profile").read_text(encoding="utf-8"))
        self.model = self.profile["onnx-model urank"]
        (path,) = [line.partition(":")[2].strip() for line in self.model.lines if line.startswith("file:")]
        self.session = onnxruntime.InferenceSession(str(folder / path), providers=["CPUExecutionProvider"])
        self.vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))

    @property
    def fields(self) -> dict[str, str]:
        """Names and types."""
        (document,) = self.schema.blocks
        found = [re.fullmatch(rf"field ({IDENTIFIER}) type (float|int)", block.head) for block in document.blocks]
        assert all(block.lines == ["indexing: attribute | summary"] for block in document.blocks)
        return {each[1]: each[2] for each in found if each is not None}

    @property
    def functions(self) -> dict[str, Block]:
        return {
            block.head.removeprefix("function ").removesuffix("()"): block
            for block in self.profile.starting("function")
        }

    def mapping(self, word: str) -> dict[str, str]:
        """The inputs, or outputs, of the graph and what they are in Vespa."""
        found = [re.fullmatch(rf'{word} "(\w+)": ({IDENTIFIER})', line) for line in self.model.lines]
        return {each[1]: each[2] for each in found if each is not None}

    def rank(self, document: dict[str, float], query: dict[str, float]) -> dict[str, Any]:
        """The outputs of the graph for a document."""
        kinds = {value.name: np.int64 if "int64" in value.type else np.float32 for value in self.session.get_inputs()}
        inputs = {
            name: tensor(self.functions[function].expression, document, query).astype(kinds[name])
            for name, function in self.mapping("input").items()
        }
        names = list(self.mapping("output"))
        return dict(zip(names, self.session.run(names, inputs), strict=True))

    def document(self, row: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
        """A raw row as it is fed: nothing for what is missing, the number of a category, 0 for an unknown one."""
        known = {names.get(name, name): value for name, value in row.items() if value is not None}
        return {
            name: self.vocabulary[name].get(value, 0) if name in self.vocabulary else float(value)
            for name, value in known.items()
        }


@each_case
def test_a_document_gets_what_the_model_gives(case: Case, exported: Exported) -> None:
    application = Application(exported(case, "vespa").target)
    model = build(case)
    rows = random_rows(model.clicks.featurizer, np.random.default_rng(3), 25)
    for row in rows.to_dicts():
        alone = pl.DataFrame([row], schema=rows.schema)
        found = application.rank(application.document(row, NAMES), {})
        expected = model.log_ctr(alone)
        np.testing.assert_allclose(found["log_ctr"], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["ctr1"], row["value"] * np.exp(expected[:, 0]), rtol=1e-4)
        if case.scorer is not None:
            np.testing.assert_allclose(found["score"], model.score(alone), rtol=1e-4, atol=1e-5)


@each_case
def test_an_empty_document(case: Case, exported: Exported) -> None:
    """Everything is missing, and a click is worth 1."""
    model = build(case)
    names = model.clicks.featurizer.names
    texts = {each.name for each in model.clicks.featurizer.categorical}
    schema = {name: pl.String if name in texts else pl.Float32 for name in names}
    nothing = pl.DataFrame([dict.fromkeys(names)], schema=schema)
    found = Application(exported(case, "vespa").target).rank({}, {})
    np.testing.assert_allclose(found["log_ctr"], model.log_ctr(nothing), rtol=1e-4, atol=1e-5)
    if case.scorer is not None:
        np.testing.assert_allclose(found["score"], model.score(nothing, np.ones(1)), rtol=1e-4, atol=1e-5)


@each_case
def test_everything_named_is_there(case: Case, exported: Exported) -> None:
    export = exported(case, "vespa")
    application = Application(export.target)
    session, functions = application.session, application.functions
    assert application.profile.head == "rank-profile urank inherits default"
    assert application.schema.head == "schema item"
    assert application.schema.blocks[0].head == "document item"
    # Inputs: each of the graph is fed by a function whose tensor has its shape, rows being 1.
    inputs = {value.name: value.shape for value in session.get_inputs()}
    assert set(application.mapping("input")) == set(inputs)
    for name, function in application.mapping("input").items():
        shape = tensor(functions[function].expression, {}, {}).shape
        assert shape == tuple(1 if each == "rows" else each for each in inputs[name])
    # Outputs: each that an expression names is declared, and is one of the graph.
    declared = application.mapping("output")
    assert list(declared) == [value.name for value in session.get_outputs()]
    used = set(re.findall(r"onnx\(urank\)\.(\w+)", " ".join(block.expression for block in functions.values())))
    assert used <= set(declared.values())
    assert ("score" if case.scorer is not None else "ctr1") in used
    # Fields: each attribute is one, and none is there for nothing.
    expressions = " ".join(block.expression for block in functions.values())
    attributes = set(re.findall(r"attribute\((\w+)\)", expressions))
    assert attributes == set(application.fields)
    assert re.findall(r"query\(", expressions) == []
    # Functions: the phase and the match features name those that are there.
    assert application.profile["second-phase"].expression in functions
    assert application.profile["match-features"].lines == ["urank_score", "urank_clicks"]
    assert {"urank_score", "urank_clicks"} <= set(functions)
    assert set(application.vocabulary) == {name for name, kind in application.fields.items() if kind == "int"}


def test_names_that_vespa_cannot_have(exported: Exported) -> None:
    export = exported(TREES, "vespa")
    assert export.renamed == {"emb[0]": "emb_0", "2nd rate": "f_2nd_rate", "if": "f_if"}
    assert Application(export.target).fields == {
        "price": "float",
        "emb_0": "float",
        "f_2nd_rate": "float",
        "shop": "int",
        "f_if": "int",
        "value": "float",
    }
    readme = (export.target / "README.md").read_text(encoding="utf-8")
    assert "| 2nd rate | `f_2nd_rate` | document | number |" in readme
    assert "| if | `f_if` | document | code of vocabulary.json |" in readme
    inputs = json.loads((export.target / "inputs.json").read_text(encoding="utf-8"))["inputs"]
    assert inputs["categorical"]["features"][1] == {"feature": "if", "name": "f_if", "from": "document"}


def test_the_vocabulary_and_the_documents(exported: Exported) -> None:
    export = exported(TREES, "vespa")
    application = Application(export.target)
    assert application.vocabulary["shop"] == {"a": 1, "b": 2, "ä c": 3}
    lines = [json.loads(line) for line in (export.target / "feed.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["put"] for line in lines] == ["id:item:item::1", "id:item:item::2"]
    assert set(lines[0]["fields"]) == set(application.fields)
    assert lines[0]["fields"]["price"] == round(np.expm1(3.0), 3)  # the mean of its log
    for line in lines:
        assert all(np.isfinite(each).all() for each in application.rank(line["fields"], {}).values())


def test_features_of_the_query(tmp_path: Path) -> None:
    export = export_vespa(build(TREES), tmp_path / "app", schema="product", query_features=["price", "shop"])
    application = Application(tmp_path / "app", "product")
    assert application.profile["inputs"].lines == ["query(price) double", "query(shop) double"]
    assert set(application.fields) == {"emb_0", "f_2nd_rate", "f_if", "value"}
    assert application.schema.head == "schema product"
    rows = random_rows(FEATURIZERS["both"], np.random.default_rng(1)).drop_nulls()[:10]
    for row in rows.to_dicts():
        document = application.document(row, NAMES)
        query = {name: document.pop(name) for name in ("price", "shop")}
        found = application.rank(document, query)
        expected = build(TREES).score(pl.DataFrame([row], schema=rows.schema))
        np.testing.assert_allclose(found["score"], expected, rtol=1e-4, atol=1e-5)
    columns = export.content["inputs"]["numeric"]["features"]
    assert [column["from"] for column in columns] == ["query", "document", "document"]
    assert "query" not in (tmp_path / "app" / "feed.jsonl").read_text()


def test_what_is_refused(tmp_path: Path) -> None:
    for schema in ("", "2nd", "a-b", "a b", "ä"):
        with pytest.raises(ConfigError, match=f"schema must be letters, digits and underscores .*; got '{schema}'"):
            export_vespa(build(ALONE), tmp_path / "app", schema=schema)
    with pytest.raises(ConfigError, match="query_features must be features of the model; 'size' is not"):
        export_vespa(build(ALONE), tmp_path / "app", query_features=["price", "size"])
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_is_not_the_model_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ranking_graph", lambda model, **how: ranking_graph(build(ALONE, seed=1), **how))
    with pytest.raises(DataError, match="the exported graph differs from the model"):
        export_vespa(build(ALONE), tmp_path / "app")
    assert list(tmp_path.iterdir()) == []


def test_again_and_again(tmp_path: Path) -> None:
    export = export_vespa(build(ALONE), tmp_path / "app")
    written = {path.relative_to(export.target).as_posix() for path in export.target.rglob("*") if path.is_file()}
    assert written == set(export.files)
    before = {name: (export.target / name).read_bytes() for name in written}
    with pytest.raises(ConfigError, match="exists already"):
        export_vespa(build(ALONE), tmp_path / "app")
    export_vespa(build(ALONE), tmp_path / "app", overwrite=True)
    assert {name: (export.target / name).read_bytes() for name in written} == before
    assert export.content["positions"] == K
    assert export.content["ranked_by"] == "ctr1"


def test_a_feature_whose_name_spans_lines(tmp_path: Path) -> None:
    """Nothing of a name reaches the texts but as an identifier or within a comment of one line."""
    from dataclasses import replace

    from urank.learning.features import Featurizer, Numeric

    model = build(ALONE)
    numbers = tuple(
        Numeric(f"{each.name}\n}} field evil", each.mean, each.std, True) for each in FEATURIZERS["numbers"].numeric
    )
    clicks = replace(model.clicks, featurizer=Featurizer(numbers, ()))
    export_vespa(RankingModel(clicks), tmp_path / "app")
    assert sorted(Application(tmp_path / "app").fields) == sorted(
        ["price_field_evil", "emb_0_field_evil", "f_2nd_rate_field_evil", "value"]
    )


some_names = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(["a b", "a.b", "A_b", "if", "IF", "f_if", "1", ""])), unique=True
)


@given(some_names, st.sets(st.sampled_from(["if", "value", "f_if", "a_b"])))
def test_all_are_valid_distinct_and_free(some: list[str], taken: set[str]) -> None:
    found = identifiers(some, taken)
    assert list(found) == some
    assert all(re.fullmatch(IDENTIFIER, name) for name in found.values())
    lowered = [name.lower() for name in found.values()]
    assert len(set(lowered)) == len(lowered)
    assert not set(lowered) & taken
    assert identifiers(some, taken) == found


@given(st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), unique=True))
def test_what_is_an_identifier_stays(some: list[str]) -> None:
    assert identifiers(some) == {name: name for name in some}


def test_a_name_that_can_stay_is_not_taken_away() -> None:
    assert identifiers(["emb[0]", "emb_0"]) == {"emb[0]": "emb_0_2", "emb_0": "emb_0"}
    assert identifiers(["Price", "price"]) == {"Price": "Price", "price": "f_price"}
