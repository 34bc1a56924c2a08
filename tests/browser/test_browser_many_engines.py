"""The page in front of more engines than have cards, none of which has had a request yet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser_fleet import BrowserFleet, until


@pytest.fixture(scope="module")
def fleet() -> Iterator[BrowserFleet]:
    fleet = BrowserFleet(roles=("any",))
    yield fleet
    fleet.close()


def table_of_many(pages: Any, fleet: BrowserFleet) -> Any:
    """The table of 21 engines.

    One engine is told 21 times: so many processes would take long to start.
    """
    context = pages.context()

    def more(route: Any) -> None:
        told = fleet.snapshot()
        one = told["engines"][0]
        copies = [
            {**one, "id": f"copy-{n}", "url": f"http://copy:{n}", "waiting": 7 * n % 20}
            for n in range(20)
        ]
        told["engines"] = [one, *copies]
        body = f"event: live\ndata: {json.dumps(told)}\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    context.route("**/admin/live*", more)
    page = pages.open(fleet.url, context)
    table = page.get_by_role("region", name="Engines")
    table.wait_for()
    return table


def test_many_engines_are_rows_of_a_table(pages: Any, fleet: BrowserFleet):
    table = table_of_many(pages, fleet)
    first = fleet.get("/admin/engines")["engines"][0]["id"]
    assert table.locator("tbody tr").count() == 21
    assert table.page.locator(".engine").count() == 0
    heights = [row.bounding_box()["height"] for row in table.locator("tbody tr").all()]
    assert max(heights) < 50  # all in one line
    table.get_by_role("button", name=f"Drain {first}", exact=True).click()
    until(lambda: fleet.get("/admin/engines")["engines"][0]["draining"])


def test_the_heads_of_columns_sort_engines(pages: Any, fleet: BrowserFleet):
    table = table_of_many(pages, fleet)

    def head(name: str) -> Any:
        return table.get_by_role("columnheader", name=name, exact=True)

    def shown() -> list[str]:
        names = table.locator("tbody tr td:first-child b").all_inner_texts()
        return [name for name in names if name.startswith("copy-")]

    copies = [f"copy-{n}" for n in range(20)]
    by_waiting = sorted(copies, key=lambda name: 7 * int(name.removeprefix("copy-")) % 20)
    assert shown() == copies and head("Engine").get_attribute("aria-sort") == "none"
    head("Waiting").get_by_role("button").click()
    until(lambda: shown() == by_waiting)
    assert head("Waiting").get_attribute("aria-sort") == "ascending"
    table.page.keyboard.press("Enter")
    until(lambda: shown() == by_waiting[::-1])
    assert head("Waiting").get_attribute("aria-sort") == "descending"
    head("Engine").get_by_role("button").focus()
    table.page.keyboard.press("Space")
    until(lambda: shown() == copies)
    assert head("Engine").get_attribute("aria-sort") == "ascending"
    assert head("Waiting").get_attribute("aria-sort") == "none"
    assert head("Change").get_attribute("aria-sort") is None


def test_axes_of_charts_without_traffic_have_numbers_that_fit(pages: Any, fleet: BrowserFleet):
    page = pages.open(f"{fleet.url}/#/latency")
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Requests", exact=True))
    chart.wait_for()
    ticks = chart.locator("svg g text").all_text_contents()
    assert ticks and all(re.fullmatch(r"[01](\.\d)?", tick) for tick in ticks), ticks
    heads = page.get_by_role("region", name="Generations").locator("th").all_inner_texts()
    assert "JCT p50" in heads
