"""The playground: one page, sent with a policy that lets it run its own script and talk to this server only."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

__all__ = ["html_page", "playground_page"]


def playground_page() -> Response:
    """The page, as it lies beside this module."""
    return html_page(_playground())


def html_page(page: str) -> Response:
    """A page of our own: only the scripts and styles that stand in it run, known by their hashes."""
    return Response(page, media_type="text/html", headers={"content-security-policy": _policy(page)})


@cache
def _playground() -> str:
    return files("urank.serve").joinpath("playground.html").read_text(encoding="utf-8")


@cache
def _policy(page: str) -> str:
    scripts, styles = (_hashes(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, tag: str) -> str:
    """The hashes of the elements of a tag, as a policy names them.

    >>> _hashes("<p>no script</p>", "script")
    "'none'"
    """
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
