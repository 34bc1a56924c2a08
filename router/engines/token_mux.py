"""The one stream on which an engine sends this router its tokens, one frame per step.

    engine ── {"a": chunk, "b": chunk} ──► MuxStream ──┬─► Delivery of a ──► the task that serves a
                                                       └─► Delivery of b ──► the task that serves b

A frame is parsed on arrival and wakes the tasks that it is for; nothing else is done per token.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec

from engine.protocol import Internal, MicroserveError, Usage, error_from_body
from router.base import Chunk, EngineUnreachable
from router.engines.http_client import HttpClient

__all__ = ["Delivery", "MuxStream", "TokenMux"]

IDLE_S = 60.0  # a stream without deliveries is closed after this time, or twice that


class _Event(Chunk):
    """A chunk as the engine sends it."""

    error: dict[str, Any] | None = None


def _read_usage(kind: type, fields: Any) -> Any:
    """Read the usage of an event: a pydantic model, which msgspec does not know."""
    if kind is Usage:
        return Usage.model_validate(fields)
    raise NotImplementedError(kind)


_FRAME = msgspec.json.Decoder(dict[str, _Event], dec_hook=_read_usage)


class TokenMux:
    """Opens the stream from an engine when it is first needed, and again after it is lost."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._stream: MuxStream | None = None
        self._opening = asyncio.Lock()

    async def stream(self) -> MuxStream:
        """Return the open stream. Raises `EngineUnreachable`, and the engine's error."""
        if self._stream is not None and self._stream.error is None:
            return self._stream
        async with self._opening:  # if one caller is cancelled here, the next opens it
            if self._stream is None or self._stream.error is not None:
                self._stream = await MuxStream.opened(self._http)
            return self._stream


class MuxStream:
    """One open stream. Its loss, and `close`, fail all its deliveries."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.error: EngineUnreachable | None = None
        self._deliveries: dict[str, Delivery] = {}  # by request id
        self._rest: list[bytes] = []  # the beginning of an incomplete frame
        self._close_connection: Any = None
        self._used = True  # since the last check
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def opened(cls, http: HttpClient) -> MuxStream:
        """Open a stream. Raises `EngineUnreachable`, and `Internal` if the engine refuses."""
        stream = cls()
        path = f"/microserving/stream?id={stream.id}"
        reply, stream._close_connection = await http.listen(path, stream._feed, stream._lose)
        if reply.status != 200:
            raise Internal(f"{http.url}: no stream but {reply.status} {reply.body[:200]!r}")
        stream._check_idle()
        return stream

    def expect(self, request_id: str) -> Delivery:
        """Begin to collect the events of `request_id`."""
        self._used = True
        delivery = self._deliveries[request_id] = Delivery(self, request_id)
        if self.error is not None:
            delivery.fail(self.error)
        return delivery

    def forget(self, delivery: Delivery) -> None:
        """Drop its further events. Idempotent."""
        if self._deliveries.get(delivery.request_id) is delivery:
            del self._deliveries[delivery.request_id]

    def close(self) -> None:
        """Close the connection; the engine aborts the generations that it delivers here."""
        self._close_connection()
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
            self._close_connection()
            self._lose(EngineUnreachable(f"the engine sent an invalid frame: {wrong}"))
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

    def _check_idle(self) -> None:
        if not self._used and not self._deliveries:
            self.close()
            return
        self._used = False
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._check_idle)


class Delivery:
    """The chunks of one generation. Steps that arrive between two `next`s become one chunk."""

    __slots__ = ("_chunk", "_error", "_stream", "_waiter", "request_id")

    def __init__(self, stream: MuxStream, request_id: str) -> None:
        self.request_id = request_id
        self._stream = stream
        self._chunk: Chunk | None = None
        self._error: MicroserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Chunk:
        """Return the next chunk.

        Raises the engine's error, and `EngineUnreachable` if the stream is lost; in either case
        after the chunks that arrived before.
        """
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
        """Add what a step emitted."""
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
            self._stream.forget(self)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: MicroserveError) -> None:
        """Raise `error` from `next`, after the chunks that arrived before."""
        self._stream.forget(self)
        self._error = self._error or error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def abort(self) -> None:
        """Make a pending or later `next` raise `EngineUnreachable`."""
        self._chunk = None
        self.fail(EngineUnreachable("the stream was given up"))

    async def finish(self) -> None:
        """Nothing is held after the last chunk."""
