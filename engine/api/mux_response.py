"""`GET /microserving/stream`: the HTTP side of a multiplexed stream."""

from __future__ import annotations

from fastapi import FastAPI

from engine.api.live_response import LiveResponse
from engine.service.event_mux import EventMuxes

__all__ = ["add_stream"]


def add_stream(app: FastAPI, muxes: EventMuxes) -> None:
    """Let routers open their streams at `app`."""

    @app.get("/microserving/stream", response_class=LiveResponse)
    async def stream(id: str = "") -> LiveResponse:
        """Open a stream of the name `id`: what `start_generate` with `stream: "mux"` and this
        `stream_id` emits, a frame a step.

        A frame is a line, `{"REQUEST_ID": EVENT, …}`. When the caller goes away, all that is
        delivered here is aborted.
        """
        mux = muxes.open(id)
        return LiveResponse(mux.frames(), lambda: muxes.close(mux), "application/x-ndjson")
