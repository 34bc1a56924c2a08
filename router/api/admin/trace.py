"""The admin API's time line: engines, their steps and puts, and requests, as a Chrome trace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from engine.protocol import TIMELINE_S
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import Http, Sent
from router.base import Conflict, StoreUnavailable
from router.timeline import EngineWork, TracedRequest, ask_engines, fleet_trace, traced

__all__ = ["routes"]

log = logging.getLogger(__name__)

MOST_REQUESTS = 4096  # the latest ones, of all workers together
MOST_STEPS = 1 << 16  # of all engines together, and as many puts
HEADERS = [
    (b"Content-Type", b"application/json"),
    (b"Content-Disposition", b'attachment; filename="microserve-trace.json"'),
]
Seconds = Annotated[float, Query(gt=0.0, le=TIMELINE_S, allow_inf_nan=False)]


def routes(router: Router) -> APIRouter:
    """Return `/admin/trace`."""
    api = api_router("Observation")
    making = asyncio.Lock()

    @api.get("/admin/trace", response_model=dict[str, Any], responses=errors(400, 409))
    async def trace(http: Http, seconds: Seconds = 60.0) -> Response:
        """The latest seconds as a time line for Perfetto or chrome://tracing.

        Engines are processes with their calls, steps and puts; requests are flows through them.
        `otherData` tells by how much each engine's clock may be off, and which engines tell no
        steps.
        """
        if making.locked():
            raise Conflict("another time line is being made: try again when it has been sent")
        async with making:
            pieces = await _pieces(router, seconds)
            stream = http.stream(HEADERS)
            for piece in pieces:
                await stream.write(piece)
                await asyncio.sleep(0)  # others have their turn, however fast the client reads
            await stream.end(b"")
        return Sent()

    return api


async def _pieces(router: Router, seconds: float) -> list[bytes]:
    now, wall = time.monotonic(), time.time()
    engines = await ask_engines([*router.registry], seconds, most=MOST_STEPS)
    requests, problem = await _requests(router, seconds)
    left_out = max(len(requests) - MOST_REQUESTS, 0)
    requests = requests[left_out:]

    def made() -> list[bytes]:  # on a thread: it may take a second
        trace = fleet_trace(engines, requests)
        about: dict[str, Any] = {
            "seconds": seconds,
            "origin_unix_s": wall + trace.origin_s - now,  # what the file calls 0
            "requests": len(requests),
            "requests_left_out": left_out,
            "engines": _told(engines),
        }
        return list(trace.pieces({**about, "problem": problem} if problem else about))

    return await asyncio.to_thread(made)


async def _requests(router: Router, seconds: float) -> tuple[list[TracedRequest], str]:
    """Return the requests of all workers by arrival, and why some are missing."""
    requests = [traced(one) for one in router.receipts.latest(seconds, MOST_REQUESTS)]
    problem = ""
    if router.peers is not None:
        try:
            requests += await router.peers.requests(seconds, MOST_REQUESTS)
        except StoreUnavailable as error:
            problem = f"requests of this worker alone: {error.message}"
            log.warning("a time line has the %s", problem)
    return sorted(requests, key=_begin), problem


def _begin(request: TracedRequest) -> float:
    return request.begin_s


def _told(engines: Sequence[EngineWork]) -> dict[str, dict[str, Any]]:
    return {
        one.id: {"problem": one.problem}
        if one.problem
        else {
            "steps": len(one.steps),
            "puts": len(one.puts),
            "clock_error_ms": one.clock_error_s * 1e3,
        }
        for one in engines
    }
