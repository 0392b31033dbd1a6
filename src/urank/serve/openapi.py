"""The OpenAPI document of the models in use, and the page that shows it.

FastAPI generates the frame. Bodies are added here, since their schemas depend on the features of the models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from jinja2 import Environment, PackageLoader
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from urank.client.wire_schemas import Accepted, Explanation, Ranking, RankingBatch, Reloaded
from urank.ranking.matching import METHODS
from urank.serve.playground import html_page
from urank.serve.request_arrays import ARROW_TYPE
from urank.serve.request_schemas import PROBLEM_JSON, ProblemBody
from urank.serve.security import OPEN_PATHS
from urank.serve.service import METRICS_TYPE, Service

JSON = "application/json"
OPERATIONS: Mapping[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "/v1/rank": (("RankQuery", "RankBatch"), 200, ("Ranking", "RankingBatch")),
    "/v1/explain": (("ExplainQuery",), 200, ("Explanation",)),
    "/v1/feedback": (("FeedbackBody",), 202, ("Accepted",)),
    "/v1/reload": ((), 200, ("Reloaded",)),
}
"""Alternatives of the body, status and alternatives of the answer of each path with a POST."""

_ANSWERS: tuple[type[BaseModel], ...] = (Ranking, RankingBatch, Explanation, Accepted, Reloaded, ProblemBody)
_REFUSALS = {
    "400": "The body does not match its type.",
    "401": "A key is required, or it is wrong.",
    "403": "This server has no key, so it does not support this.",
    "404": "Not found.",
    "408": "The body did not arrive in time.",
    "409": "The server is not configured for this, or the model is broken and the old one stays.",
    "413": "The body is too large.",
    "415": "The body has an unsupported type.",
    "421": "The host name is not allowed.",
    "422": "The body violates a rule; `errors` has the locations.",
    "503": "The log cannot be written, or the answer took too long.",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FLOAT32_BOUND = (2 - 2.0**-24) * 2.0**127  # smaller numbers are rounded to finite float32
_MAX_SCHEMA_LINES = 80
_TEMPLATES = Environment(loader=PackageLoader("urank.serve", "templates"), autoescape=True)


def describe(app: FastAPI, service: Service) -> dict[str, Any]:
    """Return the OpenAPI document for the models in use."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, summary=app.summary
    )
    models = {**service.context.bodies, **{model.__name__: model for model in _ANSWERS}}
    chosen = [(model, "validation") for model in models.values()]
    references, schemas = models_json_schema(chosen, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas.get("$defs", {}))
    _describe_features(components, service)
    if service.config.key is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    refs = {name: references[model, "validation"]["$ref"] for name, model in models.items()}
    problem = {PROBLEM_JSON: {"schema": {"$ref": refs["ProblemBody"]}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _describe_operation(path, operation, refs)
            if path in OPEN_PATHS:
                operation["security"] = []
            for status, text in _REFUSALS.items():
                operation["responses"][status] = {"description": text, "content": problem}
    return document


def _describe_operation(path: str, operation: dict[str, Any], refs: Mapping[str, str]) -> None:
    if names := re.findall(r"{(\w+)}", path):
        number = {"type": "string", "pattern": "^[0-9]{1,9}$"}
        operation["parameters"] = [{"name": each, "in": "path", "required": True, "schema": number} for each in names]
    if path not in OPERATIONS:
        metrics: dict[str, Any] = {METRICS_TYPE: {"schema": {"type": "string"}}}
        content = metrics if path == "/metrics" else {JSON: {"schema": {"type": "object"}}}
        operation["responses"]["200"] = {"description": "Success.", "content": content}
        return
    bodies, status, answers = OPERATIONS[path]
    arrow = {ARROW_TYPE: _BINARY} if path == "/v1/rank" else {}
    if bodies:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _any_of(bodies, refs)}, **arrow}}
    content = {JSON: {"schema": _any_of(answers, refs)}, **arrow}
    operation["responses"] = {str(status): {"description": "Success.", "content": content}}


def _any_of(names: tuple[str, ...], refs: Mapping[str, str]) -> dict[str, Any]:
    references = [{"$ref": refs[name]} for name in names]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _describe_features(components: dict[str, Any], service: Service) -> None:
    """Add the features of the models, the methods, and the limits."""
    bounded = {"type": "number", "exclusiveMinimum": -_FLOAT32_BOUND, "exclusiveMaximum": _FLOAT32_BOUND}
    number = {"anyOf": [bounded, {"type": "null"}]}
    category = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    active, limits = service.context.active, service.config.limits
    properties = dict.fromkeys(active.numeric, number) | dict.fromkeys(active.categorical, category)
    for schema in components.values():
        fields = schema.get("properties", {})
        if "features" in fields and "item_id" in fields:
            fields["features"] = {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": service.config.ignore_unknown,
                "description": fields["features"].get("description", ""),
            }
        for name, most in (("candidates", limits.candidates), ("queries", limits.queries)):
            if name in fields:
                fields[name]["maxItems"] = most
        if fields.get("method", {}).get("type") == "string":  # of an answer: clients accept any text
            fields["method"]["enum"] = list(METHODS)


def docs_page(document: dict[str, Any]) -> Response:
    """Return the page of an OpenAPI document."""
    schemas = {name: _schema_text(schema) for name, schema in sorted(document["components"]["schemas"].items())}
    return html_page(_TEMPLATES.get_template("docs.html").render(document=document, schemas=schemas))


def _schema_text(schema: dict[str, Any]) -> str:
    lines = json.dumps(schema, indent=2, ensure_ascii=False).splitlines()
    more = len(lines) - _MAX_SCHEMA_LINES
    return "\n".join([*lines[:_MAX_SCHEMA_LINES], *([f"… {more} more lines in /openapi.json"] if more > 0 else [])])
