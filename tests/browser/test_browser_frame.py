"""The page as a whole: keys, hostile names, restarts, tabs, sizes, accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser_fleet import BrowserFleet, behind_prefix, until

KEY = "the admin key of this test"
VIEWS = ("fleet", "requests", "latency", "strategies", "playground")
MOST_BYTES = 200_000
PATIENT_MS = 240_000  # dry runs take seconds of CPU
HOSTILE = '"><img/src=x onerror=hacked()>${hacked()}'
# Of a failed connection, which tests of restarts cause.
LOST = re.compile(r"Failed to load resource|ERR_|network")


@pytest.fixture(scope="module")
def fleet() -> Iterator[BrowserFleet]:
    fleet = BrowserFleet(admin_key=KEY, roles=("prefill", "decode"), strategy="prefill_decode")
    yield fleet
    fleet.close()


def give_key(page: Any, key: str = KEY) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Continue").click()


def entered(pages: Any, fleet: BrowserFleet, at: str = "", **options: Any) -> Any:
    """A page whose reader has given the key."""
    page = pages.open(f"{fleet.url}/{at}", **options)
    pages.expected = lambda problem: "401" in problem
    give_key(page)
    page.get_by_text("Live", exact=True).wait_for()
    return page


def test_the_key_is_asked_once_and_kept_out_of_urls_and_storage(pages: Any, fleet: BrowserFleet):
    pages.expected = lambda problem: "401" in problem  # what the browser says of the first calls
    page = pages.open(fleet.url)
    give_key(page, "wrong")
    page.get_by_text("The router refused this key.").wait_for()
    give_key(page)
    page.get_by_text("Live", exact=True).wait_for()
    for view in VIEWS:
        page.goto(f"{fleet.url}/#/{view}")
        page.get_by_role("heading", level=1).wait_for()
    page.reload()
    page.get_by_text("Live", exact=True).wait_for()
    assert page.get_by_role("dialog").count() == 0
    assert not [url for url in pages.urls if "key" in url.lower()]
    assert KEY not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie")
    assert KEY in page.evaluate("JSON.stringify({...sessionStorage})")
    page.get_by_role("button", name="Forget the key").click()
    page.get_by_role("dialog").wait_for()
    assert KEY not in page.evaluate("JSON.stringify({...sessionStorage})")


def test_hostile_names_are_text(pages: Any, fleet: BrowserFleet):
    engine = fleet.get("/admin/engines")["engines"][0]["id"]
    fleet.send("PATCH", f"/admin/engines/{engine}", labels={"zone": HOSTILE})
    fleet.ask(list(range(100, 140)), id=HOSTILE.replace(" ", "/"))
    fleet.send(
        "POST", "/admin/strategies", file=f"{HOSTILE}.py", name="hostile", source=HOSTILE_SOURCE
    )
    fleet.send("PUT", "/admin/strategy", name="hostile", params={"text": HOSTILE})
    fleet.ask(HOSTILE, id="plain")
    page = entered(pages, fleet)
    pages.expected = lambda problem: "401" in problem or "404" in problem  # of the absent request
    page.evaluate("() => { window.hacked = () => console.error('hacked') }")
    for at in ("#/fleet", "#/requests?show=newest", "#/requests/plain", "#/latency", "#/strategies",
               "#/playground", f"#/{HOSTILE}", f"#/requests/{HOSTILE}"):  # fmt: skip
        page.evaluate("at => { location.hash = at }", at)
        page.wait_for_timeout(200)
        assert page.locator("img[src=x], img[onerror]").count() == 0
        assert page.locator("main").inner_text().strip()
    page.evaluate("() => { location.hash = '#/requests?show=newest' }")
    page.get_by_text(HOSTILE.replace(" ", "/")).wait_for()
    fleet.send("PUT", "/admin/strategy", name="prefill_decode")


HOSTILE_MODELS = ("<img src=x onerror=hacked()>", "<b onclick=hacked()>\"'")


def test_hostile_names_of_models_are_text(pages: Any):
    """One router is the engine of another one, so its served name is a name of a server."""
    name = HOSTILE_MODELS[0]
    server = BrowserFleet("--served-model-name", name, roles=("any",))
    other = server.url.replace("http", "openai+http", 1)
    front = BrowserFleet("--engine", other, "--openai-tokenizer", "mock", roles=())
    try:
        until(lambda: front.get("/v1/models")["data"])
        (engine,) = front.get("/admin/engines")["engines"]
        assert (engine["status"], front.get("/v1/models")["data"][0]["id"]) == ("up", name)
        context = pages.context()

        def two(route: Any) -> None:
            """Name a second model: one is not asked for."""
            told = route.fetch().json()
            told["data"].append({**told["data"][0], "id": HOSTILE_MODELS[1]})
            route.fulfill(json=told)

        context.route("**/v1/models", two)
        page = pages.open(front.url, context)
        page.evaluate("() => { window.hacked = () => console.error('hacked') }")
        page.locator(".stat", has_text="Engines in use").get_by_text(name, exact=True).wait_for()
        assert page.locator("img[src=x], img[onerror], main [onclick]").count() == 0
        page.evaluate("() => { location.hash = '#/playground' }")
        options = page.get_by_label("Model").locator("option")
        options.nth(1).wait_for(state="attached")
        assert options.all_text_contents() == [*HOSTILE_MODELS]
        page.get_by_label("Message").fill("hello")
        page.get_by_label("Message").press("Enter")
        page.locator(".turn-assistant").get_by_text("tokens in").wait_for()
        assert page.locator("img[src=x], img[onerror], main [onclick]").count() == 0
        context.close()
    finally:
        front.close()
        server.close()


HOSTILE_SOURCE = '''
"""<script>hacked()</script>"""
from router import Cluster, Request, strategy


@strategy
async def hostile(request: Request, cluster: Cluster, *, text: str = "<b onclick=hacked()>"):
    """<img src=x onerror=hacked()>"""
    async for chunk in cluster.decode.least_loaded().start_generate(request):
        yield chunk
'''


def test_a_restart_of_the_router_is_survived(pages: Any, fleet: BrowserFleet):
    page = entered(pages, fleet)
    pages.expected = lambda problem: "401" in problem or bool(LOST.search(problem))
    fleet.stop()
    page.get_by_text("Disconnected").or_(page.get_by_text("Connecting")).first.wait_for()
    assert page.get_by_role("heading", name="engine", exact=False).count()  # the last that it told
    fleet.start()
    page.get_by_text("Live", exact=True).wait_for()
    fleet.ask([7] * 40, 400)  # its tokens are seen
    until(
        lambda: (
            page.locator(".stat", has_text="Tokens").locator(".stat-value").inner_text() != "0 /s"
        )
    )


def test_the_page_works_below_a_path_of_a_proxy(pages: Any, fleet: BrowserFleet):
    with behind_prefix(fleet, "/some/where") as url:
        pages.expected = lambda problem: "401" in problem or bool(LOST.search(problem))
        page = pages.open(url)
        give_key(page)
        page.get_by_text("Live", exact=True).wait_for()
        page.goto(f"{url}#/requests")
        page.get_by_role("region", name="Requests").wait_for()
        assert all(called.startswith(url) for called in pages.urls)
        page.close()


def test_two_tabs_show_the_same(pages: Any, fleet: BrowserFleet):
    context = pages.context()
    first = entered(pages, fleet, context=context)
    second = entered(pages, fleet, "#/fleet", context=context)
    first.get_by_role("button", name=re.compile("^Drain")).first.click()
    second.get_by_role("button", name=re.compile("^Use .* again")).wait_for()
    second.get_by_role("button", name=re.compile("^Use .* again")).click()
    first.get_by_role("button", name=re.compile("^Use .* again")).wait_for(state="detached")
    # Its call may still be under way, and a closed page would cancel it.
    until(lambda: not any(one["draining"] for one in fleet.get("/admin/engines")["engines"]))


def test_the_keyboard_goes_to_each_view(pages: Any, fleet: BrowserFleet):
    page = entered(pages, fleet)
    for view in VIEWS[1:]:
        page.keyboard.press("g")
        page.keyboard.press(view[0])
        page.get_by_role("heading", name=view.capitalize(), level=1).wait_for()
    page.keyboard.press("g")
    page.keyboard.press("f")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_a_phone(pages: Any, fleet: BrowserFleet, view: str):
    page = entered(pages, fleet, f"#/{view}", viewport={"width": 390, "height": 844})
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


LONG_ID = "0123456789abcdef" * 2
WIDTHS = """() => [...document.querySelectorAll(".table-scroll")].map(
    box => [box.getAttribute("aria-label"), box.scrollWidth, box.clientWidth])"""


@pytest.mark.parametrize("view", [*VIEWS, "requests?show=newest", f"requests/{LONG_ID}"])
def test_at_1280_pixels_no_table_scrolls_sideways(pages: Any, fleet: BrowserFleet, view: str):
    fleet.ask(list(range(300, 340)), id=LONG_ID)
    context = pages.context(viewport={"width": 1280, "height": 800})

    def older(route: Any) -> None:
        """Make requests 89 seconds older: their ages are as long as they get."""
        reply = route.fetch()
        told = reply.json()
        for one in told.get("requests", ()):  # none in the refusal of the first call
            one["created"] -= 89
        route.fulfill(response=reply, json=told)

    context.route("**/admin/requests?*", older)
    page = entered(pages, fleet, f"#/{view}", context=context)
    if view.startswith("requests?") or view == "requests":
        page.get_by_text(re.compile(r"^1 min \d+ s ago$")).first.wait_for()
    elif view.startswith("requests/"):
        page.get_by_text("Time lines").wait_for()
    if view not in ("fleet", "playground"):
        page.locator(".table-scroll").first.wait_for()
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    boxes = page.evaluate(WIDTHS)
    assert bool(boxes) == (view not in ("fleet", "playground"))
    assert [box for box in boxes if box[1] > box[2]] == []


def test_nothing_moves_for_those_who_want_no_motion(pages: Any, fleet: BrowserFleet):
    page = entered(pages, fleet, reduced_motion="reduce")
    styles = """name => {
        const one = document.querySelector("main").appendChild(document.createElement("i"));
        one.className = name;
        const {animationName, transitionDuration} = getComputedStyle(one);
        return [animationName, transitionDuration];
    }"""
    for name in ("spinner", "caret"):
        assert page.evaluate(styles, name) == ["none", "0s"]
    moving = entered(pages, fleet, reduced_motion="no-preference")
    assert [moving.evaluate(styles, name)[0] for name in ("spinner", "caret")] == ["turn", "blink"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_view_has_a_serious_accessibility_violation(pages: Any, fleet: BrowserFleet, theme: str):
    fleet.ask(list(range(40)), id="seen")
    page = entered(pages, fleet, color_scheme=theme)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    for at in (*VIEWS, "requests?show=newest", "requests/seen"):
        page.evaluate("at => { location.hash = `#/${at}` }", at)
        page.wait_for_timeout(700)
        assert serious_violations(page) == [], at
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    assert serious_violations(page) == [], "a dialog"
    page.keyboard.press("Escape")
    page.goto(f"{fleet.url}/#/strategies/data_parallel")
    page.get_by_role("button", name="Edit a copy").click()
    editor = page.get_by_label("Source of my_data_parallel")
    editor.fill(editor.input_value().replace("yield chunk", "yield chunk chunk"))
    page.get_by_role("button", name="Check", exact=True).click()
    page.locator("#check-result").get_by_text("Syntax error.").wait_for(timeout=PATIENT_MS)
    assert page.locator(".line-marked").count() == 1
    assert serious_violations(page) == [], "a failed check"


def serious_violations(page: Any) -> list[tuple[str, list[str]]]:
    """What axe-core finds, and in which elements."""
    from axe_playwright_python.sync_playwright import Axe

    return [
        (one["id"], [node["html"][:200] for node in one["nodes"]])
        for one in Axe().run(page).response["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def test_all_that_the_browser_loads_is_small_and_comes_from_here(pages: Any, fleet: BrowserFleet):
    loaded: dict[str, int] = {}
    page = pages.open("about:blank")
    page.on("response", lambda reply: loaded.__setitem__(reply.url, len(_body(reply))))
    pages.expected = lambda problem: "401" in problem
    page.goto(fleet.url)
    give_key(page)
    page.get_by_text("Live", exact=True).wait_for()
    for view in VIEWS:
        page.goto(f"{fleet.url}/#/{view}")
    files = {
        url: size for url, size in loaded.items() if "/admin/" not in url and "/v1/" not in url
    }
    assert len(files) > 10
    assert all(url.startswith(fleet.url) for url in loaded)
    assert sum(files.values()) < MOST_BYTES, files


def _body(reply: Any) -> bytes:
    """The body, unless it is a stream."""
    return b"" if "/admin/" in reply.url or "/v1/" in reply.url else reply.body()
