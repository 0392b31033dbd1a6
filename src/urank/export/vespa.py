"""Export for Vespa: the graph, a rank profile that feeds it, the fields the profile reads, and the vocabularies.

    models/urank.onnx               the graph; Vespa has no string tensors, so categories are codes
    schemas/<schema>/urank.profile  the rank profile
    schemas/<schema>.sd             a schema with the fields of the features, to copy from
    inputs.json                     the field of each feature, and the inputs of the graph
    vocabulary.json                 field -> text -> code, for feeding documents
    feed.jsonl                      two documents

The profile ranks in the second phase by `score`, or by `ctr1` if the model has no scorer. The method `match` needs the
whole list; the click probabilities it needs are match features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from urank.errors import ConfigError
from urank.export.graph import CATEGORICAL, CTR1, NUMERIC, SCORE, VALUE, ranking_graph
from urank.export.onnx import INPUTS_FILE, Export, describe, describe_matrix, to_json, write_bundle
from urank.learning.features import Featurizer
from urank.log.signed_log import inverse_signed_log
from urank.ranking.ranking_model import RankingModel

GRAPH = "models/urank.onnx"

RESERVED = frozenset(
    {"attribute", "body", "case", "context", "documentid", "else", "header", "hit", "host", "if", "index", "position"}
    | {"reference", "relevancy", "sddocname", "summary", "switch", "tokenize"}
)
"""Field names reserved by Vespa's schema reference."""


