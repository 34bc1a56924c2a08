"""One run of a strategy: how it ends, and that it leaves nothing behind, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from strategy_runs import END, GRACE_S, MINE, OTHERS, STALL_S, Run, line
from virtual_time import in_virtual_time

from engine.protocol import NoCapacity
from router.base.errors import StrategyBlocked, StrategyError, StrategyStalled
from router.base.request import Chunk
from router.execution import strategy_run as module
from router.strategy.call import _first
from router.supervision import adopting
from router.supervision.interruption import Interrupted

# Chunks and their end


@in_virtual_time
async def test_a_slow_client_holds_the_strategy_back_and_is_no_stall():
    loop, times = asyncio.get_running_loop(), []

    async def three(request, cluster):
        for number in range(3):
            times.append(loop.time())
            yield Chunk(token_ids=[number], finish_reason="stop" if number == 2 else None)

    run = Run(three)
    run.writer.reads_s = 3 * STALL_S
    assert await run.end() is None
    assert times == [0.0, 3 * STALL_S, 6 * STALL_S] and run.ended_s == 9 * STALL_S
    assert (run.writer.tokens, run.told) == ([0, 1, 2], [])


@pytest.mark.parametrize("error", [ValueError("my mistake"), StrategyError("my mistake")])
@in_virtual_time
async def test_a_strategys_own_error_after_the_end_is_an_error(error):
    async def late(request, cluster):
        yield END
        raise error

    run = Run(late)
    told = await run.end()
    assert isinstance(told, StrategyError) and "my mistake" in told.message
    kinds = [kind for kind, _ in run.told]
    assert kinds == ([] if told is error else ["raised"])


@in_virtual_time
async def test_an_engines_error_after_the_end_is_none():
    async def late(request, cluster):
        yield END
        raise ExceptionGroup("legs", [NoCapacity("full")])

    run = Run(late)
    assert await run.end() is None
    assert run.writer.chunks == [END] and not run.told


@in_virtual_time
async def test_an_engines_error_passes_out_of_its_group():
    full = NoCapacity("full")

    async def early(request, cluster):
        yield Chunk(token_ids=[1])
        raise ExceptionGroup("legs", [ValueError("another"), full])

    run = Run(early)
    assert await run.end() is full
    assert isinstance(full.__cause__, ExceptionGroup) and not run.told


async def ends_early(request, cluster):
    yield Chunk(token_ids=[1])


async def goes_on(request, cluster):
    yield END
    yield Chunk(token_ids=[1])


async def no_chunk(request, cluster):
    yield "x" * 1000


async def raises(request, cluster):
    raise KeyError("x")
    yield


async def raises_nothing_more(request, cluster):
    raise KeyError
    yield


async def awaits_what_was_cancelled(request, cluster):
    done = asyncio.get_running_loop().create_future()
    done.cancel()
    await done
    yield


@pytest.mark.parametrize(
    ("function", "kind", "what"),
    [
        (ends_early, "ended_early", "ended before the stream did"),
        (goes_on, "went_on", "goes on after the stream's end"),
        (no_chunk, "no_chunk", "yielded no chunk but '" + "x" * 79),
        (raises, "raised", f"KeyError: 'x' {line(raises, 1)}"),
        (raises_nothing_more, "raised", f"KeyError {line(raises_nothing_more, 1)}"),
        (awaits_what_was_cancelled, "raised", "CancelledError"),
    ],
)
@in_virtual_time
async def test_a_violation_is_counted_once_and_told(function, kind, what):
    run = Run(function)
    error = await run.end()
    assert run.told == [(kind, what)]
    assert isinstance(error, StrategyError) and run.ended_s == 0.0
    assert error.message == f"strategy {function.__name__} (generation 2): {what}"
    assert len(run.writer.chunks) == (function in (ends_early, goes_on))


# Blocked


@pytest.mark.parametrize("grouped", [False, True])
@in_virtual_time
async def test_a_blocked_strategy_is_told_with_its_line(grouped):
    async def blocks(request, cluster):
        raise BaseExceptionGroup("legs", [Interrupted()]) if grouped else Interrupted
        yield

    run = Run(blocks)
    error = await run.end()
    assert isinstance(error, StrategyBlocked)
    where = "" if grouped else f" {line(blocks, 1)}"  # the group's own error has no line
    assert error.message == f"strategy blocks (generation 2) held up the event loop{where}"
    assert not run.told  # the watchdog counts it


@in_virtual_time
async def test_an_interruption_outside_of_the_strategy_is_its_doing_too():
    closed = []

    async def two(request, cluster):
        try:
            yield Chunk(token_ids=[1])
        finally:
            closed.append(True)

    run = Run(two)
    run.writer.fails = Interrupted()
    error = await run.end()
    assert isinstance(error, StrategyBlocked) and closed == [True]
    assert "held up the event loop" in error.message


# Stalls


async def waits(request, cluster):
    yield Chunk(token_ids=[1])
    await asyncio.Event().wait()


def leg(attempt: str, ms: float | None) -> Any:
    """Return a leg of an attempt; it still runs if it has no duration."""
    return SimpleNamespace(request_id=attempt, ms=ms)


@pytest.mark.parametrize(
    ("legs", "stalls"),
    [
        ([], True),
        ([leg(MINE, 5.0)], True),
        ([leg(OTHERS, None)], True),
        ([leg(MINE, 5.0), leg(OTHERS, None)], True),
        ([leg(MINE, 5.0), leg(MINE, None)], False),
    ],
)
@in_virtual_time
async def test_a_strategy_that_waits_while_no_engine_works_for_it_is_ended(legs, stalls):
    run = Run(waits)
    run.legs += legs
    error = await run.end(10 * STALL_S)
    if not stalls:
        assert isinstance(error, asyncio.CancelledError) and not run.told
        assert run.ended_s == 10 * STALL_S
        return
    assert run.ended_s == 2 * STALL_S  # the first check only notes where it is
    assert isinstance(error, StrategyStalled)
    assert error.message == "strategy waits (generation 2) made no progress for 10 s"
    assert run.told == [("stalled", f"made no progress for 10 s {line(waits, 2)}")]


@pytest.mark.parametrize("how", ["a leg", "a token"])
@in_virtual_time
async def test_a_leg_or_a_token_is_progress(how):
    async def slow(request, cluster):
        await asyncio.sleep(1.5 * STALL_S)
        if how == "a token":
            yield Chunk(token_ids=[1])
        else:
            run.legs.append(leg(MINE, 5.0))
        await asyncio.Event().wait()

    run = Run(slow)
    assert isinstance(await run.end(), StrategyStalled)
    assert run.ended_s == 3 * STALL_S


@in_virtual_time
async def test_a_check_that_was_held_up_says_nothing():
    """In that time nothing could make progress."""
    late, asked = [False, True, True, False], []

    def fired_late(timer: asyncio.TimerHandle) -> bool:
        asked.append(timer.when())
        return late.pop(0)

    run = Run(waits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fired_late", fired_late)
        assert isinstance(await run.end(), StrategyStalled)
    assert asked == [STALL_S, 2 * STALL_S, 3 * STALL_S, 4 * STALL_S]
    assert run.ended_s == 4 * STALL_S and len(run.told) == 1


# Cancellation


async def obeys(request, cluster):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0.5)  # less than the grace
        raise
    yield


async def swallows(request, cluster):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return
    yield


async def yields(request, cluster):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        yield END


async def is_deaf(request, cluster):
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    yield


async def fails(request, cluster):
    try:
        await asyncio.Event().wait()
    finally:
        raise KeyError("x")
    yield


@pytest.mark.parametrize(
    ("function", "ends_s", "violation"),
    [
        (obeys, 0.5, None),
        (swallows, 0.0, ("ignored_cancellation", "swallowed its cancellation")),
        (yields, 0.0, ("ignored_cancellation", "yields after its cancellation")),
        (fails, 0.0, ("raised", f"KeyError: 'x' {line(fails, 4)}")),
        (
            is_deaf,
            GRACE_S,
            ("ignored_cancellation", f"does not end when cancelled {line(is_deaf, 3)}"),
        ),
    ],
)
@in_virtual_time
async def test_a_cancelled_run_ends_whatever_the_strategy_does(function, ends_s, violation):
    run = Run(function)
    assert isinstance(await run.end(5.0, 5.1, 5.2), asyncio.CancelledError)
    assert run.ended_s == pytest.approx(5.0 + ends_s)
    assert run.told == ([violation] if violation else [])
    assert not run.writer.chunks


@in_virtual_time
async def test_a_cancellation_takes_precedence_over_a_stall_and_hides_no_error():
    run = Run(obeys)
    error = await run.end(2 * STALL_S + 0.2)  # while the strategy is being ended
    assert isinstance(error, asyncio.CancelledError)
    assert [kind for kind, _ in run.told] == ["stalled"]


# Cleanup


async def raises_in_its_cleanup(request, cluster):
    try:
        yield "no chunk"
    finally:
        raise KeyError("GeneratorExit")


async def is_over_in_its_cleanup(request, cluster):
    try:
        yield "no chunk"
    finally:
        raise RuntimeError("over")


async def yields_in_its_cleanup(request, cluster):
    try:
        yield "no chunk"
    except GeneratorExit:
        yield END


async def awaits_what_was_cancelled_in_its_cleanup(request, cluster):
    try:
        yield "no chunk"
    finally:
        done = asyncio.get_running_loop().create_future()
        done.cancel()
        await done


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (raises_in_its_cleanup, f"KeyError: 'GeneratorExit' in its cleanup "
                                f"{line(raises_in_its_cleanup, 4)}"),
        (is_over_in_its_cleanup, f"RuntimeError: over in its cleanup "
                                 f"{line(is_over_in_its_cleanup, 4)}"),
        (yields_in_its_cleanup, "yields in its cleanup"),
        (awaits_what_was_cancelled_in_its_cleanup, "CancelledError in its cleanup"),
    ],
)  # fmt: skip
@in_virtual_time
async def test_an_error_in_the_cleanup_hides_no_other(function, what):
    run = Run(function)
    error = await run.end()
    assert isinstance(error, StrategyError) and "yielded no chunk" in error.message
    assert run.told == [("no_chunk", "yielded no chunk but 'no chunk'"), ("cleanup", what)]
    assert run.ended_s == 0.0


@in_virtual_time
async def test_a_cleanup_without_an_end_is_cancelled():
    async def hangs(request, cluster):
        try:
            yield "no chunk"
        finally:
            await asyncio.Event().wait()

    run = Run(hangs)
    error = await run.end()
    assert isinstance(error, StrategyError)
    assert error.message == "strategy hangs (generation 2) does not end"
    assert run.ended_s == GRACE_S and [kind for kind, _ in run.told] == ["no_chunk"]


# Tasks


@pytest.mark.parametrize(("count", "what"), [(0, None), (1, "1 task"), (2, "2 tasks")])
@in_virtual_time
async def test_tasks_that_are_left_end_with_the_run(count, what):
    left = []

    async def leaves(request, cluster):
        left.extend(asyncio.ensure_future(asyncio.Event().wait()) for _ in range(count))
        yield END

    with adopting(asyncio.get_running_loop()):
        run = Run(leaves)
        assert await run.end() is None
    assert all(task.cancelled() for task in left) and len(left) == count
    assert run.told == ([("left_tasks", f"leaves {what} behind")] if what else [])


@in_virtual_time
async def test_a_cancellation_reaches_the_tasks_and_leaving_them_is_no_violation_then():
    """The strategy waits for its task, which waits for ever."""
    tasks = []

    async def gathers(request, cluster):
        tasks.append(asyncio.ensure_future(asyncio.Event().wait()))
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.wait(tasks)
            tasks.append(asyncio.ensure_future(asyncio.sleep(0.5)))
        yield

    with adopting(asyncio.get_running_loop()):
        run = Run(gathers)
        assert isinstance(await run.end(5.0), asyncio.CancelledError)
    assert run.ended_s == 5.0 and all(task.cancelled() for task in tasks)
    assert len(tasks) == 2 and not run.told


# What remains


async def answers(request, cluster):
    yield END


@pytest.mark.parametrize(
    ("function", "cancelled_s"),
    [
        (answers, ()), (raises, ()), (no_chunk, ()), (raises_in_its_cleanup, ()),
        (obeys, (5.0,)), (swallows, (5.0,)), (fails, (5.0,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
@in_virtual_time
async def test_a_run_that_is_over_is_freed_at_once(function, cancelled_s):
    """Without the garbage collector: neither a timer nor its own error refers to it."""
    run = Run(function)
    there = weakref.ref(run.run)
    gc.collect()
    gc.disable()
    try:
        error = await run.end(*cancelled_s)
        del run.run, error
        assert there() is None
    finally:
        gc.enable()


@in_virtual_time
async def test_the_event_loop_does_not_close_a_strategys_generator():
    hooks = sys.get_asyncgen_hooks()
    assert hooks.firstiter is not None

    async def two(request, cluster):
        yield 1
        yield 2

    chunks: Any = two(None, None)
    assert await _first(chunks) == 1
    assert sys.get_asyncgen_hooks() == hooks
    await asyncio.get_running_loop().shutdown_asyncgens()
    assert await anext(chunks) == 2
    await chunks.aclose()
