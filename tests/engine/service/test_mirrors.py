"""Mirrors: the KV of a running generation, replicated into a lease on another engine.

Two engines in this process; either may end before the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from engine_helpers import at_rest, collect, generate, prep, running, serving, start
from raw_server import HEAD, RawServer
from waiting import until

from engine.protocol import (
    BadAddress,
    Event,
    MicroserveError,
    Mirror,
    Mirrored,
    PrepRecvReply,
    Release,
)
from engine.scheduling import Chunk
from engine.service.engine import MicroserveEngine
from kvcache.memory.region import Region
from kvcache.transport import MemoryNetwork

pytestmark = pytest.mark.slow  # all of them: each waits a little

PROMPT = [(11 * n) % 250 for n in range(37)]
END = len(PROMPT)
Pair = tuple[MicroserveEngine, MicroserveEngine]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """An engine that generates and one that holds the replica."""
    network = MemoryNetwork()
    async with running(network) as source, running(network, name="b") as replica:
        yield let_steps_wait_for_mirrors(source), replica


@dataclass
class Part:
    """The events of a stream so far."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    mirror: Mirrored | None = None
    begin: int | None = None
    last: Event | None = None

    def add(self, event: Event) -> None:
        self.tokens += event.token_ids
        self.text += event.text
        self.logprobs += event.logprobs or []
        self.mirror = event.mirror or self.mirror
        self.begin = self.begin if event.begin is None else event.begin
        self.last = event

    def __add__(self, other: Part) -> tuple[Any, ...]:
        return self.tokens + other.tokens, self.text + other.text, self.logprobs + other.logprobs


async def read(engine: MicroserveEngine, request_id: str, cut: int = 10**6, **fields: Any) -> Part:
    """Run a generation to its end, or until it has at least `cut` tokens."""
    part = Part()
    stream = await engine.start_generate(start(PROMPT, request_id, **fields))
    async with asyncio.timeout(30), contextlib.aclosing(stream.events()) as events:
        async for event in events:
            part.add(event)
            if len(part.tokens) >= cut:
                break
    return part


def lease(replica: MicroserveEngine, reserve: int, end: int = END, **fields: Any) -> PrepRecvReply:
    return replica.prep_recv(prep(PROMPT, end, "lease", reserve=reserve, **fields))


def to(got: PrepRecvReply, every: int = 4) -> Mirror:
    return Mirror(kv_addr=got.kv_addr, every=every)


async def take_right(replica: MicroserveEngine, slot: int) -> Region:
    """Take a lease's write right, like a writer that is stopped during a copy."""
    region = replica.cache.transport.region
    await until(lambda: region.try_acquire_right(slot))
    return region


def let_steps_wait_for_mirrors(
    engine: MicroserveEngine, until: threading.Event | None = None
) -> MicroserveEngine:
    """Let each step wait for the mirrors, as if it took longer than a put or a call."""
    run = engine.loop.stepper._runner.run

    def busy() -> bool:
        return bool(engine.cache._sender._writing) or any(
            not mirror.over and (mirror._mirror is None or mirror._extending)
            for mirror in list(engine.mirrors._tasks.values())
        )

    def wait_and_run(chunks: Any) -> Any:
        give_up = time.monotonic() + 10
        while busy() and not (until is not None and until.is_set()):
            assert time.monotonic() < give_up
            time.sleep(0.0002)
        return run(chunks)

    engine.loop.stepper._runner.run = wait_and_run  # type: ignore[method-assign]
    return engine


STYLES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.9, "presence_penalty": 0.4},
    "logprobs": {"temperature": 0.8, "seed": 7, "logprobs": 3, "repetition_penalty": 1.2},
}


async def abort_and_continue(
    pair: Pair, every: int, cut: int, number: int = 0, **options: Any
) -> tuple[Part, Part]:
    """Abort a generation after `cut` tokens, and continue it from the mirror."""
    source, replica = pair
    got = replica.prep_recv(prep(PROMPT, END, f"lease{number}", reserve=60))
    first = await read(source, f"first{number}", cut, mirror=to(got, every), **options)
    rest = await read(
        replica, f"rest{number}", output=first.tokens, lease_id=got.lease_id, **options
    )
    return first, rest


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.slow
async def test_a_generation_continues_from_its_mirror(pair: Pair, style: str):
    source, _ = pair
    options = {"max_tokens": 40, **STYLES[style]}
    whole = await read(source, "whole", **options)
    for number, (cut, every) in enumerate(((1, 1), (2, 4), (9, 4), (17, 1), (30, 8), (35, 16))):
        first, rest = await abort_and_continue(pair, every, cut, number, **options)
        assert first + rest == whole + Part()
        assert rest.last is not None and whole.last is not None
        assert rest.last.finish_reason == whole.last.finish_reason
        assert first.mirror is None or first.mirror.stopped is None


