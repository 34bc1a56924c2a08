"""One writer of one receive lease over any transport: order, write right, claim, first failure."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvcache.errors import BadRange, Internal, LeaseExpired, MicroserveError, Timeout
from kvcache.lease import CLAIM, LANDED, NONCE, RENEWALS, KVAddress, PageTable
from kvcache.memory import PoolLayout
from kvcache.transport.runs import Route, Runs, route_between
from kvcache.transport.target import Target
from kvcache.transport.worker import Worker
from kvcache.types import TokenPos

__all__ = ["QueuedPut"]

log = logging.getLogger(__name__)

RIGHT_TIMEOUT_S = 2.0  # another holder copies for less than 1 ms, unless its process is stopped
RIGHT_POLL_S = 0.0005  # first interval between attempts; later intervals grow
EVENT_POLL_S = 0.0002  # while the device computes the KV: about the time of one layer

SizedRuns = tuple[Runs, int]  # runs and their bytes in total


@dataclass(slots=True)
class _Write:
    """Runs to copy once the device has completed the work before `event`."""

    batches: Iterator[SizedRuns]
    event: object


@dataclass(slots=True)
class _Commit:
    """The work of one hold of the write right: copies, then words; then futures are resolved."""

    runs: list[Runs] = field(default_factory=list)
    bytes: int = 0
    words: dict[int, int] | None = None
    futures: list[Future[None]] = field(default_factory=list)


class QueuedPut:
    """A `Put` into a `Target`: calls are queued and executed by a task of a `Worker`.

    Each call of the task commits once: it takes the lease's write right and rereads nonce and claim
    under it, so a lease that has ended, or that another sender has claimed, is not written. All
    queued writes whose KV is computed go into one commit (DéjàVu's buffered copies): the few bytes
    of a token in each layer become one copy, followed by the watermark. Without the write right, or
    while a device still computes the KV, the task yields to other puts.
    """

    def __init__(
        self,
        target: Target,
        source: PoolLayout,
        address: KVAddress,
        worker: Worker,
        join: int | None = None,
    ) -> None:
        """`source` is the layout of the sender's pool. `take_claim` must precede the first write.
        `join` is a claim to share instead of a new one."""
        self.bytes_sent = 0
        self.copy_s = self.began = 0.0
        self.claim = join or secrets.randbits(63) | 1
        self._joins = join is not None
        self._target = target
        self._source = source
        self._address = address
        self._slot = address.slot
        self._worker = worker
        self._lock = threading.Lock()  # guards `_busy` and appends to the queue
        self._queue: deque[_Write | dict[int, int] | Future[None]] = deque()
        self._busy = False  # whether the task is scheduled
        self._commit: _Commit | None = None  # of the task's next call
        self._waiting_since: float | None = None  # for the write right; time.monotonic()
        self._failure: MicroserveError | None = None
        self._cancelled = False

    def take_claim(self, begin: int) -> None:
        """Become the lease's writer from position `begin` on, or join its writer. Blocks.

        Raises: `LeaseExpired` if the lease has ended or its claim is not the one to join;
        `BadRange` if `begin` is not the watermark; `Timeout` if another writer does not release the
        write right.
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

        def task() -> float | None:
            try:
                delay = self._with_right(claim, share=self.claim if self._joins else 0)
                if delay is None:
                    claimed.set_result(None)
                return delay
            except MicroserveError as error:
                claimed.set_exception(error)
            except Exception as error:
                log.exception("a claim failed")
                claimed.set_exception(Internal(f"the claim failed: {error}"))
            return None

        self._worker.submit(task)
        claimed.result()

    def write(self, layers: range, pages: PageTable, begin: TokenPos, end: TokenPos) -> None:
        # Copy the pages: the caller's table may change before the write runs.
        batches = self._batches(layers, np.array(pages, dtype=np.int64), begin, end)
        self._add(_Write(batches, self._target.record_event()))

    def signal(self, landed: TokenPos) -> None:
        if self._joins:
            raise Internal("a put that joined a claim cannot raise the watermark")
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

    def _add(self, entry: _Write | dict[int, int] | Future[None]) -> None:
        with self._lock:
            self._queue.append(entry)
            if self._busy:
                return
            self._busy = True
        try:
            self._worker.submit(self._run_task)
        except Internal as error:  # the transport is closed, so the queue will never be read
            self._failure = self._failure or error
            with self._lock:
                # Other threads may have queued futures meanwhile.
                futures = self._take_futures()
                self._busy = False
            self._complete(futures)

    def _run_task(self) -> float | None:
        """Commit part of the queue. Return the delay until the next call, as a `Task` does."""
        delay = None
        try:
            if self._failure is None and not self._cancelled:
                self._commit = self._commit or self._gather()
                words = self._commit.words
                if words is not None:
                    write = partial(self._write_commit, self._commit, words)
                    delay = self._with_right(write, share=self.claim)
                elif self._queue and not self._commit.futures:
                    self._commit, delay = None, EVENT_POLL_S  # the first write is not computed yet
        except MicroserveError as error:
            # Its traceback would keep this put, and so the peer's memory, until it is collected.
            self._failure = error.with_traceback(None)
        except Exception as error:
            # Skip all later work: a watermark would rise above positions that were not written.
            log.exception("a put failed")
            self._failure = Internal(f"the put failed: {error}")
        if delay is None and (self._failure is not None or self._cancelled):
            delay = self._delay_for_device()
        if delay is not None:
            return delay
        futures = self._commit.futures if self._commit else []
        self._commit = None
        with self._lock:
            if self._failure is not None or self._cancelled:
                futures += self._take_futures()
            self._busy = bool(self._queue)
            delay = 0.0 if self._busy else None
        self._complete(futures)
        return delay

    def _take_futures(self) -> list[Future[None]]:
        """Empty the queue and return the futures that were in it. The caller holds the lock."""
        futures = [entry for entry in self._queue if isinstance(entry, Future)]
        self._queue.clear()
        return futures

    def _complete(self, futures: Iterable[Future[None]]) -> None:
        """Complete the futures of `close` calls, with the failure if there is one."""
        for done in futures:
            if not done.set_running_or_notify_cancel():
                continue
            if self._failure is not None:
                done.set_exception(self._failure)
            else:
                done.set_result(None)

    def _delay_for_device(self) -> float | None:
        """Return when to poll again while the device computes writes that are now skipped.

        Their pages must not be reused before the device is done with them.
        """
        with self._lock:
            events = [entry.event for entry in self._queue if isinstance(entry, _Write)]
        last = events[-1] if events else None
        try:
            return None if last is None or self._target.event_done(last) else EVENT_POLL_S
        except Exception:  # the device has failed: it runs nothing any more
            log.exception("a device event cannot be read")
            return None

    def _gather(self) -> _Commit:
        """Take as much of the queue as fits into one commit.

        Stops behind the first future, and before a write whose KV is not computed yet.
        """
        commit = _Commit()
        while self._queue and not commit.futures:
            entry = self._queue[0]
            if isinstance(entry, Future):
                commit.futures.append(entry)
            elif isinstance(entry, dict):
                commit.words = (commit.words or {}) | entry
            elif entry.event is not None and not self._target.event_done(entry.event):
                break
            else:
                entry.event = None
                batch = next(entry.batches, None)
                if batch is not None:
                    runs, size = batch
                    if commit.bytes and commit.bytes + size > self._target.commit_bytes:
                        entry.batches = chain([batch], entry.batches)
                        break
                    commit.runs.append(runs)
                    commit.bytes += size
                    commit.words = commit.words or {}
                    continue
            self._queue.popleft()
        return commit

    def _batches(
        self, layers: range, pages: npt.NDArray[np.int64], begin: int, end: int
    ) -> Iterator[SizedRuns]:
        """Yield the runs of one write; a generator, so the worker's thread plans them."""
        address = self._address
        if not address.begin <= begin <= end <= address.room:
            raise BadRange(f"[{begin}, {end}) is outside the room of the lease")
        most = self._target.commit_bytes
        yield from self._route.batches(layers, pages, begin, end, most)

    @cached_property
    def _route(self) -> Route:
        # Made on first use: the peer's layout is known once the connection is open.
        first = self._address.begin // self._source.page_size
        return route_between(self._source, self._target.layout, self._address.pages(), first)

    def _write_commit(self, commit: _Commit, words: dict[int, int]) -> None:
        if self._cancelled:  # since the task looked, without the right
            return
        if words.get(LANDED, 0) > self._address.room:
            raise BadRange("the watermark cannot rise beyond the room of the lease")
        current = self._check_claim(self._check_lease())
        if commit.runs:
            runs, began = commit.runs, time.monotonic()
            self.began = self.began or began
            self._target.copy(runs[0] if len(runs) == 1 else np.concatenate(runs))
            self.bytes_sent += commit.bytes
            self.copy_s += time.monotonic() - began
            if LANDED in words:
                # This process may have been stopped during the copy: do not raise the watermark of
                # a lease that has ended. A store that follows the check is harmless, because this
                # put still holds the slot's write right.
                current = self._check_lease()
        # Workers that share a claim may increment concurrently and lose a count. Any change of
        # the word proves liveness.
        renewals = int(current[RENEWALS]) + 1
        self._target.store(self._slot, {**words, RENEWALS: renewals})

    def _with_right(self, work: Callable[[], None], share: int) -> float | None:
        """Run `work` under the lease's write right.

        Return None when it has run, else the delay in seconds until the next attempt. Raises:
        `Timeout` after `RIGHT_TIMEOUT_S` without the right.
        """
        if self._target.try_acquire_right(self._slot, share):
            self._waiting_since = None
            try:
                work()
            finally:
                self._target.release_right(self._slot)
            return None
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        waited = now - self._waiting_since
        if waited > RIGHT_TIMEOUT_S:
            raise Timeout("another writer holds the write right of the lease")
        # Jitter: two writers that retry in lockstep could block each other for ever.
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
