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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.export.check import check_graph, numeric_feed, raw_number
from urank.export.folder import Export, describe, export_folder, write_json
from urank.export.graph import CTR1, SCORE, VALUE, coded_graph
from urank.export.names import identifiers, is_identifier
from urank.export.vespa_text import Field, fields_of, profile_text, readme_text, schema_text
from urank.features import Featurizer
from urank.rankers.ranking import RankingModel

__all__ = ["export_vespa"]

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
