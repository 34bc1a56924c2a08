"""Where the chunks of one choice go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable

from router.base import Chunk, Usage
from router.telemetry import Receipt

__all__ = ["ChoiceWriter"]


class ChoiceWriter(ABC):
    """Counts the chunks of one choice and passes them on.

    `tokens` are all tokens written so far: a rerun of the strategy continues after them.
    """

    __slots__ = ("_receipt", "tokens", "usage")

    def __init__(self, receipt: Receipt) -> None:
        self.tokens: list[int] = []
        self.usage: Usage | None = None  # of the last chunk
        self._receipt = receipt

    def write(self, chunk: Chunk) -> Awaitable[None] | None:
        """Take the next chunk. An awaitable returned must be awaited: the client reads slowly."""
        if chunk.token_ids:
            self.tokens += chunk.token_ids
            receipt = self._receipt
            if receipt.first_token_ms is None:
                receipt.first_token_ms = receipt.elapsed_ms()
        if chunk.usage is not None:
            self.usage = chunk.usage
        return self.send(chunk)

    @abstractmethod
    def send(self, chunk: Chunk) -> Awaitable[None] | None:
        """Pass the chunk on; as `write`."""
