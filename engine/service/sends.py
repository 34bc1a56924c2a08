"""The sends of one engine: `remote_send` from the claim to the reply, and what ends it early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future

from engine.api.metrics import EngineMetrics
from engine.execution.step_loop import StepLoop
from engine.protocol import (
    BadRange,
    DuplicateRequest,
    Internal,
    MicroserveError,
    NoCapacity,
    RemoteSend,
    RemoteSendReply,
)
from engine.scheduling.jobs import Send
from engine.service.limits import Limits, resolve
from engine.service.recall import recall
from kvcache.cache import KVCache
from kvcache.lease.put import Put
from kvcache.types import SeqId

__all__ = ["Sends"]


class Sends:
    """Those that run or wait. Lives on one asyncio event loop."""

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        metrics: EngineMetrics,
        seq_ids: Iterator[SeqId],
        *,
        most: int,
    ) -> None:
        """At most `most` at a time; `seq_ids` are shared with all who make sequences."""
        self._cache = cache
        self._limits = limits
        self._metrics = metrics
        self._seq_ids = seq_ids
        self._most = most
        self._live: dict[str, Send | None] = {}  # None: its lease is being claimed

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        """Their request ids."""
        return iter(tuple(self._live))

    async def run(self, call: RemoteSend, loop: StepLoop) -> RemoteSendReply:
        """See `MicroserveEngine.remote_send`."""
        begin = resolve(call.begin, len(call.prompt), "begin")
        end = resolve(call.end, len(call.prompt), "end")
        if begin >= end:
            raise BadRange(f"begin {begin} is not below end {end}", param="begin")
        if call.request_id in self._live:
            raise DuplicateRequest(f"a send of {call.request_id} is running", param="request_id")
        if len(self._live) >= self._most:
            raise NoCapacity(f"{len(self._live)} sends are running")
        self._live[call.request_id] = None
        try:
            await recall(self._cache, call.prompt)
            # Claiming may wait for the peer's write right, so it is done off the event loop.
            put = await asyncio.to_thread(
                self._cache.open_put, call.kv_addr, call.prompt, begin, end
            )
            if call.request_id not in self._live:
                raise Internal("the send was aborted")
            send = self._live[call.request_id] = self._reserve(call, begin, end, put)
            loop.submit(send)
            done = asyncio.wrap_future(send.done)
            done.add_done_callback(_seen)
            try:
                reply = await asyncio.shield(done)
            except BaseException:
                loop.abort(send)
                raise
        finally:
            self._live.pop(call.request_id, None)
        self._metrics.sent(reply)
        return reply

    def abort(self, request_id: str, loop: StepLoop) -> None:
        """End a send, if there is one; it fails."""
        send = self._live.get(request_id)
        if send is not None:
            loop.abort(send)
        else:  # one that waits for its claim finds out when it has it
            self._live.pop(request_id, None)

    def fail(self, failure: MicroserveError) -> None:
        """The step loop is gone: nobody else completes them."""
        for send in self._live.values():
            if send is not None and not send.done.done():
                send.done.set_exception(failure)

    def _reserve(self, call: RemoteSend, begin: int, end: int, put: Put) -> Send:
        """A send with its sequence and all the pages it needs, or `NoCapacity` at once."""
        self._limits.check_send(end)
        seq_id = next(self._seq_ids)
        with self._cache.lock:
            # Matched beyond `end` too: a cached page can be sent in part.
            cached = min(self._cache.add_sequence(seq_id, call.prompt), end)
            try:
                self._cache.grow(seq_id, end)
            except NoCapacity:
                self._cache.remove_sequence(seq_id)
                raise
        self._metrics.prefix(end, cached)
        done: Future[RemoteSendReply] = Future()
        done.set_running_or_notify_cancel()  # the loop's to complete, whoever stops waiting
        return Send(
            request_id=call.request_id,
            seq_id=seq_id,
            tokens=call.prompt[:end],
            begin=begin,
            cached=cached,
            put=put,
            done=done,
            arrived=time.monotonic(),
            started=True,
            priority=call.priority,
        )


def _seen(done: asyncio.Future[RemoteSendReply]) -> None:
    """How it ended is known, also where nobody waits for it any more."""
    if not done.cancelled():
        done.exception()
