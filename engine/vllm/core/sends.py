"""Sends: puts of a prompt's KV into a peer's lease, as vLLM computes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import error_body
from engine.vllm.core.pool import VllmPages
from kvcache.errors import DuplicateRequest, Internal, MicroserveError, NoCapacity
from kvcache.lease import Put, Sender
from kvcache.types import PageId, TokenPos

__all__ = ["Send", "SendChunk", "Sends"]

log = logging.getLogger(__name__)

CLAIMS = 64  # that may wait for a peer's write right at a time


@dataclass(slots=True, eq=False)
class Send:
    """A put of the KV of `[begin, end)`; `blocks` are held for it beside vLLM's own references."""

    request_id: str
    begin: int
    end: int
    sent: int  # positions before it are queued
    whole: bool  # everything is cached: vLLM computes nothing
    cached: int | None = None  # of `end`, when vLLM began; None: it has not
    put: Put | None = None  # once the lease is claimed
    blocks: list[PageId] = field(default_factory=list)
    over: Future[None] = field(default_factory=Future)  # no write of it is in flight any more
    cancelled: bool = False
    closed: bool = False  # no write follows
    computed_at: float = 0.0  # time.monotonic()


@dataclass(frozen=True, slots=True)
class SendChunk:
    """What one step makes ready: positions up to `cached` before it, those up to `end` in it."""

    send: Send
    blocks: Sequence[int]
    cached: int
    end: int


