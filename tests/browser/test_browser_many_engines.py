"""The page in front of an engine that has not had a request yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser_fleet import BrowserFleet


@pytest.fixture(scope="module")
def fleet() -> Iterator[BrowserFleet]:
    fleet = BrowserFleet(roles=("any",))
    yield fleet
    fleet.close()


def test_axes_of_charts_without_traffic_have_numbers_that_fit(pages: Any, fleet: BrowserFleet):
    page = pages.open(f"{fleet.url}/#/latency")
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Requests", exact=True))
    chart.wait_for()
    ticks = chart.locator("svg g text").all_text_contents()
    assert ticks and all(re.fullmatch(r"[01](\.\d)?", tick) for tick in ticks), ticks
    heads = page.get_by_role("region", name="Generations").locator("th").all_inner_texts()
    assert "JCT p50" in heads
