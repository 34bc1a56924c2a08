"""The page's strategies: an edit, a check, a simulation, a canary and a rollback, by clicks."""

from __future__ import annotations

import io
import threading
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_fleet import BrowserFleet, Streamed, until

PATIENT_MS = 240_000  # dry runs and simulations take seconds of CPU
FOLDER = Path(__file__).parents[2] / "strategies"


@pytest.fixture(scope="module")
def fleet() -> Iterator[BrowserFleet]:
    fleet = BrowserFleet(engine_flags=("--step-ms", "8", "--prefill-tokens-per-ms", "50"))
    yield fleet
    fleet.close()


@pytest.fixture(autouse=True)
def starts_anew(fleet: BrowserFleet) -> None:
    state = fleet.get("/admin/strategies")
    if state["canary"]:
        fleet.send("POST", "/admin/rollback")
    if state["active"]["name"] != "data_parallel":
        fleet.send("PUT", "/admin/strategy", name="data_parallel")


class Streams:
    """Requests, one after the other, until the end of the block. None of them may fail."""

    def __init__(self, fleet: BrowserFleet) -> None:
        self.fleet, self.ended = fleet, 0
        self.failed: list[str] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            try:
                number = self.ended  # of different lengths, or steps do not tell their cost
                length = 20 + 53 * (number % 13)
                self.fleet.ask([1 + (number * 131 + 7 * i) % 480 for i in range(length)], 12)
                self.ended += 1
            except (AssertionError, httpx.HTTPError) as error:
                self.failed.append(repr(error))
                return


@contextmanager
def streaming(fleet: BrowserFleet, many: int = 6) -> Iterator[list[Streams]]:
    streams = [Streams(fleet) for _ in range(many)]
    threads = [threading.Thread(target=one.run) for one in streams]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        for one, thread in zip(streams, threads, strict=True):
            one.over.set()
            thread.join()


def opened(pages: Any, fleet: BrowserFleet, at: str = "") -> Any:
    page = pages.open(f"{fleet.url}/#/strategies{at}")
    page.get_by_role("navigation", name="Strategies").wait_for()
    return page


def copied(page: Any, name: str) -> Any:
    """The editor of a copy of an installed strategy."""
    page.get_by_role("button", name="Edit a copy").click()
    return page.get_by_label(f"Source of my_{name}")


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def passed(page: Any) -> None:
    press(page, "Check")
    page.get_by_text("The check has passed.").wait_for(timeout=PATIENT_MS)


def names(fleet: BrowserFleet) -> set[str]:
    return {one["name"] for one in fleet.get("/admin/strategies")["strategies"]}


def test_from_an_edit_to_a_rollback_while_streams_run(pages: Any, fleet: BrowserFleet):
    with streaming(fleet) as streams:
        page = opened(pages, fleet, "/cache_aware")
        editor = copied(page, "cache_aware")
        editor.fill(editor.input_value().replace("Weight = 0.5", "Weight = 0.25"))
        passed(page)
        page.get_by_label("load_weight").fill("2")
        until(lambda: sum(one.ended for one in streams) >= 60, timeout=120)
        press(page, "Simulate")
        title = page.get_by_role("heading", name="Simulate on recorded traffic")
        card = page.locator("section.card", has=title)
        card.locator(".simulated, .notice").first.wait_for(timeout=PATIENT_MS)
        assert card.get_by_role("alert").all_inner_texts() == []
        assert page.get_by_role("columnheader", name="Active: data_parallel").count() == 1
        assert page.get_by_role("rowheader", name="TTFT, p99").count() == 1
        assert "my_cache_aware" not in names(fleet)  # it was simulated without being loaded

        before = fleet.get("/admin/strategies")["active"]["generation"]
        first = Streamed(fleet, "before-the-canary", 8000)  # a minute at least: steps take 8 ms
        first.decoding(1)
        press(page, "Canary…")
        page.get_by_label("Share of requests (%)").fill("50")
        page.get_by_label("Requests until the verdict").fill("100000")
        press(page, "Start canary")
        page.get_by_role("heading", name="Canary: my_cache_aware").wait_for(timeout=PATIENT_MS)
        state = fleet.get("/admin/strategies")
        trial = next(one for one in state["generations"] if one["name"] == "my_cache_aware")
        assert trial["generation"] == before + 1 == state["canary"]["generation"]
        assert (trial["params"], state["canary"]["percent"]) == ({"load_weight": 2.0}, 50)
        budget = page.locator(".budget", has_text="Ended").locator(".num")
        until(lambda: not budget.inner_text().startswith("0 of"))
        assert budget.inner_text().endswith("of 100k")

        second = Streamed(fleet, "before-the-promotion", 4000)
        second.decoding(1)
        begun_in = {one.id: one.told()["generation"] for one in (first, second)}
        assert begun_in[first.id] == before and begun_in[second.id] in (before, before + 1)
        press(page, "Promote now")
        page.get_by_text("Canary promoted.").wait_for()
        active = fleet.get("/admin/strategies")["active"]
        assert (active["name"], active["generation"]) == ("my_cache_aware", before + 1)
        page.locator(".running-name", has_text="my_cache_aware").wait_for()
        press(page, "Roll back")
        page.locator(".running-name", has_text="data_parallel").wait_for()
        active = fleet.get("/admin/strategies")["active"]
        assert (active["name"], active["generation"]) == ("data_parallel", before + 2)
        assert [one.told()["status"] for one in (first, second)] == ["running", "running"]
        page.locator(".audit tbody tr", has_text="rolled back").first.wait_for()
        said = page.locator(".audit tbody tr").all_inner_texts()[:4]
        for row, what in zip(
            said, ("rolled back", "promoted", "canary began", "loaded"), strict=True
        ):
            assert what in row
        ended = [one.ended for one in streams]
        until(lambda: all(one.ended > n for one, n in zip(streams, ended, strict=True)))
    assert [one.failed for one in streams] == [[] for _ in streams]
    for one in (first, second):  # with all its tokens, in the generation in which it began
        receipt = one.receipt()
        assert (receipt["generation"], receipt["retries"]) == (begun_in[one.id], [])


