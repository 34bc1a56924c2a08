"""The admin API's view of what happens now: snapshots as a stream, and the list of requests."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from router.api.live import LiveFeed
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import EVENT_HEADERS, IDLE_S, EventStream, Http, reply
from router.telemetry import Receipt, Slo

__all__ = ["outlines", "routes"]

MOST = 1000
Order = Literal["newest", "slowest"]
State = Literal["all", "live", "ended"]
Objective = Annotated[float | None, Query(gt=0.0, le=1e9, allow_inf_nan=False)]
Limit = Annotated[int, Query(ge=1, le=MOST)]
Seconds = Annotated[float | None, Query(gt=0.0, le=86_400.0, allow_inf_nan=False)]


def routes(router: Router) -> APIRouter:
    """Return `/admin/live` and `/admin/requests`."""
    api = api_router("Observation")
    feed = LiveFeed(router)

    @api.get("/admin/live", response_class=EventStream, responses=errors(400, 503))
    async def live(
        http: Http, slo_ttft_ms: Objective = None, slo_tpot_ms: Objective = None
    ) -> Response:
        """A snapshot every second, as server-sent events: engines, KV that moves, latencies.

        With --workers, of all workers together. Goodput counts the requests within the objectives.
        """
        stream = http.stream(EVENT_HEADERS)
        with feed.listening(Slo(slo_ttft_ms, slo_tpot_ms), http.abort) as listener:
            await stream.write(b": listening\n\n")
            if http.method == "HEAD":
                listener.end()
            async for frames in listener.frames(IDLE_S):
                await stream.write(frames or b": idle\n\n")
        await stream.end(b"")
        return EventStream()

    @api.get("/admin/requests", response_model=dict[str, Any], responses=errors(400))
    async def requests(
        limit: Limit = 100, order: Order = "newest", state: State = "all", seconds: Seconds = None
    ) -> Response:
        """The requests that run and those that ran lately, in outline.

        `slowest` also has the slowest of the last five minutes whose receipts are older than the
        kept ones. `seconds`: only those that run, or ended so recently. With --workers, of all
        workers together.
        """
        wanted = (limit, order, state, seconds)
        found = outlines(router, *wanted)
        if router.peers is not None:
            others = await router.peers.ask_others("outlines", *wanted)
            found = [*found, *(one for part in others for one in part)]
            found.sort(key=itemgetter("created" if order == "newest" else "ms"), reverse=True)
        return reply({"requests": found[:limit]})

    return api


def outlines(
    router: Router, limit: int, order: Order, state: State, seconds: float | None
) -> list[dict[str, Any]]:
    """Return this process's requests in outline, sorted. Arguments as of `GET /admin/requests`."""
    now = router.activity.clock()

    def wanted() -> Iterator[tuple[float, float, Receipt]]:
        for receipt in _known(router):
            live = receipt.ms is None
            lived_s = (receipt.elapsed_ms() if receipt.ms is None else receipt.ms) / 1e3
            recent = live or seconds is None or now - receipt.began - lived_s <= seconds
            if recent and state in ("all", "live" if live else "ended"):
                yield receipt.began, lived_s, receipt

    key = itemgetter(0 if order == "newest" else 1)
    return [receipt.outline() for *_, receipt in sorted(wanted(), key=key, reverse=True)[:limit]]


def _known(router: Router) -> Iterator[Receipt]:
    """Yield each request that runs, and those that have ended and are kept."""
    seen = set()
    activity = router.activity
    for source in (activity.running, router.receipts, activity.slow):
        for receipt in source:
            if id(receipt) not in seen:
                seen.add(id(receipt))
                yield receipt
