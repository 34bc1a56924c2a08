"""The routes with endless responses: multiplexed streams and the prefix feed."""

from __future__ import annotations

from fastapi import FastAPI

from engine.api.streaming import LiveResponse
from engine.service import EventMuxes, PrefixFeed

__all__ = ["add_stream_routes"]


def add_stream_routes(app: FastAPI, muxes: EventMuxes, prefixes: PrefixFeed) -> None:
    """Add `GET /microserving/stream` and `GET /microserving/prefixes`."""

    @app.get("/microserving/stream", response_class=LiveResponse, status_code=200)
    async def stream(id: str = "") -> LiveResponse:
        """Open the multiplexed stream `id`.

        It carries the events of each `start_generate` with `stream: "mux"` and this `stream_id`. A
        frame is a line, `{"REQUEST_ID": EVENT, …}`. When the client disconnects, the generations of
        the stream are aborted.
        """
        mux = muxes.open(id)
        return LiveResponse(mux.frames(), lambda: muxes.close(mux), "application/x-ndjson")

    @app.get("/microserving/prefixes", response_class=LiveResponse, status_code=200)
    async def prefix_changes() -> LiveResponse:
        """Stream the pages that the prefix cache holds, then its changes.

        A frame is a line, `{"added": [NAME, …], "removed": [NAME, …]}`. The first frame has all
        pages.
        """
        reader = prefixes.open()
        return LiveResponse(reader.frames(), lambda: prefixes.close(reader), "application/x-ndjson")
