"""The one stream on which an engine sends this router all that it emits, a frame a step.

    engine ── {"a": chunk, "b": chunk, …} ──► Line ──┬─► Delivery of a ──► the task that serves a
                                                     └─► Delivery of b ──► the task that serves b

A frame is parsed where it arrives and wakes each task it is for: nothing else is done per token.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec

from engine.protocol import Internal, MicroserveError, Usage, error_from_body
from router.base.errors import EngineUnreachable
from router.base.request import Chunk
from router.engines.http_client import HttpClient

__all__ = ["Delivery", "Line", "TokenMux"]

IDLE_S = 60.0  # a line that nothing is delivered on is closed after so long, or twice that


class _Event(Chunk):
    """A chunk as it is on the wire."""

    error: dict[str, Any] | None = None


def _usage(kind: type, fields: Any) -> Any:
    """msgspec reads all of an event but its usage, which is a message of the protocol."""
    if kind is Usage:
        return Usage.model_validate(fields)
    raise NotImplementedError(kind)


_FRAME = msgspec.json.Decoder(dict[str, _Event], dec_hook=_usage)


class TokenMux:
    """Opens a line to an engine when one is needed, and another one when it is lost."""

    def __init__(self, wire: HttpClient) -> None:
        self._wire = wire
        self._line: Line | None = None
        self._opening = asyncio.Lock()

    async def line(self) -> Line:
        """The open line. Raises `EngineUnreachable`, and what the engine answers."""
        if self._line is not None and self._line.error is None:
            return self._line
        async with self._opening:  # whoever is cancelled here leaves it to the next
            if self._line is None or self._line.error is not None:
                self._line = await Line.opened(self._wire)
            return self._line


class Line:
    """One open stream. Lost, it fails all that was to be delivered on it; so does `close`."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.error: EngineUnreachable | None = None
        self._deliveries: dict[str, Delivery] = {}  # by request id
        self._rest: list[bytes] = []  # of a frame that is not here whole
        self._hang_up: Any = None
        self._used = True  # since the last look
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def opened(cls, wire: HttpClient) -> Line:
        """A new line to the engine at the other end of `wire`."""
        line = cls()
        path = f"/microserving/stream?id={line.id}"
        reply, line._hang_up = await wire.listen(path, line._feed, line._lose)
        if reply.status != 200:
            raise Internal(f"{wire.url}: no stream but {reply.status} {reply.body[:200]!r}")
        line._look()
        return line

    def expect(self, request_id: str) -> Delivery:
        """From now on, take what comes for `request_id`."""
        self._used = True
        delivery = self._deliveries[request_id] = Delivery(self, request_id)
        if self.error is not None:
            delivery.fail(self.error)
        return delivery

    def forget(self, delivery: Delivery) -> None:
        """Drop what else comes for it. Idempotent."""
        if self._deliveries.get(delivery.request_id) is delivery:
            del self._deliveries[delivery.request_id]

    def close(self) -> None:
        """Hang up; the engine aborts what it was to deliver."""
        self._hang_up()
        self._lose(EngineUnreachable("the stream was closed"))

    def _feed(self, data: bytes) -> None:
        if b"\n" not in data:
            self._rest.append(data)
            return
        *frames, rest = b"".join([*self._rest, data]).split(b"\n")
        self._rest = [rest] if rest else []
        for frame in frames:
            if frame:
                self._take(frame)

    def _take(self, frame: bytes) -> None:
        try:
            events = _FRAME.decode(frame)
        except (msgspec.MsgspecError, ValueError) as wrong:
            self._hang_up()
            self._lose(EngineUnreachable(f"the engine sent a frame that is none: {wrong}"))
            return
        for request_id, event in events.items():
            delivery = self._deliveries.get(request_id)
            if delivery is not None:
                delivery.push(event)

    def _lose(self, error: EngineUnreachable) -> None:
        self.error = self.error or error
        if self._timer is not None:
            self._timer.cancel()
        for delivery in list(self._deliveries.values()):
            delivery.fail(error)

    def _look(self) -> None:
        if not self._used and not self._deliveries:
            self.close()
            return
        self._used = False
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._look)


class Delivery:
    """The chunks of one generation. Steps that come before somebody asks are one chunk."""

    __slots__ = ("_chunk", "_error", "_line", "_waiter", "request_id")

    def __init__(self, line: Line, request_id: str) -> None:
        self.request_id = request_id
        self._line = line
        self._chunk: Chunk | None = None
        self._error: MicroserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Chunk:
        """The next chunk. Raises what the engine says went wrong, and `EngineUnreachable` if the
        line is lost: in either case after the chunks that came before."""
        while True:
            chunk = self._chunk
            if chunk is not None:
                self._chunk = None
                return chunk
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def push(self, event: _Event) -> None:
        """Take what a step emitted."""
        if self._chunk is None:
            self._chunk = event
        else:
            self._chunk.extend(event)
        if event.error is not None:
            if not self._chunk.token_ids:
                self._chunk = None
            self.fail(error_from_body({"error": event.error}))
            return
        if event.finish_reason is not None:
            self._line.forget(self)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: MicroserveError) -> None:
        """Nothing more comes."""
        self._line.forget(self)
        self._error = self._error or error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def abort(self) -> None:
        """Take nothing more; a pending or later `next` raises `EngineUnreachable`."""
        self._chunk = None
        self.fail(EngineUnreachable("the stream was given up"))

    async def finish(self) -> None:
        """After the last chunk: there is nothing to let go of."""
