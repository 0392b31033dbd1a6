"""`urank serve`, and `urank feedback`, which turns what a server logged into a click log."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from urank.cli.options import MethodOption, PrintOptions, Quiet, command
from urank.config import validate
from urank.errors import ConfigError
from urank.serve.server_settings import Limits

if TYPE_CHECKING:
    from urank.ranking.matching import Method
    from urank.serve.feedback_export import ExportStats
    from urank.serve.models import UserSplit


@command()
def feedback_command(
    log: Annotated[
        str,
        typer.Argument(metavar="DIR|URL", help="Feedback log of `urank serve --log`, or database of `--sink`."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder for the files of an export from PostgreSQL."),
    ] = None,
    window: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long rankings wait for clicks before they are exported."),
    ] = 0.0,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="OTHER",
            help="Feedback log of another server, which is only read: join its feedback on rankings of this one. May "
            "be repeated, and may be DIR itself.",
        ),
    ] = None,
    upload: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Copy new and changed files to a folder of any fsspec URL, as `s3://bucket/served` (needs "
            "`pip install 'urank[remote]'`).",
        ),
    ] = None,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Export the feedback log of a server to Parquet for training.

    Rankings and feedback become one row for each item shown, clicked or not, as `urank prepare` and `urank abtest
    analyse` read it. Each click counts once, however often it was reported. Clicks that arrive after the export of
    their ranking are joined later. The command may run while the server does, as often as you like, and may be
    interrupted at any time: nothing is lost or counted twice.

    Feedback on rankings that are not in this log is kept. With several servers, each with its own folder, `--with`
    joins the feedback that others received.

    Example: `urank feedback served`, `urank feedback a --with b`, or `urank feedback postgresql://db/urank -o served`
    """
    from urank.serve.feedback_export import LogFolders, export_feedback, shadow_agreement  # Polars is slow to load

    with printing.progress() as report:
        found = export_feedback(
            log, output=output, also=also or [], window_seconds=window, upload_to=upload, report=report
        )
    folder = Path(log) if output is None else output
    if found is None:
        raise ConfigError(f"{folder} is being exported by another process; wait until it has ended")
    logs = [path for path in LogFolders(folder).paths if any(path.glob("[!.]*.parquet"))]
    ranked, agreed = shadow_agreement(folder)
    shadow: dict[str, Any] | None = {"rankings": ranked, "same_first": agreed} if ranked else None
    document = {**asdict(found), "logs": [str(path) for path in logs], "shadow": shadow}
    printing.show(document, lambda console: None, *_lines(found, logs, ranked, agreed))


def _lines(found: ExportStats, logs: list[Path], ranked: int, agreed: int) -> list[str]:
    lines = [
        f"{found.rankings:,} rankings with {found.impressions:,} impressions, {found.clicks:,} clicks and "
        f"{found.conversions:,} conversions exported",
        f"earlier impressions amended: {found.amended:,}; reports unmatched: {found.unmatched:,}, "
        f"waiting for their rankings: {found.waiting:,}",
    ]
    if found.valueless:
        lines.append(f"values dropped, since their rankings were logged without values: {found.valueless:,}")
    if ranked:
        lines.append(f"the shadow had the same item first in {agreed:,} of {ranked:,} rankings ({agreed / ranked:.1%})")
    if found.uploaded:
        lines.append(f"files uploaded: {found.uploaded:,}")
    if len(logs) > 1:
        lines.append(f"the columns changed, so there are {len(logs)} logs: {', '.join(map(str, logs))}")
    if logs:
        lines.append(f"next: urank prepare {max(logs, key=_newest)} -o prepared")
    return lines


def _newest(log: Path) -> str:
    """Return the name of its newest part, which begins with the time."""
    return max(path.name for path in log.glob("[!.]*.parquet"))


_LIMITS = "Limits"
_MAXIMA = {
    "--max-candidates": "candidates",
    "--max-queries": "queries",
    "--max-rows": "rows",
    "--max-items": "items",
    "--max-requests": "requests",
    "--timeout": "seconds",
}
_LOG = "Feedback log"
_MODELS = "Several models"
_MONITORING = "Monitoring"


class LogFormatName(StrEnum):
    TEXT = "text"
    JSON = "json"


class UnknownItems(StrEnum):
    """What to do about items that the server does not know."""

    refuse = "refuse"
    context = "context"


