"""The documentation site: its links and navigation, the references, the strict build, and search in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from markdown.extensions.toc import slugify
from playwright.sync_api import sync_playwright

import urank
from pages import Page
from serve.browser import launch
from urank.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "site"


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as the site makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def nav_pages(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from nav_pages(target)


def test_every_page_is_in_the_navigation() -> None:
    pages = list(nav_pages(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))


def test_links_and_anchors_resolve() -> None:
    wrong = []
    for page in (*ROOT.glob("*.md"), *DOCS.glob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
            path, _, anchor = target.partition("#")
            if re.match(r"https?:|mailto:", target):
                continue
            linked = page if not path else page.parent / path
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                wrong.append(f"{page.name}: {target}")
    assert wrong == []


def test_the_api_reference_has_every_public_name() -> None:
    documented = re.findall(r"^::: urank\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(documented) == sorted(set(dir(urank)) - {"__version__"})


def test_the_command_line_reference_has_every_command_and_option() -> None:
    spec = spec_from_file_location("build_site", DOCS / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    reference = module.cli_reference()
    assert reference == module.cli_reference()
    assert {name.split()[1] for name in re.findall(r"^## (urank .*)$", reference, re.MULTILINE)} == set(COMMANDS)
    for _, command in module.commands():
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.opts[0] in reference


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, as `make docs` builds it."""
    built = subprocess.run([sys.executable, DOCS / "build_site.py"], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return SITE


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_it_builds_without_warnings_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in pages}
    for path in pages:
        page = Page()
        page.feed(re.sub(r"<a [^>]*>", "", path.read_text(encoding="utf-8")))  # links may lead anywhere
        assert [url for url in page.fetched if url.startswith(("http:", "https:", "//"))] == [], path.name
    assert not list(site.glob("*.py"))


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_search_and_dark_mode_work_without_a_server(site: Path) -> None:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(color_scheme="dark", viewport={"width": 1280, "height": 900})
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((site / "index.html").as_uri())
        assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
        page.get_by_title("Switch to light mode").click()
        assert page.locator("body").get_attribute("data-md-color-scheme") == "default"
        page.keyboard.press("Control+k")
        page.get_by_placeholder("Search").press_sequentially("doubly robust")
        page.get_by_text("Other estimators").first.wait_for()
        page.set_viewport_size({"width": 390, "height": 800})
        for path in sorted(site.glob("*.html")):
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.name
        browser.close()
    assert [url for url in asked if not url.startswith("file:")] == []
    assert said == []
