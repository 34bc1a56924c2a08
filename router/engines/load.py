"""The work in flight on an engine: this router's, and that of other routers as last heard of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STREAM_TOKENS", "Load"]

# Load of a running stream, in tokens of prefill: about what one more sequence adds to a step, and
# enough to spread streams if no prefill waits.
STREAM_TOKENS = 32


class Load:
    """The work in flight on an engine.

    This router counts its own: each increase is paired with a decrease. Of all that the engine
    reports, what this router has not sent is the work of others.
    """

    __slots__ = ("_ending", "_peak", "contexts", "others", "streams", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # to prefill or send, not done yet
        self.streams = 0  # generations, and leases that will become one
        self.contexts = 0  # tokens that generations may reach which outgrow the engine's pool
        self.others = 0  # of other routers, as `weight`
        self._ending = 0  # weight of what this router has given up and the engine may still count
        self._peak = 0  # the largest weight since `listen`, with what was ending

    @property
    def idle(self) -> bool:
        return not self.tokens and not self.streams

    @property
    def weight(self) -> int:
        """This router's work, in tokens of prefill."""
        return self.tokens + STREAM_TOKENS * self.streams

    @property
    def total(self) -> int:
        """The work of all routers, in tokens of prefill."""
        return self.weight + self.others

    def add(self, tokens: int, streams: int) -> None:
        """Count more work of this router, or less."""
        self.tokens += tokens
        self.streams += streams
        self._peak = max(self._peak, self.weight + self._ending)

    def end(self, tokens: int, streams: int, told: asyncio.Future[None]) -> None:
        """Count less work of this router. The engine may report it until it was `told`."""
        weight = tokens + STREAM_TOKENS * streams
        self._ending += weight

        def ended(_: asyncio.Future[None]) -> None:
            self._ending -= weight

        told.add_done_callback(ended)
        self.add(-tokens, -streams)

    @contextmanager
    def work(self, *, tokens: int = 0, streams: int = 0) -> Iterator[None]:
        """Count this much work while the body runs."""
        self.add(tokens, streams)
        try:
            yield
        finally:
            self.add(-tokens, -streams)

    def listen(self) -> None:
        """Expect a report, which the engine makes at some time before `hear`."""
        self._peak = self.weight + self._ending

    def hear(self, tokens: int | None, streams: int | None) -> None:
        """Take an engine's report of what it has to compute and send; None: it does not count.

        Any of it may be this router's, up to the most that it had there while it listened.
        """
        reported = (tokens or 0) + STREAM_TOKENS * (streams or 0)
        self.others = max(0, reported - self._peak)
