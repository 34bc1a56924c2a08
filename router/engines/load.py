"""This router's work in flight on an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STREAM_TOKENS", "Load"]

# Load of a running stream, in tokens of prefill: about what one more sequence adds to a step, and
# enough to spread streams if no prefill waits.
STREAM_TOKENS = 32


class Load:
    """This router's work in flight on an engine. Each increase is paired with a decrease."""

    __slots__ = ("contexts", "streams", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # to prefill or send, not done yet
        self.streams = 0  # generations, and leases that will become one
        self.contexts = 0  # tokens that generations may reach which outgrow the engine's pool

    @property
    def idle(self) -> bool:
        return not self.tokens and not self.streams

    @property
    def weight(self) -> int:
        return self.tokens + STREAM_TOKENS * self.streams

    @contextmanager
    def work(self, *, tokens: int = 0, streams: int = 0) -> Iterator[None]:
        """Count this much work while the body runs."""
        self.tokens += tokens
        self.streams += streams
        try:
            yield
        finally:
            self.tokens -= tokens
            self.streams -= streams
