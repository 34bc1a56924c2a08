"""500 requests a second for a minute, with the page open: nothing grows, in the router or in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import psutil
import pytest
from browser_fleet import BrowserFleet

RATE, SECONDS, WARM_S = 500, 60, 20
LEAST_RATE = 0.8 * RATE  # that the load generator reaches, or the machine is too busy to tell
LOOK_S = 0.5
MOST_ROUTER = 24 << 20  # bytes that the router may grow by after its rings are full
MOST_HEAP = 12 << 20  # bytes that the page's heap may grow by: its ring holds ten minutes


@pytest.fixture(scope="module")
def fleet() -> Iterator[BrowserFleet]:
    fleet = BrowserFleet(engine_flags=("--step-ms", "1", "--prefill-tokens-per-ms", "1000"))
    yield fleet
    fleet.close()


def bench(fleet: BrowserFleet, seconds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "router", "bench", "--url", fleet.url, "--rate", str(RATE)),
            *("--requests", str(RATE * seconds), "--input", "8", "--output", "2"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )


def result_of(loading: subprocess.Popen[str], seconds: int) -> dict[str, Any]:
    """What the load generator says at its end. Every request has to have ended well."""
    told: dict[str, Any] = json.loads(loading.communicate()[0].splitlines()[-1])
    assert (told["errors"], told["rejected"]) == (0, 0), told["error_messages"]
    assert told["completed"] == RATE * seconds, told
    return told


def heap(page: Any) -> tuple[int, int]:
    """Bytes of live objects of the page, and its nodes."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    told = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return int(told["JSHeapUsedSize"]), int(told["Nodes"])


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_nothing_grows_under_load(pages: Any, fleet: BrowserFleet):
    views = {"fleet": "", "requests": "#/requests?show=newest", "latency": "#/latency"}
    opened = {name: pages.open(f"{fleet.url}/{at}") for name, at in views.items()}
    for page in opened.values():
        page.get_by_text("Live", exact=True).wait_for()
    result_of(bench(fleet, WARM_S), WARM_S)
    router = psutil.Process(fleet.router.pid)
    before = router.memory_info().rss
    cpu = sum(router.cpu_times()[:2])
    heaps = {name: heap(page) for name, page in opened.items()}

    loading = bench(fleet, SECONDS)
    seen: list[float] = []
    while loading.poll() is None:
        seen.append(shown_rate(opened["fleet"]))
        time.sleep(LOOK_S)
    result = result_of(loading, SECONDS)
    used = sum(router.cpu_times()[:2]) - cpu
    grown = router.memory_info().rss - before
    after = {name: heap(page) for name, page in opened.items()}
    under_load = median(one for one in seen if one > 0)
    figures = {
        "rate": RATE, "seconds": SECONDS, "requests_per_s": result["requests_per_s"],
        "shown_per_s": under_load, "router_grew_bytes": grown, "router_cpu_s": used,
        "pages": {
            name: {
                "heap_grew_bytes": after[name][0] - heaps[name][0],
                "nodes": [heaps[name][1], after[name][1]],
            }
            for name in views
        },
    }  # fmt: skip
    print(json.dumps(figures))
    assert result["requests_per_s"] >= LEAST_RATE
    assert under_load == pytest.approx(result["requests_per_s"], rel=0.2)
    assert grown < MOST_ROUTER
    for name, page in opened.items():
        assert after[name][0] - heaps[name][0] < MOST_HEAP, name
        assert after[name][1] < 2 * heaps[name][1] + 2000, name
        page.get_by_text("Live", exact=True).wait_for()


def shown_rate(page: Any) -> float:
    """The requests per second that the page shows."""
    text = page.locator(".stat", has_text="Requests ended").locator(".stat-value").inner_text()
    return float(re.sub(r"[^\d.]", "", text.split("/")[0]) or 0)
