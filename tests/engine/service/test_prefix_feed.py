"""The prefix feed, in this process and over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from engine_helpers import generate, prep, running, serving
from waiting import until

from engine.protocol import PageName, page_names
from engine.service import prefix_feed
from engine.service.engine import MicroserveEngine
from engine.service.prefix_feed import PrefixReader
from kvcache.transport.memory import MemoryNetwork
from kvcache.types import SeqId

PAGE = 16


class Router:
    """What a router knows from the frames that it has read."""

    def __init__(self, reader: PrefixReader) -> None:
        self.known: set[PageName] = set()
        self.frames = 0
        self._frames = reader.frames()

    async def read(self) -> None:
        frame = json.loads(await anext(self._frames))
        added, removed = set(frame["added"]), set(frame["removed"])
        assert not added & (self.known | removed)
        assert removed <= self.known
        self.known = (self.known | added) - removed
        self.frames += 1

    async def right(self, engine: MicroserveEngine, prompts: Sequence[Sequence[int]]) -> None:
        """Read until router and engine agree on the matches of all `prompts`."""
        async with asyncio.timeout(10):
            while self.wrong(engine, prompts):
                await self.read()

    def wrong(self, engine: MicroserveEngine, prompts: Sequence[Sequence[int]]) -> bool:
        if len(self.known) * PAGE != engine.cache.prefix_tokens:
            return True
        matches = [PAGE * sum(n in self.known for n in page_names(p, PAGE)) for p in prompts]
        return matches != [matched(engine, prompt) for prompt in prompts]


def matched(engine: MicroserveEngine, prompt: Sequence[int]) -> int:
    """Return how many tokens the engine matches in its prefix cache."""
    looking = SeqId(-1)
    length = engine.cache.add_sequence(looking, prompt)
    engine.cache.remove_sequence(looking)
    return length


def test_a_page_name_depends_on_all_tokens_up_to_its_end():
    names = page_names(range(40), 16)
    assert len(names) == len(set(names)) == 2
    assert page_names(range(32), 16) == names
    assert page_names([99, *range(1, 40)], 16)[1] != names[1]
    assert page_names([*range(16), 99, *range(17, 32)], 16)[:1] == names[:1]
    assert page_names(range(15), 16) == []
    # The value is that of `b2sum -l 64`: engines and routers of different versions must agree.
    assert names == ["26ec4e1c03e59b30", "dc925506c471bf63"]


@pytest.mark.slow
async def test_a_reader_follows_published_and_evicted_pages():
    """Run 40 prompts with shared prefixes through a pool that holds a part of them."""
    draw = random.Random(5)
    roots = [[draw.randrange(500) for _ in range(80)] for _ in range(3)]
    async with running(pages=40) as engine:
        early = Router(engine.prefixes.open())
        late: Router | None = None
        prompts: list[list[int]] = []
        for number in range(40):
            root = draw.choice(roots)
            prompt = root[: draw.randrange(81)] + [draw.randrange(500) for _ in range(30)]
            prompts.append(prompt)
            await generate(engine, prompt, f"r{number}", max_tokens=draw.randrange(1, 20))
            if number == 20:
                late = Router(engine.prefixes.open())
            if number % 5 == 0:
                await early.right(engine, prompts)
        assert late is not None
        for router in (early, late):
            await router.right(engine, prompts)
        assert engine.cache.prefix_tokens < 16 * 40 < sum(map(len, prompts))


async def test_a_slow_reader_gets_the_net_difference():
    async with running(pages=32) as engine:
        router = Router(engine.prefixes.open())
        await router.read()
        for number in range(12):
            await generate(engine, [number] * 100, f"r{number}", max_tokens=2)
        assert len(engine.prefixes._readers) == 1
        (reader,) = engine.prefixes._readers
        assert len(reader._added) * PAGE == engine.cache.prefix_tokens
        await router.read()
        assert not router.wrong(engine, [[number] * 100 for number in range(12)])
        assert router.frames == 2


async def test_a_long_change_comes_in_frames_that_never_exceed_the_cache(monkeypatch):
    monkeypatch.setattr(prefix_feed, "MOST_NAMES", 4)
    cache: Any = SimpleNamespace(lock=threading.Lock())
    reader = PrefixReader(cache)
    frames = reader.frames()
    old, new = [[f"{kind}{n:015}" for n in range(10)] for kind in "ab"]
    known: set[str] = set()

    async def read() -> int:
        """Read one change; return its number of frames."""
        for count in itertools.count(1):
            frame = json.loads(await anext(frames))
            known.difference_update(frame["removed"])
            known.update(frame["added"])
            assert len(frame["added"]) + len(frame["removed"]) <= 4 and len(known) <= 10
            if not frame.get("more"):
                return count
        raise AssertionError

    async with asyncio.timeout(10):
        reader.record(old, ())
        assert (await read(), known) == (3, set(old))
        reader.record(new, old)
        frame = json.loads(await anext(frames))
        assert (frame["removed"], frame["added"], frame["more"]) == (old[:4], [], True)
        known.difference_update(frame["removed"])
        reader.record(old[:2], new[:9])  # meanwhile
        assert (await read(), known) == (3, {*old[:2], new[9]})


async def test_a_commit_and_a_truncation_are_reported():
    prompt = list(range(64))
    async with running() as engine:
        router = Router(engine.prefixes.open())
        await generate(engine, prompt[:32], max_tokens=1)
        await router.right(engine, [prompt])
        reply = engine.prep_recv(prep(prompt, 32, "commit"))
        assert engine.commit(reply.lease_id) == 32
        with engine.cache.lock:
            engine.cache.bookkeeping.pages.prefix.cut(prompt, 1)
        await router.right(engine, [prompt])
        assert router.known == {page_names(prompt, PAGE)[0]}


@asynccontextmanager
async def listening(url: str, **headers: str) -> AsyncIterator[AsyncIterator[str]]:
    async with (
        httpx.AsyncClient(base_url=url, headers=headers) as http,
        http.stream("GET", "/microserving/prefixes") as reply,
    ):
        reply.raise_for_status()
        yield reply.aiter_lines()


async def test_over_http_a_snapshot_comes_at_once_and_changes_follow():
    prompt = list(range(100))
    async with serving(MemoryNetwork(), api_key="key") as engine:
        url = engine.cache.identity.url
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            async with listening(url):
                pass
        await generate(engine, prompt[:40], max_tokens=1)
        async with asyncio.timeout(10), listening(url, Authorization="Bearer key") as lines:
            first = json.loads(await anext(lines))
            assert first == {"added": page_names(prompt[:40], PAGE), "removed": []}
            await generate(engine, prompt, "again", max_tokens=1)
            added = json.loads(await anext(lines))["added"]
            while len(added) < 4:
                added += json.loads(await anext(lines))["added"]
            assert added == page_names(prompt, PAGE)[2:]
        await until(lambda: not engine.prefixes._readers)


async def test_streams_end_with_the_engine():
    async with (
        asyncio.timeout(10),
        serving(MemoryNetwork()) as engine,
        listening(engine.cache.identity.url) as lines,
    ):
        await anext(lines)
        engine.shut_down()
        assert [line async for line in lines] == []
