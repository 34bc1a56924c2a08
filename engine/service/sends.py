"""The sends of one engine: `remote_send` from the claim of the lease to the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from engine.execution.send_reply import reply_of
from engine.execution.step_loop import StepLoop
from engine.protocol import (
    DuplicateRequest,
    Internal,
    Limits,
    MicroserveError,
    NoCapacity,
    RemoteSend,
    RemoteSendReply,
    send_range,
)
from engine.scheduling import Send, queued_tokens, reserve_send
from engine.service.metrics import EngineMetrics
from engine.service.promotion import promote
from kvcache.cache import KVCache
from kvcache.lease import Put
from kvcache.types import SeqId

__all__ = ["Sends"]


class Sends:
    """The running and waiting sends. Lives on one asyncio event loop."""

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        metrics: EngineMetrics,
        seq_ids: Iterator[SeqId],
        *,
        most: int,
    ) -> None:
        """Admit at most `most` at a time; `seq_ids` is shared with the generations."""
        self._cache = cache
        self._limits = limits
        self._metrics = metrics
        self._seq_ids = seq_ids
        self._most = most
        self._live: dict[str, Send | None] = {}  # None while the lease is claimed

    def __len__(self) -> int:
        """The number of running and waiting sends."""
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the request ids."""
        return iter(tuple(self._live))

    @property
    def queued_tokens(self) -> int:
        """Tokens that sends have to send."""
        return queued_tokens(send for send in self._live.values() if send is not None)

    async def run(self, call: RemoteSend, loop: StepLoop) -> RemoteSendReply:
        """Implement `MicroserveEngine.remote_send` for a checked prompt."""
        begin, end = send_range(call)
        if call.request_id in self._live:
            raise DuplicateRequest(f"a send of {call.request_id} is running", param="request_id")
        if len(self._live) >= self._most:
            raise NoCapacity(f"{len(self._live)} sends are running")
        self._live[call.request_id] = None
        try:
            await promote(self._cache, call.prompt)
            # Claiming the lease may wait for the peer's write right, so it runs on a thread.
            put = await asyncio.to_thread(
                self._cache.open_put, call.kv_addr, call.prompt, begin, end
            )
            if call.request_id not in self._live:
                raise Internal("the send was aborted")
            send = self._live[call.request_id] = self._reserve(
                call, begin, end, put, arrived=loop.stepper.clock()
            )
            try:
                loop.submit(send)
                reply = await reply_of(send)
            except BaseException:
                self._end(send, loop)
                raise
        finally:
            self._live.pop(call.request_id, None)
        self._metrics.sent(reply)
        return reply

    def abort(self, request_id: str, loop: StepLoop) -> None:
        """Abort a send, if there is one; its call fails."""
        send = self._live.get(request_id)
        if send is not None:
            loop.abort(send)
        else:  # a send that is claiming its lease checks for this afterwards
            self._live.pop(request_id, None)

    def fail(self, failure: MicroserveError) -> None:
        """Fail all sends with `failure`: the step loop has stopped and completes none."""
        for send in self._live.values():
            if send is not None:
                send.complete(failure)

    def _end(self, send: Send, loop: StepLoop) -> None:
        """Abort a send. If the step loop has stopped, free its pages once no write reads them."""
        loop.abort(send)
        if not loop.alive:
            send.put.close().add_done_callback(lambda _: self._free(send))

    def _free(self, send: Send) -> None:
        """Remove the sequence of a send that no step loop has. Runs on the put's thread."""
        with self._cache.lock:
            if send.started:
                send.started = False
                self._cache.remove_sequence(send.seq_id)

    def _reserve(self, call: RemoteSend, begin: int, end: int, put: Put, arrived: float) -> Send:
        """Create a send with its sequence and all pages it needs. Raises `NoCapacity`."""
        self._limits.check_send(end)
        seq_id = next(self._seq_ids)
        send = reserve_send(call, begin, end, put, self._cache, seq_id, arrived)
        self._metrics.prefix(end, send.cached)
        return send
