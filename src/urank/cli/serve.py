"""`urank serve`."""

from __future__ import annotations

import logging
import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from urank.cli.options import Quiet
from urank.errors import ConfigError

__all__ = ["serve_command"]

_LIMITS = "Limits"
_LOG = "Feedback log"
_MODELS = "Several models"


class Method(StrEnum):
    """How a list is ranked."""

    score = "score"
    match = "match"
    ctr1 = "ctr1"


def serve_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that `urank train` wrote.")],
    host: Annotated[
        str, typer.Option(help="Address to listen at. Any but a loopback address needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that serve.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of each call of the model.")] = 1,
    method: Annotated[
        Method | None,
        typer.Option(
            help="By falling **score**; by the exact **match** of items to positions; or **ctr1**, by what each would "
            "earn at position 1. A request may say otherwise.",
            show_default="the model's own",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the key that requests must show, as `Authorization: Bearer KEY`. Without it the key is "
            "that of the environment variable URANK_API_KEY, if there is one.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name under which the server may be called. May be repeated. A server at a loopback address "
            "answers to localhost and to loopback addresses, others to any name unless some are given.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="A log whose first lists the playground shows; what `urank prepare` reads."),
    ] = None,
    no_playground: Annotated[bool, typer.Option("--no-playground", help="Serve no page at `/`.")] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep rankings and clicks there, durable before they are acknowledged. `urank prepare DIR/log` reads "
            "what became of them.",
            show_default="no log",
            rich_help_panel=_LOG,
        ),
    ] = None,
    explore: Annotated[
        str | None,
        typer.Option(
            metavar="swap:SHARE|shuffle:SHARE",
            help="Randomise this share of lists, so that the next model can learn what positions do: the first item "
            "changes places with another, or all are shuffled. How, and how likely it was, is logged.",
            show_default="off",
            rich_help_panel=_LOG,
        ),
    ] = None,
    segment_mb: Annotated[
        int,
        typer.Option(
            min=1, max=4096, help="Size at which a write-ahead file gives way to the next.", rich_help_panel=_LOG
        ),
    ] = 64,
    segment_seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="Age at which it does.", rich_help_panel=_LOG)
    ] = 300,
    join_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            max=604_800,
            help="How long a closed one waits for clicks before it becomes Parquet. Later ones are joined too.",
            rich_help_panel=_LOG,
        ),
    ] = 600,
    shadow: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", help="A model that ranks silently; its orders are logged.", rich_help_panel=_MODELS
        ),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="A model for arm B of an A/B test, told by a stable hash of the user. The arm is logged, and "
            "`urank abtest analyse DIR/log` says what came of it.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    test_share: Annotated[float, typer.Option(help="Share of users in arm B.", rich_help_panel=_MODELS)] = 0.5,
    test_name: Annotated[
        str, typer.Option(help="Name of the test; another name assigns users anew.", rich_help_panel=_MODELS)
    ] = "serve",
    body_mb: Annotated[
        float, typer.Option(min=0.001, max=1024, help="Megabytes of an Arrow body.", rich_help_panel=_LIMITS)
    ] = 16,
    max_candidates: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Candidates of a query.", rich_help_panel=_LIMITS)
    ] = 2_000,
    max_queries: Annotated[
        int, typer.Option(min=1, max=100_000, help="Queries of a batch.", rich_help_panel=_LIMITS)
    ] = 100,
    max_rows: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Candidates of a batch in all.", rich_help_panel=_LIMITS)
    ] = 20_000,
    json_mb: Annotated[
        float,
        typer.Option(
            min=0.001, max=1024, help="Megabytes of a JSON body, which is slow to parse.", rich_help_panel=_LIMITS
        ),
    ] = 4,
    max_requests: Annotated[
        int, typer.Option(min=1, max=100_000, help="Requests at one time, of each worker.", rich_help_panel=_LIMITS)
    ] = 1_000,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, max=600, help="Seconds for a body to arrive, and for the answer.", rich_help_panel=_LIMITS
        ),
    ] = 10,
    ignore_unknown: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown-features",
            help="Let candidates bring features that the model does not have, as before a model that has them.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
    access_log: Annotated[bool, typer.Option("--access-log", help="Write a line for every request.")] = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP: rank, explain, take feedback, and show it in a browser.

    `POST /v1/rank` takes candidates with their raw features and gives them back best first, each with its score, the
    click probability at its place and what it is expected to earn. `POST /v1/explain` has the whole click table and
    the utility of any order. `POST /v1/feedback` takes clicks. `/docs` describes the API, `/` is the playground,
    `/metrics` is for Prometheus, `/healthz` and `/readyz` for whoever watches over it. `urank.Client` speaks to it from
    Python.

    SIGHUP, or `POST /v1/reload` with the key, loads the model anew without dropping a request; a broken one is refused,
    and the old one stays. SIGTERM finishes the requests at hand and ends.

    Example: `urank serve model --sample log.parquet --log feedback`
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to load anew

    from urank.serve.models import Sources, SplitTest
    from urank.serve.processes import Worker, open_socket, serve
    from urank.serve.ranking import Exploration
    from urank.serve.schemas import Limits
    from urank.serve.settings import ServeConfig, is_loopback, read_key

    key = read_key(key_file)
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from outside, so a key is needed: --key-file, or URANK_API_KEY"
        )
    if explore is not None and log is None:
        raise ConfigError("--explore randomises lists to learn from them, so it needs --log DIR")
    if test is None and (test_share, test_name) != (0.5, "serve"):
        raise ConfigError("--test-share and --test-name are of a test, which needs --test MODEL")
    if sample is not None and no_playground:
        raise ConfigError("--sample is for the playground, which --no-playground switches off")
    hosts = tuple(allow_host or ())
    if is_loopback(host):
        hosts = (*hosts, "localhost", "127.0.0.1", "::1", host)
    config = ServeConfig(
        sources=Sources(
            main=model,
            method=None if method is None else method.value,
            shadow=shadow,
            test=None if test is None else SplitTest(test, test_share, test_name),
            threads=threads,
        ),
        key=key,
        hosts=hosts,
        limits=Limits(
            body_bytes=int(body_mb * 2**20),
            candidates=max_candidates,
            queries=max_queries,
            rows=max_rows,
            json_bytes=int(json_mb * 2**20),
            requests=max_requests,
            seconds=timeout,
        ),
        log=log,
        exploration=None if explore is None else Exploration.parse(explore),
        sample=sample,
        playground=not no_playground,
        ignore_unknown=ignore_unknown,
        segment_bytes=segment_mb * 2**20,
        segment_seconds=segment_seconds,
        join_seconds=join_seconds,
    )
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if (worker := Worker.here()) is not None:
        worker.serve(config, access_log=access_log)
        return
    sock = open_socket(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{sock.getsockname()[1]}"

    def ready() -> None:
        if not quiet:
            page = "" if no_playground else ", the playground with a browser at the same address"
            Console().print(f"Serving {model} at {address}{page}. Ctrl-C ends it.", highlight=False, soft_wrap=True)

    with sock:
        serve(config, sock, workers=workers, access_log=access_log, ready=ready)
