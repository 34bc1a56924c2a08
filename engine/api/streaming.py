"""Responses that stream, and the server-sent events of one generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.protocol import Event, MicroserveError, error_body
from engine.service import GenerationStream

__all__ = ["LiveResponse", "event_stream"]


class LiveResponse(StreamingResponse):
    """A response of `frames`, each sent as it comes.

    `end` is called when the response has ended for any reason, even if no frame was taken because
    the client had left before.
    """

    def __init__(
        self, frames: AsyncIterator[bytes], end: Callable[[], object], media_type: str
    ) -> None:
        super().__init__(frames, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def event_stream(
    stream: GenerationStream, frames: AsyncIterator[bytes] | None = None
) -> LiveResponse:
    """Return the server-sent events of `stream`; the generation ends with the response.

    `frames` replaces the protocol's own rendering of the events.
    """
    return LiveResponse(frames or _frames(stream), stream.close, "text/event-stream")


async def _frames(stream: GenerationStream) -> AsyncIterator[bytes]:
    """Yield one frame per event; a failure is the last event."""
    try:
        async for event in stream.events():
            yield _frame(event)
    except MicroserveError as error:
        yield _frame(Event(error=error_body(error)["error"]))


def _frame(event: Event) -> bytes:
    return b"data: " + event.model_dump_json(exclude_none=True).encode() + b"\n\n"