@command(Limits, _MAXIMA, {_LIMITS: " ".join(_MAXIMA.values())})
def serve_command(
    settings: dict[str, Any],
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="An artifact of `urank train`.", show_default=False)
    ] = None,
    named: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME=MODEL",
            help="Model at `/v1/models/NAME/rank`, instead of MODEL. May be repeated; the first is also at "
            "`/v1/rank`, and --shadow and --arm-b apply to it.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Parquet file with features of items by `item_id`, which requests may then leave out. It is read "
            "again when it changes, and `PUT /v1/items` changes it.",
        ),
    ] = None,
    unknown_items: Annotated[
        UnknownItems,
        typer.Option(
            help="What to do about items that the file of --items lacks: **refuse** them, or rank them by the "
            "**context** alone."
        ),
    ] = UnknownItems.refuse,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but a loopback address needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Number of worker processes.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads per call of the model.")] = 1,
    method: MethodOption = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the key that requests must present as `Authorization: Bearer KEY`. By default the key "
            "of the environment variable URANK_API_KEY, if it is set.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Allowed name in the Host header. May be repeated. A server on a loopback address always allows "
            "localhost and loopback addresses; any other server allows all names unless some are given.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="LOG", help="Log whose first lists the playground shows; anything that `urank prepare` reads."
        ),
    ] = None,
    no_playground: Annotated[bool, typer.Option("--no-playground", help="Do not serve the page at `/`.")] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the feedback log. Rankings and clicks are durable before they are acknowledged. "
            "`urank prepare DIR/log` reads the result.",
            show_default="no log",
            rich_help_panel=_LOG,
        ),
    ] = None,
    explore: Annotated[
        str | None,
        typer.Option(
            metavar="swap:SHARE|shuffle:SHARE",
            help="Randomise this share of lists, so that the next model can learn position effects: swap the first "
            "item with another, or shuffle all. The policy and the propensities are logged.",
            show_default="off",
            rich_help_panel=_LOG,
        ),
    ] = None,
    sink: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="PostgreSQL database that takes the feedback log instead of a folder, as "
            "`postgresql://user@host/database` (needs `pip install 'urank[postgres]'`). `urank feedback URL -o DIR` "
            "exports it. A password may come from PGPASSWORD.",
            show_default="none",
            rich_help_panel=_LOG,
        ),
    ] = None,
    shadow: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", help="Shadow model: its rankings are logged but not shown.", rich_help_panel=_MODELS
        ),
    ] = None,
    arm_b: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Model for arm B of an A/B test, assigned by a stable hash of the user. The arm is logged, and "
            "`urank abtest analyse DIR/log` evaluates the test.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    arm_b_share: Annotated[
        str,
        typer.Option(
            metavar="SHARE|FILE",
            help="Share of users in arm B, or a file with it, which is read again when it changes.",
            rich_help_panel=_MODELS,
        ),
    ] = "0.5",
    abtest_name: Annotated[
        str, typer.Option(help="Name of the A/B test; another name reassigns users.", rich_help_panel=_MODELS)
    ] = "serve",
    body_mb: Annotated[
        float, typer.Option(min=0.001, max=1024, help="Largest Arrow body in megabytes.", rich_help_panel=_LIMITS)
    ] = 16,
    json_mb: Annotated[
        float,
        typer.Option(
            min=0.001, max=1024, help="Largest JSON body in megabytes; JSON is slow to parse.", rich_help_panel=_LIMITS
        ),
    ] = 4,
    ignore_unknown: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown-features",
            help="Accept candidates with features that the model does not have, as before deploying a model with them.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log every request.", rich_help_panel=_MONITORING)
    ] = False,
    log_format: Annotated[
        LogFormatName,
        typer.Option(help="Format of the server's own log on standard error.", rich_help_panel=_MONITORING),
    ] = LogFormatName.TEXT,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Export a span of every request by OpenTelemetry (OTLP over HTTP), configured by the standard OTEL "
            "variables. Needs `urank[otel]`.",
            rich_help_panel=_MONITORING,
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP: rank, explain, collect feedback, and explore lists in a browser.

    `POST /v1/rank` takes candidates with their raw features, or their ids with `--items`, and returns them best first,
    each with its score, click probability and expected utility. `POST /v1/explain` returns the whole click table and
    the utility of any order.
    `POST /v1/feedback` takes clicks. `/docs` describes the API, `/` is the playground, `/metrics` is for Prometheus,
    `/healthz` and `/readyz` are for supervisors. `urank.Client` is the Python client.

    SIGHUP, or `POST /v1/reload` with the key, reloads the model without dropping a request; a broken model is refused,
    and the old one stays. SIGTERM finishes the requests in flight and exits.

    Example: `urank serve model --sample log.parquet --log feedback`
    """
    from urank.serve.logs import configure_logging
    from urank.serve.processes import Worker, announce, open_socket, run, supervise
    from urank.serve.server_settings import ServeConfig, is_loopback, read_key

    worker = Worker.from_environment()
    if worker is None:  # a worker starts with it blocked, and must not lose it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are models to reload
    key = read_key(key_file)
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from outside, so a key is required: --key-file, or URANK_API_KEY"
        )
    if log is not None and sink is not None:
        raise ConfigError("--log writes to a folder and --sink to a database; choose one")
    if explore is not None and log is None and sink is None:
        raise ConfigError("--explore randomises lists to learn from them, so it needs --log DIR or --sink URL")
    if arm_b is None and (arm_b_share, abtest_name) != ("0.5", "serve"):
        raise ConfigError("--arm-b-share and --abtest-name need a model for arm B: --arm-b MODEL")
    if sample is not None and no_playground:
        raise ConfigError("--sample is for the playground, which --no-playground switches off")
    if absent := [name for name in ("msgspec", "starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"urank serve needs {', '.join(absent)}: pip install 'urank[serve]'")
    if trace and (find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None):
        raise ConfigError("--trace needs OpenTelemetry: pip install 'urank[otel]'")
    configure_logging(log_format.value, quiet=quiet)

    models = _named_models(model, named or [])
    served = ", ".join(map(str, models.values()))

    def message(sock: socket.socket) -> str:
        page = "" if no_playground else "; open it in a browser for the playground"
        name = f"[{host}]" if ":" in host else host
        return f"Serving {served} at http://{name}:{sock.getsockname()[1]}{page}. Ctrl-C ends it."

    if worker is None and workers > 1:
        command = [sys.executable, "-m", "urank", *sys.argv[1:]]
        with open_socket(host, port) as sock:
            supervise(sock, workers, command, message=message(sock), log_format=log_format.value, quiet=quiet)

    from urank.serve.list_ranking import Exploration  # slow to import, and the supervisor needs none of it
    from urank.serve.models import ModelSources
    from urank.serve.postgres_sink import place_of

    if sink is not None:
        place_of(sink)  # refuse an invalid URL before the models are loaded
    hosts = tuple(allow_host or ())
    if is_loopback(host):
        hosts = (*hosts, "localhost", "127.0.0.1", "::1", host)
    (name, main), *others = models.items()
    ranked_by: Method | None = None if method is None else method.value
    split = None if arm_b is None else _user_split(arm_b, arm_b_share, abtest_name)
    config = ServeConfig(
        sources=ModelSources(main=main, method=ranked_by, shadow=shadow, test=split, threads=threads),
        name=name,
        others={name: ModelSources(main=path, method=ranked_by, threads=threads) for name, path in others},
        items=items,
        rank_unknown=unknown_items == UnknownItems.context,
        key=key,
        hosts=hosts,
        limits=validate(Limits, settings | {"body_bytes": int(body_mb * 2**20), "json_bytes": int(json_mb * 2**20)}),
        log=log,
        sink=sink,
        exploration=None if explore is None else Exploration.parse(explore),
        sample=sample,
        playground=not no_playground,
        ignore_unknown=ignore_unknown,
        access_log=access_log,
        trace=trace,
    )
    if worker is not None:
        worker.serve(config)
        return
    with open_socket(host, port) as sock:
        run(config, sock, partial(announce, message(sock), log_format.value, quiet=quiet))


def _named_models(model: Path | None, named: Sequence[str]) -> dict[str, Path]:
    """Return the models by name; the only one is called `default`."""
    if (model is None) == (not named):
        raise ConfigError(
            "urank serve needs either MODEL or --model NAME=MODEL; got " + ("both" if named else "neither")
        )
    if model is not None:
        return {"default": model}
    models: dict[str, Path] = {}
    for text in named:
        name, sign, path = text.partition("=")
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name) or not sign or not path or name in models:
            raise ConfigError(f"--model must be NAME=MODEL, with a name of letters and digits of its own; got '{text}'")
        models[name] = Path(path)
    return models


def _user_split(model: Path, share: str, name: str) -> UserSplit:
    from urank.serve.models import UserSplit

    try:
        number = float(share)
    except ValueError:
        split = UserSplit(model, name=name, share_file=Path(share))
        split.current()  # fail fast
        return split
    return UserSplit(model, number, name)
