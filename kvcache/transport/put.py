"""One writer of one receive lease, whatever the wire: order, write right, claim, first failure."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvcache.errors import BadRange, Internal, LeaseExpired, MicroserveError, Timeout
from kvcache.lease.address import KVAddress
from kvcache.lease.control_slots import CLAIM, LANDED, NONCE, RENEWALS
from kvcache.memory.layout import KVLayout
from kvcache.transport.runs import Route, Runs
from kvcache.transport.target import Target
from kvcache.transport.worker import Worker
from kvcache.types import PageId

__all__ = ["QueuedPut"]

log = logging.getLogger(__name__)

HOLD_BYTES = 4 << 20  # copied in one hold of the write right, at most: some 0.3 ms in memory
RIGHT_TIMEOUT_S = 2.0  # the other holder copies for less than a millisecond, unless it is stopped
RIGHT_POLL_S = 0.0005  # between tries at first; they become rarer
MARK_POLL_S = 0.0002  # until what is to be copied has been computed: a layer takes some such time

Batch = tuple[Runs, int]  # with its bytes


@dataclass(slots=True)
class _Write:
    """What is to be copied, once the device's work up to `mark` is done."""

    batches: Iterator[Batch]
    mark: object


@dataclass(slots=True)
class _Hold:
    """What is done in one hold of the right: copies, then words; then who waits is told."""

    runs: list[Runs] = field(default_factory=list)
    bytes: int = 0
    words: dict[int, int] | None = None
    waiting: list[Future[None]] = field(default_factory=list)