@pytest.mark.parametrize("cut", [3, 12, 20])
async def test_a_stop_string_ends_a_continued_generation(pair: Pair, cut: int):
    source, _ = pair
    text = (await read(source, "text", max_tokens=60)).text
    stop = [text[-6:-2]]
    whole = await read(source, "whole", max_tokens=60, stop=stop)
    first, rest = await abort_and_continue(pair, 4, cut, max_tokens=60, stop=stop)
    assert first + rest == whole + Part()
    assert rest.last is not None
    assert (rest.last.finish_reason, rest.last.stop_reason) == ("stop", stop[0])


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.slow
async def test_after_any_number_of_tokens_little_is_recomputed(pair: Pair, every: int):
    source, _ = pair
    whole = await read(source, "whole", max_tokens=26)
    for cut in range(1, 26):
        first, rest = await abort_and_continue(pair, every, cut, cut, max_tokens=26)
        assert first + rest == whole + Part()
        assert rest.begin is not None and first.mirror is not None
        again = END + len(first.tokens) - rest.begin
        assert again >= 1
        if cut > 1:  # the first token may be delivered before its step's KV has landed
            assert again <= 2 * every + 1
        assert rest.begin >= min(first.mirror.landed, END + len(first.tokens) - 1)  # as reported


async def test_each_token_is_sent_once(pair: Pair):
    """Each token from `match_len` on is sent once; the events report the progress."""
    source, replica = pair
    await generate(replica, PROMPT, max_tokens=1)
    got = lease(replica, reserve=50)
    assert got.match_len == 32
    stream = await source.start_generate(start(PROMPT, max_tokens=40, mirror=to(got)))
    events = await collect(stream)
    told = [event.mirror.landed for event in events if event.mirror is not None]
    assert told == sorted(told) and set(told) - {0} <= {32, *range(37, 80, 4)}
    assert told[-1] >= 37 + 40 - 2 * 4 - 1
    (held,) = replica.cache.leases()
    assert held.landed == told[-1] > held.end
    assert held.state == "landed"
    await at_rest(source)
    assert source.mirrors.sent == told[-1] - 32
    assert source.mirrors.running == 0
    replica.release(Release(lease_id=got.lease_id))


# Room


@pytest.mark.parametrize("reserve", [0, 1, 30])
@pytest.mark.slow
async def test_more_room_is_requested_before_the_lease_is_full(reserve: int):
    network = MemoryNetwork()
    async with (
        running(network, pages=128, api_key="k") as source,
        serving(network, pages=128, name="b", api_key="k") as replica,
    ):
        let_steps_wait_for_mirrors(source)
        whole = await read(source, "whole", max_tokens=400)
        got = lease(replica, reserve)
        first = await read(source, "first", 380, mirror=to(got), max_tokens=400)
        (held,) = replica.cache.leases()
        assert held.room == END + 400 - 1 + 1
        assert held.landed > END + reserve
        rest = await read(
            replica, "rest", output=first.tokens, lease_id=got.lease_id, max_tokens=400
        )
        assert first + rest == whole + Part()
        assert first.mirror is not None and first.mirror.stopped is None
        assert rest.begin is not None
        assert rest.begin >= min(first.mirror.landed, END + len(first.tokens) - 1)


async def test_a_mirror_without_room_stops_and_the_stream_continues():
    network = MemoryNetwork()
    async with (
        running(network) as source,
        serving(network, pages=16, name="b") as replica,  # eight of them for leases
    ):
        let_steps_wait_for_mirrors(source)
        whole = await read(source, "whole", max_tokens=200)
        got = lease(replica, reserve=27)  # four pages
        mirrored = await read(source, "r", max_tokens=200, mirror=to(got))
        assert mirrored + Part() == whole + Part()
        assert mirrored.mirror is not None
        assert mirrored.mirror.stopped == "bad_request"  # a request for 128 more can never fit
        (held,) = replica.cache.leases()
        assert held.room == 64 and mirrored.mirror.landed == held.landed <= 64
        stopped = 'mirrors_stopped_total{model_name="tiny",reason="bad_request"} 1.0'
        assert stopped in source.metrics.render().decode()
        replica.release(Release(lease_id=got.lease_id))


async def test_a_mirror_gets_no_room_that_other_leases_use():
    network = MemoryNetwork()
    async with running(network) as source, serving(network, name="b") as replica:
        let_steps_wait_for_mirrors(source)
        got = lease(replica, reserve=27)
        replica.prep_recv(prep([9] * 400, 400, "other"))  # 25 of the 28 remaining pages
        mirrored = await read(source, "r", max_tokens=200, mirror=to(got))
        assert len(mirrored.tokens) == 200
        assert mirrored.mirror is not None and mirrored.mirror.stopped == "no_capacity"
        for name in ("lease", "other"):
            replica.release(Release(request_id=name))


