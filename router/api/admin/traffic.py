"""The admin API's recorded traffic: the shape of the latest requests, as a trace."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response

from engine.protocol import BadRequest
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import Http, Sent
from router.telemetry import recording

__all__ = ["routes"]

PIECE = 64 << 10  # bytes sent at a time
HEADERS = [(b"Content-Type", b"application/x-ndjson")]
Minutes = Annotated[float, Query(gt=0.0, le=10_080.0, allow_inf_nan=False)]


class Trace(Sent):
    """A trace that the function has sent itself."""

    media_type = "application/x-ndjson"


def routes(router: Router) -> APIRouter:
    """Return `/admin/traffic`."""
    api = api_router("Observation")

    @api.get("/admin/traffic", response_class=Trace, responses=errors(400))
    async def traffic(http: Http, minutes: Minutes = 10_080.0) -> Response:
        """The shape of the latest requests, a line of JSON each, without their text.

        `microserve simulate … --workload FILE` runs it.
        """
        if not router.traffic.seconds:
            raise BadRequest("this router records no traffic: --traffic-minutes is 0")
        stream = http.stream(HEADERS)
        for piece in recording(router.traffic.latest(60 * minutes), PIECE):
            await stream.write(piece)
            await asyncio.sleep(0)  # others have their turn, however fast the client reads
        await stream.end(b"")
        return Trace()

    return api
