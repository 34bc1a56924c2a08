"""A strategy that calls a strategy: as if the other's body stood in its own."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import aclosing, suppress
from typing import Annotated, Any

import pytest
from pydantic import Field
from strategy_runs import END, STALL_S, Run, line
from virtual_time import in_virtual_time

from engine.protocol import NoCapacity
from router import Chunk, strategy
from router.base.errors import StrategyError, StrategyStalled
from router.dry_run.dry_run import dry_run
from router.strategy.call import StrategyCall
from router.strategy.cluster import DEEPEST
from router.supervision import adopting
from strategies.data_parallel import data_parallel
from strategies.prefill_decode import prefill_decode
from strategies.replicate import replicate

ONE = Chunk(token_ids=[1])
events: list[str] = []


@pytest.fixture(autouse=True)
def _no_events() -> None:
    events.clear()


@strategy
async def inner(request, cluster, *, more: Annotated[int, Field(ge=0)] = 1):
    """Yield `more` tokens before the last one."""
    try:
        for _ in range(more):
            yield ONE
        yield END
    finally:
        await asyncio.sleep(0.1)
        events.append("inner")


async def outer(request, cluster):
    try:
        async for chunk in inner(request, cluster, more=2):
            yield chunk
    finally:
        await asyncio.sleep(0.1)
        events.append("outer")


@in_virtual_time
async def test_the_chunks_are_the_others_and_the_receipt_names_it():
    run = Run(outer)
    assert await run.end() is None
    assert run.writer.chunks == [ONE, ONE, END] and events == ["inner", "outer"]
    assert run.receipt.delegates == ["inner"] and not run.told


@in_virtual_time
async def test_a_strategy_that_calls_none_has_no_delegates():
    run = Run(inner)
    assert await run.end() is None
    assert run.receipt.delegates == []


# Both are left, the inner one first, however the run ends


class Fails(Exception):
    pass


@in_virtual_time
async def test_when_the_client_cannot_be_written_to():
    run = Run(outer)
    run.writer.fails = Fails()
    assert isinstance(await run.end(), Fails)
    assert events == ["inner", "outer"]


@in_virtual_time
async def test_when_the_client_leaves_while_it_is_written_to():
    run = Run(outer)
    run.writer.reads_s = 5.0
    assert isinstance(await run.end(1.0), asyncio.CancelledError)
    assert events == ["inner", "outer"] and not run.told


async def returns_at_the_end(request, cluster):
    async for chunk in outer_strategy(request, cluster):
        yield chunk
        if chunk.finish_reason:
            return


outer_strategy = strategy(outer)


@in_virtual_time
async def test_when_it_does_not_wait_for_the_end_of_the_other():
    run = Run(returns_at_the_end)
    assert await run.end() is None
    assert events == ["inner", "outer"] and not run.told
    assert run.receipt.delegates == ["outer", "inner"]


async def raises_between(request, cluster):
    async for chunk in inner(request, cluster):
        yield chunk
        raise KeyError("x")


@in_virtual_time
async def test_when_it_raises():
    run = Run(raises_between)
    assert isinstance(await run.end(), StrategyError)
    assert events == ["inner"]
    assert run.told == [("raised", f"KeyError: 'x' {line(raises_between, 3)}")]


async def closes_early(request, cluster):
    async with aclosing(inner(request, cluster, more=5)) as chunks:
        async for chunk in chunks:
            yield chunk
            break
    assert events == ["inner"]
    async for chunk in inner(request, cluster, more=0):
        yield chunk


@in_virtual_time
async def test_it_may_close_one_and_call_another():
    run = Run(closes_early)
    assert await run.end() is None
    assert run.writer.chunks == [ONE, END] and events == ["inner", "inner"]


async def calls_in_a_task(request, cluster):
    calls = [inner(request, cluster), waits_for_ever(request, cluster)]
    tasks = [asyncio.create_task(anext(call)) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield done.pop().result()
        async for chunk in calls[0]:
            yield chunk
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@strategy
async def waits_for_ever(request, cluster):
    try:
        await asyncio.Event().wait()
        yield END
    finally:
        events.append("waited")


@in_virtual_time
async def test_calls_may_race_in_tasks():
    run = Run(calls_in_a_task)
    assert await run.end() is None
    assert run.writer.chunks == [ONE, END] and sorted(events) == ["inner", "waited"]
    assert not run.told and run.receipt.delegates == ["inner", "waits_for_ever"]


async def leaves_a_task(request, cluster):
    task = asyncio.create_task(anext(waits_for_ever(request, cluster)))
    async for chunk in inner(request, cluster):
        yield chunk
    assert not task.done()


@in_virtual_time
async def test_a_call_in_a_task_that_was_left_ends_with_the_task():
    with adopting(asyncio.get_running_loop()):
        run = Run(leaves_a_task)
        assert await run.end() is None
    assert events == ["inner", "waited"]
    assert run.told == [("left_tasks", "leaves 1 task behind")]


@strategy
async def fails_in_its_cleanup(request, cluster):
    try:
        yield ONE
    finally:
        raise KeyError("cleanup")


async def leaves_two_open(request, cluster):
    first, second = inner(request, cluster), fails_in_its_cleanup(request, cluster)
    yield await anext(first)
    yield await anext(second)
    yield END


@in_virtual_time
async def test_a_failing_cleanup_keeps_no_other_from_its_own():
    run = Run(leaves_two_open)
    assert await run.end() is None
    where = line(fails_in_its_cleanup.function, 5)
    assert events == ["inner"]
    assert run.told == [("cleanup", f"KeyError: 'cleanup' in its cleanup {where}")]


@in_virtual_time
async def test_a_run_with_calls_is_freed_at_once():
    """Without the garbage collector, which would have asyncio close the generators."""
    run = Run(returns_at_the_end)
    there = weakref.ref(run.run)
    gc.collect()
    gc.disable()
    try:
        assert await run.end() is None
        del run.run
        assert there() is None
    finally:
        gc.enable()


@in_virtual_time
async def test_a_call_that_is_never_begun_leaves_nothing():
    async def asks_for_nothing(request, cluster):
        call = inner(request, cluster)
        assert isinstance(call, StrategyCall)
        yield END

    run = Run(asks_for_nothing)
    assert await run.end() is None
    assert (events, run.receipt.delegates, run.told) == ([], [], [])


@in_virtual_time
async def test_the_event_loop_does_not_close_a_call():
    async def goes_on(request, cluster):
        call = inner(request, cluster)
        yield await anext(call)
        await asyncio.get_running_loop().shutdown_asyncgens()
        assert not events
        yield await anext(call)

    run = Run(goes_on)
    assert await run.end() is None
    assert events == ["inner"] and not run.told


# Errors


@strategy
async def is_full(request, cluster):
    raise NoCapacity("full")
    yield


@in_virtual_time
async def test_an_engines_error_passes_and_may_be_caught():
    run = Run(strategy_of(is_full))
    assert isinstance(await run.end(), NoCapacity) and not run.told

    async def has_a_second_choice(request, cluster):
        try:
            async for chunk in is_full(request, cluster):
                yield chunk
        except NoCapacity:
            async for chunk in inner(request, cluster):
                yield chunk

    run = Run(has_a_second_choice)
    assert await run.end() is None
    assert run.writer.chunks == [ONE, END] and run.receipt.delegates == ["is_full", "inner"]


def strategy_of(called: Any) -> Any:
    async def calls(request, cluster):
        async for chunk in called(request, cluster):
            yield chunk

    return calls


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"more": -1}, "more=-1: Input should be greater than or equal to 0"),
        ({"more": "2"}, "more='2': Input should be a valid integer"),
        ({"les": 2}, "no parameter 'les'; there are: more"),
    ],
)
@in_virtual_time
async def test_a_wrong_parameter_is_the_callers_mistake_not_the_clients(params, says):
    async def calls(request, cluster):
        async for chunk in inner(request, cluster, **params):
            yield chunk

    run = Run(calls)
    error = await run.end()
    assert isinstance(error, StrategyError) and error.status == 500
    assert run.told == [("raised", f"ValueError: strategy inner: {says} {line(calls, 1)}")]


@strategy
async def ping(request, cluster):
    async for chunk in pong(request, cluster):
        yield chunk


@strategy
async def pong(request, cluster):
    async for chunk in ping(request, cluster):
        yield chunk


@in_virtual_time
async def test_recursion_without_end_is_refused():
    run = Run(ping)
    assert isinstance(await run.end(), StrategyError)
    says = f"strategies call each other more than {DEEPEST} deep, at last pong, ping, pong, ping"
    assert run.told == [("raised", f"RecursionError: {says} {line(pong.function, 2)}")]


@in_virtual_time
async def test_a_stall_is_told_with_the_line_of_the_body_that_waits():
    run = Run(strategy_of(waits_for_ever))
    error = await run.end(10 * STALL_S)
    assert isinstance(error, StrategyStalled) and events == ["waited"]
    where = line(waits_for_ever.function, 3)
    assert run.told == [("stalled", f"made no progress for 10 s {where}")]


async def waits_beside_a_call(request, cluster):
    call = inner(request, cluster)
    yield await anext(call)
    await asyncio.Event().wait()


@in_virtual_time
async def test_a_call_that_is_not_waited_for_is_not_told():
    run = Run(waits_beside_a_call)
    assert isinstance(await run.end(10 * STALL_S), StrategyStalled)
    assert run.told == [("stalled", f"made no progress for 10 s {line(waits_beside_a_call, 3)}")]
    assert events == ["inner"]


@strategy
async def is_deaf(request, cluster):
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    yield


@in_virtual_time
async def test_a_deaf_callee_is_abandoned():
    run = Run(strategy_of(is_deaf))
    assert isinstance(await run.end(5.0), asyncio.CancelledError)
    where = line(is_deaf.function, 4)
    assert run.told == [("ignored_cancellation", f"does not end when cancelled {where}")]


# Memory


@strategy
async def remembers(request, cluster):
    cluster.state(list).append("inner")
    yield END


@in_virtual_time
async def test_a_callees_memory_is_its_own_and_lasts_as_long_as_the_revision():
    async def has_memory_too(request, cluster):
        cluster.state(list).append("outer")
        async for chunk in remembers(request, cluster):
            yield chunk

    states: dict[Any, Any] = {}
    made = strategy(has_memory_too)
    for _ in range(2):
        assert await Run(made, states).end() is None
    assert sorted(states.values()) == [["inner", "inner"], ["outer", "outer"]]


# The real calls of the built-in ones, on virtual engines


@strategy
async def delegates(request, cluster):
    """Short prompts to one engine, others to two; a lease may be open when it returns."""
    if len(request.tokens) < 32:
        async for chunk in data_parallel(request, cluster):
            yield chunk
        return
    chosen = replicate if cluster.replica else prefill_decode
    async for chunk in chosen(request, cluster):
        yield chunk
        if chunk.finish_reason:
            return


def test_the_dry_run_accepts_it():
    assert dry_run(delegates.bind({})) > 100
