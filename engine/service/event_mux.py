"""The multiplexed stream: all that a step emitted for one router's requests, as one frame.

A frame is one line of JSON, `{"REQUEST_ID": EVENT, …}`; an empty line says nothing. While the
router does not read, no frame is written: what further steps emit is appended to the events that
wait, so that a slow reader is sent fewer and larger frames, and never two events of a request in
one. A reader that lags too far behind is cut off.

A request may ask for its events at a distance. All that do share one beat, so that what has waited
goes out as one frame; tokens that come further apart than a beat do not wait at all.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from engine.protocol import BadRequest, DuplicateRequest, Event, PeerUnreachable
from engine.service.generation_stream import GenerationStream

__all__ = ["EventMux", "EventMuxes"]

log = logging.getLogger(__name__)

MOST_WAITING = 1 << 22  # tokens and characters that wait to be read, of all requests together
OPTIONAL = ("begin", "logprobs", "finish_reason", "stop_reason", "usage", "mirror", "error")


@dataclass(slots=True)
class _Delivery:
    """One generation whose events go out here."""

    stream: GenerationStream
    every: int  # tokens that an event should have, but for the first and the last
    beat_s: float  # and the time between two events
    due: float = -math.inf  # no further event before (loop time); -inf: it is the first


class EventMux:
    """One router's stream, from `EventMuxes.open` to `close`: with it end all generations on it."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._deliveries: dict[str, _Delivery] = {}  # by request id
        self._held: dict[str, Event] = {}  # too small yet to be sent
        self._ready: dict[str, Event] = {}
        self._waiting = 0  # tokens and characters in both
        self._wake = asyncio.Event()
        self._beat: asyncio.TimerHandle | None = None  # set: something waits for it
        self._loop = asyncio.get_running_loop()
        self._ended = False

    def deliver(
        self, request_id: str, stream: GenerationStream, every: int = 1, beat_s: float = 0.0
    ) -> None:
        """Send the events of `stream` here, its failure too: `every` so many tokens, and once in
        `beat_s` seconds at most, but for the first and the last. Ends it if nobody reads."""
        if self._ended:
            stream.close()
            raise _unknown(self.id)
        self._deliveries[request_id] = _Delivery(stream, every, beat_s)
        stream.deliver(partial(self._take, request_id))

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames, for as long as somebody reads. Ends after `end`, with what was left."""
        yield b"\n"  # the response begins
        while True:
            if self._ready:
                ready, self._ready = self._ready, {}
                self._waiting = sum(map(_size, self._held.values()))
                yield orjson.dumps({name: _fields(event) for name, event in ready.items()}) + b"\n"
            elif self._ended:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    def end(self) -> None:
        """Take no more generations, and let `frames` end."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """Nobody reads any more: abort what was to be delivered here. Idempotent."""
        self.end()
        deliveries, self._deliveries = self._deliveries, {}
        self._held.clear()
        self._ready.clear()
        if self._beat is not None:
            self._beat.cancel()
        for delivery in deliveries.values():
            delivery.stream.close()

    def _take(self, request_id: str, event: Event) -> None:
        delivery = self._deliveries.get(request_id)
        if delivery is None:
            return
        over = event.finish_reason is not None or event.error is not None
        if over:
            del self._deliveries[request_id]
        self._waiting += _size(event)
        earlier = self._ready.get(request_id) or self._held.pop(request_id, None)
        event = event if earlier is None else _joined(earlier, event)
        if request_id in self._ready:
            self._ready[request_id] = event
        elif over or self._may_go(delivery, event):
            self._send(request_id, delivery, event)
        else:
            self._held[request_id] = event
            if self._beat is None and delivery.beat_s and len(event.token_ids) >= delivery.every:
                self._beat = self._loop.call_at(delivery.due, self._flush)
        if self._waiting > MOST_WAITING and not self._ended:
            log.warning("the router that reads stream %s is too slow: cut off", self.id)
            self.close()

    def _may_go(self, delivery: _Delivery, event: Event) -> bool:
        if delivery.due == -math.inf:
            return True
        return len(event.token_ids) >= delivery.every and self._loop.time() >= delivery.due

    def _send(self, request_id: str, delivery: _Delivery, event: Event) -> None:
        self._ready[request_id] = event
        self._wake.set()
        delivery.due = 0.0
        if delivery.beat_s:  # the next of the beats that all have in common
            delivery.due = (self._loop.time() // delivery.beat_s + 1) * delivery.beat_s

    def _flush(self) -> None:
        """Send what has waited for this beat; there is another one if something waits for it."""
        self._beat = None
        later = math.inf
        for request_id, event in list(self._held.items()):
            delivery = self._deliveries[request_id]
            if self._may_go(delivery, event):
                del self._held[request_id]
                self._send(request_id, delivery, event)
            elif delivery.beat_s and len(event.token_ids) >= delivery.every:
                later = min(later, delivery.due)
        if later < math.inf:
            self._beat = self._loop.call_at(later, self._flush)


class EventMuxes:
    """The open streams, by the ids that their routers gave them."""

    def __init__(self) -> None:
        self._open: dict[str, EventMux] = {}

    def __getitem__(self, id: str | None) -> EventMux:
        """Raises `BadRequest` for None, and `PeerUnreachable`: a router whose stream is gone is."""
        if id is None:
            raise BadRequest("a multiplexed stream needs its stream_id", param="stream_id")
        mux = self._open.get(id)
        if mux is None:
            raise _unknown(id)
        return mux

    def open(self, id: str) -> EventMux:
        """A new stream. Raises `BadRequest` for an id that is none, `DuplicateRequest`."""
        if not 1 <= len(id) <= 128:
            raise BadRequest("a stream needs an id of 1 to 128 characters", param="id")
        if id in self._open:
            raise DuplicateRequest(f"stream {id} is open", param="id")
        mux = self._open[id] = EventMux(id)
        return mux

    def close(self, mux: EventMux) -> None:
        """A stream has ended, and what is delivered on it with it. Idempotent."""
        self._open.pop(mux.id, None)
        mux.close()

    def end(self) -> None:
        """Let all streams end, after what they have to say: the process is about to exit."""
        for mux in self._open.values():
            mux.end()


def _unknown(id: str) -> PeerUnreachable:
    return PeerUnreachable(f"no stream {id} is open", param="stream_id", code="unknown_stream")


def _joined(earlier: Event, later: Event) -> Event:
    """Both as one event of the same request; `earlier` is used up."""
    earlier.token_ids += later.token_ids
    earlier.text += later.text
    if later.logprobs is not None:
        earlier.logprobs = [*(earlier.logprobs or []), *later.logprobs]
    earlier.mirror = later.mirror or earlier.mirror
    for name in ("finish_reason", "stop_reason", "usage", "error"):
        setattr(earlier, name, getattr(later, name))
    return earlier


def _size(event: Event) -> int:
    return len(event.token_ids) + len(event.text)


def _fields(event: Event) -> dict[str, Any]:
    """What is sent of an event: what is there."""
    fields: dict[str, Any] = {"token_ids": event.token_ids, "text": event.text}
    for name in OPTIONAL:
        value = getattr(event, name)
        if value is not None:
            fields[name] = value
    if event.logprobs is not None:
        fields["logprobs"] = [item.model_dump() for item in event.logprobs]
    if event.usage is not None:
        fields["usage"] = event.usage.model_dump()
    if event.mirror is not None:
        fields["mirror"] = event.mirror.model_dump(exclude_none=True)
    return fields
