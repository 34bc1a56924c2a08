"""The three stores keep the same promises. Redis is a real server, and so is the link's socket."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, needs_redis

from engine.protocol import BadRequest
from router.base import StoreUnavailable, StoreUnreadable
from router.store import (
    Change,
    Document,
    Link,
    LinkedStore,
    MemoryStore,
    RedisStore,
    SharedStore,
    StoreServer,
    Take,
)
from router.store import redis as module
from router.store.linked import CHANGED
from router.store.notices import Notices

ALWAYS = -1e18
FLEETS = itertools.count()
Opened = Callable[[], AbstractAsyncContextManager[SharedStore]]


@asynccontextmanager
async def memory() -> AsyncIterator[SharedStore]:
    yield MemoryStore(asyncio.get_running_loop().time)


@asynccontextmanager
async def linked() -> AsyncIterator[SharedStore]:
    parents, workers = socket.socketpair()
    notices = Notices()
    server = StoreServer(MemoryStore(asyncio.get_running_loop().time))
    parent = Link(parents, dict(server.handlers), {})
    worker = Link(workers, {}, {CHANGED: notices.notify})
    server.add(parent)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(link.run()) for link in (parent, worker)]
        yield LinkedStore(worker, notices)
        for task in running:
            task.cancel()


_servers: list[RedisServer] = []


@pytest.fixture(scope="module", autouse=True)
def _end_server() -> Iterator[None]:
    yield
    while _servers:
        _servers.pop().close()


def url_of_own_fleet() -> str:
    """Return the URL of a fleet of its own in this module's server."""
    if not _servers:
        _servers.append(RedisServer())
    return f"{_servers[0].url}#fleet-{next(FLEETS)}"


@asynccontextmanager
async def in_redis() -> AsyncIterator[SharedStore]:
    async with connected(url_of_own_fleet()) as store:
        yield store


@asynccontextmanager
async def connected(url: str, **options: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, **options)
    running = asyncio.create_task(store.run())
    try:
        yield store
    finally:
        running.cancel()
        await store.close()


