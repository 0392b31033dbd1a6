"""One self-contained HTML page: sections of text, tables and charts; no scripts, no external resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from urank.report.style import svg
from urank.report.tables import Table
from urank.storage import new_file

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """A figure and its caption, which also describes it to readers who cannot see it."""

    figure: Figure
    caption: str

    @property
    def markup(self) -> Markup:
        from markupsafe import Markup

        return Markup(svg(self.figure))  # noqa: S704 - generated here, not user input


@dataclass(frozen=True)
class Section:
    """A heading and its content, rendered in the order of the fields.

    A page gets a table of contents if any of its sections has sections.
    """

    title: str
    paragraphs: Sequence[str] = ()
    bullets: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    code: str = ""
    sections: Sequence[Section] = ()


def write_page(path: str | Path, title: str, lead: str, sections: Sequence[Section | None], footer: str = "") -> None:
    """Write the page atomically; sections that are None are omitted."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(
        loader=PackageLoader("urank.report", "templates"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [section for section in sections if section is not None]
    text = environment.get_template("page.html").render(title=title, lead=lead, sections=shown, footer=footer)
    with new_file(path) as working:
        working.write_text(text, encoding="utf-8")
