"""A generation's events on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.protocol import Event, MicroserveError, error_body
from engine.stream import GenerationStream

__all__ = ["EventStream"]


class EventStream(StreamingResponse):
    """Server-sent events. With the response the generation ends, even if no event was asked for: a
    caller may be gone before the first one."""

    def __init__(
        self, stream: GenerationStream, frames: AsyncIterator[bytes] | None = None
    ) -> None:
        """`frames` are made of the events of `stream`; None: as the protocol says."""
        super().__init__(
            frames or _frames(stream),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _frames(stream: GenerationStream) -> AsyncIterator[bytes]:
    """The events; a failure is one too, and the last."""
    try:
        async for event in stream.events():
            yield _frame(event)
    except MicroserveError as error:
        yield _frame(Event(error=error_body(error)["error"]))


def _frame(event: Event) -> bytes:
    return b"data: " + event.model_dump_json(exclude_none=True).encode() + b"\n\n"
