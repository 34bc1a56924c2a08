"""The calls of virtual engines: leases, sends, mirrors, and death."""

from __future__ import annotations

import asyncio
import gc

import pytest
from virtual_engines import (
    LAYERS,
    PROFILE,
    STEP,
    TOKEN_BYTES,
    Engines,
    events,
    generate,
    receive,
    send,
    tokens_of,
)
from virtual_time import in_virtual_time

from engine.latency import StepWork
from engine.protocol import (
    BadAddress,
    BadRange,
    BadRequest,
    DuplicateRequest,
    Extend,
    LeaseExpired,
    Mirror,
    MirrorGeneration,
    NoCapacity,
    PeerUnreachable,
    Pin,
    Release,
    UnknownLease,
    page_names,
)
from engine.virtual import output_tokens
from kvcache.types import LeaseId

PROMPT = [1 + i % 290 for i in range(401)]
PUT_S = 400 * TOKEN_BYTES / PROFILE.put.bandwidth  # of 400 tokens, without the layers' own time


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_disaggregation_gives_the_tokens_of_one_engine():
    engines = Engines("p", "d")
    lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
    assert (lease.match_len, lease.end) == (0, 400)
    waiting = asyncio.ensure_future(
        engines["d"].start_generate(generate("x", PROMPT, 20, begin=400, lease_id=lease.lease_id))
    )
    sent = await engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
    assert (sent.sent_tokens, sent.computed_tokens, sent.cached_tokens) == (400, 400, 0)
    assert sent.bytes == 400 * TOKEN_BYTES
    read = await events(await waiting)
    assert read[0].begin == 400
    assert [token for event in read for token in event.token_ids] == output_tokens(PROMPT, 20)
    again = engines["d"].prep_recv(receive("y", PROMPT, 400))
    assert again.match_len == 400  # what was sent is cached where it was used
    assert engines["d"].busy == ["a lease of 400 tokens on d"]
    engines["d"].release(Release(request_id="y"))
    await engines.rest()


@in_virtual_time
async def test_a_put_overlaps_with_the_computation_layer_by_layer():
    """It ends with the put of the last layer, or as late as all puts in a row after the first."""
    engines = Engines("p", "d")
    lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
    sent = await engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
    computed = STEP.seconds(StepWork(400, 160_000))
    layer_s = PUT_S / LAYERS + PROFILE.put.layer_s
    ends = max(computed, computed / LAYERS + (LAYERS - 1) * layer_s) + layer_s
    assert now() == pytest.approx(ends)
    assert sent.ms == pytest.approx(1000 * ends)
    engines["d"].release(Release(request_id="x"))
    cached = engines["d"].prep_recv(receive("y", PROMPT, 400))
    began = now()
    sent = await engines["p"].remote_send(send("y", PROMPT, 0, 400, cached.kv_addr))
    assert (sent.cached_tokens, sent.computed_tokens) == (400, 0)
    assert now() - began == pytest.approx(PUT_S + LAYERS * PROFILE.put.layer_s)
    engines["d"].release(Release(request_id="y"))
    await engines.rest()


@pytest.mark.parametrize("most_at_once", [1, 64])
def test_a_send_ends_where_its_put_drains_also_during_a_step(most_at_once):
    """The step, or the row of equal steps, that is under way then changes none of its times."""

    @in_virtual_time
    async def run() -> None:
        engines = Engines("p", "d", most_at_once=most_at_once)
        lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
        sending = asyncio.ensure_future(
            engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
        )
        computed = STEP.seconds(StepWork(400, 160_000))
        await asyncio.sleep(computed / 2)
        other = await engines["p"].start_generate(generate("y", [7] * 10, 40, stream_tokens=40))
        sent = await sending
        layer_s = PUT_S / LAYERS + PROFILE.put.layer_s
        drained = max(computed, computed / LAYERS + (LAYERS - 1) * layer_s) + layer_s
        assert now() == pytest.approx(drained)
        assert (sent.ms, sent.put_ms) == (
            pytest.approx(1000 * drained), pytest.approx(1000 * (drained - computed)),
        )  # fmt: skip
        # A step is under way, and the pages are cached or in use by the other request alone.
        began, step_s = engines["p"].steps._row.began, STEP.seconds(StepWork(0, 0, 1, 24))
        assert began + 0.1 * step_s < now() < began + 0.9 * step_s
        use = engines["p"].cache.bookkeeping.page_use
        assert (use.cached, use.active) == (25, 2)
        engines["p"].cache.check_integrity()
        started = await engines["d"].start_generate(
            generate("x", PROMPT, 1, begin=400, lease_id=lease.lease_id)
        )
        assert now() == pytest.approx(drained)
        assert await tokens_of(started) == output_tokens(PROMPT, 1)
        await events(other)
        decodes = sum(STEP.seconds(StepWork(0, 0, 1, 10 + i)) for i in range(39))
        assert now() == pytest.approx(computed + STEP.seconds(StepWork(10, 100)) + decodes)
        await engines.rest()

    run()


