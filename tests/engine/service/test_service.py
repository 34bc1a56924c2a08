"""The engine's calls in this process; two engines share the memory transport."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import pytest
from engine_helpers import (
    at_rest,
    collect,
    generate,
    prep,
    running,
    sending,
    start,
)
from waiting import until

from engine.protocol import (
    BadAddress,
    BadRange,
    BadRequest,
    DuplicateRequest,
    Internal,
    LeaseExpired,
    MicroserveError,
    NoCapacity,
    Release,
)
from engine.service.engine import MicroserveEngine
from kvcache.transport import MemoryNetwork

PROMPT = [(11 * n) % 250 for n in range(70)]
END = len(PROMPT) - 1


@pytest.fixture
async def engine() -> AsyncIterator[MicroserveEngine]:
    async with running() as engine:
        yield engine


@pytest.fixture
async def pair() -> AsyncIterator[tuple[MicroserveEngine, MicroserveEngine]]:
    network = MemoryNetwork()
    async with running(network, name="p") as prefill, running(network, name="d") as decode:
        yield prefill, decode


Pair = tuple[MicroserveEngine, MicroserveEngine]


@pytest.mark.parametrize("share", [0, 1, 17, 40, END])
async def test_a_prompt_divided_between_engines_gives_the_same_tokens(pair: Pair, share: int):
    """1P1D and its balanced variants: the prefill engine computes the first `share` tokens."""
    prefill, decode = pair
    async with running() as alone:
        expected = await generate(alone, PROMPT, max_tokens=20)
    got = decode.prep_recv(prep(PROMPT, END))
    if share:
        reply = await prefill.remote_send(sending(PROMPT, got.match_len, share, got.kv_addr))
        assert reply.sent_tokens == reply.computed_tokens == share
    tokens = await generate(decode, PROMPT, max_tokens=20, begin=share, lease_id=got.lease_id)
    assert tokens == expected
    await at_rest(decode)


async def test_a_generation_waits_for_its_kv(pair: Pair):
    prefill, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    waiting = asyncio.create_task(
        decode.start_generate(start(PROMPT, begin=END, lease_id=got.lease_id))
    )
    await asyncio.sleep(0)
    assert decode.waiting == 1
    with pytest.raises(DuplicateRequest):
        await decode.start_generate(start(PROMPT))
    await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr))
    events = await collect(await waiting)
    assert events[0].begin == END
    assert decode.waiting == 0


async def test_a_lease_of_the_whole_prompt_can_start(pair: Pair):
    prefill, decode = pair
    expected = await generate(prefill, PROMPT, "alone")
    got = decode.prep_recv(prep(PROMPT, len(PROMPT)))
    await prefill.remote_send(sending(PROMPT, 0, len(PROMPT), got.kv_addr))
    assert await generate(decode, PROMPT, lease_id=got.lease_id) == expected


async def test_a_match_of_the_whole_prompt_can_start(engine: MicroserveEngine):
    expected = await generate(engine, PROMPT[:64])
    got = engine.prep_recv(prep(PROMPT[:64], 64))
    assert got.match_len == 64
    tokens = await generate(engine, PROMPT[:64], begin=63, lease_id=got.lease_id)
    assert tokens == expected


@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_a_stream_resumes_with_its_output(engine: MicroserveEngine, cut: int):
    options = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "frequency_penalty": 0.5}
    whole = await generate(engine, PROMPT, **options)
    async with running() as other:
        rest = await generate(other, PROMPT, output=whole[:cut], **options)
    assert whole[:cut] + rest == whole


async def test_context_migration(pair: Pair):
    source, target = pair
    await generate(source, PROMPT)
    got = target.prep_recv(prep(PROMPT, 64))
    reply = await source.remote_send(sending(PROMPT, 0, 64, got.kv_addr))
    assert (reply.sent_tokens, reply.cached_tokens, reply.computed_tokens) == (64, 64, 0)
    assert target.commit(got.lease_id) == 64
    events = await collect(await target.start_generate(start(PROMPT)))
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == 64


async def test_usage_and_finish_reasons(engine: MicroserveEngine):
    events = await collect(await engine.start_generate(start(PROMPT, max_tokens=5)))
    last = events[-1]
    assert last.finish_reason == "length" and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (70, 5)
    assert events[0].begin == 0
    assert all(event.begin is None and event.finish_reason is None for event in events[1:-1])
    tokens = [token for event in events for token in event.token_ids]
    stop = await collect(await engine.start_generate(start(PROMPT, stop_token_ids=[tokens[2]])))
    assert (stop[-1].finish_reason, stop[-1].stop_reason) == ("stop", tokens[2])


async def test_a_stop_string_ends_the_generation(engine: MicroserveEngine):
    whole = await collect(await engine.start_generate(start(PROMPT, max_tokens=12)))
    text = "".join(event.text for event in whole)
    stop = text[6:9]
    events = await collect(await engine.start_generate(start(PROMPT, max_tokens=900, stop=[stop])))
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
    await at_rest(engine)


async def test_logprobs_come_with_their_tokens(engine: MicroserveEngine):
    events = await collect(await engine.start_generate(start(PROMPT, logprobs=2)))
    for event in events:
        assert event.logprobs is not None
        assert [item.token_id for item in event.logprobs] == event.token_ids
        assert all(len(item.top) == 2 for item in event.logprobs)
        assert all(item.logprob == item.top[0].logprob for item in event.logprobs)  # greedy


# Bad calls; the engine works after each of them


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"prompt": []}, BadRequest, "prompt"),
        ({"prompt": [512]}, BadRequest, "prompt"),
        ({"prompt": [1] * 8193}, BadRequest, "prompt"),
        ({"max_tokens": 8192}, BadRequest, "max_tokens"),
        ({"max_tokens": 1000}, BadRequest, "max_tokens"),  # more than the pool
        ({"begin": 70}, BadRange, "begin"),
        ({"begin": 71}, BadRange, "begin"),
        ({"begin": -71}, BadRange, "begin"),
        ({"output": [512]}, BadRequest, "output"),
        ({"output": [1] * 8}, BadRequest, "output"),
        ({"stop_token_ids": [512]}, BadRequest, "stop_token_ids"),
        ({"logit_bias": {512: 1.0}}, BadRequest, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, BadRequest, "logit_bias"),
        ({"min_tokens": 9}, BadRequest, "min_tokens"),
    ],
)
async def test_bad_generations(
    engine: MicroserveEngine, fields: dict[str, object], error: type[Exception], param: str
):
    call = start(**{"prompt": PROMPT, **fields})  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        await engine.start_generate(call)
    assert caught.value.param == param  # type: ignore[attr-defined]
    assert len(await generate(engine, PROMPT)) == 8


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (6, 5), (0, 71), (-71, 5), (0, -71), (0, 0)])
async def test_bad_ranges_of_sends(pair: Pair, begin: int, end: int):
    prefill, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    with pytest.raises(BadRange):
        await prefill.remote_send(sending(PROMPT, begin, end, got.kv_addr))
    await prefill.remote_send(sending(PROMPT, -70, -1, got.kv_addr))
    decode.release(Release(lease_id=got.lease_id))


@pytest.mark.parametrize("end", [71, -71])
async def test_bad_ranges_of_leases(engine: MicroserveEngine, end: int):
    with pytest.raises(BadRange):
        engine.prep_recv(prep(PROMPT, end))


async def test_bad_addresses(pair: Pair):
    prefill, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    for address in ("", "x", got.kv_addr[:-4], "A" * len(got.kv_addr)):
        with pytest.raises(BadAddress):
            await prefill.remote_send(sending(PROMPT, 0, END, address))
    with pytest.raises(BadAddress):
        await prefill.remote_send(sending([*PROMPT[:-2], 9, 9], 0, END, got.kv_addr))
    assert prefill.puts_in_flight == 0
    decode.release(Release(lease_id=got.lease_id))
    with pytest.raises(LeaseExpired):
        await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr))


async def test_a_lease_for_another_prompt(pair: Pair):
    _, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    with pytest.raises(BadRequest):
        await decode.start_generate(start(PROMPT[::-1], lease_id=got.lease_id))
    decode.release(Release(lease_id=got.lease_id))


async def test_a_full_queue_refuses_calls():
    async with running(max_live=2) as engine:
        streams = [
            await engine.start_generate(start(PROMPT, f"r{n}", max_tokens=900)) for n in range(2)
        ]
        with pytest.raises(NoCapacity):
            await engine.start_generate(start(PROMPT))
        for stream in streams:
            stream.close()
        assert len(await generate(engine, PROMPT)) == 8


# Early ends


async def test_a_second_lease_under_one_request_id_is_refused(engine: MicroserveEngine):
    first = engine.prep_recv(prep(PROMPT, END))
    with pytest.raises(DuplicateRequest):
        engine.prep_recv(prep(PROMPT, END))
    engine.release(Release(lease_id=first.lease_id))
    second = engine.prep_recv(prep(PROMPT, END))
    engine.release(Release(lease_id=second.lease_id))


async def test_a_duplicate_is_refused_until_the_first_has_ended(engine: MicroserveEngine):
    stream = await engine.start_generate(start(PROMPT, max_tokens=900))
    with pytest.raises(DuplicateRequest):
        await engine.start_generate(start(PROMPT))
    stream.close()
    again = await engine.start_generate(start(PROMPT, max_tokens=900))
    stream.close()  # closes the first stream again, not the second
    with pytest.raises(DuplicateRequest):
        await engine.start_generate(start(PROMPT))
    again.close()


async def test_a_stream_that_is_never_read_can_be_closed(engine: MicroserveEngine):
    stream = await engine.start_generate(start(PROMPT, max_tokens=900))
    stream.close()
    await at_rest(engine)


async def test_closing_a_stream_aborts_its_generation(engine: MicroserveEngine):
    stream = await engine.start_generate(start(PROMPT, max_tokens=900))
    async with contextlib.aclosing(stream.events()) as events:
        await anext(events)
    await at_rest(engine)
    assert engine.cache.prefix_tokens >= 64


async def test_a_cancelled_wait_keeps_the_lease(pair: Pair):
    _, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    waiting = asyncio.create_task(
        decode.start_generate(start(PROMPT, begin=END, lease_id=got.lease_id))
    )
    await asyncio.sleep(0.005)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert decode.waiting == 0
    assert [lease.lease_id for lease in decode.cache.leases()] == [got.lease_id]
    decode.release(Release(lease_id=got.lease_id))


async def test_the_end_of_a_lease_ends_the_wait(pair: Pair):
    _, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    waiting = asyncio.create_task(
        decode.start_generate(start(PROMPT, begin=END, lease_id=got.lease_id))
    )
    await asyncio.sleep(0.005)
    decode.release(Release(request_id="r"))
    with pytest.raises(LeaseExpired):
        await waiting


async def test_a_lease_expires(engine: MicroserveEngine):
    got = engine.prep_recv(prep(PROMPT, END, lease_ms=1))
    with pytest.raises(LeaseExpired):
        await engine.start_generate(start(PROMPT, begin=END, lease_id=got.lease_id))
    assert engine.loop.stats.expired_leases == 1


@pytest.mark.parametrize("steps", range(4))
async def test_a_cancelled_send_leaves_nothing(pair: Pair, steps: int):
    prefill, decode = pair
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    got = decode.prep_recv(prep(PROMPT, END))
    call = asyncio.create_task(prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr)))
    for _ in range(steps):
        await asyncio.sleep(0.001)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    assert prefill.puts_in_flight == 0
    decode.release(Release(request_id="r"))  # the send may notice the end of its lease
    await at_rest(prefill)
    await at_rest(decode)
    del call
    gc.collect()
    assert not unseen


async def test_a_release_is_idempotent(engine: MicroserveEngine):
    got = engine.prep_recv(prep(PROMPT, END))
    for _ in range(2):
        engine.release(Release(lease_id=got.lease_id))
        engine.release(Release(request_id="r"))
    engine.release(Release(lease_id="never"))
    for bad in (Release(), Release(lease_id="a", request_id="b")):
        with pytest.raises(BadRequest):
            engine.release(bad)


async def test_a_release_ends_the_stream(engine: MicroserveEngine):
    stream = await engine.start_generate(start(PROMPT, max_tokens=900))
    engine.release(Release(request_id="r"))
    with pytest.raises(MicroserveError, match="released"):
        await collect(stream)
    await at_rest(engine)


async def test_a_release_reaches_a_send_that_waits_for_its_claim(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    prefill, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    (lease,) = decode.cache.leases()
    region = decode.cache.transport.region
    assert region.try_acquire_right(lease.slot)  # the claim has to wait
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 20.0)
    call = asyncio.create_task(prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr)))
    await asyncio.sleep(0)
    assert prefill.puts_in_flight == 1
    prefill.release(Release(request_id="r"))
    assert prefill.puts_in_flight == 0
    region.release_right(lease.slot)
    with pytest.raises(Internal, match="aborted"):
        await call
    decode.release(Release(lease_id=got.lease_id))


async def test_a_dead_loop_fails_all_waiting_calls(caplog: pytest.LogCaptureFixture):
    async with running() as engine:
        stream = await engine.start_generate(start(PROMPT, max_tokens=900))
        engine._scheduler.plan = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
        with pytest.raises(Internal, match="stopped"):
            await collect(stream)
        with pytest.raises(Internal, match="stopped"):
            await engine.start_generate(start(PROMPT, "another"))
    assert "cannot continue" in caplog.text


async def test_a_lower_priority_number_overtakes_others():
    network, done = MemoryNetwork(), []
    narrow = running(network, max_batch=1, token_budget=8)
    async with narrow as engine, running(network, name="d", pages=200) as receiver:

        async def ask(name: str, base: int, **fields: int) -> None:
            await generate(engine, range(base, base + 40), name, **fields)
            done.append(name)

        async def send(name: str, base: int, priority: int) -> None:
            prompt = range(base, base + 200)
            got = receiver.prep_recv(prep(prompt, 200, name))
            await engine.remote_send(sending(prompt, 0, 200, got.kv_addr, name, priority=priority))
            receiver.release(Release(lease_id=got.lease_id))
            done.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("runs", 0, max_tokens=60))
            await until(lambda: engine.running == 1)
            tasks.create_task(ask("low", 60, priority=1))
            tasks.create_task(ask("high", 120, priority=-1))
        assert done == ["runs", "high", "low"]
        async with asyncio.TaskGroup() as tasks:
            for name, base, priority in (("send", 0, 1), ("urgent send", 200, -1)):
                tasks.create_task(send(name, base, priority))
        assert done[3:] == ["urgent send", "send"]


async def test_many_concurrent_calls_all_end(pair: Pair):
    """Concurrent sends, generations and aborts in both directions; the fixture checks integrity."""
    one, two = pair

    async def request(number: int, sender: MicroserveEngine, receiver: MicroserveEngine) -> None:
        prompt = [(number * 13 + n) % 250 for n in range(40 + number)]
        name = f"r{number}"
        got = receiver.prep_recv(prep(prompt, len(prompt) - 1, name))
        try:
            async with asyncio.timeout(0.01 if number % 5 == 0 else 20):
                await sender.remote_send(
                    sending(prompt, got.match_len, len(prompt) - 1, got.kv_addr, name)
                )
                tokens = await generate(receiver, prompt, name, lease_id=got.lease_id)
                assert tokens == await generate(sender, prompt, name + "x")
        except TimeoutError:
            pass
        finally:
            receiver.release(Release(request_id=name))

    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(request(number, *((one, two) if number % 2 else (two, one))))
    await at_rest(one)
    await at_rest(two)


async def test_a_call_that_arrives_after_its_release_does_not_begin(pair: Pair):
    """On another connection, a release may overtake the call that it ends."""
    prefill, decode = pair
    decode.release(Release(request_id="r"))
    with pytest.raises(DuplicateRequest):
        decode.prep_recv(prep(PROMPT, END, "r"))
    with pytest.raises(DuplicateRequest):
        await decode.start_generate(start(PROMPT, "r"))
    got = decode.prep_recv(prep(PROMPT, END, "s"))
    prefill.release(Release(request_id="s"))
    with pytest.raises(DuplicateRequest):
        await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr, "s"))
    decode.release(Release(lease_id=got.lease_id))
    await at_rest(decode)
