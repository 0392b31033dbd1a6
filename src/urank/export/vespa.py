"""A model for Vespa: the graph, a rank profile that feeds it, the fields that the profile reads, and the vocabularies.

    models/urank.onnx               the graph; Vespa has no text tensors, so categories are numbers
    schemas/<schema>/urank.profile  the rank profile
    schemas/<schema>.sd             a schema with the fields of the features, to copy them from
    inputs.json                     which feature is which field, and what the graph takes
    vocabulary.json                 field -> text -> number, for whoever feeds documents
    feed.jsonl                      two documents

The profile ranks in the second phase by `score`, or by `ctr1` when the model has no scorer. An order by `match` needs
the whole list; the click probabilities are match features for whoever makes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.export.bundle import Export, check_graph, describe, export_folder, numeric_feed, raw_number, write_json
from urank.export.graph import CTR1, SCORE, VALUE, coded_graph
from urank.learning.features import Featurizer
from urank.ranking.ranking_model import RankingModel

__all__ = [
    "Field",
    "export_vespa",
    "fields_of",
    "identifiers",
    "is_identifier",
    "profile_text",
    "readme_text",
    "schema_text",
]


def is_identifier(name: str) -> bool:
    """Whether it is letters, digits and underscores of ASCII, not starting with a digit."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def identifiers(names: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """An identifier for each name, the name itself where it is one; no two differ in case alone.

    Args:
        names: distinct.
        taken: identifiers that none of them may have.

    >>> identifiers(["price", "emb[0]", "2nd", "Größe", "if"], taken=["if"])
    {'price': 'price', 'emb[0]': 'emb_0', '2nd': 'f_2nd', 'Größe': 'Gr_e', 'if': 'f_if'}
    >>> identifiers(["a b", "a.b", "A_B"])
    {'a b': 'a_b_2', 'a.b': 'a_b_3', 'A_B': 'A_B'}
    """
    refused = {each.lower() for each in taken}
    kept: dict[str, str] = {}
    for name in names:  # names that can stay come first, so that no other takes them away
        if is_identifier(name) and name.lower() not in refused:
            kept[name] = name
            refused.add(name.lower())
    for name in names:
        if name not in kept:
            kept[name] = _free(name, refused)
            refused.add(kept[name].lower())
    return {name: kept[name] for name in names}


def _free(name: str, refused: Collection[str]) -> str:
    """An identifier like the name that is not refused."""
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    if not is_identifier(plain) or plain == name:
        plain = f"f_{plain}".rstrip("_")
    found, number = plain, 2
    while found.lower() in refused:
        found, number = f"{plain}_{number}", number + 1
    return found


@dataclass(frozen=True)
class Field:
    """Where the profile finds a feature.

    Attributes:
        feature: its name in the model.
        name: its name in Vespa.
        kind: `float`, or `int` for the number of a category.
        in_query: whether it comes with the query and not with the document.
    """

    feature: str
    name: str
    kind: str
    in_query: bool

    @property
    def expression(self) -> str:
        """Its value in a ranking expression.

        >>> Field("price", "price", "float", False).expression
        'attribute(price)'
        >>> Field("shop", "shop", "int", False).expression
        'if(isNan(attribute(shop)) == 1, 0, attribute(shop))'
        """
        if self.in_query:
            return f"query({self.name})"
        return f"attribute({self.name})" if self.kind == "float" else _or_else(self.name, 0)


def fields_of(fields: Sequence[Field], kind: str) -> list[Field]:
    """Those of a kind."""
    return [field for field in fields if field.kind == kind]


def schema_text(schema: str, fields: Sequence[Field]) -> str:
    """A schema with an attribute for each feature of the document, and one for the value of a click."""
    stored = [field for field in fields if not field.in_query]
    blocks = [_field_text(field.name, field.kind, _note(field)) for field in stored]
    blocks.append(_field_text("value", "float", "what a click is worth; 1 where it is left out"))
    return f"schema {schema} {{\n\n    document {schema} {{\n\n" + "\n".join(blocks) + "\n    }\n}\n"


def _note(field: Field) -> str:
    if field.kind == "int":
        return f"{_plain(field.feature)}: its number in vocabulary.json; 0, or left out, where it is not there"
    return _plain(field.feature) if field.feature != field.name else ""


def _plain(text: str) -> str:
    """A name as a comment can hold it, which ends with the line."""
    return " ".join(text.split())


def _field_text(name: str, kind: str, note: str) -> str:
    comment = f"        # {note}\n" if note else ""
    return f"{comment}        field {name} type {kind} {{\n            indexing: attribute | summary\n        }}\n"


def profile_text(fields: Sequence[Field], outputs: Sequence[str], ranked_by: str, graph: str, name: str) -> str:
    """The rank profile.

    Args:
        fields: of the features, in the order of the graph.
        outputs: of the graph.
        ranked_by: the output that the second phase ranks by.
        graph: where the graph is in the application.
        name: what the model is made of.
    """
    numbers, codes = fields_of(fields, "float"), fields_of(fields, "int")
    asked = [field for field in fields if field.in_query]
    tensors = {
        **({"numeric": _matrix(numbers)} if numbers else {}),
        **({"categorical": _matrix(codes)} if codes else {}),
        "value": ["tensor<float>(d0[1]):[" + _or_else("value", 1) + "]"],
    }
    model = [
        f"file: {graph}",
        *(f'input "{each}": urank_{each}' for each in tensors),
        *(f'output "{each}": {each}' for each in outputs),
    ]
    parts = [
        *([_block("inputs", [f"query({field.name}) double" for field in asked])] if asked else []),
        _block("onnx-model urank", model),
        *(_function(f"urank_{each}", lines) for each, lines in tensors.items()),
        _function("urank_score", [f"sum(onnx(urank).{ranked_by})"]),
        _function("urank_clicks", ["exp(reduce(onnx(urank).log_ctr, sum, d0))"]),
        _block("second-phase", ["expression: urank_score"]),
        _block("match-features", ["urank_score", "urank_clicks"]),
    ]
    head = f"# {_plain(name)}, exported by urank {version('urank')}\nrank-profile urank inherits default {{"
    return "\n\n".join([head, *parts]) + "\n}\n"


def _matrix(fields: Sequence[Field]) -> list[str]:
    """A tensor of one row, a line for each feature."""
    cells = [f"    {field.expression}," for field in fields]
    return [f"tensor<float>(d0[1],d1[{len(fields)}]):[[", *cells[:-1], cells[-1].rstrip(","), "]]"]


def _or_else(name: str, number: int) -> str:
    """An attribute, or a number where a document leaves it out."""
    return f"if(isNan(attribute({name})) == 1, {number}, attribute({name}))"


def _function(name: str, lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return _block(f"function {name}()", [f"expression: {lines[0]}"])
    return _block(f"function {name}()", ["expression {", *(f"    {line}" for line in lines), "}"])


def _block(head: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return f"    {head} {{\n{body}\n    }}"


def readme_text(content: Mapping[str, Any], fields: Sequence[Field]) -> str:
    """What to do with the folder."""
    schema = content["schema"]
    rows = [
        f"| {_cell(field.feature)} | `{field.name}` | {'query' if field.in_query else 'document'} | "
        f"{'number of vocabulary.json' if field.kind == 'int' else 'number'} |"
        for field in fields
    ]
    return _README.format(
        name=content["model"]["name"],
        urank=content["urank"],
        runtime=content["least_onnxruntime"],
        schema=schema,
        positions=content["positions"],
        ranked_by="its score" if content["ranked_by"] == "score" else "value · P(click at position 1)",
        rows="\n".join(rows),
    )


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


_README = """\
# {name}, for Vespa

