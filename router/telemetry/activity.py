"""What a router does now and did lately: running requests, latencies, KV that moved, slow requests.

All of it is bounded, and entering a request costs a few microseconds, so it is kept always.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from router.telemetry.receipts import Receipt

__all__ = ["WINDOW_S", "Activity", "Flows", "Sample", "SlowRequests"]

WINDOW_S = 10.0  # for which samples are kept
MOST_SAMPLES = 8192
MOST_PAIRS = 4096  # of engines
SLOW_S = 300.0  # for which slow requests are kept
SLOW_BUCKETS = 20
SLOW_KEPT = 32  # by bucket


class Sample(NamedTuple):
    """A request that has ended, at `at` (monotonic seconds). Times are in ms; `None`: has none."""

    at: float
    generation: int
    strategy: str
    done: bool  # it did not fail
    ttft_ms: float | None
    tpot_ms: float | None
    jct_ms: float | None


class Flows:
    """How much KV went from engine to engine since the start: calls and bytes by pair."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], list[int]] = OrderedDict()

    def add(self, source: str, target: str, size: int) -> None:
        """Count one send of `size` bytes. Of too many pairs, the one unused for longest goes."""
        pair = (source, target)
        if (sums := self._pairs.get(pair)) is None:
            sums = self._pairs[pair] = [0, 0]
            if len(self._pairs) > MOST_PAIRS:
                self._pairs.popitem(last=False)
        sums[0] += 1
        sums[1] += size
        self._pairs.move_to_end(pair)

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield source, target, calls and bytes."""
        for (source, target), (calls, size) in self._pairs.items():
            yield source, target, calls, size


class SlowRequests:
    """The slowest requests of the last `SLOW_S` seconds that have ended.

    The time is divided in buckets. Each keeps its `kept` slowest.
    """

    def __init__(self, kept: int, clock: Callable[[], float]) -> None:
        self._kept = kept
        self._clock = clock
        self._buckets: dict[int, list[tuple[float, int, Receipt]]] = {}
        self._numbers = itertools.count()

    def add(self, receipt: Receipt) -> None:
        took = receipt.ms or 0.0
        number = int(self._clock() * SLOW_BUCKETS / SLOW_S)
        if (bucket := self._buckets.get(number)) is None:
            bucket = self._buckets[number] = []
            self._drop(number)
        if len(bucket) < self._kept:
            heapq.heappush(bucket, (took, next(self._numbers), receipt))
        elif self._kept and took > bucket[0][0]:
            heapq.heapreplace(bucket, (took, next(self._numbers), receipt))

    def __iter__(self) -> Iterator[Receipt]:
        self._drop(int(self._clock() * SLOW_BUCKETS / SLOW_S))
        for bucket in self._buckets.values():
            for _, _, receipt in bucket:
                yield receipt

    def _drop(self, now: int) -> None:
        """Forget the buckets that are older than `SLOW_S`."""
        for number in [one for one in self._buckets if one <= now - SLOW_BUCKETS]:
            del self._buckets[number]


class Activity:
    """The requests to the model, from their beginning to `WINDOW_S` after their end."""

    def __init__(self, receipts: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`receipts` is how many of them the router keeps: with none, none are kept here."""
        self.clock = clock
        self.begun = self.ended = self.failed = 0
        self.tokens = 0  # emitted by requests that have ended
        self.slow = SlowRequests(min(SLOW_KEPT, receipts), clock)
        self._running: dict[int, Receipt] = {}  # by identity
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    @property
    def running(self) -> Iterable[Receipt]:
        """The requests that run, the oldest first."""
        return self._running.values()

    def begin(self, receipt: Receipt) -> None:
        """Enter a request that begins."""
        self._running[id(receipt)] = receipt
        self.begun += 1

    def end(self, receipt: Receipt) -> None:
        """Enter the end of a request. One that its client has cancelled is no sample."""
        self._running.pop(id(receipt), None)
        self.ended += 1
        self.tokens += receipt.completion_tokens
        self.slow.add(receipt)
        if receipt.status == "cancelled":
            return
        done = receipt.status == "done"
        self.failed += not done
        self._samples.append(
            Sample(
                self.clock(),
                receipt.generation,
                receipt.strategy,
                done,
                receipt.first_token_ms,
                receipt.per_token_ms() if done else None,
                receipt.ms if done else None,
            )
        )

    def samples(self) -> list[Sample]:
        """Return those of the last `WINDOW_S`, the newest `MOST_SAMPLES` at most."""
        since = self.clock() - WINDOW_S
        while self._samples and self._samples[0].at < since:
            self._samples.popleft()
        return list(self._samples)
