"""The description of the API: that of FastAPI, with bodies as the model in use takes them, feature by feature."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from jinja2 import Environment, PackageLoader
from pydantic import BaseModel, FailFast, Field, create_model
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from urank.serve import schemas
from urank.serve.playground import html_page
from urank.serve.request_arrays import ARROW_TYPE
from urank.serve.schemas import (
    MAX_FEATURES,
    PROBLEM_JSON,
    Candidate,
    ExplainQuery,
    FeedbackBody,
    Limits,
    MixedFeatures,
    NumericFeatures,
    ProblemBody,
    RankBatch,
    RankQuery,
)
from urank.serve.security import OPEN_PATHS
from urank.serve.service import METRICS_TYPE, RequestContext, Service

__all__ = ["OPERATIONS", "body_models", "describe", "docs_page"]

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


_REF = "#/components/schemas/{model}"
_GIVEN = "What was asked for."
_LARGEST = float(np.finfo(np.float32).max)
_ANSWERS: tuple[type[BaseModel], ...] = (
    schemas.RankAnswer,
    schemas.RankingsAnswer,
    schemas.ExplainAnswer,
    schemas.Accepted,
    schemas.Reloaded,
    ProblemBody,
)
OPERATIONS: Mapping[str, tuple[tuple[str, ...], dict[int, tuple[str, ...]]]] = {
    "/v1/rank": (("RankQuery", "RankBatch"), {200: ("RankAnswer", "RankingsAnswer")}),
    "/v1/explain": (("ExplainQuery",), {200: ("ExplainAnswer",)}),
    "/v1/feedback": (("FeedbackBody",), {202: ("Accepted",)}),
    "/v1/reload": ((), {200: ("Reloaded",)}),
}
"""Of each path that is posted to: what its body is one of, and what it answers."""

_REFUSALS = {
    "400": "The body is not what its type says.",
    "401": "A key is needed, or it is wrong.",
    "403": "This server has no key, so it does not do this.",
    "404": "There is no such thing.",
    "408": "The body did not come in time.",
    "409": "The server is not set up for this, or the model is broken and the old one stays.",
    "413": "The body is too large.",
    "415": "The body is of another type.",
    "421": "The server is not known by that name.",
    "422": "The body breaks a rule; `errors` says where.",
    "503": "The log cannot be written, or the answer took too long.",
}


@cache
def body_models(mixed: bool, limits: Limits) -> dict[str, Any]:
    """The types of bodies by name, for models with or without categorical features.

    Lists are given up at the first entry that is wrong: a body of a few megabytes has room for a million of them.
    """
    features: Any = Annotated[MixedFeatures if mixed else NumericFeatures, Field(max_length=MAX_FEATURES), FailFast()]
    candidate = create_model("Candidate", __base__=Candidate[features])  # under this name it is described
    some = Annotated[list[candidate], Field(min_length=1, max_length=limits.candidates), FailFast()]
    query = create_model("RankQuery", __base__=RankQuery[features], candidates=(some, ...))
    several = Annotated[list[query], Field(min_length=1, max_length=limits.queries), FailFast()]
    return {
        "RankQuery": query,
        "RankBatch": create_model("RankBatch", __base__=RankBatch[features], queries=(several, ...)),
        "ExplainQuery": create_model("ExplainQuery", __base__=ExplainQuery[features], candidates=(some, ...)),
        "FeedbackBody": FeedbackBody,
    }


def describe(app: FastAPI, service: Service) -> dict[str, Any]:
    """The OpenAPI description of what is served now."""
    found = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, summary=app.summary
    )
    state = service.state
    models = body_models(state.mixed, service.config.limits)
    named = {**models, **{model.__name__: model for model in _ANSWERS}}
    chosen = [(model, "validation") for model in named.values()]
    references, schemas = models_json_schema(chosen, ref_template=_REF)  # type: ignore[arg-type]
    components = dict(schemas.get("$defs", {}))
    names = {name: references[model, "validation"]["$ref"] for name, model in named.items()}
    _describe_features(components, state, service)
    found.setdefault("components", {}).setdefault("schemas", {}).update(components)
    if service.config.key is not None:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    problem = {PROBLEM_JSON: {"schema": {"$ref": names["ProblemBody"]}}}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            _describe_operation(path, operation, names)
            if path in OPEN_PATHS:
                operation["security"] = []
            for status, words in _REFUSALS.items():
                operation["responses"][status] = {"description": words, "content": problem}
    return found


def _describe_operation(path: str, operation: dict[str, Any], names: Mapping[str, str]) -> None:
    if parameters := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9]{1,9}$"}}
            for name in parameters
        ]
    if path not in OPERATIONS:
        kind = METRICS_TYPE if path == "/metrics" else "application/json"
        schema = {"type": "string"} if path == "/metrics" else {"type": "object"}
        operation["responses"]["200"] = {"description": _GIVEN, "content": {kind: {"schema": schema}}}
        return
    bodies_in, answers = OPERATIONS[path]
    if bodies_in:
        content: dict[str, Any] = {"application/json": {"schema": _one_of(bodies_in, names)}}
        if path == "/v1/rank":
            content[ARROW_TYPE] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = {
        str(status): {
            "description": _GIVEN,
            "content": {"application/json": {"schema": _one_of(answer, names)}},
        }
        for status, answer in answers.items()
    }
    if path == "/v1/rank":
        operation["responses"]["200"]["content"][ARROW_TYPE] = {"schema": {"type": "string", "format": "binary"}}


def _one_of(kinds: tuple[str, ...], names: Mapping[str, str]) -> dict[str, Any]:
    references = [{"$ref": names[kind]} for kind in kinds]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _describe_features(components: dict[str, Any], state: RequestContext, service: Service) -> None:
    """Put the names and kinds of the features into the description of a candidate, and the limits beside them."""
    number = {"anyOf": [{"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST}, {"type": "null"}]}
    category = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    served, limits = state.served, service.config.limits
    properties = dict.fromkeys(served.numeric, number) | dict.fromkeys(served.categorical, category)
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
        if "candidates" in fields:
            fields["candidates"]["maxItems"] = limits.candidates
        if "queries" in fields:
            fields["queries"]["maxItems"] = limits.queries