FAILS = """from router import Cluster, Request, strategy


@strategy
async def fails(request: Request, cluster: Cluster):
    engine = cluster.engines.least_loaded()
    if len(request.tokens) > 2000:  # longer than those of dry runs
        raise RuntimeError("<b>too long</b>")
    async for chunk in engine.start_generate(request):
        yield chunk
"""


def test_a_canary_is_judged_live(pages: Any, fleet: BrowserFleet):
    page = opened(pages, fleet)
    press(page, "New strategy")
    page.get_by_label("Source of my_strategy").fill(FAILS)
    page.get_by_role("heading", name="fails", exact=False).wait_for()
    press(page, "Canary…")  # checks and loads it, too
    page.get_by_label("Share of requests (%)").fill("100")
    page.get_by_label("Requests until the verdict").fill("8")
    page.get_by_label("Share that may fail").fill("0.3")
    press(page, "Start canary")
    page.get_by_role("heading", name="Canary: fails").wait_for(timeout=PATIENT_MS)
    for _ in range(2):
        fleet.ask([5] * 20)
        body = {"prompt": [5] * 2100, "max_tokens": 2}
        assert fleet.http.post("/v1/completions", json=body).status_code == 500
    page.get_by_text("Until then 0 more may fail").wait_for()
    assert fleet.http.post("/v1/completions", json=body).status_code == 500
    page.get_by_text("Canary rolled back.").wait_for()
    assert "3 of 5 requests failed" in page.locator("main").inner_text()
    assert page.locator("b", has_text="too long").count() == 0
    assert fleet.get("/admin/strategies")["active"]["name"] == "data_parallel"


def test_the_line_of_a_syntax_error_is_marked(pages: Any, fleet: BrowserFleet):
    page = opened(pages, fleet, "/cache_aware")
    editor = copied(page, "cache_aware")
    source = editor.input_value()
    editor.fill(source.replace("yield chunk", "yield chunk chunk"))
    editor.press("Control+Enter")
    marked = page.locator(".line-marked")
    marked.wait_for(timeout=PATIENT_MS)
    line = 1 + source[: source.index("yield chunk")].count("\n")
    assert marked.inner_text().lstrip().startswith("yield chunk chunk")
    assert page.locator(".number-marked").inner_text() == str(line)
    assert "chunk" in page.locator(".fault").first.inner_text()
    page.locator("#check-result").get_by_text("Syntax error.").wait_for()
    page.get_by_role("button", name=f"Line {line}, column").wait_for()
    editor.press("End")
    editor.press_sequentially("#")
    assert marked.count() == 0  # it is about another text now


def test_a_broken_rule_is_marked_too_and_stays_out(pages: Any, fleet: BrowserFleet):
    page = opened(pages, fleet, "/data_parallel")
    editor = copied(page, "data_parallel")
    editor.fill(editor.input_value().replace("    engine =", "    1 / 0\n    engine ="))
    press(page, "Activate…")
    page.get_by_role("dialog").get_by_role("button", name="Activate").click()
    page.get_by_role("dialog").get_by_text("The check has found a problem.").wait_for(
        timeout=PATIENT_MS
    )
    page.keyboard.press("Escape")
    assert page.locator(".line-marked").inner_text().lstrip().startswith("1 / 0")
    page.get_by_text("It breaks a rule in the dry run.").wait_for()
    assert "my_data_parallel" not in names(fleet)
    page.reload()  # a draft outlives it
    assert "1 / 0" in page.get_by_label("Source of my_data_parallel").input_value()
    press(page, "Discard")
    page.get_by_label("Source of data_parallel").wait_for()


