"""The HTTP application: routes of a `Service` behind the access middleware, and reload on SIGHUP."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from urank.client.wire_schemas import (
    Accepted,
    FeatureNames,
    ModelFacts,
    ModelNames,
    RankingBatch,
    Reloaded,
    Shadow,
    SplitTest,
)
from urank.errors import UrankError
from urank.serve.admission import Admission
from urank.serve.list_ranking import explain, write_arrow
from urank.serve.openapi import describe, docs_page
from urank.serve.playground import html_page, playground
from urank.serve.request_arrays import ARROW_TYPE, items_of, read_arrow, read_items
from urank.serve.request_schemas import FEEDBACK, Problem, parse, problem_response
from urank.serve.security import AccessMiddleware, read_body
from urank.serve.server_settings import ServeConfig
from urank.serve.service import METRICS_TYPE, RequestContext, Service

JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]
_BATCH = re.compile(rb'\s*\{\s*"queries"\s*:')

logger = logging.getLogger("urank.serve")


def build_app(
    config: ServeConfig, *, exports: bool = True, parent: int | None = None, reloads: Sequence[int] = ()
) -> Starlette:
    """Build the application of a `Service(config, exports=exports)`, which loads the models.

    Args:
        parent: Process that supervises several workers, and forwards a signal to all of them.
        reloads: Not empty if a signal asks for a reload while the models are loaded.
    """
    service = Service(config, exports=exports)
    tracing = None
    if config.trace:
        from urank.serve.tracing import Tracing  # OpenTelemetry is an extra

        tracing = Tracing()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start(parent)
        gc.collect()
        gc.freeze()  # later collections skip the models and modules
        with suppress(NotImplementedError, RuntimeError, ValueError):  # outside the main thread, as in tests
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(service.reload_on_signal()))
            if reloads:
                await service.reload_on_signal()
        yield
        await service.stop()
        if tracing is not None:
            tracing.close()

    admission = Admission()
    access = Middleware(
        AccessMiddleware,
        key=config.key,
        hosts=config.hosts,
        max_requests=config.limits.requests,
        on_refusal=lambda status: service.metrics.requests_of("refused", status).inc(),
        admission=admission,
        on_wait=service.metrics.queue_seconds.observe,
        access_log=config.access_log,
        tracing=tracing,
    )
    routes = []
    for path, (method, handler, _) in Routes(service, parent).all().items():
        route = Route(path, measured(path, handler, service), methods=[method])
        route.methods = {method}  # without HEAD
        routes.append(route)
    handlers: Any = {HTTPException: _routing_problem}
    app = Starlette(routes=routes, middleware=[access], exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.service, app.state.admission = service, admission
    app.state.on_shed = lambda: service.metrics.requests_of("shed", 503).inc()
    return app


async def _routing_problem(_: Request, error: HTTPException) -> Response:
    """Answer unknown paths and methods."""
    details = {404: "there is nothing at this path", 405: "this path does not support that method"}
    detail = details.get(error.status_code, "refused")
    return problem_response(Problem(error.status_code, detail, headers=error.headers))


def measured(path: str, handler: Handler, service: Service) -> Handler:
    """Wrap a handler: convert refusals and failures to problems, limit its time, and count its requests."""
    request_seconds = service.metrics.seconds.labels(path)
    limit = 2 * service.config.limits.seconds  # for the body, and for the answer

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
            response = problem_response(Problem(400, "the client closed the connection"))
        except Exception:
            logger.exception("a request to %s failed", path)
            response = problem_response(Problem(500, "an internal error occurred; see the server's log"))
        seconds = time.perf_counter() - started
        request_seconds.observe(seconds)
        service.metrics.requests_of(path, response.status_code).inc()
        _add_timing(response, f"total;dur={1e3 * seconds:.3f}")
        return response

    return route


def _add_timing(response: Response, text: str) -> None:
    response.raw_headers.append((b"server-timing", text.encode()))


@dataclass(frozen=True, eq=False)
class Routes:
    """The handlers of all paths."""

    service: Service
    parent: int | None

    def all(self) -> dict[str, tuple[str, Handler, str]]:
        """Return method, handler and summary of each path."""
        routes: dict[str, tuple[str, Handler, str]] = {
            "/v1/rank": ("POST", self.rank, "Rank one list or several"),
            "/v1/explain": ("POST", self.explain, "Return the click table of a list, and the utility of orders"),
            "/v1/feedback": ("POST", self.feedback, "Report clicks and conversions"),
            "/v1/models/{name}/rank": ("POST", self.rank, "Rank by the model of this name"),
            "/v1/models/{name}/explain": ("POST", self.explain, "Explain by the model of this name"),
            "/v1/items": ("PUT", self.items, "Add or replace items, whose features requests may then leave out"),
            "/v1/reload": ("POST", self.reload, "Reload the models"),
            "/v1/model": ("GET", self.model, "Describe the models in use, and what requests must contain"),
            "/v1/models": ("GET", self.models, "List the models by name"),
            "/v1/models/{name}": ("GET", self.model, "Describe the model of this name"),
            "/healthz": ("GET", self.health, "Whether the process is alive"),
            "/readyz": ("GET", self.ready, "Whether requests can be served"),
            "/metrics": ("GET", self.metrics, "Metrics for Prometheus"),
            "/openapi.json": ("GET", self.openapi, "This description"),
            "/docs": ("GET", self.docs, "This description as a page"),
        }
        if self.service.config.playground:
            routes["/"] = ("GET", self.playground, "Explore lists in a browser")
            routes["/v1/samples"] = ("GET", self.samples, "Sample lists of a log")
            routes["/v1/samples/{number}"] = ("GET", self.sample, "One of the sample lists")
        return routes

    def _context(self, request: Request) -> RequestContext:
        """Return the context of the model that the path names, by default of the main model."""
        name = request.path_params.get("name", self.service.config.name)
        if name not in self.service.contexts:
            raise Problem(404, "there is no model of this name; see /v1/models")
        return self.service.contexts[name]

    async def rank(self, request: Request) -> Response:
        content_type, body = await self._read(request, JSON, ARROW_TYPE)
        context = self._context(request)
        if content_type == ARROW_TYPE:
            ranked = await self.service.rank(context, read_arrow(body, context.reader))
            response = Response(write_arrow(ranked.rankings, ranked.lists, ranked.ids), media_type=ARROW_TYPE)
        else:
            batch = _BATCH.match(body) is not None  # a batch begins with its only field
            queries = parse(context.types.batch, body).queries if batch else [parse(context.types.rank, body)]
            ranked = await self.service.rank(context, context.reader.lists(queries, batch=batch))
            pairs = zip(ranked.rankings, ranked.ids, strict=True)
            answers = tuple(ranking.answer(ranked.lists, ranking_id) for ranking, ranking_id in pairs)
            response = _json(RankingBatch(answers) if batch else answers[0])
        _add_timing(response, f"model;dur={1e3 * ranked.model_seconds:.3f}, log;dur={1e3 * ranked.log_seconds:.3f}")
        return response

    async def explain(self, request: Request) -> Response:
        _, body = await self._read(request, JSON)
        context = self._context(request)
        query = parse(context.types.explain, body)
        return _json(explain(context.active, context.reader.lists([query], batch=False), query.orders))

    async def items(self, request: Request) -> Response:
        self._require_key("accepts no items: replace the file of --items instead")
        content_type, body = await self._read(request, JSON, ARROW_TYPE)
        context = self.service.context
        if content_type == ARROW_TYPE:
            return _json(await self.service.put_items(read_items(body, context.reader)))
        items = parse(context.types.items, body).items
        return _json(await self.service.put_items(items_of(items, context.reader)))

    async def feedback(self, request: Request) -> Response:
        _, body = await self._read(request, JSON)
        return _json(Accepted(await self.service.feedback(parse(FEEDBACK, body).events)), 202)

    async def reload(self, _: Request) -> Response:
        self._require_key("reloads on SIGHUP only")
        try:
            changed = await self.service.reload()
        except UrankError:
            raise Problem(409, "the model is broken, so the old one stays; the server's log has the reason") from None
        if self.parent is not None and os.getppid() == self.parent:
            os.kill(self.parent, signal.SIGHUP)
        version = self.service.context.active.main.version
        return _json(Reloaded(version=version, changed=changed, status="reloaded" if changed else "unchanged"))

    def _require_key(self, otherwise: str) -> None:
        if self.service.config.key is None:
            raise Problem(403, f"a server without a key {otherwise}")

    async def model(self, request: Request) -> Response:
        context, config = self._context(request), self.service.config
        active, items = context.active, context.reader.items
        main, shadow, other, test = active.main, active.shadow, active.other, active.test
        facts = ModelFacts(
            version=main.version,
            name=main.name,
            method=active.method_of(main),
            methods=active.methods,
            positions=main.positions,
            features=FeatureNames(numeric=active.numeric, categorical=active.categorical),
            takes_value=active.takes_value,
            loaded=datetime.fromtimestamp(int(main.loaded), UTC),
            explore=None if config.exploration is None else str(config.exploration),
            shadow=None if shadow is None else Shadow(shadow.version, shadow.name),
            test=None if test is None or other is None else SplitTest(test.name, test.share, other.version),
            items=None if items is None else len(items.index),
            log=config.log is not None or config.sink is not None,
            limits=config.limits.model_dump(),
        )
        return _json(facts)

    async def models(self, _: Request) -> Response:
        contexts = self.service.contexts.items()
        return _json(ModelNames({name: context.active.main.version for name, context in contexts}))

    async def health(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        if not self.service.ready:
            raise Problem(503, "the feedback log cannot be written")
        return _json({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        return Response(self.service.metrics.text(), headers={"content-type": METRICS_TYPE})

    async def openapi(self, _: Request) -> Response:
        return _json(describe(self._summaries(), self.service))

    async def docs(self, _: Request) -> Response:
        return docs_page(describe(self._summaries(), self.service))

    async def playground(self, _: Request) -> Response:
        return html_page(playground())

    async def samples(self, _: Request) -> Response:
        samples = enumerate(self.service.samples)
        listed = [
            {"number": n, "query_id": each.query_id, "items": len(each.candidates), "moved": each.moved}
            for n, each in samples
        ]
        return _json({"samples": listed})

    async def sample(self, request: Request) -> Response:
        text = str(request.path_params["number"])
        number = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else -1
        if not 0 <= number < len(self.service.samples):
            raise Problem(404, f"there are {len(self.service.samples)} samples, numbered from 0")
        return _json(asdict(self.service.samples[number]))

    def _summaries(self) -> dict[str, tuple[str, str]]:
        """Return method and summary of each path of the API."""
        paths = {path: (method.lower(), summary) for path, (method, _, summary) in self.all().items()}
        return {path: each for path, each in paths.items() if path not in ("/", "/docs", "/openapi.json")}

    async def _read(self, request: Request, *allowed: str) -> tuple[str, bytes]:
        """Return type and body of a request. Pages of other sites can send other types without a preflight request."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type not in allowed:
            raise Problem(415, f"the body must be {' or '.join(allowed)}", headers={"Accept-Post": ", ".join(allowed)})
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Problem(415, "the body must not be compressed")
        return content_type, await read_body(request, self.service.config.limits, json=content_type == JSON)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
