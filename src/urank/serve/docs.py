"""The description of the API as a page without anything from outside, for those who would rather read than parse."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader
from starlette.responses import Response

from urank.serve.playground import html_page

__all__ = ["docs_page"]

_MOST_LINES = 80


def docs_page(openapi: dict[str, Any]) -> Response:
    """The page of a description."""
    operations = [
        {
            "method": method.upper(),
            "path": path,
            "summary": operation.get("summary", ""),
            "takes": [
                _kind(kind, content) for kind, content in operation.get("requestBody", {}).get("content", {}).items()
            ],
            "gives": [
                (status, _answer(response), response.get("description", ""))
                for status, response in sorted(operation["responses"].items())
            ],
        }
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    ]
    schemas = {name: _text(schema) for name, schema in sorted(openapi["components"]["schemas"].items())}
    return html_page(_template().render(info=openapi["info"], operations=operations, schemas=schemas))


def _kind(kind: str, content: dict[str, Any]) -> tuple[str, list[str]]:
    return kind, _names(content.get("schema", {}))


def _answer(response: dict[str, Any]) -> list[str]:
    return [name for content in response.get("content", {}).values() for name in _names(content.get("schema", {}))]


def _names(schema: dict[str, Any]) -> list[str]:
    """The schemas that one refers to."""
    parts = [schema, *schema.get("anyOf", [])]
    return [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]


def _text(schema: dict[str, Any]) -> str:
    lines = json.dumps(schema, indent=2, ensure_ascii=False).splitlines()
    more = [f"… {len(lines) - _MOST_LINES} lines more in /openapi.json"] if len(lines) > _MOST_LINES else []
    return "\n".join([*lines[:_MOST_LINES], *more])


@cache
def _template() -> Any:
    environment = Environment(loader=PackageLoader("urank.serve", "templates"), autoescape=True)
    return environment.get_template("docs.html")
