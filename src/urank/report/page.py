"""One self-contained HTML page: sections of text, tables and figures; no script, no outside resource."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from matplotlib.figure import Figure

from urank.report.style import svg
from urank.report.tables import Table
from urank.storage import new_file

__all__ = ["Chart", "Section", "write_page"]


@dataclass(frozen=True)
class Chart:
    """A figure and what it shows, in words, which also serve those who cannot see it."""

    figure: Figure
    caption: str

    @property
    def markup(self) -> Markup:
        return Markup(svg(self.figure))  # noqa: S704 - drawn here, not taken from outside


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it, in this order; sections with others under them get a table of contents."""

    title: str
    paragraphs: Sequence[str] = ()
    bullets: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    code: str = ""
    sections: Sequence[Section] = ()


def write_page(path: str | Path, title: str, lead: str, sections: Sequence[Section], footer: str = "") -> None:
    """Write the page; it appears when it is complete."""
    environment = Environment(
        loader=PackageLoader("urank.report", "templates"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    text = template.render(title=title, lead=lead, sections=sections, footer=footer)
    with new_file(path) as working:
        working.write_text(text, encoding="utf-8")