Exported by urank {urank}, for a Vespa with ONNX Runtime {runtime} or newer. Vespa itself was not run: the graph was
checked in ONNX Runtime, the texts were written by Vespa's reference.

1. Copy `models/` and `schemas/{schema}/` into the application package, and the fields of `schemas/{schema}.sd` into
   the document that is there (or the file, if there is none).
2. Feed documents as in `feed.jsonl`: categories by their number in `vocabulary.json`, 0 for any other; a field that is
   left out is missing.
3. Query with `ranking.profile=urank`. The second phase ranks by {ranked_by}. Each hit brings the match
   features `urank_score` and `urank_clicks`, P(click) at positions 1 to {positions}.

Features of the query are sent as `input.query(NAME)`; one that is not sent is 0, not missing.

| feature | name in Vespa | comes with the | is a |
|---|---|---|---|
{rows}
| what a click is worth | `value` | document | number |
"""


GRAPH = "models/urank.onnx"

RESERVED = frozenset(
    {"attribute", "body", "case", "context", "documentid", "else", "header", "hit", "host", "if", "index", "position"}
    | {"reference", "relevancy", "sddocname", "summary", "switch", "tokenize"}
)
"""Names of fields that Vespa's schema reference keeps for itself."""


def export_vespa(
    model: RankingModel,
    target: str | Path,
    *,
    schema: str = "item",
    query_features: Collection[str] = (),
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Export:
    """Write a fragment of a Vespa application, whose graph is checked against the model before the folder appears.

    Args:
        model: what to write.
        target: the folder.
        schema: the name of the document type.
        query_features: the features that come with the query; all others are attributes of the document.
        facts: what to tell about the model.
        overwrite: replace an earlier export.

    Raises:
        ConfigError: when the schema cannot be called so, or a feature of the query is not one of the model.
        DataError: when the graph does not say what the model says; nothing is left behind.
    """
    featurizer = model.clicks.featurizer
    fields = _fields(featurizer, schema, query_features)
    graph = coded_graph(model)
    ranked_by = CTR1 if model.scorer is None else SCORE
    content = {
        **describe("vespa", model, graph, facts),
        "schema": schema,
        "ranked_by": ranked_by,
        "inputs": _inputs(fields, [value.name for value in graph.graph.input]),
    }
    outputs = [value.name for value in graph.graph.output]
    vocabulary = {
        field.name: {text: number for number, text in enumerate(feature.vocabulary, 1)}
        for field, feature in zip(fields_of(fields, "int"), featurizer.categorical, strict=True)
    }
    texts = {
        f"schemas/{schema}.sd": schema_text(schema, fields),
        f"schemas/{schema}/urank.profile": profile_text(fields, outputs, ranked_by, GRAPH, model.name),
        "feed.jsonl": _feed(schema, fields, featurizer),
        "README.md": readme_text(content, fields),
    }
    with export_folder(target, "vespa", overwrite=overwrite) as working:
        for name, text in texts.items():
            (working / name).parent.mkdir(parents=True, exist_ok=True)
            (working / name).write_text(text, encoding="utf-8")
        (working / GRAPH).parent.mkdir()
        (working / GRAPH).write_bytes(graph.SerializeToString())
        difference = check_graph(working / GRAPH, model, coded_feed)
        write_json(working / "inputs.json", content)
        write_json(working / "vocabulary.json", vocabulary)
        files = (GRAPH, *texts, "inputs.json", "vocabulary.json")
        return Export("vespa", Path(target), files, content, difference)


def coded_feed(featurizer: Featurizer, rows: pl.DataFrame) -> dict[str, NDArray[Any]]:
    """What `coded_graph` takes; unknown and missing categories are 0, or a number that no vocabulary reaches."""
    codes = featurizer.encode(rows).categorical
    if not codes.shape[1]:
        return numeric_feed(featurizer, rows)
    beyond = np.where(np.arange(len(codes))[:, None] % 2 == 0, 0, np.array(featurizer.cardinalities))
    return numeric_feed(featurizer, rows) | {"categorical": np.where(codes == 0, beyond, codes)}


def _fields(featurizer: Featurizer, schema: str, query_features: Collection[str]) -> list[Field]:
    if not is_identifier(schema):
        raise ConfigError(
            f"a schema is named by letters, digits and underscores, not starting with a digit; got '{schema}'"
        )
    unknown = [name for name in query_features if name not in featurizer.names]
    if unknown:
        raise ConfigError(f"a feature of the query must be one of the model; '{unknown[0]}' is not")
    names = identifiers(featurizer.names, [*RESERVED, VALUE])
    kinds = ["float"] * len(featurizer.numeric) + ["int"] * len(featurizer.categorical)
    return [
        Field(name, names[name], kind, name in query_features)
        for name, kind in zip(featurizer.names, kinds, strict=True)
    ]


def _inputs(fields: Sequence[Field], names: Sequence[str]) -> dict[str, Any]:
    """What each input of the graph holds, in the order of the graph."""

    def told(kind: str, type_: str) -> dict[str, Any]:
        columns = [
            {"feature": field.feature, "name": field.name, "from": "query" if field.in_query else "document"}
            for field in fields_of(fields, kind)
        ]
        return {"type": type_, "shape": ["rows", len(columns)], "features": columns}

    all_inputs = {
        "numeric": told("float", "float32"),
        "categorical": told("int", "int64"),
        VALUE: {"type": "float32", "shape": ["rows"], "default": 1.0},
    }
    return {name: all_inputs[name] for name in names}


def _feed(schema: str, fields: Sequence[Field], featurizer: Featurizer) -> str:
    """Two documents: one with all there is, and one of which nothing is known."""
    example: dict[str, Any] = {each.name: round(float(raw_number(each.mean)), 3) for each in featurizer.numeric}
    example |= {each.name: min(1, len(each.vocabulary)) for each in featurizer.categorical}
    known = {field.name: example[field.feature] for field in fields if not field.in_query}
    lines = [
        json.dumps({"put": f"id:{schema}:{schema}::{number}", "fields": each}, ensure_ascii=False, allow_nan=False)
        for number, each in enumerate([known | {VALUE: 1.0}, {}], 1)
    ]
    return "\n".join(lines) + "\n"
