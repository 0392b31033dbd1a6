"""Request bodies and refusals (RFC 9457 problem details).

Bodies are parsed with strict types, bounded lengths, and no unknown fields, NaN or infinity. The features of a model
are fields of a generated type, which is parsed twice as fast as a map from name to value, and refuses unknown names
while it is parsed. What is missing is found by `urank.serve.request_arrays`. Answers are in
`urank.client.wire_schemas`, shared with the client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, defstruct
from msgspec.json import Decoder
from starlette.responses import Response

from urank.ranking.matching import Method
from urank.serve.feedback_records import RANKING_ID

if TYPE_CHECKING:
    from urank.serve.server_settings import Limits

MAX_TEXT = 512
MAX_CATEGORY = 4_096
MAX_POSITIONS = 10_000
MAX_VALUE = 1e30  # far below the overflow of sums in 32-bit floats
MAX_ORDERS = 16
MAX_EVENTS = 10_000

Id = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
OrderName = Annotated[str, Meta(min_length=1, max_length=64)]
Value = Annotated[float, Meta(ge=0, le=MAX_VALUE)]
Positions = Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
Number = float | None
Category = Annotated[str, Meta(max_length=MAX_CATEGORY)] | int | float | bool | None
BodyT = TypeVar("BodyT")


class _Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    pass


class Candidate(_Body, frozen=True, kw_only=True):
    """An item that could be shown."""

    item_id: Id
    features: Any = UNSET
    value: Annotated[Value | None, Meta(description="value of a click; 1 by default")] = None


class ItemList(_Body, frozen=True, kw_only=True):
    """A list: either `candidates`, or the columns `item_id`, `features` and `value`."""

    positions: Annotated[
        Positions | None, Meta(description="number of items shown; as many as the model knows by default")
    ] = None
    candidates: list[Candidate] | UnsetType = UNSET
    item_id: list[Id] | UnsetType = UNSET
    features: Any = UNSET
    value: list[Value | None] | UnsetType = UNSET
    context: Any = UNSET


class RankQuery(ItemList, frozen=True, kw_only=True):
    """A list to rank."""

    query_id: Id
    user_id: Annotated[Id | None, Meta(description="decides the arm of an A/B test, and is logged")] = None
    method: Annotated[Method | None, Meta(description="how to rank; the server's method by default")] = None


class ExplainQuery(ItemList, frozen=True, kw_only=True):
    """A list to explain, and orders of it to evaluate."""

    user_id: ClassVar[None] = None
    method: ClassVar[None] = None
    query_id: Id | None = None
    orders: Annotated[
        dict[OrderName, Annotated[list[Id], Meta(min_length=1)]],
        Meta(max_length=MAX_ORDERS, description="orders to evaluate by name: item ids, best first"),
    ] = {}


class Event(_Body, frozen=True, kw_only=True):
    """Feedback on an item of a ranking."""

    ranking_id: Annotated[str, Meta(pattern=f"{RANKING_ID}(?!\\n)")]  # `$` alone would allow a line feed
    item_id: Id
    click: bool = True
    conversion: bool = False
    value: Annotated[
        Value | None, Meta(description="actual value; replaces the value by which the item was ranked")
    ] = None


class FeedbackBody(_Body, frozen=True, kw_only=True):
    """Feedback on items of rankings; reporting it twice does no harm."""

    events: Annotated[list[Event], Meta(min_length=1, max_length=MAX_EVENTS)]


class RequestTypes(NamedTuple):
    """The body types for the features of the models, and their decoders."""

    features: type[Struct]  # a value for each feature, `UNSET` if absent
    bodies: Mapping[str, type[Struct]]  # by name
    rank: Decoder[RankQuery]
    batch: Decoder[Any]  # with the field `queries`
    explain: Decoder[ExplainQuery]
    items: Decoder[Any]  # with the field `items`


def request_types(
    numeric: Sequence[str], categorical: Sequence[str], limits: Limits, *, ignore_unknown: bool = False
) -> RequestTypes:
    """Generate the types of bodies for models with these features."""
    types: list[Any] = [Number] * len(numeric) + [Category] * len(categorical)
    names = dict(zip((f"x{place}" for place in range(len(types))), (*numeric, *categorical), strict=True))
    strict: Any = {"rename": names, "forbid_unknown_fields": not ignore_unknown, "gc": False}

    def fields(kinds: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        return [(field, kind | UnsetType, UNSET) for field, kind in zip(names, kinds, strict=True)]

    features = defstruct("Features", fields(types), **strict, namespace={"__doc__": _FEATURES})
    columns = defstruct("Columns", fields([_several(kind) for kind in types]), **strict)
    frozen: Any = {"frozen": True, "forbid_unknown_fields": True, "kw_only": True, "gc": False}
    candidate = _derived(Candidate, features=features)
    listed: dict[str, Any] = {
        "candidates": _several(candidate, limits.candidates),
        "item_id": _several(Id, limits.candidates),
        "features": columns,
        "context": features,
    }
    query, explain = _derived(RankQuery, **listed), _derived(ExplainQuery, **listed)
    batch = defstruct("RankBatch", [("queries", _several(query, limits.queries))], **frozen)
    items = defstruct("ItemsBody", [("items", _several(candidate, limits.rows))], **frozen)
    bodies = {each.__name__: each for each in (query, batch, explain, items, FeedbackBody)}
    return RequestTypes(features, bodies, Decoder(query), Decoder(batch), Decoder(explain), Decoder(items))


_FEATURES = "Features by name, null if missing; one that is absent is that of the context, or of the server's items."


def _several(kind: Any, most: int | None = None) -> Any:
    return list[kind] if most is None else Annotated[list[kind], Meta(min_length=1, max_length=most)]


def _derived(base: type[BodyT], **types: Any) -> type[BodyT]:
    """Derive a type whose optional fields have these types."""
    fields = [(name, kind | UnsetType, UNSET) for name, kind in types.items()]
    derived: Any = defstruct(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True, gc=False, namespace={"__doc__": base.__doc__}
    )
    return derived  # type: ignore[no-any-return]


FEEDBACK: Decoder[FeedbackBody] = Decoder(FeedbackBody)

PROBLEM_JSON = "application/problem+json"
MAX_ERRORS = 10
NOT_THE_FEATURES = "the features are not those of the model; see /v1/model"
_MAX_ERROR_TEXT = 200
_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # older Pythons have older names


class ProblemLocation(Struct, frozen=True):
    """A location in the body, and what is wrong there."""

    at: str
    problem: str


class ProblemBody(Struct, frozen=True, omit_defaults=True):
    """A refusal."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    errors: list[ProblemLocation] = []


