"""A response that goes on, and what it is of ends with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["LiveResponse"]


class LiveResponse(StreamingResponse):
    """`frames`, each sent as it comes. `end` is called when the response has ended, one way or the
    other, even if no frame was asked for: a caller may be gone before the first one."""

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
