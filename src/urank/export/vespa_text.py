"""The texts of a Vespa application: the schema with its fields, the rank profile that feeds the graph, and a README.

Inputs of a graph are tensors whose dimensions are called d0, d1; Vespa asks about one document at a time, so that the
first is of size 1. An attribute that a document leaves out is not a number, which the graph reads as missing; a
category must be a number, so that there the profile puts 0, the unknown one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

__all__ = ["Field", "fields_of", "profile_text", "readme_text", "schema_text"]


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
