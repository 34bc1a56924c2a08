"""Tests in virtual time: pauses cost nothing, and what waits for ever fails at once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

from engine.virtual.loop import VirtualLoop

__all__ = ["in_virtual_time"]

LIMIT_S = 36_000.0  # of virtual time


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an asynchronous test run on an event loop whose clock begins at 0 and jumps.

    The test fails with `TimeoutError` after ten virtual hours. What would run in threads, which
    take real time, runs on the loop.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with (
            mock.patch.object(asyncio, "to_thread", _here),
            asyncio.Runner(loop_factory=VirtualLoop) as runner,
        ):
            runner.run(_limited(test(*args, **kwargs)))

    return run


async def _limited(body: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(LIMIT_S):
        await body


async def _here(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    return work(*args, **kwargs)