def export_vespa(
    model: RankingModel,
    target: str | Path,
    *,
    schema: str = "item",
    query_features: Collection[str] = (),
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Export:
    """Write a fragment of a Vespa application, after comparing its graph with the model.

    Args:
        model, facts: the model to export, and further facts about it, for the description.
        target, overwrite: the folder, and whether to replace an earlier export.
        schema: the name of the document type.
        query_features: the features sent with the query; all others are attributes of the document.

    Raises:
        ConfigError: the schema is not an identifier, a query feature is not a feature of the model, or the model has
            within-list features, which Vespa cannot compute for one document at a time.
        DataError: the graph differs from the model; nothing is written.
    """
    featurizer = model.clicks.featurizer
    if featurizer.within:
        raise ConfigError(
            "Vespa scores one document at a time and cannot compare features within a list; train the model with "
            "--within-list off"
        )
    fields = _fields(featurizer, schema, query_features)
    graph = ranking_graph(model, categories="codes")
    ranked_by = CTR1 if model.scorer is None else SCORE
    columns = {
        kind: [{"feature": each.feature, "name": each.name, "from": each.source} for each in _of_kind(fields, kind)]
        for kind in ("float", "int")
    }
    numeric, categorical = describe_matrix("float32", columns["float"]), describe_matrix("int64", columns["int"])
    inputs = {NUMERIC: numeric, CATEGORICAL: categorical}
    content = describe("vespa", model, graph, inputs, facts) | {"schema": schema, "ranked_by": ranked_by}
    vocabulary = {
        field.name: {text: code for code, text in enumerate(feature.vocabulary, 1)}
        for field, feature in zip(_of_kind(fields, "int"), featurizer.categorical, strict=True)
    }
    texts = {
        f"schemas/{schema}.sd": _schema(schema, fields),
        f"schemas/{schema}/urank.profile": _profile(fields, list(content["outputs"]), ranked_by, model.name),
        "feed.jsonl": _feed(schema, fields, featurizer),
        "README.md": _readme(content, fields),
        INPUTS_FILE: to_json(content),
        "vocabulary.json": to_json(vocabulary),
    }
    return write_bundle(model, Path(target), graph, GRAPH, "codes", texts, content, overwrite=overwrite)


@dataclass(frozen=True)
class VespaField:
    """Where the profile finds a feature."""

    feature: str  # feature, name: its name in the model, and in Vespa
    name: str
    kind: str  # `float`, or `int` for the code of a category
    in_query: bool  # whether it is sent with the query rather than stored in the document

    @property
    def expression(self) -> str:
        """Its value in a ranking expression.

        >>> VespaField("price", "price", "float", False).expression
        'attribute(price)'
        >>> VespaField("shop", "shop", "int", False).expression
        'if(isNan(attribute(shop)) == 1, 0, attribute(shop))'
        """
        if self.in_query:
            return f"query({self.name})"
        return f"attribute({self.name})" if self.kind == "float" else _attribute_or(self.name, 0)

    @property
    def source(self) -> str:
        return "query" if self.in_query else "document"


def identifiers(names: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Choose an identifier for each distinct name, itself where possible, none taken; no two differ in case alone.

    >>> identifiers(["price", "emb[0]", "2nd", "Größe", "if"], taken=["if"])
    {'price': 'price', 'emb[0]': 'emb_0', '2nd': 'f_2nd', 'Größe': 'Gr_e', 'if': 'f_if'}
    >>> identifiers(["a b", "a.b", "A_B"])
    {'a b': 'a_b_2', 'a.b': 'a_b_3', 'A_B': 'A_B'}
    """
    used = {each.lower() for each in taken}
    chosen: dict[str, str] = {}
    for name in names:  # first the names that can stay, so that no other takes them
        if _is_identifier(name) and name.lower() not in used:
            chosen[name] = name
            used.add(name.lower())
    for name in (name for name in names if name not in chosen):
        stem = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
        if not _is_identifier(stem) or stem == name:
            stem = f"f_{stem}".rstrip("_")
        candidate, number = stem, 2
        while candidate.lower() in used:
            candidate, number = f"{stem}_{number}", number + 1
        chosen[name] = candidate
        used.add(candidate.lower())
    return {name: chosen[name] for name in names}


def _is_identifier(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def _fields(featurizer: Featurizer, schema: str, query_features: Collection[str]) -> list[VespaField]:
    if not _is_identifier(schema):
        needed = "letters, digits and underscores and not start with a digit"
        raise ConfigError(f"schema must be {needed}; got '{schema}' (--schema)")
    unknown = [name for name in query_features if name not in featurizer.names]
    if unknown:
        raise ConfigError(f"query_features must be features of the model; '{unknown[0]}' is not (--query-feature)")
    names = identifiers(featurizer.names, [*RESERVED, VALUE])
    kinds = {each.name: "float" for each in featurizer.numeric} | {each.name: "int" for each in featurizer.categorical}
    return [VespaField(name, names[name], kind, name in query_features) for name, kind in kinds.items()]


def _of_kind(fields: Sequence[VespaField], kind: str) -> list[VespaField]:
    return [field for field in fields if field.kind == kind]


def _schema(schema: str, fields: Sequence[VespaField]) -> str:
    """Write a schema with an attribute for each feature of the document, and one for the value of a click."""
    blocks = []
    for field in fields:
        note = _one_line(field.feature) if field.feature != field.name else ""
        if field.kind == "int":
            note = f"{_one_line(field.feature)}: its code in vocabulary.json; 0 or absent if unknown"
        if not field.in_query:
            blocks.append(_attribute(field.name, field.kind, note))
    blocks.append(_attribute(VALUE, "float", "value of a click; 1 if absent"))
    return f"schema {schema} {{\n\n    document {schema} {{\n\n" + "\n".join(blocks) + "\n    }\n}\n"


def _attribute(name: str, kind: str, note: str) -> str:
    comment = f"        # {note}\n" if note else ""
    return f"{comment}        field {name} type {kind} {{\n            indexing: attribute | summary\n        }}\n"


def _one_line(text: str) -> str:
    """Collapse white space: comments and table cells end with the line."""
    return " ".join(text.split())


def _profile(fields: Sequence[VespaField], outputs: Sequence[str], ranked_by: str, name: str) -> str:
    """Write the rank profile; the fields are in the order of the graph's columns."""
    matrices = {NUMERIC: _of_kind(fields, "float"), CATEGORICAL: _of_kind(fields, "int")}
    tensors = {
        **{each: _matrix(columns) for each, columns in matrices.items() if columns},
        VALUE: ["tensor<float>(d0[1]):[" + _attribute_or(VALUE, 1) + "]"],
    }
    model = [
        f"file: {GRAPH}",
        *(f'input "{each}": urank_{each}' for each in tensors),
        *(f'output "{each}": {each}' for each in outputs),
    ]
    query_inputs = [f"query({field.name}) double" for field in fields if field.in_query]
    parts = [
        *([_block("inputs", query_inputs)] if query_inputs else []),
        _block("onnx-model urank", model),
        *(_function(f"urank_{each}", lines) for each, lines in tensors.items()),
        _function("urank_score", [f"sum(onnx(urank).{ranked_by})"]),
        _function("urank_clicks", ["exp(reduce(onnx(urank).log_ctr, sum, d0))"]),
        _block("second-phase", ["expression: urank_score"]),
        _block("match-features", ["urank_score", "urank_clicks"]),
    ]
    head = f"# {_one_line(name)}, exported by urank {version('urank')}\nrank-profile urank inherits default {{"
    return "\n\n".join([head, *parts]) + "\n}\n"


def _matrix(fields: Sequence[VespaField]) -> list[str]:
    """Write a tensor of one row, one line for each feature."""
    cells = [f"    {field.expression}," for field in fields]
    return [f"tensor<float>(d0[1],d1[{len(fields)}]):[[", *cells[:-1], cells[-1].rstrip(","), "]]"]


def _attribute_or(name: str, default: int) -> str:
    return f"if(isNan(attribute({name})) == 1, {default}, attribute({name}))"


def _function(name: str, lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return _block(f"function {name}()", [f"expression: {lines[0]}"])
    return _block(f"function {name}()", ["expression {", *(f"    {line}" for line in lines), "}"])


def _block(head: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return f"    {head} {{\n{body}\n    }}"


def _feed(schema: str, fields: Sequence[VespaField], featurizer: Featurizer) -> str:
    """Write two documents: one with all fields, and one with none."""
    example: dict[str, Any] = {each.name: round(float(inverse_signed_log(each.mean)), 3) for each in featurizer.numeric}
    example |= {each.name: min(1, len(each.vocabulary)) for each in featurizer.categorical}
    complete = {field.name: example[field.feature] for field in fields if not field.in_query} | {VALUE: 1.0}
    lines = [
        json.dumps({"put": f"id:{schema}:{schema}::{number}", "fields": each}, ensure_ascii=False, allow_nan=False)
        for number, each in enumerate([complete, {}], 1)
    ]
    return "\n".join(lines) + "\n"


def _readme(content: Mapping[str, Any], fields: Sequence[VespaField]) -> str:
    rows = []
    for field in fields:
        feature = _one_line(field.feature).replace("|", "\\|")
        kind = "code of vocabulary.json" if field.kind == "int" else "number"
        rows.append(f"| {feature} | `{field.name}` | {field.source} | {kind} |")
    return _README.format(
        name=content["model"]["name"],
        urank=content["urank"],
        runtime=content["least_onnxruntime"],
        schema=content["schema"],
        positions=content["positions"],
        ranked_by="its score" if content["ranked_by"] == SCORE else "value · P(click at position 1)",
        rows="\n".join(rows),
    )


_README = """\
# {name}, for Vespa

Exported by urank {urank}, for a Vespa with ONNX Runtime {runtime} or newer. The graph was checked in ONNX Runtime; the
schema and profile follow Vespa's reference, but were not run in Vespa.

1. Copy `models/` and `schemas/{schema}/` into the application package, and the fields of `schemas/{schema}.sd` into
   your document (or the whole file, if you have none).
2. Feed documents as in `feed.jsonl`: categories by their code in `vocabulary.json`, 0 for any other; absent fields are
   missing values.
3. Query with `ranking.profile=urank`. The second phase ranks by {ranked_by}. Each hit has the match features
   `urank_score` and `urank_clicks`, P(click) at positions 1 to {positions}.

Send query features as `input.query(NAME)`; one that is not sent is 0, not missing.

| feature | name in Vespa | source | type |
|---|---|---|---|
{rows}
| value of a click | `value` | document | number |
"""
