"""A generation's events on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine.api.live_response import LiveResponse
from engine.protocol import Event, MicroserveError, error_body
from engine.service.generation_stream import GenerationStream

__all__ = ["event_stream"]


def event_stream(
    stream: GenerationStream, frames: AsyncIterator[bytes] | None = None
) -> LiveResponse:
    """Server-sent events; with the response the generation ends. `frames` are made of the events of
    `stream`; None: as the protocol says."""
    return LiveResponse(frames or _frames(stream), stream.close, "text/event-stream")


async def _frames(stream: GenerationStream) -> AsyncIterator[bytes]:
    """The events; a failure is one too, and the last."""
    try:
        async for event in stream.events():
            yield _frame(event)
    except MicroserveError as error:
        yield _frame(Event(error=error_body(error)["error"]))


def _frame(event: Event) -> bytes:
    return b"data: " + event.model_dump_json(exclude_none=True).encode() + b"\n\n"
