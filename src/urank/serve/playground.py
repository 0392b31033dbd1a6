"""The playground: its page, and sample lists from a log.

Pages are sent with a content security policy that allows only their own scripts and styles, and requests to this
server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import polars as pl
from starlette.responses import Response

from urank.errors import ConfigError
from urank.log.reader import read
from urank.report.style import theme_css

MAX_SAMPLES = 50


@dataclass(frozen=True)
class PlaygroundSample:
    """A logged list: its candidates as in a request, the item ids in the order shown, and those clicked.

    `moved` is the mean number of places between an item's position in the log and that by the server.
    """

    query_id: str
    candidates: list[dict[str, Any]]
    logged: list[str]
    clicked: list[str]
    moved: float = 0.0


def read_samples(
    source: str,
    numeric: Sequence[str],
    categorical: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    most: int = MAX_SAMPLES,
) -> list[PlaygroundSample]:
    """Read the first list of each of the first queries of a log, which must have the features.

    `source` is as for `urank.read`; `columns` are those of the log that the model was trained on, by role.
    """
    log = read(source, known=columns)
    known = {*log.schema.named("numeric"), *log.schema.named("categorical")}
    absent = [name for name in (*numeric, *categorical) if name not in known]
    if absent:
        raise ConfigError(f"--sample {source} must have the features of the model; it lacks '{absent[0]}'")
    frame, _ = next(iter(log.batches()))
    if "session_id" in frame.columns:  # other lists of a query usually have the same items
        frame = frame.filter(pl.col("session_id") == pl.col("session_id").first().over("query_id"))
    groups = frame.partition_by("query_id", maintain_order=True)[:most]
    return [_sample(group.sort("position"), numeric, categorical) for group in groups]


def _sample(group: pl.DataFrame, numeric: Sequence[str], categorical: Sequence[str]) -> PlaygroundSample:
    ids = _ids(group)
    features = group.select(
        *[pl.col(name).cast(pl.Float64).fill_nan(None) for name in numeric],
        *[pl.col(name).cast(pl.String) for name in categorical],
    )
    candidates = [{"item_id": each, "features": row} for each, row in zip(ids, features.to_dicts(), strict=True)]
    if "value" in group.columns:
        for candidate, value in zip(candidates, group["value"].to_list(), strict=True):
            candidate["value"] = value
    clicked = [each for each, click in zip(ids, group["click"].to_list(), strict=True) if click]
    return PlaygroundSample(str(group["query_id"][0]), candidates, ids, clicked)


def _ids(group: pl.DataFrame) -> list[str]:
    """Return unique item ids: with the position where one occurs twice, the position alone if the log has none."""
    if "item_id" not in group.columns:
        return [f"item {position}" for position in group["position"]]
    ids = [str(each) for each in group["item_id"].to_list()]
    counts = Counter(ids)
    return [each if counts[each] == 1 else f"{each} at {k}" for each, k in zip(ids, group["position"], strict=True)]


def html_page(page: str) -> Response:
    """Return a page with a policy that allows only its own scripts and styles, by their hashes."""
    return Response(page, media_type="text/html", headers={"content-security-policy": _policy(page)})


@cache
def playground() -> str:
    """Return the page of the playground, in the theme of the reports."""
    page = files("urank.serve").joinpath("playground.html").read_text(encoding="utf-8")
    return page.replace("/* theme.css */", theme_css())


@cache
def _policy(page: str) -> str:
    return (
        f"default-src 'none'; script-src {_hashes(page, 'script')}; style-src {_hashes(page, 'style')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, tag: str) -> str:
    """Return the hashes of the elements with this tag, in the syntax of a policy.

    >>> _hashes("<p>no script</p>", "script")
    "'none'"
    """
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