@in_virtual_time
async def test_sends_to_one_engine_share_its_link():
    engines = Engines("a", "b", "d")
    took = []

    async def transfer(name: str, prompt: list[int]) -> None:
        lease = engines["d"].prep_recv(receive(name, prompt, 400))
        began = now()
        await engines[name].remote_send(send(name, prompt, 0, 400, lease.kv_addr))
        took.append(now() - began)
        engines["d"].release(Release(lease_id=lease.lease_id))

    for names in (["a"], ["a", "b"]):
        prompts = {name: [ord(name)] * 401 for name in names}
        for name, prompt in prompts.items():  # computed and cached before
            await tokens_of(await engines[name].start_generate(generate(f"{name}0", prompt, 1)))
        await asyncio.gather(*(transfer(name, prompt) for name, prompt in prompts.items()))
    assert took[1:] == [pytest.approx(took[0] + PUT_S)] * 2
    await engines.rest()


@in_virtual_time
async def test_an_unused_lease_expires_and_its_waiter_hears_of_it():
    engines = Engines("p", "d", lease_ms=2000)
    lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
    with pytest.raises(LeaseExpired):
        await engines["d"].start_generate(
            generate("x", PROMPT, 20, begin=400, lease_id=lease.lease_id)
        )
    assert 2 < now() < 3
    assert engines["d"].steps.stepper.stats.expired_leases == 1
    with pytest.raises(LeaseExpired):
        await engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
    await engines.rest()


@in_virtual_time
async def test_a_cancelled_send_stops_and_leaves_nothing():
    engines = Engines("p", "d")
    lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
    sending = asyncio.ensure_future(
        engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
    )
    await asyncio.sleep(STEP.seconds(StepWork(400, 160_000)) + PUT_S / LAYERS / 2)
    assert engines["p"].busy == ["a send from p"]
    sending.cancel()
    await asyncio.wait([sending])
    engines["d"].release(Release(request_id="x"))
    await engines.rest()


@in_virtual_time
async def test_a_mirror_follows_the_generation_and_another_engine_continues_from_it():
    engines = Engines("a", "b")
    lease = engines["b"].prep_recv(receive("m", PROMPT, 401, reserve=16))
    mirror = Mirror(kv_addr=lease.kv_addr, every=4)
    stream = await engines["a"].start_generate(
        generate("x", PROMPT, 300, mirror=mirror, stream_tokens=1)
    )
    landed, read = 0, []
    while len(read) < 200:  # more than the reserve: the mirror asks for room
        event = await stream.next()
        read += event.token_ids
        if event.mirror is not None:
            assert event.mirror.stopped is None
            landed = event.mirror.landed
    assert 580 < landed <= 601
    engines["a"].die()
    with pytest.raises(PeerUnreachable):
        await events(stream)
    rest = await engines["b"].start_generate(
        generate("x", PROMPT, 300, output=read, lease_id=lease.lease_id)
    )
    later = await events(rest)
    assert later[0].begin is not None and later[0].begin >= landed - 1
    tokens = read + [token for event in later for token in event.token_ids]
    assert tokens == output_tokens(PROMPT, 300)
    await engines.rest()


