"""The HTTP face of a service: its routes behind a gate, and signals."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from urank import __version__
from urank.errors import UrankError
from urank.serve.openapi import body_models, describe, docs_page
from urank.serve.playground import playground_page
from urank.serve.ranking import explain
from urank.serve.request_arrays import ARROW_TYPE, read_lists, write_rankings
from urank.serve.schemas import FeedbackBody, Limits, Problem, invalid_body, problem_response
from urank.serve.security import AccessMiddleware, read_body
from urank.serve.service import METRICS_TYPE, Ranked, Service
from urank.serve.settings import ServeConfig

__all__ = ["Routes", "build_app", "content_type", "parse", "parse_rank"]

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


JSON = "application/json"
logger = logging.getLogger("urank.serve")
Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """A handler for each path."""

    def __init__(self, service: Service, app: FastAPI, *, parent: int | None) -> None:
        self.service = service
        self.app = app
        self.parent = parent

    def all(self) -> list[tuple[str, str, Handler, str]]:
        """Path, method, handler, and what it does in a few words."""
        found: list[tuple[str, str, Handler, str]] = [
            ("/v1/rank", "POST", self.rank, "Rank one list or several"),
            ("/v1/explain", "POST", self.explain, "The click table of a list, and the utility of orders"),
            ("/v1/feedback", "POST", self.feedback, "Say what was clicked"),
            ("/v1/reload", "POST", self.reload, "Load the models anew"),
            ("/v1/model", "GET", self.model, "What is served, and what it takes"),
            ("/healthz", "GET", self.health, "Whether the process lives"),
            ("/readyz", "GET", self.ready, "Whether requests can be served"),
            ("/metrics", "GET", self.metrics, "Counters for Prometheus"),
            ("/openapi.json", "GET", self.openapi, "This description"),
            ("/docs", "GET", self.docs, "This description as a page"),
        ]
        if self.service.config.playground:
            found += [
                ("/", "GET", self.playground, "Look into lists with a browser"),
                ("/v1/samples", "GET", self.samples, "Lists of a log to look into"),
                ("/v1/samples/{number}", "GET", self.sample, "One of these lists"),
            ]
        return found

    def measured(self, path: str, handler: Handler) -> Handler:
        """A handler whose refusals are sentences, whose time is limited, and whose requests are counted."""
        seconds = self.service.metrics.seconds.labels(path)
        limit = 2 * self.service.config.limits.seconds  # for the body, and for the answer

        async def route(request: Request) -> Response:
            started = time.perf_counter()
            try:
                async with asyncio.timeout(limit):
                    response = await handler(request)
            except Problem as problem:
                response = problem_response(problem)
            except TimeoutError:
                response = problem_response(Problem(503, "the answer took too long"))
            except ClientDisconnect:
                response = problem_response(Problem(400, "the client went away"))
            except Exception:
                logger.exception("a request to %s failed", path)
                response = problem_response(Problem(500, "something went wrong here; the server's log has it"))
            took = time.perf_counter() - started
            seconds.observe(took)
            self.service.metrics.requests.labels(path, response.status_code).inc()
            timing = response.headers.get("server-timing")
            total = f"total;dur={1e3 * took:.3f}"
            response.headers["server-timing"] = total if timing is None else f"{timing}, {total}"
            return response

        route.__name__ = path.strip("/").replace("/", "_").replace(".", "_") or "playground"
        return route

    async def rank(self, request: Request) -> Response:
        kind = content_type(request, JSON, ARROW_TYPE)
        body = await read_body(request, self.service.config.limits, json=kind == JSON)
        state = self.service.state
        if kind == ARROW_TYPE:
            ranked = await self.service.rank(state, read_lists(body, state.reader))
            answer = write_rankings(ranked.shown, ranked.lists, ranked.ids)
            return _timed(Response(answer, media_type=ARROW_TYPE), ranked)
        queries, batch = parse_rank(body, state.mixed, self.service.config.limits)
        ranked = await self.service.rank(state, state.reader.lists(queries, batch=batch))
        answers = ranked.answers()
        return _timed(_json({"rankings": answers} if batch else answers[0]), ranked)

    async def explain(self, request: Request) -> Response:
        content_type(request, JSON)
        body = await read_body(request, self.service.config.limits)
        state = self.service.state
        query = parse(body_models(state.mixed, self.service.config.limits)["ExplainQuery"], body)
        return _json(explain(state.served, state.reader.list_of(query), query.orders))

    async def feedback(self, request: Request) -> Response:
        content_type(request, JSON)
        body = await read_body(request, self.service.config.limits)
        return _json({"accepted": await self.service.feedback(parse(FeedbackBody, body).events)}, 202)

    async def reload(self, _: Request) -> Response:
        if self.service.config.key is None:
            raise Problem(403, "a server without a key reloads on SIGHUP only")
        try:
            changed = await self.service.reload()
        except UrankError:
            raise Problem(409, "the model is broken, so the old one stays; the server's log says why") from None
        if self.parent is not None and os.getppid() == self.parent:
            os.kill(self.parent, signal.SIGHUP)
        version = self.service.state.served.main.version
        return _json({"version": version, "changed": changed, "status": "reloaded" if changed else "unchanged"})

    async def model(self, _: Request) -> Response:
        return _json(_model_facts(self.service))

    async def health(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        if not self.service.ready:
            raise Problem(503, "the feedback log cannot be written")
        return _json({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        return Response(self.service.metrics.text(), headers={"content-type": METRICS_TYPE})

    async def openapi(self, _: Request) -> Response:
        return _json(describe(self.app, self.service))

    async def docs(self, _: Request) -> Response:
        return docs_page(describe(self.app, self.service))

    async def playground(self, _: Request) -> Response:
        return playground_page()

    async def samples(self, _: Request) -> Response:
        listed = enumerate(self.service.samples)
        return _json(
            {"samples": [{"number": n, "query_id": s.query_id, "items": len(s.candidates)} for n, s in listed]}
        )

    async def sample(self, request: Request) -> Response:
        text = str(request.path_params["number"])
        number = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else -1
        if not 0 <= number < len(self.service.samples):
            raise Problem(404, f"there are {len(self.service.samples)} samples, from 0")
        sample = self.service.samples[number]
        return _json(
            {
                "query_id": sample.query_id,
                "candidates": sample.candidates,
                "logged": sample.logged,
                "clicked": sample.clicked,
            }
        )


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type=JSON)


def _timed(response: Response, ranked: Ranked) -> Response:
    """With the time of the models and of the log, in milliseconds, for those who look."""
    parts = f"model;dur={1e3 * ranked.model_seconds:.3f}, log;dur={1e3 * ranked.log_seconds:.3f}"
    response.headers["server-timing"] = parts
    return response


def _model_facts(service: Service) -> dict[str, Any]:
    served, config = service.state.served, service.config
    main = served.main
    return {
        "version": main.version,
        "name": main.name,
        "method": served.method_of(main),
        "methods": list(served.methods),
        "positions": main.positions,
        "features": {"numeric": list(served.numeric), "categorical": list(served.categorical)},
        "takes_value": served.takes_value,
        "loaded": datetime.fromtimestamp(main.loaded, UTC).isoformat(timespec="seconds"),
        "explore": None if config.exploration is None else str(config.exploration),
        "shadow": None if served.shadow is None else {"version": served.shadow.version, "name": served.shadow.name},
        "test": None
        if served.test is None or served.other is None
        else {"name": served.test.name, "share": served.test.share, "version": served.other.version},
        "log": config.log is not None,
        "limits": config.limits.model_dump(),
    }


def build_app(
    config: ServeConfig,
    *,
    compacts: bool = True,
    parent: int | None = None,
    reload_wanted: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The application.

    Args:
        config: how it runs; the models are loaded here.
        compacts: whether it also turns the feedback log into Parquet.
        parent: the process that watches over this and other workers, and hands a signal on to all of them.
        reload_wanted: whether a signal asked for new models while these were being loaded.
    """
    service = Service(config, compacts=compacts)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start(parent)
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not in a thread, as in tests
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(service.reload_quietly()))
            if reload_wanted():
                await service.reload_quietly()
        yield
        await service.stop()

    app = FastAPI(
        title="urank",
        version=__version__,
        summary="Ranks lists by what they are expected to earn, and logs what happened.",
        description="Refusals are `application/problem+json`.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    routes = Routes(service, app, parent=parent)
    app.router.route_class = _PlainRoute
    for path, method, handler, words in routes.all():
        shown = path.startswith("/v1/") or path in ("/healthz", "/readyz", "/metrics")
        app.add_api_route(
            path,
            routes.measured(path, handler),
            methods=[method],
            summary=words,
            include_in_schema=shown,
            response_class=Response,
        )
    app.add_exception_handler(HTTPException, _http_problem)
    count = service.metrics.requests.labels
    app.add_middleware(
        AccessMiddleware,
        key=config.key,
        hosts=config.hosts,
        most=config.limits.requests,
        refused=lambda status: count("refused", status).inc(),
    )
    return app


class _PlainRoute(APIRoute):
    """A route whose handler gets the request as it is: it parses the body itself, so FastAPI need not look for one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


async def _http_problem(_: Request, error: Exception) -> Response:
    """What the router refuses: paths and methods that are not there."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for these
    words = {404: "there is nothing at this path", 405: "this path does not take that method"}
    headers = dict(error.headers or {})
    return problem_response(Problem(error.status_code, words.get(error.status_code, "refused"), headers=headers))
