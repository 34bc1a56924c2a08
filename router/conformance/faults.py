"""Checks in which a client leaves or an engine dies.

They do so at every engine call of a request, before the call reaches the engine and before the
reply reaches the router, and in mid-stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router.conformance.answers import Answer, RequestFailed
from router.conformance.check_context import CheckContext, CheckFailed
from router.conformance.checks import DRAWN, GREEDY, PAGE
from router.conformance.proxy import HoldPoint, Moment

__all__ = ["FAULTS"]

LENGTH = 5 * PAGE + 3
STEPS = (0, 1, 9)  # steps of a stream at which the fault happens
TRIES = 5  # a busy engine may send many steps at once, and end before the step is seen
MOST_CALLS = 12
SWEEP = 12  # clients that leave, spread over the time that a request takes
# Everything that another engine must continue exactly when it takes over.
RICH = {
    **DRAWN, "max_tokens": 40, "n": 2, "logprobs": 2, "frequency_penalty": 0.4,
    "stop": ["never said"],
}  # fmt: skip
# The same for engines that continue only greedy outputs exactly.
PLAIN = {**GREEDY, "max_tokens": 40, "n": 2, "stop": ["never said"]}
LEAVE_S = 15.0


async def clients_that_leave(context: CheckContext) -> None:
    """the client leaves at every call, in mid-stream and at other times"""
    for moment in ("called", "answered", "token"):
        for number in STEPS if moment == "token" else range(MOST_CALLS):
            streams = moment == "token" or number % 2 == 0
            body = {"prompt": context.prompt(LENGTH), **DRAWN, "stream": streams}
            if not await _leave_at(context, moment, number, body):
                break
    body = {"prompt": context.prompt(LENGTH), **DRAWN}
    wanted, began = await context.wanted(body), time.monotonic()
    await context.one("undisturbed", body, wanted)
    took = time.monotonic() - began
    for number in range(SWEEP):
        body = {"prompt": context.prompt(LENGTH), **DRAWN, "stream": number % 2 == 0}
        await _leave_after(context, took * number / SWEEP, body)
    await context.settle("clients that leave at any time")


async def callees_that_die(context: CheckContext) -> None:
    """SIGKILL to the engine called, or to the receiver of KV, at every call"""
    for number in range(MOST_CALLS):
        call = await _kill_at(context, "called", number)
        if call == "remote_send":
            await _kill_at(context, "called", number, receiver=True)
        if call is None:
            return


async def engines_that_die_later(context: CheckContext) -> None:
    """SIGKILL to the engine that has just executed a call, at every call"""
    for number in range(MOST_CALLS):
        if await _kill_at(context, "answered", number) is None:
            return


async def streams_that_break(context: CheckContext) -> None:
    """SIGKILL to the generating engine: before its first token, after it and later"""
    for number in STEPS:
        for _ in range(TRIES):
            if await _kill_at(context, "token", number) is not None:
                break


async def _kill_at(
    context: CheckContext, moment: Moment, number: int, *, receiver: bool = False
) -> str | None:
    """Kill the engine that the request waits for, or the `receiver` of its KV.

    Returns the call that was held, or `None` if the request ended before that moment.
    """
    wanted = RICH if context.deployment.resumes else PLAIN
    body = {"prompt": context.prompt(LENGTH), **wanted, "stream": True}
    async with _held(context, moment, number, body) as (hold, request):
        if hold is None:
            return None
        await _kill(context, hold, hold.receiver if receiver else hold.engine, body, request)
    return hold.call


async def _kill(
    context: CheckContext,
    hold: HoldPoint,
    victim: str,
    body: dict[str, Any],
    request: asyncio.Task[Answer],
) -> None:
    """Kill `victim`, restart it, and check that the client does not notice.

    Raises `CheckFailed`.
    """
    scene = f"{victim} is killed {_when(hold)}"
    wanted = await context.wanted(body)
    await context.deployment.kill(victim)
    hold.released.set()
    try:
        answer = await request
    except RequestFailed as error:
        raise CheckFailed(f"{error} [{scene}]") from None
    finally:
        await context.deployment.revive()
    await context.compare(scene, request.get_name(), answer, wanted)
    await context.settle(scene)


async def _leave_at(
    context: CheckContext, moment: Moment, number: int, body: dict[str, Any]
) -> bool:
    """Leave while a call is held. Return whether that moment came."""
    async with _held(context, moment, number, body) as (hold, request):
        if hold is None:
            return False
        scene = f"the client leaves {_when(hold)}"
        request.cancel()
        await asyncio.wait([request])
        try:
            async with asyncio.timeout(LEAVE_S):
                await context.ended(request.get_name())
        except TimeoutError:
            raise CheckFailed(f"it goes on {LEAVE_S:g} s later [{scene}]") from None
        hold.released.set()
        await context.settle(scene)
    return True


async def _leave_after(context: CheckContext, seconds: float, body: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await context.send(body, context.new_request_id())
    except TimeoutError:
        pass
    except RequestFailed as error:
        raise CheckFailed(f"{error} [while others leave]") from None


@asynccontextmanager
async def _held(
    context: CheckContext, moment: Moment, number: int, body: dict[str, Any]
) -> AsyncIterator[tuple[HoldPoint | None, asyncio.Task[Answer]]]:
    """Send a request that stops at a hold point, in a task named like the request.

    Yields the hold point and the task; `None` and the task if the request ended before that moment.
    """
    hold = context.deployment.hold(moment, number)
    name = context.new_request_id()
    request = asyncio.create_task(context.send(body, name), name=name)
    reached = asyncio.create_task(hold.reached.wait())
    try:
        await asyncio.wait((request, reached), return_when=asyncio.FIRST_COMPLETED)
        if not hold.reached.is_set():
            try:
                await request
            except RequestFailed as error:
                raise CheckFailed(f"{error} [undisturbed]") from None
        yield (hold if hold.reached.is_set() else None), request
    finally:
        context.deployment.release()
        for task in (request, reached):
            task.cancel()
        await asyncio.wait((request, reached))


def _when(hold: HoldPoint) -> str:
    if hold.moment == "token":
        return "in mid-stream"
    if hold.moment == "called":
        return f"before {hold.engine} receives {hold.call}"
    return f"after {hold.engine} has executed {hold.call}"


FAULTS = (clients_that_leave, callees_that_die, engines_that_die_later, streams_that_break)