@in_virtual_time
async def test_a_running_generation_can_be_mirrored_later():
    engines = Engines("a", "b")
    stream = await engines["a"].start_generate(generate("x", PROMPT, 60, stream_tokens=60))
    await stream.next()
    lease = engines["b"].prep_recv(receive("m", PROMPT, 401, reserve=100))
    engines["a"].mirror(MirrorGeneration(request_id="x", kv_addr=lease.kv_addr, every=1))
    last = (await events(stream))[-1]
    assert last.mirror is not None and last.mirror.landed > 430
    with pytest.raises(BadRequest):
        engines["a"].mirror(MirrorGeneration(request_id="x", kv_addr=lease.kv_addr, every=1))
    engines["b"].release(Release(request_id="m"))
    await engines.rest()


class DiesWhenExtended(Engines):
    """An engine that grants a mirror more room, and dies."""

    async def _extend(self, url: str, call: Extend) -> str:
        kv_addr = await super()._extend(url, call)
        self[url.removeprefix("http://").removesuffix(".virtual")].die()
        return kv_addr


def test_a_mirror_whose_peer_dies_while_it_gets_more_room_stops_alone():
    problems = list[str]()

    @in_virtual_time
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context["message"]))
        engines = DiesWhenExtended("a", "b")
        lease = engines["b"].prep_recv(receive("m", PROMPT, 401, reserve=16))
        mirror = Mirror(kv_addr=lease.kv_addr, every=4)
        stream = await engines["a"].start_generate(generate("x", PROMPT, 300, mirror=mirror))
        read = await events(stream)
        tokens = [token for event in read for token in event.token_ids]
        assert tokens == output_tokens(PROMPT, 300)
        assert read[-1].mirror is not None and read[-1].mirror.stopped == "peer_unreachable"
        await engines.rest()

    run()
    gc.collect()
    assert problems == []  # such as an exception that nobody has read


@in_virtual_time
async def test_what_waits_for_a_dead_engine_fails_at_once():
    engines = Engines("p", "d")
    lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
    waiting = asyncio.ensure_future(
        engines["d"].start_generate(generate("x", PROMPT, 20, begin=400, lease_id=lease.lease_id))
    )
    sending = asyncio.ensure_future(
        engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
    )
    await asyncio.sleep(0.05)
    engines["d"].die()
    with pytest.raises(PeerUnreachable):
        await waiting
    with pytest.raises(PeerUnreachable):
        await sending
    assert now() < 2
    with pytest.raises(PeerUnreachable):
        await engines["p"].remote_send(send("y", PROMPT, 0, 400, lease.kv_addr))
    await engines.rest()


@in_virtual_time
async def test_a_send_whose_engine_dies_while_its_put_drains_fails():
    engines = Engines("p", "d")
    lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
    sending = asyncio.ensure_future(
        engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
    )
    await asyncio.sleep(STEP.seconds(StepWork(400, 160_000)) + PUT_S / LAYERS / 2)
    assert engines["p"].steps.stepper._closing
    engines["p"].die()
    with pytest.raises(PeerUnreachable):
        await sending
    assert engines["p"].state().prefix_tokens == 0  # published are only sends that have ended
    assert engines["d"].cache.lease(LeaseId(lease.lease_id)).landed == 0
    engines["d"].release(Release(request_id="x"))
    await engines.rest()


@pytest.mark.parametrize("most_at_once", [1, 64])
def test_a_stream_of_an_engine_that_dies_has_every_token_computed_before(most_at_once: int):
    decodes = 37
    dies_s = STEP.seconds(StepWork(401, 401**2)) + 1e-3
    dies_s += sum(STEP.seconds(StepWork(0, 0, 1, 401 + i)) for i in range(decodes))
    received: list[int] = []

    @in_virtual_time
    async def run() -> None:
        engine = Engines("a", most_at_once=most_at_once)["a"]
        stream = await engine.start_generate(generate("r", PROMPT, 100, stream_tokens=16))
        asyncio.get_running_loop().call_at(dies_s, engine.die)
        while True:
            received.extend((await stream.next()).token_ids)

    with pytest.raises(PeerUnreachable):
        run()
    assert received == output_tokens(PROMPT, 1 + decodes)


