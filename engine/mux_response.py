"""`GET /microserving/stream`: the HTTP side of a multiplexed stream."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.mux import Mux, Muxes

__all__ = ["add_stream"]


def add_stream(app: FastAPI, muxes: Muxes) -> None:
    """Let routers open their streams at `app`."""

    @app.get("/microserving/stream", response_class=StreamingResponse)
    async def stream(id: str = "") -> StreamingResponse:
        """Open a stream of the name `id`: what `start_generate` with `stream: "mux"` and this
        `stream_id` emits, a frame a step.

        A frame is a line, `{"REQUEST_ID": EVENT, …}`. When the caller goes away, all that is
        delivered here is aborted.
        """
        return _MuxResponse(muxes, muxes.open(id))


class _MuxResponse(StreamingResponse):
    def __init__(self, muxes: Muxes, mux: Mux) -> None:
        super().__init__(
            mux.frames(), media_type="application/x-ndjson", headers={"Cache-Control": "no-cache"}
        )
        self._muxes = muxes
        self._mux = mux

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._muxes.close(self._mux)