@pytest.mark.parametrize(("key", "reason"), [("wrong", "unauthorized"), ("", "unauthorized")])
async def test_a_refusal_by_the_peer_stops_the_mirror(key: str, reason: str):
    network = MemoryNetwork()
    async with (
        running(network, api_key=key) as source,
        serving(network, name="b", api_key="k") as replica,
    ):
        let_steps_wait_for_mirrors(source)
        got = lease(replica, reserve=27)
        mirrored = await read(source, "r", max_tokens=60, mirror=to(got))
        assert len(mirrored.tokens) == 60
        assert mirrored.mirror is not None and mirrored.mirror.stopped == reason
        replica.release(Release(lease_id=got.lease_id))


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9", "nonsense"])
async def test_an_unreachable_peer_stops_the_mirror(url: str):
    network = MemoryNetwork()
    async with running(network) as source, running(network, name="b", url=url) as replica:
        let_steps_wait_for_mirrors(source)
        got = lease(replica, reserve=27)
        mirrored = await read(source, "r", max_tokens=60, mirror=to(got))
        assert len(mirrored.tokens) == 60
        assert mirrored.mirror is not None and mirrored.mirror.stopped == "peer_unreachable"
        replica.release(Release(lease_id=got.lease_id))


async def test_a_peer_that_answers_without_end_stops_the_mirror(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.service.mirror_tasks.MOST_REPLY", 10_000)
    network, server = MemoryNetwork(), RawServer(HEAD, b"1000\r\n%b\r\n" % (b"x" * 4096))
    async with (
        server.serving(),
        running(network) as source,
        running(network, name="b", url=server.url) as replica,
    ):
        let_steps_wait_for_mirrors(source)
        got = lease(replica, reserve=27)
        mirrored = await read(source, "r", max_tokens=60, mirror=to(got))
        assert len(mirrored.tokens) == 60
        assert mirrored.mirror is not None and mirrored.mirror.stopped == "peer_unreachable"
        assert "more than 10000 bytes" in (mirrored.mirror.message or "")
        assert len(server.heads) == 1
        replica.release(Release(lease_id=got.lease_id))


# Ends


async def test_the_end_of_its_lease_stops_only_the_mirror(pair: Pair):
    source, replica = pair
    whole = await read(source, "whole", max_tokens=60)
    got = lease(replica, reserve=100)
    part = Part()
    stream = await source.start_generate(start(PROMPT, max_tokens=60, mirror=to(got)))
    async for event in stream.events():
        part.add(event)
        if len(part.tokens) == 20:
            replica.release(Release(lease_id=got.lease_id))
    assert part + Part() == whole + Part()
    assert part.mirror is not None and part.mirror.stopped == "lease_expired"
    assert part.mirror.message and END <= part.mirror.landed < END + 60


async def test_a_dead_peer_stops_only_the_mirror(pair: Pair):
    source, replica = pair
    got = lease(replica, reserve=100)
    members = replica.cache.transport._network.members  # type: ignore[attr-defined]
    del members[replica.cache.transport.endpoint]
    part = await read(source, "r", max_tokens=60, mirror=to(got))
    assert len(part.tokens) == 60
    assert part.mirror == Mirrored(
        lease_id=got.lease_id,
        landed=0,
        stopped="peer_unreachable",
        message=part.mirror and part.mirror.message,
    )
    replica.release(Release(lease_id=got.lease_id))


async def test_a_bad_address_is_a_client_error(pair: Pair):
    source, replica = pair
    got = lease(replica, reserve=10)
    for prompt, address in ((PROMPT, got.kv_addr[:-4]), (PROMPT[::-1], got.kv_addr)):
        with pytest.raises(BadAddress):
            await source.start_generate(
                start(prompt, mirror=Mirror(kv_addr=address, every=4), max_tokens=4)
            )
    assert source.running == source.waiting == source.mirrors.running == 0
    replica.release(Release(lease_id=got.lease_id))


@pytest.mark.slow
async def test_a_stuck_mirror_keeps_its_pages_and_delays_no_stream(
    monkeypatch: pytest.MonkeyPatch,
):
    """Another writer holds the write right: the put waits, the stream does not."""
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 30.0)
    network = MemoryNetwork()
    async with running(network) as source, running(network, name="b") as replica:
        await stuck(source, replica)


