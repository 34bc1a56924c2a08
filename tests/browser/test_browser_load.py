"""500 requests a second for a minute, with the page open: nothing grows, in the router or in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from browser_fleet import BrowserFleet, until

RATE, SECONDS, WARM_S = 500, 60, 20
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


def heap(page: Any) -> tuple[int, int]:
    """Bytes of live objects of the page, and its nodes."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    told = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return int(told["JSHeapUsedSize"]), int(told["Nodes"])


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_nothing_grows_under_load(pages: Any, fleet: BrowserFleet):
    fast, listed = pages.open(fleet.url), pages.open(f"{fleet.url}/#/requests?show=newest")
    charts = pages.open(f"{fleet.url}/#/latency")
    for page in (fast, listed, charts):
        page.get_by_text("Live", exact=True).wait_for()
    warm = bench(fleet, WARM_S)
    assert json.loads(warm.communicate()[0].splitlines()[-1])
    router = psutil.Process(fleet.router.pid)
    before = router.memory_info().rss
    cpu = router.cpu_times()
    heaps = [heap(page) for page in (fast, listed, charts)]
    loading = bench(fleet, SECONDS)
    seen = until(lambda: _rate(fast) > RATE / 10 and _rate(fast), timeout=SECONDS)
    result = json.loads(loading.communicate()[0].splitlines()[-1])
    grown = router.memory_info().rss - before
    used = sum(router.cpu_times()[:2]) - sum(cpu[:2])
    print(f"the router grew by {grown / 2**20:.1f} MiB and used {used:.1f} s of CPU;")
    print(f"the page showed {seen} requests/s; {json.dumps(result)[:400]}")
    assert grown < MOST_ROUTER
    for page, (size, nodes) in zip((fast, listed, charts), heaps, strict=True):
        now, nodes_now = heap(page)
        assert now - size < MOST_HEAP
        assert nodes_now < 2 * nodes + 2000
        page.get_by_text("Live", exact=True).wait_for()


def _rate(page: Any) -> float:
    """The requests per second that the page shows."""
    text = page.locator(".stat", has_text="Requests ended").locator(".stat-value").inner_text()
    return float(re.sub(r"[^\d.]", "", text.split("/")[0]) or 0)
