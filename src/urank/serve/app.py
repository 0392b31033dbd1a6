"""The HTTP application: routes of a `Service` behind the access middleware, and reload on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
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
from urank.client.wire_schemas import Accepted, FeatureNames, ModelFacts, Reloaded, Shadow, SplitTest
from urank.errors import UrankError
from urank.serve.admission import Admission
from urank.serve.list_ranking import explain, write_arrow
from urank.serve.openapi import describe, docs_page
from urank.serve.playground import html_page, playground
from urank.serve.request_arrays import ARROW_TYPE, read_arrow
from urank.serve.request_schemas import FeedbackBody, Problem, invalid_body, problem_response
from urank.serve.security import AccessMiddleware, read_body
from urank.serve.server_settings import ServeConfig
from urank.serve.service import METRICS_TYPE, Service

JSON = "application/json"
ModelT = TypeVar("ModelT", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
_BATCH = re.compile(rb'\s*\{\s*"queries"\s*:')

logger = logging.getLogger("urank.serve")


def build_app(
    config: ServeConfig, *, compacts: bool = True, parent: int | None = None, reloads: Sequence[int] = ()
) -> FastAPI:
    """Build the application of a `Service(config, compacts=compacts)`, which loads the models.

    Args:
        parent: Process that supervises several workers, and forwards a signal to all of them.
        reloads: Not empty if a signal asks for a reload while the models are loaded.
    """
    service = Service(config, compacts=compacts)
    tracing = None
    if config.trace:
        from urank.serve.tracing import Tracing  # OpenTelemetry is an extra

        tracing = Tracing()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start(parent)
        with suppress(NotImplementedError, RuntimeError, ValueError):  # outside the main thread, as in tests
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(service.reload_on_signal()))
            if reloads:
                await service.reload_on_signal()
        yield
        await service.stop()
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="urank",
        version=__version__,
        summary="Ranks lists by expected utility, and logs rankings and feedback.",
        description="Refusals are `application/problem+json`.",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.admission = Admission()
    app.state.on_shed = lambda: service.metrics.requests.labels("shed", 503).inc()
    app.router.route_class = _DirectRoute
    for path, (method, handler, summary) in Routes(service, app, parent).all().items():
        listed = path.startswith("/v1/") or path in ("/healthz", "/readyz", "/metrics")
        route = measured(path, handler, service)
        app.add_api_route(
            path, route, methods=[method], summary=summary, include_in_schema=listed, response_class=Response
        )
    app.add_exception_handler(HTTPException, _routing_problem)
    app.add_middleware(
        AccessMiddleware,
        key=config.key,
        hosts=config.hosts,
        max_requests=config.limits.requests,
        on_refusal=lambda status: service.metrics.requests.labels("refused", status).inc(),
        admission=app.state.admission,
        on_wait=service.metrics.queue_seconds.observe,
        access_log=config.access_log,
        tracing=tracing,
    )
    return app


class _DirectRoute(APIRoute):
    """A route that passes the request to its handler, which parses the body itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