class QueuedPut:
    """A `Put` into a `Target`: calls are queued, and done in turns on a `Worker`.

    Each turn holds the lease's write right once, and under it first rereads nonce and claim: a
    lease that has ended, or that another sender has claimed since, is not written. What is queued
    by then, and computed, goes together (DéjàVu's buffered copies): the few bytes that a token has
    in each layer are one copy, with the watermark behind it. A turn that does not get the right, or
    whose KV a device has still to compute, lets other puts go first.
    """

    def __init__(
        self,
        target: Target,
        source: KVLayout,
        address: KVAddress,
        worker: Worker,
        join: int | None = None,
    ) -> None:
        """`source` is the layout of our pool. Nothing may be written before `take_claim`; `join` is
        a claim to share instead of making one."""
        self.bytes_sent = 0
        self.claim = join or secrets.randbits(63) | 1
        self._joins = join is not None
        self._target = target
        self._source = source
        self._address = address
        self._slot = address.slot
        self._worker = worker
        self._lock = threading.Lock()  # of `_busy`, and of adding to the queue
        self._queue: deque[_Write | dict[int, int] | Future[None]] = deque()
        self._busy = False  # whether turns are under way
        self._hold: _Hold | None = None  # what the next turn does
        self._waits_since: float | None = None  # for the right
        self._failure: MicroserveError | None = None
        self._cancelled = False

    def take_claim(self, begin: int) -> None:
        """Become the lease's writer, from `begin` on, or join who is. Waits.

        Raises `LeaseExpired`, `BadRange` if `begin` is not the watermark, `Timeout` if another
        writer does not let go.
        """
        claimed: Future[None] = Future()

        def claim() -> None:
            words = self._check_lease()
            if self._joins:
                self._check_claim(words)
            landed = int(words[LANDED])
            if begin != landed:
                raise BadRange(f"begin is {begin}, but {landed} tokens have landed", param="begin")
            if not self._joins:
                self._target.store(self._slot, {CLAIM: self.claim})

        def turn() -> float | None:
            try:
                again = self._with_right(claim, share=self.claim if self._joins else 0)
                if again is None:
                    claimed.set_result(None)
                return again
            except MicroserveError as error:
                claimed.set_exception(error)
            except Exception as error:
                log.exception("a claim failed")
                claimed.set_exception(Internal(f"the claim failed: {error}"))
            return None

        self._worker.submit(turn)
        claimed.result()

    def write(self, layers: range, pages: Sequence[PageId], begin: int, end: int) -> None:
        # A copy: the caller's table may grow or go meanwhile.
        batches = self._batches(layers, list(pages), begin, end)
        self._add(_Write(batches, self._target.mark()))

    def signal(self, landed: int) -> None:
        if self._joins:
            raise Internal("the watermark is raised by who has made the claim")
        self._add({LANDED: landed})

    def renew(self) -> None:
        self._add({})

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def cancel(self) -> None:
        self._cancelled = True

    def close(self) -> Future[None]:
        done: Future[None] = Future()
        self._add(done)
        return done

    def _add(self, what: _Write | dict[int, int] | Future[None]) -> None:
        with self._lock:
            self._queue.append(what)
            if self._busy:
                return
            self._busy = True
        try:
            self._worker.submit(self._turn)
        except Internal:  # the transport is closed: nobody will take it
            with self._lock:
                self._queue.clear()
                self._busy = False
            raise

    def _turn(self) -> float | None:
        """Do some of what is queued. Returns as `Worker` wants it."""
        delay = None
        try:
            if self._failure is None and not self._cancelled:
                self._hold = self._hold or self._gather()
                if self._hold.words is not None:
                    delay = self._with_right(self._write_hold, share=self.claim)
                elif self._queue and not self._hold.waiting:
                    self._hold, delay = None, MARK_POLL_S  # what comes first is not computed yet
        except MicroserveError as error:
            self._failure = error
        except Exception as error:
            # Nothing may follow it: a watermark would rise over what was not written.
            log.exception("a put failed")
            self._failure = Internal(f"the put failed: {error}")
        if delay is None and (self._failure is not None or self._cancelled):
            delay = self._unfinished()
        if delay is not None:
            return delay
        waiting = self._hold.waiting if self._hold else []
        self._hold = None
        with self._lock:
            if self._failure is not None or self._cancelled:
                waiting += [what for what in self._queue if isinstance(what, Future)]
                self._queue.clear()
            self._busy = bool(self._queue)
            delay = 0.0 if self._busy else None
        for done in waiting:
            if not done.set_running_or_notify_cancel():
                continue
            if self._failure is not None:
                done.set_exception(self._failure)
            else:
                done.set_result(None)
        return delay

    def _unfinished(self) -> float | None:
        """When to look again whether the device still computes what is not wanted any more: its
        pages must not become somebody else's before."""
        with self._lock:
            marks = [what.mark for what in self._queue if isinstance(what, _Write)]
        pending = bool(marks) and marks[-1] is not None and not self._target.done(marks[-1])
        return MARK_POLL_S if pending else None

    def _gather(self) -> _Hold:
        """As much of the queue as goes into one hold, up to where somebody waits, or where what is
        to be copied is not there yet."""
        hold = _Hold()
        while self._queue and not hold.waiting:
            what = self._queue[0]
            if isinstance(what, Future):
                hold.waiting.append(what)
            elif isinstance(what, dict):
                hold.words = (hold.words or {}) | what
            elif what.mark is not None and not self._target.done(what.mark):
                break
            else:
                what.mark = None
                batch = next(what.batches, None)
                if batch is not None:
                    runs, size = batch
                    if hold.bytes and hold.bytes + size > HOLD_BYTES:
                        what.batches = chain([batch], what.batches)
                        break
                    hold.runs.append(runs)
                    hold.bytes += size
                    hold.words = hold.words or {}
                    continue
            self._queue.popleft()
        return hold

    def _batches(self, layers: range, pages: list[PageId], begin: int, end: int) -> Iterator[Batch]:
        """Planned when its turn comes, not by the caller."""
        address = self._address
        if not address.begin <= begin <= end <= address.room:
            raise BadRange(f"[{begin}, {end}) is not in the room of the lease")
        yield from self._route.batches(layers, pages, begin, end, HOLD_BYTES)

    @cached_property
    def _route(self) -> Route:
        first = self._address.begin // self._source.page_size
        return Route(self._source, self._target.layout, self._address.pages(), first)

    def _write_hold(self) -> None:
        hold = self._hold
        if hold is None or hold.words is None:
            return
        if hold.words.get(LANDED, 0) > self._address.room:
            raise BadRange("the watermark cannot rise beyond the room of the lease")
        words = self._check_claim(self._check_lease())
        if hold.runs:
            self._target.copy(hold.runs[0] if len(hold.runs) == 1 else np.concatenate(hold.runs))
            self.bytes_sent += hold.bytes
            if LANDED in hold.words:
                # We may have stood still in the middle: do not say of an ended lease that it has
                # landed. To write the words then does no harm, as we have the slot's right.
                words = self._check_lease()
        # Workers that share a claim may count at the same time, and one count be lost: any change
        # is a sign of life.
        renewals = int(words[RENEWALS]) + 1
        self._target.store(self._slot, {**hold.words, RENEWALS: renewals})

    def _with_right(self, work: Callable[[], None], share: int) -> float | None:
        """Do `work` holding the lease's right; returns None, or when to try again."""
        if self._target.try_right(self._slot, share):
            self._waits_since = None
            try:
                work()
            finally:
                self._target.drop_right(self._slot)
            return None
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        waited = now - self._waits_since
        if waited > RIGHT_TIMEOUT_S:
            raise Timeout("another writer holds the lease and does not let go")
        # Not in step with another who tries: two might put each other off for ever.
        return (RIGHT_POLL_S + waited / 100) * (0.5 + random.random())  # noqa: S311

    def _check_lease(self) -> npt.NDArray[np.uint64]:
        words = self._target.words(self._slot)
        if int(words[NONCE]) != self._address.nonce:
            raise LeaseExpired("the receive lease has ended", param="kv_addr")
        return words

    def _check_claim(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        if int(words[CLAIM]) != self.claim:
            raise LeaseExpired("another sender has taken over the lease")
        return words
