"""What engines have computed and put lately, told by them, with their clocks aligned to ours.

An engine tells what its clock says. It said so between our question and its answer: we take the
middle, so half of the round trip bounds the error. The quickest of some round trips counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from engine.protocol import TIMELINE_S, EngineTimeline, MicroserveError, Unsupported
from router.engines import Backend, guard
from router.timeline.fleet_trace import EngineWork, TracedPut, TracedStep

__all__ = ["ask_engines"]

ASK_S = 10.0  # for an engine
ASKED = 8  # engines at a time: their answers have megabytes
ROUNDS = 4
SLACK_S = 1.0  # by which steps may seem to end after the reply that tells of them


async def ask_engines(
    backends: Sequence[Backend],
    seconds: float,
    *,
    most: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[EngineWork]:
    """Ask all engines for the latest `seconds`; return what each tells, on `clock`.

    `most` steps, and as many puts, are kept of all of them together: the latest ones of each. An
    engine that does not tell has a `problem`.
    """
    asking = asyncio.Semaphore(ASKED)
    share = max(most // max(len(backends), 1), 1)

    async def ask(backend: Backend) -> EngineWork:
        async with asking:
            return await _ask(backend, seconds, share, clock)

    return list(await asyncio.gather(*map(ask, backends)))


async def _ask(
    backend: Backend, seconds: float, most: int, clock: Callable[[], float]
) -> EngineWork:
    work = EngineWork(backend.id, backend.role)
    try:
        async with asyncio.timeout(ASK_S):
            offset_s, work.clock_error_s = await _offset(backend, clock)
            told = await guard(backend.client.timeline(seconds), backend)
    except Unsupported:
        work.problem = "it keeps no time line of its steps"
    except MicroserveError as error:  # also of an engine of an earlier version: there is no path
        work.problem = error.message
    except TimeoutError:
        work.problem = f"it did not tell its steps within {ASK_S:g} s"
    else:
        if _credible(told):
            _take(work, told, offset_s, most)
        else:  # one such step would make all others too small to be seen
            work.problem = "it tells of steps or puts at times that cannot be"
    return work


async def _offset(backend: Backend, clock: Callable[[], float]) -> tuple[float, float]:
    """Return what to add to the engine's times, and by how much that may be wrong (s)."""
    best = (0.0, float("inf"))
    for _ in range(ROUNDS):
        asked = clock()
        told = await guard(backend.client.timeline(0.0), backend)
        answered = clock()
        if (error := (answered - asked) / 2) < best[1]:
            best = ((asked + answered) / 2 - told.now, error)
    return best


def _credible(told: EngineTimeline) -> bool:
    """Return whether all lies between the oldest that an engine keeps and now."""
    first, last = told.now - 2 * TIMELINE_S, told.now + SLACK_S
    return all(
        first <= began and began + took <= last for began, took, *_ in (*told.steps, *told.puts)
    )


def _take(work: EngineWork, told: EngineTimeline, offset_s: float, most: int) -> None:
    work.steps = [
        TracedStep(began + offset_s, took, prompt_tokens, decodes, requests)
        for began, took, prompt_tokens, decodes, requests in told.steps[-most:]
    ]
    work.puts = [
        TracedPut(began + offset_s, took, size, request)
        for began, took, _, size, request in told.puts[-most:]
    ]
