"""Status page in a browser."""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from penstock.testing.clocks import ManualClock
from penstock.web import LakeView, Served, serve
from tests.web.shop import Shop

CHROMIUM = "/usr/bin/chromium"
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 812}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.fail(f"{CHROMIUM} is missing; scripts/install-debian brings it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """Yield a browser page, and check at the end that it logged no error."""
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda told: wrong.append(told.text) if told.type != "log" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.set_default_timeout(15_000)
    yield page
    context.close()
    assert wrong == []


def show(page: Page, served: Served, at: str = "") -> None:
    page.goto(served.url + at)
    expect(page.locator("#detail h2")).to_be_visible()


def node(page: Page, name: str):
    return page.locator(f'.node[data-name="{name}"]')


def rendered_rows(page: Page) -> list[list[str]]:
    rows = page.get_by_role("region", name=re.compile("Rows of")).locator("tbody tr").all()
    return [row.locator("td").all_text_contents() for row in rows]


def overflow(page: Page) -> int:
    return page.evaluate("document.scrollingElement.scrollWidth - innerWidth")


def test_page_shows_rows_of_selected_collection_as_of_entered_time(
    shop: Shop, clock: ManualClock, served: Served, page: Page
):
    first = shop.tick(2)
    clock.move_ms(60_000)
    shop.tick(3)
    show(page, served)
    node(page, "shop.public.orders").click()
    expect(page.locator("#detail h2")).to_have_text("shop.public.orders")
    expect(page.get_by_text("All 5 rows as of")).to_be_visible()
    assert [row[2] for row in rendered_rows(page)] == ["new", "paid", "new", "new", "new"]
    page.get_by_label("As of").fill(str(first))
    page.keyboard.press("Enter")
    expect(page.get_by_text("All 2 rows as of")).to_be_visible()
    assert [row[:3] for row in rendered_rows(page)] == [["1", "1", "new"], ["2", "2", "new"]]
    page.reload()
    expect(page.get_by_text("All 2 rows as of")).to_be_visible()
    page.get_by_role("button", name="Latest").click()
    expect(page.get_by_text("All 5 rows as of")).to_be_visible()
    changes = page.get_by_role("region", name=re.compile("Latest changes of")).locator("tbody tr")
    expect(changes.first).to_contain_text("−1")
    expect(changes).to_have_count(7)


def test_page_can_be_operated_with_keyboard_only(shop: Shop, served: Served, page: Page):
    shop.tick()
    shop.commit(3)
    show(page, served)
    page.locator("#filter").focus()
    page.keyboard.press("Tab")
    expect(node(page, "shop")).to_be_focused()
    assert node(page, "shop").evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    expect(node(page, "shop.public.orders")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#detail h2")).to_have_text("shop.public.orders")
    expect(node(page, "shop.public.orders")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    expect(page.locator("#detail h2")).to_have_text("warehouse")
    page.keyboard.press("Tab")
    assert page.evaluate("document.getElementById('detail').contains(document.activeElement)")


def test_page_updates_charts_lag_and_state_while_open(
    shop: Shop, clock: ManualClock, view: LakeView, served: Served, page: Page
):
    shop.commit(1)
    view.sample()
    for _ in range(4):
        clock.move_ms(1_000)
        shop.tick(10)
        shop.commit(30)
        view.sample()
    clock.move_ms(2_000)
    show(page, served, "#materialization/warehouse")
    expect(page.locator(".chart rect.phase-2")).to_have_count(4)
    expect(page.locator("#detail .facts")).to_contain_text("Transactions since start5")
    show(page, served, "#source/shop")
    expect(page.locator(".chart .line")).to_have_count(3)
    expect(page.locator("#detail .facts")).to_contain_text("Rate30 rows/s")
    expect(page.locator("#detail .facts")).to_contain_text("Lag2.0 s")
    clock.move_ms(7_000)
    shop.tasks["shop"]["state"] = "restarting"
    expect(page.locator("#detail .facts")).to_contain_text("Lag–")
    expect(page.locator("#detail .pill")).to_have_text("restarting")
    expect(page.locator("#figures")).to_contain_text("Sources0 of 1running")


def test_page_escapes_html_in_names_values_and_errors(shop: Shop, served: Served, page: Page):
    evil = '<img src=x onerror="alert(1)">'
    schema = pa.schema([(evil, pa.string())])
    made = shop.client.create_or_load(f"own.{evil}", schema=schema)
    made.compare_and_append([({evil: f"</td>{evil}"}, 0, 1)], 0, 1)
    shop.tasks["shop"] |= {"state": "stopped", "error": {"message": evil, "hint": evil}}
    shop.waits_for = evil
    show(page, served)
    node_of = page.locator(".node", has_text=evil)
    node_of.click()
    expect(page.locator("#detail h2")).to_have_text(f"own.{evil}")
    expect(page.get_by_text("All 1 row as of")).to_be_visible()
    assert rendered_rows(page) == [[f"</td>{evil}"]]
    page.reload()
    expect(page.locator("#detail h2")).to_have_text(f"own.{evil}")
    page.get_by_role("link", name='source "shop"').click()
    expect(page.locator("#detail .trouble")).to_contain_text(f"Waits for {evil}")
    assert page.locator("img").count() == 0


def test_page_lists_errors_with_hint_until_they_are_resolved(
    shop: Shop, served: Served, page: Page
):
    shop.tick()
    shop.tasks["warehouse"] |= {
        "state": "stopped",
        "error": {"message": "disk is full", "detail": "No bytes are left.", "hint": "Make room."},
    }
    show(page, served)
    errors = page.locator("#errors")
    expect(errors).to_contain_text("1 error")
    expect(errors).to_contain_text("What to do: Make room.")
    errors.get_by_role("link").click()
    expect(page.locator("#detail h2")).to_have_text("warehouse")
    shop.tasks["warehouse"] |= {"state": "running", "error": None}
    expect(errors).to_be_hidden()


def test_page_with_many_collections_lists_60_and_filters_by_name(
    shop: Shop, served: Served, page: Page
):
    for number in range(150):
        shop.client.create_or_load(f"own.{number:03}", schema=pa.schema([("n", pa.int64())]))
    show(page, served)
    expect(page.locator("[data-column=collection] .node")).to_have_count(60)
    expect(page.locator(".more")).to_have_text("94 more; filter to find them")
    page.locator("#filter").fill("147")
    expect(page.locator("[data-column=collection] .node")).to_have_count(1)
    node(page, "own.147").click()
    expect(page.get_by_text("No time is complete yet.")).to_be_visible()
    page.locator("#filter").fill("nowhere")
    expect(page.locator(".more")).to_have_text("No collection has that in its name.")


def test_page_on_phone_width_does_not_overflow(
    shop: Shop, view: LakeView, served: Served, page: Page
):
    shop.tick(30)
    shop.commit(1)
    view.sample()
    page.set_viewport_size(PHONE)
    for at in ("source/shop", "collection/shop.public.orders", "materialization/warehouse"):
        show(page, served, f"#{at}")
        expect(page.locator("#detail h2")).to_have_text(at.partition("/")[2])
        assert overflow(page) <= 0, at
    node(page, "shop.public.orders").click()
    expect(page.locator("#detail h2")).to_be_in_viewport()
    page.get_by_role("button", name="Pipeline").click()
    expect(node(page, "shop.public.orders")).to_be_focused()
    page.set_viewport_size({"width": 760, "height": 800})
    assert overflow(page) <= 0


def test_page_follows_dark_color_scheme_and_reduced_motion_preferences(
    shop: Shop, served: Served, page: Page
):
    def light_of(name: str) -> int:
        color = page.evaluate(f"getComputedStyle(document.body).{name}")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    shop.tick()
    show(page, served)
    assert light_of("backgroundColor") > 600 > 150 > light_of("color")
    moves = "getComputedStyle(document.querySelector('.edge.near')).animationName"
    assert page.evaluate(moves) == "flow"
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    assert light_of("backgroundColor") < 150 < 600 < light_of("color")
    assert page.evaluate(moves) == "none"


def test_page_reports_lost_connection_and_reconnects(
    shop: Shop, view: LakeView, browser: Browser, clock: ManualClock
):
    shop.tick()
    page = browser.new_page()
    served = serve(view, ":0", token=None)
    address = served.url.removeprefix("http://").rstrip("/")
    show(page, served)
    served.close()
    expect(page.locator("#lost")).to_contain_text("Connection lost.")
    expect(page.locator("#connected")).to_have_text("not connected")
    with serve(view, address, token=None):
        expect(page.locator("#lost")).to_be_hidden()
        expect(page.locator("#connected")).to_contain_text("live")
    page.close()


def test_page_with_token_in_url_loads_and_removes_token_from_url(
    shop: Shop, view: LakeView, browser: Browser
):
    shop.tick()
    with serve(view, ":0", token="open sesame") as served, browser.new_context() as context:
        page = context.new_page()
        assert page.goto(served.url).status == 401
        page.goto(f"{served.url}?token=open%20sesame")
        expect(page.locator("#detail h2")).to_have_text("shop")
        assert page.url == served.url
