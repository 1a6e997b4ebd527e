"""The memory page in a real browser, on a memory that stands still unless it is moved."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("uvicorn", reason="needs the extra [server]")

from models.browser import CHROMIUM, Browser
from models.still_server import StillServer
from pagedkv.memory.address import translate

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[StillServer]:
    """A request with two answers that share a prefix, another one, and a cached one that ended."""
    with StillServer().running() as made:
        [ended] = made.scheduler.add([9] * 9, max_new_tokens=4)
        made.step()
        made.scheduler.finish([ended])
        made.scheduler.add(list(range(1, 15)), max_new_tokens=20, num_samples=2)
        made.scheduler.add([40, 41, 42], max_new_tokens=20)
        for token in range(4):
            made.step(token)
        yield made


def open_page(browser: Browser, server: StillServer, width: int = 1280, dark: bool = False) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.send(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=width < 500,
    )
    browser.set_dark(dark)
    browser.send("Page.navigate", url=f"{server.url}/memory")
    browser.wait_for("document.documentElement?.dataset.memory === 'live'")


@pytest.fixture
def page(browser: Browser, server: StillServer) -> Browser:
    open_page(browser, server)
    return browser


def text_of(browser: Browser, element: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{element}').innerText"))


def press(browser: Browser, key: str, modifiers: int = 0) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=modifiers)


def point(browser: Browser, block: int, *, is_clicked: bool = False) -> None:
    """Move the mouse to the middle of a block."""
    place = browser.evaluate(
        "(() => { const canvas = document.getElementById('blocks-canvas');"
        "canvas.scrollIntoView({block: 'center'});"
        "const box = canvas.getBoundingClientRect();"
        "const columns = Number(document.getElementById('blocks').getAttribute('aria-colcount'));"
        "const cell = box.width / columns;"
        f"return [box.left + ({block} % columns + 0.5) * cell,"
        f" box.top + (Math.floor({block} / columns) + 0.5) * cell]; }})()"
    )
    event = {"x": place[0], "y": place[1], "button": "none"}
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", **event)
    if is_clicked:
        event = {**event, "button": "left", "clickCount": 1}
        browser.send("Input.dispatchMouseEvent", type="mousePressed", **event)
        browser.send("Input.dispatchMouseEvent", type="mouseReleased", **event)


def pixel(browser: Browser, canvas: str, index: int) -> list[int]:
    """The colour in the middle of a cell."""
    found: list[int] = browser.evaluate(
        f"(() => {{ const canvas = document.getElementById('{canvas}');"
        "const columns = Number(document.getElementById('blocks').getAttribute('aria-colcount'));"
        "const cell = canvas.width / columns;"
        f"const x = ({index} % columns + 0.15) * cell;"
        f"const y = (Math.floor({index} / columns) + 0.4) * cell;"
        "return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data]; })()"
    )
    return found


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_live_and_fits_asks_nobody_else_and_makes_no_error(
    browser: Browser, server: StillServer, width: int, dark: bool
) -> None:
    open_page(browser, server, width, dark)
    assert text_of(browser, "headline").startswith("3 sequences use ")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.getElementById('state').className") == "state live"
    assert all(address.startswith(server.url + "/memory") for address in browser.requests)
    assert browser.errors == []


def test_blocks_are_drawn_by_what_they_are(page: Browser, server: StillServer) -> None:
    pool = server.scheduler.arrays.memory.pool
    shared = int(pool.ref_count.argmax())
    cached = next(b for b in range(64) if pool.ref_count[b] == 0 and pool.key_state[b] == 2)
    assert pool.ref_count[shared] == 2
    assert pixel(page, "blocks-canvas", shared)[:3] == [0xCC, 0x79, 0xA7]
    assert pixel(page, "blocks-canvas", 63)[:3] == [0xDF, 0xE3, 0xE8]
    assert pixel(page, "blocks-canvas", cached)[:3] == [0xDF, 0xE3, 0xE8]
    page.set_dark(True)
    page.wait_for("getComputedStyle(document.body).backgroundColor === 'rgb(17, 21, 27)'")
    time.sleep(0.2)
    assert pixel(page, "blocks-canvas", 63)[:3] == [0x34, 0x3B, 0x46]


def test_a_block_that_one_points_at_tells_all_that_is_known_of_it(
    page: Browser, server: StillServer
) -> None:
    pool = server.scheduler.arrays.memory.pool
    shared = int(pool.ref_count.argmax())
    point(page, shared)
    page.wait_for("document.getElementById('block-facts').innerText.includes('shared by 2')")
    said = text_of(page, "block-facts")
    assert f"{int(pool.key[shared, 0]) >> 32:08x}…" in said
    assert f"Physical block\n{shared}\n" in said and "References\n2\n" in said
    assert "sequence 1 logical block 0" in said and "sequence 3 logical block 0" in said


def test_a_cached_block_tells_how_old_it_is_and_when_it_goes(
    page: Browser, server: StillServer
) -> None:
    pool = server.scheduler.arrays.memory.pool
    cached = [b for b in range(64) if pool.ref_count[b] == 0 and pool.key_state[b] == 2]
    next_to_go = int(pool.previous_free[64])
    while int(pool.previous_free[next_to_go]) in cached:
        next_to_go = int(pool.previous_free[next_to_go])
    point(page, next_to_go)
    page.wait_for("document.getElementById('block-facts').innerText.includes('evicted next')")
    assert "cached since before you came" in text_of(page, "block-facts")


def test_a_clicked_block_selects_its_sequence_with_its_table_and_any_tokens_place(
    page: Browser, server: StillServer
) -> None:
    arrays = server.scheduler.arrays
    row = int(arrays.sequences.row[2])
    table = arrays.memory.tables.entries[row]
    point(page, int(table[0]), is_clicked=True)
    page.wait_for("document.querySelector('#sequence-facts h3')?.innerText === 'Sequence 2'")
    shown = page.evaluate(
        "document.querySelector('#sequence-facts .table').innerText.split(/\\s+/)"
    )
    assert [int(entry) for entry in shown[1::2]] == table[table >= 0].tolist()
    page.evaluate(
        "(() => { const token = document.getElementById('token'); token.value = '5';"
        "token.dispatchEvent(new Event('input')); })()"
    )
    found = translate(table, 5, 4)
    assert page.evaluate("document.querySelector('.spelled').textContent").splitlines() == [
        "slot of token 5",
        "= block_table[5 // 4] * 4 + 5 % 4",
        "= block_table[1] * 4 + 1",
        f"= {found.block} * 4 + 1",
        f"= {found.slot}",
    ]
    page.evaluate(
        "(() => { const token = document.getElementById('token'); token.value = '500';"
        "token.dispatchEvent(new Event('input')); })()"
    )
    assert "tokens 0 to" in page.evaluate("document.querySelector('.spelled').textContent")


def test_the_grid_is_walked_with_the_keyboard_and_says_where_one_is(
    page: Browser, server: StillServer
) -> None:
    page.evaluate("document.getElementById('blocks').focus()")

    def said() -> str:
        return str(
            page.evaluate(
                "document.getElementById(document.getElementById('blocks')"
                ".getAttribute('aria-activedescendant')).textContent"
            )
        )

    columns = int(page.evaluate("document.getElementById('blocks').getAttribute('aria-colcount')"))
    assert said().startswith("Block 0, ")
    press(page, "ArrowRight")
    assert said().startswith("Block 1, ")
    press(page, "ArrowDown")
    assert said().startswith(f"Block {columns + 1}, ")
    press(page, "Home")
    assert said().startswith(f"Block {columns}, ")
    press(page, "End", modifiers=2)
    assert said() == "Block 63, free"
    press(page, "ArrowDown")
    assert said() == "Block 63, free"
    press(page, "Home", modifiers=2)
    owner = int(server.scheduler.arrays.memory.tables.entries[0, 0])
    for _ in range(owner):
        press(page, "ArrowRight")
    press(page, "Enter")
    page.wait_for("document.querySelector('#sequence-facts h3') !== null")
    press(page, "Escape")
    page.wait_for("document.querySelector('#sequence-facts h3') === null")


def test_all_that_can_be_operated_has_a_name_and_a_role_for_those_who_listen(
    page: Browser,
) -> None:
    page.evaluate("document.getElementById('block-list').open = true")
    page.wait_for("document.querySelector('#list tr') !== null")
    page.send("Accessibility.enable")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    page.send("Accessibility.disable")
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node["ignored"]
    ]
    operated = ("button", "textbox", "combobox", "grid", "link", "spinbutton")
    assert [role for role, name in found if role in operated and not name] == []
    assert [name for role, name in found if role == "grid"] == ["Physical blocks"]
    pressed = {name for role, name in found if role == "button"}
    assert {"by sequence", "by kind", "the model’s longest", "the request’s limit"} <= pressed
    regions = [name for role, name in found if role == "region"]
    assert {"In blocks", "Up close", "Sequences", "The last minutes", "As it happens"} <= {*regions}
    headings = [name for role, name in found if role == "heading"]
    assert headings[0].startswith("3 sequences use ") and "All blocks as a table" in headings
    assert ("image", "Contiguous regions") in found
    assert {"columnheader", "rowheader", "main", "status"} <= {role for role, _ in found}


def test_everything_is_reached_with_tab_once_each_in_the_order_of_the_page(
    page: Browser,
) -> None:
    page.evaluate("document.activeElement.blur()")
    wanted = page.evaluate(
        "[...document.querySelectorAll('button, select, input, summary, [tabindex=\"0\"]')]"
        ".filter(e => e.checkVisibility()).length"
    )
    page.evaluate("window.walked = []")
    for _ in range(wanted):
        for kind in ("rawKeyDown", "keyUp"):
            page.send(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
        page.evaluate("window.walked.push(document.activeElement), 0")
    assert page.evaluate("new Set(window.walked).size") == wanted
    assert page.evaluate(
        "window.walked.every((e, i, all) => !i || "
        "all[i - 1].compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING)"
    )
    ringed = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(ringed) == "solid"


@pytest.mark.parametrize("width", [1440, 390])
def test_tens_of_thousands_of_blocks_are_a_map_of_at_most_two_screens(
    browser: Browser, width: int
) -> None:
    with StillServer(num_blocks=40_960, block_size=16, max_model_len=4_096).running() as server:
        server.scheduler.add(list(range(3_000)), max_new_tokens=1_000)
        server.step()
        open_page(browser, server, width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        columns, rows = (
            int(
                browser.evaluate(f"document.getElementById('blocks').getAttribute('aria-{n}count')")
            )
            for n in ("col", "row")
        )
        assert columns * (rows - 1) < 40_960 <= columns * rows
        assert browser.evaluate("document.getElementById('blocks-canvas').clientHeight") <= 900
        browser.evaluate("document.getElementById('blocks').focus()")
        press(browser, "End", modifiers=2)
        browser.wait_for("document.getElementById('blocks').textContent.includes('40959, free')")
        server.step()
        browser.wait_for("document.getElementById('blocks-summary').innerText.includes('3,001')")
        assert browser.errors == []
        assert pixel(browser, "blocks-canvas", 187) != pixel(browser, "blocks-canvas", 188)
        assert pixel(browser, "blocks-canvas", 40_959)[:3] == [0xDF, 0xE3, 0xE8]
        browser.send("Page.navigate", url="about:blank")


def test_sequences_are_listed_and_chosen_by_a_button_that_says_whether_it_is_pressed(
    page: Browser,
) -> None:
    names = page.evaluate(
        "[...document.querySelectorAll('#sequences button')].map(b => b.innerText)"
    )
    assert names == ["1", "2", "3"]
    pressed = "document.querySelector('#sequences button').getAttribute('aria-pressed')"
    assert page.evaluate(pressed) == "false"
    page.evaluate("document.querySelector('#sequences button').click()")
    assert page.evaluate(pressed) == "true"
    page.wait_for("document.querySelector('#sequence-facts h3')?.innerText === 'Sequence 1'")


def test_all_blocks_are_there_as_a_table_too(page: Browser, server: StillServer) -> None:
    page.evaluate("document.getElementById('block-list').open = true")
    page.wait_for("document.querySelector('#list tr') !== null")
    pool = server.scheduler.arrays.memory.pool
    rows = page.evaluate("[...document.querySelectorAll('#list tr')].map(r => r.innerText)")
    used = [b for b in range(64) if pool.ref_count[b] > 0]
    assert [int(row.split("\t")[0]) for row in rows] == used
    assert [int(row.split("\t")[2]) for row in rows] == pool.ref_count[used].tolist()


def test_the_same_load_in_regions_has_its_waste_in_words(page: Browser) -> None:
    said = text_of(page, "regions-summary")
    assert said.startswith("192 slots reserved for ") and " empty." in said
    page.evaluate("document.querySelector('[data-twin=limit]').click()")
    assert text_of(page, "regions-summary") != said
    assert pixel(page, "regions-canvas", 63)[:3] == [0xDF, 0xE3, 0xE8]


def test_happenings_are_told_in_words_and_flash(browser: Browser) -> None:
    with StillServer(num_blocks=8, seats=4).running() as server:
        open_page(browser, server)
        server.scheduler.add([1, 2, 3, 4, 5, 6], max_new_tokens=24, num_samples=2)
        for token in range(12):
            server.step(token)
            time.sleep(0.12)  # so that each is told by itself
        browser.wait_for("document.getElementById('log').innerText.includes('gave way')")
        said = text_of(browser, "log")
        assert "was forked and shares" in said
        assert "was shared and is copied to" in said
        assert browser.errors == []


def test_with_a_key_the_page_asks_for_it_and_forgets_it_when_it_is_closed(
    browser: Browser,
) -> None:
    with StillServer(keys=("sesame",)).running() as server:
        browser.errors.clear()
        browser.send("Page.navigate", url=f"{server.url}/memory")
        browser.wait_for("document.getElementById('key-form')?.hidden === false")
        give = (
            "(() => { document.getElementById('key').value = '%s';"
            "document.querySelector('#key-form button').click(); })()"
        )
        browser.evaluate(give % "guess")
        browser.wait_for("document.getElementById('key-problem').innerText.includes('not the key')")
        browser.evaluate(give % "sesame")
        browser.wait_for("document.documentElement.dataset.memory === 'live'")
        assert browser.evaluate("document.getElementById('key').value") == ""
        stored = "Object.keys(localStorage).length + Object.keys(sessionStorage).length"
        assert browser.evaluate(f"{stored} + document.cookie.length") == 0
        assert "sesame" not in browser.evaluate("location.href")
        browser.send("Page.reload")
        browser.wait_for(
            "document.documentElement?.dataset.memory === 'waiting' &&"
            "document.getElementById('key-form')?.hidden === false"
        )


def test_a_page_whose_server_went_away_says_so(browser: Browser) -> None:
    with StillServer().running() as server:
        open_page(browser, server)
    browser.wait_for("document.getElementById('state').className === 'state'")
    assert "live" not in text_of(browser, "state")
