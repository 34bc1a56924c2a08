"""Checks in which something goes away: a client or an engine, at every call that is made for a
request, before its engine knows of it and before the router knows its answer, and in mid-stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router.conformance.answers import Answer, Refused
from router.conformance.checks import DRAWN, PAGE
from router.conformance.proxy import Gate, Moment
from router.conformance.trial import CheckFailed, Trial

__all__ = ["FAULTS"]

LENGTH = 5 * PAGE + 3
STEPS = (0, 1, 9)  # of the streams: when something happens to them
TRIES = 5  # a crowded engine may send many steps as one, and be through before it comes so far
MOST_CALLS = 12
SWEEP = 12  # clients that leave over the life of a request
# All at once that must go on exactly where another engine takes over.
RICH = {
    **DRAWN, "max_tokens": 40, "n": 2, "logprobs": 2, "frequency_penalty": 0.4,
    "stop": ["never said"],
}  # fmt: skip
LEAVE_S = 15.0


async def clients_that_leave(trial: Trial) -> None:
    """the client leaves at every call, in mid-stream, and at any time"""
    for moment in ("asked", "answered", "token"):
        for number in STEPS if moment == "token" else range(MOST_CALLS):
            streams = moment == "token" or number % 2 == 0
            body = {"prompt": trial.prompt(LENGTH), **DRAWN, "stream": streams}
            if not await _leave_at(trial, moment, number, body):
                break
    body = {"prompt": trial.prompt(LENGTH), **DRAWN}
    wanted, began = await trial.wanted(body), time.monotonic()
    await trial.one("undisturbed", body, wanted)
    took = time.monotonic() - began
    for number in range(SWEEP):
        body = {"prompt": trial.prompt(LENGTH), **DRAWN, "stream": number % 2 == 0}
        await _leave_after(trial, took * number / SWEEP, body)
    await trial.settle("clients that leave at any time")


async def callees_that_die(trial: Trial) -> None:
    """SIGKILL to the engine that is being called, or that KV is to be sent to, at every call"""
    for number in range(MOST_CALLS):
        call = await _kill_at(trial, "asked", number)
        if call == "remote_send":
            await _kill_at(trial, "asked", number, receiver=True)
        if call is None:
            return


async def engines_that_die_later(trial: Trial) -> None:
    """SIGKILL to the engine that has just done what it was asked for, at every call"""
    for number in range(MOST_CALLS):
        if await _kill_at(trial, "answered", number) is None:
            return


async def streams_that_break(trial: Trial) -> None:
    """SIGKILL to the engine that generates: before its first token, after it, later"""
    for number in STEPS:
        for _ in range(TRIES):
            if await _kill_at(trial, "token", number) is not None:
                break


async def _kill_at(
    trial: Trial, moment: Moment, number: int, *, receiver: bool = False
) -> str | None:
    """Kill what the request is just waiting for; the call, `None` if there was no such moment."""
    body = {"prompt": trial.prompt(LENGTH), **RICH, "stream": True}
    async with _held(trial, moment, number, body) as (gate, asking):
        if gate is None:
            return None
        await _kill(trial, gate, gate.receiver if receiver else gate.engine, body, asking)
    return gate.call


async def _kill(
    trial: Trial, gate: Gate, victim: str, body: dict[str, Any], asking: asyncio.Task[Answer]
) -> None:
    """Kill `victim`; the client must not notice. Everything is as before afterwards."""
    scene = f"{victim} is killed {_when(gate)}"
    wanted = await trial.wanted(body)
    await trial.deployment.kill(victim)
    gate.opened.set()
    try:
        answer = await asking
    except Refused as error:
        raise CheckFailed(f"{error} [{scene}]") from None
    finally:
        await trial.deployment.revive()
    await trial.compare(scene, asking.get_name(), answer, wanted)
    await trial.settle(scene)


async def _leave_at(trial: Trial, moment: Moment, number: int, body: dict[str, Any]) -> bool:
    """Leave while a call is held; whether there was such a moment."""
    async with _held(trial, moment, number, body) as (gate, asking):
        if gate is None:
            return False
        scene = f"the client leaves {_when(gate)}"
        asking.cancel()
        await asyncio.wait([asking])
        try:
            async with asyncio.timeout(LEAVE_S):
                await trial.ended(asking.get_name())
        except TimeoutError:
            raise CheckFailed(f"it goes on {LEAVE_S:g} s later [{scene}]") from None
        gate.opened.set()
        await trial.settle(scene)
    return True


async def _leave_after(trial: Trial, seconds: float, body: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await trial.ask(body, trial.name_request())
    except TimeoutError:
        pass
    except Refused as error:
        raise CheckFailed(f"{error} [while others leave]") from None


@asynccontextmanager
async def _held(
    trial: Trial, moment: Moment, number: int, body: dict[str, Any]
) -> AsyncIterator[tuple[Gate | None, asyncio.Task[Answer]]]:
    """A request that waits at a gate, in a task of its name; without the gate, if it has ended and
    never come there."""
    gate = trial.deployment.hold(moment, number)
    name = trial.name_request()
    asking = asyncio.create_task(trial.ask(body, name), name=name)
    reached = asyncio.create_task(gate.reached.wait())
    try:
        await asyncio.wait((asking, reached), return_when=asyncio.FIRST_COMPLETED)
        if not gate.reached.is_set():
            try:
                await asking
            except Refused as error:
                raise CheckFailed(f"{error} [undisturbed]") from None
        yield (gate if gate.reached.is_set() else None), asking
    finally:
        trial.deployment.let_pass()
        for task in (asking, reached):
            task.cancel()
        await asyncio.wait((asking, reached))


def _when(gate: Gate) -> str:
    if gate.moment == "token":
        return "in mid-stream"
    return f"when {gate.engine} is {gate.moment} to {gate.call}".replace(
        "answered to", "through with"
    )


FAULTS = (clients_that_leave, callees_that_die, engines_that_die_later, streams_that_break)
