"""The HTTP face of a service: its routes behind a gate, and signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from urank import __version__
from urank.serve.config import ServeConfig
from urank.serve.problems import Problem, problem_response
from urank.serve.routes import Routes
from urank.serve.security import Gate
from urank.serve.service import Service

__all__ = ["build_app"]


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
        Gate,
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
