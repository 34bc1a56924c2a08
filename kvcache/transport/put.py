"""One writer of one receive lease, whatever the wire: order, write right, claim, first failure."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache.address import KVAddress
from kvcache.errors import BadRange, Internal, LeaseExpired, MicroserveError, Timeout
from kvcache.layout import KVLayout
from kvcache.region import CLAIM, LANDED, NONCE, RENEWALS
from kvcache.transport.runs import Runs, byte_runs
from kvcache.types import PageId

__all__ = ["QueuedPut", "Target"]

log = logging.getLogger(__name__)

RIGHT_TIMEOUT_S = 2.0  # the other holder copies for microseconds, unless it is stopped
RIGHT_POLL_S = 0.0005


class Target(Protocol):
    """A peer's region as a sender sees it. Calls return when their work is complete."""

    def try_right(self, slot: int) -> bool:
        """Take the write right of a slot if nobody has it; never waits for who has."""
        ...

    def drop_right(self, slot: int) -> None:
        """Give it back: nothing of what was written under it is under way any more."""
        ...

    def words(self, slot: int) -> npt.NDArray[np.uint64]:
        """The slot's words; holding the right, nobody else changes them but to close the lease."""
        ...

    def store(self, slot: int, words: Mapping[int, int]) -> None:
        """Write some of the slot's words, holding the right."""
        ...

    def copy(
        self,
        layer: int,
        runs: Runs,
    ) -> None:
        """Copy runs of bytes from a layer of our pool into the same layer of theirs."""
        ...


class QueuedPut:
    """A `Put` into a `Target`. `worker` has one thread, so order is kept.

    Every step holds the lease's write right, and first rereads nonce and claim under it: a lease
    that has ended, or that another sender has claimed since, is not written.
    """

    def __init__(
        self, target: Target, address: KVAddress, layout: KVLayout, worker: ThreadPoolExecutor
    ) -> None:
        """`layout` is that of both pools, but for the number of pages. Nothing may be written
        before `take_claim`."""
        self.bytes_sent = 0
        self._target = target
        self._slot = address.slot
        self._nonce = address.nonce
        self._pages = address.pages()
        self._first = address.begin // layout.page_size
        self._page_size = layout.page_size
        self._token_bytes = layout.token_bytes // 2  # of keys, or of values
        self._worker = worker
        self._claim = secrets.randbits(63) | 1
        self._failure: MicroserveError | None = None
        self._cancelled = False

    def take_claim(self, begin: int) -> None:
        """Become the lease's writer, from `begin` on.

        Raises `LeaseExpired`, `BadRange` if `begin` is not the watermark, `Timeout` if another
        writer does not let go.
        """

        def claim() -> None:
            words = self._target.words(self._slot)
            if int(words[NONCE]) != self._nonce:
                raise LeaseExpired("the receive lease has ended", param="kv_addr")
            landed = int(words[LANDED])
            if begin != landed:
                raise BadRange(f"begin is {begin}, but {landed} tokens have landed", param="begin")
            self._target.store(self._slot, {CLAIM: self._claim})

        self._with_right(claim)

    def write(self, layers: range, pages: Sequence[PageId], begin: int, end: int) -> None:
        pages = list(pages)  # the caller's table may grow or go meanwhile

        @cache
        def runs() -> Runs:
            return byte_runs(
                pages, self._pages, self._first, self._page_size, self._token_bytes, begin, end
            )

        def copy(layer: int) -> None:
            words = self._check()
            self._target.copy(layer, runs())
            self.bytes_sent += (end - begin) * 2 * self._token_bytes
            self._target.store(self._slot, _sign_of_life(words))

        for layer in layers:
            self._submit(partial(copy, layer))

    def signal(self, landed: int) -> None:
        def raise_watermark() -> None:
            words = self._check()
            self._target.store(self._slot, {LANDED: landed, **_sign_of_life(words)})

        self._submit(raise_watermark)

    def renew(self) -> None:
        self._submit(lambda: self._target.store(self._slot, _sign_of_life(self._check())))

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
        give_up = time.monotonic() + RIGHT_TIMEOUT_S
        while not self._target.try_right(self._slot):
            if time.monotonic() > give_up:
                raise Timeout("another writer holds the lease and does not let go")
            # Not in step with another who tries: two might put each other off for ever.
            time.sleep(RIGHT_POLL_S * (0.5 + random.random()))  # noqa: S311
        try:
            step()
        finally:
            self._target.drop_right(self._slot)

    def _check(self) -> npt.NDArray[np.uint64]:
        words = self._target.words(self._slot)
        if int(words[NONCE]) != self._nonce:
            raise LeaseExpired("the receive lease ended during the put")
        if int(words[CLAIM]) != self._claim:
            raise LeaseExpired("another sender has taken over the lease")
        return words


def _sign_of_life(words: npt.NDArray[np.uint64]) -> dict[int, int]:
    return {RENEWALS: int(words[RENEWALS]) + 1}
