"""The one stream on which an engine sends this router its tokens, one frame per step.

    engine ── {"a": chunk, "b": chunk} ──► MuxStream ──┬─► Delivery of a ──► the task that serves a
                                                       └─► Delivery of b ──► the task that serves b

A frame is parsed on arrival and wakes the tasks that it is for; nothing else is done per token.
What an engine sends is checked against what it was asked for: a wrong event fails its generation,
and a wrong frame the stream.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any, TypedDict

import msgspec

from engine.protocol import Internal, MicroserveError, error_from_body
from router.base import Chunk, EngineUnreachable, TokenId
from router.engines.http_client import HttpClient
from router.engines.lines import Lines

__all__ = ["Delivery", "MuxStream", "TokenMux"]

IDLE_S = 60.0  # a stream without deliveries is closed after this time, or twice that
# Bytes of the longest frame. An engine merges what a router has not read into one frame of at most
# 2^20 units, of 8 bytes each, and closes the stream beyond that.
MOST_FRAME = 16 << 20
MOST_UNWANTED = 16 << 20  # bytes of frames in a row for no request of this router
# Characters of text: longer than any token's, and what may come without tokens.
TEXT_PER_TOKEN, TEXT_ALONE = 4096, 1 << 20
ANY = 2**31  # more tokens, and larger ids, than any generation has
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class _Event(Chunk):
    """A chunk as the engine sends it."""

    error: dict[str, Any] | None = None


_FRAME = msgspec.json.Decoder(dict[str, _Event])


class _Alternative(TypedDict):
    """A token and its log probability; the fields are those of `engine.protocol.TokenLogprob`."""

    token_id: TokenId
    token: Annotated[str, msgspec.Meta(max_length=TEXT_PER_TOKEN)]
    bytes: Annotated[list[Byte], msgspec.Meta(max_length=4 * TEXT_PER_TOKEN)]
    logprob: float | None


class _Logprob(_Alternative):
    top: Annotated[list[_Alternative], msgspec.Meta(max_length=64)]


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

    def close(self) -> None:
        """Close the stream, if one is open."""
        if self._stream is not None and self._stream.error is None:
            self._stream.close()


class MuxStream:
    """One open stream. Its loss, and `close`, fail all its deliveries."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.error: EngineUnreachable | None = None
        self._deliveries: dict[str, Delivery] = {}  # by request id
        self._lines = Lines(MOST_FRAME)
        self._unwanted = 0  # bytes of frames since the last one for a request of this router
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
        if stream.error is not None:  # what came with the head was wrong
            stream._close_connection()
            raise stream.error
        stream._check_idle()
        return stream

    def expect(self, request_id: str, *, tokens: int = ANY, vocab: int = ANY) -> Delivery:
        """Begin to collect the events of `request_id`.

        It may emit `tokens` tokens at most, with ids below `vocab`.
        """
        self._used = True
        delivery = self._deliveries[request_id] = Delivery(self, request_id, tokens, vocab)
        if self.error is not None:
            delivery.fail(self.error)
        return delivery

    def expects(self, delivery: Delivery) -> bool:
        """Return whether further events of it are taken."""
        return self._deliveries.get(delivery.request_id) is delivery

    def forget(self, delivery: Delivery) -> None:
        """Drop its further events. Idempotent."""
        if self.expects(delivery):
            del self._deliveries[delivery.request_id]

    def close(self) -> None:
        """Close the connection; the engine aborts the generations that it delivers here."""
        self._close_connection()
        self._lose(EngineUnreachable("the stream was closed"))

    def _feed(self, data: bytes) -> None:
        if self.error is not None:
            return
        try:
            for frame in self._lines.feed(data):
                self._take(frame)
        except EngineUnreachable as wrong:
            if self._close_connection is not None:
                self._close_connection()
            self._lose(wrong)

    def _take(self, frame: bytes) -> None:
        """Deliver the events of a frame. Raises `EngineUnreachable` if it is invalid."""
        wanted = False
        if frame:
            try:
                events = _FRAME.decode(frame)
            except (msgspec.MsgspecError, ValueError, RecursionError) as wrong:
                what = str(wrong)[:200]
                raise EngineUnreachable(f"the engine sent an invalid frame: {what}") from None
            for request_id, event in events.items():
                if request_id in self._deliveries:
                    self._deliveries[request_id].push(event)
                    wanted = True
        if wanted:
            self._unwanted = 0
            return
        self._unwanted += len(frame) + 1
        if self._unwanted > MOST_UNWANTED:
            raise EngineUnreachable(
                f"the engine sent {MOST_UNWANTED} bytes of frames that nobody asked for"
            )

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

    __slots__ = (
        "_chunk", "_error", "_events", "_stream", "_text", "_tokens", "_vocab", "_waiter",
        "request_id",
    )  # fmt: skip

    def __init__(self, stream: MuxStream, request_id: str, tokens: int, vocab: int) -> None:
        self.request_id = request_id
        self._stream = stream
        self._tokens = tokens  # how many may still come
        self._text = TEXT_ALONE  # characters that may still come, beside those of further tokens
        self._vocab = vocab
        self._events = 0
        self._chunk: Chunk | None = None
        self._error: MicroserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def progress(self) -> int | None:
        """Return how many events have arrived; None once no more can."""
        return self._events if self._stream.expects(self) else None

    async def next(self) -> Chunk:
        """Return the next chunk.

        Raises the engine's error, and `EngineUnreachable` if the stream is lost or the engine
        sends what it was not asked for; in any case after the chunks that arrived before.
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
        ids = event.token_ids
        count = len(ids)
        self._events += 1
        self._tokens -= count
        self._text += TEXT_PER_TOKEN * count - len(event.text)
        if (
            self._tokens < 0
            or self._text < 0
            or event.logprobs is not None
            or (count and max(ids) >= self._vocab)
        ) and (wrong := self._wrong(event)):
            self.fail(EngineUnreachable(f"the engine sent {wrong}"))
            return
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

    def _wrong(self, event: _Event) -> str:
        """Return what is wrong with an event; empty if nothing is."""
        if self._tokens < 0:
            return "more than max_tokens tokens"
        if self._text < 0:
            return "more text than its tokens can have"
        if event.token_ids and max(event.token_ids) >= self._vocab:
            return f"token {max(event.token_ids)}, outside the vocabulary of {self._vocab}"
        if event.logprobs is not None:
            try:
                msgspec.convert(event.logprobs, list[_Logprob])
            except (msgspec.MsgspecError, RecursionError) as wrong:
                return f"invalid logprobs: {str(wrong)[:200]}"
            if len(event.logprobs) > len(event.token_ids):
                return "more logprobs than tokens"
        return ""

    def fail(self, error: MicroserveError) -> None:
        """Raise `error` from `next`, after the chunks that arrived before."""
        self._stream.forget(self)
        self._error = self._error or error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def abort(self, reason: str = "the stream was given up") -> None:
        """Make a pending or later `next` raise `EngineUnreachable`."""
        self._chunk = None
        self.fail(EngineUnreachable(reason))

    async def finish(self) -> None:
        """Nothing is held after the last chunk."""
