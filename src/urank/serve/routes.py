"""A handler for each path, and what is measured of every request."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from urank.errors import UrankError
from urank.serve.arrow import ARROW_TYPE, read_lists, write_rankings
from urank.serve.bodies import FeedbackBody
from urank.serve.docs import docs_page
from urank.serve.explain import explain
from urank.serve.metrics import METRICS_TYPE
from urank.serve.openapi import body_models, describe
from urank.serve.parsing import content_type, parse, parse_rank
from urank.serve.playground import playground_page
from urank.serve.problems import Problem, problem_response
from urank.serve.security import read_body
from urank.serve.service import Ranked, Service

__all__ = ["Routes"]

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
