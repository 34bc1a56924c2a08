"""The router's view of prefix caches, with scripted engines in virtual time, and with real engines
that evict, die and restart."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from engine_process import EngineProcess
from waiting import until

from engine.protocol import (
    BadRequest,
    PageName,
    PrefixChange,
    Sampling,
    TierCounts,
    page_names,
)
from engine.protocol.config import EngineConfig
from engine.virtual.loop import VirtualLoop
from router.base.errors import EngineUnreachable
from router.base.request import Request
from router.dry_run.dry_run import PROFILE, DryRunFailed, dry_run
from router.engines.backend import Backend
from router.engines.circuit_breaker import CircuitBreaker
from router.engines.prefix_index import LINGER_S, RETRY_S, UNUSED_LEGS, PrefixIndex
from router.simulation.fleet import VirtualCalls, VirtualFleet
from router.strategy.definition import strategy

PAGE = 16


def request(tokens: list[int]) -> Request:
    return Request("id", tokens, Sampling())


class Scripted(VirtualCalls):
    """An engine that reports scripted changes of its prefix cache.

    `streams` counts the open streams, `opened` all streams ever opened.
    """

    def __init__(self) -> None:
        fleet = VirtualFleet(call_s=0.0)
        super().__init__(fleet.add(EngineConfig(engine_id="scripted"), PROFILE).engine, fleet)
        self.says: asyncio.Queue[PrefixChange | None] = asyncio.Queue()
        self.streams = self.opened = 0

    def add(self, *names: PageName) -> None:
        self.says.put_nowait(PrefixChange(added=list(names), removed=[]))

    async def tells(
        self, prefixes: PrefixIndex, backend: Backend, asked: Request, pages: int | None = None
    ) -> None:
        """Report the first `pages` pages of `asked` (None: all) as cached; wait until read."""
        self.add(*asked.page_names(PAGE)[:pages])
        await prefixes.known(backend)

    async def prefixes(self) -> AsyncIterator[PrefixChange]:
        self.streams += 1
        self.opened += 1
        try:
            while (change := await self.says.get()) is not None:
                yield change
        finally:
            self.streams -= 1
        raise EngineUnreachable("the stream was lost")


def virtually(
    test: Callable[[PrefixIndex, Backend, Scripted], Awaitable[None]],
) -> Callable[[], None]:
    """Run a test in virtual time, with one engine that is up."""

    async def run() -> None:
        engine = Scripted()
        backend = Backend(engine, CircuitBreaker(3, 1.0, lambda: 0.0))
        backend.model, backend.status = await engine.model(), "up"
        async with asyncio.TaskGroup() as tasks:
            prefixes = PrefixIndex(tasks)
            try:
                async with asyncio.timeout(1e6):  # virtual: a test that fails must not hang
                    await test(prefixes, backend, engine)
            finally:
                prefixes.close()
        assert engine.streams == 0

    def runs() -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(run())

    runs.__name__ = test.__name__
    return runs


@virtually
async def test_an_engine_is_followed_from_the_first_query(prefixes, backend, engine):
    assert prefixes.expect(backend, request([1] * 64), 64) is prefixes.expect(backend, None, 0)
    await asyncio.sleep(1)
    assert engine.opened == 0
    assert prefixes.cached(backend, request([1] * 64), 64) == 0
    await asyncio.sleep(0)
    assert engine.streams == 1


@virtually
async def test_full_pages_are_counted_up_to_the_end(prefixes, backend, engine):
    tokens = list(range(100))
    names = page_names(tokens, PAGE)
    engine.add(*names[:4])
    asyncio.get_running_loop().call_later(1, engine.add)  # the first report is complete
    await prefixes.known(backend)
    for end, cached in ((0, 0), (15, 0), (16, 16), (63, 48), (64, 64), (100, 64)):
        assert prefixes.cached(backend, request(tokens), end) == cached
    assert prefixes.cached(backend, request([1, *tokens]), 101) == 0
    assert prefixes.cached(backend, request([*tokens[:20], *tokens]), 120) == 16
    engine.says.put_nowait(PrefixChange(added=names[4:5], removed=names[2:4]))
    await asyncio.sleep(0.01)
    assert prefixes.cached(backend, request(tokens), 48) == 32


def changed(names: list[PageName], *, more: bool = False) -> PrefixChange:
    return PrefixChange(added=names, removed=[], more=more)


@virtually
async def test_a_long_change_is_known_after_its_last_frame(prefixes, backend, engine):
    asked = request(list(range(64)))
    names = asked.page_names(PAGE)
    known = asyncio.ensure_future(prefixes.known(backend))
    engine.says.put_nowait(changed(names[:2], more=True))
    await asyncio.sleep(1)
    assert not known.done()
    engine.says.put_nowait(changed(names[2:]))
    await known
    assert prefixes.cached(backend, asked, 64) == 64


@virtually
async def test_an_engine_cannot_have_more_pages_than_pool_and_tiers(prefixes, backend, engine):
    state = await engine.state()
    tier = TierCounts(name="host", total=2, free=0, cached=2, swapped=0, copying=0)
    pages = state.pages.model_copy(update={"total": 3})
    backend.state = state.model_copy(update={"pages": pages, "tiers": [tier]})
    asked = request(list(range(200)))
    names = asked.page_names(PAGE)
    await engine.tells(prefixes, backend, asked, 5)
    assert prefixes.cached(backend, asked, 200) == 5 * PAGE
    engine.says.put_nowait(PrefixChange(added=names[5:6], removed=names[:1]))
    await asyncio.sleep(0.01)
    assert engine.opened == 1
    engine.add(names[0])  # the sixth page
    await asyncio.sleep(RETRY_S / 2)
    assert prefixes.cached(backend, asked, 200) == engine.streams == 0
    await engine.tells(prefixes, backend, asked, 5)  # and then it is asked again
    assert prefixes.cached(backend, asked, 200) == 5 * PAGE


@virtually
async def test_expected_tokens_count_until_their_leg_ends(prefixes, backend, engine):
    asked = request(list(range(100)))
    prefixes.cached(backend, asked, 100)
    with prefixes.expect(backend, asked, 50), prefixes.expect(backend, asked, 33) as other:
        assert prefixes.cached(backend, asked, 100) == 48
        assert prefixes.cached(backend, asked, 100, coming=False) == 0
        other.end()
        assert prefixes.cached(backend, asked, 100) == 48
    assert prefixes.cached(backend, asked, 100) == 0


@virtually
async def test_landed_tokens_count_until_reported_or_a_timeout(prefixes, backend, engine):
    asked = request(list(range(100)))
    engine.add()
    await prefixes.known(backend)
    with prefixes.expect(backend, asked, 50) as coming:
        coming.landed()
    engine.add(asked.page_names(PAGE)[0])
    await asyncio.sleep(LINGER_S / 2)
    assert prefixes.cached(backend, asked, 100) == 48
    await asyncio.sleep(LINGER_S)
    assert prefixes.cached(backend, asked, 100) == 16


@virtually
async def test_a_lost_stream_clears_the_index_and_is_reopened(prefixes, backend, engine):
    asked = request(list(range(100)))
    await engine.tells(prefixes, backend, asked)
    coming = prefixes.expect(backend, asked, 100)
    engine.says.put_nowait(None)
    await asyncio.sleep(RETRY_S / 2)
    assert prefixes.cached(backend, asked, 100) == 0
    await engine.tells(prefixes, backend, asked, 2)
    assert engine.opened == 2
    coming.end()  # this leg belongs to the lost stream
    assert prefixes.cached(backend, asked, 100) == 32


@virtually
async def test_nothing_is_known_of_an_engine_that_is_down(prefixes, backend, engine):
    asked = request(list(range(100)))
    await engine.tells(prefixes, backend, asked)
    backend.go_down("silent")
    await asyncio.sleep(10)
    assert prefixes.cached(backend, asked, 100) == 0
    assert (engine.streams, engine.opened) == (0, 1)
    backend.status = "up"
    await engine.tells(prefixes, backend, asked, 1)
    assert prefixes.cached(backend, asked, 100) == 16


@virtually
async def test_engines_are_followed_while_strategies_query_them(prefixes, backend, engine):
    asked = request(list(range(100)))
    await engine.tells(prefixes, backend, asked)
    for _ in range(3):
        await asyncio.sleep(86400)
        for _ in range(UNUSED_LEGS):
            prefixes.expect(backend, asked, 100).end()
        assert prefixes.cached(backend, asked, 100) == 96
    assert engine.opened == 1
    for _ in range(UNUSED_LEGS + 1):
        prefixes.expect(backend, asked, 100).end()
    await asyncio.sleep(1)
    assert engine.streams == 0
    await engine.tells(prefixes, backend, asked, 1)
    assert prefixes.cached(backend, asked, 100) == 16


@virtually
async def test_a_forgotten_engine_is_not_followed_again(prefixes, backend, engine):
    prefixes.cached(backend, request([1] * 64), 64)
    await asyncio.sleep(0)
    prefixes.forget(backend)
    await asyncio.sleep(1)
    assert (engine.streams, engine.opened) == (0, 1)


# Behind a router


async def test_the_effects_of_calls_count_at_once(route, fake):
    """They count without a report; these engines never send one."""
    sender, receiver = fake("a", role="prefill"), fake("b", role="decode")
    asked = request(list(range(100)))
    async with route(sender, receiver, strategy="prefill_decode") as r:
        prefixes = r.server.router.registry.prefixes
        a, b = r.server.router.registry
        assert (prefixes.cached(a, asked, 100), prefixes.cached(b, asked, 100)) == (0, 0)
        await prefixes.known(a)
        await prefixes.known(b)
        sender.send_gate = asyncio.Event()
        asking = asyncio.create_task(r.post("/v1/completions", {"prompt": asked.tokens}))
        await sender.until(lambda: sender.named("remote_send"))
        assert (prefixes.cached(a, asked, 100), prefixes.cached(b, asked, 100)) == (96, 96)
        sender.send_gate.set()
        await asking
        assert (prefixes.cached(a, asked, 100), prefixes.cached(b, asked, 100)) == (96, 96)

        sender.refuse["remote_send"] = [BadRequest("no")]
        other = request([7] * 100)
        await r.post("/v1/completions", {"prompt": other.tokens})
        assert (prefixes.cached(a, other, 100), prefixes.cached(b, other, 100)) == (0, 0)
        receiver.error_after = [(0, BadRequest("no"))]
        await r.post("/v1/completions", {"prompt": other.tokens})
        assert (prefixes.cached(a, other, 100), prefixes.cached(b, other, 100)) == (96, 0)


async def test_a_removed_engine_is_no_longer_followed(route, fake):
    engines = [fake("a"), fake("b")]
    async with route(*engines, strategy="cache_aware") as r:
        await r.post("/v1/completions", {"prompt": [1] * 40})
        await until(lambda: [engine.followers for engine in engines] == [1, 1])
        async with r.http.delete(r.server.url + "/admin/engines/a") as reply:
            assert reply.status == 200
        await until(lambda: [engine.followers for engine in engines] == [0, 1])


# Simulated engines


@pytest.mark.processes
def test_a_dry_run_includes_warm_caches():
    @strategy
    async def mine(request, cluster):
        engine = cluster.engines.longest_prefix(request)
        if engine.cached(request, coming=False) == 96:
            raise LookupError("warm")
        async for chunk in engine.start_generate(request):
            yield chunk

    with pytest.raises(DryRunFailed, match=r"LookupError: warm .* 100 tokens, warm"):
        dry_run(mine.bind({}))


# Real engines


def matched(engine: EngineProcess, prompt: list[int], end: int) -> int:
    """Return `match_len` of a lease, which is released at once."""
    reply = engine.post("prep_recv", request_id=f"look-{random.random()}", prompt=prompt, end=end)
    assert reply.status_code == 200, reply.text
    lease = reply.json()
    engine.post("release", lease_id=lease["lease_id"]).raise_for_status()
    return lease["match_len"]


def agrees(
    prefixes: PrefixIndex, backend: Backend, engine: EngineProcess, prompt: list[int]
) -> bool:
    """Return whether router and engine agree on a prompt.

    The lease covers at most one page that is not cached, so that the query evicts at most one.
    """
    cached = prefixes.cached(backend, request(prompt), len(prompt))
    return matched(engine, prompt, min(len(prompt), cached + PAGE)) == cached


@asynccontextmanager
async def engines(count: int, *flags: str) -> AsyncIterator[list[EngineProcess]]:
    running = [EngineProcess(*flags, "--engine-id", f"e{i}") for i in range(count)]
    try:
        yield running
    finally:
        for engine in running:
            engine.kill()


@pytest.mark.processes
@pytest.mark.slow
async def test_the_index_follows_evictions_deaths_and_restarts(routed_to):
    """Random prompts with common prefixes, in pools that hold a part of them.

    Then one engine is killed and restarted on its port, and caches some of them again. The other is
    stopped for a while; the router then fetches its cache anew, as it may be another process.
    """
    draw = random.Random(7)
    roots = [[draw.randrange(500) for _ in range(200)] for _ in range(4)]

    def prompt() -> list[int]:
        root = draw.choice(roots)
        return root[: draw.randrange(201)] + [draw.randrange(500) for _ in range(40)]

    async with (
        engines(2, "--pool-pages", "40") as processes,
        routed_to(
            [engine.url for engine in processes], strategy="cache_aware", health_timeout_s=1.0
        ) as r,
    ):
        registry = r.server.router.registry
        prefixes = registry.prefixes

        async def ask(prompts: list[list[int]]) -> None:
            async with asyncio.TaskGroup() as tasks:
                for each in prompts:
                    body = {"prompt": each, "max_tokens": draw.randrange(1, 24)}
                    tasks.create_task(r.post("/v1/completions", body))

        async def right(prompts: list[list[int]]) -> None:
            for engine, backend in zip(processes, registry, strict=True):
                for each in prompts:
                    await until(lambda m=backend, e=engine, p=each: agrees(prefixes, m, e, p))

        seen = [prompt() for _ in range(16)]
        for at in range(0, len(seen), 4):
            await ask(seen[at : at + 4])
        await right(seen)
        known = [prefixes.cached(m, request(p), len(p)) for m in registry for p in seen]
        assert 0 < sum(map(bool, known)) < len(known)

        killed, backend = processes[0], next(iter(registry))
        assert any(prefixes.cached(backend, request(p), len(p)) for p in seen)
        killed.kill()
        await until(lambda: backend.status == "down")
        await until(lambda: not any(prefixes.cached(backend, request(p), len(p)) for p in seen))
        processes[0] = EngineProcess("--pool-pages", "40", "--engine-id", "e0", port=killed.port)
        await until(lambda: backend.status == "up")
        await ask([prompt() for _ in range(6)])
        await right(seen)

        stopped, backend = processes[1], list(registry)[1]
        stopped.signal(signal.SIGSTOP)
        await until(lambda: backend.status == "down")
        await until(lambda: not any(prefixes.cached(backend, request(p), len(p)) for p in seen))
        stopped.signal(signal.SIGCONT)
        await until(lambda: backend.status == "up")
        await prefixes.known(backend)
        await right(seen)


@pytest.mark.processes
async def test_concurrent_requests_with_a_common_prefix_share_its_prefill(route_real):
    """The first of them computes the common prefix for all."""
    salt = random.Random(11)
    common = [salt.randrange(500) for _ in range(1500)]
    prompts = [[*common, *(salt.randrange(500) for _ in range(30))] for _ in range(3)]
    async with route_real(strategy="cache_aware") as r:
        await r.post("/v1/completions", {"prompt": [1], "max_tokens": 1})  # engines are followed
        async with asyncio.TaskGroup() as tasks:
            for number, prompt in enumerate(prompts):
                headers = {"X-Request-Id": f"alike-{number}"}
                body = {"prompt": prompt, "max_tokens": 1}
                tasks.create_task(r.post("/v1/completions", body, headers=headers))
        legs = [(await r.receipt(f"alike-{number}"))["legs"][0] for number in range(3)]
    assert len({leg["engine"] for leg in legs}) == 1
    computed = sorted(leg["computed_tokens"] for leg in legs)
    assert computed[-1] == 1530
    assert sum(computed[:2]) < 1530, computed
