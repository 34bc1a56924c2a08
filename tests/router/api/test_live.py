"""`GET /admin/live` and `GET /admin/requests`: what happens now, and what did lately."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from engine.protocol import NoCapacity
from router.api.live import LiveFeed, Part, feed, snapshot
from router.telemetry import Slo


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.05)


@asynccontextmanager
async def snapshots(r: Any, query: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with r.http.get(r.server.url + "/admin/live" + query) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"

        async def each() -> AsyncIterator[dict[str, Any]]:
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        yield each()


async def listed(r: Any, query: str = "") -> list[dict[str, Any]]:
    async with r.http.get(r.server.url + "/admin/requests" + query) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["requests"]


def ask(r: Any, id: str, tokens: int = 3, prompt: int = 20) -> Any:
    body = {"prompt": [5] * prompt, "max_tokens": tokens}
    return r.post("/v1/completions", body, headers={"X-Request-Id": id})


async def test_a_snapshot_has_engines_rates_and_latencies_by_generation(route, fake):
    a, b = fake("a"), fake("b")
    async with route(a, b) as r, snapshots(r, "?slo_ttft_ms=60000") as told:
        first = await anext(told)
        assert [one["url"] for one in first["engines"]] == [a.url, b.url]
        assert {one["status"] for one in first["engines"]} == {"up"}
        assert first["latency"] == [] and first["flows"] == [] and first["canary"] is None
        assert first["slo"] == {"ttft_ms": 60000.0, "tpot_ms": None}
        for number in range(4):
            await ask(r, f"r{number}", tokens=4)
        counted = dict.fromkeys(("begun_per_s", "ended_per_s", "tokens_per_s"), 0.0)
        async for one in told:
            for name in counted:
                counted[name] += one["requests"][name]
            if one["latency"] and one["latency"][0]["requests"] == 4:
                break
        assert all(counted.values())
        (generation,) = one["latency"]
        assert (generation["generation"], generation["strategy"]) == (1, "data_parallel")
        assert generation["goodput"] == 1.0 and generation["failed"] == 0
        for name in ("ttft_ms", "tpot_ms", "jct_ms"):
            values = generation[name]
            assert 0 <= values["p50"] <= values["p90"] <= values["p99"]
        assert one["active"]["generation"] == 1
        router = r.server.router
        router.revisions.activate(router.catalog["cache_aware"].bind({}))
        await ask(r, "later")
        async for one in told:
            if len(one["latency"]) == 2:
                break
        assert [entry["generation"] for entry in one["latency"]] == [1, 2]
        assert one["active"]["strategy"] == "cache_aware"


async def test_kv_that_moved_and_requests_that_run_are_in_it(route, fake):
    gate = asyncio.Event()
    p, d = fake("p", role="prefill"), fake("d", role="decode", gate=gate)
    async with route(p, d, strategy="prefill_decode") as r, snapshots(r) as told:
        await anext(told)
        asking = asyncio.create_task(ask(r, "held", tokens=8))
        flows: list[dict[str, Any]] = []
        async for one in told:
            flows += one["flows"]
            if any(flow["calls"] for flow in flows) and one["requests"]["live"]:
                break
        (flow,) = [flow for flow in flows if flow["calls"]]
        assert (flow["from"], flow["to"], flow["calls"]) == ("p", "d", 1)
        (running,) = await listed(r, "?state=live")
        assert running["id"] == "held" and running["status"] == "running"
        assert running["phase"].startswith("prefill") or running["phase"].startswith("decode")
        assert await listed(r, "?state=ended") == []
        gate.set()
        await asking
        async with r.http.get(r.server.url + "/admin/requests/held") as response:
            legs = (await response.json())["legs"]
        assert [leg["to"] for leg in legs if leg["call"] == "remote_send"] == ["d"]


async def test_requests_are_listed_by_age_and_by_duration(route, fake):
    async with route(fake("a"), max_receipts=3) as r:
        for number, tokens in enumerate((2, 200, 3, 4, 5)):
            await ask(r, f"r{number}", tokens=tokens)
        newest = await listed(r)
        # Those of old receipts are the slow ones that are kept for longer.
        assert [one["id"] for one in newest][:3] == ["r4", "r3", "r2"]
        slowest = await listed(r, "?order=slowest&state=ended&seconds=60")
        took = [one["ms"] for one in slowest]
        assert took == sorted(took, reverse=True) and "r1" in [one["id"] for one in slowest]
        assert len(await listed(r, "?limit=2")) == 2
        assert await listed(r, "?state=live") == []
        async with r.http.get(r.server.url + "/admin/requests/r1") as response:
            assert response.status == 200
        for bad in ("limit=0", "limit=1001", "order=x", "state=x", "seconds=0", "seconds=nan"):
            async with r.http.get(r.server.url + f"/admin/requests?{bad}") as response:
                assert response.status == 400, bad
        for bad in ("slo_ttft_ms=0", "slo_tpot_ms=nan", "slo_ttft_ms=x"):
            async with r.http.get(r.server.url + f"/admin/live?{bad}") as response:
                assert response.status == 400, bad


async def test_no_receipts_are_kept_if_none_are_wanted(route, fake):
    async with route(fake("a"), max_receipts=0) as r:
        await ask(r, "gone")
        assert await listed(r) == []


async def test_a_wait_for_room_says_where(route, fake):
    a = fake("a", refuse={"start_generate": [NoCapacity("full", retry_after_s=0.01)] * 2})
    async with route(a) as r:
        await ask(r, "waits")
        async with r.http.get(r.server.url + "/admin/requests/waits") as response:
            receipt = await response.json()
        assert receipt["waiting"]
        for wait in receipt["waiting"]:
            assert wait["why"] == "for room on a" and wait["ms"] >= 0
        assert sum(wait["ms"] for wait in receipt["waiting"]) == pytest.approx(receipt["queued_ms"])


async def test_snapshots_are_made_only_for_listeners_and_shared_by_them(
    route, fake, monkeypatch: pytest.MonkeyPatch
):
    made = 0
    real = feed.part_of

    def counted(router: Any) -> Part:
        nonlocal made
        made += 1
        return real(router)

    monkeypatch.setattr(feed, "part_of", counted)
    async with route(fake("a")) as r:
        await asyncio.sleep(0.2)
        assert made == 0
        async with (
            snapshots(r) as one,
            snapshots(r) as two,
            snapshots(r, "?slo_ttft_ms=1") as three,
        ):
            seen: list[dict[float, Any]] = []
            for told in (one, two, three):
                seen.append({each["time"]: each async for each in first(4, told)})
            # The third one has listened for as long as the first one, and reads later.
            assert len(set(seen[0]) & set(seen[1])) >= 1
        unmade = 0
        for _ in range(200):  # until the server has noticed that they are gone
            before = made
            await asyncio.sleep(0.1)
            unmade = unmade + 1 if made == before else 0
            if unmade == 3:
                break
        assert unmade == 3


async def test_listeners_with_other_objectives_share_the_percentiles(
    route, fake, monkeypatch: pytest.MonkeyPatch
):
    """Else 64 listeners would keep the router's event loop from its requests for most of a second,
    every second."""
    computed = 0
    real = snapshot.percentile

    def counted(*args: Any) -> float | None:
        nonlocal computed
        computed += 1
        return real(*args)

    monkeypatch.setattr(snapshot, "percentile", counted)
    async with route(fake("a")) as r, AsyncExitStack() as listening:
        await ask(r, "x")
        queries = [f"?slo_ttft_ms={ms}" for ms in (1e-6, 10, 1e6, 1e7)]
        told = [await listening.enter_async_context(snapshots(r, query)) for query in queries]
        for one in told:  # all listen now
            await anext(one)
        seen: list[dict[float, Any]] = []
        began = computed
        for one in told:
            seen.append({each["time"]: each["latency"] async for each in first(6, one)})
        (time, *_) = set.intersection(*map(set, seen))
        shown = [latencies[time][0] for latencies in seen]
    assert [one.pop("goodput") for one in (shown[0], shown[-1])] == [0.0, 1.0]
    assert shown[0]["ttft_ms"] == shown[-1]["ttft_ms"] and shown[0]["requests"] == 1
    times = {time for latencies in seen for time in latencies}
    assert computed - began <= 9 * (len(times) + 8)  # three of three, for each snapshot


async def first(count: int, told: AsyncIterator[Any]) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(told)


async def test_listeners_are_bounded_and_end_with_the_router(route, fake, monkeypatch):
    monkeypatch.setattr(feed, "MOST_LISTENERS", 2)
    async with route(fake("a")) as r:
        async with snapshots(r) as one, snapshots(r) as two:
            async with r.http.get(r.server.url + "/admin/live") as response:
                assert response.status == 503
            await anext(one), await anext(two)
        last = await r.http.get(r.server.url + "/admin/live")
        while last.status == 503:  # the router has yet to notice that the two have gone
            last = await r.http.get(r.server.url + "/admin/live")
        ended = asyncio.create_task(last.content.read())
        await asyncio.sleep(0.1)
        r.server.router.events.close()  # as a shutdown does
        assert b"event: live" in await asyncio.wait_for(ended, 10)


async def test_a_listener_of_snapshots_that_does_not_read_is_cut_off(route, fake):
    async with route(fake("a")) as r:
        cut = asyncio.Event()
        snapshots_of = LiveFeed(r.server.router)
        with snapshots_of.listening(Slo(), cut.set):
            await asyncio.wait_for(cut.wait(), 10)
