"""What a writer counts of the chunks that it passes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

from router.base.request import Chunk, Usage
from router.execution import ChoiceWriter


class Writer(ChoiceWriter):
    """Passes chunks to a client that reads those with text slowly."""

    def __init__(self, receipt: Any) -> None:
        super().__init__(receipt)
        self.sent: list[Chunk] = []
        self.reading: list[asyncio.Future[None]] = []

    def send(self, chunk: Chunk) -> Awaitable[None] | None:
        self.sent.append(chunk)
        if not chunk.text:
            return None
        self.reading.append(asyncio.get_running_loop().create_future())
        return self.reading[-1]


async def test_tokens_usage_and_the_first_tokens_time_are_noted():
    times = iter([12.5, 99.0])
    receipt: Any = SimpleNamespace(first_token_ms=None, elapsed_ms=lambda: next(times))
    writer = Writer(receipt)
    assert (writer.tokens, writer.usage) == ([], None)
    usage = Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=0)
    chunks = [
        Chunk(begin=2),  # no token yet
        Chunk(token_ids=[7]),
        Chunk(token_ids=[8, 9], text="x", usage=usage),
        Chunk(finish_reason="stop"),
    ]
    noted = []
    for chunk in chunks:
        reading = writer.write(chunk)
        assert reading is (writer.reading[-1] if chunk.text else None)
        noted.append((receipt.first_token_ms, list(writer.tokens), writer.usage))
    assert noted == [
        (None, [], None), (12.5, [7], None), (12.5, [7, 8, 9], usage), (12.5, [7, 8, 9], usage),
    ]  # fmt: skip
    assert writer.sent == chunks
    assert chunks[1].token_ids == [7]  # they are the client's now