class Sends:
    """The sends of one engine core. Its methods run on the core's thread, the claims on others."""

    def __init__(
        self,
        pages: VllmPages,
        sender: Sender,
        page_size: int,
        layers: int,
        note: Callable[[dict[str, Any]], None],
    ) -> None:
        self._pages = pages
        self._sender = sender
        self._page_size = page_size
        self._layers = range(layers)
        self._note = note
        self._live: dict[str, Send] = {}
        self._draining: list[Send] = []
        self._claims = ThreadPoolExecutor(CLAIMS, "claim")

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, request_id: object) -> Send | None:
        return self._live.get(request_id) if isinstance(request_id, str) else None

    def open(
        self, request_id: str, prompt: Sequence[int], begin: int, end: int, kv_addr: str
    ) -> Send:
        """Claim the lease on another thread; a note says how it went.

        Raises `BadAddress` for a forged address or one for another prompt or layout.
        """
        if request_id in self._live:
            raise DuplicateRequest(f"a send of {request_id} is running", param="request_id")
        self._sender.check(kv_addr, prompt)
        cached = self._pages.match(prompt[:end])
        whole = len(cached) * self._page_size >= end
        send = Send(request_id, begin, end, sent=begin, whole=whole)
        if whole:
            send.cached = end
            send.blocks = self._pages.share(cached)
        self._live[request_id] = send
        self._claims.submit(self._claim, send, kv_addr, list(prompt))
        return send

    def cancel(self, request_id: str) -> None:
        """Write nothing more for a send. Idempotent."""
        send = self._live.get(request_id)
        if send is not None:
            send.cancelled = True
            if send.put is not None:
                send.put.cancel()

    def end(self, request_id: str) -> None:
        """Forget a send whose call has ended; its blocks are free once nothing reads them."""
        send = self._live.pop(request_id, None)
        if send is None:
            return
        send.cancelled = True
        if send.put is not None:
            send.put.cancel()
            self._close(send)
        self._draining.append(send)
        self.reap()

    def reap(self) -> None:
        """Drop the blocks of sends that are over."""
        draining, self._draining = self._draining, []
        for send in draining:
            if send.over.done():
                self._pages.drop(send.blocks)
            else:
                self._draining.append(send)

    def renew(self) -> None:
        """Tell the receivers that the senders live."""
        for send in self._live.values():
            if send.put is not None and not send.closed:
                send.put.renew()

    def write_cached(self, chunk: SendChunk) -> None:
        """Queue what was cached before the step, in all layers."""
        send = chunk.send
        if send.cached is None:
            send.cached = chunk.cached
        if send.put is not None and chunk.cached > send.sent and not send.closed:
            send.put.write(self._layers, _ids(chunk), TokenPos(send.sent), TokenPos(chunk.cached))
            send.put.signal(TokenPos(chunk.cached))
            send.sent = chunk.cached

    def write_layer(self, chunk: SendChunk, layer: int) -> None:
        """Queue one layer of what the step computes."""
        send = chunk.send
        if send.put is not None and chunk.end > send.sent and not send.closed:
            one = range(layer, layer + 1)
            send.put.write(one, _ids(chunk), TokenPos(send.sent), TokenPos(chunk.end))

    def end_step(self, chunk: SendChunk) -> None:
        """Raise the watermark behind the step's layers; close the put behind the last of them."""
        send = chunk.send
        if send.put is None or send.closed:
            return
        if chunk.end > send.sent:
            send.put.signal(TokenPos(chunk.end))
            send.sent = chunk.end
        if send.sent >= send.end or send.put.failed:
            # vLLM frees the blocks when the request ends; the writes may still read them.
            send.blocks += self._pages.share(_ids(chunk)[: -(-chunk.end // self._page_size)])
            self._close(send)

    def abandon(self, send: Send, blocks: Sequence[int]) -> None:
        """End a send whose request ends before its last layer, as when its caller has left.

        vLLM frees `blocks` next; queued writes may still read them.
        """
        if send.put is not None and not send.closed:
            send.blocks += self._pages.share([PageId(block) for block in blocks])
            send.put.cancel()
            self._close(send, Internal("the send was aborted"))

    def preempt(self, send: Send) -> None:
        """Fail a send whose blocks vLLM takes away, and wait until nothing reads them."""
        if send.put is None or send.closed:
            return
        send.put.cancel()
        self._close(send, NoCapacity("the send was preempted"))
        # Copies in host memory: the current one takes less than a millisecond.
        send.over.exception(timeout=5.0)

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the blocks that sends hold, to prove ownership."""
        for send in (*self._live.values(), *self._draining):
            yield send.blocks

    def close(self) -> None:
        """End the threads of claims."""
        self._claims.shutdown(wait=False, cancel_futures=True)

    def _claim(self, send: Send, kv_addr: str, prompt: list[int]) -> None:
        """Claim the lease of a send. Runs on a thread of its own."""
        try:
            put = self._sender.open(kv_addr, prompt, send.begin, send.end)
        except MicroserveError as error:
            self._over(send, error)
            return
        except Exception as error:
            log.exception("a claim failed")
            self._over(send, Internal(f"the claim failed: {error}"))
            return
        send.put = put
        if send.cancelled:
            put.cancel()
            self._close(send)
        elif send.whole:
            send.computed_at = time.monotonic()
            put.write(self._layers, send.blocks, TokenPos(send.begin), TokenPos(send.end))
            put.signal(TokenPos(send.end))
            self._close(send)
        else:
            self._note({"send": send.request_id, "claimed": True})

    def _close(self, send: Send, failure: MicroserveError | None = None) -> None:
        if send.closed or send.put is None:
            return
        send.closed = True
        send.computed_at = send.computed_at or time.monotonic()

        def drained(done: Future[None]) -> None:
            self._over(send, failure or done.exception())

        send.put.close().add_done_callback(drained)

    def _over(self, send: Send, error: BaseException | None) -> None:
        """Note the end of a send. Runs on the thread of its put or of its claim."""
        if error is not None and not isinstance(error, MicroserveError):
            error = Internal(f"the put failed: {error}")
        note: dict[str, Any] = {"send": send.request_id, "over": True}
        if send.put is not None:
            note["cached"] = send.cached
            note["bytes"] = send.put.bytes_sent
            note["put_ms"] = (time.monotonic() - send.computed_at) * 1e3
        if error is not None:
            note.update(error_body(error))
        if not send.over.done():
            send.over.set_result(None)
        self._note(note)


def _ids(chunk: SendChunk) -> list[PageId]:
    return [PageId(block) for block in chunk.blocks]