@pytest.fixture(params=[memory, linked, pytest.param(in_redis, marks=needs_redis)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SharedStore]:
    async with request.param() as opened:
        yield opened


def change(found: int, value: bytes, **fields: object) -> Change:
    return Change(found, Document(found + 1, value), **fields)  # type: ignore[arg-type]


async def test_a_document_is_replaced_only_by_who_knows_its_version(store: SharedStore):
    assert await store.get() == Document(0, b"")
    assert await store.commit(change(0, b"a\0\xff")) == "done"
    assert await store.commit(change(0, b"b")) == "stale"
    assert await store.commit(change(2, b"b")) == "stale"
    assert await store.get() == Document(1, b"a\0\xff")
    assert store.available
    # Of many at once, one wins.
    outcomes = await asyncio.gather(*(store.commit(change(1, b"%d" % i)) for i in range(8)))
    assert sorted(outcomes) == ["done", *["stale"] * 7]
    assert await store.get() == Document(2, b"%d" % outcomes.index("done"))


async def test_sources_and_log_change_with_the_document_or_not_at_all(store: SharedStore):
    source = bytes(range(256)) * 40
    digest = hashlib.sha256(source).hexdigest()
    await store.append(b"0")
    first = change(0, b"a", sources={digest: source, "other": b"x"}, entries=[b"1", b"2 \xff"])
    assert await store.commit(first) == "done"
    lost = change(0, b"b", sources={"third": b"y"}, dropped=[digest], entries=[b"3"])
    assert await store.commit(lost) == "stale"
    assert await store.source(digest) == source
    assert await store.source("third") is None
    assert await store.commit(change(1, b"b", dropped=["other"])) == "done"
    assert (await store.source("other"), await store.source(digest)) == (None, source)
    entries = [(entry.number, entry.value) for entry in await store.log()]
    assert entries == [(1, b"0"), (2, b"1"), (3, b"2 \xff")]
    for begin in range(0, 1020, 60):
        await asyncio.gather(*(store.append(b"%d" % i) for i in range(begin, begin + 60)))
    numbers = [entry.number for entry in await store.log()]
    assert numbers == list(range(24, 1024))


async def test_a_counter_has_one_part_of_each_member(store: SharedStore):
    assert await store.report("c", "a", [1, 2, 3]) == [1, 2, 3]
    assert await store.report("c", "b", [10, 0, 0]) == [11, 2, 3]
    assert await store.report("c", "a", [2, 2, 3]) == [12, 2, 3]  # repeated, not added
    assert await store.report("d", "a", [1]) == [1]


async def test_all_buckets_are_taken_from_or_none(store: SharedStore):
    def takes(amount: float) -> list[Take]:
        return [Take("r", 6, 1, 1), Take("t", 60, 1, amount)]

    for left in (5, 4, 3):
        taken = await store.take(takes(0))
        assert taken.admitted and round(taken.levels[0]) == left
    taken = await store.take([Take("t", 60, ALWAYS, 100)])  # overdrawn
    assert taken.admitted and -41 < taken.levels[0] < -38
    refused = await store.take(takes(0))
    assert not refused.admitted and round(refused.levels[0]) == 3
    taken = await asyncio.gather(*(store.take([Take("r", 6, 1, 1)]) for _ in range(9)))
    assert sum(one.admitted for one in taken) == 3


async def test_a_member_is_there_until_its_time_is_over(store: SharedStore):
    await store.announce("engine", "a", b"1", 60)
    await store.announce("engine", "b", b"2", 0.05)
    await store.announce("other", "c", b"3", 60)
    assert (await store.members("engine"))["a"] == b"1"
    await asyncio.sleep(0.1)
    assert await store.members("engine") == {"a": b"1"}
    await store.withdraw("engine", "a")
    assert await store.members("engine") == {}


async def test_changes_wake_who_waits(store: SharedStore):
    seen = 0
    while (now := await store.wait(seen, 0.2)) != seen:  # the subscription itself
        seen = now
    for make in (
        lambda: store.commit(change(0, b"a")),
        lambda: store.announce("e", "a", b"1", 60),
        lambda: store.withdraw("e", "a"),
    ):
        await make()
        async with asyncio.timeout(10):
            while (now := await store.wait(seen, 10)) == seen:
                pass
        while now != seen:
            seen, now = now, await store.wait(now, 0.1)
    await store.announce("e", "a", b"1", 60)
    seen = await store.wait(seen, 10)
    await store.announce("e", "a", b"1", 60)  # nothing new
    assert await store.wait(seen, 0.1) == seen


@pytest.mark.parametrize("opened", [memory, pytest.param(in_redis, marks=needs_redis)])
async def test_after_a_restoration_nothing_else_is_committed_for_a_while(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RESTORE_S", 1.0)
    async with opened() as store:
        if isinstance(store, MemoryStore):
            store = MemoryStore(asyncio.get_running_loop().time, restore_s=1.0)
        assert await store.commit(change(0, b"a", restoring=True)) == "done"
        assert await store.commit(change(1, b"b")) == "settling"
        newer = Change(1, Document(7, b"c"), restoring=True)  # who knows a newer one may
        assert await store.commit(newer) == "done"
        await asyncio.sleep(1.1)
        assert await store.commit(change(7, b"d")) == "done"


async def test_a_link_whose_other_end_is_gone_fails_its_calls():
    parents, workers = socket.socketpair()
    link = Link(workers, {}, {})
    running = asyncio.create_task(link.run())
    store = LinkedStore(link, Notices())
    waiting = asyncio.create_task(store.get())
    await asyncio.sleep(0.01)
    parents.close()
    with pytest.raises(StoreUnavailable):
        await waiting
    with pytest.raises(StoreUnavailable):
        await store.get()
    assert not store.available
    await running


async def test_a_frame_that_is_too_large_ends_the_link():
    parents, workers = socket.socketpair()
    link = Link(workers, {}, {})
    parents.sendall(b"\xff\xff\xff\xff")
    async with asyncio.timeout(10):
        await link.run()
    assert link.closed
    parents.close()


@pytest.mark.parametrize("url", ["http://h", "redis", "", "memcached://h"])
def test_urls_of_other_kinds_are_refused(url: str):
    with pytest.raises(BadRequest, match="--store"):
        RedisStore(url)


# Redis that dies


def in_real_redis(test: Callable[..., Any]) -> Callable[..., Any]:
    for mark in needs_redis:
        test = mark(test)
    return test


@pytest.mark.slow
@in_real_redis
async def test_a_server_that_is_killed_or_stopped_is_lost_and_found_again():
    server = RedisServer(keeps=True)
    try:
        async with connected(server.url) as store:
            assert await store.commit(change(0, b"a")) == "done"
            seen = await store.wait(0, 5)
            server.kill()
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await store.get()
            assert not store.available
            server.start()
            async with asyncio.timeout(30):
                while await store.wait(seen, 1) == seen:  # it subscribes again
                    pass
            assert await store.get() == Document(1, b"a")
            assert store.available
            # Another router may know of changes that the server had not written to disk yet.
            assert await store.commit(change(1, b"b")) == "settling"
            assert await store.commit(Change(1, Document(3, b"c"), restoring=True)) == "done"
            server.signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(20):
                    with pytest.raises(StoreUnavailable):
                        await store.get()
            finally:
                server.signal(signal.SIGCONT)
            assert await store.get() == Document(3, b"c")
    finally:
        server.close()


@in_real_redis
async def test_after_a_restart_changes_wait_and_then_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "RESTORE_S", 1.0)
    server = RedisServer(keeps=True)
    try:
        async with connected(server.url) as store:
            assert await store.commit(change(0, b"a")) == "done"
            assert await store.commit(change(1, b"b")) == "done"
            server.kill()
            server.start()
            assert await store.commit(change(2, b"c")) == "settling"
            await asyncio.sleep(1.1)
            assert await store.commit(change(2, b"c")) == "done"
    finally:
        server.close()


@in_real_redis
async def test_fleets_of_other_names_do_not_meet():
    async with connected(url_of_own_fleet()) as one, connected(url_of_own_fleet()) as other:
        assert await one.commit(change(0, b"a")) == "done"
        assert (await other.get()).version == 0


@in_real_redis
async def test_something_else_under_a_key_is_named_and_harms_nothing_else():
    url = url_of_own_fleet()
    prefix = f"{{{url.partition('#')[2]}}}"
    async with connected(url) as store:
        raw: Any = store._redis
        assert await store.commit(change(0, b"a")) == "done"
        await raw.hset(f"{prefix}:document", "version", "many")
        with pytest.raises(StoreUnreadable, match="document"):
            await store.get()
        await raw.set(f"{prefix}:document", "x")
        with pytest.raises(StoreUnavailable, match="refuses a call: WRONGTYPE"):
            await store.get()
        await raw.delete(f"{prefix}:document")
        assert await store.get() == Document(0, b"")
        await store.append(b"1")
        await raw.rpush(f"{prefix}:log", "no number")
        await store.append(b"2")
        assert [entry.value for entry in await store.log()][-2:] == [b"1", b"2"]
        await store.announce("engines", "a", b"1", 60)
        await raw.hset(f"{prefix}:members:engines", b"\xff", b"2")
        assert (await store.members("engines"))["a"] == b"1"
        await raw.hset(f"{prefix}:counter:c", "evil", "x y")
        with pytest.raises(StoreUnreadable, match="counter:c"):
            await store.report("c", "a", [1, 2])


@in_real_redis
async def test_a_bucket_fills_though_the_clock_of_the_server_was_set_back():
    url = url_of_own_fleet()
    key = f"{{{url.partition('#')[2]}}}:bucket:b:6000"
    async with connected(url) as store:
        raw: Any = store._redis
        assert (await store.take([Take("b", 6000, ALWAYS, 6050)])).admitted
        then = float(await raw.hget(key, "then"))
        await raw.hset(key, "then", str(then + 3600))  # an hour in the future
        wanted = [Take("b", 6000, 1, 1)]
        assert not (await store.take(wanted)).admitted
        async with asyncio.timeout(10):  # 51 tokens at 100 per second
            while not (await store.take(wanted)).admitted:  # noqa: ASYNC110  there is no event
                await asyncio.sleep(0.05)


@in_real_redis
async def test_the_password_is_read_from_a_file_at_each_connection(tmp_path: Path):
    server, file = RedisServer(password="the right one"), tmp_path / "password"
    try:
        file.write_text("a wrong one\n")
        async with connected(server.url, password_file=str(file)) as store:
            with pytest.raises(StoreUnavailable, match="password") as caught:
                await store.get()
            assert "wrong one" not in str(caught.value)
            file.write_text("the right one\n")
            assert await store.get() == Document(0, b"")
        file.unlink()
        with pytest.raises(BadRequest, match="No such file"):
            RedisStore(server.url, password_file=str(file))
    finally:
        server.close()


@in_real_redis
async def test_a_call_that_is_cancelled_at_any_moment_ends():
    """asyncio.wait_for of Python 3.11, by which the client writes, swallows some cancellations."""
    async with in_redis() as store:
        for calls in (store.get, lambda: store.members("engines")):
            await calls()
            for turns in range(40):
                call = asyncio.create_task(calls())
                for _ in range(turns):
                    await asyncio.sleep(0)
                if call.cancel():
                    await asyncio.wait([call], timeout=10)
                    assert call.cancelled(), f"after {turns} turns of the event loop"