HOSTILE = "<img src=x onerror=hacked()>"
HACKED = "() => { window.hacked = () => { throw new Error('hacked') } }"
HOSTILE_SOURCE = f'''
"""</textarea><script>hacked()</script>{HOSTILE}"""
from typing import Annotated, Literal
from pydantic import Field
from router import Cluster, Request, strategy

Text = Annotated[str, Field(description="{HOSTILE}", pattern=".*{HOSTILE}?.*")]


@strategy
async def hostile_params(
    request: Request, cluster: Cluster, *, text: Text = "{HOSTILE}",
    choice: Literal["{HOSTILE}", "b"] = "b",
):
    """{HOSTILE}"""
    if choice != "b":
        raise RuntimeError("{HOSTILE}")
    async for chunk in cluster.engines.least_loaded().start_generate(request):
        yield chunk
'''


def test_hostile_names_sources_and_params_are_text(pages: Any, fleet: BrowserFleet):
    fleet.send("POST", "/admin/strategies", source=HOSTILE_SOURCE, name="hostile_params")
    fleet.send("PUT", "/admin/strategy", name="hostile_params", params={"text": HOSTILE})
    page = opened(pages, fleet)
    page.evaluate(HACKED)
    assert HOSTILE in page.get_by_label("Source of hostile_params").input_value()
    page.get_by_label("choice").select_option(label=HOSTILE)
    press(page, "Check")
    page.get_by_text("It breaks a rule in the dry run.").wait_for(timeout=PATIENT_MS)
    assert HOSTILE in page.locator("#check-result").inner_text()
    page.evaluate("name => { location.hash = `#/strategies/${encodeURIComponent(name)}` }", HOSTILE)
    page.get_by_text(f"There is no strategy “{HOSTILE}”.").wait_for()
    assert page.locator("img[src=x], main script").count() == 0


def test_parameters_are_a_form_from_their_schemas(pages: Any, fleet: BrowserFleet):
    pages.expected = lambda problem: "400 (Bad Request)" in problem
    page = opened(pages, fleet, "/balanced")
    ratio = page.get_by_label("ratio", exact=True)
    ratio.fill("nonsense")
    press(page, "Activate…")
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Activate").click()
    dialog.get_by_role("alert").wait_for()
    page.keyboard.press("Escape")
    assert ratio.get_attribute("aria-invalid") == "true"
    assert fleet.get("/admin/strategies")["active"]["name"] == "data_parallel"
    ratio.fill("0.25")
    assert ratio.get_attribute("aria-invalid") is None
    press(page, "Activate…")
    dialog.get_by_role("button", name="Activate").click()
    page.locator(".running-name", has_text="balanced").wait_for()
    assert fleet.get("/admin/strategies")["active"]["params"]["ratio"] == 0.25


def test_what_cannot_be_rolled_back_has_no_button_to_press(pages: Any, fleet: BrowserFleet):
    while fleet.get("/admin/strategies")["can_roll_back"]:
        fleet.send("POST", "/admin/rollback")
    page = opened(pages, fleet)
    button = page.get_by_role("button", name="Roll back", exact=True)
    button.wait_for()
    assert button.is_disabled()
    assert button.get_attribute("title") == "There is no earlier generation to go back to"
    fleet.send("PUT", "/admin/strategy", name="balanced")
    until(button.is_enabled)
    assert button.get_attribute("title") == "Activate what was active before"


COLORED = """source => import(`${location.origin}/ui/python.js`).then(
    ({highlighted}) => highlighted(source))"""


def test_colors_change_no_character_and_find_strings_and_comments(pages: Any, fleet: BrowserFleet):
    page = opened(pages, fleet)
    for path in sorted(FOLDER.glob("*.py")):
        source = path.read_text()
        lines = page.evaluate(COLORED, source)
        assert "\n".join("".join(text for _, text in line) for line in lines) == source
        for kind, wanted in (("comment", tokenize.COMMENT), ("string", tokenize.STRING)):
            found = "".join(text for line in lines for one, text in line if one == kind)
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            expected = "".join(one.string for one in tokens if one.type == wanted)
            assert found == expected.replace("\n", ""), (path.name, kind)