class Problem(Exception):  # noqa: N818 - the term of RFC 9457
    """Refusal of a request: status, one sentence, pairs of a location and what is wrong there, response headers."""

    def __init__(
        self, status: int, detail: str, errors: Sequence[tuple[str, str]] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.errors, self.headers = list(errors), dict(headers or {})


def problem_response(problem: Problem) -> Response:
    """Return the response for a refusal."""
    title = _TITLES.get(problem.status) or HTTPStatus(problem.status).phrase
    body: dict[str, Any] = {"type": "about:blank", "title": title, "status": problem.status, "detail": problem.detail}
    if problem.errors:
        body["errors"] = [{"at": _short(at), "problem": _short(text)} for at, text in problem.errors[:MAX_ERRORS]]
    return Response(msgspec.json.encode(body), problem.status, headers=problem.headers, media_type=PROBLEM_JSON)


def parse(decoder: Decoder[BodyT], body: bytes) -> BodyT:
    """Parse a body; a `Problem` has the first location that is wrong."""
    try:
        return decoder.decode(body)
    except ValidationError as error:
        raise _invalid_body(str(error)) from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply") from None
    except ValueError as error:  # malformed JSON, or text that is not UTF-8
        raise Problem(400, f"the body is not JSON: {_short(str(error))}") from None


_MESSAGE = re.compile(r"(?P<text>.*?)(?: - at (?:`key` in )?`(?P<place>[$].*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)
_OF_ITEM = re.compile(r"(?:.*\.)?(?:candidates|items)\[\d+\]\.features\.")
_INDEX = re.compile(r"\[(\d+)\]")


def _invalid_body(message: str) -> Problem:
    """Convert an error of the parser to a refusal with its location.

    >>> _invalid_body("Expected `float | null`, got `str` - at `$.candidates[3].features.emb[0]`").errors
    [('candidates.3.features.emb[0]', 'Expected `float | null`, got `str`')]
    >>> _invalid_body("Object contains unknown field `prize` - at `$.features`").errors
    [('features.prize', 'is not a feature of the model')]
    """
    found = _MESSAGE.fullmatch(message)
    assert found is not None  # noqa: S101 - it matches every text
    text, place = found["text"], (found["place"] or "$")[1:].removeprefix(".").replace("[...]", "")
    own = _OF_ITEM.match(place)  # after it comes the name of a feature, which may have brackets
    place = _INDEX.sub(r".\1", own[0]) + place[own.end() :] if own else _INDEX.sub(r".\1", place)
    detail = "the body violates the schema; see openapi.json"
    if text.startswith("Invalid enum value"):  # and the value follows
        text = "is not one of the values allowed"
    if field := _FIELD.fullmatch(text):
        last = place.rpartition(".")[2]
        place, text = f"{place}.{field['name']}".removeprefix("."), "is required"
        if field["what"] == "contains unknown":
            of_model = last in ("features", "context")
            detail = NOT_THE_FEATURES if of_model else detail
            text = "is not a feature of the model" if of_model else "is not a field of the body"
    return Problem(422, detail, [(place, text)])


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_TEXT else f"{text[:_MAX_ERROR_TEXT]}…"