@in_virtual_time
async def test_bad_calls_are_refused_as_by_a_real_engine():
    engines = Engines("p", "d", pool_pages=100)
    p, d = engines["p"], engines["d"]
    lease = d.prep_recv(receive("x", PROMPT, 400))
    for wrong, call in (
        (BadRequest, lambda: d.prep_recv(receive("y", [], 0))),
        (BadRequest, lambda: d.prep_recv(receive("y", [5000], 1))),
        (BadRange, lambda: d.prep_recv(receive("y", PROMPT, 402))),
        (DuplicateRequest, lambda: d.prep_recv(receive("x", PROMPT, 400))),
        (NoCapacity, lambda: d.prep_recv(receive("y", [9] * 600, 600))),
        (UnknownLease, lambda: d.commit("none")),
    ):
        with pytest.raises(wrong):
            call()
    for wrong, calling in (
        (BadRange, p.remote_send(send("x", PROMPT, 16, 400, lease.kv_addr))),
        (BadRange, p.remote_send(send("x", PROMPT, 8, 8, lease.kv_addr))),
        (BadAddress, p.remote_send(send("x", [3, *PROMPT[1:]], 0, 400, lease.kv_addr))),
        (BadAddress, p.remote_send(send("x", PROMPT, 0, 400, "AAAA"))),
        (BadRange, p.start_generate(generate("x", PROMPT, 5, begin=401))),
        (BadRequest, p.start_generate(generate("x", PROMPT, 5000))),
        (UnknownLease, p.start_generate(generate("x", PROMPT, 5, lease_id="none"))),
    ):
        with pytest.raises(wrong):
            await calling
    d.release(Release(request_id="x"))
    d.release(Release(lease_id=lease.lease_id))
    await engines.rest()


@in_virtual_time
async def test_a_prompt_without_room_beside_pinned_prefixes_is_refused_at_once():
    engines = Engines("a", pool_pages=16)
    a, prefix = engines["a"], PROMPT[: 7 * 16]
    await tokens_of(await a.start_generate(generate("x", [*prefix, 1], 1)))
    assert a.pin(Pin(prompt=prefix)) == len(prefix)
    other = [300 + i for i in range(150)]  # ten pages; nine are left
    with pytest.raises(NoCapacity, match="pin 7"):
        await a.start_generate(generate("y", other, 1))
    # 13 pages; it shares seven
    assert (
        len(await tokens_of(await a.start_generate(generate("z", [*prefix, *other[:90]], 1)))) == 1
    )
    a.unpin(Pin(prompt=prefix))
    assert len(await tokens_of(await a.start_generate(generate("y", other, 1)))) == 1
    await engines.rest()


@in_virtual_time
async def test_commit_pins_and_the_feed_of_prefixes():
    engines = Engines("p", "d")
    names = page_names(PROMPT, 16)
    feed = engines["d"].prefixes()
    assert (await anext(feed)).added == []
    lease = engines["d"].prep_recv(receive("x", PROMPT, 400))
    await engines["p"].remote_send(send("x", PROMPT, 0, 400, lease.kv_addr))
    assert engines["d"].commit(lease.lease_id) == 400
    assert (await anext(feed)).added == names
    assert engines["d"].pin(Pin(prompt=PROMPT)) == 400
    assert engines["d"].state().pages.pinned == 25
    assert engines["d"].unpin(Pin(prompt=PROMPT)) == 400
    await feed.aclose()
    await engines.rest()


@in_virtual_time
async def test_choices_share_the_pages_of_their_prompt():
    engines = Engines("a")
    streams = [
        await engines["a"].start_generate(generate("0", PROMPT, 30, forks=2)),
        await engines["a"].start_generate(generate("1", PROMPT, 30, fork_of="0", choice=1)),
        await engines["a"].start_generate(generate("2", PROMPT, 30, fork_of="0", choice=2)),
    ]
    answers = await asyncio.gather(*map(tokens_of, streams))
    assert answers == [output_tokens(PROMPT, 30, choice=choice) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert engines["a"].steps.stepper.stats.prompt_tokens < 410  # computed once
    await asyncio.sleep(30)
    await engines.rest()