async def _routing_problem(_: Request, error: Exception) -> Response:
    """Answer unknown paths and methods."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for these
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
        service.metrics.requests.labels(path, response.status_code).inc()
        parts = [response.headers.get("server-timing"), f"total;dur={1e3 * seconds:.3f}"]
        response.headers["server-timing"] = ", ".join(part for part in parts if part is not None)
        return response

    route.__name__ = path.strip("/").replace("/", "_").replace(".", "_") or "playground"
    return route


@dataclass(frozen=True, eq=False)
class Routes:
    """The handlers of all paths."""

    service: Service
    app: FastAPI
    parent: int | None

    def all(self) -> dict[str, tuple[str, Handler, str]]:
        """Return method, handler and summary of each path."""
        routes: dict[str, tuple[str, Handler, str]] = {
            "/v1/rank": ("POST", self.rank, "Rank one list or several"),
            "/v1/explain": ("POST", self.explain, "Return the click table of a list, and the utility of orders"),
            "/v1/feedback": ("POST", self.feedback, "Report clicks and conversions"),
            "/v1/reload": ("POST", self.reload, "Reload the models"),
            "/v1/model": ("GET", self.model, "Describe the models in use, and what requests must contain"),
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

    async def rank(self, request: Request) -> Response:
        content_type, body = await self._read(request, JSON, ARROW_TYPE)
        context = self.service.context
        if content_type == ARROW_TYPE:
            ranked = await self.service.rank(context, read_arrow(body, context.reader))
            response = Response(write_arrow(ranked.rankings, ranked.lists, ranked.ids), media_type=ARROW_TYPE)
        else:
            bodies = context.bodies
            batch = _BATCH.match(body) is not None  # a batch begins with its only field
            queries = _parse(bodies["RankBatch"], body).queries if batch else [_parse(bodies["RankQuery"], body)]
            ranked = await self.service.rank(context, context.reader.lists(queries, batch=batch))
            pairs = zip(ranked.rankings, ranked.ids, strict=True)
            answers = [ranking.to_dict(ranked.lists, ranking_id) for ranking, ranking_id in pairs]
            response = _json({"rankings": answers} if batch else answers[0])
        parts = f"model;dur={1e3 * ranked.model_seconds:.3f}, log;dur={1e3 * ranked.log_seconds:.3f}"
        response.headers["server-timing"] = parts
        return response

    async def explain(self, request: Request) -> Response:
        _, body = await self._read(request, JSON)
        context = self.service.context
        query = _parse(context.bodies["ExplainQuery"], body)
        return _json(explain(context.active, context.reader.lists([query], batch=False), query.orders))

    async def feedback(self, request: Request) -> Response:
        _, body = await self._read(request, JSON)
        return _json(Accepted(accepted=await self.service.feedback(_parse(FeedbackBody, body).events)), 202)

    async def reload(self, _: Request) -> Response:
        if self.service.config.key is None:
            raise Problem(403, "a server without a key reloads on SIGHUP only")
        try:
            changed = await self.service.reload()
        except UrankError:
            raise Problem(409, "the model is broken, so the old one stays; the server's log has the reason") from None
        if self.parent is not None and os.getppid() == self.parent:
            os.kill(self.parent, signal.SIGHUP)
        version = self.service.context.active.main.version
        return _json(Reloaded(version=version, changed=changed, status="reloaded" if changed else "unchanged"))

    async def model(self, _: Request) -> Response:
        active, config = self.service.context.active, self.service.config
        main, shadow, other, test = active.main, active.shadow, active.other, active.test
        facts = ModelFacts(
            version=main.version,
            name=main.name,
            method=active.method_of(main),
            methods=active.methods,
            positions=main.positions,
            features=FeatureNames(numeric=active.numeric, categorical=active.categorical),
            takes_value=active.takes_value,
            loaded=datetime.fromtimestamp(main.loaded, UTC),
            explore=None if config.exploration is None else str(config.exploration),
            shadow=shadow and Shadow(version=shadow.version, name=shadow.name),
            test=test and other and SplitTest(name=test.name, share=test.share, version=other.version),
            log=config.log is not None or config.sink is not None,
            limits=config.limits.model_dump(),
        )
        return _json(facts)

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
        return html_page(playground())

    async def samples(self, _: Request) -> Response:
        samples = enumerate(self.service.samples)
        listed = [{"number": n, "query_id": each.query_id, "items": len(each.candidates)} for n, each in samples]
        return _json({"samples": listed})

    async def sample(self, request: Request) -> Response:
        text = str(request.path_params["number"])
        number = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else -1
        if not 0 <= number < len(self.service.samples):
            raise Problem(404, f"there are {len(self.service.samples)} samples, numbered from 0")
        return _json(asdict(self.service.samples[number]))

    async def _read(self, request: Request, *allowed: str) -> tuple[str, bytes]:
        """Return type and body of a request. Pages of other sites can send other types without a preflight request."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type not in allowed:
            raise Problem(415, f"the body must be {' or '.join(allowed)}", headers={"Accept-Post": ", ".join(allowed)})
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Problem(415, "the body must not be compressed")
        return content_type, await read_body(request, self.service.config.limits, json=content_type == JSON)


def _parse(model: type[ModelT], body: bytes) -> ModelT:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type=JSON)
