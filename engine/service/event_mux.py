"""The multiplexed stream: the events of all generations of one router, in frames.

A frame is one line of JSON, `{"REQUEST_ID": EVENT, …}`; an empty line carries no events. While the
router does not read, no frame is written: the events of further steps are merged into the pending
ones, so a slow reader gets fewer and larger frames, with at most one event per request in each. A
reader that lags too far behind is disconnected.

A request may set a minimum interval between its events. All such requests of one interval share its
ticks, so that their events go out as one frame. Tokens further apart than the interval do not wait.
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

from engine.protocol import BadRequest, DuplicateRequest, Event, PeerUnreachable, TokenLogprob
from engine.service.generation_stream import GenerationStream

__all__ = ["EventMux", "EventMuxes"]

log = logging.getLogger(__name__)

# Pending units of all requests together. A unit is a token, a character, or as much of the log
# probabilities, and takes at most 8 bytes in a frame: routers refuse frames of more than 16 MiB.
MAX_PENDING = 1 << 20
OPTIONAL_FIELDS = ("begin", "logprobs", "finish_reason", "stop_reason", "usage", "mirror", "error")


@dataclass(slots=True)
class _Subscription:
    """One generation whose events go to this stream."""

    stream: GenerationStream
    # The first and the last event ignore both minima.
    min_tokens: int  # per event
    interval_s: float  # between two events
    not_before: float = -math.inf  # the next event, in loop time; -inf: the first event

    def waits_for_tick(self, event: Event) -> bool:
        """Whether `event` is large enough and only has to wait for the interval to pass."""
        return bool(self.interval_s) and len(event.token_ids) >= self.min_tokens


class EventMux:
    """One router's stream, from `EventMuxes.open` to `close`, which aborts its generations."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._subscriptions: dict[str, _Subscription] = {}  # by request id
        self._held: dict[str, Event] = {}  # below their minima
        self._ready: dict[str, Event] = {}  # for the next frame
        self._pending = 0  # units in both
        self._wake = asyncio.Event()
        self._tick: asyncio.TimerHandle | None = None  # set while held events wait for it
        self._loop = asyncio.get_running_loop()
        self._ended = False

    def subscribe(
        self,
        request_id: str,
        stream: GenerationStream,
        min_tokens: int = 1,
        interval_s: float = 0.0,
    ) -> None:
        """Send the events of `stream`, including its failure, over this one.

        An event has at least `min_tokens` tokens and follows the previous one after at least
        `interval_s` seconds, except for the first and the last. Raises `PeerUnreachable`, and
        aborts the generation, if this stream has ended.
        """
        if self._ended:
            stream.close()
            raise _unknown(self.id)
        self._subscriptions[request_id] = _Subscription(stream, min_tokens, interval_s)
        stream.subscribe(partial(self._on_event, request_id))

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield frames. Ends after `end`, with the events that were left."""
        yield b"\n"  # starts the response
        while True:
            if self._ready:
                ready, self._ready = self._ready, {}
                self._pending = sum(map(_size, self._held.values()))
                yield orjson.dumps({name: _fields(event) for name, event in ready.items()}) + b"\n"
            elif self._ended:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    def end(self) -> None:
        """Accept no more generations, and end `frames`."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """Abort the generations of this stream: it has no reader any more. Idempotent."""
        self.end()
        subscriptions, self._subscriptions = self._subscriptions, {}
        self._held.clear()
        self._ready.clear()
        if self._tick is not None:
            self._tick.cancel()
        for subscription in subscriptions.values():
            subscription.stream.close()

    def _on_event(self, request_id: str, event: Event) -> None:
        subscription = self._subscriptions.get(request_id)
        if subscription is None:
            return
        over = event.finish_reason is not None or event.error is not None
        if over:
            del self._subscriptions[request_id]
        self._pending += _size(event)
        earlier = self._ready.get(request_id) or self._held.pop(request_id, None)
        event = event if earlier is None else _merge(earlier, event)
        if request_id in self._ready:
            self._ready[request_id] = event
        elif over or self._is_due(subscription, event):
            self._send(request_id, subscription, event)
        else:
            self._held[request_id] = event
            if self._tick is None and subscription.waits_for_tick(event):
                self._tick = self._loop.call_at(subscription.not_before, self._flush)
        if self._pending > MAX_PENDING and not self._ended:
            log.warning("the reader of stream %s is too slow: disconnected", self.id)
            self.close()

    def _is_due(self, subscription: _Subscription, event: Event) -> bool:
        if subscription.not_before == -math.inf:
            return True
        large_enough = len(event.token_ids) >= subscription.min_tokens
        return large_enough and self._loop.time() >= subscription.not_before

    def _send(self, request_id: str, subscription: _Subscription, event: Event) -> None:
        self._ready[request_id] = event
        self._wake.set()
        interval_s = subscription.interval_s
        subscription.not_before = 0.0
        if interval_s:  # the next tick, which all requests of this interval share
            subscription.not_before = (self._loop.time() // interval_s + 1) * interval_s

    def _flush(self) -> None:
        """Send the held events that are due, and schedule the next tick if others wait for one."""
        self._tick = None
        next_tick = math.inf
        for request_id, event in list(self._held.items()):
            subscription = self._subscriptions[request_id]
            if self._is_due(subscription, event):
                del self._held[request_id]
                self._send(request_id, subscription, event)
            elif subscription.waits_for_tick(event):
                next_tick = min(next_tick, subscription.not_before)
        if next_tick < math.inf:
            self._tick = self._loop.call_at(next_tick, self._flush)


class EventMuxes:
    """The open streams, by the ids that their routers chose."""

    def __init__(self) -> None:
        self._open: dict[str, EventMux] = {}

    def __getitem__(self, id: str | None) -> EventMux:
        """Return an open stream.

        Raises `BadRequest` for None, and `PeerUnreachable` if the router's stream is gone.
        """
        if id is None:
            raise BadRequest("a multiplexed stream needs its stream_id", param="stream_id")
        mux = self._open.get(id)
        if mux is None:
            raise _unknown(id)
        return mux

    def open(self, id: str) -> EventMux:
        """Open a stream. Raises `BadRequest` for a bad id, `DuplicateRequest` for an open one."""
        if not 1 <= len(id) <= 128:
            raise BadRequest("a stream needs an id of 1 to 128 characters", param="id")
        if id in self._open:
            raise DuplicateRequest(f"stream {id} is open", param="id")
        mux = self._open[id] = EventMux(id)
        return mux

    def close(self, mux: EventMux) -> None:
        """Close a stream and abort its generations. Idempotent."""
        self._open.pop(mux.id, None)
        mux.close()

    def end(self) -> None:
        """End all streams after their pending events, before the process exits."""
        for mux in self._open.values():
            mux.end()


def _unknown(id: str) -> PeerUnreachable:
    return PeerUnreachable(f"no stream {id} is open", param="stream_id", code="unknown_stream")


def _merge(earlier: Event, later: Event) -> Event:
    """Merge two events of one request into `earlier`, and return it."""
    earlier.token_ids += later.token_ids
    earlier.text += later.text
    if later.logprobs is not None:
        earlier.logprobs = [*(earlier.logprobs or []), *later.logprobs]
    earlier.mirror = later.mirror or earlier.mirror
    for name in ("finish_reason", "stop_reason", "usage", "error"):
        setattr(earlier, name, getattr(later, name))
    return earlier


def _size(event: Event) -> int:
    """Return the units of an event."""
    size = len(event.token_ids) + len(event.text)
    for chosen in event.logprobs or ():
        size += _logprob_size(chosen) + sum(map(_logprob_size, chosen.top))
    return size


def _logprob_size(item: TokenLogprob) -> int:
    return 12 + len(item.token) + len(item.bytes)  # 12: names of fields and numbers


def _fields(event: Event) -> dict[str, Any]:
    """Return the JSON fields of an event, without absent ones."""
    fields: dict[str, Any] = {"token_ids": event.token_ids, "text": event.text}
    for name in OPTIONAL_FIELDS:
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
