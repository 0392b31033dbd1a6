"""Self-contained HTML: an answer, then sections of text, tables and charts; no scripts, no external resources.

The same sections make a page and the view of a result in a notebook. Charts need matplotlib, which is an extra; without
it they are left out, and a sentence says how to get them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from urank.report.style import themed_svg
from urank.report.tables import Table
from urank.storage import new_file

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.figure import Figure


_WIDE, _NARROW = 10.0, 4.2
"""Widths of a chart in inches, on a screen and on a phone; either shows its text in 11 to 14 pixels."""
_WITHOUT_CHARTS = "Charts are left out, since they need matplotlib: pip install 'urank[report]'"


@dataclass(frozen=True)
class Chart:
    """A function that draws a figure, and its caption, which also describes it to readers who cannot see it."""

    draw: Callable[[], Figure]
    caption: str

    @cached_property
    def markup(self) -> Markup:
        """The figure drawn for a screen and for a phone, of which the style sheet shows one; drawn once."""
        from markupsafe import Markup

        label = f'<svg role="img" aria-label="{escape(self.caption)}" '
        drawn = {"wide": themed_svg(self.draw, _WIDE), "narrow": themed_svg(self.draw, _NARROW)}
        parts = [f'<div class="{kind}">{svg.replace("<svg ", label, 1)}</div>' for kind, svg in drawn.items()]
        return Markup("".join(parts))  # noqa: S704 - generated here, not user input


@dataclass(frozen=True)
class Section:
    """A heading and its content, rendered in the order of the fields; `terms` are names in the charts and tables.

    A page gets a table of contents if any of its sections has sections.
    """

    title: str
    paragraphs: Sequence[str] = ()
    bullets: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    code: str = ""
    sections: Sequence[Section] = ()


@dataclass(frozen=True)
class Summary:
    """The top of a page: the answer in plain words, the evidence for it, and what to do next.

    Text between backticks is code. The tone is `good` or `bad`, or empty for an answer that is neither.
    """

    answer: str
    evidence: str = ""
    next_step: str = ""
    tone: str = ""


def write_page(
    path: str | Path,
    title: str,
    summary: Summary,
    sections: Sequence[Section | None],
    *,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Write the page atomically; sections that are None are omitted.

    Args:
        report: called with the number of charts drawn, and of all charts; drawing takes nearly all of the time.
    """
    if report is not None and _can_draw():
        charts = [chart for section in sections if section is not None for chart in _charts(section)]
        for number, chart in enumerate(charts, start=1):
            _ = chart.markup  # which keeps the drawing
            report(number, len(charts))
    facts = {"title": title, "version": version("urank"), "command": _command()}
    text = _rendered("page.html", summary, sections, **facts)
    with new_file(path) as working:
        working.write_text(text, encoding="utf-8")


def notebook_html(summary: Summary, sections: Sequence[Section | None]) -> str:
    """Return the same content as an element for the output of a notebook's cell."""
    return _rendered("notebook.html", summary, sections)


def _rendered(template: str, summary: Summary, sections: Sequence[Section | None], **facts: Any) -> str:
    shown = [section for section in sections if section is not None]
    charts = _can_draw()
    missing = "" if charts or not any(any(_charts(section)) for section in shown) else _WITHOUT_CHARTS
    content = {"summary": summary, "sections": shown, "charts": charts, "missing": missing, **facts}
    return _templates().get_template(template).render(**content)


def _can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _charts(section: Section) -> Iterator[Chart]:
    yield from section.charts
    for inner in section.sections:
        yield from _charts(inner)


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, select_autoescape

    loader = PackageLoader("urank.report", "templates")
    return Environment(loader=loader, autoescape=select_autoescape(["html"]), trim_blocks=True, lstrip_blocks=True)


def _command() -> str:
    """Return the urank command that this process runs; empty if it runs something else."""
    program = Path(sys.argv[0])
    own = program.stem == "urank" or (program.name, program.parent.name) == ("__main__.py", "urank")
    return shlex.join(["urank", *sys.argv[1:]]) if own else ""
