"""What a request holds: its type checked, its JSON parsed into the bodies of the model that is served."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from urank.serve.bodies import Limits
from urank.serve.openapi import body_models
from urank.serve.problems import Problem, invalid_body

__all__ = ["content_type", "parse", "parse_rank"]

ModelT = TypeVar("ModelT", bound=BaseModel)
_BATCH = re.compile(rb'\s*\{\s*"queries"\s*:')


def content_type(request: Request, *allowed: str) -> str:
    """What the body is said to be; pages of other sites can send other types without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in allowed:
        raise Problem(415, f"the body must be {' or '.join(allowed)}", headers={"Accept-Post": ", ".join(allowed)})
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "the body must not be compressed")
    return kind


def parse(model: type[ModelT], body: bytes) -> ModelT:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


def parse_rank(body: bytes, mixed: bool, limits: Limits) -> tuple[list[Any], bool]:
    """The queries of a body, and whether it is a batch: one begins with its only field."""
    models = body_models(mixed, limits)
    if _BATCH.match(body):
        return parse(models["RankBatch"], body).queries, True
    return [parse(models["RankQuery"], body)], False
