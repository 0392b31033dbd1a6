"""The playground in a real browser on a real server: what it shows is what the server says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import polars as pl
import pytest
from playwright.sync_api import Browser, Locator, expect, sync_playwright

from serve.browser import Visit, launch, visiting
from serve.server import running

if TYPE_CHECKING:  # torch is slow to load
    from simulated import Small

HOSTILE = "<img src=x onerror=alert(1)>"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="session")
def sample_log(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with one list of each of twelve queries; in the third an item has markup for a name."""
    log = small.simulation.log.filter(pl.col("session_id") == pl.col("session_id").first().over("query_id"))
    queries = log["query_id"].unique(maintain_order=True).head(12)
    hostile = (pl.col("query_id") == queries[2]) & (pl.col("position") == 2)
    name = pl.when(hostile).then(pl.lit(HOSTILE)).otherwise(pl.col("item_id"))
    path = tmp_path_factory.mktemp("sample") / "log.parquet"
    log.filter(pl.col("query_id").is_in(queries.implode())).with_columns(item_id=name).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def address(served_model: Path, sample_log: Path) -> Iterator[str]:
    """A server with a sample of a log."""
    with running(served_model, "--sample", sample_log) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Only as long as this module needs it: while it runs, nothing else in the process can run an event loop.
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Visit]:
    """The page, as it is on a desk."""
    with visiting(browser, address, viewport={"width": 1360, "height": 1500}) as visit:
        visit.shown()
        yield visit


def order_of(answer: dict[str, Any], name: str) -> dict[str, Any]:
    (order,) = (order for order in answer["orders"] if order["name"] == name)
    return dict(order)


def moved(order: list[str], start: int, end: int) -> list[str]:
    rest = order[:start] + order[start + 1 :]
    return [*rest[:end], order[start], *rest[end:]]


def center(locator: Locator) -> tuple[float, float]:
    box = locator.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def cells(visit: Visit) -> dict[str, list[tuple[float, str, bool]]]:
    """Item -> for each position: the click probability, the number in the cell, whether it is marked."""
    script = """rows => rows.map(row => [row.dataset.item, [...row.querySelectorAll("td.cell")].map(cell =>
        [Number(cell.dataset.click), cell.querySelector(".number").textContent, cell.classList.contains("placed")])])"""
    return {
        item: [(c, text, placed) for c, text, placed in row]
        for item, row in visit.page.locator("#heat tbody tr").evaluate_all(script)
    }


def assert_heat_map(visit: Visit, answer: dict[str, Any], chosen: str) -> None:
    shown = cells(visit)
    placed = order_of(answer, chosen)["items"]
    assert list(shown)[: len(placed)] == placed
    assert shown.keys() == {item["item_id"] for item in answer["items"]}
    for item in answer["items"]:
        row = shown[item["item_id"]]
        assert [click for click, _, _ in row] == item["clicks"]
        assert [float(text) for _, text, _ in row] == pytest.approx([100 * c for c in item["clicks"]], abs=0.05 + 1e-9)
        at = [position for position, (_, _, mark) in enumerate(row) if mark]
        assert at == ([placed.index(item["item_id"])] if item["item_id"] in placed else [])


class _Attributes(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}