async def stuck(source: MicroserveEngine, replica: MicroserveEngine) -> None:
    got = lease(replica, reserve=400)
    (held,) = replica.cache.leases()
    run, taken, seen = source.loop.stepper._runner.run, threading.Event(), threading.Event()
    steps = count()

    def wait_for_the_test(chunks: Any) -> Any:
        assert not source.mirrors.sent or taken.wait(20)
        assert next(steps) != 200 or seen.wait(20)  # before the second half of the stream
        return run(chunks)

    source.loop.stepper._runner.run = wait_for_the_test  # type: ignore[method-assign]
    let_steps_wait_for_mirrors(source, until=taken)
    stream = await source.start_generate(start(PROMPT, max_tokens=400, mirror=to(got)))
    await until(lambda: source.mirrors.sent > 0)
    region = await take_right(replica, held.slot)
    taken.set()
    await until(lambda: len(source.cache._sender._writing) == 1)
    (mirror,) = source.cache._sender._writing
    assert mirror.held and (source.cache.bookkeeping.pages.refs[mirror.held] > 1).all()
    seen.set()
    part = Part()
    for event in await collect(stream):
        part.add(event)
    assert len(part.tokens) == 400
    assert source.running == 0
    source.cache.check_integrity()
    region.release_right(held.slot)
    await at_rest(source)
    assert not source.cache._sender._writing
    replica.release(Release(lease_id=got.lease_id))


async def test_a_writer_stopped_beyond_the_prompt_loses_its_claim(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 30.0)
    source, replica = pair
    whole = await read(source, "whole", max_tokens=50)
    got = lease(replica, reserve=60)
    (held,) = replica.cache.leases()
    first = await read(source, "first", 20, mirror=to(got), max_tokens=50)
    region = await take_right(replica, held.slot)
    landed = replica.cache.lease(held.lease_id).landed
    rest = await read(replica, "rest", output=first.tokens, lease_id=got.lease_id, max_tokens=50)
    assert first + rest == whole + Part()
    assert rest.begin == min(landed, END + len(first.tokens) - 1) > END
    assert replica.cache.page_use().quarantined > 0
    region.release_right(held.slot)
    await at_rest(replica)


# While the generation waits


def let_steps_take(engine: MicroserveEngine, seconds: float) -> None:
    """Have each step take so much longer: a generation outlasts the test on a fast machine."""
    runner = engine.loop.stepper._runner
    run = runner.run

    def slow(chunks: Sequence[Chunk]) -> Any:
        time.sleep(seconds)
        return run(chunks)

    runner.run = slow


async def test_a_waiting_generation_keeps_its_mirror():
    network = MemoryNetwork()
    async with running(network, max_batch=1) as source, running(network, name="b") as replica:
        let_steps_wait_for_mirrors(source)
        let_steps_take(source, 0.002)
        got = lease(replica, reserve=30, lease_ms=500)
        busy = await source.start_generate(start(PROMPT, "busy", max_tokens=900))
        stream = await source.start_generate(start(PROMPT, mirror=to(got), max_tokens=20))
        await asyncio.sleep(1.2)
        assert source.waiting == 1 and len(replica.cache.leases()) == 1
        busy.close()
        part = Part()
        for event in await collect(stream):
            part.add(event)
        assert part.mirror is not None and part.mirror.stopped is None and part.mirror.landed > END
        # No writer is left: the lease expires.
        await until(lambda: not replica.cache.leases())


async def test_a_preempted_generation_continues_with_its_mirror():
    network = MemoryNetwork()
    async with running(network, pages=12) as source, running(network, name="b") as replica:
        let_steps_wait_for_mirrors(source)
        whole = await read(source, "whole", max_tokens=90)
        got = lease(replica, reserve=120)
        older = await source.start_generate(start(PROMPT[::-1], "older", max_tokens=110))
        first, _ = await asyncio.gather(
            read(source, "first", 80, mirror=to(got), max_tokens=90), collect(older)
        )
        assert source.preemptions
        rest = await read(
            replica, "rest", output=first.tokens, lease_id=got.lease_id, max_tokens=90
        )
        assert first + rest == whole + Part()
        assert rest.begin is not None and first.mirror is not None
        assert END < min(first.mirror.landed, END + len(first.tokens) - 1) <= rest.begin


async def test_a_failed_step_ends_the_mirror(pair: Pair):
    source, replica = pair
    got = lease(replica, reserve=100)
    stream = await source.start_generate(start(PROMPT, max_tokens=60, mirror=to(got)))
    events = stream.events()
    await anext(events)

    def fail(chunks: Any) -> Any:
        raise RuntimeError("no")

    source.loop.stepper._runner.run = fail  # type: ignore[method-assign]
    with pytest.raises(MicroserveError):
        async for _ in events:
            pass
    await at_rest(source)
    assert source.mirrors.running == 0
    replica.release(Release(lease_id=got.lease_id))
