"""What the views of engines, requests and latencies show, against what the API says."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from browser_fleet import BrowserFleet, Streamed, until

ROLES = ("prefill", "prefill", "decode", "decode")


@pytest.fixture(scope="module")
def fleet() -> Iterator[BrowserFleet]:
    fleet = BrowserFleet(roles=ROLES, strategy="prefill_decode")
    yield fleet
    fleet.close()


def engines(fleet: BrowserFleet) -> dict[str, Any]:
    return {one["id"]: one for one in fleet.get("/admin/engines")["engines"]}


def card(page: Any, engine: str) -> Any:
    return page.locator(".engine").filter(has=page.get_by_role("heading", name=engine, exact=True))


def test_the_fleet_shows_what_the_api_says(pages: Any, fleet: BrowserFleet):
    fleet.ask(list(range(320)))  # pages are cached then
    page = pages.open(fleet.url)
    known = engines(fleet)
    assert len(known) == len(ROLES)

    def cached(id: str) -> int:
        """What the API says now: what it said before the last poll of the engine is old."""
        pages: int = engines(fleet)[id]["state"]["pages"]["cached"]
        return pages

    until(lambda: any(cached(id) for id in known))
    for id, one in known.items():
        shown = card(page, id)
        shown.get_by_text(one["url"]).wait_for()
        assert shown.locator(".badge").first.inner_text() == one["role"]
        assert shown.locator(".badge").nth(1).inner_text().strip() == one["status"]
        legend = shown.locator(".pool .legend")
        until(
            lambda id=id, legend=legend: (
                f"cached {cached(id)}" in legend.inner_text().replace("\n", " ")
            )
        )


def test_the_fleet_shows_what_waits(pages: Any):
    """While one engine has a queue."""
    fleet = BrowserFleet(roles=("any", "any"), engine_flags=("--max-batch", "1", "--step-ms", "20"))
    running: list[Streamed] = []
    try:
        drained = next(iter(engines(fleet)))
        fleet.send("PATCH", f"/admin/engines/{drained}", draining=True)
        page = pages.open(fleet.url)
        running = [Streamed(fleet, f"long-{n}", 1000) for n in range(4)]

        def same() -> bool:
            for id, one in engines(fleet).items():
                shown = card(page, id)
                epoch = shown.get_by_text("epoch …").inner_text()
                names, values = shown.locator("dt"), shown.locator("dd")
                numbers = dict(zip(names.all_inner_texts(), values.all_inner_texts(), strict=True))
                state = one["state"]
                expected = {
                    "running": state["running"], "waiting": state["waiting"],
                    "load": one["load"]["tokens"],
                }  # fmt: skip
                if epoch != f"epoch …{str(state['epoch'])[-6:]}":
                    return False
                if {name: numbers[name] for name in expected} != {
                    name: str(value) for name, value in expected.items()
                }:
                    return False
                if id != drained and not (expected["running"] and expected["waiting"]):
                    return False
            return True

        until(same)
        page.close()
    finally:
        fleet.close()
        for one in running:
            one.join()


OPACITIES = """labels => labels.map(label => {
    const found = [];
    for (let one = label; one; one = one.parentElement) found.push(getComputedStyle(one).opacity);
    return found;
})"""


def test_kv_that_moves_is_drawn(pages: Any, fleet: BrowserFleet):
    page = pages.open(fleet.url)
    page.get_by_text("Live", exact=True).wait_for()
    over = threading.Event()

    def load() -> None:
        number = 0
        while not over.wait(0.1):  # few enough for the lists of requests in other tests
            number += 1
            fleet.ask([number % 500, *range(399)])  # no prefix of it is cached

    loading = threading.Thread(target=load)
    loading.start()
    try:
        arc = page.locator(".arc-moves title").first
        told = re.compile(r"(\S+) to (\S+): \d+ sends, [\d.]+ KB")
        said = until(lambda: told.match(arc.text_content()))  # first it may be under way
        assert said is not None
        known = engines(fleet)
        assert [known[said[1]]["role"], known[said[2]]["role"]] == ["prefill", "decode"]
        line = page.locator(".arc-moves .arc-line").first
        assert line.evaluate("line => getComputedStyle(line).strokeDasharray") == "none"
        labels = page.locator(".arc text")
        labels.first.wait_for()
        for opacities in labels.evaluate_all(OPACITIES):  # also of arcs that fade
            assert {*opacities} == {"1"}
    finally:
        over.set()
        loading.join()


def test_engines_are_drained_and_change_roles_from_the_page(pages: Any, fleet: BrowserFleet):
    page = pages.open(fleet.url)
    engine = next(iter(engines(fleet)))
    page.get_by_role("button", name=f"Drain {engine}").click()
    page.get_by_role("button", name=f"Use {engine} again").wait_for()
    assert engines(fleet)[engine]["draining"]
    page.get_by_role("button", name=f"Use {engine} again").click()
    page.get_by_role("button", name=f"Drain {engine}").wait_for()
    assert not engines(fleet)[engine]["draining"]
    page.get_by_label(f"Role of {engine}").select_option("any")
    until(lambda: engines(fleet)[engine]["role"] == "any")
    page.get_by_label(f"Role of {engine}").select_option("prefill")
    until(lambda: engines(fleet)[engine]["role"] == "prefill")


def test_a_prefix_is_moved_from_the_page(pages: Any, fleet: BrowserFleet):
    page = pages.open(fleet.url)
    text = "What is moved has a few pages. " * 40
    legs = fleet.get(f"/admin/requests/{fleet.ask(text)}")["legs"]
    source = next(leg["engine"] for leg in legs if leg["call"] == "remote_send")
    target = next(
        id for id, one in engines(fleet).items() if id != source and one["role"] == "prefill"
    )
    before = engines(fleet)[target]["state"]["pages"]["cached"]
    page.get_by_role("button", name=f"Move a prefix from {source}").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Text of the prefix").fill(text)
    dialog.get_by_label("To").select_option(target)
    dialog.get_by_role("button", name="Move", exact=True).click()
    page.get_by_text(re.compile(rf"tokens are at {target}")).wait_for()
    until(lambda: engines(fleet)[target]["state"]["pages"]["cached"] > before)


def test_requests_are_listed_slowest_first_and_each_is_told(pages: Any, fleet: BrowserFleet):
    for number, tokens in enumerate((4, 200, 40)):
        fleet.ask([7 + number] * 100, tokens, id=f"of-{tokens}")
    page = pages.open(f"{fleet.url}/#/requests")
    listed = fleet.get("/admin/requests?order=slowest&state=ended&seconds=300")["requests"]
    rows = page.locator("tbody tr")
    page.get_by_role("link", name="of-200").wait_for()
    names = [name.strip() for name in rows.locator("td:first-child").all_inner_texts()]
    assert names == [one["id"] for one in listed]
    assert [one["ms"] for one in listed] == sorted((one["ms"] for one in listed), reverse=True)
    assert {"of-4", "of-40", "of-200"} <= {*names}
    page.get_by_role("link", name="of-200").click()
    page.get_by_text("Time lines").wait_for()
    receipt = fleet.get("/admin/requests/of-200")
    legs = page.locator(".leg")
    assert legs.count() == len(receipt["legs"]) == 3
    lanes = page.locator(".lane-name").all_inner_texts()
    assert lanes == [*dict.fromkeys(leg["engine"] for leg in receipt["legs"])]
    send = next(leg for leg in receipt["legs"] if leg["call"] == "remote_send")
    assert send["to"] in lanes and send["to"] != send["engine"]
    drawn = page.locator(".waterfall").evaluate(DRAWN)
    for bar in drawn["bars"].values():  # no style sheet of another view takes their color or height
        assert bar["height"] > 15 and bar["background"].startswith("linear-gradient"), bar
    assert drawn["bars"].keys() == {"bar-compute"}
    assert_where_time_says(receipt, drawn["legs"])
    story = page.locator(".story").inner_text()
    assert f"{send['engine']} computed {send['computed_tokens']} tokens" in story
    assert "generated 200 tokens" in story
    assert "Done: 200 tokens" in story


# Where legs are in their lanes, as shares of the width, and the bars of computations.
DRAWN = """waterfall => {
    const legs = [...waterfall.querySelectorAll(".leg")].map(leg => {
        const lane = leg.parentElement.getBoundingClientRect(), box = leg.getBoundingClientRect();
        const name = leg.closest(".lane").querySelector(".lane-name").textContent;
        const call = leg.querySelector(".leg-name").textContent;
        const from = (box.left - lane.left) / lane.width;
        return {name, call, from, share: box.width / lane.width, least: 2 / lane.width};
    });
    const bars = {};
    for (const bar of waterfall.querySelectorAll(".leg .bar-compute")) {
        const {height, backgroundImage} = getComputedStyle(bar);
        bars[bar.classList[1]] = {height: parseFloat(height), background: backgroundImage};
    }
    return {legs, bars};
}"""


def assert_where_time_says(receipt: dict[str, Any], drawn: list[dict[str, Any]]) -> None:
    """The legs of a request that has ended begin and end where their times say, within 1 %."""
    assert len(drawn) == len(receipt["legs"])
    for leg in receipt["legs"]:
        shown = next(
            one
            for one in drawn
            if (one["name"], one["call"]) == (leg["engine"], leg["call"])
            and one["from"] == pytest.approx(leg["start_ms"] / receipt["ms"], abs=0.01)
        )
        share = max(leg["ms"] / receipt["ms"], shown["least"])  # two pixels at least
        assert shown["share"] == pytest.approx(share, abs=0.01), leg


@pytest.fixture
def two() -> Iterator[BrowserFleet]:
    """Two engines of which one may be lost."""
    fleet = BrowserFleet(engine_flags=("--step-ms", "8", "--prefill-tokens-per-ms", "50"))
    yield fleet
    fleet.close()


def test_a_retry_after_the_death_of_an_engine_is_drawn_and_told(pages: Any, two: BrowserFleet):
    stream = Streamed(two, "survives", 400)
    dead = stream.decoding(50)
    of = {one["url"]: one["id"] for one in engines(two).values()}
    next(engine for engine in two.engines if of[engine.url] == dead).kill()
    receipt = stream.receipt()
    (retry,) = receipt["retries"]
    after = retry["after_tokens"]
    assert 50 <= after < 400 and retry["engines"] == [dead]
    page = pages.open(f"{two.url}/#/requests/survives")
    page.get_by_text(f"retry after {after} tokens", exact=False).wait_for()
    lanes = page.locator(".lane")
    assert page.locator(".lane-track .mark-bad").count() == page.locator(".lane-name").count() == 2
    legend = page.locator(".waterfall-legend li", has_text="retry").inner_text()
    assert legend.startswith(f"retry after {after} tokens")
    failed = page.locator(".leg-failed")
    assert failed.count() == 1
    assert lanes.filter(has=failed).locator(".lane-name").inner_text() == dead
    story = page.locator(".story")
    assert f"Goes on elsewhere after {after} tokens, not on {dead}" in story.inner_text()
    assert f"start_generate on {dead} failed" in story.locator(".story-bad").inner_text()
    assert "resumed: " in story.inner_text()
    stat = page.locator(".stat", has_text="Retries")
    assert stat.locator(".stat-value").inner_text() == "1"
    assert_where_time_says(receipt, page.locator(".waterfall").evaluate(DRAWN)["legs"])
    page.close()


def test_a_move_off_a_drained_engine_is_no_failure(pages: Any, two: BrowserFleet):
    stream = Streamed(two, "moves", 400)
    drained = stream.decoding(50)
    two.send("PATCH", f"/admin/engines/{drained}", draining=True)
    receipt = stream.receipt()
    (move,) = receipt["retries"]
    assert move["error"]["type"] == "draining"
    page = pages.open(f"{two.url}/#/requests/moves")
    after = move["after_tokens"]
    page.get_by_text(f"moved after {after} tokens: engine drained").wait_for()
    assert page.locator(".lane-track .mark-move").count() == 2
    assert page.locator(".mark-bad, .leg-failed, .story-bad, .text-bad").count() == 0
    assert f"Moves away after {after} tokens" in page.locator(".story").inner_text()
    stat = page.locator(".stat", has_text="Retries")
    assert stat.locator(".stat-value").inner_text() == "0"
    assert "moved once" in stat.inner_text()
    page.close()


def test_a_request_that_runs_has_its_phase_and_then_ends(pages: Any, two: BrowserFleet):
    page = pages.open(f"{two.url}/#/requests?show=live")
    running = threading.Thread(target=two.ask, args=([9] * 50, 1500), kwargs={"id": "long"})
    running.start()
    try:
        row = page.locator("tbody tr", has_text="long")
        row.locator(".badge", has_text="decode").wait_for()
        row.get_by_role("link", name="long").click()
        page.get_by_text("running", exact=True).wait_for()
        page.locator(".leg-open").wait_for()
    finally:
        running.join()
    page.get_by_text("done", exact=True).wait_for()
    assert page.locator(".leg-open").count() == 0
    page.close()


def test_a_swap_is_a_generation_of_its_own_and_goodput_follows_the_objectives(
    pages: Any, fleet: BrowserFleet
):
    page = pages.open(f"{fleet.url}/#/latency")
    first = fleet.get("/admin/strategies")["active"]["generation"]
    fleet.ask([3] * 64, 20)
    table = page.get_by_role("region", name="Generations")
    table.get_by_text(f"gen {first}").wait_for()
    second = fleet.send("PUT", "/admin/strategy", name="data_parallel")["generation"]
    for _ in range(3):
        fleet.ask([4] * 64, 20)
    row = table.locator("tr", has_text=f"gen {second}")
    until(lambda: "100 %" in row.inner_text())
    page.locator(".chart .legend", has_text=f"gen {second}").first.wait_for()
    marks = page.locator(".chart-mark text")
    marks.first.wait_for()
    assert {*marks.all_text_contents()} == {f"gen {second} data_parallel"}
    assert marks.count() == page.locator(".chart").count()
    page.get_by_label("TPOT objective (ms)").fill("0.0001")
    page.get_by_text("TPOT ≤ 0.1 µs").wait_for()
    fleet.ask([5] * 64, 20)
    until(lambda: " 0 %" in row.inner_text().replace("\t", " "))
    page.get_by_label("TPOT objective (ms)").fill("")
    fleet.send("PUT", "/admin/strategy", name="prefill_decode")


AS_SHOWN = """([how, value, rate]) => import(`${location.origin}/ui/format.js`).then(
    format => format[how](value) + (rate === undefined ? "" : `\\n${format.count(rate)} /s`))"""


def test_latencies_and_rates_of_a_generation_are_those_of_the_api(pages: Any, fleet: BrowserFleet):
    page = pages.open(f"{fleet.url}/#/latency")
    page.get_by_label("TTFT objective (ms)").fill("100000")  # any answer meets it
    generation = fleet.get("/admin/strategies")["active"]["generation"]
    table = page.get_by_role("region", name="Generations")
    heads = table.locator("th").all_inner_texts()
    row = table.locator("tbody tr", has_text=f"gen {generation}")
    for _ in range(12):
        fleet.ask([6] * 64, 20)

    def told() -> dict[str, str] | None:
        """What the API tells of the generation, as the page writes it; all of it in one order."""
        latency = fleet.snapshot()["latency"]
        own = next((one for one in latency if one["generation"] == generation), None)
        if own is None or not own["requests"]:
            return None
        wanted = {
            "TTFT p50": ("ms", own["ttft_ms"]["p50"]),
            "TPOT p50": ("ms", own["tpot_ms"]["p50"]),
            "JCT p99": ("ms", own["jct_ms"]["p99"]),
            "Requests": ("count", own["requests"], own["requests"] / 10),
            "Within SLO": ("percent", own["goodput"], own["goodput_per_s"]),
        }
        return {name: page.evaluate(AS_SHOWN, [*one]) for name, one in wanted.items()}

    def same() -> bool:
        expected = told()
        if expected is None:  # the window has passed
            fleet.ask([6] * 64, 20)
            return False
        cells = dict(zip(heads, row.locator("td").all_inner_texts(), strict=True))
        return {name: cells[name] for name in expected} == expected

    until(same)


KEYS = """chart => [...chart.querySelectorAll(".legend .key path")].map(path => {
    const {stroke, strokeDasharray} = getComputedStyle(path);
    return [stroke, strokeDasharray];
})"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_percentiles_have_colors_and_dashes_of_their_own(
    pages: Any, fleet: BrowserFleet, theme: str
):
    page = pages.open(f"{fleet.url}/#/latency", color_scheme=theme)
    page.get_by_role("button", name="p90").click()
    name = "Time to first token"
    chart = page.locator(".chart", has=page.get_by_role("heading", name=name, exact=True))
    chart.locator(".key").nth(2).wait_for()
    keys = chart.evaluate(KEYS)[:3]
    assert len({color for color, _ in keys}) == len({dash for _, dash in keys}) == 3, keys


def test_a_wait_for_room_is_told_in_words(pages: Any):
    flags = ("--max-waiting", "1", "--max-batch", "1", "--step-ms", "4")
    fleet = BrowserFleet(roles=("any",), engine_flags=flags)
    try:
        asked = [
            threading.Thread(
                target=fleet.ask, args=([number] * 100, 60), kwargs={"id": f"r{number}"}
            )
            for number in range(4)
        ]
        for one in asked:
            one.start()
        for one in asked:
            one.join()
        receipts = [fleet.get(f"/admin/requests/r{number}") for number in range(4)]
        waited = max(receipts, key=lambda receipt: receipt["queued_ms"])
        assert waited["waiting"], receipts
        engine = next(iter(engines(fleet)))
        page = pages.open(f"{fleet.url}/#/requests/{waited['id']}")
        said = re.compile(rf"waited [\d.]+ m?s for room on {engine}")
        page.locator(".story-queue", has_text=said).first.wait_for()
        assert page.locator(".lane-name").all_inner_texts()[0] in ("router", engine)
        page.locator(".bar-queue").first.wait_for()
        page.close()  # it would note that its router is gone
    finally:
        fleet.close()
