"""Random calls at random times to virtual engines: no leaks, and no effect of skipping steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from virtual_engines import Engines, events, generate, receive, send
from virtual_time import in_virtual_time

from engine.protocol import MicroserveError, Mirror, MirrorGeneration, Pin, Release
from engine.virtual import VirtualEngine, VirtualStream, output_tokens

REQUESTS = 60
LEASE_MS = 3000
FAMILIES = [[1 + (7 * i + 31 * family) % 290 for i in range(320)] for family in range(4)]
LONG = 1000  # tokens in an event: the first and the last event of a stream have their step's time


class Request:
    """One client with a random plan, which depends on nothing that the engines do.

    `notes` has what it saw: what, when, and values that must not depend on how steps are taken.
    """

    def __init__(self, engines: Engines, name: str, source: random.Random) -> None:
        self.engines = engines
        self.name = name
        self.source = source
        self.notes: list[tuple[str, float, Any]] = []
        self.at = source.uniform(0.0, 12.0)
        self.given_up_s = source.uniform(0.0, 3.0) if source.random() < 0.4 else 60.0
        family = source.choice(FAMILIES)
        own = [source.randrange(10, 290) for _ in range(source.randrange(1, 200))]
        self.prompt = family[: source.randrange(0, 320)] + own
        self.tokens = source.randrange(1, 120)
        one, other = source.sample(list(engines.all.values()), 2)
        self.receiver, self.sender = one, other
        self.plan: Callable[[], Awaitable[None]] = source.choice(
            [self.alone, self.divided, self.divided, self.copied, self.mirrored, self.pinned]
        )

    def note(self, what: str, value: Any = None) -> None:
        self.notes.append((what, asyncio.get_running_loop().time(), value))

    async def run(self) -> None:
        await asyncio.sleep(self.at)
        try:
            async with asyncio.timeout(self.given_up_s):
                await self.plan()
        except TimeoutError:
            self.note("given up")
        except MicroserveError as error:
            self.note("failed", type(error).__name__)

    async def alone(self) -> None:
        await self.read(await self.receiver.start_generate(self.generation()))

    async def divided(self) -> None:
        """Prefill on the sender, in one or two sends; the generation may wait for them."""
        end = self.source.randrange(0, len(self.prompt))
        cut = self.source.randrange(0, len(self.prompt))
        early, lease_s = self.source.random() < 0.5, self.source.uniform(0.0, 0.3)
        lease = self.receiver.prep_recv(receive(self.name, self.prompt, end))
        self.note("leased", lease.match_len)
        await asyncio.sleep(lease_s)
        call = self.generation(begin=end, lease_id=lease.lease_id)

        async def sends() -> None:
            for begin, to in ((lease.match_len, cut), (max(cut, lease.match_len), end)):
                if begin < to <= end:
                    await self.put(begin, to, lease.kv_addr)

        if early:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_alone(self.read_started(call)))
                tasks.create_task(_alone(sends()))
        else:
            await sends()
            await self.read_started(call)

    async def copied(self) -> None:
        """Copy a prefix and commit, release or forget it."""
        end = self.source.randrange(1, len(self.prompt) + 1)
        after_s, what = self.source.uniform(0.0, 0.5), self.source.randrange(4)
        lease = self.receiver.prep_recv(receive(self.name, self.prompt, end))
        self.note("leased", lease.match_len)
        if what == 3:
            await asyncio.sleep(after_s)
        if what and lease.match_len < end:
            await self.put(lease.match_len, end, lease.kv_addr)
        if what == 1:
            self.note("committed", self.receiver.commit(lease.lease_id))
        elif what == 2:
            await asyncio.sleep(after_s)
            self.receiver.release(Release(request_id=self.name))

    async def mirrored(self) -> None:
        """Mirror from the start or from a later time on; then continue from the replica."""
        every, first_s = self.source.choice([1, 4, 16]), self.source.uniform(0.0, 0.6)
        later, killed = self.source.random() < 0.5, self.source.random() < 0.3
        reserve = self.source.choice([0, 16, 200])
        lease = self.sender.prep_recv(
            receive(self.name, self.prompt, len(self.prompt), reserve=reserve)
        )
        mirror = Mirror(kv_addr=lease.kv_addr, every=every)
        stream = await self.receiver.start_generate(
            self.generation() if later else self.generation(mirror=mirror)
        )
        reading = asyncio.ensure_future(self.read(stream))
        try:
            if later:
                await asyncio.sleep(first_s)
                if self.receiver.alive:
                    self.receiver.mirror(
                        MirrorGeneration(request_id=self.name, kv_addr=lease.kv_addr, every=every)
                    )
            if killed:
                await asyncio.sleep(first_s)
                self.receiver.release(Release(request_id=self.name))
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        if self.sender.alive:
            call = generate(f"{self.name}+", self.prompt, self.tokens, lease_id=lease.lease_id)
            await self.read(await self.sender.start_generate(call))

    async def pinned(self) -> None:
        pause_s = self.source.uniform(0.0, 4.0)
        self.note("pinned", self.receiver.pin(Pin(prompt=self.prompt)))
        try:
            await asyncio.sleep(pause_s)
        finally:
            if self.receiver.alive:
                self.receiver.unpin(Pin(prompt=self.prompt))

    def generation(self, **fields: Any) -> Any:
        return generate(self.name, self.prompt, self.tokens, stream_tokens=LONG, **fields)

    async def put(self, begin: int, end: int, kv_addr: str) -> None:
        if self.sender.alive:
            sent = await self.sender.remote_send(send(self.name, self.prompt, begin, end, kv_addr))
            self.note("sent", (sent.sent_tokens, sent.cached_tokens, sent.computed_tokens))

    async def read_started(self, call: Any) -> None:
        if self.receiver.alive:
            await self.read(await self.receiver.start_generate(call))

    async def read(self, stream: VirtualStream) -> None:
        """Read a stream to its end; check its tokens."""
        try:
            first = await stream.next()
            self.note("first", first.begin)
            rest = [] if first.finish_reason else await events(stream)
            last = rest[-1] if rest else first
            assert last.usage is not None
            self.note("last", (last.usage.completion_tokens, last.usage.cached_tokens))
            tokens = [token for event in [first, *rest] for token in event.token_ids]
            assert tokens == output_tokens(self.prompt, self.tokens)
        finally:
            stream.close()


async def _alone(work: Awaitable[None]) -> None:
    """Do one of two works that go on beside each other; the failure of one leaves the other."""
    with suppress(MicroserveError):
        await work


def history(seed: int, most_at_once: int, **options: Any) -> dict[str, list[Any]]:
    """Run one history to its end; return each request's notes."""
    notes: dict[str, list[Any]] = {}

    @in_virtual_time
    async def run() -> None:
        engines = Engines(
            "a", "b", "c", most_at_once=most_at_once, lease_ms=LEASE_MS, token_budget=256,
            **options,
        )  # fmt: skip
        source = random.Random(seed)
        requests = [
            Request(engines, f"r{number}", random.Random(f"{seed}/{number}"))
            for number in range(REQUESTS)
        ]
        dies: tuple[VirtualEngine, float] | None = None
        if seed % 2:
            dies = source.choice(list(engines.all.values())), source.uniform(2.0, 12.0)

        async def die(engine: VirtualEngine, at: float) -> None:
            await asyncio.sleep(at)
            engine.die()

        async with asyncio.TaskGroup() as tasks:
            if dies is not None:
                tasks.create_task(die(*dies))
            for request in requests:
                tasks.create_task(request.run())
        await asyncio.sleep(2 * LEASE_MS / 1000)
        await engines.rest()
        for engine in engines.all.values():
            check_nothing_is_kept(engine)
        notes.update((request.name, request.notes) for request in requests)

    run()
    return notes


def check_nothing_is_kept(engine: VirtualEngine) -> None:
    """Check what `busy` and the pages do not show, also of a dead engine."""
    assert not engine._streams and not engine._starting and not engine._arrivals._waiters
    assert not engine._generations and not engine._sends
    assert not engine._mirrors._tasks and not engine.steps._states
    assert not engine._endpoint.link.incoming and not engine._endpoint.link.outgoing


OPTIONS = [{}, {"pool_pages": 130}, {"max_batch": 4, "decode_slowdown": 1.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.thorough) if n > 3 else n for n in range(40)]
)
def test_nothing_leaks_and_skipping_over_steps_changes_nothing(seed, options):
    stepped, skipped = history(seed, 1, **options), history(seed, 64, **options)
    for name, notes in stepped.items():
        near = [(what, pytest.approx(at, abs=1e-6), value) for what, at, value in notes]
        assert skipped[name] == near, name
    seen = {what for notes in stepped.values() for what, _, _ in notes}
    assert seen >= {"first", "last", "leased", "sent", "given up", "failed", "pinned"}
