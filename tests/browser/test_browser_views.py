"""What the views of engines, requests and latencies show, against what the API says."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from browser_fleet import BrowserFleet, until

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
    for id, one in known.items():
        shown = card(page, id)
        shown.get_by_text(one["url"]).wait_for()
        assert shown.locator(".badge").first.inner_text() == one["role"]
        assert shown.locator(".badge").nth(1).inner_text().strip() == one["status"]
        pages_of = one["state"]["pages"]
        legend = shown.locator(".pool .legend")
        until(
            lambda legend=legend, cached=pages_of["cached"]: (
                f"cached {cached}" in legend.inner_text().replace("\n", " ")
            )
        )
    assert any(one["state"]["pages"]["cached"] for one in known.values())


def test_kv_that_moves_is_drawn(pages: Any, fleet: BrowserFleet):
    page = pages.open(fleet.url)
    page.get_by_text("Live", exact=True).wait_for()
    over = threading.Event()

    def load() -> None:
        start = 1000
        while not over.is_set():
            start += 400
            fleet.ask([token % 500 for token in range(start, start + 400)])

    loading = threading.Thread(target=load)
    loading.start()
    try:
        arc = page.locator(".arc-moves title").first
        arc.wait_for(state="attached")
        said = re.match(r"(\S+) to (\S+): \d+ sends, [\d.]+ KB", arc.text_content())
        assert said is not None, arc.text_content()
        known = engines(fleet)
        assert [known[said[1]]["role"], known[said[2]]["role"]] == ["prefill", "decode"]
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
    assert names.index("of-200") < names.index("of-40") < names.index("of-4")
    page.get_by_role("link", name="of-200").click()
    page.get_by_text("Time lines").wait_for()
    receipt = fleet.get("/admin/requests/of-200")
    legs = page.locator(".leg")
    assert legs.count() == len(receipt["legs"]) == 3
    lanes = page.locator(".lane-name").all_inner_texts()
    assert lanes == [*dict.fromkeys(leg["engine"] for leg in receipt["legs"])]
    send = next(leg for leg in receipt["legs"] if leg["call"] == "remote_send")
    assert send["to"] in lanes and send["to"] != send["engine"]
    story = page.locator(".story").inner_text()
    assert f"{send['engine']} computed {send['computed_tokens']} tokens" in story
    assert "generated 200 tokens" in story
    assert "Done: 200 tokens" in story


def test_a_request_that_runs_has_its_phase_and_then_ends(pages: Any, fleet: BrowserFleet):
    running = threading.Thread(target=fleet.ask, args=([9] * 50, 1500), kwargs={"id": "long"})
    running.start()
    try:
        page = pages.open(f"{fleet.url}/#/requests?show=live")
        row = page.locator("tbody tr", has_text="long")
        row.locator(".badge", has_text="decode").wait_for()
        row.get_by_role("link", name="long").click()
        page.get_by_text("running", exact=True).wait_for()
        page.locator(".leg-open").wait_for()
    finally:
        running.join()
    page.get_by_text("done", exact=True).wait_for()
    assert page.locator(".leg-open").count() == 0


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
    page.get_by_label("TPOT objective (ms)").fill("0.0001")
    page.get_by_text("TPOT ≤ 0.1 µs").wait_for()
    fleet.ask([5] * 64, 20)
    until(lambda: " 0 %" in row.inner_text().replace("\t", " "))
    page.get_by_label("TPOT objective (ms)").fill("")
    fleet.send("PUT", "/admin/strategy", name="prefill_decode")


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
