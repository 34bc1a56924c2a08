"""Puts into memory that is mapped here: what the `memory` and `shm` transports have in common."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvcache.address import KVAddress
from kvcache.errors import BadRange, Internal, LeaseExpired, MicroserveError, Timeout
from kvcache.region import CLAIM, LANDED, NONCE, RENEWALS, Region
from kvcache.types import PageId

__all__ = ["MappedPut", "copy_span"]

log = logging.getLogger(__name__)

RIGHT_TIMEOUT_S = 2.0  # the other holder copies for microseconds, unless it is stopped
RIGHT_POLL_S = 0.0005


class MappedPut:
    """One writer of one lease in a mapped region. `worker` has one thread, so order is kept."""

    def __init__(
        self,
        source: torch.Tensor,
        target: Region,
        address: KVAddress,
        begin: int,
        worker: ThreadPoolExecutor,
    ) -> None:
        self.bytes_sent = 0
        self._source = source  # KVLayout.shape, ours
        self._target = target
        self._address = address
        self._pages = address.pages()
        self._page_size = source.shape[3]
        self._worker = worker
        self._claim = secrets.randbits(63) | 1
        self._failure: MicroserveError | None = None
        self._cancelled = False
        self._with_right(lambda: self._take_claim(begin))

    def write(self, layer: int, pages: Sequence[PageId], begin: int, end: int) -> None:
        pages = list(pages)  # the caller's table may grow or go meanwhile

        def copy() -> None:
            self._check()
            first = self._address.begin // self._page_size
            self.bytes_sent += copy_span(
                self._source[layer], pages, self._target.pool[layer], self._pages, first, begin, end
            )
            self._target.slots[self._address.slot, RENEWALS] += 1

        self._submit(copy)

    def signal(self, landed: int) -> None:
        def raise_watermark() -> None:
            self._check()
            self._target.slots[self._address.slot, LANDED] = landed
            self._target.slots[self._address.slot, RENEWALS] += 1

        self._submit(raise_watermark)

    def renew(self) -> None:
        def sign_of_life() -> None:
            self._check()
            self._target.slots[self._address.slot, RENEWALS] += 1

        self._submit(sign_of_life)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def cancel(self) -> None:
        self._cancelled = True

    def close(self) -> Future[None]:
        def last() -> None:
            if self._failure is not None:
                raise self._failure

        return self._worker.submit(last)

    def _submit(self, step: Callable[[], None]) -> None:
        def run() -> None:
            if self._failure is not None or self._cancelled:
                return
            try:
                self._with_right(step)
            except MicroserveError as error:
                self._failure = error
            except Exception as error:
                # Nothing may follow it: a watermark would rise over what was not written.
                log.exception("a put failed")
                self._failure = Internal(f"the put failed: {error}")

        self._worker.submit(run)

    def _with_right(self, step: Callable[[], None]) -> None:
        """Run `step` holding the lease's write right."""
        slot = self._address.slot
        give_up = time.monotonic() + RIGHT_TIMEOUT_S
        while not self._target.try_right(slot):
            if time.monotonic() > give_up:
                raise Timeout("another writer holds the lease and does not let go")
            time.sleep(RIGHT_POLL_S)
        try:
            step()
        finally:
            self._target.drop_right(slot)

    def _take_claim(self, begin: int) -> None:
        words = self._target.slots[self._address.slot]
        if int(words[NONCE]) != self._address.nonce:
            raise LeaseExpired("the receive lease has ended", param="kv_addr")
        landed = int(words[LANDED])
        if begin != landed:
            raise BadRange(f"begin is {begin}, but {landed} tokens have landed", param="begin")
        words[CLAIM] = self._claim

    def _check(self) -> None:
        words = self._target.slots[self._address.slot]
        if int(words[NONCE]) != self._address.nonce:
            raise LeaseExpired("the receive lease ended during the put")
        if int(words[CLAIM]) != self._claim:
            raise LeaseExpired("another sender has taken over the lease")


def copy_span(
    source: torch.Tensor,
    source_pages: Sequence[PageId],
    target: torch.Tensor,
    target_pages: Sequence[PageId],
    target_first: int,
    begin: int,
    end: int,
) -> int:
    """Copy the KV of positions `[begin, end)` of one layer, page to page; returns the bytes.

    `source` and `target` are `[pages, 2, page_size, kv_heads, head_dim]`. `source_pages[i]` holds
    the positions from `i * page_size`; `target_pages[0]` those from `target_first * page_size`. A
    position's slot in its page is the same on both sides. Runs of pages, consecutive on both sides,
    go as one copy.
    """
    size = source.shape[2]
    token_bytes = source[0, :, 0].numel() * source.element_size()
    at = begin
    while at < end:
        index = at // size
        src, dst = source_pages[index], target_pages[index - target_first]
        if at % size or end - at < size:
            lo, hi = at % size, min(size, at % size + end - at)
            target[dst, :, lo:hi].copy_(source[src, :, lo:hi])
            at += hi - lo
            continue
        run = 1
        while (
            end - at >= (run + 1) * size
            and source_pages[index + run] == src + run
            and target_pages[index + run - target_first] == dst + run
        ):
            run += 1
        target[dst : dst + run].copy_(source[src : src + run])
        at += run * size
    return (end - begin) * token_bytes
