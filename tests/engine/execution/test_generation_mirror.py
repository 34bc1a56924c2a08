"""The mirror of one generation, over a cache that notes its calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from engine.execution.generation_mirror import GenerationMirror
from engine.protocol import Internal, LeaseExpired, MicroserveError
from kvcache.cache import KVCache
from kvcache.types import LeaseId, SeqId

SEQ = SeqId(3)
PAGE = 16


@dataclass(eq=False)
class Writer:
    """The writer of the lease, as `KVCache.open_mirror` returns it."""

    begin: int = 32
    landed: int = 32
    room: int = 200
    failure: MicroserveError | None = None
    renewed: int = 0

    def renew(self) -> None:
        self.renewed += 1


@dataclass
class Cache:
    length_: int = 0
    writer: Writer = field(default_factory=Writer)
    written: list[tuple[SeqId, Writer, int]] = field(default_factory=list)
    closed: list[Writer] = field(default_factory=list)
    opened: list[tuple[str, list[int]]] = field(default_factory=list)
    extended: list[tuple[Writer, str]] = field(default_factory=list)
    page_size = PAGE

    def open_mirror(self, kv_addr: str, tokens: list[int]) -> Writer:
        self.opened.append((kv_addr, tokens))
        return self.writer

    def mirror(self, seq_id: SeqId, writer: Writer, every: int) -> None:
        self.written.append((seq_id, writer, every))

    def extend_mirror(self, writer: Writer, kv_addr: str) -> None:
        self.extended.append((writer, kv_addr))

    def close_mirror(self, writer: Writer) -> None:
        self.closed.append(writer)

    def length(self, seq_id: SeqId) -> int:
        assert seq_id == SEQ
        return self.length_


def new(cache: Cache, *, every: int = 4, most: int = 1000, opened: bool = True) -> GenerationMirror:
    loop = asyncio.get_running_loop()
    mirror = GenerationMirror(cast(KVCache, cast(Any, cache)), LeaseId("m"), every, most, loop)
    if opened:
        mirror.open("address", [1, 2])
    return mirror


async def asked(mirror: GenerationMirror) -> int:
    """Return the tokens that the mirror needs room for; 0 if it needs none."""
    waiting = asyncio.create_task(mirror.wait_for_extension())
    for _ in range(5):
        await asyncio.sleep(0)
    if waiting.done():
        return await waiting
    waiting.cancel()
    return 0


async def test_before_it_is_open_nothing_is_sent():
    cache = Cache()
    mirror = new(cache, opened=False)
    assert (mirror.lease_id, mirror.landed, mirror.sent, mirror.over) == ("m", 0, 0, False)
    mirror.advance(SEQ)
    mirror.renew()
    assert cache.written == [] and cache.writer.renewed == 0
    with pytest.raises(LeaseExpired):
        mirror.extend("address")
    mirror.open("address", [1, 2])
    assert cache.opened == [("address", [1, 2])] and cache.closed == []
    mirror.advance(SEQ)
    mirror.renew()
    assert cache.written == [(SEQ, cache.writer, 4)] and cache.writer.renewed == 1


async def test_tokens_that_the_lease_had_from_the_start_are_not_sent_ones():
    cache = Cache()
    mirror = new(cache)
    assert (mirror.landed, mirror.sent) == (32, 0)
    cache.writer.landed = 50
    assert (mirror.landed, mirror.sent) == (50, 18)


@pytest.mark.parametrize("ends", [True, False])
async def test_nothing_follows_an_end(ends: bool):
    cache, failure = Cache(), Internal("no")
    mirror = new(cache)
    for _ in range(2):
        if ends:
            mirror.end()
        else:
            mirror.stop(failure)
    assert mirror.over and mirror.stopped is (None if ends else failure)
    assert set(cache.closed) == {cache.writer}
    cache.writer.failure = Internal("later")
    mirror.advance(SEQ)
    mirror.renew()
    mirror.stop(Internal("later"))
    assert mirror.stopped is (None if ends else failure)
    assert cache.written == [] and cache.writer.renewed == 0


@pytest.mark.parametrize("call", ["advance", "renew"])
async def test_the_failure_of_a_put_stops_the_mirror(call: str):
    cache = Cache()
    mirror = new(cache)
    cache.writer.failure = failure = LeaseExpired("gone")
    if call == "advance":
        mirror.advance(SEQ)
    else:
        mirror.renew()
    assert mirror.stopped is failure and mirror.over
    assert cache.closed == [cache.writer]
    assert cache.written == [] and cache.writer.renewed == 0
    assert await mirror.wait_for_extension() == 0


@pytest.mark.parametrize("ends", [True, False])
async def test_a_mirror_that_ends_while_it_is_opened_is_closed(ends: bool):
    cache = Cache()
    mirror = new(cache, opened=False)
    if ends:
        mirror.end()
    else:
        mirror.stop(Internal("no"))
    assert cache.closed == []
    mirror.open("address", [1])
    assert cache.closed == [cache.writer]


@pytest.mark.parametrize(
    ("every", "margin"), [(1, 4 * PAGE), (4, 4 * PAGE), (17, 4 * 17), (40, 4 * 40)]
)
async def test_more_room_is_requested_four_pages_or_four_writes_ahead(every: int, margin: int):
    cache = Cache(length_=200 - margin)
    mirror = new(cache, every=every)
    mirror.advance(SEQ)
    assert await asked(mirror) == 0
    cache.length_ += 1
    mirror.advance(SEQ)
    assert await asked(mirror) == max(128, 4 * every)
    assert cache.written == [(SEQ, cache.writer, every)] * 2


async def test_no_more_room_is_requested_than_the_generation_may_use():
    cache = Cache(length_=190)
    mirror = new(cache, most=200)
    mirror.advance(SEQ)
    assert await asked(mirror) == 0
    mirror = new(cache, most=201)
    mirror.advance(SEQ)
    assert await asked(mirror) == 1


async def test_room_is_requested_again_once_it_was_granted():
    cache = Cache(length_=190)
    mirror = new(cache)
    waiting = asyncio.create_task(mirror.wait_for_extension())
    await asyncio.sleep(0)
    mirror.advance(SEQ)
    mirror.advance(SEQ)  # asks no second time
    assert await waiting == 128
    cache.writer.room += 128
    mirror.extend("another")
    assert cache.extended == [(cache.writer, "another")]
    assert await asked(mirror) == 0
    mirror.advance(SEQ)
    assert await asked(mirror) == 0
    cache.length_ += 128
    mirror.advance(SEQ)
    assert await asked(mirror) == 128


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("short", [True, False])
async def test_the_end_ends_the_wait_for_room(ends: bool, short: bool):
    mirror = new(Cache(length_=190))
    waiting = asyncio.create_task(mirror.wait_for_extension())
    await asyncio.sleep(0)
    if short:
        mirror.advance(SEQ)
    if ends:
        mirror.end()
    else:
        mirror.stop(Internal("no"))
    async with asyncio.timeout(5):
        assert await waiting == 0
        assert await mirror.wait_for_extension() == 0