def test_page_is_one_file_that_a_strict_policy_can_allow() -> None:
    text = (files("urank.serve") / "playground.html").read_text(encoding="utf-8")
    page = _Attributes()
    page.feed(text)
    assert (page.tags.count("style"), page.tags.count("script")) == (1, 1)
    assert not {name for name in page.names if name == "style" or name == "src" or name.startswith("on")}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    addresses = set(re.findall(r"https?://[^'\"]*", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a format; nobody asks there


@pytest.mark.slow
def test_heat_map_has_the_numbers_of_the_server(visit: Visit) -> None:
    sample = visit.sample(0)
    answer = visit.explain(sample["candidates"], logged=sample["logged"])
    assert_heat_map(visit, answer, answer["method"])
    assert visit.page.locator("#heat thead th[scope=col]").count() == 2 + answer["positions"]  # item, value
    for name in ("match", "ctr1", "logged"):
        visit.page.locator(f".order[data-order={name}] .order-head").click()
        assert_heat_map(visit, answer, name)


@pytest.mark.slow
def test_orders_stand_side_by_side_with_their_utilities(visit: Visit) -> None:
    sample = visit.sample(0)
    answer = visit.explain(sample["candidates"], logged=sample["logged"])
    logged = order_of(answer, "logged")["utility"]
    for order in answer["orders"]:
        column = visit.page.locator(f".order[data-order={order['name']}]")
        items = column.locator("li .chip").evaluate_all("chips => chips.map(chip => chip.dataset.item)")
        assert items == order["items"]
        utility = column.locator(".utility")
        assert float(utility.get_attribute("data-utility") or "nan") == order["utility"]
        assert float((utility.text_content() or "").replace(",", "")) == pytest.approx(order["utility"], rel=1e-3)
        if order["name"] != "logged":
            gain = 100 * (order["utility"] - logged) / logged
            text = (column.locator(".gain").text_content() or "").replace("−", "-").replace("\u00a0", " ")
            assert float(text.split(" %")[0]) == pytest.approx(gain, abs=0.05 + 1e-9)
            assert text.endswith("% vs logged")
    assert visit.page.locator(".order[data-order=logged] .clicked").count() == len(sample["clicked"])
    assert visit.my_order()[: len(sample["logged"])] == order_of(answer, "match")["items"]
    assert visit.my_utility() == order_of(answer, "match")["utility"]


def test_dragging_moves_an_item_and_asks_for_the_utility(visit: Visit) -> None:
    candidates = visit.sample(0)["candidates"]
    before, first = visit.my_order(), visit.my_utility()
    rows = visit.page.locator("#my-list > li")
    visit.page.mouse.move(*center(rows.nth(0).locator(".chip")))
    visit.page.mouse.down()
    visit.page.mouse.move(*center(rows.nth(1)), steps=3)
    visit.page.mouse.move(*center(rows.nth(4)), steps=5)
    wanted = moved(before, 0, 4)
    utility = order_of(visit.explain(candidates, mine=wanted), "mine")["utility"]
    expect(visit.page.locator("#my-utility")).to_have_attribute("data-utility", str(utility))  # before it is dropped
    visit.page.mouse.up()
    visit.has_my_order(wanted)
    assert visit.my_utility() == utility < first
    assert_heat_map(visit, visit.explain(candidates, mine=wanted), "mine")
    text = (visit.page.locator("[data-change=before]").text_content() or "").replace("−", "-")
    assert float(text.split(" ")[0]) == pytest.approx(utility - first, abs=1e-3)
    assert visit.page.locator("[data-change=best]").text_content() == text.replace("-", "−")
    visit.page.locator("#reset").click()
    assert (visit.my_order(), visit.my_utility()) == (before, first)


@pytest.mark.slow
def test_a_drag_that_is_given_up_changes_nothing(visit: Visit) -> None:
    before = visit.my_order()
    rows = visit.page.locator("#my-list > li")
    visit.page.mouse.move(*center(rows.nth(2).locator(".chip")))
    visit.page.mouse.down()
    visit.page.mouse.move(*center(rows.nth(5)), steps=4)
    visit.page.keyboard.press("Escape")
    visit.page.mouse.up()
    visit.has_my_order(before)
    assert visit.my_utility() == order_of(visit.explain(visit.sample(0)["candidates"]), "match")["utility"]


@pytest.mark.slow
def test_keys_and_buttons_move_an_item(visit: Visit) -> None:
    candidates = visit.sample(0)["candidates"]
    order = visit.my_order()
    first = order[0]
    visit.page.locator("#my-list > li .chip").nth(0).focus()
    for place in (1, 2):
        visit.page.keyboard.press("Alt+ArrowDown")
        order = moved(order, place - 1, place)
        visit.has_my_order(order)
        assert visit.my_utility() == order_of(visit.explain(candidates, mine=order), "mine")["utility"]
        said = visit.page.locator("#announce")
        expect(said).to_contain_text(f"{first} is at position {place + 1} of ")
        expect(said).to_contain_text("to the best order")
    focused = visit.page.evaluate("document.activeElement.dataset.item")
    assert focused == first
    visit.page.keyboard.press("Alt+ArrowUp")
    visit.shown()
    visit.page.locator("#my-list > li").nth(1).get_by_role("button", name="Move").first.click()
    visit.has_my_order([first, *[item for item in order if item != first]])
    visit.page.locator("#my-list > li .step").first.click(force=True)  # up from the top
    assert visit.my_order()[0] == first
    visit.page.locator("#my-list > li .chip").first.focus()
    visit.page.keyboard.press("ArrowDown")  # without Alt only the focus moves
    assert visit.page.evaluate("document.activeElement.dataset.item") == visit.my_order()[1]
    assert visit.my_order()[0] == first


@pytest.mark.slow
def test_an_item_lights_up_wherever_it_is(visit: Visit) -> None:
    lit = "() => [...document.querySelectorAll('.lit')].map(element => element.dataset.item)"
    visit.page.locator("#heat tbody tr").nth(3).locator("td.cell").last.hover()
    item = visit.page.locator("#heat tbody tr").nth(3).get_attribute("data-item")
    assert set(visit.page.evaluate(lit)) == {item}
    places = ".order .chip.lit", "#my-list li.lit", "#heat tr.lit", "#chart .curve.lit", "#links path.lit"
    assert all(visit.page.locator(place).count() > 0 for place in places)
    visit.page.mouse.move(2, 2)
    assert visit.page.evaluate(lit) == []
    visit.page.locator("#legend .chip").first.click()  # stays until it is clicked again
    visit.page.mouse.move(2, 2)
    assert len(set(visit.page.evaluate(lit))) == 1
    visit.page.keyboard.press("Escape")
    assert visit.page.evaluate(lit) == []


@pytest.mark.slow
def test_curves_are_drawn_where_the_numbers_are(visit: Visit) -> None:
    answer = visit.explain(visit.sample(0)["candidates"])
    script = """curves => curves.map(curve => [curve.dataset.item, curve.querySelector("path").getAttribute("d")])"""
    drawn = dict(visit.page.locator("#chart .curve").evaluate_all(script))
    heights = {item: [float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)] for item, path in drawn.items()}
    clicks = {item["item_id"]: item["clicks"] for item in answer["items"]}
    assert heights.keys() == clicks.keys()
    (one, *others) = clicks
    scale = (heights[one][0] - heights[one][-1]) / (clicks[one][0] - clicks[one][-1])  # pixels for a probability of 1
    for item in others:
        expected = [heights[one][0] + scale * (click - clicks[one][0]) for click in clicks[item]]
        assert heights[item] == pytest.approx(expected, abs=0.01)
    x, y = center(visit.page.locator("#chart .curve circle").first)
    visit.page.mouse.move(x, y)
    expect(visit.page.locator("#readout")).to_contain_text(re.compile(r"position \d+: \d+\.\d+"))


@pytest.mark.slow
def test_queries_of_the_sample_can_be_walked_through_and_found(visit: Visit) -> None:
    samples = httpx.get(f"{visit.address}/v1/samples").json()["samples"]
    assert visit.page.locator("#query option").count() == len(samples) == 12
    visit.page.locator("#step-on").click()
    visit.shown()
    expect(visit.page.locator("#query")).to_have_value("1")
    wait_for_items(visit, 1)
    visit.page.locator("#step-back").click()
    wait_for_items(visit, 0)
    expect(visit.page.locator("#step-back")).to_be_disabled()
    visit.page.locator("#search").fill(samples[5]["query_id"].upper())
    wait_for_items(visit, 5)
    visit.page.locator("#search").fill("no query is called so")
    assert visit.page.locator("#query").text_content() == "no such query"


def wait_for_items(visit: Visit, number: int) -> None:
    first = visit.sample(number)["logged"][0]
    expect(visit.page.locator(".order[data-order=logged] li .chip").first).to_have_attribute("data-item", first)
    visit.shown()


@pytest.mark.slow
def test_markup_in_an_id_is_text(visit: Visit) -> None:
    number = next(n for n in range(12) if HOSTILE in visit.sample(n)["logged"])
    visit.page.locator("#query").select_option(str(number))
    wait_for_items(visit, number)
    assert visit.page.locator(".order[data-order=logged] li .id").nth(1).text_content() == HOSTILE
    assert visit.page.locator("#my-list").get_by_text(HOSTILE, exact=True).count() == 1
    assert visit.page.locator("img").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_the_api_fits_and_a_link_opens_a_type(
    browser: Browser, address: str, width: int, scheme: str
) -> None:
    with visiting(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme) as visit:
        page = visit.page
        page.goto(f"{address}/docs")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.documentElement.scrollHeight") < 12 * 900
        expect(page.locator("#RankQuery")).to_be_hidden()
        page.get_by_role("link", name="RankQuery").first.click()
        expect(page.locator("#RankQuery")).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_ids_are_shown_whole_and_the_orders_are_explained(browser: Browser, address: str, width: int) -> None:
    cut = """ids => ids.filter(id => id.scrollWidth > id.clientWidth + 1
        || id.getBoundingClientRect().height > id.closest(".chip").getBoundingClientRect().height).length"""
    with visiting(browser, address, viewport={"width": width, "height": 900}) as visit:
        visit.shown()
        candidates = visit.sample(0)["candidates"]
        for candidate in candidates:
            candidate["item_id"] = f"3f2a91bc-7d5e-4c1a-9b0f-{candidate['item_id']}"
        visit.page.locator("#edit").click()
        visit.page.locator("#paste").fill(json.dumps(candidates))
        visit.page.locator("#submit").click()
        expect(visit.page.locator(".order .id").first).to_contain_text("3f2a91bc")
        visit.shown()
        assert visit.page.locator(".chip .id").evaluate_all(cut) == 0
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        names = visit.page.locator(".order .name").all_text_contents()
        meanings = visit.page.locator("#meanings dt").all_text_contents()
        assert [name.removesuffix("served") for name in names] == meanings


@pytest.mark.slow
def test_pasted_candidates_are_ranked(visit: Visit) -> None:
    candidates = visit.sample(4)["candidates"][:5]
    visit.page.get_by_label("Paste candidates").check()
    visit.page.locator("#paste").fill(json.dumps(candidates))
    visit.page.locator("#submit").click()
    expect(visit.page.locator("#heat tbody tr")).to_have_count(5)
    visit.shown()
    answer = visit.explain(candidates)
    assert_heat_map(visit, answer, answer["method"])
    assert visit.page.locator(".order[data-order=logged]").count() == 0
    expect(visit.page.locator(".order[data-order=match] .gain")).to_contain_text("vs CTR-1")
    visit.page.locator("#example").click()
    example = json.loads(visit.page.locator("#paste").input_value())
    visit.page.locator("#paste").press("Control+Enter")
    expect(visit.page.locator("#heat tbody tr")).to_have_count(len(example))
    assert_heat_map(visit, visit.explain(example), answer["method"])


@pytest.mark.slow
def test_a_wrong_paste_shows_the_sentence_of_the_server(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        visit.shown()
        visit.page.locator("#edit").click()
        candidates = json.loads(visit.page.locator("#paste").input_value())
        assert candidates == visit.sample(0)["candidates"]
        for text in ("[{", '{"items": []}'):
            visit.page.locator("#paste").fill(text)
            visit.page.locator("#submit").click()
            visit.page.get_by_role("alert").get_by_text("This is not").wait_for()
        del candidates[3]["features"]["f1"]
        visit.page.locator("#paste").fill(json.dumps(candidates))
        visit.page.locator("#submit").click()
        problem = httpx.post(f"{address}/v1/explain", json={"candidates": candidates})
        assert problem.headers["content-type"].startswith("application/problem+json")
        expect(visit.page.locator("#problem-detail")).to_have_text(problem.json()["detail"])
        for number, error in enumerate(problem.json()["errors"]):
            line = visit.page.locator("#problem-errors li").nth(number)
            expect(line).to_have_text(f"{error['at']} {error['problem']}")
        visit.page.locator("#paste").fill(json.dumps(visit.sample(1)["candidates"]))
        visit.page.locator("#submit").click()
        expect(visit.page.get_by_role("alert")).to_be_hidden()
        # The browser itself notes an answer that is an error; there is one.
        (note,) = visit.said
        assert note.startswith("error: Failed to load resource")
        visit.said.clear()


@pytest.mark.slow
def test_of_a_long_list_the_placed_items_come_first(visit: Visit) -> None:
    candidates = [
        {**candidate, "item_id": f"{number}: {candidate['item_id']}"}
        for number in range(10)
        for candidate in visit.sample(number)["candidates"]
    ]
    visit.page.locator("#edit").click()
    visit.page.locator("#paste").fill(json.dumps({"query_id": "long", "candidates": candidates}))
    visit.page.locator("#submit").click()
    expect(visit.page.locator("#heat tbody tr")).to_have_count(50)
    visit.shown()
    answer = visit.explain(candidates)
    assert list(cells(visit))[: answer["positions"]] == order_of(answer, answer["method"])["items"]
    visit.page.get_by_role("button", name=f"Show all {len(candidates)} items").last.click()
    assert visit.page.locator("#heat tbody tr").count() == len(candidates)
    assert len(visit.my_order()) == len(candidates)
    assert_heat_map(visit, answer, answer["method"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_of_the_heat_map_are_legible(browser: Browser, address: str, scheme: str) -> None:
    script = """cells => {
        const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const light = colour => {
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(part => part / 255)
                .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        return cells.map(cell => {
            const style = getComputedStyle(cell);
            const [low, high] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
            return (high + 0.05) / (low + 0.05);
        });
    }"""
    with visiting(browser, address, color_scheme=scheme) as visit:
        visit.shown()
        contrasts = visit.page.locator("#heat td.cell").evaluate_all(script)
        assert min(contrasts) > 4.3
        assert max(contrasts) > 10


@pytest.mark.slow
def test_works_on_a_phone_by_touch(browser: Browser, address: str) -> None:
    with visiting(browser, address, **PHONE) as visit:
        visit.shown()
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth === 390")
        small = """controls => controls.filter(control => control.offsetParent !== null)
            .map(control => (control.closest("label") ?? control).getBoundingClientRect())
            .filter(box => box.width < 40 || box.height < 40).length"""
        assert visit.page.locator("button, select, input, .handle").evaluate_all(small) == 0
        rows = visit.page.locator("#my-list > li")
        order = moved(visit.my_order(), 0, 1)
        rows.nth(0).get_by_role("button", name="down").tap()
        visit.has_my_order(order)
        x, start = center(rows.nth(3).locator(".handle"))
        _, end = center(rows.nth(1))
        at = [{"x": x, "y": start + (end - start) * step / 6} for step in range(7)]
        touch = visit.page.context.new_cdp_session(visit.page)
        touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [at[0]]})
        for point in at[1:]:
            touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [point]})
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        order = moved(order, 3, 1)
        visit.has_my_order(order)
        answer = visit.explain(visit.sample(0)["candidates"], mine=order)
        assert visit.my_utility() == order_of(answer, "mine")["utility"]
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_works_behind_a_path(browser: Browser, address: str) -> None:
    with visiting(browser, address) as visit:
        visit.page.route(
            "**/tools/rank/**",
            lambda route: route.fulfill(response=route.fetch(url=route.request.url.replace("/tools/rank/", "/"))),
        )
        visit.page.goto("about:blank")
        visit.page.goto(f"{address}/tools/rank/")
        visit.shown()
        assert visit.page.locator("#heat tbody tr").count() > 0


@pytest.mark.slow
def test_without_a_sample_it_begins_with_the_paste_box(browser: Browser, served_model: Path) -> None:
    with running(served_model) as (address, _), visiting(browser, address) as visit:
        expect(visit.page.locator("#no-sample")).to_contain_text("--sample LOG")
        expect(visit.page.locator("#paste")).to_be_visible()
        expect(visit.page.locator("#from-log")).to_be_hidden()
        visit.page.locator("#example").click()
        visit.page.locator("#submit").click()
        visit.shown()
        example = json.loads(visit.page.locator("#paste").input_value())
        answer = visit.explain(example)
        assert_heat_map(visit, answer, answer["method"])
